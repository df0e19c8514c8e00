#include "server/store/wal_scan.h"

#include <algorithm>
#include <cstring>

namespace bellwether::server {
namespace {

// How far a record's LSN may lie beyond the expected one.  Bounds the chance
// that garbage gets as far as a checksum over megabytes.
constexpr Lsn kLsnJumpMax = Lsn{1} << 32;

uint64_t WordAt(std::string_view bytes, int64_t offset) {
  uint64_t word;
  std::memcpy(&word, bytes.data() + offset, sizeof(word));
  return word;
}

// The first valid record at or after `offset` with an LSN >= `expected`, or -1.
int64_t FindRecord(std::string_view segment, uint32_t salt, int64_t offset, Lsn expected, RecordView* record) {
  const auto size = static_cast<int64_t>(segment.size());
  for (; offset + kRecordHeaderBytes <= size; offset += 8) {
    if (WordAt(segment, offset) == 0) continue;
    const Lsn lsn = WordAt(segment, offset + 8);
    if (lsn < expected || lsn - expected > kLsnJumpMax) continue;
    if (ParseRecord(segment.substr(static_cast<size_t>(offset)), salt, record)) return offset;
  }
  return -1;
}

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
  for (;;) {
    RecordView record;
    bool valid = ParseRecord(segment.substr(static_cast<size_t>(scan.end)), salt, &record);
    if (valid) {
      const bool is_gap = record.kind == WalKind::kNone && record.control == WalControl::kGap;
      valid = is_gap ? record.seq == scan.next_lsn && record.lsn >= scan.next_lsn : record.lsn == scan.next_lsn;
    }
    if (!valid) {
      const int64_t found = FindRecord(segment, salt, scan.end + kRecordHeaderBytes, scan.next_lsn, &record);
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
