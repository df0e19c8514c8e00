// Goal: a partition has one owner at a time: a takeover waits for a commit that is
// under way, no commit comes after it, and an owner who pauses holds nobody up.
// Method: members on a real PostgreSQL, beside an owner whose transaction the test
// takes apart.
#include "server/cluster/member.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "server/cluster/fence.h"
#include "server/cluster/frame_tables.h"
#include "tests/support/postgres_server.h"

namespace bellwether::server {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::Field;

class Host final : public PartitionHost {
 public:
  absl::Status AcquirePartition(uint32_t partition, uint64_t epoch) override {
    absl::MutexLock lock(&mutex_);
    served_[partition] = epoch;
    return absl::OkStatus();
  }
  absl::Status LoadHistory(uint32_t, const std::function<bool()>& is_wanted) override {
    if (history != nullptr) history(is_wanted);
    return absl::OkStatus();
  }
  void FencePartition(uint32_t partition) override {
    absl::MutexLock lock(&mutex_);
    served_.erase(partition);
  }
  Lsn ReleasePartition(uint32_t partition, bool) override {
    FencePartition(partition);
    if (before_dropped) before_dropped(partition);
    return 0;
  }
  std::function<void(uint32_t partition)> before_dropped;
  std::function<void(const std::function<bool()>& is_wanted)> history;  // Reads it.

  // The epoch under which it is served; 0: it is not, in time.
  uint64_t AwaitServed(uint32_t partition) {
    absl::MutexLock lock(&mutex_);
    const auto served = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return served_.count(partition) > 0; };
    return mutex_.AwaitWithTimeout(absl::Condition(&served), absl::Seconds(60)) ? served_[partition] : 0;
  }
  size_t AwaitCount(size_t count) {
    absl::MutexLock lock(&mutex_);
    const auto right = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return served_.size() == count; };
    mutex_.AwaitWithTimeout(absl::Condition(&right), absl::Seconds(60));
    return served_.size();
  }

 private:
  absl::Mutex mutex_;
  std::map<uint32_t, uint64_t> served_ ABSL_GUARDED_BY(mutex_);
};

bool Eventually(const std::function<bool()>& is) {
  const absl::Time deadline = absl::Now() + absl::Seconds(60);
  while (!is()) {
    if (absl::Now() > deadline) return false;
    absl::SleepFor(absl::Milliseconds(25));
  }
  return true;
}

class MemberTest : public ::testing::Test {
 protected:
  void SetUp() override {
    postgres_ = PostgresServer::Start();
    if (postgres_ == nullptr && !HasFailure()) GTEST_SKIP() << "PostgreSQL or libpq is not installed";
    ASSERT_NE(postgres_, nullptr);
  }

  std::unique_ptr<Member> Join(const std::string& node, Host* host, AskHoldings ask = {}, int64_t lease_seconds = 2) {
    ClusterOptions options;
    options.dsns = {postgres_->dsn()};
    options.node = node;
    options.address = node + ":7070";
    options.lease_seconds = lease_seconds;
    auto member = Member::Open(options, /*database=*/0, node + "/1", host, &counters_, Clock::System(), std::move(ask));
    EXPECT_TRUE(member.ok()) << member.status();
    if (!member.ok()) return nullptr;
    (*member)->Begin();
    return *std::move(member);
  }

  // An owner of partition 0 under epoch 1 whose lease has run out, in the middle
  // of a commit: all but the COMMIT has been sent.
  std::unique_ptr<PgConnection> BeginCommit() {
    postgres_->Sql("UPDATE bellwether.lease SET owner = 'old/1', epoch = 1 WHERE p = 0");
    auto connection = PgConnection::Connect(postgres_->dsn(), 5000);
    EXPECT_TRUE(connection.ok()) << connection.status();
    const Fence fence = {.partition = 0, .epoch = 1};
    WalRecord record;
    record.lsn = 1;
    record.kind = WalKind::kMessage;
    std::vector<PgStatement> flight = {{"BEGIN", {}}};
    for (PgStatement& each : FencedFlight(fence)) flight.push_back(std::move(each));
    flight.push_back(FrameTables::Insert(0, fence, 1, 1, "old/1", PackRecords({record})));
    EXPECT_TRUE((*connection)->Run(flight, 5000).ok());
    return *std::move(connection);
  }

  // The database ends a transaction that pauses for two seconds, as this machine may.
  static void KeepOpen(PgConnection* connection) {
    EXPECT_TRUE(connection->Run({{"SET idle_in_transaction_session_timeout = 0", {}}}, 5000).ok());
  }

  static constexpr char kTakerWaits[] =
      "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE 'UPDATE bellwether.lease%'";
  // Since when, as a number; 0: nobody does.
  static constexpr char kTakerWaitsSince[] =
      "SELECT coalesce(max(CAST(extract(epoch FROM query_start) * 1000000 AS bigint)), 0) FROM pg_stat_activity "
      "WHERE wait_event_type = 'Lock' AND query LIKE 'UPDATE bellwether.lease%'";

  std::unique_ptr<PostgresServer> postgres_;
  Counters counters_;
};

TEST_F(MemberTest, ATakeoverWaitsForACommitThatIsUnderWay) {
  const std::unique_ptr<PgConnection> old = BeginCommit();
  KeepOpen(old.get());
  Host host;
  const std::unique_ptr<Member> member = Join("new", &host);
  ASSERT_TRUE(postgres_->Await(kTakerWaits));
  EXPECT_EQ(postgres_->Number("SELECT epoch FROM bellwether.lease WHERE p = 0"), 1);
  EXPECT_TRUE(old->Run({{"COMMIT", {}}}, 5000).ok());
  EXPECT_EQ(host.AwaitServed(0), 2u);
  EXPECT_EQ(postgres_->Number("SELECT count(*) FROM bellwether.frames_0 WHERE epoch = 1"), 1);
  // And none comes after it.
  EXPECT_TRUE(absl::IsAborted(old->Transact(FencedFlight({.partition = 0, .epoch = 1}), 5000).status()));
}

TEST_F(MemberTest, OwnerPausedInCommitLosesItWithoutDelayingTakeover) {
  const std::unique_ptr<PgConnection> old = BeginCommit();
  Host host;
  const std::unique_ptr<Member> member = Join("new", &host);
  EXPECT_EQ(host.AwaitServed(0), 2u);
  EXPECT_EQ(postgres_->Number("SELECT count(*) FROM bellwether.frames_0"), 0);
  const absl::Status committed = old->Run({{"COMMIT", {}}}, 5000).status();
  EXPECT_TRUE(absl::IsUnavailable(committed)) << committed;
  EXPECT_TRUE(old->broken());
}

TEST_F(MemberTest, TwoServersShareHalvesAndLeavingReturnsThemAtOnce) {
  Host first, second;  // No lease runs out meanwhile.
  const std::unique_ptr<Member> one = Join("one", &first, {}, /*lease_seconds=*/60);
  EXPECT_EQ(first.AwaitCount(64), 64u);
  std::unique_ptr<Member> two = Join("two", &second, {}, /*lease_seconds=*/60);
  EXPECT_EQ(second.AwaitCount(32), 32u);
  EXPECT_EQ(first.AwaitCount(32), 32u);
  EXPECT_EQ(postgres_->Number("SELECT count(DISTINCT owner) FROM bellwether.lease WHERE until > now()"), 2);
  EXPECT_EQ(one->peer_key().size(), 32u);
  EXPECT_EQ(one->peer_key(), two->peer_key());
  // What each knows of the other follows within a look.
  EXPECT_TRUE(Eventually([&] {
    const Member::Spread spread = one->spread();
    return spread.others == std::vector<std::string>{"two:7070"} && spread.unserved == 0;
  }));
  EXPECT_TRUE(Eventually([&] { return one->Serves(63) != two->Serves(63); }));
  two->Leave();
  two.reset();
  EXPECT_EQ(first.AwaitCount(64), 64u);
  EXPECT_EQ(postgres_->Number("SELECT count(*) FROM bellwether.lease WHERE owner = 'one/1'"), 64);
}

TEST_F(MemberTest, LeavingDoesNotWaitForHistoryBeingRead) {
  Host host;
  absl::Notification begun;
  std::atomic<bool> given_up = false;
  host.history = [&](const std::function<bool()>& is_wanted) {
    if (begun.HasBeenNotified()) return;
    begun.Notify();
    given_up = Eventually([&] { return !is_wanted(); });
  };
  const std::unique_ptr<Member> member = Join("one", &host);
  ASSERT_TRUE(begun.WaitForNotificationWithTimeout(absl::Seconds(60)));
  member->Leave();
  EXPECT_TRUE(given_up);
}

TEST_F(MemberTest, LeavingServersFirstPartitionMovesBeforeLastIsSaved) {
  Host first, second;  // No lease runs out meanwhile.
  const std::unique_ptr<Member> one = Join("one", &first, {}, /*lease_seconds=*/60);
  ASSERT_EQ(first.AwaitCount(64), 64u);
  const std::unique_ptr<Member> two = Join("two", &second, {}, /*lease_seconds=*/60);
  ASSERT_EQ(second.AwaitCount(32), 32u);
  ASSERT_EQ(first.AwaitCount(32), 32u);
  size_t others = 0;
  second.before_dropped = [&](uint32_t partition) {
    EXPECT_GT(two->spread().unserved, 0u) << "its runs are not unknown, they move";
    if (partition == 63) others = first.AwaitCount(63);
  };
  two->Leave();
  EXPECT_EQ(others, 63u);
  EXPECT_EQ(first.AwaitCount(64), 64u);
}

TEST_F(MemberTest, NoClientIsSentToALeavingServer) {
  constexpr int64_t kLeaseSeconds = 6;  // Longer than this machine may halt.
  Host first, second;
  const std::unique_ptr<Member> one = Join("one", &first, {}, kLeaseSeconds);
  ASSERT_EQ(first.AwaitCount(64), 64u);
  const std::unique_ptr<Member> two = Join("two", &second, {}, kLeaseSeconds);
  ASSERT_EQ(second.AwaitCount(32), 32u);
  ASSERT_TRUE(Eventually([&] { return one->OwnerAddress(63) == "two:7070"; }));
  two->Announce();
  EXPECT_TRUE(Eventually([&] { return one->OwnerAddress(63).empty(); }));
  // The lease that it has now runs out.
  const int64_t until_ms = postgres_->Number(
      "SELECT floor(extract(epoch FROM max(until)) * 1000) FROM bellwether.lease WHERE owner = 'two/1'");
  ASSERT_TRUE(
      postgres_->Await(absl::StrCat("SELECT CAST(extract(epoch FROM now()) * 1000 > ", until_ms, " AS integer)")));
  EXPECT_TRUE(two->Serves(63)) << "until it has saved it";
  EXPECT_EQ(postgres_->Number("SELECT count(*) FROM bellwether.lease WHERE owner = 'two/1' AND until > now()"), 32);
}

TEST_F(MemberTest, MemberWithoutDatabaseAsksNoPeersBeforeItBegins) {
  Host host;
  ClusterOptions options;
  options.dsns = {postgres_->dsn(), "host=127.0.0.1 port=1 dbname=none"};
  options.node = "one";
  options.lease_seconds = 2;
  std::atomic<bool> begun = false;
  absl::Notification asked;
  const AskHoldings ask = [&](const std::vector<std::string>&) {
    EXPECT_TRUE(begun);
    if (!asked.HasBeenNotified()) asked.Notify();
    return std::vector<Holding>();
  };
  const auto member = Member::Open(options, /*database=*/1, "one/1", &host, &counters_, Clock::System(), ask);
  ASSERT_TRUE(member.ok()) << member.status();
  absl::SleepFor(absl::Milliseconds(100));  // It would have asked by now.
  begun = true;
  (*member)->Begin();
  EXPECT_TRUE(asked.WaitForNotificationWithTimeout(absl::Seconds(60)));
}

TEST_F(MemberTest, MemberThatNeverBeganLeavesAtOnce) {
  Host host;
  ClusterOptions options;
  options.dsns = {postgres_->dsn()};
  options.node = "one";
  options.address = "one:7070";
  options.lease_seconds = 60;  // It does not run out meanwhile.
  {
    const auto member = Member::Open(options, /*database=*/0, "one/1", &host, &counters_, Clock::System());
    ASSERT_TRUE(member.ok()) << member.status();
    EXPECT_EQ(postgres_->Number("SELECT count(*) FROM bellwether.servers WHERE until > now()"), 1);
  }
  EXPECT_EQ(postgres_->Number("SELECT count(*) FROM bellwether.servers WHERE until > now()"), 0);
}

TEST_F(MemberTest, LookSoonFindsAMovedPartitionSooner) {
  Host host;
  // By itself it looks each half second.
  const std::unique_ptr<Member> member = Join("one", &host, /*ask=*/{}, /*lease_seconds=*/60);
  ASSERT_EQ(host.AwaitCount(64), 64u);
  const auto move_to = [&](const std::string& address) {
    postgres_->Sql(absl::StrCat("UPDATE bellwether.lease SET owner = 'other/1', address = '", address,
                                "', epoch = epoch + 1, until = now() + interval '1 h' WHERE p = 9"));
  };
  move_to("other:0");
  ASSERT_TRUE(Eventually([&] { return member->OwnerAddress(9) == "other:0"; }));
  // The median of eleven: this machine may halt during some of them.
  const auto a_move_takes = [&](bool asks) {
    std::vector<absl::Duration> took;
    for (int i = 1; i <= 11; ++i) {
      const std::string address = absl::StrCat("other:", asks, i);
      const absl::Time began = absl::Now();
      move_to(address);
      EXPECT_TRUE(Eventually([&] {
        if (asks) member->LookSoon();
        return member->OwnerAddress(9) == address;
      }));
      took.push_back(absl::Now() - began);
    }
    std::sort(took.begin(), took.end());
    return took[took.size() / 2];
  };
  const absl::Duration unasked = a_move_takes(false), asked = a_move_takes(true);
  EXPECT_LT(asked, unasked / 2);
}

TEST_F(MemberTest, LeasesAreRenewedInPartitionOrder) {
  Host host;
  const std::unique_ptr<Member> member = Join("one", &host);
  ASSERT_EQ(host.AwaitCount(64), 64u);
  // The first lease lies last in the table now, and somebody has one of the middle.
  postgres_->Sql("UPDATE bellwether.lease SET keep = keep WHERE p = 0");
  auto middle = PgConnection::Connect(postgres_->dsn(), 5000);
  ASSERT_TRUE(middle.ok()) << middle.status();
  KeepOpen(middle->get());
  ASSERT_TRUE(
      (*middle)->Run({{"BEGIN", {}}, {"SELECT p FROM bellwether.lease WHERE p = 32 FOR UPDATE", {}}}, 5000).ok());
  const auto unlocked = [&](const std::string& which) {
    return postgres_->Number(absl::StrCat("SELECT count(*) FROM (SELECT p FROM bellwether.lease WHERE p ", which,
                                          " FOR UPDATE SKIP LOCKED) AS free"));
  };
  int64_t since = 0, below = -1, above = -1;
  do {  // Whoever waits gives up after two seconds, and begins again: both are looked at while he waits.
    ASSERT_TRUE(postgres_->Await(kTakerWaits));
    since = postgres_->Number(kTakerWaitsSince);
    below = unlocked("< 32");
    above = unlocked("> 32");
  } while (since == 0 || postgres_->Number(kTakerWaitsSince) != since);
  EXPECT_EQ(below, 0);
  EXPECT_EQ(above, 31);
  EXPECT_TRUE((*middle)->Run({{"COMMIT", {}}}, 5000).ok());
}

TEST_F(MemberTest, ALeaseThatAnotherTookIsGivenUp) {
  Host host;
  const std::unique_ptr<Member> member = Join("one", &host);
  ASSERT_EQ(host.AwaitCount(64), 64u);
  postgres_->Sql(
      "UPDATE bellwether.lease SET owner = 'other/1', address = 'other:7070', epoch = epoch + 1, "
      "until = now() + interval '1 h' WHERE p = 9");
  EXPECT_EQ(host.AwaitCount(63), 63u);
  EXPECT_TRUE(Eventually([&] { return member->OwnerAddress(9) == "other:7070"; }));
  EXPECT_EQ(member->OwnerAddress(8), "");
  EXPECT_EQ(counters_.counter("bellwether_cluster_moves_total", {{"move", "lost"}})->value(), 1);
}

TEST_F(MemberTest, WithoutDatabasePartitionsServedInLaterEpochAreReleased) {
  constexpr int64_t kLeaseSeconds = 6;  // Longer than this machine may halt: no lease runs out before its time.
  Host one, two;
  const std::unique_ptr<Member> other = Join("two", &two, {}, kLeaseSeconds);
  ASSERT_EQ(two.AwaitCount(64), 64u);
  const AskHoldings ask = [](const std::vector<std::string>& servers) {
    EXPECT_THAT(servers, ElementsAre("two:7070"));
    return std::vector<Holding>{{63, 1000, "two:7070"}, {62, 2, "two:7070"}, {64, 9, "two:7070"}, {0, 1, "three:1"}};
  };
  const std::unique_ptr<Member> member = Join("one", &one, ask, kLeaseSeconds);
  ASSERT_EQ(one.AwaitCount(32), 32u);
  ASSERT_EQ(one.AwaitServed(63), 2u) << "who has more gives the last ones away";
  ASSERT_EQ(one.AwaitServed(62), 2u);
  EXPECT_TRUE(Eventually([&] { return member->spread().unserved == 0; }));
  EXPECT_THAT(member->holdings(), Contains(AllOf(Field(&Holding::partition, 62), Field(&Holding::epoch, 2))));
  postgres_.reset();
  EXPECT_EQ(one.AwaitCount(31), 31u);
  EXPECT_TRUE(Eventually([&] { return member->OwnerAddress(63) == "two:7070"; }));
  EXPECT_TRUE(member->Serves(62)) << "in the epoch that is its own";
  EXPECT_TRUE(Eventually([&] { return member->OwnerAddress(0) == "three:1"; })) << "what it never had has moved, too";
  EXPECT_EQ(two.AwaitCount(32), 32u) << "asks nobody, and keeps what it has";
}

}  // namespace
}  // namespace bellwether::server
