// baseline_learner.h: makes bands of runs that ended healthy.
//
// A run is looked at once it has ended, or has been silent for silent_ms.  It is looked
// at again when it has gone on meanwhile, and when a person has called an alert a false
// alarm or taken that back.  It is learned from if
//   * it went beyond steps_min: before, nothing was judged;
//   * no alert of warning or above was ever open in it, but for rank silence and
//     the hook's overhead, which say nothing about its numerics, and for false alarms.
//     Nor was a head beyond stage 0 when it ended, unless a false alarm says so: its loss
//     stayed on course and nothing grew;
//   * kernel and centring stayed what its first Hello said;
//   * what judged it judged all of its layers: a layer that nothing judged may have been ill.
// Otherwise what was learned from it before is dropped.
//
// The bands come from the stored series, by the readers that queries use, so
// that nothing is added to the way of a frame: per signal and stage of training
// some samples of all heads.  Of the job's own signals it is some values of some cells.  All of it follows from what is
// stored, so a crash in the middle needs no care: the next start looks at the run again.
//
// One thread; Start, Stop and Drain may come from another.

#ifndef BELLWETHER_SERVER_ENGINE_BASELINE_LEARNER_H_
#define BELLWETHER_SERVER_ENGINE_BASELINE_LEARNER_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <thread>
#include <tuple>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/store/alert_store.h"
#include "server/store/baselines.h"
#include "server/store/database.h"
#include "server/store/run_table.h"
#include "server/store/series_store.h"
#include "server/util/clock.h"
#include "server/util/counters.h"

namespace bellwether::server {

// All must outlive the learner.
struct BaselineLearnerParts {
  const RunTable* runs = nullptr;
  const SeriesStore* series = nullptr;
  const AlertStore* alerts = nullptr;
  const Database* database = nullptr;
  Baselines* baselines = nullptr;
  Counters* counters = nullptr;
  Clock* clock = nullptr;
};

class BaselineLearner {
 public:
  struct Options {
    int64_t steps_min = 1000;
    int64_t silent_ms = 6 * 3'600'000;
    int64_t poll_ms = 1000;
    // Of a signal at each stage of training; fewer, but one, where all stages
    // together would take more than cells_max values.
    int64_t samples = 8;
    int64_t cells_max = 2 << 20;
  };

  BaselineLearner(const Options& options, const BaselineLearnerParts& parts);
  ~BaselineLearner();  // As Stop().
  BaselineLearner(const BaselineLearner&) = delete;
  BaselineLearner& operator=(const BaselineLearner&) = delete;

  void Start();
  // Gives up what is being read; returns when the thread has ended.
  void Stop();
  // Waits until every run that has ended by now was looked at.
  void Drain();

 private:
  // What became of a run; counted in bellwether_baseline_runs_total{result}.
  enum class Verdict { kLearned, kIll, kShort, kChanged, kOld, kPartly };
  // (attempt, step, steps recorded, last said of false alarms): as of when a run was looked at.
  using AsOf = std::tuple<uint32_t, int64_t, uint64_t, int64_t>;

  void Loop();
  void Scan();
  bool IsOver(const RunRecord& run) const;
  absl::StatusOr<Verdict> Judge(const RunSnapshot& run) const;
  // Reads the run's bands.  CANCELLED: Stop() was called.
  absl::StatusOr<BaselinePercentiles> Read(const RunSnapshot& run) const;
  // Adds those of one signal.
  absl::Status ReadSignal(const RunRecord& run, const SignalInfo& signal, BaselinePercentiles* bands) const;
  // Adds those of the signals that the job has named itself.
  absl::Status ReadOwn(const RunSnapshot& run, BaselinePercentiles* bands) const;

  const Options options_;
  const BaselineLearnerParts parts_;
  std::map<RunId, AsOf> seen_;  // The thread's own.
  std::atomic<bool> stopping_ = false;
  mutable absl::Mutex mutex_;
  uint64_t wanted_ ABSL_GUARDED_BY(mutex_) = 0;  // Scans asked for, and done.
  uint64_t done_ ABSL_GUARDED_BY(mutex_) = 0;
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_ENGINE_BASELINE_LEARNER_H_
