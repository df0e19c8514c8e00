// Goal: ranks and parts combine by the catalogue's rules, steps close in order
// and exactly once, and nobody waits for a rank that left.
// Method: small frames by hand; a shuffled interleaving of many ranks must give
// what the sorted one gives.

#include "server/ingest/rank_merge.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

namespace bellwether::server {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;
using testing::SizeIs;

constexpr Layout kMergedLayout{1, 2, 1, 64, 0};
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

RankFrame Frame(int64_t step, SignalId signal, std::vector<float> values, int head_begin = 0) {
  RankFrame frame;
  frame.step = step;
  frame.blocks = {{signal, 0, 1, head_begin, static_cast<int32_t>(values.size()), 0}};
  frame.values = std::move(values);
  return frame;
}

class RankMergeTest : public testing::Test {
 protected:
  RankMerge::Sink Sink() {
    return [this](const StepSample& sample) { closed_.push_back(sample); };
  }
  std::vector<int64_t> Steps() const {
    std::vector<int64_t> steps;
    for (const StepSample& sample : closed_) steps.push_back(sample.step);
    return steps;
  }
  std::vector<StepSample> closed_;
};

TEST_F(RankMergeTest, OneReporterClosesEachStepAtOnce) {
  RankMerge merge(kMergedLayout, 1);
  for (int64_t step : {0, 10, 20}) merge.Add(0, Frame(step, SignalId::kRows, {1, 2}), 1, Sink());
  EXPECT_THAT(Steps(), ElementsAre(0, 10, 20));
  EXPECT_TRUE(closed_[0].complete);
  EXPECT_EQ(merge.oldest_open_lsn(), 0u);
}

TEST_F(RankMergeTest, SumsAddMaximaWinMeansAverage) {
  RankMerge merge(kMergedLayout, 2);
  for (uint32_t rank : {0u, 1u}) {
    RankFrame frame = Frame(5, SignalId::kRows, {1.0f + static_cast<float>(rank), 10});
    frame.blocks.push_back({SignalId::kLogitMax, 0, 1, 0, 2, 2});
    frame.blocks.push_back({SignalId::kLoss, 0, 1, 0, 1, 4});
    const float more[] = {rank == 0 ? 7.0f : 3.0f, rank == 0 ? 1.0f : kNan, rank == 0 ? 2.0f : 4.0f};
    frame.values.insert(frame.values.end(), std::begin(more), std::end(more));
    merge.Add(rank, frame, rank + 1, Sink());
  }
  ASSERT_THAT(closed_, SizeIs(1));
  EXPECT_THAT(closed_[0].matrix(SignalId::kRows), ElementsAre(3, 20));
  EXPECT_EQ(closed_[0].matrix(SignalId::kLogitMax)[0], 7);
  EXPECT_TRUE(std::isnan(closed_[0].matrix(SignalId::kLogitMax)[1])) << "a NaN is not hidden";
  EXPECT_EQ(closed_[0].scalar(SignalId::kLoss), 3);
  EXPECT_EQ(closed_[0].ranks, 2u);
}

TEST_F(RankMergeTest, HeadsOfTensorParallelRanksFillTheirPlaces) {
  RankMerge merge(kMergedLayout, 2);
  merge.Add(1, Frame(0, SignalId::kWqSigma, {9}, 1), 1, Sink());
  merge.Add(0, Frame(0, SignalId::kWqSigma, {4}, 0), 2, Sink());
  EXPECT_THAT(closed_[0].matrix(SignalId::kWqSigma), ElementsAre(4, 9));
  EXPECT_THAT(closed_[0].disagreements, IsEmpty());
}

TEST_F(RankMergeTest, ReplicasThatDisagreeAreReported) {
  RankMerge merge(kMergedLayout, 2);
  merge.Add(0, Frame(0, SignalId::kWqSigma, {4, 5}), 1, Sink());
  merge.Add(1, Frame(0, SignalId::kWqSigma, {4, 6}), 2, Sink());
  ASSERT_THAT(closed_[0].disagreements, SizeIs(1));
  EXPECT_EQ(closed_[0].disagreements[0].head, 1);
  EXPECT_EQ(closed_[0].disagreements[0].low, 5);
  EXPECT_EQ(closed_[0].disagreements[0].high, 6);
}

TEST_F(RankMergeTest, DisagreementIsReportedOncePerCellAndExcessCounted) {
  constexpr size_t kMax = StepSample::kDisagreementsMax;
  constexpr Layout kLarge{static_cast<int32_t>(kMax) / 64 + 1, 64, 64, 64, 0};
  for (const size_t cells : {size_t{1}, kMax, kMax + 1}) {
    RankMerge merge(kLarge, 4);
    for (uint32_t rank = 0; rank < 4; ++rank) {
      RankFrame frame;
      frame.blocks = {{SignalId::kWqSigma, 0, kLarge.layers, 0, kLarge.heads, 0}};
      frame.values.assign(static_cast<size_t>(kLarge.layers * kLarge.heads), 1);
      std::fill_n(frame.values.begin(), cells, 5 - static_cast<float>(rank));
      merge.Add(rank, frame, rank + 1, Sink());
    }
    const StepSample& sample = closed_.back();
    ASSERT_THAT(sample.disagreements, SizeIs(std::min(cells, kMax)));
    EXPECT_EQ(sample.disagreements[0].low, 2);
    EXPECT_EQ(sample.disagreements[0].high, 5);
    EXPECT_EQ(sample.disagreements_left_out, cells > kMax ? 3u : 0u);
  }
}

TEST_F(RankMergeTest, AStepWaitsForAllItsParts) {
  RankMerge merge(kMergedLayout, 1);
  for (uint32_t part : {1u, 0u}) {
    EXPECT_THAT(closed_, IsEmpty());
    RankFrame frame = Frame(3, SignalId::kRows, {1}, static_cast<int>(part));
    frame.part = part;
    frame.parts = 2;
    EXPECT_EQ(merge.Add(0, frame, 8, Sink()), RankMerge::Outcome::kTaken);
    if (part == 1) {
      EXPECT_EQ(merge.oldest_open_lsn(), 8u);
      EXPECT_EQ(merge.Add(0, frame, 9, Sink()), RankMerge::Outcome::kRepeated);
    }
  }
  EXPECT_THAT(closed_[0].matrix(SignalId::kRows), ElementsAre(1, 1));
}

TEST_F(RankMergeTest, ALateFrameChangesNothing) {
  RankMerge merge(kMergedLayout, 1);
  merge.Add(0, Frame(10, SignalId::kRows, {1, 1}), 1, Sink());
  EXPECT_EQ(merge.Add(0, Frame(10, SignalId::kRows, {5, 5}), 2, Sink()), RankMerge::Outcome::kLate);
  EXPECT_EQ(merge.Add(0, Frame(9, SignalId::kRows, {5, 5}), 3, Sink()), RankMerge::Outcome::kLate);
  EXPECT_THAT(Steps(), ElementsAre(10));
  // A rollback is another attempt: the step may come again.
  RankFrame again = Frame(5, SignalId::kRows, {2, 2});
  again.attempt = 1;
  EXPECT_EQ(merge.Add(0, again, 4, Sink()), RankMerge::Outcome::kTaken);
  EXPECT_THAT(Steps(), ElementsAre(10, 5));
}

TEST_F(RankMergeTest, AStepThatARankSkippedClosesWithTheNext) {
  RankMerge merge(kMergedLayout, 2);
  merge.Add(0, Frame(1, SignalId::kRows, {1, 1}), 1, Sink());
  merge.Add(0, Frame(2, SignalId::kRows, {1, 1}), 2, Sink());
  EXPECT_THAT(closed_, IsEmpty());
  merge.Add(1, Frame(2, SignalId::kRows, {1, 1}), 3, Sink());
  EXPECT_THAT(Steps(), ElementsAre(1, 2));
  EXPECT_FALSE(closed_[0].complete);
  EXPECT_TRUE(closed_[1].complete);
}

TEST_F(RankMergeTest, TheDeadlineAndAGoodbyeEndTheWait) {
  RankMerge merge(kMergedLayout, 2);
  merge.Add(0, Frame(1, SignalId::kRows, {1, 1}), 1, Sink());
  merge.CloseThrough(0, 1, Sink());
  EXPECT_THAT(Steps(), ElementsAre(1));
  merge.Add(1, Frame(2, SignalId::kRows, {1, 1}), 2, Sink());
  merge.SetGone(1, Sink());  // It left without the other's step 2.
  merge.Add(0, Frame(2, SignalId::kRows, {1, 1}), 3, Sink());
  EXPECT_THAT(Steps(), ElementsAre(1, 2));
  merge.Add(0, Frame(3, SignalId::kRows, {1, 1}), 4, Sink());
  EXPECT_THAT(Steps(), ElementsAre(1, 2, 3)) << "a rank that left is not waited for";
}

TEST_F(RankMergeTest, DepartedRanksFramesDoNotReplaceOtherRanks) {
  RankMerge merge(kMergedLayout, 2);
  for (uint32_t rank : {0u, 1u}) merge.Join(rank, 0, 2);
  for (int64_t step = 0; step < 3; ++step) merge.Add(0, Frame(step, SignalId::kRows, {1, 1}), 1, Sink());
  merge.SetGone(0, Sink());
  EXPECT_THAT(closed_, IsEmpty()) << "the other's are on their way";
  for (int64_t step = 0; step < 4; ++step) {
    EXPECT_EQ(merge.Add(1, Frame(step, SignalId::kRows, {1, 1}), 2, Sink()), RankMerge::Outcome::kTaken);
  }
  EXPECT_THAT(Steps(), ElementsAre(0, 1, 2, 3));
  for (const StepSample& sample : closed_) {
    EXPECT_EQ(sample.matrix(SignalId::kRows)[0], sample.step < 3 ? 2 : 1);
    EXPECT_TRUE(sample.complete);
  }
  closed_.clear();
  merge.Add(0, Frame(4, SignalId::kRows, {1, 1}), 3, Sink());  // It is back, and goes first.
  merge.SetGone(0, Sink());
  EXPECT_THAT(closed_, IsEmpty());
  merge.SetGone(1, Sink());
  EXPECT_THAT(Steps(), ElementsAre(4)) << "nobody is left";
  EXPECT_TRUE(closed_[0].complete);
}

TEST_F(RankMergeTest, ReturnedRankIsAwaitedFromItsHello) {
  RankMerge merge(kMergedLayout, 2);
  for (uint32_t rank : {0u, 1u}) merge.Join(rank, 0, 2);
  for (uint32_t rank : {0u, 1u}) merge.Add(rank, Frame(0, SignalId::kRows, {1, 1}), 1, Sink());
  merge.SetGone(0, Sink());
  merge.Join(0, 0, 2);
  for (int64_t step = 1; step < 4; ++step) {
    for (uint32_t rank : {1u, 0u}) merge.Add(rank, Frame(step, SignalId::kRows, {1, 1}), 2, Sink());
    EXPECT_EQ(closed_.back().step, step);
    EXPECT_EQ(closed_.back().ranks, 2u);
  }
}

TEST_F(RankMergeTest, LateFrameAlsoBringsARankBack) {
  RankMerge merge(kMergedLayout, 2);
  for (uint32_t rank : {0u, 1u}) merge.Add(rank, Frame(0, SignalId::kRows, {1, 1}), 1, Sink());
  merge.SetGone(0, Sink());
  merge.Add(1, Frame(1, SignalId::kRows, {1, 1}), 2, Sink());
  EXPECT_EQ(merge.Add(0, Frame(1, SignalId::kRows, {1, 1}), 3, Sink()), RankMerge::Outcome::kLate);
  for (uint32_t rank : {1u, 0u}) merge.Add(rank, Frame(2, SignalId::kRows, {1, 1}), 4, Sink());
  EXPECT_THAT(Steps(), ElementsAre(0, 1, 2));
  EXPECT_EQ(closed_[2].ranks, 2u);
}

TEST_F(RankMergeTest, AnAttemptHasRanksOfItsOwn) {
  RankMerge merge(kMergedLayout, 4);
  for (uint32_t rank = 0; rank < 4; ++rank) {
    merge.Join(rank, 0, 4);
    merge.Add(rank, Frame(0, SignalId::kRows, {1, 1}), 1, Sink());
  }
  merge.SetGone(3, Sink());  // Of the others nothing more is heard.
  for (uint32_t rank : {0u, 1u}) merge.Join(rank, 1, 2);
  merge.Join(2, 0, 4);  // Stragglers.
  merge.SetGone(2, Sink());
  merge.Add(1, Frame(0, SignalId::kRows, {1, 1}), 1, Sink());
  EXPECT_THAT(merge.gone(), IsEmpty());
  for (int64_t step = 1; step < 4; ++step) {
    for (uint32_t rank : {0u, 1u}) {
      if (step == 2 && rank == 1) continue;
      RankFrame frame = Frame(step, SignalId::kRows, {1, 1});
      frame.attempt = 1;
      EXPECT_EQ(merge.Add(rank, frame, 2, Sink()), RankMerge::Outcome::kTaken);
    }
  }
  EXPECT_THAT(Steps(), ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(closed_[1].matrix(SignalId::kRows), ElementsAre(2, 2));
  EXPECT_FALSE(closed_[2].complete);
  merge.SetGone(0, Sink());
  merge.SetGone(1, Sink());
  EXPECT_THAT(merge.gone(), SizeIs(2));
}

TEST_F(RankMergeTest, FramesOfEarlierAttemptAreMergedInTheNext) {
  RankMerge merge(kMergedLayout, 2);
  for (uint32_t rank : {0u, 1u}) merge.Join(rank, 1, 2);
  for (uint32_t rank : {0u, 1u}) {
    for (int64_t step = 0; step < 3; ++step) merge.Add(rank, Frame(step, SignalId::kRows, {1, 1}), 1, Sink());
  }
  EXPECT_THAT(Steps(), ElementsAre(0, 1, 2));
  for (const StepSample& sample : closed_) EXPECT_EQ(sample.ranks, 2u);
}

TEST_F(RankMergeTest, RestoredMergeContinuesLikeTheSavedOne) {
  // Rank 0 has left with step 1 open, of which the third sends nothing any more.
  const auto begin = [&](RankMerge* merge) {
    for (uint32_t rank = 0; rank < 3; ++rank) {
      merge->Join(rank, 0, 3);
      merge->Add(rank, Frame(0, SignalId::kRows, {1, 1}), 1, Sink());
    }
  };
  RankMerge merge(kMergedLayout, 3);
  begin(&merge);
  merge.Add(0, Frame(1, SignalId::kRows, {1, 1}), 4, Sink());
  merge.SetGone(0, Sink());
  merge.Add(1, Frame(1, SignalId::kRows, {1, 1}), 6, Sink());
  RankMerge restored(kMergedLayout, 3);
  restored.Restore(0, 0, merge.ranks());
  restored.SetReplay(true);
  EXPECT_EQ(restored.Add(0, Frame(1, SignalId::kRows, {1, 1}), 4, Sink()), RankMerge::Outcome::kTaken);
  EXPECT_EQ(restored.Add(1, Frame(1, SignalId::kRows, {1, 1}), 6, Sink()), RankMerge::Outcome::kTaken);
  restored.SetReplay(false);
  closed_.clear();
  for (RankMerge* each : {&merge, &restored}) {
    EXPECT_THAT(each->gone(), ElementsAre(0u));
    EXPECT_EQ(each->reporting(), 2u);
    each->Add(2, Frame(1, SignalId::kRows, {1, 1}), 7, Sink());
    ASSERT_THAT(Steps(), ElementsAre(1));
    EXPECT_EQ(closed_[0].ranks, 3u);
    EXPECT_TRUE(closed_[0].complete);
    closed_.clear();
  }
}

TEST_F(RankMergeTest, OpenStepsAreBounded) {
  RankMerge merge(kMergedLayout, 2, 4);
  for (int64_t step = 0; step < 6; ++step) merge.Add(0, Frame(step, SignalId::kRows, {1, 1}), 1, Sink());
  EXPECT_THAT(Steps(), ElementsAre(0, 1));
}

TEST_F(RankMergeTest, AnyInterleavingOfRanksGivesTheSameSteps) {
  constexpr uint32_t kRanks = 8;
  constexpr int64_t kSteps = 40;
  std::mt19937 random(7);
  RankMerge merge(kMergedLayout, kRanks);
  std::vector<int64_t> next(kRanks, 0);
  Lsn lsn = 0;
  for (;;) {
    std::vector<uint32_t> able;
    const int64_t slowest = *std::min_element(next.begin(), next.end());
    for (uint32_t rank = 0; rank < kRanks; ++rank) {
      if (next[rank] < kSteps && next[rank] < slowest + 30) able.push_back(rank);
    }
    if (able.empty()) break;
    const uint32_t rank = able[random() % able.size()];
    merge.Add(rank, Frame(next[rank]++, SignalId::kRows, {1, static_cast<float>(rank)}), ++lsn, Sink());
  }
  ASSERT_THAT(closed_, SizeIs(kSteps));
  for (int64_t step = 0; step < kSteps; ++step) {
    EXPECT_EQ(closed_[static_cast<size_t>(step)].step, step);
    EXPECT_THAT(closed_[static_cast<size_t>(step)].matrix(SignalId::kRows), ElementsAre(8, 28));
  }
}

TEST_F(RankMergeTest, HeldStepDelaysLaterStepsUntilFilled) {
  RankMerge merge(kMergedLayout, 1);
  EXPECT_TRUE(merge.Hold(0, 1, 7, 1));
  merge.Add(0, Frame(0, SignalId::kRows, {1, 2}), 8, Sink());
  merge.Add(0, Frame(1, SignalId::kRows, {1, 2}), 9, Sink());
  merge.Add(0, Frame(2, SignalId::kRows, {1, 2}), 10, Sink());
  EXPECT_THAT(Steps(), ElementsAre(0));
  EXPECT_EQ(merge.oldest_open_lsn(), 7u);
  EXPECT_TRUE(merge.Holding(0));
  EXPECT_FALSE(merge.Holding(1)) << "it took part in nothing";
  EXPECT_TRUE(merge.Fill(0, 1, {{SignalId::kGramSigma, 0, 1, 3}, {SignalId::kRows, 0, 0, 9}}, Sink()));
  EXPECT_THAT(Steps(), ElementsAre(0, 1, 2));
  EXPECT_TRUE(closed_[1].complete);
  EXPECT_TRUE(IsNotMeasured(closed_[1].matrix(SignalId::kGramSigma)[0]));
  EXPECT_EQ(closed_[1].matrix(SignalId::kGramSigma)[1], 3);
  EXPECT_EQ(closed_[1].matrix(SignalId::kRows)[0], 1) << "what was measured stays";
  EXPECT_FALSE(merge.Holding(0));
  EXPECT_FALSE(merge.Fill(0, 1, {}, Sink())) << "it is closed";
  EXPECT_FALSE(merge.Hold(0, 2, 11, 1));
}

TEST_F(RankMergeTest, HeldStepClosesByDeadlineOrTooManyOpenSteps) {
  RankMerge merge(kMergedLayout, 1, 4);
  merge.Hold(0, 0, 1, 2);
  merge.Add(0, Frame(0, SignalId::kRows, {1, 2}), 2, Sink());
  merge.Add(0, Frame(1, SignalId::kRows, {1, 2}), 2, Sink());
  EXPECT_THAT(Steps(), IsEmpty());
  merge.CloseThrough(0, 0, Sink());
  EXPECT_THAT(Steps(), ElementsAre(0, 1)) << "with the one behind it";
  EXPECT_FALSE(merge.Holding(0));
  closed_.clear();
  merge.Hold(0, 2, 3, 1);
  for (int64_t step = 2; step <= 6; ++step) merge.Add(0, Frame(step, SignalId::kRows, {1, 2}), 4, Sink());
  EXPECT_THAT(Steps(), ElementsAre(2, 3, 4, 5, 6)) << "the fifth open step closes the oldest, which held the others";
  EXPECT_TRUE(closed_[0].complete) << "all ranks were there";
}

TEST_F(RankMergeTest, HeldValuesWithoutAFrameMakeNoStep) {
  RankMerge merge(kMergedLayout, 1);
  merge.Hold(0, 3, 1, 1);
  merge.Fill(0, 3, {{SignalId::kGramSigma, 0, 1, 3}}, Sink());
  merge.Hold(0, 4, 2, 0);
  merge.Add(0, Frame(5, SignalId::kRows, {1, 2}), 3, Sink());
  EXPECT_THAT(Steps(), ElementsAre(5));
}

TEST_F(RankMergeTest, AnOpenStepGetsTheRowsThatTheRunGains) {
  Layout layout = kMergedLayout;
  layout.tensors = 1;
  RankMerge merge(layout, 2);
  RankFrame first = Frame(5, SignalId::kReplicaSumLow, {7});
  first.blocks[0].head_count = 1;
  merge.Add(0, first, 1, Sink());
  layout.tensors = 3;
  merge.Grow(layout);
  RankFrame second = Frame(5, SignalId::kReplicaSumLow, {7, 8, 9});
  second.blocks[0] = {SignalId::kReplicaSumLow, 0, 3, 0, 1, 0};
  merge.Add(1, second, 2, Sink());
  ASSERT_THAT(closed_, SizeIs(1));
  EXPECT_THAT(closed_[0].matrix(SignalId::kReplicaSumLow), ElementsAre(7, 8, 9));
  EXPECT_THAT(closed_[0].disagreements, IsEmpty());
}

// Two stages of a pipeline: each tensor is reported by two of the four ranks, or by three of five.
TEST_F(RankMergeTest, ADisagreementNamesTheRanksThatHaveTheTensor) {
  Layout layout = kMergedLayout;
  layout.tensors = 2;
  RankMerge merge(layout, 5);
  const auto report = [&](uint32_t rank, int32_t tensor, float value) {
    RankFrame frame = Frame(1, SignalId::kReplicaSumLow, {value});
    frame.blocks[0].layer_begin = tensor;
    merge.Add(rank, frame, 1, Sink());
  };
  report(0, 0, 7);
  report(1, 0, 7);
  report(3, 1, 8);
  report(4, 1, 8);
  report(2, 1, 9);
  ASSERT_THAT(closed_, SizeIs(1));
  ASSERT_THAT(closed_[0].disagreements, SizeIs(1));
  const StepSample::Disagreement& found = closed_[0].disagreements[0];
  EXPECT_EQ(found.layer, 1);
  EXPECT_EQ(found.first_rank, 3u);
  EXPECT_EQ(found.reporters, 3u);
  EXPECT_THAT(found.ranks, ElementsAre(2u));
}

TEST_F(RankMergeTest, AMeanIsOfTheRanksThatReportedTheCell) {
  RankMerge merge(kMergedLayout, 3);
  merge.Add(0, Frame(1, SignalId::kLoss, {4}), 1, Sink());
  merge.Add(1, Frame(1, SignalId::kLoss, {NotMeasured()}), 1, Sink());
  merge.Add(2, Frame(1, SignalId::kLoss, {8}), 1, Sink());
  ASSERT_THAT(closed_, SizeIs(1));
  EXPECT_EQ(closed_[0].scalar(SignalId::kLoss), 6);
}

// Ranks may sample at other steps, as where one host is slower.
TEST_F(RankMergeTest, PartOfATensorIsNotShownAsTheWhole) {
  constexpr Layout kTensors{.layers = 1, .heads = 2, .kv_heads = 1, .head_dim = 64, .tensors = 2};
  RankMerge merge(kTensors, 2);
  const auto frame = [](uint32_t attempt, int64_t step, std::vector<float> values) {
    RankFrame of = Frame(step, SignalId::kTensorGradSumsq, {});
    of.attempt = attempt;
    of.blocks = {{SignalId::kTensorGradSumsq, 0, static_cast<int32_t>(values.size()), 0, 1, 0}};
    of.values = std::move(values);
    return of;
  };
  for (const uint32_t rank : {0u, 1u}) merge.Join(rank, 0, 2);
  // Both tell of the first tensor, and one of the second.
  merge.Add(0, frame(0, 0, {3, 7}), 1, Sink());
  merge.Add(1, frame(0, 0, {4}), 2, Sink());
  merge.Add(0, frame(0, 4, {5, 6}), 3, Sink());
  merge.Add(1, Frame(4, SignalId::kLoss, {1}), 4, Sink());
  ASSERT_THAT(closed_, SizeIs(2));
  EXPECT_THAT(closed_[0].matrix(SignalId::kTensorGradSumsq), ElementsAre(7, 7));
  EXPECT_TRUE(IsNotMeasured(closed_[1].matrix(SignalId::kTensorGradSumsq)[0]));
  EXPECT_EQ(closed_[1].matrix(SignalId::kTensorGradSumsq)[1], 6);
  // An attempt of another world size begins anew.
  merge.Join(0, 1, 1);
  merge.Add(0, frame(1, 5, {9, 9}), 5, Sink());
  EXPECT_THAT(closed_.back().matrix(SignalId::kTensorGradSumsq), ElementsAre(9, 9));
}

}  // namespace
}  // namespace bellwether::server
