#include "server/cluster/postgres_alerts.h"

#include <utility>

#include "server/store/record_codec.h"
#include "server/util/log.h"
#include "server/util/status_macros.h"

namespace bellwether::server {

absl::StatusOr<bool> PutPostgresTransition(std::vector<PgStatement> begin, const Fence& stored,
                                           const std::string& owner, AlertTransition* transition, SharedPgLink* link) {
  const PgValue p = int64_t{stored.partition}, run = static_cast<int64_t>(transition->run), key = transition->key,
                k = int64_t{transition->k};
  std::vector<PgStatement> flight = std::move(begin);
  flight.push_back(
      {"UPDATE bellwether.alert_count SET n = n + 1 WHERE one = 1 AND NOT EXISTS "
       "(SELECT 1 FROM bellwether.alerts WHERE p = $1 AND run = $2 AND key = $3 AND k = $4)",
       {p, run, key, k}});
  flight.push_back(
      {"INSERT INTO bellwether.alerts (p, run, key, k, n, epoch, owner, body) SELECT CAST($1 AS integer), "
       "CAST($2 AS bigint), CAST($3 AS text), CAST($4 AS integer), n, CAST($5 AS bigint), CAST($6 AS text), $7 "
       "FROM bellwether.alert_count WHERE one = 1 ON CONFLICT (p, run, key, k) DO NOTHING",
       {p, run, key, k, static_cast<int64_t>(stored.epoch), owner, PgValue::Bytes(EncodeTransition(*transition))}});
  flight.push_back(
      {"SELECT n, CASE WHEN epoch = $5 AND owner = $6 THEN 1 ELSE 0 END FROM bellwether.alerts "
       "WHERE p = $1 AND run = $2 AND key = $3 AND k = $4",
       {p, run, key, k, static_cast<int64_t>(stored.epoch), owner}});
  BW_ASSIGN_OR_RETURN(const auto done, link->Transact(flight));
  if (done.back().rows() != 1) return absl::InternalError("an alert is not there after it was stored");
  transition->id = static_cast<uint64_t>(done.back().Number(0, 0));
  return done.back().Number(0, 1) == 1;
}

absl::StatusOr<std::vector<AlertTransition>> ListPostgresTransitions(uint64_t after, size_t limit, SharedPgLink* link,
                                                                     std::atomic<uint64_t>* unreadable) {
  std::vector<AlertTransition> transitions;
  for (;;) {
    const size_t wanted = limit - transitions.size();
    BW_ASSIGN_OR_RETURN(const auto rows, link->Ask({"SELECT n, body FROM bellwether.alerts WHERE n > $1 ORDER BY n "
                                                    "LIMIT $2",
                                                    {static_cast<int64_t>(after), static_cast<int64_t>(wanted)}}));
    for (int row = 0; row < rows.rows(); ++row) {
      after = static_cast<uint64_t>(rows.Number(row, 0));
      absl::StatusOr<AlertTransition> transition = DecodeTransition(rows.Text(row, 1));
      if (!transition.ok()) {
        if (uint64_t said = *unreadable; said < after && unreadable->compare_exchange_strong(said, after)) {
          LogError("alert number {} is left out: {}", after, std::string(transition.status().message()));
        }
        continue;
      }
      transition->id = after;
      transitions.push_back(*std::move(transition));
    }
    if (transitions.size() == limit || static_cast<size_t>(rows.rows()) < wanted) return transitions;
  }
}

}  // namespace bellwether::server
