// live_run_parts.h: what every live run needs of its server.

#ifndef BELLWETHER_SERVER_ENGINE_LIVE_RUN_PARTS_H_
#define BELLWETHER_SERVER_ENGINE_LIVE_RUN_PARTS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "server/detect/detector_bank.h"
#include "server/engine/reloadable_policy.h"
#include "server/engine/reloadable_rules.h"
#include "server/engine/spectra_worker.h"
#include "server/store/action_store.h"
#include "server/store/alert_store.h"
#include "server/store/baselines.h"
#include "server/store/database.h"
#include "server/store/log_backend.h"
#include "server/store/run_table.h"
#include "server/store/series_store.h"
#include "server/util/clock.h"
#include "server/util/counters.h"
#include "server/util/work_pool.h"

namespace bellwether::server {

// All must outlive the runs.
struct LiveRunParts {
  ReloadableRules* rules = nullptr;
  ReloadablePolicy* policy = nullptr;
  ActionStore* actions = nullptr;
  Database* database = nullptr;
  SeriesStore* series = nullptr;
  AlertStore* alerts = nullptr;
  RunTable* table = nullptr;
  LogBackend* wal = nullptr;
  Counters* counters = nullptr;
  Clock* clock = nullptr;
  DetectorBank* bank = nullptr;      // Null = the CPU's.
  Baselines* baselines = nullptr;    // Null = nothing is known of other runs.
  SpectraWorker* spectra = nullptr;  // Null = Gram matrices give no signals.
  // By lane of the log; null = runs are saved by their shard's thread.
  const std::vector<std::unique_ptr<WorkPool>>* savers = nullptr;
  // Passes an action on to the rank's stream; false = the rank has none.  Null = no rank
  // is handed anything.
  std::function<bool(RunId run, uint32_t rank, const Action& action)> hand_over;
  uint64_t events_max = 10'000;  // Events of a run that are kept.
  // A stream or an import of the run is open.  Null = none ever is.
  std::function<bool(RunId run)> attached;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_ENGINE_LIVE_RUN_PARTS_H_
