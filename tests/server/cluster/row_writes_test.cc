// Goal: of two writes of a row the later one counts, also where the earlier was given
// up without an answer and is carried out when nobody expects it any more.
// Method: the log on a real PostgreSQL, one of whose processes is stopped with a write
// in its socket and goes on after the next one.
#include <gmock/gmock.h>
#include <signal.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/cluster/postgres_log.h"
#include "server/cluster/postgres_rows.h"
#include "tests/support/postgres_server.h"

namespace bellwether::server {
namespace {

constexpr uint32_t kRowsPartition = 5;
constexpr int64_t kShortMs = 1000;  // Where an answer is to be given up.
constexpr RunId kRowsRun = FirstRunOf(kRowsPartition) + 1;

class RowWritesTest : public ::testing::Test {
 protected:
  void SetUp() override {
    postgres_ = PostgresServer::Start();
    if (postgres_ == nullptr && !HasFailure()) GTEST_SKIP() << "PostgreSQL or libpq is not installed";
    ASSERT_NE(postgres_, nullptr);
    Open(/*answer_ms=*/10'000);
  }

  // And takes the lease.
  void Open(int64_t answer_ms) {
    PostgresLogOptions options;
    options.dsn = postgres_->dsn();
    options.owner = "me/1";
    options.answer_ms_max = answer_ms;
    // Here as below, what has a short time for its answer may have to ask again.
    absl::StatusOr<std::unique_ptr<SharedLog>> opened;
    do opened = OpenPostgresLog(options, [](Lsn) {});
    while (absl::IsUnavailable(opened.status()));
    ASSERT_TRUE(opened.ok()) << opened.status();
    log_ = *std::move(opened);
    TakeLease();
  }
  // As a takeover does.
  void TakeLease() {
    const auto epoch =
        postgres_->Sql("UPDATE bellwether.lease SET epoch = epoch + 1, owner = 'x' WHERE p = 5 RETURNING epoch");
    absl::Status owns;
    do owns = log_->AcquirePartition(kRowsPartition, static_cast<uint64_t>(epoch[0].Number(0, 0)));
    while (absl::IsUnavailable(owns));
    ASSERT_TRUE(owns.ok()) << owns;
  }

  absl::Status Put(const std::string& key, const std::string& value) { return log_->PutRows(kRowsRun, {{key, value}}); }
  void PutUntilAnswered(const std::string& key, const std::string& value) {
    absl::Status put;
    do put = Put(key, value);
    while (absl::IsUnavailable(put));
    EXPECT_TRUE(put.ok()) << put;
  }
  std::string Stored(const std::string& key) {
    const auto rows = postgres_->Sql(absl::StrCat("SELECT value FROM bellwether.run_rows WHERE key = '", key, "'"));
    return rows[0].rows() == 1 ? std::string(rows[0].Text(0, 0)) : "(none)";
  }
  // The database's process that carried out the last write.
  pid_t Writer() {
    return static_cast<pid_t>(
        postgres_->Number("SELECT pid FROM pg_stat_activity WHERE query = 'COMMIT' AND usename = 'bellwether' "
                          "ORDER BY query_start DESC LIMIT 1"));
  }

  std::unique_ptr<PostgresServer> postgres_;
  std::unique_ptr<SharedLog> log_;
};

TEST_F(RowWritesTest, AbandonedWriteChangesNothingAfterALaterOne) {
  Open(kShortMs);
  PutUntilAnswered("row", "first");
  const pid_t writer = Writer();
  ASSERT_GT(writer, 0);
  ASSERT_EQ(kill(writer, SIGSTOP), 0);
  PutUntilAnswered("row", "second");  // On another connection, after the one that is stopped was given up.
  PutUntilAnswered("row", "third");
  ASSERT_EQ(kill(writer, SIGCONT), 0);
  // Its end: it has carried out all that it was sent.
  EXPECT_TRUE(postgres_->Await(absl::StrCat("SELECT 1 - count(*) FROM pg_stat_activity WHERE pid = ", writer)));
  EXPECT_EQ(Stored("row"), "third");
  PutUntilAnswered("row", "fourth");
  EXPECT_EQ(Stored("row"), "fourth");
}

TEST_F(RowWritesTest, WritesOfALaterEpochReplaceEarlierOnes) {
  ASSERT_TRUE(Put("row", "first").ok());
  TakeLease();
  EXPECT_TRUE(Put("row", "second").ok());
  EXPECT_EQ(Stored("row"), "second");
  EXPECT_EQ(
      postgres_->Number(absl::StrCat("SELECT count(*) FROM bellwether.run_rows WHERE key = '", kWriteNumberKey, "'")),
      1);
}

// A database without a standby may have lost the number with its last seconds.
TEST_F(RowWritesTest, ANumberThatTheDatabaseLostIsGivenAgain) {
  ASSERT_TRUE(Put("row", "first").ok());
  postgres_->Sql(absl::StrCat("DELETE FROM bellwether.run_rows WHERE key = '", kWriteNumberKey, "'"));
  EXPECT_TRUE(Put("row", "second").ok());
  EXPECT_EQ(Stored("row"), "second");
}

// Set back to a time before the epochs that its servers had, with them running.
TEST_F(RowWritesTest, DatabaseSetBackTakesWritesOfNextOwners) {
  TakeLease();
  TakeLease();
  ASSERT_TRUE(Put("row", "first").ok());
  postgres_->Sql("UPDATE bellwether.lease SET epoch = 0 WHERE p = 5");
  postgres_->Sql("DELETE FROM bellwether.run_rows");
  TakeLease();
  EXPECT_TRUE(Put("row", "second").ok());
  Open(/*answer_ms=*/10'000);
  EXPECT_TRUE(Put("row", "third").ok());
  EXPECT_EQ(Stored("row"), "third");
}

// Whatever the role's transactions are by default: what was committed while a write
// waited for its lease counts.
TEST_F(RowWritesTest, OvertakenWriteDoesNotReplaceALaterOne) {
  postgres_->Sql("ALTER ROLE bellwether SET default_transaction_isolation = 'repeatable read'");
  Open(/*answer_ms=*/10'000);
  ASSERT_TRUE(Put("row", "first").ok());
  postgres_->Sql("SET idle_in_transaction_session_timeout = 0");  // However long this machine halts.
  postgres_->Sql("BEGIN");
  postgres_->Sql("SELECT 1 FROM bellwether.lease WHERE p = 5 FOR UPDATE");
  postgres_->Sql(absl::StrCat("UPDATE bellwether.run_rows SET value = '\\xff' WHERE key = '", kWriteNumberKey, "'"));
  std::thread late([&] {
    absl::Status put;
    do put = Put("row", "late");
    while (absl::IsUnavailable(put));  // It waits for two seconds at a time.
    EXPECT_TRUE(absl::IsAborted(put)) << put;
  });
  EXPECT_TRUE(postgres_->Await("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"));
  postgres_->Sql("COMMIT");
  late.join();
  EXPECT_EQ(Stored("row"), "first");
}

TEST(WriteNumbersTest, AbandoningAnOldEpochsWriteKeepsNewNumbers) {
  WriteNumbers numbers;
  const Fence before{.partition = 5, .epoch = 1}, now{.partition = 5, .epoch = 2};
  const WriteNumber late = numbers.Of(before);
  numbers.GiveUp(now, numbers.Of(now));
  const WriteNumber second_try = numbers.Of(before);
  EXPECT_EQ(second_try.epoch, 2u) << "its fence refuses it";
  numbers.GiveUp(before, late);
  numbers.GiveUp(before, second_try);
  EXPECT_EQ(numbers.Of(now).epoch, 2u);
  EXPECT_EQ(numbers.Of(now).number, 3u);
}

// Those beside one that is given up are overtaken by what follows it, and made again.
TEST_F(RowWritesTest, WritesBesideOneThatIsGivenUpAllArrive) {
  Open(kShortMs);
  constexpr int kWriters = 4, kWrites = 40;
  std::vector<std::thread> writers;
  for (int writer = 0; writer < kWriters; ++writer) {
    writers.emplace_back([this, writer] {
      for (int i = 1; i <= kWrites; ++i) PutUntilAnswered(absl::StrCat("row ", writer), absl::StrCat(i));
    });
  }
  for (int i = 0; i < 6; ++i) {
    const pid_t writer = Writer();
    if (writer <= 0 || kill(writer, SIGSTOP) != 0) continue;
    std::this_thread::sleep_for(std::chrono::milliseconds(kShortMs / 2 * (1 + i % 3)));
    kill(writer, SIGCONT);
  }
  for (std::thread& writer : writers) writer.join();
  for (int writer = 0; writer < kWriters; ++writer) {
    EXPECT_EQ(Stored(absl::StrCat("row ", writer)), absl::StrCat(kWrites));
  }
}

}  // namespace
}  // namespace bellwether::server
