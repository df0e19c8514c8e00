// Goal: living in someone else's process leaves no traces: forked children are
// not clients, no child stays to be reaped, no inherited pipe stays open, the
// trainer's death loses nothing, and a recording survives a killed sender.
// Method: the real sender; trainers that fork, die or end; files read back.

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>

#include <csignal>
#include <fstream>
#include <iterator>
#include <thread>

#include "bellwether/recording.h"
#include "client_lib/src/watchdog.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/client_lib/fake_ingest.h"
#include "tests/client_lib/test_client.h"

namespace bellwether::client {
namespace {

using ::testing::HasSubstr;

struct Recorded {
  std::vector<int64_t> steps;
  std::vector<uint64_t> seqs;
  int hellos = 0;
  v1::ByeReason bye = v1::BYE_REASON_UNSPECIFIED;
  bool ended = false;
};

Recorded ReadRecording(const std::string& path) {
  RecordingReader reader;
  reader.Feed(ReadText(path));
  Recorded recorded;
  v1::RecordedMessage m;
  RecordingReader::Result result;
  while ((result = reader.Next(&m)) == RecordingReader::Result::kMessage) {
    if (m.message().has_hello()) ++recorded.hellos;
    if (m.message().has_bye()) recorded.bye = m.message().bye().reason();
    if (m.message().seq() != 0) recorded.seqs.push_back(m.message().seq());
    if (m.message().has_frame()) recorded.steps.push_back(m.message().frame().step());
  }
  recorded.ended = result == RecordingReader::Result::kEnd;
  return recorded;
}

std::vector<int64_t> Range(int64_t end) {
  std::vector<int64_t> steps;
  for (int64_t i = 0; i < end; ++i) steps.push_back(i);
  return steps;
}

bool IsAlive(uint32_t pid) { return kill(static_cast<pid_t>(pid), 0) == 0; }

TEST(RecordTest, WritesWhatWasPushedAndEndsTheFile) {
  TestFolder folder;
  TestClient client({.record_path = folder / "run.bwrun"});
  for (int64_t step = 0; step < 300; ++step) {
    ASSERT_TRUE(WaitUntil([&] { return client.PushStep(step) == BW_OK; }));
  }
  ASSERT_EQ(client.Flush(), BW_OK) << client.Counters().error;
  EXPECT_EQ(ReadRecording(folder / "run.bwrun").steps, Range(300));  // Readable while it grows.
  EXPECT_EQ(client.Counters().link, BW_LINK_RECORDING);
  client.Destroy();
  ASSERT_TRUE(WaitUntil([&] { return ReadRecording(folder / "run.bwrun").ended; }));
  const Recorded recorded = ReadRecording(folder / "run.bwrun");
  EXPECT_EQ(recorded.hellos, 1);
  EXPECT_EQ(recorded.bye, v1::BYE_REASON_FINISHED);
  EXPECT_EQ(recorded.steps, Range(300));
}

TEST(RecordTest, KeepsTheFileOfAnEarlierRun) {
  TestFolder folder;
  std::ofstream(folder / "run.bwrun") << "precious";
  TestClient client({.record_path = folder / "run.bwrun"});
  ASSERT_EQ(client.PushStep(0), BW_OK);
  ASSERT_EQ(client.Flush(), BW_OK);
  EXPECT_EQ(ReadText(folder / "run.bwrun.1"), "precious");
}

TEST(RecordTest, AKilledSenderGoesOnInTheSameFile) {
  TestFolder folder;
  TestClient client({.record_path = folder / "run.bwrun"});
  int64_t step = 0;
  for (int round = 0; round < 4; ++round) {
    for (int i = 0; i < 50; ++i) ASSERT_EQ(client.PushStep(step++), BW_OK);
    if (round % 2 == 1) {
      ASSERT_EQ(client.Flush(), BW_OK);
    }
    uint32_t pid = 0;
    ASSERT_TRUE(WaitUntil([&] { return (pid = client.Counters().sender_pid) != 0; }));
    kill(static_cast<pid_t>(pid), SIGKILL);
    ASSERT_TRUE(WaitUntil([&] { return client.Counters().sender_pid != pid; }));
  }
  ASSERT_EQ(client.Flush(60000), BW_OK) << client.Counters().error;
  const Recorded recorded = ReadRecording(folder / "run.bwrun");
  EXPECT_EQ(recorded.steps, Range(step));
  EXPECT_EQ(recorded.hellos, 1);
  for (size_t i = 0; i < recorded.seqs.size(); ++i) ASSERT_EQ(recorded.seqs[i], i + 1);
}

TEST(RecordTest, MissingFolderIsReported) {
  TestFolder folder;
  TestClient client({.record_path = folder / "missing/run.bwrun"});
  ASSERT_EQ(client.PushStep(0), BW_OK);
  ASSERT_TRUE(WaitUntil([&] { return client.Counters().link == BW_LINK_FAILED; }));
  EXPECT_THAT(client.Counters().error, HasSubstr("missing/run.bwrun: No such file"));
}

// What may lie where a file should: each would block, swallow or lose what is written.
std::vector<std::pair<std::string, std::string>> NoFiles(const TestFolder& folder) {
  mkfifo((folder / "fifo").c_str(), 0600);
  mkdir((folder / "folder").c_str(), 0700);
  EXPECT_EQ(symlink("loop", (folder / "loop").c_str()), 0);
  EXPECT_EQ(symlink("fifo", (folder / "link").c_str()), 0);
  const int fd = socket(AF_UNIX, SOCK_STREAM, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string path = folder / "socket";
  path.copy(address.sun_path, sizeof(address.sun_path) - 1);
  EXPECT_EQ(bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  close(fd);
  return {{folder / "fifo", "it is a FIFO, must be a regular file"},
          {folder / "link", "it is a FIFO, must be a regular file"},
          {folder / "folder", "it is a folder, must be a regular file"},
          {folder / "loop", "Too many levels of symbolic links"},
          {path, "it is a socket, must be a regular file"},
          {"/dev/full", "it is a device, must be a regular file"},
          {"/dev/zero", "it is a device, must be a regular file"}};
}

TEST(FilesTest, ARecordingGoesToARegularFileOnly) {
  TestFolder folder;
  for (const auto& [path, why] : NoFiles(folder)) {
    const TestClientOptions test{.record_path = path};
    const bw_client_options options = Options(test);
    bw_client* client = nullptr;
    EXPECT_EQ(bw_client_create(&options, &client), BW_INVALID_ARGUMENT) << path;
    EXPECT_EQ(bw_last_error(), "record_path is " + path + ": " + why);
  }
}

TEST(FilesTest, RecordPathReplacedByFifoBeforeOpenIsReported) {
  for (const std::string at : {"run.bwrun", "link.bwrun"}) {
    TestFolder folder;
    TestClient client({.record_path = folder / at});
    ASSERT_EQ(mkfifo((folder / "run.bwrun").c_str(), 0600), 0);
    if (at != "run.bwrun") {
      ASSERT_EQ(symlink("run.bwrun", (folder / at).c_str()), 0);
    }
    ASSERT_EQ(client.PushStep(0), BW_OK);
    // The sender sets it on its way out.
    ASSERT_TRUE(WaitUntil([&] { return client.Counters().link == BW_LINK_FAILED; }));
    EXPECT_THAT(client.Counters().error, HasSubstr(at + ": it is a FIFO, must be a regular file"));
  }
}

TEST(FilesTest, NonRegularRecordOrLogFileDoesNotStopStream) {
  TestFolder folder;
  for (const auto& [path, why] : NoFiles(folder)) {
    IngestStore store;
    FakeIngest server("127.0.0.1:0", &store, {});
    const std::string record = folder / "record";
    TestClient client({.run = "of-" + path.substr(path.rfind('/') + 1),
                       .server = "127.0.0.1:" + std::to_string(server.port()),
                       .record_path = record,
                       .log_path = path});
    ASSERT_EQ(mkfifo(record.c_str(), 0600), 0);
    ASSERT_EQ(client.PushStep(0), BW_OK);
    ASSERT_EQ(client.Flush(), BW_OK) << path << ": " << client.Counters().error;
    client.Destroy();
    ASSERT_EQ(unlink(record.c_str()), 0);
  }
}

// True once the sender of a client, which lets go of it here, has ended because it was asked to: by itself it would
// try for as long as a server may be away.
bool EndsWhenAsked(TestClient* client) {
  uint32_t pid = 0;
  const bool began = WaitUntil([&] { return (pid = client->Counters().sender_pid) != 0; });
  client->Destroy();
  const double seconds = std::chrono::duration<double>(kDrainSeconds).count() / 3;
  return began && WaitUntil([pid] { return kill(static_cast<pid_t>(pid), SIGTERM) != 0; }, seconds);
}

TEST(FilesTest, NonRegularCredentialFileIsReportedAtOnce) {
  TestFolder folder;
  std::vector<std::thread> cases;  // All at once: a sender takes a second or two to end.
  for (const auto& no_file : NoFiles(folder)) {
    for (const bool token : {false, true}) {
      cases.emplace_back([path = no_file.first, why = no_file.second, token] {
        TestClient client({.server = "127.0.0.1:1", .token_file = token ? path : "", .tls_ca = token ? "" : path});
        ASSERT_EQ(client.PushStep(0), BW_OK);
        const std::string said = "127.0.0.1:1: cannot read " + path + ": " + why;
        EXPECT_TRUE(WaitUntil([&] { return client.Counters().error == said; })) << client.Counters().error;
        EXPECT_TRUE(EndsWhenAsked(&client)) << path;
      });
    }
  }
  for (std::thread& thread : cases) thread.join();
}

TEST(ProcessTest, SenderOutlivingItsTrainerEndsOnSigterm) {
  TestClient client({.server = "127.0.0.1:1"});
  ASSERT_EQ(client.PushStep(0), BW_OK);
  EXPECT_TRUE(EndsWhenAsked(&client));
}

TEST(ProcessTest, AForkedChildIsNoClient) {
  TestFolder folder;
  TestClient client({.record_path = folder / "run.bwrun"});
  ASSERT_EQ(client.PushStep(0), BW_OK);
  // No thread allocates now: AddressSanitizer's heap, unlike the C library's,
  // is not taken over whole by a child.
  ASSERT_EQ(client.Flush(), BW_OK);
  const pid_t child = fork();
  if (child == 0) {
    bw_counters counters{};
    counters.struct_size = sizeof(counters);
    bw_command command{};
    command.struct_size = sizeof(command);
    const bool dead = client.PushStep(1) == BW_UNAVAILABLE && bw_client_flush(client.get(), 1000) == BW_UNAVAILABLE &&
                      bw_client_poll(client.get(), &command) == BW_UNAVAILABLE &&
                      client.Name({"a"}) == BW_UNAVAILABLE &&
                      bw_client_get_counters(client.get(), &counters) == BW_UNAVAILABLE &&
                      std::string(bw_last_error()).find("forked") != std::string::npos;
    client.Destroy();
    // A client of the child's own works.
    TestClient own({.record_path = folder / "child.bwrun"});
    const bool works = own.PushStep(5) == BW_OK && own.Flush() == BW_OK;
    _exit(dead && works ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  // The parent's client lives on.
  ASSERT_EQ(client.PushStep(1), BW_OK);
  ASSERT_EQ(client.Flush(), BW_OK);
  EXPECT_EQ(ReadRecording(folder / "run.bwrun").steps, Range(2));
}

TEST(ProcessTest, WorkersForkedUnderLoadNeitherHangNorDisturb) {
  TestFolder folder;
  TestClient client({.record_path = folder / "run.bwrun", .ring_frames = 4096});
  int64_t step = 0;
  // The children allocate nothing: the watchdog may be allocating where they fork, and AddressSanitizer's heap,
  // unlike the C library's, is not taken over whole.
  const std::vector<float> values(8);
  for (int i = 0; i < 200; ++i) {
    ASSERT_EQ(client.PushStep(step++), BW_OK);
    const pid_t child = fork();
    if (child == 0) _exit(client.Push(0, values, 1, 8) == BW_UNAVAILABLE ? 0 : 1);
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_EQ(status, 0);
  }
  ASSERT_EQ(client.Flush(), BW_OK);
  EXPECT_EQ(ReadRecording(folder / "run.bwrun").steps, Range(step));
  EXPECT_EQ(client.Counters().sender_restarts, 0);
}

TEST(ProcessTest, NoChildStaysBehind) {
  TestFolder folder;
  TestClient client({.record_path = folder / "run.bwrun"});
  ASSERT_EQ(client.PushStep(0), BW_OK);
  ASSERT_EQ(client.Flush(), BW_OK);
  // The sender's parent may still be on its way out; it is not reaped here.
  EXPECT_TRUE(WaitUntil([] {
    siginfo_t info{};
    return waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) == -1 && errno == ECHILD;
  }));
}

// Runs `trainer` in a child whose stderr is a pipe; returns when the pipe ends.
template <typename Trainer>
void RunTrainer(Trainer trainer) {
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const pid_t child = fork();
  if (child == 0) {
    dup2(ends[1], STDERR_FILENO);
    close(ends[0]);
    trainer();
    _exit(0);
  }
  close(ends[1]);
  char byte;
  while (read(ends[0], &byte, 1) > 0) {
  }
  close(ends[0]);
  waitpid(child, nullptr, 0);
}

TEST(ProcessTest, ATrainerKilledAtOnceLosesNothing) {
  TestFolder folder;
  RunTrainer([&] {
    TestClient client({.record_path = folder / "run.bwrun", .log_path = ""});
    for (int64_t step = 0; step < 100; ++step) (void)client.PushStep(step);
    while (client.Counters().sender_pid == 0) usleep(1000);  // Started, no more.
    kill(getpid(), SIGKILL);
  });
  ASSERT_TRUE(WaitUntil([&] { return ReadRecording(folder / "run.bwrun").ended; }));
  const Recorded recorded = ReadRecording(folder / "run.bwrun");
  EXPECT_EQ(recorded.steps, Range(100));
  EXPECT_EQ(recorded.bye, v1::BYE_REASON_DIED);
}

TEST(ProcessTest, SenderClosesTrainerStderrWhileServerIsDead) {
  const auto start = std::chrono::steady_clock::now();
  RunTrainer([] {
    TestClient client({.server = "127.0.0.1:1", .log_path = ""});
    (void)client.PushStep(0);
    while (client.Counters().link != BW_LINK_CONNECTING) usleep(1000);
    client.Destroy();
  });
  // With the sender's end it would be let go, too: that long after the trainer's.
  EXPECT_LT(std::chrono::steady_clock::now() - start, kDrainSeconds);
}

TEST(ProcessTest, SignalsToTheWholeGroupDoNotEndTheSender) {
  TestFolder folder;
  TestClient client({.record_path = folder / "run.bwrun"});
  ASSERT_EQ(client.PushStep(0), BW_OK);
  ASSERT_EQ(client.Flush(), BW_OK);
  // Told by the process that started the sender, which may come to it after the sender has begun to work.
  ASSERT_TRUE(WaitUntil([&] { return client.Counters().sender_pid != 0; }));
  const uint32_t pid = client.Counters().sender_pid;
  EXPECT_NE(getsid(static_cast<pid_t>(pid)), getsid(0));
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) kill(static_cast<pid_t>(pid), signal);
  ASSERT_EQ(client.PushStep(1), BW_OK);
  ASSERT_EQ(client.Flush(), BW_OK);
  EXPECT_EQ(client.Counters().sender_pid, pid);
  client.Destroy();
  EXPECT_TRUE(WaitUntil([&] { return !IsAlive(pid); }));
}

TEST(ProcessTest, AMissingSenderFailsOnceWithWords) {
  TestClientOptions test;
  test.server = "localhost:1";
  bw_client_options options = Options(test);
  options.sender_path = "/nonexistent/bellwether-sender";
  bw_client* client = nullptr;
  ASSERT_EQ(bw_client_create(&options, &client), BW_OK);
  EXPECT_EQ(bw_client_push_event(client, 0, 1, 0, nullptr), BW_OK);
  EXPECT_EQ(bw_client_flush(client, 20000), BW_UNAVAILABLE);
  EXPECT_THAT(bw_last_error(), HasSubstr("/nonexistent/bellwether-sender"));
  bw_client_destroy(client);
}

}  // namespace
}  // namespace bellwether::client
