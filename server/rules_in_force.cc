#include "server/rules_in_force.h"

#include <algorithm>
#include <utility>

namespace bellwether::server {
namespace {

constexpr size_t kKnownMax = 8;

RuleSetPtr WithoutFile(const JudgeOptions& options) {
  auto set = std::make_shared<RuleSet>();
  set->options = options;
  return set;
}

}  // namespace

RulesInForce::RulesInForce(const JudgeOptions& built_in) : built_in_(WithoutFile(built_in)), current_(built_in_) {}

RuleSetPtr RulesInForce::current() const {
  absl::MutexLock lock(&mutex_);
  return current_;
}

void RulesInForce::Set(RuleSetPtr rules) {
  absl::MutexLock lock(&mutex_);
  current_ = rules == nullptr ? built_in_ : std::move(rules);
}

absl::StatusOr<RuleSetPtr> RulesInForce::Find(std::string_view text) {
  absl::MutexLock lock(&mutex_);
  if (text == current_->text) return current_;
  if (text.empty()) return built_in_;
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
