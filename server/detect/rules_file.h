// rules_file.h: a YAML file of thresholds, rules that are off, and own rules.
//
//   thresholds:
//     drift: {grown_factor: 4, hold_batches: 3}
//   off: [overhead, drift.leak]
//   rules:
//   - name: entropy_gone
//     signal: entropy_ratio
//     detector: level
//     below: 0.05
//     stage: 4
//     severity: warning
//
// What is not said is as built in.  Every key, range and default:
// docs/reference/rules.md, made of thresholds.cc and rule_fields.cc.
//
// Pure functions; safe from any thread.

#ifndef BELLWETHER_SERVER_DETECT_RULES_FILE_H_
#define BELLWETHER_SERVER_DETECT_RULES_FILE_H_

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "server/detect/judge_options.h"
#include "server/detect/user_rule.h"

namespace bellwether::server {

inline constexpr size_t kRulesBytesMax = 256 << 10;

struct RuleSet {
  JudgeOptions options;
  std::string text;  // The file's: ParseRules(text) gives the options again.
};
using RuleSetPtr = std::shared_ptr<const RuleSet>;

// `name` is what findings call the file.  INVALID_ARGUMENT: every finding, a
// line each, `file:line:column: field = value: what is legal`.
absl::StatusOr<RuleSetPtr> ParseRules(std::string_view text, const std::string& name);
// NOT_FOUND: it cannot be read.
absl::StatusOr<RuleSetPtr> ReadRules(const std::string& path);

// [a-z][a-z0-9_]{0,62} and not the name of a built-in rule.
bool IsRuleName(std::string_view name);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_DETECT_RULES_FILE_H_
