// Goal: a span's summary is that of its values, whatever they are; it comes back
// from its row cell by cell; what was added before a restart is not forgotten;
// no damaged row is read out of bounds.
// Method: a plain loop against the builder; cuts and flips at random (seed printed).
#include "server/store/series_summary.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "server/model/step_sample.h"

namespace bellwether::server {
namespace {

std::vector<int64_t> SummarySteps(size_t n, int64_t first, int64_t period) {
  std::vector<int64_t> steps(n);
  for (size_t i = 0; i < n; ++i) steps[i] = first + static_cast<int64_t>(i) * period;
  return steps;
}

std::vector<SummarizedSpan> Decode(const std::string& row, size_t cell) {
  std::vector<SummarizedSpan> spans;
  const absl::Status status = DecodeSpans(row, cell, &spans);
  EXPECT_TRUE(status.ok()) << status;
  return spans;
}

TEST(SeriesSummaryTest, IsThatOfTheValues) {
  const float nan = std::nanf("");
  //                                numbers     mixed          NaN only  not measured
  const std::vector<float> values = {1,   nan,
                                     nan, NotMeasured(),  //
                                     5,   -2,
                                     nan, NotMeasured(),  //
                                     3,   NotMeasured(),
                                     nan, NotMeasured()};
  const auto steps = SummarySteps(3, 10, 10);
  const auto summaries = Summarize({.steps = steps, .values = values.data(), .cells = 4, .stride = 4});
  const std::string row = EncodeSpans(summaries, 0, 4);
  const auto numbers = Decode(row, 0), mixed = Decode(row, 1), nans = Decode(row, 2), none = Decode(row, 3);
  ASSERT_EQ(numbers.size(), 1u);
  EXPECT_EQ(numbers[0].first_step, 10);
  EXPECT_EQ(numbers[0].last_step, 30);
  EXPECT_EQ(numbers[0].next_step, 31);
  EXPECT_EQ(numbers[0].steps, 3u);
  EXPECT_EQ(numbers[0].summary.min, 1);
  EXPECT_EQ(numbers[0].summary.mean, 3);
  EXPECT_EQ(numbers[0].summary.max, 5);
  EXPECT_EQ(numbers[0].summary.numbers, 3);
  EXPECT_EQ(mixed[0].summary.mean, -2);
  EXPECT_EQ(mixed[0].summary.numbers, 1);
  EXPECT_EQ(mixed[0].summary.nans, 1);
  EXPECT_TRUE(std::isnan(nans[0].summary.mean));
  EXPECT_EQ(nans[0].summary.nans, 3);
  EXPECT_TRUE(std::isnan(none[0].summary.max));
  EXPECT_EQ(none[0].summary.numbers + none[0].summary.nans, 0);
  EXPECT_TRUE(Decode(row, 4).empty());
}

TEST(SeriesSummaryTest, LongRowsHaveASpanPer256StepsAndGroup) {
  const size_t steps_count = 2 * kSpanSteps + 100, cells = 11;
  const auto steps = SummarySteps(steps_count, -300, 3);
  std::vector<float> values(steps_count * cells);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % 997);
  values[5 * cells + 9] = NotMeasured();  // The first span of the second group counts.
  values[6 * cells + 2] = INFINITY;
  const auto summaries = Summarize({.steps = steps, .values = values.data(), .cells = cells, .stride = cells});
  ASSERT_EQ(summaries.size(), 3u);
  for (size_t cell = 0; cell < cells; ++cell) {
    const std::string row = cell < 8 ? EncodeSpans(summaries, 0, 8) : EncodeSpans(summaries, 8, cells);
    const auto spans = Decode(row, cell % 8);
    ASSERT_EQ(spans.size(), 3u);
    for (size_t i = 0; i < 3; ++i) {
      const size_t from = i * kSpanSteps, to = std::min<size_t>(from + kSpanSteps, steps_count);
      float low = INFINITY, high = -INFINITY;
      double sum = 0;
      uint16_t count = 0;
      for (size_t t = from; t < to; ++t) {
        const float value = values[t * cells + cell];
        if (IsNotMeasured(value)) continue;
        low = std::min(low, value);
        high = std::max(high, value);
        sum += value;
        ++count;
      }
      EXPECT_EQ(spans[i].first_step, steps[from]);
      EXPECT_EQ(spans[i].last_step, steps[to - 1]);
      EXPECT_EQ(spans[i].summary.min, low);
      EXPECT_EQ(spans[i].summary.max, high);
      EXPECT_EQ(spans[i].summary.mean, static_cast<float>(sum / count));
      EXPECT_EQ(spans[i].summary.numbers, count);
    }
  }
}

TEST(SeriesSummaryTest, ABuilderGoesOnAfterARestart) {
  SpanBuilder before(3), after(3), other(4);
  const float first[] = {1, -2, NotMeasured()}, second[] = {3, NAN, 7};
  before.Add(10, first);
  std::string saved;
  ByteWriter out(&saved);
  before.Save(&out);
  ByteReader in(saved);
  ASSERT_TRUE(after.Restore(&in) && in.done());
  before.Add(12, second);
  after.Add(12, second);
  const SpanSummary a = before.Take(), b = after.Take();
  EXPECT_EQ(EncodeSpans({&a, 1}, 0, 3), EncodeSpans({&b, 1}, 0, 3));
  EXPECT_EQ(a.series[0].mean, 2);
  EXPECT_EQ(a.series[2].numbers, 1);
  ByteReader again(saved);
  EXPECT_FALSE(other.Restore(&again)) << "of another number of cells";
  for (size_t size = 0; size < saved.size(); ++size) {
    ByteReader cut(std::string_view(saved).substr(0, size));
    EXPECT_FALSE(after.Restore(&cut)) << size;
  }
}

TEST(SeriesSummaryTest, DamagedRowsGiveAnErrorOrSpansNeverMore) {
  const uint32_t seed = 11;
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  const auto steps = SummarySteps(600, 0, 1);
  std::vector<float> values(600 * 8);
  for (float& value : values) value = static_cast<float>(random());
  const std::string good =
      EncodeSpans(Summarize({.steps = steps, .values = values.data(), .cells = 8, .stride = 8}), 0, 8);
  std::vector<SummarizedSpan> spans;
  for (int i = 0; i < 3000; ++i) {
    std::string bad = good.substr(0, random() % (good.size() + 1));
    if (!bad.empty()) bad[random() % bad.size()] ^= static_cast<char>(1 << random() % 8);
    const std::vector<char> exact(bad.begin(), bad.end());  // The sanitizer sees the first byte too many.
    spans.clear();
    if (!DecodeSpans({exact.data(), exact.size()}, random() % 9, &spans).ok()) continue;
    for (const SummarizedSpan& span : spans) EXPECT_LE(span.first_step, span.last_step);
  }
  EXPECT_FALSE(DecodeSpans("", 0, &spans).ok());
  EXPECT_FALSE(DecodeSpans(good.substr(0, good.size() - 1), 0, &spans).ok());
}

}  // namespace
}  // namespace bellwether::server
