// rules_in_force.h: which rules new decisions are to be made by, and
// where the text of a run's record becomes rules again.  Thread-safe.

#ifndef BELLWETHER_SERVER_ENGINE_RULES_IN_FORCE_H_
#define BELLWETHER_SERVER_ENGINE_RULES_IN_FORCE_H_

#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/detect/rules_file.h"
#include "server/engine/in_force.h"

namespace bellwether::server {

class RulesInForce : public InForce<RuleSetPtr> {
 public:
  // `built_in` are the options without a rules file.
  explicit RulesInForce(const JudgeOptions& built_in);

  // The rules of a text that was in force once.  INVALID_ARGUMENT: this version
  // does not take it.
  absl::StatusOr<RuleSetPtr> Find(std::string_view text);

 private:
  absl::Mutex mutex_;
  // Parsed lately: after a restart many runs ask for the same.
  std::vector<RuleSetPtr> known_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_ENGINE_RULES_IN_FORCE_H_
