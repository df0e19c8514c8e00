// Goal: so many calls at once and no more, half of them of one caller, and who
// waits gets the next place or is told that there is none.
// Method: places held by hand; one thread that waits.

#include "server/http/call_slots.h"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

namespace bellwether::server {
namespace {

TEST(CallSlotsTest, ConcurrentCallsAreLimitedAndHalvedPerClient) {
  Counters counters;
  CallSlots slots({.running_max = 4, .waiting_max = 0, .wait_ns_max = 0}, &counters);
  std::vector<std::unique_ptr<CallSlots::Place>> held;
  for (const char* who : {"a", "a", "b", "b"}) {
    held.push_back(slots.Enter(who));
    ASSERT_NE(held.back(), nullptr);
    if (held.size() == 2) {
      EXPECT_EQ(slots.Enter("a"), nullptr) << "his half";
    }
  }
  EXPECT_EQ(slots.Enter("c"), nullptr);
  EXPECT_EQ(counters.counter("bellwether_query_limit_refused_total", {{"limit", "http_calls"}})->value(), 2);
  held.pop_back();
  EXPECT_NE(slots.Enter("c"), nullptr);
}

TEST(CallSlotsTest, WaitingCallGetsTheFreedPlace) {
  Counters counters;
  CallSlots slots({.running_max = 1, .waiting_max = 2, .wait_ns_max = 60'000'000'000}, &counters);
  auto first = slots.Enter("a");
  std::unique_ptr<CallSlots::Place> second;
  std::thread waiter([&] { second = slots.Enter("a"); });
  // His share of those that wait is taken, or he has the place already.
  first.reset();
  waiter.join();
  EXPECT_NE(second, nullptr);
}

TEST(CallSlotsTest, WaitForAPlaceIsBounded) {
  Counters counters;
  CallSlots slots({.running_max = 1, .waiting_max = 2, .wait_ns_max = 20'000'000}, &counters);
  const auto first = slots.Enter("a");
  EXPECT_EQ(slots.Enter("b"), nullptr);
}

}  // namespace
}  // namespace bellwether::server
