// spectra_worker.h: the thread that turns shipped Gram matrices into signals.
//
// Only the steps of the matrices wait for the worker: acknowledgements come from the log,
// and shards only hand tasks over.  Tasks that come during one pass go to the bank as one
// batch, over all runs.  When more than queue_bytes_max wait, tasks are answered as
// dropped.
//
// An answer goes into the log of its run before it is used.  So the signals of a step are
// the same after a crash, whether a GPU or the CPU computed them, and dropped ones stay
// dropped.  A matrix without an answer in the log is computed after the restart.
//
// Thread-safe.

#ifndef BELLWETHER_SERVER_ENGINE_SPECTRA_WORKER_H_
#define BELLWETHER_SERVER_ENGINE_SPECTRA_WORKER_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <thread>
#include <utility>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "server/detect/gram_assembler.h"
#include "server/detect/spectra_bank.h"
#include "server/ingest/message.h"
#include "server/util/clock.h"
#include "server/util/counters.h"

namespace bellwether::server {

class SpectraWorker {
 public:
  struct Options {
    // Bytes of matrices that may wait.  Steps wait for them: a second of one core for
    // 128 rows, four for 512.
    int64_t queue_bytes_max = 16 << 20;
    int64_t batch_bytes_max = 4 << 20;  // Bytes of matrices in one pass.
    size_t dropped_max = 65'536;        // Answers without a matrix that wait.
  };
  // Logs the answers of one run and queues them at its shard.  False: the log does not
  // take them now; the worker tries again.
  using Sink = std::function<bool(RunId run, const SpectraMessage& answers)>;

  // `bank` null: the CPU's.  All must outlive it.
  SpectraWorker(const Options& options, SpectraBank* bank, Counters* counters, const Clock* clock);
  ~SpectraWorker();  // As Stop().
  SpectraWorker(const SpectraWorker&) = delete;
  SpectraWorker& operator=(const SpectraWorker&) = delete;

  void Start(Sink sink);
  // Tasks that wait get no answer; the log still has their matrices.
  void Stop();
  void Submit(GramTask task);
  // Waits until all that was submitted so far is answered.
  void AwaitIdle();

 private:
  using Answers = std::map<RunId, SpectraMessage>;

  void Loop();
  Counter* counter(const char* result) const;
  void Solve(const std::vector<GramTask>& tasks, Answers* answers);
  // False: the worker was stopped before.
  bool Deliver(const Answers& answers);

  // Constant after construction.
  const Options options_;
  SpectraBank* const bank_;
  Counters* const counters_;
  const Clock* const clock_;
  Histogram* const cpu_seconds_;
  Histogram* const cuda_seconds_;
  Gauge* const queue_bytes_gauge_;
  Sink sink_;  // Constant after Start().
  std::thread thread_;

  // Guarded by mutex_.
  absl::Mutex mutex_;
  std::deque<GramTask> queue_ ABSL_GUARDED_BY(mutex_);
  int64_t queue_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  // Answers of tasks that found no room.
  std::vector<std::pair<RunId, GramAnswer>> dropped_ ABSL_GUARDED_BY(mutex_);
  bool busy_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_ENGINE_SPECTRA_WORKER_H_
