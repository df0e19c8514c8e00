// series_reader.h: finds a run's values wherever they are: in memory, in stored
// windows, in chunks.
//
// A reader is made per query from what was in memory, then from a snapshot of
// the database, in this order.  A step that moves from the first to the second
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
#include "server/store/retention_state.h"
#include "server/store/series_keys.h"
#include "server/store/series_store.h"
#include "server/store/series_summary.h"

namespace bellwether::server {

// Steps of some cells of a signal in memory: encoded, still open, or (of a
// derived signal) summaries alone.
struct MemoryBlock {
  uint16_t signal = 0;
  uint32_t attempt = 0;
  size_t first_cell = 0;
  std::shared_ptr<const std::string> bytes;
  std::shared_ptr<const Chunk> open;
  std::shared_ptr<const std::string> summaries;  // If it will be stored with some.
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

struct SampleAt {
  int64_t step = -1;
  uint32_t attempt = 0;
  bool found = false;
};

class SeriesReader {
 public:
  SeriesReader(const RocksDatabase* database, RunId run, std::vector<MemoryBlock> memory)
      : memory_(std::move(memory)), snapshot_(database), run_(run) {}

  // Summaries of one cell by rising step: spans that lie wholly in the
  // range and where no other attempt has steps of `written`, a measured signal
  // (for a derived one its numerator).  None if together they hold fewer than
  // `steps_min` steps; but always those whose values are gone (retention.h), cut
  // to the range and to where a newer attempt begins.
  absl::Status ReadSpans(uint16_t signal, size_t cell, uint8_t written, const SeriesRange& range, uint64_t steps_min,
                         std::vector<SummarizedSpan>* spans) const;
  // The measured values of one cell by rising step, without those in `spans`;
  // where attempts overlap, the newest that wrote a step.
  absl::Status ReadCell(uint16_t signal, size_t cell, const SeriesRange& range,
                        const std::vector<SummarizedSpan>& spans, std::vector<SeriesPoint>* points) const;

  // The last sample of the signal at or before `step`; newest: the last one of
  // the newest attempt.
  absl::StatusOr<SampleAt> FindSample(uint16_t signal, int64_t step, bool newest) const;
  // All `cells` of the signal at exactly this sample; false: it has none.
  absl::StatusOr<bool> ReadRow(uint16_t signal, const SampleAt& at, size_t cells, std::vector<float>* row) const;

  absl::StatusOr<std::vector<uint32_t>> Attempts(uint16_t signal) const;  // Rising.

  const std::vector<MemoryBlock>& memory() const { return memory_; }
  const RocksDatabase::Snapshot& snapshot() const { return snapshot_; }
  RunId run() const { return run_; }

 private:
  // The signal's blocks in memory; its stored windows of one part.
  // `visit(const Block&)` returns a status.
  template <typename Visit>
  absl::Status VisitMemory(uint16_t signal, Visit visit) const;
  template <typename Visit>
  absl::Status VisitWindows(uint16_t signal, uint32_t part, Visit visit) const;
  // Up to where values are gone and summaries are what there is.
  absl::StatusOr<HistoryPoint> Summarized() const;
  // All spans of the attempt that may reach into the range, by rising step.
  absl::Status ReadAttemptSpans(uint16_t signal, size_t cell, uint32_t attempt, const SeriesRange& range,
                                std::vector<SummarizedSpan>* spans) const;
  // The attempt's first and last step; first > last: it has none.
  absl::Status ReadExtent(uint16_t signal, uint32_t attempt, int64_t* first, int64_t* last) const;
  // Of the attempt's chunks, those with steps that `spans` leave out.
  absl::Status AddChunks(uint16_t signal, size_t cell, uint32_t attempt, const SeriesRange& range,
                         const std::vector<SummarizedSpan>& spans, std::vector<SeriesPoint>* points) const;

  const std::vector<MemoryBlock> memory_;
  const RocksDatabase::Snapshot snapshot_;
  const RunId run_;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_STORE_SERIES_READER_H_
