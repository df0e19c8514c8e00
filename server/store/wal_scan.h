// wal_scan.h: what one segment holds, record by record, and what is broken.
//
// Pure; any thread.

#ifndef BELLWETHER_SERVER_STORE_WAL_SCAN_H_
#define BELLWETHER_SERVER_STORE_WAL_SCAN_H_

#include <cstdint>
#include <string_view>
#include <vector>

#include "server/store/wal_format.h"

namespace bellwether::server {

// Bytes [begin, end) hold no valid record, though `from` to `to` belong there.
struct SegmentHole {
  int64_t begin = 0, end = 0;
  Lsn from = 0, to = 0;
};

struct SegmentScan {
  Lsn next_lsn = 0;  // After the last valid record.
  int64_t end = 0;   // Offset there.
  uint64_t records = 0;
  Lsn durable_lsn = 0;             // The highest that a valid record states.
  int64_t dirty_bytes = 0;         // From `end` to the last byte that is not zero.
  std::vector<SegmentHole> holes;  // Rising; each is followed by a valid record.
  uint64_t keep_segment = 0;       // Of the newest kKeep record, 0 = none.
  Lsn keep_lsn = 0;
};

// Scans the whole segment (header included) whose first record is `first_lsn`.
SegmentScan ScanSegment(std::string_view segment, uint32_t salt, Lsn first_lsn);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_STORE_WAL_SCAN_H_
