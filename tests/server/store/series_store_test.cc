// Goal: every appended step is read back bit for bit, from memory, stored
// windows and chunks, by any thread at any time, over restarts and attempts;
// downsampling loses no extreme, of derived signals neither; damage is a status.
// Method: a plain map of what was appended against every read, with windows that
// wait in memory for their chunk, without the memory for any, and changing
// between both; a crash is a second store on the same database and the last
// saved state.
#include "server/store/series_store.h"

#include <gtest/gtest.h>

#include <atomic>
#include <bit>
#include <cmath>
#include <filesystem>
#include <map>
#include <random>
#include <thread>

#include "absl/synchronization/mutex.h"
#include "server/store/shared_rows.h"
#include "tests/support/temp_directory.h"

namespace bellwether::server {
namespace {

constexpr RunId kRun = 5;
constexpr int64_t kEnd = INT64_MAX;

float Value(SignalId signal, int64_t step, int cell, uint32_t attempt = 0) {
  const auto mixed = static_cast<uint64_t>(step * 7919 + cell * 31 + static_cast<int>(signal) + 1000003 * attempt) *
                     0x9e3779b97f4a7c15u;
  return static_cast<float>((mixed >> 32) % 100000) / 7 + 1;
}

class SeriesStoreTest : public testing::TestWithParam<int64_t> {
 protected:
  void SetUp() override { Reopen(GetParam()); }
  void Reopen() { Reopen(GetParam()); }
  void Reopen(int64_t window_bytes_max, SharedRows* shared = nullptr) {
    store_.reset();
    database_.reset();
    auto database =
        Database::Open({.directory = directory_.path() + (shared == nullptr ? "/db" : "/cache"), .shared = shared});
    ASSERT_TRUE(database.ok()) << database.status();
    database_ = *std::move(database);
    store_ = SeriesStore::Create({.window_bytes_max = window_bytes_max}, database_.get());
  }
  StepSample Sample(int64_t step, uint32_t attempt = 0) const {
    StepSample sample;
    sample.Reset(layout_);
    sample.step = step;
    sample.attempt = attempt;
    sample.time_unix_ns = 1'700'000'000'000'000'000 + 1000 * step;
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
    batch->PutState(RunRecord{.id = kRun}, state);
    EXPECT_TRUE(database_->Commit(std::move(batch)).ok());
    return state;
  }
  SeriesPoints Read(SignalId signal, int layer, int head, int64_t begin = 0, int64_t end = kEnd, size_t points = 100000,
                    int32_t attempt = SeriesStore::kNewestAttempt) const {
    auto series = store_->ReadSeries(kRun, layout_, {signal, layer, head}, begin, end, points, attempt);
    EXPECT_TRUE(series.ok()) << series.status();
    return series.ok() ? *std::move(series) : SeriesPoints{};
  }
  void Close() {
    auto batch = database_->NewBatch();
    ASSERT_TRUE(store_->Close(kRun, batch.get()).ok());
    ASSERT_TRUE(database_->Commit(std::move(batch)).ok());
    store_->Drain();
  }
  // Each bucket's extremes and mean are those of the values that it covers.
  static void ExpectBuckets(const SeriesPoints& points, const std::map<int64_t, float>& values) {
    for (size_t i = 0; i < points.step.size(); ++i) {
      const auto to = i + 1 < points.step.size() ? values.lower_bound(points.step[i + 1]) : values.end();
      float low = INFINITY, high = -INFINITY;
      double sum = 0, count = 0;
      for (auto at = values.lower_bound(points.step[i]); at != to; ++at, ++count) {
        low = std::min(low, at->second);
        high = std::max(high, at->second);
        sum += at->second;
      }
      ASSERT_EQ(points.min[i], low) << points.step[i];
      ASSERT_EQ(points.max[i], high) << points.step[i];
      ASSERT_NEAR(points.mean[i], sum / count, 1e-5 * (1 + std::abs(high))) << points.step[i];
    }
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

TEST_P(SeriesStoreTest, ReadsEveryStepFromMemoryWindowsAndChunks) {
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
  Close();
  EXPECT_EQ(store_->memory_bytes(), 0);
  ExpectAll(3000);
  Reopen();
  ExpectAll(3000);
}

TEST_P(SeriesStoreTest, RestoreAndReplayGiveTheSameSeries) {
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

TEST_P(SeriesStoreTest, StepsAppendedDuringASaveAreStoredOnce) {
  store_->Open(kRun, layout_);
  int64_t end = 0, saved = 0;
  std::string saved_state;
  for (int i = 0; i < 40; ++i) {
    Append(end, end + 50);
    const int64_t begun = end += 50;
    auto batch = database_->NewBatch();
    std::string state;
    ASSERT_TRUE(store_->Save(kRun, batch.get(), &state).ok());
    batch->PutState(RunRecord{.id = kRun}, state);
    const int64_t more = i % 3 * 137;  // Windows are sealed meanwhile, or are not.
    Append(end, end + more);
    end += more;
    if (i % 4 == 2) {
      batch.reset();  // It failed.
    } else {
      ASSERT_TRUE(database_->Commit(std::move(batch)).ok());
      saved = begun;
      saved_state = state;
    }
    ExpectAll(end);
  }
  Reopen();
  ASSERT_TRUE(store_->Restore(kRun, layout_, saved_state).ok());
  ExpectAll(saved);
  Append(saved, saved + 700);
  Close();
  ExpectAll(saved + 700);
}

// Has what it is given, also where it does not say so.
class RemoteRows final : public SharedRows {
 public:
  std::atomic<bool> answers = true;

  std::vector<SharedRow> Rows() {
    absl::MutexLock lock(&mutex_);
    std::vector<SharedRow> rows;
    for (const auto& [key, value] : rows_) rows.push_back({key, value});
    return rows;
  }
  absl::Status PutRows(RunId, const std::vector<SharedRow>& put) override {
    absl::MutexLock lock(&mutex_);
    for (const SharedRow& row : put) {
      if (row.value.has_value()) {
        rows_[row.key] = *row.value;
      } else {
        rows_.erase(row.key);
      }
    }
    return answers ? absl::OkStatus() : absl::UnavailableError("no answer");
  }
  absl::StatusOr<bool> PutTransition(AlertTransition*) override { return false; }
  absl::StatusOr<std::vector<AlertTransition>> ListTransitions(uint64_t, size_t) const override {
    return std::vector<AlertTransition>();
  }

 private:
  absl::Mutex mutex_;  // Windows are packed beside.
  std::map<std::string, std::string> rows_ ABSL_GUARDED_BY(mutex_);
};

TEST_P(SeriesStoreTest, RowsOfAnUnansweredSaveGoWhenTheirWindowSeals) {
  RemoteRows elsewhere;
  Reopen(GetParam(), &elsewhere);
  store_->Open(kRun, layout_);
  Append(0, 40);
  {
    auto batch = database_->NewBatch();
    std::string state;
    ASSERT_TRUE(store_->Save(kRun, batch.get(), &state).ok());
    elsewhere.answers = false;
    EXPECT_TRUE(absl::IsUnavailable(database_->ShareBatch(batch.get())));
    elsewhere.answers = true;
  }
  constexpr int64_t kSealed = 3000;  // Longer than every window that was open then.
  Append(40, kSealed);
  std::string state = Save();
  // As its next owner.
  const auto take_up = [&](const std::string& saved) {
    store_.reset();
    database_.reset();
    std::filesystem::remove_all(directory_.path() + "/cache");
    Reopen(GetParam(), &elsewhere);
    ASSERT_TRUE(database_->TakeUpRows(elsewhere.Rows(), /*only_missing=*/false).ok());
    const absl::Status restored = store_->Restore(kRun, layout_, saved);
    ASSERT_TRUE(restored.ok()) << restored;
  };
  take_up(state);
  ExpectAll(kSealed);
  Append(kSealed, kSealed + 700);
  Save();
  ExpectAll(kSealed + 700);
  Append(100, 140, /*attempt=*/1);
  state = Save();
  take_up(state);
  store_.reset();  // Its windows are packed into `elsewhere` until then.
  database_.reset();
}

// Windows of both kinds end up side by side: none of them may be lost or put
// into a chunk that reaches over another.
TEST_P(SeriesStoreTest, RestartsWithMoreAndLessMemoryGiveTheSame) {
  store_->Open(kRun, layout_);
  int64_t end = 0;
  for (int restart = 0; restart < 6; ++restart) {
    const int64_t saved = end + 60 + 2400 * (restart % 3);
    Append(end, saved);
    const std::string state = Save();
    Append(saved, saved + 40);  // Lost.
    if (restart >= 2) store_->Drain();
    Reopen(restart % 2 == 0 ? int64_t{256} << 20 : 0);
    ASSERT_TRUE(store_->Restore(kRun, layout_, state).ok());
    end = saved;
    ExpectAll(end);
  }
  Append(end, end + 700);
  Close();
  ExpectAll(end + 700);
  for (int64_t step = 0; step < end + 700; step += 35) {
    int64_t at = -1;
    const auto matrix = store_->ReadMatrix(kRun, layout_, SignalId::kSpreadSum, step, &at);
    ASSERT_TRUE(matrix.ok()) << matrix.status();
    ASSERT_EQ(at, step);
    ASSERT_EQ((*matrix)[17], Value(SignalId::kSpreadSum, step, 17));
  }
  int64_t next = 0;
  const absl::Status all = store_->ReadAll(kRun, layout_, [&](const StepSample& sample) {
    return sample.step == next++ ? absl::OkStatus() : absl::DataLossError(std::to_string(sample.step));
  });
  EXPECT_TRUE(all.ok()) << all << " where " << next - 1 << " was expected";
  EXPECT_EQ(next, end + 700);
}

TEST_P(SeriesStoreTest, NewestAttemptWinsWhereAttemptsOverlap) {
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

TEST_P(SeriesStoreTest, DownsamplingLosesNoExtremeAndKeepsTheMean) {
  store_->Open(kRun, layout_);
  const int64_t n = 30000;
  std::map<int64_t, float> values;
  for (int64_t step = 0; step < n; ++step) {
    StepSample sample;
    sample.Reset(layout_);
    sample.step = step;
    values[step] = step == 12345 ? 1e6f : step == 23456 ? -1e6f : Value(SignalId::kLoss, step, 0);
    sample.Add(SignalId::kLoss)[0] = values[step];
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
      ExpectBuckets(points, {values.lower_bound(begin), values.lower_bound(last)});
    }
  }
}

TEST_P(SeriesStoreTest, NanIsDataAndUnmeasuredIsNot) {
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

TEST_P(SeriesStoreTest, DerivedSignalsAreWhatDeriveMatrixSays) {
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

// Neither the parts' extremes nor their means give those of a ratio.
TEST_P(SeriesStoreTest, DownsamplingADerivedSignalLosesNoExtreme) {
  store_->Open(kRun, layout_);
  std::mt19937 random(17);
  std::map<int64_t, float> ratio;
  std::string state;
  const int64_t n = 9000;
  const auto append = [&](int64_t step) {
    StepSample sample;
    sample.Reset(layout_);
    sample.step = step;
    sample.Add(SignalId::kLoss)[0] = 1;
    for (float& value : sample.Add(SignalId::kKeyLeakSum)) value = static_cast<float>(random() % 1000) + 1;
    if (step == 4444) sample.Add(SignalId::kKeyLeakSum)[5] = 1e9f;
    if (step % 7 != 3) {  // The other part is missing at times, and 0 at times.
      for (float& value : sample.Add(SignalId::kKeyGradientSum)) value = static_cast<float>(random() % 100);
    }
    const auto above = sample.matrix(SignalId::kKeyLeakSum), below = sample.matrix(SignalId::kKeyGradientSum);
    ratio.erase(step);
    if (!below.empty() && below[5] != 0) ratio[step] = above[5] / below[5];
    return store_->Append(kRun, sample);
  };
  for (int64_t step = 0; step < n; ++step) {
    ASSERT_TRUE(append(step).ok());
    if (step % 500 == 99) state = Save();
    if (step != 6100) continue;
    Reopen();
    ASSERT_TRUE(store_->Restore(kRun, layout_, state).ok());
    for (int64_t again = 6100; again <= step; ++again) ASSERT_TRUE(append(again).ok());
  }
  for (const bool closed : {false, true}) {
    if (closed) Close();
    for (const size_t points_max : {1u, 9u, 20u, 50u, 10000u}) {
      for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, kEnd}, {1000, 8200}, {4400, 4500}}) {
        SCOPED_TRACE(testing::Message() << points_max << " points of " << begin << " to " << end << ", " << closed);
        const SeriesPoints points = Read(SignalId::kKeyLeak, 1, 1, begin, end, points_max);
        const std::map<int64_t, float> expected(ratio.lower_bound(begin), ratio.lower_bound(end));
        ASSERT_FALSE(points.step.empty());
        ASSERT_LE(points.step.size(), points_max);
        EXPECT_EQ(points.values, expected.size());
        ExpectBuckets(points, expected);
      }
    }
  }
}

TEST_P(SeriesStoreTest, ADownsampledSeriesOfOverlappingAttemptsIsTheNewest) {
  store_->Open(kRun, layout_);
  Append(0, 9000, 0);
  Save();
  Append(5000, 5100, 1);
  Append(5100, 12000, 2);
  std::map<int64_t, float> loss, drift;
  std::vector<float> row;
  for (int64_t step = 0; step < 12000; ++step) {
    const uint32_t attempt = step < 5000 ? 0 : step < 5100 ? 1 : 2;
    const StepSample sample = Sample(step, attempt);
    loss[step] = sample.scalar(SignalId::kLoss);
    if (DeriveMatrix(sample, *FindSignal(SignalId::kDriftRatio), &row)) drift[step] = row[14];
  }
  for (const bool saved : {false, true}) {
    if (saved) Save();
    store_->Drain();
    for (const size_t points_max : {1u, 13u, 40u}) {
      const SeriesPoints losses = Read(SignalId::kLoss, 0, 0, 0, kEnd, points_max);
      EXPECT_EQ(losses.values, loss.size());
      ExpectBuckets(losses, loss);
      const SeriesPoints drifts = Read(SignalId::kDriftRatio, 1, 2, 0, kEnd, points_max);
      EXPECT_EQ(drifts.values, drift.size());
      ExpectBuckets(drifts, drift);
    }
  }
}

// Tensors are named as they come, so that matrices become longer while they are written.
TEST_P(SeriesStoreTest, ARunThatGrowsKeepsItsSeries) {
  Layout layout = layout_;
  layout.tensors = 5;
  store_->Open(kRun, layout);
  const auto signal = SignalId::kReplicaSumLow;
  std::string state;
  int64_t step = 0;
  const auto append = [&](int64_t steps) {
    for (const int64_t end = step + steps; step < end; ++step) {
      StepSample sample = Sample(step);
      sample.Grow(layout);
      const auto values = sample.Add(signal);
      for (size_t i = 0; i < values.size(); ++i) values[i] = Value(signal, step, static_cast<int>(i));
      const absl::Status status = store_->Append(kRun, sample);
      ASSERT_TRUE(status.ok()) << status;
    }
  };
  const std::map<int32_t, int64_t> since = {{4, 0}, {8, 300}, {2000, 700}};
  const auto check = [&] {
    for (const auto& [row, first] : since) {
      if (row >= layout.tensors) continue;
      const auto points = store_->ReadSeries(kRun, layout, {signal, row, 0}, 0, kEnd, 100000, -1);
      ASSERT_TRUE(points.ok()) << points.status();
      ASSERT_EQ(points->step.size(), static_cast<size_t>(step - first)) << row;
      for (size_t i = 0; i < points->step.size(); ++i) {
        ASSERT_EQ(points->mean[i], Value(signal, points->step[i], row)) << row;
      }
    }
    int64_t at = -1;
    const auto newest = store_->ReadMatrix(kRun, layout, signal, -1, &at);
    ASSERT_TRUE(newest.ok()) << newest.status();
    EXPECT_EQ(at, step - 1);
    EXPECT_EQ(newest->size(), static_cast<size_t>(layout.tensors));
    const auto early = store_->ReadMatrix(kRun, layout, signal, 100, &at);
    ASSERT_TRUE(early.ok()) << early.status();
    EXPECT_EQ((*early)[4], Value(signal, 100, 4));
    EXPECT_EQ(layout.tensors > 5, layout.tensors > 5 && IsNotMeasured((*early)[5]));
    int64_t steps = 0;
    const auto visit = [&](const StepSample& sample) {
      EXPECT_EQ(sample.matrix(signal)[4], Value(signal, sample.step, 4));
      ++steps;
      return absl::OkStatus();
    };
    EXPECT_TRUE(store_->ReadAll(kRun, layout, visit).ok());
    EXPECT_EQ(steps, step);
  };
  append(300);
  check();
  Save();
  layout.tensors = 9;
  append(200);
  check();
  state = Save();
  append(200);
  Reopen();  // A crash: the last 200 steps are lost.
  step = 500;
  ASSERT_TRUE(store_->Restore(kRun, layout, state).ok());
  check();
  append(200);
  layout.tensors = 2100;
  append(40);
  check();
  Save();
  store_->Drain();
  check();
  Close();
  check();
}

TEST_P(SeriesStoreTest, ReadAllGivesWhatWasAppendedInOrder) {
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

TEST_P(SeriesStoreTest, ADamagedStateIsAStatus) {
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

TEST_P(SeriesStoreTest, ReadersSeeEveryAppendedStepWhileItMoves) {
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

// Bytes for windows as long as chunks: the default, and none.
INSTANTIATE_TEST_SUITE_P(Memory, SeriesStoreTest, testing::Values(SeriesStore::Options().window_bytes_max, 0),
                         [](const auto& mode) { return mode.param > 0 ? "Chunks" : "Windows"; });

}  // namespace
}  // namespace bellwether::server
