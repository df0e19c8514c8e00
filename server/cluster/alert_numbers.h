// alert_numbers.h: the alerts of runs in other databases, in the one order that the
// first database counts.
//
// What is put is stored in the run's own database before (waiting_alerts.h), by an
// owner that was fenced there: here the first of the same alert counts, whoever
// brings it, and again it is found and left.
//
// A first database that does not answer is left alone for a moment: shards, which
// wait for the answer, have other runs to serve.
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

  // UNAVAILABLE: it is left alone now.
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
