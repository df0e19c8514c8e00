// Goal: each row has the value that it had when it was last measured, in this attempt.
// Method: samples of four rows that take turns.

#include "server/model/row_values.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

namespace bellwether::server {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

const float kNone = NotMeasured();

// Of a variance of one, so that z is the difference.
StepSample DifferencesOf(uint32_t attempt, const std::vector<float>& differences) {
  StepSample sample;
  Layout layout{.layers = 1, .heads = 1, .kv_heads = 1};
  layout.modules = static_cast<int32_t>(differences.size());
  sample.Reset(layout);
  sample.attempt = attempt;
  std::ranges::copy(differences, sample.Add(SignalId::kLawDifference).begin());
  for (float& value : sample.Add(SignalId::kLawVariance)) value = 1;
  return sample;
}

std::vector<float> MeasuredOf(const RowValues& values) {
  std::vector<float> out;
  for (const float value : values.of(0)) out.push_back(IsNotMeasured(value) ? -1 : value);
  return out;
}

TEST(RowValuesTest, RowsKeepTheirNewestValue) {
  RowValues values;
  EXPECT_THAT(values.of(0), IsEmpty());
  EXPECT_TRUE(values.Take(DifferencesOf(0, {1, kNone, kNone})));
  EXPECT_TRUE(values.Take(DifferencesOf(0, {kNone, 2, kNone})));
  EXPECT_THAT(MeasuredOf(values), ElementsAre(1, 2, -1));
  EXPECT_TRUE(values.Take(DifferencesOf(0, {3, kNone, kNone, 4})));
  EXPECT_THAT(MeasuredOf(values), ElementsAre(3, 2, -1, 4));
  EXPECT_THAT(values.of(1), IsEmpty());
}

TEST(RowValuesTest, SamplesWithoutRowsChangeNothing) {
  RowValues values;
  StepSample sample;
  sample.Reset({.layers = 1, .heads = 1, .kv_heads = 1});
  EXPECT_FALSE(values.Take(sample));
  EXPECT_FALSE(values.Take(DifferencesOf(0, {kNone})));
}

TEST(RowValuesTest, ANewAttemptBeginsWithNoValues) {
  RowValues values;
  values.Take(DifferencesOf(0, {1, 2}));
  EXPECT_TRUE(values.Take(DifferencesOf(1, {kNone, 5})));
  EXPECT_THAT(MeasuredOf(values), ElementsAre(-1, 5));
  EXPECT_FALSE(values.Take(DifferencesOf(0, {9, 9}))) << "a straggler";
  EXPECT_THAT(MeasuredOf(values), ElementsAre(-1, 5));
}

}  // namespace
}  // namespace bellwether::server
