// Goal: a policy file says what it says, and is refused with the place where
// it is wrong; the committed pages are those of the code.
// Method: small texts, good and bad; files of the repository.

#include "server/act/policy.h"

#include <gmock/gmock.h>

#include <fstream>
#include <iterator>

#include "server/act/action_kinds.h"
#include "server/act/policy_text.h"

namespace bellwether::server {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::Pair;

std::string Committed(const std::string& path) {
  std::ifstream file(std::string(BELLWETHER_SOURCE "/") + path);
  EXPECT_TRUE(file) << path;
  return {std::istreambuf_iterator<char>(file), {}};
}

std::string FindingsOf(const std::string& text) {
  const auto policy = ParsePolicy(text, "p.yml");
  return policy.ok() ? "" : std::string(policy.status().message());
}

// Everything that a policy decides.
void ExpectSame(const Policy& a, const Policy& b) {
  EXPECT_EQ(a.mode, b.mode);
  EXPECT_EQ(a.approvers, b.approvers);
  EXPECT_EQ(a.quiet_minutes, b.quiet_minutes);
  EXPECT_EQ(a.actions_per_run, b.actions_per_run);
  EXPECT_EQ(a.min_steps_between, b.min_steps_between);
  EXPECT_EQ(a.time_to_live_s, b.time_to_live_s);
  EXPECT_EQ(ExplainPolicy(a), ExplainPolicy(b));
}

TEST(PolicyTest, BuiltInPolicyObservesAndHasLadders) {
  const PolicyPtr policy = DefaultPolicy();
  EXPECT_EQ(policy->mode, PolicyMode::kObserve);
  EXPECT_EQ(policy->text, DefaultPolicyText());
  const PolicyRule* const drift = policy->Find("drift", 1, Severity::kWarning);
  ASSERT_NE(drift, nullptr);
  EXPECT_EQ(drift->ladder[0].kind, ActionKind::kCenterK);
  EXPECT_EQ(drift->ladder[1].mode, "hp");
  const PolicyRule* const late = policy->Find("drift", 3, Severity::kCritical);
  ASSERT_NE(late, nullptr);
  EXPECT_TRUE(late->ladder[0].always_next);
  EXPECT_EQ(late->ladder[1].kind, ActionKind::kQkClip);
  EXPECT_EQ(policy->Find("norm", 3, Severity::kWarning), drift);  // A norm alone is no reason to clip.
  EXPECT_EQ(policy->Find("drift", 1, Severity::kInfo), nullptr);
  EXPECT_EQ(policy->Find("loss", 5, Severity::kWarning), nullptr);
  EXPECT_EQ(policy->Find("overhead", 0, Severity::kCritical), nullptr);
}

TEST(PolicyTest, ModeAloneKeepsTheBuiltInRules) {
  const auto policy = ParsePolicy("mode: enforce", "p.yml");
  ASSERT_TRUE(policy.ok()) << policy.status();
  Policy built_in = *DefaultPolicy();
  built_in.mode = PolicyMode::kEnforce;
  ExpectSame(**policy, built_in);
  const auto empty = ParsePolicy("", "p.yml");
  ASSERT_TRUE(empty.ok());
  ExpectSame(**empty, *DefaultPolicy());
}

TEST(PolicyTest, PolicyFileSetsEveryField) {
  const auto read = ParsePolicy(
      "mode: propose\n"
      "approvers: [alice, \"oncall-*\"]\n"
      "quiet_hours: [\"22:00-06:30\", \"12:00-24:00\"]\n"
      "limits: {actions_per_run: 3, min_steps_between: 0, time_to_live_s: 60}\n"
      "rules:\n"
      "- when: {rule: [drift, my_rule], stage: 2, severity: critical}\n"
      "  confirm_steps: 100\n"
      "  ladder:\n"
      "  - {do: attention.center_k, scope: layers, trial_steps: 500, undo: never}\n"
      "  - {do: attention.center_k, on: false}\n"
      "  - {do: attention.mode, mode: hpm, scope: all, next: always}\n"
      "  - {do: qk.clip, gamma: 0.25, scope: heads}\n"
      "  - {do: lr.scale, factor: 10}\n"
      "  - {do: batch.skip, batches: 1000}\n"
      "  - {do: sampling.deepen, period: 1}\n"
      "  - {do: stop}\n"
      "- ladder: [{do: rollback.suggest}]\n",
      "p.yml");
  ASSERT_TRUE(read.ok()) << read.status();
  const Policy& policy = **read;
  EXPECT_EQ(policy.mode, PolicyMode::kPropose);
  EXPECT_TRUE(policy.MayApprove("alice"));
  EXPECT_TRUE(policy.MayApprove("oncall-eu"));
  EXPECT_FALSE(policy.MayApprove("bob"));
  EXPECT_THAT(policy.quiet_minutes, ElementsAre(Pair(1320, 390), Pair(720, 1440)));
  EXPECT_EQ(policy.actions_per_run, 3);
  EXPECT_EQ(policy.min_steps_between, 0);
  EXPECT_EQ(policy.time_to_live_s, 60);
  ASSERT_EQ(policy.rules.size(), 2u);
  const PolicyRule& rule = policy.rules[0];
  EXPECT_THAT(rule.rules, ElementsAre("drift", "my_rule"));
  EXPECT_EQ(rule.confirm_steps, 100);
  ASSERT_EQ(rule.ladder.size(), 8u);
  EXPECT_EQ(rule.ladder[0].scope, PolicyRung::Scope::kLayers);
  EXPECT_EQ(rule.ladder[0].trial_steps, 500);
  EXPECT_FALSE(rule.ladder[0].may_undo);
  EXPECT_EQ(rule.ladder[1].value, 0);
  EXPECT_EQ(rule.ladder[2].mode, "hpm");
  EXPECT_TRUE(rule.ladder[2].always_next);
  EXPECT_EQ(rule.ladder[3].value, 0.25);
  EXPECT_EQ(rule.ladder[6].value, 1);
  EXPECT_EQ(policy.Find("loss", 5, Severity::kWarning), &policy.rules[1]);
  EXPECT_EQ(policy.Find("loss", 5, Severity::kInfo), nullptr);
  EXPECT_EQ(policy.Find("my_rule", 2, Severity::kCritical), &rule);
  ExpectSame(**ParsePolicy(policy.text, "again.yml"), policy);
}

TEST(PolicyTest, QuietHoursMayPassMidnight) {
  const auto policy = ParsePolicy("quiet_hours: [\"22:00-06:00\"]", "p.yml");
  ASSERT_TRUE(policy.ok());
  constexpr int64_t kHour = 3'600'000'000'000;
  constexpr int64_t kDay = 24 * kHour;
  const int64_t midnight = 19'000 * kDay;
  EXPECT_EQ((*policy)->QuietUntil(midnight + 21 * kHour), -1);
  EXPECT_EQ((*policy)->QuietUntil(midnight + 22 * kHour), midnight + 30 * kHour);
  EXPECT_EQ((*policy)->QuietUntil(midnight + 1), midnight + 6 * kHour);
  EXPECT_EQ((*policy)->QuietUntil(midnight + 6 * kHour), -1);
}

TEST(PolicyTest, ErrorsNamePlaceFieldValueAndRange) {
  const struct {
    const char* text;
    const char* says;
  } cases[] = {
      {"mode: on", "p.yml:1:7: mode = on: must be one of observe, propose, enforce"},
      {"modes: observe", "p.yml:1:1: modes is unknown; known: mode, approvers, quiet_hours, limits, rules"},
      {"mode: observe\nmode: enforce", "p.yml:2:1: mode stands twice"},
      {"limits: {actions_per_run: 201}",
       "p.yml:1:27: limits.actions_per_run = 201: must be a whole number in [0, 200]"},
      {"limits: {min_steps_between: -1}", "limits.min_steps_between = -1: must be a whole number in [0, 10000000]"},
      {"limits: {time_to_live_s: 9}", "limits.time_to_live_s = 9: must be a whole number in [10, 604800]"},
      {"limits: {steps: 9}", "limits.steps is unknown"},
      {"approvers: alice", "p.yml:1:12: approvers = alice: must be a list"},
      {"quiet_hours: [\"25:00-06:00\"]", "quiet_hours[0] = 25:00-06:00: must be \"HH:MM-HH:MM\""},
      {"quiet_hours: [\"06:00-06:00\"]", "not empty"},
      {"rules: [{when: {stage: 6}, ladder: [{do: stop}]}]",
       "rules[0].when.stage = 6: must be a whole number in [0, 5]"},
      {"rules: [{when: {rule: Drift}, ladder: [{do: stop}]}]", "rules[0].when.rule = Drift: must be a rule's name"},
      {"rules: [{when: {rule: [drift, \"a b\"]}, ladder: [{do: stop}]}]", "rules[0].when.rule[1] = a b: must be"},
      {"rules: [{when: {severity: high}, ladder: [{do: stop}]}]",
       "severity = high: must be one of info, warning, critical"},
      {"rules: [{when: {rule: drift}}]", "rules[0].ladder is missing"},
      {"rules: [{ladder: []}]", "rules[0].ladder is empty: must hold 1 to 8 rungs"},
      {"rules: [{ladder: [{scope: all}]}]", "rules[0].ladder[0].do is missing"},
      {"rules: [{ladder: [{do: dance}]}]", "rules[0].ladder[0].do = dance: must be one of attention.mode, "},
      {"rules: [{ladder: [{do: attention.mode}]}]", "rules[0].ladder[0].mode is missing: must be one of fa, paper"},
      {"rules: [{ladder: [{do: attention.mode, mode: turbo}]}]", "ladder[0].mode = turbo: must be one of"},
      {"rules: [{ladder: [{do: lr.scale, factor: 0}]}]", "rules[0].ladder[0].factor = 0: must be above 0"},
      {"rules: [{ladder: [{do: qk.clip, gamma: 1.1}]}]", "gamma = 1.1: must be a number in [0, 1]"},
      {"rules: [{ladder: [{do: qk.clip, scope: all}]}]", "scope = all: must be heads for qk.clip"},
      {"rules: [{ladder: [{do: lr.scale, scope: layers}]}]", "scope = layers: must be all for lr.scale"},
      {"rules: [{ladder: [{do: attention.center_k, scope: heads}]}]", "must be all or layers for attention.center_k"},
      {"rules: [{ladder: [{do: lr.scale, gamma: 0.5}]}]", "rules[0].ladder[0].gamma is not for lr.scale"},
      {"rules: [{ladder: [{do: stop, trial_steps: 100}]}]", "trial_steps is not for stop: its effect is not judged"},
      {"rules: [{ladder: [{do: qk.clip, undo: never}]}]", "undo is not for qk.clip: it cannot be undone"},
      {"rules: [{ladder: [{do: lr.scale, trial_steps: 19}]}]",
       "trial_steps = 19: must be a whole number in [20, 1000000]"},
      {"rules: [{ladder: [{do: batch.skip, batches: 1.5}]}]", "batches = 1.5: must be a whole number in [1, 1000]"},
      {"rules: [{ladder: [{do: lr.scale, next: never}]}]", "next = never: must be one of if_needed, always"},
  };
  for (const auto& c : cases) EXPECT_THAT(FindingsOf(c.text), HasSubstr(c.says)) << c.text;
}

TEST(PolicyTest, EveryFindingIsToldAtOnce) {
  const std::string findings =
      FindingsOf("mode: on\nlimits: {actions_per_run: -1}\nrules: [{ladder: [{do: dance}, {do: run}]}]");
  EXPECT_EQ(std::count(findings.begin(), findings.end(), '\n'), 3);
}

TEST(PolicyTest, SizesAreLimited) {
  std::string rules = "rules:\n";
  for (int i = 0; i < 33; ++i) rules += "- ladder: [{do: stop}]\n";
  EXPECT_THAT(FindingsOf(rules), HasSubstr("rules holds 33 entries: at most 32"));
  std::string ladder = "rules: [{ladder: [{do: stop}";
  for (int i = 0; i < 8; ++i) ladder += ", {do: stop}";
  EXPECT_THAT(FindingsOf(ladder + "]}]"), HasSubstr("rules[0].ladder holds 9 entries: at most 8"));
  EXPECT_THAT(FindingsOf(std::string(kPolicyBytesMax + 1, ' ')), HasSubstr("at most 65536"));
  EXPECT_EQ(FindingsOf("mode: enforce" + std::string(kPolicyBytesMax - 13, ' ')), "");
}

TEST(PolicyTest, TheCommittedFilesAreWhatTheCodeSays) {
  EXPECT_EQ(Committed("deploy/policy/default.yml"), DefaultPolicyText())
      << "bellwetherd policy defaults > deploy/policy/default.yml";
  EXPECT_EQ(Committed("docs/reference/policy.md"), PolicyReference())
      << "bellwetherd policy reference > docs/reference/policy.md";
}

TEST(PolicyTest, EveryActionKindIsInReferenceAndFoundByName) {
  const std::string page = PolicyReference();
  for (const ActionKindInfo& info : ActionKinds()) {
    EXPECT_THAT(page, HasSubstr(std::string("| `") + info.name + "` |"));
    EXPECT_EQ(FindActionKind(info.name), &info);
    EXPECT_EQ(FindActionKind(info.kind), &info);
  }
  EXPECT_EQ(FindActionKind(ActionKind::kNone), nullptr);
  EXPECT_EQ(FindActionKind("attention"), nullptr);
}

TEST(PolicyTest, ExplanationHasThePolicysNumbers) {
  const auto policy = ParsePolicy(
      "{mode: enforce, quiet_hours: [\"22:00-06:00\"], rules: [{when: {rule: drift, stage: 2}, confirm_steps: 70,"
      " ladder: [{do: qk.clip, gamma: 0.25}]}]}",
      "p.yml");
  ASSERT_TRUE(policy.ok());
  const std::string text = ExplainPolicy(**policy);
  for (const char* part :
       {"Mode enforce", "From 22:00 to 06:00 UTC", "An alert of drift, from stage 2, warning or worse",
        "fired for 70 steps", "1. qk.clip gamma 0.25", "cannot be undone"}) {
    EXPECT_THAT(text, HasSubstr(part));
  }
}

}  // namespace
}  // namespace bellwether::server
