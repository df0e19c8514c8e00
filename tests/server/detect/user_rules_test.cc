// Goal: rules that people wrote fire on what they name and on nothing else, per
// head, layer and run; they heed what the built-in rules heed; each has one
// alert; and new rules, switches and restored states lose nothing that goes on.
// Method: a run of 4 x 4 heads whose entropy ratio is a given function of step
// and head, judged through RunJudge by rules written in YAML.

#include "server/detect/user_rules.h"

#include <gmock/gmock.h>

#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/detect/rules_file.h"
#include "server/detect/run_judge.h"

namespace bellwether::server {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr int64_t kPeriod = 20;
constexpr Head kIll{2, 1};
using Shape = std::function<double(int64_t step, Head where)>;

RunDescription Description() {
  RunDescription run;
  run.name = "r";
  run.layout = {.layers = 4, .heads = 4, .kv_heads = 4};
  run.attention.score_dtype = "bf16";
  return run;
}

// 0.5 with a wave that the head decides, and what `ill` says for kIll.
Shape Healthy(const std::function<double(int64_t)>& ill = nullptr) {
  return [ill](int64_t step, Head where) {
    std::mt19937 random(static_cast<uint32_t>(step * 16 + where.layer * 4 + where.head));
    const double noise = 0.01 * std::normal_distribution<double>()(random);
    return (ill != nullptr && where == kIll ? ill(step) : 0.5) + noise;
  };
}

StepSample SampleAt(int64_t step, const Shape& shape) {
  StepSample sample;
  sample.Reset(Description().layout);
  sample.step = step;
  sample.Add(SignalId::kLoss)[0] = 2 + 1e-3f * static_cast<float>(step % 3);  // A constant one is an illness.
  if (step % kPeriod != 0) return sample;
  sample.Add(SignalId::kRows);
  sample.Add(SignalId::kEntropySum);
  for (int32_t i = 0; i < 16; ++i) {
    const auto at = static_cast<size_t>(i);
    sample.Add(SignalId::kRows)[at] = 1;
    const double value = shape(step, {i / 4, i % 4});  // NaN: not measured.
    sample.Add(SignalId::kEntropySum)[at] = std::isnan(value) ? NotMeasured() : static_cast<float>(value);
  }
  return sample;
}

JudgeOptions Options(const std::string& yaml) {
  const auto rules = ParseRules(yaml, "r.yml");
  EXPECT_TRUE(rules.ok()) << rules.status();
  return rules.ok() ? (*rules)->options : JudgeOptions();
}

JudgeOptions OneRule(const std::string& rest) {
  return Options(absl::StrCat("rules: [{name: mine, signal: entropy_ratio, severity: warning, stage: 4, ", rest, "}]"));
}

class Judged {
 public:
  explicit Judged(const JudgeOptions& options, const RunDescription& run = Description()) : judge(options, run) {}

  // Steps up to and with `last`.
  void To(int64_t last, const Shape& shape) {
    for (; next <= last; ++next) judge.Observe(SampleAt(next, shape), &out);
  }
  void Tell(EventKind kind) { judge.OnEvent({.step = next - 1, .kind = kind}, &out); }

  RunJudge judge;
  int64_t next = 0;
  std::vector<AlertTransition> out;
};

std::vector<std::string> Texts(const std::vector<AlertTransition>& transitions) {
  std::vector<std::string> texts;
  for (const AlertTransition& t : transitions) {
    texts.push_back(
        absl::StrCat(t.state == AlertState::kFiring ? "+" : "-", t.key, " k", t.k, " at ", t.step, " ", t.summary));
  }
  return texts;
}

TEST(UserRulesTest, ALevelNamesTheHeadAndItsEvidence) {
  Judged run(
      OneRule("detector: level, below: 0.1, hold_batches: 3, cause: one key takes all, advice: look at the mask"));
  run.To(2000, Healthy([](int64_t step) { return step >= 1000 ? 0.05 : 0.5; }));
  ASSERT_EQ(run.out.size(), 1u) << testing::PrintToString(Texts(run.out));
  const AlertTransition& t = run.out[0];
  EXPECT_EQ(t.rule, "mine");
  EXPECT_EQ(t.key, "u1");
  EXPECT_EQ(t.step, 1040) << "the third batch";
  EXPECT_EQ(t.first_step, 1000);
  EXPECT_EQ(t.severity, Severity::kWarning);
  EXPECT_EQ(t.stage, 4);
  EXPECT_EQ(t.strongest, kIll);
  EXPECT_THAT(t.heads, ElementsAre(kIll));
  EXPECT_EQ(t.cause, "one key takes all");
  EXPECT_EQ(t.advice, "look at the mask");
  EXPECT_THAT(t.summary, HasSubstr("mine in layer 2 head 1: entropy_ratio"));
  ASSERT_EQ(t.evidence.size(), 1u);
  EXPECT_EQ(t.evidence[0].detector, "level");
  EXPECT_EQ(t.evidence[0].threshold, 0.1);
  EXPECT_NEAR(t.evidence[0].value, 0.05, 0.05);
  EXPECT_NEAR(t.evidence[0].baseline, 0.5, 0.05);
  EXPECT_EQ(run.judge.stage(), 4);
  EXPECT_EQ(run.judge.alerts_firing(), 1u);
}

TEST(UserRulesTest, AnAlertResolvesAndCoolsDown) {
  Judged run(OneRule("detector: level, below: 0.1, hold_batches: 1, resolve_steps: 100, cooldown_steps: 400"));
  const auto dips = [](int64_t step) { return step == 1000 || step == 1300 || step == 1800 ? 0.0 : 0.5; };
  run.To(2000, Healthy(dips));
  std::vector<int64_t> fired, resolved;
  for (const AlertTransition& t : run.out) (t.state == AlertState::kFiring ? fired : resolved).push_back(t.step);
  EXPECT_THAT(fired, ElementsAre(1000, 1800)) << "1300 is within the cool-down";
  EXPECT_THAT(resolved, ElementsAre(1100, 1900));
}

TEST(UserRulesTest, LayersAndRunsAreJudgedByTheirAggregate) {
  const Shape shape = Healthy([](int64_t step) { return step >= 1000 ? 0.05 : 0.5; });
  Judged layer(OneRule("detector: level, below: 0.1, scope: layer, aggregate: min"));
  layer.To(1500, shape);
  ASSERT_EQ(layer.out.size(), 1u);
  EXPECT_EQ(layer.out[0].strongest, (Head{2, -1}));
  EXPECT_THAT(layer.out[0].heads, IsEmpty());
  EXPECT_THAT(layer.out[0].summary, HasSubstr("mine in layer 2: entropy_ratio"));
  Judged median(OneRule("detector: level, below: 0.1, scope: layer, aggregate: median"));
  median.To(1500, shape);
  EXPECT_THAT(median.out, IsEmpty());
  Judged minimum(OneRule("detector: level, below: 0.1, scope: run, aggregate: min"));
  minimum.To(1500, shape);
  ASSERT_EQ(minimum.out.size(), 1u);
  EXPECT_EQ(minimum.out[0].strongest, Head());
  Judged mean(OneRule("detector: level, below: 0.48, scope: run, aggregate: mean"));
  mean.To(1500, shape);
  EXPECT_EQ(mean.out.size(), 1u) << "0.5 - 0.45 / 16";
  Judged most(OneRule("detector: level, above: 0.6, scope: run, aggregate: max"));
  most.To(1500, shape);
  EXPECT_THAT(most.out, IsEmpty());
}

TEST(UserRulesTest, ASignalOfTheRunIsJudgedToo) {
  Judged run(
      Options("rules: [{name: mine, signal: loss, detector: level, above: 1.5, stage: 5, severity: info, batch_steps: "
              "1, hold_batches: 2}]"));
  run.To(701, Healthy());
  ASSERT_EQ(run.out.size(), 1u);
  EXPECT_EQ(run.out[0].step, 701) << "the second step after the warm-up";
}

TEST(UserRulesTest, ASignalOfModulesNamesTheWorstOne) {
  RunDescription description = Description();
  description.layout.modules = 2;
  auto rows = std::make_shared<RunRows>();
  rows->modules.Add("up_proj dx=dW");
  rows->modules.Add("lm_head dx=dW");
  Judged run(Options("rules: [{name: mine, signal: law_z, severity: warning, stage: 1, detector: level, above: 4}]"),
             description);
  run.judge.SetRows(rows);
  for (int64_t step = 0; step <= 2000; step += kPeriod) {
    StepSample sample;
    sample.Reset(description.layout);
    sample.step = step;
    for (const SignalId id : {SignalId::kLawDifference, SignalId::kLawVariance}) sample.Add(id);
    // They take turns; the second one is at 5 from step 1000 on.
    const size_t row = static_cast<size_t>(step / kPeriod % 2);
    sample.Add(SignalId::kLawDifference)[row] = row == 1 && step >= 1000 ? 10 : 2;
    sample.Add(SignalId::kLawVariance)[row] = 4;
    run.judge.Observe(sample, &run.out);
  }
  // A batch of 20 steps holds one of them: every other one fires.
  EXPECT_THAT(run.out, IsEmpty());
  Judged longer(Options("rules: [{name: mine, signal: law_z, severity: warning, stage: 1, detector: level, above: 2.5, "
                        "batch_steps: 40}]"),
                description);
  longer.judge.SetRows(rows);
  for (int64_t step = 0; step <= 2000; step += kPeriod) {
    StepSample sample;
    sample.Reset(description.layout);
    sample.step = step;
    const size_t row = static_cast<size_t>(step / kPeriod % 2);
    sample.Add(SignalId::kLawDifference)[row] = row == 1 && step >= 1000 ? 10 : 2;
    sample.Add(SignalId::kLawVariance)[row] = 4;
    longer.judge.Observe(sample, &longer.out);
  }
  ASSERT_EQ(longer.out.size(), 1u);
  EXPECT_THAT(longer.out[0].summary, HasSubstr("r: mine: law_z of lm_head dx=dW 3 (limit 2.5), since step 1,0"));
  ASSERT_EQ(longer.out[0].evidence.size(), 1u);
  EXPECT_EQ(longer.out[0].evidence[0].text, "lm_head dx=dW");
}

TEST(UserRulesTest, AnExpertThatDiesNamesItsLayer) {
  RunDescription description = Description();
  description.layout.experts = 3;
  const std::string rule = "signal: expert_share, aggregate: min, detector: level, below: 0.01, hold_batches: 1";
  Judged run(Options(absl::StrCat("off: [experts]\nrules: [{name: dead, severity: warning, stage: 1, ", rule, "}]")),
             description);
  for (int64_t step = 0; step <= 2000; step += kPeriod) {
    StepSample sample;
    sample.Reset(description.layout);
    sample.step = step;
    for (const SignalId id : {SignalId::kExpertLoad, SignalId::kExpertIdealLoad}) sample.Add(id);
    for (size_t layer = 1; layer < 3; ++layer) {  // The others have no experts.
      const float dead = layer == 2 && step >= 1000 ? 0 : 8;
      sample.Add(SignalId::kExpertIdealLoad)[layer] = 10;
      const auto load = sample.Add(SignalId::kExpertLoad).subspan(layer * 3, 3);
      load[0] = 11;
      load[1] = dead;
      load[2] = 19 - dead;
    }
    run.judge.Observe(sample, &run.out);
  }
  ASSERT_EQ(run.out.size(), 1u) << testing::PrintToString(Texts(run.out));
  EXPECT_EQ(run.out[0].strongest, (Head{2, -1}));
  EXPECT_EQ(run.out[0].first_step, 1000);
  EXPECT_THAT(run.out[0].summary, HasSubstr("dead in layer 2: expert_share 0 (limit 0.01)"));
}

// Modules of which every second one is measured in a sample, and what is to be thought of each from step
// 1000 on.
std::vector<AlertTransition> OfModules(const std::string& rule, const std::vector<std::string>& names,
                                       const std::map<size_t, float>& z) {
  RunDescription description = Description();
  description.layout.modules = static_cast<int32_t>(names.size());
  auto rows = std::make_shared<RunRows>();
  for (const std::string& name : names) rows->modules.Add(name);
  Judged run(Options("off: [arithmetic]\nrules: [{name: mine, signal: law_z, severity: warning, stage: 1, "
                     "hold_batches: 2, resolve_steps: "
                     "200, " +
                     rule + "}]"),
             description);
  run.judge.SetRows(rows);
  for (int64_t step = 0; step <= 3000; step += kPeriod) {
    StepSample sample;
    sample.Reset(description.layout);
    sample.step = step;
    for (const SignalId id : {SignalId::kLawDifference, SignalId::kLawVariance}) sample.Add(id);
    for (size_t row = static_cast<size_t>(step / kPeriod % 2); row < names.size(); row += 2) {
      const bool ill = z.contains(row) && step >= 1000 && step < 2000;
      sample.Add(SignalId::kLawDifference)[row] = ill ? z.at(row) : 1;
      sample.Add(SignalId::kLawVariance)[row] = 1;
    }
    run.judge.Observe(sample, &run.out);
  }
  return run.out;
}

TEST(UserRulesTest, EachModuleIsJudgedByItself) {
  // Each is measured in every second batch, and holds in between.
  const std::vector<AlertTransition> out =
      OfModules("detector: level, above: 4, scope: row", {"a y=dx", "b dx=dW", "c y=dx"}, {{1, 9.0f}, {2, 5.0f}});
  ASSERT_EQ(out.size(), 2u);
  EXPECT_EQ(out[0].state, AlertState::kFiring);
  EXPECT_EQ(out[0].strongest, Head{});
  EXPECT_THAT(out[0].summary, HasSubstr("mine: law_z of c y=dx 5 (limit 4), since step 1,000"));
  EXPECT_EQ(out[1].state, AlertState::kResolved);
}

TEST(UserRulesTest, ModulesThatFireTogetherAreNamedTogether) {
  std::vector<std::string> names;
  std::map<size_t, float> z;
  for (size_t i = 0; i < 20; ++i) {
    names.push_back("layers." + std::to_string(i));
    if (i % 2 == 0) z[i] = static_cast<float>(10 + i);
  }
  const std::vector<AlertTransition> out = OfModules("detector: level, above: 4, scope: row", names, z);
  ASSERT_GE(out.size(), 1u);
  EXPECT_THAT(out[0].summary,
              HasSubstr("law_z of layers.18 28 (limit 4), since step 1,000; also of layers.0, layers.2, "
                        "layers.4, layers.6 and 5 more"));
  EXPECT_THAT(out[0].evidence, testing::SizeIs(testing::Gt(1u)));
  EXPECT_EQ(out[0].evidence[0].text, "layers.18");
}

TEST(UserRulesTest, ARuleMayTakeSomeModulesByName) {
  const std::vector<std::string> names = {"layers.0.mlp dx=dW", "lm_head dx=dW", "layers.1.mlp dx=dW"};
  const std::map<size_t, float> head = {{1, 9.0f}}, layer = {{2, 9.0f}};
  for (const std::string scope : {"row", "run"}) {
    const std::string rule = "detector: level, above: 4, scope: " + scope + ", rows: 'layers.*.mlp *', batch_steps: 40";
    EXPECT_THAT(OfModules(rule, names, head), IsEmpty()) << scope;
    const std::vector<AlertTransition> out = OfModules(rule, names, layer);
    ASSERT_GE(out.size(), 1u) << scope;
    EXPECT_THAT(out[0].summary, HasSubstr("law_z of layers.1.mlp dx=dW")) << scope;
  }
}

// Signals that the job named: kl of the run, whose ranks are averaged, and load of two experts, added up.
std::vector<AlertTransition> OfOwn(const std::string& rule, double kl, double load) {
  RunDescription description = Description();
  description.layout.own = 3;
  auto rows = std::make_shared<RunRows>();
  rows->own_signals = {{.name = "load", .granularity = Granularity::kExpert, .merge = Merge::kSum}, {.name = "kl"}};
  for (const OwnCell& cell : {OwnCell{0, 1, 6}, OwnCell{1, 0, 0}, OwnCell{0, 1, 7}}) rows->AddOwnCell(cell);
  Judged run(Options("rules: [{name: mine, severity: warning, stage: 5, hold_batches: 2, " + rule + "}]"), description);
  for (int64_t step = 0; step <= 2000; step += kPeriod) {
    if (step == 100) run.judge.SetRows(rows);  // Nothing was named before.
    StepSample sample;
    sample.Reset(description.layout);
    sample.step = step;
    if (step >= 100) {
      sample.Add(SignalId::kOwnMean)[1] = step < 1000 ? 0.1f : static_cast<float>(kl);
      sample.Add(SignalId::kOwnSum)[0] = 4;
      sample.Add(SignalId::kOwnSum)[2] = step < 1000 ? 4 : static_cast<float>(load);
    }
    run.judge.Observe(sample, &run.out);
  }
  return run.out;
}

TEST(UserRulesTest, AnOwnSignalIsJudgedByItsName) {
  const std::string rule = "signal: kl, detector: level, above: 0.5";
  EXPECT_THAT(OfOwn(rule, 0.2, 9), IsEmpty());
  const std::vector<AlertTransition> out = OfOwn(rule, 3, 4);
  ASSERT_EQ(out.size(), 1u);
  EXPECT_THAT(out[0].summary, HasSubstr("r: mine: kl 3 (limit 0.5), since step 1,0"));
  ASSERT_EQ(out[0].evidence.size(), 1u);
  EXPECT_EQ(out[0].evidence[0].signal, "kl");
  EXPECT_EQ(OfOwn("signal: own_mean, rows: kl, detector: level, above: 0.5", 3, 4).size(), 1u) << "as before";
}

TEST(UserRulesTest, CellsOfAnOwnSignalAreItsRows) {
  const std::string rule = "signal: load, detector: level, below: 0.5, scope: row";
  EXPECT_THAT(OfOwn(rule, 0.1, 4), IsEmpty()) << "kl is none of them";
  const std::vector<AlertTransition> out = OfOwn(rule, 0.1, 0);
  ASSERT_EQ(out.size(), 1u);
  EXPECT_THAT(out[0].summary, HasSubstr("r: mine: load[1,7] 0 (limit 0.5), since step 1,0"));
  EXPECT_THAT(OfOwn(rule + ", rows: 'load[1,6]'", 0.1, 0), IsEmpty());
  EXPECT_EQ(OfOwn("signal: load, aggregate: min, detector: level, below: 0.5", 0.1, 0).size(), 1u);
  EXPECT_THAT(OfOwn("signal: never_logged, detector: level, above: 0", 3, 9), IsEmpty());
}

TEST(UserRulesTest, ModulesArePeersOfEachOther) {
  std::vector<std::string> names;
  for (size_t i = 0; i < 40; ++i) names.push_back("layers." + std::to_string(i));
  const std::vector<AlertTransition> out =
      OfModules("detector: peers, factor: 3, scope: row, batch_steps: 40", names, {{7, 9.0f}});
  ASSERT_GE(out.size(), 1u);
  EXPECT_THAT(out[0].summary, HasSubstr("law_z of layers.7 "));
}

TEST(UserRulesTest, ModulesBeyondARulesRoomAreCounted) {
  RunDescription description = Description();
  description.layout.modules = kRuleRowsMax + 10;
  auto rows = std::make_shared<RunRows>();
  for (int32_t i = 0; i < description.layout.modules; ++i) rows->modules.Add("row " + std::to_string(i));
  Judged run(Options("off: [arithmetic]\nrules: [{name: mine, signal: law_z, severity: warning, stage: 1, detector: "
                     "level, above: 4, scope: "
                     "row, batch_steps: 1, hold_batches: 1}]"),
             description);
  run.judge.SetRows(rows);
  StepSample sample;
  sample.Reset(description.layout);
  for (sample.step = 700; sample.step < 720; ++sample.step) {
    for (float& value : sample.Add(SignalId::kLawVariance)) value = 1;
    for (float& value : sample.Add(SignalId::kLawDifference)) value = 1;
    for (const int32_t high : {kRuleRowsMax - 1, kRuleRowsMax}) {
      sample.Add(SignalId::kLawDifference)[static_cast<size_t>(high)] = 9;
    }
    run.judge.Observe(sample, &run.out);
  }
  EXPECT_EQ(run.judge.rule_rows_left_out(), 10u);
  ASSERT_EQ(run.out.size(), 1u);
  EXPECT_THAT(run.out[0].summary, HasSubstr("law_z of row 1023 9"));
  EXPECT_THAT(run.out[0].summary, testing::Not(HasSubstr("row 1024")));
}

TEST(UserRulesTest, PeersAreAsManyAsTheyMustBe) {
  const Shape shape = Healthy([](int64_t) { return 1.7; });
  Judged above(OneRule("detector: peers, factor: 3"));
  above.To(1500, shape);
  ASSERT_EQ(above.out.size(), 1u);
  EXPECT_EQ(above.out[0].strongest, kIll);
  EXPECT_NEAR(above.out[0].evidence[0].threshold, 1.5, 0.1);
  Judged held(OneRule("detector: peers, factor: 3, floor: 0.6"));
  held.To(1500, shape);
  EXPECT_THAT(held.out, IsEmpty());
  Judged below(OneRule("detector: peers, factor: 0.2"));
  below.To(1500, Healthy([](int64_t) { return 0.02; }));
  EXPECT_EQ(below.out.size(), 1u);
  JudgeOptions few = OneRule("detector: peers, factor: 3");
  few.drift.peers_min = 17;
  Judged alone(few);
  alone.To(1500, shape);
  EXPECT_THAT(alone.out, IsEmpty());
}

TEST(UserRulesTest, GrowthIsCalledWithItsRate) {
  const auto grows = [](int64_t step) {
    return step < 1000 ? 0.5 : 0.5 * std::exp2(static_cast<double>(step - 1000) / 300.0);
  };
  Judged run(OneRule("detector: growth, eta_level: 64"));
  run.To(2500, Healthy(grows));
  ASSERT_GE(run.out.size(), 1u);
  const AlertTransition& t = run.out[0];
  EXPECT_EQ(t.strongest, kIll);
  EXPECT_THAT(t.evidence[0].text, testing::ContainsRegex("doubles every (29|30|31).* steps"));
  // 0.5 to 64: 7 doublings.
  ASSERT_TRUE(t.eta.known);
  EXPECT_NEAR(static_cast<double>(t.step) + t.eta.steps, 1000 + 7 * 300, 150);
  EXPECT_TRUE(run.judge.eta().known);
  Judged slow(OneRule("detector: growth, doubling_steps_max: 200"));
  slow.To(2500, Healthy(grows));
  EXPECT_THAT(slow.out, IsEmpty());
  Judged high(OneRule("detector: growth, above: 1000"));
  high.To(2500, Healthy(grows));
  EXPECT_THAT(high.out, IsEmpty());
}

TEST(UserRulesTest, BaselineDetectorsFindWhatLeavesIt) {
  const auto shifts = [](int64_t step) { return step >= 3000 ? 0.6 : 0.5; };
  for (const char* detector : {"detector: impulse, sigmas: 6", "detector: cusum", "detector: cusum, scale: log"}) {
    Judged run(OneRule(absl::StrCat(detector, ", hold_batches: 1")));
    run.To(3400, Healthy(shifts));
    ASSERT_EQ(run.out.size(), 1u) << detector << testing::PrintToString(Texts(run.out));
    EXPECT_EQ(run.out[0].strongest, kIll);
    EXPECT_GE(run.out[0].step, 3000);
    EXPECT_LE(run.out[0].step, 3100);
    EXPECT_NEAR(run.out[0].evidence[0].baseline, 0.5, 0.02);
    EXPECT_GT(run.out[0].evidence[0].value, run.out[0].evidence[0].threshold);
  }
}

TEST(UserRulesTest, BenjaminiHochbergTakesFewer) {
  // One head three deviations off says nothing among sixteen.
  const Shape shape = Healthy([](int64_t step) { return step == 4000 ? 0.535 : 0.5; });
  Judged plain(OneRule("detector: impulse, sigmas: 2.9, hold_batches: 1, cooldown_steps: 0, resolve_steps: 20"));
  plain.To(4000, shape);
  Judged held(
      OneRule("detector: impulse, sigmas: 2.9, hold_batches: 1, cooldown_steps: 0, resolve_steps: 20, "
              "benjamini_hochberg: 0.00001"));
  held.To(4000, shape);
  EXPECT_GT(plain.out.size(), 2u);
  EXPECT_THAT(held.out, IsEmpty());
  Judged far(OneRule("detector: impulse, sigmas: 2.9, hold_batches: 1, benjamini_hochberg: 0.00001"));
  far.To(4000, Healthy([](int64_t step) { return step == 4000 ? 0.7 : 0.5; }));
  ASSERT_EQ(far.out.size(), 1u);
  EXPECT_EQ(far.out[0].step, 4000);
}

TEST(UserRulesTest, WarmUpAndExcusesAreHeeded) {
  const std::string rule = "detector: level, below: 0.1, hold_batches: 1";
  Judged warm(OneRule(rule));
  warm.To(699, Healthy([](int64_t) { return 0.0; }));
  EXPECT_THAT(warm.out, IsEmpty());
  warm.To(700, Healthy([](int64_t) { return 0.0; }));
  EXPECT_EQ(warm.out.size(), 1u);
  Judged excused(OneRule(rule));
  excused.To(1000, Healthy());
  excused.Tell(EventKind::kLearningRate);
  const Shape low = Healthy([](int64_t) { return 0.0; });
  excused.To(1199, low);
  EXPECT_THAT(excused.out, IsEmpty());
  excused.To(1200, low);
  EXPECT_EQ(excused.out.size(), 1u);
}

TEST(UserRulesTest, AnExcuseTeachesBaselinesAnew) {
  Judged run(OneRule("detector: cusum, hold_batches: 1, direction: both"));
  run.To(3000, Healthy());
  run.Tell(EventKind::kBatchSize);
  const Shape other = [shape = Healthy()](int64_t step, Head where) { return shape(step, where) + 0.2; };
  run.To(5000, other);
  EXPECT_THAT(run.out, IsEmpty()) << "the level after the change is normal";
}

TEST(UserRulesTest, RoundingRulesRestWhileKeysAreCentred) {
  const Shape low = Healthy([](int64_t step) { return step >= 1000 ? 0.0 : 0.5; });
  const std::string rule = "detector: level, below: 0.1, hold_batches: 1, rounding_only: ";
  for (const bool only : {true, false}) {
    Judged run(OneRule(rule + (only ? "true" : "false")));
    run.To(1100, low);
    ASSERT_EQ(run.out.size(), 1u);
    run.Tell(EventKind::kCentringOn);
    EXPECT_EQ(run.out.size(), only ? 2u : 1u);
    if (only) {
      EXPECT_THAT(run.out[1].summary, HasSubstr("under repair since step"));
      EXPECT_EQ(run.out[1].state, AlertState::kFiring);
    }
    run.To(4000, low);
    EXPECT_EQ(run.judge.alerts_firing(), 1u) << "that the rule is off shows nothing";
    run.Tell(EventKind::kCentringOff);
    run.To(6000, Healthy());
    EXPECT_EQ(run.judge.alerts_firing(), 0u);
  }
  RunDescription exact = Description();
  exact.attention.score_dtype = "fp32";
  Judged run(OneRule(rule + "true"), exact);
  run.To(2000, low);
  EXPECT_THAT(run.out, IsEmpty());
}

TEST(UserRulesTest, UnmeasuredValuesChangeNothing) {
  const double hole = std::numeric_limits<double>::quiet_NaN();
  for (const char* detector : {"detector: cusum", "detector: impulse"}) {
    Judged run(OneRule(absl::StrCat(detector, ", hold_batches: 1, resolve_steps: 10000000")));
    const auto shifts = [&](int64_t step) { return step >= 3400 ? 0.7 : step >= 3000 ? hole : 0.5; };
    run.To(3399, Healthy(shifts));
    EXPECT_THAT(run.out, IsEmpty()) << detector;
    run.To(3480, Healthy(shifts));
    ASSERT_EQ(run.out.size(), 1u) << detector;
    EXPECT_NEAR(run.out[0].evidence[0].baseline, 0.5, 0.02) << "of before the hole";
  }
}

TEST(UserRulesTest, AKeyHeadSpeaksForTheHeadsThatShareIt) {
  RunDescription description = Description();
  description.layout.kv_heads = 2;
  Judged run(Options("rules: [{name: mine, signal: key_coherence, detector: level, above: 0.9, stage: 1, severity: "
                     "info, hold_batches: 1}]"),
             description);
  for (int64_t step = 0; step <= 700; step += kPeriod) {
    StepSample sample;
    sample.Reset(description.layout);
    sample.step = step;
    for (float& sequences : sample.Add(SignalId::kSequences)) sequences = 1;
    sample.Add(SignalId::kKeyCoherenceSum)[3] = 0.95f;  // Layer 1, its second key head.
    run.judge.Observe(sample, &run.out);
  }
  ASSERT_EQ(run.out.size(), 1u);
  EXPECT_THAT(run.out[0].heads, ElementsAre(Head{1, 2}, Head{1, 3}));
}

TEST(UserRulesTest, ANewAttemptBeginsAfresh) {
  const Shape low = Healthy([](int64_t step) { return step >= 1960 ? 0.0 : 0.5; });
  Judged run(OneRule("detector: level, below: 0.1, hold_batches: 4"));
  run.To(2000, low);  // Three batches.
  ASSERT_THAT(run.out, IsEmpty());
  for (int64_t step = 1980; step <= 2300; step += kPeriod) {
    StepSample sample = SampleAt(step, low);
    sample.attempt = 1;
    run.judge.Observe(sample, &run.out);
  }
  ASSERT_EQ(run.out.size(), 1u);
  // A restore excuses 200 steps; four batches count from then on.
  EXPECT_EQ(run.out[0].step, 1980 + 200 + 3 * kPeriod);
}

TEST(UserRulesTest, UserRulesAllocateMemoryOnce) {
  Judged run(Options(R"(
rules:
- {name: a, signal: entropy_ratio, detector: growth, stage: 1, severity: info}
- {name: b, signal: entropy_ratio, detector: cusum, stage: 1, severity: info}
- {name: c, signal: entropy_ratio, detector: impulse, stage: 1, severity: info}
)"));
  run.To(1500, Healthy());
  const size_t bytes = run.judge.memory_bytes();
  run.To(4000, Healthy());
  EXPECT_EQ(run.judge.memory_bytes(), bytes);
}

TEST(UserRulesTest, SaveAtAnyStepChangesNoUserRule) {
  const JudgeOptions options = Options(R"(
rules:
- {name: a, signal: entropy_ratio, detector: growth, stage: 1, severity: info}
- {name: b, signal: entropy_ratio, detector: cusum, stage: 1, severity: info, hold_batches: 1}
- {name: c, signal: entropy_ratio, detector: impulse, stage: 1, severity: info, scope: layer}
- {name: d, signal: entropy_ratio, detector: level, above: 0.9, stage: 1, severity: warning}
)");
  const Shape shape = Healthy(
      [](int64_t step) { return step < 3000 ? 0.5 : 0.5 * std::exp2(static_cast<double>(step - 3000) / 400.0); });
  Judged whole(options);
  whole.To(4600, shape);
  ASSERT_GE(whole.out.size(), 4u);
  for (const int64_t at : {710, 2990, 3333, 4000}) {
    Judged first(options);
    first.To(at, shape);
    Judged second(options);
    ASSERT_TRUE(second.judge.Restore(first.judge.Save()));
    second.next = first.next;
    second.out = first.out;
    second.To(4600, shape);
    EXPECT_EQ(Texts(second.out), Texts(whole.out)) << at;
    EXPECT_TRUE(second.judge.Save() == whole.judge.Save()) << at;
  }
}

TEST(UserRulesTest, ChangedUserRulesBeginAfreshAfterRestore) {
  const Shape low = Healthy([](int64_t step) { return step >= 1000 ? 0.0 : 0.5; });
  Judged before(OneRule("detector: level, below: 0.1"));
  before.To(1500, low);
  ASSERT_EQ(before.judge.alerts_firing(), 1u);
  const std::string saved = before.judge.Save();
  for (const JudgeOptions& options : {OneRule("detector: level, below: 0.2"), JudgeOptions()}) {
    Judged after(options);
    ASSERT_TRUE(after.judge.Restore(saved));
    EXPECT_EQ(after.judge.alerts_firing(), 0u);
    after.next = 0;
    after.To(1500, low);
    EXPECT_THAT(after.out, IsEmpty()) << "those steps are known";
  }
  Judged damaged(OneRule("detector: level, below: 0.1"));
  EXPECT_FALSE(damaged.judge.Restore(saved.substr(0, saved.size() - 1)));
}

TEST(RuleReloadTest, LimitsChangeAndWindowsStay) {
  const auto shifts = [](int64_t step) { return step >= 3000 ? 0.6 : 0.5; };
  Judged run(OneRule("detector: cusum, h: 1000, hold_batches: 1"));
  run.To(3200, Healthy(shifts));
  ASSERT_THAT(run.out, IsEmpty());
  run.judge.SetOptions(OneRule("detector: cusum, h: 12, hold_batches: 1"), &run.out);
  run.To(3220, Healthy(shifts));
  ASSERT_EQ(run.out.size(), 1u) << "the sum and the baseline have gone on";
  run.judge.SetOptions(OneRule("detector: cusum, h: 13, hold_batches: 1"), &run.out);
  run.To(3300, Healthy(shifts));
  EXPECT_EQ(run.out.size(), 1u) << "the alert has gone on";
  EXPECT_EQ(run.judge.alerts_firing(), 1u);
}

TEST(RuleReloadTest, AnAlertEndsWithItsRule) {
  const Shape low = Healthy([](int64_t step) { return step >= 1000 ? 0.0 : 0.5; });
  const JudgeOptions options = OneRule("detector: level, below: 0.1");
  for (const JudgeOptions& next : {JudgeOptions(), OneRule("detector: level, below: 0.1, batch_steps: 40")}) {
    Judged run(options);
    run.To(1500, low);
    ASSERT_EQ(run.out.size(), 1u);
    run.judge.SetOptions(next, &run.out);
    ASSERT_EQ(run.out.size(), 2u);
    EXPECT_EQ(run.out[1].state, AlertState::kResolved);
    EXPECT_EQ(run.out[1].key, run.out[0].key);
    EXPECT_EQ(run.out[1].step, 1500);
    EXPECT_THAT(run.out[1].summary, HasSubstr("the rule was changed or removed"));
    EXPECT_EQ(run.judge.alerts_firing(), 0u);
  }
}

TEST(RuleReloadTest, TheSameOptionsAgainChangeNothing) {
  const JudgeOptions options = OneRule("detector: growth");
  const Shape grows = Healthy(
      [](int64_t step) { return step < 1500 ? 0.5 : 0.5 * std::exp2(static_cast<double>(step - 1500) / 300.0); });
  Judged plain(options);
  plain.To(3000, grows);
  Judged reloaded(options);
  for (int64_t step = 0; step <= 3000; step += 100) {
    reloaded.To(step, grows);
    reloaded.judge.SetOptions(options, &reloaded.out);
  }
  EXPECT_EQ(Texts(reloaded.out), Texts(plain.out));
  EXPECT_TRUE(reloaded.judge.Save() == plain.judge.Save());
}

TEST(RuleReloadTest, AShorterWindowKeepsTheNewest) {
  BatchSeries series(2, 4);
  for (int i = 1; i <= 6; ++i) {
    series.Add(std::vector<float>{static_cast<float>(i), static_cast<float>(10 * i)});
    series.Close(i);
  }
  std::vector<float> values, steps;
  series.SetWindow(2);
  series.Window(1, series.rows(), false, &values, &steps);
  EXPECT_THAT(values, ElementsAre(50, 60));
  series.SetWindow(3);
  series.Add(std::vector<float>{7, 70});
  series.Close(7);
  series.Window(1, series.rows(), false, &values, &steps);
  EXPECT_THAT(values, ElementsAre(50, 60, 70));
  EXPECT_THAT(steps, ElementsAre(5, 6, 7));
  EXPECT_TRUE(series.Consistent());
  series.SetWindow(0);
  EXPECT_EQ(series.newest(1), 70);
  EXPECT_TRUE(series.Consistent());
}

TEST(OffTest, DisabledRuleIsSilentAndItsAlertEnds) {
  StepSample sample;
  sample.Reset(Description().layout);
  sample.step = 1000;
  sample.Add(SignalId::kLoss)[0] = std::numeric_limits<float>::quiet_NaN();
  Judged off(Options("off: [nonfinite]"));
  off.judge.Observe(sample, &off.out);
  EXPECT_THAT(off.out, IsEmpty());
  Judged on{JudgeOptions()};
  on.judge.Observe(sample, &on.out);
  ASSERT_EQ(on.out.size(), 1u);
  on.judge.SetOptions(Options("off: [nonfinite]"), &on.out);
  ASSERT_EQ(on.out.size(), 2u);
  EXPECT_THAT(on.out[1].summary, HasSubstr("the rule was switched off"));
  StepSample unequal;
  unequal.Reset(Description().layout);
  unequal.step = 1000;
  unequal.disagreements.push_back({SignalId::kWqSigma, 1, 1, 2, 3});
  Judged torn(Options("off: [disagreement]"));
  torn.judge.Observe(unequal, &torn.out);
  EXPECT_THAT(torn.out, IsEmpty());
  Judged silent(Options("off: [silent]"));
  silent.judge.OnSilence(1, 100, &silent.out);
  EXPECT_THAT(silent.out, IsEmpty());
}

}  // namespace
}  // namespace bellwether::server
