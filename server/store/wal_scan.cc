#include "server/store/wal_scan.h"

#include <algorithm>
#include <optional>

#include "server/store/wal_search.h"

namespace bellwether::server {
namespace {

// Of a file that was a segment before: `tail` is what a group under way may have
// reached.  What was there before has lower LSNs, and what a client put into its
// payloads hardly looks like this: the next LSN or one that still fits, written when
// all before it was durable and nothing before the segment was not.
int64_t BegunBytes(std::string_view tail, Lsn first_lsn, Lsn next_lsn) {
  const auto size = static_cast<int64_t>(tail.size());
  int64_t begun = 0;
  for (int64_t offset = 0; offset + kRecordHeaderBytes <= size; offset += 8) {
    const Lsn lsn = WordAt(tail, offset + 8), durable = WordAt(tail, offset + 16);
    if (lsn < next_lsn || lsn - next_lsn > static_cast<Lsn>(offset / kRecordHeaderBytes)) continue;
    if (durable >= next_lsn || durable + 1 < first_lsn) continue;
    RecordView record;
    int64_t bytes = 0;
    if (ParseVerifiedRecord(tail.substr(static_cast<size_t>(offset)), &record, &bytes) && bytes <= size - offset) {
      begun = std::max(begun, offset + bytes);
    }
  }
  return begun;
}

int64_t DirtyBytes(std::string_view tail) {
  auto size = static_cast<int64_t>(tail.size());
  while (size >= 8 && WordAt(tail, size - 8) == 0) size -= 8;
  while (size > 0 && tail[static_cast<size_t>(size - 1)] == 0) --size;
  return size;
}

}  // namespace

SegmentScan ScanSegment(std::string_view segment, uint32_t salt, Lsn first_lsn, int64_t in_flight_bytes_max) {
  SegmentScan scan;
  scan.next_lsn = first_lsn;
  scan.end = kSegmentHeaderBytes;
  if (static_cast<int64_t>(segment.size()) <= scan.end) return scan;
  std::optional<WalSearch> search;
  for (;;) {
    RecordView record;
    bool valid = ParseRecord(segment.substr(static_cast<size_t>(scan.end)), salt, &record);
    int64_t skip = kRecordHeaderBytes;
    if (valid) {
      if (record.lsn < scan.next_lsn) skip = RecordBytes(record.payload.size());
      const bool is_gap = record.kind == WalKind::kNone && record.control == WalControl::kGap;
      // A gap may be of no record: a repair's of garbage between two that follow each other.
      valid = is_gap ? record.seq == scan.next_lsn && record.lsn + 1 >= scan.next_lsn : record.lsn == scan.next_lsn;
    }
    if (!valid) {
      // A repair's gap record needs the first bytes; in an old one that is whole is no other.
      if (!search) search.emplace(segment, salt, scan.end);
      const int64_t found = search->Find(scan.end + skip, scan.next_lsn, &record);
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
  const std::string_view tail = segment.substr(static_cast<size_t>(scan.end));
  scan.dirty_bytes = in_flight_bytes_max == 0 ? DirtyBytes(tail)
                                              : BegunBytes(tail.substr(0, static_cast<size_t>(in_flight_bytes_max)),
                                                           first_lsn, scan.next_lsn);
  return scan;
}

}  // namespace bellwether::server
