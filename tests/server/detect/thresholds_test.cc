// Goal: the table names every number of JudgeOptions once, and what is built in
// is legal.
// Method: each row writes through its slot; the rest must not move.

#include "server/detect/thresholds.h"

#include <gtest/gtest.h>

#include <set>

namespace bellwether::server {
namespace {

TEST(ThresholdsTest, EachRowIsANumberOfItsOwn) {
  JudgeOptions options;
  std::set<void*> places;
  std::set<std::string> paths;
  for (const Threshold& row : Thresholds()) {
    void* const place = std::visit([](auto* value) { return static_cast<void*>(value); }, row.slot(&options));
    EXPECT_TRUE(places.insert(place).second) << row.path() << " is another row's number";
    EXPECT_TRUE(paths.insert(row.path()).second) << row.path();
    EXPECT_EQ(FindThreshold(row.path()), &row);
    EXPECT_NE(*row.help, '\0') << row.path();
  }
  EXPECT_EQ(FindThreshold("drift.nothing"), nullptr);
  EXPECT_EQ(FindThreshold(""), nullptr);
}

TEST(ThresholdsTest, BuiltInThresholdsAreLegal) {
  const JudgeOptions options;
  for (const Threshold& row : Thresholds()) {
    EXPECT_LE(row.low, row.Get(options)) << row.path();
    EXPECT_GE(row.high, row.Get(options)) << row.path();
  }
  for (const ThresholdOrder& order : ThresholdOrders()) {
    ASSERT_NE(FindThreshold(order.smaller), nullptr) << order.smaller;
    ASSERT_NE(FindThreshold(order.larger), nullptr) << order.larger;
    EXPECT_LE(FindThreshold(order.smaller)->Get(options), FindThreshold(order.larger)->Get(options));
  }
}

TEST(ThresholdsTest, SetsBothEndsOfEachRange) {
  for (const Threshold& row : Thresholds()) {
    for (const double value : {row.low, row.high}) {
      JudgeOptions options;
      row.Set(value, &options);
      EXPECT_EQ(row.Get(options), value) << row.path() << ": the range is wider than its type";
    }
  }
}

TEST(ThresholdsTest, NumbersReadBack) {
  EXPECT_EQ(NumberText(4), "4");
  EXPECT_EQ(NumberText(0.02), "0.02");
  EXPECT_EQ(NumberText(2e-4), "0.0002");
  EXPECT_EQ(std::stod(NumberText(1.0 / 3)), 1.0 / 3);
}

TEST(ThresholdsTest, BuiltinSetHoldsItsMembers) {
  BuiltinSet set;
  set.Add(Builtin::kOverhead);
  set.Add(Builtin::kDrift);
  EXPECT_TRUE(set.has(Builtin::kDrift) && set.has(Builtin::kOverhead));
  EXPECT_FALSE(set.has(Builtin::kTies));
  EXPECT_STREQ(NameOf(Builtin::kDriftCommonMode), "drift.common_mode");
  EXPECT_STREQ(NameOf(Builtin::kOverhead), "overhead");
}

}  // namespace
}  // namespace bellwether::server
