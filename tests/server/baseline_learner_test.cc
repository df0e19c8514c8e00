// Goal: runs that ended healthy are learned from, once, and no others; what is
// learned is in the alerts of the runs that come after, and changes nothing else.
// Method: synthetic runs on the real store for what is learned and what is not;
// recorded runs through the whole pipeline for the alerts of a failing one.
#include "server/baseline_learner.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "tests/support/query_stack.h"
#include "tests/support/service_stack.h"
#include "tests/support/transition_text.h"

namespace bellwether::server {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::SizeIs;

constexpr int64_t kHour = 3'600'000'000'000;

class BaselineLearnerTest : public testing::Test {
 protected:
  // As a server that starts, looks at all runs and ends.
  void Learn(BaselineLearner::Options options = {}) {
    BaselineLearner learner(options, {.runs = &stack_.runs(),
                                      .series = stack_.stores().series,
                                      .alerts = &stack_.alerts(),
                                      .database = stack_.stores().database,
                                      .baselines = &stack_.baselines(),
                                      .counters = &stack_.counters(),
                                      .clock = &clock_});
    learner.Start();
    learner.Drain();
    learner.Drain();  // A second look changes nothing.
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
  Transition silent = stack_.MakeTransition(informed, "silent/-1/-1/9", 0, AlertState::kFiring, Severity::kCritical);
  silent.rule = "silent";
  stack_.Post(silent);
  Learn();
  EXPECT_EQ(count("ill"), 2);
  EXPECT_EQ(count("learned"), 1);
  EXPECT_NE(stack_.baselines().Get(informed), nullptr);
}

TEST_F(BaselineLearnerTest, ARunThatChangedItsKernelIsOfNoKind) {
  const RunId run = stack_.AddRun(Healthy("switched"));
  ASSERT_TRUE(
      stack_.stores().control->Annotate(run, {.step = 700, .kind = EventKind::kAttentionMode, .text = "x"}).ok());
  const RunId noted = stack_.AddRun(Healthy("noted"));
  ASSERT_TRUE(stack_.stores().control->Annotate(noted, {.step = 700, .kind = EventKind::kEvaluation}).ok());
  Learn();
  EXPECT_EQ(count("changed"), 1);
  EXPECT_EQ(stack_.baselines().Get(run), nullptr);
  EXPECT_NE(stack_.baselines().Get(noted), nullptr);
}

TEST_F(BaselineLearnerTest, ALiveRunIsNotOverUntilItIsSilentForLong) {
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

TEST_F(BaselineLearnerTest, ARunIsLearnedOnceAndAnewWhenItWentOn) {
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

TEST_F(BaselineLearnerTest, AnOlderRunThanThereIsRoomForIsNotRead) {
  for (int i = 0; i < 33; ++i) stack_.AddRun(Healthy("run-" + std::to_string(i)));
  Learn();
  EXPECT_EQ(count("learned"), 33);
  EXPECT_EQ(stack_.baselines().Get(1), nullptr) << "pushed out by the 33rd";
  Learn();
  EXPECT_EQ(count("old"), 1);
  EXPECT_EQ(count("learned"), 33);
}

const char* const kHealthy[] = {"gpt-flash-lr3e4-s5", "gpt-flash-lr1e3-s15", "gpt-flash-glitch-s6"};

std::string File(const std::string& run) { return "runs/" + run + ".bwrun"; }

// The first transition of the rule.
const Transition* FirstOf(const std::vector<Transition>& transitions, const std::string& rule) {
  for (const Transition& transition : transitions) {
    if (transition.rule == rule) return &transition;
  }
  return nullptr;
}

TEST(SiblingsTest, AFailingRunIsHeldAgainstEarlierHealthyOnes) {
  ServiceStack service;
  // The first of its kind has no siblings.
  const std::vector<Transition> alone = service.Transitions(service.Import(File("gpt-flash-s4"), "first"));
  ASSERT_FALSE(alone.empty());
  for (const Transition& transition : alone) {
    EXPECT_EQ(transition.siblings, "");
    for (const Evidence& evidence : transition.evidence) EXPECT_EQ(evidence.siblings.runs, 0u);
  }
  for (const char* const name : kHealthy) service.Import(File(name), name);
  service.Import(File("gpt-qknorm-s4"), "of-another-kind");

  const std::vector<Transition> told = service.Transitions(service.Import(File("gpt-flash-s4"), "again"));
  EXPECT_EQ(service.count("bellwether_baseline_runs_total", {{"result", "ill"}}), 2);
  const Transition* const drift = FirstOf(told, "drift");
  ASSERT_NE(drift, nullptr);
  ASSERT_FALSE(drift->evidence.empty());
  const Evidence& evidence = drift->evidence.front();
  EXPECT_EQ(evidence.siblings.runs, 3u);
  EXPECT_LE(evidence.siblings.step_begin, drift->step);
  EXPECT_GT(evidence.siblings.step_end, drift->step);
  EXPECT_GT(evidence.value, evidence.siblings.p99) << drift->siblings;
  EXPECT_LT(evidence.siblings.p50, evidence.siblings.p99);
  EXPECT_THAT(drift->siblings, AllOf(HasSubstr(evidence.signal), HasSubstr("3 earlier healthy runs")));

  // Nothing else is concluded, or said otherwise, for knowing them.
  std::vector<std::string> before = TextsOf(alone), after = TextsOf(told);
  ASSERT_EQ(before.size(), after.size());
  for (size_t i = 0; i < before.size(); ++i) {
    const size_t name = after[i].find("again:");
    if (name != std::string::npos) after[i].replace(name, 6, "first:");
    EXPECT_EQ(before[i], after[i]);
  }
}

TEST(SiblingsTest, ARestartKeepsWhatWasLearnedAndWhatWasTold) {
  ServiceStack service;
  for (const char* const name : kHealthy) service.Import(File(name), name);
  const RunId ill = service.Import(File("gpt-flash-s12"), "ill");
  const auto text = [&] {
    std::vector<std::string> texts;
    for (const Transition& transition : service.Transitions(ill)) texts.push_back(transition.siblings);
    return texts;
  };
  const std::vector<std::string> before = text();
  ASSERT_THAT(before, testing::Contains(HasSubstr("3 earlier healthy runs")));
  const double learned = service.count("bellwether_baseline_runs_total", {{"result", "learned"}});
  EXPECT_EQ(learned, 3);
  service.Restart();
  EXPECT_EQ(text(), before);
  EXPECT_EQ(service.count("bellwether_baseline_runs_total", {{"result", "learned"}}), learned) << "read again";
  ASSERT_THAT(service.pipeline().baselines()->List(), SizeIs(1));
  EXPECT_THAT(service.pipeline().baselines()->List()[0], SizeIs(3));
  const std::vector<Transition> next = service.Transitions(service.Import(File("gpt-flash-s17"), "next"));
  const Transition* const drift = FirstOf(next, "drift");
  ASSERT_NE(drift, nullptr);
  EXPECT_EQ(drift->evidence.front().siblings.runs, 3u);
}

}  // namespace
}  // namespace bellwether::server
