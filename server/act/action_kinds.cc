#include "server/act/action_kinds.h"

#include <algorithm>
#include <cmath>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/detect/thresholds.h"

namespace bellwether::server {
namespace {

constexpr const char* kModes[] = {"fa", "paper", "sr", "hp", "hpm", "sdpa"};

constexpr ActionKindInfo kKinds[] = {
    {.kind = ActionKind::kAttentionMode,
     .name = "attention.mode",
     .parameter = "mode",
     .of_layers = true,
     .holds = true,
     .on_trial = true,
     .effect = "hp and hpm take the bias out of delta, which pushes the weights; fa, paper, sr and sdpa do not",
     .cost = "hp: at most 2 % of forward and backward at 4k tokens"},
    {.kind = ActionKind::kCenterK,
     .name = "attention.center_k",
     .parameter = "on",
     .high = 1,
     .whole = true,
     .fallback = 1,
     .of_layers = true,
     .holds = true,
     .on_trial = true,
     .effect = "k - mean(k) per sequence and key head stops the drift on any kernel; softmax does not feel it",
     .cost = "up to 8 % of attention time from 4k tokens on, up to 15 % below"},
    {.kind = ActionKind::kQkClip,
     .name = "qk.clip",
     .parameter = "gamma",
     .high = 1,
     .fallback = 0.5,
     .of_heads = true,
     .on_trial = true,
     .effect = "rows of W_Q and W_K times sqrt(gamma): the heads' scores shrink by gamma; 0: singular values down to "
               "the other heads' median",
     .cost = "the heads attend more broadly at once and learn the rest again; cannot be undone"},
    {.kind = ActionKind::kLrScale,
     .name = "lr.scale",
     .parameter = "factor",
     .high = 10,
     .above_low = true,
     .fallback = 0.5,
     .holds = true,
     .on_trial = true,
     .effect = "the learning rate times the factor, beneath any schedule",
     .cost = "below 1: slower learning while it holds"},
    {.kind = ActionKind::kCheckpointNow,
     .name = "checkpoint.now",
     .parameter = "",
     .effect = "a state to go back to",
     .cost = "one checkpoint's time and space"},
    {.kind = ActionKind::kBatchSkip,
     .name = "batch.skip",
     .parameter = "batches",
     .low = 1,
     .high = 1000,
     .whole = true,
     .fallback = 1,
     .effect = "the next batches are passed over",
     .cost = "these batches are not learned from"},
    {.kind = ActionKind::kSamplingDeepen,
     .name = "sampling.deepen",
     .parameter = "period",
     .low = 1,
     .high = 1e6,
     .whole = true,
     .fallback = 5,
     .holds = true,
     .effect = "a sample of the heads every so many steps",
     .cost = "more of the hook's time, within its budget"},
    {.kind = ActionKind::kStop,
     .name = "stop",
     .parameter = "",
     .effect = "training ends at a step's boundary",
     .cost = "the run ends; cannot be undone"},
    {.kind = ActionKind::kRollbackSuggest,
     .name = "rollback.suggest",
     .parameter = "",
     .effect = "advice to go back to a checkpoint; a person does it",
     .cost = "the steps since that checkpoint"},
};
static_assert(std::size(kKinds) == kActionKindEnd - 1);

struct ReachInfo {
  ActionKind kind;
  std::string_view rule;
  RuleReach reach;
};
// What is not here is kNone.  A test drives the judge with each action and each rule.
constexpr ReachInfo kReaches[] = {
    // The probe may see the centred keys: what is made of the scores is another thing.
    {ActionKind::kCenterK, "drift", RuleReach::kOff},
    {ActionKind::kCenterK, "ties", RuleReach::kOff},
    {ActionKind::kCenterK, "logits", RuleReach::kMoved},
    // It makes weights and scores smaller.
    {ActionKind::kQkClip, "drift", RuleReach::kMoved},
    {ActionKind::kQkClip, "ties", RuleReach::kMoved},
    {ActionKind::kQkClip, "norm", RuleReach::kMoved},
    {ActionKind::kQkClip, "logits", RuleReach::kMoved},
    // Told as a change of the learning rate, or of the data, after which the past is no measure.
    {ActionKind::kLrScale, "loss", RuleReach::kMoved},
    {ActionKind::kLrScale, "gradient", RuleReach::kMoved},
    {ActionKind::kBatchSkip, "loss", RuleReach::kMoved},
    {ActionKind::kBatchSkip, "gradient", RuleReach::kMoved},
};
// They may look at anything that the action changes.
constexpr ActionKind kMovesRulesOfPeople[] = {ActionKind::kAttentionMode, ActionKind::kCenterK, ActionKind::kQkClip,
                                              ActionKind::kLrScale};

absl::Status Refused(std::string_view field, std::string_view value, std::string_view legal) {
  const auto view = [](std::string_view text) { return absl::string_view(text.data(), text.size()); };
  return absl::InvalidArgumentError(absl::StrCat(view(field), " = ", view(value), ": must be ", view(legal)));
}

absl::Status CheckScope(const ActionKindInfo& info, const ActionScope& scope, const Layout& layout) {
  if (!info.of_layers && !scope.layers.empty()) {
    return Refused("scope.layers", absl::StrJoin(scope.layers, ","), absl::StrCat("empty for ", info.name));
  }
  if (!info.of_heads && !scope.heads.empty()) {
    return Refused("scope.heads", absl::StrCat(scope.heads.size(), " heads"), absl::StrCat("empty for ", info.name));
  }
  if (info.of_heads && scope.heads.empty()) {
    return Refused("scope.heads", "none", absl::StrCat("1 to ", kScopeHeadsMax, " heads for ", info.name));
  }
  if (scope.layers.size() > kScopeLayersMax) {
    return Refused("scope.layers", absl::StrCat(scope.layers.size(), " layers"),
                   absl::StrCat("at most ", kScopeLayersMax));
  }
  if (scope.heads.size() > kScopeHeadsMax) {
    return Refused("scope.heads", absl::StrCat(scope.heads.size(), " heads"), absl::StrCat("at most ", kScopeHeadsMax));
  }
  for (size_t i = 0; i < scope.layers.size(); ++i) {
    const int32_t layer = scope.layers[i];
    const std::string field = absl::StrCat("scope.layers[", i, "]");
    if (layer < 0 || layer >= layout.layers) {
      return Refused(field, absl::StrCat(layer), absl::StrCat("in [0, ", layout.layers - 1, "]"));
    }
    if (i > 0 && layer <= scope.layers[i - 1]) {
      return Refused(field, absl::StrCat(layer), "ascending, each layer once");
    }
  }
  for (size_t i = 0; i < scope.heads.size(); ++i) {
    const Head head = scope.heads[i];
    const std::string field = absl::StrCat("scope.heads[", i, "]");
    const std::string value = absl::StrCat(head.layer, "/", head.head);
    if (head.layer < 0 || head.layer >= layout.layers || head.head < 0 || head.head >= layout.heads) {
      return Refused(field, value,
                     absl::StrCat("layer in [0, ", layout.layers - 1, "], head in [0, ", layout.heads - 1, "]"));
    }
    if (std::find(scope.heads.begin(), scope.heads.begin() + static_cast<ptrdiff_t>(i), head) !=
        scope.heads.begin() + static_cast<ptrdiff_t>(i)) {
      return Refused(field, value, "named once");
    }
  }
  return absl::OkStatus();
}

}  // namespace

std::span<const ActionKindInfo> ActionKinds() { return kKinds; }
std::span<const char* const> AttentionModes() { return kModes; }

const ActionKindInfo* FindActionKind(std::string_view name) {
  for (const ActionKindInfo& info : kKinds) {
    if (name == info.name) return &info;
  }
  return nullptr;
}

const ActionKindInfo* FindActionKind(ActionKind kind) {
  const auto index = static_cast<size_t>(kind);
  return index == 0 || index > std::size(kKinds) ? nullptr : &kKinds[index - 1];
}

RuleReach ReachOf(const Action& action, std::string_view rule) {
  const bool centres_no_more = action.kind == ActionKind::kCenterK && action.value == 0;
  for (const ReachInfo& info : kReaches) {
    if (info.kind != action.kind || info.rule != rule) continue;
    return info.reach == RuleReach::kOff && centres_no_more ? RuleReach::kNone : info.reach;
  }
  if (BuiltinNamed(rule).has_value()) return RuleReach::kNone;
  const auto* const end = std::end(kMovesRulesOfPeople);
  return std::find(std::begin(kMovesRulesOfPeople), end, action.kind) != end ? RuleReach::kMoved : RuleReach::kNone;
}

const char* NameOf(ActionKind kind) {
  const ActionKindInfo* const info = FindActionKind(kind);
  return info == nullptr ? "none" : info->name;
}

const char* NameOf(ActionState state) {
  switch (state) {
    case ActionState::kNone:
      return "none";
    case ActionState::kProposed:
      return "proposed";
    case ActionState::kApproved:
      return "approved";
    case ActionState::kSent:
      return "sent";
    case ActionState::kApplied:
      return "applied";
    case ActionState::kRefused:
      return "refused";
    case ActionState::kExpired:
      return "expired";
    case ActionState::kHelped:
      return "helped";
    case ActionState::kDidNotHelp:
      return "did not help";
    case ActionState::kKept:
      return "kept";
    case ActionState::kUndone:
      return "undone";
    case ActionState::kEscalated:
      return "escalated";
  }
  return "unknown";
}

absl::Status CheckAction(const Action& action, const Layout& layout) {
  const ActionKindInfo* const info = FindActionKind(action.kind);
  if (info == nullptr) {
    std::string names;
    for (const ActionKindInfo& kind : kKinds) absl::StrAppend(&names, names.empty() ? "" : ", ", kind.name);
    return Refused("kind", absl::StrCat(static_cast<int>(action.kind)), absl::StrCat("one of ", names));
  }
  if (const absl::Status scope = CheckScope(*info, action.scope, layout); !scope.ok()) return scope;
  const bool has_mode = std::string_view(info->parameter) == "mode";
  if (has_mode != !action.mode.empty()) {
    return Refused(
        "mode", has_mode ? "nothing" : action.mode,
        has_mode ? absl::StrCat("one of ", absl::StrJoin(kModes, ", ")) : absl::StrCat("empty for ", info->name));
  }
  if (has_mode && std::find(std::begin(kModes), std::end(kModes), action.mode) == std::end(kModes)) {
    return Refused("mode", action.mode, absl::StrCat("one of ", absl::StrJoin(kModes, ", ")));
  }
  const std::string value = NumberText(action.value);
  if (has_mode || *info->parameter == '\0') {
    if (action.value != 0) return Refused("value", value, absl::StrCat("0 for ", info->name));
  } else {
    const bool low = info->above_low ? action.value > info->low : action.value >= info->low;
    if (!low || !(action.value <= info->high) || (info->whole && action.value != std::floor(action.value))) {
      return Refused(info->parameter, value,
                     absl::StrCat(info->whole ? "a whole number in " : "in ", info->above_low ? "(" : "[",
                                  NumberText(info->low), ", ", NumberText(info->high), "]"));
    }
  }
  if (action.apply_at_step < 0) return Refused("apply_at_step", absl::StrCat(action.apply_at_step), "0 or above");
  return absl::OkStatus();
}

std::string ScopeText(const ActionScope& scope) {
  if (!scope.heads.empty()) {
    std::string text = absl::StrCat("layer ", scope.heads[0].layer, " head ", scope.heads[0].head);
    const size_t others = scope.heads.size() - 1;
    if (others > 0) absl::StrAppend(&text, " and ", others, others == 1 ? " other" : " others");
    return text;
  }
  if (scope.layers.empty()) return "the whole model";
  return absl::StrCat(scope.layers.size() == 1 ? "layer " : "layers ", absl::StrJoin(scope.layers, ", "));
}

std::string ActionText(const Action& action) {
  std::string text = NameOf(action.kind);
  const ActionKindInfo* const info = FindActionKind(action.kind);
  if (info != nullptr && !action.mode.empty()) absl::StrAppend(&text, " ", action.mode);
  if (action.kind == ActionKind::kCenterK) {
    if (action.value == 0) absl::StrAppend(&text, " off");
  } else if (info != nullptr && *info->parameter != '\0' && action.mode.empty()) {
    absl::StrAppend(&text, " ", NumberText(action.value));
  }
  if (info != nullptr && (info->of_layers || info->of_heads)) absl::StrAppend(&text, " of ", ScopeText(action.scope));
  return text;
}

}  // namespace bellwether::server
