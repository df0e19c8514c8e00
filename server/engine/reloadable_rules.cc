#include "server/engine/reloadable_rules.h"

#include <algorithm>
#include <memory>

namespace bellwether::server {
namespace {

constexpr size_t kKnownMax = 8;

RuleSetPtr WithoutFile(const JudgeOptions& options) {
  auto set = std::make_shared<RuleSet>();
  set->options = options;
  return set;
}

}  // namespace

ReloadableRules::ReloadableRules(const JudgeOptions& built_in) : ReloadableConfig(WithoutFile(built_in)) {}

absl::StatusOr<RuleSetPtr> ReloadableRules::Find(std::string_view text) {
  if (RuleSetPtr now = current(); text == now->text) return now;
  if (text.empty()) return built_in();
  absl::MutexLock lock(&mutex_);
  const auto found =
      std::find_if(known_.begin(), known_.end(), [&](const RuleSetPtr& set) { return set->text == text; });
  if (found != known_.end()) return *found;
  const auto parsed = ParseRules(text, "the rules of the log");
  if (!parsed.ok()) return parsed.status();
  if (known_.size() == kKnownMax) known_.erase(known_.begin());
  known_.push_back(*parsed);
  return *parsed;
}

}  // namespace bellwether::server
