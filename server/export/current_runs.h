// current_runs.h: the runs of which the world outside still hears.
//
// Of each name the newest run, as long as it reports and a while after its end
// or its last report.  A recording that was imported is none, unless that was asked for:
// it neither calls people nor hides the run of its name that lives.  Prometheus' series and Alertmanager's alerts end
// together.

#ifndef BELLWETHER_SERVER_EXPORT_CURRENT_RUNS_H_
#define BELLWETHER_SERVER_EXPORT_CURRENT_RUNS_H_

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "server/store/run_table.h"

namespace bellwether::server {

struct RunHolds {
  int64_t ended_ns = int64_t{15} * 60 * 1'000'000'000;     // After its end.
  int64_t silent_ns = int64_t{24} * 3600 * 1'000'000'000;  // After its last report.
};

// By name.
inline std::vector<RunSnapshotPtr> CurrentRuns(const RunTable& runs, const RunHolds& holds, int64_t now_unix_ns) {
  std::map<std::string, RunSnapshotPtr> newest;  // Rising ids: the last one of a name stays.
  for (RunSnapshotPtr& run : runs.List()) {
    if (run->record.notifies()) newest[run->record.description.name] = std::move(run);
  }
  std::vector<RunSnapshotPtr> current;
  for (auto& [name, run] : newest) {
    const int64_t quiet_ns = now_unix_ns - run->record.last_report_unix_ns;
    if (quiet_ns < (run->record.ended ? holds.ended_ns : holds.silent_ns)) current.push_back(std::move(run));
  }
  return current;
}

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_EXPORT_CURRENT_RUNS_H_
