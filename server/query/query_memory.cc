#include "server/query/query_memory.h"

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "server/util/await_for.h"

namespace bellwether::server {

QueryMemory::QueryMemory(const Options& options, Counters* counters)
    : options_(options),
      refused_(counters->counter("bellwether_query_limit_refused_total", {{"limit", "query_memory"}})),
      reserved_gauge_(counters->gauge("bellwether_query_memory_bytes")) {}

int64_t QueryMemory::reserved() const {
  absl::MutexLock lock(&mutex_);
  return reserved_;
}

absl::Status QueryMemory::Use::Reserve(int64_t bytes) { return Take(bytes, memory_->options_.wait_ns_max); }

absl::Status QueryMemory::Use::GrowTo(int64_t bytes) { return Take(bytes, 0); }

absl::Status QueryMemory::Use::Take(int64_t bytes, int64_t wait_ns) {
  const Options& options = memory_->options_;
  if (bytes <= held_ || bytes <= options.free_bytes) return absl::OkStatus();
  const int64_t own_max = who_.empty() ? options.bytes_max : options.bytes_max / 4 * 3;
  if (bytes > own_max) {
    memory_->refused_->Add();
    return absl::ResourceExhaustedError(absl::StrCat("query memory = ", bytes, " bytes: must be at most ", own_max,
                                                     " (limits.query_memory_max); ask for fewer series or points"));
  }
  const int64_t more = bytes - held_;
  absl::MutexLock lock(&memory_->mutex_);
  const auto fits = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(memory_->mutex_) {
    const auto his = memory_->callers_.find(who_);
    return memory_->reserved_ + more <= options.bytes_max &&
           (his == memory_->callers_.end() ? 0 : his->second) + more <= own_max;
  };
  if (!fits() && (wait_ns == 0 || !AwaitFor(&memory_->mutex_, absl::Condition(&fits), absl::Nanoseconds(wait_ns)))) {
    memory_->refused_->Add();
    return absl::ResourceExhaustedError(absl::StrCat("query memory = ", bytes, " bytes: others have ",
                                                     memory_->reserved_ - held_, " of ", options.bytes_max,
                                                     " (limits.query_memory_max) just now; come back"));
  }
  memory_->reserved_ += more;
  memory_->callers_[who_] += more;
  memory_->reserved_gauge_->Set(static_cast<double>(memory_->reserved_));
  held_ = bytes;
  return absl::OkStatus();
}

void QueryMemory::Use::ShrinkTo(int64_t bytes) {
  if (bytes >= held_) return;
  if (bytes <= memory_->options_.free_bytes) bytes = 0;
  absl::MutexLock lock(&memory_->mutex_);
  memory_->reserved_ -= held_ - bytes;
  const auto his = memory_->callers_.find(who_);
  if ((his->second -= held_ - bytes) == 0) memory_->callers_.erase(his);
  memory_->reserved_gauge_->Set(static_cast<double>(memory_->reserved_));
  held_ = bytes;
}

}  // namespace bellwether::server
