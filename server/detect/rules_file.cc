#include "server/detect/rules_file.h"

#include <algorithm>
#include <map>
#include <set>
#include <sstream>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/detect/rule_fields.h"
#include "server/detect/thresholds.h"
#include "server/model/own_signals.h"
#include "server/util/nearest_word.h"
#include "server/util/regular_file.h"
#include "server/util/status_macros.h"
#include "server/util/strict_yaml.h"

namespace bellwether::server {
namespace {

std::string KnownSections() {
  std::vector<std::string> sections;
  for (const Threshold& row : Thresholds()) {
    if (sections.empty() || sections.back() != row.section) sections.push_back(row.section);
  }
  return absl::StrJoin(sections, ", ");
}

std::string KnownIn(const std::string& section) {
  std::vector<std::string> names;
  for (const Threshold& row : Thresholds()) {
    if (row.section == section) names.push_back(row.name);
  }
  return absl::StrJoin(names, ", ");
}

void ReadThresholds(const YAML::Node& node, StrictYaml* yaml, JudgeOptions* options) {
  std::map<std::string, YAML::Mark> said;
  yaml->ForEach(node, "thresholds", [&](const std::string& section, const YAML::Node& at, const YAML::Node& values) {
    if (KnownIn(section).empty()) {
      return yaml->Report(at, absl::StrCat("thresholds.", section, " is unknown; known: ", KnownSections()));
    }
    const std::string path = "thresholds." + section;
    yaml->ForEach(values, path, [&](const std::string& name, const YAML::Node& name_at, const YAML::Node& value) {
      const Threshold* const row = FindThreshold(section + "." + name);
      if (row == nullptr) {
        return yaml->Report(name_at, absl::StrCat(path, ".", name, " is unknown; known: ", KnownIn(section)));
      }
      const std::string field = absl::StrCat(path, ".", name);
      if (row->whole()) {
        int64_t number = 0;
        if (!yaml->Integer(value, field, static_cast<int64_t>(row->low), static_cast<int64_t>(row->high), &number))
          return;
        row->Set(static_cast<double>(number), options);
      } else {
        double number = 0;
        if (!yaml->Number(value, field, row->low, row->high, &number)) return;
        row->Set(number, options);
      }
      said[row->path()] = value.Mark();
    });
  });
  for (const ThresholdOrder& order : ThresholdOrders()) {
    const double smaller = FindThreshold(order.smaller)->Get(*options);
    const double larger = FindThreshold(order.larger)->Get(*options);
    if (smaller <= larger) continue;
    const auto at = said.contains(order.smaller) ? said.find(order.smaller) : said.find(order.larger);
    yaml->Report(
        at == said.end() ? node.Mark() : at->second,
        absl::StrCat("thresholds.", order.smaller, " = ", smaller, ": must be at most ", order.larger, " = ", larger));
  }
}

void ReadOff(const YAML::Node& node, StrictYaml* yaml, JudgeOptions* options) {
  const auto names = BuiltinNames();
  const std::vector<YAML::Node> items = yaml->List(node, "off", names.size());
  for (size_t i = 0; i < items.size(); ++i) {
    size_t chosen = 0;
    const std::string path = absl::StrCat("off[", i, "]");
    if (!yaml->Choice(items[i], path, {names.begin(), names.end()}, &chosen)) continue;
    const auto rule = static_cast<Builtin>(chosen);
    if (options->off.has(rule)) yaml->Report(items[i], absl::StrCat(path, " = ", names[chosen], ": stands twice"));
    options->off.Add(rule);
  }
}

// The signal that a slip of the pen may have meant by `name`, null: none.
const SignalInfo* NearestSignal(std::string_view name) {
  std::vector<std::string> names;
  for (size_t i = 0; i < SignalCount(); ++i) names.push_back(SignalTable()[i].name);
  return FindSignal(NearestWord(name, names));
}

// One entry of `rules:`.
class RuleReader {
 public:
  RuleReader(const YAML::Node& node, std::string path, const JudgeOptions& thresholds, StrictYaml* yaml)
      : node_(node), path_(std::move(path)), thresholds_(thresholds), yaml_(yaml) {}

  // What it is decides what else it may say, so that is read first.
  bool Read(UserRule* rule) {
    if (!yaml_->ForEach(node_, path_, [this](const std::string& key, const YAML::Node& at, const YAML::Node& value) {
          if (FindRuleField(key) == nullptr) {
            std::vector<const char*> known;
            for (const RuleField& field : RuleFields()) known.push_back(field.name);
            return yaml_->Report(at, absl::StrCat(path_, ".", key, " is unknown; known: ", absl::StrJoin(known, ", ")));
          }
          said_.emplace(key, std::make_pair(at, value));
        })) {
      return false;
    }
    UserRule kind;
    const bool has_signal = ReadField("signal", &kind);
    const bool has_detector = ReadField("detector", &kind);
    if (!has_signal || !has_detector) {
      // What the rest says wrongly is told as well, as far as that can be known.
      for (const RuleField& field : RuleFields()) {
        const bool read = field.name == std::string_view("signal") || field.name == std::string_view("detector");
        if (read || !said_.contains(field.name)) continue;
        (void)(has_detector ? ReadField(field.name, &kind) : ReadValue(field, &kind));
      }
      return false;
    }
    const Granularity granularity = FindSignal(kind.signal)->granularity;
    const bool of_run = granularity == Granularity::kRun;
    const bool of_rows = OfNamedRows(granularity);
    const bool of_layers = granularity == Granularity::kLayer || granularity == Granularity::kExpert;
    if (!of_run && !of_rows && !of_layers && !OfHeads(granularity)) {
      return Refuse("signal",
                    absl::StrCat("= ", SignalNameOf(kind),
                                 ": must be a signal of heads, layers, experts, tensors, modules or the run"));
    }
    kind.scope = of_run || of_rows ? RuleScope::kRun : of_layers ? RuleScope::kLayer : RuleScope::kHead;
    if (said_.contains("scope") && !ReadField("scope", &kind)) return false;
    *rule = DefaultRule(thresholds_, kind.signal, kind.scope, kind.detector);
    bool good = true;
    for (const RuleField& field : RuleFields()) {
      if (said_.contains(field.name) || (field.required && field.taken_by(rule->detector))) {
        good = ReadField(field.name, rule) && good;
      }
    }
    return good && Check(*rule, of_run, of_rows, of_layers);
  }

 private:
  bool Refuse(const char* key, const std::string& why) {
    const auto found = said_.find(key);
    yaml_->Report(found == said_.end() ? node_ : found->second.second, absl::StrCat(path_, ".", key, " ", why));
    return false;
  }

  bool ReadField(const char* name, UserRule* rule) {
    const RuleField& field = *FindRuleField(name);
    if (!said_.contains(name)) return Refuse(name, "is missing");
    if (!field.taken_by(rule->detector)) {
      return Refuse(name, absl::StrCat("is not for detector ", NameOf(rule->detector)));
    }
    return ReadValue(field, rule);
  }

  // REQUIRES: it was said.
  bool ReadValue(const RuleField& field, UserRule* rule) {
    const YAML::Node& value = said_.at(field.name).second;
    const std::string path = absl::StrCat(path_, ".", field.name);
    struct Visitor {
      const RuleField& field;
      const YAML::Node& value;
      const std::string& path;
      StrictYaml* yaml;
      UserRule* rule;
      bool operator()(double* to) const { return yaml->Number(value, path, field.low, field.high, to); }
      bool operator()(std::optional<double>* to) const {
        double number = 0;
        if (!(*this)(&number)) return false;
        *to = number;
        return true;
      }
      bool operator()(int64_t* to) const {
        return yaml->Integer(value, path, static_cast<int64_t>(field.low), static_cast<int64_t>(field.high), to);
      }
      bool operator()(int32_t* to) const {
        int64_t number = 0;
        if (!(*this)(&number)) return false;
        *to = static_cast<int32_t>(number);
        return true;
      }
      bool operator()(bool* to) const { return yaml->Flag(value, path, to); }
      bool operator()(std::string* to) const { return yaml->Text(value, path, static_cast<size_t>(field.high), to); }
      bool operator()(SignalId* to) const {
        std::string text;
        if (!yaml->Text(value, path, 128, &text)) return false;
        const SignalInfo* const signal = FindSignal(text);
        const SignalInfo* const meant = signal == nullptr ? NearestSignal(text) : nullptr;
        if (meant != nullptr || (signal == nullptr && !IsOwnName(text))) {
          yaml->Report(
              value,
              meant != nullptr
                  ? absl::StrCat(path, " = ", text, ": did you mean ", meant->name,
                                 "? For a signal of the job's own that is called so: signal: own_mean, rows: ", text)
                  : absl::StrCat(path, " = ", text, ": must be a signal of signals.md, or one of the job's own, named ",
                                 "[a-z][a-z0-9_./-]{0,63}"));
          return false;
        }
        *to = signal != nullptr ? signal->id : SignalId::kOwnMean;
        rule->own = signal != nullptr ? "" : text;
        return true;
      }
      bool operator()(uint8_t* to) const {
        // A word that nobody may write is empty, and stands first.
        const size_t hidden = *field.words.front() == '\0' ? 1 : 0;
        size_t chosen = 0;
        if (!yaml->Choice(value, path, field.words.subspan(hidden), &chosen)) return false;
        *to = static_cast<uint8_t>(chosen + hidden);
        return true;
      }
    };
    return std::visit(Visitor{field, value, path, yaml_, rule}, field.slot(rule));
  }

  // What no range of one field says.
  bool Check(const UserRule& rule, bool of_run, bool of_rows, bool of_layers) {
    const std::string signal = SignalNameOf(rule);
    const bool own = FindSignal(rule.signal)->granularity == Granularity::kOwn;
    if (!IsRuleName(rule.name)) {
      return Refuse("name",
                    absl::StrCat("= ", rule.name, ": must match [a-z][a-z0-9_]{0,62} and not be a built-in rule's"));
    }
    const bool legal = of_rows     ? rule.scope == RuleScope::kRun || rule.scope == RuleScope::kRow
                       : of_run    ? rule.scope == RuleScope::kRun
                       : of_layers ? rule.scope == RuleScope::kLayer || rule.scope == RuleScope::kRun
                                   : rule.scope != RuleScope::kRow;
    if (!legal) {
      return Refuse("scope", absl::StrCat("= ", NameOf(rule.scope), ": must be ",
                                          of_rows     ? "run or row"
                                          : of_run    ? "run"
                                          : of_layers ? "layer or run"
                                                      : "head, layer or run",
                                          ", since ", signal, " is of ",
                                          own         ? "the job's own"
                                          : of_rows   ? "tensors or modules"
                                          : of_run    ? "the run"
                                          : of_layers ? "layers or experts"
                                                      : "heads"));
    }
    const bool one_by_one = rule.scope == RuleScope::kHead || rule.scope == RuleScope::kRow;
    if (said_.contains("aggregate") && (of_run || one_by_one)) {
      return Refuse("aggregate", "has nothing to add up: scope must be layer or run, and the signal not of the run");
    }
    if (said_.contains("rows") && !of_rows) {
      return Refuse("rows",
                    absl::StrCat("is for signals of tensors, modules and the job's own, and ", signal, " is none"));
    }
    if (rule.detector == RuleDetector::kLevel && rule.above.has_value() == rule.below.has_value()) {
      return Refuse(rule.above ? "below" : "above", "or the other one: a level needs exactly one of above and below");
    }
    if (rule.detector == RuleDetector::kPeers && rule.scope == RuleScope::kRun) {
      return Refuse("scope", "= run: must be head, layer or row, since a run has no peers");
    }
    if (rule.detector == RuleDetector::kPeers && rule.factor == 1) {
      return Refuse("factor", "= 1: must be above or below 1");
    }
    if (rule.benjamini_hochberg && rule.scope == RuleScope::kRun) {
      return Refuse("benjamini_hochberg", "is for the scopes head, layer and row: a run is one value");
    }
    return true;
  }

  const YAML::Node node_;
  const std::string path_;
  const JudgeOptions& thresholds_;
  StrictYaml* const yaml_;
  std::map<std::string, std::pair<YAML::Node, YAML::Node>> said_;  // Key -> itself, its value.
};

void ReadUserRules(const YAML::Node& node, StrictYaml* yaml, JudgeOptions* options) {
  std::vector<UserRule> rules;
  std::set<std::string> names;
  const std::vector<YAML::Node> items = yaml->List(node, "rules", kUserRulesMax);
  for (size_t i = 0; i < items.size(); ++i) {
    const std::string path = absl::StrCat("rules[", i, "]");
    UserRule rule;
    if (!RuleReader(items[i], path, *options, yaml).Read(&rule)) continue;
    if (!names.insert(rule.name).second) {
      yaml->Report(items[i], absl::StrCat(path, ".name = ", rule.name, ": another rule has this name"));
    }
    rules.push_back(std::move(rule));
  }
  if (!rules.empty()) options->rules = std::make_shared<const std::vector<UserRule>>(std::move(rules));
}

}  // namespace

bool IsRuleName(std::string_view name) {
  if (name.empty() || name.size() > 63 || name[0] < 'a' || name[0] > 'z') return false;
  const bool legal = std::all_of(name.begin(), name.end(),
                                 [](char c) { return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_'; });
  const auto builtin = BuiltinNames();
  return legal && std::none_of(builtin.begin(), builtin.end(), [&](const char* taken) { return name == taken; });
}

absl::StatusOr<RuleSetPtr> ParseRules(std::string_view text, const std::string& name) {
  auto set = std::make_shared<RuleSet>();
  StrictYaml yaml(name);
  const std::optional<YAML::Node> root = yaml.Load(text, kRulesBytesMax);
  if (!root) return yaml.status();
  std::map<std::string, YAML::Node> parts;
  yaml.ForEach(*root, "", [&](const std::string& key, const YAML::Node& at, const YAML::Node& value) {
    if (key == "thresholds" || key == "off" || key == "rules") {
      parts.emplace(key, value);
    } else {
      yaml.Report(at, absl::StrCat(key, " is unknown; known: thresholds, off, rules"));
    }
  });
  // In this order: rules take their defaults from the thresholds.
  if (parts.contains("thresholds")) ReadThresholds(parts.at("thresholds"), &yaml, &set->options);
  if (parts.contains("off")) ReadOff(parts.at("off"), &yaml, &set->options);
  if (parts.contains("rules")) ReadUserRules(parts.at("rules"), &yaml, &set->options);
  if (!yaml.clean()) return yaml.status();
  set->text = std::string(text);
  return RuleSetPtr(std::move(set));
}

absl::StatusOr<RuleSetPtr> ReadRules(const std::string& path) {
  BW_ASSIGN_OR_RETURN(const RegularFile file, ReadRegularFile(path, kRulesBytesMax));
  return ParseRules(file.text, path);
}

}  // namespace bellwether::server
