// A log of valid records with arbitrary damage is opened, refused, or repaired;
// what is opened is a log that goes on, and nothing that it holds is made up.
//
// The input is the number of segments, from 128 on with the 16 bytes that all payloads
// are made of, then for each segment the number of records, from 128 on in a file that
// an earlier server had used for a segment before, and for each damage where it is and what.

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
constexpr uint64_t kFirstNumber = 4;  // Segments below it, with LSNs below kFirst, were given up:
constexpr Lsn kFirst = 1000;          // that says the first record of the last segment.
constexpr uint64_t kRun = 1, kGivenUpRun = 2;

// Their payloads say their LSN, by their length and, if they are made of nothing else,
// by each byte.
void AppendRecords(uint64_t run, Lsn lsn, int records, std::string_view words, std::string* bytes) {
  for (int i = 0; i < records; ++i, ++lsn) {
    std::string payload(static_cast<size_t>(lsn % 90), static_cast<char>(lsn));
    if (!words.empty()) {
      for (size_t k = 0; k < payload.size(); ++k) payload[k] = words[k % words.size()];
    }
    AppendRecord(
        {.lsn = lsn, .durable_lsn = lsn - 1, .kind = WalKind::kMessage, .run = run, .seq = lsn, .payload = payload},
        kSalt, bytes);
  }
}

std::string GivenUpRecord(Lsn lsn) {
  std::string bytes;
  AppendRecord({.lsn = lsn, .durable_lsn = lsn - 1, .control = WalControl::kKeep, .epoch = kFirst, .seq = kFirstNumber},
               kSalt, &bytes);
  return bytes;
}

// Segment `number` with `records` records from `lsn` on.
std::string MakeSegment(uint64_t number, Lsn lsn, int records, bool last, bool used_before, std::string_view words) {
  std::string bytes = EncodeSegmentHeader({.number = number, .first_lsn = lsn, .segment_bytes = kSegment}, kSalt);
  std::string given_up = bytes;
  if (last) bytes += GivenUpRecord(lsn);
  AppendRecords(kRun, last ? lsn + 1 : lsn, records, words, &bytes);
  AppendRecords(kGivenUpRun, 1 + number, used_before ? 36 : 0, words, &given_up);
  if (given_up.size() > bytes.size()) bytes += given_up.substr(bytes.size());
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
  options.group_bytes_max = 512;
  options.record_bytes_max = 100;
  options.repair = repair;
  return RecoverWal(options, fs);
}

}  // namespace
}  // namespace bellwether::server

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace bellwether::server;
  bellwether::FuzzInput input(data, size);
  FakeFileSystem fs;
  const auto shape = input.Take<uint8_t>();
  const int segments = 1 + shape % 3;
  const std::string_view words = shape >= 128 ? input.TakeBytes(16) : std::string_view();
  Lsn lsn = kFirst;
  // Whether anything whole says where the log begins: the header of its first segment, or
  // the record of what was given up.
  bool begun = false, header_there = false, begin_told = true;
  for (int i = 0; i < segments; ++i) {
    const auto what = input.Take<uint8_t>();
    const int records = what % 24;
    const uint64_t number = kFirstNumber + static_cast<uint64_t>(i);
    const bool last = i + 1 == segments;
    std::string bytes = MakeSegment(number, lsn, records, last, what >= 128, words);
    for (int damages = input.Take<uint8_t>() % 4; damages > 0; --damages) Damage(&input, &bytes);
    const bool missing = input.Take<uint8_t>() % 16 == 15;
    const std::string_view whole(bytes);
    const size_t begin = std::min(whole.size(), static_cast<size_t>(kSegmentHeaderBytes));
    if (last && (missing || !whole.substr(begin).starts_with(GivenUpRecord(lsn)))) begin_told = false;
    lsn += static_cast<Lsn>(records);
    if (missing) continue;
    // The first that is there says itself where it begins, unless its header is lost.
    if (!begun && number != kFirstNumber) begin_told = false;
    if (!begun && DecodeSegmentHeader(whole.substr(0, begin), kSalt)) header_there = true;
    begun = true;
    const auto file = fs.Create("/wal/" + SegmentName(number, kSalt), static_cast<int64_t>(bytes.size()));
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
        FUZZ_CHECK(record.run == kRun || (!header_there && !begin_told));
      }
      rest.remove_prefix(static_cast<size_t>(RecordBytes(record.payload.size())));
    }
  }
  return 0;
}
