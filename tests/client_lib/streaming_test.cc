// Goal: what a trainer pushes reaches the server bit for bit, once, in order,
// whatever happens to the server, to the link and to the sender; every loss is
// counted and told; commands come back.
// Method: the real library and the real bellwether-sender against an Ingest
// server in this process that counts duplicate and missing seqs.

#include <sys/resource.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <ctime>
#include <set>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/client_lib/fake_ingest.h"
#include "tests/client_lib/test_client.h"

namespace bellwether::client {
namespace {

using ::testing::HasSubstr;

class StreamingTest : public ::testing::Test {
 protected:
  std::unique_ptr<FakeIngest> Serve(FakeIngest::Options options = {}) {
    auto server = std::make_unique<FakeIngest>(address_, &store_, std::move(options));
    EXPECT_TRUE(server->started());
    return server;
  }
  uint64_t Stored() {
    const std::lock_guard<std::mutex> lock(store_.mutex);
    return store_.messages.size();
  }
  void ExpectExactlyOnce() {
    const std::lock_guard<std::mutex> lock(store_.mutex);
    EXPECT_EQ(store_.duplicates, 0);
    EXPECT_EQ(store_.gaps, 0);
  }
  // Steps of the stored frames, in order.
  std::vector<int64_t> StoredSteps() {
    const std::lock_guard<std::mutex> lock(store_.mutex);
    std::vector<int64_t> steps;
    for (const v1::ClientMessage& m : store_.messages) {
      if (m.has_frame()) steps.push_back(m.frame().step());
    }
    return steps;
  }

  TestFolder folder_;
  std::string address_ = "unix:" + (folder_ / "s");
  IngestStore store_;
};

// kill() returns while the signal is still on its way: until it stands, a process may do another thing.
bool StandsStill(pid_t process) {
  const std::string stat = ReadText("/proc/" + std::to_string(process) + "/stat");
  const size_t name_end = stat.rfind(')');
  return name_end != std::string::npos && stat.compare(name_end, 3, ") T") == 0;
}

std::vector<int64_t> Range(int64_t end) {
  std::vector<int64_t> steps(static_cast<size_t>(end));
  for (int64_t i = 0; i < end; ++i) steps[static_cast<size_t>(i)] = i;
  return steps;
}

TEST_F(StreamingTest, FramesArriveBitForBit) {
  const auto server = Serve();
  TestClient client(
      {.run = "a/run", .server = address_, .attempt = 3, .actions_mask = 1 << v1::ACTION_KIND_STOP, .ranks_agree = 1});
  const std::vector<uint32_t> bits = {0x7fc00000, 0x7f800001, 0xffc12345, 0x7f800000,
                                      0xff800000, 0x80000000, 1,          0x7f7fffff};
  std::vector<float> values(8);
  std::memcpy(values.data(), bits.data(), 32);
  ASSERT_EQ(client.Push(7, values, 1, 8), BW_OK);
  ASSERT_EQ(client.Flush(), BW_OK) << client.Counters().error;
  ASSERT_EQ(Stored(), 1);
  const v1::Frame& frame = store_.messages[0].frame();
  EXPECT_EQ(store_.messages[0].seq(), 1);
  EXPECT_EQ(frame.step(), 7);
  EXPECT_EQ(frame.attempt(), 3);
  EXPECT_EQ(frame.parts(), 1);
  EXPECT_GT(frame.time_unix_ns(), 0);
  ASSERT_EQ(frame.blocks_size(), 1);
  ASSERT_EQ(frame.blocks(0).values_size(), 8);
  EXPECT_EQ(std::memcmp(frame.blocks(0).values().data(), bits.data(), 32), 0);
  const v1::Hello& hello = store_.hellos[0];
  EXPECT_EQ(hello.run().name(), "a/run");
  EXPECT_EQ(hello.run().uuid().size(), 16);
  EXPECT_EQ(hello.run().layout().kv_heads(), 2);
  EXPECT_EQ(hello.run().world(), 1);
  ASSERT_EQ(hello.capabilities_size(), 1);
  EXPECT_EQ(hello.capabilities(0), v1::ACTION_KIND_STOP);
  EXPECT_TRUE(hello.ranks_agree());
  const bw_counters counters = client.Counters();
  EXPECT_EQ(counters.link, BW_LINK_STREAMING);
  EXPECT_EQ(counters.frames_queued, 1);
  EXPECT_EQ(counters.frames_sent, 1);
  EXPECT_EQ(counters.frames_acked, 1);
  EXPECT_STREQ(counters.page_url, "http://page/run");
}

TEST_F(StreamingTest, NamesEventsSpectraAndResultsKeepTheirOrder) {
  const auto server = Serve();
  TestClient client({.server = address_});
  const std::vector<float> gram = {1, 2, 3, 4, 5, 6};
  ASSERT_EQ(client.PushStep(1), BW_OK);
  ASSERT_EQ(client.Name({"embed", "größe"}), BW_OK);
  ASSERT_EQ(bw_client_push_event(client.get(), 2, v1::EVENT_KIND_RESTORE, 1.5, "zurück"), BW_OK);
  ASSERT_EQ(bw_client_push_spectrum(client.get(), 3, 1, 7, v1::SPECTRUM_KIND_WQ_GRAM, 3, 0.5f, gram.data()), BW_OK);
  ASSERT_EQ(bw_client_push_action_result(client.get(), "a-1", 4, 0, "not now"), BW_OK);
  ASSERT_EQ(client.Flush(), BW_OK);
  ASSERT_EQ(Stored(), 5);
  const v1::Names& names = store_.messages[1].names();
  EXPECT_EQ(names.granularity(), v1::GRANULARITY_TENSOR);
  EXPECT_THAT(names.names(), ::testing::ElementsAre("embed", "größe"));
  const v1::Event& event = store_.messages[2].event();
  EXPECT_EQ(event.kind(), v1::EVENT_KIND_RESTORE);
  EXPECT_EQ(event.value(), 1.5);
  EXPECT_EQ(event.text(), "zurück");
  const v1::Spectrum& spectrum = store_.messages[3].spectrum();
  EXPECT_THAT(spectrum.upper(), ::testing::ElementsAre(1, 2, 3, 4, 5, 6));
  EXPECT_EQ(spectrum.head(), 7);
  EXPECT_EQ(spectrum.scale(), 0.5f);
  const v1::ActionResult& result = store_.messages[4].action_result();
  EXPECT_EQ(result.id(), "a-1");
  EXPECT_FALSE(result.applied());
  EXPECT_EQ(result.reason(), "not now");
  ExpectExactlyOnce();
}

TEST_F(StreamingTest, ResendsWithTheSameSeqAfterBrokenStreams) {
  FakeIngest::Options breaking;
  breaking.ack_every = 3;
  breaking.end_after = 7;
  const auto server = Serve(breaking);
  TestClient client({.server = address_});
  for (int64_t step = 0; step < 60; ++step) ASSERT_EQ(client.PushStep(step), BW_OK);
  ASSERT_TRUE(WaitUntil([&] { return Stored() == 60; })) << Stored();
  EXPECT_EQ(StoredSteps(), Range(60));
  ExpectExactlyOnce();
  EXPECT_GE(client.Counters().reconnects, 60 / 7);
}

TEST_F(StreamingTest, LinkCutAfterEachWelcomeIsReported) {
  FakeIngest::Options breaking;
  breaking.end_after = 1;
  const auto server = Serve(breaking);
  TestClient client({.server = address_, .log_path = folder_ / "log"});
  for (int64_t step = 0; step < 2; ++step) ASSERT_EQ(client.PushStep(step), BW_OK);
  ASSERT_TRUE(WaitUntil([&] { return client.Counters().reconnects >= 2; }));
  EXPECT_EQ(ReadText(folder_ / "log"), "") << "two may be a server's restarts";
  for (int64_t step = 2; step < 6; ++step) ASSERT_EQ(client.PushStep(step), BW_OK);
  ASSERT_TRUE(WaitUntil([&] { return Stored() == 6; })) << Stored();
  ASSERT_TRUE(WaitUntil([&] { return client.Counters().reconnects >= 6; }));
  const std::string told = ReadText(folder_ / "log");
  EXPECT_THAT(told, HasSubstr("UNAVAILABLE: planted; training goes on, frames wait"));
  EXPECT_EQ(std::count(told.begin(), told.end(), '\n'), 1) << told;
  ExpectExactlyOnce();
}

TEST_F(StreamingTest, GoesOnAfterARestartOfTheServer) {
  auto server = Serve();
  TestClient client({.server = address_});
  for (int64_t step = 0; step < 50; ++step) ASSERT_EQ(client.PushStep(step), BW_OK);
  ASSERT_EQ(client.Flush(), BW_OK);
  server.reset();
  for (int64_t step = 50; step < 100; ++step) ASSERT_EQ(client.PushStep(step), BW_OK);
  // The first word may be another one: that the stream was cancelled.
  ASSERT_TRUE(WaitUntil([&] {
    const bw_counters c = client.Counters();
    return c.link == BW_LINK_CONNECTING && std::string(c.error).find("UNAVAILABLE") != std::string::npos;
  })) << client.Counters().error;
  server = Serve();
  ASSERT_EQ(client.Flush(), BW_OK) << client.Counters().error;
  EXPECT_EQ(StoredSteps(), Range(100));
  EXPECT_STREQ(client.Counters().error, "");
  ExpectExactlyOnce();
}

TEST_F(StreamingTest, NextSeqFollowsServersDurableSeqAfterStoreLoss) {
  auto server = Serve();
  TestClient client({.server = address_});
  for (int64_t step = 0; step < 10; ++step) ASSERT_EQ(client.PushStep(step), BW_OK);
  ASSERT_EQ(client.Flush(), BW_OK);
  server.reset();
  store_.durable_seq = 4;
  store_.messages.clear();
  server = Serve();
  ASSERT_EQ(client.PushStep(10), BW_OK);
  ASSERT_EQ(client.Flush(), BW_OK);
  EXPECT_EQ(store_.messages.at(0).seq(), 5);
  ExpectExactlyOnce();
}

TEST_F(StreamingTest, ANewProcessGoesOnBehindWhatIsDurable) {
  store_.durable_seq = 1000;
  const auto server = Serve();
  TestClient client({.server = address_, .attempt = 1});
  ASSERT_EQ(client.PushStep(0), BW_OK);
  ASSERT_EQ(client.Flush(), BW_OK);
  EXPECT_EQ(store_.messages.at(0).seq(), 1001);
  ExpectExactlyOnce();
}

TEST_F(StreamingTest, AcksOfAnotherSessionFreeNothing) {
  FakeIngest::Options options;
  options.ack_epoch_offset = 1;
  const auto server = Serve(options);
  TestClient client({.server = address_});
  ASSERT_EQ(client.PushStep(0), BW_OK);
  ASSERT_TRUE(WaitUntil([&] { return Stored() == 1; }));
  EXPECT_EQ(client.Flush(200), BW_TIMEOUT);
  EXPECT_EQ(client.Counters().frames_acked, 0);
}

TEST_F(StreamingTest, TwentyKilledSendersLoseAndDoubleNothing) {
  // Three of four acks never come by themselves: much is in doubt at each kill.
  auto server = Serve({.ack_every = 4});
  TestClient client({.server = address_, .ring_frames = 4096});
  std::atomic<bool> stop{false};
  std::atomic<int64_t> pushed{0};
  std::thread trainer([&] {
    while (!stop) {
      if (client.PushStep(pushed) == BW_OK) ++pushed;
      usleep(200);
    }
  });
  std::set<uint32_t> killed;
  for (int i = 0; i < 20; ++i) {
    uint32_t pid = 0;
    const uint64_t stored = Stored(), acked = client.Counters().frames_acked;
    // Every other one gets an ack through, which ends the wait that grows with each sender that did not.
    const bool sees_an_ack = i % 2 == 1;
    ASSERT_TRUE(WaitUntil(
        [&] {
          const bw_counters counters = client.Counters();
          pid = counters.sender_pid;
          return pid != 0 && killed.count(pid) == 0 && Stored() > stored + 5 &&
                 (!sees_an_ack || counters.frames_acked > acked);
        },
        60))
        << i << " " << client.Counters().error;
    killed.insert(pid);
    kill(static_cast<pid_t>(pid), SIGKILL);
  }
  stop = true;
  trainer.join();
  server.reset();
  server = Serve();
  ASSERT_EQ(client.Flush(60000), BW_OK) << client.Counters().error;
  EXPECT_EQ(StoredSteps(), Range(pushed));
  ExpectExactlyOnce();
  const bw_counters counters = client.Counters();
  EXPECT_EQ(counters.frames_dropped_window, 0);
  EXPECT_EQ(counters.frames_acked, counters.frames_queued);
  // Where all was acknowledged before the last kill, nothing above has waited for the sender after it.
  EXPECT_TRUE(WaitUntil([&] { return client.Counters().sender_restarts >= 20; })) << client.Counters().sender_restarts;
}

TEST_F(StreamingTest, AFullRingDropsTheNewestCountsAndTells) {
  TestClient client({.server = address_, .ring_frames = 2});
  // Without a server the window takes frames, so the sender is stopped.
  ASSERT_EQ(client.PushStep(0), BW_OK);
  ASSERT_TRUE(WaitUntil([&] { return client.Counters().sender_pid != 0; }));
  const auto pid = static_cast<pid_t>(client.Counters().sender_pid);
  ASSERT_TRUE(WaitUntil([&] { return client.Counters().link == BW_LINK_CONNECTING; }));
  kill(pid, SIGSTOP);
  ASSERT_TRUE(WaitUntil([&] { return StandsStill(pid); }));
  int64_t step = 1;
  while (client.PushStep(step) == BW_OK) ++step;
  EXPECT_LE(step, 4);
  EXPECT_EQ(client.Name({"a"}), BW_DROPPED);
  const float value = 1;
  const bw_block block{
      .signal = bw_signal_by_name("replica_sum_low"), .layer_count = 1, .head_count = 1, .values = &value};
  const bw_frame frame{.struct_size = sizeof(frame), .block_count = 1, .step = step, .blocks = &block};
  EXPECT_EQ(bw_client_push(client.get(), &frame), BW_INVALID_ARGUMENT) << "the row has no name yet";
  EXPECT_EQ(client.Counters().frames_dropped_ring, 2);
  kill(pid, SIGCONT);
  const auto server = Serve();
  ASSERT_EQ(client.Flush(), BW_OK);
  ASSERT_EQ(client.PushStep(100), BW_OK);
  ASSERT_EQ(client.Flush(), BW_OK);
  EXPECT_EQ(store_.messages.back().frame().dropped_ring_total(), 2);
  ExpectExactlyOnce();
}

TEST_F(StreamingTest, AFullWindowThinsThenDropsCountsAndTells) {
  FakeIngest::Options options;
  options.ack = false;
  options.window_bytes = 64 << 10;
  auto server = Serve(options);
  TestClient client({.server = address_, .ring_frames = 64});
  ASSERT_EQ(client.PushStep(0), BW_OK);
  ASSERT_TRUE(WaitUntil([&] { return Stored() == 1; }));  // The window's limit is known now.
  int64_t step = 1;
  const auto push = [&](int count) {
    for (const int64_t end = step + count; step < end;) {
      if (client.PushStep(step) == BW_OK) ++step;
    }
  };
  // 8 floats make a message of about 100 bytes: 64 KiB hold some 600.
  push(3000);
  ASSERT_TRUE(WaitUntil([&] {
    const bw_counters c = client.Counters();
    return c.frames_sent + c.frames_dropped_window == c.frames_queued;
  }));
  const bw_counters full = client.Counters();
  EXPECT_GT(full.frames_dropped_window, 1000);
  EXPECT_GT(full.frames_sent, 300);
  ASSERT_TRUE(WaitUntil([&] { return Stored() == full.frames_sent; }));  // Sent is not arrived.
  // Thinned, not cut: the frames that were let in reach beyond the first ones.
  EXPECT_GT(StoredSteps().back(), static_cast<int64_t>(full.frames_sent) + 200);
  // An event is let in while it fits.
  ASSERT_EQ(bw_client_push_event(client.get(), step, v1::EVENT_KIND_DATA, 0, "still"), BW_OK);
  ASSERT_TRUE(WaitUntil([&] {
    const std::lock_guard<std::mutex> lock(store_.mutex);
    return store_.messages.back().has_event();
  }));
  server.reset();
  server = Serve();
  ASSERT_EQ(client.Flush(), BW_OK);
  ASSERT_EQ(client.PushStep(step), BW_OK);
  ASSERT_EQ(client.Flush(), BW_OK);
  const bw_counters after = client.Counters();
  EXPECT_EQ(store_.messages.back().frame().dropped_window_total(), after.frames_dropped_window);
  EXPECT_EQ(after.frames_acked + after.frames_dropped_window, after.frames_queued);
  ExpectExactlyOnce();
}

TEST_F(StreamingTest, LargeFramesTravelInPartsThatMakeTheWhole) {
  const auto server = Serve();
  TestClient client({.server = address_, .layers = 512, .heads = 1024, .kv_heads = 1024, .ring_frames = 2});
  std::vector<float> values(512 * 1024);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
  ASSERT_EQ(client.Push(5, values, 512, 1024), BW_OK);
  ASSERT_EQ(client.Flush(), BW_OK);
  ASSERT_GE(Stored(), 3);  // 2 MiB of values, 1 MiB a message.
  size_t next = 0;
  for (size_t part = 0; part < store_.messages.size(); ++part) {
    const v1::Frame& frame = store_.messages[part].frame();
    EXPECT_EQ(frame.part(), part);
    EXPECT_EQ(frame.parts(), store_.messages.size());
    EXPECT_LE(store_.messages[part].ByteSizeLong(), 1 << 20);
    for (const v1::Block& block : frame.blocks()) {
      EXPECT_EQ(block.layer_begin(), next / 1024);
      EXPECT_EQ(block.layer_count() * block.head_count(), block.values_size());
      for (const float value : block.values()) ASSERT_EQ(value, values[next++]);
    }
  }
  EXPECT_EQ(next, values.size());
  EXPECT_EQ(client.Counters().frames_acked, 1);
}

TEST_F(StreamingTest, CommandsComeBackAndOversizedOnesAreRefused) {
  FakeIngest::Options options;
  v1::ServerMessage sampling, action, oversized;
  sampling.mutable_sampling()->set_period_steps(5);
  action.mutable_action()->set_id("a-7");
  action.mutable_action()->set_kind(v1::ACTION_KIND_LR_SCALE);
  action.mutable_action()->set_value(0.5);
  action.mutable_action()->set_apply_at_step(120);
  action.mutable_action()->mutable_scope()->add_layers(3);
  action.mutable_action()->set_cost(std::string(5000, 'x'));  // Of no use to the trainer.
  action.mutable_action()->add_history()->set_reason("likewise");
  oversized.mutable_action()->set_id("a-8");
  oversized.mutable_action()->set_mode(std::string(5000, 'x'));
  options.after_welcome = {sampling, action, oversized};
  const auto server = Serve(options);
  TestClient client({.server = address_});
  ASSERT_EQ(client.PushStep(0), BW_OK);
  std::vector<bw_command> commands;
  ASSERT_TRUE(WaitUntil([&] {
    bw_command command{};
    command.struct_size = sizeof(command);
    EXPECT_EQ(bw_client_poll(client.get(), &command), BW_OK);
    if (command.type != BW_COMMAND_NONE) commands.push_back(command);
    return commands.size() == 2;
  }));
  EXPECT_EQ(commands[0].type, BW_COMMAND_SAMPLING);
  EXPECT_EQ(commands[0].value, 5);
  EXPECT_EQ(client.Counters().sampling_period_steps, 5);
  ASSERT_EQ(commands[1].type, BW_COMMAND_ACTION);
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(commands[1].payload), commands[1].payload_bytes),
            R"({"id":"a-7","kind":"ACTION_KIND_LR_SCALE","scope":{"layers":[3]},"value":0.5,"apply_at_step":"120"})");
  ASSERT_TRUE(WaitUntil([&] { return Stored() == 2; }));
  EXPECT_EQ(store_.messages[1].action_result().id(), "a-8");
  EXPECT_FALSE(store_.messages[1].action_result().applied());
  EXPECT_EQ(client.Counters().frames_sent, 1);  // The refusal is no frame of the trainer.
}

TEST_F(StreamingTest, RefusalsAreFinalAndSayWhy) {
  for (const auto code : {grpc::StatusCode::INVALID_ARGUMENT, grpc::StatusCode::FAILED_PRECONDITION,
                          grpc::StatusCode::UNIMPLEMENTED, grpc::StatusCode::ABORTED}) {
    FakeIngest::Options options;
    options.refuse = {code, "this server is not yours"};
    const auto server = Serve(options);
    TestClient client({.server = address_});
    ASSERT_EQ(client.PushStep(0), BW_OK);
    ASSERT_TRUE(WaitUntil([&] { return client.Counters().link == BW_LINK_FAILED; }));
    EXPECT_EQ(client.Flush(), BW_UNAVAILABLE);
    EXPECT_THAT(bw_last_error(), HasSubstr("this server is not yours"));
    ASSERT_TRUE(WaitUntil([&] { return client.PushStep(1) == BW_UNAVAILABLE; }));
    const bw_counters counters = client.Counters();
    EXPECT_EQ(counters.frames_dropped_window + counters.frames_dropped_ring, counters.frames_queued + 1);
    EXPECT_EQ(counters.sender_restarts, 0);
  }
  EXPECT_EQ(store_.hellos.size(), 4);  // Once each.
}

TEST_F(StreamingTest, RefusalsForResourcesAreRetried) {
  FakeIngest::Options options;
  options.refuse = {grpc::StatusCode::RESOURCE_EXHAUSTED, "streams_max"};
  auto server = Serve(options);
  TestClient client({.server = address_});
  ASSERT_EQ(client.PushStep(0), BW_OK);
  ASSERT_TRUE(WaitUntil([&] {
    const std::lock_guard<std::mutex> lock(store_.mutex);
    return store_.hellos.size() >= 2;
  }));
  EXPECT_THAT(client.Counters().error, HasSubstr("streams_max"));
  server.reset();
  server = Serve();
  EXPECT_EQ(client.Flush(), BW_OK);
}

// What a person puts right is found without a restart of the job, and nothing is missing.
TEST_F(StreamingTest, CorrectedRoleOrTokenIsUsedWithoutRestart) {
  for (const auto code : {grpc::StatusCode::PERMISSION_DENIED, grpc::StatusCode::UNAUTHENTICATED}) {
    FakeIngest::Options options;
    options.refuse = {code, "this run is not yours"};
    auto server = Serve(options);
    TestClient client({.server = address_});
    ASSERT_EQ(client.PushStep(0), BW_OK);
    ASSERT_TRUE(WaitUntil(
        [&] { return std::string(client.Counters().error).find("this run is not yours") != std::string::npos; }));
    ASSERT_EQ(client.PushStep(1), BW_OK);
    server.reset();
    server = Serve();
    EXPECT_EQ(client.Flush(60000), BW_OK) << client.Counters().error;
    const bw_counters counters = client.Counters();
    EXPECT_EQ(counters.frames_acked, 2);
    EXPECT_EQ(counters.frames_dropped_window + counters.frames_dropped_ring, 0);
  }
}

TEST_F(StreamingTest, FollowsARunThatMoved) {
  IngestStore other;
  const std::string there = "unix:" + (folder_ / "there");
  FakeIngest owner(there, &other, {});
  FakeIngest::Options options;
  options.moved_to = there;
  const auto server = Serve(options);
  TestClient client({.server = address_});
  ASSERT_EQ(client.PushStep(0), BW_OK);
  ASSERT_EQ(client.Flush(), BW_OK);
  EXPECT_EQ(other.messages.size(), 1);
}

TEST_F(StreamingTest, SaysHowTheTrainerEnded) {
  const auto server = Serve();
  const auto byes = [&] {
    const std::lock_guard<std::mutex> lock(store_.mutex);
    return store_.byes.size();
  };
  TestClient finished({.server = address_});
  ASSERT_EQ(finished.PushStep(0), BW_OK);
  finished.Destroy();
  ASSERT_TRUE(WaitUntil([&] { return byes() == 1; }));
  EXPECT_EQ(store_.byes[0].reason(), v1::BYE_REASON_FINISHED);
  EXPECT_EQ(store_.byes[0].last_seq(), 1);
  TestClient detached({.server = address_});
  ASSERT_EQ(detached.PushStep(0), BW_OK);
  ASSERT_EQ(bw_client_push_event(detached.get(), 1, v1::EVENT_KIND_DETACH, 0, nullptr), BW_OK);
  detached.Destroy();
  ASSERT_TRUE(WaitUntil([&] { return byes() == 2; }));
  EXPECT_EQ(store_.byes[1].reason(), v1::BYE_REASON_DETACHED);
}

TEST_F(StreamingTest, SaysGoodbyeAgainUntilItIsAnswered) {
  const auto server = Serve({.byes_lost = 2});
  TestClient client({.server = address_});
  ASSERT_EQ(client.PushStep(0), BW_OK);
  client.Destroy();
  ASSERT_TRUE(WaitUntil([&] {
    const std::lock_guard<std::mutex> lock(store_.mutex);
    return store_.byes.size() == 3;
  }));
}

TEST_F(StreamingTest, ATokenTravelsOnLoopback) {
  const std::string token = folder_ / "token";
  std::ofstream(token) << "s3cret\n";
  const auto server = Serve();
  TestClient client({.server = address_, .token_file = token});
  ASSERT_EQ(client.PushStep(0), BW_OK);
  ASSERT_EQ(client.Flush(), BW_OK);
  EXPECT_EQ(store_.tokens.at(0), "Bearer s3cret");
}

TEST_F(StreamingTest, DestroyWithADeadServerWaitsForNothing) {
  TestClient client({.server = address_});
  for (int64_t step = 0; step < 100; ++step) ASSERT_EQ(client.PushStep(step), BW_OK);
  ASSERT_TRUE(WaitUntil([&] { return client.Counters().link == BW_LINK_CONNECTING; }));
  // A thread that is put aside for others has waited for nothing: it has not given its processor up.
  const auto given_up = [] {
    rusage usage{};
    getrusage(RUSAGE_THREAD, &usage);
    return usage.ru_nvcsw;
  };
  const auto worked = [] {
    timespec spent{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &spent);
    return std::chrono::seconds(spent.tv_sec) + std::chrono::nanoseconds(spent.tv_nsec);
  };
  constexpr std::chrono::milliseconds kAtOnce(50);
  const auto given_up_before = given_up();
  const auto worked_before = worked();
  const auto start = std::chrono::steady_clock::now();
  client.Destroy();
  const auto took = std::chrono::steady_clock::now() - start;
  EXPECT_TRUE(took < kAtOnce || given_up() == given_up_before) << took.count() << " ns";
  EXPECT_LT(worked() - worked_before, kAtOnce);
  // What was pushed still arrives once the server is there.
  const auto server = Serve();
  EXPECT_TRUE(WaitUntil([&] { return Stored() == 100; }));
  ExpectExactlyOnce();
}

}  // namespace
}  // namespace bellwether::client
