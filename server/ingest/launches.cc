#include "server/ingest/launches.h"

#include <algorithm>
#include <iterator>

namespace bellwether::server {

int64_t Launches::Credible(int64_t launch_unix_ms, int64_t now_unix_ms) {
  return launch_unix_ms > now_unix_ms + kAheadMsMax ? 0 : launch_unix_ms;
}

std::optional<uint32_t> Launches::AttemptOf(int64_t launch_unix_ms, uint32_t told) const {
  if (launch_unix_ms == 0) return told;
  const auto later = attempts_.upper_bound(launch_unix_ms);
  const bool is_first = later == attempts_.begin();
  if (!is_first && std::prev(later)->first == launch_unix_ms) return std::prev(later)->second;
  if (told > newest_attempt_) return told;  // Also where the clock was set back since.
  if (later == attempts_.end()) {
    // Others of the newest attempt may not have known their launch.
    const bool is_unknown = is_first || std::prev(later)->second < newest_attempt_;
    return is_unknown && told == newest_attempt_ ? told : newest_attempt_ + 1;
  }
  const bool fits = told < later->second && (is_first || told > std::prev(later)->second);
  return fits ? std::optional(told) : std::nullopt;
}

void Launches::Begin(int64_t launch_unix_ms, uint32_t attempt) {
  newest_attempt_ = std::max(newest_attempt_, attempt);
  if (launch_unix_ms == 0) return;
  attempts_[launch_unix_ms] = attempt;
  if (attempts_.size() > kLaunchesMax) attempts_.erase(attempts_.begin());
}

}  // namespace bellwether::server
