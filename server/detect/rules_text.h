// rules_text.h: rules in sentences, and the pages that are made of the tables.
//
// Every number comes from the options that are asked about, every legal range
// from thresholds.cc and rule_fields.cc.
//
// Pure functions; safe from any thread.

#ifndef BELLWETHER_SERVER_DETECT_RULES_TEXT_H_
#define BELLWETHER_SERVER_DETECT_RULES_TEXT_H_

#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "server/detect/judge_options.h"
#include "server/detect/user_rule.h"

namespace bellwether::server {

// All rules, or the one called `name` (built in or not) if it is not empty: when
// it fires, with the numbers in force, and what they would be by default where
// they are not.  NOT_FOUND: names the rules that there are.
absl::StatusOr<std::string> ExplainRules(const JudgeOptions& options, std::string_view name);

std::string ExplainRule(const UserRule& rule, const JudgeOptions& options);

// docs/reference/rules.md.
std::string RulesReference();
// deploy/rules/builtin.yml: a rules file that says what is built in.
std::string BuiltinRulesFile();

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_DETECT_RULES_TEXT_H_
