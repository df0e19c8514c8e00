// run_metrics.h: one run's snapshot as series.
//
// There are five groups.  A spent budget keeps them in this order: the core (never
// left out), the layers of a run that is ill, the extras, the single tensors,
// modules and ranks, and the single heads.  A cell that was not measured makes no series.  A
// NaN that was measured is exported as NaN.  It wins over the layer's other heads
// in every aggregate except the median, which leaves it out.  Stateless.

#ifndef BELLWETHER_SERVER_EXPORT_RUN_METRICS_H_
#define BELLWETHER_SERVER_EXPORT_RUN_METRICS_H_

#include <cstdint>
#include <span>

#include "server/export/family_set.h"
#include "server/export/row_choice.h"
#include "server/store/run_table.h"

namespace bellwether::server {

// info, step, stage, last report.
inline constexpr int64_t kRunCoreSeries = 4;
void AddRunCore(const RunSnapshot& run, FamilySet* set);

// Attempt, ranks, losses on the way, ETA, and the run-level signals: of the newest step, or of the newest sample of
// the heads where that step does not tell them.
int64_t RunExtraSeriesMax(const RunSnapshot& run);
void AddRunExtras(const RunSnapshot& run, FamilySet* set);

// Every metric of signals.proto at layer level, for all layers.
int64_t LayerSeriesMax(const RunSnapshot& run);
void AddLayers(const RunSnapshot& run, FamilySet* set);

// Every metric of signals.proto at head level; series per head at most.
int64_t HeadSeriesMax(const RunSnapshot& run);
void AddHeads(const RunSnapshot& run, std::span<const Head> heads, FamilySet* set);

// How many rows of each signal have a value, exported or not, and how many cells of own signals are not
// among `rows`, which are the exported ones.  Of signals of ranks the largest and the median of all.
int64_t RowCountSeries(const RunSnapshot& run);
void AddRowCounts(const RunSnapshot& run, std::span<const ChosenRow> rows, FamilySet* set);
// One series a row at most.  A name that is too long for a label loses its middle.
void AddRows(const RunSnapshot& run, std::span<const ChosenRow> rows, FamilySet* set);

// The aggregate of a row of heads; kNotMeasured if none was measured.
float AggregateRow(Aggregate aggregate, std::span<const float> row);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_EXPORT_RUN_METRICS_H_
