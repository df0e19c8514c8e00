#include "server/query/query_memory.h"

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "server/util/await_for.h"

namespace bellwether::server {

bool QueryMemory::Part::Fits(const std::string& who, int64_t more) const {
  const auto own = callers.find(who);
  return reserved + more <= bytes_max && (own == callers.end() ? 0 : own->second) + more <= OwnMax(who);
}

void QueryMemory::Part::Add(const std::string& who, int64_t more) {
  if (more == 0) return;
  reserved += more;
  const auto own = callers.try_emplace(who, 0).first;
  if ((own->second += more) == 0) callers.erase(own);
}

QueryMemory::QueryMemory(const Options& options, Counters* counters)
    : options_(options),
      refused_(counters->counter("bellwether_query_limit_refused_total", {{"limit", "query_memory"}})),
      reserved_gauge_(counters->gauge("bellwether_query_memory_bytes")),
      large_{.bytes_max = options.bytes_max},
      small_{.bytes_max = options.bytes_max / 4} {}

int64_t QueryMemory::reserved() const {
  absl::MutexLock lock(&mutex_);
  return large_.reserved + small_.reserved;
}

void QueryMemory::Show() { reserved_gauge_->Set(static_cast<double>(large_.reserved + small_.reserved)); }

absl::Status QueryMemory::Use::Reserve(int64_t bytes) { return Take(bytes, memory_->options_.wait_ns_max); }

absl::Status QueryMemory::Use::GrowTo(int64_t bytes) { return Take(bytes, 0); }

absl::Status QueryMemory::Use::Take(int64_t bytes, int64_t wait_ns) {
  if (bytes <= held_) return absl::OkStatus();
  absl::MutexLock lock(&memory_->mutex_);
  Part* const part = bytes > memory_->options_.small_bytes ? &memory_->large_ : part_;
  const int64_t own_max = part->OwnMax(who_);
  if (bytes > own_max) {
    memory_->refused_->Add();
    return absl::ResourceExhaustedError(absl::StrCat("query memory = ", bytes, " bytes: must be at most ", own_max,
                                                     " (limits.query_memory_max); ask for fewer series or points"));
  }
  const int64_t held_there = part == part_ ? held_ : 0;
  const auto fits = [&]()
                        ABSL_EXCLUSIVE_LOCKS_REQUIRED(memory_->mutex_) { return part->Fits(who_, bytes - held_there); };
  bool fit = fits();
  if (!fit && wait_ns > 0 && !memory_->one_waits_) {
    memory_->one_waits_ = true;
    fit = AwaitFor(&memory_->mutex_, absl::Condition(&fits), absl::Nanoseconds(wait_ns));
    memory_->one_waits_ = false;
  }
  if (!fit) {
    memory_->refused_->Add();
    return absl::ResourceExhaustedError(absl::StrCat("query memory = ", bytes, " bytes: others have ",
                                                     part->reserved - held_there, " of ", part->bytes_max,
                                                     " (limits.query_memory_max) just now; come back"));
  }
  part_->Add(who_, -held_);
  part->Add(who_, bytes);
  part_ = part;
  held_ = bytes;
  memory_->Show();
  return absl::OkStatus();
}

void QueryMemory::Use::ShrinkTo(int64_t bytes) {
  if (bytes >= held_) return;
  absl::MutexLock lock(&memory_->mutex_);
  part_->Add(who_, bytes - held_);
  held_ = bytes;
  memory_->Show();
}

}  // namespace bellwether::server
