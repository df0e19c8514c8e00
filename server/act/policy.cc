#include "server/act/policy.h"

#include <algorithm>
#include <charconv>
#include <iterator>
#include <map>
#include <optional>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/act/action_kinds.h"
#include "server/detect/rule_fields.h"
#include "server/util/glob.h"
#include "server/util/regular_file.h"
#include "server/util/status_macros.h"
#include "server/util/strict_yaml.h"

namespace bellwether::server {

const PolicyNumber kActionsPerRun = {"limits.actions_per_run", 0, 200, "actions",
                                     "of the policy in a run, undoing aside"};
const PolicyNumber kMinStepsBetween = {"limits.min_steps_between", 0, 10'000'000, "steps",
                                       "from one action on trial to the next"};
const PolicyNumber kTimeToLive = {"limits.time_to_live_s", 10, 604'800, "seconds",
                                  "after which an action that was not approved, or not answered, expires"};
const PolicyNumber kConfirmSteps = {"rules[].confirm_steps", 0, 10'000'000, "steps", "that the alert must have fired"};
const PolicyNumber kTrialSteps = {"rules[].ladder[].trial_steps", 20, 1'000'000, "steps",
                                  "after which the effect is judged"};
const PolicyNumber kStageMin = {"rules[].when.stage", 0, 5, "", "least stage of the alert"};

namespace {

constexpr const char* kModeNames[] = {"observe", "propose", "enforce"};
constexpr const char* kScopeNames[] = {"all", "layers", "heads"};
constexpr const char* kNextNames[] = {"if_needed", "always"};
constexpr const char* kUndoNames[] = {"when_safe", "never"};
constexpr const char* kSeverityNames[] = {"info", "warning", "critical"};
constexpr size_t kApproversMax = 64;
constexpr size_t kQuietMax = 16;
constexpr size_t kRuleNamesMax = 16;
constexpr int64_t kTrialStepsUsual = 1000;
constexpr int32_t kDayMinutes = 24 * 60;

// "HH:MM" -> minutes of the day; 24:00 is the end of it.
std::optional<int32_t> MinuteOf(std::string_view text) {
  int32_t hour = 0;
  int32_t minute = 0;
  if (text.size() != 5 || text[2] != ':') return std::nullopt;
  const auto two = [](std::string_view digits, int32_t* to) {
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + 2, *to);
    return error == std::errc() && end == digits.data() + 2 && digits[0] != '-';
  };
  if (!two(text, &hour) || !two(text.substr(3), &minute) || minute > 59) return std::nullopt;
  const int32_t all = hour * 60 + minute;
  return all > kDayMinutes ? std::nullopt : std::optional(all);
}

bool IsShapedLikeARule(std::string_view name) {
  if (name.empty() || name.size() > 63 || name[0] < 'a' || name[0] > 'z') return false;
  return std::all_of(name.begin(), name.end(),
                     [](char c) { return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_'; });
}

class Reader {
 public:
  Reader(StrictYaml* yaml, Policy* policy) : yaml_(yaml), policy_(policy) {}

  void Read(const YAML::Node& root) {
    const auto parts = Keys(root, "", {"mode", "approvers", "quiet_hours", "limits", "rules"});
    size_t chosen = 0;
    if (parts.contains("mode") && yaml_->Choice(parts.at("mode"), "mode", kModeNames, &chosen)) {
      policy_->mode = static_cast<PolicyMode>(chosen + 1);
    }
    if (parts.contains("approvers")) ReadApprovers(parts.at("approvers"));
    if (parts.contains("quiet_hours")) ReadQuietHours(parts.at("quiet_hours"));
    if (parts.contains("limits")) ReadLimits(parts.at("limits"));
    if (!parts.contains("rules")) return;
    policy_->rules.clear();
    const std::vector<YAML::Node> items = yaml_->List(parts.at("rules"), "rules", kPolicyRulesMax);
    for (size_t i = 0; i < items.size(); ++i) ReadRule(items[i], absl::StrCat("rules[", i, "]"));
  }

 private:
  using Values = std::map<std::string, YAML::Node>;

  Values Keys(const YAML::Node& node, const std::string& path, const std::vector<std::string>& known) {
    Values values;
    yaml_->ForEach(node, path, [&](const std::string& key, const YAML::Node& at, const YAML::Node& value) {
      if (std::find(known.begin(), known.end(), key) == known.end()) {
        yaml_->Report(
            at, absl::StrCat(path, path.empty() ? "" : ".", key, " is unknown; known: ", absl::StrJoin(known, ", ")));
      } else {
        values.emplace(key, value);
      }
    });
    return values;
  }

  bool Whole(const YAML::Node& node, const std::string& path, const PolicyNumber& number, int64_t* out) {
    return yaml_->Integer(node, path, number.low, number.high, out);
  }

  void ReadApprovers(const YAML::Node& node) {
    const std::vector<YAML::Node> items = yaml_->List(node, "approvers", kApproversMax);
    for (size_t i = 0; i < items.size(); ++i) {
      std::string name;
      if (yaml_->Text(items[i], absl::StrCat("approvers[", i, "]"), 128, &name)) policy_->approvers.push_back(name);
    }
  }

  void ReadQuietHours(const YAML::Node& node) {
    const std::vector<YAML::Node> items = yaml_->List(node, "quiet_hours", kQuietMax);
    for (size_t i = 0; i < items.size(); ++i) {
      const std::string path = absl::StrCat("quiet_hours[", i, "]");
      std::string text;
      if (!yaml_->Text(items[i], path, 32, &text)) continue;
      const size_t dash = text.find('-');
      const auto begin = MinuteOf(std::string_view(text).substr(0, dash));
      const auto end = dash == std::string::npos ? std::nullopt : MinuteOf(std::string_view(text).substr(dash + 1));
      if (!begin || !end || *begin == *end || *begin == kDayMinutes) {
        yaml_->Report(items[i], absl::StrCat(path, " = ", text,
                                             ": must be \"HH:MM-HH:MM\" of the UTC day, 00:00 to 24:00, not empty"));
        continue;
      }
      policy_->quiet_minutes.emplace_back(*begin, *end);
    }
  }

  void ReadLimits(const YAML::Node& node) {
    const Values values = Keys(node, "limits", {"actions_per_run", "min_steps_between", "time_to_live_s"});
    int64_t actions = policy_->actions_per_run;
    const auto read = [&](const char* key, const PolicyNumber& number, int64_t* out) {
      if (values.contains(key)) Whole(values.at(key), number.path, number, out);
    };
    read("actions_per_run", kActionsPerRun, &actions);
    read("min_steps_between", kMinStepsBetween, &policy_->min_steps_between);
    read("time_to_live_s", kTimeToLive, &policy_->time_to_live_s);
    policy_->actions_per_run = static_cast<int32_t>(actions);
  }

  void ReadRule(const YAML::Node& node, const std::string& path) {
    const Values values = Keys(node, path, {"when", "confirm_steps", "ladder"});
    PolicyRule rule;
    if (values.contains("when")) ReadWhen(values.at("when"), path + ".when", &rule);
    if (values.contains("confirm_steps")) {
      Whole(values.at("confirm_steps"), path + ".confirm_steps", kConfirmSteps, &rule.confirm_steps);
    }
    if (!values.contains("ladder")) {
      if (node.IsMap()) yaml_->Report(node, absl::StrCat(path, ".ladder is missing"));
    } else {
      const std::string ladder = path + ".ladder";
      const std::vector<YAML::Node> rungs = yaml_->List(values.at("ladder"), ladder, kLadderMax);
      if (rungs.empty() && values.at("ladder").IsSequence() && values.at("ladder").size() == 0) {
        yaml_->Report(values.at("ladder"), absl::StrCat(ladder, " is empty: must hold 1 to ", kLadderMax, " rungs"));
      }
      for (size_t i = 0; i < rungs.size(); ++i) {
        PolicyRung rung;
        if (ReadRung(rungs[i], absl::StrCat(ladder, "[", i, "]"), &rung)) rule.ladder.push_back(rung);
      }
    }
    policy_->rules.push_back(std::move(rule));
  }

  void ReadWhen(const YAML::Node& node, const std::string& path, PolicyRule* rule) {
    const Values values = Keys(node, path, {"rule", "stage", "severity"});
    if (values.contains("rule")) ReadRuleNames(values.at("rule"), path + ".rule", rule);
    int64_t stage = 0;
    if (values.contains("stage") && Whole(values.at("stage"), path + ".stage", kStageMin, &stage)) {
      rule->stage_min = static_cast<int32_t>(stage);
    }
    size_t severity = 0;
    if (values.contains("severity") &&
        yaml_->Choice(values.at("severity"), path + ".severity", kSeverityNames, &severity)) {
      rule->severity_min = static_cast<Severity>(severity + 1);
    }
  }

  // One name or a list of them.
  void ReadRuleNames(const YAML::Node& node, const std::string& path, PolicyRule* rule) {
    std::vector<YAML::Node> items = {node};
    if (node.IsSequence()) items = yaml_->List(node, path, kRuleNamesMax);
    for (size_t i = 0; i < items.size(); ++i) {
      const std::string at = node.IsSequence() ? absl::StrCat(path, "[", i, "]") : path;
      std::string name;
      if (!yaml_->Text(items[i], at, 63, &name)) continue;
      if (!IsShapedLikeARule(name)) {
        yaml_->Report(items[i], absl::StrCat(at, " = ", name, ": must be a rule's name, [a-z][a-z0-9_]{0,62}"));
      } else {
        rule->rules.push_back(name);
      }
    }
  }

  bool ReadRung(const YAML::Node& node, const std::string& path, PolicyRung* rung) {
    std::vector<std::string> known = {"do", "scope", "trial_steps", "next", "undo"};
    for (const ActionKindInfo& info : ActionKinds()) {
      if (*info.parameter != '\0') known.emplace_back(info.parameter);
    }
    const Values values = Keys(node, path, known);
    if (!values.contains("do")) {
      if (node.IsMap()) yaml_->Report(node, absl::StrCat(path, ".do is missing"));
      return false;
    }
    std::vector<const char*> names;
    for (const ActionKindInfo& info : ActionKinds()) names.push_back(info.name);
    size_t chosen = 0;
    if (!yaml_->Choice(values.at("do"), path + ".do", names, &chosen)) return false;
    const ActionKindInfo& info = ActionKinds()[chosen];
    rung->kind = info.kind;
    rung->value = info.fallback;
    rung->scope = info.of_heads ? PolicyRung::Scope::kHeads : PolicyRung::Scope::kAll;
    rung->trial_steps = info.on_trial ? kTrialStepsUsual : 0;
    bool good = true;
    const auto refuse = [&](const YAML::Node& at, const std::string& what) {
      yaml_->Report(at, absl::StrCat(path, ".", what));
      good = false;
    };
    for (const auto& [key, value] : values) {
      if (key == "do") continue;
      if (key == "scope") {
        good = ReadScope(value, path + ".scope", info, rung) && good;
      } else if (key == "trial_steps") {
        if (!info.on_trial) {
          refuse(value, absl::StrCat("trial_steps is not for ", info.name, ": its effect is not judged"));
        } else {
          good = Whole(value, path + ".trial_steps", kTrialSteps, &rung->trial_steps) && good;
        }
      } else if (key == "next") {
        size_t next = 0;
        good = yaml_->Choice(value, path + ".next", kNextNames, &next) && good;
        rung->always_next = next == 1;
      } else if (key == "undo") {
        size_t undo = 0;
        if (!info.holds) {
          refuse(value, absl::StrCat("undo is not for ", info.name, ": it cannot be undone"));
        } else {
          good = yaml_->Choice(value, path + ".undo", kUndoNames, &undo) && good;
          rung->may_undo = undo == 0;
        }
      } else if (key != info.parameter) {
        refuse(value, absl::StrCat(key, " is not for ", info.name));
      } else {
        good = ReadParameter(value, path + "." + key, info, rung) && good;
      }
    }
    if (std::string_view(info.parameter) == "mode" && !values.contains("mode")) {
      refuse(node, absl::StrCat("mode is missing: must be one of ", absl::StrJoin(AttentionModes(), ", ")));
    }
    return good;
  }

  bool ReadScope(const YAML::Node& value, const std::string& path, const ActionKindInfo& info, PolicyRung* rung) {
    size_t chosen = 0;
    if (!yaml_->Choice(value, path, kScopeNames, &chosen)) return false;
    const auto scope = static_cast<PolicyRung::Scope>(chosen);
    const bool legal = scope == PolicyRung::Scope::kHeads    ? info.of_heads
                       : scope == PolicyRung::Scope::kLayers ? info.of_layers
                                                             : !info.of_heads;
    if (!legal) {
      yaml_->Report(value, absl::StrCat(path, " = ", kScopeNames[chosen], ": must be ",
                                        info.of_heads    ? "heads"
                                        : info.of_layers ? "all or layers"
                                                         : "all",
                                        " for ", info.name));
      return false;
    }
    rung->scope = scope;
    return true;
  }

  bool ReadParameter(const YAML::Node& value, const std::string& path, const ActionKindInfo& info, PolicyRung* rung) {
    if (std::string_view(info.parameter) == "mode") {
      size_t chosen = 0;
      if (!yaml_->Choice(value, path, AttentionModes(), &chosen)) return false;
      rung->mode = AttentionModes()[chosen];
      return true;
    }
    if (info.kind == ActionKind::kCenterK) {
      bool on = true;
      if (!yaml_->Flag(value, path, &on)) return false;
      rung->value = on ? 1 : 0;
      return true;
    }
    if (info.whole) {
      int64_t number = 0;
      if (!yaml_->Integer(value, path, static_cast<int64_t>(info.low), static_cast<int64_t>(info.high), &number)) {
        return false;
      }
      rung->value = static_cast<double>(number);
      return true;
    }
    double number = 0;
    if (!yaml_->Number(value, path, info.low, info.high, &number)) return false;
    if (info.above_low && number <= info.low) {
      yaml_->Report(value, absl::StrCat(path, " = ", number, ": must be above ", info.low));
      return false;
    }
    rung->value = number;
    return true;
  }

  StrictYaml* const yaml_;
  Policy* const policy_;
};

}  // namespace

const char* NameOf(PolicyMode mode) { return kModeNames[static_cast<size_t>(mode) - 1]; }

bool Policy::MayApprove(const std::string& who) const {
  return approvers.empty() || std::any_of(approvers.begin(), approvers.end(),
                                          [&](const std::string& pattern) { return GlobMatches(pattern, who); });
}

int64_t Policy::QuietUntil(int64_t time_unix_ns) const {
  constexpr int64_t kMinute = 60'000'000'000;
  const int64_t minute = time_unix_ns / kMinute;
  const auto of_day = static_cast<int32_t>(minute % kDayMinutes);
  int64_t until = -1;
  for (const auto& [begin, end] : quiet_minutes) {
    const bool in = begin < end ? of_day >= begin && of_day < end : of_day >= begin || of_day < end;
    if (!in) continue;
    const int32_t left = (end - of_day + kDayMinutes) % kDayMinutes;
    until = std::max(until, (minute + (left == 0 ? kDayMinutes : left)) * kMinute);
  }
  return until;
}

const PolicyRule* Policy::Find(const std::string& rule, int32_t stage, Severity severity) const {
  for (const PolicyRule& candidate : rules) {
    if (stage < candidate.stage_min || severity < candidate.severity_min) continue;
    if (candidate.rules.empty() ||
        std::find(candidate.rules.begin(), candidate.rules.end(), rule) != candidate.rules.end()) {
      return &candidate;
    }
  }
  return nullptr;
}

absl::StatusOr<PolicyPtr> ParsePolicy(std::string_view text, const std::string& name) {
  auto policy = std::make_shared<Policy>();
  StrictYaml yaml(name);
  const std::optional<YAML::Node> root = yaml.Load(text, kPolicyBytesMax);
  if (!root) return yaml.status();
  // The built-in text says everything itself.
  if (text != DefaultPolicyText()) policy->rules = DefaultPolicy()->rules;
  Reader(&yaml, policy.get()).Read(*root);
  if (!yaml.clean()) return yaml.status();
  policy->text = std::string(text);
  return PolicyPtr(std::move(policy));
}

absl::StatusOr<PolicyPtr> ReadPolicy(const std::string& path) {
  BW_ASSIGN_OR_RETURN(const RegularFile file, ReadRegularFile(path, kPolicyBytesMax));
  return ParsePolicy(file.text, path);
}

}  // namespace bellwether::server
