#include "server/engine/run_deadlines.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace bellwether::server {
namespace {

// A rank is silent after so many of its usual intervals.
constexpr double kSilentIntervals = 10;
// Senders that lost their server are back by then, if they come back at all.
constexpr int64_t kComeBackNanos = 600'000'000'000;

}  // namespace

void RunDeadlines::RecordEffects(const RunEffects& effects) {
  for (const uint32_t rank : effects.left) heard_ns_.erase(rank);
  if (!effects.ended_by_silence) return;
  heard_ns_.clear();
  silent_ranks_ = 0;
}

void RunDeadlines::RecordAway(int64_t away_ns) {
  for (auto& [rank, heard] : heard_ns_) heard += away_ns;
  open_since_ns_ += away_ns;
  present_ns_ += away_ns;
}

bool RunDeadlines::StepOverdue(const RunState& state, int64_t now_ns, int64_t deadline_ns, StepClosedMessage* overdue) {
  uint32_t attempt = 0;
  int64_t step = 0;
  if (!state.merge().OldestOpen(&attempt, &step)) {
    open_step_ = {0, -1};
    return false;
  }
  if (open_step_ != std::make_pair(attempt, step)) {
    open_step_ = {attempt, step};
    open_since_ns_ = now_ns;
    return false;
  }
  if (now_ns - open_since_ns_ < deadline_ns) return false;
  open_since_ns_ = now_ns;  // The record that closes it is on its way.
  *overdue = {attempt, step};
  return true;
}

bool RunDeadlines::SilenceChanged(const RunState& state, int64_t now_ns, int64_t silence_ns_min,
                                  SilenceMessage* silence) {
  if (state.record().ended || heard_ns_.empty()) return false;
  const StepSample& newest = state.newest();
  const float interval = newest.signals().empty() ? 0 : newest.scalar(SignalId::kStepSeconds);
  const double usual_ns = std::isfinite(interval) ? interval * 1e9 : 0;
  const int64_t deadline_ns = std::max(silence_ns_min, static_cast<int64_t>(kSilentIntervals * usual_ns));
  std::vector<int64_t> silent_ns;
  for (const auto& [rank, heard] : heard_ns_) {
    if (now_ns - heard >= deadline_ns) silent_ns.push_back(now_ns - heard);
  }
  // A job that continues with fewer ranks misses none while as many as it has now send or
  // have left.  If fewer do, those are missed that were heard last.
  const size_t accounted = heard_ns_.size() - silent_ns.size() + state.merge().gone().size();
  const uint32_t reporters = state.record().description.reporters;
  const size_t missed_max = reporters - std::min<size_t>(reporters, accounted);
  std::sort(silent_ns.begin(), silent_ns.end());
  if (silent_ns.size() > missed_max) silent_ns.resize(missed_max);
  const auto silent = static_cast<uint32_t>(silent_ns.size());
  const int64_t longest_ns = silent_ns.empty() ? 0 : silent_ns.back();
  if (silent == silent_ranks_) return false;
  silent_ranks_ = silent;
  *silence = {silent, longest_ns / 1'000'000'000};
  return true;
}

bool RunDeadlines::SilentTooLong(const RunState& state, int64_t now_ns, int64_t now_unix_ns, int64_t silent_ns_max,
                                 RunSilentMessage* silent) const {
  const RunRecord& record = state.record();
  if (record.ended || now_ns - present_ns_ < std::min(silent_ns_max, kComeBackNanos)) return false;
  if (now_unix_ns - record.last_report_unix_ns < silent_ns_max) return false;
  *silent = {record.last_report_unix_ns / 1'000'000};
  return true;
}

}  // namespace bellwether::server
