// A log of valid records with arbitrary damage is opened, refused, or repaired;
// what is opened is a log that goes on, and nothing that it holds is made up.
//
// The input is the number of records, then for each damage where it is and what.

#include <algorithm>
#include <map>
#include <string>

#include "server/store/wal_format.h"
#include "server/store/wal_recovery.h"
#include "tests/fuzz/fuzz.h"
#include "tests/support/fake_file_system.h"

namespace bellwether::server {
namespace {

constexpr int64_t kSegment = 8192;
constexpr uint32_t kSalt = 7;

// Segment `number` with `records` records from `lsn` on; their payloads say their LSN.
std::string MakeSegment(uint64_t number, Lsn lsn, int records) {
  std::string bytes = EncodeSegmentHeader({.number = number, .first_lsn = lsn, .segment_bytes = kSegment}, kSalt);
  for (int i = 0; i < records; ++i, ++lsn) {
    const std::string payload(static_cast<size_t>(lsn % 90), static_cast<char>(lsn));
    AppendRecord(
        {.lsn = lsn, .durable_lsn = lsn - 1, .kind = WalKind::kMessage, .run = 1, .seq = lsn, .payload = payload},
        kSalt, &bytes);
  }
  bytes.resize(static_cast<size_t>(kSegment), '\0');
  return bytes;
}

void Damage(FuzzInput* input, std::string* bytes) {
  const size_t at = input->Take<uint16_t>() % bytes->size();
  const std::string_view with = input->TakeBytes(1 + input->Take<uint8_t>() % 16);
  switch (input->Take<uint8_t>() % 4) {
    case 0:
      bytes->replace(at, std::min(with.size(), bytes->size() - at), with.substr(0, bytes->size() - at));
      break;
    case 1:
      bytes->resize(at);  // Cut.
      bytes->resize(std::max<size_t>(bytes->size(), 1), '\0');
      break;
    case 2:
      std::fill(bytes->begin() + static_cast<ptrdiff_t>(at), bytes->end(), '\0');  // Never written.
      break;
    default:
      bytes->replace(at, std::min<size_t>(64, bytes->size() - at),
                     std::string(std::min<size_t>(64, bytes->size() - at), '\0'));
  }
}

absl::StatusOr<RecoveredWal> Open(FakeFileSystem* fs, bool repair) {
  Wal::Options options;
  options.directory = "/wal";
  options.segment_bytes = kSegment;
  options.repair = repair;
  return RecoverWal(options, fs);
}

}  // namespace
}  // namespace bellwether::server

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace bellwether::server;
  bellwether::FuzzInput input(data, size);
  FakeFileSystem fs;
  const int segments = 1 + input.Take<uint8_t>() % 3;
  Lsn lsn = 1;
  for (int i = 0; i < segments; ++i) {
    const int records = input.Take<uint8_t>() % 24;
    std::string bytes = MakeSegment(static_cast<uint64_t>(i) + 1, lsn, records);
    lsn += static_cast<Lsn>(records);
    for (int damages = input.Take<uint8_t>() % 4; damages > 0; --damages) Damage(&input, &bytes);
    if (input.Take<uint8_t>() % 16 == 15) continue;  // The file is missing.
    const auto file =
        fs.Create("/wal/" + SegmentName(static_cast<uint64_t>(i) + 1, kSalt), static_cast<int64_t>(bytes.size()));
    FUZZ_CHECK(file.ok() && (*file)->WriteAt(0, bytes).ok() && (*file)->Sync().ok());
  }
  auto opened = Open(&fs, /*repair=*/false);
  if (!opened.ok()) {
    FUZZ_CHECK(absl::IsDataLoss(opened.status()) || absl::IsFailedPrecondition(opened.status()));
    opened = Open(&fs, /*repair=*/true);
    if (!opened.ok()) return 0;  // Files of two logs, or swapped: nothing is changed.
    FUZZ_CHECK(!opened->recovery.lost.empty());
  }
  // A second look finds the same, and nothing to repair.
  const auto again = Open(&fs, /*repair=*/false);
  FUZZ_CHECK(again.ok());
  FUZZ_CHECK(again->next_lsn == opened->next_lsn && again->recovery.torn_bytes == 0);
  for (const WalSegment& segment : again->segments) {
    const auto file = fs.Open(segment.path);
    std::string bytes(static_cast<size_t>(segment.end - kSegmentHeaderBytes), '\0');
    FUZZ_CHECK(file.ok() && *(*file)->ReadAt(kSegmentHeaderBytes, bytes.size(), bytes.data()) == bytes.size());
    for (std::string_view rest = bytes; !rest.empty();) {
      RecordView record;
      FUZZ_CHECK(ParseRecord(rest, kSalt, &record));
      if (record.kind == WalKind::kMessage) {
        FUZZ_CHECK(record.seq == record.lsn && record.payload.size() == record.lsn % 90);
      }
      rest.remove_prefix(static_cast<size_t>(RecordBytes(record.payload.size())));
    }
  }
  return 0;
}
