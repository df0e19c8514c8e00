// What the store costs: the log's rate and latency by batch, its opening, the
// codec, whole ingest into the series store, a long series read cold.
//
//   store_bench --benchmark_format=json
#include <benchmark/benchmark.h>
#include <stdlib.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <string>
#include <system_error>
#include <vector>

#include "server/store/chunk.h"
#include "server/store/series_store.h"
#include "server/store/wal.h"
#include "tests/support/signal_mix.h"

namespace bellwether::server {
namespace {

class Folder {
 public:
  Folder() : path_((std::filesystem::temp_directory_path() / "store-bench-XXXXXX").string()) {
    if (::mkdtemp(path_.data()) == nullptr) throw std::system_error(errno, std::generic_category(), path_);
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

WalRecord Frame() {
  WalRecord record;
  record.kind = WalKind::kMessage;
  record.payload.assign(16 << 10, 'f');
  return record;
}

void BM_WalBatch(benchmark::State& state) {
  Folder folder;
  auto wal = Wal::Open({.directory = folder.path()}, nullptr);
  const WalRecord frame = Frame();
  std::vector<double> seconds;
  Lsn last = 0;
  for (auto _ : state) {
    const auto begin = std::chrono::steady_clock::now();
    for (int64_t i = 0; i < state.range(0); ++i) last = *(*wal)->Append(WalRecord(frame));
    if (!(*wal)->Sync(last).ok()) state.SkipWithError("sync");
    seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
    if (last % 4096 == 0) (*wal)->Truncate(last).IgnoreError();
  }
  std::sort(seconds.begin(), seconds.end());
  state.counters["p50_ms"] = 1e3 * seconds[seconds.size() / 2];
  state.counters["p99_ms"] = 1e3 * seconds[seconds.size() * 99 / 100];
  state.SetItemsProcessed(state.iterations() * state.range(0));
}
BENCHMARK(BM_WalBatch)->Arg(1)->Arg(16)->Arg(64)->UseRealTime()->Iterations(1000);

void BM_WalOpen(benchmark::State& state) {
  Folder folder;
  {
    auto wal = Wal::Open({.directory = folder.path()}, nullptr);
    const WalRecord frame = Frame();
    Lsn last = 0;
    for (int i = 0; i < 16000; ++i) {
      last = *(*wal)->Append(WalRecord(frame));
      if (i % 256 == 0) (*wal)->Sync(last).IgnoreError();
    }
  }
  int64_t bytes = 0;
  for (auto _ : state) {
    auto wal = Wal::Open({.directory = folder.path()}, nullptr);
    bytes = (*wal)->recovery().bytes;
    state.PauseTiming();
    wal->reset();
    state.ResumeTiming();
  }
  state.SetBytesProcessed(state.iterations() * bytes);
}
BENCHMARK(BM_WalOpen)->UseRealTime()->Iterations(4)->Unit(benchmark::kMillisecond);

std::vector<int64_t> Steps(size_t n) {
  std::vector<int64_t> steps(n);
  for (size_t i = 0; i < n; ++i) steps[i] = static_cast<int64_t>(i);
  return steps;
}

void BM_ChunkEncode(benchmark::State& state) {
  const auto mix = testing_support::SignalMix(1, 256, 64);
  const auto steps = Steps(256);
  size_t bytes = 0, values = 0;
  for (auto _ : state) {
    bytes = values = 0;
    for (const auto& signal : mix) {
      for (size_t head = 0; head < 64; head += 8) {
        bytes += EncodeChunk({.steps = steps, .values = signal.data() + head, .cells = 8, .stride = 64}).size();
        values += 256 * 8;
      }
    }
  }
  state.counters["bytes_per_value"] = static_cast<double>(bytes) / static_cast<double>(values);
  state.SetItemsProcessed(state.iterations() * static_cast<int64_t>(values));
}
BENCHMARK(BM_ChunkEncode);

void BM_ChunkDecode(benchmark::State& state) {
  const auto mix = testing_support::SignalMix(1, 256, 8);
  const auto steps = Steps(256);
  std::vector<std::string> chunks;
  for (const auto& signal : mix) {
    chunks.push_back(EncodeChunk({.steps = steps, .values = signal.data(), .cells = 8, .stride = 8}));
  }
  Chunk chunk;
  for (auto _ : state) {
    for (const std::string& bytes : chunks) DecodeChunk(bytes, &chunk).IgnoreError();
  }
  state.SetItemsProcessed(state.iterations() * 4 * 256 * 8);
}
BENCHMARK(BM_ChunkDecode);

constexpr Layout kEightHeads{.layers = 1, .heads = 8, .kv_heads = 8};

// 32 layers x 32 heads; packing and a flush included.  Of 4 signals, whose values
// are the mix, or (0) of all that are measured per head, with all derived ones.
void BM_SeriesIngest(benchmark::State& state) {
  const Layout layout{.layers = 32, .heads = 32, .kv_heads = 32};
  std::vector<SignalId> signals = {SignalId::kWqSigma, SignalId::kDeltaBiasSum, SignalId::kEntropySum,
                                   SignalId::kTiedRowsBf16};
  if (state.range(0) == 0) {
    signals.clear();
    for (size_t i = 0; i < SignalCount(); ++i) {
      const SignalInfo& info = SignalTable()[i];
      if (!info.derived && info.granularity != Granularity::kRun) signals.push_back(info.id);
    }
  }
  const auto mix = testing_support::SignalMix(1, 1024, 1024);
  int64_t values = 0;
  for (auto _ : state) {
    state.PauseTiming();
    Folder folder;
    auto database = Database::Open({.directory = folder.path()});
    auto store = SeriesStore::Create({}, database->get());
    store->Open(1, layout);
    StepSample sample;
    state.ResumeTiming();
    for (int64_t step = 0; step < 1024; ++step) {
      sample.Reset(layout);
      sample.step = step;
      for (size_t s = 0; s < signals.size(); ++s) {
        std::copy_n(mix[s % 4].begin() + step * 1024, 1024, sample.Add(signals[s]).begin());
      }
      store->Append(1, sample).IgnoreError();
      if (step % 256 != 255) continue;
      auto batch = (*database)->NewBatch();
      std::string saved;
      store->Save(1, batch.get(), &saved).IgnoreError();
      batch->PutState(RunRecord{.id = 1}, saved);
      (*database)->Commit(std::move(batch)).IgnoreError();
    }
    store->Drain();
    (*database)->Flush().IgnoreError();
    values += 1024 * 1024 * static_cast<int64_t>(signals.size());
    state.PauseTiming();
    store.reset();
    database->reset();
    state.ResumeTiming();
  }
  state.SetItemsProcessed(values);
}
BENCHMARK(BM_SeriesIngest)
    ->Arg(4)
    ->Arg(0)
    ->MeasureProcessCPUTime()
    ->UseRealTime()
    ->Unit(benchmark::kMillisecond)
    ->Iterations(3);

// Series of 8 heads and 1 M steps, written once.
const std::string& MillionSteps() {
  static Folder* const folder = new Folder;
  const std::string* const path = new std::string(folder->path() + "/db");
  if (std::filesystem::exists(*path)) return *path;
  auto database = Database::Open({.directory = *path});
  auto store = SeriesStore::Create({}, database->get());
  store->Open(1, kEightHeads);
  const auto mix = testing_support::SignalMix(1, 1000, 8);
  StepSample sample;
  for (int64_t step = 0; step < 1'000'000; ++step) {
    sample.Reset(kEightHeads);
    sample.step = step;
    for (const auto& [signal, s] : {std::pair(SignalId::kCommonModeSum, 0), {SignalId::kSpreadSum, 2}}) {
      std::copy_n(mix[static_cast<size_t>(s)].begin() + step % 1000 * 8, 8, sample.Add(signal).begin());
    }
    store->Append(1, sample).IgnoreError();
    if (step % 5000 != 4999) continue;
    auto batch = (*database)->NewBatch();
    std::string saved;
    store->Save(1, batch.get(), &saved).IgnoreError();
    (*database)->Commit(std::move(batch)).IgnoreError();
  }
  store->Drain();
  return *path;
}

// One cell as 1,000 points: of a measured (0) or derived (1) signal, of so many
// thousand steps.  Few enough are decoded, many are drawn from summaries.
void BM_ReadSeries(benchmark::State& state) {
  const std::string& path = MillionSteps();
  const SignalId signal = state.range(0) == 0 ? SignalId::kSpreadSum : SignalId::kDriftRatio;
  for (auto _ : state) {
    state.PauseTiming();
    auto database = Database::Open({.directory = path});
    auto store = SeriesStore::Create({}, database->get());
    state.ResumeTiming();
    auto points =
        store->ReadSeries(1, kEightHeads, {signal, 0, 3}, 0, 1000 * state.range(1), 1000, SeriesStore::kNewestAttempt);
    state.PauseTiming();
    state.counters["points"] = points.ok() ? static_cast<double>(points->step.size()) : -1;
    store.reset();
    database->reset();
    state.ResumeTiming();
  }
}
BENCHMARK(BM_ReadSeries)->ArgsProduct({{0, 1}, {70, 128, 1000}})->Iterations(10)->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace bellwether::server

BENCHMARK_MAIN();
