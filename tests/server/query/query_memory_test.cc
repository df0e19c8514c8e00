// Goal: all queries together have what they may have and no more, one caller leaves
// some of it to others, and it comes back.
// Method: shares of a small memory, also of threads that wait for it.

#include "server/query/query_memory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <deque>
#include <memory>
#include <optional>
#include <thread>
#include <utility>

#include "absl/synchronization/notification.h"
#include "absl/time/time.h"

namespace bellwether::server {
namespace {

using testing::HasSubstr;

class QueryMemoryTest : public testing::Test {
 protected:
  QueryMemory& Make(int64_t wait_ns_max) {
    return memory_.emplace(QueryMemory::Options{.bytes_max = 1000, .small_bytes = 10, .wait_ns_max = wait_ns_max},
                           &counters_);
  }
  double refused() {
    return counters_.counter("bellwether_query_limit_refused_total", {{"limit", "query_memory"}})->value();
  }

  Counters counters_;
  std::optional<QueryMemory> memory_;
};

TEST_F(QueryMemoryTest, QueryThatDoesNotFitBesideOthersIsRefused) {
  QueryMemory& memory = Make(0);
  QueryMemory::Use first(&memory, ""), second(&memory, "");
  EXPECT_TRUE(first.Reserve(700).ok());
  const absl::Status said = second.Reserve(301);
  EXPECT_EQ(said.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(said.message()), HasSubstr("301 bytes: others have 700 of 1000"));
  EXPECT_EQ(refused(), 1);
  EXPECT_TRUE(second.Reserve(300).ok());
  EXPECT_EQ(memory.reserved(), 1000);
  EXPECT_EQ(counters_.gauge("bellwether_query_memory_bytes")->value(), 1000);
  EXPECT_FALSE(second.GrowTo(301).ok());
  first.ShrinkTo(600);
  EXPECT_TRUE(second.GrowTo(400).ok());
}

TEST_F(QueryMemoryTest, SmallQueriesHaveABoundedShareOfTheirOwn) {
  QueryMemory& memory = Make(0);
  std::optional<QueryMemory::Use> all(std::in_place, &memory, "");
  QueryMemory::Use small(&memory, "");
  EXPECT_TRUE(all->Reserve(1000).ok());
  EXPECT_TRUE(small.Reserve(10).ok());
  EXPECT_FALSE(small.Reserve(11).ok());
  // As many as fit into a quarter.
  std::deque<QueryMemory::Use> many;
  while (many.emplace_back(&memory, "").GrowTo(10).ok()) continue;
  EXPECT_EQ(many.size(), 25u);
  EXPECT_EQ(memory.reserved(), 1250);
  EXPECT_EQ(refused(), 2);
  // Large ones find no room among the small ones, and small ones that grow go over.
  all.reset();
  EXPECT_EQ(memory.reserved(), 250);
  EXPECT_TRUE(small.GrowTo(1000).ok());
  EXPECT_EQ(memory.reserved(), 1240);
  EXPECT_TRUE(many.back().GrowTo(10).ok());
  small.ShrinkTo(0);
  many.clear();
  EXPECT_EQ(memory.reserved(), 0);
  EXPECT_EQ(counters_.gauge("bellwether_query_memory_bytes")->value(), 0);
}

TEST_F(QueryMemoryTest, OneCallersSmallQueriesLeaveRoomForOthers) {
  QueryMemory& memory = Make(0);
  std::deque<QueryMemory::Use> many;
  while (many.emplace_back(&memory, "a").GrowTo(10).ok()) continue;
  EXPECT_EQ(many.size(), 19u);
  QueryMemory::Use other(&memory, "b");
  EXPECT_TRUE(other.GrowTo(10).ok());
}

TEST_F(QueryMemoryTest, ACallerLeavesAQuarterToOthers) {
  QueryMemory& memory = Make(0);
  QueryMemory::Use first(&memory, "a"), second(&memory, "a"), other(&memory, "b");
  const absl::Status said = first.Reserve(751);
  EXPECT_THAT(std::string(said.message()), HasSubstr("751 bytes: must be at most 750"));
  EXPECT_TRUE(first.Reserve(500).ok());
  EXPECT_FALSE(second.Reserve(251).ok());
  EXPECT_TRUE(second.Reserve(250).ok());
  EXPECT_TRUE(other.Reserve(250).ok());
}

TEST_F(QueryMemoryTest, ReleasedMemoryGoesToWaitingQueries) {
  QueryMemory& memory = Make(60'000'000'000);
  // Each waits for the other, again and again: without that one of them would be refused.
  const auto takes = [&memory](const char* who) {
    for (int i = 0; i < 200; ++i) {
      QueryMemory::Use use(&memory, who);
      EXPECT_TRUE(use.Reserve(700).ok());
      std::this_thread::yield();
    }
  };
  std::thread second([&] { takes("b"); });
  takes("a");
  second.join();
  EXPECT_EQ(memory.reserved(), 0);
  EXPECT_EQ(refused(), 0);
}

TEST_F(QueryMemoryTest, OneQueryWaitsAndTheNextIsRefusedAtOnce) {
  QueryMemory& memory = Make(60'000'000'000);
  auto first = std::make_unique<QueryMemory::Use>(&memory, "");
  ASSERT_TRUE(first->Reserve(700).ok());
  // Whichever comes second is refused; had it waited too, neither would ever end.
  std::atomic<int> refusals = 0;
  absl::Notification one_is_refused;
  const auto ask = [&] {
    if (QueryMemory::Use(&memory, "").Reserve(700).ok()) return;
    ++refusals;
    one_is_refused.Notify();
  };
  std::thread second(ask), third(ask);
  EXPECT_TRUE(one_is_refused.WaitForNotificationWithTimeout(absl::Seconds(30)));
  first.reset();
  second.join();
  third.join();
  EXPECT_EQ(refusals, 1);
  EXPECT_EQ(memory.reserved(), 0);
}

}  // namespace
}  // namespace bellwether::server
