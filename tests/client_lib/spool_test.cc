// Goal: what a spool took is there again, in order and bit for bit, after any end
// of its process; what is torn or damaged is cut off and never given out; every
// limit refuses and says why.
// Method: files cut at every byte and flipped at every byte, a cap, a floor, a
// limit of the file size that makes real writes fail half way; a window with a
// spool against a list in memory.

#include "client_lib/sender/spool.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <random>

#include "client_lib/sender/body_codec.h"
#include "client_lib/sender/intake.h"
#include "client_lib/sender/spool_folder.h"
#include "client_lib/sender/window.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/temp_directory.h"

namespace bellwether::client {
namespace {

using ::testing::HasSubstr;

struct Kept {
  uint64_t ordinal;
  bool last_part;
  uint64_t frames;
  std::string body;
  bool operator==(const Kept& other) const {
    return ordinal == other.ordinal && last_part == other.last_part && frames == other.frames && body == other.body;
  }
};

// Nothing that could be packed, so that sizes are known.
std::string Body(uint64_t ordinal, size_t bytes) {
  std::mt19937 random(static_cast<uint32_t>(ordinal));
  std::string body(bytes, '\0');
  for (char& c : body) c = static_cast<char>(random());
  return body;
}

// One frame of `parts` messages from `ordinal` on.
bool Append(Spool* spool, uint64_t ordinal, size_t bytes = 20, size_t parts = 1) {
  std::vector<std::string> bodies;
  for (size_t i = 0; i < parts; ++i) bodies.push_back(Body(ordinal + i, bytes));
  std::vector<HeldMessage> messages;
  for (size_t i = 0; i < parts; ++i)
    messages.push_back({ordinal + i, i + 1 == parts, ordinal, ordinal + 1000, bodies[i]});
  return spool->Append(messages);
}

std::vector<Kept> ReadAll(Spool* spool) {
  std::vector<Kept> all;
  Spool::Cursor cursor;
  HeldMessage m;
  for (; spool->Peek(&cursor, &m); spool->Advance(&cursor))
    all.push_back({m.ordinal, m.last_part, m.frames_admitted, std::string(m.body)});
  return all;
}

std::vector<std::string> Files(const std::string& folder) {
  std::vector<std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) files.push_back(entry.path());
  std::sort(files.begin(), files.end());
  return files;
}

class SpoolTest : public ::testing::Test {
 protected:
  SpoolTest() { mkdir(path_.c_str(), 0700); }
  Spool::Options Options() { return {.folder = path_, .free_bytes_min = 0}; }

  TempDirectory folder_;
  std::string path_ = folder_.path() + "/spool";
};

TEST_F(SpoolTest, ReturnsMessagesInOrderOverSegmentsAndProcesses) {
  Spool::Options options = Options();
  options.segment_bytes = 1000;
  std::vector<Kept> wanted;
  for (uint64_t life = 0; life < 3; ++life) {
    Spool spool(options);
    ASSERT_TRUE(spool.Open(UINT64_MAX));
    EXPECT_EQ(ReadAll(&spool), wanted);
    for (uint64_t i = 0; i < 100; ++i) {
      // Ordinals leave out what lies in the memory.
      const uint64_t ordinal = life * 1000 + i * 3 + 1;
      ASSERT_TRUE(Append(&spool, ordinal, 10 + i, 2));
      wanted.push_back({ordinal, false, ordinal, Body(ordinal, 10 + i)});
      wanted.push_back({ordinal + 1, true, ordinal, Body(ordinal + 1, 10 + i)});
    }
    EXPECT_EQ(ReadAll(&spool), wanted);
    EXPECT_EQ(spool.last_ordinal(), wanted.back().ordinal);
  }
  EXPECT_GT(Files(path_).size(), 30);
  for (const std::string& file : Files(path_)) {
    struct stat info {};
    ASSERT_EQ(stat(file.c_str(), &info), 0);
    EXPECT_EQ(info.st_mode & 0777, 0600);
  }
}

TEST_F(SpoolTest, ATornTailIsCutOffWhereverItTears) {
  {
    Spool spool(Options());
    ASSERT_TRUE(spool.Open(UINT64_MAX));
    for (uint64_t ordinal = 1; ordinal <= 3; ++ordinal) ASSERT_TRUE(Append(&spool, ordinal, 9));
  }
  const std::string file = Files(path_).at(0);
  const auto size = std::filesystem::file_size(file);
  std::ifstream in(file, std::ios::binary);
  const std::string whole(std::istreambuf_iterator<char>(in), {});
  constexpr uint64_t kRecord = 40 + 9;
  for (uint64_t bytes = 0; bytes <= size; ++bytes) {
    std::ofstream(file, std::ios::binary) << whole.substr(0, bytes);
    const uint64_t records = bytes < 8 ? 0 : (bytes - 8) / kRecord;
    Spool spool(Options());
    ASSERT_TRUE(spool.Open(UINT64_MAX));
    ASSERT_EQ(ReadAll(&spool).size(), records) << bytes;
    // What follows goes on behind it, and both are there again.
    ASSERT_TRUE(Append(&spool, 100));
    Spool again(Options());
    ASSERT_TRUE(again.Open(UINT64_MAX));
    ASSERT_EQ(ReadAll(&again).size(), records + 1) << bytes;
    for (const std::string& left : Files(path_)) std::filesystem::remove(left);
  }
}

TEST_F(SpoolTest, IncompleteFrameIsNotReturned) {
  constexpr uint64_t kRecord = 40 + 9;
  {
    Spool spool(Options());
    ASSERT_TRUE(spool.Open(UINT64_MAX));
    for (uint64_t ordinal = 1; ordinal <= 9; ordinal += 3) ASSERT_TRUE(Append(&spool, ordinal, 9, 3));
  }
  const std::string file = Files(path_).at(0);
  std::ifstream in(file, std::ios::binary);
  const std::string whole(std::istreambuf_iterator<char>(in), {});
  for (uint64_t records = 0; records <= 9; ++records) {
    std::ofstream(file, std::ios::binary) << whole.substr(0, 8 + records * kRecord);
    Spool spool(Options());
    ASSERT_TRUE(spool.Open(UINT64_MAX));
    EXPECT_EQ(ReadAll(&spool).size(), records / 3 * 3);
    EXPECT_EQ(spool.last_ordinal(), records / 3 * 3);
  }
  // Damaged in the second frame's second part, with a segment behind it.
  std::string damaged = whole;
  damaged[8 + 4 * kRecord + 45] ^= 1;
  std::ofstream(file, std::ios::binary) << damaged;
  std::ofstream(path_ + "/000000000000000a.spool", std::ios::binary) << "cut off";
  Spool spool(Options());
  ASSERT_TRUE(spool.Open(UINT64_MAX));
  ASSERT_TRUE(Append(&spool, 10, 9));
  std::vector<uint64_t> ordinals;
  for (const Kept& kept : ReadAll(&spool)) ordinals.push_back(kept.ordinal);
  EXPECT_THAT(ordinals, ::testing::ElementsAre(1, 2, 3, 10));
}

TEST_F(SpoolTest, AFileIsReadOnceHoweverItsNameIsSpelt) {
  {
    Spool spool(Options());
    ASSERT_TRUE(spool.Open(UINT64_MAX));
    ASSERT_TRUE(Append(&spool, 0xab, 9));
  }
  const std::string file = Files(path_).at(0);
  for (const char* name : {"/00000000000000AB.spool", "/0x000000000000ab.spool", "/+0000000000000ab.spool"})
    std::filesystem::copy(file, path_ + name);
  Spool spool(Options());
  ASSERT_TRUE(spool.Open(UINT64_MAX));
  EXPECT_EQ(ReadAll(&spool).size(), 1);
  EXPECT_EQ(spool.bytes(), std::filesystem::file_size(file));
}

TEST_F(SpoolTest, OrdinalsThatTheNextSegmentHasAreCutOff) {
  {
    Spool spool(Options());
    ASSERT_TRUE(spool.Open(UINT64_MAX));
    for (uint64_t ordinal = 1; ordinal <= 5; ++ordinal) ASSERT_TRUE(Append(&spool, ordinal, 9));
  }
  const std::string file = Files(path_).at(0);
  {
    Spool spool({.folder = path_, .suffix = ".other", .free_bytes_min = 0});
    for (uint64_t ordinal = 3; ordinal <= 4; ++ordinal) ASSERT_TRUE(Append(&spool, ordinal, 9));
  }
  std::filesystem::rename(path_ + "/0000000000000003.other", path_ + "/0000000000000003.spool");
  // And one whose records are not those that its name says.
  std::filesystem::copy(file, path_ + "/0000000000000009.spool");
  Spool spool(Options());
  ASSERT_TRUE(spool.Open(UINT64_MAX));
  std::vector<uint64_t> ordinals;
  for (const Kept& kept : ReadAll(&spool)) ordinals.push_back(kept.ordinal);
  EXPECT_THAT(ordinals, ::testing::ElementsAre(1, 2, 3, 4));
  EXPECT_EQ(spool.last_ordinal(), 4);
  EXPECT_EQ(Files(path_).size(), 2);
}

TEST_F(SpoolTest, FrameEndIsNotReadFromDamagedHeader) {
  Spool::Options options = Options();
  {
    Spool spool(options);
    ASSERT_TRUE(spool.Open(UINT64_MAX));
    for (uint64_t ordinal = 1; ordinal <= 3; ++ordinal) ASSERT_TRUE(Append(&spool, ordinal, 9));
  }
  const std::string file = Files(path_).at(0);
  {
    Spool spool(options);
    ASSERT_TRUE(spool.Open(UINT64_MAX));
    ASSERT_TRUE(Append(&spool, 10, 9));
  }
  std::fstream damaged(file, std::ios::binary | std::ios::in | std::ios::out);
  damaged.seekp(8 + 2 * (40 + 9) + 39) << '\x7f';  // The third record's frames_admitted.
  damaged.close();
  Spool spool(options);
  ASSERT_TRUE(spool.Open(UINT64_MAX));
  HeldMessage last;
  spool.FindFrameEnd(9, &last);
  EXPECT_EQ(last.ordinal, 2);
  EXPECT_EQ(last.frames_admitted, 2);
}

TEST_F(SpoolTest, CompressibleMessagesTakeLessAndReturnBitForBit) {
  std::vector<Kept> wanted;
  {
    Spool spool(Options());
    ASSERT_TRUE(spool.Open(UINT64_MAX));
    for (uint64_t ordinal = 1; ordinal <= 40; ++ordinal) {
      std::string body = Body(ordinal, 100'000);
      std::fill(body.begin() + 1000, body.end() - static_cast<ptrdiff_t>(ordinal), 'x');
      ASSERT_TRUE(spool.Append({{ordinal, true, ordinal, ordinal, body}}));
      wanted.push_back({ordinal, true, ordinal, body});
    }
    EXPECT_EQ(ReadAll(&spool), wanted);
    EXPECT_LT(spool.bytes(), 40 * 1500);
    EXPECT_GT(spool.bytes(), 40 * 1000);
  }
  Spool spool(Options());
  ASSERT_TRUE(spool.Open(UINT64_MAX));
  EXPECT_EQ(ReadAll(&spool), wanted);
}

TEST(BodyCodecTest, UnpacksWhatItPackedWithinItsLimitAndNothingElse) {
  BodyCodec codec;
  const std::string body(100'000, 'x');
  const std::string packed(codec.Pack(body));
  ASSERT_FALSE(packed.empty());
  std::string back;
  EXPECT_TRUE(codec.Unpack(packed, body.size(), &back));
  EXPECT_EQ(back, body);
  EXPECT_FALSE(codec.Unpack(packed, body.size() - 1, &back)) << "more than the limit";
  for (size_t bytes = 0; bytes < packed.size(); ++bytes)
    EXPECT_FALSE(codec.Unpack(packed.substr(0, bytes), body.size(), &back)) << bytes;
  EXPECT_FALSE(codec.Unpack("no zstd", body.size(), &back));
  EXPECT_TRUE(codec.Pack(Body(1, 1000)).empty()) << "would not be smaller";
  EXPECT_TRUE(codec.Pack("").empty());
}

TEST_F(SpoolTest, NoFlippedByteIsEverGivenOut) {
  {
    Spool spool(Options());
    ASSERT_TRUE(spool.Open(UINT64_MAX));
    for (uint64_t ordinal = 1; ordinal <= 3; ++ordinal) ASSERT_TRUE(Append(&spool, ordinal, 9));
  }
  const std::string file = Files(path_).at(0);
  std::ifstream in(file, std::ios::binary);
  const std::string whole(std::istreambuf_iterator<char>(in), {});
  for (size_t at = 0; at < whole.size(); ++at) {
    std::string flipped = whole;
    flipped[at] = static_cast<char>(flipped[at] ^ 0x10);
    std::ofstream(file, std::ios::binary) << flipped;
    Spool spool(Options());
    ASSERT_TRUE(spool.Open(UINT64_MAX));
    const std::vector<Kept> read = ReadAll(&spool);
    ASSERT_EQ(read.size(), at < 8 ? 0 : (at - 8) / (40 + 9)) << at;
    for (const Kept& kept : read) ASSERT_EQ(kept.body, Body(kept.ordinal, 9));
    std::filesystem::remove(file);
  }
}

TEST_F(SpoolTest, UncommittedMessagesAreCutOff) {
  {
    Spool spool(Options());
    ASSERT_TRUE(spool.Open(UINT64_MAX));
    for (uint64_t ordinal = 1; ordinal <= 5; ++ordinal) ASSERT_TRUE(Append(&spool, ordinal));
  }
  Spool spool(Options());
  ASSERT_TRUE(spool.Open(3));
  EXPECT_EQ(ReadAll(&spool).size(), 3);
  ASSERT_TRUE(Append(&spool, 4, 7));
  EXPECT_EQ(ReadAll(&spool).back().body, Body(4, 7));
}

TEST_F(SpoolTest, FreesWholeSegmentsAndSaysWhatTheLastFrameWas) {
  Spool::Options options = Options();
  options.segment_bytes = 500;
  Spool spool(options);
  ASSERT_TRUE(spool.Open(UINT64_MAX));
  for (uint64_t ordinal = 1; ordinal <= 99; ordinal += 2) ASSERT_TRUE(Append(&spool, ordinal, 20, 2));
  const size_t files = Files(path_).size();
  HeldMessage last;
  spool.FindFrameEnd(0, &last);
  EXPECT_EQ(last.ordinal, 0);
  spool.FindFrameEnd(51, &last);  // The first part of a frame: the frame before is the last whole one.
  EXPECT_EQ(last.ordinal, 50);
  EXPECT_EQ(last.frames_admitted, 49);
  EXPECT_EQ(last.ring_position, 1049);
  EXPECT_EQ(Files(path_).size(), files);
  spool.FreeUpTo(51);
  EXPECT_LT(Files(path_).size(), files);
  EXPECT_LE(ReadAll(&spool).front().ordinal, 52);
  EXPECT_EQ(ReadAll(&spool).back().ordinal, 100);
  spool.FindFrameEnd(100, &last);
  EXPECT_EQ(last.ordinal, 100);
  spool.FreeUpTo(100);
  EXPECT_TRUE(spool.empty());
  EXPECT_EQ(spool.bytes(), 0);
  EXPECT_TRUE(Files(path_).empty());
  ASSERT_TRUE(Append(&spool, 101));
  EXPECT_EQ(ReadAll(&spool).size(), 1);
}

TEST_F(SpoolTest, CapHoldsToTheByteAndFreedRoomIsUsed) {
  Spool::Options options = Options();
  options.segment_bytes = 500;
  options.bytes_max = 2000;
  Spool spool(options);
  ASSERT_TRUE(spool.Open(UINT64_MAX));
  uint64_t ordinal = 1;
  while (Append(&spool, ordinal)) ++ordinal;
  EXPECT_LE(spool.bytes(), 2000);
  EXPECT_GT(spool.bytes(), 1800);
  EXPECT_THAT(spool.trouble(), HasSubstr("spool_bytes"));
  EXPECT_TRUE(spool.refuses());
  spool.FreeUpTo(20);
  EXPECT_FALSE(spool.refuses());
  EXPECT_TRUE(Append(&spool, ordinal));
  // Others' bytes count too.
  spool.set_other_bytes(2000);
  EXPECT_FALSE(Append(&spool, ordinal + 1));
}

TEST_F(SpoolTest, TheFloorOfTheDiskIsKept) {
  Spool::Options options = Options();
  options.free_bytes_min = UINT64_MAX;
  options.free_ratio_min = 1;
  Spool spool(options);
  ASSERT_TRUE(spool.Open(UINT64_MAX));
  EXPECT_FALSE(Append(&spool, 1));
  EXPECT_THAT(spool.trouble(), HasSubstr("the floor is"));
  EXPECT_TRUE(Files(path_).empty());
}

TEST_F(SpoolTest, AWriteThatFailsHalfWayLeavesWhatWasThere) {
  std::signal(SIGXFSZ, SIG_IGN);
  Spool spool(Options());
  ASSERT_TRUE(spool.Open(UINT64_MAX));
  for (uint64_t ordinal = 1; ordinal <= 4; ++ordinal) ASSERT_TRUE(Append(&spool, ordinal, 1000));
  struct rlimit before {};
  getrlimit(RLIMIT_FSIZE, &before);
  struct rlimit limit = before;
  limit.rlim_cur = 4800;  // The fifth message is written in part.
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
  EXPECT_FALSE(Append(&spool, 5, 1000));
  setrlimit(RLIMIT_FSIZE, &before);
  EXPECT_THAT(spool.trouble(), HasSubstr("File too large"));
  EXPECT_TRUE(spool.refuses()) << "a disk that failed is not tried again";
  EXPECT_EQ(ReadAll(&spool).size(), 4);
  Spool again(Options());
  ASSERT_TRUE(again.Open(UINT64_MAX));
  EXPECT_EQ(ReadAll(&again).size(), 4);
}

TEST_F(SpoolTest, MissingFolderIsReported) {
  Spool spool({.folder = folder_.path() + "/missing"});
  EXPECT_FALSE(spool.Open(UINT64_MAX));
  EXPECT_THAT(spool.trouble(), HasSubstr("missing: No such file"));
}

// ---- a window with a spool ----

class SpillTest : public SpoolTest {
 protected:
  SpillTest() { EXPECT_EQ(memory_.Create({.slot_count = 8, .values_max = 1 << 14}), 0); }

  void Take(Intake* intake, int64_t step) {
    if (ring_ == nullptr) ring_ = std::make_unique<RingProducer>(memory_);
    char* slot = ring_->Reserve();
    ASSERT_NE(slot, nullptr);
    auto* header = new (slot) SlotHeader{};
    header->kind = SlotKind::kFrame;
    header->block_count = 1;
    header->step = step;
    SlotBlocks(slot)[0] = {1, 0, 1, 0, 1000, 0};
    const std::string values = Body(static_cast<uint64_t>(step), 4000);
    std::memcpy(slot + SlotValuesOffset(1), values.data(), values.size());
    ring_->Commit();
    ASSERT_EQ(intake->Take(8), 1);
  }
  static int64_t StepOf(const Window::Message& message) {
    v1::ClientMessage parsed;
    EXPECT_TRUE(parsed.ParseFromArray(message.body.data(), static_cast<int>(message.body.size())));
    return parsed.frame().step();
  }
  // A window of 64 KiB: of frames of 4 KB, seven fit its lower half.
  static void Shrink(Window* window) {
    window->mutable_state()->window_bytes_max = 64 << 10;
    window->Commit();
  }

  SharedMemory memory_;
  std::unique_ptr<RingProducer> ring_;
};

TEST_F(SpillTest, MemoryAndDiskAreReadAsOneSequence) {
  Spool spool(Options());
  ASSERT_TRUE(spool.Open(0));
  Window window(&memory_);
  Shrink(&window);
  window.SetSpool(&spool);
  Intake intake(&memory_, &window);
  int64_t pushed = 0, read = 0;
  Window::Cursor cursor = window.Begin();
  Window::Message message;
  // Fills, drains a little, fills again: stretches in memory and on disk by turns.
  for (int round = 0; round < 30; ++round) {
    for (int i = 0; i < 20; ++i) Take(&intake, pushed++);
    for (int i = 0; i < (round % 5 == 4 ? 60 : 10); ++i) {
      if (!window.Read(&cursor, &message)) break;
      ASSERT_EQ(StepOf(message), read);
      window.FreeUpTo(static_cast<uint64_t>(++read));
      ASSERT_EQ(window.state().frames_durable, read);
    }
  }
  while (window.Read(&cursor, &message)) {
    ASSERT_EQ(StepOf(message), read);
    window.FreeUpTo(static_cast<uint64_t>(++read));
  }
  EXPECT_EQ(read, pushed);
  EXPECT_TRUE(window.empty());
  EXPECT_TRUE(spool.empty());
  const SenderState& state = window.state();
  EXPECT_EQ(state.frames_dropped, 0);
  EXPECT_EQ(state.frames_lost, 0);
  EXPECT_GT(state.frames_spooled, 300);
  EXPECT_LT(state.frames_spooled, pushed);
  EXPECT_EQ(memory_.header()->settled.load(), pushed);
}

TEST_F(SpillTest, ARestartedSenderReadsOnWhereTheLastCommitWas) {
  {
    Spool spool(Options());
    ASSERT_TRUE(spool.Open(0));
    Window window(&memory_);
    Shrink(&window);
    window.SetSpool(&spool);
    Intake intake(&memory_, &window);
    for (int64_t step = 0; step < 50; ++step) Take(&intake, step);
    window.FreeUpTo(20);
    // Killed in the middle of the next one: on disk, not committed.
    ASSERT_TRUE(window.Spill({"torn"}, 50));
  }
  Window window(&memory_);
  Spool spool(Options());
  ASSERT_TRUE(spool.Open(window.state().appended_ordinal));
  window.SetSpool(&spool);
  Intake intake(&memory_, &window);
  Take(&intake, 50);
  Window::Cursor cursor = window.Begin();
  Window::Message message;
  for (int64_t step = 20; step <= 50; ++step) {
    ASSERT_TRUE(window.Read(&cursor, &message));
    ASSERT_EQ(StepOf(message), step);
    ASSERT_EQ(message.ordinal, static_cast<uint64_t>(step) + 1);
  }
  EXPECT_FALSE(window.Read(&cursor, &message));
}

class LossTest : public SpillTest, public ::testing::WithParamInterface<bool> {};

TEST_P(LossTest, FramesLostByDiskAreCountedOnceAndSkipped) {
  const bool at_the_end = GetParam();
  Spool::Options options = Options();
  options.segment_bytes = 40'000;
  Spool spool(options);
  ASSERT_TRUE(spool.Open(0));
  Window window(&memory_);
  Shrink(&window);
  window.SetSpool(&spool);
  Intake intake(&memory_, &window);
  for (int64_t step = 0; step < 60; ++step) Take(&intake, step);
  const std::vector<std::string> files = Files(path_);
  ASSERT_GT(files.size(), 3);
  std::filesystem::resize_file(at_the_end ? files.back() : files[1], 100);
  for (int pass = 0; pass < 2; ++pass) {
    Window::Cursor cursor = window.Begin();
    Window::Message message;
    uint64_t given = 0;
    while (window.Read(&cursor, &message)) ++given;
    EXPECT_GT(window.state().frames_lost, 0);
    EXPECT_EQ(given + window.state().frames_lost, 60) << pass;
    EXPECT_EQ(window.state().frames_dropped, window.state().frames_lost);
  }
  // All that was given is acknowledged: nothing is waited for any more.
  window.FreeUpTo(at_the_end ? 60 - window.state().frames_lost : 60);
  EXPECT_TRUE(window.empty());
  const SharedHeader& header = *memory_.header();
  EXPECT_EQ(header.frames_acked + header.frames_dropped_window, 60);
}

INSTANTIATE_TEST_SUITE_P(InTheMiddleAndAtTheEnd, LossTest, ::testing::Bool());

TEST_F(SpillTest, BeyondTheCapFramesAreThinnedAndCounted) {
  Spool::Options options = Options();
  options.bytes_max = 100'000;
  Spool spool(options);
  ASSERT_TRUE(spool.Open(0));
  Window window(&memory_);
  Shrink(&window);
  window.SetSpool(&spool);
  Intake intake(&memory_, &window);
  for (int64_t step = 0; step < 500; ++step) Take(&intake, step);
  const SenderState& state = window.state();
  EXPECT_EQ(state.frames_admitted + state.frames_dropped, 500);
  EXPECT_GT(state.frames_dropped, 400);
  EXPECT_GT(window.used_bytes(), 48 << 10) << "the upper half of the memory is for what is thinned";
  Window::Cursor cursor = window.Begin();
  Window::Message message;
  uint64_t given = 0;
  int64_t last = -1;
  for (; window.Read(&cursor, &message); ++given) {
    EXPECT_GT(StepOf(message), last);
    last = StepOf(message);
  }
  EXPECT_EQ(given, state.frames_admitted);
}

// ---- the folder ----

class SpoolFolderTest : public SpoolTest {
 protected:
  SpoolFolderTest() {
    config_ = std::make_unique<SenderConfig>();
    config_->rank = 3;
    std::strcpy(config_->spool_dir, path_.c_str());
  }
  std::unique_ptr<SenderConfig> config_;
  std::string error_;
};

TEST_F(SpoolFolderTest, SpoolNumbersRiseAndLockedSpoolsAreBusy) {
  std::unique_ptr<SpoolFolder> first, second, taken;
  ASSERT_EQ(SpoolFolder::Make(*config_, &first, &error_), SpoolFolder::Result::kOk) << error_;
  ASSERT_EQ(SpoolFolder::Make(*config_, &second, &error_), SpoolFolder::Result::kOk) << error_;
  EXPECT_LT(first->number(), second->number());
  struct stat info {};
  ASSERT_EQ(stat(first->path().c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0700);
  EXPECT_THAT(SpoolFolder::Older(*config_, second->number()), ::testing::ElementsAre(first->number()));
  EXPECT_EQ(SpoolFolder::Take(*config_, first->number(), &taken, &error_), SpoolFolder::Result::kBusy);
  const uint64_t number = first->number();
  first.reset();
  EXPECT_EQ(SpoolFolder::Take(*config_, number, &taken, &error_), SpoolFolder::Result::kOk) << error_;
  taken->Remove();
  EXPECT_EQ(SpoolFolder::Take(*config_, number, &taken, &error_), SpoolFolder::Result::kError);
  EXPECT_EQ(error_, "");
  // Another rank's and another run's are none of this one's business.
  config_->rank = 4;
  EXPECT_TRUE(SpoolFolder::Older(*config_, UINT64_MAX).empty());
}

TEST_F(SpoolFolderTest, StateAndHelloComeBackAndDamageIsNoticed) {
  std::unique_ptr<SpoolFolder> folder;
  ASSERT_EQ(SpoolFolder::Make(*config_, &folder, &error_), SpoolFolder::Result::kOk) << error_;
  SenderState state{};
  EXPECT_FALSE(folder->LoadState(&state));
  state.freed_ordinal = 7;
  state.appended_ordinal = 9;
  state.seq_base = -3;
  state.seq_base_known = 1;
  state.frames_admitted = 8;
  ASSERT_TRUE(folder->SaveState(state));
  SenderState read{};
  ASSERT_TRUE(folder->LoadState(&read));
  EXPECT_EQ(read.freed_ordinal, 7);
  EXPECT_EQ(read.appended_ordinal, 9);
  EXPECT_EQ(read.seq_base, -3);
  EXPECT_EQ(read.seq_base_known, 1);
  EXPECT_EQ(read.frames_admitted, 8);
  v1::ClientMessage hello;
  hello.mutable_hello()->set_rank(3);
  EXPECT_FALSE(folder->LoadHello().has_value());
  ASSERT_TRUE(folder->SaveHello(hello));
  EXPECT_EQ(folder->LoadHello()->hello().rank(), 3);
  std::fstream file(folder->path() + "/state", std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(20);
  file.put('x');
  file.close();
  EXPECT_FALSE(folder->LoadState(&read));
  folder->DropState();
  EXPECT_FALSE(std::filesystem::exists(folder->path() + "/state"));
}

TEST_F(SpoolFolderTest, OnlyOldUnlockedSpoolsAreRemoved) {
  std::unique_ptr<SpoolFolder> own, locked;
  ASSERT_EQ(SpoolFolder::Make(*config_, &own, &error_), SpoolFolder::Result::kOk);
  config_->rank = 4;
  ASSERT_EQ(SpoolFolder::Make(*config_, &locked, &error_), SpoolFolder::Result::kOk);
  config_->rank = 3;
  const std::string uuid(32, 'a');
  for (const std::string& name : {uuid + "-0-1", uuid + "-0-2", uuid + "-x-1", std::string("precious")}) {
    mkdir((path_ + "/" + name).c_str(), 0700);
    std::ofstream(path_ + "/" + name + "/0000000000000001.spool") << "frames";
  }
  const auto age = [&](const std::string& path, int days) {
    const struct timespec when = {time(nullptr) - days * 86400, 0};
    const struct timespec times[2] = {when, when};
    ASSERT_EQ(utimensat(AT_FDCWD, path.c_str(), times, 0), 0);
  };
  for (const std::string& path : Files(path_)) age(path, 8);
  age(path_ + "/" + uuid + "-0-2", 6);
  EXPECT_EQ(SpoolFolder::RemoveForsaken(*config_), 1);
  EXPECT_THAT(Files(path_), ::testing::UnorderedElementsAre(own->path(), locked->path(), path_ + "/" + uuid + "-0-2",
                                                            path_ + "/" + uuid + "-x-1", path_ + "/precious"));
}

}  // namespace
}  // namespace bellwether::client
