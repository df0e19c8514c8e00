// Goal: the rows furthest from zero get a series, keep it for a while, and stay few.
// Method: a run whose rows' values the test sets itself, and a clock in hand.

#include "server/export/row_choice.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <memory>
#include <vector>

#include "tests/support/row_snapshots.h"

namespace bellwether::server {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;
using testing::SizeIs;

constexpr int64_t kRowMinute = int64_t{60} * 1'000'000'000;
const float kNoNumber = std::numeric_limits<float>::quiet_NaN();

RunSnapshot RunOfRows(const std::vector<float>& z, const std::vector<float>& nonfinite = {}) {
  RunSnapshot run;
  run.record.id = 1;
  SetRows(z, nonfinite, &run);
  return run;
}

TEST(RowChoiceTest, FurthestFromZeroComesFirst) {
  RowChoice choice({.rows_top = 3});
  EXPECT_THAT(choice.Choose(RunOfRows({1, -9, 5, kNoNumber}), 0),
              ElementsAre(ChosenRow{0, 3}, ChosenRow{0, 1}, ChosenRow{0, 2}));
}

TEST(RowChoiceTest, EachSignalHasItsOwnRows) {
  RowChoice choice({.rows_top = 1});
  EXPECT_THAT(choice.Choose(RunOfRows({1, 2, 3}, {0, 7, 0}), 0), ElementsAre(ChosenRow{0, 2}, ChosenRow{1, 1}));
}

TEST(RowChoiceTest, ZeroAndTheUnmeasuredAreLeftOut) {
  RowChoice choice({});
  EXPECT_THAT(choice.Choose(RunOfRows({0, NotMeasured(), 2}, {0, 0, 0}), 0), ElementsAre(ChosenRow{0, 2}));
  EXPECT_THAT(choice.Choose(RunSnapshot(), 0), IsEmpty());
  EXPECT_THAT(RowChoice({.rows_top = 0}).Choose(RunOfRows({1}), 0), IsEmpty());
}

TEST(RowChoiceTest, RowsStayFifteenMinutes) {
  RowChoice choice({.rows_top = 1});
  choice.Choose(RunOfRows({9, 1}), 0);
  EXPECT_THAT(choice.Choose(RunOfRows({1, 9}), kRowMinute), ElementsAre(ChosenRow{0, 1}, ChosenRow{0, 0}));
  EXPECT_THAT(choice.Choose(RunOfRows({NotMeasured(), 9}), kRowMinute), ElementsAre(ChosenRow{0, 1}));
  EXPECT_THAT(choice.Choose(RunOfRows({1, 9}), 16 * kRowMinute), ElementsAre(ChosenRow{0, 1}));
}

TEST(RowChoiceTest, ManyRowsThatChangePlacesStayBounded) {
  RowChoice choice({.rows_top = 2});
  std::vector<float> values(100, 1);
  for (size_t turn = 0; turn < values.size(); ++turn) {
    values[turn] = static_cast<float>(10 + turn);
    EXPECT_THAT(choice.Choose(RunOfRows(values), static_cast<int64_t>(turn)), SizeIs(testing::Le(8u)));
  }
}

}  // namespace
}  // namespace bellwether::server
