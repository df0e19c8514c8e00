#include "server/engine/reloadable_rules.h"

#include <memory>

namespace bellwether::server {
namespace {

RuleSetPtr WithoutFile(const JudgeOptions& options) {
  auto set = std::make_shared<RuleSet>();
  set->options = options;
  return set;
}

}  // namespace

ReloadableRules::ReloadableRules(const JudgeOptions& built_in) : ReloadableConfig(WithoutFile(built_in)) {}

absl::StatusOr<RuleSetPtr> ReloadableRules::Find(std::string_view text) {
  return FindText(text, [](std::string_view unknown) { return ParseRules(unknown, "the rules of the log"); });
}

}  // namespace bellwether::server
