// Goal: what is old becomes 12-bit values, then summaries, then nothing, at the
// step where the configuration says so and never before; sums whose sign counts
// keep every bit; queries go on from what is left; it can be broken off anywhere.
// Method: a run stored as a shard does it, a clock of the test's own, and reads
// against what was appended.
#include "server/store/retention.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <memory>

#include "server/store/rocks_database.h"
#include "server/store/series_keys.h"
#include "server/store/series_store.h"
#include "server/store/series_summary.h"
#include "tests/support/temp_directory.h"

namespace bellwether::server {
namespace {

constexpr RunId kRetainedRun = 3;
constexpr int64_t kDay = 86'400;
constexpr int64_t kSteps = 1024;  // A day, four chunks.

float RetainedValue(SignalId signal, int64_t step, int cell) {
  const auto mixed = static_cast<uint64_t>(step * 7919 + cell * 31 + static_cast<int>(signal)) * 0x9e3779b97f4a7c15u;
  return static_cast<float>(static_cast<int64_t>(mixed >> 40) - (1 << 23)) / 1000;
}

TEST(RetentionTest, RoundsTo12BitsOfMantissa) {
  for (const float value : {1.0f, -1.0f, 8191.0f, 4096.0f, 0.0f, -0.0f, 0.5f}) {
    EXPECT_EQ(std::bit_cast<uint32_t>(RoundTo12Bits(value)), std::bit_cast<uint32_t>(value)) << value;
  }
  for (int i = 0; i < 10'000; ++i) {
    const float value = RetainedValue(SignalId::kLoss, i, 0);
    const float rounded = RoundTo12Bits(value);
    EXPECT_LE(std::abs(rounded - value), std::ldexp(std::abs(value), -13)) << value;
    EXPECT_EQ(std::bit_cast<uint32_t>(rounded) & 0x7ff, 0u);
    EXPECT_EQ(RoundTo12Bits(rounded), rounded);
  }
  const float huge = std::numeric_limits<float>::max();
  EXPECT_TRUE(std::isfinite(RoundTo12Bits(huge)));
  EXPECT_EQ(RoundTo12Bits(INFINITY), INFINITY);
  for (const uint32_t bits : {0x7fc0be11u, 0x7f800001u, 0xffc12345u}) {
    EXPECT_EQ(std::bit_cast<uint32_t>(RoundTo12Bits(std::bit_cast<float>(bits))), bits);
  }
}

TEST(RetentionTest, StateIsReadBackAndDamageIsSeen) {
  RetentionState state;
  state.marks = {{1'700'000'000'000'000'000, {0, -5}}, {1'700'000'000'000'000'001, {7, INT64_MAX}}};
  state.rounded = {7, 12};
  const std::string bytes = EncodeRetentionState(state);
  const auto read = DecodeRetentionState(bytes);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(EncodeRetentionState(*read), bytes);
  for (size_t cut = 0; cut < bytes.size(); ++cut) EXPECT_FALSE(DecodeRetentionState(bytes.substr(0, cut)).ok()) << cut;
}

class JumpingClock final : public Clock {
 public:
  int64_t UnixNanos() const override { return passed_ns_ + ahead_ns_; }
  int64_t MonotonicNanos() const override { return passed_ns_; }
  void Advance(int64_t nanos) { passed_ns_ += nanos; }
  void JumpWall(int64_t nanos) { ahead_ns_ += nanos; }  // No time passes.

 private:
  int64_t passed_ns_ = 1'700'000'000'000'000'000;
  int64_t ahead_ns_ = 0;
};

class RetentionRunTest : public testing::Test {
 protected:
  void SetUp() override {
    auto database = Database::Open({.directory = directory_.path() + "/db"});
    ASSERT_TRUE(database.ok()) << database.status();
    database_ = *std::move(database);
    store_ = SeriesStore::Create({}, database_.get());
    record_.id = kRetainedRun;
    record_.description.name = "old";
    record_.description.layout = layout_;
  }
  // What a shard does in a day of the attempt, or a part of it; then a pass.
  void Day(uint32_t attempt, int64_t begin, int64_t end, double part = 1) {
    store_->Open(kRetainedRun, layout_);
    for (int64_t step = begin; step < end; ++step)
      ASSERT_TRUE(store_->Append(kRetainedRun, Sample(step, attempt)).ok());
    record_.description.attempt = attempt;
    record_.step = end - 1;
    record_.steps_recorded += static_cast<uint64_t>(end - begin);
    End();
    store_->Drain();
    Pass();
    clock_.Advance(static_cast<int64_t>(part * kDay * 1e9));
  }
  // Its goodbye: what it still had in memory is stored.
  void End() {
    record_.ended = true;
    auto batch = database_->NewBatch();
    ASSERT_TRUE(store_->Close(kRetainedRun, batch.get()).ok());
    batch->PutRun(record_);
    ASSERT_TRUE(database_->Commit(std::move(batch)).ok());
    Publish();
  }
  void Publish() {
    auto snapshot = std::make_shared<RunSnapshot>();
    snapshot->record = record_;
    table_.Publish(snapshot);
  }
  int Stored(const char* kind) const {
    int rows = 0;
    EXPECT_TRUE(RocksDatabase::Snapshot(RocksDatabase::As(database_.get()))
                    .Scan(KeyBuilder(*kind).U64(kRetainedRun).key(), {},
                          [&](std::string_view, std::string_view) {
                            ++rows;
                            return true;
                          })
                    .ok());
    return rows;
  }
  void Wait(double days) {
    clock_.Advance(static_cast<int64_t>(days * kDay * 1e9));
    Pass();
  }
  void Pass() {
    Retention::Options options;
    options.raw_seconds = 2 * kDay;
    options.rounded_seconds = 4 * kDay;
    options.summarized_seconds = 8 * kDay;
    Retention(options, &table_, database_.get(), store_.get(), &counters_, &clock_).Pass();
  }
  StepSample Sample(int64_t step, uint32_t attempt) const {
    StepSample sample;
    sample.Reset(layout_);
    sample.step = step;
    sample.attempt = attempt;
    sample.time_unix_ns = 0;  // A trainer whose clock is wrong.
    for (const SignalId signal : {SignalId::kLoss, SignalId::kLogitMax, SignalId::kDeltaBiasSum}) {
      const auto values = sample.Add(signal);
      for (size_t i = 0; i < values.size(); ++i) values[i] = RetainedValue(signal, step, static_cast<int>(i));
    }
    return sample;
  }
  SeriesPoints Read(SignalId signal, int64_t begin, int64_t end, size_t points = 100'000) const {
    auto series =
        store_->ReadSeries(kRetainedRun, layout_, {signal, 0, 1}, begin, end, points, SeriesStore::kNewestAttempt);
    EXPECT_TRUE(series.ok()) << series.status();
    return series.ok() ? *std::move(series) : SeriesPoints{};
  }
  // Cell 1 of all steps of [begin, end) is there, as `expected` makes it of what was measured.
  template <typename F>
  void ExpectValues(SignalId signal, int64_t begin, int64_t end, F expected) const {
    const SeriesPoints points = Read(signal, begin, end);
    ASSERT_EQ(points.step.size(), static_cast<size_t>(end - begin));
    for (size_t i = 0; i < points.step.size(); ++i) {
      ASSERT_EQ(points.step[i], begin + static_cast<int64_t>(i));
      ASSERT_EQ(points.mean[i], expected(RetainedValue(signal, points.step[i], 1))) << points.step[i];
    }
  }
  // Of kLogitMax: 12 bits, but for a chunk so short that nothing is gained.
  void ExpectRounded(int64_t begin, int64_t end) const {
    const SeriesPoints points = Read(SignalId::kLogitMax, begin, end);
    ASSERT_EQ(points.step.size(), static_cast<size_t>(end - begin));
    int whole = 0;
    for (size_t i = 0; i < points.step.size(); ++i) {
      const float value = RetainedValue(SignalId::kLogitMax, points.step[i], 1);
      if (points.mean[i] == RoundTo12Bits(value)) continue;
      ASSERT_EQ(points.mean[i], value) << points.step[i];
      ++whole;
    }
    EXPECT_LT(whole, 32);
  }
  // Of kLogitMax, by spans: each bucket is exact over its steps.
  void ExpectSpans(const SeriesPoints& spans, int64_t end) const {
    EXPECT_TRUE(spans.downsampled);
    for (size_t i = 0; i < spans.step.size(); ++i) {
      float low = INFINITY, high = -INFINITY;
      for (int64_t step = spans.step[i]; step < (i + 1 < spans.step.size() ? spans.step[i + 1] : end); ++step) {
        low = std::min(low, RetainedValue(SignalId::kLogitMax, step, 1));
        high = std::max(high, RetainedValue(SignalId::kLogitMax, step, 1));
      }
      EXPECT_EQ(spans.min[i], low) << "of what was measured, not of what was rounded";
      EXPECT_EQ(spans.max[i], high);
    }
  }
  double Rows(const char* result) {
    return counters_.counter("bellwether_retention_rows_total", {{"result", result}})->value();
  }

  const Layout layout_{.layers = 2, .heads = 8, .kv_heads = 8};
  TempDirectory directory_;
  std::unique_ptr<Database> database_;
  std::unique_ptr<SeriesStore> store_;
  RunRecord record_;
  RunTable table_;
  Counters counters_;
  JumpingClock clock_;
};

constexpr auto kAsItWas = [](float value) { return value; };

TEST_F(RetentionRunTest, EachDayGetsItsTier) {
  Day(0, 0, kSteps);
  ExpectValues(SignalId::kLogitMax, 0, kSteps, kAsItWas);
  Wait(0.9);  // 1.9 days after it was seen.
  EXPECT_EQ(Rows("rounded"), 0);
  ExpectValues(SignalId::kLogitMax, 0, kSteps, kAsItWas);

  Wait(0.2);
  EXPECT_GT(Rows("rounded"), 0);
  ExpectRounded(0, kSteps);
  ExpectValues(SignalId::kDeltaBiasSum, 0, kSteps, kAsItWas);
  const double rounded = Rows("rounded");
  Pass();
  EXPECT_EQ(Rows("rounded"), rounded) << "done once";

  const SeriesPoints before = Read(SignalId::kLogitMax, 0, kSteps, 2);
  Wait(2);  // 4.1 days.
  EXPECT_GT(Rows("summarized"), 0);
  const SeriesPoints spans = Read(SignalId::kLogitMax, 0, kSteps);
  ASSERT_GE(spans.step.size(), static_cast<size_t>(kSteps / kSpanSteps));
  ASSERT_LE(spans.step.size(), static_cast<size_t>(kSteps / kSpanSteps + 1)) << "the first chunk may be short";
  EXPECT_EQ(spans.values, static_cast<uint64_t>(kSteps));
  ExpectSpans(spans, kSteps);
  const SeriesPoints after = Read(SignalId::kLogitMax, 0, kSteps, 2);
  EXPECT_EQ(after.min, before.min);
  EXPECT_EQ(after.max, before.max);
  // A part of a span is drawn by the span, within what was asked for.
  const int64_t inside = spans.step[1] + 10;
  const SeriesPoints part = Read(SignalId::kLogitMax, inside, inside + 10);
  ASSERT_EQ(part.step.size(), 1u);
  EXPECT_EQ(part.step[0], inside);
  EXPECT_EQ(part.max[0], spans.max[1]);

  Wait(4);  // 8.1 days.
  EXPECT_GT(Rows("dropped"), 0);
  EXPECT_TRUE(Read(SignalId::kLogitMax, 0, kSteps).step.empty());
  int left = 0;
  for (const char* const kind : {"s", "m"}) {
    ASSERT_TRUE(RocksDatabase::Snapshot(RocksDatabase::As(database_.get()))
                    .Scan(kind, {},
                          [&](std::string_view, std::string_view) {
                            ++left;
                            return true;
                          })
                    .ok());
  }
  EXPECT_EQ(left, 0);
  EXPECT_EQ(counters_.counter("bellwether_retention_failures_total")->value(), 0);
}

TEST_F(RetentionRunTest, ARunThatGoesOnHasAllTiersAtOnce) {
  constexpr int kDays = 7;
  for (int day = 0; day < kDays; ++day) Day(0, day * kSteps, (day + 1) * kSteps);
  Pass();  // Day i ended 7 - i days ago.
  const int64_t now = kDays * kSteps;
  ExpectValues(SignalId::kLogitMax, now - 1 * kSteps, now, kAsItWas);
  ExpectRounded(now - 3 * kSteps, now - 2 * kSteps);
  const SeriesPoints spans = Read(SignalId::kLogitMax, 0, 2 * kSteps);
  EXPECT_LE(spans.step.size(), static_cast<size_t>(2 * (kSteps / kSpanSteps + 1)));
  ExpectSpans(spans, 2 * kSteps);
  EXPECT_EQ(counters_.counter("bellwether_retention_failures_total")->value(), 0);
}

TEST_F(RetentionRunTest, LaterAttemptAgesFromItsOwnSteps) {
  Day(0, 0, kSteps, 4.5);
  Day(1, 0, kSteps / 2, 0.1);  // Rolled back; attempt 0 is summarized by this pass.
  EXPECT_GT(Rows("summarized"), 0);
  // Its own steps are whole; of attempt 0 what it did not write again is drawn by summaries.
  ExpectValues(SignalId::kLogitMax, 0, kSteps / 2, kAsItWas);
  const SeriesPoints rest = Read(SignalId::kLogitMax, kSteps / 2, kSteps);
  ASSERT_GE(rest.step.size(), 2u);
  EXPECT_LE(rest.step.size(), 4u);
  EXPECT_EQ(rest.step.front(), kSteps / 2);
  const SeriesPoints all = Read(SignalId::kLogitMax, 0, kSteps);
  EXPECT_EQ(all.step.size(), static_cast<size_t>(kSteps / 2) + rest.step.size());
}

TEST_F(RetentionRunTest, ClockJumpsDropNothingTooEarly) {
  Day(0, 0, kSteps, 0);
  clock_.Advance(int64_t{3600} * 1'000'000'000);
  Pass();
  clock_.Advance(-int64_t{30 * kDay} * 1'000'000'000);  // Back by a month.
  Pass();
  ExpectValues(SignalId::kLogitMax, 0, kSteps, kAsItWas);
  Wait(1.9);
  ExpectValues(SignalId::kLogitMax, 0, kSteps, kAsItWas);
  Wait(0.2);  // It is seen anew, by the clock as it is now.
  EXPECT_GT(Rows("rounded"), 0);
}

TEST_F(RetentionRunTest, ClockSetAheadMakesNothingOlder) {
  Day(0, 0, kSteps, 0);
  const Retention::Options options{
      .raw_seconds = 2 * kDay, .rounded_seconds = 4 * kDay, .summarized_seconds = 8 * kDay};
  Retention retention(options, &table_, database_.get(), store_.get(), &counters_, &clock_);
  retention.Pass();
  clock_.Advance(kDay * 1'000'000'000);
  clock_.JumpWall(int64_t{3650 * kDay} * 1'000'000'000);
  retention.Pass();
  retention.Pass();
  ExpectValues(SignalId::kLogitMax, 0, kSteps, kAsItWas);
  Wait(0.9);  // Another server, behind the jump.
  ExpectValues(SignalId::kLogitMax, 0, kSteps, kAsItWas);
  clock_.Advance(kDay * 1'000'000'000 / 2);
  clock_.JumpWall(-int64_t{3650 * kDay} * 1'000'000'000);
  retention.Pass();
  ExpectValues(SignalId::kLogitMax, 0, kSteps, kAsItWas);
  EXPECT_EQ(Rows("rounded"), 0);
  clock_.Advance(int64_t{3 * kDay} * 1'000'000'000);
  retention.Pass();  // It was seen anew, and ages as it did before.
  EXPECT_GT(Rows("rounded"), 0);
  EXPECT_EQ(Rows("summarized"), 0);
}

// A machine without a clock begins in 1970 at each start.
TEST_F(RetentionRunTest, ClockThatIsSetRightAgesWhatWasSeenBefore) {
  Day(0, 0, kSteps, 1.5);
  clock_.JumpWall(-int64_t{3650 * kDay} * 1'000'000'000);
  const Retention::Options options{
      .raw_seconds = 2 * kDay, .rounded_seconds = 4 * kDay, .summarized_seconds = 8 * kDay};
  Retention retention(options, &table_, database_.get(), store_.get(), &counters_, &clock_);
  retention.Start();  // Its thread waits for an hour.
  clock_.JumpWall(int64_t{3650 * kDay} * 1'000'000'000);
  clock_.Advance(kDay * 1'000'000'000);
  retention.Pass();
  EXPECT_GT(Rows("rounded"), 0);
}

TEST_F(RetentionRunTest, ClusterRunIsRetainedUntilWholeByClusterTime) {
  Day(0, 0, kSteps, 0);
  bool whole = false;
  int64_t now_ns = clock_.UnixNanos();  // The cluster's, not this server's.
  const auto pass = [&] {
    Retention::Options options{.raw_seconds = 2 * kDay, .rounded_seconds = 4 * kDay, .summarized_seconds = 8 * kDay};
    Retention retention(options, &table_, database_.get(), store_.get(), &counters_, &clock_);
    retention.Share(
        {.whole = [&](RunId run) { return run == kRetainedRun && whole; }, .unix_nanos = [&] { return now_ns; }});
    retention.Pass();
  };
  const std::string row =
      RocksDatabase::Snapshot(RocksDatabase::As(database_.get())).Get(RetentionKey(kRetainedRun)).value();
  now_ns += 100 * kDay * 1'000'000'000;
  pass();
  EXPECT_EQ(RocksDatabase::Snapshot(RocksDatabase::As(database_.get())).Get(RetentionKey(kRetainedRun)).value(), row)
      << "neither rewritten nor marked";
  whole = true;
  now_ns = clock_.UnixNanos() + kDay * 1'000'000'000;
  clock_.Advance(int64_t{3650 * kDay} * 1'000'000'000);  // A server whose clock is years ahead.
  pass();
  ExpectValues(SignalId::kLogitMax, 0, kSteps, kAsItWas);
  now_ns += 2 * kDay * 1'000'000'000;
  pass();
  EXPECT_GT(Rows("rounded"), 0);
  EXPECT_EQ(Rows("summarized"), 0);
}

TEST_F(RetentionRunTest, ZeroDaysKeepsDataForever) {
  Day(0, 0, kSteps, 0);
  clock_.Advance(int64_t{3650 * kDay} * 1'000'000'000);
  Retention({.raw_seconds = 0, .rounded_seconds = 0, .summarized_seconds = 0}, &table_, database_.get(), store_.get(),
            &counters_, &clock_)
      .Pass();
  ExpectValues(SignalId::kLogitMax, 0, kSteps, kAsItWas);
}

TEST_F(RetentionRunTest, DataStoredAtTheEndAgesFromItsSteps) {
  store_->Open(kRetainedRun, layout_);
  for (int64_t step = 0; step < 40; ++step) ASSERT_TRUE(store_->Append(kRetainedRun, Sample(step, 0)).ok());
  record_.step = 39;
  record_.steps_recorded = 40;
  auto snapshot = std::make_shared<RunSnapshot>();
  snapshot->record = record_;
  snapshot->newest = std::make_shared<StepSample>(Sample(39, 0));
  table_.Publish(snapshot);
  Pass();
  Wait(20);  // All of it is over, and nothing is stored yet.
  End();
  EXPECT_GT(Stored("s"), 0);
  Pass();
  EXPECT_EQ(Stored("s"), 0);
  EXPECT_EQ(Stored("m"), 0);
}

TEST_F(RetentionRunTest, WindowsUnpackedAtStopArePackedAndRetained) {
  const SeriesStore::Options windows{.window_bytes_max = 0};
  store_ = SeriesStore::Create(windows, database_.get());
  store_->Open(kRetainedRun, layout_);
  for (int64_t step = 0; step < 40; ++step) ASSERT_TRUE(store_->Append(kRetainedRun, Sample(step, 0)).ok());
  record_.step = 39;
  record_.steps_recorded = 40;
  auto batch = database_->NewBatch();
  std::string state;
  ASSERT_TRUE(store_->Save(kRetainedRun, batch.get(), &state).ok());  // As it is when the end is not packed.
  record_.ended = true;
  batch->PutRun(record_);
  ASSERT_TRUE(database_->Commit(std::move(batch)).ok());
  store_ = SeriesStore::Create(windows, database_.get());  // An ended run is not opened again.
  Publish();
  store_->Drain();
  ASSERT_GT(Stored("w"), 0);
  Pass();
  store_->Drain();
  EXPECT_EQ(Stored("w"), 0);
  EXPECT_GT(Stored("s"), 0);
  for (int i = 0; i < 4; ++i) Wait(4);
  EXPECT_EQ(Stored("s"), 0);
  EXPECT_EQ(Stored("m"), 0);
}

TEST_F(RetentionRunTest, MarksAreBoundedAndGrowCoarser) {
  Day(0, 0, kSteps, 0);
  for (int i = 0; i < 3000; ++i) {
    record_.step += 1;
    auto snapshot = std::make_shared<RunSnapshot>();
    snapshot->record = record_;
    table_.Publish(snapshot);
    clock_.Advance(int64_t{60} * 1'000'000'000);
    Pass();
  }
  const auto row = RocksDatabase::Snapshot(RocksDatabase::As(database_.get())).Get(RetentionKey(kRetainedRun));
  ASSERT_TRUE(row.ok());
  const auto state = DecodeRetentionState(*row);
  ASSERT_TRUE(state.ok());
  EXPECT_LE(state->marks.size(), Retention::kMarksMax);
  EXPECT_GE(state->marks.size(), Retention::kMarksMax / 2);
}

}  // namespace
}  // namespace bellwether::server
