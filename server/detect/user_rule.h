// user_rule.h: a rule that people wrote, with every number that it goes by.
//
// The fields are those of an entry of `rules:` in a rules file; their words,
// legal ranges, defaults and meaning stand in rule_fields.cc, once.  What a
// file leaves out has been filled in: from the thresholds where a built-in rule
// has the same number, else from that table.
//
// Plain values; no thread rules.

#ifndef BELLWETHER_SERVER_DETECT_USER_RULE_H_
#define BELLWETHER_SERVER_DETECT_USER_RULE_H_

#include <cstdint>
#include <optional>
#include <string>

#include "bellwether/signal_table.h"
#include "server/model/alert_transition.h"

namespace bellwether::server {

inline constexpr size_t kUserRulesMax = 64;
// Tensors or modules that a rule judges one by one: the first so many of a run whose names fit.
inline constexpr int32_t kRuleRowsMax = 1024;

// What is judged: each head, each layer's aggregate, the run's, or each tensor, module or own cell.
enum class RuleScope : uint8_t { kHead, kLayer, kRun, kRow };
// How the heads of a layer or a run become one value.
enum class RuleAggregate : uint8_t { kMax, kMin, kMedian, kMean };
enum class RuleDetector : uint8_t { kLevel, kPeers, kGrowth, kImpulse, kCusum };
enum class RuleDirection : uint8_t { kUp, kDown, kBoth };
enum class RuleScale : uint8_t { kLinear, kLog };

struct UserRule {
  std::string name;
  SignalId signal = SignalId::kNone;
  // The signal that the job itself has given this name (mon.log), if it is one; `signal` is kOwnMean then,
  // however the run's merges.  The run says of what it is.
  std::string own;
  RuleScope scope = RuleScope::kHead;
  RuleAggregate aggregate = RuleAggregate::kMax;
  std::string rows = "*";  // Which tensors, modules or cells of own signals, as a glob (util/glob.h).
  RuleDetector detector = RuleDetector::kLevel;
  int32_t stage = 1;
  Severity severity = Severity::kWarning;

  int32_t batch_steps = 20;
  int32_t hold_batches = 3;
  int64_t cooldown_steps = 500;
  int64_t resolve_steps = 1000;
  bool rounding_only = false;
  std::string cause = "unknown";
  std::string advice;

  std::optional<double> above, below;  // level; growth takes above
  double factor = 0;                   // peers
  double floor = 0;                    // peers
  double z_min = 4;                    // growth
  double r2_min = 0.8;                 // growth
  double doubling_steps_max = 2000;    // growth
  std::optional<double> eta_level;     // growth
  double sigmas = 6;                   // impulse
  double k = 1;                        // cusum
  double h = 8;                        // cusum
  int32_t window_batches = 64;         // impulse, cusum: what it is held against
  int32_t relearn_batches = 100;       // impulse, cusum
  RuleDirection direction = RuleDirection::kUp;
  RuleScale scale = RuleScale::kLinear;
  std::optional<double> benjamini_hochberg;  // growth, impulse, cusum

  bool operator==(const UserRule&) const = default;

  // True if what `other` has remembered can go on under this rule: the same
  // series and the same kind of memory, whatever the limits.
  bool RemembersLike(const UserRule& other) const {
    return name == other.name && signal == other.signal && own == other.own && scope == other.scope &&
           aggregate == other.aggregate && rows == other.rows && detector == other.detector &&
           batch_steps == other.batch_steps && window_batches == other.window_batches && scale == other.scale;
  }
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_DETECT_USER_RULE_H_
