// process_metrics.h: the process_* series that every Prometheus target has.

#ifndef BELLWETHER_SERVER_EXPORT_PROCESS_METRICS_H_
#define BELLWETHER_SERVER_EXPORT_PROCESS_METRICS_H_

#include "server/export/family_set.h"

namespace bellwether::server {

// Reads /proc/self; what cannot be read is left out.  Adds at most
// kProcessSeries series.  Thread-safe.
inline constexpr int64_t kProcessSeries = 7;
void AddProcessMetrics(FamilySet* set);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_EXPORT_PROCESS_METRICS_H_
