#include "server/model/alert_places.h"

#include <algorithm>
#include <string_view>

#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "bellwether/signal_table.h"

namespace bellwether::server {
namespace {

template <typename Value>
void AddOnce(const Value& value, std::vector<Value>* to) {
  if (std::find(to->begin(), to->end(), value) == to->end()) to->push_back(value);
}

// "a.weight, b.weight, ...", or "a.weight: what a rule says of it"
void AddNames(const std::string& text, const char* unnamed, std::vector<std::string>* to) {
  const std::string names = text.substr(0, text.find(": "));
  for (const absl::string_view name : absl::StrSplit(names, ", ")) {
    const bool is_number = absl::StartsWith(name, unnamed);  // "tensor 5" has no name.
    if (name.empty() || name == "..." || (!is_number && absl::StrContains(name, ' '))) continue;
    AddOnce(std::string(name), to);
  }
}

// "layers.3.mlp gated:dx", with what a rule says of it: the name, then the law.
void AddModule(const std::string& text, std::vector<std::string>* to) {
  const std::string row = text.substr(0, text.find(": "));
  AddNames(row.substr(0, row.rfind(' ')), "row ", to);
}

}  // namespace

AlertPlaces PlacesOf(const std::vector<Evidence>& evidence) {
  AlertPlaces places;
  for (const Evidence& piece : evidence) {
    if (piece.signal == kDifferingRank) {
      AddOnce(static_cast<int64_t>(piece.value), &places.ranks);
      continue;
    }
    const SignalInfo* const signal = FindSignal(std::string_view(piece.signal));
    if (signal == nullptr) continue;
    if (signal->id == SignalId::kLossSequenceMax && places.sequences.empty()) places.sequences = piece.text;
    switch (signal->granularity) {
      case Granularity::kExpert:
        if (piece.where.head >= 0) AddOnce(piece.where, &places.experts);
        break;
      case Granularity::kTensor:
        AddNames(piece.text, "tensor ", &places.tensors);
        break;
      case Granularity::kModule:
        AddModule(piece.text, &places.modules);
        break;
      default:
        // The norm of a head that jumps with its parameter.
        if (piece.detector == "jump") AddNames(piece.text, "tensor ", &places.tensors);
    }
  }
  return places;
}

}  // namespace bellwether::server
