// rules_in_force.h: which rules new decisions are to be made by.
//
// A run's own rules are part of its state and change by records of its log
// only, so that recovery judges each step as it was judged; this is what the
// shards compare them with, and where the text of a record becomes rules.
//
// Thread-safe.

#ifndef BELLWETHER_SERVER_RULES_IN_FORCE_H_
#define BELLWETHER_SERVER_RULES_IN_FORCE_H_

#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/detect/rules_file.h"

namespace bellwether::server {

class RulesInForce {
 public:
  // `built_in` are the options without a rules file.
  explicit RulesInForce(const JudgeOptions& built_in);

  const RuleSetPtr& built_in() const { return built_in_; }
  RuleSetPtr current() const;
  // nullptr: the built-in ones.
  void Set(RuleSetPtr rules);
  // The rules of a text that was in force once.  INVALID_ARGUMENT: this version
  // does not take it.
  absl::StatusOr<RuleSetPtr> Find(std::string_view text);

 private:
  const RuleSetPtr built_in_;
  mutable absl::Mutex mutex_;
  RuleSetPtr current_ ABSL_GUARDED_BY(mutex_);
  // Parsed lately: after a restart many runs ask for the same.
  std::vector<RuleSetPtr> known_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_RULES_IN_FORCE_H_
