#include "server/access/quota.h"

#include <algorithm>
#include <utility>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"

namespace bellwether::server {
namespace {

constexpr char kRetryInfo[] = "type.googleapis.com/google.rpc.RetryInfo";
constexpr int64_t kRetryMs = 5'000;
constexpr double kNs = 1e9;

void AppendVarint(uint64_t value, std::string* out) {
  for (; value >= 0x80; value >>= 7) out->push_back(static_cast<char>(value | 0x80));
  out->push_back(static_cast<char>(value));
}

// A rate with a second's worth of store.  What was taken beyond it is a debt.
class Bucket {
 public:
  // Nanoseconds until the debt is paid.
  int64_t Take(double amount, int64_t per_second, int64_t now_ns) {
    if (per_second == 0) {
      filled_ns_ = 0;
      return 0;
    }
    const auto rate = static_cast<double>(per_second);
    if (filled_ns_ == 0) held_ = rate;
    if (filled_ns_ != 0) held_ = std::min(rate, held_ + static_cast<double>(now_ns - filled_ns_) / kNs * rate);
    filled_ns_ = now_ns;
    held_ -= amount;
    return held_ >= 0 ? 0 : static_cast<int64_t>(-held_ / rate * kNs) + 1;
  }

 private:
  double held_ = 0;
  int64_t filled_ns_ = 0;  // 0 = never
};

void Release(std::map<std::string, int>* uses, const std::string& key) {
  const auto found = uses->find(key);
  if (found != uses->end() && --found->second == 0) uses->erase(found);
}

}  // namespace

absl::Status ExhaustedFor(std::string_view message, int64_t retry_ms) {
  absl::Status status = absl::ResourceExhaustedError(absl::string_view(message.data(), message.size()));
  // RetryInfo { Duration retry_delay = 1 { seconds = 1, nanos = 2 } }
  std::string duration;
  if (retry_ms >= 1000) {
    duration.push_back(1 << 3);
    AppendVarint(static_cast<uint64_t>(retry_ms / 1000), &duration);
  }
  if (retry_ms % 1000 != 0) {
    duration.push_back(2 << 3);
    AppendVarint(static_cast<uint64_t>(retry_ms % 1000) * 1'000'000, &duration);
  }
  std::string info;
  info.push_back(1 << 3 | 2);
  AppendVarint(duration.size(), &info);
  status.SetPayload(kRetryInfo, absl::Cord(info + duration));
  return status;
}

namespace {

absl::Status Exhausted(const std::string& tenant, const char* quota, int64_t max) {
  return ExhaustedFor(absl::StrCat("tenant ", tenant, ": ", max, " ", quota, " are open, which is the quota"),
                      kRetryMs);
}

}  // namespace

struct TenantUse {
  std::string name;
  Clock* clock = nullptr;
  Counter* refused_runs = nullptr;
  Counter* throttled_frames = nullptr;
  Counter* throttled_bytes = nullptr;
  absl::Mutex mutex;
  Quota quota ABSL_GUARDED_BY(mutex);
  int64_t streams ABSL_GUARDED_BY(mutex) = 0;
  std::map<std::string, int> peers ABSL_GUARDED_BY(mutex);
  std::map<std::string, int> runs ABSL_GUARDED_BY(mutex);
  Bucket frame_rate ABSL_GUARDED_BY(mutex), byte_rate ABSL_GUARDED_BY(mutex);
};

StreamUse::StreamUse(std::shared_ptr<TenantUse> tenant, std::string peer)
    : tenant_(std::move(tenant)), peer_(std::move(peer)) {}

StreamUse::~StreamUse() {
  absl::MutexLock lock(&tenant_->mutex);
  --tenant_->streams;
  Release(&tenant_->peers, peer_);
  if (!run_uuid_.empty()) Release(&tenant_->runs, run_uuid_);
}

absl::Status StreamUse::EnterRun(std::string_view run_uuid) {
  const std::string run(run_uuid);
  absl::MutexLock lock(&tenant_->mutex);
  const int64_t max = tenant_->quota.runs_max;
  if (max > 0 && !tenant_->runs.contains(run) && static_cast<int64_t>(tenant_->runs.size()) >= max) {
    tenant_->refused_runs->Add();
    return Exhausted(tenant_->name, "runs", max);
  }
  ++tenant_->runs[run];
  run_uuid_ = run;
  return absl::OkStatus();
}

int64_t StreamUse::Charge(int64_t bytes) {
  absl::MutexLock lock(&tenant_->mutex);
  const int64_t now_ns = tenant_->clock->MonotonicNanos();
  const int64_t frames_ns = tenant_->frame_rate.Take(1, tenant_->quota.frames_per_second_max, now_ns);
  const int64_t bytes_ns =
      tenant_->byte_rate.Take(static_cast<double>(bytes), tenant_->quota.bytes_per_second_max, now_ns);
  if (frames_ns > 0) tenant_->throttled_frames->Add();
  if (bytes_ns > 0) tenant_->throttled_bytes->Add();
  return std::max(frames_ns, bytes_ns);
}

Quotas::Quotas(Counters* counters, Clock* clock) : counters_(counters), clock_(clock) {
  for (const char* quota : {"connections", "streams", "runs", "frames_per_second", "bytes_per_second"}) {
    counters_->counter("bellwether_quota_refused_total", {{"quota", quota}});  // From 0 on.
  }
}

void Quotas::Set(const std::map<std::string, Quota>& tenants) {
  absl::MutexLock lock(&mutex_);
  for (const auto& [name, use] : tenants_) {
    if (tenants.contains(name)) continue;
    absl::MutexLock of_use(&use->mutex);
    use->quota = {};  // Of open streams; the tenant is gone.
  }
  for (const auto& [name, quota] : tenants) {
    std::shared_ptr<TenantUse>& use = tenants_[name];
    if (use == nullptr) {
      use = std::make_shared<TenantUse>();
      use->name = name;
      use->clock = clock_;
      use->refused_runs = counters_->counter("bellwether_quota_refused_total", {{"quota", "runs"}});
      use->throttled_frames = counters_->counter("bellwether_quota_refused_total", {{"quota", "frames_per_second"}});
      use->throttled_bytes = counters_->counter("bellwether_quota_refused_total", {{"quota", "bytes_per_second"}});
    }
    absl::MutexLock of_use(&use->mutex);
    use->quota = quota;
  }
  std::erase_if(tenants_, [&tenants](const auto& entry) { return !tenants.contains(entry.first); });
}

absl::StatusOr<std::unique_ptr<StreamUse>> Quotas::Open(const std::string& tenant, std::string_view peer) {
  std::shared_ptr<TenantUse> use;
  {
    absl::MutexLock lock(&mutex_);
    const auto found = tenants_.find(tenant);
    if (found == tenants_.end()) return nullptr;
    use = found->second;
  }
  const std::string peer_key(peer);
  {
    absl::MutexLock lock(&use->mutex);
    const auto refuse = [&](const char* quota, int64_t max) {
      counters_->counter("bellwether_quota_refused_total", {{"quota", quota}})->Add();
      return Exhausted(tenant, quota, max);
    };
    const Quota& quota = use->quota;
    if (quota.streams_max > 0 && use->streams >= quota.streams_max) return refuse("streams", quota.streams_max);
    if (quota.connections_max > 0 && !use->peers.contains(peer_key) &&
        static_cast<int64_t>(use->peers.size()) >= quota.connections_max) {
      return refuse("connections", quota.connections_max);
    }
    ++use->streams;
    ++use->peers[peer_key];
  }
  return std::make_unique<StreamUse>(std::move(use), peer_key);
}

}  // namespace bellwether::server
