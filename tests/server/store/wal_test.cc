// Goal: what the log reported durable is there after anything, once and in order.
// Method: a model of what was appended and reported, against a file system
// that cuts the power, loses pages, fails syncs and fills up (seeds printed);
// a child process on real files, killed at random.
#include "server/store/wal.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/support/fake_file_system.h"
#include "tests/support/temp_directory.h"
#include "tests/support/wal_log.h"

namespace bellwether::server {
namespace {

using ::testing::ElementsAre;

int Segments(FakeFileSystem* fs) {
  const auto names = *fs->List("/wal");
  return static_cast<int>(
      std::count_if(names.begin(), names.end(), [](const auto& name) { return absl::EndsWith(name, ".wal"); }));
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
    lsn = *wal->Append(WalRecord(record));
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

TEST(WalTest, RefusesBeyondPendingBytesUntilTheDiskRecovers) {
  FakeFileSystem fs;
  Wal::Options options = Small(&fs);
  options.pending_bytes_max = 8 << 10;
  const auto wal = MustOpen(options);
  fs.SetFull(true);
  // One segment may be prepared already; beyond it nothing can become durable.
  Lsn last = 0;
  absl::Status refused;
  for (int i = 0; i < 1000 && refused.ok(); ++i) {
    // Read before the record is offered: a writer that was merely busy may take the queue and only then find no room.
    const bool stuck = !wal->health().ok();
    const auto lsn = wal->Append(Record(std::string(1000, 'x')));
    if (lsn.ok()) {
      last = *lsn;
    } else if (stuck) {
      refused = lsn.status();
    } else {
      std::this_thread::yield();
      --i;
    }
  }
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted) << refused;
  EXPECT_EQ(wal->health().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(wal->Sync(last).code(), absl::StatusCode::kResourceExhausted) << "nobody may wait for a disk";
  WalRecord record = Record(std::string(1000, 'y'));
  EXPECT_FALSE(wal->Append(std::move(record)).ok());
  EXPECT_EQ(record.payload, std::string(1000, 'y')) << "a refused record is left as it was";
  fs.SetFull(false);
  while (!wal->health().ok()) std::this_thread::yield();
  EXPECT_TRUE(wal->Sync(last).ok());
  EXPECT_TRUE(wal->health().ok());
  AppendSynced(wal.get(), "after");
}

TEST(WalTest, HeldLogQueuesRecordsAndWritesThemInOrderLater) {
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

TEST(WalTest, LogHeldWhileWaitingToCoverWritesNothing) {
  FakeFileSystem fs;
  Wal::Options options = Small(&fs);
  options.cover_idle_us = 300'000;  // Nothing else is under way when it is held.
  const auto wal = MustOpen(options);
  AppendSynced(wal.get(), "before");
  std::this_thread::sleep_for(std::chrono::milliseconds(20));  // Its thread waits by now.
  wal->Hold(absl::ResourceExhaustedError("below the floor"));
  const Lsn durable = wal->durable_lsn();
  const auto held = wal->Append(Record("held"));
  ASSERT_TRUE(held.ok());
  std::this_thread::sleep_for(std::chrono::milliseconds(400));
  EXPECT_EQ(wal->durable_lsn(), durable);
  wal->Hold(absl::OkStatus());
  EXPECT_TRUE(wal->Sync(*held).ok());
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

TEST(WalTest, CopyIsAnIndependentLogOfDurableRecords) {
  FakeFileSystem fs;
  Wal::Options options = Small(&fs);
  options.cover_idle_us = 3'600'000'000;  // Of two LSNs in a row one is a record's.
  const auto wal = MustOpen(options);
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

TEST(WalTest, FsyncErrorIsFinalForAllLaterRecords) {
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

TEST(WalTest, TruncateRemovesWholeSegmentsAndMissingOnesAreNoticed) {
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

TEST(WalTest, UnremovableSegmentsGoAtTheNextStart) {
  int failed = 0;
  for (bool fails = true; fails; ++failed) {
    SCOPED_TRACE(testing::Message() << failed << " changes before");
    FakeFileSystem fs;
    const Wal::Options options = Small(&fs);
    Lsn last = 0;
    {
      const auto wal = MustOpen(options);
      while (wal->bytes() < 5 * options.segment_bytes) last = AppendSynced(wal.get(), std::string(1000, 'x'));
      fs.FailDirectoryChange(failed + 1);
      fails = !wal->Truncate(last).ok();
      fs.FailDirectoryChange(0);
      EXPECT_EQ(wal->bytes(), options.segment_bytes);
      EXPECT_LE(Segments(&fs), fails ? 2 : 1) << "one at most that could not be removed";
      last = AppendSynced(wal.get(), "goes on");
    }
    EXPECT_GE(MustOpen(options)->recovery().last_lsn, last);
    EXPECT_EQ(Segments(&fs), 1);
  }
  EXPECT_EQ(failed, 6) << "four files and their folder";
}

TEST(WalTest, ReaderOfATruncatedSegmentIsToldSo) {
  FakeFileSystem fs;
  const Wal::Options options = Small(&fs);
  Lsn last = 0;
  {
    const auto wal = MustOpen(options);
    while (wal->bytes() < 5 * options.segment_bytes) last = AppendSynced(wal.get(), std::string(1000, 'x'));
  }
  const auto wal = MustOpen(options);
  int seen = 0;
  const auto visit = [&](const WalRecord&) { return seen++ == 0 ? wal->Truncate(last) : absl::OkStatus(); };
  const absl::Status read = wal->Read(1, last, visit);
  EXPECT_TRUE(absl::IsNotFound(read)) << read;
  EXPECT_GT(seen, 10) << "the first segment was open";
}

TEST(WalTest, AnotherSegmentSizeHoldsFromTheNextSegmentOn) {
  for (const int64_t size : {8 << 10, 32 << 10}) {
    SCOPED_TRACE(testing::Message() << "then of " << size << " bytes");
    FakeFileSystem fs;
    Wal::Options options = Small(&fs);
    {
      const auto wal = MustOpen(options);
      while (wal->bytes() < 3 * options.segment_bytes) AppendSynced(wal.get(), std::string(1000, 'x'));
    }
    const int64_t before = 3 * options.segment_bytes;
    options.segment_bytes = size;
    Lsn last = 0;
    {
      const auto wal = MustOpen(options);
      while (wal->bytes() < before + 2 * size) last = AppendSynced(wal.get(), std::string(1000, 'y'));
      EXPECT_EQ(wal->bytes(), before + 2 * size);
    }
    EXPECT_GE(MustOpen(options)->recovery().last_lsn, last);
  }
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
TEST(WalTest, NextSegmentIsZeroedWhenThisOneIsHalfFull) {
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
  for (int i = 0; i < 60'000 && !ready(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_TRUE(ready()) << "half of this one is full";
}

TEST(FileSystemTest, FileCreationEndsWhenItsCallbackRefuses) {
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
