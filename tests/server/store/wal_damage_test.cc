// Goal: what is damaged is never passed over in silence, a repair loses what it says and
// no more, and no LSN is given twice.
// Method: single bytes flipped and files cut, removed and renamed; a log that is told
// how far it went before it lost its end.
#include <gmock/gmock.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>

#include "server/store/wal.h"
#include "server/store/wal_format.h"
#include "tests/support/fake_file_system.h"
#include "tests/support/temp_directory.h"
#include "tests/support/wal_log.h"

namespace bellwether::server {
namespace {

using ::testing::HasSubstr;

class WalDamageTest : public testing::Test {
 protected:
  // Three segments and a bit, closed in order: everything is covered.
  void SetUp() override {
    Wal::Options options = Options();
    options.cover_idle_us = 3'600'000'000;  // On close only: offsets are known.
    const auto wal = MustOpen(options);
    for (int i = 0; i < 50; ++i) last_ = AppendSynced(wal.get(), std::string(1000, static_cast<char>('a' + i % 26)));
    ASSERT_TRUE(wal->Close().ok());
    for (const auto& entry : std::filesystem::directory_iterator(directory_.path() + "/wal")) {
      if (entry.path().extension() == ".wal") files_.push_back(entry.path().string());
    }
    std::sort(files_.begin(), files_.end());
    ASSERT_GE(files_.size(), 3u);
  }
  Wal::Options Options(bool repair = false) const {
    Wal::Options options = Small(nullptr, directory_.path() + "/wal");
    options.repair = repair;
    return options;
  }
  static void Flip(const std::string& path, int64_t offset) {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(offset);
    const char byte = static_cast<char>(file.get() ^ 0x10);
    file.seekp(offset);
    file.put(byte);
  }

  TempDirectory directory_;
  std::vector<std::string> files_;
  Lsn last_ = 0;
};

TEST_F(WalDamageTest, FlippedRecordFieldIsCorruptionNamingItsLsn) {
  // A record of 1,000 bytes takes 1,064: its header's fields, then its payload.
  const int64_t record = kSegmentHeaderBytes + 2 * RecordBytes(1000);
  for (const std::string& path : {files_.front(), files_.back()}) {
    for (const int64_t field : {0, 4, 8, 16, 24, 32, 40, 48, 52, 56, 57, 64, 1063}) {
      SCOPED_TRACE(testing::Message() << path << " field " << field);
      Flip(path, record + field);
      const absl::Status status = Wal::Open(Options(), nullptr).status();
      EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr("LSN"));
      Flip(path, record + field);
    }
  }
  EXPECT_EQ(ReadAll(*MustOpen(Options())).size(), 50u);
}

TEST_F(WalDamageTest, RepairLosesExactlyTheRecordAndSaysSo) {
  Flip(files_.front(), kSegmentHeaderBytes + 2 * RecordBytes(1000) + 100);
  const auto wal = MustOpen(Options(/*repair=*/true));
  EXPECT_THAT(wal->recovery().lost, testing::EndsWith(": LSN 3"));
  EXPECT_EQ(ReadAll(*wal).size(), 49u);
  EXPECT_GE(wal->last_lsn(), last_);
  AppendSynced(wal.get(), "new");
  ASSERT_TRUE(wal->Close().ok());
}

TEST_F(WalDamageTest, AMissingSegmentIsCorruptionAndRepairNamesItsRange) {
  std::filesystem::remove(files_[1]);
  EXPECT_EQ(Wal::Open(Options(), nullptr).status().code(), absl::StatusCode::kDataLoss);
  { EXPECT_THAT(MustOpen(Options(true))->recovery().lost, HasSubstr("missing: LSN ")); }
  const size_t left = ReadAll(*MustOpen(Options())).size();
  EXPECT_GT(left, 30u);
  EXPECT_LT(left, 50u);
}

TEST_F(WalDamageTest, ACutSegmentIsCorruptionWhereverItWasCut) {
  for (const std::string& path : {files_.front(), files_.back()}) {
    const auto copy = path + ".copy";
    std::filesystem::copy_file(path, copy);
    for (const uintmax_t size : {uintmax_t{0}, uintmax_t{100}, uintmax_t{5000}, uintmax_t{16383}}) {
      SCOPED_TRACE(testing::Message() << path << " cut to " << size);
      std::filesystem::resize_file(path, size);
      EXPECT_EQ(Wal::Open(Options(), nullptr).status().code(), absl::StatusCode::kDataLoss);
      std::filesystem::copy_file(copy, path, std::filesystem::copy_options::overwrite_existing);
    }
    std::filesystem::remove(copy);
  }
  std::filesystem::resize_file(files_.back(), 5000);
  {
    const auto wal = MustOpen(Options(true));
    EXPECT_THAT(wal->recovery().lost, HasSubstr("and all after it"));
    EXPECT_GT(wal->last_lsn(), last_) << "an LSN that was given must not be given again";
    AppendSynced(wal.get(), "new");
  }
  EXPECT_EQ(ReadAll(*MustOpen(Options())).back(), "new");
}

TEST_F(WalDamageTest, RepairReusesNoLsnWhenTheLastPaddingIsLost) {
  {
    const auto wal = MustOpen(Options());
    last_ = AppendSynced(wal.get(), std::string(1001, 'p'));
    ASSERT_EQ(wal->bytes() / Options().segment_bytes, static_cast<int64_t>(files_.size()));
    for (int i = 0; i < 3; ++i) last_ = AppendSynced(wal.get(), "lost");
  }
  std::ifstream file(files_.back(), std::ios::binary);
  const std::string bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  const size_t end = bytes.find(std::string(1001, 'p')) + 1001;
  ASSERT_NE(end % 8, 0u);
  std::filesystem::resize_file(files_.back(), end);
  {
    const auto wal = MustOpen(Options(/*repair=*/true));
    EXPECT_GT(wal->last_lsn(), last_);
  }
  EXPECT_EQ(ReadAll(*MustOpen(Options())).back(), std::string(1001, 'p'));
}

TEST_F(WalDamageTest, SwappedFilesAreRefusedAndLostHeadersAreNot) {
  Flip(files_[1], 20);
  EXPECT_EQ(ReadAll(*MustOpen(Options())).size(), 50u) << "the second copy of the header serves";
  Flip(files_[1], kSegmentHeaderBytes / 2 + 20);
  EXPECT_EQ(ReadAll(*MustOpen(Options())).size(), 50u) << "the name and the records tell the rest";
  std::filesystem::rename(files_[0], files_[0] + ".x");
  std::filesystem::rename(files_[1], files_[0]);
  std::filesystem::rename(files_[0] + ".x", files_[1]);
  EXPECT_EQ(Wal::Open(Options(true), nullptr).status().code(), absl::StatusCode::kDataLoss);
}

TEST_F(WalDamageTest, OneProcessHoldsTheDirectory) {
  const auto wal = MustOpen(Options());
  EXPECT_EQ(Wal::Open(Options(), nullptr).status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST(WalLostEndTest, ALogThatLostItsEndGoesOnAboveIt) {
  // With so many records the gap is the log's first, lies behind others, or begins a segment.
  for (const int records : {0, 5, 11}) {
    SCOPED_TRACE(testing::Message() << records << " records");
    FakeFileSystem fs;
    Wal::Options options = Small(&fs);
    options.cover_idle_us = 3'600'000'000;
    {
      const auto wal = MustOpen(options);
      for (int i = 0; i < records; ++i) AppendSynced(wal.get(), std::string(1000, 'x'));
      if (records == 11) AppendSynced(wal.get(), std::string(520, 'x'));  // Full to the last byte.
      EXPECT_EQ(wal->bytes(), options.segment_bytes);
      ASSERT_TRUE(wal->GoOnAbove(5'000'000'000).ok());
      EXPECT_EQ(wal->durable_lsn(), 5'000'000'000u);
      EXPECT_EQ(wal->bytes(), (records == 11 ? 2 : 1) * options.segment_bytes);
      ASSERT_TRUE(wal->GoOnAbove(70).ok());
      fs.CutPower();
    }
    std::mt19937 random(1);
    fs.Restart(random);
    {
      const auto wal = MustOpen(options);
      ASSERT_NE(wal, nullptr);
      EXPECT_EQ(wal->recovery().last_lsn, 5'000'000'000u);
      EXPECT_EQ(AppendSynced(wal.get(), "after"), 5'000'000'001u);
    }
    const auto wal = MustOpen(options);
    EXPECT_EQ(wal->recovery().torn_bytes, 0);
    EXPECT_EQ(ReadAll(*wal).size(), static_cast<size_t>(records == 11 ? 12 : records) + 1);
    EXPECT_EQ(ReadAll(*wal).back(), "after");
  }
}

}  // namespace
}  // namespace bellwether::server
