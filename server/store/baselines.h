// baselines.h: the bands of past healthy runs, and how a new run compares with
// them.
//
// Each run has one entry (baseline_percentiles.h).  So a run is learned once however often
// it is tried, and forgotten by dropping its entry.  Runs of a kind are merged
// when a caller asks.  Everything is in memory and in the database, durably: an
// alert that is concluded again after a crash finds what it found before.
//
// Bands are shown, never judged by: detectors see their own run only, or a
// replay would not be the live run.
//
// Thread-safe; the database must outlive it.

#ifndef BELLWETHER_SERVER_STORE_BASELINES_H_
#define BELLWETHER_SERVER_STORE_BASELINES_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "server/store/baseline_percentiles.h"
#include "server/store/database.h"
#include "server/util/counters.h"

namespace bellwether::server {

class Baselines {
 public:
  // Where one is reached, the oldest run (lowest id) makes room, counted in
  // bellwether_baseline_limit_refused_total{limit}; a run that is itself the
  // oldest is not taken.
  struct Options {
    size_t runs_per_kind_max = 32;
    size_t runs_max = 1024;
  };

  Baselines(const Options& options, Database* database, Counters* counters);

  // Reads what is stored.  A row that cannot be read (of another version,
  // damaged) is dropped, and its run learned again.  Call once, first.
  absl::Status Load();

  // False: the limits would not let the run stay.
  bool HasRoomFor(RunId run, const std::string& kind) const;
  // Adds or replaces the run's; it may push out others.
  absl::Status Put(BaselinePercentiles bands);
  absl::Status Remove(RunId run);
  std::shared_ptr<const BaselinePercentiles> Get(RunId run) const;  // Null: not learned.

  // Runs of the kind by falling id, without `except`.
  std::vector<std::shared_ptr<const BaselinePercentiles>> Siblings(const std::string& kind, RunId except) const;
  // Kinds and their runs, both as above; those with most runs first.
  std::vector<std::vector<std::shared_ptr<const BaselinePercentiles>>> List() const;

  // How `signal` lay at the stage that holds `step` in the runs of the kind
  // but `except`; runs = 0: nothing is known.  `own`: the name of an own signal,
  // whose matrix `signal` is.
  SiblingBand Find(const std::string& kind, RunId except, SignalId signal, int64_t step,
                   std::string_view own = {}) const;

 private:
  using Kind = std::map<RunId, std::shared_ptr<const BaselinePercentiles>>;
  // The run that must go before `run` of `kind` can stay, and for which limit;
  // 0 = none, `run` = it is the one.
  RunId Surplus(RunId run, const std::string& kind, const char** limit) const ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  void Drop(RunId run) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const Options options_;
  Database* const database_;
  Counters* const counters_;
  Gauge* const runs_gauge_;
  // Held by the thread that changes them: readers do not wait for a database
  // that is silent.
  absl::Mutex change_mutex_ ABSL_ACQUIRED_BEFORE(mutex_);
  mutable absl::Mutex mutex_;
  std::map<RunId, std::shared_ptr<const BaselinePercentiles>> runs_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, Kind> kinds_ ABSL_GUARDED_BY(mutex_);
};

// Bands of one run for (signal, own name, range); null if it has none.
const Band* FindBand(const BaselinePercentiles& run, SignalId signal, int range, std::string_view own = {});

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_STORE_BASELINES_H_
