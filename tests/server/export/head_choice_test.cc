// Goal: the worst heads get a series, keep it for the time they are promised,
// and never more than held_max of a run.
// Method: a small run whose values the test sets itself, and a clock in hand.

#include "server/export/head_choice.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>
#include <vector>

namespace bellwether::server {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;

constexpr int64_t kChoiceMinute = int64_t{60} * 1'000'000'000;
const float kNan = std::numeric_limits<float>::quiet_NaN();

// One layer whose heads have these logit maxima.
RunSnapshot RunWith(const std::vector<float>& logits) {
  RunSnapshot run;
  run.record.id = 1;
  auto sample = std::make_shared<StepSample>();
  sample->Reset({.layers = 1, .heads = static_cast<int32_t>(logits.size()), .kv_heads = 1});
  const std::span<float> values = sample->Add(SignalId::kLogitMax);
  std::copy(logits.begin(), logits.end(), values.begin());
  run.heads = sample;
  return run;
}

Head H(int32_t head) { return {0, head}; }

TEST(HeadChoiceTest, WorstByStageThenByValue) {
  HeadChoice choice({.heads_top = 3});
  RunSnapshot run = RunWith({1, 9, 5, 7});
  EXPECT_THAT(choice.Choose(run, 0), ElementsAre(H(1), H(3), H(2)));
  HeadChoice fresh({.heads_top = 2});
  run.head_stage = {2, 0, 0, 1};
  EXPECT_THAT(fresh.Choose(run, 0), ElementsAre(H(0), H(3)));
}

TEST(HeadChoiceTest, NanRanksWorstAndUnmeasuredIsLeftOut) {
  HeadChoice choice({.heads_top = 3});
  EXPECT_THAT(choice.Choose(RunWith({1, kNan, NotMeasured(), NotMeasured()}), 0), ElementsAre(H(1), H(0)));
  EXPECT_THAT(choice.Choose(RunSnapshot(), 0), IsEmpty());
}

TEST(HeadChoiceTest, StaysForFifteenMinutesAndNoLonger) {
  HeadChoice choice({.heads_top = 1});
  EXPECT_THAT(choice.Choose(RunWith({9, 1, 1}), 0), ElementsAre(H(0)));
  EXPECT_THAT(choice.Choose(RunWith({1, 9, 1}), kChoiceMinute), ElementsAre(H(1), H(0)));
  EXPECT_THAT(choice.Choose(RunWith({1, 9, 1}), 15 * kChoiceMinute - 1), ElementsAre(H(1), H(0)));
  EXPECT_THAT(choice.Choose(RunWith({1, 9, 1}), 15 * kChoiceMinute), ElementsAre(H(1)));
}

TEST(HeadChoiceTest, HoldsHeldMaxAndCountsWhoLeftEarly) {
  HeadChoice choice({.heads_top = 1, .held_max = 2});
  choice.Choose(RunWith({9, 1, 1}), 0);
  EXPECT_THAT(choice.Choose(RunWith({1, 9, 1}), 1), UnorderedElementsAre(H(0), H(1)));
  EXPECT_EQ(choice.evicted(), 0u);
  EXPECT_THAT(choice.Choose(RunWith({1, 1, 9}), 2), ElementsAre(H(2), H(1)));
  EXPECT_EQ(choice.evicted(), 1u);
}

TEST(HeadChoiceTest, ForgetsHeadsThatTheLayoutLostAndRunsThatLeft) {
  HeadChoice choice({.heads_top = 1});
  choice.Choose(RunWith({1, 1, 9}), 0);
  EXPECT_THAT(choice.Choose(RunWith({9, 1}), 1), ElementsAre(H(0)));
  choice.Keep({});
  EXPECT_THAT(choice.Choose(RunWith({1, 9}), 2), ElementsAre(H(1)));
}

TEST(HeadChoiceTest, ChoosesAllHeadsOrNone) {
  EXPECT_THAT(HeadChoice({.all = true}).Choose(RunWith({1, 9, 5}), 0), ElementsAre(H(1), H(2), H(0)));
  EXPECT_THAT(HeadChoice({.heads_top = 0}).Choose(RunWith({1, 9, 5}), 0), IsEmpty());
}

}  // namespace
}  // namespace bellwether::server
