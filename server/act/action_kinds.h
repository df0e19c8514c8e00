// action_kinds.h: the kinds of action by name, with what is legal for each.
//
// The one list that policy files and requests are checked against, that people
// are told from and that docs/reference/policy.md is made of.
//
// Immutable; safe from any thread.

#ifndef BELLWETHER_SERVER_ACT_ACTION_KINDS_H_
#define BELLWETHER_SERVER_ACT_ACTION_KINDS_H_

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "server/model/action.h"

namespace bellwether::server {

struct ActionKindInfo {
  ActionKind kind;
  const char* name;          // "attention.center_k"
  const char* parameter;     // What a policy calls `value`; "mode" = the words below; "" = it has none.
  double low = 0, high = 0;  // Of the value, both ends legal, unless:
  bool above_low = false;    // the low end itself is not.
  bool whole = false;        // Takes whole numbers only.
  double fallback = 0;       // The value where nothing is said.
  bool of_layers = false;    // Its scope may name layers,
  bool of_heads = false;     // must name heads.
  bool holds = false;        // Stays in force: handed again to a new attempt, and can be undone.
  bool on_trial = false;     // Its effect is judged.
  const char* effect;
  const char* cost;
};

// What an action that was applied does to a rule of the judge.
enum class RuleReach : uint8_t {
  // The rule judges on: that its alert is over is evidence.
  kNone,
  // The rule finds nothing while the action holds.  The judge keeps its alert until
  // other signals end it: that it is over says nothing of the action.
  kOff,
  // The action itself changes what the rule looks at, or what it is held against:
  // the alert may be over by that alone.
  kMoved,
};
// `rule`: of a transition, also one that people wrote.
RuleReach ReachOf(const Action& action, std::string_view rule);

// By rising ActionKind, kNone aside.
std::span<const ActionKindInfo> ActionKinds();
// nullptr: there is none.
const ActionKindInfo* FindActionKind(std::string_view name);
const ActionKindInfo* FindActionKind(ActionKind kind);
// "attention.center_k"; "none".
const char* NameOf(ActionKind kind);
// "did not help"
const char* NameOf(ActionState state);

// Of attention.mode.
std::span<const char* const> AttentionModes();

// Whether kind, scope, mode, value and apply_at_step are legal in a run of this
// layout.  INVALID_ARGUMENT names field, value and range.
absl::Status CheckAction(const Action& action, const Layout& layout);

// "layers 1, 3", "layer 1 head 0 and 2 others", "the whole model"
std::string ScopeText(const ActionScope& scope);
// "attention.mode hp of layer 1", "qk.clip 0.5 of layer 1 head 0"
std::string ActionText(const Action& action);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_ACT_ACTION_KINDS_H_
