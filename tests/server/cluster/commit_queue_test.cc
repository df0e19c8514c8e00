// Goal: what the shared log calls durable is committed by the partition's owner,
// once, whatever happens between the server and its database.
// Method: the log on a real PostgreSQL, whose standbys, sessions and answers are
// taken away at chosen moments.
#include "server/cluster/commit_queue.h"

#include <gmock/gmock.h>

#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "server/cluster/postgres_log.h"
#include "tests/support/postgres_server.h"

namespace bellwether::server {
namespace {

constexpr uint32_t kQueuePartition = 5;
constexpr RunId kQueueRun = FirstRunOf(kQueuePartition) + 1;
// Commits that wait for a standby.
constexpr char kWaitsForStandby[] = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'";

class CommitQueueTest : public ::testing::Test {
 protected:
  void SetUp() override {
    postgres_ = PostgresServer::Start();
    if (postgres_ == nullptr && !HasFailure()) GTEST_SKIP() << "PostgreSQL or libpq is not installed";
    ASSERT_NE(postgres_, nullptr);
  }

  void Open(int64_t patience_ms = 60'000) {
    PostgresLogOptions options;
    options.dsn = postgres_->dsn();
    options.owner = "me/1";
    options.patience_ms = patience_ms;  // Sync() waits for what is tried again.
    auto opened = OpenPostgresLog(options, [](Lsn) {});
    ASSERT_TRUE(opened.ok()) << opened.status();
    log_ = *std::move(opened);
  }

  // As a takeover does; returns the epoch.
  uint64_t TakeLease() {
    return static_cast<uint64_t>(
        postgres_->Sql("UPDATE bellwether.lease SET epoch = epoch + 1, owner = 'x' WHERE p = 5 RETURNING epoch")[0]
            .Number(0, 0));
  }

  static WalRecord Record(uint64_t seq, RunId run = kQueueRun) {
    WalRecord record;
    record.kind = WalKind::kMessage;
    record.run = run;
    record.seq = seq;
    record.payload = absl::StrCat("payload ", seq);
    return record;
  }

  int64_t Rows() {
    int64_t rows = 0;
    for (int i = 0; i < 4; ++i) rows += postgres_->Number(absl::StrCat("SELECT count(*) FROM bellwether.frames_", i));
    return rows;
  }

  std::unique_ptr<PostgresServer> postgres_;
  std::unique_ptr<SharedLog> log_;
};

TEST_F(CommitQueueTest, CommitUnderOldEpochIsVoidAndUnacknowledged) {
  Open();
  ASSERT_TRUE(log_->AcquirePartition(kQueuePartition, TakeLease()).ok());
  const Lsn first = *log_->Append(Record(1));
  ASSERT_TRUE(log_->Sync(first).ok());
  ASSERT_EQ(Rows(), 1);

  TakeLease();
  absl::Notification lost;
  Lsn durable_when_lost = 0;
  log_->SetLost([&](uint32_t partition) {
    EXPECT_EQ(partition, kQueuePartition);
    durable_when_lost = log_->durable_lsn();
    lost.Notify();
  });
  const Lsn second = *log_->Append(Record(2));
  lost.WaitForNotification();
  EXPECT_LT(durable_when_lost, second) << "called durable before whoever waits for it was let go";
  log_->ReleasePartition(kQueuePartition);
  EXPECT_EQ(Rows(), 1);
  EXPECT_TRUE(absl::IsUnavailable(log_->Append(Record(3)).status()));
  EXPECT_TRUE(absl::IsAborted(log_->PutRows(kQueueRun, {{"key", "value"}})));
}

TEST_F(CommitQueueTest, RowsAndAlertsUnderAnOldEpochAreVoid) {
  Open();
  ASSERT_TRUE(log_->AcquirePartition(kQueuePartition, TakeLease()).ok());
  ASSERT_TRUE(log_->PutRows(kQueueRun, {{"key", "before"}}).ok());
  TakeLease();
  EXPECT_TRUE(absl::IsAborted(log_->PutRows(kQueueRun, {{"key", "after"}})));
  AlertTransition transition;
  transition.run = kQueueRun;
  transition.key = "rule/0/0/1";
  EXPECT_TRUE(absl::IsAborted(log_->PutTransition(&transition).status()));
  EXPECT_EQ(postgres_->Number("SELECT count(*) FROM bellwether.run_rows WHERE value = 'before'"), 1);
  EXPECT_EQ(postgres_->Number("SELECT n FROM bellwether.alert_count"), 0);
  EXPECT_EQ(postgres_->Number("SELECT count(*) FROM bellwether.alerts"), 0);
}

// An operator who cancels what waits for a standby makes COMMIT succeed, with a
// warning: the primary alone has it.
TEST_F(CommitQueueTest, ACommitWithAWarningIsNoAck) {
  Open();
  ASSERT_TRUE(log_->AcquirePartition(kQueuePartition, TakeLease()).ok());
  postgres_->Set("synchronous_standby_names", "s1");
  const Lsn lsn = *log_->Append(Record(1));
  ASSERT_TRUE(postgres_->Await(kWaitsForStandby));
  for (int i = 0; i < 3; ++i) {
    const int64_t pid = postgres_->Number("SELECT pid FROM pg_stat_activity WHERE wait_event = 'SyncRep'");
    postgres_->Sql(absl::StrCat("SELECT pg_cancel_backend(", pid, ")"));
    // It is committed again, by a connection of its own; the first may be seen waiting for a while yet.
    ASSERT_TRUE(postgres_->Await(absl::StrCat(kWaitsForStandby, " AND pid <> ", pid)));
    EXPECT_LT(log_->durable_lsn(), lsn);
    EXPECT_EQ(Rows(), 1) << "the primary has it, and nobody else";
  }
  postgres_->Set("synchronous_standby_names", "");
  EXPECT_TRUE(log_->Sync(lsn).ok());
  EXPECT_EQ(Rows(), 1);
}

// The session ends while its commit is already there: the answer is lost, not the
// commit.
TEST_F(CommitQueueTest, CommitWithLostAnswerIsNotRepeated) {
  Open();
  ASSERT_TRUE(log_->AcquirePartition(kQueuePartition, TakeLease()).ok());
  postgres_->Set("synchronous_standby_names", "s1");
  const Lsn lsn = *log_->Append(Record(1));
  ASSERT_TRUE(postgres_->Await(kWaitsForStandby));
  postgres_->Sql("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE wait_event = 'SyncRep'");
  postgres_->Set("synchronous_standby_names", "");
  EXPECT_TRUE(log_->Sync(lsn).ok());
  EXPECT_EQ(Rows(), 1);
  const Lsn next = *log_->Append(Record(2));
  EXPECT_TRUE(log_->Sync(next).ok());
  EXPECT_EQ(Rows(), 2);
}

TEST_F(CommitQueueTest, ALostConnectionIsMadeAgain) {
  Open();
  ASSERT_TRUE(log_->AcquirePartition(kQueuePartition, TakeLease()).ok());
  for (uint64_t seq = 1; seq <= 3; ++seq) {
    const Lsn lsn = *log_->Append(Record(seq));
    ASSERT_TRUE(log_->Sync(lsn).ok());
    postgres_->Sql("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'bellwether'");
  }
  EXPECT_EQ(Rows(), 3);
}

// Nobody sends anything to a log that is not well: its health must not hang on the
// answer to a commit.
TEST_F(CommitQueueTest, RecoveredDatabaseIsNoticedWithNothingToCommit) {
  Open(/*patience_ms=*/100);
  ASSERT_TRUE(log_->AcquirePartition(kQueuePartition, TakeLease()).ok());
  ASSERT_TRUE(log_->Sync(*log_->Append(Record(1))).ok());
  postgres_->Sql("ALTER ROLE bellwether NOLOGIN");
  postgres_->Sql("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'bellwether'");
  EXPECT_FALSE(log_->Sync(*log_->Append(Record(2))).ok());
  log_->ReleasePartition(kQueuePartition);
  EXPECT_FALSE(log_->health().ok()) << "it is away still";
  postgres_->Sql("ALTER ROLE bellwether LOGIN");
  const absl::Time deadline = absl::Now() + absl::Seconds(60);
  while (!log_->health().ok() && absl::Now() < deadline) absl::SleepFor(absl::Milliseconds(25));
  EXPECT_TRUE(log_->health().ok());
}

TEST_F(CommitQueueTest, ASerializationFailureIsTriedAgainFromTheTop) {
  // The first two attempts fail so; a sequence is not rolled back.
  postgres_->Sql("CREATE SEQUENCE bellwether.tries");
  postgres_->Sql("GRANT USAGE ON SEQUENCE bellwether.tries TO bellwether");
  postgres_->Sql(
      "CREATE FUNCTION bellwether.fail() RETURNS trigger AS $$ BEGIN "
      "IF nextval('bellwether.tries') < 3 THEN RAISE EXCEPTION 'conflict' USING ERRCODE = '40001'; END IF; "
      "RETURN NEW; END $$ LANGUAGE plpgsql");
  for (int i = 0; i < 4; ++i) {
    postgres_->Sql(absl::StrCat("CREATE TRIGGER fail BEFORE INSERT ON bellwether.frames_", i,
                                " FOR EACH ROW EXECUTE FUNCTION bellwether.fail()"));
  }
  Open();
  ASSERT_TRUE(log_->AcquirePartition(kQueuePartition, TakeLease()).ok());
  const Lsn lsn = *log_->Append(Record(1));
  EXPECT_TRUE(log_->Sync(lsn).ok());
  EXPECT_EQ(Rows(), 1);
  EXPECT_EQ(postgres_->Number("SELECT last_value FROM bellwether.tries"), 3);
}

TEST_F(CommitQueueTest, LsnsGoOnAboveThoseOfThePartitionsLastOwner) {
  Open();
  ASSERT_TRUE(log_->AcquirePartition(kQueuePartition, TakeLease()).ok());
  const Lsn last = *log_->Append(Record(1));
  ASSERT_TRUE(log_->Sync(last).ok());
  ASSERT_TRUE(log_->Close().ok());
  Open();
  ASSERT_TRUE(log_->AcquirePartition(kQueuePartition, TakeLease()).ok());
  EXPECT_GT(*log_->Append(Record(2)), last);
  EXPECT_TRUE(absl::IsUnavailable(log_->Append(Record(1, FirstRunOf(kQueuePartition + 1) + 1)).status())) << "not ours";
}

TEST_F(CommitQueueTest, AnAppendBeyondItsLimitsIsRefused) {
  Open();
  ASSERT_TRUE(log_->AcquirePartition(kQueuePartition, TakeLease()).ok());
  WalRecord record = Record(1);
  record.payload.assign(PostgresLogOptions().record_bytes_max + 1, 'x');
  EXPECT_TRUE(absl::IsInvalidArgument(log_->Append(WalRecord(record)).status()));
  record.payload.pop_back();
  log_->Hold(absl::UnavailableError("held"));  // So that it waits.
  absl::Status status;
  for (int i = 0; i < 100 && status.ok(); ++i) status = log_->Append(WalRecord(record)).status();
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  log_->Hold(absl::OkStatus());
  EXPECT_TRUE(log_->Sync(log_->last_lsn()).ok());
}

TEST_F(CommitQueueTest, ASchemaOfAnotherVersionIsRefusedAtTheStart) {
  postgres_->Sql("INSERT INTO bellwether.migrations (version) VALUES (99)");
  PostgresLogOptions options;
  options.dsn = postgres_->dsn();
  const auto opened = OpenPostgresLog(options, [](Lsn) {});
  EXPECT_TRUE(absl::IsFailedPrecondition(opened.status())) << opened.status();
}

}  // namespace
}  // namespace bellwether::server
