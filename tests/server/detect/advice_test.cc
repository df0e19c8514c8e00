// Goal: an alert says what its runbook says, whatever the stage, the test and
// sigma; a spike is told as one, and who must go back is told when that begins.
// Method: every case of every family against the text of its runbooks; findings
// by hand through the engine.

#include "server/detect/advice.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "server/detect/alert_engine.h"

namespace bellwether::server {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;

const std::map<Family, std::vector<std::string>> kRunbooks = {
    {Family::kRounding, {"driftgrowing", "tiesandbiasrising", "spectralnormgrowing"}},
    {Family::kLogits, {"logitsgrowing"}},
    {Family::kLoss, {"diverging"}},
    {Family::kGradient, {"gradientjump"}},
    {Family::kNonfinite, {"nonfinite"}},
    {Family::kDisagreement, {"weightsdisagree"}},
    {Family::kSilent, {"ranksmissing"}},
    {Family::kOverhead, {"hookoverbudget"}},
    {Family::kKernel, {"kernelwrong"}},
    {Family::kArithmetic, {"arithmeticwrong"}},
    {Family::kOwn, {"ownsignal"}},
    {Family::kFrozen, {"parametersfrozen"}},
    {Family::kExperts, {"expertsdead"}},
    {Family::kSequences, {"sequencesodd"}},
    {Family::kParameters, {"parametersoutofpast"}},
    {Family::kCorruption, {"corruption"}},
    {Family::kLearning, {"notlearning"}},
};

std::string Runbook(const std::string& name) {
  std::ifstream file(std::string(BELLWETHER_SOURCE) + "/dashboards/alerts/runbooks/bellwether" + name + ".md");
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

// The first actions that a runbook's table has.
std::set<std::string> ActionsOf(const std::string& runbook) {
  std::set<std::string> actions;
  for (size_t at = runbook.find("| **"); at != std::string::npos; at = runbook.find("| **", at + 1)) {
    actions.insert(runbook.substr(at + 4, runbook.find("** |", at) - at - 4));
  }
  return actions;
}

TEST(AdviceTest, ARunbookHasTheRowsOfItsFamily) {
  ASSERT_EQ(kRunbooks.size(), static_cast<size_t>(kFamilies));
  for (const auto& [family, names] : kRunbooks) {
    for (const std::string& name : names) EXPECT_THAT(Runbook(name), HasSubstr(RunbookTable(family))) << name;
  }
}

TEST(AdviceTest, FirstActionIsAlwaysOneOfTheRunbooks) {
  std::set<std::string> told;
  for (const auto& [family, names] : kRunbooks) {
    for (const Severity severity : {Severity::kInfo, Severity::kWarning, Severity::kCritical}) {
      for (int32_t stage = 0; stage <= 5; ++stage) {
        for (const double sigma : {std::nan(""), 1.0, 30.0, 31.0, 1e6}) {
          for (const char* const dtype : {"bf16", "fp32"}) {
            for (const float softcap : {0.0f, 30.0f}) {
              RunDescription run;
              run.attention.score_dtype = dtype;
              run.attention.softcap = softcap;
              const AdviceState state{.severity = severity, .stage = stage, .sigma = sigma};
              const std::string first = FirstAction(family, run, state);
              const std::string text = AdviceText(family, run, state, 2750);
              EXPECT_THAT(text, AllOf(StartsWith(first + "."), Not(HasSubstr("{"))));
              told.insert(first);
              // With softcap the runbook names that repair behind the other one, in the same cell.
              const size_t other = first.find("witch to");
              const std::string words = other == std::string::npos ? first : first.substr(other);
              for (const std::string& name : names) {
                const std::set<std::string> actions = ActionsOf(Runbook(name));
                EXPECT_TRUE(
                    std::any_of(actions.begin(), actions.end(),
                                [&](const std::string& action) { return action.find(words) != std::string::npos; }))
                    << name << ": " << first;
              }
              const bool back = first == "Stop, or go back to a checkpoint";
              EXPECT_EQ(back, GoesBack(family, run, state));
              if (family == Family::kRounding) {
                EXPECT_EQ(back, severity > Severity::kInfo && (stage == 5 || sigma > 30)) << stage << " " << sigma;
              }
              if (family == Family::kLogits) {
                EXPECT_EQ(back, severity > Severity::kInfo && stage == 5);
              }
              if (family == Family::kLoss) {
                EXPECT_EQ(back, severity > Severity::kInfo);
              }
              if (back) {
                EXPECT_THAT(text, HasSubstr("from before step 2750"));
              }
            }
          }
        }
      }
    }
  }
  EXPECT_EQ(told.size(), 31u);
}

class AdviceOfAlertsTest : public testing::Test {
 protected:
  AdviceOfAlertsTest() { run_.name = std::string("r"); }
  static Finding Found(Rule rule, Severity severity, int32_t stage, const char* detector, int64_t first_step) {
    Finding finding;
    finding.rule = rule;
    finding.severity = severity;
    finding.stage = stage;
    finding.first_step = first_step;
    if (rule == Rule::kDrift) finding.where = {1, 3};
    finding.Add({.signal = "s", .where = finding.where, .value = 10, .threshold = 4, .detector = detector});
    return finding;
  }
  std::vector<AlertTransition> At(Family family, int64_t step, std::vector<Finding> findings) {
    std::vector<AlertTransition> out;
    engine_.Update(family, step, run_, findings, &out);
    return out;
  }
  std::vector<AlertTransition> Drift(int64_t step, double sigma) {
    Finding drift = Found(Rule::kDrift, Severity::kCritical, 3, "growth", 2750);
    drift.sigma = sigma;
    Finding next = drift;  // Whose sigma nobody knows.
    next.severity = Severity::kInfo;
    next.sigma = std::nan("");
    return At(Family::kRounding, step, {next, drift});
  }

  RunDescription run_;
  AlertEngine engine_{AlertOptions()};
};

TEST_F(AdviceOfAlertsTest, OnlyAnImpulseIsCalledASpike) {
  for (const auto& [family, rule] : {std::pair(Family::kLoss, Rule::kLoss), {Family::kGradient, Rule::kGradient}}) {
    engine_ = AlertEngine(AlertOptions());
    const auto spike = At(family, 1072, {Found(rule, Severity::kInfo, 0, "impulse", 1072)});
    ASSERT_EQ(spike.size(), 1u);
    EXPECT_THAT(spike[0].advice, StartsWith("One spike; nothing to do unless it"));
    EXPECT_THAT(spike[0].summary, HasSubstr(" has a spike at step 1,072."));
    const auto lasts = At(family, 1300, {Found(rule, Severity::kWarning, 5, "level", 1072)});
    ASSERT_EQ(lasts.size(), 1u);
    EXPECT_THAT(lasts[0].advice, Not(HasSubstr("spike")));
    EXPECT_THAT(lasts[0].summary, Not(HasSubstr("spike")));
  }
}

TEST_F(AdviceOfAlertsTest, DriftAdviceIsRollbackOnceSigmaIsBeyondRescue) {
  const auto opened = Drift(3000, 29);
  ASSERT_EQ(opened.size(), 1u);
  EXPECT_THAT(opened[0].advice, StartsWith("Save a checkpoint, then centre the keys (attention.center_k)."));
  EXPECT_TRUE(Drift(3020, 30).empty());
  const auto beyond = Drift(3040, 31);
  ASSERT_EQ(beyond.size(), 1u);
  EXPECT_EQ(beyond[0].key, opened[0].key);
  EXPECT_EQ(beyond[0].k, 1u);
  EXPECT_THAT(beyond[0].advice,
              AllOf(StartsWith("Stop, or go back to a checkpoint."), HasSubstr("from before step 2750")));
  EXPECT_EQ(engine_.went_back(), 1u << static_cast<int>(Family::kRounding));
  EXPECT_TRUE(Drift(3060, 40).empty()) << "said once";
}

TEST_F(AdviceOfAlertsTest, AnAlertAfterAnotherIsAdvisedByItsOwnState) {
  Drift(3000, 31);
  At(Family::kRounding, 3000 + AlertOptions().resolve_steps, {});
  Finding mild = Found(Rule::kDrift, Severity::kWarning, 1, "growth", 6000);
  mild.sigma = 2;
  const auto again = At(Family::kRounding, 6000, {mild});
  ASSERT_EQ(again.size(), 1u);
  EXPECT_THAT(again[0].advice, AllOf(StartsWith("Centre the keys"), HasSubstr("No work is lost yet")));
}

TEST_F(AdviceOfAlertsTest, LostLossAdvisesDriftRollbackAndSpikeDoesNot) {
  const auto opened = Drift(3000, 5);
  At(Family::kLoss, 3010, {Found(Rule::kLoss, Severity::kInfo, 0, "impulse", 3010)});
  EXPECT_TRUE(Drift(3020, 5).empty());
  const auto gone = At(Family::kLoss, 3300, {Found(Rule::kLoss, Severity::kWarning, 5, "level", 3100)});
  ASSERT_EQ(gone.size(), 1u);
  // A checkpoint from before the loss turned would hold the illness.
  EXPECT_THAT(gone[0].advice, HasSubstr("from before step 2750"));
  EXPECT_THAT(gone[0].advice, StartsWith("Stop, or go back to a checkpoint."));
  EXPECT_EQ(gone[0].key, opened[0].key) << "the loss is a sign of the drift";
  EXPECT_EQ(gone[0].rule, "drift");
  EXPECT_EQ(gone[0].cause, "rounding drift");
  EXPECT_EQ(gone[0].stage, 5);
  EXPECT_TRUE(Drift(3320, 5).empty()) << "said once";
}

}  // namespace
}  // namespace bellwether::server
