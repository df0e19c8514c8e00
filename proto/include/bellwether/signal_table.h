// signal_table.h: the catalogue of signals.proto as a plain table.
//
// Generated from the options of the enum values, so that code which must not
// see protobuf (the client library, the server's inside) reads the same list.
// Immutable; safe from any thread.

#ifndef BELLWETHER_SIGNAL_TABLE_H_
#define BELLWETHER_SIGNAL_TABLE_H_

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "bellwether/signal_id.h"  // Generated: enum class SignalId.

namespace bellwether {

enum class Granularity : uint8_t {
  kRun = 1,
  kHead = 2,
  kKvHead = 3,
  kLayer = 4,
  kExpert = 5,
  kRank = 6,
  kTensor = 7,
  kModule = 8,
  kOwn = 9,
};
// Rows are heads or key heads of layers.
constexpr bool OfHeads(Granularity granularity) {
  return granularity == Granularity::kHead || granularity == Granularity::kKvHead;
}
// Rows have names, which a rank tells before it reports them (Names in ingest.proto).
constexpr bool IsNamedByRanks(Granularity granularity) {
  return granularity == Granularity::kTensor || granularity == Granularity::kModule;
}
// Rows have names: those, or the server made them (OwnValues in ingest.proto).
constexpr bool OfNamedRows(Granularity granularity) {
  return IsNamedByRanks(granularity) || granularity == Granularity::kOwn;
}
enum class Merge : uint8_t { kNone = 0, kSum = 1, kMax = 2, kMean = 3, kEqual = 4 };
enum class MetricLevel : uint8_t { kRun = 1, kLayer = 2, kHead = 3, kRow = 4 };
// Which values are worst; kFurthest: from zero.
enum class Worst : uint8_t { kLargest = 0, kSmallest = 1, kFurthest = 2 };
enum class Aggregate : uint8_t {
  kLast = 1,
  kMax = 2,
  kMedian = 3,
  kMin = 4,
  kTotal = 5,
  kSignedExtreme = 6,
  kSum = 7,
};

struct MetricInfo {
  MetricLevel level;
  Aggregate aggregate;
  const char* name;  // Full Prometheus name.
  const char* help;
  const char* label_name;  // "" = no constant label.
  const char* label_value;
};

struct SignalInfo {
  SignalId id;
  const char* name;
  const char* unit;
  Granularity granularity;
  Merge merge;  // kNone for derived signals.
  bool derived;
  // Derived: numerator / denominator, / sqrt(denominator), or sqrt(numerator / denominator).
  SignalId numerator;
  SignalId denominator;
  bool denominator_root;
  bool root;
  Worst worst;
  const char* help;
  const MetricInfo* metrics;
  size_t metric_count;
};

// All signals by rising id.
const SignalInfo* SignalTable();
size_t SignalCount();

// nullptr if there is no such signal.
const SignalInfo* FindSignal(SignalId id);
const SignalInfo* FindSignal(std::string_view name);

}  // namespace bellwether

#endif  // BELLWETHER_SIGNAL_TABLE_H_
