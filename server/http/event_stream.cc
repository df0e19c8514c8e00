#include "server/http/event_stream.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/util/await_for.h"
#include "server/util/clock.h"

namespace bellwether::server {

EventHub::EventHub(const Options& options, const RunTable* runs, AlertStore* alerts, Counters* counters, ToJson to_json,
                   std::function<bool()> others)
    : options_(options),
      runs_(runs),
      alerts_(alerts),
      open_(counters->gauge("bellwether_console_streams")),
      to_json_(std::move(to_json)),
      others_(std::move(others)) {
  subscription_ = alerts_->Subscribe([this](const AlertTransition& transition) {
    absl::MutexLock lock(&mutex_);
    posted_ = std::max(posted_, transition.id);
  });
}

EventHub::~EventHub() { alerts_->Unsubscribe(subscription_); }

std::unique_ptr<EventStream> EventHub::Open(std::optional<uint64_t> after, GrantPtr grant) {
  const uint64_t last = alerts_->last_id();
  absl::MutexLock lock(&mutex_);
  if (stopped_ || streams_ >= options_.streams_max) return nullptr;
  ++streams_;
  open_->Set(streams_);
  posted_ = std::max(posted_, last);
  // An id from another life of the server is no place to resume from.
  const uint64_t from = after.has_value() && *after <= last ? *after : last;
  return std::unique_ptr<EventStream>(new EventStream(this, from, std::move(grant)));
}

void EventHub::Stop() {
  absl::MutexLock lock(&mutex_);
  stopped_ = true;
}

int EventHub::streams() const {
  absl::MutexLock lock(&mutex_);
  return streams_;
}

EventStream::EventStream(EventHub* hub, uint64_t after, GrantPtr grant)
    : hub_(hub), grant_(std::move(grant)), after_(after) {}

EventStream::~EventStream() {
  absl::MutexLock lock(&hub_->mutex_);
  --hub_->streams_;
  hub_->open_->Set(hub_->streams_);
}

std::optional<std::string> EventStream::Next(const std::function<bool()>& gone) {
  const Clock& clock = *Clock::System();
  std::string text;
  if (!greeted_) {
    // The browser waits so long before it comes back.
    greeted_ = true;
    written_ns_ = clock.MonotonicNanos();
    table_version_ = hub_->runs_->version();
    for (const RunSnapshotPtr& run : hub_->runs_->List()) {
      if (Sees(run->record.description.name)) versions_[run->record.id] = run->version;
    }
    return absl::StrCat("retry: 2000\nid: ", after_, "\nevent: resync\ndata: {}\n\n");
  }
  const int64_t until_ns = clock.MonotonicNanos() + hub_->options_.tick_ns;
  for (bool waits = true; waits;) {
    if (gone != nullptr && gone()) return std::nullopt;
    absl::MutexLock lock(&hub_->mutex_);
    const auto has_news = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(hub_->mutex_) {
      return hub_->stopped_ || (hub_->posted_ > after_ && !failed_);
    };
    const int64_t left_ns = until_ns - clock.MonotonicNanos();
    waits = !AwaitFor(&hub_->mutex_, absl::Condition(&has_news),
                      absl::Nanoseconds(std::clamp<int64_t>(left_ns, 0, hub_->options_.look_ns))) &&
            left_ns > hub_->options_.look_ns;
    if (hub_->stopped_) return std::nullopt;
  }
  if (refused_) return std::nullopt;
  if (grant_ != nullptr) {
    if (const absl::Status allowed = grant_->CheckOpen("events", Role::kRead, ""); !allowed.ok()) {
      refused_ = true;
      const nlohmann::json data = {{"message", std::string(allowed.message())}};
      return absl::StrCat("event: refused\ndata: ", data.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace),
                          "\n\n");
    }
  }
  const auto transitions = hub_->alerts_->Read(after_, hub_->options_.transitions_max, /*run=*/0);
  failed_ = !transitions.ok();
  if (transitions.ok()) {
    for (const AlertTransition& transition : *transitions) {
      after_ = transition.id;
      if (!Sees(transition.run_name)) continue;
      absl::StrAppend(&text, "id: ", transition.id, "\nevent: alert\ndata: ", hub_->to_json_(transition), "\n\n");
    }
  }
  const int64_t now_ns = clock.MonotonicNanos();
  const uint64_t version = hub_->runs_->version();
  if (version != table_version_ && now_ns - runs_sent_ns_ >= hub_->options_.tick_ns) {
    table_version_ = version;
    runs_sent_ns_ = now_ns;
    std::map<RunId, uint64_t> versions;
    nlohmann::json changed = nlohmann::json::array();
    for (const RunSnapshotPtr& run : hub_->runs_->List()) {
      if (!Sees(run->record.description.name)) continue;
      versions[run->record.id] = run->version;
      const auto before = versions_.find(run->record.id);
      if (before == versions_.end() || before->second != run->version) changed.push_back(run->record.description.name);
    }
    const bool many = changed.size() > hub_->options_.runs_named_max || versions.size() < versions_.size();
    versions_ = std::move(versions);
    if (many || !changed.empty()) {
      nlohmann::json data;
      data[many ? "all" : "runs"] = many ? nlohmann::json(true) : std::move(changed);
      absl::StrAppend(&text, "event: runs\ndata: ", data.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace),
                      "\n\n");
    }
  }
  if (hub_->others_ != nullptr && now_ns - others_told_ns_ >= hub_->options_.others_ns && hub_->others_()) {
    others_told_ns_ = now_ns;
    text += "event: runs\ndata: {\"all\":true}\n\n";
  }
  if (text.empty() && now_ns - written_ns_ >= hub_->options_.keepalive_ns) text = ": still here\n\n";
  if (!text.empty()) written_ns_ = now_ns;
  return text;
}

}  // namespace bellwether::server
