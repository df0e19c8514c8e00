// Goal: Gram matrices become signals of the very step that they were shipped with, off the
// shard's thread; a queue that is full, a log that does not take answers and a restart lose
// no step, and a restart changes no signal.
// Method: the worker alone with a bank that is made to wait; then a live run with a real log
// whose records are applied again.

#include "server/engine/spectra_worker.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <utility>
#include <vector>

#include "absl/synchronization/notification.h"
#include "server/detect/judge_options.h"
#include "server/engine/live_run.h"
#include "server/ingest/log_records.h"
#include "tests/support/null_series_store.h"
#include "tests/support/temp_directory.h"

namespace bellwether::server {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Pair;
using ::testing::SizeIs;

constexpr Layout kWorkerLayout{2, 2, 2, 8, 0};

ShippedGram Gram(int64_t step, Head where, float largest, GramOf of = GramOf::kQuery) {
  auto upper = std::make_shared<std::vector<float>>(GramOf::kQuery == of ? 3 : 10, 0.0f);
  upper->front() = largest;
  return {0, step, where, of, of == GramOf::kQuery ? 2 : 4, std::move(upper)};
}

GramTask Task(RunId run, int64_t step, float largest) { return {run, Gram(step, {0, 0}, largest), {}}; }

// Computes nothing before it is let.
class SlowBank final : public SpectraBank {
 public:
  void Eigenvalues(int64_t n, int64_t count, double* matrices, double* values) override {
    batches.push_back(count);
    if (batches.size() == 1) {
      began.Notify();
      go.WaitForNotification();
    }
    CpuSpectraBank()->Eigenvalues(n, count, matrices, values);
  }
  const char* backend() const override { return "cpu"; }

  absl::Notification began, go;
  std::vector<int64_t> batches;  // Of the worker's thread.
};

TEST(SpectraWorkerTest, WaitingMatricesFormOneBatchAndExcessIsDropped) {
  Counters counters;
  FakeClock clock;
  SlowBank bank;
  std::vector<std::pair<RunId, SpectraMessage>> answers;
  SpectraWorker worker({.queue_bytes_max = 3 * 12}, &bank, &counters, &clock);
  worker.Start([&](RunId run, const SpectraMessage& message) {
    answers.emplace_back(run, message);
    return true;
  });
  worker.Submit(Task(1, 0, 4));
  bank.began.WaitForNotification();
  for (int64_t step = 1; step <= 5; ++step) worker.Submit(Task(step == 2 ? 2 : 1, step, 9));
  bank.go.Notify();
  worker.AwaitIdle();
  worker.Stop();
  EXPECT_THAT(bank.batches, ElementsAre(1, 3));
  ASSERT_THAT(answers, ElementsAre(Pair(1, testing::_), Pair(1, testing::_), Pair(2, testing::_)));
  std::vector<std::pair<int64_t, GramAnswer::Outcome>> of_one;
  for (const GramAnswer& answer : answers[1].second.answers) of_one.emplace_back(answer.step, answer.outcome);
  EXPECT_THAT(of_one, testing::UnorderedElementsAre(
                          Pair(1, GramAnswer::Outcome::kComputed), Pair(3, GramAnswer::Outcome::kComputed),
                          Pair(4, GramAnswer::Outcome::kDropped), Pair(5, GramAnswer::Outcome::kDropped)));
  EXPECT_EQ(answers[2].second.answers[0].values[0].value, 3);
  EXPECT_EQ(counters.counter("bellwether_spectra_total", {{"result", "dropped"}})->value(), 2);
  EXPECT_EQ(counters.counter("bellwether_spectra_total", {{"result", "computed"}})->value(), 4);
}

TEST(SpectraWorkerTest, AnswersAreRetriedUntilLogFailsForGood) {
  Counters counters;
  std::atomic<int> asked = 0;
  absl::Notification third;
  {
    SpectraWorker worker({}, nullptr, &counters, Clock::System());
    worker.Start([&](RunId, const SpectraMessage&) {
      if (++asked == 3) third.Notify();
      return asked >= 3;
    });
    worker.Submit(Task(1, 0, 1));
    worker.AwaitIdle();
    EXPECT_EQ(asked, 3);
  }
  SpectraWorker worker({}, nullptr, &counters, Clock::System());
  absl::Notification refused;
  worker.Start([&](RunId, const SpectraMessage&) {
    if (!refused.HasBeenNotified()) refused.Notify();
    return false;
  });
  worker.Submit(Task(1, 0, 1));
  refused.WaitForNotification();
  worker.Stop();  // Returns.
}

TEST(SpectraWorkerTest, RecordOfAnswersIsReadBack) {
  SpectraMessage message;
  GramAnswer answer;
  answer.attempt = 3;
  answer.step = 1'000'000'007;
  answer.where = {1, 0};
  answer.count = 2;
  answer.values[0] = {SignalId::kGramSigma, 2.5f};
  answer.values[1] = {SignalId::kGramTop2Ratio, 0.25f};
  message.answers.push_back(answer);
  answer.outcome = GramAnswer::Outcome::kDropped;
  answer.increment = true;
  answer.count = 0;
  message.answers.push_back(answer);
  WalRecord record;
  record.kind = WalKind::kSpectra;
  record.payload = EncodeSpectra(message);
  const auto plain = DecodeRecord(record, &kWorkerLayout, {});
  ASSERT_TRUE(plain.ok()) << plain.status();
  const auto& read = std::get<SpectraMessage>(plain->body);
  ASSERT_THAT(read.answers, SizeIs(2));
  EXPECT_EQ(read.answers[0].step, 1'000'000'007);
  EXPECT_EQ(read.answers[0].values[1].value, 0.25f);
  EXPECT_TRUE(read.answers[1].increment);
  EXPECT_EQ(read.answers[1].outcome, GramAnswer::Outcome::kDropped);
  for (size_t bytes = 0; bytes < record.payload.size(); ++bytes) {
    WalRecord cut = record;
    cut.payload.resize(bytes);
    EXPECT_FALSE(DecodeRecord(cut, &kWorkerLayout, {}).ok()) << bytes;
  }
  const Layout smaller{1, 2, 2, 8, 0};
  EXPECT_FALSE(DecodeRecord(record, &smaller, {}).ok()) << "a layer that there is not";
}

// Keeps what is stored.
class StoredSteps final : public NullSeriesStore {
 public:
  std::vector<StepSample> steps;

  absl::Status Append(RunId, const StepSample& sample) override {
    steps.push_back(sample);
    return absl::OkStatus();
  }
};

// A live run whose messages are given by hand, in the order of a log.
class LiveRunSpectraTest : public testing::Test {
 protected:
  LiveRunSpectraTest() {
    Wal::Options wal;
    wal.directory = directory_.path() + "/wal";
    wal_ = *Wal::Open(wal, [](Lsn) {});
    Database::Options database;
    database.directory = directory_.path() + "/db";
    database_ = *Database::Open(database);
    alerts_ = std::make_unique<AlertStore>(database_.get());
    EXPECT_TRUE(alerts_->Load().ok());
    worker_ = std::make_unique<SpectraWorker>(SpectraWorker::Options(), nullptr, &counters_, &clock_);
    worker_->Start([this](RunId, const SpectraMessage& message) {
      absl::MutexLock lock(&mutex_);
      answers_.push_back(message);
      return true;
    });
  }

  std::unique_ptr<LiveRun> NewRun(StoredSteps* series) {
    const LiveRunParts parts = {.rules = &rules_,
                                .policy = &policy_,
                                .database = database_.get(),
                                .series = series,
                                .alerts = alerts_.get(),
                                .table = &table_,
                                .wal = wal_.get(),
                                .counters = &counters_,
                                .clock = &clock_,
                                .spectra = worker_.get()};
    RunRecord record;
    record.id = 1;
    record.description.name = "r";
    record.description.layout = kWorkerLayout;
    return *LiveRun::Load(parts, record);
  }

  LoggedMessage Logged(IngestMessage message, uint64_t epoch = 1) {
    WalRecord record;
    record.kind = WalKind::kMessage;
    record.run = 1;
    record.payload = "not read here";
    LoggedMessage logged{*wal_->Append(std::move(record)), 1, 0, epoch, 0, std::move(message)};
    log_.push_back(logged);
    return logged;
  }
  LoggedMessage Frame(int64_t step) {
    RankFrame frame;
    frame.step = step;
    frame.blocks = {{SignalId::kLoss, 0, 1, 0, 1, 0}};
    frame.values = {1};
    return Logged({1, std::move(frame)});
  }
  // What the worker has made of all that it was given.
  std::vector<SpectraMessage> Answers() {
    worker_->AwaitIdle();
    absl::MutexLock lock(&mutex_);
    return std::exchange(answers_, {});
  }

  TempDirectory directory_;
  ReloadableRules rules_{JudgeOptions()};
  ReloadablePolicy policy_;
  RunTable table_;
  Counters counters_;
  FakeClock clock_;
  std::unique_ptr<Wal> wal_;
  std::unique_ptr<Database> database_;
  std::unique_ptr<AlertStore> alerts_;
  absl::Mutex mutex_;
  std::vector<SpectraMessage> answers_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<SpectraWorker> worker_;
  std::vector<LoggedMessage> log_;
};

TEST_F(LiveRunSpectraTest, StepWaitsForSignalsAndGoodbyeForStep) {
  StoredSteps series;
  const auto run = NewRun(&series);
  run->Apply(Frame(0), 5);
  EXPECT_THAT(series.steps, SizeIs(1)) << "a step without matrices waits for nothing";
  run->Apply(Logged({2, Gram(1, {1, 0}, 9)}), 5);
  run->Apply(Logged({3, Gram(1, {0, 1}, 4, GramOf::kIncrementA)}), 5);
  run->Apply(Logged({4, Gram(1, {0, 1}, 4, GramOf::kIncrementB)}), 5);
  run->Apply(Logged({5, Gram(1, {1, 1}, 4, GramOf::kIncrementB)}), 5);  // Its pair never comes.
  run->Apply(Frame(1), 5);
  run->Apply(Frame(2), 5);
  run->Apply(Logged({0, ByeMessage{ByeMessage::Reason::kFinished, ""}}), 5);
  EXPECT_THAT(series.steps, SizeIs(1));
  EXPECT_FALSE(run->ended());
  EXPECT_FALSE(run->SaveDue(INT64_MAX)) << "no saved state says that it has said goodbye";
  for (const SpectraMessage& answers : Answers()) run->Apply(Logged({0, answers}, 0), 5);
  ASSERT_THAT(series.steps, SizeIs(3));
  EXPECT_EQ(series.steps[1].step, 1);
  EXPECT_TRUE(series.steps[1].complete);
  EXPECT_EQ(series.steps[1].matrix(SignalId::kGramSigma)[2], 3);
  EXPECT_EQ(series.steps[1].matrix(SignalId::kGramIncrementRank)[1], 1);
  EXPECT_TRUE(IsNotMeasured(series.steps[1].matrix(SignalId::kGramIncrementRank)[3]));
  EXPECT_FALSE(series.steps[2].has(SignalId::kGramSigma));
  EXPECT_TRUE(run->ended());
  EXPECT_TRUE(run->SaveDue(INT64_MAX));
  EXPECT_EQ(counters_.counter("bellwether_spectra_total", {{"result", "incomplete"}})->value(), 1);
  run->Apply(Logged({6, Gram(1, {0, 0}, 9)}), 5);
  EXPECT_EQ(counters_.counter("bellwether_spectra_total", {{"result", "late"}})->value(), 1);
}

TEST_F(LiveRunSpectraTest, DeadlineClosesStepWithoutItsSignals) {
  StoredSteps series;
  const auto run = NewRun(&series);
  run->Apply(Logged({1, Gram(0, {1, 0}, 9)}), 5);
  run->Apply(Frame(0), 5);
  StepClosedMessage overdue;
  EXPECT_FALSE(run->deadlines().StepOverdue(run->state(), 0, 10, &overdue));
  ASSERT_TRUE(run->deadlines().StepOverdue(run->state(), 10, 10, &overdue));
  run->Apply(Logged({0, overdue}, 0), 5);
  ASSERT_THAT(series.steps, SizeIs(1));
  EXPECT_TRUE(series.steps[0].signals() == std::vector<SignalId>{SignalId::kLoss});
  for (const SpectraMessage& answers : Answers()) run->Apply(Logged({0, answers}, 0), 5);
  EXPECT_EQ(counters_.counter("bellwether_spectra_total", {{"result", "late"}})->value(), 1);
}

TEST_F(LiveRunSpectraTest, RestartAnywhereGivesSameSteps) {
  StoredSteps series;
  const auto run = NewRun(&series);
  for (int64_t step = 0; step < 6; ++step) {
    run->Apply(Logged({1, Gram(step, {0, 0}, static_cast<float>((step + 1) * (step + 1)))}), 5);
    run->Apply(Logged({2, Gram(step, {0, 1}, 4, GramOf::kIncrementA)}), 5);
    run->Apply(Logged({3, Gram(step, {0, 1}, 4, GramOf::kIncrementB)}), 5);
    run->Apply(Frame(step), 5);
    if (step % 2 == 1) {
      for (const SpectraMessage& answers : Answers()) run->Apply(Logged({0, answers}, 0), 5);
    }
  }
  ASSERT_THAT(series.steps, SizeIs(6));
  const std::vector<LoggedMessage> log = std::exchange(log_, {});
  for (size_t cut = 0; cut <= log.size(); ++cut) {
    StoredSteps again;
    const auto recovered = NewRun(&again);
    for (size_t i = 0; i < cut; ++i) recovered->Apply(log[i], 0);  // 0: recovery.
    EXPECT_THAT(Answers(), IsEmpty()) << "nothing is computed while the log may hold the answer";
    recovered->state().SubmitUnanswered();
    for (const SpectraMessage& answers : Answers()) recovered->Apply(Logged({0, answers}, 0), 5);
    ASSERT_LE(again.steps.size(), 6u);
    for (size_t i = 0; i < again.steps.size(); ++i) {
      const StepSample& a = again.steps[i];
      const StepSample& b = series.steps[i];
      ASSERT_EQ(a.signals(), b.signals()) << "cut at " << cut << ", step " << i;
      EXPECT_EQ(a.matrix(SignalId::kGramSigma)[0], b.matrix(SignalId::kGramSigma)[0]);
      EXPECT_EQ(a.matrix(SignalId::kGramIncrementRank)[1], b.matrix(SignalId::kGramIncrementRank)[1]);
    }
  }
}

}  // namespace
}  // namespace bellwether::server
