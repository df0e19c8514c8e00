// Goal: a push after the first one makes no allocation and no system call, and
// neither does a drop, an event, a spectrum, a poll or the counters.
// Method: malloc and its kin of this program count per thread; system calls
// are counted by strace on the pushing thread between two marks (calls to
// getppid), with a planted call that must be seen.

#include <dlfcn.h>
#include <malloc.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <sstream>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/client_lib/fake_ingest.h"
#include "tests/client_lib/test_client.h"

namespace {
thread_local bool counting = false;
thread_local uint64_t allocations = 0;
}  // namespace

extern "C" {
void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);
#ifdef BELLWETHER_COUNT_MALLOC
void* malloc(size_t bytes) {
  if (counting) ++allocations;
  return __libc_malloc(bytes);
}
void* calloc(size_t count, size_t bytes) {
  if (counting) ++allocations;
  return __libc_calloc(count, bytes);
}
void* realloc(void* old, size_t bytes) {
  if (counting) ++allocations;
  return __libc_realloc(old, bytes);
}
#endif
}

namespace bellwether::client {
namespace {

constexpr int kPushes = 10'000;

// Everything that a training thread calls between two steps.
void CallEverything(TestClient* client, const std::vector<float>& values, int64_t step) {
  const bw_block block{.signal = 1, .layer_count = 4, .head_count = 8, .values = values.data()};
  bw_frame frame{};
  frame.struct_size = sizeof(frame);
  frame.block_count = 1;
  frame.step = step;
  frame.blocks = &block;
  (void)bw_client_push(client->get(), &frame);
  (void)bw_client_push_event(client->get(), step, 1, 0.1, "text");
  (void)bw_client_push_spectrum(client->get(), step, 0, 0, 1, 4, 1, values.data());
  (void)bw_client_push_action_result(client->get(), "id", step, 1, "why");
  bw_command command;
  command.struct_size = sizeof(command);
  (void)bw_client_poll(client->get(), &command);
  bw_counters counters;
  counters.struct_size = sizeof(counters);
  (void)bw_client_get_counters(client->get(), &counters);
}

TEST(PushCostTest, NoAllocation) {
#ifndef BELLWETHER_COUNT_MALLOC
  GTEST_SKIP() << "a sanitizer owns malloc";
#endif
  TestFolder folder;
  TestClient client({.record_path = folder / "run.bwrun", .ring_frames = 64});
  const std::vector<float> values(32);
  ASSERT_EQ(client.PushStep(0), BW_OK);
  counting = true;
  void* volatile planted = std::malloc(1);
  counting = false;
  std::free(planted);
  ASSERT_EQ(allocations, 1) << "the counter sees nothing";
  allocations = 0;
  counting = true;
  for (int64_t step = 1; step < kPushes; ++step) CallEverything(&client, values, step);
  counting = false;
  EXPECT_EQ(allocations, 0);
  EXPECT_GT(client.Counters().frames_dropped_ring, 0);  // Drops were among them.
}

// The child of SystemCallsTest, started by name under strace.
TEST(PushCostTest, DISABLED_Traced) {
  TestFolder folder;
  TestClient client({.record_path = folder / "run.bwrun"});
  const std::vector<float> values(32);
  ASSERT_EQ(client.PushStep(0), BW_OK);
  ASSERT_EQ(client.Flush(), BW_OK);
  syscall(SYS_getppid);
  for (int64_t step = 1; step < kPushes; ++step) CallEverything(&client, values, step);
  syscall(SYS_getppid);
  syscall(SYS_getuid);  // Planted: the next mark must find it.
  syscall(SYS_getppid);
}

TEST(PushCostTest, NoSystemCall) {
  if (std::system("strace -o /dev/null true 2>/dev/null") != 0) GTEST_SKIP() << "strace is missing or may not trace";
  TestFolder folder;
  const std::string command = "strace -f -o " + (folder / "trace") + " /proc/" + std::to_string(getpid()) +
                              "/exe --gtest_also_run_disabled_tests --gtest_filter=*DISABLED_Traced >/dev/null 2>&1";
  ASSERT_EQ(std::system(command.c_str()), 0);
  std::ifstream trace(folder / "trace");
  std::vector<int> between;  // Calls of the marking thread behind each mark.
  std::string line, thread;
  while (std::getline(trace, line)) {
    std::istringstream words(line);
    std::string pid, call;
    words >> pid >> call;
    if (call == "<..." || call == "---") continue;  // The second half of a call; a signal, as of a child that ended.
    if (call.rfind("getppid(", 0) == 0 && (thread.empty() || pid == thread)) {
      thread = pid;
      between.push_back(0);
    } else if (pid == thread && !between.empty()) {
      ++between.back();
    }
  }
  ASSERT_EQ(between.size(), 3);
  EXPECT_EQ(between[0], 0);
  EXPECT_EQ(between[1], 1) << "the trace sees nothing";
}

}  // namespace
}  // namespace bellwether::client
