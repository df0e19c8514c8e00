// wal.h: the write-ahead log, the durability path of a server that has a disk
// to itself.
//
// Records are appended by any thread, written and fsynced in groups by one, and
// reported durable in order.  Segments have `segment_bytes`, preallocated, and
// one header each.  A record is 8-aligned.  It carries its length, a CRC32C
// over all that follows, its LSN, and the LSN that was durable when it was
// written.  The latter separates a torn tail from corruption on recovery.
//
// A write or fsync error is final for the segment.  It is never retried, since
// the kernel may have dropped the dirty pages.  The log turns failed, reports
// it, and reports no more durability.

#ifndef BELLWETHER_SERVER_STORE_WAL_H_
#define BELLWETHER_SERVER_STORE_WAL_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/store/log_backend.h"

namespace bellwether::server {

class FileSystem;

// Thread-safe.
class Wal : public LogBackend {
 public:
  struct Options {
    std::string directory;
    int64_t segment_bytes = 64 << 20;
    int64_t group_bytes_max = 1 << 20;
    // A record that finds the log idle is written at once.  While several come
    // per group, the next group waits up to this long to be as large as the last.
    int64_t group_wait_us_max = 2000;
    int64_t record_bytes_max = (1 << 20) + 1024;
    // Append() refuses beyond this: RESOURCE_EXHAUSTED.
    int64_t pending_bytes_max = 64 << 20;
    bool repair = false;                // Cut corrupt ranges out instead of refusing to open.
    int64_t cover_idle_us = 10'000;     // Idle for this long: an empty record says that the last batch was durable.
    FileSystem* file_system = nullptr;  // nullptr = the real one; must outlive the log.
  };

  // Opens or creates; scans and verifies every record.  DATA_LOSS for
  // corruption (names segment, offset, LSN range) unless `repair`.
  // INVALID_ARGUMENT: options that contradict each other.  FAILED_PRECONDITION:
  // another process holds the directory.
  static absl::StatusOr<std::unique_ptr<Wal>> Open(const Options& options, DurableCallback on_durable);
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_STORE_WAL_H_
