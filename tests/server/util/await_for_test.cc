// Goal: a wait ends when its condition holds or its time is over, with the mutex
// held, and leaves nothing behind that touches the mutex afterwards.
// Method: waits that must and that must not end by their time; a mutex that
// somebody holds; mutexes that are gone as soon as the wait is over.

#include "server/util/await_for.h"

#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "absl/synchronization/notification.h"

namespace bellwether::server {
namespace {

constexpr absl::Duration kNever = absl::InfiniteDuration();

const auto never = [] { return false; };

TEST(AwaitForTest, TrueConditionReturnsAtOnce) {
  absl::Mutex mutex;
  const absl::MutexLock lock(&mutex);
  EXPECT_TRUE(AwaitFor(&mutex, absl::Condition::kTrue, absl::ZeroDuration()));
  EXPECT_TRUE(AwaitFor(&mutex, absl::Condition::kTrue, kNever));
  EXPECT_FALSE(AwaitFor(&mutex, absl::Condition(&never), absl::ZeroDuration()));
  EXPECT_FALSE(AwaitFor(&mutex, absl::Condition(&never), -kNever));
}

TEST(AwaitForTest, EndsByTheMonotonicClockWithTheMutexHeld) {
  absl::Mutex mutex;
  const absl::MutexLock lock(&mutex);
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_FALSE(AwaitFor(&mutex, absl::Condition(&never), absl::Milliseconds(30)));
  EXPECT_GE(std::chrono::steady_clock::now() - begin, std::chrono::milliseconds(30));
  mutex.AssertHeld();
}

TEST(AwaitForTest, EndsWhenTheConditionComesTrue) {
  absl::Mutex mutex;
  bool come = false;
  std::thread other([&] {
    const absl::MutexLock lock(&mutex);
    come = true;
  });
  {
    const absl::MutexLock lock(&mutex);
    EXPECT_TRUE(AwaitFor(&mutex, absl::Condition(&come), kNever));
  }
  other.join();
}

TEST(AwaitForTest, HeldMutexDelaysNoOtherWaiter) {
  absl::Mutex held, free;
  absl::Notification holds, over;
  std::thread waiter([&] {
    const absl::MutexLock lock(&held);
    holds.Notify();
    EXPECT_FALSE(AwaitFor(&held, absl::Condition(&never), absl::Milliseconds(1)));
  });
  holds.WaitForNotification();
  std::thread holder([&] {
    const absl::MutexLock lock(&held);  // As soon as the waiter lets go.
    over.WaitForNotification();
  });
  {
    const absl::MutexLock lock(&free);
    EXPECT_FALSE(AwaitFor(&free, absl::Condition(&never), absl::Milliseconds(50)));
  }
  over.Notify();
  waiter.join();
  holder.join();
}

TEST(AwaitForTest, NothingTouchesAMutexThatIsGone) {
  struct Place {
    absl::Mutex mutex;
    bool come = false;
  };
  std::vector<std::thread> threads;
  for (unsigned seed = 0; seed < 6; ++seed) {
    threads.emplace_back([seed] {
      std::mt19937 rng(seed);
      std::uniform_int_distribution<int> microseconds(0, 400);
      for (int i = 0; i < 300; ++i) {
        auto place = std::make_unique<Place>();
        std::thread setter([&place = *place, wait = microseconds(rng)] {
          std::this_thread::sleep_for(std::chrono::microseconds(wait));
          const absl::MutexLock lock(&place.mutex);
          place.come = true;
        });
        {
          const absl::MutexLock lock(&place->mutex);
          const bool came =
              AwaitFor(&place->mutex, absl::Condition(&place->come), absl::Microseconds(microseconds(rng)));
          EXPECT_EQ(came, place->come);
        }
        setter.join();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace bellwether::server
