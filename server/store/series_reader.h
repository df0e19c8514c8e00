// series_reader.h: finds a run's values wherever they are: in memory, in stored
// windows, in chunks.
//
// A reader is made per query from what was in memory, then from a snapshot of
// the database, in this order: a step that moves from the first to the second
// meanwhile is seen twice and counted once, never missed.  Not thread-safe.

#ifndef BELLWETHER_SERVER_STORE_SERIES_READER_H_
#define BELLWETHER_SERVER_STORE_SERIES_READER_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/store/chunk.h"
#include "server/store/series_keys.h"
#include "server/store/series_store.h"

namespace bellwether::server {

// A few steps of one part of a signal, in memory: encoded, or still open.
struct MemoryWindow {
  uint8_t signal = 0;
  uint32_t part = 0;
  uint32_t attempt = 0;
  std::shared_ptr<const std::string> bytes;
  std::shared_ptr<const Chunk> open;
};

struct SeriesRange {
  int64_t begin = 0, end = 0;
  int32_t attempt = SeriesStore::kNewestAttempt;
};

struct SeriesPoint {
  int64_t step = 0;
  uint32_t attempt = 0;
  float value = 0;
};

// A whole chunk of one series that nothing else overlaps.
struct SummarizedSpan {
  int64_t first_step = 0, last_step = 0;
  SeriesSummary summary;
};

struct SampleAt {
  int64_t step = -1;
  uint32_t attempt = 0;
  bool found = false;
};

class SeriesReader {
 public:
  SeriesReader(const RocksDatabase* database, RunId run, std::vector<MemoryWindow> memory)
      : memory_(std::move(memory)), snapshot_(database), run_(run) {}

  // The measured values of one cell by rising step; where attempts overlap the
  // newest that wrote a step.  Chunks that lie wholly in the range, that nothing
  // overlaps and that together hold at least `summarize_from` steps are handed
  // out as spans instead.
  absl::Status ReadCell(uint8_t signal, size_t cell, const SeriesRange& range, uint64_t summarize_from,
                        std::vector<SeriesPoint>* points, std::vector<SummarizedSpan>* spans) const;

  // The last sample of the signal at or before `step`; newest: the last one of
  // the newest attempt.
  absl::StatusOr<SampleAt> FindSample(uint8_t signal, int64_t step, bool newest) const;
  // All `cells` of the signal at exactly this sample; false: it has none.
  absl::StatusOr<bool> ReadRow(uint8_t signal, const SampleAt& at, size_t cells, std::vector<float>* row) const;

  absl::StatusOr<std::vector<uint32_t>> Attempts(uint8_t signal) const;  // Rising.

  const std::vector<MemoryWindow>& memory() const { return memory_; }
  const RocksDatabase::Snapshot& snapshot() const { return snapshot_; }
  RunId run() const { return run_; }

 private:
  // Every window of the part, from memory and from the database.
  template <typename Visit>
  absl::Status VisitWindows(uint8_t signal, uint32_t part, Visit visit) const;

  const std::vector<MemoryWindow> memory_;
  const RocksDatabase::Snapshot snapshot_;
  const RunId run_;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_STORE_SERIES_READER_H_
