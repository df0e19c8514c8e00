// prometheus.h: the page that Prometheus scrapes.
//
// Built anew for every scrape from the snapshots of the runs, the firing alerts
// and the server's own counters; nothing is kept per sample.
//
// The page holds at most series_max series, or the server's own metrics if
// those are more.  When they are spent, series leave in this order:
// 1. single heads;
// 2. single tensors and modules;
// 3. the layers of healthy runs;
// 4. the extras of runs;
// 5. the layers of runs that are ill;
// 6. the series that every run has (info, step, stage, last report), of ended
//    runs first, of ill ones last;
// 7. alerts, the mildest first. bellwether_series_suppressed_total{level}
//    counts what was left out.  A run's layers come whole or not at all: half a
//    model on a graph misleads.
//
// Only current runs are exported (current_runs.h); alerts leave with their run.

#ifndef BELLWETHER_SERVER_EXPORT_PROMETHEUS_H_
#define BELLWETHER_SERVER_EXPORT_PROMETHEUS_H_

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "server/export/current_runs.h"
#include "server/export/family_set.h"
#include "server/export/head_choice.h"
#include "server/export/row_choice.h"
#include "server/store/alert_store.h"
#include "server/store/run_table.h"
#include "server/util/clock.h"
#include "server/util/counters.h"

namespace bellwether::server {

struct ExportOptions {
  HeadChoiceOptions heads;
  RowChoiceOptions rows;
  int64_t series_max = 20'000;
  RunHolds holds;
};

// Thread-safe; scrapes are served one after the other.
class Exporter {
 public:
  // All must outlive this object.  Counts transitions from here on.
  Exporter(const ExportOptions& options, const RunTable* runs, AlertStore* alerts, Counters* counters, Clock* clock);
  ~Exporter();
  Exporter(const Exporter&) = delete;
  Exporter& operator=(const Exporter&) = delete;

  // The text format, version 0.0.4.
  std::string Render();

 private:
  std::vector<RunSnapshotPtr> ExportedRuns(int64_t now_ns) const;
  // As many as the budget has room for, which is less by them afterwards.
  void AddAlerts(const std::vector<RunSnapshotPtr>& runs, int64_t now_ns, int64_t* budget, FamilySet* set);
  std::vector<RunSnapshotPtr> AddCores(std::vector<RunSnapshotPtr> runs, int64_t* budget, FamilySet* set);
  void AddCounters(FamilySet* set);
  void AddDetails(const std::vector<RunSnapshotPtr>& runs, int64_t budget, int64_t now_ns, FamilySet* set)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Suppress(SeriesLevel level, int64_t series);

  const ExportOptions options_;
  const RunTable* const runs_;
  AlertStore* const alerts_;
  Counters* const counters_;
  Clock* const clock_;
  int64_t subscription_ = 0;
  absl::Mutex mutex_;
  HeadChoice heads_ ABSL_GUARDED_BY(mutex_);
  RowChoice rows_ ABSL_GUARDED_BY(mutex_);
  std::set<std::string> unknown_names_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_EXPORT_PROMETHEUS_H_
