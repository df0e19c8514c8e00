// Goal: runs that ended healthy are learned from, once, and no others.
// Method: synthetic runs on the real store, a clock that stands still.
#include "server/engine/baseline_learner.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "tests/support/query_stack.h"

namespace bellwether::server {
namespace {

constexpr int64_t kHour = 3'600'000'000'000;

class BaselineLearnerTest : public testing::Test {
 protected:
  // As a server that starts, looks at all runs and ends.
  void Learn(BaselineLearner::Options options = {}) {
    BaselineLearner learner(options, parts());
    learner.Start();
    learner.Drain();
    learner.Drain();  // A second look changes nothing.
  }
  BaselineLearnerParts parts() {
    return {.runs = &stack_.runs(),
            .series = stack_.stores().series,
            .alerts = &stack_.alerts(),
            .database = stack_.stores().database,
            .baselines = &stack_.baselines(),
            .counters = &stack_.counters(),
            .clock = &clock_};
  }
  double count(const char* result) {
    return stack_.counters().counter("bellwether_baseline_runs_total", {{"result", result}})->value();
  }
  static QueryStack::RunSpec Healthy(const std::string& name) {
    return {.name = name, .steps = 1500, .every = 10, .failing = {}, .ended = true};
  }

  QueryStack stack_;
  FakeClock clock_;
};

TEST_F(BaselineLearnerTest, LearnsWhatCanBeHeldAgainstAnotherRun) {
  const RunId run = stack_.AddRun(Healthy("a"));
  Learn();
  EXPECT_EQ(count("learned"), 1);
  const auto bands = stack_.baselines().Get(run);
  ASSERT_NE(bands, nullptr);
  EXPECT_EQ(bands->name, "a");
  EXPECT_EQ(bands->step, 1499);
  for (int range = 0; range <= BandRangeOf(1499); ++range) {
    const Band* const ratio = FindBand(*bands, SignalId::kDriftRatio, range);
    ASSERT_NE(ratio, nullptr) << range;
    EXPECT_THAT(ratio->quantiles, testing::Each(1));
    EXPECT_EQ(ratio->values % 12, 0u);
    EXPECT_GE(ratio->values, 12u * 5) << range;  // Some samples, each once.
    EXPECT_LE(ratio->values, 12u * 8) << range;
    const Band* const loss = FindBand(*bands, SignalId::kLoss, range);
    ASSERT_NE(loss, nullptr);
    EXPECT_LE(loss->quantiles.back(), 4.0f / static_cast<float>(1 + BandBegin(range)));
    EXPECT_GE(loss->quantiles.front(), 4.0f / static_cast<float>(1 + BandBegin(range + 1)));
  }
  EXPECT_EQ(FindBand(*bands, SignalId::kCommonModeSum, 3), nullptr) << "a sum";
  EXPECT_EQ(FindBand(*bands, SignalId::kKeyLeak, 3), nullptr) << "never reported";
}

TEST_F(BaselineLearnerTest, OwnSignalsAreLearnedHoweverRarelyTheyAreTold) {
  for (const int64_t every : {1, 7, 300}) {
    QueryStack::RunSpec spec = Healthy("own");
    spec.own_every = every;
    const RunId run = stack_.AddRun(spec);
    Learn();
    const auto bands = stack_.baselines().Get(run);
    ASSERT_NE(bands, nullptr);
    EXPECT_THAT(bands->own, testing::ElementsAre("kl", "z")) << "a sum is of no other run";
    for (int range = 0; range <= BandRangeOf(1499); ++range) {
      const int64_t begin = BandBegin(range), end = std::min<int64_t>(BandBegin(range + 1), 1500);
      const Band* const kl = FindBand(*bands, SignalId::kOwnMean, range, "kl");
      const bool told = (end - 1) / every * every >= begin;
      ASSERT_EQ(kl != nullptr, told) << every << " " << range;
      if (told) {
        EXPECT_GE(kl->quantiles.front(), static_cast<float>(begin));
        EXPECT_EQ(kl->quantiles.back(), static_cast<float>((end - 1) / every * every));
      }
      const Band* const z = FindBand(*bands, SignalId::kOwnMax, range, "z");
      ASSERT_NE(z, nullptr);
      EXPECT_EQ(z->values, 16u) << "two cells";
      EXPECT_EQ(z->quantiles.front(), 10);
      EXPECT_EQ(z->quantiles.back(), 11);
    }
  }
}

TEST_F(BaselineLearnerTest, OwnSignalsBeyondTheLimitAreCounted) {
  QueryStack::RunSpec spec = Healthy("many");
  spec.own_every = 1;
  const RunId run = stack_.AddRun(spec);
  stack_.Edit(run, [](RunSnapshot* snapshot) {
    auto rows = std::make_shared<RunRows>(*snapshot->rows);
    for (size_t i = 3; i < kOwnBandSignalsMax + 6; ++i) rows->own_signals.push_back({.name = "s" + std::to_string(i)});
    snapshot->rows = rows;
  });
  Learn();
  EXPECT_EQ(stack_.baselines().Get(run)->own.size(), kOwnBandSignalsMax);
  EXPECT_EQ(stack_.counters().counter("bellwether_baseline_limit_refused_total", {{"limit", "own_signals"}})->value(),
            5);
}

TEST_F(BaselineLearnerTest, ANaNIsNotLearned) {
  QueryStack::RunSpec spec = Healthy("a");
  spec.nan = {.layer = 0, .head = 1};
  const RunId run = stack_.AddRun(spec);
  Learn();
  const auto bands = stack_.baselines().Get(run);
  ASSERT_NE(bands, nullptr);
  const Band* const ratio = FindBand(*bands, SignalId::kDriftRatio, 5);
  ASSERT_NE(ratio, nullptr);
  EXPECT_THAT(ratio->quantiles, testing::Each(1));
  EXPECT_EQ(ratio->values % 11, 0u);
}

TEST_F(BaselineLearnerTest, ManyHeadsAreLearnedFromFewerSamples) {
  const RunId run = stack_.AddRun(Healthy("a"));
  Learn({.cells_max = 12 * 9 * 2});  // Nine stages, two samples each.
  const Band* const ratio = FindBand(*stack_.baselines().Get(run), SignalId::kDriftRatio, 5);
  ASSERT_NE(ratio, nullptr);
  EXPECT_EQ(ratio->values, 24u);
}

TEST_F(BaselineLearnerTest, AShortRunWasNotJudged) {
  QueryStack::RunSpec spec = Healthy("short");
  spec.steps = 1000;
  stack_.AddRun(spec);
  spec.name = "long enough";
  spec.steps = 1001;
  stack_.AddRun(spec);
  Learn();
  EXPECT_EQ(count("short"), 1);
  EXPECT_EQ(count("learned"), 1);
}

TEST_F(BaselineLearnerTest, ARunJudgedInPartIsNoExample) {
  const auto edited = [&](const std::string& name, auto edit) {
    stack_.Edit(stack_.AddRun(Healthy(name)), [&](RunSnapshot* run) { edit(&run->record.coverage); });
  };
  edited("one layer is not measured", [](RunCoverage* coverage) { coverage->missed[1] = RunCoverage::kNever; });
  edited("no loss", [](RunCoverage* coverage) { coverage->loss_step = -1; });
  edited("padded: no drift in any layer",
         [](RunCoverage* coverage) { std::fill_n(coverage->missed.begin(), 3, RunCoverage::kNever); });
  Learn();
  EXPECT_EQ(count("partly"), 2);
  EXPECT_EQ(count("learned"), 1);
}

TEST_F(BaselineLearnerTest, AnIllRunIsNoExample) {
  const RunId warned = stack_.AddRun(Healthy("warned"));
  stack_.Post(stack_.MakeTransition(warned, "drift/1/2/220", 0, AlertState::kFiring, Severity::kWarning));
  stack_.Post(stack_.MakeTransition(warned, "drift/1/2/220", 1, AlertState::kResolved, Severity::kWarning));
  QueryStack::RunSpec spec = Healthy("drifts a little");
  spec.stage = 1;
  stack_.AddRun(spec);
  // Told, but nothing about its numerics.
  const RunId informed = stack_.AddRun(Healthy("informed"));
  stack_.Post(stack_.MakeTransition(informed, "gradient/-1/-1/3", 0, AlertState::kFiring, Severity::kInfo));
  AlertTransition silent =
      stack_.MakeTransition(informed, "silent/-1/-1/9", 0, AlertState::kFiring, Severity::kCritical);
  silent.rule = "silent";
  stack_.Post(silent);
  Learn();
  EXPECT_EQ(count("ill"), 2);
  EXPECT_EQ(count("learned"), 1);
  EXPECT_NE(stack_.baselines().Get(informed), nullptr);
}

TEST_F(BaselineLearnerTest, FalseAlarmsKeepNoRunOut) {
  QueryStack::RunSpec spec = Healthy("a");
  spec.stage = 1;
  const RunId run = stack_.AddRun(spec);
  const AlertTransition fired = stack_.MakeTransition(run, "a1", 0, AlertState::kFiring, Severity::kWarning);
  stack_.Post(fired);
  const auto say = [&](bool undone) {
    FalseAlarm said{.by = "ann", .reason = "known"};
    clock_.Advance(kHour);
    said.time_unix_ns = clock_.UnixNanos();
    said.severity = Severity::kWarning;
    said.illness = IllnessOf(fired);
    said.undone = undone;
    Database::AlertNote note = stack_.alerts().Get(run, "a1")->note;
    note.false_alarms.push_back(said);
    ASSERT_TRUE(stack_.alerts().Annotate(run, "a1", note).ok());
    clock_.Advance(kHour);
  };
  BaselineLearner learner({}, parts());
  learner.Start();
  learner.Drain();
  EXPECT_EQ(stack_.baselines().Get(run), nullptr);
  // The run stands still, and what people say of it does not.
  say(false);
  learner.Drain();
  EXPECT_NE(stack_.baselines().Get(run), nullptr);
  learner.Drain();
  EXPECT_EQ(count("learned"), 1);
  say(true);
  learner.Drain();
  EXPECT_EQ(stack_.baselines().Get(run), nullptr);
  say(false);
  learner.Drain();
  EXPECT_EQ(count("learned"), 2);
  learner.Stop();
  Learn();  // A restart.
  EXPECT_EQ(count("learned"), 2);
  say(true);
  Learn();
  EXPECT_EQ(stack_.baselines().Get(run), nullptr) << "it was taken back while no server looked";
}

TEST_F(BaselineLearnerTest, HeadsBeyondAFalseAlarmAreIll) {
  QueryStack::RunSpec spec = Healthy("a");
  spec.stage = 3;
  const RunId run = stack_.AddRun(spec);
  const AlertTransition fired = stack_.MakeTransition(run, "a1", 0, AlertState::kFiring, Severity::kWarning);
  stack_.Post(fired);
  FalseAlarm said{.by = "ann", .reason = "known"};
  said.severity = Severity::kWarning;
  said.illness = IllnessOf(fired);
  ASSERT_TRUE(stack_.alerts().Annotate(run, "a1", {.false_alarms = {said}}).ok());
  Learn();
  EXPECT_EQ(count("ill"), 1) << "stage 1 is all that was judged";
}

TEST_F(BaselineLearnerTest, ARunThatChangedItsKernelIsOfNoKind) {
  const RunId run = stack_.AddRun(Healthy("switched"));
  ASSERT_TRUE(
      stack_.stores().control->Annotate(run, {.step = 700, .kind = EventKind::kAttentionMode, .text = "x"}).ok());
  const RunId noted = stack_.AddRun(Healthy("noted"));
  ASSERT_TRUE(stack_.stores().control->Annotate(noted, {.step = 700, .kind = EventKind::kEvaluation}).ok());
  const RunId mixed = stack_.AddRun(Healthy("restarted-with-another-kernel"));
  stack_.Edit(mixed, [](RunSnapshot* it) { it->record.kind_changed = true; });
  Learn();
  EXPECT_EQ(count("changed"), 2);
  EXPECT_EQ(stack_.baselines().Get(run), nullptr);
  EXPECT_EQ(stack_.baselines().Get(mixed), nullptr);
  EXPECT_NE(stack_.baselines().Get(noted), nullptr);
}

TEST_F(BaselineLearnerTest, LiveRunIsLearnedOnlyAfterLongSilence) {
  QueryStack::RunSpec spec = Healthy("live");
  spec.ended = false;
  spec.last_report_unix_ns = clock_.UnixNanos();
  const RunId run = stack_.AddRun(spec);
  clock_.Advance(6 * kHour - 1);
  Learn();
  EXPECT_EQ(stack_.baselines().Get(run), nullptr);
  clock_.Advance(1);
  Learn();
  EXPECT_NE(stack_.baselines().Get(run), nullptr);
}

TEST_F(BaselineLearnerTest, RunIsLearnedOnceAndAgainAfterItContinued) {
  const RunId run = stack_.AddRun(Healthy("a"));
  Learn();
  Learn();  // A restart.
  EXPECT_EQ(count("learned"), 1);
  stack_.Edit(run, [](RunSnapshot* it) { it->record.step = 1490; });
  Learn();
  EXPECT_EQ(count("learned"), 2);
  EXPECT_EQ(stack_.baselines().Get(run)->step, 1490);
  stack_.Post(stack_.MakeTransition(run, "loss/-1/-1/1495", 0, AlertState::kFiring, Severity::kCritical));
  stack_.Edit(run, [](RunSnapshot* it) { it->record.step = 1495; });
  Learn();
  EXPECT_EQ(stack_.baselines().Get(run), nullptr) << "it went on, and fell ill";
}

TEST_F(BaselineLearnerTest, RunOlderThanTheKeptBaselinesIsNotRead) {
  for (int i = 0; i < 33; ++i) stack_.AddRun(Healthy("run-" + std::to_string(i)));
  Learn();
  EXPECT_EQ(count("learned"), 33);
  EXPECT_EQ(stack_.baselines().Get(1), nullptr) << "pushed out by the 33rd";
  Learn();
  EXPECT_EQ(count("old"), 1);
  EXPECT_EQ(count("learned"), 33);
}

}  // namespace
}  // namespace bellwether::server
