// series_store.h: a run's measured series, from the newest step in memory to
// the oldest chunk on disk.
//
// Each run has open windows: its newest steps, raw.  They become chunks
// (chunk.h: 256 steps, more of signals with few heads; 8 heads a row) with a
// summary {min, mean, max} per series and 256 steps, and go into the run's
// batch.  Derived signals have summaries too, and are computed where these do
// not suffice.  Attempts are kept apart; a reader asks for one, or for the
// newest that wrote a step.  What is stored is bit for bit what was measured.
//
// Append and Save belong to the shard that owns the run; reads come from any
// thread at any time and see every appended step.

#ifndef BELLWETHER_SERVER_STORE_SERIES_STORE_H_
#define BELLWETHER_SERVER_STORE_SERIES_STORE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/model/step_sample.h"
#include "server/store/database.h"

namespace bellwether::server {

struct SeriesKey {
  SignalId signal = SignalId::kNone;  // Measured or derived.
  int32_t layer = 0;
  int32_t head = 0;
};

// Bucket i covers [step[i], step[i + 1]); undownsampled, min = mean = max.
struct SeriesPoints {
  std::vector<int64_t> step;
  std::vector<float> min, mean, max;
  bool downsampled = false;
  uint64_t values = 0;
};

class SeriesStore {
 public:
  struct Options {
    int32_t chunk_steps = 256;  // At most 4096.
    // All runs' windows that are as long as a chunk, raw.  What comes beyond
    // waits in windows of window_steps (1..chunk_steps), which are stored and
    // packed together behind.
    int64_t window_bytes_max = 256 << 20;
    int32_t window_steps = 32;
    int32_t zstd_level = 1;
  };
  static constexpr int32_t kNewestAttempt = -1;

  // `database` must outlive this object.
  static std::unique_ptr<SeriesStore> Create(const Options& options, Database* database);
  virtual ~SeriesStore() = default;

  // ---- the shard that owns the run ----
  virtual void Open(RunId run, const Layout& layout) = 0;
  // Adds a closed step.  FAILED_PRECONDITION: not above the attempt's last step,
  // of an attempt older than the newest, or of another layout; nothing is added.
  // NOT_FOUND: not open.
  virtual absl::Status Append(RunId run, const StepSample& sample) = 0;
  // Moves chunks and what the windows have gained into `batch`; `*state` is
  // for the same batch, so that both belong to one point of history.  Until the
  // batch is committed readers find everything in memory.
  virtual absl::Status Save(RunId run, RunBatch* batch, std::string* state) = 0;
  // Instead of Open().  DATA_LOSS: not a saved state; FAILED_PRECONDITION: of
  // another layout; the run is then not open.
  virtual absl::Status Restore(RunId run, const Layout& layout, std::string_view state) = 0;
  // Writes the open windows as chunks and frees the run's memory; reads go on.
  virtual absl::Status Close(RunId run, RunBatch* batch) = 0;

  // Of a closed run: packs, soon, what a stop or an error has left in windows.
  virtual void Pack(RunId) {}

  // Frees the run's memory without writing anything: another server serves it.
  virtual void Forget(RunId) {}

  // ---- anybody ----
  // Steps in [begin, end), at most points_max points (0: no points).  A cell that
  // was not measured gives no point; a bucket of NaN only is NaN, in any other
  // NaN is left out.  `values` counts what was measured.  An unreported series,
  // or an unknown run, gives no points.  INVALID_ARGUMENT: no such head.
  virtual absl::StatusOr<SeriesPoints> ReadSeries(RunId run, const Layout& layout, const SeriesKey& key, int64_t begin,
                                                  int64_t end, size_t points_max, int32_t attempt) const = 0;
  // The last sample at or before `step` (-1 = newest) that has the signal;
  // `*at` is its step, -1 (and no values) if there is none.  "Newest" is the
  // last of the newest attempt, else the highest step counts.
  virtual absl::StatusOr<std::vector<float>> ReadMatrix(RunId run, const Layout& layout, SignalId signal, int64_t step,
                                                        int64_t* at) const = 0;
  // Every stored step by attempt and step, for export, with its time to the
  // microsecond, number of ranks and completeness; `visit` may stop it with an error.
  virtual absl::Status ReadAll(RunId run, const Layout& layout,
                               const std::function<absl::Status(const StepSample&)>& visit) const = 0;
  virtual int64_t memory_bytes() const = 0;
  // Waits until what was committed is packed as far as it will be.
  virtual void Drain() = 0;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_STORE_SERIES_STORE_H_
