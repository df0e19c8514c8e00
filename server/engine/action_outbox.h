// action_outbox.h: what changed of a run's actions, until it is stored.
//
// A database or a disk may be away for hours, and what people and policies decided
// meanwhile must not be lost with it: it waits here, in memory.  It is small: of an
// action the newest state has all of its history, and of refused requests no more are
// kept than the store keeps.  What a crash takes is concluded again from the log, which
// is needed as long as something waits (LiveRun::SaveDue()).
//
// One thread's own.

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
  // The newest cause: nothing may be stored before the log has that.
  Lsn lsn() const { return lsn_; }
  // Stores what waits, oldest first.  The first error, after which the rest waits on;
  // what is damaged in the store is left as it is.
  absl::Status Post(RunId run, ActionStore* log);

 private:
  std::deque<Action> actions_;  // Each once.
  std::deque<std::pair<Lsn, AuditEntry>> audit_;
  Lsn lsn_ = 0;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_ENGINE_ACTION_OUTBOX_H_
