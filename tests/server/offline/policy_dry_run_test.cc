// Goal: the built-in policy, enforced, does nothing on any healthy, benign or
// centred recording, and begins to repair every failing one before it is lost.
// Method: the dry run over all recordings with their labels.

#include "server/offline/policy_dry_run.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "server/act/action_kinds.h"
#include "tools/lab/scorecard.h"

namespace bellwether::server {
namespace {

const std::string kRuns = BELLWETHER_TESTDATA "/runs";

PolicyPtr InMode(PolicyMode mode) {
  auto policy = std::make_shared<Policy>(*DefaultPolicy());
  policy->mode = mode;
  return policy;
}

DryRun Try(const std::string& file, PolicyMode mode) {
  const auto run =
      DryRunPolicy([&](RunListener* listener) { return WalkRecordedRun(file, listener); }, InMode(mode), {});
  EXPECT_TRUE(run.ok()) << run.status();
  return run.ok() ? *run : DryRun();
}

TEST(PolicyDryRunTest, ActsInTimeOnFailingRunsNotOnHealthyOnes) {
  const auto folder = OpenRunFolder(kRuns, "");
  ASSERT_TRUE(folder.ok()) << folder.status();
  int healthy = 0;
  int failing = 0;
  for (const std::string& file : folder->files) {
    SCOPED_TRACE(file);
    const RunLabel* const label = folder->LabelOf(file);
    ASSERT_NE(label, nullptr);
    const DryRun run = Try(file, PolicyMode::kEnforce);
    const std::string& family = label->family;
    if (family == "healthy" || family == "benign" || family == "centred") {
      ++healthy;
      EXPECT_TRUE(run.actions.empty()) << DryRunText(run);
    } else if (family == "logits") {
      ++failing;
      ASSERT_GE(run.first_applied_step(), 0);
      EXPECT_LT(run.first_applied_step(), label->truth.t_loss);
    } else if (label->truth.t_sigma >= 0) {
      ++failing;
      ASSERT_GE(run.first_applied_step(), 0);
      EXPECT_LT(run.first_applied_step(), label->truth.t_sigma);
      EXPECT_EQ(run.actions[0].kind, ActionKind::kCenterK);
    }
    EXPECT_LE(std::count_if(run.actions.begin(), run.actions.end(),
                            [](const Action& action) {
                              return action.undoes.empty() && action.kind != ActionKind::kRollbackSuggest;
                            }),
              DefaultPolicy()->actions_per_run);
  }
  EXPECT_GE(healthy, 10);
  EXPECT_GE(failing, 7);
}

TEST(PolicyDryRunTest, ModeObserveDoesNothing) {
  const DryRun run = Try(kRuns + "/gpt-flash-s4.bwrun", PolicyMode::kObserve);
  EXPECT_TRUE(run.actions.empty());
  EXPECT_GT(run.alerts, 0);
  EXPECT_THAT(DryRunText(run), testing::HasSubstr("mode observe does nothing"));
}

TEST(PolicyDryRunTest, ModeProposeTakesProposalsForApproved) {
  const DryRun run = Try(kRuns + "/gpt-flash-s4.bwrun", PolicyMode::kPropose);
  ASSERT_FALSE(run.actions.empty());
  EXPECT_EQ(run.actions[0].history[1].by, "dry run");
  EXPECT_GE(run.first_applied_step(), 0);
}

// Its keys were centred at step 4000.
TEST(PolicyDryRunTest, RepairedRunIsReportedAsHelpedAfterItsRepair) {
  const DryRun run = Try(kRuns + "/gpt-flash-center-at-4000-s4.bwrun", PolicyMode::kEnforce);
  ASSERT_FALSE(run.actions.empty());
  EXPECT_LT(run.first_applied_step(), 4000);
  int64_t helped = 0;
  for (const Action& action : run.actions) {
    for (const ActionChange& change : action.history) {
      if (change.state == ActionState::kHelped) helped = change.step;
      if (change.state == ActionState::kDidNotHelp) {
        EXPECT_LT(change.step, 4000);
      }
    }
  }
  EXPECT_GT(helped, 4000) << DryRunText(run);
}

TEST(PolicyDryRunTest, TextAndJsonSayTheSame) {
  const DryRun run = Try(kRuns + "/gpt-flash-s4.bwrun", PolicyMode::kEnforce);
  const nlohmann::json json = nlohmann::json::parse(DryRunJson(run));
  EXPECT_EQ(json["mode"], "enforce");
  EXPECT_EQ(json["first_applied_step"], run.first_applied_step());
  ASSERT_EQ(json["actions"].size(), run.actions.size());
  const std::string text = DryRunText(run);
  for (const auto& action : json["actions"]) {
    EXPECT_THAT(text, testing::HasSubstr(action["id"].get<std::string>()));
    for (const auto& change : action["history"]) {
      EXPECT_THAT(text, testing::HasSubstr(change["reason"].get<std::string>()));
    }
  }
}

TEST(PolicyDryRunTest, FilesOtherThanRecordingsAreRefused) {
  const auto run = DryRunPolicy(
      [](RunListener* listener) { return WalkRecordedRun(BELLWETHER_TESTDATA "/runs/labels.json", listener); },
      DefaultPolicy(), {});
  EXPECT_EQ(run.status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace bellwether::server
