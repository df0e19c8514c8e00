#include "server/cluster/waiting_alerts.h"

#include <utility>

#include "server/store/record_codec.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

constexpr int64_t kPage = 100;

}  // namespace

absl::Status KeepWaitingAlert(const Fence& fence, const std::string& owner, const AlertTransition& transition,
                              SharedPgLink* link) {
  std::vector<PgStatement> flight = FencedFlight(fence);
  flight.push_back(
      {"INSERT INTO bellwether.alerts_waiting (p, run, key, k, epoch, owner, body) VALUES ($1, $2, $3, $4, $5, $6, $7) "
       "ON CONFLICT (p, run, key, k) DO UPDATE SET epoch = excluded.epoch, owner = excluded.owner, "
       "body = excluded.body",
       {int64_t{fence.partition}, static_cast<int64_t>(transition.run), transition.key, int64_t{transition.k},
        static_cast<int64_t>(fence.epoch), owner, PgValue::Bytes(EncodeTransition(transition))}});
  return link->Transact(flight).status();
}

absl::StatusOr<std::vector<WaitingAlert>> ListWaitingAlerts(const Fence& fence, SharedPgLink* link) {
  BW_ASSIGN_OR_RETURN(const auto rows,
                      link->Ask({"SELECT epoch, owner, body FROM bellwether.alerts_waiting "
                                 "WHERE p = $1 AND epoch < $2 ORDER BY run, key, k LIMIT $3",
                                 {int64_t{fence.partition}, static_cast<int64_t>(fence.epoch), kPage}}));
  std::vector<WaitingAlert> waiting;
  for (int row = 0; row < rows.rows(); ++row) {
    BW_ASSIGN_OR_RETURN(AlertTransition transition, DecodeTransition(rows.Text(row, 2)));
    waiting.push_back(
        {static_cast<uint64_t>(rows.Number(row, 0)), std::string(rows.Text(row, 1)), std::move(transition)});
  }
  return waiting;
}

absl::Status DropWaitingAlert(uint32_t partition, const AlertTransition& transition, SharedPgLink* link) {
  return link
      ->Ask({"DELETE FROM bellwether.alerts_waiting WHERE p = $1 AND run = $2 AND key = $3 AND k = $4",
             {int64_t{partition}, static_cast<int64_t>(transition.run), transition.key, int64_t{transition.k}}})
      .status();
}

}  // namespace bellwether::server
