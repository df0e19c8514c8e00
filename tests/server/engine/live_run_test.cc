// Goal: a run is merged, counted and ended by its ranks' words in the order of the log,
// and a restart from any save on comes to the same.
// Method: a run with real log, database and series on the test's own thread; what was
// logged behind its saved state is applied again to what was loaded.

#include "server/engine/live_run.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/temp_directory.h"

namespace bellwether::server {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

constexpr Layout kLayout{1, 2, 1, 64, 0};

constexpr int64_t kDay = int64_t{86'400} * 1'000'000'000;

class LiveRunTest : public testing::Test {
 protected:
  LiveRunTest() {
    Wal::Options wal;
    wal.directory = directory_.path() + "/wal";
    wal_ = *Wal::Open(wal, [](Lsn) {});
    Database::Options database;
    database.directory = directory_.path() + "/db";
    database_ = *Database::Open(database);
    series_ = SeriesStore::Create({}, database_.get());
    alerts_ = std::make_unique<AlertStore>(database_.get());
    EXPECT_TRUE(alerts_->Load().ok());
  }

  RunDescription Describe(uint32_t reporters, uint32_t attempt) {
    RunDescription run;
    run.name = "run";
    run.layout = kLayout;
    run.reporters = reporters;
    run.attempt = attempt;
    return run;
  }
  void Begin(uint32_t reporters) {
    RunRecord record;
    record.id = 1;
    record.description = Describe(reporters, 0);
    Load(record);
    for (uint32_t rank = 0; rank < reporters; ++rank) Hello(rank, reporters);
  }
  void Load(const RunRecord& record) {
    parts_ = {.rules = &rules_,
              .policy = &policy_,
              .database = database_.get(),
              .series = series_.get(),
              .alerts = alerts_.get(),
              .table = &table_,
              .wal = wal_.get(),
              .counters = &counters_,
              .clock = &clock_,
              .events_max = events_max_};
    auto loaded = LiveRun::Load(parts_, record);
    ASSERT_TRUE(loaded.ok()) << loaded.status();
    run_ = *std::move(loaded);
  }
  // As after a kill: what the log holds behind what was saved is applied.
  void Restart() {
    const RunRecord record = *database_->GetRun(1);
    run_.reset();
    series_ = SeriesStore::Create({}, database_.get());
    Load(record);
    for (const LoggedMessage& message : sent_) {
      if (message.lsn > record.applied_lsn) run_->Apply(message, 0);
    }
  }
  void Save() { ASSERT_TRUE(run_->Save().ok()); }

  void Put(uint32_t rank, WalKind kind, IngestMessage message) {
    WalRecord record;
    record.kind = kind;
    record.run = 1;
    record.payload = "not read here";
    const Lsn lsn = *wal_->Append(std::move(record));
    const bool own = kind == WalKind::kRunSilent;
    sent_.push_back({lsn, 1, rank, own ? 0u : 1u, clock_.UnixMillis(), std::move(message)});
    run_->Apply(sent_.back(), clock_.MonotonicNanos());
  }
  void Hello(uint32_t rank, uint32_t reporters, uint32_t attempt = 0) {
    HelloMessage hello;
    hello.run = Describe(reporters, attempt);
    hello.rank = rank;
    Put(rank, WalKind::kHello, {0, hello});
  }
  void Send(uint32_t rank, int64_t step, uint32_t attempt = 0, uint64_t dropped = 0, uint64_t stripped = 0) {
    RankFrame frame;
    frame.attempt = attempt;
    frame.step = step;
    frame.dropped_total = dropped;
    frame.stripped_total = stripped;
    frame.blocks = {{SignalId::kRows, 0, 1, 0, 2, 0}};
    frame.values = {1, 1};
    Put(rank, WalKind::kMessage, {++seq_, std::move(frame)});
  }
  void Bye(uint32_t rank, ByeMessage::Reason reason = ByeMessage::Reason::kFinished) {
    Put(rank, WalKind::kBye, {0, ByeMessage{reason, ""}});
  }
  // Of each stored step how many ranks are in it, "?" behind it if some are missing.
  std::vector<std::string> Stored() {
    std::vector<std::string> steps;
    EXPECT_TRUE(series_
                    ->ReadAll(1, kLayout,
                              [&](const StepSample& sample) {
                                const int ranks = static_cast<int>(sample.matrix(SignalId::kRows)[0]);
                                steps.push_back(std::to_string(sample.step) + ": " + std::to_string(ranks) +
                                                (sample.complete ? "" : "?"));
                                return absl::OkStatus();
                              })
                    .ok());
    return steps;
  }
  bool SilentForADay(RunSilentMessage* silent) {
    return run_->deadlines().SilentTooLong(run_->state(), clock_.MonotonicNanos(), clock_.UnixNanos(), kDay, silent);
  }
  double Late() { return counters_.counter("bellwether_ingest_frames_total", {{"result", "late"}})->value(); }

  uint64_t events_max_ = 10'000;
  TempDirectory directory_;
  ReloadableRules rules_{JudgeOptions()};
  ReloadablePolicy policy_;
  RunTable table_;
  Counters counters_;
  FakeClock clock_;
  std::unique_ptr<Wal> wal_;
  std::unique_ptr<Database> database_;
  std::unique_ptr<SeriesStore> series_;
  std::unique_ptr<AlertStore> alerts_;
  LiveRunParts parts_;
  std::unique_ptr<LiveRun> run_;
  std::vector<LoggedMessage> sent_;
  uint64_t seq_ = 0;
};

TEST_F(LiveRunTest, LastStepsHaveAllRanks) {
  Begin(2);
  for (uint32_t rank : {0u, 1u}) {
    for (int64_t step = 0; step < 3; ++step) Send(rank, step);
    Bye(rank);
  }
  EXPECT_THAT(Stored(), ElementsAre("0: 2", "1: 2", "2: 2"));
  EXPECT_TRUE(run_->ended());
  EXPECT_EQ(Late(), 0);
}

TEST_F(LiveRunTest, ReturnedRankIsInEachStep) {
  Begin(2);
  for (uint32_t rank : {0u, 1u}) Send(rank, 0);
  Bye(0, ByeMessage::Reason::kDetached);
  Hello(0, 2);
  for (int64_t step = 1; step < 3; ++step) {
    for (uint32_t rank : {1u, 0u}) Send(rank, step);
  }
  EXPECT_THAT(Stored(), ElementsAre("0: 2", "1: 2", "2: 2"));
}

TEST_F(LiveRunTest, NextAttemptHasAllRanksDespiteMissingGoodbyes) {
  Begin(2);
  for (uint32_t rank : {0u, 1u}) Send(rank, 0);
  Bye(0, ByeMessage::Reason::kDied);
  for (uint32_t rank : {0u, 1u}) Hello(rank, 2, 1);
  for (int64_t step = 1; step < 3; ++step) {
    for (uint32_t rank : {1u, 0u}) Send(rank, step, 1);
  }
  EXPECT_THAT(Stored(), ElementsAre("0: 2", "1: 2", "2: 2"));
}

TEST_F(LiveRunTest, RestartDoesNotWaitForRankThatLeft) {
  Begin(2);
  for (uint32_t rank : {0u, 1u}) Send(rank, 0);
  Bye(1);
  Send(0, 1);
  Save();
  Restart();
  for (int64_t step = 2; step < 4; ++step) Send(0, step);
  EXPECT_THAT(Stored(), ElementsAre("0: 2", "1: 1", "2: 1", "3: 1"));
}

TEST_F(LiveRunTest, GoodbyeInOpenStepSurvivesRestart) {
  Begin(3);
  for (uint32_t rank = 0; rank < 3; ++rank) Send(rank, 0);
  Send(0, 1);
  Bye(0);
  Save();
  Restart();
  for (int64_t step = 1; step < 3; ++step) {
    for (uint32_t rank : {1u, 2u}) Send(rank, step);
  }
  EXPECT_THAT(Stored(), ElementsAre("0: 3", "1: 3", "2: 2"));
  for (uint32_t rank : {1u, 2u}) Bye(rank);
  EXPECT_TRUE(run_->ended());
}

TEST_F(LiveRunTest, RestartWaitsForRankThatWasHeard) {
  Begin(3);
  for (uint32_t rank = 0; rank < 3; ++rank) Send(rank, 0);
  Send(0, 1);
  Save();
  Restart();
  Bye(0);
  for (uint32_t rank : {1u, 2u}) Send(rank, 1);
  EXPECT_THAT(Stored(), ElementsAre("0: 3", "1: 3"));
}

TEST_F(LiveRunTest, ReplayedMessagesAreCountedOnce) {
  Begin(2);
  Send(0, 0, 0, 5);
  Send(0, 1, 0, 10);
  for (int i = 0; i < 3; ++i) {
    Save();
    Restart();
    EXPECT_EQ(run_->record().frames, 2u);
    EXPECT_EQ(run_->record().frames_dropped, 10u);
  }
  Send(0, 2, 0, 3);  // Another client process.
  Send(0, 3, 0, 4);
  EXPECT_EQ(run_->record().frames_dropped, 11u);
}

TEST_F(LiveRunTest, StrippedFramesAreCountedOncePerRank) {
  Begin(2);
  Send(0, 0, 0, 5);
  Save();
  Restart();  // From a state as servers of before wrote it, which still do not miss anything.
  EXPECT_EQ(run_->record().frames_stripped, 0u);
  Send(0, 1, 0, 5, 1);
  Send(1, 0, 0, 0, 2);
  Send(0, 2, 0, 6, 3);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(run_->record().frames_stripped, 5u);
    EXPECT_EQ(run_->record().frames_dropped, 6u);
    Save();
    Restart();
  }
  Send(0, 3, 0, 6, 3);
  EXPECT_EQ(run_->record().frames_stripped, 5u);
  Send(0, 4, 0, 0, 0);  // Another client process.
  Send(0, 5, 0, 0, 1);
  EXPECT_EQ(run_->record().frames_stripped, 6u);
}

// The version is in the first four bytes.
TEST_F(LiveRunTest, RestartAtAnyStepGivesSameJudgement) {
  const auto shown = [&] {
    run_->Publish();
    return JudgedByOf(table_.Get(1)->record).Text(false);
  };
  Begin(1);
  EXPECT_EQ(shown(), "not judged yet");
  std::string before;
  for (int64_t step = 0; step < 30; ++step) {
    RankFrame frame;
    frame.step = step;
    frame.blocks = {{SignalId::kKeyLeakSum, 0, 1, 0, 1, 0}, {SignalId::kKeyGradientSum, 0, 1, 0, 1, 1}};
    frame.values = {1, 1};
    if (step == 3) {  // Once the weights are measured, too.
      frame.blocks.push_back({SignalId::kWqSigma, 0, 1, 0, 2, 2});
      frame.values.insert(frame.values.end(), {1, 1});
    }
    Put(0, WalKind::kMessage, {++seq_, std::move(frame)});
    before = shown();
    EXPECT_EQ(before, step >= 3 && step < 11 ? "judged by: norm, leak" : "judged by: leak") << step;
    if (step % 3 == 1) Save();
    if (step % 5 == 4) {
      Restart();
      EXPECT_EQ(shown(), before) << step;
    }
  }
}

TEST_F(LiveRunTest, OlderServersReadStateWithoutStrippedFrames) {
  Begin(1);
  const auto version = [this] { return static_cast<int>(database_->GetState(1)->at(0)); };
  Send(0, 0, 0, 5);
  Save();
  EXPECT_EQ(version(), 4);
  Send(0, 1, 0, 5, 1);
  Save();
  EXPECT_EQ(version(), 5);
}

TEST_F(LiveRunTest, GoodbyesOfAttemptEndNoLaterAttempt) {
  Begin(4);
  for (uint32_t rank = 0; rank < 4; ++rank) Send(rank, 0);
  for (uint32_t rank = 0; rank < 4; ++rank) Bye(rank);
  Save();
  for (uint32_t rank : {0u, 1u}) Hello(rank, /*reporters=*/2, /*attempt=*/1);
  for (int64_t step = 1; step < 3; ++step) {
    for (uint32_t rank : {0u, 1u}) Send(rank, step, 1);
  }
  Send(0, 3, 1);
  Bye(0);
  Bye(3);  // Late.
  EXPECT_FALSE(run_->ended());
  Save();
  for (int64_t step = 3; step < 5; ++step) Send(1, step, 1);
  Save();
  EXPECT_THAT(Stored(), ElementsAre("0: 4", "1: 2", "2: 2", "3: 2", "4: 1"));
  EXPECT_FALSE(run_->ended());
  Bye(1);
  EXPECT_TRUE(run_->ended());
}

TEST_F(LiveRunTest, ReopenedRunIsStoredFurther) {
  Begin(2);
  for (uint32_t rank : {0u, 1u}) Send(rank, 0);
  for (uint32_t rank : {0u, 1u}) Bye(rank);
  Save();
  ASSERT_TRUE(run_->closed());
  for (uint32_t rank : {0u, 1u}) Hello(rank, 2);
  for (uint32_t rank : {0u, 1u}) Send(rank, 1);
  Save();
  EXPECT_THAT(Stored(), ElementsAre("0: 2", "1: 2"));
  for (uint32_t rank : {0u, 1u}) Bye(rank);
  Save();
  for (uint32_t rank : {0u, 1u}) Send(rank, 2);  // Without another hello; the second comes late.
  EXPECT_FALSE(run_->ended());
  for (uint32_t rank : {0u, 1u}) Bye(rank);
  EXPECT_TRUE(run_->ended());
  Save();
  Restart();
  EXPECT_THAT(Stored(), ElementsAre("0: 2", "1: 2", "2: 1"));
}

TEST_F(LiveRunTest, RanksThatJobDroppedAreNotMissed) {
  constexpr int64_t kSecond = 1'000'000'000, kSilence = 60 * kSecond;
  Begin(4);
  for (uint32_t rank : {0u, 1u, 2u, 3u}) Send(rank, 0);
  clock_.Advance(kSilence);
  for (uint32_t rank : {0u, 1u}) Send(rank, 1);
  SilenceMessage silence;
  ASSERT_TRUE(run_->SilenceChanged(clock_.MonotonicNanos(), kSilence, &silence));
  EXPECT_EQ(silence.silent_ranks, 2);
  // Two machines are gone, and the job is started on the others.
  for (uint32_t rank : {0u, 1u}) Hello(rank, 2, 1);
  for (uint32_t rank : {0u, 1u}) Send(rank, 1, 1);
  ASSERT_TRUE(run_->SilenceChanged(clock_.MonotonicNanos(), kSilence, &silence));
  EXPECT_EQ(silence.silent_ranks, 0);
  clock_.Advance(kSilence);
  Send(0, 2, 1);
  ASSERT_TRUE(run_->SilenceChanged(clock_.MonotonicNanos(), kSilence, &silence));
  EXPECT_EQ(silence.silent_ranks, 1);
  EXPECT_EQ(silence.seconds, 60) << "of the rank that is missed, not of those that left long ago";
  Bye(1);
  ASSERT_TRUE(run_->SilenceChanged(clock_.MonotonicNanos(), kSilence, &silence));
  EXPECT_EQ(silence.silent_ranks, 0);
}

TEST_F(LiveRunTest, RanksAreNotSilentWhileTheServerIsAway) {
  constexpr int64_t kSecond = 1'000'000'000, kSilence = 60 * kSecond;
  Begin(2);
  for (uint32_t rank : {0u, 1u}) Send(rank, 0);
  SilenceMessage silence;
  StepClosedMessage overdue;
  Send(0, 1);
  EXPECT_FALSE(run_->deadlines().StepOverdue(run_->state(), clock_.MonotonicNanos(), kSilence, &overdue));
  clock_.Advance(600 * kSecond);
  run_->deadlines().RecordAway(600 * kSecond);
  EXPECT_FALSE(run_->SilenceChanged(clock_.MonotonicNanos(), kSilence, &silence));
  EXPECT_FALSE(run_->deadlines().StepOverdue(run_->state(), clock_.MonotonicNanos(), kSilence, &overdue))
      << "the other rank's frame may wait in a socket";
  clock_.Advance(kSilence);
  EXPECT_TRUE(run_->deadlines().StepOverdue(run_->state(), clock_.MonotonicNanos(), kSilence, &overdue));
  ASSERT_TRUE(run_->SilenceChanged(clock_.MonotonicNanos(), kSilence, &silence));
  EXPECT_EQ(silence.silent_ranks, 2);
  EXPECT_EQ(silence.seconds, 60);
}

TEST_F(LiveRunTest, SilentRunEndsAndHelloReopensIt) {
  constexpr int64_t kMinutes = int64_t{60} * 1'000'000'000;
  Begin(2);
  for (uint32_t rank : {0u, 1u}) Send(rank, 0);
  Bye(0);
  Send(0, 1);
  RunSilentMessage silent;
  clock_.Advance(kDay - 1);
  EXPECT_FALSE(SilentForADay(&silent));
  Save();
  Restart();
  clock_.Advance(1);
  EXPECT_FALSE(SilentForADay(&silent)) << "they had no time to find it again";
  clock_.Advance(10 * kMinutes);
  ASSERT_TRUE(SilentForADay(&silent));
  Send(1, 2);  // Just then.
  Put(0, WalKind::kRunSilent, {0, silent});
  EXPECT_FALSE(run_->ended());
  clock_.Advance(kDay);
  ASSERT_TRUE(SilentForADay(&silent));
  run_->deadlines().RecordPresent(clock_.MonotonicNanos());
  EXPECT_FALSE(SilentForADay(&silent));
  Put(0, WalKind::kRunSilent, {0, silent});
  for (int i = 0; i < 2; ++i) {
    EXPECT_TRUE(run_->ended());
    EXPECT_EQ(run_->record().end_reason, "silent");
    EXPECT_THAT(Stored(), ElementsAre("0: 2", "1: 1?", "2: 1?"));
    if (i == 0) Restart();  // From before it ended.
  }
  EXPECT_EQ(counters_.counter("bellwether_runs_ended_silent_total")->value(), 2) << "told again by the log";
  Save();
  EXPECT_TRUE(run_->closed());
  Hello(0, 2, 1);
  Hello(1, 2, 1);
  EXPECT_FALSE(run_->ended());
  for (uint32_t rank : {0u, 1u}) Send(rank, 3, 1);
  EXPECT_THAT(Stored(), ElementsAre("0: 2", "1: 1?", "2: 1?", "3: 2"));
}

TEST_F(LiveRunTest, UnknownSignalsAreCountedAndSaidOnce) {
  Begin(2);
  const Counter* const left_out = counters_.counter("bellwether_ingest_values_unknown_total");
  const auto send = [&](uint32_t rank, int64_t step, std::vector<int32_t> unknown) {
    RankFrame frame;
    frame.step = step;
    frame.blocks = {{SignalId::kRows, 0, 1, 0, 2, 0}};
    frame.values = {1, 1};
    frame.unknown_values = 5 * unknown.size();
    frame.unknown_signals = std::move(unknown);
    Put(rank, WalKind::kMessage, {++seq_, std::move(frame)});
  };
  const auto said = [this] {
    run_->Publish();
    std::vector<std::string> out;
    const auto events = EventsOf(*table_.Get(1), *database_, 0, 100);
    for (const RunEvent& event : *events) out.push_back(event.text);
    return out;
  };
  for (const uint32_t rank : {0u, 1u}) send(rank, 0, {500, 501});
  EXPECT_EQ(left_out->value(), 20);
  EXPECT_THAT(said(), ElementsAre(testing::HasSubstr("(500, 501 of signals.proto)")));
  for (const uint32_t rank : {0u, 1u}) send(rank, 1, {500, 502, 503, 504, 505, 506});
  EXPECT_THAT(said(), ElementsAre(testing::_, testing::HasSubstr("(502, 503, 504, 505 and 1 more of signals.proto)")));
  EXPECT_THAT(Stored(), ElementsAre("0: 2", "1: 2"));
  Save();
  Restart();
  EXPECT_EQ(said().size(), 2u);
  // A frame of nothing else is one all the same.
  for (const uint32_t rank : {0u, 1u}) {
    RankFrame frame;
    frame.step = 2;
    frame.unknown_signals = {501};
    frame.unknown_values = 1;
    Put(rank, WalKind::kMessage, {++seq_, std::move(frame)});
  }
  EXPECT_EQ(run_->record().frames, 6u);
  EXPECT_EQ(run_->record().step, 2);
}

TEST_F(LiveRunTest, LastKeptEventNotesThatOthersWereDropped) {
  events_max_ = 4;
  Begin(1);
  const auto texts = [this] {
    std::vector<std::string> out;
    const RunSnapshotPtr snapshot = table_.Get(1);
    const auto events = EventsOf(*snapshot, *database_, 0, 100);
    for (const RunEvent& event : *events) out.push_back(event.text);
    return out;
  };
  const auto note = testing::HasSubstr("4 events of a run are kept (limits.events_per_run_max)");
  const Counter* const refused =
      counters_.counter("bellwether_ingest_limit_refused_total", {{"limit", "events_per_run"}});
  for (int i = 0; i < 3; ++i) Put(0, WalKind::kMessage, {++seq_, RunEvent{.step = i, .text = "kept"}});
  Save();
  EXPECT_EQ(refused->value(), 0);
  for (int i = 0; i < 3; ++i) {
    Put(0, WalKind::kMessage, {++seq_, RunEvent{.step = 3 + i, .kind = EventKind::kCentringOn, .text = "lost"}});
  }
  EXPECT_TRUE(run_->record().kind_changed) << "it is judged all the same";
  EXPECT_EQ(refused->value(), 3);
  run_->Publish();
  EXPECT_THAT(texts(), ElementsAre("kept", "kept", "kept", note));
  Restart();
  Put(0, WalKind::kMessage, {++seq_, RunEvent{.step = 6, .text = "lost"}});
  Save();
  run_->Publish();
  EXPECT_THAT(texts(), ElementsAre("kept", "kept", "kept", note));
}

TEST_F(LiveRunTest, DroppedFramesSaturate) {
  Begin(1);
  for (int step = 0; step < 6; step += 2) {
    Send(0, step, 0, UINT64_MAX, UINT64_MAX);
    Send(0, step + 1, 0, 0, 0);  // A new process: the next rise is a whole one again.
  }
  EXPECT_EQ(run_->record().frames_dropped, UINT64_MAX);
  EXPECT_EQ(run_->record().frames_stripped, UINT64_MAX);
}

}  // namespace
}  // namespace bellwether::server
