// finding.h: what the rules say about a head or the run at one tick.

#ifndef BELLWETHER_SERVER_DETECT_FINDING_H_
#define BELLWETHER_SERVER_DETECT_FINDING_H_

#include <cstdint>
#include <vector>

#include "server/store/transition.h"

namespace bellwether::server {

enum class Rule : uint8_t {
  kDrift,
  kTies,
  kNorm,
  kLogits,
  kLoss,
  kGradient,
  kNonfinite,
  kDisagreement,
  kSilent,
  kOverhead,
};

// One alert is open per family at a time: drift, ties and norm are stages of
// one illness and grow as one alert.
enum class Family : uint8_t {
  kRounding,
  kLogits,
  kLoss,
  kGradient,
  kNonfinite,
  kDisagreement,
  kSilent,
  kOverhead,
};
inline constexpr int kFamilies = 8;

const char* NameOf(Rule rule);

struct Finding {
  Rule rule = Rule::kDrift;
  Severity severity = Severity::kNone;
  int32_t stage = 0;
  Head where;        // -1 / -1: the run.
  double score = 0;  // Orders the heads of an alert; larger is worse.
  int64_t first_step = 0;
  Eta eta;
  std::vector<Evidence> evidence;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_DETECT_FINDING_H_
