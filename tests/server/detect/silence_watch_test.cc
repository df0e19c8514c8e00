// Goal: what stops reporting while its like goes on is told, with its place.  What takes turns, is logged now and
// then, or may have been meant is not.
// Method: made-up samples of 4 layers, and a judge that takes them.

#include "server/detect/silence_watch.h"

#include <gmock/gmock.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "server/detect/judge_options.h"
#include "server/detect/run_judge.h"
#include "tests/support/judged_samples.h"

namespace bellwether::server {
namespace {

using testing::AllOf;
using testing::Each;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;

constexpr SignalId kOfHeads[] = {SignalId::kRows, SignalId::kCommonModeSum, SignalId::kWqSigma, SignalId::kLogitMax};

// What a sample lacks.
struct Lacks {
  std::function<bool(SignalId)> signal = [](SignalId) { return false; };
  std::function<bool(SignalId, size_t layer)> of_layer = [](SignalId, size_t) { return false; };
  std::function<bool(size_t)> tensor = [](size_t) { return false; };
  bool heads = false, rank = false;
};

class SilenceWatchTest : public testing::Test {
 protected:
  StepSample Next(const Lacks& lacks = {}, int heads_every = 1) {
    StepSample sample;
    Layout layout{.layers = 4, .heads = 2, .kv_heads = 2};
    layout.tensors = 6;
    sample.Reset(layout);
    sample.step = step_++;
    sample.complete = !lacks.rank;
    for (const SignalId id : {SignalId::kLoss, SignalId::kGradNorm, SignalId::kLearningRate}) {
      if (!lacks.signal(id)) sample.Add(id)[0] = 1;
    }
    const auto tensors = sample.Add(SignalId::kTensorGradNorm);
    for (size_t row = 0; row < tensors.size(); ++row) {
      if (!lacks.tensor(row)) tensors[row] = kNan;  // A NaN was measured.
    }
    if (lacks.heads || sample.step % heads_every != 0) return sample;
    for (const SignalId id : kOfHeads) {
      if (lacks.signal(id)) continue;
      const auto values = sample.Add(id);
      for (size_t i = 0; i < values.size(); ++i) {
        if (!lacks.of_layer(id, i / 2)) values[i] = 1;
      }
    }
    return sample;
  }
  std::vector<Finding> After(int samples, const Lacks& lacks = {}, int heads_every = 1) {
    for (int i = 0; i < samples; ++i) watch_.Observe(Next(lacks, heads_every));
    return watch_.Find(nullptr);
  }

  int64_t step_ = 0;
  SilenceWatch watch_;
};

TEST_F(SilenceWatchTest, LayerWithoutItsSignalsIsNamed) {
  ASSERT_THAT(After(20), IsEmpty());
  const Lacks attention{.of_layer = [](SignalId id, size_t layer) { return layer == 2 && id != SignalId::kWqSigma; }};
  EXPECT_THAT(After(kHeadsLeast, attention), IsEmpty());
  const auto found = After(1, attention);
  ASSERT_THAT(found, SizeIs(1));
  EXPECT_EQ(found[0].severity, Severity::kWarning);
  EXPECT_EQ(found[0].where, (Head{2, -1}));
  EXPECT_THAT(found[0].summary, HasSubstr("layer 2 no longer reports 3 of its 4 signals"));
  EXPECT_EQ(found[0].facts[0].value, kHeadsLeast + 1);
  EXPECT_THAT(After(1), IsEmpty()) << "it reports again";
}

TEST_F(SilenceWatchTest, SingleSignalIsInformation) {
  ASSERT_THAT(After(20), IsEmpty());
  const auto found = After(50, {.signal = [](SignalId id) { return id == SignalId::kWqSigma; }});
  ASSERT_THAT(found, SizeIs(1));
  EXPECT_EQ(found[0].severity, Severity::kInfo);
  EXPECT_EQ(found[0].where.layer, -1);
  EXPECT_THAT(found[0].summary, HasSubstr("no layer reports any more"));
}

TEST_F(SilenceWatchTest, LayerIsToldOfWhatTrendsAreJudgedBy) {
  ASSERT_THAT(After(20), IsEmpty());
  EXPECT_THAT(After(50, {.of_layer = [](SignalId id, size_t layer) { return layer == 3 && id == SignalId::kRows; }}),
              IsEmpty());
  EXPECT_THAT(After(50, {.of_layer = [](SignalId id, size_t layer) { return layer > 0 && id == SignalId::kRows; }}),
              IsEmpty())
      << "nor is it of more of them";
  const auto found =
      After(50, {.of_layer = [](SignalId id, size_t layer) { return layer == 3 && id == SignalId::kWqSigma; }});
  ASSERT_THAT(found, SizeIs(1));
  EXPECT_EQ(found[0].severity, Severity::kInfo);
  EXPECT_THAT(found[0].summary, HasSubstr("layer 3 no longer reports 1 of its 4"));
}

TEST_F(SilenceWatchTest, TensorIsNamedAmongOthers) {
  ASSERT_THAT(After(20), IsEmpty());
  const auto found = After(kOthersLeast + 1, {.tensor = [](size_t row) { return row == 4; }});
  ASSERT_THAT(found, SizeIs(1));
  EXPECT_EQ(found[0].severity, Severity::kInfo);
  EXPECT_THAT(found[0].summary, HasSubstr("tensor 4"));
}

TEST_F(SilenceWatchTest, LossAndAttentionAsAWholeAreMissed) {
  ASSERT_THAT(After(20), IsEmpty());
  auto found = After(kOthersLeast + 1, {.signal = [](SignalId id) { return id == SignalId::kLoss; }});
  ASSERT_THAT(found, SizeIs(1));
  EXPECT_EQ(found[0].severity, Severity::kWarning);
  EXPECT_THAT(found[0].summary, HasSubstr("the loss no longer comes"));
  found = After(kOthersLeast + 1, {.heads = true});
  ASSERT_THAT(found, SizeIs(1));
  EXPECT_EQ(found[0].severity, Severity::kWarning);
  EXPECT_THAT(found[0].summary, HasSubstr("attention is no longer measured"));
}

TEST_F(SilenceWatchTest, PlacesThatTakeTurnsAreNotSilent) {
  for (int turn = 0; turn < 400; ++turn) {
    const auto found = After(1,
                             {.signal = [turn](SignalId id) { return id == SignalId::kLoss && turn % 50 != 0; },
                              .of_layer =
                                  [turn](SignalId id, size_t layer) {
                                    return id == SignalId::kCommonModeSum && layer != static_cast<size_t>(turn / 3 % 4);
                                  },
                              .tensor = [turn](size_t row) { return row != static_cast<size_t>(turn % 6); }},
                             3);
    ASSERT_THAT(found, IsEmpty()) << turn;
  }
}

TEST_F(SilenceWatchTest, PlacesThatHardlyReportedAreNotMissed) {
  const Lacks rare{.of_layer = [this](SignalId, size_t layer) { return layer == 1 && step_ > 4; }};
  EXPECT_THAT(After(300, rare), IsEmpty());
}

TEST_F(SilenceWatchTest, SamplesWithoutARankDoNotCount) {
  ASSERT_THAT(After(20), IsEmpty());
  EXPECT_THAT(After(300, {.of_layer = [](SignalId, size_t layer) { return layer > 1; }, .rank = true}), IsEmpty());
}

TEST_F(SilenceWatchTest, MoreSilenceIsNewsAsItDoubles) {
  ASSERT_THAT(After(20), IsEmpty());
  int news = 0;
  for (size_t gone = 1; gone <= 3; ++gone) {
    const Lacks lacks{.of_layer = [gone](SignalId, size_t layer) { return layer < gone; }};
    for (int i = 0; i < 40; ++i) {
      const auto found = After(1, lacks);
      news += !found.empty() && found[0].news;
    }
  }
  EXPECT_EQ(news, 1) << "4 places, then 8, then 12";
}

std::vector<AlertTransition> OfRule(const std::vector<AlertTransition>& all, const std::string& rule) {
  std::vector<AlertTransition> found;
  for (const AlertTransition& each : all) {
    if (each.rule == rule) found.push_back(each);
  }
  return found;
}

// A judge whose layer 1 stops at step 1000, restored from its state in between.
TEST(SilenceOfRunTest, LayerThatStopsIsOneAlertUntilItIsBack) {
  const RunDescription run = SyntheticRun();
  auto judge = std::make_unique<RunJudge>(JudgeOptions{}, run);
  std::vector<AlertTransition> out;
  for (int64_t step = 0; step <= 2000; ++step) {
    StepSample sample = SampleAt(run, {.drift_from = -1}, step);
    if (step > 1000 && step < 1800) {
      for (const SignalId id : std::vector<SignalId>(sample.signals())) {
        if (!OfHeads(FindSignal(id)->granularity)) continue;
        const auto values = sample.Add(id);
        for (size_t i = 4; i < 8; ++i) values[i] = NotMeasured();
      }
    }
    judge->Observe(sample, &out);
    if (step == 1100 || step == 1500) {
      const std::string state = judge->Save();
      judge = std::make_unique<RunJudge>(JudgeOptions{}, run);
      ASSERT_TRUE(judge->Restore(state));
    }
  }
  const auto silent = OfRule(out, "silent");
  ASSERT_THAT(silent, SizeIs(2));
  EXPECT_EQ(silent[0].severity, Severity::kWarning);
  EXPECT_EQ(silent[0].step, 1170) << "the 17th sample without it";
  EXPECT_EQ(silent[0].strongest, (Head{1, -1}));
  EXPECT_THAT(silent[0].summary, HasSubstr("layer 1 no longer reports"));
  EXPECT_EQ(silent[1].state, AlertState::kResolved);
  EXPECT_EQ(silent[1].step, 1800);
}

TEST(SilenceOfRunTest, AnotherKernelMayMeasureOtherThings) {
  const RunDescription run = SyntheticRun();
  RunJudge judge(JudgeOptions{}, run);
  std::vector<AlertTransition> out;
  for (int64_t step = 0; step <= 2000; ++step) {
    if (step == 1000) judge.OnEvent({.step = step, .kind = EventKind::kAttentionMode, .text = "eager"}, &out);
    StepSample sample = SampleAt(run, {.drift_from = -1}, step);
    if (step >= 1000 && sample.has(SignalId::kTiedRowsBf16)) {
      for (float& value : sample.Add(SignalId::kTiedRowsBf16)) value = NotMeasured();
    }
    judge.Observe(sample, &out);
  }
  EXPECT_THAT(OfRule(out, "silent"), IsEmpty());
}

TEST(SilenceOfRunTest, SilentRanksAreToldBeforeWhatTheyWouldReport) {
  RunDescription run = SyntheticRun();
  run.reporters = 4;
  RunJudge judge(JudgeOptions{}, run);
  std::vector<AlertTransition> out;
  for (int64_t step = 0; step <= 1000; ++step) judge.Observe(SampleAt(run, {.drift_from = -1}, step), &out);
  judge.OnSilence(1, 90, &out);
  for (int64_t step = 1001; step <= 2000; ++step) {
    StepSample sample = SampleAt(run, {.drift_from = -1}, step);
    sample.complete = false;
    judge.Observe(sample, &out);
  }
  ASSERT_THAT(OfRule(out, "silent"), SizeIs(1)) << "no sample ends the silence of a rank";
  judge.OnSilence(0, 0, &out);
  EXPECT_EQ(OfRule(out, "silent").back().state, AlertState::kResolved);
}

}  // namespace
}  // namespace bellwether::server
