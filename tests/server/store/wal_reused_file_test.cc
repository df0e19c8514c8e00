// Goal: a log of an earlier server, which wrote given-up files again, is read: the records
// are the new segment's alone, and what is damaged is told from what is torn and from old.
// Method: such files made by hand with an old segment's records behind their own; any part
// of the record that was under way on the disk, each field of others flipped, files cut.
#include <gmock/gmock.h>

#include <algorithm>
#include <cstring>

#include "bellwether/crc32c.h"
#include "server/store/wal_format.h"
#include "server/store/wal_recovery.h"
#include "server/store/wal_scan.h"
#include "tests/support/fake_file_system.h"
#include "tests/support/wal_log.h"

namespace bellwether::server {
namespace {

using ::testing::HasSubstr;

constexpr uint32_t kSalt = 7;
constexpr int64_t kBytes = 16 << 10;
constexpr Lsn kFirst = 100;
constexpr size_t kPayload = 1000;
const int64_t kRecord = RecordBytes(kPayload);
constexpr size_t kSecondHeader = kSegmentHeaderBytes / 2;

// Durable: all before it.
std::string RecordOf(Lsn lsn, const std::string& word, uint64_t epoch = 1) {
  std::string payload, bytes;
  while (payload.size() < kPayload) payload += word;  // Differs wherever it is cut.
  payload.resize(kPayload);
  AppendRecord({.lsn = lsn, .durable_lsn = lsn - 1, .kind = WalKind::kMessage, .epoch = epoch, .payload = payload},
               kSalt, &bytes);
  return bytes;
}

// Segment 4, which says that all before it were given up, with LSNs 90 to 99, and 5, from
// LSN 100 on, whose file was one of those before: full of their records.
class WalReusedFileTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string fourth = EncodeSegmentHeader({.number = 4, .first_lsn = 90, .segment_bytes = kBytes}, kSalt);
    AppendRecord({.lsn = 90, .durable_lsn = 89, .control = WalControl::kKeep, .epoch = 90, .seq = 4}, kSalt, &fourth);
    for (Lsn lsn = 91; lsn < kFirst; ++lsn) fourth += RecordOf(lsn, "fourth");
    fourth.resize(kBytes, '\0');
    Put(4, fourth);
    fifth_ = EncodeSegmentHeader({.number = 5, .first_lsn = kFirst, .segment_bytes = kBytes}, kSalt);
    for (const size_t copy : {size_t{0}, kSecondHeader}) {  // How much was under way at most, and a checksum.
      const int64_t in_flight_bytes_max = 4096;
      std::memcpy(fifth_.data() + copy + 40, &in_flight_bytes_max, sizeof(in_flight_bytes_max));
      const uint32_t crc = ExtendCrc32c(Crc32c({reinterpret_cast<const char*>(&kSalt), sizeof(kSalt)}),
                                        std::string_view(fifth_).substr(copy, 48));
      std::memcpy(fifth_.data() + copy + 48, &crc, sizeof(crc));
    }
    for (Lsn lsn = 1; static_cast<int64_t>(fifth_.size()) + kRecord <= kBytes; ++lsn) fifth_ += RecordOf(lsn, "old");
    fifth_.resize(kBytes, '\0');
    Put(5, fifth_);
  }

  void Put(uint64_t number, const std::string& bytes) {
    const auto file = fs_.Create("/wal/" + SegmentName(number, kSalt), static_cast<int64_t>(bytes.size()));
    ASSERT_TRUE((*file)->WriteAt(0, bytes).ok() && (*file)->Sync().ok());
  }
  // Segment 5 with so many records; behind them what was there before.
  std::string Fifth(int records) {
    std::string bytes = fifth_;
    for (int i = 0; i < records; ++i) {
      bytes.replace(At(i), static_cast<size_t>(kRecord), RecordOf(kFirst + static_cast<Lsn>(i), "new"));
    }
    return bytes;
  }
  static size_t At(int record) { return static_cast<size_t>(kSegmentHeaderBytes + record * kRecord); }
  std::string Now() {
    const auto file = fs_.Open("/wal/" + SegmentName(5, kSalt));
    std::string bytes(static_cast<size_t>(*(*file)->Size()), '\0');
    EXPECT_EQ(*(*file)->ReadAt(0, bytes.size(), bytes.data()), bytes.size());
    return bytes;
  }
  bool TailIsZeros(int records) {
    const std::string tail = Now().substr(At(records));
    return tail == std::string(tail.size(), '\0');
  }
  absl::StatusOr<RecoveredWal> Recover(bool repair = false) {
    Wal::Options options = SmallGroups(&fs_);
    options.repair = repair;
    return RecoverWal(options, &fs_);
  }
  // Opens without complaint, holds this many records of segment 5 and nothing else.
  void ExpectFifth(int records) {
    const auto found = Recover();
    ASSERT_TRUE(found.ok()) << found.status();
    EXPECT_EQ(found->next_lsn, kFirst + static_cast<Lsn>(records));
    EXPECT_EQ(found->segments.back().end, static_cast<int64_t>(At(records)));
    EXPECT_TRUE(TailIsZeros(records));
    const auto wal = MustOpen(SmallGroups(&fs_));
    EXPECT_EQ(wal->recovery().torn_bytes, 0);
    std::vector<std::string> words;
    for (const std::string& payload : ReadAll(*wal, kFirst)) words.push_back(payload.substr(0, 3));
    EXPECT_EQ(words, std::vector<std::string>(static_cast<size_t>(records), "new"));
    ASSERT_TRUE(wal->Close().ok());
  }

  FakeFileSystem fs_;
  std::string fifth_;
};

TEST_F(WalReusedFileTest, OldRecordsAreNotTakenAndZeroedOnce) {
  for (int records = 0; records <= 10; ++records) {
    SCOPED_TRACE(testing::Message() << records << " records");
    Put(5, Fifth(records));
    ExpectFifth(records);
  }
  // Nor behind a segment that is not the last: there is nothing to write.
  std::string sixth = EncodeSegmentHeader({.number = 6, .first_lsn = kFirst + 3, .segment_bytes = kBytes}, kSalt);
  sixth.resize(kBytes, '\0');
  Put(5, Fifth(3));
  Put(6, sixth);
  EXPECT_EQ(Recover()->recovery.torn_bytes, 0);
  EXPECT_TRUE(Now() == Fifth(3));
}

// Of the record that was under way some bytes are on the disk, the old record's elsewhere.
TEST_F(WalReusedFileTest, TornRecordBeforeAnOldOneNeverComesBack) {
  for (const int before : {0, 2}) {
    const Lsn lsn = kFirst + static_cast<Lsn>(before);
    const std::string lost = RecordOf(lsn, "lost"), next = RecordOf(lsn, "lost", /*epoch=*/2);
    for (const size_t n : {0, 8, 16, 24, 64, 512, 1024, 1056}) {
      SCOPED_TRACE(testing::Message() << before << " records before, the first " << n << " bytes");
      std::string bytes = Fifth(before);
      bytes.replace(At(before), n, lost.substr(0, n));
      Put(5, bytes);
      const auto found = Recover();
      ASSERT_TRUE(found.ok()) << found.status();
      EXPECT_EQ(found->next_lsn, lsn);
      EXPECT_TRUE(TailIsZeros(before));
      // A trainer sends the same again; of that only the payload is written before a crash.
      bytes = Now();
      bytes.replace(At(before) + 64, next.size() - 64, next.substr(64));
      Put(5, bytes);
      EXPECT_EQ(Recover()->next_lsn, lsn);
    }
    for (const size_t n : {8, 16, 64, 512, 1056}) {
      SCOPED_TRACE(testing::Message() << before << " records before, all but the first " << n << " bytes");
      std::string bytes = Fifth(before);
      bytes.replace(At(before) + n, lost.size() - n, lost.substr(n));
      Put(5, bytes);
      EXPECT_EQ(Recover()->next_lsn, lsn);
      EXPECT_TRUE(TailIsZeros(before));
    }
  }
}

TEST_F(WalReusedFileTest, TornGroupEndsAtItsFirstGap) {
  std::string bytes = Fifth(6);
  // LSN 103 was not written, 104 and 105 were, none of them with a word that it is durable.
  for (int i = 3; i < 6; ++i) {
    std::string record;
    AppendRecord({.lsn = kFirst + static_cast<Lsn>(i),
                  .durable_lsn = kFirst + 2,
                  .kind = WalKind::kMessage,
                  .payload = std::string(kPayload, 'g')},
                 kSalt, &record);
    bytes.replace(At(i), record.size(), i == 3 ? fifth_.substr(At(i), record.size()) : record);
  }
  Put(5, bytes);
  ExpectFifth(3);
}

TEST_F(WalReusedFileTest, ADamagedDurableRecordIsCorruptionAndRepairLosesIt) {
  for (const size_t field : {0, 4, 8, 16, 24, 32, 40, 48, 52, 56, 57, 64, 1063}) {
    SCOPED_TRACE(testing::Message() << "field " << field);
    std::string bytes = Fifth(5);
    bytes[At(2) + field] ^= 0x10;
    Put(5, bytes);
    const absl::Status status = Recover().status();
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("LSN 102."));
    EXPECT_TRUE(Now() == bytes);
  }
  const auto repaired = Recover(/*repair=*/true);
  ASSERT_TRUE(repaired.ok()) << repaired.status();
  EXPECT_THAT(repaired->recovery.lost, testing::EndsWith(": LSN 102"));
  EXPECT_EQ(repaired->next_lsn, kFirst + 5);
  const auto wal = MustOpen(SmallGroups(&fs_));
  EXPECT_EQ(wal->recovery().torn_bytes, 0);
  EXPECT_EQ(ReadAll(*wal, kFirst).size(), 4u);
}

// Records that were never written over lie in between, those of the log's own, too: one
// that says what was given up, and a repair's, larger than anything that is under way.
TEST_F(WalReusedFileTest, ARecordBehindLostOnesAndOldOnesIsFound) {
  std::string old;
  AppendRecord({.lsn = 3, .durable_lsn = 2, .control = WalControl::kKeep, .epoch = 1000, .seq = 900}, kSalt, &old);
  const std::string zeros(static_cast<size_t>(5 * kRecord - 2 * kRecordHeaderBytes), '\0');
  AppendRecord({.lsn = 60, .control = WalControl::kGap, .seq = 4, .payload = zeros}, kSalt, &old);
  ASSERT_EQ(old.size(), static_cast<size_t>(5 * kRecord));
  for (const bool own : {false, true}) {
    SCOPED_TRACE(own ? "the log's own records" : "a client's");
    std::string bytes = Fifth(8);
    bytes.replace(At(2), old.size(), own ? old : fifth_.substr(At(2), old.size()));
    Put(5, bytes);
    const absl::Status status = Recover().status();
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("LSN 102-106."));
    const auto repaired = Recover(/*repair=*/true);
    ASSERT_TRUE(repaired.ok()) << repaired.status();
    EXPECT_THAT(repaired->recovery.lost, testing::EndsWith(": LSN 102-106"));
    EXPECT_EQ(repaired->next_lsn, kFirst + 8);
    EXPECT_EQ(ReadAll(*MustOpen(SmallGroups(&fs_)), kFirst).size(), 3u);
  }
}

// Where a segment without its header begins says the record of what was given up, not
// what its file holds.
TEST_F(WalReusedFileTest, LostHeaderRevivesNoRecordsOfAnEarlierUse) {
  for (const bool next_too : {false, true}) {
    SCOPED_TRACE(next_too ? "that of the next, too" : "one");
    std::string fourth = fifth_;
    fourth.replace(0, static_cast<size_t>(kSegmentHeaderBytes), static_cast<size_t>(kSegmentHeaderBytes), '\0');
    Put(4, fourth);
    std::string fifth = EncodeSegmentHeader({.number = 5, .first_lsn = 90, .segment_bytes = kBytes}, kSalt);
    AppendRecord({.lsn = 90, .durable_lsn = 89, .control = WalControl::kKeep, .epoch = 90, .seq = 4}, kSalt, &fifth);
    for (Lsn lsn = 91; lsn < 95; ++lsn) fifth += RecordOf(lsn, "fifth");
    fifth.resize(kBytes, '\0');
    if (next_too) std::fill_n(fifth.begin(), kSegmentHeaderBytes, '\0');
    Put(5, fifth);
    const auto found = Recover();
    ASSERT_TRUE(found.ok()) << found.status();
    EXPECT_EQ(found->recovery.records, 5u);
    EXPECT_EQ(found->next_lsn, 95u);
    EXPECT_EQ(ReadAll(*MustOpen(SmallGroups(&fs_))).size(), 4u);
  }
}

// No crash leaves this: but what a repair calls repaired can be opened.
TEST_F(WalReusedFileTest, GarbageBetweenRecordsCanBeRepaired) {
  for (const size_t garbage : {size_t{64}, size_t{1064}}) {
    SCOPED_TRACE(testing::Message() << garbage << " bytes");
    std::string bytes = Fifth(5);
    bytes.insert(At(2), std::string(garbage, 'g'));
    bytes.resize(kBytes);
    Put(5, bytes);
    const absl::Status status = Recover().status();
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("garbage between records"));
    const auto repaired = Recover(/*repair=*/true);
    ASSERT_TRUE(repaired.ok()) << repaired.status();
    EXPECT_EQ(repaired->next_lsn, kFirst + 5);
    EXPECT_EQ(ReadAll(*MustOpen(SmallGroups(&fs_)), kFirst).size(), 5u);
  }
}

// Each of a million words says that a record of 4 MiB begins there.  With a checksum for
// each over what it says this takes a quarter of an hour.
TEST(WalScanTest, APayloadThatLooksLikeHeadersIsReadOnce) {
  constexpr int64_t kSegment = 16 << 20;
  constexpr Lsn kNext = 1'000'000;
  const uint64_t words[] = {4 << 20, kNext + 10'000'000};
  std::string pattern;
  while (pattern.size() < 12 << 20) pattern.append(reinterpret_cast<const char*>(words), sizeof(words));
  const auto record = [](Lsn lsn, std::string_view payload) {
    std::string bytes;
    AppendRecord({.lsn = lsn, .durable_lsn = lsn - 1, .kind = WalKind::kMessage, .payload = payload}, kSalt, &bytes);
    return bytes;
  };
  const std::string_view words_of_old(pattern);
  const std::string own = record(kNext, "own");
  for (const size_t size : {size_t{100'000}, pattern.size()}) {
    SCOPED_TRACE(testing::Message() << "records of " << size);
    std::string bytes(static_cast<size_t>(kSegmentHeaderBytes), '\0');
    for (Lsn lsn = 1000; bytes.size() + size + 100 < static_cast<size_t>(kSegment); ++lsn) {
      bytes += record(lsn, words_of_old.substr(0, size));
    }
    bytes.resize(static_cast<size_t>(kSegment), '\0');
    bytes.replace(static_cast<size_t>(kSegmentHeaderBytes), own.size(), own);
    SegmentScan scan = ScanSegment(bytes, kSalt, kNext);
    EXPECT_EQ(scan.next_lsn, kNext + 1);
    EXPECT_TRUE(scan.holes.empty());
    // Nor does it hide a record behind it.
    const std::string last = record(kNext + 3, "last");
    const auto at = static_cast<size_t>(kSegment - 4096);
    bytes.replace(at, last.size(), last);
    scan = ScanSegment(bytes, kSalt, kNext);
    EXPECT_EQ(scan.next_lsn, kNext + 4);
    ASSERT_EQ(scan.holes.size(), 1u);
    EXPECT_EQ(scan.holes[0].end, static_cast<int64_t>(at));
  }
}

// Nobody said that the last record is durable: a torn tail, as in a file of zeros.
TEST_F(WalReusedFileTest, DamageBehindWhatIsDurableChangesNothingBefore) {
  for (const size_t field : {0, 4, 8, 16, 56, 64, 1063}) {
    SCOPED_TRACE(testing::Message() << "field " << field);
    std::string bytes = Fifth(5);
    bytes[At(4) + field] ^= 0x10;
    Put(5, bytes);
    EXPECT_EQ(Recover()->next_lsn, kFirst + 4);
    EXPECT_EQ(Recover()->recovery.torn_bytes, 0);
  }
  for (size_t at = At(5); at < static_cast<size_t>(kBytes); at += 500) {
    std::string bytes = Fifth(5);
    bytes[at] ^= 0x10;
    Put(5, bytes);
    ExpectFifth(5);
  }
}

TEST_F(WalReusedFileTest, RepairOfACutSegmentTakesNoOldRecords) {
  for (const size_t size : {size_t{100}, At(2) + 100, At(5), At(7) + 100, static_cast<size_t>(kBytes) - 1}) {
    SCOPED_TRACE(testing::Message() << "cut to " << size);
    Put(5, Fifth(5).substr(0, size));
    EXPECT_EQ(Recover().status().code(), absl::StatusCode::kDataLoss);
    ASSERT_TRUE(Recover(/*repair=*/true).ok());
    const auto wal = MustOpen(SmallGroups(&fs_));
    EXPECT_GE(wal->last_lsn(), kFirst + 5) << "an LSN that was given must not be given again";
    for (const std::string& payload : ReadAll(*wal, kFirst)) EXPECT_EQ(payload.substr(0, 3), "new");
  }
}

TEST_F(WalReusedFileTest, ALostHeaderBringsBackNoOldRecord) {
  for (const int records : {0, 1, 4}) {
    for (const size_t field : {4, 20, 40, 48}) {
      SCOPED_TRACE(testing::Message() << records << " records, field " << field);
      std::string bytes = Fifth(records);
      for (const size_t copy : {size_t{0}, kSecondHeader}) {  // One, then both.
        bytes[copy + field] ^= 1;
        Put(5, bytes);
        ExpectFifth(records);
      }
    }
  }
}

// No honest disk leaves this: an earlier server wrote the new header before the new name.
TEST_F(WalReusedFileTest, AFileThatStillHasItsOldHeaderIsRefused) {
  std::string bytes = fifth_;
  const std::string header = EncodeSegmentHeader({.number = 3, .first_lsn = 1, .segment_bytes = kBytes}, kSalt);
  bytes.replace(0, header.size(), header);
  Put(5, bytes);
  const absl::Status status = Recover().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(status.message()), HasSubstr("holds segment 3"));
}

}  // namespace
}  // namespace bellwether::server
