// action_store.h: every change of every action once, and requests that came to
// nothing.
//
// The run's shard posts an action that changed, with its whole history.  A
// change that is stored already is a replay after a crash and changes nothing.
// Reads go to the database: an action is looked at far less often than it is
// kept.  Thread-safe; the changes of one run come from one thread.

#ifndef BELLWETHER_SERVER_STORE_ACTION_STORE_H_
#define BELLWETHER_SERVER_STORE_ACTION_STORE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/model/action.h"
#include "server/store/database.h"

namespace bellwether::server {

class ActionStore {
 public:
  // The last `fresh` changes of the action's history are new.  Called from the
  // thread that posts, without any other lock: be quick.
  using Subscriber = std::function<void(RunId run, const Action& action, size_t fresh)>;

  // `database` must outlive this object.
  explicit ActionStore(Database* database) : database_(database) {}

  // Durable when it returns.  Returns how many changes are new; 0 = a replay,
  // without a notice to subscribers.
  absl::StatusOr<size_t> Post(RunId run, const Action& action);
  // The entry of the log record `lsn`, once.
  absl::Status Note(RunId run, Lsn lsn, const AuditEntry& entry);

  absl::StatusOr<std::vector<Action>> List(RunId run) const;           // Oldest first.
  absl::StatusOr<Action> Get(RunId run, const std::string& id) const;  // NOT_FOUND
  absl::StatusOr<std::vector<AuditEntry>> Audit(RunId run) const;      // Oldest first.

  int64_t Subscribe(Subscriber subscriber);
  void Unsubscribe(int64_t id);  // Returns once no call is in flight.

 private:
  Database* const database_;
  absl::Mutex subscribers_mutex_;
  std::map<int64_t, Subscriber> subscribers_ ABSL_GUARDED_BY(subscribers_mutex_);
  int64_t next_subscriber_ ABSL_GUARDED_BY(subscribers_mutex_) = 1;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_STORE_ACTION_STORE_H_
