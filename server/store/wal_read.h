// wal_read.h: the records of the log's segments, from disk.
//
// Up to the end that each segment is given with; whatever is appended behind it
// meanwhile is not looked at.
//
// Pure but for the disk; any thread.

#ifndef BELLWETHER_SERVER_STORE_WAL_READ_H_
#define BELLWETHER_SERVER_STORE_WAL_READ_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "server/store/file_system.h"
#include "server/store/log_backend.h"
#include "server/store/wal_recovery.h"

namespace bellwether::server {

// As LogBackend::Read(), with `until` given.
absl::Status ReadRecords(FileSystem* file_system, const std::vector<WalSegment>& segments, uint32_t salt, Lsn from,
                         Lsn until, const std::function<absl::Status(const WalRecord&)>& visit);

// As LogBackend::ReadHeads(): of records that were verified before.
absl::Status ReadRecordHeads(FileSystem* file_system, const std::vector<WalSegment>& segments, Lsn until,
                             const std::function<absl::Status(const WalRecord&)>& visit);

// Copies them from directory `from` to `to`, which is made; synced.
absl::Status CopySegments(FileSystem* file_system, const std::vector<WalSegment>& segments, const std::string& from,
                          const std::string& to);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_STORE_WAL_READ_H_
