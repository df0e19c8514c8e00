// Goal: the shared log is read back as it was written, in its order, whichever day's
// table holds it, and no row is there twice.
// Method: rows put into the tables of a real PostgreSQL in a shuffled order.
#include "server/cluster/frame_tables.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/model/partition.h"
#include "tests/support/postgres_server.h"

namespace bellwether::server {
namespace {

constexpr Fence kFence = {.partition = 7, .epoch = 0};

std::vector<WalRecord> Records(Lsn first, size_t count, uint32_t partition = kFence.partition) {
  std::vector<WalRecord> records(count);
  for (size_t i = 0; i < count; ++i) {
    records[i].lsn = first + i;
    records[i].kind = WalKind::kMessage;
    records[i].run = FirstRunOf(partition) + 1;
    records[i].rank = 3;
    records[i].attempt = 2;
    records[i].epoch = 9;
    records[i].seq = first + i + 100;
    records[i].time_unix_ms = 1'700'000'000'000;
    records[i].payload = absl::StrCat("payload of ", first + i);
  }
  return records;
}

TEST(PackRecordsTest, GivesBackEveryFieldAndRefusesWhatIsDamaged) {
  const std::vector<WalRecord> records = Records(40, 3);
  std::string packed = PackRecords(records);
  std::vector<WalRecord> seen;
  ASSERT_TRUE(UnpackRecords(packed, [&](const WalRecord& record) {
                seen.push_back(record);
                return absl::OkStatus();
              }).ok());
  ASSERT_EQ(seen.size(), 3u);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(seen[i].lsn, records[i].lsn);
    EXPECT_EQ(seen[i].kind, records[i].kind);
    EXPECT_EQ(seen[i].run, records[i].run);
    EXPECT_EQ(seen[i].rank, records[i].rank);
    EXPECT_EQ(seen[i].attempt, records[i].attempt);
    EXPECT_EQ(seen[i].epoch, records[i].epoch);
    EXPECT_EQ(seen[i].seq, records[i].seq);
    EXPECT_EQ(seen[i].time_unix_ms, records[i].time_unix_ms);
    EXPECT_EQ(seen[i].payload, records[i].payload);
  }
  const auto ignore = [](const WalRecord&) { return absl::OkStatus(); };
  EXPECT_TRUE(absl::IsDataLoss(UnpackRecords(packed.substr(0, packed.size() / 2), ignore)));
  packed[packed.size() / 2] = static_cast<char>(packed[packed.size() / 2] ^ 0x40);
  EXPECT_TRUE(absl::IsDataLoss(UnpackRecords(packed, ignore)));
  EXPECT_TRUE(absl::IsDataLoss(UnpackRecords("no frame of zstd", ignore)));
}

class FrameTablesTest : public ::testing::Test {
 protected:
  void SetUp() override {
    postgres_ = PostgresServer::Start();
    if (postgres_ == nullptr && !HasFailure()) GTEST_SKIP() << "PostgreSQL or libpq is not installed";
    ASSERT_NE(postgres_, nullptr);
    link_ = std::make_unique<SharedPgLink>(postgres_->dsn(), 5000);
  }

  absl::Status Put(int table, const Fence& fence, const std::vector<WalRecord>& records) {
    std::vector<PgStatement> flight = FencedFlight(fence);
    flight.push_back(
        FrameTables::Insert(table, fence, records.front().lsn, records.back().lsn, "me/1", PackRecords(records)));
    return link_->Transact(flight).status();
  }

  std::vector<Lsn> ReadLsns() {
    std::vector<Lsn> lsns;
    const absl::Status read = FrameTables::Read(kFence.partition, link_.get(), [&](const WalRecord& record) {
      lsns.push_back(record.lsn);
      return absl::OkStatus();
    });
    EXPECT_TRUE(read.ok()) << read;
    return lsns;
  }

  // The table of two days ago.
  std::string OldTable() {
    return absl::StrCat("bellwether.frames_",
                        postgres_->Number("SELECT (CAST(floor(extract(epoch FROM now()) / 86400) AS bigint) + 2) % 4"));
  }

  std::unique_ptr<PostgresServer> postgres_;
  std::unique_ptr<SharedPgLink> link_;
};

TEST_F(FrameTablesTest, ReplayFollowsLsnOrderOverAllTablesAndPages) {
  std::vector<Lsn> firsts(150);
  for (size_t i = 0; i < firsts.size(); ++i) firsts[i] = 10 + 3 * i;
  std::mt19937 random(11);
  std::shuffle(firsts.begin(), firsts.end(), random);
  for (const Lsn first : firsts) {
    ASSERT_TRUE(Put(static_cast<int>(first / 90 % 4), kFence, Records(first, 3)).ok());
  }
  // Of another partition: not its own.
  ASSERT_TRUE(Put(0, {.partition = 8, .epoch = 0}, Records(11, 1, 8)).ok());
  std::vector<Lsn> all(450);
  for (size_t i = 0; i < all.size(); ++i) all[i] = 10 + i;
  EXPECT_EQ(ReadLsns(), all);
  EXPECT_EQ(*FrameTables::LastLsn(kFence.partition, link_.get()), all.back());

  // From the row that holds `keep` on.
  postgres_->Sql("UPDATE bellwether.lease SET keep = 101 WHERE p = 7");
  EXPECT_EQ(ReadLsns(), std::vector<Lsn>(all.begin() + 90, all.end()));
}

TEST_F(FrameTablesTest, RepeatedRowIsLeftUnchanged) {
  ASSERT_TRUE(Put(1, kFence, Records(10, 2)).ok());
  ASSERT_TRUE(Put(1, kFence, Records(10, 2)).ok());
  EXPECT_EQ(ReadLsns(), (std::vector<Lsn>{10, 11}));
}

TEST_F(FrameTablesTest, LsnsGoOnAboveWhatWasForgotten) {
  EXPECT_EQ(*FrameTables::LastLsn(kFence.partition, link_.get()), 0u);
  postgres_->Sql("UPDATE bellwether.lease SET keep = 500 WHERE p = 7");
  EXPECT_EQ(*FrameTables::LastLsn(kFence.partition, link_.get()), 500u);
}

TEST_F(FrameTablesTest, OnlyUnneededTablesOlderThanYesterdayAreEmptied) {
  FrameTables tables;
  auto connection = PgConnection::Connect(postgres_->dsn(), 5000);
  ASSERT_TRUE(connection.ok());
  ASSERT_TRUE(tables.LearnDay(connection->get(), 5000).ok());
  const int today = tables.TableOfToday();
  for (int i = 0; i < 4; ++i) {
    ASSERT_TRUE(Put((today + i) % 4, kFence, Records(10 + static_cast<Lsn>(i), 1)).ok());
  }
  // Nothing is needed but what tomorrow's table of four days ago holds.
  postgres_->Sql("UPDATE bellwether.lease SET keep = 100 WHERE p = 7");
  ASSERT_TRUE(Put((today + 1) % 4, {.partition = 8, .epoch = 0}, Records(50, 1, 8)).ok());
  ASSERT_TRUE(tables.EmptyOld(link_.get()).ok());
  const auto rows = [&](int offset) {
    return postgres_->Number(absl::StrCat("SELECT count(*) FROM bellwether.frames_", (today + offset) % 4));
  };
  EXPECT_EQ(rows(0), 1) << "today's";
  EXPECT_EQ(rows(1), 2) << "partition 8 needs it";
  EXPECT_EQ(rows(2), 0) << "two days ago";
  EXPECT_EQ(rows(3), 1) << "yesterday's";
}

TEST_F(FrameTablesTest, ATableThatIsReadIsEmptiedAnotherTime) {
  const std::string table = OldTable();
  ASSERT_TRUE(Put(table.back() - '0', kFence, Records(10, 1)).ok());
  postgres_->Sql("UPDATE bellwether.lease SET keep = 100 WHERE p = 7");
  // A dump, for one.  (One that waits for it for long would hold everybody's commits up.)
  postgres_->Sql("SET idle_in_transaction_session_timeout = 0");
  postgres_->Sql("BEGIN");
  postgres_->Sql("SELECT 1 FROM " + table);
  EXPECT_TRUE(FrameTables().EmptyOld(link_.get()).ok());
  EXPECT_EQ(postgres_->Number("SELECT count(*) FROM " + table), 1);
  postgres_->Sql("COMMIT");
  EXPECT_TRUE(FrameTables().EmptyOld(link_.get()).ok());
  EXPECT_EQ(postgres_->Number("SELECT count(*) FROM " + table), 0);
}

// What is committed between the look at a table and its end; were that not looked for
// again, it would be gone.
TEST_F(FrameTablesTest, CommitJustBeforeTableIsEmptiedIsKept) {
  const std::string table = OldTable();
  ASSERT_TRUE(Put(table.back() - '0', kFence, Records(10, 1)).ok());
  postgres_->Sql("UPDATE bellwether.lease SET keep = 100 WHERE p = 7");
  postgres_->Sql("SET idle_in_transaction_session_timeout = 0");
  auto watch = PgConnection::Connect(postgres_->dsn(), 5000);
  ASSERT_TRUE(watch.ok());
  postgres_->Sql("BEGIN");
  postgres_->Sql("SELECT 1 FROM bellwether.lease WHERE p = 8 FOR UPDATE");
  postgres_->Sql("INSERT INTO " + table +
                 " (p, first_lsn, last_lsn, epoch, owner, body) VALUES (8, 50, 50, 0, 'x', '')");
  std::atomic<bool> ended = false;
  std::thread empty([&] {
    EXPECT_TRUE(FrameTables().EmptyOld(link_.get()).ok());
    ended = true;
  });
  const PgStatement waits = {
      "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%lease ORDER BY p FOR%'",
      {}};
  while (!ended) {
    const auto counted = (*watch)->Run({waits}, 5000);
    ASSERT_TRUE(counted.ok()) << counted.status();
    if (counted->front().Number(0, 0) > 0) break;
  }
  postgres_->Sql("COMMIT");
  empty.join();
  EXPECT_EQ(postgres_->Number("SELECT count(*) FROM " + table + " WHERE p = 8"), 1);
}

}  // namespace
}  // namespace bellwether::server
