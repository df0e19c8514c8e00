// Goal: what the log reported durable is there after anything, once and in
// order; what is damaged is never passed over in silence.
// Method: a model of what was appended and reported, against a file system
// that cuts the power, loses pages, fails syncs and fills up (seeds printed);
// single bytes flipped and files cut, removed and renamed; a child process on
// real files, killed at random.
#include "server/store/wal.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "server/store/wal_format.h"
#include "tests/support/fake_file_system.h"
#include "tests/support/temp_directory.h"

namespace bellwether::server {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

Wal::Options Small(FileSystem* fs, const std::string& directory = "/wal") {
  Wal::Options options;
  options.directory = directory;
  options.segment_bytes = 16 << 10;
  options.record_bytes_max = 2000;
  options.pending_bytes_max = 1 << 20;
  options.cover_idle_us = 1000;
  options.file_system = fs;
  return options;
}

WalRecord Record(const std::string& payload) {
  WalRecord record;
  record.kind = WalKind::kMessage;
  record.payload = payload;
  return record;
}

std::vector<std::string> ReadAll(const Wal& wal, Lsn from = 1, Lsn until = 0) {
  std::vector<std::string> payloads;
  const absl::Status status = wal.Read(from, until, [&payloads](const WalRecord& record) {
    payloads.push_back(record.payload);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
  return payloads;
}

std::unique_ptr<Wal> MustOpen(const Wal::Options& options, Wal::DurableCallback callback = nullptr) {
  auto wal = Wal::Open(options, std::move(callback));
  EXPECT_TRUE(wal.ok()) << wal.status();
  return wal.ok() ? *std::move(wal) : nullptr;
}

Lsn AppendSynced(Wal* wal, const std::string& payload) {
  const auto lsn = wal->Append(Record(payload));
  EXPECT_TRUE(lsn.ok()) << lsn.status();
  EXPECT_TRUE(wal->Sync(*lsn).ok());
  return *lsn;
}

TEST(WalTest, GivesBackEveryFieldInOrder) {
  FakeFileSystem fs;
  WalRecord record{.kind = WalKind::kHello,
                   .run = 7,
                   .rank = 8,
                   .attempt = 9,
                   .epoch = 10,
                   .seq = 11,
                   .time_unix_ms = (int64_t{1} << 48) - 1,
                   .payload = "x"};
  Lsn lsn = 0;
  {
    const auto wal = MustOpen(Small(&fs));
    lsn = *wal->Append(record);
    AppendSynced(wal.get(), "");
  }
  const auto wal = MustOpen(Small(&fs));
  std::vector<WalRecord> records;
  ASSERT_TRUE(wal->Read(1, 0,
                        [&](const WalRecord& r) {
                          records.push_back(r);
                          return absl::OkStatus();
                        })
                  .ok());
  ASSERT_EQ(records.size(), 2u);
  EXPECT_EQ(records[0].lsn, lsn);
  EXPECT_EQ(records[0].kind, WalKind::kHello);
  EXPECT_EQ(records[0].run, 7u);
  EXPECT_EQ(records[0].rank, 8u);
  EXPECT_EQ(records[0].attempt, 9u);
  EXPECT_EQ(records[0].epoch, 10u);
  EXPECT_EQ(records[0].seq, 11u);
  EXPECT_EQ(records[0].time_unix_ms, (int64_t{1} << 48) - 1);
  EXPECT_EQ(records[0].payload, "x");
  EXPECT_EQ(records[1].lsn, lsn + 1);
  EXPECT_EQ(wal->recovery().torn_bytes, 0);
}

TEST(WalTest, RefusesWhatIsTooLargeAndTakesTheLargest) {
  FakeFileSystem fs;
  const auto wal = MustOpen(Small(&fs));
  AppendSynced(wal.get(), std::string(2000, 'x'));
  EXPECT_EQ(wal->Append(Record(std::string(2001, 'x'))).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(wal->Append(WalRecord{}).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(wal->durable_lsn(), wal->last_lsn());
}

TEST(WalTest, RefusesOptionsThatCannotWork) {
  FakeFileSystem fs;
  Wal::Options options = Small(&fs);
  options.segment_bytes = 4096;
  EXPECT_EQ(Wal::Open(options, nullptr).status().code(), absl::StatusCode::kInvalidArgument);
  options = Small(&fs);
  options.pending_bytes_max = 100;
  EXPECT_EQ(Wal::Open(options, nullptr).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(WalTest, RefusesBeyondPendingBytesWhileTheDiskIsStuckAndGoesOnAfter) {
  FakeFileSystem fs;
  Wal::Options options = Small(&fs);
  options.pending_bytes_max = 8 << 10;
  const auto wal = MustOpen(options);
  fs.SetFull(true);
  // One segment may be prepared already; beyond it nothing can become durable.
  Lsn last = 0;
  absl::Status refused;
  for (int i = 0; i < 1000 && refused.ok(); ++i) {
    const auto lsn = wal->Append(Record(std::string(1000, 'x')));
    if (lsn.ok()) {
      last = *lsn;
    } else if (!wal->health().ok()) {
      refused = lsn.status();  // Stuck for want of a segment, not merely busy.
    } else {
      std::this_thread::yield();
      --i;
    }
  }
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted) << refused;
  EXPECT_EQ(wal->health().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(wal->Sync(last).code(), absl::StatusCode::kResourceExhausted) << "nobody may wait for a disk";
  fs.SetFull(false);
  while (!wal->health().ok()) std::this_thread::yield();
  EXPECT_TRUE(wal->Sync(last).ok());
  EXPECT_TRUE(wal->health().ok());
  AppendSynced(wal.get(), "after");
}

TEST(WalTest, AHeldLogTakesRecordsWritesNoneAndGoesOnInOrder) {
  FakeFileSystem fs;
  Wal::Options options = Small(&fs);
  options.pending_bytes_max = 8 << 10;
  const auto wal = MustOpen(options);
  const Lsn before = AppendSynced(wal.get(), "before");
  wal->Hold(absl::ResourceExhaustedError("below the floor"));
  EXPECT_EQ(std::string(wal->health().message()), "below the floor");
  EXPECT_TRUE(wal->Sync(before).ok());
  const auto held = wal->Append(Record("held"));
  ASSERT_TRUE(held.ok());
  EXPECT_EQ(wal->Sync(*held).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_FALSE(wal->Truncate(*held).ok());
  while (wal->Append(Record(std::string(1000, 'x'))).ok()) continue;  // What it may keep has an end.
  EXPECT_LT(wal->durable_lsn(), *held);
  wal->Hold(absl::OkStatus());
  ASSERT_TRUE(wal->Sync(wal->last_lsn()).ok());
  const auto all = ReadAll(*wal, 1, wal->last_lsn());
  ASSERT_GE(all.size(), 3u);
  EXPECT_EQ(all[0], "before");
  EXPECT_EQ(all[1], "held");
}

TEST(WalTest, HeadsAreThoseOfTheRecordsWithHellosWhole) {
  FakeFileSystem fs;
  const std::string hello(1500, 'h');
  {
    const auto wal = MustOpen(Small(&fs));
    for (uint64_t i = 1; i <= 100; ++i) {
      WalRecord record = Record(i % 10 == 0 ? hello : std::string(i * 13, 'm'));
      if (i % 10 == 0) record.kind = WalKind::kHello;
      record.seq = i;
      ASSERT_TRUE(wal->Append(std::move(record)).ok());
    }
  }
  const auto wal = MustOpen(Small(&fs));
  std::vector<std::pair<Lsn, uint64_t>> whole, heads;
  ASSERT_TRUE(wal->Read(1, 0,
                        [&](const WalRecord& record) {
                          whole.emplace_back(record.lsn, record.seq);
                          return absl::OkStatus();
                        })
                  .ok());
  ASSERT_TRUE(wal->ReadHeads([&](const WalRecord& record) {
                   heads.emplace_back(record.lsn, record.seq);
                   EXPECT_EQ(record.payload, record.kind == WalKind::kHello ? hello : "");
                   return absl::OkStatus();
                 })
                  .ok());
  EXPECT_EQ(whole.size(), 100u);
  EXPECT_EQ(heads, whole);
}

TEST(WalTest, ACopyIsALogOfItsOwnUpToWhatWasDurable) {
  FakeFileSystem fs;
  const auto wal = MustOpen(Small(&fs));
  for (int i = 0; i < 40; ++i) AppendSynced(wal.get(), absl::StrCat(i, std::string(1000, 'c')));
  ASSERT_TRUE(wal->Truncate(20).ok());
  const Lsn durable = wal->durable_lsn();
  std::atomic<bool> stop = false;
  std::thread writer([&] {
    while (!stop) (void)wal->Append(Record(std::string(700, 'n')));
  });
  const absl::Status copied = wal->CopyTo("/copy");
  stop = true;
  writer.join();
  ASSERT_TRUE(copied.ok()) << copied;
  const auto copy = MustOpen(Small(&fs, "/copy"));
  EXPECT_GT(copy->recovery().first_lsn, 1u);
  EXPECT_GE(copy->recovery().last_lsn, durable);
  EXPECT_EQ(copy->recovery().torn_bytes, 0);
  const auto all = ReadAll(*copy, durable - 1, durable);
  ASSERT_FALSE(all.empty());
  AppendSynced(copy.get(), "goes on");
}

TEST(WalTest, AnFsyncErrorIsFinalAndNothingAfterItIsDurable) {
  FakeFileSystem fs;
  std::atomic<Lsn> told = 0;
  {
    const auto wal = MustOpen(Small(&fs), [&told](Lsn lsn) { told = lsn; });
    const Lsn good = AppendSynced(wal.get(), "good");
    // The record that covers "good" must not be the one that fails.
    while (wal->durable_lsn() <= good) std::this_thread::yield();
    fs.FailNextSync();
    const auto lost = wal->Append(Record("lost"));
    ASSERT_TRUE(lost.ok());
    EXPECT_FALSE(wal->Sync(*lost).ok());
    EXPECT_FALSE(wal->health().ok());
    EXPECT_LT(told.load(), *lost);
    EXPECT_EQ(wal->Append(Record("refused")).status().code(), absl::StatusCode::kUnavailable);
  }
  EXPECT_THAT(ReadAll(*MustOpen(Small(&fs))), ElementsAre("good"));
}

TEST(WalTest, AShortWriteIsATornTail) {
  FakeFileSystem fs;
  {
    const auto wal = MustOpen(Small(&fs));
    const Lsn good = AppendSynced(wal.get(), "good");
    while (wal->durable_lsn() <= good) std::this_thread::yield();
    fs.FailNextWrite();
    const auto lost = wal->Append(Record(std::string(1000, 'y')));
    EXPECT_FALSE(wal->Sync(*lost).ok());
  }
  const auto wal = MustOpen(Small(&fs));
  EXPECT_GT(wal->recovery().torn_bytes, 0);
  EXPECT_THAT(ReadAll(*wal), ElementsAre("good"));
}

TEST(WalTest, TruncateForgetsWholeSegmentsAndAMissingOneIsStillNoticed) {
  FakeFileSystem fs;
  Lsn last = 0;
  {
    const auto wal = MustOpen(Small(&fs));
    for (int i = 0; i < 60; ++i) last = AppendSynced(wal.get(), std::string(1000, static_cast<char>('a' + i % 26)));
    const int64_t before = wal->bytes();
    ASSERT_TRUE(wal->Truncate(last).ok());
    EXPECT_LT(wal->bytes(), before);
    EXPECT_FALSE(ReadAll(*wal, last, last).empty());
    for (int i = 0; i < 60; ++i) last = AppendSynced(wal.get(), std::string(1000, 'z'));
  }
  const auto names = *fs.List("/wal");
  ASSERT_GE(names.size(), 3u);
  { EXPECT_GT(MustOpen(Small(&fs))->recovery().first_lsn, 1u); }
  ASSERT_TRUE(fs.Remove("/wal/" + names[0]).ok());
  EXPECT_EQ(Wal::Open(Small(&fs), nullptr).status().code(), absl::StatusCode::kDataLoss);
}

TEST(WalTest, TheTailBeginsWithASegmentThatFits) {
  FakeFileSystem fs;
  const Wal::Options options = Small(&fs);
  const auto wal = MustOpen(options);
  EXPECT_EQ(wal->TailBegin(0), 0);  // The only segment is the newest.
  while (wal->bytes() < 4 * options.segment_bytes) AppendSynced(wal.get(), std::string(1000, 'x'));
  const Lsn newest = wal->TailBegin(0), three = wal->TailBegin(3 * options.segment_bytes);
  EXPECT_EQ(wal->TailBegin(options.segment_bytes), newest);
  EXPECT_EQ(wal->TailBegin(4 * options.segment_bytes - 1), three);
  EXPECT_EQ(wal->TailBegin(4 * options.segment_bytes), 0);
  EXPECT_LT(1, three);
  EXPECT_LT(three, newest);
  ASSERT_TRUE(wal->Truncate(three).ok());
  EXPECT_EQ(wal->bytes(), 3 * options.segment_bytes);
}

// Acknowledgements wait behind whatever is written beside them.
TEST(WalTest, TheNextSegmentIsZeroedWhileThisOneFillsAndNotBefore) {
  FakeFileSystem fs;
  const auto wal = MustOpen(Small(&fs));
  const auto ready = [&fs] {
    const auto names = *fs.List("/wal");
    return std::count(names.begin(), names.end(), "next.tmp") == 1;
  };
  AppendSynced(wal.get(), std::string(1000, 'x'));
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_FALSE(ready());
  for (int i = 0; i < 7; ++i) AppendSynced(wal.get(), std::string(1000, 'x'));
  for (int i = 0; i < 10'000 && !ready(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_TRUE(ready()) << "half of this one is full";
}

TEST(FileSystemTest, WhoCreatesAFileSaysWhetherToGoOn) {
  TempDirectory directory;
  const std::string path = directory.path() + "/zeros";
  std::vector<int64_t> asked;
  auto file = FileSystem::Real()->Create(path, 1 << 20, [&asked](int64_t written) {
    asked.push_back(written);
    return true;
  });
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(*(*file)->Size(), 1 << 20);
  EXPECT_GT(asked.size(), 1u);
  EXPECT_EQ(asked.front(), 0);
  EXPECT_TRUE(std::is_sorted(asked.begin(), asked.end()));
  const auto stopped = FileSystem::Real()->Create(path, 1 << 20, [](int64_t written) { return written == 0; });
  EXPECT_TRUE(absl::IsCancelled(stopped.status())) << stopped.status();
  EXPECT_FALSE(std::filesystem::exists(path));
}

// Appends at random, cuts the power at random, keeps arbitrary pages.
TEST(WalTest, ModelWhatWasReportedDurableSurvivesEveryCrash) {
  const uint32_t first_seed = 20261121;
  for (uint32_t seed = first_seed; seed < first_seed + 40; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937 random(seed);
    FakeFileSystem fs;
    std::map<Lsn, std::string> appended;  // By LSN; a lost one's number is given again.
    Lsn kept_from = 1;
    for (int life = 0; life < 6; ++life) {
      std::atomic<Lsn> durable = 0;
      {
        auto opened = Wal::Open(Small(&fs), [&durable](Lsn lsn) { durable = lsn; });
        ASSERT_TRUE(opened.ok()) << opened.status();
        const std::unique_ptr<Wal> wal = *std::move(opened);
        std::map<Lsn, std::string> found;
        ASSERT_TRUE(wal->Read(1, 0,
                              [&found](const WalRecord& record) {
                                EXPECT_TRUE(found.empty() || record.lsn > found.rbegin()->first);
                                found[record.lsn] = record.payload;
                                return absl::OkStatus();
                              })
                        .ok());
        for (const auto& [lsn, payload] : appended) {
          if (lsn < kept_from || lsn > wal->recovery().last_lsn) continue;
          ASSERT_EQ(found.count(lsn), 1u) << "LSN " << lsn << " is gone";
          ASSERT_EQ(found[lsn], payload);
        }
        for (const auto& [lsn, payload] : found) ASSERT_EQ(appended.count(lsn), 1u) << "LSN " << lsn << " is made up";
        appended.erase(appended.upper_bound(wal->recovery().last_lsn), appended.end());

        const int writes = static_cast<int>(random() % 60);
        for (int i = 0; i < writes; ++i) {
          const std::string payload(random() % 1500, static_cast<char>('a' + random() % 26));
          const auto lsn = wal->Append(Record(payload));
          ASSERT_TRUE(lsn.ok()) << lsn.status();
          appended[*lsn] = payload;
          if (random() % 4 == 0) {
            ASSERT_TRUE(wal->Sync(*lsn).ok());
          }
          if (random() % 30 == 0 && wal->Truncate(*lsn / 2).ok()) kept_from = std::max(kept_from, *lsn / 2);
        }
        fs.CutPower();
      }
      fs.Restart(random);
      const auto again = Wal::Open(Small(&fs), nullptr);
      ASSERT_TRUE(again.ok()) << again.status();
      ASSERT_GE((*again)->recovery().last_lsn, durable.load()) << "reported durable, and lost";
      appended.erase(appended.upper_bound((*again)->recovery().last_lsn), appended.end());
    }
  }
}

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

TEST_F(WalDamageTest, EveryFlippedFieldOfARecordIsCorruptionWithItsLsn) {
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

void CheckLog(const Wal::Options& options, Lsn reported) {
  const auto wal = MustOpen(options);
  ASSERT_NE(wal, nullptr);
  EXPECT_GE(wal->recovery().last_lsn, reported);
  Lsn before = 0;
  const auto visit = [&before](const WalRecord& record) {
    EXPECT_GT(record.lsn, before);
    before = record.lsn;
    return absl::OkStatus();
  };
  EXPECT_TRUE(wal->Read(1, 0, visit).ok());
}

// The child reports every durable LSN through a pipe and dies without notice.
TEST(WalKillTest, NothingReportedDurableIsLostInTwentyKills) {
  TempDirectory directory;
  Wal::Options options = Small(nullptr, directory.path() + "/wal");
  options.segment_bytes = 256 << 10;
  std::mt19937 random(4711);
  for (int round = 0; round < 20; ++round) {
    int pipe_fds[2];
    ASSERT_EQ(::pipe(pipe_fds), 0);
    const pid_t child = ::fork();
    if (child == 0) {
      ::close(pipe_fds[0]);
      auto wal = Wal::Open(options, [fd = pipe_fds[1]](Lsn lsn) {
        if (::write(fd, &lsn, sizeof(lsn)) != sizeof(lsn)) ::_exit(3);
      });
      if (!wal.ok()) ::_exit(2);
      for (;;) {
        const auto lsn = (*wal)->Append(Record(std::string(500, 'k')));
        if (!lsn.ok() && !(*wal)->Sync((*wal)->last_lsn()).ok()) ::_exit(4);
      }
    }
    ::close(pipe_fds[1]);
    Lsn reported = 0, lsn = 0;
    const int reports = 1 + static_cast<int>(random() % 40);
    for (int i = 0; i < reports && ::read(pipe_fds[0], &lsn, sizeof(lsn)) == sizeof(lsn); ++i) reported = lsn;
    ::kill(child, SIGKILL);
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status)) << "the child ended by itself: " << WEXITSTATUS(status);
    while (::read(pipe_fds[0], &lsn, sizeof(lsn)) == sizeof(lsn)) reported = lsn;
    ::close(pipe_fds[0]);
    // Read by a child, too: this process must have no thread where it forks.
    const pid_t reader = ::fork();
    if (reader == 0) {
      CheckLog(options, reported);
      std::fflush(nullptr);
      ::_exit(testing::Test::HasFailure() ? 1 : 0);
    }
    ASSERT_EQ(::waitpid(reader, &status, 0), reader);
    ASSERT_TRUE(WIFEXITED(status));
    ASSERT_EQ(WEXITSTATUS(status), 0) << "round " << round;
  }
}

TEST(WalTest, ManyThreadsGetEachLsnOnce) {
  FakeFileSystem fs;
  const auto wal = MustOpen(Small(&fs));
  std::vector<std::thread> threads;
  std::vector<std::vector<Lsn>> lsns(4);
  for (size_t t = 0; t < lsns.size(); ++t) {
    threads.emplace_back([&wal, &mine = lsns[t]] {
      for (int i = 0; i < 200; ++i) mine.push_back(AppendSynced(wal.get(), "thread"));
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::vector<Lsn> all;
  for (const auto& mine : lsns) {
    EXPECT_TRUE(std::is_sorted(mine.begin(), mine.end()));
    all.insert(all.end(), mine.begin(), mine.end());
  }
  std::sort(all.begin(), all.end());
  EXPECT_EQ(std::unique(all.begin(), all.end()), all.end());
  EXPECT_EQ(ReadAll(*wal, 1, wal->last_lsn()).size(), 800u);
  std::vector<double> seconds;
  wal->TakeSyncSeconds(&seconds);
  EXPECT_FALSE(seconds.empty());
  wal->TakeSyncSeconds(&seconds);
  EXPECT_LE(seconds.size(), 1u);  // A cover record at most.
}

}  // namespace
}  // namespace bellwether::server
