#include "server/store/series_store.h"

#include <algorithm>
#include <limits>
#include <map>
#include <set>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "server/store/downsample.h"
#include "server/store/run_windows.h"
#include "server/store/sample_cursor.h"
#include "server/store/series_packer.h"
#include "server/store/series_reader.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

constexpr int kFindTriesMax = 64;  // Samples to look at for one that has both parts of a derived signal.

uint8_t Index(SignalId signal) { return static_cast<uint8_t>(signal); }

SeriesStore::Options Bounded(SeriesStore::Options options) {
  options.chunk_steps = std::clamp<int32_t>(options.chunk_steps, 1, kChunkStepsMax);
  options.window_steps = std::clamp<int32_t>(options.window_steps, 1, options.chunk_steps);
  return options;
}

// One cell's column of a signal that may have fewer heads than asked for: a
// query head's key head.
size_t CellOf(MatrixShape from, MatrixShape of, const SeriesKey& key) {
  const int64_t head = of.heads == 0 ? 0 : int64_t{key.head} * from.heads / of.heads;
  return static_cast<size_t>(int64_t{key.layer} * from.heads + head);
}

class LocalSeriesStore final : public SeriesStore {
 public:
  LocalSeriesStore(const Options& options, Database* database)
      : options_(Bounded(options)),
        database_(RocksDatabase::As(database)),
        packer_({.chunk_steps = static_cast<size_t>(options_.chunk_steps), .zstd_level = options_.zstd_level},
                database_) {}

  void Open(RunId run, const Layout& layout) override { Put(run, NewWindows(layout)); }

  absl::Status Append(RunId run, const StepSample& sample) override {
    BW_ASSIGN_OR_RETURN(const std::shared_ptr<RunWindows> windows, Find(run));
    return windows->Append(sample);
  }

  absl::Status Save(RunId run, RunBatch* batch, std::string* state) override {
    BW_ASSIGN_OR_RETURN(const std::shared_ptr<RunWindows> windows, Find(run));
    PutSealed(run, windows, batch, /*close=*/false);
    *state = windows->Save();
    return absl::OkStatus();
  }

  absl::Status Restore(RunId run, const Layout& layout, std::string_view state) override {
    std::shared_ptr<RunWindows> windows = NewWindows(layout);
    BW_RETURN_IF_ERROR(windows->Restore(state));
    Put(run, std::move(windows));
    return absl::OkStatus();
  }

  absl::Status Close(RunId run, RunBatch* batch) override {
    BW_ASSIGN_OR_RETURN(const std::shared_ptr<RunWindows> windows, Find(run));
    windows->SealAll();
    PutSealed(run, windows, batch, /*close=*/true);
    return absl::OkStatus();
  }

  absl::StatusOr<SeriesPoints> ReadSeries(RunId run, const Layout& layout, const SeriesKey& key, int64_t begin,
                                          int64_t end, size_t points_max, int32_t attempt) const override;
  absl::StatusOr<std::vector<float>> ReadMatrix(RunId run, const Layout& layout, SignalId signal, int64_t step,
                                                int64_t* at) const override;
  absl::Status ReadAll(RunId run, const Layout& layout,
                       const std::function<absl::Status(const StepSample&)>& visit) const override;

  int64_t memory_bytes() const override {
    absl::MutexLock lock(&mutex_);
    int64_t bytes = 0;
    for (const auto& [run, windows] : runs_) bytes += windows->memory_bytes();
    return bytes;
  }

  void Drain() override { packer_.Drain(); }

 private:
  std::shared_ptr<RunWindows> NewWindows(const Layout& layout) const {
    return std::make_shared<RunWindows>(layout, static_cast<size_t>(options_.window_steps), options_.zstd_level);
  }
  void Put(RunId run, std::shared_ptr<RunWindows> windows) {
    {
      absl::MutexLock lock(&mutex_);
      runs_[run] = std::move(windows);
    }
    packer_.Request(run, SeriesPacker::kAllSignals, /*finish=*/false);  // What a crash left unpacked.
  }
  absl::StatusOr<std::shared_ptr<RunWindows>> Find(RunId run) const {
    absl::MutexLock lock(&mutex_);
    const auto found = runs_.find(run);
    if (found == runs_.end()) return absl::NotFoundError(absl::StrCat("run ", run, " is not open"));
    return found->second;
  }

  void PutSealed(RunId run, const std::shared_ptr<RunWindows>& windows, RunBatch* batch, bool close) {
    RocksBatch* const rocks = RocksBatch::As(batch);
    uint64_t last = 0;
    std::set<uint8_t> signals;
    for (const RunWindows::Sealed& sealed : windows->TakeSealed()) {
      const SeriesAddress address{.run = run, .signal = sealed.signal, .index = sealed.part};
      rocks->Put(SeriesRowKey('w', address, sealed.attempt, sealed.first_step), *sealed.bytes);
      signals.insert(sealed.signal);
      last = sealed.number;
    }
    rocks->OnCommitted([this, run, windows, last, close, signals = std::move(signals)] {
      windows->Forget(last);
      if (close) {
        absl::MutexLock lock(&mutex_);
        const auto found = runs_.find(run);
        if (found != runs_.end() && found->second == windows) runs_.erase(found);
      }
      if (close) {
        packer_.Request(run, SeriesPacker::kAllSignals, /*finish=*/true);
      } else {
        for (const uint8_t signal : signals) packer_.Request(run, signal, /*finish=*/false);
      }
    });
  }

  // Memory first, the snapshot after it.
  std::unique_ptr<SeriesReader> NewReader(RunId run, const std::vector<std::pair<uint8_t, size_t>>& cells) const {
    std::vector<MemoryWindow> memory;
    if (const auto windows = Find(run); windows.ok()) {
      for (const auto& [signal, cell] : cells) {
        const auto part = static_cast<uint32_t>(cell / kPartCells);
        (*windows)->Collect(signal, part, part + 1, &memory);
      }
    }
    return std::make_unique<SeriesReader>(database_, run, std::move(memory));
  }
  std::unique_ptr<SeriesReader> NewWholeReader(RunId run, const std::set<uint8_t>& signals) const {
    std::vector<MemoryWindow> memory;
    if (const auto windows = Find(run); windows.ok()) {
      for (const uint8_t signal : signals) {
        (*windows)->Collect(signal, 0, std::numeric_limits<uint32_t>::max(), &memory);
      }
    }
    return std::make_unique<SeriesReader>(database_, run, std::move(memory));
  }

  const Options options_;
  RocksDatabase* const database_;
  mutable absl::Mutex mutex_;
  absl::flat_hash_map<RunId, std::shared_ptr<RunWindows>> runs_ ABSL_GUARDED_BY(mutex_);
  SeriesPacker packer_;
};

absl::StatusOr<SeriesPoints> LocalSeriesStore::ReadSeries(RunId run, const Layout& layout, const SeriesKey& key,
                                                          int64_t begin, int64_t end, size_t points_max,
                                                          int32_t attempt) const {
  const SignalInfo* const info = FindSignal(key.signal);
  if (info == nullptr) return absl::InvalidArgumentError("no such signal");
  const MatrixShape shape = ShapeOf(*info, layout);
  if (key.layer < 0 || key.layer >= shape.layers || key.head < 0 || key.head >= shape.heads) {
    return absl::InvalidArgumentError(absl::StrCat("layer ", key.layer, ", head ", key.head, ": ", info->name, " has ",
                                                   shape.layers, " layers and ", shape.heads, " heads"));
  }
  const SeriesRange range{.begin = begin, .end = end, .attempt = attempt};
  std::vector<SeriesPoint> points;
  std::vector<SummarizedSpan> spans;
  if (!info->derived) {
    const size_t cell = CellOf(shape, shape, key);
    const auto reader = NewReader(run, {{Index(key.signal), cell}});
    // A bucket of at least half a chunk: whole chunks still give enough points.
    const uint64_t summarize_from = uint64_t{points_max} * static_cast<uint64_t>(options_.chunk_steps) / 2 + 1;
    BW_RETURN_IF_ERROR(reader->ReadCell(Index(key.signal), cell, range, summarize_from, &points, &spans));
    return Downsample(points, spans, points_max);
  }

  const size_t above = CellOf(ShapeOf(*FindSignal(info->numerator), layout), shape, key);
  const size_t below = CellOf(ShapeOf(*FindSignal(info->denominator), layout), shape, key);
  const auto reader = NewReader(run, {{Index(info->numerator), above}, {Index(info->denominator), below}});
  constexpr uint64_t kNever = std::numeric_limits<uint64_t>::max();
  std::vector<SeriesPoint> divisors;
  BW_RETURN_IF_ERROR(reader->ReadCell(Index(info->numerator), above, range, kNever, &points, &spans));
  BW_RETURN_IF_ERROR(reader->ReadCell(Index(info->denominator), below, range, kNever, &divisors, &spans));
  std::vector<SeriesPoint> derived;
  for (size_t i = 0, j = 0; i < points.size(); ++i) {
    while (j < divisors.size() && divisors[j].step < points[i].step) ++j;
    if (j == divisors.size()) break;
    // Parts of two attempts are not one sample.
    if (divisors[j].step != points[i].step || divisors[j].attempt != points[i].attempt) continue;
    derived.push_back({points[i].step, points[i].attempt, DeriveValue(*info, points[i].value, divisors[j].value)});
  }
  return Downsample(derived, {}, points_max);
}

absl::StatusOr<std::vector<float>> LocalSeriesStore::ReadMatrix(RunId run, const Layout& layout, SignalId signal,
                                                                int64_t step, int64_t* at) const {
  *at = -1;
  const SignalInfo* const info = FindSignal(signal);
  if (info == nullptr) return absl::InvalidArgumentError("no such signal");
  const bool newest = step < 0;
  if (newest) step = std::numeric_limits<int64_t>::max();
  std::set<SignalId> parts = {signal};
  if (info->derived) parts = {info->numerator, info->denominator};
  std::set<uint8_t> signals;
  for (const SignalId part : parts) signals.insert(Index(part));
  const auto reader = NewWholeReader(run, signals);

  StepSample sample;
  std::vector<float> row;
  for (int tries = 0; tries < kFindTriesMax; ++tries) {
    BW_ASSIGN_OR_RETURN(const SampleAt found, reader->FindSample(*signals.begin(), step, newest && tries == 0));
    if (!found.found) return std::vector<float>{};
    sample.Reset(layout);
    bool all = true;
    for (const SignalId part : parts) {
      const auto cells = static_cast<size_t>(ShapeOf(*FindSignal(part), layout).size());
      BW_ASSIGN_OR_RETURN(const bool has, reader->ReadRow(Index(part), found, cells, &row));
      all = all && has;
      if (has) std::copy(row.begin(), row.end(), sample.Add(part).begin());
    }
    if (all && DeriveMatrix(sample, *info, &row)) {
      *at = found.step;
      return row;
    }
    if (found.step == std::numeric_limits<int64_t>::min()) break;
    step = found.step - 1;
  }
  return std::vector<float>{};
}

absl::Status LocalSeriesStore::ReadAll(RunId run, const Layout& layout,
                                       const std::function<absl::Status(const StepSample&)>& visit) const {
  std::set<uint8_t> signals = {kMetaSignal};
  for (size_t i = 0; i < SignalCount(); ++i) {
    if (!SignalTable()[i].derived) signals.insert(Index(SignalTable()[i].id));
  }
  const auto reader = NewWholeReader(run, signals);
  BW_ASSIGN_OR_RETURN(const std::vector<uint32_t> attempts, reader->Attempts(kMetaSignal));
  std::vector<float> row;
  for (const uint32_t attempt : attempts) {
    std::map<uint8_t, std::unique_ptr<SampleCursor>> cursors;
    for (const uint8_t signal : signals) {
      const size_t cells = signal == kMetaSignal
                               ? kMetaCells
                               : static_cast<size_t>(ShapeOf(*FindSignal(static_cast<SignalId>(signal)), layout).size());
      auto cursor = std::make_unique<SampleCursor>(reader.get(), signal, attempt, cells);
      BW_RETURN_IF_ERROR(cursor->Start());
      if (cursor->valid()) cursors[signal] = std::move(cursor);
    }
    if (cursors.find(kMetaSignal) == cursors.end()) continue;
    SampleCursor& meta = *cursors[kMetaSignal];
    while (meta.valid()) {
      StepSample sample;
      sample.Reset(layout);
      sample.attempt = attempt;
      sample.step = meta.step();
      for (auto& [signal, cursor] : cursors) {
        if (signal == kMetaSignal) continue;
        if (!cursor->valid() || cursor->step() != sample.step) continue;
        std::copy(cursor->row().begin(), cursor->row().end(), sample.Add(static_cast<SignalId>(signal)).begin());
        BW_RETURN_IF_ERROR(cursor->Next());
      }
      DecodeMeta({meta.row().begin(), meta.row().end()}, &sample);
      BW_RETURN_IF_ERROR(meta.Next());
      BW_RETURN_IF_ERROR(visit(sample));
    }
  }
  return absl::OkStatus();
}

}  // namespace

std::unique_ptr<SeriesStore> SeriesStore::Create(const Options& options, Database* database) {
  return std::make_unique<LocalSeriesStore>(options, database);
}

}  // namespace bellwether::server
