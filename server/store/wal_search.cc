#include "server/store/wal_search.h"

#include "bellwether/crc32c.h"

namespace bellwether::server {
namespace {

// How far a record's LSN may lie beyond the expected one.  Bounds the chance
// that garbage passes for a record.
constexpr Lsn kLsnJumpMax = Lsn{1} << 32;
constexpr int64_t kLsnAt = 8;  // What is checksummed begins there.

}  // namespace

WalSearch::WalSearch(std::string_view segment, uint32_t salt, int64_t begin)
    : segment_(segment),
      salt_(salt),
      salt_crc_(Crc32c({reinterpret_cast<const char*>(&salt), sizeof(salt)})),
      begin_(begin),
      crcs_(segment.substr(static_cast<size_t>(begin))) {}

int64_t WalSearch::Find(int64_t offset, Lsn expected, RecordView* record) {
  const auto size = static_cast<int64_t>(segment_.size());
  for (; offset + kRecordHeaderBytes <= size; offset += 8) {
    const uint64_t word = WordAt(segment_, offset);
    const auto len = static_cast<int64_t>(word & 0xffffffff);
    if (len < kRecordHeaderBytes - kLsnAt || len > size - offset - kLsnAt) continue;
    const Lsn lsn = WordAt(segment_, offset + kLsnAt), durable = WordAt(segment_, offset + 16);
    if (durable >= lsn || (lsn > expected && lsn - expected > kLsnJumpMax)) continue;
    const auto covered = static_cast<size_t>(offset + kLsnAt - begin_);
    if (crcs_.Extend(salt_crc_, covered, covered + static_cast<size_t>(len)) != word >> 32) continue;
    if (!ParseRecord(segment_.substr(static_cast<size_t>(offset)), salt_, record)) continue;
    if (lsn >= expected) return offset;
    offset += RecordBytes(record->payload.size()) - 8;
  }
  return -1;
}

}  // namespace bellwether::server
