// Goal: each database of a cluster is a lane of its own, which holds nobody else's
// records when it cannot go on; alerts of all are numbered by the first, whoever dies
// in between; a list of databases that is not the cluster's is refused.
// Method: the log on two real PostgreSQL, of which one is made to wait.
#include "server/cluster/spread_log.h"

#include <gmock/gmock.h>

#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "server/cluster/identity.h"
#include "server/model/partition.h"
#include "tests/support/postgres_server.h"

namespace bellwether::server {
namespace {

using ::testing::HasSubstr;

constexpr uint32_t kPartition = 5;
constexpr RunId kRuns[] = {FirstRunOf(kPartition) + 1, FirstRunOf(kPartitions + kPartition) + 1};  // By database.

TEST(PartitionTest, PartitionsSpreadRunsOverAllDatabases) {
  std::mt19937 random(11);
  std::map<uint32_t, std::set<uint32_t>> places;  // By database.
  for (int i = 0; i < 10'000; ++i) {
    RunUuid uuid;
    for (auto& byte : uuid) byte = static_cast<uint8_t>(random());
    const uint32_t alone = PartitionOf(uuid, 1), of_two = PartitionOf(uuid, 2);
    EXPECT_LT(alone, kPartitions);
    EXPECT_EQ(PartitionInDatabase(of_two), alone);
    EXPECT_LT(DatabaseOf(PartitionOf(uuid, kDatabasesMax)), kDatabasesMax);
    places[DatabaseOf(of_two)].insert(PartitionInDatabase(of_two));
  }
  EXPECT_EQ(places[0].size(), kPartitions);
  EXPECT_EQ(places[1].size(), kPartitions);
}

class SpreadLogTest : public ::testing::Test {
 protected:
  void SetUp() override {
    for (auto& postgres : postgres_) {
      postgres = PostgresServer::Start();
      if (postgres == nullptr && !HasFailure()) GTEST_SKIP() << "PostgreSQL or libpq is not installed";
      ASSERT_NE(postgres, nullptr);
    }
  }

  std::unique_ptr<SharedLog> Open(const std::string& owner) {
    PostgresLogOptions options;
    options.owner = owner;
    auto opened =
        OpenSpreadLog({postgres_[0]->dsn(), postgres_[1]->dsn()}, options, [this](uint32_t lane, Lsn durable) {
          absl::MutexLock lock(&mutex_);
          told_[lane] = durable;
        });
    EXPECT_TRUE(opened.ok()) << opened.status();
    return opened.ok() ? *std::move(opened) : nullptr;
  }

  // As a takeover does.
  void Take(SharedLog* log, uint32_t database) {
    const auto epoch = postgres_[database]->Sql(
        "UPDATE bellwether.lease SET epoch = epoch + 1, owner = 'x' WHERE p = 5 RETURNING epoch");
    ASSERT_TRUE(
        log->AcquirePartition(database * kPartitions + kPartition, static_cast<uint64_t>(epoch[0].Number(0, 0))).ok());
  }

  static Lsn Append(SharedLog* log, uint32_t database) {
    WalRecord record;
    record.kind = WalKind::kMessage;
    record.run = kRuns[database];
    record.seq = 1;
    const auto lsn = log->Append(std::move(record));
    EXPECT_TRUE(lsn.ok()) << lsn.status();
    return lsn.value_or(0);
  }

  bool AwaitTold(uint32_t lane, Lsn durable) {
    absl::MutexLock lock(&mutex_);
    const auto told = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return told_[lane] >= durable; };
    return mutex_.AwaitWithTimeout(absl::Condition(&told), absl::Seconds(60));
  }
  Lsn Told(uint32_t lane) {
    absl::MutexLock lock(&mutex_);
    return told_[lane];
  }

  static AlertTransition MakeTransition(RunId run, int number) {
    AlertTransition transition;
    transition.run = run;
    transition.key = absl::StrCat("rule/0/0/", number);
    transition.state = AlertState::kFiring;
    return transition;
  }

  int64_t Waiting() { return postgres_[1]->Number("SELECT count(*) FROM bellwether.alerts_waiting"); }

  std::unique_ptr<PostgresServer> postgres_[2];
  absl::Mutex mutex_;
  std::map<uint32_t, Lsn> told_ ABSL_GUARDED_BY(mutex_);
};

TEST_F(SpreadLogTest, HeldLaneDelaysNoOtherLane) {
  const auto log = Open("me/1");
  Take(log.get(), 0);
  Take(log.get(), 1);
  ASSERT_EQ(log->lanes(), 2u);
  log->lane(1)->Hold(absl::UnavailableError("away"));
  const Lsn held = Append(log.get(), 1), goes_on = Append(log.get(), 0);
  EXPECT_GT(goes_on, held) << "one count";
  EXPECT_TRUE(log->LogOf(kRuns[0])->Sync(goes_on).ok());
  EXPECT_TRUE(AwaitTold(0, goes_on));
  EXPECT_TRUE(log->LogOf(kRuns[0])->health().ok());
  EXPECT_TRUE(absl::IsUnavailable(log->LogOf(kRuns[1])->Sync(held)));
  EXPECT_LT(log->LogOf(kRuns[1])->durable_lsn(), held);
  EXPECT_LT(Told(1), held);
  // A word about what is durable in a lane that is quiet covers all that others have given.
  log->lane(1)->Hold(absl::OkStatus());
  EXPECT_TRUE(log->LogOf(kRuns[1])->Sync(held).ok());
  EXPECT_TRUE(AwaitTold(1, held));
  EXPECT_EQ(log->lane(1)->durable_lsn(), log->last_lsn());
  EXPECT_EQ(log->lane(0)->durable_lsn(), log->last_lsn());
}

TEST_F(SpreadLogTest, RecordsAndRowsLieInTheDatabaseOfTheirRun) {
  const auto log = Open("me/1");
  for (uint32_t database : {0u, 1u}) {
    Take(log.get(), database);
    EXPECT_TRUE(log->Sync(Append(log.get(), database)).ok());
    EXPECT_TRUE(log->PutRows(kRuns[database], {{absl::StrCat("row ", database), "value"}}).ok());
    int rows = 0, records = 0;
    const uint32_t partition = database * kPartitions + kPartition;
    EXPECT_TRUE(log->ReadRows(partition, "a", "z",
                              [&](const std::vector<SharedRow>& page) {
                                for (const SharedRow& row : page) rows += row.key == absl::StrCat("row ", database);
                                return absl::OkStatus();
                              })
                    .ok());
    EXPECT_TRUE(log->ReadRecords(partition,
                                 [&](const WalRecord& record) {
                                   records += record.run == kRuns[database];
                                   return absl::OkStatus();
                                 })
                    .ok());
    EXPECT_EQ(rows, 1);
    EXPECT_EQ(records, 1);
    EXPECT_EQ(postgres_[database]->Number("SELECT count(*) FROM bellwether.run_rows WHERE p = 5 AND length(key) > 1"),
              1);
  }
}

TEST_F(SpreadLogTest, AlertsOfAllDatabasesHaveOneOrder) {
  const auto log = Open("me/1");
  Take(log.get(), 0);
  Take(log.get(), 1);
  for (int i = 0; i < 4; ++i) {
    AlertTransition transition = MakeTransition(kRuns[i % 2], i);
    const auto is_new = log->PutTransition(&transition);
    EXPECT_TRUE(is_new.ok() && *is_new) << is_new.status();
    EXPECT_EQ(transition.id, static_cast<uint64_t>(i) + 1);
  }
  AlertTransition again = MakeTransition(kRuns[1], 1);
  EXPECT_TRUE(*log->PutTransition(&again)) << "its own, as if it had not been answered";
  EXPECT_EQ(again.id, 2u);
  const auto all = log->ListTransitions(0, 10);
  ASSERT_TRUE(all.ok()) << all.status();
  ASSERT_EQ(all->size(), 4u);
  EXPECT_EQ((*all)[1].run, kRuns[1]);
  EXPECT_EQ(Waiting(), 0);
}

TEST_F(SpreadLogTest, AnAlertThatCannotBeReadHidesNoOthers) {
  const auto log = Open("me/1");
  Take(log.get(), 0);
  for (int i = 0; i < 6; ++i) {
    AlertTransition transition = MakeTransition(kRuns[0], i);
    ASSERT_TRUE(log->PutTransition(&transition).ok());
  }
  postgres_[0]->Sql("UPDATE bellwether.alerts SET body = '\\xff' WHERE n IN (2, 3, 6)");
  const auto ids = [&](uint64_t after, size_t limit) {
    std::vector<uint64_t> listed;
    const auto page = log->ListTransitions(after, limit);
    EXPECT_TRUE(page.ok()) << page.status();
    if (!page.ok()) return listed;
    for (const AlertTransition& transition : *page) listed.push_back(transition.id);
    return listed;
  };
  EXPECT_EQ(ids(0, 10), (std::vector<uint64_t>{1, 4, 5}));
  EXPECT_EQ(ids(0, 2), (std::vector<uint64_t>{1, 4})) << "fewer than asked for would be the last";
  EXPECT_EQ(ids(5, 10), std::vector<uint64_t>());
}

// The first database does not answer when an alert of the second's run is concluded,
// and its owner dies before it does.
TEST_F(SpreadLogTest, UnnumberedAlertIsNumberedByNextOwner) {
  const auto log = Open("old/1");
  Take(log.get(), 1);
  postgres_[0]->Sql("SET idle_in_transaction_session_timeout = 0");
  postgres_[0]->Sql("BEGIN");
  postgres_[0]->Sql("LOCK TABLE bellwether.alert_count");
  AlertTransition transition = MakeTransition(kRuns[1], 1);
  EXPECT_TRUE(absl::IsUnavailable(log->PutTransition(&transition).status()));
  EXPECT_EQ(Waiting(), 1);
  EXPECT_TRUE(log->KeepTransition(MakeTransition(kRuns[1], 2)).ok());
  EXPECT_EQ(Waiting(), 2);
  EXPECT_TRUE(log->lane(1)->Truncate(0).ok());
  EXPECT_EQ(Waiting(), 2) << "its own are its own to put again";
  postgres_[0]->Sql("COMMIT");

  const auto next = Open("new/1");
  Take(next.get(), 1);
  EXPECT_TRUE(absl::IsAborted(log->PutTransition(&transition).status())) << "another owns its run";
  EXPECT_TRUE(next->lane(1)->Truncate(0).ok());
  EXPECT_EQ(Waiting(), 0);
  const auto all = next->ListTransitions(0, 10);
  ASSERT_TRUE(all.ok()) << all.status();
  ASSERT_EQ(all->size(), 2u);
  EXPECT_EQ(all->front().key, transition.key);
  EXPECT_EQ(postgres_[0]->Number("SELECT min(p) FROM bellwether.alerts"), int64_t{kPartitions} + kPartition);
  // Concluded again from the log.
  EXPECT_FALSE(*next->PutTransition(&transition));
  EXPECT_EQ(transition.id, 1u);
}

TEST_F(SpreadLogTest, WrongOrderOfDatabasesIsRefused) {
  const std::string first = postgres_[0]->dsn(), second = postgres_[1]->dsn();
  const auto says = [](const std::vector<std::string>& dsns) {
    const absl::Status status = CheckIdentity(dsns, 5000).status();
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
    return std::string(status.message());
  };
  EXPECT_THAT(says({first, first}), HasSubstr("entries 1 and 2 lead to the same database"));
  EXPECT_TRUE(CheckIdentity({first, second}, 5000).ok());
  EXPECT_TRUE(CheckIdentity({first, second}, 5000).ok());
  EXPECT_THAT(says({second, first}), HasSubstr("database 2 of the 2 of its cluster, and stands here as 1 of 2"));
  EXPECT_THAT(says({first}), HasSubstr("database 1 of the 2 of its cluster, and stands here as 1 of 1"));
  // Begun by a server that died in between.
  postgres_[1]->Sql("UPDATE bellwether.identity SET databases = ''");
  EXPECT_TRUE(CheckIdentity({first, second}, 5000).ok());
  // One that is away is known by the first; without it, or before, nobody knows which it is.
  const std::string away = "host=/nowhere dbname=none";
  const auto names = CheckIdentity({first, away}, 5000);
  ASSERT_TRUE(names.ok()) << names.status();
  EXPECT_TRUE(absl::IsUnavailable(CheckIdentity({away, second}, 5000).status()));
  auto connection = PgConnection::Connect(second, 5000);
  ASSERT_TRUE(connection.ok()) << connection.status();
  EXPECT_TRUE(CheckPlace(*names, 1, 5000, connection->get()).ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(CheckPlace(*names, 0, 5000, connection->get())));
  // Another database in the second's place learns nothing.
  postgres_[1]->Sql("UPDATE bellwether.identity SET name = 'another', databases = ''");
  EXPECT_THAT(says({first, second}), HasSubstr("the others are not those that it knows"));
  EXPECT_EQ(postgres_[1]->Number("SELECT count(*) FROM bellwether.identity WHERE databases = ''"), 1);
}

TEST_F(SpreadLogTest, ADatabaseOfAnOlderSchemaIsNamed) {
  postgres_[1]->Sql("DELETE FROM bellwether.migrations WHERE version = 3");
  const auto opened =
      OpenSpreadLog({postgres_[0]->dsn(), postgres_[1]->dsn()}, PostgresLogOptions(), [](uint32_t, Lsn) {});
  EXPECT_TRUE(absl::IsFailedPrecondition(opened.status())) << opened.status();
  EXPECT_THAT(std::string(opened.status().message()), HasSubstr("entry 2: the shared schema is of version 2"));
  const std::vector<std::string> many(kDatabasesMax + 1, postgres_[0]->dsn());
  const auto refused = OpenSpreadLog(many, PostgresLogOptions(), [](uint32_t, Lsn) {});
  EXPECT_TRUE(absl::IsInvalidArgument(refused.status())) << refused.status();
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("17 entries: must be 1 to 16"));
}

}  // namespace
}  // namespace bellwether::server
