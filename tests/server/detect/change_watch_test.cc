// Goal: an announced change excuses what it may cost, and nothing else: a loss
// that it blew up, scores and weights out of bounds are told at once, with what
// was changed, for as long as they last.
// Method: a run whose loss has come down to 1.8, a change at step 1,000, and
// losses of all kinds behind it.

#include "server/detect/change_watch.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "server/detect/judge_options.h"
#include "server/detect/run_judge.h"
#include "tests/support/judged_samples.h"

namespace bellwether::server {
namespace {

// A run of loss `before`, from `start` on, to which something is announced at
// step 1,000, and whose loss is `after(step)` from then on.
struct Change {
  RunEvent event{.step = 1000, .kind = EventKind::kLearningRate, .value = 3e-3};
  double start = 10, before = 1.8, noise = 0.05;
  bool announced = true;
  double rate = 3e-3;  // From the change on; 3e-4 before.
  int64_t last_step = 2000;
};
template <class After>
std::vector<AlertTransition> JudgeChange(const Change& change, const After& after) {
  const RunDescription run = SyntheticRun();
  RunJudge judge(JudgeOptions{}, run);
  std::vector<AlertTransition> out;
  std::mt19937 random(3);
  std::normal_distribution<double> normal;
  for (int64_t step = 0; step <= change.last_step; ++step) {
    StepSample sample = SampleAt(run, {.period = 500, .drift_from = -1}, step);
    const bool changed = step >= change.event.step;
    const double level =
        changed ? after(step)
                : change.before + (change.start - change.before) * std::exp(-static_cast<double>(step) / 120);
    sample.Add(SignalId::kLoss)[0] = static_cast<float>(level + change.noise * normal(random));
    sample.Add(SignalId::kLearningRate)[0] = static_cast<float>(changed ? change.rate : 3e-4);
    if (step == change.event.step && change.announced) judge.OnEvent(change.event, &out);
    judge.Observe(sample, &out);
  }
  return out;
}
std::vector<AlertTransition> Told(const std::vector<AlertTransition>& out, const std::string& rule, Severity least) {
  std::vector<AlertTransition> told;
  for (const AlertTransition& t : out) {
    if (t.rule == rule && t.severity >= least) told.push_back(t);
  }
  return told;
}
std::vector<AlertTransition> JudgeStepChange(const Change& change, double level) {
  return JudgeChange(change, [level](int64_t) { return level; });
}

TEST(ChangeWatchTest, LossExplodedByLearningRateFiresWithinTwentySteps) {
  // 1.8 to 9.3 within 50 steps, then 3.9 for the next 1,000.
  const auto blown_up = [](int64_t step) {
    const auto past = static_cast<double>(step - 1000);
    return past <= 50 ? 1.8 + 7.5 * past / 50 : past <= 70 ? 9.3 : std::max(3.9, 9.3 - (past - 70) / 10);
  };
  for (const double start : {5.5, 9.0, 10.8}) {
    for (const bool announced : {true, false}) {
      SCOPED_TRACE(testing::Message() << start << " " << announced);
      const auto out = JudgeChange({.start = start, .announced = announced}, blown_up);
      const auto told = Told(out, "loss", Severity::kWarning);
      ASSERT_FALSE(told.empty());
      EXPECT_LE(told[0].step, 1020);
      EXPECT_EQ(told[0].stage, 5);
      EXPECT_EQ(told[0].cause, "learning rate too high");
      EXPECT_THAT(told[0].summary, testing::HasSubstr("the loss has gone from 1.8 to "));
      EXPECT_THAT(told[0].summary, testing::HasSubstr(" after the learning rate rose tenfold at step 1,000"));
      EXPECT_THAT(told[0].advice, testing::HasSubstr("Set the learning rate back to 0.0003"));
      const std::string words = told[0].summary.substr(std::string("synthetic: ").size());
      EXPECT_THAT(
          told[0].evidence,
          testing::Contains(testing::Field(
              &Evidence::text,
              testing::ResultOf([&](const std::string& text) { return !text.empty() && words.starts_with(text); },
                                testing::IsTrue()))));
      // It goes on while the loss is at 3.9, twice what it was.
      EXPECT_EQ(told.back().state, AlertState::kFiring);
      EXPECT_EQ(told.back().severity, Severity::kCritical);
    }
  }
  // At once.
  const auto jump = Told(JudgeStepChange({}, 9.3), "loss", Severity::kWarning);
  ASSERT_FALSE(jump.empty());
  EXPECT_LE(jump[0].step, 1010);
  EXPECT_THAT(jump[0].summary, testing::HasSubstr("the loss has gone from 1.8 to 9.3 after the learning rate"));
  EXPECT_EQ(jump[0].severity, Severity::kCritical);
}

TEST(ChangeWatchTest, HighLossAfterChangeKeepsItsAlert) {
  const Change change{.last_step = 6000};
  const auto out = JudgeStepChange(change, 3.9);
  ASSERT_FALSE(Told(out, "loss", Severity::kWarning).empty());
  EXPECT_EQ(out.back().state, AlertState::kFiring);
  // Back at its level, it ends a thousand steps later.
  const auto back = JudgeChange(change, [](int64_t step) { return step < 3000 ? 3.9 : 1.8; });
  ASSERT_EQ(back.back().state, AlertState::kResolved);
  EXPECT_NEAR(static_cast<double>(back.back().step), 4000, 100);
}

TEST(ChangeWatchTest, LaterChangesDoNotExcuseAnExplosion) {
  const RunDescription run = SyntheticRun();
  RunJudge judge(JudgeOptions{}, run);
  std::vector<AlertTransition> out;
  for (int64_t step = 0; step <= 2500; ++step) {
    StepSample sample = SampleAt(run, {.period = 500, .drift_from = -1}, step);
    sample.Add(SignalId::kLoss)[0] = (step < 100 ? 10 : step < 1000 ? 1.8f : 3.9f) + (step % 2 == 0 ? 0.001f : 0);
    if (step == 1000) judge.OnEvent({.step = step, .kind = EventKind::kLearningRate, .value = 1e-2}, &out);
    // Data, and the rate put back.
    if (step % 150 == 0 && step > 1000) judge.OnEvent({.step = step, .kind = EventKind::kData}, &out);
    if (step == 1400) judge.OnEvent({.step = step, .kind = EventKind::kLearningRate, .value = 1e-3}, &out);
    judge.Observe(sample, &out);
  }
  ASSERT_EQ(out.size(), 2u);
  EXPECT_LE(out[0].step, 1020);
  EXPECT_THAT(out[1].summary, testing::HasSubstr("after the learning rate"));
  EXPECT_THAT(out[1].summary, testing::HasSubstr("at step 1,000"));
  EXPECT_EQ(out[1].severity, Severity::kCritical);
  EXPECT_NEAR(static_cast<double>(out[1].step), 1600, 20);
}

// A run whose loss goes from 1.8 to 3.9 at step 1,000, unannounced, and that is told `events`.
std::vector<AlertTransition> JudgeExploded(std::vector<RunEvent> events, int64_t last_step, double after = 3.9) {
  const RunDescription run = SyntheticRun();
  RunJudge judge(JudgeOptions{}, run);
  std::vector<AlertTransition> out;
  std::mt19937 random(3);
  std::normal_distribution<double> normal;
  for (int64_t step = 0; step <= last_step; ++step) {
    StepSample sample = SampleAt(run, {.period = 500, .drift_from = -1}, step);
    const double level = step < 1000 ? 1.8 + 8.2 * std::exp(-static_cast<double>(step) / 120) : after;
    sample.Add(SignalId::kLoss)[0] = static_cast<float>(level + 0.05 * normal(random));
    for (const RunEvent& event : events) {
      if (event.step == step) judge.OnEvent(event, &out);
    }
    judge.Observe(sample, &out);
  }
  return out;
}

TEST(ChangeWatchTest, LossRisenBeforeAChangeKeepsFiring) {
  for (const EventKind kind :
       {EventKind::kLearningRate, EventKind::kData, EventKind::kBatchSize, EventKind::kSequenceLength}) {
    for (const int64_t at : {1040, 1150, 1700}) {
      SCOPED_TRACE(testing::Message() << static_cast<int>(kind) << " " << at);
      const auto out = JudgeExploded({{.step = at, .kind = kind, .value = at == 1150 ? 3e-5 : 0.0}}, 3500);
      const auto told = Told(out, "loss", Severity::kWarning);
      ASSERT_FALSE(told.empty());
      EXPECT_LE(told[0].step, 1230);
      EXPECT_EQ(told.back().state, AlertState::kFiring);
      EXPECT_EQ(told.back().severity, Severity::kCritical);
      EXPECT_THAT(told[0].summary, testing::Not(testing::HasSubstr("after"))) << "it was there before";
    }
  }
  // A checkpoint of behind the rise has it, too; one of before has not.
  const auto restored = [](double to, double after) {
    return JudgeExploded({{.step = 2000, .kind = EventKind::kRestore, .value = to}}, 3500, after);
  };
  EXPECT_EQ(restored(1900, 3.9).back().state, AlertState::kFiring);
  EXPECT_EQ(restored(900, 3.9).back().state, AlertState::kFiring);
}

// A head of layer 1 that drifts from step 2,000 on, in a run that is told `events(step)`.
template <class Events>
int64_t FirstDrift(const Events& events, bool save_and_restore = false) {
  const RunDescription run = SyntheticRun();
  auto judge = std::make_unique<RunJudge>(JudgeOptions{}, run);
  std::vector<AlertTransition> out;
  for (int64_t step = 0; step <= 6000; ++step) {
    StepSample sample = SampleAt(run, {.drift_from = 2000}, step);
    sample.Add(SignalId::kLoss)[0] = 2;
    for (const RunEvent& event : events(step)) judge->OnEvent(event, &out);
    judge->Observe(sample, &out);
    if (save_and_restore && step % 130 == 0) {
      auto again = std::make_unique<RunJudge>(JudgeOptions{}, run);
      EXPECT_TRUE(again->Restore(judge->Save()));
      judge = std::move(again);
    }
    for (const AlertTransition& t : out) {
      if (t.rule == "drift") return t.step;
    }
  }
  return -1;
}

TEST(ChangeWatchTest, ConstantlyAnnouncedChangesExcuseNothing) {
  using Events = std::vector<RunEvent>;
  const int64_t quiet = FirstDrift([](int64_t) { return Events{}; });
  ASSERT_GT(quiet, 2000);
  // A schedule that tells its learning rate, whole or in creeping steps.
  EXPECT_EQ(
      FirstDrift([](int64_t step) { return Events{{.step = step, .kind = EventKind::kLearningRate, .value = 3e-4}}; }),
      quiet);
  EXPECT_EQ(FirstDrift([](int64_t step) {
              const double rate = 3e-4 * (1 + std::cos(static_cast<double>(step) / 3000)) / 2;
              return step < 4000 ? Events{{.step = step, .kind = EventKind::kLearningRate, .value = rate}} : Events{};
            }),
            quiet);
  // Something for every batch of data.
  for (const EventKind kind : {EventKind::kData, EventKind::kBatchSize, EventKind::kLearningRate}) {
    for (const int64_t every : {1, 100, 250}) {
      SCOPED_TRACE(testing::Message() << static_cast<int>(kind) << " every " << every);
      const auto often = [&](int64_t step) {
        return step % every == 0 ? Events{{.step = step, .kind = kind}} : Events{};
      };
      const int64_t told = FirstDrift(often);
      EXPECT_GE(told, quiet);
      EXPECT_LE(told, quiet + 300);
      if (every == 100) {
        EXPECT_EQ(FirstDrift(often, true), told);
      }
    }
  }
  // A step that the run does not come to.
  const auto ahead = [](int64_t step) {
    return step == 100 ? Events{{.step = 1'000'000'000, .kind = EventKind::kData}} : Events{};
  };
  EXPECT_EQ(FirstDrift(ahead), quiet);
  EXPECT_EQ(FirstDrift(ahead, true), quiet);
}

TEST(ChangeWatchTest, AChangeAnnouncedAheadHoldsFromItsStepOn) {
  for (const int64_t announced_at : {100, 700, 900, 999}) {
    SCOPED_TRACE(announced_at);
    const RunDescription run = SyntheticRun();
    RunJudge judge(JudgeOptions{}, run);
    std::vector<AlertTransition> out;
    for (int64_t step = 0; step <= 2000; ++step) {
      StepSample sample = SampleAt(run, {.period = 500, .drift_from = -1}, step);
      sample.Add(SignalId::kLoss)[0] =
          static_cast<float>(step < 1000 ? 1.8 + 8.2 * std::exp(-static_cast<double>(step) / 120) : 9.3);
      if (step == announced_at) judge.OnEvent({.step = 1000, .kind = EventKind::kLearningRate, .value = 3e-3}, &out);
      judge.Observe(sample, &out);
    }
    const auto told = Told(out, "loss", Severity::kWarning);
    ASSERT_FALSE(told.empty());
    EXPECT_LE(told[0].step, 1010);
    EXPECT_THAT(told[0].summary, testing::HasSubstr("after the learning rate became 0.003 at step 1,000"));
  }
}

TEST(ChangeWatchTest, ExcusesEndWithTheirAttempt) {
  const RunDescription run = SyntheticRun();
  RunJudge judge(JudgeOptions{}, run);
  std::vector<AlertTransition> out;
  for (int64_t step = 0; step <= 5000; ++step) judge.Observe(SampleAt(run, {.drift_from = -1}, step), &out);
  judge.OnEvent({.step = 5000, .kind = EventKind::kData}, &out);
  for (int64_t step = 1000; step <= 5000; ++step) {
    judge.Observe(SampleAt(run, {.drift_from = 1500}, step, 1), &out);
  }
  ASSERT_FALSE(out.empty());
  EXPECT_EQ(out[0].rule, "drift");
  EXPECT_LT(out[0].step, 4000);
}

TEST(ChangeWatchTest, ExpectedCostOfAChangeIsExcused) {
  const auto worst = [](const Change& change, double level) {
    Severity severity = Severity::kNone;
    for (const AlertTransition& t : JudgeStepChange(change, level)) severity = std::max(severity, t.severity);
    return severity;
  };
  const auto event = [](EventKind kind, double value) { return RunEvent{.step = 1000, .kind = kind, .value = value}; };
  const Change rate{.last_step = 4000};
  EXPECT_EQ(worst(rate, 2.1), Severity::kNone);  // A warm restart.
  Change same{.event = event(EventKind::kLearningRate, 3e-5), .rate = 3e-5, .last_step = 4000};
  EXPECT_EQ(worst(same, 1.7), Severity::kNone);  // A decay.
  same.rate = 3e-4;
  for (const EventKind kind : {EventKind::kData, EventKind::kSequenceLength, EventKind::kRestore}) {
    SCOPED_TRACE(static_cast<int>(kind));
    same.event = event(kind, 0);
    EXPECT_EQ(worst(same, 2.9), Severity::kNone);
    EXPECT_EQ(worst(same, 5), Severity::kNone);
  }
  same.event = event(EventKind::kBatchSize, 8);
  for (const double noise : {0.05, 0.2, 0.4}) {
    EXPECT_EQ(worst(same, 1.9), Severity::kNone);
    // Scatters eight times as much from the change on.
    std::mt19937 random(5);
    std::normal_distribution<double> normal;
    for (const AlertTransition& t : JudgeChange(same, [&](int64_t) { return 1.8 + noise * normal(random); })) {
      EXPECT_LE(t.severity, Severity::kInfo) << noise << " " << t.summary;
    }
  }
  // A fine-tune begins near its level, and other data may be twice as hard.
  same.start = 1.6;
  same.before = 1.2;
  same.event = event(EventKind::kData, 0);
  EXPECT_EQ(worst(same, 2.4), Severity::kNone);
}

TEST(ChangeWatchTest, DataChangeAfterLearningRateExcusesALossMove) {
  const auto judged = [](EventKind second, double value) {
    const RunDescription run = SyntheticRun();
    RunJudge judge(JudgeOptions{}, run);
    std::vector<AlertTransition> out;
    for (int64_t step = 0; step <= 4000; ++step) {
      StepSample sample = SampleAt(run, {.period = 500, .drift_from = -1}, step);
      const double level = step < 1050 ? 1.8 + 8.2 * std::exp(-static_cast<double>(step) / 120) : 5;
      sample.Add(SignalId::kLoss)[0] = static_cast<float>(level + 0.02 * std::sin(step));
      if (step == 1000) judge.OnEvent({.step = step, .kind = EventKind::kLearningRate, .value = 3e-4}, &out);
      if (step == 1050) judge.OnEvent({.step = step, .kind = second, .value = value}, &out);
      judge.Observe(sample, &out);
    }
    return Told(out, "loss", Severity::kWarning);
  };
  for (const EventKind kind : {EventKind::kData, EventKind::kSequenceLength, EventKind::kRestore}) {
    EXPECT_TRUE(judged(kind, 0).empty()) << static_cast<int>(kind);
  }
  // Nothing that may move it: what is five is far.
  EXPECT_FALSE(judged(EventKind::kLearningRate, 3e-4).empty());
}

TEST(ChangeWatchTest, LossOfUntrainedModelFiresAfterAnyChange) {
  const std::pair<EventKind, const char*> kinds[] = {
      {EventKind::kData, "the data changed at step 1,000"},
      {EventKind::kSequenceLength, "the sequence length changed to 4096 at step 1,000"},
      {EventKind::kRestore, "a checkpoint was restored at step 1,000"},
      {EventKind::kBatchSize, "the batch size changed to 4096 at step 1,000"}};
  for (const auto& [kind, words] : kinds) {
    SCOPED_TRACE(words);
    Change change{.rate = 3e-4};
    change.event = {.step = 1000, .kind = kind, .value = kind == EventKind::kRestore ? 0.0 : 4096.0};
    const auto told = Told(JudgeStepChange(change, 9.9), "loss", Severity::kWarning);
    ASSERT_FALSE(told.empty());
    EXPECT_LE(told[0].step, 1020);
    EXPECT_THAT(told[0].summary, testing::HasSubstr(std::string("after ") + words));
    EXPECT_NE(told[0].cause, "learning rate too high");
    EXPECT_EQ(told.back().severity, Severity::kCritical);
  }
}

// The loss falls from 10 to 1.8; at step 1,500 the run goes back to 700.
std::vector<AlertTransition> JudgeRestore(bool new_attempt, double value, double off) {
  const RunDescription run = SyntheticRun();
  RunJudge judge(JudgeOptions{}, run);
  std::vector<AlertTransition> out;
  const auto loss_at = [](int64_t step) { return 1.8 + 8.2 * std::exp(-static_cast<double>(step) / 300); };
  for (int64_t i = 0; i <= 4000; ++i) {
    const bool after = i >= 1500;
    const int64_t trained = after ? i - 800 : i;
    StepSample sample =
        SampleAt(run, {.period = 500, .drift_from = -1}, after && new_attempt ? trained : i, after && new_attempt);
    sample.Add(SignalId::kLoss)[0] = static_cast<float>(loss_at(trained) + (after ? off : 0) + 0.02 * std::sin(i));
    if (i == 1500 && !new_attempt) judge.OnEvent({.step = i, .kind = EventKind::kRestore, .value = value}, &out);
    if (i == 1500 && new_attempt)
      judge.OnEvent({.attempt = 1, .step = trained, .kind = EventKind::kRestore, .value = value}, &out);
    judge.Observe(sample, &out);
  }
  return out;
}

TEST(ChangeWatchTest, RestoredRunIsComparedWithItsCheckpointsLoss) {
  for (const bool new_attempt : {true, false}) {
    for (const double value : {0.0, 700.0}) {
      SCOPED_TRACE(testing::Message() << new_attempt << " " << value);
      EXPECT_TRUE(JudgeRestore(new_attempt, value, 0).empty());
      const auto told = Told(JudgeRestore(new_attempt, value, 4), "loss", Severity::kWarning);
      // Of what checkpoint it was is not known: a level of before is no fault.
      if (!new_attempt && value == 0) continue;
      ASSERT_FALSE(told.empty());
      EXPECT_LE(told[0].step, (new_attempt ? 700 : 1500) + 20);
      EXPECT_THAT(told[0].summary, testing::HasSubstr("the checkpoint of step 700 was restored at step"));
    }
  }
}

TEST(ChangeWatchTest, ScoresAndWeightsOutOfBoundsFireDuringExcuse) {
  const RunDescription run = SyntheticRun();
  for (const bool weights : {false, true}) {
    SCOPED_TRACE(weights);
    RunJudge judge(JudgeOptions{}, run);
    std::vector<AlertTransition> out;
    for (int64_t step = 0; step <= 3000; ++step) {
      StepSample sample = SampleAt(run, {.drift_from = -1}, step);
      if (step >= 2000 && sample.has(SignalId::kLogitMax)) {
        if (weights) {
          sample.Add(SignalId::kWqSigma)[5] *= static_cast<float>(std::min(10.0, std::exp2((step - 2000) / 30.0)));
        } else {
          sample.Add(SignalId::kLogitMax)[5] = 5000;
        }
      }
      // Announced again and again: never 200 steps of peace.
      if (step >= 2000 && step % 100 == 0) judge.OnEvent({.step = step, .kind = EventKind::kLearningRate}, &out);
      judge.Observe(sample, &out);
    }
    ASSERT_FALSE(out.empty());
    EXPECT_EQ(out[0].rule, weights ? "norm" : "logits");
    EXPECT_EQ(out[0].strongest, (Head{1, 1}));
    EXPECT_LE(out[0].step, weights ? 2200 : 2140);
  }
}

}  // namespace
}  // namespace bellwether::server
