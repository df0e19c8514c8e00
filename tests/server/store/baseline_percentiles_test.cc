// Goal: stages of training tile all steps; a run's bands are the quantiles of
// what was finite; the mixture of several runs is what its header says.
// Method: small sets whose quantiles can be counted, and a mixture held against
// the quantiles of the runs' values put together.
#include "server/store/baseline_percentiles.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <set>

#include "server/model/step_sample.h"

namespace bellwether::server {
namespace {

using testing::ElementsAre;
using testing::FloatEq;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

Band BandOf(std::vector<float> values, uint8_t range = 0) {
  Band band{.signal = SignalId::kDriftRatio, .range = range};
  EXPECT_TRUE(DescribeBand(&values, &band));
  return band;
}

TEST(BaselinePercentilesTest, RangesTileAllSteps) {
  EXPECT_EQ(BandBegin(0), 0);
  for (int range = 0; range < kBandRanges; ++range) {
    const int64_t begin = BandBegin(range), end = BandBegin(range + 1);
    ASSERT_LT(begin, end);
    EXPECT_EQ(BandRangeOf(begin), range);
    EXPECT_EQ(BandRangeOf(end - 1), range);
  }
  EXPECT_EQ(BandBegin(3), 256);
  EXPECT_EQ(BandRangeOf(2400), BandRangeOf(2048));
  EXPECT_NE(BandRangeOf(2400), BandRangeOf(2900));
  EXPECT_GE(BandBegin(kBandRanges - 1), int64_t{10'000'000'000'000});
  EXPECT_EQ(BandRangeOf(std::numeric_limits<int64_t>::max()), kBandRanges - 1);
}

TEST(BaselinePercentilesTest, QuantilesAreOfWhatIsFinite) {
  std::vector<float> values = {kNan, 4, 0, kInf, 2, NotMeasured(), 1, 3, -kInf};
  Band band;
  ASSERT_TRUE(DescribeBand(&values, &band));
  EXPECT_EQ(band.values, 5u);
  EXPECT_THAT(band.quantiles, ElementsAre(0, FloatEq(0.004f), FloatEq(0.04f), FloatEq(0.2f), 1, 2, 3, FloatEq(3.8f),
                                          FloatEq(3.96f), FloatEq(3.996f), 4));
  values = {kNan, kInf, NotMeasured()};
  EXPECT_FALSE(DescribeBand(&values, &band));
  values = {7};
  ASSERT_TRUE(DescribeBand(&values, &band));
  EXPECT_THAT(band.quantiles, testing::Each(7));
}

TEST(BaselinePercentilesTest, MixtureOfOneRunEqualsTheRun) {
  const Band band = BandOf({1, 2, 3, 4, 5}, 4);
  const SiblingBand merged = MergeBands({&band});
  EXPECT_EQ(merged.runs, 1u);
  EXPECT_EQ(merged.step_begin, 362);
  EXPECT_EQ(merged.step_end, 512);
  EXPECT_EQ(merged.min, 1);
  EXPECT_NEAR(merged.p01, 1.04, 1e-6);
  EXPECT_NEAR(merged.p50, 3, 1e-6);
  EXPECT_NEAR(merged.p99, 4.96, 1e-6);
  EXPECT_EQ(merged.max, 5);
  EXPECT_EQ(MergeBands({}).runs, 0u);
}

TEST(BaselinePercentilesTest, MixtureOfEqualValuesIsExact) {
  const Band one = BandOf({1, 1, 1}), two = BandOf({2, 2});
  const SiblingBand same = MergeBands({&one, &one});
  EXPECT_EQ(same.p01, 1);
  EXPECT_EQ(same.p99, 1);
  // Half of the mixture is 1, half is 2, however many values each run had.
  const SiblingBand both = MergeBands({&one, &two});
  EXPECT_EQ(both.p01, 1);
  EXPECT_EQ(both.p50, 1);
  EXPECT_NEAR(both.p99, 2, 1e-9);
}

TEST(BaselinePercentilesTest, AMixtureIsOfAllRunsAlike) {
  std::mt19937 random(1);
  std::vector<Band> bands;
  std::vector<float> all;
  for (const float centre : {-1.0f, 0.0f, 0.5f, 2.0f}) {
    std::normal_distribution<float> draw(centre, 1);
    std::vector<float> values;
    for (int i = 0; i < 20'000; ++i) values.push_back(draw(random));
    all.insert(all.end(), values.begin(), values.end());
    bands.push_back(BandOf(values));
  }
  std::vector<const Band*> runs;
  for (const Band& band : bands) runs.push_back(&band);
  const SiblingBand merged = MergeBands(runs);
  std::sort(all.begin(), all.end());
  const auto exact = [&](double prob) {
    return double{all[static_cast<size_t>(prob * static_cast<double>(all.size() - 1))]};
  };
  // Lines between eleven quantiles: a part of a standard deviation off at most.
  EXPECT_NEAR(merged.p50, exact(0.5), 0.1);
  EXPECT_NEAR(merged.p01, exact(0.01), 0.1);
  EXPECT_NEAR(merged.p99, exact(0.99), 0.1);
  EXPECT_EQ(merged.min, exact(0));
  EXPECT_EQ(merged.max, exact(1));
}

TEST(BaselinePercentilesTest, OutlierRunDoesNotMoveTheMergedMedian) {
  const Band calm = BandOf({0.9f, 1, 1.1f}), wild = BandOf({1, 1, 3e38f});
  std::vector<const Band*> runs(31, &calm);
  runs.push_back(&wild);
  const SiblingBand merged = MergeBands(runs);
  EXPECT_NEAR(merged.p50, 1, 0.01);
  EXPECT_EQ(merged.max, double{3e38f});
  EXPECT_TRUE(std::isfinite(merged.p99));
}

TEST(BaselinePercentilesTest, TheKindIsArchitectureKernelAndDtype) {
  const RunDescription base{.name = "a",
                            .layout = {.layers = 6, .heads = 6, .kv_heads = 6, .head_dim = 64, .seq_len = 1024},
                            .attention = {.kernel = "flash", .score_dtype = "bf16", .causal = true},
                            .model = "gpt"};
  EXPECT_EQ(KindOf(base), "gpt 6 layers x 6 heads of 64, 1024 tokens, causal; flash, bf16");
  RunDescription same = base;
  same.name = "b";
  same.attempt = 3;
  same.world = same.reporters = 8;
  same.framework = "torch";
  same.weight_decay = 0.1;
  same.labels = {{"lr", "3e-4"}};
  EXPECT_EQ(KindOf(same), KindOf(base));
  std::set<std::string> kinds = {KindOf(base)};
  const auto expect_other = [&](auto change) {
    RunDescription other = base;
    change(&other);
    EXPECT_TRUE(kinds.insert(KindOf(other)).second) << KindOf(other);
  };
  expect_other([](RunDescription* run) { run->model = "llama"; });
  expect_other([](RunDescription* run) { run->layout.layers = 12; });
  expect_other([](RunDescription* run) { run->layout.heads = 12; });
  expect_other([](RunDescription* run) { run->layout.kv_heads = 2; });
  expect_other([](RunDescription* run) { run->layout.head_dim = 128; });
  expect_other([](RunDescription* run) { run->layout.seq_len = 0; });
  expect_other([](RunDescription* run) { run->attention.kernel = "cudnn"; });
  expect_other([](RunDescription* run) { run->attention.score_dtype = "fp16"; });
  expect_other([](RunDescription* run) { run->attention.centred = true; });
  expect_other([](RunDescription* run) { run->attention.qk_norm = true; });
  expect_other([](RunDescription* run) { run->attention.causal = false; });
  expect_other([](RunDescription* run) { run->attention.softcap = 30; });
  expect_other([](RunDescription* run) { run->attention.window = 256; });
  expect_other([](RunDescription* run) { run->step_from_attach = true; });
}

}  // namespace
}  // namespace bellwether::server
