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
#include "server/store/run_windows.h"
#include "server/store/series_packer.h"
#include "server/store/series_reader.h"
#include "server/store/series_reads.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

SeriesStore::Options Bounded(SeriesStore::Options options) {
  options.chunk_steps = std::clamp<int32_t>(options.chunk_steps, 1, kChunkStepsMax);
  options.window_steps = std::clamp<int32_t>(options.window_steps, 1, options.chunk_steps);
  return options;
}

absl::Status NoSuchSignal() { return absl::InvalidArgumentError("no such signal"); }

class LocalSeriesStore final : public SeriesStore {
 public:
  LocalSeriesStore(const Options& options, Database* database)
      : options_(Bounded(options)),
        database_(RocksDatabase::As(database)),
        budget_(options_.window_bytes_max),
        packer_({.chunk_steps = static_cast<size_t>(options_.chunk_steps), .zstd_level = options_.zstd_level},
                database_) {}

  void Open(RunId run, const Layout& layout) override { Put(run, NewWindows(run, layout)); }

  absl::Status Append(RunId run, const StepSample& sample) override {
    BW_ASSIGN_OR_RETURN(const std::shared_ptr<RunWindows> windows, Find(run));
    return windows->Append(sample);
  }

  absl::Status Save(RunId run, RunBatch* batch, std::string* state) override {
    BW_ASSIGN_OR_RETURN(const std::shared_ptr<RunWindows> windows, Find(run));
    PutUnfinished(run, windows, batch);
    PutSealed(run, windows, batch, /*close=*/false);
    *state = windows->Save();
    return absl::OkStatus();
  }

  absl::Status Restore(RunId run, const Layout& layout, std::string_view state) override {
    std::shared_ptr<RunWindows> windows = NewWindows(run, layout);
    BW_RETURN_IF_ERROR(windows->Restore(state));
    BW_RETURN_IF_ERROR(ReadUnfinished(run, windows.get()));
    Put(run, std::move(windows));
    return absl::OkStatus();
  }

  absl::Status Close(RunId run, RunBatch* batch) override {
    BW_ASSIGN_OR_RETURN(const std::shared_ptr<RunWindows> windows, Find(run));
    windows->SealAll();
    PutSealed(run, windows, batch, /*close=*/true);
    return absl::OkStatus();
  }

  void Pack(RunId run) override { packer_.Request(run, SeriesPacker::kAllSignals, /*finish=*/true); }

  void Forget(RunId run) override {
    absl::MutexLock lock(&mutex_);
    runs_.erase(run);
  }

  absl::StatusOr<SeriesPoints> ReadSeries(RunId run, const Layout& layout, const SeriesKey& key, int64_t begin,
                                          int64_t end, size_t points_max, int32_t attempt) const override {
    const SignalInfo* const info = FindSignal(key.signal);
    if (info == nullptr) return NoSuchSignal();
    const MatrixShape shape = ShapeOf(*info, layout);
    if (key.layer < 0 || key.layer >= shape.layers || key.head < 0 || key.head >= shape.heads) {
      return absl::InvalidArgumentError(absl::StrCat("layer ", key.layer, ", head ", key.head, ": ", info->name,
                                                     " has ", shape.layers, " layers and ", shape.heads, " heads"));
    }
    std::vector<MemoryBlock> memory;
    if (const auto windows = Find(run); windows.ok()) {
      for (const CellKey& cell : CellsOf(*info, layout, key)) {
        (*windows)->Collect(cell.signal, cell.cell, cell.cell + 1, &memory);
      }
    }
    const SeriesReader reader(database_, run, std::move(memory));
    return ReadSeriesFrom(reader, layout, key, {.begin = begin, .end = end, .attempt = attempt}, points_max);
  }

  absl::StatusOr<std::vector<float>> ReadMatrix(RunId run, const Layout& layout, SignalId signal, int64_t step,
                                                int64_t* at) const override {
    *at = -1;
    const SignalInfo* const info = FindSignal(signal);
    if (info == nullptr) return NoSuchSignal();
    std::set<SignalId> signals = {signal};
    if (info->derived) signals = {info->numerator, info->denominator};
    return ReadMatrixFrom(NewReader(run, signals), layout, *info, step, at);
  }

  absl::Status ReadAll(RunId run, const Layout& layout,
                       const std::function<absl::Status(const StepSample&)>& visit) const override {
    std::set<SignalId> signals = {static_cast<SignalId>(kMetaSignal)};
    for (size_t i = 0; i < SignalCount(); ++i) {
      if (!SignalTable()[i].derived) signals.insert(SignalTable()[i].id);
    }
    return ReadAllFrom(NewReader(run, signals), layout, visit);
  }

  int64_t memory_bytes() const override {
    absl::MutexLock lock(&mutex_);
    int64_t bytes = 0;
    for (const auto& [run, windows] : runs_) bytes += windows->memory_bytes();
    return bytes;
  }

  void Drain() override { packer_.Drain(); }

 private:
  std::shared_ptr<RunWindows> NewWindows(RunId run, const Layout& layout) {
    const RunWindows::Options options{.window_steps = static_cast<size_t>(options_.window_steps),
                                      .chunk_steps = static_cast<size_t>(options_.chunk_steps),
                                      .zstd_level = options_.zstd_level,
                                      .stagger = run * SignalCount()};
    return std::make_shared<RunWindows>(layout, options, &budget_);
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
  // Of whole signals.  Memory first, the snapshot after it.
  SeriesReader NewReader(RunId run, const std::set<SignalId>& signals) const {
    std::vector<MemoryBlock> memory;
    if (const auto windows = Find(run); windows.ok()) {
      for (const SignalId signal : signals) {
        (*windows)->Collect(static_cast<uint16_t>(signal), 0, std::numeric_limits<size_t>::max(), &memory);
      }
    }
    return SeriesReader(database_, run, std::move(memory));
  }

  void PutUnfinished(RunId run, const std::shared_ptr<RunWindows>& windows, RunBatch* batch);
  absl::Status ReadUnfinished(RunId run, RunWindows* windows) const;
  void PutSealed(RunId run, const std::shared_ptr<RunWindows>& windows, RunBatch* batch, bool close);

  const Options options_;
  RocksDatabase* const database_;
  MemoryBudget budget_;
  mutable absl::Mutex mutex_;
  absl::flat_hash_map<RunId, std::shared_ptr<RunWindows>> runs_ ABSL_GUARDED_BY(mutex_);
  SeriesPacker packer_;
};

void LocalSeriesStore::PutUnfinished(RunId run, const std::shared_ptr<RunWindows>& windows, RunBatch* batch) {
  RocksBatch* const rocks = RocksBatch::As(batch);
  const std::vector<RunWindows::Unfinished> unfinished = windows->TakeUnfinished();
  for (const RunWindows::Unfinished& rows : unfinished) {
    SeriesAddress address{.run = run, .signal = rows.signal, .index = 0};
    for (const std::string& part : rows.parts) {
      rocks->Put(SeriesRowKey('p', address, rows.attempt, rows.first_step), part);
      ++address.index;
    }
  }
  rocks->OnAbandoned([windows] { windows->NotStored(); });
}

absl::Status LocalSeriesStore::ReadUnfinished(RunId run, RunWindows* windows) const {
  // Parts lie apart: all of part 0, then all of part 1.
  std::map<std::pair<uint16_t, int64_t>, RunWindows::Unfinished> stored;
  const RocksDatabase::Snapshot snapshot(database_);
  absl::Status damage;
  BW_RETURN_IF_ERROR(
      snapshot.Scan(KeyBuilder('p').U64(run).key(), {}, [&](std::string_view key, std::string_view value) {
        RunWindows::Unfinished& rows = stored[{KeySignal(key), KeyFirstStep(key)}];
        rows.signal = KeySignal(key);
        rows.attempt = KeyAttempt(key);
        rows.first_step = KeyFirstStep(key);
        if (KeyIndex(key) != rows.parts.size()) damage = absl::DataLossError("unfinished chunk: a part is missing");
        rows.parts.emplace_back(value);
        return damage.ok();
      }));
  BW_RETURN_IF_ERROR(damage);
  for (const auto& [where, rows] : stored) BW_RETURN_IF_ERROR(windows->RestoreUnfinished(rows));
  return absl::OkStatus();
}

void LocalSeriesStore::PutSealed(RunId run, const std::shared_ptr<RunWindows>& windows, RunBatch* batch, bool close) {
  RocksBatch* const rocks = RocksBatch::As(batch);
  uint64_t last = 0;
  std::set<uint8_t> windowed;
  for (const auto& sealed : windows->TakeSealed()) {
    SeriesAddress address{.run = run, .signal = sealed->signal, .index = 0};
    for (const auto& row : sealed->rows) {
      rocks->Put(SeriesRowKey(sealed->is_chunk ? 's' : 'w', address, sealed->attempt, sealed->first_step), *row);
      ++address.index;
    }
    address.index = 0;
    for (const std::string& row : sealed->summaries) {
      rocks->Put(SeriesRowKey('m', address, sealed->attempt, sealed->first_step), row);
      ++address.index;
    }
    for (const RunWindows::Superseded& row : sealed->superseded) {
      address.index = row.part;
      rocks->Delete(SeriesRowKey('p', address, sealed->attempt, row.first_step), row.bytes);
    }
    if (!sealed->is_chunk && !sealed->rows.empty()) windowed.insert(sealed->signal);
    last = sealed->number;
  }
  rocks->OnCommitted([this, run, windows, last, close, windowed = std::move(windowed)] {
    windows->Forget(last);
    if (close) {
      absl::MutexLock lock(&mutex_);
      const auto found = runs_.find(run);
      if (found != runs_.end() && found->second == windows) runs_.erase(found);
    }
    if (close) {
      packer_.Request(run, SeriesPacker::kAllSignals, /*finish=*/true);
    } else {
      for (const uint16_t signal : windowed) packer_.Request(run, signal, /*finish=*/false);
    }
  });
}

}  // namespace

std::unique_ptr<SeriesStore> SeriesStore::Create(const Options& options, Database* database) {
  return std::make_unique<LocalSeriesStore>(options, database);
}

}  // namespace bellwether::server
