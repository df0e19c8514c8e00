// Goal: what a test is worth and what tuning wins are said rightly.
// Method: recorded runs of the CPU example, which are short; made-up scores.

#include "tools/lab/tuning.h"

#include <algorithm>
#include <filesystem>
#include <set>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/temp_directory.h"
#include "tools/lab/ablation.h"

namespace bellwether::server {
namespace {

using ::testing::HasSubstr;

RunSet TinyRuns() {
  TempDirectory folder;
  for (const char* run : {"bf16-1", "bf16-2", "fp32-1"}) {
    std::filesystem::copy(std::string(BELLWETHER_TESTDATA "/tiny/") + run + ".bwrun",
                          folder.path() + "/" + run + ".bwrun");
  }
  return RunSet::Read(folder.path(), "", nullptr).value();
}

TEST(AblationTest, AblationShowsRunsThatNeedTheDisabledTest) {
  const RunSet runs = TinyRuns();
  size_t told = 0;
  const auto rows = Ablate(runs, {}, [&](size_t done, size_t of) {
    EXPECT_EQ(done, ++told);
    EXPECT_EQ(of, static_cast<size_t>(kBuiltins) + 1);
  });
  ASSERT_EQ(rows.size(), static_cast<size_t>(kBuiltins) + 1);
  EXPECT_FALSE(rows[0].off);
  EXPECT_EQ(rows[0].runs_changed, 0);
  const auto without = [&](Builtin test) {
    return *std::find_if(rows.begin(), rows.end(), [&](const Ablated& row) { return row.off == test; });
  };
  // The leak is the witness there (docs/concepts/detection.md).
  EXPECT_GT(without(Builtin::kDriftLeak).runs_changed, 0);
  EXPECT_LT(without(Builtin::kDriftLeak).totals.mean_lead, rows[0].totals.mean_lead);
  EXPECT_EQ(without(Builtin::kSilent).runs_changed, 0);
  const std::string table = ToTable(rows);
  EXPECT_THAT(table, HasSubstr("| nothing | 0 |"));
  EXPECT_THAT(table, HasSubstr("| drift.leak | "));
  EXPECT_THAT(table.substr(table.find("No run changes without: ")), HasSubstr("silent"));
}

TEST(AblationTest, DisabledTestsAreNotAblatedAgain) {
  JudgeOptions options;
  options.off = {Builtin::kDriftLeak, Builtin::kNorm};
  EXPECT_EQ(Ablate(TinyRuns(), options, nullptr).size(), static_cast<size_t>(kBuiltins) - 1);
}

TEST(TuningTest, LeadPaysUpToItsGoalAndFalseAlarmsCost) {
  RunScore lost{.run = "lost", .truth = {.t_sigma = 4000, .heads = {}, .steps = 9000}};
  EXPECT_EQ(CostOf(lost), 2.5);
  lost.first_warning = 2500;
  EXPECT_EQ(CostOf(lost), 1);  // Half of the goal, and no critical.
  lost.first_critical = 3000;
  EXPECT_EQ(CostOf(lost), 0.5);
  lost.first_warning = 100;
  EXPECT_EQ(CostOf(lost), 0);
  lost.first_warning = 4000;
  EXPECT_EQ(CostOf(lost), 2);
  RunScore quiet{.run = "quiet", .warnings = 2, .criticals = 1};
  EXPECT_EQ(CostOf(quiet), 7);
  RunScore drifting{.run = "drifting", .family = "drifting"};
  EXPECT_EQ(CostOf(drifting), 1);
  drifting.first_warning = 10;
  EXPECT_EQ(CostOf(drifting), 0);
  drifting.criticals = 1;
  EXPECT_EQ(CostOf(drifting), 5);
}

TEST(TuningTest, TuningIsNoWorseAndLeavesEachRunOutOnce) {
  const RunSet runs = TinyRuns();
  const Tuning tuning = Tune(runs, {}, nullptr);
  const JudgeOptions defaults;
  ASSERT_EQ(tuning.given.size(), TuningKnobs().size());
  EXPECT_EQ(tuning.given[0], defaults.drift.grown_factor);
  EXPECT_LE(tuning.best_cost, tuning.given_cost);
  ASSERT_EQ(tuning.folds.size(), 3u);
  double left_out = 0;
  for (size_t run = 0; run < 3; ++run) {
    EXPECT_EQ(tuning.folds[run].before.run, runs.Score(run, {}).run);
    EXPECT_EQ(tuning.folds[run].after.run, tuning.folds[run].before.run);
    EXPECT_EQ(CostOf(tuning.folds[run].before), CostOf(runs.Score(run, {})));
    left_out += CostOf(tuning.folds[run].after) / 3;
  }
  EXPECT_DOUBLE_EQ(tuning.left_out_cost, left_out);
  // Chosen without the run: never better for all of them than chosen with it.
  EXPECT_GE(tuning.left_out_cost, tuning.best_cost - 1e-9);
  EXPECT_THAT(ToTable(tuning), HasSubstr("| bf16-1 | "));
}

TEST(TuningTest, EveryKnobTurnsAnotherThreshold) {
  JudgeOptions options;
  std::set<double*> fields;
  for (const Knob& knob : TuningKnobs()) {
    EXPECT_TRUE(fields.insert(&knob.field(&options)).second) << knob.name;
    EXPECT_GE(knob.values.size(), 3u) << knob.name;
    EXPECT_EQ(std::count(knob.values.begin(), knob.values.end(), knob.field(&options)), 0) << knob.name;
  }
}

}  // namespace
}  // namespace bellwether::server
