// Goal: a segment that is written again brings back nothing of what it held, loses
// nothing of what it is given, and is told apart from a torn tail and from damage.
// Method: a model of what was appended and reported, against a file system that cuts
// the power at each change and keeps arbitrary pages; a child process on real files,
// killed at random.
#include <gmock/gmock.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <random>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/store/wal_format.h"
#include "server/store/wal_recovery.h"
#include "tests/support/fake_file_system.h"
#include "tests/support/temp_directory.h"
#include "tests/support/wal_kills.h"
#include "tests/support/wal_log.h"

namespace bellwether::server {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::vector<std::string> Names(FileSystem* fs, const std::string& ending) {
  std::vector<std::string> names = *fs->List("/wal");
  names.erase(std::remove_if(names.begin(), names.end(),
                             [&ending](const std::string& name) { return !absl::EndsWith(name, ending); }),
              names.end());
  std::sort(names.begin(), names.end());
  return names;
}
size_t Reserve(FileSystem* fs) {
  const auto names = Names(fs, ".tmp");
  return static_cast<size_t>(
      std::count_if(names.begin(), names.end(), [](const auto& name) { return absl::StartsWith(name, "reuse-"); }));
}

// Appends records of 1,000 bytes until so many segments are held.
Lsn Fill(Wal* wal, int segments, const std::string& word) {
  Lsn lsn = 0;
  while (wal->bytes() < segments * (int64_t{16} << 10)) lsn = AppendSynced(wal, word + std::string(1000, 'x'));
  return lsn;
}

void AwaitSpare(FileSystem* fs, size_t reserve) {
  while (Reserve(fs) > reserve) std::this_thread::yield();
}

TEST(WalReuseTest, AGivenUpSegmentIsWrittenAgainInsteadOfZeros) {
  FakeFileSystem fs;
  Wal::Options options = ReusingOptions(&fs);
  options.cover_idle_us = 3'600'000'000;  // No LSN but what is appended here.
  {
    const auto wal = MustOpen(options);
    const Lsn given_up = Fill(wal.get(), 5, "old");
    ASSERT_TRUE(wal->Truncate(given_up).ok());
    EXPECT_GE(Reserve(&fs), 3u);
    const Lsn first = wal->last_lsn() + 1, last = Fill(wal.get(), 5, "new");
    const auto all = ReadAll(*wal, first, last);
    EXPECT_EQ(all.size(), last - first + 1);
    for (const std::string& payload : all) EXPECT_TRUE(absl::StartsWith(payload, "new"));
  }
  EXPECT_THAT(Names(&fs, ".tmp"), IsEmpty());
  const auto names = Names(&fs, ".wal");
  ASSERT_EQ(names.size(), 5u);
  size_t used_before = 0;
  for (const std::string& name : names) used_before += HeaderOf(&fs, name).in_flight_bytes_max > 0 ? 1 : 0;
  EXPECT_GE(used_before, 3u);

  const std::string before = BytesOf(&fs, names.back());
  EXPECT_THAT(before, HasSubstr("oldxxx")) << "nothing old lies behind the end: the test has lost its point";
  for (int i = 0; i < 2; ++i) {
    const auto again = RecoverWal(options, &fs);
    ASSERT_TRUE(again.ok()) << again.status();
    EXPECT_EQ(again->recovery.torn_bytes, 0);
    const std::string after = BytesOf(&fs, names.back());
    const auto end = static_cast<size_t>(again->segments.back().end);
    const auto reach = static_cast<size_t>(InFlightBytesMax(options));
    const size_t untouched = std::min(end + reach, after.size());
    EXPECT_TRUE(after.substr(0, end) == before.substr(0, end));
    EXPECT_TRUE(after.substr(untouched) == before.substr(untouched));
  }
}

TEST(WalReuseTest, RegularlyTruncatedLogSoonNeedsFewZeros) {
  for (const bool reuse : {true, false}) {
    FakeFileSystem fs;
    Wal::Options options = ReusingOptions(&fs);
    if (!reuse) options.reuse_segments_max = 0;
    const auto wal = MustOpen(options);
    int64_t before = 0;
    for (int i = 0; i < 24; ++i) {
      if (i == 8) before = fs.zeros();
      // Given up when half of the next one is full of zeros already.
      for (int k = 0; k < 15; ++k) AppendSynced(wal.get(), std::string(1000, 'x'));
      ASSERT_TRUE(wal->Truncate(wal->last_lsn()).ok());
    }
    // Of 20 segments.  A file is too many for the reserve, and missed later, only where
    // the next segment was still in it when others were given up: at most every other time.
    const int64_t zeros = fs.zeros() - before;
    if (reuse) {
      EXPECT_LE(zeros, 8 * options.segment_bytes);
    } else {
      EXPECT_GE(zeros, 16 * options.segment_bytes);
    }
  }
}

TEST(WalReuseTest, ReserveIsBoundedByOptionAndLogSize) {
  FakeFileSystem fs;
  Wal::Options options = ReusingOptions(&fs);
  options.reuse_segments_max = 3;
  {
    const auto wal = MustOpen(options);
    ASSERT_TRUE(wal->Truncate(Fill(wal.get(), 7, "a")).ok());
    AwaitSpare(&fs, 3);
    EXPECT_GE(Reserve(&fs), 2u);
    EXPECT_EQ(wal->bytes(), options.segment_bytes) << "the reserve is no part of the log";
    // The log is short now: it needs less in reserve.
    while (wal->Truncate(wal->last_lsn()).ok() && Reserve(&fs) > 2) std::this_thread::yield();
    EXPECT_LE(Reserve(&fs), 2u);  // One of them perhaps the next segment already.
    wal->FreeRoom();
    EXPECT_LE(Reserve(&fs), 1u);
    AppendSynced(wal.get(), "goes on");
  }
  options.reuse_segments_max = 0;
  const auto wal = MustOpen(options);
  ASSERT_TRUE(wal->Truncate(Fill(wal.get(), 5, "b")).ok());
  EXPECT_EQ(Reserve(&fs), 0u);
  options.reuse_segments_max = -1;
  EXPECT_EQ(Wal::Open(options, nullptr).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(WalReuseTest, SegmentsOfAnotherSizeAreNotWrittenAgain) {
  for (const int64_t size : {8 << 10, 32 << 10}) {
    SCOPED_TRACE(testing::Message() << "then of " << size << " bytes");
    FakeFileSystem fs;
    Wal::Options options = ReusingOptions(&fs);
    Fill(MustOpen(options).get(), 5, "old");
    options.segment_bytes = size;
    Lsn last = 0;
    {
      const auto wal = MustOpen(options);
      while (wal->bytes() < 6 * (int64_t{16} << 10)) last = AppendSynced(wal.get(), std::string(1000, 'y'));
      ASSERT_TRUE(wal->Truncate(5).ok()) << "the first alone is of before";
      ASSERT_TRUE(wal->Truncate(last).ok());
      for (const std::string& name : Names(&fs, ".tmp")) {
        EXPECT_EQ(BytesOf(&fs, name).size(), static_cast<size_t>(size)) << name;
      }
      for (int i = 0; i < 60; ++i) {
        last = AppendSynced(wal.get(), std::string(1000, 'z'));
        if (i % 10 == 9) {
          ASSERT_TRUE(wal->Truncate(last).ok());
        }
      }
    }
    const auto again = MustOpen(options);
    ASSERT_NE(again, nullptr);
    EXPECT_GE(again->recovery().last_lsn, last);
  }
}

TEST(WalReuseTest, FailedTruncationKeepsNoReserve) {
  int failed = 0;
  for (bool fails = true; fails; ++failed) {
    SCOPED_TRACE(testing::Message() << failed << " changes before");
    FakeFileSystem fs;
    Lsn last = 0;
    {
      const auto wal = MustOpen(ReusingOptions(&fs));
      last = Fill(wal.get(), 5, "old");
      fs.FailDirectoryChange(failed + 1);
      fails = !wal->Truncate(last).ok();
      EXPECT_EQ(Reserve(&fs), fails ? 0u : 4u);
      EXPECT_LE(Names(&fs, ".wal").size(), fails ? 2u : 1u) << "one at most that could not be removed";
      fs.FailDirectoryChange(0);
      last = Fill(wal.get(), 3, "new");
      EXPECT_TRUE(wal->Truncate(last).ok());
    }
    EXPECT_GE(MustOpen(ReusingOptions(&fs))->recovery().last_lsn, last);
  }
  EXPECT_EQ(failed, 6) << "four names and their folder";
}

TEST(WalReuseTest, OnAFullDiskTheReserveServes) {
  FakeFileSystem fs;
  const auto wal = MustOpen(ReusingOptions(&fs));
  ASSERT_TRUE(wal->Truncate(Fill(wal.get(), 5, "old")).ok());
  fs.SetFull(true);
  Fill(wal.get(), 4, "new");
  EXPECT_TRUE(wal->health().ok());
}

TEST(WalReuseTest, SegmentsBeingReadAreNotOverwritten) {
  FakeFileSystem fs;
  const auto wal = MustOpen(ReusingOptions(&fs));
  const Lsn last = Fill(wal.get(), 5, "old");
  Lsn seen = 0;
  const absl::Status status = wal->Read(1, last, [&](const WalRecord& record) {
    EXPECT_TRUE(absl::StartsWith(record.payload, "old")) << record.payload.substr(0, 10);
    if (seen++ == 0) {
      EXPECT_TRUE(wal->Truncate(last).ok());
      EXPECT_EQ(Reserve(&fs), 0u);
    }
    return absl::OkStatus();
  });
  // As before there were reserves: the first segment was read, the second is gone.
  EXPECT_TRUE(absl::IsNotFound(status)) << status;
  EXPECT_GT(seen, 10u);
  ASSERT_TRUE(wal->Truncate(Fill(wal.get(), 5, "new")).ok());
  EXPECT_EQ(Reserve(&fs), 4u) << "nobody reads any more";
}

TEST(WalReuseTest, SegmentsReadForHeadsAreNotOverwritten) {
  FakeFileSystem fs;
  Fill(MustOpen(ReusingOptions(&fs)).get(), 5, "old");
  const auto wal = MustOpen(ReusingOptions(&fs));
  Lsn seen = 0;
  const absl::Status status = wal->ReadHeads([&](const WalRecord&) {
    if (seen++ == 0) {
      EXPECT_TRUE(wal->Truncate(wal->last_lsn()).ok());
      EXPECT_EQ(Reserve(&fs), 0u);
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(absl::IsNotFound(status)) << status;
  EXPECT_GT(seen, 10u);
}

TEST(WalReuseTest, CopyOfReusedSegmentsIsAnIndependentLog) {
  FakeFileSystem fs;
  const auto wal = MustOpen(ReusingOptions(&fs));
  ASSERT_TRUE(wal->Truncate(Fill(wal.get(), 5, "old")).ok());
  const Lsn last = Fill(wal.get(), 4, "new");
  ASSERT_TRUE(wal->CopyTo("/copy").ok());
  const auto copy = MustOpen(ReusingOptions(&fs, "/copy"));
  EXPECT_EQ(copy->recovery().torn_bytes, 0);
  EXPECT_GE(copy->recovery().last_lsn, last);
  EXPECT_EQ(ReadAll(*copy, 1, last), ReadAll(*wal, 1, last));
  AppendSynced(copy.get(), "goes on");
}

TEST(WalReuseTest, AShortWriteIsATornTailBeforeOldRecords) {
  FakeFileSystem fs;
  std::vector<std::string> before;
  {
    const auto wal = MustOpen(ReusingOptions(&fs));
    ASSERT_TRUE(wal->Truncate(Fill(wal.get(), 5, "old")).ok());
    Fill(wal.get(), 4, "new");
    const Lsn good = AppendSynced(wal.get(), "good");
    while (wal->durable_lsn() <= good) std::this_thread::yield();  // The record that covers it.
    before = ReadAll(*wal, 1, wal->durable_lsn());
    fs.FailNextWrite();
    const auto lost = wal->Append(Record(std::string(1000, 'y')));
    EXPECT_FALSE(wal->Sync(*lost).ok());
  }
  {
    const auto wal = MustOpen(ReusingOptions(&fs));
    EXPECT_EQ(wal->recovery().torn_bytes, RecordBytes(1000));
    EXPECT_EQ(ReadAll(*wal), before);
  }
  EXPECT_EQ(MustOpen(ReusingOptions(&fs))->recovery().torn_bytes, 0);
}

// ---- crashes ----

// What was appended to one log over its lives, and what it must have.
class Model {
 public:
  explicit Model(FakeFileSystem* fs, uint32_t seed) : options_(ReusingOptions(fs)), fs_(fs), random_(seed) {
    if (seed % 2 == 1) options_.group_bytes_max = 512;  // Less than many a record.
  }

  // One life: opens, compares, appends and truncates, until the power goes with the
  // `cut`-th change; false if it did not.
  bool Live(int64_t cut, int appends) {
    std::atomic<Lsn> durable = 0;
    Lsn opened_with = 0;
    fs_->CutPowerAt(cut);
    if (auto opened = Wal::Open(options_, [&durable](Lsn lsn) { durable = lsn; }); opened.ok()) {
      const std::unique_ptr<Wal> wal = *std::move(opened);
      opened_with = wal->recovery().last_lsn;
      Compare(*wal);
      ++life_;
      for (int i = 0; i < appends && fs_->has_power(); ++i) {
        const std::string payload = absl::StrCat("life ", life_, " record ", i, std::string(random_() % 1500, 'p'));
        const auto lsn = wal->Append(Record(payload));
        if (!lsn.ok()) break;
        appended_[*lsn] = payload;
        if (random_() % 3 == 0) (void)wal->Sync(*lsn);
        if (random_() % 25 == 0) {
          const Lsn keep = wal->durable_lsn() - std::min<Lsn>(wal->durable_lsn(), random_() % 30);
          kept_from_ = std::max(kept_from_, keep);  // Even if it fails: it may have been done.
          (void)wal->Truncate(keep);
        }
      }
      if (fs_->has_power()) (void)wal->Sync(wal->last_lsn());
    } else {
      EXPECT_FALSE(fs_->has_power()) << opened.status();
    }
    durable_ = std::max({durable_, durable.load(), opened_with});
    const bool went = !fs_->has_power();
    fs_->CutPower();
    fs_->Restart(random_);
    return went;
  }

  // Opens what the last crash left.
  void Check() {
    const auto wal = Wal::Open(options_, nullptr);
    ASSERT_TRUE(wal.ok()) << wal.status();
    Compare(**wal);
    for (const std::string& name : Names(fs_, ".wal")) reused_ += HeaderOf(fs_, name).in_flight_bytes_max > 0 ? 1 : 0;
  }

  size_t reused() const { return reused_; }

 private:
  void Compare(const Wal& wal) {
    const Lsn last = wal.recovery().last_lsn;
    EXPECT_GE(last, durable_) << "reported durable, and lost";
    appended_.erase(appended_.upper_bound(last), appended_.end());
    std::map<Lsn, std::string> found;
    const absl::Status status = wal.Read(1, 0, [&found](const WalRecord& record) {
      EXPECT_TRUE(found.empty() || record.lsn > found.rbegin()->first);
      found[record.lsn] = record.payload;
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
    for (const auto& [lsn, payload] : found) {
      const auto known = appended_.find(lsn);
      ASSERT_TRUE(known != appended_.end()) << "LSN " << lsn << " is made up";
      ASSERT_EQ(payload, known->second) << "LSN " << lsn << " is another's";
    }
    for (const auto& [lsn, payload] : appended_) {
      if (lsn < kept_from_) continue;
      ASSERT_EQ(found.count(lsn), 1u) << "LSN " << lsn << " is gone";
    }
  }

  Wal::Options options_;
  FakeFileSystem* const fs_;
  std::mt19937 random_;
  std::map<Lsn, std::string> appended_;  // By LSN; a lost one's number is given again.
  Lsn durable_ = 0, kept_from_ = 1;
  int life_ = 0;
  size_t reused_ = 0;
};

TEST(WalReuseTest, PowerLossNeitherLosesNorRevivesRecords) {
  const uint32_t first_seed = 20261123;
  size_t reused = 0;
  for (uint32_t seed = first_seed; seed < first_seed + 30; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937 random(seed);
    FakeFileSystem fs;
    Model model(&fs, seed);
    for (int life = 0; life < 12 && !testing::Test::HasFailure(); ++life) {
      model.Live(1 + static_cast<int64_t>(random() % 300), 200);
      // Every third is opened twice: what recovery writes is cut off, too.
      if (life % 3 != 0) model.Check();
    }
    reused += model.reused();
  }
  EXPECT_GT(reused, 100u) << "segments were hardly used again";
}

TEST(WalReuseTest, EachChangeOfTruncateAndRotateMayBeTheLast) {
  size_t reused = 0;
  for (int64_t cut = 1;; ++cut) {
    SCOPED_TRACE(testing::Message() << "cut " << cut);
    bool went = false;
    for (uint32_t seed = 0; seed < 4; ++seed) {
      FakeFileSystem fs;
      Model model(&fs, seed);
      model.Live(1'000'000, 150);  // Makes segments to give up.
      went |= model.Live(cut, 150);
      model.Check();
      reused += model.reused();
      ASSERT_FALSE(testing::Test::HasFailure()) << "seed " << seed;
    }
    if (!went) break;
  }
  EXPECT_GT(reused, 100u);
}

TEST(WalReuseTest, NothingIsLostAndNothingComesBackInTwentyKills) {
  TempDirectory directory;
  Wal::Options options = ReusingOptions(nullptr, directory.path() + "/wal");
  options.segment_bytes = 64 << 10;
  options.cover_idle_us = 3'600'000'000;  // No LSN but what is appended here, which holds its own.
  const auto live = [](Wal* wal) {
    for (;;) {
      const auto lsn = wal->Append(Record(absl::StrCat(wal->last_lsn() + 1, " ", std::string(900, 'k'))));
      if (!lsn.ok()) ::_exit(4);
      if (*lsn % 8 == 0 && !wal->Sync(*lsn).ok()) ::_exit(5);
      if (*lsn % 100 == 0 && !wal->Truncate(*lsn - 50).ok()) ::_exit(6);
    }
  };
  KillTwenty(options, /*reports_max=*/300, live, [&options](Lsn reported) {
    const auto wal = MustOpen(options);
    ASSERT_NE(wal, nullptr);
    EXPECT_GE(wal->recovery().last_lsn, reported);
    Lsn before = 0;
    EXPECT_TRUE(wal->Read(1, 0,
                          [&before](const WalRecord& record) {
                            EXPECT_GT(record.lsn, before);
                            before = record.lsn;
                            EXPECT_TRUE(absl::StartsWith(record.payload, absl::StrCat(record.lsn, " ")));
                            return absl::OkStatus();
                          })
                    .ok());
  });
}

}  // namespace
}  // namespace bellwether::server
