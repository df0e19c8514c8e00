// Goal: on recorded training runs the judge warns of every run that will fail,
// in the right layer and long before, and leaves healthy runs in peace.
// Method: all runs of tests/testdata/runs are replayed in order; labels.json,
// which the judge never sees, says what became of them.  The bars are those of
// the project's scorecard.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "tests/support/judged_run.h"

namespace bellwether::server {
namespace {

const std::string kRunsFolder = BELLWETHER_TESTDATA "/runs";

struct Case {
  RunLabel label;
  Verdict verdict;
};

const std::vector<Case>& Cases() {
  static const std::vector<Case> cases = [] {
    std::vector<Case> all;
    for (const RunLabel& label : ReadLabels(kRunsFolder + "/labels.json")) {
      const auto run = ReadRecordedRun(kRunsFolder + "/" + label.name + ".bwrun");
      if (run) all.push_back({label, Judge(*run)});
    }
    return all;
  }();
  return cases;
}

bool IsOneOf(const std::string& family, std::initializer_list<const char*> families) {
  return std::find(families.begin(), families.end(), family) != families.end();
}

TEST(RecordedRunsTest, AllRunsAreRead) { EXPECT_EQ(Cases().size(), 27u); }

TEST(RecordedRunsTest, EveryRoundingRunIsWarnedLongBeforeItsWeightsExplode) {
  std::vector<int64_t> leads;
  for (const Case& c : Cases()) {
    SCOPED_TRACE(c.label.name);
    if (!IsOneOf(c.label.family, {"rounding", "rounding-rescued"})) continue;
    ASSERT_GE(c.verdict.first_warning, 0);
    EXPECT_EQ(c.verdict.warning.strongest.layer, 1);
    if (c.label.t_sigma < 0) continue;
    leads.push_back(c.label.t_sigma - c.verdict.first_warning);
    EXPECT_GE(leads.back(), 500);
    ASSERT_GE(c.verdict.first_critical, 0);
    EXPECT_LT(c.verdict.first_critical, c.label.t_sigma);
  }
  ASSERT_GE(leads.size(), 5u);
  std::sort(leads.begin(), leads.end());
  EXPECT_GE(leads[leads.size() / 2], 1500);
}

// Their layer leaks, is silent for a while, and then explodes: asked whether it
// leaks now, the criticals came 240 and 260 steps before.
TEST(RecordedRunsTest, ACriticalRemembersThatItsLayerLeaked) {
  int runs = 0;
  for (const Case& c : Cases()) {
    SCOPED_TRACE(c.label.name);
    if (c.label.name != "gpt-live-long-s12" && c.label.name != "gpt-live-long-s14") continue;
    ++runs;
    ASSERT_GE(c.verdict.first_critical, 0);
    EXPECT_GE(c.label.t_sigma - c.verdict.first_critical, 600);
    JudgeOptions forgets;
    forgets.leak.memory_steps = 0;
    const auto run = ReadRecordedRun(kRunsFolder + "/" + c.label.name + ".bwrun");
    ASSERT_TRUE(run);
    EXPECT_GT(Judge(*run, forgets).first_critical, c.verdict.first_critical);
  }
  EXPECT_EQ(runs, 2);
}

TEST(RecordedRunsTest, OneOfTheFirstThreeNamedHeadsExplodes) {
  int right = 0;
  int all = 0;
  for (const Case& c : Cases()) {
    if (c.label.heads.empty() || c.verdict.first_critical < 0) continue;
    ++all;
    const std::vector<Head>& named = c.verdict.critical.heads;
    for (size_t i = 0; i < std::min<size_t>(3, named.size()); ++i) {
      if (std::find(c.label.heads.begin(), c.label.heads.end(), named[i]) == c.label.heads.end()) continue;
      ++right;
      break;
    }
  }
  ASSERT_GE(all, 5);
  EXPECT_GE(right, 0.8 * all);
}

TEST(RecordedRunsTest, EvidenceIsBeyondTheThresholdThatItQuotes) {
  int pieces = 0;
  for (const Case& c : Cases()) {
    for (const AlertTransition& t : c.verdict.transitions) {
      SCOPED_TRACE(c.label.name + " step " + std::to_string(t.step) + ": " + t.summary);
      EXPECT_EQ(t.evidence.empty(), t.state == AlertState::kResolved);
      for (const Evidence& e : t.evidence) {
        if (e.detector == "next in line") continue;  // Named, not found.
        ++pieces;
        EXPECT_TRUE(e.value > e.threshold || !std::isfinite(e.value))
            << e.signal << " " << e.value << " of " << e.threshold;
      }
    }
  }
  EXPECT_GT(pieces, 50);
}

TEST(RecordedRunsTest, LogitGrowthIsWarnedBeforeTheLossTurns) {
  int runs = 0;
  for (const Case& c : Cases()) {
    SCOPED_TRACE(c.label.name);
    if (c.label.family != "logits") continue;
    ++runs;
    ASSERT_GE(c.verdict.first_warning, 0);
    EXPECT_LT(c.verdict.first_warning, c.label.t_loss);
    EXPECT_EQ(c.verdict.warning.rule, "logits");
    EXPECT_EQ(c.verdict.warning.cause, "logit growth");
  }
  EXPECT_EQ(runs, 2);
}

// One of them is critical: sigma(W_Q) of gpt-live-long-s13 doubles the median's
// at step 2,420, and is no further at 10,500.
TEST(RecordedRunsTest, UnexplodedDriftIsWarnedAndSeldomCritical) {
  int runs = 0;
  int critical = 0;
  for (const Case& c : Cases()) {
    SCOPED_TRACE(c.label.name);
    if (c.label.family != "drifting") continue;
    ++runs;
    EXPECT_GE(c.verdict.first_warning, 0);
    critical += c.verdict.first_critical >= 0;
  }
  EXPECT_EQ(runs, 5);
  EXPECT_LE(critical, 1);
}

TEST(RecordedRunsTest, HealthyRunsHaveFewWarningsAndNoCritical) {
  int64_t steps = 0;
  int warnings = 0;
  for (const Case& c : Cases()) {
    SCOPED_TRACE(c.label.name);
    if (!IsOneOf(c.label.family, {"healthy", "benign", "centred"})) continue;
    EXPECT_EQ(c.verdict.first_critical, -1);
    steps += c.label.steps;
    warnings += c.verdict.warnings;
  }
  EXPECT_GE(steps, 80000);
  EXPECT_LE(warnings, 0.1 * static_cast<double>(steps) / 1000);
}

}  // namespace
}  // namespace bellwether::server
