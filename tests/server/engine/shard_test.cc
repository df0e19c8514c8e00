// Goal: while a shard saves all its runs, messages wait for one save and not for
// all of them; and what it then says of the log is never more than is saved.
// Method: the shard with real log and database, and a series store that tells
// when a run is saved, on the shard's own thread: what is sent from there has
// arrived in the middle.  A database whose rows go elsewhere, too, fails at will.

#include "server/engine/shard.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <limits>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "server/detect/rules_file.h"
#include "tests/support/null_series_store.h"
#include "tests/support/temp_directory.h"

namespace bellwether::server {
namespace {

using testing::ElementsAre;

constexpr Layout kShardLayout{1, 2, 1, 64, 0};

// Stores nothing.
class SaveWatch final : public NullSeriesStore {
 public:
  std::function<void(RunId)> on_save;  // Called on the shard's thread.

  absl::Status Save(RunId run, RunBatch*, std::string*) override {
    if (on_save) on_save(run);
    return absl::OkStatus();
  }
};

// Another store of rows, which can be away.
class RemoteRows final : public SharedRows {
 public:
  std::atomic<bool> away = false;
  // Keeps whoever puts rows of these runs waiting.
  void Silence(std::set<RunId> runs = {1, 2}) {
    absl::MutexLock lock(&mutex_);
    silent_ = std::move(runs);
  }
  void Answer() { Silence({}); }
  void AwaitWaiting(int waiting) {
    absl::MutexLock lock(&mutex_);
    const auto wait = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return waiting_ == waiting; };
    EXPECT_TRUE(mutex_.AwaitWithTimeout(absl::Condition(&wait), absl::Seconds(60))) << waiting_ << " wait";
  }

  absl::Status PutRows(RunId run, const std::vector<SharedRow>&) override {
    absl::MutexLock lock(&mutex_);
    ++waiting_;
    const auto answers = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !silent_.contains(run); };
    mutex_.Await(absl::Condition(&answers));
    --waiting_;
    return away ? absl::UnavailableError("away") : absl::OkStatus();
  }
  absl::StatusOr<bool> PutTransition(AlertTransition* transition) override {
    transition->id = ++alerts_;
    return true;
  }
  absl::StatusOr<std::vector<AlertTransition>> ListTransitions(uint64_t, size_t) const override {
    return std::vector<AlertTransition>();
  }

 private:
  absl::Mutex mutex_;
  std::set<RunId> silent_ ABSL_GUARDED_BY(mutex_);
  int waiting_ ABSL_GUARDED_BY(mutex_) = 0;
  std::atomic<uint64_t> alerts_ = 0;
};

// A log that goes into another.
class LogThrough : public LogBackend {
 public:
  explicit LogThrough(LogBackend* log) : log_(log) {}
  const Recovery& recovery() const override { return log_->recovery(); }
  absl::Status Read(Lsn from, Lsn until, const std::function<absl::Status(const WalRecord&)>& visit) const override {
    return log_->Read(from, until, visit);
  }
  absl::Status ReadHeads(const std::function<absl::Status(const WalRecord&)>& visit) const override {
    return log_->ReadHeads(visit);
  }
  absl::StatusOr<Lsn> Append(WalRecord&& record) override { return log_->Append(std::move(record)); }
  absl::Status Sync(Lsn lsn) override { return log_->Sync(lsn); }
  absl::Status Truncate(Lsn keep) override { return log_->Truncate(keep); }
  void Hold(const absl::Status& why) override { log_->Hold(why); }
  absl::Status CopyTo(const std::string& directory) override { return log_->CopyTo(directory); }
  absl::Status Close() override { return log_->Close(); }
  Lsn durable_lsn() const override { return log_->durable_lsn(); }
  Lsn last_lsn() const override { return log_->last_lsn(); }
  int64_t bytes() const override { return log_->bytes(); }
  Lsn TailBegin(int64_t bytes) const override { return log_->TailBegin(bytes); }
  absl::Status health() const override { return log_->health(); }
  void TakeSyncSeconds(std::vector<double>* seconds) override { log_->TakeSyncSeconds(seconds); }

 private:
  LogBackend* const log_;
};

// One that is away for a while.
class AwayForAWhile final : public LogThrough {
 public:
  using LogThrough::LogThrough;
  std::atomic<bool> away = false;
  absl::Status Sync(Lsn lsn) override { return away ? health() : LogThrough::Sync(lsn); }
  absl::Status health() const override { return away ? absl::UnavailableError("away") : absl::OkStatus(); }
};

// Of two lanes; runs with odd numbers are in the second, which is away, or not.
class HalfAway final : public LogThrough {
 public:
  explicit HalfAway(LogBackend* log, bool away = true) : LogThrough(log), here_(log), away_(log) { away_.away = away; }
  uint32_t lanes() const override { return 2; }
  uint32_t LaneOf(RunId run) const override { return run % 2; }
  LogBackend* lane(uint32_t lane) override { return lane == 0 ? static_cast<LogBackend*>(&here_) : &away_; }

 private:
  LogThrough here_;
  AwayForAWhile away_;
};

class ShardTest : public testing::Test {
 protected:
  explicit ShardTest(SharedRows* rows = nullptr) {
    Wal::Options wal;
    wal.directory = directory_.path() + "/wal";
    wal_ = *Wal::Open(wal, [](Lsn) {});
    Database::Options database;
    database.directory = directory_.path() + "/db";
    database.shared = rows;
    database_ = *Database::Open(database);
    alerts_ = std::make_unique<AlertStore>(database_.get());
    EXPECT_TRUE(alerts_->Load().ok());
    parts_ = {.rules = &rules_,
              .policy = &policy_,
              .database = database_.get(),
              .series = &series_,
              .alerts = alerts_.get(),
              .table = &table_,
              .wal = wal_.get(),
              .counters = &counters_,
              .clock = &clock_};
    shard_ = std::make_unique<Shard>(Shard::Options(), parts_, 0);
    shard_->Start();
  }

  void AddRun(RunId id, uint32_t reporters = 1, std::string import_of = "") {
    RunRecord record;
    record.import_of = std::move(import_of);
    record.id = id;
    record.description.name = std::to_string(id);
    record.description.layout = kShardLayout;
    record.description.reporters = reporters;
    absl::MutexLock lock(&shard_->mutex());
    shard_->Adopt(*LiveRun::Load(parts_, record));
  }

  // Logs a step of the run and hands it to the shard.
  Lsn Send(RunId run, int64_t step, float loss, uint32_t rank = 0) {
    RankFrame frame;
    frame.step = step;
    frame.blocks = {{SignalId::kLoss, 0, 1, 0, 1, 0}};
    frame.values = {loss};
    WalRecord record;
    record.kind = WalKind::kMessage;
    record.run = run;
    record.rank = rank;
    record.epoch = 1;
    record.time_unix_ms = clock_.UnixMillis();
    record.payload = "not read here";
    absl::MutexLock lock(&shard_->mutex());
    return *shard_->Append(std::move(record), {static_cast<uint64_t>(step) + 1, std::move(frame)});
  }

  // Lets the shard look at the clock with all that was sent applied, and returns when it has.
  void Tick() {
    shard_->Barrier([] {});
    clock_.Advance(1'000'000'000);
    for (int i = 0; i < 2; ++i) shard_->Barrier([] {});
  }
  // "run: text" of every change of rules that the log holds.
  std::vector<std::string> RulesInLog() {
    EXPECT_TRUE(wal_->Sync(wal_->last_lsn()).ok());
    std::vector<std::string> found;
    const auto visit = [&](const WalRecord& record) {
      if (record.kind == WalKind::kRules) found.push_back(std::to_string(record.run) + ": " + record.payload);
      return absl::OkStatus();
    };
    EXPECT_TRUE(wal_->Read(1, wal_->last_lsn(), visit).ok());
    return found;
  }

  TempDirectory directory_;
  ReloadableRules rules_{JudgeOptions()};
  ReloadablePolicy policy_;
  SaveWatch series_;
  RunTable table_;
  Counters counters_;
  FakeClock clock_;
  std::unique_ptr<Wal> wal_;
  std::unique_ptr<Database> database_;
  std::unique_ptr<AlertStore> alerts_;
  LiveRunParts parts_;
  std::unique_ptr<Shard> shard_;
};

TEST_F(ShardTest, AlertWaitsForOneSaveAtMost) {
  for (const RunId run : {1, 2, 3}) {
    AddRun(run);
    Send(run, 0, 1);
  }
  std::vector<std::string> order;
  const int64_t subscription = alerts_->Subscribe([&](const AlertTransition&) { order.push_back("alert of 3"); });
  series_.on_save = [&](RunId run) {
    order.push_back("saved " + std::to_string(run));
    if (run == 1) Send(3, 1, std::numeric_limits<float>::quiet_NaN());
  };
  shard_->CommitAll();
  alerts_->Unsubscribe(subscription);
  EXPECT_THAT(order, ElementsAre("saved 1", "alert of 3", "saved 2", "saved 3"));
}

TEST_F(ShardTest, AlertWaitsForOneOfManyDueSaves) {
  for (const RunId run : {1, 2, 3}) {
    AddRun(run);
    Send(run, 0, 1);
  }
  shard_->CommitAll();
  for (const RunId run : {1, 2, 3}) Send(run, 1, 1);
  shard_->Barrier([] {});
  std::vector<std::string> order;
  absl::Notification all_saved;
  const int64_t subscription = alerts_->Subscribe([&](const AlertTransition&) { order.push_back("alert of 3"); });
  series_.on_save = [&](RunId run) {
    order.push_back("saved " + std::to_string(run));
    if (order.size() == 1) Send(3, 2, std::numeric_limits<float>::quiet_NaN());
    if (run == 3) all_saved.Notify();
  };
  clock_.Advance(60'000'000'000);
  shard_->Barrier([] {});
  all_saved.WaitForNotification();
  shard_->Barrier([this] { series_.on_save = nullptr; });
  alerts_->Unsubscribe(subscription);
  EXPECT_THAT(order, ElementsAre("saved 1", "alert of 3", "saved 2", "saved 3"));
}

TEST_F(ShardTest, LogKeepsMessagesAfterRunsSave) {
  for (const RunId run : {1, 2}) {
    AddRun(run);
    Send(run, 0, 1);
  }
  Lsn late = 0;
  series_.on_save = [&](RunId run) {
    if (run == 2) late = Send(1, 1, 1);
  };
  const Lsn needed = shard_->CommitAll().front();
  EXPECT_LE(needed, late);

  series_.on_save = nullptr;
  EXPECT_GT(shard_->CommitAll().front(), late);
}

TEST_F(ShardTest, LogKeepsUnsavedClosedStepsWhileStepIsOpen) {
  AddRun(1, /*reporters=*/2);
  const Lsn first = Send(1, 0, 1, /*rank=*/0);
  Send(1, 0, 1, /*rank=*/1);
  Send(1, 1, 1, /*rank=*/0);  // The other rank is late.
  EXPECT_LE(shard_->CommitBefore(/*lane=*/0, /*end=*/0), first) << "nothing was saved";
  const Lsn late = Send(1, 1, 1, /*rank=*/1);
  shard_->CommitAll();
  EXPECT_GT(shard_->CommitBefore(/*lane=*/0, /*end=*/0), late);
}

TEST_F(ShardTest, ActionsAreStoredOnceLogIsBack) {
  AwayForAWhile log(wal_.get());
  ActionStore actions(database_.get());
  parts_.wal = &log;
  parts_.actions = &actions;
  shard_ = std::make_unique<Shard>(Shard::Options(), parts_, 0);
  shard_->Start();
  AddRun(1);
  int told = 0;
  const int64_t subscription = actions.Subscribe([&](RunId, const Action&, size_t) { ++told; });
  const auto ask = [&](const ActionRequest& request) {
    WalRecord record;
    record.kind = WalKind::kActionRequest;
    record.run = 1;
    record.payload = "not read here";
    absl::MutexLock lock(&shard_->mutex());
    return *shard_->Append(std::move(record), {0, ActionRequestMessage{.request = request}});
  };
  log.away = true;
  ActionRequest propose;
  propose.by = "alice";
  propose.action.kind = ActionKind::kCenterK;
  propose.action.value = 1;
  const Lsn proposed = ask(propose);
  ask({.verb = ActionRequest::Verb::kApprove, .id = "no such action", .by = "alice"});
  ASSERT_TRUE(wal_->Sync(wal_->last_lsn()).ok());
  Tick();
  EXPECT_THAT(*actions.List(1), testing::IsEmpty());
  EXPECT_EQ(told, 0);
  EXPECT_LE(shard_->CommitAll().front(), proposed) << "a crash would conclude it from the log";
  log.away = false;
  Tick();
  EXPECT_THAT(*actions.List(1), testing::SizeIs(1));
  EXPECT_EQ(told, 1);
  EXPECT_THAT(*actions.Audit(1), testing::SizeIs(1));
  const Lsn late = wal_->last_lsn();
  EXPECT_GT(shard_->CommitAll().front(), late);
  actions.Unsubscribe(subscription);
  shard_.reset();
}

struct HasRowsElsewhere {
  RemoteRows rows;
};
class ShardOfACluster : protected HasRowsElsewhere, public ShardTest {
 protected:
  ShardOfACluster() : ShardTest(&rows) {
    for (int lane = 0; lane < 2; ++lane) savers_.push_back(std::make_unique<WorkPool>(2, Shard::kSavesMax));
    parts_.savers = &savers_;
    shard_ = std::make_unique<Shard>(Shard::Options(), parts_, 0);
    shard_->Start();
  }
  ~ShardOfACluster() override { shard_.reset(); }

  // How many steps the database has of the run.
  uint64_t StepsSaved(RunId run) {
    const auto record = database_->GetRun(run);
    return record.ok() ? record->steps_recorded : 0;
  }
  // Returns when it has some, and the shard has looked at the clock since.
  void AwaitSaved(RunId run) {
    const absl::Time deadline = absl::Now() + absl::Seconds(60);
    while (StepsSaved(run) == 0 && absl::Now() < deadline) shard_->Barrier([] {});
    EXPECT_GT(StepsSaved(run), 0u);
    shard_->Barrier([] {});
  }

  std::vector<std::unique_ptr<WorkPool>> savers_;
};

TEST_F(ShardOfACluster, MessagesAreAppliedWhileSaveWaitsForDatabase) {
  AddRun(1);
  AddRun(2);
  Send(1, 0, 1);
  rows.Silence();
  std::thread save([&] { shard_->CommitAll(); });
  rows.AwaitWaiting(1);
  absl::Notification told;
  const int64_t subscription = alerts_->Subscribe([&](const AlertTransition&) { told.Notify(); });
  Send(2, 0, std::numeric_limits<float>::quiet_NaN());
  EXPECT_TRUE(told.WaitForNotificationWithTimeout(absl::Seconds(60)));
  alerts_->Unsubscribe(subscription);
  const Lsn late = Send(1, 1, 1);
  shard_->Barrier([] {});
  EXPECT_EQ(StepsSaved(1), 0u);
  rows.Answer();
  save.join();
  EXPECT_EQ(StepsSaved(1), 1u) << "as it was when the save began";
  EXPECT_LE(shard_->CommitBefore(/*lane=*/0, /*end=*/0), late);
  shard_->CommitAll();
  EXPECT_EQ(StepsSaved(1), 2u);
  EXPECT_GT(shard_->CommitBefore(/*lane=*/0, /*end=*/0), late);
}

TEST_F(ShardOfACluster, MessageBehindEndOfSaveIsNeeded) {
  Shard::Options options;
  options.queue_messages_max = 1;  // HasRoom() then tells whether anything is queued.
  shard_ = std::make_unique<Shard>(options, parts_, 0);
  shard_->Start();
  AddRun(1);
  AddRun(2);
  Send(2, 0, 1);
  shard_->CommitAll();  // Of run 2 nothing is needed.
  Send(1, 0, 1);
  rows.Silence({1});
  Lsn needed = 0;
  std::thread save([&] { needed = shard_->CommitBefore(/*lane=*/0, std::numeric_limits<Lsn>::max()); });
  rows.AwaitWaiting(1);
  absl::Notification held, go_on;
  std::thread hold([&] {
    shard_->Barrier([&] {
      held.Notify();
      go_on.WaitForNotification();
    });
  });
  held.WaitForNotification();
  rows.Answer();
  {  // The end of the save is queued, and a frame of run 2 behind it: one batch.
    absl::MutexLock lock(&shard_->mutex());
    const auto queued = [this] {
      shard_->mutex().AssertHeld();
      return !shard_->HasRoom(0);
    };
    EXPECT_TRUE(shard_->mutex().AwaitWithTimeout(absl::Condition(&queued), absl::Seconds(60)));
  }
  const Lsn behind = Send(2, 1, 1);
  go_on.Notify();
  save.join();
  hold.join();
  EXPECT_LE(needed, behind);
}

TEST_F(ShardOfACluster, DropWaitsForSaveUnderWay) {
  AddRun(1);
  Send(1, 0, 1);
  rows.Silence();
  std::thread save([&] { shard_->CommitAll(); });
  rows.AwaitWaiting(1);
  const Lsn late = Send(1, 1, 1);
  absl::Notification dropped;
  std::thread drop([&] {
    EXPECT_GT(shard_->Drop(1, 2, /*save=*/true), late);
    dropped.Notify();
  });
  EXPECT_FALSE(dropped.WaitForNotificationWithTimeout(absl::Milliseconds(200)));
  rows.Answer();
  drop.join();
  save.join();
  EXPECT_EQ(StepsSaved(1), 2u);
}

TEST_F(ShardOfACluster, DropWaitsForSecondSave) {
  AddRun(1);
  AddRun(2);
  Send(1, 0, 1);
  Send(2, 0, 1);
  rows.Silence({2});
  absl::Notification dropped;
  std::thread drop([&] {
    shard_->Drop(1, 3, /*save=*/true);
    dropped.Notify();
  });
  rows.AwaitWaiting(1);
  AwaitSaved(1);
  rows.Silence({1, 2});
  Send(1, 1, 1);
  std::thread save([&] { shard_->CommitAll(); });
  rows.AwaitWaiting(2);
  rows.Silence({1});
  AwaitSaved(2);
  EXPECT_FALSE(dropped.WaitForNotificationWithTimeout(absl::Milliseconds(200)));
  rows.Answer();
  drop.join();
  save.join();
  EXPECT_EQ(StepsSaved(1), 2u);
}

TEST_F(ShardOfACluster, TickSavesNoRunThatIsBeingDropped) {
  AddRun(1);
  AddRun(2);
  Send(1, 0, 1);
  Send(2, 0, 1);
  std::atomic<int> saves = 0;
  series_.on_save = [&](RunId run) { saves += run == 1; };
  rows.Silence({2});
  Lsn needed = 0;
  std::thread drop([&] { needed = shard_->Drop(1, 3, /*save=*/true); });
  rows.AwaitWaiting(1);
  AwaitSaved(1);
  const Lsn late = Send(1, 1, 1);
  clock_.Advance(60'000'000'000);
  Tick();
  Tick();
  EXPECT_EQ(saves, 1);
  rows.Answer();
  drop.join();
  EXPECT_LE(needed, late) << "whoever takes it up reads it from the log";
  shard_.reset();
}

TEST_F(ShardOfACluster, MessagesAreHeldDuringFinalSave) {
  AddRun(1);
  Send(1, 0, 1);
  rows.Silence();
  const auto push = [&](IngestMessage message, WalKind kind) {
    WalRecord record;
    record.kind = kind;
    record.run = 1;
    record.epoch = 1;
    record.payload = "not read here";
    absl::MutexLock lock(&shard_->mutex());
    ASSERT_TRUE(shard_->Append(std::move(record), std::move(message), 100).ok());
  };
  push({2, ByeMessage{}}, WalKind::kMessage);
  Tick();
  rows.AwaitWaiting(1);
  HelloMessage again;
  again.run.name = "1";
  again.run.layout = kShardLayout;
  again.run.reporters = 1;
  push({0, again}, WalKind::kHello);
  const Lsn late = Send(1, 1, 1);
  shard_->Barrier([] {});
  shard_->WithRun(1, [](const LiveRun* run) { EXPECT_TRUE(run != nullptr && run->ended()); });
  rows.Answer();
  EXPECT_GT(shard_->CommitAll().front(), late);
  EXPECT_EQ(StepsSaved(1), 2u);
  EXPECT_FALSE(database_->GetRun(1)->ended);
}

TEST_F(ShardOfACluster, SavesUnderWayAreBounded) {
  constexpr int kRuns = Shard::kSavesMax + 4;
  for (RunId run = 1; run <= kRuns; ++run) {
    AddRun(run);
    Send(run, 0, 1);
  }
  int begun = 0;
  std::set<RunId> all;
  for (RunId run = 1; run <= kRuns; ++run) all.insert(run);
  series_.on_save = [&](RunId) { ++begun; };
  rows.Silence(all);
  std::thread save([&] { shard_->CommitAll(); });
  rows.AwaitWaiting(2);  // The threads that wait for others.
  for (int i = 0; i < 2 * kRuns; ++i) shard_->Barrier([] {});
  shard_->Barrier([&] { EXPECT_EQ(begun, Shard::kSavesMax); });
  rows.Answer();
  save.join();
  for (RunId run = 1; run <= kRuns; ++run) EXPECT_EQ(StepsSaved(run), 1u);
  shard_.reset();
}

TEST_F(ShardOfACluster, SavesOfOneDatabaseDoNotDelayAnothers) {
  HalfAway log(wal_.get(), /*away=*/false);
  parts_.wal = &log;
  shard_ = std::make_unique<Shard>(Shard::Options(), parts_, 0);
  shard_->Start();
  constexpr RunId kRuns = 2 * Shard::kSavesMax + 4;
  std::set<RunId> odd;
  for (RunId run = 1; run <= kRuns; ++run) {
    AddRun(run);
    Send(run, 0, 1);
    if (run % 2 == 1) odd.insert(run);
  }
  rows.Silence(odd);
  std::thread save([&] { shard_->CommitBefore(/*lane=*/1, std::numeric_limits<Lsn>::max()); });
  rows.AwaitWaiting(2);
  shard_->CommitBefore(/*lane=*/0, std::numeric_limits<Lsn>::max());
  EXPECT_EQ(StepsSaved(kRuns), 1u);
  EXPECT_EQ(StepsSaved(1), 0u);
  rows.Answer();
  save.join();
  EXPECT_EQ(StepsSaved(1), 1u);
  shard_.reset();
}

TEST_F(ShardOfACluster, MessagesOfDroppedRunStayInLog) {
  AddRun(1);
  Send(1, 0, 1);
  shard_->Drop(1, 2, /*save=*/true);
  const auto steps = [this] {
    uint64_t found = 0;
    shard_->WithRun(1, [&](const LiveRun* run) { found = run == nullptr ? 0 : run->record().steps_recorded; });
    return found;
  };
  Send(1, 1, 1);
  EXPECT_EQ(steps(), 0u) << "its rows are there still: the run was taken up again";
  EXPECT_EQ(StepsSaved(1), 1u);
  shard_->Expect(1, 2);
  Send(1, 1, 1);
  EXPECT_EQ(steps(), 2u);
}

TEST_F(ShardOfACluster, UnsavedMessagesAreNeeded) {
  AddRun(1);
  const Lsn saved = Send(1, 0, 1);
  EXPECT_GT(shard_->CommitAll().front(), saved);
  const Lsn unsaved = Send(1, 1, 1);
  rows.away = true;
  EXPECT_LE(shard_->CommitAll().front(), unsaved);
  EXPECT_LE(shard_->Drop(1, 2, /*save=*/true), unsaved);
}

TEST_F(ShardTest, NewRulesReachEachRunOnceThroughLog) {
  for (const RunId run : {1, 2}) AddRun(run);
  Tick();
  EXPECT_THAT(RulesInLog(), ElementsAre()) << "nothing has changed";
  const auto off = ParseRules("off: [nonfinite]", "r.yml");
  ASSERT_TRUE(off.ok());
  rules_.Set(*off);
  for (int i = 0; i < 3; ++i) Tick();
  EXPECT_THAT(RulesInLog(), ElementsAre("1: off: [nonfinite]", "2: off: [nonfinite]"));
  const auto read_again = ParseRules("off: [nonfinite]", "r.yml");
  rules_.Set(*read_again);
  Tick();
  EXPECT_EQ(RulesInLog().size(), 2u) << "the same words are no change";

  Send(1, 0, std::numeric_limits<float>::quiet_NaN());
  shard_->CommitAll();
  EXPECT_TRUE(alerts_->List(1, true).empty());
  const auto again = LiveRun::Load(parts_, *database_->GetRun(1));
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_FALSE((*again)->RulesDiffer(*read_again)) << "its state holds them";
  EXPECT_TRUE((*again)->RulesDiffer(rules_.built_in()));

  rules_.Set(nullptr);
  Tick();
  EXPECT_THAT(RulesInLog(), ElementsAre("1: off: [nonfinite]", "2: off: [nonfinite]", "1: ", "2: "));
  Send(1, 1, std::numeric_limits<float>::quiet_NaN());
  shard_->CommitAll();
  EXPECT_EQ(alerts_->List(1, true).size(), 1u);
}

TEST_F(ShardTest, SilentRunEndsUnlessStreamIsOpen) {
  parts_.attached = [](RunId run) { return run == 2; };
  Shard::Options options;
  options.run_silent_ms_max = 3'600'000;
  shard_ = std::make_unique<Shard>(options, parts_, 0);
  shard_->Start();
  for (const RunId run : {1, 2}) {
    AddRun(run);
    Send(run, 0, 1);
  }
  clock_.Advance(int64_t{3600} * 1'000'000'000);
  for (int i = 0; i < 2; ++i) Tick();
  const auto is_ended = [&](RunId run) {
    bool ended = false;
    shard_->WithRun(run, [&](const LiveRun* live) { ended = live->ended(); });
    return ended;
  };
  EXPECT_TRUE(is_ended(1));
  EXPECT_FALSE(is_ended(2));
}

TEST_F(ShardTest, CutOffImportKeepsLogForLimitedTime) {
  std::atomic<bool> attached = true;
  parts_.attached = [&](RunId) { return attached.load(); };
  shard_ = std::make_unique<Shard>(Shard::Options(), parts_, 0);
  shard_->Start();
  AddRun(1, /*reporters=*/2, "a recording");
  const Lsn open = Send(1, 0, 1);
  const auto wait = [&](int64_t seconds) {
    clock_.Advance(seconds * 1'000'000'000);
    for (int i = 0; i < 4; ++i) Tick();  // A deadline is found, then it passes.
    clock_.Advance(int64_t{11} * 1'000'000'000);
    for (int i = 0; i < 4; ++i) Tick();
    return shard_->CommitAll().front();
  };
  EXPECT_LE(wait(3600), open) << "whoever imports it is slow";
  attached = false;
  EXPECT_LE(wait(600), open) << "he may come back";
  EXPECT_GT(wait(600), open);
}

TEST_F(ShardTest, SilentLaneDoesNotKeepOtherLanes) {
  HalfAway log(wal_.get());
  parts_.wal = &log;
  shard_ = std::make_unique<Shard>(Shard::Options(), parts_, 0);
  shard_->Start();
  AddRun(1);
  AddRun(2);
  const Lsn held = Send(1, 0, 1), saved = Send(2, 0, 1);
  const std::vector<Lsn> needed = shard_->CommitAll();
  EXPECT_THAT(needed, ElementsAre(testing::Gt(saved), testing::Le(held)));
  shard_.reset();
}

}  // namespace
}  // namespace bellwether::server
