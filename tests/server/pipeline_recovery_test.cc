// Goal: a server that is started again takes and acknowledges at once, and what
// comes then is applied behind what its log holds, once and in order; what it
// copies of itself while it works is such a log, too.
// Method: a whole pipeline on real files, a crash as a copy of its folder, and a
// rank that goes on where it was while the log is still being applied.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <memory>
#include <numeric>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "server/detect/rules_file.h"
#include "server/pipeline.h"
#include "tests/support/crash_copy.h"
#include "tests/support/pipeline_trainer.h"
#include "tests/support/temp_directory.h"

namespace bellwether::server {
namespace {

class Trainer final : public PipelineTrainer {
 public:
  Trainer(Pipeline* pipeline, uint64_t first_seq, uint32_t world = 1) {
    Greet(pipeline, v1::ClientMessage(), world, /*layers=*/1, first_seq);
  }
  Trainer(Pipeline* pipeline, const std::string& name, const std::string& uuid) {
    v1::ClientMessage message;
    message.mutable_hello()->mutable_run()->set_name(name);
    message.mutable_hello()->mutable_run()->set_uuid(uuid);
    Greet(pipeline, std::move(message), /*world=*/1, /*layers=*/1);
  }
  ~Trainer() override { session_->Detach(); }

  void OnOpen(uint64_t durable_seq) override {
    absl::MutexLock lock(&mutex_);
    opened_with_ = static_cast<int64_t>(durable_seq);
  }
  void OnDurable(uint64_t seq) override {
    absl::MutexLock lock(&mutex_);
    durable_ = std::max(durable_, seq);
  }
  void Steps(int64_t begin, int64_t end) {
    for (int64_t step = begin; step < end; ++step) {
      PutLoss(step);
      if (step % 1000 == 999) AwaitDurable();  // As a window would.
    }
    AwaitDurable();
  }
  int64_t AwaitOpen() {
    absl::MutexLock lock(&mutex_);
    const auto done = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return opened_with_ >= 0; };
    mutex_.Await(absl::Condition(&done));
    return opened_with_;
  }

 private:
  void AwaitDurable() {
    absl::MutexLock lock(&mutex_);
    const auto done = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return durable_ >= seq_; };
    mutex_.Await(absl::Condition(&done));
  }

  absl::Mutex mutex_;
  int64_t opened_with_ ABSL_GUARDED_BY(mutex_) = -1;
  uint64_t durable_ ABSL_GUARDED_BY(mutex_) = 0;
};

// A second later each time that it is asked: whatever is done once a second is due.
class HurryingClock final : public Clock {
 public:
  int64_t UnixNanos() const override { return System()->UnixNanos(); }
  int64_t MonotonicNanos() const override { return now_ += 1'000'000'000; }

 private:
  mutable std::atomic<int64_t> now_ = 0;
};

class PipelineRecoveryTest : public testing::Test {
 protected:
  absl::StatusOr<std::unique_ptr<Pipeline>> TryOpen(const std::string& folder, bool repair, RuleSetPtr rules = nullptr,
                                                    Clock* clock = Clock::System()) {
    Pipeline::Options options;
    options.wal.repair = repair;
    options.rules = std::move(rules);
    options.storage_path = folder;
    options.wal.segment_bytes = 2 << 20;
    options.shards = 2;
    options.apply_ms_max = 0;
    return Pipeline::Open(options, &counters_, clock);
  }
  std::unique_ptr<Pipeline> Open(const std::string& folder, RuleSetPtr rules = nullptr,
                                 Clock* clock = Clock::System()) {
    auto pipeline = TryOpen(folder, /*repair=*/false, std::move(rules), clock);
    EXPECT_TRUE(pipeline.ok()) << pipeline.status();
    return *std::move(pipeline);
  }
  static void RemoveLog(const std::string& folder) {
    for (const auto& entry : std::filesystem::directory_iterator(folder + "/wal")) std::filesystem::remove(entry);
  }
  // As a crash now leaves what is in `from`.
  static void Kill(const std::string& from, const std::string& to) {
    std::filesystem::create_directory(to);
    for (const char* part : {"/db", "/wal"}) CrashCopy(from + part, to + part);
  }
  static std::vector<int64_t> StoredSteps(Pipeline* pipeline) {
    const RunSnapshotPtr run = pipeline->runs()->Find("r");
    EXPECT_NE(run, nullptr);
    pipeline->AwaitApplied(run->record.id);
    const auto points = pipeline->series()->ReadSeries(run->record.id, run->record.description.layout,
                                                       {SignalId::kLoss, 0, 0}, 0, 100'000, 100'000, -1);
    EXPECT_TRUE(points.ok()) << points.status();
    EXPECT_EQ(pipeline->runs()->Find("r")->record.frames, points->step.size());
    return points->step;
  }
  static std::vector<int64_t> UpTo(int64_t end) {
    std::vector<int64_t> steps(static_cast<size_t>(end));
    std::iota(steps.begin(), steps.end(), 0);
    return steps;
  }

  TempDirectory directory_;
  Counters counters_;
};

TEST_F(PipelineRecoveryTest, WhatComesDuringTheReplayIsAppliedBehindIt) {
  const std::string first = directory_.path() + "/first", killed = directory_.path() + "/killed";
  {
    const auto pipeline = Open(first);
    Trainer(pipeline.get(), 0).Steps(0, 6000);
    Kill(first, killed);
  }
  {
    const auto pipeline = Open(killed);
    Trainer trainer(pipeline.get(), 6000);
    EXPECT_EQ(trainer.AwaitOpen(), 6000) << "known before it is applied";
    trainer.Steps(6000, 9000);
    EXPECT_EQ(StoredSteps(pipeline.get()), UpTo(9000));
  }
  EXPECT_EQ(StoredSteps(Open(killed).get()), UpTo(9000));
}

TEST_F(PipelineRecoveryTest, ClosedDuringTheReplayItLosesNothing) {
  const std::string first = directory_.path() + "/first", killed = directory_.path() + "/killed";
  {
    const auto pipeline = Open(first);
    Trainer(pipeline.get(), 0).Steps(0, 5000);
    Kill(first, killed);
  }
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(Open(killed)->Close().ok());
  EXPECT_EQ(StoredSteps(Open(killed).get()), UpTo(5000));
}

// The numbers of the lost records count as saved: who gets them again is not heard.
TEST_F(PipelineRecoveryTest, WhatComesAfterTheLogWasLostIsKept) {
  const std::string first = directory_.path() + "/first", killed = directory_.path() + "/killed";
  {
    const auto pipeline = Open(first);
    Trainer(pipeline.get(), 0).Steps(0, 3000);
    EXPECT_EQ(StoredSteps(pipeline.get()), UpTo(3000));
  }
  RemoveLog(first);
  EXPECT_TRUE(absl::IsDataLoss(TryOpen(first, /*repair=*/false).status()));
  {
    const auto pipeline = TryOpen(first, /*repair=*/true);
    ASSERT_TRUE(pipeline.ok()) << pipeline.status();
    Trainer trainer(pipeline->get(), 3000);
    EXPECT_EQ(trainer.AwaitOpen(), 3000);
    trainer.Steps(3000, 3500);
    Kill(first, killed);
  }
  EXPECT_EQ(StoredSteps(Open(killed).get()), UpTo(3500));
}

// Saved further than it is applied: a rank is behind with every step.
TEST_F(PipelineRecoveryTest, TheLogGoesOnAboveWhatIsSavedOfOpenSteps) {
  const std::string folder = directory_.path() + "/live";
  {
    const auto pipeline = Open(folder);
    Trainer(pipeline.get(), 0, /*world=*/2).Steps(0, 20);
    pipeline->AwaitApplied(pipeline->runs()->Find("r")->record.id);  // And saved.
  }
  RemoveLog(folder);
  {
    const auto pipeline = TryOpen(folder, /*repair=*/true);
    ASSERT_TRUE(pipeline.ok()) << pipeline.status();
  }
  Wal::Options options;
  options.directory = folder + "/wal";
  options.segment_bytes = 2 << 20;
  const auto wal = Wal::Open(options, nullptr);
  ASSERT_TRUE(wal.ok()) << wal.status();
  EXPECT_GT((*wal)->recovery().last_lsn, 20u) << "a Hello and twenty frames";
}

// The shard brings the rules of the server to runs that have others: to one whose
// Hello is only about to be logged, too, if it has it already.  A log in which
// they come first cannot be read by whoever does not know the run.
TEST_F(PipelineRecoveryTest, NothingOfARunIsLoggedBeforeItsHello) {
  const std::string folder = directory_.path() + "/live";
  const auto rules = ParseRules("off: [nonfinite]", "r.yml");
  ASSERT_TRUE(rules.ok());
  HurryingClock clock;
  {
    const auto pipeline = Open(folder, *rules, &clock);
    for (int i = 100; i < 300; ++i) {
      const std::string number = std::to_string(i);
      Trainer(pipeline.get(), "run-" + number, number + std::string(13, 'u')).Steps(0, 1);
    }
  }
  Wal::Options options;
  options.directory = folder + "/wal";
  const auto wal = Wal::Open(options, [](Lsn) {});
  ASSERT_TRUE(wal.ok()) << wal.status();
  std::set<RunId> met;
  const auto visit = [&met](const WalRecord& record) {
    const bool is_first = met.insert(record.run).second;
    EXPECT_EQ(is_first, record.kind == WalKind::kHello) << "record " << record.lsn << " of run " << record.run;
    return absl::OkStatus();
  };
  ASSERT_TRUE((*wal)->Read(1, (*wal)->last_lsn(), visit).ok());
  EXPECT_EQ(met.size(), 200u);
}

TEST_F(PipelineRecoveryTest, ACheckpointIsOfOnePointInTime) {
  const auto pipeline = Open(directory_.path() + "/live");
  const std::string copy = directory_.path() + "/copy";
  Trainer trainer(pipeline.get(), 0);
  trainer.Steps(0, 3000);
  EXPECT_EQ(StoredSteps(pipeline.get()), UpTo(3000));
  std::thread writer([&trainer] { trainer.Steps(3000, 6000); });
  const absl::Status written = pipeline->WriteCheckpoint(copy);
  writer.join();
  ASSERT_TRUE(written.ok()) << written;
  EXPECT_FALSE(pipeline->WriteCheckpoint(copy).ok()) << "it is there already";
  const auto steps = StoredSteps(Open(copy).get());
  EXPECT_GE(steps.size(), 3000u);
  EXPECT_EQ(steps, UpTo(static_cast<int64_t>(steps.size())));
}

}  // namespace
}  // namespace bellwether::server
