#include "server/store/wal_format.h"

#include <cstddef>
#include <cstring>

#include "absl/strings/str_format.h"
#include "bellwether/crc32c.h"
#include "server/util/byte_io.h"

namespace bellwether::server {
namespace {

constexpr std::string_view kMagic("BWwal\r\n\0", 8);
constexpr size_t kHeaderCopyAt[] = {0, static_cast<size_t>(kSegmentHeaderBytes / 2)};

struct RecordHeader {
  uint32_t len, crc;
  uint64_t lsn, durable_lsn, run, epoch, seq;
  uint32_t rank, attempt;
  uint8_t kind, control, time[6];
};
static_assert(sizeof(RecordHeader) == kRecordHeaderBytes && offsetof(RecordHeader, lsn) == 8);
constexpr size_t kLenMin = sizeof(RecordHeader) - offsetof(RecordHeader, lsn);

uint32_t Checksum(uint32_t salt, std::string_view bytes) {
  return ExtendCrc32c(Crc32c({reinterpret_cast<const char*>(&salt), sizeof(salt)}), bytes);
}

std::optional<SegmentHeader> DecodeCopy(std::string_view bytes, uint32_t salt) {
  ByteReader in(bytes);
  if (in.GetRaw(kMagic.size()) != kMagic) return std::nullopt;
  SegmentHeader header;
  header.version = in.Get<uint32_t>();
  header.number = in.Get<uint64_t>();
  header.first_lsn = in.Get<uint64_t>();
  header.segment_bytes = in.Get<int64_t>();
  const size_t covered = bytes.size() - in.remaining();
  const auto crc = in.Get<uint32_t>();
  if (!in.ok() || crc != Checksum(salt, bytes.substr(0, covered))) return std::nullopt;
  return header;
}

void FillView(const RecordHeader& header, RecordView* record) {
  record->lsn = header.lsn;
  record->durable_lsn = header.durable_lsn;
  record->kind = static_cast<WalKind>(header.kind);
  record->control = static_cast<WalControl>(header.control);
  record->run = header.run;
  record->rank = header.rank;
  record->attempt = header.attempt;
  record->epoch = header.epoch;
  record->seq = header.seq;
  record->time_unix_ms = 0;
  std::memcpy(&record->time_unix_ms, header.time, sizeof(header.time));
}

}  // namespace

std::string EncodeSegmentHeader(const SegmentHeader& header, uint32_t salt) {
  std::string copy(kMagic);
  ByteWriter out(&copy);
  out.Put(header.version);
  out.Put(header.number);
  out.Put(header.first_lsn);
  out.Put(header.segment_bytes);
  out.Put(Checksum(salt, copy));
  std::string bytes(static_cast<size_t>(kSegmentHeaderBytes), '\0');
  for (const size_t at : kHeaderCopyAt) bytes.replace(at, copy.size(), copy);
  return bytes;
}

std::optional<SegmentHeader> DecodeSegmentHeader(std::string_view bytes, uint32_t salt) {
  for (const size_t at : kHeaderCopyAt) {
    if (at >= bytes.size()) break;
    if (const auto header = DecodeCopy(bytes.substr(at), salt)) return header;
  }
  return std::nullopt;
}

std::string SegmentName(uint64_t number, uint32_t salt) { return absl::StrFormat("%016x-%08x.wal", number, salt); }

bool ParseSegmentName(std::string_view name, uint64_t* number, uint32_t* salt) {
  if (name.size() != 29) return false;
  *number = 0;
  *salt = 0;
  for (size_t i = 0; i < 25; ++i) {
    if (i == 16) continue;
    const char c = name[i];
    const int digit = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
    if (digit < 0) return false;
    if (i < 16) {
      *number = *number << 4 | static_cast<uint64_t>(digit);
    } else {
      *salt = *salt << 4 | static_cast<uint32_t>(digit);
    }
  }
  return name == SegmentName(*number, *salt);
}

RecordView ViewOf(const WalRecord& record, Lsn durable) {
  return {.lsn = record.lsn,
          .durable_lsn = durable,
          .kind = record.kind,
          .run = record.run,
          .rank = record.rank,
          .attempt = record.attempt,
          .epoch = record.epoch,
          .seq = record.seq,
          .time_unix_ms = record.time_unix_ms,
          .payload = record.payload};
}

void FillRecord(const RecordView& view, WalRecord* record) {
  record->lsn = view.lsn;
  record->kind = view.kind;
  record->run = view.run;
  record->rank = view.rank;
  record->attempt = view.attempt;
  record->epoch = view.epoch;
  record->seq = view.seq;
  record->time_unix_ms = view.time_unix_ms;
}

void AppendRecord(const RecordView& record, uint32_t salt, std::string* out) {
  const size_t begin = out->size();
  RecordHeader header{};
  header.len = static_cast<uint32_t>(kLenMin + record.payload.size());
  header.lsn = record.lsn;
  header.durable_lsn = record.durable_lsn;
  header.run = record.run;
  header.epoch = record.epoch;
  header.seq = record.seq;
  header.rank = record.rank;
  header.attempt = record.attempt;
  header.kind = static_cast<uint8_t>(record.kind);
  header.control = static_cast<uint8_t>(record.control);
  std::memcpy(header.time, &record.time_unix_ms, sizeof(header.time));
  out->append(reinterpret_cast<const char*>(&header), sizeof(header));
  out->append(record.payload);
  const uint32_t crc = Checksum(salt, std::string_view(*out).substr(begin + offsetof(RecordHeader, lsn), header.len));
  std::memcpy(out->data() + begin + offsetof(RecordHeader, crc), &crc, sizeof(crc));
  out->append(static_cast<size_t>(RecordBytes(record.payload.size())) - (out->size() - begin), '\0');
}

bool ParseRecord(std::string_view bytes, uint32_t salt, RecordView* record) {
  RecordHeader header;
  if (bytes.size() < sizeof(header)) return false;
  std::memcpy(&header, bytes.data(), sizeof(header));
  if (header.len < kLenMin || header.len > bytes.size() - offsetof(RecordHeader, lsn)) return false;
  if (header.lsn == 0 || header.durable_lsn >= header.lsn) return false;
  if (header.crc != Checksum(salt, bytes.substr(offsetof(RecordHeader, lsn), header.len))) return false;
  FillView(header, record);
  record->payload = bytes.substr(sizeof(header), header.len - kLenMin);
  return true;
}

bool ParseVerifiedRecord(std::string_view bytes, RecordView* record, int64_t* size) {
  RecordHeader header;
  if (bytes.size() < sizeof(header)) return false;
  std::memcpy(&header, bytes.data(), sizeof(header));
  if (header.len < kLenMin || header.lsn == 0) return false;
  FillView(header, record);
  const size_t payload_bytes = header.len - kLenMin;
  record->payload =
      bytes.size() - sizeof(header) < payload_bytes ? std::string_view() : bytes.substr(sizeof(header), payload_bytes);
  *size = RecordBytes(payload_bytes);
  return true;
}

}  // namespace bellwether::server
