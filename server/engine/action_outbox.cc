#include "server/engine/action_outbox.h"

#include "server/util/log.h"

namespace bellwether::server {
namespace {

// False: it waits on.  A damaged row must not keep everything behind it, nor the log.
bool IsOver(const absl::Status& status, const char* what) {
  if (status.ok()) return true;
  if (!absl::IsDataLoss(status)) return false;
  LogError("{} could not be stored: {}", what, std::string(status.message()));
  return true;
}

}  // namespace

void ActionOutbox::Add(const std::vector<Action>& changed, const std::vector<AuditEntry>& audit, Lsn lsn) {
  for (const Action& action : changed) {
    std::erase_if(actions_, [&](const Action& older) { return older.id == action.id; });
    actions_.push_back(action);
  }
  for (const AuditEntry& entry : audit) audit_.emplace_back(lsn, entry);
  while (audit_.size() > Database::kAuditMax) audit_.pop_front();
  if (!changed.empty() || !audit.empty()) lsn_ = lsn;
}

absl::Status ActionOutbox::Post(RunId run, ActionStore* log) {
  for (; !actions_.empty(); actions_.pop_front()) {
    const absl::Status posted = log->Post(run, actions_.front()).status();
    if (!IsOver(posted, "an action")) return posted;
  }
  for (; !audit_.empty(); audit_.pop_front()) {
    const absl::Status noted = log->Note(run, audit_.front().first, audit_.front().second);
    if (!IsOver(noted, "an audit entry")) return noted;
  }
  return absl::OkStatus();
}

}  // namespace bellwether::server
