#include "server/cluster/alert_numbers.h"

#include <vector>

#include "server/cluster/postgres_alerts.h"
#include "server/model/partition.h"
#include "server/util/clock.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {}  // namespace

absl::Status AlertNumbers::answers() const {
  return MonotonicNow() < quiet_until_ns_ ? absl::UnavailableError("the database that numbers alerts does not answer")
                                          : absl::OkStatus();
}

void AlertNumbers::Note(const absl::Status& status) {
  if (absl::IsUnavailable(status)) quiet_until_ns_ = MonotonicNow() + kQuietNanos;
}

absl::StatusOr<bool> AlertNumbers::Put(uint64_t epoch, const std::string& owner, AlertTransition* transition) {
  BW_RETURN_IF_ERROR(answers());
  // Before anything is looked for: without a fence two may bring the same alert.
  const std::vector<PgStatement> lock = {{"SELECT n FROM bellwether.alert_count WHERE one = 1 FOR UPDATE", {}}};
  const Fence stored = {PartitionOfRun(transition->run), epoch};
  absl::StatusOr<bool> put = PutPostgresTransition(lock, stored, owner, transition, &link_);
  Note(put.status());
  return put;
}

}  // namespace bellwether::server
