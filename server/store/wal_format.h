// wal_format.h: the bytes of the log.
//
// A segment is a file <number>-<salt>.wal, both in hexadecimal.  It has a
// header of kSegmentHeaderBytes (two copies, so that one damaged sector does
// not hide a segment), then records without gaps, then zeros.
// Earlier servers wrote given-up files again.  In such a file an older segment's records
// lie behind the end instead of zeros.  Their LSNs are below this segment's first one, and
// so they are never taken for its own.
//
//   header, each copy, little-endian
//    0 magic         8 u32 version        12 u64 number   20 u64 first_lsn
//   28 i64 segment_bytes                  36 u32 crc32c of the salt and all before
//   40 12 bytes that earlier servers wrote where the file was a segment before; ignored
//
//   record, 8-aligned, little-endian
//    0 u32 len       of all that follows crc, without the padding
//    4 u32 crc32c    of the salt and the `len` bytes from offset 8
//    8 u64 lsn      16 u64 durable_lsn   24 u64 run   32 u64 epoch   40 u64 seq
//   48 u32 rank     52 u32 attempt       56 u8 kind   57 u8 control  58 u48 time, Unix ms
//   64 payload, zero-padded to 8
//
// The salt is random per log.  A record inside another record's payload, which
// a client could send on purpose, is therefore never taken for a record.
//
// Pure; any thread.

#ifndef BELLWETHER_SERVER_STORE_WAL_FORMAT_H_
#define BELLWETHER_SERVER_STORE_WAL_FORMAT_H_

#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>

#include "server/store/wal.h"

namespace bellwether::server {

inline constexpr int64_t kSegmentHeaderBytes = 4096;
inline constexpr int64_t kRecordHeaderBytes = 64;
inline constexpr uint32_t kWalVersion = 1;

struct SegmentHeader {
  uint32_t version = kWalVersion;
  uint64_t number = 0;  // 1, 2, 3, ...
  Lsn first_lsn = 0;
  int64_t segment_bytes = 0;
};
std::string EncodeSegmentHeader(const SegmentHeader& header, uint32_t salt);
// From the first kSegmentHeaderBytes; either copy will do.  nullopt if neither.
std::optional<SegmentHeader> DecodeSegmentHeader(std::string_view bytes, uint32_t salt);

std::string SegmentName(uint64_t number, uint32_t salt);
bool ParseSegmentName(std::string_view name, uint64_t* number, uint32_t* salt);

// The content of a record of kind kNone.
enum class WalControl : uint8_t {
  kCover = 0,  // Nothing but its durable_lsn.
  kKeep = 1,   // Segments below number `seq` were given up; it begins at LSN `epoch`.
  kGap = 2,    // LSNs from `seq` to its own were lost: cut out by a repair, or missing at its end.
};

// A record in a buffer.
struct RecordView {
  Lsn lsn = 0;
  Lsn durable_lsn = 0;
  WalKind kind = WalKind::kNone;
  WalControl control = WalControl::kCover;
  uint64_t run = 0;
  uint32_t rank = 0;
  uint32_t attempt = 0;
  uint64_t epoch = 0;
  uint64_t seq = 0;
  int64_t time_unix_ms = 0;  // 0..2^48-1
  std::string_view payload;
};

// Of a record, which must outlive its view, and what the log adds.
RecordView ViewOf(const WalRecord& record, Lsn durable = 0);
// All but the payload, which not every reader wants.
void FillRecord(const RecordView& view, WalRecord* record);

// Eight of a log's bytes as the number that they are; [offset, offset + 8) lies within.
inline uint64_t WordAt(std::string_view bytes, int64_t offset) {
  uint64_t word;
  std::memcpy(&word, bytes.data() + offset, sizeof(word));
  return word;
}

// With header and padding.
constexpr int64_t RecordBytes(size_t payload_bytes) {
  return (kRecordHeaderBytes + static_cast<int64_t>(payload_bytes) + 7) & ~int64_t{7};
}
void AppendRecord(const RecordView& record, uint32_t salt, std::string* out);
// Parses the record at the start of `bytes`; false if none that is whole and
// has the right checksum begins there.
bool ParseRecord(std::string_view bytes, uint32_t salt, RecordView* record);
// The same of a record that was verified before: without the checksum, and
// without `payload` where `bytes` ends before it does.  `*size` is all that the
// record takes.
bool ParseVerifiedRecord(std::string_view bytes, RecordView* record, int64_t* size);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_STORE_WAL_FORMAT_H_
