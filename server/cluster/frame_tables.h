// frame_tables.h: the shared log's tables: a row is a commit of one partition, its
// records packed; of the days since 1970, modulo four, each has a table.
//
// Which day it is says the database, so that no server's clock decides which frames
// are old.  Tables of the days before yesterday are emptied at once: deleting their
// rows would leave work for vacuum.
//
// Thread-safe.

#ifndef BELLWETHER_SERVER_CLUSTER_FRAME_TABLES_H_
#define BELLWETHER_SERVER_CLUSTER_FRAME_TABLES_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/cluster/fence.h"
#include "server/cluster/link.h"
#include "server/store/log_backend.h"

namespace bellwether::server {

// A row's body, and back.  DATA_LOSS: damaged; else the first error of `visit`.
std::string PackRecords(const std::vector<WalRecord>& records);
absl::Status UnpackRecords(std::string_view packed, const std::function<absl::Status(const WalRecord&)>& visit);

class FrameTables {
 public:
  // Asks the database what day it is; call it with each new connection.
  absl::Status LearnDay(PgConnection* connection, int64_t answer_ms);
  // REQUIRES: LearnDay() was OK once.
  int TableOfToday() const { return static_cast<int>(Day() % kTables); }

  // A row of `table` for [first, last]; the same row again changes nothing.
  static PgStatement Insert(int table, const Fence& fence, Lsn first, Lsn last, const std::string& owner,
                            const std::string& body);
  // The highest LSN that a partition has given, or may have: 0 = none.
  static absl::StatusOr<Lsn> LastLsn(uint32_t partition, SharedPgLink* link);
  // The partition's records from its lease's `keep` on, in the order of their LSNs;
  // some earlier ones may come along.
  static absl::Status Read(uint32_t partition, SharedPgLink* link,
                           const std::function<absl::Status(const WalRecord&)>& visit);
  // Empties the tables that are neither today's nor yesterday's, at most once in ten
  // minutes each.  A table stays while it is being read, or while some server's saved
  // state still needs its records; the log says so.
  absl::Status EmptyOld(SharedPgLink* link);

 private:
  static constexpr int kTables = 4;  // Of 001_tables.sql.
  int64_t Day() const;
  // ABORTED: it is not `today` any more, or something in it is needed.  UNAVAILABLE: a lock
  // was not to be had at once, or no answer.
  static absl::Status Empty(const std::string& table, int64_t today, SharedPgLink* link);
  void SetDay(int64_t unix_seconds);

  std::atomic<int64_t> day_offset_ns_ = 0;  // The database's clock less our monotonic one.
  absl::Mutex emptying_;
  int64_t emptied_ns_ ABSL_GUARDED_BY(emptying_) = 0;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_CLUSTER_FRAME_TABLES_H_
