#include "server/detect/rule_families.h"

#include <algorithm>
#include <initializer_list>

#include "server/model/run_coverage.h"

namespace bellwether::server {

uint8_t FamiliesOff(const JudgeOptions& options) {
  const auto off = [&](RuleFamily family, std::initializer_list<Builtin> rules) {
    const bool none = std::none_of(rules.begin(), rules.end(), [&](Builtin rule) { return options.is_on(rule); });
    return none ? 1u << static_cast<uint32_t>(family) : 0u;
  };
  return static_cast<uint8_t>(
      off(RuleFamily::kDrift, {Builtin::kDriftGrowth, Builtin::kDriftLevel, Builtin::kDriftCommonMode}) |
      off(RuleFamily::kTies, {Builtin::kTies}) | off(RuleFamily::kNorm, {Builtin::kNorm}) |
      off(RuleFamily::kLogits, {Builtin::kLogits}) | off(RuleFamily::kLeak, {Builtin::kDriftLeak}) |
      off(RuleFamily::kLoss, {Builtin::kLoss}));
}

}  // namespace bellwether::server
