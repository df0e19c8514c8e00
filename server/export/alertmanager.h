// alertmanager.h: sends what fires to an Alertmanager, again and again.
//
// An Alertmanager forgets: it takes an alert for resolved once the alert's
// endsAt has passed.  So what fires is sent at once, and again every resend_ns
// with a later endsAt (four times that ahead, as Prometheus does it).  An alert
// that no longer fires is sent with its end for five minutes more, which
// outlasts a receiver's restart.  Each push holds the whole state, so a push
// that was lost costs nothing but time.  In a cluster of Alertmanagers every
// member needs the pushes: one object each.
//
// To an Alertmanager an alert is its labels.  One that grew worse has others
// (severity, head), so the former ones are ended in the same push.
//
// API: https://github.com/prometheus/alertmanager/blob/main/api/v2/openapi.yaml

#ifndef BELLWETHER_SERVER_EXPORT_ALERTMANAGER_H_
#define BELLWETHER_SERVER_EXPORT_ALERTMANAGER_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/export/alert_json.h"
#include "server/export/current_runs.h"
#include "server/export/http_post.h"
#include "server/store/alert_store.h"
#include "server/util/counters.h"

namespace bellwether::server {

struct AlertmanagerOptions {
  std::string url;                       // http://host:9093, or with the route prefix it serves under
  UrlParts proxy;                        // By which the url is reached; without a host: directly.
  std::string channel = "alertmanager";  // Label of the counters.
  AlertLinks links;
  Severity severity_min = Severity::kWarning;
  // The advice of an alert that fires, with the actions proposed for it, as of each push.
  // Thread-safe; null = as it was when the alert changed.
  std::function<std::string(const AlertTransition& alert)> advice;
  RunHolds holds;
  size_t alerts_max = 4096;  // In one state; the oldest beyond it are refused.
  size_t batch_max = 256;    // In one request.
  int attempts_max = 5;      // Failures in a row before each counts as failed.
  int64_t resend_ns = 60'000'000'000;
  int64_t resolved_ns = 300'000'000'000;
  int64_t group_wait_ns = 50'000'000;      // Collects what comes together.
  int64_t backoff_first_ns = 500'000'000;  // Doubles, up to resend_ns.
  HttpPostLimits post;                     // Of each request.
  int64_t stop_wait_ns = 1'000'000'000;    // Stop() has so long for its last push.
};

// bellwether_notifications_total{channel,result}: delivered (news), resent (no
// news), retried, failed, refused (alerts_max).
// Thread-safe.
class Alertmanager {
 public:
  // INVALID_ARGUMENT: `url` is not a URL.  All arguments must outlive the
  // object.
  static absl::StatusOr<std::unique_ptr<Alertmanager>> Start(const AlertmanagerOptions& options, AlertStore* alerts,
                                                             const RunTable* runs, Counters* counters);
  ~Alertmanager();
  Alertmanager(const Alertmanager&) = delete;
  Alertmanager& operator=(const Alertmanager&) = delete;

  // One last push of what has not been sent.  What fires goes on firing there
  // until its endsAt, and the next server sends it again.
  void Stop();
  // Begins the time that Stop() has and returns, so that many have it together.
  void AskToStop();

 private:
  // An alert as the Alertmanager knows it.
  struct Told {
    StringMap annotations;
    RunId run = 0;
    std::string key;
    int64_t starts_ns = 0;
    int64_t ended_ns = 0;  // 0 = it fires.
  };
  using State = std::map<StringMap, Told>;  // By labels.

  Alertmanager(const AlertmanagerOptions& options, UrlParts url, AlertStore* alerts, const RunTable* runs,
               Counters* counters);
  void Work();
  // Brings told_ up to date; whether there is news.
  bool Update(int64_t now_ns);
  State Firing(int64_t now_ns) const;
  // What is told of an alert that no longer fires under `labels`, and why.
  StringMap AnnotationsOfEnd(const StringMap& labels, const Told& told, int64_t now_ns) const;
  absl::Status Push(int64_t now_ns);
  void Count(const char* result) const;

  const AlertmanagerOptions options_;
  HttpPoster poster_;  // The worker's.
  AlertStore* const alerts_;
  const RunTable* const runs_;
  Counters* const counters_;
  Histogram* const seconds_;
  int64_t subscription_ = 0;
  State told_;           // The worker's.
  bool unsent_ = false;  // The worker's: news that no push has carried yet.
  absl::Mutex mutex_;
  int64_t changed_ns_ ABSL_GUARDED_BY(mutex_) = 0;  // Of the oldest change since the last push; 0 = none.
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread worker_;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_EXPORT_ALERTMANAGER_H_
