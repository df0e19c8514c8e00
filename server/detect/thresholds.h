// thresholds.h: every number of JudgeOptions by name, with its legal range.
//
// The one list that the rules file is checked against, that `rules explain`
// prints from and that docs/reference/rules.md is made of.  A field of
// JudgeOptions that it lacks does not compile.
//
// Immutable; safe from any thread.

#ifndef BELLWETHER_SERVER_DETECT_THRESHOLDS_H_
#define BELLWETHER_SERVER_DETECT_THRESHOLDS_H_

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>

#include "server/detect/judge_options.h"

namespace bellwether::server {

using ThresholdSlot = std::variant<int32_t*, int64_t*, double*>;

struct Threshold {
  const char* section;  // "drift"
  const char* name;     // "grown_factor"
  ThresholdSlot (*slot)(JudgeOptions*);
  double low, high;  // Legal, both ends.
  const char* unit;  // "" = a pure number
  const char* help;

  std::string path() const { return std::string(section) + "." + name; }
  bool whole() const;  // Takes integers only.
  double Get(const JudgeOptions& options) const;
  void Set(double value, JudgeOptions* options) const;
};

// By section, in the order of JudgeOptions.
std::span<const Threshold> Thresholds();
// "drift.grown_factor"; nullptr if there is none.
const Threshold* FindThreshold(std::string_view path);

// The first must not be larger than the second.
struct ThresholdOrder {
  const char* smaller;
  const char* larger;
};
std::span<const ThresholdOrder> ThresholdOrders();

// "drift.growth"; what a rules file calls it.
const char* NameOf(Builtin rule);
// Nothing if no rule or test has that name.
std::optional<Builtin> BuiltinNamed(std::string_view name);
// By Builtin.
std::span<const char* const> BuiltinNames();

// As people write numbers: shortest that reads back the same.
std::string NumberText(double value);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_DETECT_THRESHOLDS_H_
