#include "server/store/series_packer.h"

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "server/store/chunk_rows.h"
#include "server/util/log.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

struct Window {
  std::string key;
  std::string value;
  size_t steps = 0;
  size_t cells = 0;
};

bool SamePartAndAttempt(const Window& a, const Window& b) {
  constexpr size_t kBytes = kSeriesPrefixBytes + 4;
  return std::string_view(a.key).substr(0, kBytes) == std::string_view(b.key).substr(0, kBytes);
}

// Of a chunk of this window's signal.  The first part has all cells of a small one.
size_t StepsOfChunk(size_t chunk_steps, const Window& window) {
  return KeyIndex(window.key) == 0 ? StepsForCells(chunk_steps, window.cells) : chunk_steps;
}

// Where the part's first chunk behind the window begins.
absl::StatusOr<int64_t> NextChunk(const RocksDatabase::Snapshot& snapshot, const Window& window) {
  const SeriesAddress address{.run = KeyNumber(window.key, 1, 8),
                              .signal = KeySignal(window.key),
                              .index = static_cast<uint32_t>(KeyIndex(window.key) * (kPartCells / kGroupCells))};
  const std::string from = SeriesRowKey('s', address, KeyAttempt(window.key), KeyFirstStep(window.key));
  int64_t next = INT64_MAX;
  BW_RETURN_IF_ERROR(
      snapshot.Scan(from.substr(0, kSeriesPrefixBytes + 4), from, [&](std::string_view key, std::string_view) {
        next = KeyFirstStep(key);
        return false;
      }));
  return next;
}

// Whether a signal has windows enough for a chunk, by those of its first part.  Other parts have
// the same steps, or wait for it: of tensors that were named later.
absl::StatusOr<bool> MayHaveChunk(const RocksDatabase::Snapshot& snapshot, const std::vector<Window>& windows,
                                  size_t chunk_steps) {
  size_t steps = 0;
  for (const Window& window : windows) {
    if (!SamePartAndAttempt(windows[0], window) || window.cells != windows[0].cells) return true;
    steps += window.steps;
  }
  if (steps >= StepsOfChunk(chunk_steps, windows[0])) return true;
  BW_ASSIGN_OR_RETURN(const int64_t next_chunk, NextChunk(snapshot, windows[0]));
  return next_chunk != INT64_MAX;
}

// Writes windows[begin, end) of one part and attempt as a chunk.
absl::Status WriteChunk(const std::vector<Window>& windows, size_t begin, size_t end, int zstd_level,
                        RocksBatch* batch) {
  std::vector<int64_t> steps;
  std::vector<float> values;
  size_t cells = 0;
  Chunk window;
  for (size_t i = begin; i < end; ++i) {
    BW_RETURN_IF_ERROR(DecodeChunk(windows[i].value, &window));
    if (i > begin && (window.cells != cells || window.steps.front() <= steps.back())) {
      return absl::DataLossError("stored windows do not follow each other");
    }
    cells = window.cells;
    steps.insert(steps.end(), window.steps.begin(), window.steps.end());
    values.insert(values.end(), window.values.begin(), window.values.end());
    batch->Delete(windows[i].key, windows[i].value.size());
  }
  const std::string& key = windows[begin].key;
  const ChunkRows rows = MakeChunkRows(
      KeySignal(key),
      {.steps = steps, .values = values.data(), .cells = cells, .stride = cells, .zstd_level = zstd_level});
  SeriesAddress address{.run = KeyNumber(key, 1, 8),
                        .signal = KeySignal(key),
                        .index = static_cast<uint32_t>(KeyIndex(key) * (kPartCells / kGroupCells))};
  for (size_t i = 0; i < rows.chunks.size(); ++i, ++address.index) {
    batch->Put(SeriesRowKey('s', address, KeyAttempt(key), steps.front()), *rows.chunks[i]);
    if (rows.summaries.empty()) continue;
    batch->Put(SeriesRowKey('m', address, KeyAttempt(key), steps.front()), rows.summaries[i]);
  }
  return absl::OkStatus();
}

}  // namespace

SeriesPacker::SeriesPacker(const Options& options, RocksDatabase* database)
    : options_(options), database_(database), thread_([this] { Work(); }) {}

SeriesPacker::~SeriesPacker() {
  {
    absl::MutexLock lock(&mutex_);
    stop_ = true;
  }
  thread_.join();
}

void SeriesPacker::Request(RunId run, int signal, bool finish) {
  absl::MutexLock lock(&mutex_);
  bool& request = requests_[{run, signal}];
  request = request || finish;
}

void SeriesPacker::Drain() {
  absl::MutexLock lock(&mutex_);
  const auto done = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return requests_.empty() && !busy_; };
  mutex_.Await(absl::Condition(&done));
}

void SeriesPacker::Work() {
  absl::MutexLock lock(&mutex_);
  const auto wanted = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return stop_ || !requests_.empty(); };
  for (;;) {
    busy_ = false;
    mutex_.Await(absl::Condition(&wanted));
    if (stop_) return;
    const auto [target, finish] = *requests_.begin();
    requests_.erase(requests_.begin());
    busy_ = true;
    mutex_.Unlock();
    if (absl::Status status = Pack(target.first, target.second, finish); !status.ok()) {
      LogError("run {}: its windows stay unpacked: {}", target.first, std::string(status.message()));
    }
    mutex_.Lock();
  }
}

absl::Status SeriesPacker::Pack(RunId run, int signal, bool finish) {
  if (signal != kAllSignals) return PackSignal(run, static_cast<uint16_t>(signal), finish);
  std::set<uint16_t> signals;
  BW_RETURN_IF_ERROR(RocksDatabase::Snapshot(database_).Scan(KeyBuilder('w').U64(run).key(), {},
                                                             [&](std::string_view key, std::string_view) {
                                                               signals.insert(KeySignal(key));
                                                               return true;
                                                             }));
  for (const uint16_t each : signals) BW_RETURN_IF_ERROR(PackSignal(run, each, finish));
  return absl::OkStatus();
}

absl::Status SeriesPacker::PackSignal(RunId run, uint16_t signal, bool finish) {
  std::vector<Window> windows;
  const RocksDatabase::Snapshot snapshot(database_);
  absl::Status damage;
  std::vector<int64_t> decoded;
  bool looked = finish, nothing = false;
  BW_RETURN_IF_ERROR(
      snapshot.Scan(SignalKey('w', run, signal).key(), {}, [&](std::string_view key, std::string_view value) {
        // Of ten thousand tensors the first part is a tenth, and mostly no chunk is full.
        if (!looked && !windows.empty() && KeyIndex(key) > 0) {
          looked = true;
          const auto may = MayHaveChunk(snapshot, windows, options_.chunk_steps);
          if (!may.ok()) damage = may.status();
          nothing = !may.ok() || !*may;
          if (nothing) return false;
        }
        Window& window = windows.emplace_back();
        damage = DecodeChunkShape(value, &decoded, &window.cells);
        window.key = key;
        window.value = value;
        window.steps = decoded.size();
        return damage.ok();
      }));
  BW_RETURN_IF_ERROR(damage);
  if (nothing) return absl::OkStatus();
  uint32_t newest = 0;
  for (const Window& window : windows) newest = std::max(newest, KeyAttempt(window.key));
  std::unique_ptr<RunBatch> batch = database_->NewBatch();
  bool changed = false;
  for (size_t begin = 0; begin < windows.size();) {
    // One part of one attempt at a time; as many windows as make a chunk, and
    // never from both sides of one: a restart may have come in between.
    const size_t chunk_steps = StepsOfChunk(options_.chunk_steps, windows[begin]);
    BW_ASSIGN_OR_RETURN(const int64_t next_chunk, NextChunk(snapshot, windows[begin]));
    // A signal of tensors has more cells once the run has named more of them.
    const auto follows = [&](size_t i) {
      return i < windows.size() && SamePartAndAttempt(windows[begin], windows[i]) &&
             windows[i].cells == windows[begin].cells;
    };
    size_t end = begin, steps = 0;
    while (follows(end) && (end == begin || steps + windows[end].steps <= chunk_steps) &&
           KeyFirstStep(windows[end].key) < next_chunk) {
      steps += windows[end++].steps;
    }
    const bool grew = end < windows.size() && SamePartAndAttempt(windows[begin], windows[end]) && !follows(end);
    const bool full = steps >= chunk_steps || follows(end) || grew || next_chunk != INT64_MAX;
    if (full || finish || KeyAttempt(windows[begin].key) < newest) {
      BW_RETURN_IF_ERROR(WriteChunk(windows, begin, end, options_.zstd_level, RocksBatch::As(batch.get())));
      changed = true;
    }
    begin = end;
  }
  return changed ? database_->Commit(std::move(batch)) : absl::OkStatus();
}

}  // namespace bellwether::server
