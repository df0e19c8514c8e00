#include "server/http/call_slots.h"

#include "server/util/await_for.h"

namespace bellwether::server {

CallSlots::CallSlots(const Options& options, Counters* counters)
    : options_(options),
      refused_(counters->counter("bellwether_query_limit_refused_total", {{"limit", "http_calls"}})) {}

std::unique_ptr<CallSlots::Place> CallSlots::Enter(const std::string& who) {
  absl::MutexLock lock(&mutex_);
  Use& his = callers_[who];  // Stays where it is while somebody is in it.
  const auto free = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return all_.running < options_.running_max && his.running < Share(options_.running_max);
  };
  bool entered = free();
  if (!entered && all_.waiting < options_.waiting_max && his.waiting < Share(options_.waiting_max)) {
    ++all_.waiting;
    ++his.waiting;
    entered = AwaitFor(&mutex_, absl::Condition(&free), absl::Nanoseconds(options_.wait_ns_max));
    --all_.waiting;
    --his.waiting;
  }
  if (!entered) {
    refused_->Add();
    if (his.running == 0 && his.waiting == 0) callers_.erase(who);
    return nullptr;
  }
  ++all_.running;
  ++his.running;
  return std::make_unique<Place>(this, who);
}

void CallSlots::Leave(const std::string& who) {
  absl::MutexLock lock(&mutex_);
  --all_.running;
  const auto found = callers_.find(who);
  if (--found->second.running == 0 && found->second.waiting == 0) callers_.erase(found);
}

}  // namespace bellwether::server
