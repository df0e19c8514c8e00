// Goal: a server that is started again takes and acknowledges at once, and what
// comes then is applied behind what its log holds, once and in order; what it
// copies of itself while it works is such a log, too.
// Method: a whole engine on real files, a crash as a copy of its folder, and a
// rank that goes on where it was while the log is still being applied.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <numeric>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "server/detect/rules_file.h"
#include "server/engine/engine.h"
#include "tests/support/crash_copy.h"
#include "tests/support/hurrying_clock.h"
#include "tests/support/ingest_trainer.h"
#include "tests/support/temp_directory.h"

namespace bellwether::server {
namespace {

class RecoveryTrainer final : public IngestTrainer {
 public:
  RecoveryTrainer(Engine* engine, uint64_t first_seq, uint32_t world = 1) {
    Greet(engine->ingest(), v1::ClientMessage(), world, /*layers=*/1, first_seq);
  }
  RecoveryTrainer(Engine* engine, const std::string& name, const std::string& uuid) {
    v1::ClientMessage message;
    message.mutable_hello()->mutable_run()->set_name(name);
    message.mutable_hello()->mutable_run()->set_uuid(uuid);
    Greet(engine->ingest(), std::move(message), /*world=*/1, /*layers=*/1);
  }
  // Of a launch, which calls itself attempt `told`.
  RecoveryTrainer(Engine* engine, int64_t launch_unix_ms, uint32_t told, uint64_t first_seq) {
    v1::ClientMessage message;
    message.mutable_hello()->mutable_run()->set_launch_unix_ms(launch_unix_ms);
    message.mutable_hello()->mutable_run()->set_attempt(told);
    Greet(engine->ingest(), std::move(message), /*world=*/1, /*layers=*/1, first_seq);
  }
  ~RecoveryTrainer() override { session_->Detach(); }

  uint32_t attempt() const { return session_->attempt(); }

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
      PutLoss(step, attempt());
      if (step % 1000 == 999) AwaitDurable();  // As a window would.
    }
    AwaitDurable();
  }
  // Names tensors, and reports a sum of each in steps [begin, end).
  void Tensors(const std::vector<std::pair<std::string, float>>& sums, int64_t begin, int64_t end, uint32_t told = 0) {
    v1::ClientMessage named;
    named.mutable_names()->set_attempt(told);
    named.mutable_names()->set_granularity(v1::GRANULARITY_TENSOR);
    for (const auto& [name, sum] : sums) named.mutable_names()->add_names(name);
    Put(std::move(named));
    for (int64_t step = begin; step < end; ++step) {
      v1::ClientMessage message = LossFrame(step, told);
      v1::Block* const block = message.mutable_frame()->add_blocks();
      block->set_signal(v1::SIGNAL_REPLICA_SUM_LOW);
      block->set_layer_count(static_cast<uint32_t>(sums.size()));
      block->set_head_count(1);
      for (const auto& [name, sum] : sums) block->add_values(sum);
      Put(std::move(message));
    }
    AwaitDurable();
  }
  absl::Status TrySeq(uint64_t seq) {
    v1::ClientMessage message = LossFrame(static_cast<int64_t>(steps_++), attempt());
    message.set_seq(seq);
    auto plain = Decode(message, &session_->layout(), {});
    EXPECT_TRUE(plain.ok()) << plain.status();
    std::string payload = message.SerializeAsString();
    return session_->Put(*plain, payload).status();
  }
  int64_t AwaitOpen() {
    absl::MutexLock lock(&mutex_);
    const auto done = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return opened_with_ >= 0; };
    mutex_.Await(absl::Condition(&done));
    return opened_with_;
  }

 private:
  uint64_t steps_ = 0;

  void AwaitDurable() {
    absl::MutexLock lock(&mutex_);
    const auto done = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return durable_ >= seq_; };
    mutex_.Await(absl::Condition(&done));
  }

  absl::Mutex mutex_;
  int64_t opened_with_ ABSL_GUARDED_BY(mutex_) = -1;
  uint64_t durable_ ABSL_GUARDED_BY(mutex_) = 0;
};

class EngineRecoveryTest : public testing::Test {
 protected:
  absl::StatusOr<std::unique_ptr<Engine>> TryOpen(const std::string& folder, bool repair, RuleSetPtr rules = nullptr,
                                                  Clock* clock = Clock::System()) {
    Engine::Options options;
    options.wal.repair = repair;
    options.rules = std::move(rules);
    options.storage_path = folder;
    options.wal.segment_bytes = 2 << 20;
    options.shards = 2;
    options.apply_ms_max = 0;
    return Engine::Open(options, &counters_, clock);
  }
  std::unique_ptr<Engine> Open(const std::string& folder, RuleSetPtr rules = nullptr, Clock* clock = Clock::System()) {
    auto engine = TryOpen(folder, /*repair=*/false, std::move(rules), clock);
    EXPECT_TRUE(engine.ok()) << engine.status();
    return *std::move(engine);
  }
  static void RemoveLog(const std::string& folder) {
    for (const auto& entry : std::filesystem::directory_iterator(folder + "/wal")) std::filesystem::remove(entry);
  }
  // As a crash now leaves what is in `from`.
  static void Kill(const std::string& from, const std::string& to) {
    std::filesystem::create_directory(to);
    for (const char* part : {"/db", "/wal"}) CrashCopy(from + part, to + part);
  }
  static std::vector<int64_t> StoredLosses(Engine* engine) {
    const RunSnapshotPtr run = engine->runs()->Find("r");
    EXPECT_NE(run, nullptr);
    engine->ingest()->AwaitApplied(run->record.id);
    const auto points = engine->series()->ReadSeries(run->record.id, run->record.description.layout,
                                                     {SignalId::kLoss, 0, 0}, 0, 100'000, 100'000, -1);
    EXPECT_TRUE(points.ok()) << points.status();
    return points->step;
  }
  // Of a run of one attempt, each of whose frames is a step.
  static std::vector<int64_t> StoredSteps(Engine* engine) {
    std::vector<int64_t> steps = StoredLosses(engine);
    EXPECT_EQ(engine->runs()->Find("r")->record.frames, steps.size());
    return steps;
  }
  // What a Hello that is not taken is answered.
  static absl::Status Refused(Engine* engine, v1::ClientMessage message) {
    message = HelloOf(std::move(message), /*world=*/1, /*layers=*/1);
    const auto plain = Decode(message, nullptr, {});
    EXPECT_TRUE(plain.ok()) << plain.status();
    return engine->ingest()->Open(std::get<HelloMessage>(plain->body), message.SerializeAsString(), nullptr).status();
  }
  static std::vector<int64_t> UpTo(int64_t end) {
    std::vector<int64_t> steps(static_cast<size_t>(end));
    std::iota(steps.begin(), steps.end(), 0);
    return steps;
  }

  TempDirectory directory_;
  Counters counters_;
};

TEST_F(EngineRecoveryTest, MessagesDuringReplayAreAppliedAfterIt) {
  const std::string first = directory_.path() + "/first", killed = directory_.path() + "/killed";
  {
    const auto engine = Open(first);
    RecoveryTrainer(engine.get(), 0).Steps(0, 6000);
    Kill(first, killed);
  }
  {
    const auto engine = Open(killed);
    RecoveryTrainer trainer(engine.get(), 6000);
    EXPECT_EQ(trainer.AwaitOpen(), 6000) << "known before it is applied";
    trainer.Steps(6000, 9000);
    EXPECT_EQ(StoredSteps(engine.get()), UpTo(9000));
  }
  EXPECT_EQ(StoredSteps(Open(killed).get()), UpTo(9000));
}

// Its launches go on where they were, whatever they tell: torchrun's nodes count by
// themselves, and a node that is new begins at 0.
TEST_F(EngineRecoveryTest, LaunchesKeepTheirAttempts) {
  constexpr int64_t kLaunch = 1'790'000'000'000;
  const std::string first = directory_.path() + "/first", killed = directory_.path() + "/killed";
  const auto attempt = [](Engine* engine) { return engine->runs()->Find("r")->record.description.attempt; };
  {
    const auto engine = Open(first);
    RecoveryTrainer(engine.get(), kLaunch, /*told=*/0, 0).Steps(0, 10);
    RecoveryTrainer again(engine.get(), kLaunch + 1, /*told=*/0, 10);
    EXPECT_EQ(again.attempt(), 1);
    again.Steps(5, 20);
    Kill(first, killed);
  }
  {
    const auto engine = Open(killed);
    EXPECT_EQ(RecoveryTrainer(engine.get(), kLaunch + 1, /*told=*/0, 25).attempt(), 1) << "it came back";
    v1::ClientMessage straggler;
    straggler.mutable_hello()->mutable_run()->set_launch_unix_ms(kLaunch);
    EXPECT_TRUE(absl::IsAborted(Refused(engine.get(), straggler)));
    straggler.mutable_hello()->mutable_run()->set_launch_unix_ms(kLaunch - 1);
    EXPECT_TRUE(absl::IsAborted(Refused(engine.get(), straggler)));
    RecoveryTrainer(engine.get(), kLaunch + 2, /*told=*/1, 25).Steps(15, 30);
    EXPECT_EQ(StoredLosses(engine.get()), UpTo(30));
    EXPECT_EQ(attempt(engine.get()), 2);
    EXPECT_TRUE(engine->Close().ok());
  }
  // All of it is saved, and no Hello is needed from the log any more.
  RemoveLog(killed);
  const auto engine = TryOpen(killed, /*repair=*/true);
  ASSERT_TRUE(engine.ok()) << engine.status();
  EXPECT_EQ((*engine)->runs()->Find("r")->record.description.launch_unix_ms, kLaunch + 2);
  EXPECT_EQ(RecoveryTrainer(engine->get(), kLaunch + 2, /*told=*/0, 40).attempt(), 2);
  EXPECT_EQ(RecoveryTrainer(engine->get(), kLaunch + 3, /*told=*/0, 40).attempt(), 3);
}

TEST_F(EngineRecoveryTest, CloseDuringReplayLosesNothing) {
  const std::string first = directory_.path() + "/first", killed = directory_.path() + "/killed";
  {
    const auto engine = Open(first);
    RecoveryTrainer(engine.get(), 0).Steps(0, 5000);
    Kill(first, killed);
  }
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(Open(killed)->Close().ok());
  EXPECT_EQ(StoredSteps(Open(killed).get()), UpTo(5000));
}

// The numbers of the lost records count as saved: who gets them again is not heard.
TEST_F(EngineRecoveryTest, MessagesAfterLostLogAreKept) {
  const std::string first = directory_.path() + "/first", killed = directory_.path() + "/killed";
  {
    const auto engine = Open(first);
    RecoveryTrainer(engine.get(), 0).Steps(0, 3000);
    EXPECT_EQ(StoredSteps(engine.get()), UpTo(3000));
  }
  RemoveLog(first);
  EXPECT_TRUE(absl::IsDataLoss(TryOpen(first, /*repair=*/false).status()));
  {
    const auto engine = TryOpen(first, /*repair=*/true);
    ASSERT_TRUE(engine.ok()) << engine.status();
    RecoveryTrainer trainer(engine->get(), 3000);
    EXPECT_EQ(trainer.AwaitOpen(), 3000);
    trainer.Steps(3000, 3500);
    Kill(first, killed);
  }
  EXPECT_EQ(StoredSteps(Open(killed).get()), UpTo(3500));
}

// Saved further than it is applied: a rank is behind with every step.
TEST_F(EngineRecoveryTest, LogContinuesAboveSavedStateOfOpenSteps) {
  const std::string folder = directory_.path() + "/live";
  {
    const auto engine = Open(folder);
    RecoveryTrainer(engine.get(), 0, /*world=*/2).Steps(0, 20);
    engine->ingest()->AwaitApplied(engine->runs()->Find("r")->record.id);  // And saved.
  }
  RemoveLog(folder);
  {
    const auto engine = TryOpen(folder, /*repair=*/true);
    ASSERT_TRUE(engine.ok()) << engine.status();
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
TEST_F(EngineRecoveryTest, NothingOfRunIsLoggedBeforeItsHello) {
  const std::string folder = directory_.path() + "/live";
  const auto rules = ParseRules("off: [nonfinite]", "r.yml");
  ASSERT_TRUE(rules.ok());
  HurryingClock clock;
  {
    const auto engine = Open(folder, *rules, &clock);
    for (int i = 100; i < 300; ++i) {
      const std::string number = std::to_string(i);
      RecoveryTrainer(engine.get(), "run-" + number, number + std::string(13, 'u')).Steps(0, 1);
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

TEST_F(EngineRecoveryTest, CheckpointIsOfOnePointInTime) {
  const auto engine = Open(directory_.path() + "/live");
  const std::string copy = directory_.path() + "/copy";
  RecoveryTrainer trainer(engine.get(), 0);
  trainer.Steps(0, 3000);
  EXPECT_EQ(StoredSteps(engine.get()), UpTo(3000));
  std::thread writer([&trainer] { trainer.Steps(3000, 6000); });
  const absl::Status written = engine->WriteCheckpoint(copy);
  writer.join();
  ASSERT_TRUE(written.ok()) << written;
  EXPECT_FALSE(engine->WriteCheckpoint(copy).ok()) << "it is there already";
  const auto steps = StoredSteps(Open(copy).get());
  EXPECT_GE(steps.size(), 3000u);
  EXPECT_EQ(steps, UpTo(static_cast<int64_t>(steps.size())));
}

TEST_F(EngineRecoveryTest, FarSeqIsRefused) {
  const auto engine = Open(directory_.path() + "/a");
  const Counter* const refused = counters_.counter("bellwether_ingest_limit_refused_total", {{"limit", "seq"}});
  constexpr uint64_t kRise = uint64_t{1} << 32;
  {
    RecoveryTrainer trainer(engine.get(), 0);
    const absl::Status far = trainer.TrySeq(UINT64_MAX);
    EXPECT_TRUE(absl::IsInvalidArgument(far)) << far;
    EXPECT_EQ(far.message(), "seq = 18446744073709551615: must be in [1, 4294967296]: 0 was the last one");
    EXPECT_TRUE(trainer.TrySeq(5).ok());
    EXPECT_FALSE(trainer.TrySeq(5 + kRise + 1).ok());
    EXPECT_TRUE(trainer.TrySeq(5 + kRise).ok()) << "what lies between was lost on the way";
    EXPECT_TRUE(trainer.TrySeq(6).ok()) << "a duplicate like any other";
    EXPECT_EQ(refused->value(), 2);
  }
  EXPECT_EQ(RecoveryTrainer(engine.get(), 0).AwaitOpen(), static_cast<int64_t>(5 + kRise));
}

// Each in an order of its own.
TEST_F(EngineRecoveryTest, TensorsKeepTheirNamesAndSeries) {
  const std::string first = directory_.path() + "/first", killed = directory_.path() + "/killed";
  const auto expect_all = [](Engine* engine, int64_t steps) {
    const RunSnapshotPtr run = engine->runs()->Find("r");
    ASSERT_NE(run, nullptr);
    engine->ingest()->AwaitApplied(run->record.id);
    const RunSnapshotPtr now = engine->runs()->Find("r");
    const auto rows = RowsOf(*now, *engine->database());
    ASSERT_TRUE(rows.ok()) << rows.status();
    EXPECT_THAT((*rows)->tensors.names(), testing::ElementsAre("a", "b", "c"));
    const Layout& layout = now->record.description.layout;
    EXPECT_EQ(layout.tensors, 3);
    const auto points =
        engine->series()->ReadSeries(now->record.id, layout, {SignalId::kReplicaSumLow, 1, 0}, 0, 1000, 1000, -1);
    ASSERT_TRUE(points.ok()) << points.status();
    EXPECT_EQ(points->mean, std::vector<float>(static_cast<size_t>(steps), 2)) << "b";
  };
  {
    const auto engine = Open(first);
    RecoveryTrainer(engine.get(), 0).Tensors({{"a", 1}, {"b", 2}}, 0, 10);
    Kill(first, killed);
  }
  {
    const auto engine = Open(killed);
    RecoveryTrainer(engine.get(), 11).Tensors({{"c", 3}, {"b", 2}}, 10, 20, /*attempt=*/1);
    expect_all(engine.get(), 20);
    EXPECT_TRUE(engine->Close().ok());
  }
  const auto engine = Open(killed);
  RecoveryTrainer(engine.get(), 22).Steps(20, 21);
  expect_all(engine.get(), 20);
}

}  // namespace
}  // namespace bellwether::server
