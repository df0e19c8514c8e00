// Goal: CompareRuns says of recorded failing runs which heads explode, from
// before they do, whether held against their fp32 twin or against a healthy run
// of another seed; and of two healthy runs that they hardly differ.
// Method: recordings through the engine, the query engine on top;
// tests/testdata/runs/labels.json and tiny/README.md say what is true.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>

#include "tests/support/service_stack.h"

namespace bellwether::server {
namespace {

using ExplodingHeads = std::set<std::pair<int, int>>;

class CompareRecordedTest : public testing::Test {
 protected:
  void Import(const std::string& folder, const std::string& run) { service_.Import(folder + run + ".bwrun", run); }

  // The heads that differ and from which step on.
  std::map<std::pair<int, int>, int64_t> Compare(const std::string& run, const std::string& baseline,
                                                 const std::string& signal) {
    v1::CompareRunsRequest request;
    request.set_run(run);
    request.set_baseline(baseline);
    request.set_signal(signal);
    request.set_limit(1024);
    const auto response = service_.queries().CompareRuns(request, service_.queries().NewContext());
    EXPECT_TRUE(response.ok()) << response.status();
    std::map<std::pair<int, int>, int64_t> differing;
    if (!response.ok()) return differing;
    for (const v1::HeadDifference& head : response->heads()) {
      if (head.first_step() < 0) continue;
      EXPECT_GE(std::abs(head.ratio()), head.band());
      differing[{static_cast<int>(head.layer()), static_cast<int>(head.head())}] = head.first_step();
    }
    EXPECT_EQ(differing.size(), response->heads_differing());
    return differing;
  }

  ServiceStack service_;
};

TEST_F(CompareRecordedTest, AHealthySeedShowsTheExplodingHeadsBeforeTheyExplode) {
  const char* const healthy[] = {"gpt-flash-lr3e4-s5", "gpt-flash-lr1e3-s15", "gpt-flash-glitch-s6"};
  const struct {
    const char* run;
    int64_t t_sigma;
    ExplodingHeads heads;
  } failing[] = {{"gpt-flash-s4", 4010, {{1, 0}, {1, 1}, {1, 2}, {1, 4}}},
                 {"gpt-flash-s12", 6110, {{1, 0}, {1, 1}, {1, 2}, {1, 3}, {1, 5}}},
                 {"gpt-flash-s17", 4120, {{1, 2}, {1, 3}, {1, 4}}}};
  for (const char* const run : healthy) Import("runs/", run);
  for (const auto& ill : failing) {
    Import("runs/", ill.run);
    for (const char* const baseline : healthy) {
      SCOPED_TRACE(std::string(ill.run) + " against " + baseline);
      size_t found = 0;
      int64_t first = INT64_MAX;
      for (const auto& [head, step] : Compare(ill.run, baseline, "drift_ratio")) {
        EXPECT_TRUE(head.first == 1 || step > ill.t_sigma) << "L" << head.first << " H" << head.second << " " << step;
        if (!ill.heads.contains(head)) continue;
        ++found;
        first = std::min(first, step);
      }
      EXPECT_GE(found, std::min<size_t>(ill.heads.size(), 4));
      EXPECT_LT(first, ill.t_sigma);
    }
  }
}

TEST_F(CompareRecordedTest, CompareWithATwinFindsTheDriftingHead) {
  // Where sigma(W_Q) of layer 1 passes 3 times its fp32 twin's.
  const int64_t passes[] = {2420, 4780, 5020, 4220};
  for (int seed = 1; seed <= 4; ++seed) {
    const std::string ill = "bf16-" + std::to_string(seed), twin = "fp32-" + std::to_string(seed);
    Import("tiny/", ill);
    Import("tiny/", twin);
    const auto differing = Compare(ill, twin, "wq_sigma");
    ASSERT_TRUE(differing.contains({1, 0})) << ill;
    EXPECT_LT(differing.at({1, 0}), passes[seed - 1]) << ill;
    EXPECT_TRUE(Compare(ill, ill, "wq_sigma").empty());
  }
}

TEST_F(CompareRecordedTest, HealthyRunsOfTwoSeedsHardlyDiffer) {
  const char* const healthy[] = {"gpt-flash-lr3e4-s5", "gpt-flash-lr1e3-s15", "gpt-flash-glitch-s6"};
  for (const char* const run : healthy) Import("runs/", run);
  for (const char* const run : healthy) {
    for (const char* const baseline : healthy) {
      for (const char* const signal : {"drift_ratio", "tied_fraction_bf16", "logit_max", "loss"}) {
        // A head may lie for good where no head of the other seed does: 2 of 36 here.
        EXPECT_LE(Compare(run, baseline, signal).size(), 2u) << run << " against " << baseline << ": " << signal;
      }
    }
  }
}

}  // namespace
}  // namespace bellwether::server
