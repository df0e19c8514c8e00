// Goal: the judge is deterministic, survives Save and Restore at any step,
// never looks ahead, takes rollbacks, holes and changed sampling, heeds events,
// and raises the run-level alerts.
// Method: a synthetic run of 4 x 4 heads in which one head's ratio doubles
// every 300 steps from step 2000 on, with fixed noise; variants of it.

#include "server/detect/run_judge.h"

#include <gmock/gmock.h>

#include <cmath>
#include <limits>
#include <memory>
#include <random>
#include <set>

#include "absl/strings/str_cat.h"
#include "server/detect/judge_options.h"
#include "server/detect/thresholds.h"
#include "server/model/alert_words.h"
#include "tests/support/judged_samples.h"
#include "tests/support/law_samples.h"
#include "tests/support/transition_text.h"

namespace bellwether::server {
namespace {

std::vector<AlertTransition> JudgeAll(const RunDescription& run, const Plan& plan) {
  RunJudge judge(JudgeOptions{}, run);
  std::vector<AlertTransition> out;
  for (int64_t step = 0; step <= plan.last_step; ++step) judge.Observe(SampleAt(run, plan, step), &out);
  return out;
}

const AlertTransition* First(const std::vector<AlertTransition>& transitions, const std::string& rule, Severity least) {
  for (const AlertTransition& t : transitions) {
    if (t.rule == rule && t.state == AlertState::kFiring && t.severity >= least) return &t;
  }
  return nullptr;
}

TEST(RunJudgeTest, DriftWarningNamesHeadAndPredictsEnd) {
  const auto out = JudgeAll(SyntheticRun(), {});
  const AlertTransition* warning = First(out, "drift", Severity::kWarning);
  ASSERT_NE(warning, nullptr);
  EXPECT_EQ(warning->strongest, kIll);
  EXPECT_EQ(warning->stage, 1);
  EXPECT_EQ(warning->cause, "rounding drift");
  EXPECT_GT(warning->step, 2000);
  EXPECT_LT(warning->step, 3200);
  ASSERT_TRUE(warning->eta.known);
  // The ratio passes 128 at 2000 + 7 * 300; the common mode of 2 logits at the
  // start passes 1,500 two and a half doublings later.
  EXPECT_NEAR(static_cast<double>(warning->step) + warning->eta.steps, 4100 + 380, 500);
  EXPECT_LE(warning->eta.lower_steps, warning->eta.steps);
  EXPECT_GE(warning->eta.upper_steps, warning->eta.steps);
  const AlertTransition* critical = First(out, "drift", Severity::kCritical);
  ASSERT_NE(critical, nullptr);
  EXPECT_EQ(critical->key, warning->key);
  EXPECT_GT(critical->k, warning->k);
  EXPECT_GE(critical->stage, 2);
  EXPECT_THAT(warning->advice, testing::HasSubstr("No work is lost yet"));
  EXPECT_THAT(critical->advice, testing::HasSubstr("repair at once"));
}

TEST(RunJudgeTest, CommonModeGivesEtaBeyondHalfTheCriticalRatio) {
  const RunDescription run = SyntheticRun();
  RunJudge judge(JudgeOptions{}, run);
  std::vector<AlertTransition> out;
  const auto ill = static_cast<size_t>(kIll.layer * 4 + kIll.head);
  for (int64_t step = 0; step <= 4060; ++step) {
    StepSample sample = SampleAt(run, {}, step);
    if (sample.has(SignalId::kSpreadSum)) {
      // The ratio stays at 100, which it reaches at 3,993; the mode goes on.
      float& spread = sample.Add(SignalId::kSpreadSum)[ill];
      spread = std::max(spread, sample.matrix(SignalId::kCommonModeSum)[ill] / 100);
    }
    judge.Observe(sample, &out);
  }
  ASSERT_TRUE(judge.eta().known);
  // 2 logits pass 1,500 after 9.55 doublings.
  EXPECT_NEAR(4060 + judge.eta().steps, 2000 + 9.55 * 300, 150);
}

TEST(RunJudgeTest, OutlierHeadIsWatchedTwiceAsLongWithoutTies) {
  const RunDescription run = SyntheticRun();
  const auto ill = static_cast<size_t>(kIll.layer * 4 + kIll.head);
  const auto first_warning = [&](float tied) {
    RunJudge judge(JudgeOptions{}, run);
    std::vector<AlertTransition> out;
    for (int64_t step = 0; step <= 5000; ++step) {
      StepSample sample = SampleAt(run, {.drift_from = -1}, step);
      if (sample.has(SignalId::kCommonModeSum)) {
        const auto mode = sample.Add(SignalId::kCommonModeSum);
        std::fill(mode.begin(), mode.end(), 2048 * 2.0f);
        // Passes 8 at step 4,000; too slow to be called growth.
        mode[ill] *= static_cast<float>(4 * std::exp2(static_cast<double>(step) / 4000));
        if (step > 3900) sample.Add(SignalId::kTiedRowsBf16)[ill] = 2048 * tied;
      }
      judge.Observe(sample, &out);
    }
    const AlertTransition* const warning = First(out, "drift", Severity::kWarning);
    return warning == nullptr ? -1 : warning->step;
  };
  EXPECT_NEAR(static_cast<double>(first_warning(0.05f)), 4000 + 20 * 20, 40);
  EXPECT_NEAR(static_cast<double>(first_warning(0.6f)), 4000 + 10 * 20, 40);
}

TEST(RunJudgeTest, WeightJumpAndScoreGrowthAreDriftStages) {
  const RunDescription run = SyntheticRun();
  const auto ill = static_cast<size_t>(kIll.layer * 4 + kIll.head);
  const auto worst = [&](float sigma, float logit) {
    RunJudge judge(JudgeOptions{}, run);
    std::vector<AlertTransition> out;
    for (int64_t step = 0; step <= 3600; ++step) {
      StepSample sample = SampleAt(run, {}, step);
      // A jump within one batch, and a plateau: no test of a trend holds.
      if (step > 3400 && sample.has(SignalId::kWqSigma)) {
        sample.Add(SignalId::kWqSigma)[ill] *= sigma;
        sample.Add(SignalId::kLogitMax)[ill] = logit;
        sample.Add(SignalId::kTiedRowsBf16)[ill] = 0;
      }
      judge.Observe(sample, &out);
    }
    const AlertTransition* last = nullptr;
    for (const AlertTransition& t : out) last = t.rule == "drift" ? &t : last;
    return last == nullptr ? std::pair(-1, Severity::kNone) : std::pair(last->stage, last->severity);
  };
  EXPECT_EQ(worst(1, 100), (std::pair{1, Severity::kWarning}));
  EXPECT_EQ(worst(3, 100), (std::pair{1, Severity::kWarning}));
  EXPECT_EQ(worst(5, 100), (std::pair{3, Severity::kCritical}));
  EXPECT_EQ(worst(5, 2000), (std::pair{4, Severity::kCritical}));
  EXPECT_EQ(worst(1, 2000), (std::pair{4, Severity::kCritical}));
}

TEST(RunJudgeTest, HealthyRunHasNoAlerts) { EXPECT_TRUE(JudgeAll(SyntheticRun(), {.drift_from = -1}).empty()); }

// What the judge says of a drift from step 2000 on, of a loss that is lost and
// a gradient that is ten times its past from 3000 on, of a silent rank, of a
// replica that disagrees and of a NaN, without the tests of `off`.
std::set<std::string> RulesTold(BuiltinSet off) {
  JudgeOptions options;
  options.off = off;
  RunDescription run = SyntheticRun();
  run.reporters = 2;
  RunJudge judge(options, run);
  std::vector<AlertTransition> out;
  for (int64_t step = 0; step <= 5000; ++step) {
    StepSample sample = SampleAt(run, {}, step);
    sample.Add(SignalId::kStepSeconds)[0] = 1;
    sample.Add(SignalId::kHookSeconds)[0] = 0.1f;
    if (step >= 3000) {
      sample.Add(SignalId::kLoss)[0] += 3;
      sample.Add(SignalId::kGradNorm)[0] *= 50;
    }
    if (step == 4000) {
      sample.Add(SignalId::kSpreadSum)[3] = kNan;
      sample.disagreements.push_back({SignalId::kWqSigma, 1, 3, 3.0f, 3.5f});
      judge.OnSilence(1, 90, &out);
    }
    judge.Observe(sample, &out);
  }
  std::set<std::string> rules;
  for (const AlertTransition& t : out) {
    rules.insert(t.rule);
    // Signs that others lead, as "loss off its course since step 3,000".
    const size_t others = t.summary.find("Of the same illness: ");
    if (others == std::string::npos) continue;
    for (const char* const rule : {"drift", "loss", "gradient", "nonfinite", "disagreement"}) {
      if (t.summary.find(absl::StrCat(NounOf(rule), " since step"), others) != std::string::npos) rules.insert(rule);
    }
  }
  return rules;
}

TEST(RunJudgeTest, DisabledTestFindsNothingAndOthersGoOn) {
  const std::set<std::string> all = RulesTold({});
  ASSERT_EQ(all,
            (std::set<std::string>{"drift", "loss", "gradient", "nonfinite", "disagreement", "silent", "overhead"}));
  for (const Builtin test : {Builtin::kLoss, Builtin::kGradient, Builtin::kNonfinite, Builtin::kDisagreement,
                             Builtin::kSilent, Builtin::kOverhead}) {
    SCOPED_TRACE(NameOf(test));
    std::set<std::string> others = all;
    others.erase(NameOf(test));
    EXPECT_EQ(RulesTold({test}), others);
  }
  // The synthetic drift is seen by three tests; ties alone warn without them.
  BuiltinSet drift = {Builtin::kDriftGrowth, Builtin::kDriftLevel, Builtin::kDriftCommonMode};
  EXPECT_TRUE(RulesTold(drift).contains("ties"));
  EXPECT_FALSE(RulesTold(drift).contains("drift"));
  EXPECT_FALSE(RulesTold({Builtin::kDrift}).contains("drift"));
  drift.Add(Builtin::kTies);
  EXPECT_FALSE(RulesTold(drift).contains("ties"));
}

TEST(RunJudgeTest, GradientThatJumpsHasTheCauseThatMomentsTell) {
  // Cause and summary of the gradient's jump, wherever it stands.
  const auto told = [](float lag, BuiltinSet off) {
    JudgeOptions options;
    options.off = off;
    const RunDescription run = SyntheticRun();
    RunJudge judge(options, run);
    std::vector<AlertTransition> out;
    for (int64_t step = 0; step <= 1600; ++step) {
      StepSample sample = SampleAt(run, {.drift_from = -1}, step);
      if (step >= 1500) sample.Add(SignalId::kGradNorm)[0] *= 4;
      if (step % 10 == 0) sample.Add(SignalId::kMomentLagMax)[0] = step >= 1500 ? lag : 1.3f;
      judge.Observe(sample, &out);
    }
    const AlertTransition* const warning = First(out, "gradient", Severity::kWarning);
    return warning == nullptr ? AlertTransition() : *warning;
  };
  const BuiltinSet parameters{Builtin::kParameters};  // They see the lag themselves.
  const AlertTransition named = told(7.5f, parameters);
  EXPECT_EQ(named.cause, "second moment too slow");
  EXPECT_THAT(named.summary, testing::HasSubstr("7.5 times what they expect, since step 1,500"));
  EXPECT_EQ(told(1.3f, parameters).cause, "unknown") << "moments follow";
  EXPECT_EQ(told(7.5f, {Builtin::kParameters, Builtin::kLearning}).cause, "unknown") << "that is switched off";
}

TEST(BuiltinTest, NamesAreReadAsTheyAreWritten) {
  for (int i = 0; i < kBuiltins; ++i) {
    const auto test = static_cast<Builtin>(i);
    EXPECT_EQ(BuiltinNamed(NameOf(test)), test);
    EXPECT_STREQ(BuiltinNames()[static_cast<size_t>(i)], NameOf(test));
  }
  EXPECT_EQ(BuiltinNamed("drift.none"), std::nullopt);
  EXPECT_EQ(BuiltinNamed(""), std::nullopt);
}

TEST(RunJudgeTest, AmongManyHeadsOneMustStandOutFurther) {
  // A head that goes up and down between 8 and 11 times the median.
  const auto warned = [](int32_t layers, int32_t heads) {
    const RunDescription run = SyntheticRun(layers, heads);
    RunJudge judge(JudgeOptions{}, run);
    std::vector<AlertTransition> out;
    for (int64_t step = 0; step <= 4000; step += 10) {
      StepSample sample = SampleAt(run, {.drift_from = -1}, step);
      sample.Add(SignalId::kCommonModeSum)[3] =
          2048 * 2 * 9.5f * (1 + 0.15f * std::sin(static_cast<float>(step) / 400));
      judge.Observe(sample, &out);
    }
    return First(out, "drift", Severity::kWarning) != nullptr;
  };
  EXPECT_TRUE(warned(8, 12));
  EXPECT_FALSE(warned(32, 40));
}

TEST(RunJudgeTest, AfterRollbackHeadsAreJudgedBeforeTheOldStep) {
  const RunDescription run = SyntheticRun();
  RunJudge judge(JudgeOptions{}, run);
  std::vector<AlertTransition> out;
  const Plan healthy{.drift_from = -1};
  for (int64_t step = 0; step <= 9000; step += 10) judge.Observe(SampleAt(run, healthy, step), &out);
  ASSERT_TRUE(out.empty());
  for (int64_t step = 1000; step <= 5000; step += 10) judge.Observe(SampleAt(run, {.drift_from = 2000}, step, 1), &out);
  const AlertTransition* warning = First(out, "drift", Severity::kWarning);
  ASSERT_NE(warning, nullptr);
  EXPECT_LT(warning->step, 4000);
}

TEST(RunJudgeTest, SaveAndRestoreAtAnyStepChangeNothing) {
  const RunDescription run = SyntheticRun();
  const Plan plan{.last_step = 4000};
  const auto expected = TextsOf(JudgeAll(run, plan));
  ASSERT_FALSE(expected.empty());
  auto judge = std::make_unique<RunJudge>(JudgeOptions{}, run);
  std::vector<AlertTransition> out;
  for (int64_t step = 0; step <= plan.last_step; ++step) {
    judge->Observe(SampleAt(run, plan, step), &out);
    if (step % 37 != 0) continue;
    const std::string saved = judge->Save();
    auto restored = std::make_unique<RunJudge>(JudgeOptions{}, run);
    ASSERT_TRUE(restored->Restore(saved));
    EXPECT_EQ(restored->Save(), saved);
    judge = std::move(restored);
  }
  EXPECT_EQ(TextsOf(out), expected);
}

TEST(RunJudgeTest, NeverLooksAhead) {
  const auto whole = TextsOf(JudgeAll(SyntheticRun(), {.last_step = 4500}));
  for (const int64_t end : {2500, 3000, 3333, 4000}) {
    const auto part = TextsOf(JudgeAll(SyntheticRun(), {.last_step = end}));
    ASSERT_LE(part.size(), whole.size());
    EXPECT_TRUE(std::equal(part.begin(), part.end(), whole.begin()));
  }
}

TEST(RunJudgeTest, ADamagedStateIsRefusedAndLeavesAFreshJudge) {
  RunJudge judge(JudgeOptions{}, SyntheticRun());
  std::vector<AlertTransition> out;
  for (int64_t step = 0; step <= 3500; ++step) judge.Observe(SampleAt(SyntheticRun(), {}, step), &out);
  ASSERT_GE(judge.alerts_firing(), 1u);
  const std::string saved = judge.Save();
  RunJudge fresh(JudgeOptions{}, SyntheticRun());
  const std::string empty = fresh.Save();
  // Which keys were given stands in front: none is given twice.
  constexpr size_t kNumbersEnd = 92;
  EXPECT_FALSE(fresh.Restore(std::string_view(saved).substr(0, kNumbersEnd)));
  const std::string numbered = fresh.Save();
  EXPECT_FALSE(numbered == empty);
  for (size_t size = 0; size < saved.size(); size += 101) {
    EXPECT_FALSE(fresh.Restore(std::string_view(saved).substr(0, size)));
    EXPECT_TRUE(fresh.Save() == (size < kNumbersEnd ? empty : numbered)) << size;
    EXPECT_EQ(fresh.alerts_firing(), 0u);
  }
  EXPECT_FALSE(fresh.Restore(saved + "x"));
  RunJudge other(JudgeOptions{}, SyntheticRun(4, 8));
  EXPECT_FALSE(other.Restore(saved));
  EXPECT_TRUE(fresh.Restore(saved));
  EXPECT_EQ(fresh.alerts_firing(), judge.alerts_firing());
}

TEST(RunJudgeTest, OlderStateVersionsAreRead) {
  RunJudge judge(JudgeOptions{}, SyntheticRun());
  std::vector<AlertTransition> out;
  for (int64_t step = 0; step <= 3500; ++step) judge.Observe(SampleAt(SyntheticRun(), {}, step), &out);
  ASSERT_GE(judge.alerts_firing(), 1u);
  std::string saved = judge.Save();
  ASSERT_EQ(saved.substr(0, 4), "BWJJ");
  for (const char version : {'I', 'H', 'G', 'F', 'E', 'D', 'C', 'B', '9', '6', '4', '3', '2'}) {
    SCOPED_TRACE(version);
    saved[3] = version;
    // It ends before what came with later versions.
    RunJudge restored(JudgeOptions{}, SyntheticRun());
    int read = 0;
    for (size_t cut = 1; cut < saved.size(); ++cut) {
      read += restored.Restore(std::string_view(saved).substr(0, saved.size() - cut));
      if (read > 0) break;
    }
    ASSERT_EQ(read, 1);
    EXPECT_EQ(restored.alerts_firing(), judge.alerts_firing());
    EXPECT_EQ(restored.stage(), judge.stage());
  }
}

TEST(RunJudgeTest, OtherSamplingPeriodsSeeTheSameIllness) {
  for (const int64_t period : {1, 5, 20, 50}) {
    SCOPED_TRACE(period);
    const auto out = JudgeAll(SyntheticRun(), {.last_step = 6000, .period = period});
    const AlertTransition* warning = First(out, "drift", Severity::kWarning);
    ASSERT_NE(warning, nullptr);
    EXPECT_EQ(warning->strongest, kIll);
    EXPECT_LT(warning->step, 4100);
  }
}

TEST(RunJudgeTest, PastSamplesAreIgnoredUnlessOfAHigherAttempt) {
  const RunDescription run = SyntheticRun();
  const Plan plan{.drift_from = -1};
  RunJudge judge(JudgeOptions{}, run);
  std::vector<AlertTransition> out;
  for (int64_t step = 0; step <= 3000; ++step) judge.Observe(SampleAt(run, plan, step), &out);
  const std::string before = judge.Save();
  judge.Observe(SampleAt(run, plan, 3000), &out);
  judge.Observe(SampleAt(run, plan, 10), &out);
  EXPECT_EQ(judge.Save(), before);
  // Back to 2000 in a new attempt, where the drift now begins.
  for (int64_t step = 2000; step <= 5000; ++step) judge.Observe(SampleAt(run, {}, step, 1), &out);
  const AlertTransition* warning = First(out, "drift", Severity::kWarning);
  ASSERT_NE(warning, nullptr);
  EXPECT_EQ(warning->attempt, 1u);
  // The old attempt's late frames say nothing any more.
  const std::string after = judge.Save();
  judge.Observe(SampleAt(run, plan, 9000, 0), &out);
  EXPECT_EQ(judge.Save(), after);
}

TEST(RunJudgeTest, HolesAndNanInSignalsDoNotHideTheDrift) {
  const RunDescription run = SyntheticRun();
  RunJudge judge(JudgeOptions{}, run);
  std::vector<AlertTransition> out;
  for (int64_t step = 0; step <= 5000; ++step) {
    StepSample sample = SampleAt(run, {}, step);
    if (sample.has(SignalId::kSpreadSum)) {
      sample.Add(SignalId::kSpreadSum)[static_cast<size_t>(step / 10 % 16)] = NotMeasured();
      if (step == 1500) sample.Add(SignalId::kSpreadSum)[9] = kNan;
    }
    if (step > 2600 && step < 2700) continue;
    judge.Observe(sample, &out);
  }
  ASSERT_NE(First(out, "drift", Severity::kWarning), nullptr);
  EXPECT_EQ(First(out, "drift", Severity::kWarning)->strongest, kIll);
  const AlertTransition* nonfinite = First(out, "nonfinite", Severity::kWarning);
  ASSERT_NE(nonfinite, nullptr);
  EXPECT_EQ(nonfinite->step, 1500);
  EXPECT_EQ(nonfinite->strongest, (Head{2, 1}));
}

TEST(RunJudgeTest, ALossThatIsNoNumberIsCriticalAtOnce) {
  RunJudge judge(JudgeOptions{}, SyntheticRun());
  std::vector<AlertTransition> out;
  StepSample sample = SampleAt(SyntheticRun(), {}, 3);
  sample.Add(SignalId::kLoss)[0] = kNan;
  judge.Observe(sample, &out);
  ASSERT_EQ(out.size(), 1u);
  EXPECT_EQ(out[0].rule, "nonfinite");
  EXPECT_EQ(out[0].severity, Severity::kCritical);
}

TEST(RunJudgeTest, ExcessNonfiniteValuesAreCounted) {
  RunDescription run = SyntheticRun();
  run.layout = {128, 128, 128, 64, 0};
  RunJudge judge(JudgeOptions{}, run);
  std::vector<AlertTransition> out;
  StepSample sample;
  sample.Reset(run.layout);
  sample.step = 0;
  sample.Add(SignalId::kGradNorm)[0] = 1;  // The weights of step 1 are finite.
  judge.Observe(sample, &out);
  sample.Reset(run.layout);
  sample.step = 1;
  for (const SignalId signal : {SignalId::kCommonModeSum, SignalId::kSpreadSum}) {
    std::ranges::fill(sample.Add(signal), std::numeric_limits<float>::infinity());
  }
  judge.Observe(sample, &out);
  ASSERT_EQ(out.size(), 1u);
  EXPECT_EQ(out[0].strongest, (Head{0, 0}));
  EXPECT_EQ(out[0].heads_total, 128u);
  EXPECT_EQ(out[0].evidence[0].text, "32512 further values are not finite");
}

// The raw keys of head kIll drift on under centring; what becomes of its W_Q and scores.
StepSample CentredAt(const RunDescription& run, int64_t step, double sigma, double logit) {
  StepSample sample = SampleAt(run, {}, step);
  if (step % 10 != 0) return sample;
  const auto at = static_cast<size_t>(kIll.layer * run.layout.heads + kIll.head);
  sample.Add(SignalId::kWqSigma)[at] = static_cast<float>(sigma);
  sample.Add(SignalId::kLogitMax)[at] = static_cast<float>(logit);
  return sample;
}

TEST(RunJudgeTest, CentringKeepsAlertAndIgnoresRawKeyDrift) {
  for (const bool by_hello : {false, true}) {
    const RunDescription run = SyntheticRun();
    RunJudge judge(JudgeOptions{}, run);
    std::vector<AlertTransition> out;
    for (int64_t step = 0; step < 3300; ++step) judge.Observe(SampleAt(run, {}, step), &out);
    ASSERT_EQ(judge.alerts_firing(), 1u);
    const AlertTransition before = out.back();
    const int32_t stage = judge.stage();
    RunDescription centred = run;
    centred.attention.centred = true;
    if (by_hello) {
      judge.OnHello(centred, &out);
    } else {
      judge.OnEvent({.step = 3300, .kind = EventKind::kCentringOn}, &out);
    }
    const auto repaired = static_cast<int64_t>(out.size());
    EXPECT_FALSE(judge.eta().known) << "what grew before says nothing of what is left";
    // The weights stand still: that shows that it is over, after as long as it must.
    for (int64_t step = 3300; step <= 5000; ++step) judge.Observe(CentredAt(run, step, 3.4, 30), &out);
    const AlertTransition& marked = out[static_cast<size_t>(repaired) - 1];
    EXPECT_EQ(marked.state, AlertState::kFiring);
    EXPECT_EQ(marked.key, before.key);
    EXPECT_EQ(marked.severity, before.severity);
    EXPECT_EQ(marked.stage, stage);
    EXPECT_EQ(marked.cause, before.cause);
    EXPECT_EQ(marked.first_step, before.first_step);
    ASSERT_EQ(static_cast<int64_t>(out.size()), repaired + 1);
    EXPECT_EQ(out.back().state, AlertState::kResolved);
    EXPECT_GE(out.back().step, 4300);
    EXPECT_EQ(judge.alerts_firing(), 0u);
    EXPECT_EQ(judge.stage(), 0);
  }
}

TEST(RunJudgeTest, HeadGrowingUnderCentringKeepsOneAlert) {
  const struct {
    const char* what;
    double sigma_doubles;
    double logit;
    AlertState ends;
  } cases[] = {{"weights grow", 1500, 30, AlertState::kFiring},
               {"scores stay large", 1e9, 5000, AlertState::kFiring},
               {"both stand still", 1e9, 30, AlertState::kResolved}};
  for (const auto& c : cases) {
    SCOPED_TRACE(c.what);
    const RunDescription run = SyntheticRun();
    RunJudge judge(JudgeOptions{}, run);
    std::vector<AlertTransition> out;
    for (int64_t step = 0; step < 3300; ++step) judge.Observe(SampleAt(run, {}, step), &out);
    ASSERT_EQ(judge.alerts_firing(), 1u);
    const AlertTransition before = out.back();
    judge.OnEvent({.step = 3300, .kind = EventKind::kCentringOn}, &out);
    const size_t repaired = out.size();
    for (int64_t step = 3300; step <= 7000; ++step) {
      const double sigma = 4 * std::exp2(static_cast<double>(step - 3300) / c.sigma_doubles);
      judge.Observe(CentredAt(run, step, sigma, c.logit), &out);
      if (step % 500 != 0) continue;
      const std::string saved = judge.Save();
      ASSERT_TRUE(judge.Restore(saved));
    }
    Severity severity = before.severity;
    for (size_t i = repaired; i < out.size(); ++i) {
      EXPECT_EQ(out[i].key, before.key) << out[i].summary;
      EXPECT_EQ(out[i].first_step, before.first_step);
      EXPECT_GE(out[i].severity, severity);
      if (out[i].state == AlertState::kFiring) {
        EXPECT_EQ(out[i].cause, before.cause);
      }
      severity = out[i].severity;
    }
    EXPECT_EQ(out.back().state, c.ends) << out.back().summary;
    EXPECT_EQ(judge.alerts_firing(), c.ends == AlertState::kFiring ? 1u : 0u);
  }
}

TEST(RunJudgeTest, RepairedAlertStaysWithoutEvidenceOfItsEnd) {
  const RunDescription run = SyntheticRun();
  RunJudge judge(JudgeOptions{}, run);
  std::vector<AlertTransition> out;
  const auto blind = [&](int64_t step) {
    const StepSample whole = SampleAt(run, {}, step);
    StepSample sample;
    sample.Reset(run.layout);
    sample.step = step;
    for (const SignalId id : whole.signals()) {
      if (id == SignalId::kWqSigma || id == SignalId::kLogitMax) continue;
      std::ranges::copy(whole.matrix(id), sample.Add(id).begin());
    }
    return sample;
  };
  for (int64_t step = 0; step <= 9000; ++step) {
    if (step == 3300) judge.OnEvent({.step = step, .kind = EventKind::kCentringOn}, &out);
    judge.Observe(blind(step), &out);
  }
  EXPECT_EQ(judge.alerts_firing(), 1u);
  // Raw again, and well: the rules judge as before.
  judge.OnEvent({.step = 9001, .kind = EventKind::kCentringOff}, &out);
  for (int64_t step = 9001; step <= 11000; ++step) judge.Observe(SampleAt(run, {.drift_from = -1}, step), &out);
  EXPECT_EQ(judge.alerts_firing(), 0u);
}

TEST(RunJudgeTest, AfterKernelChangeAlertEndsOnlyAfterRulesRelearn) {
  const RunDescription run = SyntheticRun();
  RunJudge judge(JudgeOptions{}, run);
  std::vector<AlertTransition> out;
  for (int64_t step = 0; step <= 4500; ++step) judge.Observe(SampleAt(run, {}, step), &out);
  ASSERT_EQ(judge.alerts_firing(), 1u);
  judge.OnEvent({.step = 4501, .kind = EventKind::kAttentionMode, .text = "hp"}, &out);
  const JudgeOptions options;
  const int64_t blind = int64_t{options.trend.window_batches_min} * options.trend.batch_steps;
  int64_t step = 4501;
  for (; judge.alerts_firing() > 0; ++step) {
    ASSERT_LT(step, 8000);
    judge.Observe(SampleAt(run, {.drift_from = -1}, step), &out);
  }
  EXPECT_GE(step, 4501 + blind + options.alert.resolve_steps - 2 * options.trend.batch_steps);
}

TEST(RunJudgeTest, AlertKeysStayUniqueWhenStateIsUnreadable) {
  const RunDescription run = SyntheticRun();
  RunJudge judge(JudgeOptions{}, run);
  std::vector<AlertTransition> out;
  for (int64_t step = 0; step <= 4000; ++step) judge.Observe(SampleAt(run, {}, step), &out);
  ASSERT_FALSE(out.empty());
  const std::string key = out.front().key;
  const std::string saved = judge.Save();
  RunJudge fresh(JudgeOptions{}, run);
  EXPECT_FALSE(fresh.Restore(saved.substr(0, saved.size() / 2)));
  out.clear();
  for (int64_t step = 0; step <= 4000; ++step) fresh.Observe(SampleAt(run, {}, step), &out);
  ASSERT_FALSE(out.empty());
  EXPECT_NE(out.front().key, key);
}

TEST(RunJudgeTest, RunKeepsItsAlertsStageUntilItResolves) {
  const RunDescription run = SyntheticRun();
  RunJudge judge(JudgeOptions{}, run);
  std::vector<AlertTransition> out;
  int64_t step = 0;
  for (; step <= 4500; ++step) judge.Observe(SampleAt(run, {}, step), &out);
  ASSERT_GE(out.back().stage, 2);
  EXPECT_EQ(judge.stage(), out.back().stage);
  // Well again: the head's stage goes first, the alert's 1,000 steps later.
  const Plan well{.drift_from = -1};
  for (; judge.stage_of(kIll.layer, kIll.head) > 0; ++step) {
    ASSERT_LT(step, 8000);
    judge.Observe(SampleAt(run, well, step), &out);
  }
  ASSERT_EQ(judge.alerts_firing(), 1u);
  EXPECT_EQ(judge.stage(), out.back().stage);
  for (; judge.alerts_firing() > 0; ++step) {
    ASSERT_LT(step, 12000);
    judge.Observe(SampleAt(run, well, step), &out);
  }
  EXPECT_EQ(judge.stage(), 0);
}

TEST(RunJudgeTest, ScoresInFp32DoNotDriftByRounding) {
  RunDescription run = SyntheticRun();
  run.attention.score_dtype = std::string("fp32");
  EXPECT_EQ(First(JudgeAll(run, {}), "drift", Severity::kInfo), nullptr);
}

TEST(RunJudgeTest, LossSpikeIsInfoAndLostLossIsCritical) {
  const RunDescription run = SyntheticRun();
  const auto judged = [&](int64_t end_of_spike) {
    RunJudge judge(JudgeOptions{}, run);
    std::vector<AlertTransition> out;
    for (int64_t step = 0; step <= 5000; ++step) {
      StepSample sample = SampleAt(run, {.drift_from = -1}, step);
      if (step >= 3000 && step < end_of_spike) sample.Add(SignalId::kLoss)[0] += 3;
      judge.Observe(sample, &out);
    }
    return out;
  };
  const auto spike = judged(3006);
  EXPECT_EQ(First(spike, "loss", Severity::kWarning), nullptr);
  EXPECT_NE(First(spike, "loss", Severity::kInfo), nullptr);
  const auto lost = judged(5001);
  const AlertTransition* warning = First(lost, "loss", Severity::kWarning);
  const AlertTransition* critical = First(lost, "loss", Severity::kCritical);
  ASSERT_TRUE(warning != nullptr && critical != nullptr);
  EXPECT_NEAR(static_cast<double>(warning->step), 3008, 2);
  EXPECT_NEAR(static_cast<double>(critical->step), 3600, 60);
  EXPECT_EQ(critical->stage, 5);
}

TEST(RunJudgeTest, AnAnnouncedJumpOfTheLossIsExcused) {
  const RunDescription run = SyntheticRun();
  RunJudge judge(JudgeOptions{}, run);
  std::vector<AlertTransition> out;
  for (int64_t step = 0; step <= 5000; ++step) {
    StepSample sample = SampleAt(run, {.drift_from = -1}, step);
    if (step >= 3000) sample.Add(SignalId::kLoss)[0] += 3;
    if (step == 3000) judge.OnEvent({.step = step, .kind = EventKind::kData}, &out);
    judge.Observe(sample, &out);
  }
  EXPECT_TRUE(out.empty());
}

TEST(RunJudgeTest, ReplicasThatDisagreeAreCritical) {
  RunJudge judge(JudgeOptions{}, SyntheticRun());
  std::vector<AlertTransition> out;
  StepSample sample = SampleAt(SyntheticRun(), {}, 50);
  sample.disagreements.push_back({SignalId::kWqSigma, 1, 3, 3.0f, 3.5f});
  judge.Observe(sample, &out);
  ASSERT_EQ(out.size(), 1u);
  EXPECT_EQ(out[0].rule, "disagreement");
  EXPECT_EQ(out[0].severity, Severity::kCritical);
  EXPECT_EQ(out[0].strongest, (Head{1, 3}));
  EXPECT_EQ(out[0].cause, "replicas apart");
}

TEST(RunJudgeTest, TensorsWhoseCopiesDifferAreNamedWithTheirRanks) {
  RunRows rows;
  rows.tensors = RowNames({"embed", "mlp"});
  std::vector<double> ranks;
  const auto summary = [&](StepSample::Disagreement found) {
    RunJudge judge(JudgeOptions{}, SyntheticRun());
    judge.SetRows(std::make_shared<const RunRows>(rows));
    StepSample sample = SampleAt(SyntheticRun(), {}, 50);
    found.signal = SignalId::kReplicaSumLow;
    found.layer = 1;
    found.ranks_total = static_cast<uint32_t>(found.ranks.size());
    sample.disagreements.push_back(found);
    std::vector<AlertTransition> out;
    judge.Observe(sample, &out);
    EXPECT_EQ(out.size(), 1u);
    ranks.clear();
    for (const Evidence& piece : out[0].evidence) {
      if (piece.signal == "differing_rank") ranks.push_back(piece.value);
    }
    return out[0].summary;
  };
  const std::string copies = "synthetic: the copies of mlp differ at step 50: ";
  EXPECT_EQ(summary({.first_rank = 2, .ranks = {5}, .reporters = 2}), copies + "rank 2 differs from rank 5.");
  EXPECT_THAT(ranks, testing::ElementsAre(2, 5));
  EXPECT_EQ(summary({.first_rank = 2, .ranks = {5}, .reporters = 4}), copies + "rank 5 differs from 3 others.");
  EXPECT_THAT(ranks, testing::ElementsAre(5));
  EXPECT_EQ(summary({.first_rank = 2, .ranks = {0, 5}, .reporters = 3}), copies + "rank 2 differs from the 2 others.");
  EXPECT_THAT(ranks, testing::ElementsAre(2));
  EXPECT_EQ(summary({.first_rank = 2, .ranks = {0, 5}, .reporters = 4}), copies + "ranks 0, 5 differ from 2 others.");
  EXPECT_THAT(ranks, testing::ElementsAre(0, 5));
}

TEST(RunJudgeTest, DisagreementsThatAreLeftOutAreTold) {
  RunJudge judge(JudgeOptions{}, SyntheticRun());
  std::vector<AlertTransition> out;
  StepSample sample = SampleAt(SyntheticRun(), {}, 50);
  sample.disagreements = {{SignalId::kWqSigma, 0, 1, 3.0f, 3.5f}, {SignalId::kWqSigma, 1, 3, 3.0f, 4.5f}};
  sample.disagreements_left_out = 7;
  judge.Observe(sample, &out);
  ASSERT_EQ(out.size(), 1u);
  EXPECT_EQ(out[0].strongest, (Head{1, 3}));
  EXPECT_EQ(out[0].evidence[0].text, "7 values of further heads differ, too");
}

TEST(RunJudgeTest, SilenceIsToldAndEnds) {
  RunDescription run = SyntheticRun();
  run.reporters = 4;
  RunJudge judge(JudgeOptions{}, run);
  std::vector<AlertTransition> out;
  judge.OnSilence(1, 90, &out);
  judge.OnSilence(1, 120, &out);
  ASSERT_EQ(out.size(), 1u);
  EXPECT_EQ(out[0].rule, "silent");
  EXPECT_EQ(out[0].severity, Severity::kWarning);
  EXPECT_THAT(out[0].evidence[0].text, testing::HasSubstr("1 of 4"));
  judge.OnSilence(4, 200, &out);
  ASSERT_EQ(out.size(), 2u);
  EXPECT_EQ(out[1].severity, Severity::kCritical);
  judge.OnSilence(0, 0, &out);
  ASSERT_EQ(out.size(), 3u);
  EXPECT_EQ(out[2].state, AlertState::kResolved);
}

TEST(RunJudgeTest, AHookThatCostsTooMuchForLongIsTold) {
  const JudgeOptions options;
  RunJudge judge(options, SyntheticRun());
  std::vector<AlertTransition> out;
  for (int64_t step = 0; step <= options.alert.hook_overhead_steps; ++step) {
    EXPECT_TRUE(out.empty());
    StepSample sample;
    sample.Reset(SyntheticRun().layout);
    sample.step = step;
    sample.Add(SignalId::kStepSeconds)[0] = 1;
    sample.Add(SignalId::kHookSeconds)[0] = 0.03f;
    judge.Observe(sample, &out);
  }
  ASSERT_EQ(out.size(), 1u);
  EXPECT_EQ(out[0].rule, "overhead");
}

TEST(RunJudgeTest, LayoutsFromOneHeadToTheLargestAreJudged) {
  for (const auto& [layers, heads] : {std::pair{1, 1}, std::pair{2, 1}, std::pair{512, 16}}) {
    const RunDescription run = SyntheticRun(layers, heads);
    RunJudge judge(JudgeOptions{}, run);
    std::vector<AlertTransition> out;
    for (int64_t step = 0; step <= 2000; step += 50)
      judge.Observe(SampleAt(run, {.period = 50, .drift_from = -1}, step), &out);
    EXPECT_TRUE(out.empty());
    EXPECT_EQ(judge.stage_of(layers - 1, heads - 1), 0);
    EXPECT_EQ(judge.stage_of(layers, 0), 0);
    // 4 windows of 64 means and little else a head.
    EXPECT_LT(judge.memory_bytes(), static_cast<size_t>(layers) * static_cast<size_t>(heads) * 1400 + 32768);
  }
}

// A healthy step whose kernel is right, but for what `spoil` does.
template <class Spoil>
StepSample LawSampleAt(const RunDescription& run, int64_t step, const Spoil& spoil) {
  StepSample sample = SampleAt(run, {.drift_from = -1}, step);
  AddHealthyLaws(&sample);
  spoil(&sample);
  return sample;
}
void WrongDq(StepSample* sample) { sample->Add(SignalId::kLawA3)[2 * 4 + 1] = -200; }

TEST(RunJudgeTest, AWrongKernelIsToldInItsFirstSample) {
  RunDescription run = SyntheticRun();
  run.attention.kernel = "flash";
  RunJudge judge(JudgeOptions{}, run);
  std::vector<AlertTransition> out;
  judge.Observe(LawSampleAt(run, 0, WrongDq), &out);
  ASSERT_EQ(out.size(), 1u);
  EXPECT_EQ(out[0].rule, "kernel");
  EXPECT_EQ(out[0].key, "i1");
  EXPECT_EQ(out[0].severity, Severity::kCritical);
  EXPECT_EQ(out[0].cause, "faulty kernel");
  EXPECT_EQ(out[0].strongest, kIll);
  EXPECT_EQ(out[0].heads_total, 1u);
  EXPECT_THAT(out[0].summary,
              testing::HasSubstr("kernel (flash) is wrong in layer 2 head 1: law A3 is broken by 100 standard"));
  EXPECT_THAT(out[0].advice, testing::StartsWith("Switch to another kernel of attention."));
  EXPECT_EQ(judge.stage(), 0);
  // Once, however long it goes on; and it ends behind the last evidence.
  int64_t step = 10;
  for (; step <= 500; step += 10) judge.Observe(LawSampleAt(run, step, WrongDq), &out);
  EXPECT_EQ(out.size(), 1u);
  // Samples without its sums are no sign that it is right.  That they no longer come is told by itself.
  for (; step <= 2000; step += 10) judge.Observe(SampleAt(run, {.drift_from = -1}, step), &out);
  ASSERT_EQ(out.size(), 2u);
  EXPECT_EQ(out[1].rule, "silent");
  EXPECT_EQ(out[1].severity, Severity::kInfo);
  judge.Observe(LawSampleAt(run, step, [](StepSample*) {}), &out);
  ASSERT_EQ(out.size(), 4u);
  for (const size_t i : {2, 3}) EXPECT_EQ(out[i].state, AlertState::kResolved);
}

TEST(RunJudgeTest, TheTensorIsToldOnceTheShadowCheckKnowsIt) {
  const RunDescription run = SyntheticRun();
  auto judge = std::make_unique<RunJudge>(JudgeOptions{}, run);
  std::vector<AlertTransition> out;
  judge->Observe(LawSampleAt(run, 0, WrongDq), &out);
  ASSERT_EQ(out.size(), 1u);
  EXPECT_THAT(out[0].summary, testing::HasSubstr("leaves dQ or dK"));
  const auto compared = [](StepSample* sample) {
    // Another layer is further off, but of it only a set is known.
    sample->Add(SignalId::kLawA3)[0] = 4000;
    WrongDq(sample);
    sample->Add(LawSignal(SignalId::kShadowDqDot, 3))[2 * 4 + 1] = 3 * kShadowRows * 400;
  };
  judge->Observe(LawSampleAt(run, 10, compared), &out);
  ASSERT_EQ(out.size(), 2u);
  EXPECT_EQ(out[1].key, out[0].key);
  EXPECT_EQ(out[1].k, out[0].k + 1);
  EXPECT_EQ(out[1].strongest, kIll);
  EXPECT_THAT(out[1].summary, testing::HasSubstr("wrong in layer 2 head 1: dQ is wrong: 400 times as far"));
  EXPECT_THAT(out[1].summary, testing::HasSubstr("also in layer 0 head 0"));
  // Once, also over a restart.
  const std::string saved = judge->Save();
  judge = std::make_unique<RunJudge>(JudgeOptions{}, run);
  ASSERT_TRUE(judge->Restore(saved));
  judge->Observe(LawSampleAt(run, 20, WrongDq), &out);
  judge->Observe(LawSampleAt(run, 30, compared), &out);
  EXPECT_EQ(out.size(), 2u);
}

TEST(RunJudgeTest, AWrongKernelIsSilentWhereTheRuleIsOff) {
  JudgeOptions options;
  options.off = {Builtin::kKernel};
  const RunDescription run = SyntheticRun();
  RunJudge judge(options, run);
  std::vector<AlertTransition> out;
  judge.Observe(LawSampleAt(run, 10, WrongDq), &out);
  EXPECT_TRUE(out.empty());
  judge.SetOptions(JudgeOptions{}, &out);
  judge.Observe(LawSampleAt(run, 20, WrongDq), &out);
  ASSERT_EQ(out.size(), 1u);
  judge.SetOptions(options, &out);
  ASSERT_EQ(out.size(), 2u);
  EXPECT_THAT(out[1].summary, testing::HasSubstr("the rule was switched off"));
}

TEST(RunJudgeTest, AKernelsAlertAndItsBudgetSurviveARestart) {
  const RunDescription run = SyntheticRun();
  RunJudge judge(JudgeOptions{}, run);
  std::vector<AlertTransition> out;
  judge.Observe(SampleAt(run, {}, 0), &out);
  for (int64_t step = 10; step <= 3000; step += 10) judge.Observe(LawSampleAt(run, step, [](StepSample*) {}), &out);
  judge.Observe(LawSampleAt(run, 3010, WrongDq), &out);
  ASSERT_EQ(out.size(), 1u);
  const std::string saved = judge.Save();
  RunJudge restored(JudgeOptions{}, run);
  ASSERT_TRUE(restored.Restore(saved));
  EXPECT_EQ(restored.Save(), saved);
  EXPECT_EQ(restored.alerts_firing(), 1u);
  // Beyond the first sample's limit, within that of the 303rd: a fresh judge would tell it.
  const auto near = [](StepSample* sample) { sample->Add(SignalId::kLawA3)[0] = 2 * 6; };
  std::vector<AlertTransition> of_fresh, of_restored;
  RunJudge fresh(JudgeOptions{}, run);
  fresh.Observe(LawSampleAt(run, 3020, near), &of_fresh);
  EXPECT_EQ(of_fresh.size(), 1u);
  JudgeOptions quick;
  quick.alert.resolve_steps = 10;
  quick.alert.cooldown_steps = 0;
  restored.SetOptions(quick, &of_restored);
  restored.Observe(LawSampleAt(run, 3030, near), &of_restored);
  ASSERT_EQ(of_restored.size(), 1u);
  EXPECT_EQ(of_restored[0].state, AlertState::kResolved);
  restored.Observe(LawSampleAt(run, 3040, WrongDq), &of_restored);
  ASSERT_EQ(of_restored.size(), 2u);
  EXPECT_EQ(of_restored[1].key, "i2");
}

// A healthy step in which two layers are asked: `z` of the first one, of the second one 1.
StepSample LayerSampleAt(const RunDescription& run, int64_t step, float z) {
  RunDescription grown = run;
  grown.layout.modules = 2;
  StepSample sample = SampleAt(grown, {.drift_from = -1}, step);
  sample.Add(SignalId::kLawDifference)[0] = z;
  sample.Add(SignalId::kLawVariance)[0] = 1;
  sample.Add(SignalId::kLawDifference)[1] = 1;
  sample.Add(SignalId::kLawVariance)[1] = 1;
  return sample;
}
std::shared_ptr<const RunRows> TwoLayers() {
  auto rows = std::make_shared<RunRows>();
  rows->modules.Add("model.up_proj dx=dW");
  rows->modules.Add("lm_head dW:classes");
  return rows;
}

TEST(RunJudgeTest, AWrongLayerIsToldUntilItIsFoundRight) {
  const RunDescription run = SyntheticRun();
  RunJudge judge(JudgeOptions{}, run);
  judge.SetRows(TwoLayers());
  std::vector<AlertTransition> out;
  judge.Observe(LayerSampleAt(run, 0, 100), &out);
  ASSERT_EQ(out.size(), 1u);
  EXPECT_EQ(out[0].rule, "arithmetic");
  EXPECT_EQ(out[0].key, "j1");
  EXPECT_EQ(out[0].severity, Severity::kCritical);
  EXPECT_EQ(out[0].cause, "faulty kernel");
  EXPECT_EQ(out[0].strongest, (Head{-1, -1}));
  EXPECT_THAT(out[0].summary,
              testing::HasSubstr("arithmetic is wrong in model.up_proj: dx or dW: law dx=dW is broken"));
  EXPECT_THAT(out[0].advice, testing::StartsWith("Test the GPUs, and the kernel of the named layer."));
  ASSERT_EQ(out[0].evidence.size(), 1u);
  EXPECT_EQ(out[0].evidence[0].signal, "law_z");
  EXPECT_EQ(out[0].evidence[0].text, "model.up_proj dx=dW");
  EXPECT_EQ(judge.stage(), 0);
  // Once, however long it goes on.  While others have their turn nothing is known of it.
  int64_t step = 10;
  for (; step <= 500; step += 10) judge.Observe(LayerSampleAt(run, step, 100), &out);
  for (; step <= 3000; step += 10) judge.Observe(LayerSampleAt(run, step, NotMeasured()), &out);
  EXPECT_EQ(out.size(), 1u);
  judge.Observe(LayerSampleAt(run, step, 0), &out);
  ASSERT_EQ(out.size(), 2u);
  EXPECT_EQ(out[1].state, AlertState::kResolved);
}

TEST(RunJudgeTest, AWrongLayerIsSilentWhereTheRuleIsOff) {
  JudgeOptions options;
  options.off = {Builtin::kArithmetic};
  const RunDescription run = SyntheticRun();
  RunJudge judge(options, run);
  std::vector<AlertTransition> out;
  judge.Observe(LayerSampleAt(run, 10, 100), &out);
  EXPECT_TRUE(out.empty());
  judge.SetOptions(JudgeOptions{}, &out);
  judge.Observe(LayerSampleAt(run, 20, 100), &out);
  ASSERT_EQ(out.size(), 1u);
  judge.SetOptions(options, &out);
  ASSERT_EQ(out.size(), 2u);
  EXPECT_THAT(out[1].summary, testing::HasSubstr("the rule was switched off"));
}

TEST(RunJudgeTest, AWrongLayersAlertAndItsBudgetSurviveARestart) {
  const RunDescription run = SyntheticRun();
  JudgeOptions options;
  options.arithmetic.z_min = 0;
  RunJudge judge(options, run);
  std::vector<AlertTransition> out;
  for (int64_t step = 0; step <= 3000; step += 10) judge.Observe(LayerSampleAt(run, step, 1), &out);
  judge.Observe(LayerSampleAt(run, 3010, 100), &out);
  ASSERT_EQ(out.size(), 1u);
  const std::string saved = judge.Save();
  RunJudge restored(options, run);
  restored.SetRows(TwoLayers());
  ASSERT_TRUE(restored.Restore(saved));
  EXPECT_EQ(restored.Save(), saved);
  EXPECT_EQ(restored.alerts_firing(), 1u);
  // The layer is still not known to be right.
  std::vector<AlertTransition> later;
  int64_t step = 3020;
  for (; step <= 5000; step += 10) restored.Observe(LayerSampleAt(run, step, NotMeasured()), &later);
  EXPECT_TRUE(later.empty());
  // Beyond a first sample's limit, within that of a later one: a fresh judge would tell it.
  std::vector<AlertTransition> of_fresh;
  RunJudge fresh(options, run);
  fresh.Observe(LayerSampleAt(run, step, 5.5f), &of_fresh);
  EXPECT_EQ(of_fresh.size(), 1u);
  restored.Observe(LayerSampleAt(run, step, 5.5f), &later);
  ASSERT_EQ(later.size(), 1u);
  EXPECT_EQ(later[0].state, AlertState::kResolved);
  // What was named before it was restored keeps its name.
  restored.Observe(LayerSampleAt(run, step + 1000, 100), &later);
  ASSERT_EQ(later.size(), 2u);
  EXPECT_THAT(later[1].summary, testing::HasSubstr("wrong in model.up_proj: "));
}

TEST(RunJudgeTest, ANewAttemptAsksItsLayersAfresh) {
  RunDescription run = SyntheticRun();
  RunJudge judge(JudgeOptions{}, run);
  std::vector<AlertTransition> out;
  judge.Observe(LayerSampleAt(run, 10, 100), &out);
  ASSERT_EQ(out.size(), 1u);
  StepSample sample = LayerSampleAt(run, 2000, NotMeasured());
  sample.attempt = 1;
  judge.Observe(sample, &out);
  ASSERT_EQ(out.size(), 2u);
  EXPECT_EQ(out[1].state, AlertState::kResolved);
}

// A healthy step with four parameters; the first `still` of them do not move.
StepSample TensorSampleAt(const RunDescription& run, int64_t step, size_t still) {
  RunDescription grown = run;
  grown.layout.tensors = 4;
  StepSample sample = SampleAt(grown, {.drift_from = -1}, step);
  for (const SignalId signal : {SignalId::kTensorMoved, SignalId::kTensorGradMax, SignalId::kTensorGradSumsq,
                                SignalId::kTensorElements, SignalId::kTensorWeightSumsq}) {
    for (float& value : sample.Add(signal)) value = 1;
  }
  for (size_t i = 0; i < still; ++i) sample.Add(SignalId::kTensorMoved)[i] = 0;
  return sample;
}
std::shared_ptr<const RunRows> FourTensors() {
  auto rows = std::make_shared<RunRows>();
  for (const char* const name : {"embed", "up", "down", "lm_head"}) rows->tensors.Add(name);
  return rows;
}

TEST(RunJudgeTest, AFrozenParameterIsToldUntilItMoves) {
  const RunDescription run = SyntheticRun();
  RunJudge judge(JudgeOptions{}, run);
  judge.SetRows(FourTensors());
  std::vector<AlertTransition> out;
  judge.Observe(TensorSampleAt(run, 0, 1), &out);
  EXPECT_TRUE(out.empty());
  judge.Observe(TensorSampleAt(run, 10, 1), &out);
  ASSERT_EQ(out.size(), 1u);
  EXPECT_EQ(out[0].rule, "frozen");
  EXPECT_EQ(out[0].key, "l1");
  EXPECT_EQ(out[0].severity, Severity::kWarning);
  EXPECT_EQ(out[0].cause, "optimizer does not move");
  EXPECT_EQ(out[0].first_step, 0);
  EXPECT_THAT(out[0].summary, testing::HasSubstr("1 parameter has a gradient and does not move: embed; 3 others"));
  EXPECT_THAT(out[0].advice, testing::StartsWith("Look at the optimizer's groups and their learning rates."));
  ASSERT_EQ(out[0].evidence.size(), 2u);
  EXPECT_EQ(out[0].evidence[0].text, "embed");
  EXPECT_EQ(judge.stage(), 0);
  // A restart tells nothing twice, and ends it in its time.
  const std::string saved = judge.Save();
  RunJudge restored(JudgeOptions{}, run);
  restored.SetRows(FourTensors());
  ASSERT_TRUE(restored.Restore(saved));
  EXPECT_EQ(restored.Save(), saved);
  int64_t step = 20;
  for (; step <= 1000; step += 10) restored.Observe(TensorSampleAt(run, step, 0), &out);
  EXPECT_EQ(out.size(), 1u);
  restored.Observe(TensorSampleAt(run, step, 0), &out);
  ASSERT_EQ(out.size(), 2u);
  EXPECT_EQ(out[1].state, AlertState::kResolved);
}

TEST(RunJudgeTest, AFrozenParameterIsSilentWhereTheRuleIsOff) {
  JudgeOptions options;
  options.off = {Builtin::kFrozen};
  const RunDescription run = SyntheticRun();
  RunJudge judge(options, run);
  std::vector<AlertTransition> out;
  for (int64_t step = 0; step < 100; step += 10) judge.Observe(TensorSampleAt(run, step, 1), &out);
  EXPECT_TRUE(out.empty());
  judge.SetOptions(JudgeOptions{}, &out);
  judge.Observe(TensorSampleAt(run, 100, 1), &out);
  ASSERT_EQ(out.size(), 1u);
  judge.SetOptions(options, &out);
  ASSERT_EQ(out.size(), 2u);
  EXPECT_THAT(out[1].summary, testing::HasSubstr("the rule was switched off"));
}

// Two layers of four experts, of which the first of the second layer may be dead, and a loss of sequences.
StepSample ExpertSampleAt(const RunDescription& run, int64_t step, bool dead, float lost) {
  RunDescription grown = run;
  grown.layout.experts = 4;
  StepSample sample = SampleAt(grown, {.drift_from = -1}, step);
  for (float& load : sample.Add(SignalId::kExpertLoad)) load = 100;
  for (float& tokens : sample.Add(SignalId::kRouterTokens)) tokens = 200;
  if (dead) sample.Add(SignalId::kExpertLoad)[4] = 0;
  sample.Add(SignalId::kLossSequenceMax)[0] = lost + 0.01f * static_cast<float>(step % 7);
  return sample;
}

TEST(RunJudgeTest, DeadExpertsAndOddSequencesAreAlertsOfTheirOwn) {
  const RunDescription run = SyntheticRun();
  RunJudge judge(JudgeOptions{}, run);
  std::vector<AlertTransition> out;
  int64_t step = 0;
  for (; step < 3800; step += 10) judge.Observe(ExpertSampleAt(run, step, false, 3), &out);
  EXPECT_TRUE(out.empty());
  for (int i = 0; i < 8; ++i, step += 10) judge.Observe(ExpertSampleAt(run, step, true, 3), &out);
  ASSERT_EQ(out.size(), 1u);
  EXPECT_EQ(out[0].rule, "experts");
  EXPECT_EQ(out[0].key, "m1");
  EXPECT_EQ(out[0].cause, "dead experts");
  EXPECT_EQ(out[0].strongest, (Head{1, -1}));
  EXPECT_TRUE(out[0].heads.empty());
  EXPECT_EQ(out[0].evidence[0].where, (Head{1, 0}));
  EXPECT_THAT(out[0].advice, testing::StartsWith("Look at the router's balancing loss, its bias"));
  judge.OnEvent(
      {.step = step, .kind = EventKind::kAnnotation, .value = 50, .text = "largest losses of sequences: 50 ab"}, &out);
  judge.Observe(ExpertSampleAt(run, step, true, 50), &out);
  ASSERT_EQ(out.size(), 2u);
  EXPECT_EQ(out[1].rule, "sequences");
  EXPECT_EQ(out[1].key, "n1");
  EXPECT_EQ(out[1].severity, Severity::kInfo);
  EXPECT_EQ(out[1].evidence[0].text, "50 ab");
  const std::string saved = judge.Save();
  RunJudge restored(JudgeOptions{}, run);
  ASSERT_TRUE(restored.Restore(saved));
  EXPECT_EQ(restored.Save(), saved);
  // Both end when they have been well for long enough.
  const int64_t end = step + 1010;
  for (step += 10; step <= end; step += 10) restored.Observe(ExpertSampleAt(run, step, false, 3), &out);
  ASSERT_EQ(out.size(), 4u);
  EXPECT_EQ(out[2].state, AlertState::kResolved);
  EXPECT_EQ(out[3].state, AlertState::kResolved);
}

TEST(RunJudgeTest, AParameterOutOfItsPastIsToldAndKept) {
  const RunDescription run = SyntheticRun();
  RunJudge judge(JudgeOptions{}, run);
  judge.SetRows(FourTensors());
  std::vector<AlertTransition> out;
  const auto at = [&run](int64_t step, float gradient) {
    StepSample sample = TensorSampleAt(run, step, 0);
    sample.Add(SignalId::kTensorGradSumsq)[2] = gradient;
    return sample;
  };
  int64_t step = 0;
  for (; step < 2000; step += 10) judge.Observe(at(step, step < 700 ? 1e8f : 1.0f), &out);
  EXPECT_TRUE(out.empty());
  for (int i = 0; i < 5; ++i, step += 10) judge.Observe(at(step, 1e4f), &out);
  ASSERT_EQ(out.size(), 1u);
  EXPECT_EQ(out[0].rule, "parameters");
  EXPECT_EQ(out[0].key, "o1");
  EXPECT_EQ(out[0].severity, Severity::kInfo);
  EXPECT_EQ(out[0].cause, "parameters out of their past");
  EXPECT_THAT(out[0].summary, testing::HasSubstr("the gradient norm of down has risen to 100, from 1"));
  EXPECT_EQ(out[0].evidence[0].text, "down");
  const std::string saved = judge.Save();
  RunJudge restored(JudgeOptions{}, run);
  restored.SetRows(FourTensors());
  ASSERT_TRUE(restored.Restore(saved));
  EXPECT_EQ(restored.Save(), saved);
  for (int i = 0; i < 15; ++i, step += 10) restored.Observe(at(step, 1e4f), &out);
  ASSERT_EQ(out.size(), 2u);
  EXPECT_EQ(out[1].severity, Severity::kWarning);
}

TEST(RunJudgeTest, ALossThatTurnsInTheFirstStepsIsTold) {
  const RunDescription run = SyntheticRun();
  RunJudge judge(JudgeOptions{}, run);
  std::vector<AlertTransition> out;
  for (int64_t step = 0; step < 500; ++step) {
    StepSample sample = SampleAt(run, {.drift_from = -1}, step);
    const auto at = static_cast<float>(step);
    sample.Add(SignalId::kLoss)[0] =
        step < 150 ? 10 - 0.04f * at : std::min(4 + 0.04f * (at - 150), 9 + 0.01f * static_cast<float>(step % 7));
    judge.Observe(sample, &out);
  }
  const AlertTransition* warning = First(out, "loss", Severity::kWarning);
  ASSERT_NE(warning, nullptr);
  EXPECT_LT(warning->step, 420);
}

TEST(RunJudgeTest, ScoresOutOfBoundsAreToldInTheFirstSteps) {
  const RunDescription run = SyntheticRun();
  RunJudge judge(JudgeOptions{}, run);
  std::vector<AlertTransition> out;
  for (int64_t step = 0; step < 300; step += 10) {
    StepSample sample = SampleAt(run, {.drift_from = -1}, step);
    if (step >= 50) sample.Add(SignalId::kLogitMax)[3] = 5000;
    judge.Observe(sample, &out);
  }
  const AlertTransition* warning = First(out, "logits", Severity::kWarning);
  ASSERT_NE(warning, nullptr);
  EXPECT_LT(warning->step, 200);
}

TEST(RunJudgeTest, DeadExpertsAreToldInTheFirstSteps) {
  const RunDescription run = SyntheticRun();
  RunJudge judge(JudgeOptions{}, run);
  std::vector<AlertTransition> out;
  int64_t step = 0;
  for (; step <= 300; step += 10) judge.Observe(ExpertSampleAt(run, step, false, 3), &out);
  EXPECT_TRUE(out.empty());
  for (; step < 330; step += 10) judge.Observe(ExpertSampleAt(run, step, true, 3), &out);
  ASSERT_EQ(out.size(), 1u);
  EXPECT_EQ(out[0].step, 320);
  EXPECT_EQ(out[0].cause, "dead experts");
}

TEST(RunJudgeTest, ChangesExcuseExpertsAndSequences) {
  const RunDescription run = SyntheticRun();
  RunJudge judge(JudgeOptions{}, run);
  std::vector<AlertTransition> out;
  int64_t step = 0;
  for (; step < 700; step += 10) judge.Observe(ExpertSampleAt(run, step, false, 3), &out);
  for (; step < 3800; step += 10) judge.Observe(ExpertSampleAt(run, step, false, 3), &out);
  judge.OnEvent({.step = step, .kind = EventKind::kData, .text = "other data"}, &out);
  for (; step < 4400; step += 10) judge.Observe(ExpertSampleAt(run, step, true, 50), &out);
  EXPECT_TRUE(out.empty());
}

TEST(RunJudgeTest, TrendsAreJudgedOnceTheLearningRateHasWarmedUp) {
  const RunDescription run = SyntheticRun();
  RunJudge judge(JudgeOptions{}, run);
  std::vector<AlertTransition> out;
  for (int64_t step = 0; step < 700; step += 10) {
    StepSample sample = ExpertSampleAt(run, step, step > 300, 3);
    sample.Add(SignalId::kLearningRate)[0] = 1e-3f * static_cast<float>(std::min<int64_t>(step + 10, 100)) / 100;
    judge.Observe(sample, &out);
    if (step == 350) {
      EXPECT_TRUE(judge.Restore(judge.Save()));
    }
  }
  EXPECT_NE(First(out, "experts", Severity::kWarning), nullptr);
}

TEST(RunJudgeTest, AGradientThatIsNotFiniteNamesItsParameter) {
  const RunDescription run = SyntheticRun();
  RunJudge judge(JudgeOptions{}, run);
  judge.SetRows(FourTensors());
  std::vector<AlertTransition> out;
  StepSample sample = TensorSampleAt(run, 10, 0);
  sample.Add(SignalId::kTensorGradNonfinite)[1] = 2;
  sample.Add(SignalId::kGradNorm)[0] = kNan;
  judge.Observe(sample, &out);
  ASSERT_EQ(out.size(), 1u);
  EXPECT_EQ(out[0].rule, "nonfinite");
  EXPECT_EQ(out[0].severity, Severity::kCritical);
  EXPECT_EQ(out[0].stage, 5);
  EXPECT_THAT(out[0].summary, testing::HasSubstr("2 elements of the gradient of up; the optimizer has taken the step"));
}

TEST(RunJudgeTest, ALossThatIsNotFiniteComesBeforeGradients) {
  const RunDescription run = SyntheticRun();
  RunJudge judge(JudgeOptions{}, run);
  std::vector<AlertTransition> out;
  StepSample sample = TensorSampleAt(run, 10, 0);
  for (float& value : sample.Add(SignalId::kTensorGradNonfinite)) value = 1;
  sample.Add(SignalId::kLoss)[0] = kNan;
  judge.Observe(sample, &out);
  ASSERT_EQ(out.size(), 1u);
  EXPECT_THAT(out[0].summary, testing::Not(testing::HasSubstr("elements of the gradient")));
  EXPECT_EQ(out[0].evidence.back().signal, "tensor_grad_nonfinite");
}

TEST(RunJudgeTest, ADriftSaysThatTheKernelsRoundingIsBiased) {
  const RunDescription run = SyntheticRun();
  RunJudge judge(JudgeOptions{}, run);
  std::vector<AlertTransition> out;
  for (int64_t step = 0; step <= 4000; ++step) {
    StepSample sample = SampleAt(run, {}, step);
    if (sample.has(SignalId::kRows)) {
      AddHealthyLaws(&sample);
      sample.Add(SignalId::kLawA10)[2 * 4 + 1] = 2 * 63;
      sample.Add(SignalId::kLawA1Alike)[2 * 4 + 1] = 2 * 40;
    }
    judge.Observe(sample, &out);
  }
  ASSERT_FALSE(out.empty());
  for (const AlertTransition& t : out) EXPECT_EQ(t.rule, "drift");
  EXPECT_THAT(out[0].summary, testing::HasSubstr(" Law A1 differs by 63 standard deviations of rounding (chance: "));
  EXPECT_THAT(out[0].summary, testing::HasSubstr("): rounding is biased there"));
}

}  // namespace
}  // namespace bellwether::server
