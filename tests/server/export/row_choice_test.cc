// Goal: the rows furthest from zero get a series, keep it for a while, and stay few.
// Method: a run whose rows' values the test sets itself, and a clock in hand.

#include "server/export/row_choice.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <span>
#include <string>
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
    EXPECT_THAT(choice.Choose(RunOfRows(values), static_cast<int64_t>(turn)), SizeIs(testing::Le(4u)));
  }
}

// Own signals called a, b, ... of experts, each with these values; they stand one after the other.
RunSnapshot RunOfOwn(const std::vector<std::vector<float>>& signals) {
  auto rows = std::make_shared<RunRows>();
  std::vector<float> all;
  for (size_t i = 0; i < signals.size(); ++i) {
    rows->own_signals.push_back({.name = "s" + std::to_string(i), .granularity = Granularity::kExpert});
    for (size_t cell = 0; cell < signals[i].size(); ++cell) {
      rows->AddOwnCell({static_cast<int32_t>(i), 0, static_cast<int32_t>(cell)});
      all.push_back(signals[i][cell]);
    }
  }
  StepSample sample;
  Layout layout{.layers = 1, .heads = 1, .kv_heads = 1};
  layout.own = static_cast<int32_t>(all.size());
  sample.Reset(layout);
  std::copy(all.begin(), all.end(), sample.Add(SignalId::kOwnMean).begin());
  auto values = std::make_shared<RowValues>();
  values->Take(sample);
  RunSnapshot run;
  run.record.id = 1;
  run.rows = rows;
  run.row_values = values;
  return run;
}

constexpr size_t kOwnMeanRows = kCatalogueRowSignals;  // Of kRowSignals.

TEST(RowChoiceTest, SignalsWithAMetricOfRowsAreKept) {
  for (const SignalInfo& signal : std::span(SignalTable(), SignalCount())) {
    const std::span<const MetricInfo> metrics(signal.metrics, signal.metric_count);
    const bool has_one = std::ranges::any_of(metrics, [](const MetricInfo& m) { return m.level == MetricLevel::kRow; });
    const auto kept = static_cast<size_t>(std::ranges::find(kRowSignals, signal.id) - kRowSignals.begin());
    EXPECT_TRUE(!has_one || kept < kCatalogueRowSignals) << signal.name;
  }
}

TEST(RowChoiceTest, EachOwnSignalHasItsWorstCellsFirst) {
  static_assert(kRowSignals[kOwnMeanRows] == SignalId::kOwnMean);
  RowChoice choice({.rows_top = 2});
  EXPECT_THAT(choice.Choose(RunOfOwn({{1, -9, 5}, {0}, {kNoNumber, 3, NotMeasured()}}), 0),
              ElementsAre(ChosenRow{kOwnMeanRows, 1}, ChosenRow{kOwnMeanRows, 3}, ChosenRow{kOwnMeanRows, 4},
                          ChosenRow{kOwnMeanRows, 2}, ChosenRow{kOwnMeanRows, 5}))
      << "a zero that was logged is a value";
  EXPECT_THAT(RowChoice({.rows_top = 0}).Choose(RunOfOwn({{1}}), 0), IsEmpty());
}

TEST(RowChoiceTest, ManyOwnSignalsStayBounded) {
  RowChoice choice({.rows_top = 2});
  const RunSnapshot run = RunOfOwn(std::vector<std::vector<float>>(200, {1, 2, 3}));
  const std::vector<ChosenRow> chosen = choice.Choose(run, 0);
  EXPECT_THAT(chosen, SizeIs(2 * kOwnRowsFactor));
  EXPECT_EQ(chosen.back(), (ChosenRow{kOwnMeanRows, 3 * 15 + 2})) << "one of each of the first";
}

TEST(RowChoiceTest, OwnCellsThatChangePlacesStayBounded) {
  RowChoice choice({.rows_top = 2});
  std::vector<float> values(100, 1);
  for (size_t turn = 0; turn < values.size(); ++turn) {
    values[turn] = static_cast<float>(10 + turn);
    EXPECT_THAT(choice.Choose(RunOfOwn({values, {1}}), static_cast<int64_t>(turn)),
                SizeIs(testing::Le(2 * 2 * kOwnRowsFactor)));
  }
}

}  // namespace
}  // namespace bellwether::server
