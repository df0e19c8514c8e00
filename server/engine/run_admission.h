// run_admission.h: whether one more run can be live.
//
// Live runs are limited by their number and by their memory, which is estimated before the
// first sample comes.  A new run counts as if it sent every signal.  Later, or once it has
// been silent for a while, it counts for the signals that it has sent.  A live run may
// begin to send more; then the next run may find no room.  Rows that a live run names are
// admitted as runs are.
//
// Thread-safe.

#ifndef BELLWETHER_SERVER_ENGINE_RUN_ADMISSION_H_
#define BELLWETHER_SERVER_ENGINE_RUN_ADMISSION_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/store/run_table.h"
#include "server/util/counters.h"

namespace bellwether::server {

// The memory of a live run that sends `signals`, estimated, in bytes: its window, the newest
// steps, names of rows and the detectors' state.  It holds where a sample comes a second or
// more rarely.  Windows as long as a chunk have a budget of their own.
// docs/operate/sizing.md.
int64_t RunMemoryBytes(const Layout& layout, std::span<const SignalId> signals);
// The same for a run that sends all measured signals.
int64_t RunMemoryBytesMax(const Layout& layout);

class RunAdmission {
 public:
  struct Options {
    size_t runs_live_max = 1000;
    // The memory of the whole process, in bytes.  0 = three quarters of that of the machine
    // or its control group, and no less than leaves kRunsLeast for runs.
    int64_t memory_max = 0;
    // The server's memory without any run, in bytes.
    int64_t own_bytes = int64_t{576} << 20;
  };
  static constexpr int64_t kRunsLeast = int64_t{512} << 20;

  // INVALID_ARGUMENT: memory_max is not more than own_bytes.
  static absl::Status Check(const Options& options);
  // As Check().
  static absl::StatusOr<std::unique_ptr<RunAdmission>> Create(const Options& options, Counters* counters);

  // The memory that the process may take, in bytes: limits.memory_max, or this machine's.
  int64_t memory_max() const { return options_.memory_max; }

  // Whether a run of this layout can be live beside those of `runs` that have not ended.
  // RESOURCE_EXHAUSTED: which limit, and how much of it is taken; counted.
  absl::Status Admit(const Layout& layout, std::span<const RunSnapshotPtr> runs, int64_t now_unix_ns);
  // Whether `run`, one of `runs`, can have the rows by name that `more` has more of.  From
  // then on they count, also before its snapshot shows them.  RESOURCE_EXHAUSTED: as Admit().
  absl::Status AdmitRows(const RunRecord& run, const Layout& more, std::span<const RunSnapshotPtr> runs,
                         int64_t now_unix_ns);
  // Shows the memory of `runs` in the metrics.  Returns what the server takes with them.
  int64_t Show(std::span<const RunSnapshotPtr> runs, int64_t now_unix_ns);

 private:
  struct Taken {
    size_t runs = 0;
    int64_t bytes = 0;
  };
  RunAdmission(const Options& options, Counters* counters);
  Taken Take(std::span<const RunSnapshotPtr> runs, int64_t now_unix_ns) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  Options options_;
  Counter* refused_runs_;
  Counter* refused_memory_;
  Gauge* runs_bytes_;
  absl::Mutex mutex_;
  // Rows by name that live runs were given and do not show yet.
  std::map<RunId, Layout> admitted_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_ENGINE_RUN_ADMISSION_H_
