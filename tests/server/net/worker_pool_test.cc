// Goal: never more than threads_max threads, never more than queue_max tasks
// waiting, and everything queued is run before Shutdown() returns.
// Method: tasks that hold until they are let go.

#include "server/net/worker_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "absl/synchronization/notification.h"

namespace bellwether::server {
namespace {

TEST(WorkerPoolTest, LimitsThreadsAndQueueAndLosesNothing) {
  WorkerPool pool(2, 3);
  EXPECT_EQ(pool.threads(), 0u);
  absl::Notification go;
  std::atomic<int> started = 0, done = 0;
  const auto task = [&] {
    ++started;
    go.WaitForNotification();
    ++done;
  };
  for (int i = 0; i < 2; ++i) EXPECT_TRUE(pool.Enqueue(task));
  while (started < 2) std::this_thread::yield();
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(pool.Enqueue(task));
  EXPECT_FALSE(pool.Enqueue(task)) << "the queue is full";
  EXPECT_EQ(pool.threads(), 2u);
  EXPECT_EQ(started, 2);
  go.Notify();
  pool.Shutdown();
  EXPECT_EQ(done, 5);
  EXPECT_FALSE(pool.Enqueue(task)) << "stopped";
}

}  // namespace
}  // namespace bellwether::server
