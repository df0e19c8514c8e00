// Goal: an alert has one voice: the words of each part are what a person on call can act on, numbers are readable.
// Method: transitions by hand, with the numbers of a recorded failing run.

#include "server/model/alert_words.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"
#include "bellwether/signal_title.h"

namespace bellwether::server {
namespace {

AlertTransition Drift() {
  AlertTransition alert;
  alert.run_name = "gpt";
  alert.rule = "drift";
  alert.state = AlertState::kFiring;
  alert.severity = Severity::kCritical;
  alert.strongest = {1, 3};
  alert.heads_total = 3;
  alert.first_step = 2750;
  alert.evidence = {
      {.signal = "drift_ratio", .where = {1, 3}, .value = 125.8, .threshold = 4, .first_step = 2750},
      {.signal = "drift_ratio", .where = {1, 3}, .value = 120, .threshold = 4, .first_step = 2760},
      {.signal = "drift_ratio", .where = {1, 0}, .value = 61, .threshold = 4, .first_step = 2800},
      {.signal = "tied_fraction_bf16", .where = {1, 3}, .value = 0.8643, .threshold = 0.3, .first_step = 2750},
  };
  return alert;
}

TEST(AlertWordsTest, NumbersHaveThreeDigitsAndSeparators) {
  EXPECT_EQ(CountText(2750), "2,750");
  EXPECT_EQ(CountText(-1234567), "-1,234,567");
  EXPECT_EQ(CountText(999), "999");
  EXPECT_EQ(ValueText(125.8), "126");
  EXPECT_EQ(ValueText(6.922e6), "6,920,000");
  EXPECT_EQ(ValueText(999.7), "1,000");
  EXPECT_EQ(ValueText(-1234.5), "-1,230");
  EXPECT_EQ(ValueText(0.005342), "0.00534");
  EXPECT_EQ(ValueText(3e12), "3e+12");
  EXPECT_EQ(ValueText(std::nan("")), "NaN");
  EXPECT_EQ(ValueText(-std::numeric_limits<double>::infinity()), "-infinite");
  EXPECT_EQ(SignalValueText("tied_fraction_bf16", 0.8643), "86 %");
  EXPECT_EQ(SignalValueText("hook_overhead", 0.031), "3.1 %");
}

TEST(AlertWordsTest, StepsInATextAreGrouped) {
  EXPECT_EQ(WithStepsGrouped("since step 12345, step 9 and step by step"),
            "since step 12,345, step 9 and step by step");
}

TEST(AlertWordsTest, TimeLeftIsToldInStepsAndTime) {
  EXPECT_EQ(TimeLeftText({}), "");
  EXPECT_EQ(TimeLeftText({.known = true, .steps = 1269.4}), "~1,269 steps");
  EXPECT_EQ(TimeLeftText({.known = true, .steps = 269.1, .step_seconds = 1.1}), "~269 steps (~5 min)");
}

TEST(AlertWordsTest, SentenceNamesPlaceAndOthers) {
  AlertTransition alert = Drift();
  EXPECT_EQ(HappensText(alert), "layer 1 head 3 (and 2 more) is drifting");
  alert.rule = "corruption";
  EXPECT_EQ(HappensText(alert), "a weight has jumped in layer 1 head 3 (and 2 more)");
  alert.strongest = {};
  alert.rule = "silent";
  EXPECT_EQ(HappensText(alert), "all ranks are silent");
  alert.severity = Severity::kWarning;
  EXPECT_EQ(HappensText(alert), "a part of the run is silent");
  alert.rule = "loss";
  alert.severity = Severity::kInfo;
  EXPECT_EQ(HappensText(alert), "the loss has a spike");
  alert.rule = "nonfinite";
  alert.evidence = {{.signal = "grad_norm", .value = std::nan("")}};
  EXPECT_EQ(HappensText(alert), "the gradient norm is not finite");
  alert.rule = "my_rule";
  EXPECT_EQ(HappensText(alert), "the rule my_rule holds");
}

TEST(AlertWordsTest, EvidenceIsToldOnceAndNamesAnotherHead) {
  EXPECT_EQ(WhyText(Drift(), 4),
            "drift ratio 126 (limit 4) since step 2,750; tied rows 86 % (limit 30 %); "
            "drift ratio 61 (limit 4) of layer 1 head 0 since step 2,800");
  EXPECT_EQ(WhyText(Drift(), 1), "drift ratio 126 (limit 4) since step 2,750; and 2 more");
}

TEST(AlertWordsTest, EachSignalIsToldBeforeOneTwice) {
  AlertTransition alert = Drift();
  alert.evidence = {{.signal = "logit_max", .where = {1, 1}, .value = 9000, .threshold = 1000, .first_step = 7},
                    {.signal = "logit_max", .where = {1, 2}, .value = 8000, .threshold = 1000, .first_step = 7},
                    {.signal = "drift_ratio", .where = alert.strongest, .value = 6, .threshold = 4, .first_step = 7}};
  EXPECT_EQ(WhyText(alert, 2),
            "largest logit 9,000 (limit 1,000) of layer 1 head 1 since step 7; drift ratio 6 "
            "(limit 4); and 1 more");
}

TEST(AlertWordsTest, EvidenceWithinItsLimitIsNoReason) {
  AlertTransition alert = Drift();
  alert.evidence = {{.signal = "common_mode", .value = 7, .threshold = 100, .detector = kNextInLine}};
  EXPECT_EQ(WhyText(alert, 4), "");
  EXPECT_EQ(AllEvidenceText(alert), "common mode 7 (limit 100) since step 0");
}

TEST(AlertWordsTest, ValueThatIsNotFiniteHasNoLimit) {
  EXPECT_EQ(EvidenceText({.signal = "loss", .value = std::nan(""), .threshold = 0}, {}), "loss NaN");
  EXPECT_EQ(EvidenceText({.signal = "wq_sigma", .value = 31.4, .threshold = 16}, {}), "σ(W_Q) 31.4 (limit 16)");
  EXPECT_EQ(EvidenceText({.signal = "of_the_job", .value = 2, .threshold = 1}, {}), "of_the_job 2 (limit 1)");
}

TEST(AlertWordsTest, OneThingToDoIsTold) {
  AlertTransition alert = Drift();
  alert.advice =
      "Centre the keys (attention.center_k). Centring costs 1 %. Proposed: attention.center_k of layer 1; "
      "`bellwether action approve gpt 4a9d6c8a-1` applies it; cost: 1 %.";
  EXPECT_EQ(DoText(alert, "http://page"),
            "Approve \"centre the keys\" (attention.center_k of layer 1): http://page or "
            "`bellwether action approve gpt 4a9d6c8a-1`.");
  EXPECT_EQ(DoText(alert, ""),
            "Approve \"centre the keys\" (attention.center_k of layer 1) by "
            "`bellwether action approve gpt 4a9d6c8a-1`.");
  alert.advice.replace(0, alert.advice.find(" Centring"), "Stop, or go back to a checkpoint.");
  EXPECT_EQ(
      DoText(alert, "http://page"),
      "Stop, or go back to a checkpoint. Proposed as well: \"centre the keys\" (attention.center_k of layer 1), by "
      "`bellwether action approve gpt 4a9d6c8a-1`.");
  alert.advice = "Switch to the unbiased delta (attention.mode = hp). It costs 2 %.";
  EXPECT_EQ(DoText(alert, "http://page"), "Switch to the unbiased delta (attention.mode = hp).");
  alert.advice += " On its way by the policy: attention.mode hp of layer 1 (action 4a9d6c8a-1).";
  EXPECT_EQ(DoText(alert, ""),
            "Wait: the policy applies \"switch the attention mode\" (attention.mode hp of layer 1).");
  alert.advice =
      "Switch to hp. Cannot be approved: attention.center_k of layer 1 (action 4a9d6c8a-1): rank 0 did not allow it. "
      "More.";
  EXPECT_EQ(DoText(alert, "http://page"),
            "Switch to hp. Cannot be approved: \"centre the keys\" (attention.center_k of layer 1), since rank 0 did "
            "not allow it.");
  alert.advice = absl::StrCat(kOnTrialWords, " Switch to hp.");
  EXPECT_EQ(DoText(alert, "http://page"), kOnTrialWords);
  alert.state = AlertState::kResolved;
  EXPECT_EQ(DoText(alert, "http://page"), "Nothing: it is over.");
}

TEST(AlertWordsTest, LongTextsAreCutBetweenCharacters) {
  EXPECT_EQ(Clipped("short", 5), "short");
  EXPECT_EQ(Clipped("abcdefgh", 7), "abcd...");
  EXPECT_EQ(Clipped("abσσσσ", 8), "abσ...") << "a character has two bytes";
}

TEST(AlertWordsTest, SignalWithoutATitleIsItsName) {
  EXPECT_EQ(SignalTitle("tied_fraction_bf16"), "Tied rows");
  EXPECT_EQ(SignalTitle("nothing_known"), "nothing_known");
}

}  // namespace
}  // namespace bellwether::server
