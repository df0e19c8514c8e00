// Goal: every appended step is read back bit for bit, from memory, stored
// windows and chunks, by any thread at any time, over restarts and attempts;
// downsampling loses no extreme; damage is a status.
// Method: a plain map of what was appended against every read; a crash is a
// second store on the same database and the last saved state.
#include "server/store/series_store.h"

#include <gtest/gtest.h>

#include <atomic>
#include <bit>
#include <cmath>
#include <map>
#include <random>
#include <thread>

#include "tests/support/temp_directory.h"

namespace bellwether::server {
namespace {

constexpr RunId kRun = 5;
constexpr int64_t kEnd = INT64_MAX;

float Value(SignalId signal, int64_t step, int cell, uint32_t attempt = 0) {
  std::mt19937 random(static_cast<uint32_t>(step * 7919 + cell * 31 + static_cast<int>(signal) + 1000003 * attempt));
  return static_cast<float>(random() % 100000) / 7 + 1;
}

class SeriesStoreTest : public testing::Test {
 protected:
  void SetUp() override { Reopen(); }
  void Reopen() {
    store_.reset();
    database_.reset();
    auto database = Database::Open({.directory = directory_.path() + "/db"});
    ASSERT_TRUE(database.ok()) << database.status();
    database_ = *std::move(database);
    store_ = SeriesStore::Create({}, database_.get());
  }
  StepSample Sample(int64_t step, uint32_t attempt = 0) const {
    StepSample sample;
    sample.Reset(layout_);
    sample.step = step;
    sample.attempt = attempt;
    sample.time_unix_ns = 1'700'000'000'000'000'000 + step;
    sample.ranks = 3;
    sample.complete = step % 2 == 0;
    sample.Add(SignalId::kLoss)[0] = Value(SignalId::kLoss, step, 0, attempt);
    if (step % 5 != 0) return sample;
    for (const SignalId signal : {SignalId::kCommonModeSum, SignalId::kSpreadSum}) {
      const auto values = sample.Add(signal);
      for (size_t i = 0; i < values.size(); ++i) values[i] = Value(signal, step, static_cast<int>(i), attempt);
    }
    return sample;
  }
  void Append(int64_t from, int64_t to, uint32_t attempt = 0) {
    for (int64_t step = from; step < to; ++step) {
      const absl::Status status = store_->Append(kRun, Sample(step, attempt));
      ASSERT_TRUE(status.ok()) << status;
    }
  }
  std::string Save() {
    auto batch = database_->NewBatch();
    std::string state;
    EXPECT_TRUE(store_->Save(kRun, batch.get(), &state).ok());
    batch->PutState(kRun, state);
    EXPECT_TRUE(database_->Commit(std::move(batch)).ok());
    return state;
  }
  SeriesPoints Read(SignalId signal, int layer, int head, int64_t begin = 0, int64_t end = kEnd, size_t points = 100000,
                    int32_t attempt = SeriesStore::kNewestAttempt) const {
    auto series = store_->ReadSeries(kRun, layout_, {signal, layer, head}, begin, end, points, attempt);
    EXPECT_TRUE(series.ok()) << series.status();
    return series.ok() ? *std::move(series) : SeriesPoints{};
  }
  void ExpectAll(int64_t end) const {
    const SeriesPoints loss = Read(SignalId::kLoss, 0, 0);
    ASSERT_EQ(loss.step.size(), static_cast<size_t>(end));
    for (int64_t step = 0; step < end; ++step) {
      ASSERT_EQ(loss.step[static_cast<size_t>(step)], step);
      ASSERT_EQ(loss.mean[static_cast<size_t>(step)], Value(SignalId::kLoss, step, 0));
    }
    for (const int cell : {0, 13, 35}) {
      const SeriesPoints heads = Read(SignalId::kSpreadSum, cell / 12, cell % 12);
      ASSERT_EQ(heads.step.size(), static_cast<size_t>((end + 4) / 5));
      for (size_t i = 0; i < heads.step.size(); ++i) {
        ASSERT_EQ(heads.mean[i], Value(SignalId::kSpreadSum, heads.step[i], cell));
      }
    }
  }

  const Layout layout_{.layers = 3, .heads = 12, .kv_heads = 4};
  TempDirectory directory_;
  std::unique_ptr<Database> database_;
  std::unique_ptr<SeriesStore> store_;
};

TEST_F(SeriesStoreTest, ReadsEveryStepFromMemoryWindowsAndChunks) {
  store_->Open(kRun, layout_);
  Append(0, 20);
  ExpectAll(20);
  for (int64_t step = 20; step < 3000; step += 149) {
    Append(step, std::min<int64_t>(step + 149, 3000));
    if (step % 2 == 0) Save();
    if (step % 3 == 0) ExpectAll(std::min<int64_t>(step + 149, 3000));
  }
  Save();
  store_->Drain();
  ExpectAll(3000);
  auto batch = database_->NewBatch();
  ASSERT_TRUE(store_->Close(kRun, batch.get()).ok());
  ASSERT_TRUE(database_->Commit(std::move(batch)).ok());
  EXPECT_EQ(store_->memory_bytes(), 0);
  store_->Drain();
  ExpectAll(3000);
  Reopen();
  ExpectAll(3000);
}

TEST_F(SeriesStoreTest, ARestartFromTheLastSaveAndAReplayGiveTheSame) {
  store_->Open(kRun, layout_);
  Append(0, 777);
  const std::string state = Save();
  Append(777, 900);  // Not saved: comes again from the log.
  Reopen();
  ASSERT_EQ(*database_->GetState(kRun), state);
  ASSERT_TRUE(store_->Restore(kRun, layout_, state).ok());
  ExpectAll(777);
  Append(777, 1500);
  Save();
  store_->Drain();
  ExpectAll(1500);
}

TEST_F(SeriesStoreTest, NewestAttemptWinsWhereAttemptsOverlap) {
  store_->Open(kRun, layout_);
  Append(0, 1000);
  Append(600, 800, /*attempt=*/1);
  EXPECT_EQ(store_->Append(kRun, Sample(900, 0)).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(store_->Append(kRun, Sample(799, 1)).code(), absl::StatusCode::kFailedPrecondition);
  for (const bool stored : {false, true}) {
    if (stored) Save();
    store_->Drain();
    const SeriesPoints merged = Read(SignalId::kLoss, 0, 0);
    ASSERT_EQ(merged.step.size(), 1000u);
    for (size_t i = 0; i < 1000; ++i) {
      const bool newer = i >= 600 && i < 800;
      ASSERT_EQ(merged.mean[i], Value(SignalId::kLoss, static_cast<int64_t>(i), 0, newer ? 1 : 0)) << i;
    }
    EXPECT_EQ(Read(SignalId::kLoss, 0, 0, 0, kEnd, 100000, 0).mean[700], Value(SignalId::kLoss, 700, 0, 0));
    EXPECT_EQ(Read(SignalId::kLoss, 0, 0, 0, kEnd, 100000, 1).step.size(), 200u);
    int64_t at = 0;
    const auto newest = store_->ReadMatrix(kRun, layout_, SignalId::kSpreadSum, -1, &at);
    ASSERT_TRUE(newest.ok());
    EXPECT_EQ(at, 795);
    EXPECT_EQ((*newest)[35], Value(SignalId::kSpreadSum, 795, 35, 1));
    ASSERT_TRUE(store_->ReadMatrix(kRun, layout_, SignalId::kSpreadSum, 998, &at).ok());
    EXPECT_EQ(at, 995);
  }
}

TEST_F(SeriesStoreTest, DownsamplingLosesNoExtremeAndKeepsTheMean) {
  store_->Open(kRun, layout_);
  const int64_t n = 30000;
  std::vector<float> values;
  for (int64_t step = 0; step < n; ++step) {
    StepSample sample;
    sample.Reset(layout_);
    sample.step = step;
    values.push_back(step == 12345 ? 1e6f : step == 23456 ? -1e6f : Value(SignalId::kLoss, step, 0));
    sample.Add(SignalId::kLoss)[0] = values.back();
    ASSERT_TRUE(store_->Append(kRun, sample).ok());
    if (step % 1000 == 0) Save();
  }
  Save();
  store_->Drain();
  for (const size_t points_max : {1u, 10u, 37u, 100u, 1000u, 10000u}) {
    for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, kEnd}, {100, 29001}, {12000, 12500}}) {
      SCOPED_TRACE(testing::Message() << points_max << " points of " << begin << " to " << end);
      const SeriesPoints points = Read(SignalId::kLoss, 0, 0, begin, end, points_max);
      const auto last = std::min(end, n);
      ASSERT_FALSE(points.step.empty());
      ASSERT_LE(points.step.size(), points_max);
      EXPECT_GE(points.step.size(), std::min<size_t>(points_max, static_cast<size_t>(last - begin)) / 2);
      EXPECT_EQ(points.values, static_cast<uint64_t>(last - begin));
      EXPECT_EQ(points.step.front(), begin);
      for (size_t i = 0; i < points.step.size(); ++i) {
        const int64_t to = i + 1 < points.step.size() ? points.step[i + 1] : last;
        float low = INFINITY, high = -INFINITY;
        double sum = 0;
        for (int64_t s = points.step[i]; s < to; ++s) {
          low = std::min(low, values[static_cast<size_t>(s)]);
          high = std::max(high, values[static_cast<size_t>(s)]);
          sum += values[static_cast<size_t>(s)];
        }
        ASSERT_EQ(points.min[i], low);
        ASSERT_EQ(points.max[i], high);
        ASSERT_NEAR(points.mean[i], sum / static_cast<double>(to - points.step[i]), 1e-3 * (1 + std::abs(high)));
      }
    }
  }
}

TEST_F(SeriesStoreTest, NanIsDataAndNotMeasuredIsNone) {
  store_->Open(kRun, layout_);
  for (int64_t step = 0; step < 400; ++step) {
    StepSample sample;
    sample.Reset(layout_);
    sample.step = step;
    const auto values = sample.Add(SignalId::kLogitMax);
    values[0] = step < 200 ? NAN : 1;
    values[1] = INFINITY;  // The others stay not measured.
    ASSERT_TRUE(store_->Append(kRun, sample).ok());
  }
  Save();
  store_->Drain();
  const SeriesPoints nan = Read(SignalId::kLogitMax, 0, 0, 0, kEnd, 4);
  ASSERT_EQ(nan.step.size(), 4u);
  EXPECT_TRUE(std::isnan(nan.mean[0]));
  EXPECT_EQ(nan.mean[3], 1);
  EXPECT_EQ(nan.values, 400u);
  EXPECT_EQ(Read(SignalId::kLogitMax, 0, 1).max[0], INFINITY);
  EXPECT_TRUE(Read(SignalId::kLogitMax, 0, 2).step.empty());
  EXPECT_TRUE(Read(SignalId::kEntropySum, 0, 0).step.empty());
  int64_t at = 0;
  const auto matrix = store_->ReadMatrix(kRun, layout_, SignalId::kLogitMax, 100, &at);
  ASSERT_TRUE(matrix.ok());
  EXPECT_EQ(at, 100);
  EXPECT_TRUE(std::isnan((*matrix)[0]) && !IsNotMeasured((*matrix)[0]));
  EXPECT_TRUE(IsNotMeasured((*matrix)[2]));
}

TEST_F(SeriesStoreTest, DerivedSignalsAreWhatDeriveMatrixSays) {
  store_->Open(kRun, layout_);
  Append(0, 2000);
  Save();
  store_->Drain();
  std::vector<float> expected;
  ASSERT_TRUE(DeriveMatrix(Sample(1000), *FindSignal(SignalId::kDriftRatio), &expected));
  int64_t at = 0;
  const auto matrix = store_->ReadMatrix(kRun, layout_, SignalId::kDriftRatio, 1003, &at);
  ASSERT_TRUE(matrix.ok());
  EXPECT_EQ(at, 1000);
  EXPECT_EQ(*matrix, expected);
  const SeriesPoints series = Read(SignalId::kDriftRatio, 1, 3, 1000, 1001);
  ASSERT_EQ(series.step.size(), 1u);
  EXPECT_EQ(series.mean[0], expected[15]);
  EXPECT_FALSE(store_->ReadSeries(kRun, layout_, {SignalId::kDriftRatio, 3, 0}, 0, 1, 1, -1).ok());
  EXPECT_FALSE(store_->ReadSeries(kRun, layout_, {SignalId::kDriftRatio, 0, 12}, 0, 1, 1, -1).ok());
}

TEST_F(SeriesStoreTest, ReadAllGivesWhatWasAppendedInOrder) {
  store_->Open(kRun, layout_);
  Append(0, 1100);
  Save();
  store_->Drain();
  Append(1100, 1150);
  Append(1000, 1030, /*attempt=*/2);
  std::vector<std::pair<uint32_t, int64_t>> seen;
  const absl::Status status = store_->ReadAll(kRun, layout_, [&](const StepSample& sample) {
    const StepSample expected = Sample(sample.step, sample.attempt);
    seen.emplace_back(sample.attempt, sample.step);
    EXPECT_EQ(sample.signals(), expected.signals());
    EXPECT_EQ(sample.time_unix_ns, expected.time_unix_ns);
    EXPECT_EQ(sample.ranks, expected.ranks);
    EXPECT_EQ(sample.complete, expected.complete);
    for (const SignalId signal : sample.signals()) {
      const auto a = sample.matrix(signal), b = expected.matrix(signal);
      EXPECT_TRUE(std::equal(a.begin(), a.end(), b.begin(), b.end()));
    }
    return absl::OkStatus();
  });
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(seen.size(), 1180u);
  EXPECT_TRUE(std::is_sorted(seen.begin(), seen.end()));
  EXPECT_EQ(store_->ReadAll(kRun, layout_, [](const StepSample&) { return absl::CancelledError("enough"); }).code(),
            absl::StatusCode::kCancelled);
}

TEST_F(SeriesStoreTest, ADamagedStateIsAStatus) {
  store_->Open(kRun, layout_);
  Append(0, 50);
  const std::string state = Save();
  for (size_t size = 0; size < state.size(); size += 1 + size / 8) {
    EXPECT_FALSE(store_->Restore(kRun + 1, layout_, state.substr(0, size)).ok()) << size;
  }
  EXPECT_EQ(store_->Restore(kRun + 1, {.layers = 2, .heads = 12, .kv_heads = 4}, state).code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(store_->Append(kRun + 1, Sample(0)).code(), absl::StatusCode::kNotFound);
}

TEST_F(SeriesStoreTest, ReadersSeeEveryAppendedStepWhileItMoves) {
  store_->Open(kRun, layout_);
  std::atomic<int64_t> appended = 0;
  std::atomic<bool> done = false;
  std::thread reader([&] {
    while (!done) {
      const int64_t before = appended;
      const SeriesPoints loss = Read(SignalId::kLoss, 0, 0);
      ASSERT_GE(loss.step.size(), static_cast<size_t>(before));
      for (size_t i = 0; i < loss.step.size(); ++i) ASSERT_EQ(loss.step[i], static_cast<int64_t>(i));
    }
  });
  for (int64_t step = 0; step < 4000; ++step) {
    Append(step, step + 1);
    appended = step + 1;
    if (step % 70 == 0) Save();
  }
  done = true;
  reader.join();
}

}  // namespace
}  // namespace bellwether::server
