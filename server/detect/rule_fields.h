// rule_fields.h: the keys of a rule that people write: words, legal ranges,
// defaults, and which detectors take them.
//
// The one list that the rules file is checked against, that `rules explain`
// prints from and that docs/reference/rules.md is made of.
//
// Immutable; safe from any thread.

#ifndef BELLWETHER_SERVER_DETECT_RULE_FIELDS_H_
#define BELLWETHER_SERVER_DETECT_RULE_FIELDS_H_

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>

#include "server/detect/judge_options.h"
#include "server/detect/user_rule.h"

namespace bellwether::server {

// uint8_t: one of `words`, by its number.
using RuleSlot =
    std::variant<double*, std::optional<double>*, int32_t*, int64_t*, bool*, std::string*, SignalId*, uint8_t*>;

struct RuleField {
  const char* name;
  RuleSlot (*slot)(UserRule*);
  double low, high;  // Of a number, both ends legal; of a text, its bytes.
  std::span<const char* const> words;
  uint8_t detectors;       // 1 << RuleDetector of those that take it.
  bool required;           // Where it is taken.
  const char* default_of;  // The threshold that it is by default, or what it is in words; "" = the struct's own.
  const char* unit;
  const char* help;

  bool taken_by(RuleDetector detector) const { return (detectors >> static_cast<uint8_t>(detector) & 1u) != 0; }
};

std::span<const RuleField> RuleFields();
const RuleField* FindRuleField(std::string_view name);
// The value as a rules file would say it; "" for an optional number without one.
std::string ValueText(const RuleField& field, const UserRule& rule);

// A rule with nothing said but its name, signal, scope and detector, under
// these thresholds.
UserRule DefaultRule(const JudgeOptions& thresholds, SignalId signal, RuleScope scope, RuleDetector detector);

// The signals that say something of rounding: they are nothing to worry about
// while keys are centred or scores are computed in fp32.
bool IsRoundingSignal(SignalId signal);

// The name of what it judges: the catalogue's, or a job's own.  Valid as long as the rule.
const char* SignalNameOf(const UserRule& rule);

const char* NameOf(RuleScope scope);
const char* NameOf(RuleAggregate aggregate);
const char* NameOf(RuleDetector detector);
const char* NameOf(Severity severity);

// The same for equal rules, on any machine.
uint64_t Fingerprint(std::span<const UserRule> rules);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_DETECT_RULE_FIELDS_H_
