// wal_recovery.h: opens what a log left behind and decides what it means.
//
// A record that is broken at LSN x is corruption in three cases.  A later valid
// record proves that x was durable.  Or x lies in an earlier segment (rotation
// waits for the fsync).  Or a segment is missing or shorter than its header
// declares.  Acknowledged data is gone then, and only a repair, which states
// the LSNs, goes on.  In any other case x was never reported durable: a torn
// tail, cut and counted.
//
// What earlier servers left behind the records of a file that was a segment before
// (wal_format.h) counts as a torn tail, too: it is zeroed once, at the first start.

#ifndef BELLWETHER_SERVER_STORE_WAL_RECOVERY_H_
#define BELLWETHER_SERVER_STORE_WAL_RECOVERY_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/store/file_system.h"
#include "server/store/wal.h"

namespace bellwether::server {

struct WalSegment {
  uint64_t number = 0;
  std::string path;
  Lsn first_lsn = 0;
  int64_t end = 0;    // Offset after the last record.
  int64_t bytes = 0;  // Of the file.
};

struct RecoveredWal {
  std::vector<WalSegment> segments;  // By rising number, without a hole.
  uint32_t salt = 0;
  Lsn next_lsn = 1;
  Wal::Recovery recovery;
};

// Everything it returns is on disk.  Errors as Wal::Open().
absl::StatusOr<RecoveredWal> RecoverWal(const Wal::Options& options, FileSystem* file_system);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_STORE_WAL_RECOVERY_H_
