// alert_numbers.h: the alerts of runs in other databases, in the one order that the
// first database counts.
//
// An alert is stored in its run's own database first, fenced there (waiting_alerts.h).
// Here the first copy of an alert counts.  A second copy, from any server, changes
// nothing.
//
// A first database that does not answer is not asked for a moment, because the shards
// that wait for the answer have other runs to serve.
//
// Thread-safe.

#ifndef BELLWETHER_SERVER_CLUSTER_ALERT_NUMBERS_H_
#define BELLWETHER_SERVER_CLUSTER_ALERT_NUMBERS_H_

#include <atomic>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/cluster/link.h"
#include "server/model/alert_transition.h"

namespace bellwether::server {

class AlertNumbers {
 public:
  // `dsn`: of the first database.
  AlertNumbers(std::string dsn, int64_t answer_ms) : link_(std::move(dsn), answer_ms) {}

  // As SharedRows::PutTransition(); `epoch` and `owner`: as it was stored with its run.
  absl::StatusOr<bool> Put(uint64_t epoch, const std::string& owner, AlertTransition* transition);

  // UNAVAILABLE: it is not asked now.
  absl::Status answers() const;
  // What came of asking it.
  void Note(const absl::Status& status);

 private:
  static constexpr int64_t kQuietNanos = 1'000'000'000;

  SharedPgLink link_;
  std::atomic<int64_t> quiet_until_ns_ = 0;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_CLUSTER_ALERT_NUMBERS_H_
