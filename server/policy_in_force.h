// policy_in_force.h: the server's own policy, for runs that nobody set one for.
//
// A run's policy is part of its state and changes by records of its log only,
// so that recovery decides what was decided; this is what the shards compare
// it with.  Thread-safe.

#ifndef BELLWETHER_SERVER_POLICY_IN_FORCE_H_
#define BELLWETHER_SERVER_POLICY_IN_FORCE_H_

#include <utility>

#include "absl/synchronization/mutex.h"
#include "server/act/policy.h"
#include "server/ingest/message.h"

namespace bellwether::server {

class PolicyInForce {
 public:
  PolicyInForce() : current_(DefaultPolicy()) {}

  PolicyPtr current() const {
    absl::MutexLock lock(&mutex_);
    return current_;
  }
  // nullptr: the built-in one.
  void Set(PolicyPtr policy) {
    absl::MutexLock lock(&mutex_);
    current_ = policy == nullptr ? DefaultPolicy() : std::move(policy);
  }

 private:
  mutable absl::Mutex mutex_;
  PolicyPtr current_ ABSL_GUARDED_BY(mutex_);
};

// The record that puts `policy` in force as the server's.
PolicyMessage ServerPolicy(const PolicyPtr& policy);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_POLICY_IN_FORCE_H_
