#include "server/engine/rules_in_force.h"

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

RulesInForce::RulesInForce(const JudgeOptions& built_in) : InForce(WithoutFile(built_in)) {}

absl::StatusOr<RuleSetPtr> RulesInForce::Find(std::string_view text) {
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
