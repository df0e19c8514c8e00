#include "server/query/alert_cursor.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

int64_t BytesOf(const AlertTransition& transition) {
  size_t bytes = sizeof(AlertTransition) + transition.run_name.size() + transition.key.size() + transition.rule.size() +
                 transition.cause.size() + transition.summary.size() + transition.advice.size() +
                 transition.heads.size() * sizeof(Head);
  for (const Evidence& evidence : transition.evidence) {
    bytes += sizeof(Evidence) + evidence.signal.size() + evidence.detector.size() + evidence.text.size();
  }
  return static_cast<int64_t>(bytes);
}

}  // namespace

AlertCursor::AlertCursor(const Options& options, AlertStore* log, const Filter& filter, uint64_t after,
                         std::function<void()> wake)
    : options_(options), log_(log), filter_(filter), wake_(std::move(wake)), after_(after) {
  // Subscribed before the first read: what is posted in between wakes us.
  subscription_ = log_->Subscribe([this](const AlertTransition& transition) { OnTransition(transition); });
  const uint64_t last = log_->last_id();
  if (after_ == UINT64_MAX) {
    after_ = last;
  } else if (after_ > last) {
    out_of_range_ = true;
  }
  for (const AlertTransition& transition : log_->Unstored()) {
    if (Matches(transition)) RecordUnstored(transition);
  }
}

AlertCursor::~AlertCursor() { log_->Unsubscribe(subscription_); }

bool AlertCursor::Matches(const AlertTransition& transition) const {
  return (filter_.run == 0 || transition.run == filter_.run) && transition.severity >= filter_.severity_min &&
         (!filter_.sees || filter_.sees(transition.run_name));
}

void AlertCursor::OnTransition(const AlertTransition& transition) {
  const bool matches = Matches(transition);
  if (transition.id == 0) {
    if (!matches) return;
    RecordUnstored(transition);
    return wake_();
  }
  {
    absl::MutexLock lock(&mutex_);
    noticed_ = std::max(noticed_, transition.id);
    // A late notice of what was read already is no backlog.
    if (matches && counting_ && !behind_ && transition.id > delivered_) {
      waiting_[transition.id] = BytesOf(transition);
      waiting_bytes_ += waiting_[transition.id];
      if (waiting_bytes_ > options_.behind_bytes_max) {
        behind_ = true;
        waiting_.clear();
      }
    }
  }
  if (matches) wake_();
}

void AlertCursor::RecordUnstored(const AlertTransition& transition) {
  absl::MutexLock lock(&mutex_);
  if (unstored_.size() >= options_.unstored_max) return;
  // One that is posted while the cursor is made is told, and in the list, too.
  const bool known = std::any_of(unstored_.begin(), unstored_.end(), [&](const AlertTransition& each) {
    return each.run == transition.run && each.k == transition.k && each.key == transition.key;
  });
  if (!known) unstored_.push_back(transition);
}

absl::StatusOr<AlertCursor::Item> AlertCursor::Next() {
  if (out_of_range_) {
    return absl::OutOfRangeError(
        absl::StrCat("after_id ", after_, ": this server's newest transition is ", log_->last_id()));
  }
  if (ended_) return Item{};
  {
    absl::MutexLock lock(&mutex_);
    if (behind_) {
      ended_ = true;
      return Item{.kind = Item::kResync, .after = after_};
    }
  }
  // Other streams wait for the thread that looks: who watches little must not hold
  // it while it goes through all that others wrote.
  for (size_t pages = 0;;) {
    while (!page_.empty()) {
      AlertTransition transition = std::move(page_.front());
      page_.pop_front();
      after_ = transition.id;
      {
        absl::MutexLock lock(&mutex_);
        delivered_ = after_;
        while (!waiting_.empty() && waiting_.begin()->first <= after_) {
          waiting_bytes_ -= waiting_.begin()->second;
          waiting_.erase(waiting_.begin());
        }
      }
      if (Matches(transition)) return Item{.kind = Item::kTransition, .transition = std::move(transition)};
    }
    // Noticed before the read: all up to there is in the read, or filtered.
    uint64_t noticed = 0;
    {
      absl::MutexLock lock(&mutex_);
      noticed = noticed_;
      if (caught_up_ && !unstored_.empty()) {
        Item item{.kind = Item::kTransition, .transition = std::move(unstored_.front())};
        unstored_.pop_front();
        return item;
      }
    }
    if (caught_up_ && noticed <= after_) return Item{};
    if (++pages > options_.pages_max) {
      wake_();
      return Item{};
    }
    // Of all runs: a read for one would go through those of all others at once.
    BW_ASSIGN_OR_RETURN(std::vector<AlertTransition> page, log_->Read(after_, options_.page_transitions, /*run=*/0));
    const bool all = page.size() < options_.page_transitions;
    page_.assign(std::make_move_iterator(page.begin()), std::make_move_iterator(page.end()));
    if (!page_.empty()) continue;
    if (all) after_ = std::max(after_, noticed);
    if (!caught_up_) {
      caught_up_ = true;
      absl::MutexLock lock(&mutex_);
      counting_ = true;
      return Item{.kind = Item::kCaughtUp, .after = after_};
    }
  }
}

}  // namespace bellwether::server
