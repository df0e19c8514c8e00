// Goal: two batches that are no data like those before are found in their step; one is not, and neither is a
// loss that grows, is up for all sequences alike, or has heavy tails.
// Method: losses of steps, drawn at random, with batches planted.

#include "server/detect/odd_batches.h"

#include <gmock/gmock.h>

#include <cmath>
#include <limits>
#include <random>
#include <string>

#include "server/detect/archive.h"

namespace bellwether::server {
namespace {

class OddBatchesTest : public testing::Test {
 protected:
  OddBatches::Batch Usual() {
    OddBatches::Batch batch{.step = step_++};
    batch.repeated = static_cast<float>(0.2 + 0.05 * normal_(random_));
    batch.mean =
        static_cast<float>(std::max(5.5 - 0.03 * static_cast<double>(batch.step), 2.4) + 0.2 * normal_(random_));
    batch.largest = batch.mean + static_cast<float>(0.6 + 0.2 * std::abs(normal_(random_)));
    return batch;
  }
  bool Judge(const OddBatches::Batch& batch) {
    odd_.Observe(batch, 100, false);
    return odd_.found();
  }
  void JudgeHealthy(int steps) {
    for (int i = 0; i < steps; ++i) ASSERT_FALSE(Judge(Usual()));
  }
  // One sequence of four is none.
  OddBatches::Batch OneBad() {
    OddBatches::Batch batch = Usual();
    batch.mean += 1.5f;
    batch.largest = 8;
    return batch;
  }

  int64_t step_ = 0;
  std::mt19937 random_{11};
  std::normal_distribution<double> normal_;
  OddBatches odd_;
};

TEST_F(OddBatchesTest, TwoBadBatchesAreFoundAndTheirStepsTold) {
  JudgeHealthy(200);
  EXPECT_FALSE(Judge(OneBad()));
  EXPECT_TRUE(Judge(OneBad()));
  Judge(OneBad());
  EXPECT_EQ(odd_.first_step(), 200);
  EXPECT_EQ(odd_.last_step(), 202);
  EXPECT_EQ(odd_.count(), 3);
  for (int i = 0; i < 6; ++i) {
    EXPECT_FALSE(odd_.ended());
    Judge(Usual());
  }
  EXPECT_TRUE(odd_.ended());
  JudgeHealthy(300);
}

TEST_F(OddBatchesTest, OneBadBatchNowAndThenIsNotFound) {
  JudgeHealthy(100);
  for (int i = 0; i < 50; ++i) {
    EXPECT_FALSE(Judge(OneBad()));
    JudgeHealthy(40);
  }
}

TEST_F(OddBatchesTest, BatchesOfRepeatedLabelsAreFoundWithALoss) {
  JudgeHealthy(200);
  for (const bool up : {false, true}) {
    bool found = false;
    for (int i = 0; i < 4; ++i) {
      OddBatches::Batch batch = Usual();
      batch.repeated = 0.9f;
      batch.mean += up ? 1.0f : -1.0f;
      batch.largest = batch.mean + 0.6f;
      found = Judge(batch) || found;
    }
    EXPECT_EQ(found, up);
    for (int i = 0; i < 20; ++i) Judge(Usual());
  }
}

TEST_F(OddBatchesTest, WorseThanChanceIsBadThoughAllSequencesAre) {
  JudgeHealthy(200);
  for (int i = 0; i < 2; ++i) {
    OddBatches::Batch batch = Usual();
    batch.mean = 7.5f;
    batch.largest = 8;
    Judge(batch);
  }
  EXPECT_TRUE(odd_.found());
}

TEST_F(OddBatchesTest, LossUpOfAllSequencesAlikeIsNotFound) {
  JudgeHealthy(200);
  for (int i = 0; i < 60; ++i) {
    OddBatches::Batch batch = Usual();
    batch.mean += 1.2f;
    batch.largest += 1.2f;
    ASSERT_FALSE(Judge(batch)) << i;
  }
}

TEST_F(OddBatchesTest, GrowthAndARiseOfTheRateAreNotFound) {
  JudgeHealthy(200);
  for (int i = 0; i < 60; ++i) {
    OddBatches::Batch batch = Usual();
    batch.mean += 0.05f * static_cast<float>(i);
    batch.largest += 0.1f * static_cast<float>(i);
    ASSERT_FALSE(Judge(batch)) << i;
  }
  odd_.Clear();
  JudgeHealthy(200);
  for (int i = 0; i < 4; ++i) {
    odd_.Observe(OneBad(), 100, true);
    EXPECT_FALSE(odd_.found());
  }
}

TEST_F(OddBatchesTest, HeavyTailsAreSeldomFound) {
  std::exponential_distribution<double> tail(3);
  int found = 0;
  for (int i = 0; i < 200000; ++i) {
    OddBatches::Batch batch{.step = i,
                            .mean = std::numeric_limits<float>::quiet_NaN(),
                            .repeated = std::numeric_limits<float>::quiet_NaN()};
    batch.largest = static_cast<float>(3 * std::exp(tail(random_)));
    found += Judge(batch) ? 1 : 0;
  }
  EXPECT_LE(found, 4);
}

// An AR(r) of deviation 1: one value says much of the next.
TEST_F(OddBatchesTest, LossesLikeTheirNeighboursAreSeldomFound) {
  for (const double kept : {0.9, 0.98}) {
    odd_.Clear();
    double state = 0;
    int groups = 0;
    bool before = false;
    for (int i = 0; i < 30000; ++i) {
      state = kept * state + std::sqrt(1 - kept * kept) * normal_(random_);
      OddBatches::Batch batch{.step = step_++, .repeated = std::numeric_limits<float>::quiet_NaN()};
      batch.mean = static_cast<float>(2 * std::exp(0.08 * state));
      batch.largest = batch.mean + static_cast<float>(0.6 + 0.2 * std::abs(normal_(random_)));
      const bool found = Judge(batch);
      groups += found && !before ? 1 : 0;
      before = found;
    }
    EXPECT_LE(groups, 1) << kept;
    for (int i = 0; i < 6 && !odd_.found(); ++i) Judge(OneBad());
    EXPECT_TRUE(odd_.found()) << kept;
  }
}

TEST_F(OddBatchesTest, BatchesThatStayAreTheNewNormal) {
  JudgeHealthy(200);
  for (int i = 0; i < 100; ++i) Judge(OneBad());
  EXPECT_FALSE(Judge(OneBad()));
}

TEST_F(OddBatchesTest, ASavedStateFindsTheSame) {
  JudgeHealthy(200);
  Judge(OneBad());
  std::string saved;
  StateWriter writer(&saved);
  writer(odd_);
  OddBatches restored;
  StateReader reader(saved);
  reader(restored);
  ASSERT_TRUE(reader.at_end() && restored.Consistent());
  restored.Observe(OneBad(), 100, false);
  EXPECT_TRUE(restored.found());
  EXPECT_EQ(restored.first_step(), 200);
}

}  // namespace
}  // namespace bellwether::server
