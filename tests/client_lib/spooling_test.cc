// Goal: with a spool nothing is lost or doubled while the server is away, over
// killed senders and killed trainers; the next attempt sends what is left as the
// attempt's that it is of; what cannot be sent is counted; a folder that cannot be
// used costs one line and nothing else.
// Method: the real library and the real bellwether-sender against an Ingest
// server in this process; a window of 64 KiB, so that little is much.

#include <dirent.h>
#include <sys/wait.h>

#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/client_lib/fake_ingest.h"
#include "tests/client_lib/test_client.h"

namespace bellwether::client {
namespace {

using ::testing::HasSubstr;

class SpoolingTest : public ::testing::Test {
 protected:
  std::unique_ptr<FakeIngest> Serve(FakeIngest::Options options = {}) {
    options.window_bytes = 64 << 10;
    auto server = std::make_unique<FakeIngest>(address_, &store_, std::move(options));
    EXPECT_TRUE(server->started());
    return server;
  }
  TestClientOptions Options(uint32_t attempt = 0) {
    return {.server = address_, .log_path = log_, .spool_dir = spool_, .ring_frames = 1024, .attempt = attempt};
  }
  uint64_t Stored() {
    const std::lock_guard<std::mutex> lock(store_.mutex);
    return store_.messages.size();
  }
  // (attempt, step) of the stored frames, in order.
  std::vector<std::pair<uint32_t, int64_t>> StoredSteps() {
    const std::lock_guard<std::mutex> lock(store_.mutex);
    std::vector<std::pair<uint32_t, int64_t>> steps;
    for (const v1::ClientMessage& m : store_.messages) {
      if (m.has_frame()) steps.emplace_back(m.frame().attempt(), m.frame().step());
    }
    return steps;
  }
  void ExpectExactlyOnce() {
    const std::lock_guard<std::mutex> lock(store_.mutex);
    EXPECT_EQ(store_.duplicates, 0);
    EXPECT_EQ(store_.gaps, 0);
  }
  std::string Log() const { return ReadText(log_); }
  // How many frames the one spool's state tells of, those in the sender's memory among them: the last number but one.
  uint64_t FramesSaved() const {
    uint64_t frames = 0;
    std::error_code none;
    for (const auto& entry : std::filesystem::directory_iterator(spool_, none)) {
      const std::string state = ReadText(entry.path() / "state");
      if (state.size() >= 16) std::memcpy(&frames, state.data() + state.size() - 16, sizeof(frames));
    }
    return frames;
  }
  size_t Folders() const {
    std::error_code none;
    size_t count = 0;
    for (const auto& entry : std::filesystem::directory_iterator(spool_, none)) count += entry.is_directory() ? 1 : 0;
    return count;
  }
  // Steps from..to-1, each taken by the ring; one that finds it full is pushed again.
  static void Push(TestClient* client, int64_t from, int64_t to) {
    for (int64_t step = from; step < to; ++step)
      ASSERT_TRUE(WaitUntil([&] { return client->PushStep(step) == BW_OK; }));
  }
  // The sender has seen the server once, and so knows its window; then the server goes.
  void Meet(TestClient* client) {
    auto server = Serve();
    ASSERT_EQ(client->PushStep(0), BW_OK);
    ASSERT_EQ(client->Flush(), BW_OK) << client->Counters().error;
  }

  TestFolder folder_;
  std::string address_ = "unix:" + (folder_ / "s");
  std::string spool_ = folder_ / "spool";
  std::string log_ = folder_ / "log";
  IngestStore store_;
};

std::vector<std::pair<uint32_t, int64_t>> Steps(uint32_t attempt, int64_t from, int64_t to) {
  std::vector<std::pair<uint32_t, int64_t>> steps;
  for (int64_t i = from; i < to; ++i) steps.emplace_back(attempt, i);
  return steps;
}

TEST_F(SpoolingTest, FramesBeyondMemoryWaitOnDiskAndArriveInOrder) {
  TestClient client(Options());
  Meet(&client);
  Push(&client, 1, 5000);
  ASSERT_TRUE(WaitUntil([&] { return client.Counters().frames_spooled > 4000; }));
  EXPECT_GT(client.Counters().spool_bytes, 4000 * 40);  // A record's header alone.
  EXPECT_EQ(client.Counters().frames_dropped_window, 0);
  const auto server = Serve();
  Push(&client, 5000, 6000);  // While it drains.
  ASSERT_EQ(client.Flush(60000), BW_OK) << client.Counters().error;
  EXPECT_EQ(StoredSteps(), Steps(0, 0, 6000));
  ExpectExactlyOnce();
  const bw_counters counters = client.Counters();
  EXPECT_EQ(counters.frames_acked, 6000);
  EXPECT_EQ(counters.frames_queued, 6000);
  EXPECT_EQ(counters.frames_dropped_window, 0);
  EXPECT_TRUE(WaitUntil([&] { return client.Counters().spool_bytes == 0; }));
  client.Destroy();
  EXPECT_TRUE(WaitUntil([&] { return Folders() == 0; })) << "nothing is left behind";
}

TEST_F(SpoolingTest, KilledSendersLoseAndDoubleNothing) {
  TestClient client(Options());
  Meet(&client);
  std::set<uint32_t> killed;
  const auto kill_sender = [&] {
    uint32_t pid = 0;
    ASSERT_TRUE(WaitUntil([&] { return (pid = client.Counters().sender_pid) != 0 && killed.count(pid) == 0; }, 60));
    killed.insert(pid);
    kill(static_cast<pid_t>(pid), SIGKILL);
  };
  int64_t step = 1;
  for (int i = 0; i < 3; ++i) {  // Away.
    Push(&client, step, step + 1500);
    step += 1500;
    kill_sender();
  }
  std::unique_ptr<FakeIngest> server = Serve({.ack_every = 4, .end_after = 700});
  for (int i = 0; i < 3; ++i) {  // Draining, by pieces.
    const uint64_t stored = Stored();
    ASSERT_TRUE(WaitUntil([&] { return Stored() > stored + 300; }, 60)) << client.Counters().error;
    kill_sender();
  }
  server.reset();
  server = Serve();
  ASSERT_EQ(client.Flush(60000), BW_OK) << client.Counters().error;
  EXPECT_EQ(StoredSteps(), Steps(0, 0, step));
  ExpectExactlyOnce();
  EXPECT_EQ(client.Counters().frames_dropped_window, 0);
  EXPECT_EQ(client.Counters().frames_acked, static_cast<uint64_t>(step));
}

TEST_F(SpoolingTest, BeyondTheCapItThinsAndCountsToTheFrame) {
  TestClientOptions options = Options();
  options.spool_bytes = 1 << 20;
  TestClient client(options);
  Meet(&client);
  for (int64_t step = 1; step < 20'000;) step += client.PushStep(step) == BW_OK ? 1 : 0;
  ASSERT_TRUE(WaitUntil([&] { return client.Counters().frames_dropped_window > 3000; }));
  EXPECT_LE(client.Counters().spool_bytes, 1 << 20);
  const auto server = Serve();
  ASSERT_EQ(client.Flush(60000), BW_OK);
  ASSERT_EQ(client.PushStep(20'000), BW_OK);
  ASSERT_EQ(client.Flush(60000), BW_OK);
  const bw_counters counters = client.Counters();
  EXPECT_EQ(counters.frames_acked + counters.frames_dropped_window, counters.frames_queued);
  EXPECT_EQ(StoredSteps().size(), counters.frames_acked);
  EXPECT_EQ(store_.messages.back().frame().dropped_window_total(), counters.frames_dropped_window);
  ExpectExactlyOnce();
  EXPECT_THAT(Log(), HasSubstr("(spool_bytes); what does not fit the memory is thinned"));
}

TEST_F(SpoolingTest, AFolderThatCannotBeUsedCostsOneLine) {
  std::ofstream(folder_ / "file") << "no folder";
  TestClientOptions options = Options();
  options.spool_dir = folder_ / "file/spool";
  TestClient client(options);
  auto server = Serve();
  for (int64_t step = 0; step < 100; ++step) ASSERT_EQ(client.PushStep(step), BW_OK);
  ASSERT_EQ(client.Flush(), BW_OK);
  EXPECT_EQ(StoredSteps(), Steps(0, 0, 100));
  const std::string log = Log();
  EXPECT_THAT(log, HasSubstr("no spool: cannot make " + folder_ / "file/spool: Not a directory"));
  EXPECT_EQ(std::count(log.begin(), log.end(), '\n'), 1) << log;
}

// ---- the next attempt ----

TEST_F(SpoolingTest, TheNextAttemptSendsWhatItsPredecessorCouldNot) {
  {
    TestClient client(Options());
    Meet(&client);
    Push(&client, 1, 3000);
    // Refused for good: it ends, and what memory and disk hold stays.
    const auto server = Serve({.refuse = {grpc::StatusCode::FAILED_PRECONDITION, "not now"}});
    ASSERT_TRUE(WaitUntil([&] { return client.Counters().link == BW_LINK_FAILED; }));
    ASSERT_TRUE(WaitUntil([&] { return client.Counters().sender_pid == 0; }));
  }
  EXPECT_EQ(Folders(), 1);
  EXPECT_THAT(Log(), HasSubstr(" frames wait in " + spool_));
  {
    // Still refused: nothing is given up.
    TestClient client(Options(1));
    const auto server = Serve({.refuse = {grpc::StatusCode::FAILED_PRECONDITION, "still not"}});
    ASSERT_EQ(client.PushStep(2400), BW_OK);
    ASSERT_TRUE(WaitUntil([&] { return client.Counters().link == BW_LINK_FAILED; }));
    ASSERT_TRUE(WaitUntil([&] { return client.Counters().sender_pid == 0; }));
    EXPECT_EQ(client.Counters().frames_dropped_window, 0);
  }
  EXPECT_EQ(Folders(), 2);
  EXPECT_THAT(Log(), HasSubstr("frames of an earlier attempt stay in " + spool_));
  TestClient client(Options(2));
  const auto server = Serve();
  for (int64_t step = 2500; step < 2600; ++step) ASSERT_EQ(client.PushStep(step), BW_OK);
  ASSERT_EQ(client.Flush(60000), BW_OK) << client.Counters().error;
  auto wanted = Steps(0, 0, 3000);
  wanted.emplace_back(1, 2400);
  const auto more = Steps(2, 2500, 2600);
  wanted.insert(wanted.end(), more.begin(), more.end());
  EXPECT_EQ(StoredSteps(), wanted);
  ExpectExactlyOnce();
  EXPECT_EQ(client.Counters().frames_dropped_window, 0);
  // A Hello for each attempt, the new one's own last.
  ASSERT_GE(store_.hellos.size(), 3);
  EXPECT_EQ(store_.hellos.end()[-3].run().attempt(), 0);
  EXPECT_EQ(store_.hellos.end()[-3].capabilities_size(), 0);
  EXPECT_EQ(store_.hellos.end()[-2].run().attempt(), 1);
  EXPECT_EQ(store_.hellos.end()[-1].run().attempt(), 2);
  EXPECT_EQ(Folders(), 1) << "its own";
}

TEST_F(SpoolingTest, LostFramesAreCountedWhenTrainerAndSenderAreKilled) {
  int ready[2], begin[2];
  ASSERT_EQ(pipe(ready), 0);
  ASSERT_EQ(pipe(begin), 0);
  // Before there is a server: this process must have no thread where it forks.
  const pid_t trainer = fork();
  if (trainer == 0) {
    char go;
    if (read(begin[0], &go, 1) != 1) _exit(1);
    TestClient client(Options());
    // The sender may work before the process that started it has told its pid.
    const bool met = client.PushStep(0) == BW_OK && client.Flush() == BW_OK &&
                     WaitUntil([&] { return client.Counters().sender_pid != 0; });
    uint32_t said = met ? client.Counters().sender_pid : 0;
    (void)!write(ready[1], &said, sizeof(said));
    // Once the server is gone.
    if (!WaitUntil([&] { return client.Counters().link == BW_LINK_CONNECTING; })) _exit(1);
    Push(&client, 1, 3000);
    // All of them are taken, and the disk knows of those in memory, too: only so can they be counted.
    if (!WaitUntil([&] { return client.Counters().frames_spooled > 2000 && FramesSaved() == 3000; })) _exit(1);
    (void)!write(ready[1], &said, sizeof(said));
    for (;;) pause();
  }
  close(begin[0]);
  close(ready[1]);  // So that a trainer that dies too early ends the reads below.
  auto first = Serve();
  ASSERT_EQ(write(begin[1], "", 1), 1);
  uint32_t sender = 0;
  ASSERT_EQ(read(ready[0], &sender, sizeof(sender)), static_cast<ssize_t>(sizeof(sender)));
  ASSERT_NE(sender, 0);
  first.reset();
  ASSERT_EQ(read(ready[0], &sender, sizeof(sender)), static_cast<ssize_t>(sizeof(sender)));
  kill(trainer, SIGKILL);
  kill(static_cast<pid_t>(sender), SIGKILL);
  ASSERT_EQ(waitpid(trainer, nullptr, 0), trainer);
  close(ready[0]);
  close(begin[1]);

  TestClient client(Options(1));
  const auto server = Serve();
  ASSERT_EQ(client.PushStep(7000), BW_OK);
  ASSERT_EQ(client.Flush(60000), BW_OK) << client.Counters().error;
  ASSERT_EQ(client.PushStep(7001), BW_OK);
  ASSERT_EQ(client.Flush(60000), BW_OK);
  const auto stored = StoredSteps();
  const uint64_t of_the_first = stored.size() - 2;
  EXPECT_GT(of_the_first, 2000);
  EXPECT_EQ(of_the_first + client.Counters().frames_dropped_window, 3000);
  EXPECT_EQ(std::set(stored.begin(), stored.end()).size(), stored.size());
  EXPECT_TRUE(std::is_sorted(stored.begin(), stored.end()));
  EXPECT_EQ(store_.messages.back().frame().dropped_window_total(), client.Counters().frames_dropped_window);
  EXPECT_EQ(store_.duplicates, 0);
  EXPECT_THAT(Log(), HasSubstr("died with its sender's memory"));
}

TEST_F(SpoolingTest, FencedFramesOfEarlierAttemptAreCountedAndDeleted) {
  {
    TestClient client(Options());
    Meet(&client);
    Push(&client, 1, 2000);
    const auto server = Serve({.refuse = {grpc::StatusCode::FAILED_PRECONDITION, "not now"}});
    ASSERT_TRUE(WaitUntil([&] { return client.Counters().link == BW_LINK_FAILED; }));
    ASSERT_TRUE(WaitUntil([&] { return client.Counters().sender_pid == 0; }));
  }
  // Attempt 1 was here, from another machine.
  TestClient client(Options(2));
  const auto server = Serve({.attempt_min = 1});
  ASSERT_EQ(client.PushStep(5000), BW_OK);
  ASSERT_EQ(client.Flush(60000), BW_OK) << client.Counters().error;
  EXPECT_EQ(StoredSteps().back(), (std::pair<uint32_t, int64_t>(2, 5000)));
  EXPECT_EQ(Stored(), 2);
  EXPECT_EQ(client.Counters().frames_dropped_window, 1999);
  EXPECT_EQ(Folders(), 1);
  EXPECT_THAT(Log(), HasSubstr("1999 frames of an earlier attempt will never arrive"));
}

TEST_F(SpoolingTest, KilledSenderResumesOrphanedSpools) {
  {
    TestClient client(Options());
    Meet(&client);
    Push(&client, 1, 4000);
    const auto server = Serve({.refuse = {grpc::StatusCode::FAILED_PRECONDITION, "not now"}});
    ASSERT_TRUE(WaitUntil([&] { return client.Counters().link == BW_LINK_FAILED; }));
    ASSERT_TRUE(WaitUntil([&] { return client.Counters().sender_pid == 0; }));
  }
  TestClient client(Options(1));
  auto server = Serve({.end_after = 500});
  ASSERT_EQ(client.PushStep(9000), BW_OK);
  std::set<uint32_t> killed;
  for (int i = 0; i < 3; ++i) {
    const uint64_t stored = Stored();
    uint32_t pid = 0;
    ASSERT_TRUE(WaitUntil(
        [&] { return Stored() > stored + 200 && (pid = client.Counters().sender_pid) != 0 && killed.count(pid) == 0; },
        60));
    killed.insert(pid);
    kill(static_cast<pid_t>(pid), SIGKILL);
  }
  server.reset();
  server = Serve();
  ASSERT_EQ(client.Flush(60000), BW_OK) << client.Counters().error;
  auto wanted = Steps(0, 0, 4000);
  wanted.emplace_back(1, 9000);
  const auto stored = StoredSteps();
  EXPECT_EQ(std::set(stored.begin(), stored.end()), std::set(wanted.begin(), wanted.end()));
  // What was acknowledged within the round of the kill may come twice; the server
  // leaves a closed step alone.
  EXPECT_TRUE(std::is_sorted(stored.begin(), stored.end()) || stored.size() > wanted.size());
  EXPECT_EQ(client.Counters().frames_dropped_window, 0);
}

}  // namespace
}  // namespace bellwether::client
