#include "server/export/webhook.h"

#include <algorithm>
#include <functional>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "bellwether/crc32c.h"
#include "server/export/alert_json.h"
#include "server/util/await_for.h"
#include "server/util/log.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

constexpr char kNever[] = "0001-01-01T00:00:00Z";  // Go's zero time: still firing.

nlohmann::json AlertJson(const AlertTransition& transition, const AlertLinks& links, bool imported) {
  const bool firing = transition.state == AlertState::kFiring;
  return {{"status", firing ? "firing" : "resolved"},
          {"labels", AlertLabels(transition, imported)},
          {"annotations", AlertAnnotations(transition, links, imported)},
          {"startsAt", FormatTime(transition.time_unix_ns)},
          {"endsAt", firing ? std::string(kNever) : FormatTime(transition.time_unix_ns)},
          {"generatorURL", AlertUrl(transition, links.page)},
          {"fingerprint", AlertFingerprint(transition)}};
}

// Of what a person must hear of: an alert that was told again with newer values alone is no news.
size_t NewsHash(const nlohmann::json& alert) {
  nlohmann::json news = {{"labels", alert.at("labels")}};
  const nlohmann::json& annotations = alert.at("annotations");
  for (const char* const name : {"summary", "cause", "advice", "stage"}) {
    const auto found = annotations.find(name);
    if (found != annotations.end()) news[name] = *found;
  }
  return std::hash<std::string>()(news.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
}

// Pairs that all alerts have.
nlohmann::json Common(const nlohmann::json& alerts, const char* field) {
  nlohmann::json common = alerts.at(0).at(field);
  for (const nlohmann::json& alert : alerts) {
    for (auto it = common.begin(); it != common.end();) {
      const nlohmann::json& pairs = alert.at(field);
      const auto found = pairs.find(it.key());
      it = found != pairs.end() && *found == *it ? std::next(it) : common.erase(it);
    }
  }
  return common;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Webhook>> Webhook::Start(const WebhookOptions& options, AlertStore* alerts,
                                                        ActionStore* actions, Counters* counters) {
  absl::StatusOr<UrlParts> url = SplitUrl(options.url);
  if (!url.ok()) return url.status();
  return std::unique_ptr<Webhook>(new Webhook(options, *std::move(url), alerts, actions, counters));
}

Webhook::Webhook(const WebhookOptions& options, UrlParts url, AlertStore* alerts, ActionStore* actions,
                 Counters* counters)
    : options_(options),
      poster_(std::move(url), options.proxy, options.post, options.channel, counters),
      receiver_(Crc32c(absl::StrCat(options.channel, " ", options.url))),  // A url may hold a secret.
      alerts_(alerts),
      actions_(actions),
      counters_(counters),
      seconds_(counters->histogram("bellwether_notification_seconds", {{"channel", options.channel}})),
      random_(std::random_device()()) {
  for (const char* result : {"delivered", "failed"}) {
    counters_->counter("bellwether_notifications_total", {{"channel", options_.channel}, {"result", result}});
  }
  worker_ = std::thread([this] { Work(); });
  subscription_ = alerts_->Subscribe([this](const AlertTransition& transition) { Note(transition); });
  action_subscription_ =
      actions_->Subscribe([this](RunId run, const Action& action, size_t fresh) { RecordAction(run, action, fresh); });
}

Webhook::~Webhook() { Stop(); }

void Webhook::CatchUp(RunId first, RunId end) {
  std::map<RunId, uint64_t> told;
  for (const AlertTransition& last : alerts_->Newest(first, end, Clock::System()->UnixNanos() - options_.catch_up_ns)) {
    const auto [entry, fresh] = told.try_emplace(last.run, 0);
    if (fresh) {
      const absl::StatusOr<uint64_t> stored = alerts_->GetTold(last.run, receiver_);
      if (!stored.ok()) {
        LogWarning("webhook {}: of run {} all is told again: {}", options_.channel, last.run_name,
                   std::string(stored.status().message()));
      }
      entry->second = stored.value_or(0);
    }
    // Who heard of nothing need not hear that it is over.
    if (last.id > entry->second && (entry->second > 0 || last.state == AlertState::kFiring)) Note(last);
  }
}

void Webhook::Stop() {
  if (!worker_.joinable()) return;
  alerts_->Unsubscribe(subscription_);
  actions_->Unsubscribe(action_subscription_);
  AskToStop();
  worker_.join();
  absl::MutexLock lock(&mutex_);
  for (size_t i = 0; i < pending_.size(); ++i) Count("dropped");
  pending_.clear();
}

void Webhook::AskToStop() {
  absl::MutexLock lock(&mutex_);
  if (stopping_) return;
  stopping_ = true;
  stop_at_ns_ = Clock::System()->MonotonicNanos() + options_.stop_wait_ns;
  poster_.EndBy(stop_at_ns_);
}

void Webhook::Count(const char* result) {
  counters_->counter("bellwether_notifications_total", {{"channel", options_.channel}, {"result", result}})->Add();
}

void Webhook::Note(const AlertTransition& transition) {
  if (transition.told_before || transition.foreign) return;
  if (options_.notifies != nullptr && !options_.notifies(transition.run)) return;
  const bool resolved = transition.state == AlertState::kResolved;
  if (transition.severity < options_.severity_min || (resolved && !options_.send_resolved)) return;
  absl::MutexLock lock(&mutex_);
  if (!pending_.contains(transition.run) && pending_.size() >= options_.runs_max) {
    Count("refused");
    return;
  }
  Pending& pending = pending_[transition.run];
  const int64_t now_ns = Clock::System()->MonotonicNanos();
  if (pending.since_ns == 0) {
    pending.since_ns = now_ns;
    pending.due_ns = now_ns + options_.group_wait_ns;
  }
  pending.run_name = transition.run_name;
  if (!resolved) {
    // Its end may have been told meanwhile to who catches up with its beginning.
    const auto over = pending.resolved.find(transition.key);
    if (over != pending.resolved.end() && over->second.k < transition.k) pending.resolved.erase(over);
    pending.changed.insert(transition.key);
  } else if (pending.resolved.size() < options_.resolved_max || pending.resolved.contains(transition.key)) {
    pending.resolved[transition.key] = transition;
  } else {
    ++pending.truncated;
  }
}

bool Webhook::IsToldOf(const AlertView& alert) const {
  return alert.last.state == AlertState::kFiring && alert.last.severity >= options_.severity_min &&
         alert.notifies(Clock::System()->UnixNanos());
}

void Webhook::RecordAction(RunId run, const Action& action, size_t fresh) {
  // New as a whole: a proposal is told once, whatever becomes of it.
  const bool is_new = fresh == action.history.size() && action.asked_by == kPolicyName && !action.alert_key.empty();
  if (!is_new || options_.advice == nullptr) return;
  const auto alert = alerts_->Get(run, action.alert_key);
  // One that fires only now brings it along.
  if (alert.ok() && IsToldOf(*alert) && options_.advice({action}, alert->last) != alert->last.advice) Note(alert->last);
}

std::vector<AlertTransition> Webhook::Firing(RunId run) const {
  std::vector<AlertTransition> firing;
  for (const AlertView& alert : alerts_->List(run, /*firing_only=*/true)) {
    if (IsToldOf(alert)) firing.push_back(alert.last);
  }
  if (firing.empty() || options_.advice == nullptr) return firing;
  const auto actions = actions_->List(run);
  if (!actions.ok()) {
    LogWarning("webhook {}: what is proposed cannot be told: {}", options_.channel,
               std::string(actions.status().message()));
    return firing;
  }
  for (AlertTransition& alert : firing) alert.advice = options_.advice(*actions, alert);
  return firing;
}

void Webhook::Work() {
  const Clock& clock = *Clock::System();
  for (;;) {
    RunId run = 0;
    Pending pending;
    {
      absl::MutexLock lock(&mutex_);
      int64_t due_ns = 0;
      const auto next = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
        return std::min_element(pending_.begin(), pending_.end(),
                                [](const auto& a, const auto& b) { return a.second.due_ns < b.second.due_ns; });
      };
      const auto changed = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
        const auto first = next();
        return stopping_ || (first != pending_.end() && (due_ns == 0 || first->second.due_ns < due_ns));
      };
      for (;;) {
        const auto first = next();
        const int64_t now_ns = clock.MonotonicNanos();
        if (stopping_ && (pending_.empty() || now_ns >= stop_at_ns_)) return;
        if (first != pending_.end() && (stopping_ || first->second.due_ns <= now_ns)) {
          run = first->first;
          pending = std::move(first->second);
          pending_.erase(first);
          break;
        }
        due_ns = first == pending_.end() ? 0 : first->second.due_ns;
        if (due_ns == 0) {
          mutex_.Await(absl::Condition(&changed));
        } else {
          AwaitFor(&mutex_, absl::Condition(&changed), absl::Nanoseconds(due_ns - now_ns));
        }
      }
    }
    Deliver(run, std::move(pending));
  }
}

absl::Status Webhook::RecordPosted(RunId run, uint64_t told) {
  BW_ASSIGN_OR_RETURN(const uint64_t before, alerts_->GetTold(run, receiver_));
  return told > before ? alerts_->PutTold(run, receiver_, told) : absl::OkStatus();
}

void Webhook::Deliver(RunId run, Pending pending) {
  uint64_t told = 0;
  if (said_.size() > options_.runs_max) said_.clear();  // What fires is then told once more.
  const auto [known, fresh] = said_.try_emplace(run);
  if (fresh) known->second.before = alerts_->GetTold(run, receiver_).value_or(0);
  Said said = known->second;
  const std::string body = Body(run, pending, &told, &said);
  if (body.empty()) return;
  const absl::Status posted = poster_.Post(body);
  if (posted.ok()) {
    Count("delivered");
    known->second = std::move(said);
    if (const absl::Status noted = RecordPosted(run, told); !noted.ok()) {
      LogWarning("webhook {}: run {} may be told of again: {}", options_.channel, pending.run_name,
                 std::string(noted.message()));
    }
    seconds_->Observe(static_cast<double>(Clock::System()->MonotonicNanos() - pending.since_ns) * 1e-9);
    return;
  }
  ++pending.attempts;
  absl::MutexLock lock(&mutex_);
  if (pending.attempts >= options_.attempts_max || stopping_) {
    Count("failed");
    LogWarning("webhook {}: gave up on a notification of run {} after {} attempts, the last one: {}", options_.channel,
               pending.run_name, pending.attempts, std::string(posted.message()));
    return;
  }
  Count("retried");
  const int shift = std::min(pending.attempts - 1, 30);
  const int64_t wait_ns = std::min(options_.backoff_max_ns, options_.backoff_first_ns << shift);
  // Between half and all of it: receivers that fail together must not be hit together.
  pending.due_ns = Clock::System()->MonotonicNanos() + wait_ns / 2 +
                   static_cast<int64_t>(random_() % static_cast<uint64_t>(wait_ns / 2 + 1));
  // What came meanwhile is newer than what failed.
  const auto [entry, first] = pending_.try_emplace(run, pending);
  if (!first) {
    Pending& newer = entry->second;
    newer.changed.merge(pending.changed);
    for (auto& [key, transition] : pending.resolved) newer.resolved.try_emplace(key, std::move(transition));
    newer.truncated += pending.truncated;
    newer.since_ns = pending.since_ns;
    newer.due_ns = pending.due_ns;
    newer.attempts = pending.attempts;
  }
}

std::string Webhook::Body(RunId run, const Pending& pending, uint64_t* told, Said* said) const {
  const int64_t now_ns = Clock::System()->UnixNanos();
  const bool imported = options_.imported != nullptr && options_.imported(run);
  nlohmann::json alerts = nlohmann::json::array();
  std::map<std::string, size_t> before = std::exchange(said->alerts, {});
  size_t others = 0;
  for (const AlertTransition& alert : Firing(run)) {
    nlohmann::json text = AlertJson(alert, options_.links, imported);
    const size_t hash = NewsHash(text);
    const auto found = before.find(alert.key);
    const bool unchanged = found != before.end() ? found->second == hash
                                                 : alert.id <= said->before && !pending.changed.contains(alert.key);
    said->alerts[alert.key] = hash;
    *told = std::max(*told, alert.id);
    if (unchanged) {
      ++others;
    } else {
      alerts.push_back(std::move(text));
    }
  }
  const bool firing = !alerts.empty() || others > 0;
  for (const auto& [key, transition] : pending.resolved) {
    const auto newest = alerts_->Get(run, key);
    if (newest.ok() && (newest->last.state == AlertState::kFiring || !newest->notifies(now_ns))) continue;
    alerts.push_back(AlertJson(transition, options_.links, imported));
    *told = std::max(*told, transition.id);
  }
  // What is silenced goes on as it was told, so that a change meanwhile is told once it may be.
  for (const auto& [key, hash] : before) {
    const auto newest = alerts_->Get(run, key);
    if (newest.ok() && newest->last.state == AlertState::kFiring) said->alerts.try_emplace(key, hash);
  }
  if (alerts.empty()) return {};
  nlohmann::json body = {{"version", "4"},
                         {"groupKey", absl::StrCat("{}:{run=\"", pending.run_name, "\"}")},
                         {"truncatedAlerts", pending.truncated},
                         {"otherAlertsFiring", others},
                         {"status", firing ? "firing" : "resolved"},
                         {"receiver", options_.channel},
                         {"groupLabels", {{"run", pending.run_name}}},
                         {"commonLabels", Common(alerts, "labels")},
                         {"commonAnnotations", Common(alerts, "annotations")},
                         {"externalURL", options_.links.page},
                         {"alerts", alerts}};
  if (options_.body) body = options_.body->Fill(body);
  return body.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

}  // namespace bellwether::server
