// Goal: what is committed is read back, whole batches or nothing; a transition
// is stored once and its id never given twice; damage is a status.
// Method: every field through a reopened database; a crash is a copy of the
// directory taken while the database is open (what is not flushed is not in it).
#include "server/store/database.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/synchronization/notification.h"
#include "server/store/action_store.h"
#include "server/store/alert_store.h"
#include "server/store/record_codec.h"
#include "server/store/rocks_database.h"
#include "server/store/shared_rows.h"
#include "server/util/byte_io.h"
#include "tests/support/crash_copy.h"
#include "tests/support/memory_database.h"
#include "tests/support/temp_directory.h"

namespace bellwether::server {
namespace {

RunRecord FullRun() {
  RunRecord run;
  run.id = 3;
  run.description = {
      .name = "llama",
      .attempt = 2,
      .world = 64,
      .reporters = 8,
      .layout = {.layers = 32, .heads = 32, .kv_heads = 8, .head_dim = 128, .seq_len = 4096},
      .attention = {.kernel = "flash", .score_dtype = "bf16", .centred = true, .softcap = 30, .window = 7},
      .framework = "torch",
      .model = "x",
      .weight_decay = 0.1,
      .step_from_attach = true,
      .labels = {{"team", "a"}, {"empty", ""}}};
  run.description.uuid[15] = 0xff;
  run.step = 77;
  run.stage = 4;
  run.ended = true;
  run.end_reason = "bye";
  run.frames = 1ull << 40;
  run.applied_lsn = 99;
  run.signals = {SignalId::kRows, SignalId::kLoss};
  run.kind_changed = true;
  return run;
}

AlertTransition FullTransition(const std::string& key, uint32_t k) {
  AlertTransition t;
  t.run = 3;
  t.run_name = "llama";
  t.key = key;
  t.k = k;
  t.state = AlertState::kFiring;
  t.severity = Severity::kCritical;
  t.strongest = {1, 2};
  t.heads = {{1, 2}, {3, 4}};
  t.eta = {.known = true, .steps = 10, .lower_steps = 5, .upper_steps = 20};
  t.evidence = {{.signal = "drift_ratio", .where = {1, 2}, .value = 9, .threshold = 4, .text = "grows"}};
  t.summary = "drift";
  return t;
}

// With `changes` changes.
Action FullAction(const std::string& id, size_t changes) {
  Action action{.id = id,
                .attempt = 2,
                .kind = ActionKind::kQkClip,
                .scope = {.layers = {1, 4}, .heads = {{3, 5}, {0, 1}}},
                .mode = "hp",
                .value = 0.5,
                .apply_at_step = 120,
                .expires_unix_ns = 77,
                .expected_effect = "less",
                .cost = "little",
                .asked_by = "alice",
                .alert_key = "drift/3/5/100",
                .undoes = "x-1",
                .not_allowed = "rank 0 did not allow it"};
  for (size_t i = 0; i < changes; ++i) {
    action.state = static_cast<ActionState>(1 + i % 11);
    action.history.push_back({action.state, static_cast<int64_t>(i), "bob", "because", static_cast<int64_t>(10 * i)});
  }
  return action;
}

class DatabaseTest : public testing::Test {
 protected:
  std::string Path() const { return directory_.path() + "/db"; }
  void Open() {
    database_.reset();
    auto opened = Database::Open({.directory = Path()});
    ASSERT_TRUE(opened.ok()) << opened.status();
    database_ = *std::move(opened);
  }
  // As the disk is now, without what a clean close would write.
  void Crash() {
    const std::filesystem::path copy = directory_.path() + "/copy";
    CrashCopy(Path(), copy);
    database_.reset();
    std::filesystem::remove_all(Path());
    std::filesystem::rename(copy, Path());
    Open();
  }
  void SetUp() override { Open(); }

  TempDirectory directory_;
  std::unique_ptr<Database> database_;
};

TEST_F(DatabaseTest, KeepsRunsRanksEventsAndStateOverAReopen) {
  auto batch = database_->NewBatch();
  const RunRecord run = FullRun();
  batch->PutRun(run);
  batch->PutRank(3, {.rank = 300, .epoch = 4, .durable_seq = 5});
  batch->PutRank(3, {.rank = 2, .epoch = 9, .durable_seq = 8});
  batch->PutEvent(3, {.step = 1, .kind = EventKind::kRestore, .value = 2, .text = "a"});
  batch->PutEvent(3, {.step = 2, .text = "b"});
  batch->PutState(run, std::string("\0state", 6));
  ASSERT_TRUE(database_->Commit(std::move(batch)).ok());
  Open();
  batch = database_->NewBatch();
  batch->PutEvent(3, {.step = 3, .text = "c"});
  ASSERT_TRUE(database_->Commit(std::move(batch)).ok());
  const auto runs = database_->ListRuns();
  ASSERT_TRUE(runs.ok());
  ASSERT_EQ(runs->size(), 1u);
  EXPECT_EQ(EncodeRunRecord((*runs)[0]), EncodeRunRecord(run));
  EXPECT_EQ((*runs)[0].description.labels, run.description.labels);
  EXPECT_EQ((*runs)[0].description.attention.centred, true);
  EXPECT_EQ((*runs)[0].signals, run.signals);
  EXPECT_EQ(database_->GetRun(4).status().code(), absl::StatusCode::kNotFound);
  const auto ranks = database_->ListRanks(3);
  ASSERT_EQ(ranks->size(), 2u);
  EXPECT_EQ((*ranks)[0].rank, 2u);
  EXPECT_EQ((*ranks)[1].durable_seq, 5u);
  const auto events = database_->ListEvents(3, 0, 100);
  ASSERT_EQ(events->size(), 3u);
  EXPECT_EQ((*events)[0].kind, EventKind::kRestore);
  EXPECT_EQ((*events)[2].text, "c");
  EXPECT_EQ(*database_->CountEvents(3), 3u);
  const auto page = database_->ListEvents(3, 1, 1);
  ASSERT_EQ(page->size(), 1u);
  EXPECT_EQ((*page)[0].text, "b");
  EXPECT_TRUE(database_->ListEvents(3, 3, 1)->empty());
  EXPECT_TRUE(database_->ListEvents(3, 0, 0)->empty());
  EXPECT_EQ(*database_->CountEvents(2), 0u);
  EXPECT_TRUE(database_->ListEvents(2, 0, 100)->empty()) << "of another run";
  EXPECT_EQ(*database_->GetState(3), std::string("\0state", 6));
  EXPECT_EQ(database_->GetState(4).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(DatabaseTest, EndedRunKeepsItsStateUntilAResumeReplacesIt) {
  RunRecord run = FullRun();
  const auto put = [&](bool ended, const std::string& state) {
    run.ended = ended;
    auto batch = database_->NewBatch();
    batch->PutState(run, state);
    ASSERT_TRUE(database_->Commit(std::move(batch)).ok());
    EXPECT_EQ(*database_->GetState(run.id), state);
  };
  put(false, "live");
  put(true, "ended");
  Open();
  EXPECT_EQ(*database_->GetState(run.id), "ended");
  put(false, "goes on");
  put(true, "ended again");
}

// Every state is new and as long as the last: without its space given back the
// database would hold dozens of them.
// Of every kind of row, over a crash between the record and the rest, too.
TEST_F(DatabaseTest, DeletedRunLeavesNothingButItsRecord) {
  RunRecord run = FullRun(), other = FullRun();
  other.id = run.id + 1;
  for (const RunRecord& each : {run, other}) {
    auto batch = database_->NewBatch();
    batch->PutRun(each);
    batch->PutRank(each.id, {.rank = 1});
    for (int i = 0; i < 5000; ++i) batch->PutEvent(each.id, {.step = i, .text = "e"});
    batch->PutState(each, "state");
    batch->PutRows(each.id, {});
    // What the series' parts, the windows and the retention write.
    for (const char* kind : {"s", "m", "w", "p", "x"}) {
      RocksBatch::As(batch.get())->Put(KeyBuilder(kind[0]).U64(each.id).U8(1).key(), "row");
    }
    ASSERT_TRUE(database_->Commit(std::move(batch)).ok());
    AlertTransition transition{.run = each.id, .key = "a", .k = 1};
    ASSERT_TRUE(*database_->PutTransition(&transition));
    ASSERT_TRUE(database_->PutAlertNote(each.id, "a", {.by = "ann"}).ok());
    ASSERT_TRUE(database_->PutTold(each.id, 1, 1).ok());
    ASSERT_TRUE(database_->PutBands(each.id, "bands").ok());
    ASSERT_TRUE(*database_->PutAction(each.id, {.id = "1-1", .history = {{.by = "ann"}}}) == 1);
    ASSERT_TRUE(*database_->PutAudit(each.id, 1, {.by = "ann"}));
  }
  const auto rows_of = [this](RunId id) {
    std::map<char, int> rows;
    const RocksDatabase::Snapshot snapshot(RocksDatabase::As(database_.get()));
    for (int kind = 'A'; kind <= 'z'; ++kind) {
      const auto prefix = KeyBuilder(static_cast<char>(kind)).U64(id).key();
      if (kind == 't') continue;  // By its own number.
      EXPECT_TRUE(snapshot.Scan(prefix, {}, [&](auto, auto) { return ++rows[static_cast<char>(kind)] > 0; }).ok());
    }
    return rows;
  };
  ASSERT_TRUE(database_->Flush().ok());
  const auto before = rows_of(run.id);
  EXPECT_EQ(before.size(), 16u) << "every kind of database.h";
  ASSERT_TRUE(database_->DeleteRun(run).ok());
  Crash();
  for (int times = 0; times < 2; ++times) {
    EXPECT_EQ(rows_of(run.id), (std::map<char, int>{{'r', 1}}));
    EXPECT_EQ(rows_of(other.id), before);
    const auto transitions = database_->ListTransitions(0, 100, 0);
    ASSERT_EQ(transitions->size(), 1u);
    EXPECT_EQ((*transitions)[0].run, other.id);
    const auto left = database_->GetRun(run.id);
    ASSERT_TRUE(left.ok()) << left.status();
    EXPECT_TRUE(left->deleted);
    EXPECT_TRUE(left->description.name.empty() && left->description.labels.empty());
    ASSERT_TRUE(database_->DeleteRun(*left).ok()) << "as after a crash";
  }
  AlertTransition next{.run = other.id, .key = "b", .k = 1};
  ASSERT_TRUE(*database_->PutTransition(&next));
  EXPECT_EQ(next.id, 3u) << "no number is given twice";
}

TEST_F(DatabaseTest, AFlushGivesBackWhatWasSuperseded) {
  const uint32_t seed = 4;
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  constexpr size_t kBytes = 200 << 10;
  for (int i = 0; i < 40; ++i) {
    std::string state(kBytes, '\0');
    for (char& byte : state) byte = static_cast<char>(random());
    auto batch = database_->NewBatch();
    batch->PutState(RunRecord{.id = 1}, state);
    ASSERT_TRUE(database_->Commit(std::move(batch)).ok());
    ASSERT_TRUE(database_->Flush().ok());
  }
  EXPECT_GE(database_->bytes(), static_cast<int64_t>(kBytes));
  EXPECT_LE(database_->bytes(), static_cast<int64_t>(4 * kBytes));
}

TEST_F(DatabaseTest, ACrashKeepsWhatWasFlushedAndNoHalfBatch) {
  for (RunId run = 1; run <= 2; ++run) {
    auto batch = database_->NewBatch();
    RunRecord record;
    record.id = run;
    batch->PutRun(record);
    batch->PutState(record, "state");
    ASSERT_TRUE(database_->Commit(std::move(batch)).ok());
    if (run == 1) {
      ASSERT_TRUE(database_->Flush().ok());
    }
  }
  EXPECT_EQ(database_->ListRuns()->size(), 2u);
  EXPECT_EQ(database_->ListRuns(0, 2)->size(), 1u);
  EXPECT_EQ(database_->ListRuns(2, 3)->front().id, 2u);
  EXPECT_TRUE(database_->ListRuns(3, UINT64_MAX)->empty());
  Crash();
  EXPECT_EQ(database_->ListRuns()->size(), 1u);
  EXPECT_TRUE(database_->GetState(1).ok());
  EXPECT_FALSE(database_->GetState(2).ok());
}

TEST_F(DatabaseTest, TransitionIsStoredOnceAndKeepsItsIdOverCrash) {
  AlertTransition first = FullTransition("drift/1/2/100", 1);
  EXPECT_TRUE(*database_->PutTransition(&first));
  AlertTransition again = FullTransition("drift/1/2/100", 1);
  EXPECT_FALSE(*database_->PutTransition(&again));
  EXPECT_EQ(again.id, first.id);
  ASSERT_TRUE(database_->Flush().ok());
  AlertTransition unflushed = FullTransition("drift/1/2/100", 2);
  EXPECT_TRUE(*database_->PutTransition(&unflushed));
  EXPECT_GT(unflushed.id, first.id);
  Crash();
  AlertTransition replayed = FullTransition("drift/1/2/100", 2);
  EXPECT_FALSE(*database_->PutTransition(&replayed)) << "people heard of it before the crash";
  EXPECT_EQ(replayed.id, unflushed.id);
  AlertTransition other = FullTransition("other", 1);
  EXPECT_TRUE(*database_->PutTransition(&other));
  EXPECT_GT(other.id, unflushed.id);
  Open();
  EXPECT_EQ(database_->last_transition_id(), other.id);
  const auto all = database_->ListTransitions(0, 100, 0);
  ASSERT_EQ(all->size(), 3u);
  EXPECT_EQ(EncodeTransition((*all)[0]), EncodeTransition(first));
  EXPECT_EQ((*all)[0].evidence[0].text, "grows");
  EXPECT_EQ(database_->ListTransitions(first.id, 100, 0)->size(), 2u);
  EXPECT_EQ(database_->ListTransitions(0, 1, 0)->size(), 1u);
  EXPECT_EQ(database_->ListTransitions(0, 100, 4)->size(), 0u);
}

TEST_F(DatabaseTest, TransitionWithoutSiblingsIsRead) {
  AlertTransition whole = FullTransition("drift/1/2/100", 1);
  whole.evidence[0].siblings = {
      .runs = 12, .step_begin = 2048, .step_end = 2896, .min = 0.2, .p01 = 0.3, .p50 = 1, .p99 = 1.9, .max = 2.4};
  whole.siblings = "12 earlier runs";
  const std::string now = EncodeTransition(whole);
  const auto read = DecodeTransition(now);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(EncodeTransition(*read), now);
  EXPECT_EQ(read->evidence[0].siblings.runs, 12u);
  EXPECT_EQ(read->evidence[0].siblings.p99, 1.9);
  EXPECT_EQ(read->siblings, "12 earlier runs");

  // Version 1: without the band behind the evidence's text, and the sentence at the end.
  AlertTransition bare = FullTransition("drift/1/2/100", 1);
  std::string before = EncodeTransition(bare);
  before[0] = 1;
  before.pop_back();
  before.erase(before.find("grows") + 5, 4 + 2 * 8 + 5 * 8);
  const auto old = DecodeTransition(before);
  ASSERT_TRUE(old.ok()) << old.status();
  EXPECT_EQ(EncodeTransition(*old), EncodeTransition(bare));
  before[0] = 3;
  EXPECT_EQ(DecodeTransition(before).status().code(), absl::StatusCode::kDataLoss);
}

TEST_F(DatabaseTest, RunRecordWithoutMixedFlagIsRead) {
  RunRecord run = FullRun();
  std::string before = EncodeRunRecord(run);
  before[0] = 1;
  before.pop_back();
  const auto old = DecodeRunRecord(before);
  ASSERT_TRUE(old.ok()) << old.status();
  run.kind_changed = false;
  EXPECT_EQ(EncodeRunRecord(*old), EncodeRunRecord(run));
}

TEST_F(DatabaseTest, RunIsStoredInTheOldestVersionHoldingItsFields) {
  RunRecord run = FullRun();
  EXPECT_EQ(EncodeRunRecord(run)[0], 2);
  run.import_of = "f.bwrun";
  const std::string before = EncodeRunRecord(run);
  EXPECT_EQ(before[0], 3);
  run.frames_stripped = uint64_t{1} << 40;
  EXPECT_EQ(EncodeRunRecord(run)[0], 4);
  const auto read = DecodeRunRecord(EncodeRunRecord(run));
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->frames_stripped, run.frames_stripped);
  EXPECT_EQ(read->import_of, "f.bwrun");
  const auto old = DecodeRunRecord(before);
  ASSERT_TRUE(old.ok()) << old.status();
  EXPECT_EQ(old->frames_stripped, 0u);
  run.description.launch_unix_ms = 1'790'000'000'000;
  EXPECT_EQ(EncodeRunRecord(run)[0], 5);
  EXPECT_EQ(DecodeRunRecord(EncodeRunRecord(run))->description.launch_unix_ms, 1'790'000'000'000);
  EXPECT_FALSE(DecodeRunRecord(EncodeRunRecord(run))->import_notifies);
  run.import_notifies = true;
  EXPECT_EQ(EncodeRunRecord(run)[0], 6);
  EXPECT_TRUE(DecodeRunRecord(EncodeRunRecord(run))->import_notifies);
  run.renamed = "other";
  EXPECT_EQ(EncodeRunRecord(run)[0], 10);
  EXPECT_EQ(DecodeRunRecord(EncodeRunRecord(run))->renamed, "other");
  std::string newer = EncodeRunRecord(run);
  newer[0] = 11;
  EXPECT_EQ(DecodeRunRecord(newer).status().code(), absl::StatusCode::kDataLoss);
}

TEST_F(DatabaseTest, ActionChangesAreStoredOnceAndSurviveACrash) {
  size_t told = 0;
  ActionStore log(database_.get());
  log.Subscribe([&told](RunId, const Action&, size_t fresh) { told += fresh; });
  EXPECT_EQ(*log.Post(3, FullAction("x-10", 2)), 2u);
  EXPECT_EQ(*log.Post(3, FullAction("x-10", 2)), 0u);
  EXPECT_EQ(*log.Post(3, FullAction("x-10", 1)), 0u) << "what a replay says on the way";
  EXPECT_EQ(*log.Post(3, FullAction("x-10", 5)), 3u);
  EXPECT_EQ(*log.Post(3, FullAction("x-9", 1)), 1u);
  EXPECT_EQ(*log.Post(4, FullAction("y-1", 1)), 1u);
  EXPECT_EQ(told, 7u);
  // A long history loses its middle.
  Action longest = FullAction("x-9", 64);
  EXPECT_EQ(*log.Post(3, longest), 63u);
  longest.history.erase(longest.history.begin() + 1);
  longest.history.push_back({ActionState::kSent, 1000, "server", "again", 0});
  EXPECT_EQ(*log.Post(3, longest), 1u);
  Crash();
  ActionStore after(database_.get());
  EXPECT_EQ(*after.Post(3, FullAction("x-10", 5)), 0u);
  const auto actions = after.List(3);
  ASSERT_EQ(actions->size(), 2u);
  EXPECT_EQ((*actions)[0].id, "x-9") << "oldest first";
  EXPECT_EQ(EncodeAction((*actions)[1]), EncodeAction(FullAction("x-10", 5)));
  EXPECT_EQ((*actions)[1].scope.heads[0].head, 5);
  EXPECT_EQ(after.Get(3, "x-10")->cost, "little");
  EXPECT_TRUE(absl::IsNotFound(after.Get(3, "y-1").status()));
}

TEST_F(DatabaseTest, TheAuditKeepsTheNewestOfARunOnceEach) {
  const auto entry = [](size_t i) { return AuditEntry{.by = std::to_string(i), .what = "approve", .refused = "no"}; };
  for (size_t i = 1; i <= Database::kAuditMax; ++i) EXPECT_TRUE(*database_->PutAudit(3, i, entry(i)));
  EXPECT_FALSE(*database_->PutAudit(3, 7, entry(7)));
  EXPECT_TRUE(*database_->PutAudit(4, 7, entry(7)));
  EXPECT_EQ(database_->ListAudit(3)->size(), Database::kAuditMax);
  EXPECT_TRUE(*database_->PutAudit(3, Database::kAuditMax + 1, entry(0)));
  EXPECT_FALSE(*database_->PutAudit(3, 1, entry(1))) << "a replay of what was dropped";
  Crash();
  const auto kept = database_->ListAudit(3);
  ASSERT_EQ(kept->size(), Database::kAuditMax);
  EXPECT_EQ(kept->front().by, "2");
  EXPECT_EQ(kept->back().by, "0");
  EXPECT_EQ(kept->back().refused, "no");
}

TEST_F(DatabaseTest, BandsAreThereAfterACrash) {
  ASSERT_TRUE(database_->PutBands(3, std::string("\0one", 4)).ok());
  ASSERT_TRUE(database_->PutBands(1ull << 40, "far").ok());
  ASSERT_TRUE(database_->PutBands(4, "gone").ok());
  ASSERT_TRUE(database_->DeleteBands(4).ok());
  Crash();
  const auto rows = database_->ListBands();
  ASSERT_TRUE(rows.ok());
  ASSERT_EQ(rows->size(), 2u);
  EXPECT_EQ((*rows)[0].run, 3u);
  EXPECT_EQ((*rows)[0].row, std::string("\0one", 4));
  EXPECT_EQ((*rows)[1].run, 1ull << 40);
}

TEST(AlertStoreTest, UnstorableAlertsAreToldAtOnceAndStoredInOrder) {
  MemoryDatabase database;
  AlertStore log(&database);
  std::vector<std::pair<std::string, uint64_t>> told;
  log.Subscribe([&told](const AlertTransition& t) { told.emplace_back(t.key, t.id); });
  database.SetFull(true);
  EXPECT_TRUE(absl::IsResourceExhausted(log.Post(FullTransition("a", 1)).status()));
  EXPECT_TRUE(absl::IsUnavailable(log.Post(FullTransition("b", 1)).status())) << "it is not even tried";
  EXPECT_TRUE(absl::IsResourceExhausted(log.StoreWaiting()));
  EXPECT_EQ(log.List(0, true).size(), 2u) << "they fire, stored or not";
  EXPECT_TRUE(log.Waits(3)) << "the run must not be saved as if they were";
  database.SetFull(false);
  EXPECT_TRUE(absl::IsUnavailable(log.Post(FullTransition("c", 1)).status())) << "not before the others";
  EXPECT_FALSE(*log.Post(FullTransition("b", 1))) << "as after a takeover: it was told, and waits";
  EXPECT_TRUE(log.StoreWaiting().ok());
  EXPECT_FALSE(log.Waits(3));
  EXPECT_TRUE(*log.Post(FullTransition("d", 1)));
  using Told = std::vector<std::pair<std::string, uint64_t>>;
  EXPECT_EQ(told, (Told{{"a", 0}, {"b", 0}, {"c", 0}, {"a", 1}, {"b", 2}, {"c", 3}, {"d", 4}}));
  EXPECT_EQ(log.Get(3, "a")->last.id, 1u);
  EXPECT_FALSE(*log.Post(FullTransition("a", 1))) << "as after a crash";
}

TEST(AlertStoreTest, AlertsBeyondTheWaitingLimitAreToldAndCounted) {
  constexpr int kMax = 4096;
  MemoryDatabase database;
  Counters counters;
  AlertStore log(&database, &counters);
  int told = 0;
  log.Subscribe([&told](const AlertTransition&) { ++told; });
  database.SetFull(true);
  for (int i = 0; i < kMax + 3; ++i) log.Post(FullTransition(std::to_string(i), 1)).status().IgnoreError();
  EXPECT_EQ(told, kMax + 3);
  EXPECT_EQ(counters.gauge("bellwether_alerts_waiting")->value(), kMax);
  EXPECT_EQ(counters.counter("bellwether_alerts_never_stored_total")->value(), 3);
  database.SetFull(false);
  EXPECT_TRUE(log.StoreWaiting().ok());
  EXPECT_EQ(counters.gauge("bellwether_alerts_waiting")->value(), 0);
}

// Runs with odd numbers are in a second store, which is away at will.
class TwoStores final : public MemoryDatabase {
 public:
  bool away = true;
  std::vector<std::string> kept;

  uint32_t StoreOf(RunId run) const override { return run % 2; }
  absl::Status KeepTransition(const AlertTransition& transition) override {
    kept.push_back(transition.key);
    return absl::OkStatus();
  }
  absl::StatusOr<bool> PutTransition(AlertTransition* transition) override {
    if (away && transition->run % 2 == 1) return absl::UnavailableError("away");
    return MemoryDatabase::PutTransition(transition);
  }
};

TEST(AlertStoreTest, AStoreThatIsAwayHoldsNoOthersAlerts) {
  const auto of_run = [](RunId run, const std::string& key) {
    AlertTransition transition = FullTransition(key, 1);
    transition.run = run;
    return transition;
  };
  TwoStores database;
  AlertStore log(&database);
  std::vector<std::pair<std::string, uint64_t>> told;
  log.Subscribe([&told](const AlertTransition& t) { told.emplace_back(t.key, t.id); });
  EXPECT_TRUE(absl::IsUnavailable(log.Post(of_run(1, "a")).status()));
  EXPECT_TRUE(*log.Post(of_run(2, "b")));
  EXPECT_TRUE(absl::IsUnavailable(log.Post(of_run(3, "c")).status()));
  EXPECT_EQ(database.kept, std::vector<std::string>{"c"}) << "what is not even tried is kept with its run";
  EXPECT_TRUE(log.Waits(1));
  EXPECT_FALSE(log.Waits(3)) << "it is kept";
  EXPECT_TRUE(*log.Post(of_run(4, "d")));
  EXPECT_TRUE(absl::IsUnavailable(log.StoreWaiting()));
  database.away = false;
  EXPECT_TRUE(log.StoreWaiting().ok());
  using Told = std::vector<std::pair<std::string, uint64_t>>;
  EXPECT_EQ(told, (Told{{"a", 0}, {"b", 1}, {"c", 0}, {"d", 2}, {"a", 3}, {"c", 4}}));
}

// Some of whose rows cannot be read.
class DamagedDatabase final : public MemoryDatabase {
 public:
  absl::StatusOr<bool> PutTransition(AlertTransition* transition) override {
    if (transition->key == "damaged") return absl::DataLossError("damaged");
    return MemoryDatabase::PutTransition(transition);
  }
};

TEST(AlertStoreTest, DamagedAlertRowIsToldCountedAndBlocksNoOther) {
  DamagedDatabase database;
  Counters counters;
  AlertStore log(&database, &counters);
  int told = 0;
  log.Subscribe([&told](const AlertTransition&) { ++told; });
  EXPECT_TRUE(absl::IsDataLoss(log.Post(FullTransition("damaged", 1)).status()));
  EXPECT_TRUE(absl::IsUnavailable(log.Post(FullTransition("behind", 1)).status()));
  EXPECT_EQ(told, 2);
  EXPECT_TRUE(log.StoreWaiting().ok());
  EXPECT_EQ(log.Get(3, "behind")->last.id, 1u);
  EXPECT_FALSE(log.Waits(3));
  EXPECT_EQ(counters.counter("bellwether_alerts_never_stored_total")->value(), 1);
}

// A store of all servers that lists what another put, and keeps those waiting who put
// into it.
class SilentStore final : public SharedRows {
 public:
  explicit SilentStore(AlertTransition of_another) : of_another_(std::move(of_another)) { of_another_.id = 1; }
  absl::Notification asked, answers;

  absl::Status PutRows(RunId, const std::vector<SharedRow>&) override { return absl::OkStatus(); }
  absl::StatusOr<bool> PutTransition(AlertTransition* transition) override {
    {
      absl::MutexLock lock(&mutex_);
      transition->id = 2;
      own_ = *transition;  // It is there, and its answer is not.
    }
    asked.Notify();
    answers.WaitForNotification();
    return true;
  }
  absl::StatusOr<std::vector<AlertTransition>> ListTransitions(uint64_t after, size_t) const override {
    absl::MutexLock lock(&mutex_);
    std::vector<AlertTransition> listed;
    if (after < 1) listed.push_back(of_another_);
    if (after < 2 && own_.id != 0) listed.push_back(own_);
    return listed;
  }

 private:
  AlertTransition of_another_;
  mutable absl::Mutex mutex_;
  AlertTransition own_ ABSL_GUARDED_BY(mutex_);
};

TEST(AlertStoreTest, SilentStoreDelaysNoOtherCaller) {
  const TempDirectory directory;
  SilentStore store(FullTransition("another's", 1));
  const auto database = Database::Open({.directory = directory.path() + "/db", .shared = &store});
  ASSERT_TRUE(database.ok()) << database.status();
  AlertStore log(database->get());
  std::vector<std::pair<std::string, bool>> told;
  log.Subscribe([&told](const AlertTransition& t) { told.emplace_back(t.key, t.foreign); });
  std::thread post([&] { EXPECT_TRUE(*log.Post(FullTransition("own", 1))); });
  store.asked.WaitForNotification();
  EXPECT_TRUE(log.List(0, false).empty());
  EXPECT_TRUE(log.NotifyForeign().ok());
  EXPECT_EQ(log.List(0, false).size(), 1u);
  store.answers.Notify();
  post.join();
  EXPECT_TRUE(log.NotifyForeign().ok());
  using Told = std::vector<std::pair<std::string, bool>>;
  EXPECT_EQ(told, (Told{{"another's", true}, {"own", false}})) << "its own once, and as its own";
}

// Two alerts' store: takes the first without an answer, and the second.
class LateStore final : public SharedRows {
 public:
  absl::Status PutRows(RunId, const std::vector<SharedRow>&) override { return absl::OkStatus(); }
  absl::StatusOr<bool> PutTransition(AlertTransition* transition) override {
    for (const AlertTransition& known : stored_) {
      if (known.k != transition->k) continue;
      transition->id = known.id;
      return false;
    }
    transition->id = stored_.size() + 1;
    stored_.push_back(*transition);
    if (stored_.size() == 1) return absl::UnavailableError("no answer");
    return true;
  }
  absl::StatusOr<std::vector<AlertTransition>> ListTransitions(uint64_t after, size_t) const override {
    return std::vector<AlertTransition>(stored_.begin() + static_cast<ptrdiff_t>(after), stored_.end());
  }

 private:
  std::vector<AlertTransition> stored_;
};

TEST(AlertStoreTest, LateOlderTransitionDoesNotChangeANewerAlert) {
  const TempDirectory directory;
  LateStore store;
  const auto database = Database::Open({.directory = directory.path() + "/db", .shared = &store});
  ASSERT_TRUE(database.ok()) << database.status();
  AlertStore log(database->get());
  AlertTransition fires = FullTransition("a", 1), ends = FullTransition("a", 2);
  fires.state = AlertState::kFiring;
  ends.state = AlertState::kResolved;
  EXPECT_TRUE(absl::IsUnavailable(log.Post(fires).status()));
  EXPECT_TRUE(absl::IsUnavailable(log.Post(ends).status())) << "not before the other";
  EXPECT_TRUE(log.StoreWaiting().ok());
  EXPECT_TRUE(log.NotifyForeign().ok());
  EXPECT_EQ(log.Get(3, "a")->last.state, AlertState::kResolved);
  EXPECT_EQ(log.Get(3, "a")->last.id, 2u);
}

// A store whose answer about an alert's firing comes after another server has resolved it.
class OvertakenStore final : public SharedRows {
 public:
  explicit OvertakenStore(absl::Status answer) : answer_(std::move(answer)) {}
  absl::Notification asked, answers;

  absl::Status PutRows(RunId, const std::vector<SharedRow>&) override { return absl::OkStatus(); }
  absl::StatusOr<bool> PutTransition(AlertTransition* transition) override {
    {
      absl::MutexLock lock(&mutex_);
      transition->id = 1;
      stored_.push_back(*transition);
      stored_.push_back(*transition);
      stored_.back().id = stored_.back().k = 2;
      stored_.back().state = AlertState::kResolved;
    }
    asked.Notify();
    answers.WaitForNotification();
    if (!answer_.ok()) return answer_;
    return true;
  }
  absl::StatusOr<std::vector<AlertTransition>> ListTransitions(uint64_t after, size_t) const override {
    absl::MutexLock lock(&mutex_);
    return std::vector<AlertTransition>(
        stored_.begin() + static_cast<ptrdiff_t>(std::min<size_t>(after, stored_.size())), stored_.end());
  }

 private:
  const absl::Status answer_;
  mutable absl::Mutex mutex_;
  std::vector<AlertTransition> stored_ ABSL_GUARDED_BY(mutex_);
};

TEST(AlertStoreTest, AnAnswerThatComesLateSetsNoAlertBack) {
  for (const absl::Status& answer : {absl::OkStatus(), absl::UnavailableError("no answer in time")}) {
    SCOPED_TRACE(testing::Message() << answer);
    const TempDirectory directory;
    OvertakenStore store(answer);
    const auto database = Database::Open({.directory = directory.path() + "/db", .shared = &store});
    ASSERT_TRUE(database.ok()) << database.status();
    AlertStore log(database->get());
    AlertTransition fires = FullTransition("a", 1);
    fires.state = AlertState::kFiring;
    std::thread post([&] { EXPECT_EQ(log.Post(fires).status().code(), answer.code()); });
    store.asked.WaitForNotification();
    EXPECT_TRUE(log.NotifyForeign().ok());
    store.answers.Notify();
    post.join();
    EXPECT_EQ(log.Get(3, "a")->last.state, AlertState::kResolved);
  }
}

TEST(AlertStoreTest, UnreadableForeignAlertDoesNotDamageOwnAlerts) {
  class DamagedStore final : public SharedRows {
   public:
    bool damaged = true;
    absl::Status PutRows(RunId, const std::vector<SharedRow>&) override { return absl::OkStatus(); }
    absl::StatusOr<bool> PutTransition(AlertTransition* transition) override {
      transition->id = 1;
      stored_ = {*transition};
      return true;
    }
    absl::StatusOr<std::vector<AlertTransition>> ListTransitions(uint64_t after, size_t) const override {
      if (damaged) return absl::DataLossError("stored transition: unknown version");
      return after == 0 ? stored_ : std::vector<AlertTransition>();
    }

   private:
    std::vector<AlertTransition> stored_;
  };
  const TempDirectory directory;
  DamagedStore store;
  const auto database = Database::Open({.directory = directory.path() + "/db", .shared = &store});
  ASSERT_TRUE(database.ok()) << database.status();
  Counters counters;
  AlertStore log(database->get(), &counters);
  EXPECT_TRUE(absl::IsUnavailable(log.Post(FullTransition("a", 1)).status()));
  EXPECT_TRUE(absl::IsUnavailable(log.StoreWaiting()));
  EXPECT_EQ(counters.counter("bellwether_alerts_never_stored_total")->value(), 0);
  store.damaged = false;
  EXPECT_TRUE(log.StoreWaiting().ok());
  EXPECT_EQ(log.Get(3, "a")->last.id, 1u);
}

TEST(AlertStoreTest, UnansweredNoteDelaysNoOtherCaller) {
  class SilentRows final : public SharedRows {
   public:
    absl::Notification asked, answers;
    uint32_t StoreOf(RunId run) const override { return run % 2; }
    absl::Status PutRows(RunId run, const std::vector<SharedRow>&) override {
      if (run % 2 == 0) return absl::OkStatus();
      asked.Notify();
      answers.WaitForNotification();
      return absl::OkStatus();
    }
    absl::StatusOr<bool> PutTransition(AlertTransition* transition) override {
      transition->id = transition->run;
      return true;
    }
    absl::StatusOr<std::vector<AlertTransition>> ListTransitions(uint64_t, size_t) const override {
      return std::vector<AlertTransition>();
    }
  };
  const TempDirectory directory;
  SilentRows store;
  const auto database = Database::Open({.directory = directory.path() + "/db", .shared = &store});
  ASSERT_TRUE(database.ok()) << database.status();
  AlertStore log(database->get());
  AlertTransition of_another_store = FullTransition("a", 1);
  of_another_store.run = 4;
  ASSERT_TRUE(*log.Post(FullTransition("a", 1)));
  ASSERT_TRUE(*log.Post(of_another_store));
  const Database::AlertNote note = {.acknowledged = true, .by = "alice"};
  std::thread annotate([&] { EXPECT_TRUE(log.Annotate(3, "a", note).ok()); });
  store.asked.WaitForNotification();
  EXPECT_FALSE(log.List(3, false).front().note.acknowledged);
  EXPECT_TRUE(log.Annotate(4, "a", note).ok());
  EXPECT_TRUE(log.List(4, false).front().note.acknowledged);
  store.answers.Notify();
  annotate.join();
  EXPECT_TRUE(log.List(3, false).front().note.acknowledged);
}

// A store whose notes take as long as the test wants.
class SlowNotes final : public MemoryDatabase {
 public:
  absl::StatusOr<AlertNote> GetAlertNote(RunId run, const std::string& key) const override {
    if (asked != nullptr) {
      asked->Notify();
      answers->WaitForNotification();
    }
    return MemoryDatabase::GetAlertNote(run, key);
  }
  absl::Notification *asked = nullptr, *answers = nullptr;
};

TEST(AlertStoreTest, NotesThatAreReadSlowlyDelayNoOtherCaller) {
  SlowNotes database;
  AlertStore log(&database);
  ASSERT_TRUE(*log.Post(FullTransition("a", 1)));
  ASSERT_TRUE(database.PutAlertNote(3, "a", {.acknowledged = true, .by = "alice"}).ok());
  absl::Notification asked, answers, listed;
  database.asked = &asked;
  database.answers = &answers;
  std::thread load([&] { EXPECT_TRUE(log.LoadNotes(3, 4).ok()); });
  asked.WaitForNotification();
  std::thread list([&] {
    EXPECT_EQ(log.List(3, false).size(), 1u);
    listed.Notify();
  });
  EXPECT_TRUE(listed.WaitForNotificationWithTimeout(absl::Seconds(20)));
  // Who writes one meanwhile is not set back to what was read before.
  std::thread annotate([&] { EXPECT_TRUE(log.Annotate(3, "a", {.acknowledged = true, .by = "bob"}).ok()); });
  answers.Notify();
  for (std::thread* const each : {&load, &list, &annotate}) each->join();
  EXPECT_EQ(log.Get(3, "a")->note.by, "bob");
}

TEST_F(DatabaseTest, OlderSchemaIsUpgradedAndNewerOneRefused) {
  const auto set_schema = [this](std::optional<uint32_t> version) {
    auto batch = database_->NewBatch();
    std::string row;
    if (version) ByteWriter(&row).Put(*version);
    if (version) RocksBatch::As(batch.get())->Put("v", row);
    if (!version) RocksBatch::As(batch.get())->Delete("v", 0);
    ASSERT_TRUE(database_->Commit(std::move(batch)).ok());
    ASSERT_TRUE(database_->Flush().ok());
  };
  const auto schema = [this] { return RocksDatabase::Snapshot(RocksDatabase::As(database_.get())).Get("v"); };
  const std::string current = *schema();
  set_schema(std::nullopt);  // As before there was one.
  Open();
  EXPECT_EQ(*schema(), current);
  set_schema(kSchemaVersion + 1);
  database_.reset();
  const absl::Status refused = Database::Open({.directory = Path()}).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
  EXPECT_NE(refused.message().find("newer version"), absl::string_view::npos);
}

TEST_F(DatabaseTest, ACopyIsWholeAndItsDamageIsFound) {
  auto batch = database_->NewBatch();
  batch->PutRun(FullRun());
  ASSERT_TRUE(database_->Commit(std::move(batch)).ok());
  const std::string copy = directory_.path() + "/checkpoint";
  ASSERT_TRUE(database_->CopyTo(copy).ok());
  EXPECT_FALSE(database_->CopyTo(copy).ok()) << "it is there already";
  std::filesystem::path table;
  {
    const auto opened = RocksDatabase::Open({.directory = copy});
    ASSERT_TRUE(opened.ok()) << opened.status();
    EXPECT_EQ((*opened)->GetRun(3)->description.name, "llama");
    for (const auto& entry : std::filesystem::directory_iterator(copy)) {
      if (entry.path().extension() == ".sst" && entry.file_size() > 300) table = entry.path();
    }
    ASSERT_FALSE(table.empty());
  }
  EXPECT_TRUE(RocksDatabase::FindDamage(copy).empty());
  std::fstream file(table, std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(20);
  file.put('!');
  file.close();
  const auto damage = RocksDatabase::FindDamage(copy);
  ASSERT_EQ(damage.size(), 1u);
  EXPECT_NE(damage[0].find(table.filename().string()), std::string::npos) << damage[0];
}

// RocksDB itself goes on up to such a record, with a warning.
TEST_F(DatabaseTest, LossWithinTheDatabaseLogIsRefused) {
  constexpr uint64_t kTransitions = 60;  // Two blocks of the log.
  for (uint64_t i = 0; i < kTransitions; ++i) {
    AlertTransition transition = FullTransition(std::to_string(i), 1);
    transition.advice.assign(700, 'x');
    ASSERT_TRUE(*database_->PutTransition(&transition));
  }
  const std::string crashed = directory_.path() + "/crashed", copy = directory_.path() + "/copy";
  CrashCopy(directory_.path() + "/db", crashed);
  std::string name;
  for (const auto& entry : std::filesystem::directory_iterator(crashed)) {
    if (entry.path().extension() == ".log" && entry.file_size() > 0) name = entry.path().filename();
  }
  ASSERT_FALSE(name.empty());
  const auto bytes = static_cast<int64_t>(std::filesystem::file_size(crashed + "/" + name));
  ASSERT_GT(bytes, 40'000);
  const auto begin = [&] {
    std::filesystem::remove_all(copy);
    std::filesystem::copy(crashed, copy);
  };
  const auto flip = [&](int64_t offset) {
    std::fstream file(copy + "/" + name, std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(offset);
    const char byte = static_cast<char>(file.get() ^ 0x10);
    file.seekp(offset);
    file.put(byte);
  };
  for (int64_t offset = 0; offset < bytes - 2000; offset += 997) {
    SCOPED_TRACE(offset);
    begin();
    flip(offset);
    EXPECT_EQ(RocksDatabase::Open({.directory = copy}).status().code(), absl::StatusCode::kDataLoss);
    const auto damage = RocksDatabase::FindDamage(copy);
    ASSERT_EQ(damage.size(), 1u);
    EXPECT_NE(damage[0].find(name), std::string::npos) << damage[0];
  }
  ASSERT_TRUE(RocksDatabase::Repair({.directory = copy}).ok());
  {
    const auto repaired = RocksDatabase::Open({.directory = copy});
    ASSERT_TRUE(repaired.ok()) << repaired.status();
    AlertTransition next = FullTransition("new", 1);
    ASSERT_TRUE(*(*repaired)->PutTransition(&next));
    EXPECT_GT(next.id, kTransitions) << "given before";
  }
  // What a power cut leaves: the last record cut anywhere, or not there though its room is.
  for (int64_t cut = bytes - 1; cut > bytes - 900; cut -= 37) {
    for (const bool zeros : {false, true}) {
      SCOPED_TRACE(testing::Message() << cut << (zeros ? " and zeros" : ""));
      begin();
      std::filesystem::resize_file(copy + "/" + name, static_cast<uintmax_t>(cut));
      if (zeros) std::filesystem::resize_file(copy + "/" + name, static_cast<uintmax_t>(bytes));
      if (cut % 2 == 0) std::ofstream(copy + "/000999.log");  // The next start was cut off, too.
      const auto opened = RocksDatabase::Open({.directory = copy});
      ASSERT_TRUE(opened.ok()) << opened.status();
      EXPECT_GE((*opened)->last_transition_id(), kTransitions - 2);
    }
  }
}

TEST_F(DatabaseTest, AlertLogTellsEachTransitionOnceAndKeepsNotes) {
  uint64_t told = 0;
  {
    AlertStore log(database_.get());
    ASSERT_TRUE(log.Load().ok());
    const int64_t id = log.Subscribe([&told](const AlertTransition&) { ++told; });
    EXPECT_TRUE(*log.Post(FullTransition("a", 1)));
    EXPECT_FALSE(*log.Post(FullTransition("a", 1)));
    EXPECT_EQ(told, 1u);
    log.Unsubscribe(id);
    AlertTransition resolved = FullTransition("a", 2);
    resolved.state = AlertState::kResolved;
    EXPECT_TRUE(*log.Post(resolved));
    EXPECT_TRUE(*log.Post(FullTransition("b", 1)));
    EXPECT_EQ(told, 1u);
    EXPECT_TRUE(log.Annotate(3, "a", {.acknowledged = true, .by = "me"}).ok());
    EXPECT_FALSE(log.Annotate(3, "none", {}).ok());
  }
  Open();
  AlertStore log(database_.get());
  ASSERT_TRUE(log.Load().ok());
  ASSERT_EQ(log.List(0, false).size(), 2u);
  EXPECT_EQ(log.List(0, false)[0].last.key, "b") << "firing first";
  EXPECT_EQ(log.List(3, true).size(), 1u);
  EXPECT_EQ(log.List(4, false).size(), 0u);
  EXPECT_EQ(log.Get(3, "a")->note.by, "me");
  EXPECT_FALSE(log.Get(4, "a").ok());
}

FalseAlarm Said(const AlertTransition& of, int64_t time_unix_ns, bool undone = false) {
  FalseAlarm said{.by = "ann", .reason = "known", .time_unix_ns = time_unix_ns};
  said.severity = of.severity;
  said.step = of.step;
  said.illness = IllnessOf(of);
  said.undone = undone;
  return said;
}

TEST_F(DatabaseTest, FalseAlarmMutesItsIllnessAfterRestart) {
  const AlertTransition first = FullTransition("a", 1);
  {
    AlertStore log(database_.get());
    ASSERT_TRUE(log.Load().ok());
    ASSERT_TRUE(*log.Post(first));
    ASSERT_TRUE(log.Annotate(3, "a", {.false_alarms = {Said(first, 5)}}).ok());
    AlertTransition resolved = FullTransition("a", 2);
    resolved.state = AlertState::kResolved;
    resolved.heads.clear();
    resolved.evidence.clear();
    ASSERT_TRUE(*log.Post(resolved));
  }
  Crash();
  AlertStore log(database_.get());
  ASSERT_TRUE(log.Load().ok());
  EXPECT_TRUE(log.Get(3, "a")->muted) << "as it was when it fired";
  ASSERT_TRUE(*log.Post(FullTransition("b", 1)));
  const AlertView back = *log.Get(3, "b");
  EXPECT_TRUE(back.muted);
  EXPECT_EQ(back.false_alarm->key, "a");
  EXPECT_EQ(back.false_alarm->reason, "known");
  EXPECT_FALSE(back.notifies(1));
  AlertTransition of_other_run = FullTransition("b", 1);
  of_other_run.run = 4;
  ASSERT_TRUE(*log.Post(of_other_run));
  EXPECT_FALSE(log.Get(4, "b")->muted);

  // Taken back by the other key.
  ASSERT_TRUE(log.Annotate(3, "b", {.false_alarms = {Said(first, 6, /*undone=*/true)}}).ok());
  EXPECT_FALSE(log.Get(3, "b")->muted);
  EXPECT_FALSE(log.Get(3, "a")->false_alarm.has_value());
  const std::vector<FalseAlarm> history = log.FalseAlarmsOf(*log.Get(3, "a"));
  ASSERT_EQ(history.size(), 2u);
  EXPECT_EQ(history[0].key, "a");
  EXPECT_TRUE(history[1].undone);
}

TEST_F(DatabaseTest, NotesOfATakenOverRunAreRead) {
  AlertStore log(database_.get());
  const AlertTransition first = FullTransition("a", 1);
  ASSERT_TRUE(*log.Post(first));
  // As its owner of before wrote it.
  ASSERT_TRUE(database_->PutAlertNote(3, "a", {.acknowledged = true, .false_alarms = {Said(first, 5)}}).ok());
  EXPECT_FALSE(log.Get(3, "a")->muted);
  ASSERT_TRUE(log.LoadNotes(4, 5).ok());
  EXPECT_FALSE(log.Get(3, "a")->muted);
  ASSERT_TRUE(log.LoadNotes(3, 4).ok());
  EXPECT_TRUE(log.Get(3, "a")->muted);
  EXPECT_TRUE(log.Get(3, "a")->note.acknowledged);
}

TEST(RecordCodecTest, NotesWithoutFalseAlarmsAreAsBefore) {
  const Database::AlertNote plain = {.acknowledged = true, .by = "ann", .silenced_until_unix_ns = 7};
  const std::string before(
      "\x01\x01\x03"
      "ann\x00\x07\0\0\0\0\0\0\0",
      15);
  EXPECT_EQ(EncodeAlertNote(plain), before) << "servers of before read it";
  const auto read = DecodeAlertNote(before);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->by, "ann");
  EXPECT_TRUE(read->false_alarms.empty());
}

TEST(RecordCodecTest, DamageIsAStatusNeverACrash) {
  std::mt19937 random(5);
  const std::string run = EncodeRunRecord(FullRun());
  const std::string transition = EncodeTransition(FullTransition("k", 1));
  for (size_t size = 0; size < run.size(); ++size) EXPECT_FALSE(DecodeRunRecord(run.substr(0, size)).ok());
  for (size_t size = 0; size < transition.size(); ++size) {
    EXPECT_FALSE(DecodeTransition(transition.substr(0, size)).ok());
  }
  const std::string action = EncodeAction(FullAction("x-1", 3));
  const std::string request = EncodeActionRequest({.action = FullAction("x-1", 0), .by = "alice"});
  const std::string entry = EncodeAuditEntry({.by = "mallory", .refused = "no"});
  for (size_t size = 0; size < action.size(); ++size) EXPECT_FALSE(DecodeAction(action.substr(0, size)).ok());
  for (size_t size = 0; size < request.size(); ++size) {
    EXPECT_FALSE(DecodeActionRequest(request.substr(0, size)).ok());
  }
  for (size_t size = 0; size < entry.size(); ++size) EXPECT_FALSE(DecodeAuditEntry(entry.substr(0, size)).ok());
  for (int i = 0; i < 5000; ++i) {
    std::string bad = transition;
    bad[random() % bad.size()] ^= static_cast<char>(1 << random() % 8);
    DecodeTransition(bad).status().IgnoreError();
    bad = run;
    bad[random() % bad.size()] ^= static_cast<char>(1 << random() % 8);
    DecodeRunRecord(bad).status().IgnoreError();
    bad = action;
    bad[random() % bad.size()] ^= static_cast<char>(1 << random() % 8);
    DecodeAction(bad).status().IgnoreError();
  }
}

}  // namespace
}  // namespace bellwether::server
