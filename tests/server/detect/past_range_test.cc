// Goal: the range of a past is of whole blocks, however it is closed.
// Method: values counted by hand.

#include "server/detect/past_range.h"

#include <gtest/gtest.h>

namespace bellwether::server {
namespace {

using Range8 = PastRange<8>;

Range8 Filled(int values) {
  Range8 range;
  for (int i = 0; i < values; ++i) range.Add(static_cast<float>(i));
  return range;
}

TEST(PastRangeTest, TwoWholeBlocksAreAPast) {
  EXPECT_FALSE(Filled(15).known());
  const Range8 range = Filled(20);
  ASSERT_TRUE(range.known());
  EXPECT_EQ(range.low(), 0);
  EXPECT_EQ(range.high(), 15) << "what is under way is no past";
}

TEST(PastRangeTest, FewValuesJoinTheBlockBefore) {
  Range8 range = Filled(16);
  range.Add(100);
  range.Close();
  EXPECT_EQ(range.low(), 0);
  EXPECT_EQ(range.high(), 100);
  for (int i = 0; i < 8; ++i) range.Add(3);
  EXPECT_EQ(range.low(), 3) << "a whole block replaces the oldest";
  EXPECT_EQ(range.high(), 100);
}

TEST(PastRangeTest, ManyValuesAreABlock) {
  Range8 range = Filled(16);
  for (int i = 0; i < 4; ++i) range.Add(100);
  range.Close();
  EXPECT_EQ(range.low(), 8);
  EXPECT_EQ(range.high(), 100);
}

TEST(PastRangeTest, FewValuesWithoutAPastWaitForMore) {
  Range8 range = Filled(3);
  range.Close();
  for (int i = 0; i < 12; ++i) range.Add(1);
  EXPECT_FALSE(range.known());
  range.Add(1);
  EXPECT_TRUE(range.known());
  EXPECT_EQ(range.high(), 2);
}

}  // namespace
}  // namespace bellwether::server
