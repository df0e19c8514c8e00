// webhook.h: sends changes of alerts to an address, in Alertmanager's format.
//
// POSTs the body of Alertmanager's webhook, version 4, so that any receiver of
// an Alertmanager can receive from here.  There is one notification per run,
// with those of its alerts that have changed since the last one; how many others
// fire is a number.  The body is built when it is sent, so that a receiver that
// was away gets the newest state once and no backlog.  If a policy proposes
// something for an alert after it fired, the alert is sent once more with the
// proposal.
//
// A template gives the body another form (body_template.h).
//
// Alertmanager:
// https://prometheus.io/docs/alerting/latest/configuration/#webhook_config

#ifndef BELLWETHER_SERVER_EXPORT_WEBHOOK_H_
#define BELLWETHER_SERVER_EXPORT_WEBHOOK_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/export/alert_json.h"
#include "server/export/body_template.h"
#include "server/export/http_post.h"
#include "server/store/action_store.h"
#include "server/store/alert_store.h"
#include "server/util/clock.h"
#include "server/util/counters.h"

namespace bellwether::server {

struct WebhookOptions {
  std::string url;                   // http://host[:port]/path or https://...
  UrlParts proxy;                    // By which the url is reached; without a host: directly.
  std::string channel = "webhook";   // Label of the counters, receiver in the body.
  std::optional<BodyTemplate> body;  // Without one: Alertmanager's body.
  AlertLinks links;
  Severity severity_min = Severity::kWarning;
  bool send_resolved = true;
  // The advice of an alert that fires, with what of a run's actions was proposed for it.
  // Thread-safe; null = as it was when the alert changed.
  std::function<std::string(const std::vector<Action>& actions, const AlertTransition& alert)> advice;
  // Whether alerts of a run are sent at all.  Thread-safe; null = of every run.
  std::function<bool(RunId run)> notifies;
  // Whether a run is a recording that was imported, which is said of its alerts.  Thread-safe; null = none is.
  std::function<bool(RunId run)> imported;
  size_t runs_max = 1000;                  // Runs with something to send; more are refused.
  size_t resolved_max = 256;               // Resolved alerts of a run in one notification.
  int attempts_max = 8;                    // Then the notification is given up.
  int64_t group_wait_ns = 50'000'000;      // Collects what comes together.
  int64_t backoff_first_ns = 500'000'000;  // Doubles, with jitter.
  int64_t backoff_max_ns = 60'000'000'000;
  HttpPostLimits post;                                       // Of each attempt.
  int64_t stop_wait_ns = 1'000'000'000;                      // Stop() tries so long to empty the queue.
  int64_t catch_up_ns = 24 * 3600 * int64_t{1'000'000'000};  // Older is no news.
};

// bellwether_notifications_total{channel,result}: delivered, retried, failed
// (given up), refused (runs_max), dropped (left at Stop()).
// Thread-safe.
class Webhook {
 public:
  // INVALID_ARGUMENT: `url` is not a URL.  Begins with the next transition, and
  // CatchUp(); all arguments must outlive the object.
  static absl::StatusOr<std::unique_ptr<Webhook>> Start(const WebhookOptions& options, AlertStore* alerts,
                                                        ActionStore* actions, Counters* counters);
  ~Webhook();
  Webhook(const Webhook&) = delete;
  Webhook& operator=(const Webhook&) = delete;

  // Sends changes of the runs in [first, end), which are served here from now
  // on, that were never sent to this receiver.  A server may have ended before,
  // or the receiver was away for too long.  The database keeps the last id that
  // was sent, with the run.
  void CatchUp(RunId first, RunId end);

  // Delivers what is due if it can within stop_wait_ns, and ends what is under way
  // then.  No retries after.
  void Stop();
  // Begins that time and returns, so that many receivers have it together.
  void AskToStop();

 private:
  struct Pending {
    std::string run_name;
    std::set<std::string> changed;                    // Keys of those that fired, or rose.
    std::map<std::string, AlertTransition> resolved;  // By key.
    uint64_t truncated = 0;
    int64_t since_ns = 0;
    int64_t due_ns = 0;
    int attempts = 0;
  };

  Webhook(const WebhookOptions& options, UrlParts url, AlertStore* alerts, ActionStore* actions, Counters* counters);
  void Note(const AlertTransition& transition);
  void RecordAction(RunId run, const Action& action, size_t fresh);
  // Of a run, as they fire now.
  std::vector<AlertTransition> Firing(RunId run) const;
  bool IsToldOf(const AlertView& alert) const;
  void Work();
  // What was told of a run.
  struct Said {
    uint64_t before = 0;                   // Up to this id by servers before this one.
    std::map<std::string, size_t> alerts;  // By key, of what fires; hashes.
  };
  // "" if nothing is left to send.  `*told` becomes the highest id that is known then, `*said` what fires then.
  std::string Body(RunId run, const Pending& pending, uint64_t* told, Said* said) const;
  absl::Status RecordPosted(RunId run, uint64_t told);
  void Deliver(RunId run, Pending pending);
  void Count(const char* result);

  const WebhookOptions options_;
  HttpPoster poster_;        // The worker's.
  const uint32_t receiver_;  // In the database.
  AlertStore* const alerts_;
  ActionStore* const actions_;
  Counters* const counters_;
  Histogram* const seconds_;
  int64_t subscription_ = 0;
  int64_t action_subscription_ = 0;
  std::mt19937_64 random_;      // The worker's.
  std::map<RunId, Said> said_;  // The worker's.
  absl::Mutex mutex_;
  std::map<RunId, Pending> pending_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  int64_t stop_at_ns_ ABSL_GUARDED_BY(mutex_) = 0;
  std::thread worker_;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_EXPORT_WEBHOOK_H_
