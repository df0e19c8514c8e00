// pending_deliveries.h: which actions are due at which rank's stream and were not handed
// over yet.
//
// Nothing of it is saved: each new stream is handed everything that is due.
//
// Not thread-safe: the shard that owns the run calls it.

#ifndef BELLWETHER_SERVER_ENGINE_PENDING_DELIVERIES_H_
#define BELLWETHER_SERVER_ENGINE_PENDING_DELIVERIES_H_

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "server/engine/run_state.h"

namespace bellwether::server {

struct PendingDelivery {
  uint32_t rank = 0;
  Action action;
};

class PendingDeliveries {
 public:
  // The deliveries that are due; empty until another one may be due.
  std::vector<PendingDelivery> Find(const RunState& state);
  // The deliveries of the last Find() could not be passed on.
  void FindAgain() { seen_version_ = UINT64_MAX; }
  // The rank's stream has the action.
  void RecordHandedOver(uint32_t rank, const std::string& id) { handed_over_[rank].insert(id); }
  // A rank has a new stream.
  void RecordEffects(const RunEffects& effects);

 private:
  std::map<uint32_t, std::set<std::string>> handed_over_;  // rank -> ids, to its newest stream.
  uint64_t seen_version_ = UINT64_MAX;                     // RunState::due_version() at the last Find().
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_ENGINE_PENDING_DELIVERIES_H_
