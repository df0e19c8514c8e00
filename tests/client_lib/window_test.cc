// Goal: the ring and the window in shared memory keep every frame through any
// interruption: what is mapped afresh goes on exactly where the last commit was.
// Method: both ends in this process, on two threads for the ring (ThreadSanitizer
// runs it too); a second mapping of the same file stands for the restarted sender.

#include "client_lib/sender/window.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "bellwether/signal_table.h"
#include "client_lib/sender/command_queue.h"
#include "client_lib/sender/frame_encoder.h"
#include "client_lib/sender/intake.h"
#include "client_lib/src/backoff.h"
#include "client_lib/src/frame_ring.h"
#include "client_lib/src/run_uuid.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace bellwether::client {
namespace {

constexpr uint64_t kValuesMax = 1 << 17;  // Touched only where a test does.

class WindowTest : public ::testing::Test {
 protected:
  WindowTest() { EXPECT_EQ(memory_.Create({.slot_count = 8, .values_max = kValuesMax}), 0); }

  // Pushes a frame of signals of the run and, if `with_heads`, of `values` floats more.
  bool PushRunSignals(RingProducer* ring, int64_t step, bool with_heads, uint32_t values) {
    char* slot = ring->Reserve();
    if (slot == nullptr) return false;
    auto* header = new (slot) SlotHeader{};
    header->kind = SlotKind::kFrame;
    header->block_count = with_heads ? 2 : 1;
    header->step = step;
    SlotBlocks(slot)[0] = {static_cast<uint32_t>(SignalId::kLoss), 0, 1, 0, 1, 0};
    if (with_heads) SlotBlocks(slot)[1] = {static_cast<uint32_t>(SignalId::kRows), 0, 1, 0, values, 0};
    auto* out = reinterpret_cast<float*>(slot + SlotValuesOffset(header->block_count));
    for (uint32_t i = 0; i <= (with_heads ? values : 0); ++i) out[i] = static_cast<float>(step);
    ring->Commit();
    return true;
  }

  // Pushes a frame of `values` floats, all `step`, on signal `signal`.
  bool Push(RingProducer* ring, int64_t step, uint32_t values, uint32_t signal = 1) {
    char* slot = ring->Reserve();
    if (slot == nullptr) return false;
    auto* header = new (slot) SlotHeader{};
    header->kind = SlotKind::kFrame;
    header->block_count = 1;
    header->step = step;
    SlotBlocks(slot)[0] = {signal, 0, 1, 0, values, 0};
    auto* out = reinterpret_cast<float*>(slot + SlotValuesOffset(1));
    for (uint32_t i = 0; i < values; ++i) out[i] = static_cast<float>(step);
    ring->Commit();
    return true;
  }

  SharedMemory memory_;
};

v1::ClientMessage Parse(std::string_view body) {
  v1::ClientMessage message;
  EXPECT_TRUE(message.ParseFromArray(body.data(), static_cast<int>(body.size())));
  return message;
}

TEST_F(WindowTest, RingKeepsOrderAndContentBetweenTwoThreads) {
  constexpr int64_t kFrames = 20'000;
  RingProducer producer(memory_);
  RingConsumer consumer(memory_);
  std::thread trainer([&] {
    for (int64_t step = 0; step < kFrames;) {
      if (Push(&producer, step, 16)) {
        ++step;
      } else {
        std::this_thread::yield();
      }
    }
  });
  for (uint64_t position = 0; position < kFrames;) {
    const char* slot = consumer.At(position);
    if (slot == nullptr) {
      std::this_thread::yield();
      continue;
    }
    ASSERT_EQ(reinterpret_cast<const SlotHeader*>(slot)->step, static_cast<int64_t>(position));
    const auto* values = reinterpret_cast<const float*>(slot + SlotValuesOffset(1));
    ASSERT_EQ(values[15], static_cast<float>(position));
    consumer.Release(++position);
  }
  trainer.join();
}

TEST_F(WindowTest, RestartResumesFromLastCommit) {
  RingProducer producer(memory_);
  ASSERT_TRUE(Push(&producer, 1, 4));
  ASSERT_TRUE(Push(&producer, 2, 4));
  {
    Window window(&memory_);
    Intake intake(&memory_, &window);
    ASSERT_EQ(intake.Take(1), 1);
    // Killed in the middle of the second frame: appended, not committed.
    std::memset(window.Prepare(10), 'x', 10);
    window.Append(10, true, 1);
  }
  SharedMemory again;
  ASSERT_EQ(again.Open(dup(memory_.fd())), 0);
  Window window(&again);
  Intake intake(&again, &window);
  EXPECT_EQ(intake.Take(8), 1);
  Window::Cursor cursor = window.Begin();
  Window::Message message;
  for (int64_t step = 1; step <= 2; ++step) {
    ASSERT_TRUE(window.Read(&cursor, &message));
    EXPECT_EQ(message.ordinal, step);
    EXPECT_EQ(Parse(message.body).frame().step(), step);
  }
  EXPECT_FALSE(window.Read(&cursor, &message));
  EXPECT_EQ(window.state().frames_admitted, 2);
}

TEST_F(WindowTest, MessagesSkipTheEndOfTheBuffer) {
  RingProducer producer(memory_);
  Window window(&memory_);
  Intake intake(&memory_, &window);
  constexpr uint32_t kValues = 100'003;  // 400 KB, no divisor of the room.
  Window::Cursor cursor = window.Begin();
  Window::Message message;
  int64_t pushed = 0, read = 0;
  // Never empty, so that positions really wrap: twice around 66 MiB.
  for (int round = 0; round < 400; ++round) {
    ASSERT_TRUE(Push(&producer, pushed++, kValues));
    ASSERT_EQ(intake.Take(1), 1);
    if (pushed - read < 4) continue;
    ASSERT_TRUE(window.Read(&cursor, &message));
    const v1::ClientMessage parsed = Parse(message.body);
    ASSERT_EQ(parsed.frame().step(), read);
    ASSERT_EQ(parsed.frame().blocks(0).values(kValues - 1), static_cast<float>(read));
    window.FreeUpTo(static_cast<uint64_t>(++read));
  }
  EXPECT_EQ(window.state().frames_dropped, 0);
}

TEST_F(WindowTest, FillsToTheLimitAndNotBeyond) {
  RingProducer producer(memory_);
  Window window(&memory_);
  Intake intake(&memory_, &window);
  for (int64_t step = 0; step < 2000; ++step) {
    ASSERT_TRUE(Push(&producer, step, 100'000));
    ASSERT_EQ(intake.Take(1), 1);
    ASSERT_LE(window.used_bytes(), kWindowBytesMax + (1 << 20));
  }
  EXPECT_GT(window.used_bytes(), kWindowBytesMax / 2);
  const SenderState& state = window.state();
  EXPECT_EQ(state.frames_admitted + state.frames_dropped, 2000);
  // Near full, signals of the run still get through.
  const uint64_t admitted = state.frames_admitted;
  ASSERT_TRUE(Push(&producer, 2000, 1, 40));
  ASSERT_EQ(intake.Take(1), 1);
  EXPECT_GE(window.state().frames_admitted + window.state().frames_dropped, admitted + 1);
}

TEST_F(WindowTest, StrippedFrameIsCountedAndCarriesTheCount) {
  RingProducer producer(memory_);
  Window window(&memory_);
  Intake intake(&memory_, &window);
  constexpr uint32_t kValues = 60'000;
  int64_t step = 0;
  uint64_t natural = 0;
  const auto push = [&](bool with_heads) {
    ASSERT_TRUE(PushRunSignals(&producer, step++, with_heads, kValues));
    ASSERT_EQ(intake.Take(1), 1);
  };
  while (window.state().frames_stripped == 0 && step < 5000) push(true);
  // One that has no heads loses none, and one that has nothing else is dropped.
  for (int i = 0; i < 20; ++i) {
    push(i % 2 == 0);
    natural += i % 2;
  }
  const uint64_t dropped = window.state().frames_dropped;
  ASSERT_TRUE(Push(&producer, step++, kValues, static_cast<uint32_t>(SignalId::kRows)));
  ASSERT_EQ(intake.Take(1), 1);
  EXPECT_EQ(window.state().frames_dropped, dropped + 1);
  const SenderState& state = window.state();
  EXPECT_EQ(state.frames_stripped, 11);
  EXPECT_EQ(state.frames_admitted + state.frames_dropped, static_cast<uint64_t>(step));
  EXPECT_EQ(memory_.header()->frames_stripped, 11);

  Window::Cursor cursor = window.Begin();
  Window::Message message;
  uint64_t without_heads = 0, read = 0;
  while (window.Read(&cursor, &message)) {
    const v1::ClientMessage parsed = Parse(message.body);
    ++read;
    const bool stripped = parsed.frame().blocks_size() == 1 && parsed.frame().stripped_total() > without_heads;
    without_heads += stripped ? 1 : 0;
    EXPECT_EQ(parsed.frame().stripped_total(), without_heads);
    if (parsed.frame().blocks_size() == 1 && !stripped) --natural;
  }
  EXPECT_EQ(read, state.frames_admitted);
  EXPECT_EQ(without_heads, 11);
  EXPECT_EQ(natural, 0);

  // The next sender goes on from there.
  Window again(&memory_);
  EXPECT_EQ(again.state().frames_stripped, 11);
}

TEST_F(WindowTest, ADamagedSlotIsDroppedAndCounted) {
  RingProducer producer(memory_);
  Window window(&memory_);
  Intake intake(&memory_, &window);
  const auto damage = [&](auto change) {
    const uint64_t before = window.state().frames_dropped;
    char* slot = producer.Reserve();
    auto* header = new (slot) SlotHeader{};
    header->kind = SlotKind::kFrame;
    header->block_count = 1;
    SlotBlocks(slot)[0] = {1, 0, 1, 0, 4, 0};
    change(header, SlotBlocks(slot));
    producer.Commit();
    EXPECT_EQ(intake.Take(1), 1);
    EXPECT_EQ(window.state().frames_dropped, before + 1);
  };
  damage([](SlotHeader* h, BlockHeader*) { h->kind = static_cast<SlotKind>(99); });
  damage([](SlotHeader* h, BlockHeader*) { h->block_count = 1'000'000; });
  damage([](SlotHeader*, BlockHeader* b) { b->layer_count = 0xffffffff, b->head_count = 0xffffffff; });
  damage([](SlotHeader*, BlockHeader* b) { b->head_count = kValuesMax + 1; });
  damage([](SlotHeader* h, BlockHeader*) { h->kind = SlotKind::kEvent, h->text_bytes[0] = 5000; });
  damage([](SlotHeader* h, BlockHeader*) { h->kind = SlotKind::kNames, h->text_bytes[0] = 0xffffffff; });
  damage([](SlotHeader* h, BlockHeader*) { h->kind = SlotKind::kNames, h->n = 3; });
  damage([](SlotHeader* h, BlockHeader*) { h->kind = SlotKind::kSpectrum, h->n = 60'000; });
  damage([](SlotHeader* h, BlockHeader*) { h->kind = SlotKind::kActionResult, h->text_bytes[1] = 5000; });
}

TEST_F(WindowTest, PartsFitAnyMessageLimit) {
  RingProducer producer(memory_);
  ASSERT_TRUE(Push(&producer, 1, 0));
  char* slot = memory_.ring();
  SlotBlocks(slot)[0] = {1, 0, 100, 0, 1024, 0};
  FrameEncoder encoder;
  for (const uint32_t bytes_max : {8u << 10, 64u << 10, 1u << 20}) {
    // Counters as long as they can be.
    EncodeContext context{.attempt = UINT32_MAX,
                          .dropped_ring_total = UINT64_MAX,
                          .dropped_window_total = UINT64_MAX,
                          .stripped_total = UINT64_MAX,
                          .message_bytes_max = bytes_max,
                          .values_max = kValuesMax};
    ASSERT_TRUE(encoder.Encode(slot, context));
    uint64_t values = 0;
    for (const v1::ClientMessage& message : encoder.messages()) {
      EXPECT_LE(message.ByteSizeLong() + 11, bytes_max);
      for (const v1::Block& block : message.frame().blocks()) values += static_cast<uint64_t>(block.values_size());
    }
    EXPECT_EQ(values, 100 * 1024);
  }
}

TEST_F(WindowTest, APartHasAtMostTheBlocksOfTheWire) {
  RingProducer producer(memory_);
  ASSERT_TRUE(Push(&producer, 1, 0));
  char* slot = memory_.ring();
  reinterpret_cast<SlotHeader*>(slot)->block_count = kBlocksMax;
  for (uint32_t i = 0; i < kBlocksMax; ++i) SlotBlocks(slot)[i] = {1, i, 1, 0, 1, 0};
  FrameEncoder encoder;
  ASSERT_TRUE(encoder.Encode(slot, {.attempt = 1, .values_max = kValuesMax}));
  ASSERT_EQ(encoder.messages().size(), 2u);
  for (uint32_t part = 0; part < 2; ++part) {
    const v1::Frame& frame = encoder.messages()[part].frame();
    EXPECT_EQ(frame.part(), part);
    EXPECT_EQ(frame.parts(), 2u);
    ASSERT_EQ(frame.blocks_size(), 128);
    EXPECT_EQ(frame.blocks(0).layer_begin(), part * 128);
  }
}

TEST_F(WindowTest, NamesFitAnyMessageLimit) {
  char* slot = memory_.ring();
  auto* header = new (slot) SlotHeader{};
  header->kind = SlotKind::kNames;
  header->event_kind = static_cast<uint32_t>(Granularity::kTensor);
  header->layer = 7;
  std::vector<std::string> names;
  for (header->n = 0; header->n < 4000; ++header->n) names.push_back(std::to_string(header->n));
  names.back() = std::string(BW_ROW_NAME_MAX, 'x');
  char* to = slot + sizeof(SlotHeader);
  for (const std::string& name : names) to = std::copy_n(name.c_str(), name.size() + 1, to);
  header->text_bytes[0] = static_cast<uint32_t>(to - slot - sizeof(SlotHeader));
  FrameEncoder encoder;
  for (const uint32_t bytes_max : {8u << 10, 64u << 10, 1u << 20}) {
    ASSERT_TRUE(
        encoder.Encode(slot, {.attempt = UINT32_MAX, .message_bytes_max = bytes_max, .values_max = kValuesMax}));
    std::vector<std::string> read;
    for (const v1::ClientMessage& message : encoder.messages()) {
      EXPECT_LE(message.ByteSizeLong() + 11, bytes_max);
      EXPECT_EQ(message.names().granularity(), v1::GRANULARITY_TENSOR);
      EXPECT_EQ(message.names().first(), 7 + read.size());
      read.insert(read.end(), message.names().names().begin(), message.names().names().end());
    }
    EXPECT_EQ(read, names);
  }
  header->text_bytes[0] -= 1;
  EXPECT_FALSE(encoder.Encode(slot, {.values_max = kValuesMax})) << "damaged";
}

TEST_F(WindowTest, CommandsWaitForTheTrainerAndThenAreRefused) {
  CommandQueue commands(&memory_);
  v1::Action action;
  action.set_kind(v1::ACTION_KIND_STOP);
  std::string why;
  for (size_t i = 0; i < kCommandSlots + CommandQueue::kWaitingMax; ++i)
    ASSERT_TRUE(commands.PushAction(action, &why)) << i;
  EXPECT_FALSE(commands.PushAction(action, &why));
  EXPECT_THAT(why, ::testing::HasSubstr("does not take"));
}

TEST(SharedTextTest, ReadersNeverSeeAMixture) {
  SharedText text;
  text.Set(std::string(300, 'a'));
  std::thread writer([&] {
    for (int i = 0; i < 20'000; ++i) text.Set(std::string(255, i % 2 == 0 ? 'a' : 'b'));
  });
  char out[SharedText::kBytes];
  for (int i = 0; i < 2'000; ++i) {
    text.Get(out);
    ASSERT_EQ(std::strlen(out), 255);
  }
  writer.join();
  text.Get(out);
  EXPECT_EQ(std::string(out), std::string(255, 'b'));
}

TEST(BackoffTest, JitterStaysUnderADoublingCeiling) {
  Backoff backoff(7);
  auto ceiling = Backoff::kFirst;
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(backoff.ceiling(), ceiling);
    EXPECT_LE(backoff.Next(), ceiling);
    ceiling = std::min(Backoff::kMax, ceiling * 2);
  }
  EXPECT_EQ(backoff.ceiling(), Backoff::kMax);
  backoff.Reset();
  EXPECT_EQ(backoff.ceiling(), Backoff::kFirst);
}

TEST(RunUuidTest, IsStableAndSpreads) {
  uint8_t a[16], b[16], again[16];
  RunUuidFromName("run-1", a);
  RunUuidFromName("run-2", b);
  RunUuidFromName("run-1", again);
  EXPECT_EQ(std::memcmp(a, again, 16), 0);
  int differing_bits = 0;
  for (int i = 0; i < 16; ++i) differing_bits += __builtin_popcount(a[i] ^ b[i]);
  EXPECT_GT(differing_bits, 40);
  EXPECT_LT(differing_bits, 90);
}

}  // namespace
}  // namespace bellwether::client
