// rule_families.h: which families of rules are switched off.

#ifndef BELLWETHER_SERVER_DETECT_RULE_FAMILIES_H_
#define BELLWETHER_SERVER_DETECT_RULE_FAMILIES_H_

#include <cstdint>

#include "server/detect/judge_options.h"

namespace bellwether::server {

// 1 << RuleFamily for each family none of whose rules is on: RunCoverage::off.
uint8_t FamiliesOff(const JudgeOptions& options);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_DETECT_RULE_FAMILIES_H_
