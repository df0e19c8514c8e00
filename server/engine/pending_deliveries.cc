#include "server/engine/pending_deliveries.h"

#include <utility>

namespace bellwether::server {

std::vector<PendingDelivery> PendingDeliveries::Find(const RunState& state) {
  std::vector<PendingDelivery> pending;
  const ActionEngine& engine = state.action_engine();
  if (seen_version_ == engine.due_version()) return pending;
  seen_version_ = engine.due_version();
  for (const auto& [rank, record] : state.ranks()) {
    const std::set<std::string>& handed_over = handed_over_[rank];
    for (Action& action : engine.Due(rank)) {
      if (!handed_over.contains(action.id)) pending.push_back({rank, std::move(action)});
    }
  }
  return pending;
}

void PendingDeliveries::RecordEffects(const RunEffects& effects) {
  if (!effects.joined.has_value()) return;
  handed_over_.erase(*effects.joined);
  seen_version_ = UINT64_MAX;
}

}  // namespace bellwether::server
