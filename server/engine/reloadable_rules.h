// reloadable_rules.h: the rules for new decisions, and the rules of a text that a run's log
// holds.  Thread-safe.

#ifndef BELLWETHER_SERVER_ENGINE_RELOADABLE_RULES_H_
#define BELLWETHER_SERVER_ENGINE_RELOADABLE_RULES_H_

#include <string_view>

#include "absl/status/statusor.h"
#include "server/detect/rules_file.h"
#include "server/engine/reloadable_config.h"

namespace bellwether::server {

class ReloadableRules : public ReloadableConfig<RuleSetPtr> {
 public:
  // `built_in` are the options without a rules file.
  explicit ReloadableRules(const JudgeOptions& built_in);

  // The rules of a text that was in force once.  INVALID_ARGUMENT: this version refuses
  // the text.
  absl::StatusOr<RuleSetPtr> Find(std::string_view text);
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_ENGINE_RELOADABLE_RULES_H_
