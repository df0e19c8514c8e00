// Goal: whatever crash ends a log that grows and is shortened, nothing that was durable is
// lost, and nothing that was cut off or given up comes back.
// Method: a model of what was appended and reported, against a file system that cuts
// the power at each change and keeps arbitrary pages; a child process on real files,
// killed at random.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <map>
#include <random>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/support/fake_file_system.h"
#include "tests/support/temp_directory.h"
#include "tests/support/wal_kills.h"
#include "tests/support/wal_log.h"

namespace bellwether::server {
namespace {

// What was appended to one log over its lives, and what it must have.
class Model {
 public:
  Model(FakeFileSystem* fs, uint32_t seed) : options_(SmallGroups(fs)), fs_(fs), random_(seed) {
    if (seed % 3 == 1) options_.group_bytes_max = 512;  // Less than many a record.
    if (seed % 3 == 2) {
      options_.group_bytes_max = 1 << 20;  // More than a segment.
      options_.group_wait_us_max = 50;
    }
  }

  // The same log, whose files `fs` has.
  Model(const Model& other, FakeFileSystem* fs)
      : options_(other.options_),
        fs_(fs),
        random_(other.random_),
        appended_(other.appended_),
        durable_(other.durable_),
        kept_from_(other.kept_from_),
        life_(other.life_) {
    options_.file_system = fs;
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
          const int64_t before = wal->bytes();
          if (wal->Truncate(keep).ok() && wal->bytes() < before) ++truncated_;
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
  }

  // How often segments were given up.
  int truncated() const { return truncated_; }

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
  int life_ = 0, truncated_ = 0;
};

TEST(WalCrashTest, PowerLossAnywhereLosesNoDurableRecord) {
  const uint32_t first_seed = 20261123;
  int truncated = 0;
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
    truncated += model.truncated();
  }
  EXPECT_GT(truncated, 100) << "segments were hardly given up";
}

TEST(WalCrashTest, EachChangeOfTruncateAndRotateMayBeTheLast) {
  constexpr uint32_t kSeeds = 4;
  std::array<FakeFileSystem, kSeeds> files;
  std::vector<Model> begun;
  for (uint32_t seed = 0; seed < kSeeds; ++seed) {
    begun.emplace_back(&files[seed], seed).Live(1'000'000, 150);  // Makes segments to give up.
  }
  int truncated = 0;
  for (int64_t cut = 1;; ++cut) {
    SCOPED_TRACE(testing::Message() << "cut " << cut);
    bool went = false;
    for (uint32_t seed = 0; seed < kSeeds; ++seed) {
      FakeFileSystem fs(files[seed]);
      Model model(begun[seed], &fs);
      went |= model.Live(cut, 150);
      model.Check();
      truncated += model.truncated();
      ASSERT_FALSE(testing::Test::HasFailure()) << "seed " << seed;
    }
    if (!went) break;
  }
  EXPECT_GT(truncated, 100);
}

TEST(WalCrashTest, NothingIsLostAndNothingComesBackInTwentyKills) {
  TempDirectory directory;
  Wal::Options options = SmallGroups(nullptr, directory.path() + "/wal");
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
