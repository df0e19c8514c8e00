// own_signals.h: signals that a job has named itself (mon.log), and their cells.
//
// A signal is what its name says, for the whole run: of what its values are and how ranks merge never
// change.  Its cells get rows as they first come, in the matrices of own_mean, own_sum and own_max.
//
// Plain values; no thread rules.

#ifndef BELLWETHER_SERVER_MODEL_OWN_SIGNALS_H_
#define BELLWETHER_SERVER_MODEL_OWN_SIGNALS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "bellwether/signal_table.h"

namespace bellwether::server {

inline constexpr size_t kOwnSignalsMax = 256;  // Of a run.
inline constexpr size_t kOwnNameBytesMax = 64;

struct OwnSignal {
  std::string name, unit, help;
  Granularity granularity = Granularity::kRun;  // Run, head, layer, expert or rank.
  Merge merge = Merge::kMean;                   // Sum, max or mean.
  std::optional<double> low, high;              // Beyond them a value is wrong.
  uint32_t attempt = 0;                         // That said unit, help and limits.
  int32_t layers = 0, heads = 0;                // That have cells: all are below.
};

// One cell of the own signal of that index.
struct OwnCell {
  int32_t signal = 0, layer = 0, head = 0;
};

// [a-z][a-z0-9_./-]{0,63}
bool IsOwnName(std::string_view name);
// Whose matrix has the values: own_mean, own_sum or own_max.
SignalId MatrixOf(const OwnSignal& signal);
// Its values are of heads or experts, of several in each layer.
bool HasColumns(const OwnSignal& signal);
// kl, router_z[3] or load[3,7].
std::string OwnCellName(const OwnSignal& signal, int32_t layer, int32_t head);

// To which side a signal of that name goes when it is bad, however the job prefixes it: train/kl is a kl.
enum class PastSide : uint8_t { kNone, kFalls, kRises, kRisesLate };  // kRisesLate: not in the first steps.
PastSide PastOf(std::string_view name);
// Whether it says how far the policy that is trained is from the one that samples, which may be 0 exactly.
bool ComparesPolicies(std::string_view name);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_MODEL_OWN_SIGNALS_H_
