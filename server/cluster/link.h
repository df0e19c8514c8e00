// link.h: a connection that is made again when it broke.

#ifndef BELLWETHER_SERVER_CLUSTER_LINK_H_
#define BELLWETHER_SERVER_CLUSTER_LINK_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/cluster/connection.h"

namespace bellwether::server {

// A failed flight is not repeated here: only the caller knows whether it may be.
// Not thread-safe.
class PgLink {
 public:
  // Called with each new connection before its first use.  If it returns an error, the
  // connection is closed.
  using Greet = std::function<absl::Status(PgConnection*)>;

  // A connection and each of its flights takes at most `answer_ms`.
  PgLink(std::string dsn, int64_t answer_ms, Greet greet = {})
      : dsn_(std::move(dsn)), answer_ms_(answer_ms), greet_(std::move(greet)) {}

  // A connection, unless there is one; the others begin with it.  As
  // PgConnection::Connect(), and what `greet` said.
  absl::Status Connect();
  // There is one, as far as is known: it may have ended since it was last used.
  bool connected() const { return connection_ != nullptr && !connection_->broken(); }
  // As PgConnection's own.
  absl::StatusOr<std::vector<PgResult>> Run(const std::vector<PgStatement>& statements);
  absl::StatusOr<std::vector<PgResult>> Transact(const std::vector<PgStatement>& statements);

 private:
  const std::string dsn_;
  const int64_t answer_ms_;
  const Greet greet_;
  std::unique_ptr<PgConnection> connection_;
};

// One link or a few, shared by several threads, for statements that may run twice.  What
// fails on a used connection is tried once more on a new one, because the database may
// have been restarted while the connection was idle.  The next link is made when all
// others are in use.  Thread-safe.
class SharedPgLink {
 public:
  SharedPgLink(const std::string& dsn, int64_t answer_ms, size_t links = 1);

  absl::StatusOr<std::vector<PgResult>> Run(const std::vector<PgStatement>& statements);
  absl::StatusOr<std::vector<PgResult>> Transact(const std::vector<PgStatement>& statements);
  // In one transaction the statements that `make` returns, which a second try calls again.
  using Maker = std::function<std::vector<PgStatement>()>;
  absl::StatusOr<std::vector<PgResult>> Transact(const Maker& make);
  // Run() of one statement.
  absl::StatusOr<PgResult> Ask(PgStatement statement);

 private:
  using Flight = std::function<absl::StatusOr<std::vector<PgResult>>(PgLink*)>;
  absl::StatusOr<std::vector<PgResult>> Fly(const Flight& flight);

  std::vector<std::unique_ptr<PgLink>> links_;  // Each whose place it has in free_.
  absl::Mutex mutex_;
  std::set<size_t> free_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_CLUSTER_LINK_H_
