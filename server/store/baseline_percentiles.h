// baseline_percentiles.h: how the signals of one run lay, by stage of training.
//
// A stage is a range of steps: [0, 128), then half octaves, so that early
// training, where everything moves, is told finely and the rest coarsely.  Of
// each signal and range a run keeps kBandProbs quantiles over its heads and
// some of its samples there: a few kilobytes, however long the run was.  Signals that
// the job has named itself are kept in the same way, kOwnBandSignalsMax of them.
//
// Several runs are merged as an even mixture: each of them counts the same,
// whatever it sampled.  Pure functions and plain structs; any thread.

#ifndef BELLWETHER_SERVER_STORE_BASELINE_PERCENTILES_H_
#define BELLWETHER_SERVER_STORE_BASELINE_PERCENTILES_H_

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "bellwether/signal_table.h"
#include "server/model/alert_transition.h"
#include "server/model/run_types.h"

namespace bellwether::server {

// 0-based; range i holds the steps in [BandBegin(i), BandBegin(i + 1)).
inline constexpr int kBandRanges = 80;  // The last one ends beyond 10^13 steps.
int64_t BandBegin(int range);           // range 0..kBandRanges
int BandRangeOf(int64_t step);          // step >= 0; 0..kBandRanges - 1

inline constexpr std::array<double, 11> kBandProbs = {0, 0.001, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 0.999, 1};

// Own signals of a run that are learned: those that it named first.
inline constexpr size_t kOwnBandSignalsMax = 32;

struct Band {
  SignalId signal = SignalId::kNone;  // Of an own signal: its matrix.
  uint16_t own = 0;                   // 1 + the index of its name in BaselinePercentiles::own; 0: none.
  uint8_t range = 0;
  uint32_t values = 0;                               // Behind the quantiles, >= 1; at most UINT32_MAX is told.
  std::array<float, kBandProbs.size()> quantiles{};  // Rising, finite.
};

// What one run was like while it was healthy.
struct BaselinePercentiles {
  RunId run = 0;
  std::string name;
  RunUuid uuid{};
  std::string kind;  // KindOf() its description.
  // What had been recorded when it was learned.
  uint32_t attempt = 0;
  int64_t step = -1;
  uint64_t steps_recorded = 0;
  int64_t learned_unix_ns = 0;
  std::vector<std::string> own;  // Names of own signals, at most kOwnBandSignalsMax.
  std::vector<Band> bands;       // By signal, own name's index and range, each once.
};

// Which runs may be held against each other: architecture, kernel and score
// dtype in words, as the run's newest Hello told them.  Name, rates, world and
// versions do not matter.
std::string KindOf(const RunDescription& run);
// From such an event on the run is of another kind than its Hello told.
bool ChangesKind(EventKind kind);

// Quantiles of the finite ones of `values` (taken apart), linear between
// neighbours; false if there is none.
bool DescribeBand(std::vector<float>* values, Band* band);

// "" of a signal of the catalogue.  REQUIRES: of `run`.
const std::string& OwnNameOf(const BaselinePercentiles& run, const Band& band);

// The even mixture of `bands` (of one signal and range; not null).  None: runs
// is 0.
SiblingBand MergeBands(const std::vector<const Band*>& bands);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_STORE_BASELINE_PERCENTILES_H_
