// alert_transition.h: one change of an alert's state, as a plain struct.
//
// The fields are those of Transition in alerts.proto, which specifies them.

#ifndef BELLWETHER_SERVER_MODEL_ALERT_TRANSITION_H_
#define BELLWETHER_SERVER_MODEL_ALERT_TRANSITION_H_

#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "server/model/run_types.h"

namespace bellwether::server {

enum class Severity : uint8_t { kNone = 0, kInfo = 1, kWarning = 2, kCritical = 3 };
enum class AlertState : uint8_t { kNone = 0, kFiring = 1, kResolved = 2 };

struct Eta {
  bool known = false;
  double steps = 0, lower_steps = 0, upper_steps = 0;  // 80 % interval
  double step_seconds = 0;                             // Wall time of a step of the run; 0: not told.  Not stored.
};

// How a signal lay in earlier healthy runs of the same kind.
struct SiblingBand {
  uint32_t runs = 0;  // 0 = nothing is known.
  int64_t step_begin = 0, step_end = 0;
  double min = 0, p01 = 0, p50 = 0, p99 = 0, max = 0;
};

struct Evidence {
  std::string signal;
  Head where;  // -1 = the run, or the layer, as a whole
  double value = 0;
  double threshold = 0;
  double baseline = std::numeric_limits<double>::quiet_NaN();
  int64_t first_step = 0;
  std::string detector;
  std::string text;
  SiblingBand siblings;  // Added by the poster of the transition; detectors do not set it.
};

struct AlertTransition {
  uint64_t id = 0;  // Given by the alert log.
  RunId run = 0;
  std::string run_name;
  uint32_t attempt = 0;
  std::string key;  // Names the alert in its run, and carries nothing else: alert_engine.h
  uint32_t k = 0;
  AlertState state = AlertState::kNone;
  Severity severity = Severity::kNone;
  std::string rule;
  int32_t stage = 0;
  int64_t step = 0;
  int64_t first_step = 0;
  Head strongest;
  std::vector<Head> heads;  // Strongest first, <= 32
  uint32_t heads_total = 0;
  Eta eta;
  std::vector<Evidence> evidence;  // <= 32
  std::string cause;
  std::string summary;
  std::string advice;
  int64_t time_unix_ns = 0;
  std::string siblings;      // One sentence, added by the poster as well.
  bool told_before = false;  // To subscribers, when it could not be stored; not stored itself.
  // Another server of the cluster concluded and notifies it; set by the poster
  // as well.
  bool foreign = false;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_MODEL_ALERT_TRANSITION_H_
