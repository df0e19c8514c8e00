// quota.h: what a tenant uses, and its limits.

#ifndef BELLWETHER_SERVER_ACCESS_QUOTA_H_
#define BELLWETHER_SERVER_ACCESS_QUOTA_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/access/identity.h"
#include "server/util/clock.h"
#include "server/util/counters.h"

namespace bellwether::server {

// RESOURCE_EXHAUSTED with google.rpc.RetryInfo as its payload.
absl::Status ExhaustedFor(std::string_view message, int64_t retry_ms);

struct TenantUse;

// One open stream; its end gives back what it holds.  Thread-safe, but for EnterRun().
class StreamUse {
 public:
  StreamUse(std::shared_ptr<TenantUse> tenant, std::string peer);
  ~StreamUse();
  StreamUse(const StreamUse&) = delete;
  StreamUse& operator=(const StreamUse&) = delete;

  // The run of the stream, once its Hello has named it; call once.
  // RESOURCE_EXHAUSTED: names quota and limit.
  absl::Status EnterRun(std::string_view run_uuid);

  // Takes a message into account.  Returns for how many nanoseconds no further
  // message should be read: 0 as long as the tenant keeps to its rates.
  int64_t Charge(int64_t bytes);

 private:
  const std::shared_ptr<TenantUse> tenant_;
  const std::string peer_;
  std::string run_uuid_;  // "" = not known yet.
};

// Thread-safe.
class Quotas {
 public:
  Quotas(Counters* counters, Clock* clock);

  // From now on, also for the streams that are open.
  void Set(const std::map<std::string, Quota>& tenants);
  // Null: the tenant has no quota.  RESOURCE_EXHAUSTED: names quota and limit.
  absl::StatusOr<std::unique_ptr<StreamUse>> Open(const std::string& tenant, std::string_view peer);

 private:
  Counters* const counters_;
  Clock* const clock_;
  absl::Mutex mutex_;
  std::map<std::string, std::shared_ptr<TenantUse>> tenants_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_ACCESS_QUOTA_H_
