// connection.h: one connection to a PostgreSQL, as flights of statements.
//
// A flight is sent whole and answered whole, in libpq's pipeline mode: one way
// there and back, however many statements it has.  A transaction is one flight,
// so that a server that is paused in the middle of its own work holds no lock.
//
// Not thread-safe: one thread at a time.

#ifndef BELLWETHER_SERVER_CLUSTER_CONNECTION_H_
#define BELLWETHER_SERVER_CLUSTER_CONNECTION_H_

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

struct pg_conn;
struct pg_result;

namespace bellwether::server {

struct Libpq;

// A parameter: an integer, a text, or bytes.
struct PgValue {
  PgValue(int64_t number) : text(std::to_string(number)) {}  // NOLINT(google-explicit-constructor)
  PgValue(std::string words) : text(std::move(words)) {}     // NOLINT(google-explicit-constructor)
  static PgValue Bytes(std::string bytes) {
    PgValue value(std::move(bytes));
    value.is_bytes = true;
    return value;
  }
  std::string text;
  bool is_bytes = false;
};

struct PgStatement {
  std::string sql;  // With $1, $2, ...
  std::vector<PgValue> values;
};

class PgResult {
 public:
  PgResult(const Libpq* pq, pg_result* result);
  PgResult(PgResult&& other) noexcept;
  PgResult& operator=(PgResult&&) = delete;
  ~PgResult();

  int rows() const;
  int64_t affected() const;  // By INSERT, UPDATE, DELETE.
  // REQUIRES: the column is of that type and not null.
  int64_t Number(int row, int column) const;         // int2, int4, int8, bool
  std::string_view Text(int row, int column) const;  // text, bytea
  bool IsNull(int row, int column) const;

 private:
  const Libpq* const pq_;
  pg_result* result_;
};

class PgConnection {
 public:
  // `dsn` as libpq takes it; neither it nor its password is ever logged.
  // UNAVAILABLE: no answer; FAILED_PRECONDITION: no libpq, or refused there.
  static absl::StatusOr<std::unique_ptr<PgConnection>> Connect(const std::string& dsn, int64_t timeout_ms);
  ~PgConnection();
  PgConnection(const PgConnection&) = delete;
  PgConnection& operator=(const PgConnection&) = delete;

  // Each statement for itself, in order; stops at the first error.
  //   ABORTED              a check of ours failed there: 1/count(*) of nothing
  //   UNAVAILABLE          what may succeed another time: a broken connection, a
  //                        lock timeout, a serialization failure, no answer in
  //                        timeout_ms.  What came of it is not known.
  //   FAILED_PRECONDITION  a table or a right is missing
  //   INTERNAL             anything else
  absl::StatusOr<std::vector<PgResult>> Run(const std::vector<PgStatement>& statements, int64_t timeout_ms);
  // All of them in one transaction, without the results of BEGIN and COMMIT.  A
  // commit that comes with a warning is none: with synchronous standbys it may
  // say that a standby has not got it.  UNAVAILABLE then, and the connection ends.
  absl::StatusOr<std::vector<PgResult>> Transact(const std::vector<PgStatement>& statements, int64_t timeout_ms);

  // Of no use any more: connect again.
  bool broken() const { return broken_; }

 private:
  PgConnection(const Libpq* pq, pg_conn* connection) : pq_(pq), connection_(connection) {}
  static void OnNotice(void* self, const pg_result* notice);
  // Waits until the socket is readable (or writable); false: not in time.
  bool Wait(bool to_write, int64_t deadline_ns) const;
  absl::Status Broken(const std::string& why);
  absl::Status FromResult(const pg_result* result);
  absl::StatusOr<std::vector<PgResult>> Fly(const std::vector<PgStatement>& statements, int64_t deadline_ns);

  const Libpq* const pq_;
  pg_conn* const connection_;
  bool broken_ = false;
  bool warned_ = false;  // Since Transact() began.
  std::string warning_;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_CLUSTER_CONNECTION_H_
