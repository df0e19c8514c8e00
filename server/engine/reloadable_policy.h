// reloadable_policy.h: the server's own policy, for runs without one of their own, and the policy of a text that
// a run's log or state holds.
// Thread-safe.

#ifndef BELLWETHER_SERVER_ENGINE_RELOADABLE_POLICY_H_
#define BELLWETHER_SERVER_ENGINE_RELOADABLE_POLICY_H_

#include <string_view>

#include "absl/status/statusor.h"
#include "server/act/policy.h"
#include "server/engine/reloadable_config.h"
#include "server/ingest/message.h"

namespace bellwether::server {

class ReloadablePolicy : public ReloadableConfig<PolicyPtr> {
 public:
  ReloadablePolicy() : ReloadableConfig(DefaultPolicy()) {}

  // The policy of a text that was in force once.  INVALID_ARGUMENT: this version refuses the text.
  absl::StatusOr<PolicyPtr> Find(std::string_view text);
};

// The record that puts `policy` in force as the server's.
PolicyMessage ServerPolicy(const PolicyPtr& policy);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_ENGINE_RELOADABLE_POLICY_H_
