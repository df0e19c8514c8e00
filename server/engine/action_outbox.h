// action_outbox.h: changes of a run's actions and audit, until they are stored.
//
// A database or a disk may be away for hours.  Decisions of people and policies wait here
// meanwhile, in memory.  That is little: an action's newest state has its whole history,
// and no more refused requests are kept than the store keeps.  After a crash the log gives
// the same decisions again: it is needed as long as one waits (LiveRun::SaveDue()).
//
// Not thread-safe.

#ifndef BELLWETHER_SERVER_ENGINE_ACTION_OUTBOX_H_
#define BELLWETHER_SERVER_ENGINE_ACTION_OUTBOX_H_

#include <deque>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "server/store/action_store.h"

namespace bellwether::server {

class ActionOutbox {
 public:
  // `changed` in the order of the changes; the log record `lsn` caused them.
  void Add(const std::vector<Action>& changed, const std::vector<AuditEntry>& audit, Lsn lsn);
  bool empty() const { return actions_.empty() && audit_.empty(); }
  // The newest cause: the log must have it before anything is stored.
  Lsn lsn() const { return lsn_; }
  // Stores what waits, oldest first.  Returns the first error; the rest still waits.  An
  // action that is damaged in the store is left as it is.
  absl::Status Post(RunId run, ActionStore* log);

 private:
  std::deque<Action> actions_;  // Each once.
  std::deque<std::pair<Lsn, AuditEntry>> audit_;
  Lsn lsn_ = 0;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_ENGINE_ACTION_OUTBOX_H_
