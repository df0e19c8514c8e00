// policy_in_force.h: the server's own policy, for runs that nobody set one for.
// Thread-safe.

#ifndef BELLWETHER_SERVER_ENGINE_POLICY_IN_FORCE_H_
#define BELLWETHER_SERVER_ENGINE_POLICY_IN_FORCE_H_

#include "server/act/policy.h"
#include "server/engine/in_force.h"
#include "server/ingest/message.h"

namespace bellwether::server {

class PolicyInForce : public InForce<PolicyPtr> {
 public:
  PolicyInForce() : InForce(DefaultPolicy()) {}
};

// The record that puts `policy` in force as the server's.
PolicyMessage ServerPolicy(const PolicyPtr& policy);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_ENGINE_POLICY_IN_FORCE_H_
