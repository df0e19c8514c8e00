// What the store costs: the log's rate and latency by batch, its opening, the
// codec, whole ingest into the series store, a long series read cold.
//
//   store_bench --benchmark_format=json
#include <benchmark/benchmark.h>
#include <stdlib.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <string>
#include <vector>

#include "server/store/chunk.h"
#include "server/store/series_store.h"
#include "server/store/wal.h"
#include "tests/support/signal_mix.h"

namespace bellwether::server {
namespace {

class Folder {
 public:
  Folder() : path_((std::filesystem::temp_directory_path() / "store-bench-XXXXXX").string()) { ::mkdtemp(path_.data()); }
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
    for (int64_t i = 0; i < state.range(0); ++i) last = *(*wal)->Append(frame);
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
      last = *(*wal)->Append(frame);
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

// 32 layers x 32 heads x 4 signals; packing and a flush included.
void BM_SeriesIngest(benchmark::State& state) {
  const Layout layout{.layers = 32, .heads = 32, .kv_heads = 32};
  const SignalId signals[] = {SignalId::kWqSigma, SignalId::kDeltaBiasSum, SignalId::kEntropySum, SignalId::kTiedRowsBf16};
  const auto mix = testing_support::SignalMix(1, 1024, 1024);
  int64_t values = 0;
  for (auto _ : state) {
    state.PauseTiming();
    Folder folder;
    auto database = Database::Open({.directory = folder.path()});
    auto store = SeriesStore::Create({}, database->get());
    store->Open(1, layout);
    state.ResumeTiming();
    for (int64_t step = 0; step < 1024; ++step) {
      StepSample sample;
      sample.Reset(layout);
      sample.step = step;
      for (size_t s = 0; s < 4; ++s) {
        const auto out = sample.Add(signals[s]);
        std::copy_n(mix[s].begin() + step * 1024, 1024, out.begin());
      }
      store->Append(1, sample).IgnoreError();
      if (step % 64 != 63) continue;
      auto batch = (*database)->NewBatch();
      std::string saved;
      store->Save(1, batch.get(), &saved).IgnoreError();
      batch->PutState(1, saved);
      (*database)->Commit(std::move(batch)).IgnoreError();
    }
    store->Drain();
    (*database)->Flush().IgnoreError();
    values += 1024 * 4096;
    state.PauseTiming();
    store.reset();
    database->reset();
    state.ResumeTiming();
  }
  state.SetItemsProcessed(values);
}
BENCHMARK(BM_SeriesIngest)->MeasureProcessCPUTime()->UseRealTime()->Unit(benchmark::kMillisecond)->Iterations(3);

// One cell of 1 M steps: 0 = measured, 1 = derived.
void BM_ReadMillionSteps(benchmark::State& state) {
  const Layout layout{.layers = 1, .heads = 8, .kv_heads = 8};
  static Folder* const folder = new Folder;
  if (!std::filesystem::exists(folder->path() + "/db")) {
    auto database = Database::Open({.directory = folder->path() + "/db"});
    auto store = SeriesStore::Create({}, database->get());
    store->Open(1, layout);
    const auto mix = testing_support::SignalMix(1, 1000, 8);
    StepSample sample;
    for (int64_t step = 0; step < 1'000'000; ++step) {
      sample.Reset(layout);
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
  }
  const SignalId signal = state.range(0) == 0 ? SignalId::kSpreadSum : SignalId::kDriftRatio;
  for (auto _ : state) {
    state.PauseTiming();
    auto database = Database::Open({.directory = folder->path() + "/db"});
    auto store = SeriesStore::Create({}, database->get());
    state.ResumeTiming();
    auto points = store->ReadSeries(1, layout, {signal, 0, 3}, 0, INT64_MAX, 1000, SeriesStore::kNewestAttempt);
    state.PauseTiming();
    state.counters["points"] = points.ok() ? static_cast<double>(points->step.size()) : -1;
    store.reset();
    database->reset();
    state.ResumeTiming();
  }
}
BENCHMARK(BM_ReadMillionSteps)->Arg(0)->Arg(1)->Iterations(10)->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace bellwether::server

BENCHMARK_MAIN();
