#include "server/model/own_signals.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace bellwether::server {

bool IsOwnName(std::string_view name) {
  if (name.empty() || name.size() > kOwnNameBytesMax || name[0] < 'a' || name[0] > 'z') return false;
  return std::all_of(name.begin(), name.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_' || c == '.' || c == '/' || c == '-';
  });
}

SignalId MatrixOf(const OwnSignal& signal) {
  return signal.merge == Merge::kSum   ? SignalId::kOwnSum
         : signal.merge == Merge::kMax ? SignalId::kOwnMax
                                       : SignalId::kOwnMean;
}

bool HasColumns(const OwnSignal& signal) {
  return OfHeads(signal.granularity) || signal.granularity == Granularity::kExpert;
}

std::string OwnCellName(const OwnSignal& signal, int32_t layer, int32_t head) {
  if (signal.granularity == Granularity::kRun) return signal.name;
  return HasColumns(signal) ? absl::StrCat(signal.name, "[", layer, ",", head, "]")
                            : absl::StrCat(signal.name, "[", layer, "]");
}

}  // namespace bellwether::server
