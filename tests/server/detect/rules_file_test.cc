// Goal: a rules file says exactly what it says: every threshold can be set,
// every wrong value is refused with its place, its name and what is legal, and
// limits hold at max and max + 1.
// Method: small texts; every threshold and every key in turn.

#include "server/detect/rules_file.h"

#include <gmock/gmock.h>

#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "server/detect/rule_fields.h"
#include "server/detect/thresholds.h"
#include "tests/support/temp_directory.h"

namespace bellwether::server {
namespace {

using testing::HasSubstr;
using testing::StartsWith;

constexpr char kRule[] =
    "rules:\n- {name: a, signal: entropy_ratio, detector: level, below: 0.05, stage: 4, severity: warning";

constexpr char kOwnRule[] = "rules:\n- {name: a, detector: level, above: 1, stage: 5, severity: warning, signal: ";

std::string Findings(const std::string& text) {
  const auto rules = ParseRules(text, "r.yml");
  return rules.ok() ? "" : std::string(rules.status().message());
}

// The only rule of a text.
UserRule OnlyRule(const std::string& text) {
  const auto rules = ParseRules(text, "r.yml");
  EXPECT_TRUE(rules.ok()) << rules.status();
  if (!rules.ok() || (*rules)->options.rules == nullptr) return {};
  EXPECT_EQ((*rules)->options.rules->size(), 1u);
  return (*rules)->options.rules->front();
}

TEST(RulesFileTest, EmptyFileGivesTheBuiltInRules) {
  const auto rules = ParseRules("", "r.yml");
  ASSERT_TRUE(rules.ok()) << rules.status();
  const JudgeOptions built_in;
  for (const Threshold& row : Thresholds()) EXPECT_EQ(row.Get((*rules)->options), row.Get(built_in)) << row.path();
  EXPECT_EQ((*rules)->options.off, BuiltinSet());
  EXPECT_EQ((*rules)->options.rules, nullptr);
}

TEST(RulesFileTest, EveryThresholdCanBeSetAndIsChecked) {
  for (const Threshold& row : Thresholds()) {
    const auto text = [&](double value) {
      return absl::StrCat("thresholds:\n  ", row.section, ":\n    ", row.name, ": ", NumberText(value));
    };
    // An end that another threshold forbids is refused for that reason only.
    for (const double value : {row.low, row.high}) {
      const auto rules = ParseRules(text(value), "r.yml");
      if (rules.ok()) {
        EXPECT_EQ(row.Get((*rules)->options), value) << row.path();
      } else {
        EXPECT_THAT(std::string(rules.status().message()), HasSubstr(": must be at most ")) << row.path();
      }
    }
    const std::string place =
        absl::StrCat("r.yml:3:", 7 + std::string(row.name).size(), ": thresholds.", row.path(), " = ");
    for (const double value : {row.low - 1, row.high * 1.5 + 1}) {
      EXPECT_THAT(Findings(text(value)), StartsWith(place)) << row.path();
      EXPECT_THAT(Findings(text(value)), HasSubstr("number in [")) << row.path();
    }
    if (row.whole()) {
      EXPECT_THAT(Findings(text(row.low + 0.5)), HasSubstr("must be a whole number")) << row.path();
    }
    EXPECT_THAT(Findings(absl::StrCat("thresholds: {", row.section, ": {", row.name, ": [1]}}")), HasSubstr("= a list"))
        << row.path();
  }
}

TEST(RulesFileTest, ThresholdsThatContradictEachOtherAreRefused) {
  EXPECT_EQ(Findings("thresholds: {trend: {window_batches: 16, window_batches_min: 8, window_batches_short: 16}}"), "");
  EXPECT_THAT(Findings("thresholds: {trend: {window_batches_min: 60}}"),
              HasSubstr("thresholds.trend.window_batches_min = 60: must be at most trend.window_batches_short = 32"));
  EXPECT_THAT(Findings("thresholds: {loss: {persist_steps: 700}}"),
              HasSubstr("must be at most loss.critical_steps = 600"));
}

TEST(RulesFileTest, UnknownKeysAreRefusedByName) {
  EXPECT_EQ(
      Findings("thresholds:\n  drift:\n    grown: 4"),
      "r.yml:3:5: thresholds.drift.grown is unknown; known: ratio_floor, grown_factor, level_factor, level_batches, "
      "level_rise_min, common_mode_large, common_mode_factor, peers_min, heads_usual, heads_exponent, "
      "ratio_critical, eta_steps_max, "
      "common_mode_critical, hold_batches");
  EXPECT_THAT(Findings("thresholds: {drifts: {}}"),
              HasSubstr("thresholds.drifts is unknown; known: trend, drift, leak"));
  EXPECT_THAT(Findings("treshold: {}"), HasSubstr("r.yml:1:1: treshold is unknown; known: thresholds, off, rules"));
  EXPECT_THAT(Findings("thresholds: {drift: {grown_factor: 4, grown_factor: 5}}"),
              HasSubstr("grown_factor stands twice"));
  EXPECT_THAT(Findings(absl::StrCat(kRule, ", colour: red}")),
              HasSubstr("rules[0].colour is unknown; known: name, signal"));
}

TEST(RulesFileTest, AllFindingsAreReportedAtOnce) {
  const std::string findings = Findings("thresholds: {drift: {grown_factor: 0}}\noff: [drifts]\nrules: [{name: a}]");
  EXPECT_THAT(findings, HasSubstr("r.yml:1:"));
  EXPECT_THAT(findings, HasSubstr("r.yml:2:7: off[0] = drifts: must be one of drift, drift.growth"));
  EXPECT_THAT(findings, HasSubstr("r.yml:3:9: rules[0].signal is missing"));
}

TEST(RulesFileTest, AllFaultsOfARuleAreReportedAtOnce) {
  const std::string findings =
      Findings("rules: [{name: a, signal: drfit_ratio, detector: lvl, below: soon, severity: loud}]");
  EXPECT_THAT(findings, HasSubstr("rules[0].signal = drfit_ratio: did you mean drift_ratio?"));
  EXPECT_THAT(findings, HasSubstr("rules[0].detector = lvl: must be one of level"));
  EXPECT_THAT(findings, HasSubstr("rules[0].below = soon: "));
  EXPECT_THAT(findings, HasSubstr("rules[0].severity = loud: must be one of"));
  // Of a known detector also what is not for it.
  const std::string level = Findings("rules: [{name: a, signal: drfit_ratio, detector: level, above: 1, sigmas: 3}]");
  EXPECT_THAT(level, HasSubstr("rules[0].signal"));
  EXPECT_THAT(level, HasSubstr("rules[0].sigmas is not for detector level"));
}

TEST(RulesFileTest, EveryBuiltinCanBeSwitchedOff) {
  std::string all = "off: [";
  for (int i = 0; i < kBuiltins; ++i) absl::StrAppend(&all, i > 0 ? ", " : "", NameOf(static_cast<Builtin>(i)));
  const auto rules = ParseRules(all + "]", "r.yml");
  ASSERT_TRUE(rules.ok()) << rules.status();
  for (int i = 0; i < kBuiltins; ++i) EXPECT_TRUE((*rules)->options.off.has(static_cast<Builtin>(i)));
  EXPECT_THAT(Findings("off: [ties, ties]"), HasSubstr("r.yml:1:13: off[1] = ties: stands twice"));
  EXPECT_THAT(Findings("off: ties"), HasSubstr("off = ties: must be a list"));
}

TEST(RulesFileTest, ARuleHasItsDefaults) {
  const UserRule rule = OnlyRule(absl::StrCat(kRule, "}"));
  EXPECT_EQ(rule.name, "a");
  EXPECT_EQ(rule.signal, SignalId::kEntropyRatio);
  EXPECT_EQ(rule.scope, RuleScope::kHead);
  EXPECT_EQ(rule.below, 0.05);
  EXPECT_FALSE(rule.above.has_value());
  EXPECT_EQ(rule.batch_steps, 20);
  EXPECT_EQ(rule.hold_batches, 3);
  EXPECT_EQ(rule.resolve_steps, 1000);
  EXPECT_FALSE(rule.rounding_only);
  EXPECT_EQ(rule.cause, "unknown");
  // Where a built-in rule has the same number, it is that one's.
  const std::string other = "thresholds: {alert: {cooldown_steps: 77}, trend: {batch_steps: 40}}\n";
  EXPECT_EQ(OnlyRule(absl::StrCat(kRule, "}\n", other)).cooldown_steps, 77) << "whichever comes first in the file";
  EXPECT_EQ(OnlyRule(absl::StrCat(other, kRule, ", batch_steps: 10}")).batch_steps, 10);
  EXPECT_TRUE(OnlyRule("rules: [{name: a, signal: drift_ratio, detector: peers, factor: 4, stage: 1, severity: info}]")
                  .rounding_only);
  const std::string of_run = "rules: [{name: a, signal: grad_norm, detector: cusum, stage: 5, severity: info}]";
  EXPECT_EQ(OnlyRule(of_run).scope, RuleScope::kRun);
  EXPECT_EQ(OnlyRule(of_run).h, 8);
  EXPECT_EQ(OnlyRule(of_run).window_batches, 50);
  EXPECT_EQ(OnlyRule("rules: [{name: a, signal: wq_sigma, detector: cusum, stage: 3, severity: info}]").h, 12);
  EXPECT_EQ(OnlyRule("rules: [{name: a, signal: wq_sigma, detector: impulse, scope: run, stage: 3, severity: info}]")
                .aggregate,
            RuleAggregate::kMedian);
}

TEST(RulesFileTest, EveryKeyIsCheckedAndBelongsToItsDetectors) {
  for (const RuleField& field : RuleFields()) {
    for (int d = 0; d < 5; ++d) {
      const auto detector = static_cast<RuleDetector>(d);
      const std::string name = field.name;
      if (name == "name" || name == "signal" || name == "detector") continue;
      std::string text = absl::StrCat("rules:\n- name: a\n  signal: wq_sigma\n  detector: ", NameOf(detector), "\n");
      for (const RuleField& other : RuleFields()) {
        const std::string key = other.name;
        if (key == name || !other.taken_by(detector)) continue;
        if (key == "stage" || key == "factor") absl::StrAppend(&text, "  ", key, ": 2\n");
        if (key == "severity") absl::StrAppend(&text, "  severity: info\n");
        if (key == "above" && detector == RuleDetector::kLevel && name != "below")
          absl::StrAppend(&text, "  above: 1\n");
      }
      const std::string wrong = Findings(absl::StrCat(text, "  ", name, ": {}\n"));
      if (field.taken_by(detector)) {
        EXPECT_THAT(wrong, HasSubstr(absl::StrCat("rules[0].", name, " = a map: must be"))) << NameOf(detector);
        if (field.required) {
          EXPECT_THAT(Findings(text), HasSubstr(absl::StrCat("rules[0].", name, " is missing")));
        }
      } else {
        EXPECT_THAT(wrong, HasSubstr(absl::StrCat("rules[0].", name, " is not for detector ", NameOf(detector))));
      }
    }
  }
}

TEST(RulesFileTest, ContradictoryRulesAreRefused) {
  const auto rule = [](const std::string& rest) {
    return Findings(absl::StrCat("rules:\n- {name: a, stage: 1, severity: info, ", rest, "}"));
  };
  EXPECT_THAT(rule("signal: wq_sigma, detector: level"), HasSubstr("exactly one of above and below"));
  EXPECT_THAT(rule("signal: wq_sigma, detector: level, above: 2, below: 1"),
              HasSubstr("exactly one of above and below"));
  EXPECT_THAT(rule("signal: wq_sigma, detector: peers, factor: 1"),
              HasSubstr("rules[0].factor = 1: must be above or below 1"));
  EXPECT_THAT(rule("signal: wq_sigma, detector: peers, factor: 2, scope: run"), HasSubstr("a run has no peers"));
  EXPECT_THAT(rule("signal: loss, detector: level, above: 2, scope: head"),
              HasSubstr("must be run, since loss is of the run"));
  EXPECT_THAT(rule("signal: loss, detector: level, above: 2, aggregate: max"), HasSubstr("rules[0].aggregate"));
  EXPECT_THAT(rule("signal: law_z, detector: level, above: 2, scope: layer"),
              HasSubstr("must be run or row, since law_z is of tensors or modules"));
  EXPECT_THAT(rule("signal: wq_sigma, detector: level, above: 2, scope: row"),
              HasSubstr("must be head, layer or run, since wq_sigma is of heads"));
  EXPECT_THAT(rule("signal: expert_share, detector: level, below: 0.1, scope: head"),
              HasSubstr("must be layer or run, since expert_share is of layers or experts"));
  EXPECT_EQ(rule("signal: expert_share, detector: level, below: 0.1, aggregate: min"), "");
  EXPECT_EQ(rule("signal: router_entropy, detector: peers, factor: 0.5"), "");
  EXPECT_THAT(rule("signal: law_z, detector: level, above: 2, scope: row, aggregate: max"),
              HasSubstr("rules[0].aggregate"));
  EXPECT_THAT(rule("signal: wq_sigma, detector: level, above: 2, rows: '*'"),
              HasSubstr("rules[0].rows is for signals of tensors, modules and the job's own"));
  EXPECT_EQ(rule("signal: law_z, detector: level, above: 2, scope: row, rows: 'layers.*'"), "");
  EXPECT_THAT(rule("signal: loss, detector: cusum, benjamini_hochberg: 0.05"), HasSubstr("a run is one value"));
  EXPECT_THAT(rule("signal: 'No thing', detector: level, above: 2"),
              HasSubstr("rules[0].signal = No thing: must be a signal of signals.md, or one of the job's own, named "
                        "[a-z][a-z0-9_./-]{0,63}"));
  const auto named = [](const std::string& name) {
    return Findings(absl::StrCat("rules:\n- {name: ", name,
                                 ", stage: 1, severity: info, signal: loss, detector: level, above: 2}"));
  };
  for (const char* bad : {"drift", "overhead", "Big", "1st", "a-b", "_a"})
    EXPECT_THAT(named(bad), HasSubstr("must match")) << bad;
  EXPECT_EQ(named(std::string(63, 'a')), "");
  EXPECT_THAT(named(std::string(64, 'a')), HasSubstr("64 bytes long: must be 1 to 63"));
}

TEST(RulesFileTest, NumberOfRulesAndBytesIsBounded) {
  const auto rules = [](size_t count) {
    std::string text = "rules:\n";
    for (size_t i = 0; i < count; ++i) {
      absl::StrAppend(&text, "- {name: a", i, ", stage: 1, severity: info, signal: loss, detector: level, above: 2}\n");
    }
    return text;
  };
  EXPECT_EQ(Findings(rules(kUserRulesMax)), "");
  EXPECT_EQ(Findings(rules(kUserRulesMax + 1)), "r.yml:2:1: rules holds 65 entries: at most 64");
  EXPECT_THAT(Findings(rules(1) + rules(1).substr(7)), HasSubstr("rules[1].name = a0: another rule has this name"));

  TempDirectory folder;
  const std::string path = folder.path() + "/r.yml";
  for (const size_t bytes : {kRulesBytesMax, kRulesBytesMax + 1}) {
    std::string text = rules(1);
    text += '#';
    text.append(bytes - text.size(), 'x');
    std::ofstream(path) << text;
    const auto read = ReadRules(path);
    EXPECT_EQ(read.ok(), bytes == kRulesBytesMax) << read.status();
    if (!read.ok()) {
      EXPECT_THAT(std::string(read.status().message()), HasSubstr("262145 bytes long: at most 262144"));
    }
  }
  EXPECT_EQ(ReadRules(folder.path() + "/none.yml").status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(ReadRules(folder.path()).status().code(), absl::StatusCode::kInvalidArgument) << "a folder";
}

TEST(RulesFileTest, TheTextGivesTheSameRulesAgain) {
  const std::string text = absl::StrCat("thresholds: {drift: {grown_factor: 5}}\noff: [ties]\n", kRule, "}");
  const auto once = ParseRules(text, "r.yml");
  ASSERT_TRUE(once.ok());
  const auto again = ParseRules((*once)->text, "elsewhere");
  ASSERT_TRUE(again.ok());
  EXPECT_EQ(*(*once)->options.rules, *(*again)->options.rules);
  EXPECT_EQ(Fingerprint(*(*once)->options.rules), Fingerprint(*(*again)->options.rules));
  EXPECT_EQ((*again)->options.drift.grown_factor, 5);
}

TEST(RulesFileTest, AFingerprintTellsEveryField) {
  const UserRule plain = OnlyRule("rules: [{name: a, signal: wq_sigma, detector: cusum, stage: 3, severity: info}]");
  UserRule other = plain;
  other.h = 13;
  EXPECT_NE(Fingerprint(std::vector{plain}), Fingerprint(std::vector{other}));
  EXPECT_NE(Fingerprint(std::vector{plain}), Fingerprint(std::vector{plain, plain}));
  EXPECT_EQ(Fingerprint(std::vector{plain}), Fingerprint(std::vector{plain}));
}

TEST(RulesFileTest, ASignalThatNoCatalogueHasIsTheJobsOwn) {
  const auto text = [](const std::string& signal, const std::string& rest = "") {
    return absl::StrCat("rules:\n- {name: mine, stage: 5, severity: warning, detector: level, above: 2, signal: '",
                        signal, "'", rest, "}");
  };
  const UserRule rule = OnlyRule(text("train/kl"));
  EXPECT_EQ(rule.own, "train/kl");
  EXPECT_EQ(rule.scope, RuleScope::kRun);
  EXPECT_EQ(rule.aggregate, RuleAggregate::kMax);
  EXPECT_EQ(SignalNameOf(rule), std::string("train/kl"));
  EXPECT_EQ(OnlyRule(text("router_z", ", scope: row, rows: 'router_z[3,*'")).rows, "router_z[3,*");
  EXPECT_EQ(OnlyRule(text("own_mean", ", rows: kl")).own, "") << "as before";
  EXPECT_EQ(OnlyRule(text("loss")).own, "");
  for (const char* field : {"reward", "kl", "entropy", "router_z", "clip_share", "actor/entropy", "ppo_kl"}) {
    EXPECT_EQ(Findings(text(field)), "") << field;
  }
  EXPECT_THAT(Findings(text("kl", ", scope: head")), HasSubstr("must be run or row, since kl is of the job's own"));
}

TEST(RulesFileTest, ASlipOfThePenIsNoOwnSignal) {
  for (const auto& [said, meant] :
       {std::pair("entropy_ration", "entropy_ratio"), {"los", "loss"}, {"grad_nrom", "grad_norm"}}) {
    EXPECT_THAT(
        Findings(absl::StrCat("rules: [{name: a, stage: 1, severity: info, detector: level, above: 2, signal: ", said,
                              "}]")),
        HasSubstr(absl::StrCat("rules[0].signal = ", said, ": did you mean ", meant,
                               "? For a signal of the job's own that is called so: signal: own_mean, rows: ", said)));
  }
}

TEST(RulesFileTest, RulesOnOtherOwnSignalsRememberNothingOfEachOther) {
  const UserRule kl = OnlyRule(std::string(kOwnRule) + "kl}");
  const UserRule reward = OnlyRule(std::string(kOwnRule) + "reward}");
  EXPECT_TRUE(kl.RemembersLike(kl));
  EXPECT_FALSE(kl.RemembersLike(reward));
  EXPECT_NE(Fingerprint({&kl, 1}), Fingerprint({&reward, 1}));
}

}  // namespace
}  // namespace bellwether::server
