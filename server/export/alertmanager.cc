#include "server/export/alertmanager.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/time/time.h"
#include "server/model/alert_words.h"
#include "server/util/await_for.h"
#include "server/util/clock.h"
#include "server/util/log.h"

namespace bellwether::server {

absl::StatusOr<std::unique_ptr<Alertmanager>> Alertmanager::Start(const AlertmanagerOptions& options,
                                                                  AlertStore* alerts, const RunTable* runs,
                                                                  Counters* counters) {
  absl::StatusOr<UrlParts> url = SplitUrl(options.url);
  if (!url.ok()) return url.status();
  url->path = absl::StrCat(absl::StripSuffix(url->path, "/"), "/api/v2/alerts");
  return std::unique_ptr<Alertmanager>(new Alertmanager(options, *std::move(url), alerts, runs, counters));
}

Alertmanager::Alertmanager(const AlertmanagerOptions& options, UrlParts url, AlertStore* alerts, const RunTable* runs,
                           Counters* counters)
    : options_(options),
      poster_(std::move(url), options.proxy, options.post, options.channel, counters),
      alerts_(alerts),
      runs_(runs),
      counters_(counters),
      seconds_(counters->histogram("bellwether_notification_seconds", {{"channel", options.channel}})) {
  for (const char* result : {"delivered", "failed"}) {
    counters_->counter("bellwether_notifications_total", {{"channel", options_.channel}, {"result", result}});
  }
  worker_ = std::thread([this] { Work(); });
  subscription_ = alerts_->Subscribe([this](const AlertTransition& transition) {
    if (transition.severity < options_.severity_min) return;
    absl::MutexLock lock(&mutex_);
    if (changed_ns_ == 0) changed_ns_ = Clock::System()->MonotonicNanos();
  });
}

Alertmanager::~Alertmanager() { Stop(); }

void Alertmanager::Stop() {
  if (!worker_.joinable()) return;
  alerts_->Unsubscribe(subscription_);
  AskToStop();
  worker_.join();
}

void Alertmanager::AskToStop() {
  absl::MutexLock lock(&mutex_);
  if (stopping_) return;
  stopping_ = true;
  poster_.EndBy(Clock::System()->MonotonicNanos() + options_.stop_wait_ns);
}

void Alertmanager::Count(const char* result) const {
  counters_->counter("bellwether_notifications_total", {{"channel", options_.channel}, {"result", result}})->Add();
}

void Alertmanager::Work() {
  const Clock& clock = *Clock::System();
  int failures = 0;
  int64_t due_ns = clock.MonotonicNanos();  // At once: the one before may have left without a word.
  for (bool last = false; !last;) {
    int64_t changed_ns = 0;
    {
      absl::MutexLock lock(&mutex_);
      const auto changed = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return stopping_ || changed_ns_ != 0; };
      const auto stopping = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return stopping_; };
      const auto until = [&](int64_t ns) {
        return absl::Nanoseconds(std::max<int64_t>(ns - clock.MonotonicNanos(), 0));
      };
      // After a failure news has to wait with the rest.
      AwaitFor(&mutex_, failures == 0 ? absl::Condition(&changed) : absl::Condition(&stopping), until(due_ns));
      if (changed_ns_ != 0 && !stopping_) {
        AwaitFor(&mutex_, absl::Condition(&stopping), until(changed_ns_ + options_.group_wait_ns));
      }
      last = stopping_;
      changed_ns = std::exchange(changed_ns_, 0);
    }
    unsent_ |= Update(clock.UnixNanos());
    if (last && !unsent_) return;
    const absl::Status pushed = Push(clock.UnixNanos());
    const int64_t now_ns = clock.MonotonicNanos();
    if (pushed.ok()) {
      failures = 0;
      due_ns = now_ns + options_.resend_ns;
      if (!told_.empty()) Count(unsent_ ? "delivered" : "resent");
      if (changed_ns != 0) seconds_->Observe(static_cast<double>(now_ns - changed_ns) * 1e-9);
      unsent_ = false;
      continue;
    }
    const bool given_up = ++failures >= options_.attempts_max || last;
    Count(given_up ? "failed" : "retried");
    if (failures == options_.attempts_max) {  // Said once; the counter says the rest.
      LogWarning("alertmanager {}: {} pushes in a row failed, the last one: {}", options_.channel, failures,
                 std::string(pushed.message()));
    }
    due_ns = now_ns + std::min(options_.resend_ns, options_.backoff_first_ns << std::min(failures - 1, 30));
    if (changed_ns != 0) {  // It is as old as it is.
      absl::MutexLock lock(&mutex_);
      changed_ns_ = changed_ns;
    }
  }
}

Alertmanager::State Alertmanager::Firing(int64_t now_ns) const {
  std::set<RunId> past, imported;
  for (const RunSnapshotPtr& run : runs_->List()) {
    past.insert(run->record.id);
    if (!run->record.import_of.empty()) imported.insert(run->record.id);
  }
  for (const RunSnapshotPtr& run : CurrentRuns(*runs_, options_.holds, now_ns)) past.erase(run->record.id);
  State firing;
  for (const AlertView& alert : alerts_->List(/*run=*/0, /*firing_only=*/true)) {
    const AlertTransition& last = alert.last;
    if (last.severity < options_.severity_min || past.contains(last.run)) continue;
    if (!alert.notifies(now_ns)) continue;
    StringMap labels = AlertLabels(last, imported.contains(last.run));
    const auto same = firing.find(labels);  // Two alerts that differ only in when they began are one there.
    if (same != firing.end()) {
      same->second.starts_ns = std::min(same->second.starts_ns, last.time_unix_ns);
    } else if (firing.size() == options_.alerts_max) {
      Count("refused");
    } else {
      AlertTransition now = last;
      if (options_.advice != nullptr) now.advice = options_.advice(last);
      firing[std::move(labels)] = {.annotations = AlertAnnotations(now, options_.links, imported.contains(last.run)),
                                   .run = last.run,
                                   .key = last.key,
                                   .starts_ns = last.time_unix_ns};
    }
  }
  return firing;
}

StringMap Alertmanager::AnnotationsOfEnd(const StringMap& labels, const Told& told, int64_t now_ns) const {
  const auto newest = alerts_->Get(told.run, told.key);
  const bool imported = labels.contains("imported");
  if (newest.ok() && newest->last.state == AlertState::kResolved) {
    return AlertAnnotations(newest->last, options_.links, imported);
  }
  const std::vector<RunSnapshotPtr> current = CurrentRuns(*runs_, options_.holds, now_ns);
  const bool runs_on = std::any_of(current.begin(), current.end(),
                                   [&](const RunSnapshotPtr& run) { return run->record.id == told.run; });
  const bool heard = newest.ok() && newest->notifies(now_ns);
  const char* const why = !runs_on ? "the run has ended"
                          : !heard ? "it was silenced, or called a false alarm"
                                   : "it goes on with another severity, head or name";
  StringMap annotations = told.annotations;
  for (const char* gone : {"why", "eta", "evidence", "advice"}) annotations.erase(gone);
  annotations["summary"] = absl::StrCat("RESOLVED ", labels.at("run"), ": ", imported ? kImportedMark : "",
                                        NounOf(labels.at("rule")), " is no longer told: ", why, ".");
  annotations["do"] = "Nothing for this message.";
  annotations["description"] = absl::StrCat("Do: ", annotations["do"]);
  return annotations;
}

bool Alertmanager::Update(int64_t now_ns) {
  State firing = Firing(now_ns);
  bool news = false;
  for (auto& [labels, told] : told_) {
    if (told.ended_ns != 0 || firing.contains(labels)) continue;
    told.ended_ns = now_ns;
    told.annotations = AnnotationsOfEnd(labels, told, now_ns);
    news = true;
  }
  std::erase_if(told_, [&](const auto& entry) {
    return entry.second.ended_ns != 0 && now_ns - entry.second.ended_ns > options_.resolved_ns;
  });
  for (auto& [labels, alert] : firing) {
    const auto [told, fresh] = told_.try_emplace(labels, alert);
    if (!fresh && told->second.ended_ns == 0) {
      alert.starts_ns = std::min(told->second.starts_ns, alert.starts_ns);
    }
    news |= fresh || told->second.ended_ns != 0;
    told->second = std::move(alert);
  }
  return news;
}

absl::Status Alertmanager::Push(int64_t now_ns) {
  nlohmann::json batch = nlohmann::json::array();
  size_t left = told_.size();
  for (const auto& [labels, told] : told_) {
    batch.push_back({{"labels", labels},
                     {"annotations", told.annotations},
                     {"startsAt", FormatTime(told.starts_ns)},
                     {"endsAt", FormatTime(told.ended_ns != 0 ? told.ended_ns : now_ns + 4 * options_.resend_ns)}});
    const auto url = told.annotations.find("page_url");
    if (url != told.annotations.end()) batch.back()["generatorURL"] = url->second;
    if (--left != 0 && batch.size() < options_.batch_max) continue;
    const absl::Status status = poster_.Post(batch.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
    if (!status.ok()) return status;
    batch.clear();
  }
  return absl::OkStatus();
}

}  // namespace bellwether::server
