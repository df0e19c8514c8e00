// Goal: alerts of all servers have one order: numbers without a gap, each transition
// one, and a reader who goes by them misses none.
// Method: several owners that post at once to a real PostgreSQL, beside a reader.
#include <gmock/gmock.h>

#include <atomic>
#include <memory>
#include <set>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/cluster/postgres_alerts.h"
#include "server/model/partition.h"
#include "tests/support/postgres_server.h"

namespace bellwether::server {
namespace {

AlertTransition MakeTransition(uint32_t partition, int number) {
  AlertTransition transition;
  transition.run = FirstRunOf(partition) + 1;
  transition.run_name = absl::StrCat("run-", partition);
  transition.key = absl::StrCat("rule/0/0/", number);
  transition.state = AlertState::kFiring;
  return transition;
}

class AlertOrderTest : public ::testing::Test {
 protected:
  void SetUp() override {
    postgres_ = PostgresServer::Start();
    if (postgres_ == nullptr && !HasFailure()) GTEST_SKIP() << "PostgreSQL or libpq is not installed";
    ASSERT_NE(postgres_, nullptr);
  }

  std::unique_ptr<PostgresServer> postgres_;
};

TEST_F(AlertOrderTest, NumbersRiseStrictlyAndAReaderMissesNone) {
  constexpr int kOwners = 4, kEach = 50;
  std::atomic<int> posting = kOwners;
  std::vector<std::thread> owners;
  for (uint32_t p = 0; p < kOwners; ++p) {
    owners.emplace_back([&, p] {
      SharedPgLink link(postgres_->dsn(), 10'000);
      uint64_t last = 0;
      for (int i = 0; i < kEach; ++i) {
        AlertTransition transition = MakeTransition(p, i);
        absl::StatusOr<bool> is_new;
        // Who waited for two seconds for the others comes again, as its server would.
        do is_new = PutPostgresTransition({.partition = p, .epoch = 0}, "me", &transition, &link);
        while (absl::IsUnavailable(is_new.status()));
        EXPECT_TRUE(is_new.ok() && *is_new) << is_new.status();
        EXPECT_GT(transition.id, last);
        last = transition.id;
        // In between: what comes to nothing takes no number.
        AlertTransition void_one = MakeTransition(p, 1000 + i);
        EXPECT_TRUE(absl::IsAborted(
            PutPostgresTransition({.partition = p, .epoch = 99}, "another", &void_one, &link).status()));
      }
      --posting;
    });
  }
  SharedPgLink link(postgres_->dsn(), 10'000);
  uint64_t after = 0;
  std::atomic<uint64_t> unreadable = 0;
  std::set<std::string> seen;
  for (bool last_look = false; !last_look;) {
    last_look = posting == 0;
    for (;;) {
      const auto page = ListPostgresTransitions(after, 7, &link, &unreadable);
      ASSERT_TRUE(page.ok()) << page.status();
      for (const AlertTransition& transition : *page) {
        EXPECT_EQ(transition.id, after + 1) << "one that a reader of before did not see";
        after = transition.id;
        seen.insert(absl::StrCat(transition.run_name, " ", transition.key));
      }
      if (page->empty()) break;
    }
  }
  for (std::thread& owner : owners) owner.join();
  EXPECT_EQ(after, uint64_t{kOwners * kEach});
  EXPECT_EQ(seen.size(), size_t{kOwners * kEach});
}

TEST_F(AlertOrderTest, StoredTransitionKeepsItsNumber) {
  SharedPgLink link(postgres_->dsn(), 10'000);
  AlertTransition first = MakeTransition(3, 1), again = first, second = MakeTransition(3, 2);
  const Fence fence = {.partition = 3, .epoch = 0};
  EXPECT_TRUE(*PutPostgresTransition(fence, "me", &first, &link));
  EXPECT_TRUE(*PutPostgresTransition(fence, "me", &second, &link));
  // Concluded again by the run's next owner.
  postgres_->Sql("UPDATE bellwether.lease SET epoch = 1 WHERE p = 3");
  EXPECT_FALSE(*PutPostgresTransition({.partition = 3, .epoch = 1}, "another", &again, &link));
  EXPECT_EQ(again.id, first.id);
  EXPECT_EQ(second.id, first.id + 1);
  EXPECT_EQ(postgres_->Number("SELECT n FROM bellwether.alert_count"), 2);
}

}  // namespace
}  // namespace bellwether::server
