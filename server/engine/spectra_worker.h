// spectra_worker.h: the thread that turns shipped Gram matrices into signals.
//
// Nothing waits for it but the steps that the matrices are of: acknowledgements
// come from the log, and shards only hand tasks over.  What it is given within
// one pass goes to the bank as one batch, over all runs.  When it is behind by
// more than queue_bytes_max, tasks are answered as dropped.
//
// An answer goes into the log of its run before anybody acts on it.  So the
// signals of a step are the same after a crash, whether a GPU or the CPU
// computed them and whatever was dropped; a matrix without an answer in the log
// is computed after the restart.
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
    // Of matrices as they came.  Steps wait for what waits here: a second of one
    // core for 128 rows, four for 512.
    int64_t queue_bytes_max = 16 << 20;
    int64_t batch_bytes_max = 4 << 20;  // Likewise, of one pass.
    size_t dropped_max = 65'536;        // Answers without a matrix that wait.
  };
  // Logs the answers of one run and hands them to its shard.  False: the log
  // does not take them now; it is asked again.
  using Sink = std::function<bool(RunId run, const SpectraMessage& answers)>;

  // `bank` null: the CPU's.  All must outlive it.
  SpectraWorker(const Options& options, SpectraBank* bank, Counters* counters, const Clock* clock);
  ~SpectraWorker();  // As Stop().
  SpectraWorker(const SpectraWorker&) = delete;
  SpectraWorker& operator=(const SpectraWorker&) = delete;

  void Start(Sink sink);
  // Leaves what waits unanswered; the log still has it.
  void Stop();
  void Submit(GramTask task);
  // Waits until all that was submitted so far is answered.
  void AwaitIdle();

 private:
  using Answers = std::map<RunId, SpectraMessage>;

  void Loop();
  Counter* counter(const char* result) const;
  void Solve(const std::vector<GramTask>& tasks, Answers* answers);
  // False: it was stopped first.
  bool Deliver(const Answers& answers);

  const Options options_;
  SpectraBank* const bank_;
  Counters* const counters_;
  const Clock* const clock_;
  Histogram* const cpu_seconds_;
  Histogram* const cuda_seconds_;
  Gauge* const queue_bytes_gauge_;
  Sink sink_;

  absl::Mutex mutex_;
  std::deque<GramTask> queue_ ABSL_GUARDED_BY(mutex_);
  int64_t queue_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  // What could not wait.
  std::vector<std::pair<RunId, GramAnswer>> dropped_ ABSL_GUARDED_BY(mutex_);
  bool busy_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_ENGINE_SPECTRA_WORKER_H_
