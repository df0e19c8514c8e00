#include "server/store/wal_scan.h"

#include <algorithm>
#include <optional>

#include "server/store/wal_search.h"

namespace bellwether::server {
namespace {

int64_t DirtyBytes(std::string_view tail) {
  auto size = static_cast<int64_t>(tail.size());
  while (size >= 8 && WordAt(tail, size - 8) == 0) size -= 8;
  while (size > 0 && tail[static_cast<size_t>(size - 1)] == 0) --size;
  return size;
}

}  // namespace

SegmentScan ScanSegment(std::string_view segment, uint32_t salt, Lsn first_lsn) {
  SegmentScan scan;
  scan.next_lsn = first_lsn;
  scan.end = kSegmentHeaderBytes;
  if (static_cast<int64_t>(segment.size()) <= scan.end) return scan;
  std::optional<WalSearch> search;
  for (;;) {
    RecordView record;
    bool valid = ParseRecord(segment.substr(static_cast<size_t>(scan.end)), salt, &record);
    if (valid) {
      const bool is_gap = record.kind == WalKind::kNone && record.control == WalControl::kGap;
      // A gap may be of no record: a repair's of garbage between two that follow each other.
      valid = is_gap ? record.seq == scan.next_lsn && record.lsn + 1 >= scan.next_lsn : record.lsn == scan.next_lsn;
    }
    if (!valid) {
      if (!search) search.emplace(segment, salt, scan.end);
      // A repair's gap record needs the first bytes.
      const int64_t found = search->Find(scan.end + kRecordHeaderBytes, scan.next_lsn, &record);
      if (found < 0) break;
      // A gap record of an earlier repair may begin below its own LSN.
      const bool is_gap = record.kind == WalKind::kNone && record.control == WalControl::kGap;
      const Lsn first = is_gap ? std::max(record.seq, scan.next_lsn) : record.lsn;
      scan.holes.push_back({scan.end, found, scan.next_lsn, first - 1});
      scan.end = found;
    }
    if (record.kind == WalKind::kNone && record.control == WalControl::kKeep) {
      scan.keep_segment = record.seq;
      scan.keep_lsn = record.epoch;
    }
    ++scan.records;
    scan.durable_lsn = std::max(scan.durable_lsn, record.durable_lsn);
    scan.next_lsn = record.lsn + 1;
    scan.end += RecordBytes(record.payload.size());
    if (scan.end >= static_cast<int64_t>(segment.size())) break;
  }
  scan.end = std::min(scan.end, static_cast<int64_t>(segment.size()));
  scan.dirty_bytes = DirtyBytes(segment.substr(static_cast<size_t>(scan.end)));
  return scan;
}

}  // namespace bellwether::server
