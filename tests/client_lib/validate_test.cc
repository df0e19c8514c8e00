// Goal: the C ABI keeps the rules of client.h: wrong arguments change nothing and
// are named, limits hold at max and at max + 1, callers that know longer structs
// work, and before the first push nothing is started.
// Method: calls through the public header only; no server, no sender.

#include <dirent.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/client_lib/test_client.h"

namespace bellwether::client {
namespace {

using ::testing::HasSubstr;

// Expects INVALID_ARGUMENT from create, with `words` in the message.
void ExpectRefused(const bw_client_options& options, const std::string& words) {
  bw_client* client = reinterpret_cast<bw_client*>(1);
  EXPECT_EQ(bw_client_create(&options, &client), BW_INVALID_ARGUMENT) << words;
  EXPECT_EQ(client, nullptr);
  EXPECT_THAT(bw_last_error(), HasSubstr(words));
}

void ExpectAccepted(const bw_client_options& options) {
  bw_client* client = nullptr;
  EXPECT_EQ(bw_client_create(&options, &client), BW_OK) << bw_last_error();
  bw_client_destroy(client);
}

TEST(OptionsTest, EveryLimitAtMaxAndOneMore) {
  TestClientOptions test;
  test.server = "localhost:1";
  struct Case {
    uint32_t bw_client_options::*field;
    uint32_t max;
    const char* name;
  };
  for (const Case& c :
       {Case{&bw_client_options::layers, BW_LAYERS_MAX, "layers"},
        Case{&bw_client_options::heads, BW_HEADS_MAX, "heads"}, Case{&bw_client_options::world, BW_WORLD_MAX, "world"},
        Case{&bw_client_options::head_dim, 1024, "head_dim"},
        Case{&bw_client_options::experts, BW_EXPERTS_MAX, "experts"},
        Case{&bw_client_options::ring_frames, 4096, "ring_frames"}}) {
    bw_client_options options = Options(test);
    options.*c.field = c.max;
    ExpectAccepted(options);
    options.*c.field = c.max + 1;
    ExpectRefused(options, std::string(c.name) + " is " + std::to_string(c.max + 1));
  }
}

TEST(OptionsTest, NamesFieldValueAndRange) {
  TestClientOptions test;
  test.server = "localhost:1";
  const bw_client_options good = Options(test);
  ExpectAccepted(good);
  bw_client_options o = good;
  o.struct_size += 64;  // A newer header.
  ExpectAccepted(o);
  o.struct_size = offsetof(bw_client_options, ranks_agree);  // That of 1.0: what follows is not looked at.
  o.ranks_agree = 7;
  ExpectAccepted(o);
  o.struct_size -= 1;
  ExpectRefused(o, "struct_size");
  o = good, o.ranks_agree = 2;
  ExpectRefused(o, "ranks_agree is 2, must be 0..1");
  o = good, o.spool_dir = "spool";
  for (const uint64_t bytes : {uint64_t{0}, uint64_t{1} << 20, uint64_t{1} << 44}) {
    o.spool_bytes = bytes;
    ExpectAccepted(o);
  }
  o.spool_bytes = (1 << 20) - 1;
  ExpectRefused(o, "spool_bytes is 1048575, must be 0 or 1048576..17592186044416");
  o.spool_bytes = (uint64_t{1} << 44) + 1;
  ExpectRefused(o, "spool_bytes is 17592186044417");
  o.struct_size = offsetof(bw_client_options, spool_dir);  // That of 1.1.
  ExpectAccepted(o);
  o = good, o.launch_unix_ms = int64_t{1} << 53;
  ExpectAccepted(o);
  o.launch_unix_ms += 1;
  ExpectRefused(o, "launch_unix_ms is 9007199254740993, must be 0..9007199254740992");
  o.launch_unix_ms = -1;
  ExpectRefused(o, "launch_unix_ms is -1");
  o = good, o.attempt = 1 << 30, o.seq_len = 1 << 30, o.window = INT32_MAX;
  ExpectAccepted(o);
  o = good, o.attempt = (1 << 30) + 1;
  ExpectRefused(o, "attempt is 1073741825, must be 0..1073741824");
  o = good, o.seq_len = (1 << 30) + 1;
  ExpectRefused(o, "seq_len is 1073741825, must be 0..1073741824");
  o = good, o.window = uint32_t{INT32_MAX} + 1;
  ExpectRefused(o, "window is 2147483648, must be 0..2147483647");
  o = good, o.spool_dir = "";
  ExpectRefused(o, "spool_dir is empty");
  o = good, o.spool_dir = "spool", o.server = nullptr, o.record_path = "run.bwrun";
  ExpectRefused(o, "spool_dir is given and server is NULL");
  o = good, o.layers = 0;
  ExpectRefused(o, "layers is 0, must be 1..512");
  o = good, o.rank = 1;
  ExpectRefused(o, "rank is 1, must be 0..0");
  o = good, o.world = 4, o.reporters = 5;
  ExpectRefused(o, "reporters is 5, must be 1..4");
  o = good, o.kv_heads = 3;
  ExpectRefused(o, "kv_heads is 3, must divide heads, 8");
  o = good, o.ring_frames = 1;
  ExpectRefused(o, "ring_frames is 1");
  o = good, o.ring_frames = 4096, o.frame_values_max = 4'200'000;
  ExpectRefused(o, "ring_frames x frame_values_max");
  o = good, o.run = nullptr;
  ExpectRefused(o, "run is");
  o = good, o.run = "no spaces";
  ExpectRefused(o, "no spaces");
  const std::string longest(128, 'r'), too_long(129, 'r');
  o = good, o.run = longest.c_str();
  ExpectAccepted(o);
  o.run = too_long.c_str();
  ExpectRefused(o, "run is");
  o = good, o.run_uuid = "0123456789abcdef0123456789ABCDEF";
  ExpectAccepted(o);
  o.run_uuid = "0123456789abcdef0123456789abcdeg";
  ExpectRefused(o, "run_uuid");
  o = good, o.server = nullptr;
  ExpectRefused(o, "server and record_path");
  o.server = "nocolon";
  ExpectRefused(o, "host:port");
  o = good, o.tls_cert = "c";
  ExpectRefused(o, "tls_key is NULL");
  o.tls_key = "k";
  ExpectRefused(o, "tls_ca is NULL");
  o = good, o.token_file = "t";
  ExpectAccepted(o);
  o.server = "far.example:7070";
  ExpectRefused(o, "token_file needs tls_ca");
  o.tls_ca = "ca";
  ExpectAccepted(o);
  o = good, o.model = "bad\nname";
  ExpectRefused(o, "model has byte 0x0a at 3");
  o = good, o.framework = "\xc3(";
  ExpectRefused(o, "framework has byte 0xc3");
  o = good, o.weight_decay = NAN;
  ExpectRefused(o, "weight_decay");
  o = good, o.softcap = -1;
  ExpectRefused(o, "softcap is -1");
  o = good, o.causal = 2;
  ExpectRefused(o, "causal is 2, must be 0..1");
  o = good, o.actions_mask = 1u << 10;
  ExpectRefused(o, "actions_mask is 0x400");
}

class FrameTest : public ::testing::Test {
 protected:
  bw_status Push() { return bw_client_push(client_.get(), &frame_); }
  void ExpectRefused(const std::string& words) {
    EXPECT_EQ(Push(), BW_INVALID_ARGUMENT) << words;
    EXPECT_THAT(bw_last_error(), HasSubstr(words));
    const bw_counters counters = client_.Counters();
    EXPECT_EQ(counters.frames_queued + counters.frames_dropped_ring, queued_);
  }
  void ExpectAccepted() {
    EXPECT_EQ(Push(), BW_OK) << bw_last_error();
    ++queued_;
  }

  TestClient client_{TestClientOptions{.server = "localhost:1"}};
  std::vector<float> values_ = std::vector<float>(512, 1.0f);
  bw_block block_{.signal = bw_signal_by_name("rows"), .layer_count = 1, .head_count = 1, .values = values_.data()};
  bw_frame frame_{.struct_size = sizeof(frame_), .block_count = 1, .blocks = &block_};
  uint64_t queued_ = 0;
};

TEST_F(FrameTest, RangesAreThoseOfTheLayout) {
  block_.layer_begin = 3;
  block_.head_begin = 7;
  ExpectAccepted();
  block_.layer_count = 2;
  ExpectRefused("blocks[0] covers layers 3 + 2, must lie within 0..3");
  block_.layer_begin = std::numeric_limits<uint32_t>::max();  // Wraps to 1.
  ExpectRefused("layers 4294967295 + 2");
  block_.layer_begin = 0;
  block_.head_count = 2;
  ExpectRefused("blocks[0] covers heads 7 + 2, must lie within 0..7");
  block_.head_count = 0;
  ExpectRefused("heads 7 + 0");
  // Signals of key heads know two heads here, signals of the run one.
  block_ = {.signal = bw_signal_by_name("key_leak_sum"), .layer_count = 4, .head_count = 2, .values = values_.data()};
  ExpectAccepted();
  block_.head_count = 3;
  ExpectRefused("within 0..1");
  block_ = {.signal = bw_signal_by_name("loss"), .layer_count = 1, .head_count = 1, .values = values_.data()};
  ExpectAccepted();
  block_.layer_begin = 1;
  ExpectRefused("within 0..0");
}

TEST_F(FrameTest, SignalsAreMeasuredOnesOfTheCatalogue) {
  block_.signal = 0;
  ExpectRefused("blocks[0].signal is 0");
  block_.signal = 64;  // Derived.
  ExpectRefused("blocks[0].signal is 64");
  block_.signal = 4'000'000'000;
  ExpectRefused("blocks[0].signal is 4000000000");
}

TEST_F(FrameTest, EveryFieldOfAFrameIsChecked) {
  frame_.struct_size = sizeof(frame_) + 8;
  ExpectAccepted();
  frame_.struct_size = offsetof(bw_frame, own_count);  // That of 1.0.
  block_.layer_count = 1;
  ExpectAccepted();
  frame_.struct_size -= 1;
  ExpectRefused("frame.struct_size");
  frame_.struct_size = sizeof(frame_);
  frame_.step = -1;
  ExpectRefused("frame.step is -1");
  frame_.step = (int64_t{1} << 53) + 1;  // A replay takes no more.
  ExpectRefused("frame.step is 9007199254740993, must be 0..9007199254740992");
  frame_.step = 0;
  frame_.reserved = 1;
  ExpectRefused("frame.reserved is 1");
  frame_.reserved = 0;
  frame_.partial_rows = 2;
  ExpectRefused("frame.partial_rows is 2");
  frame_.partial_rows = 0;
  frame_.time_unix_ns = -5;
  ExpectRefused("frame.time_unix_ns is -5");
  frame_.time_unix_ns = 0;
  block_.reserved = 9;
  ExpectRefused("blocks[0].reserved is 9");
  block_.reserved = 0;
  block_.values = nullptr;
  ExpectRefused("blocks[0].values is NULL");
  frame_.blocks = nullptr;
  ExpectRefused("frame.blocks is NULL");
}

TEST_F(FrameTest, AcceptsMostBlocksAndRefusesOneMore) {
  const std::vector<bw_block> blocks(BW_BLOCKS_MAX + 1, block_);
  frame_.blocks = blocks.data();
  frame_.block_count = BW_BLOCKS_MAX;
  ExpectAccepted();
  frame_.block_count = BW_BLOCKS_MAX + 1;
  ExpectRefused("frame.block_count is 257, must be 1..256");
}

TEST(FrameValuesTest, AcceptsMostValuesAndRefusesOneMore) {
  TestClientOptions test;
  test.server = "localhost:1";
  bw_client_options options = Options(test);
  options.frame_values_max = 16;
  bw_client* client = nullptr;
  ASSERT_EQ(bw_client_create(&options, &client), BW_OK);
  const std::vector<float> values(24);
  bw_block block{.signal = bw_signal_by_name("rows"), .layer_count = 2, .head_count = 8, .values = values.data()};
  bw_frame frame{.struct_size = sizeof(frame), .block_count = 1, .blocks = &block};
  EXPECT_EQ(bw_client_push(client, &frame), BW_OK);
  block.layer_count = 3;
  EXPECT_EQ(bw_client_push(client, &frame), BW_INVALID_ARGUMENT);
  EXPECT_THAT(bw_last_error(), HasSubstr("24 values, must have at most frame_values_max, 16"));
  bw_client_destroy(client);
}

class OwnTest : public FrameTest {
 protected:
  OwnTest() { frame_.own_count = 1, frame_.own = &own_; }

  const std::vector<float> values_ = std::vector<float>(BW_OWN_VALUES_MAX + 1, 1.5f);
  bw_own_values own_{.name = "train/kl",
                     .unit = "nats",
                     .granularity = 1,
                     .merge = 3,
                     .count = 1,
                     .limits = 3,
                     .low = 0,
                     .high = 10,
                     .values = values_.data()};
};

TEST_F(OwnTest, EachFieldHasItsRange) {
  ExpectAccepted();
  const bw_own_values good = own_;
  const auto refused = [&](const char* words) {
    ExpectRefused(words);
    own_ = good;
  };
  own_.name = "KL";
  refused("own[0].name is \"KL\", must match [a-z][a-z0-9_./-]{0,63}");
  own_.name = nullptr;
  refused("own[0].name is \"\"");
  own_.name = "drift_ratio";
  refused("which is a signal of the catalogue");
  own_.granularity = 7;
  refused("own[0].granularity is 7, must be 1 run");
  own_.merge = 4;
  refused("own[0].merge is 4, must be 1..3");
  own_.count = 2;
  refused("own[0].count is 2, must be 1..1");
  own_.layer = 1;
  refused("own[0].layer is 1, must be 0..0");
  own_.granularity = 5, own_.count = 1024, own_.head = 3073;
  refused("own[0].head is 3073, must be 0..3072");
  own_.granularity = 5, own_.count = 1025;
  refused("own[0].count is 1025, must be 1..1024");
  own_.granularity = 4, own_.layer = UINT32_MAX;
  refused("own[0].layer is 4294967295, must be 0..511");
  own_.granularity = 6, own_.layer = 4096;
  refused("own[0].layer is 4096");
  own_.low = std::numeric_limits<double>::quiet_NaN();
  refused("low and high must be finite");
  own_.low = 10.5;
  refused("own[0].low is 10.5, must be at most own[0].high, which is 10");
  own_.low = 10.5, own_.limits = 1;
  ExpectAccepted();
  own_ = good, own_.low = 10;
  ExpectAccepted();
  own_ = good;
  own_.values = nullptr;
  refused("own[0].values is NULL");
  own_.unit = "twenty-seven letters and more";
  ExpectAccepted();
  own_.unit = "thirty-three letters and one more";
  refused("own[0].unit is longer than 32 bytes");
  own_.low = std::numeric_limits<double>::quiet_NaN(), own_.limits = 2;
  ExpectAccepted();
  own_ = good;
  frame_.own_count = BW_OWN_MAX + 1;
  refused("frame.own_count is 513, must be 0..512");
  frame_.own_count = 1, frame_.own = nullptr;
  refused("frame.own is NULL and own_count is 1");
}

class NamesTest : public FrameTest {
 protected:
  static constexpr uint32_t kTensor = 7, kModule = 8;

  bw_status Name(uint32_t granularity, uint32_t first, const std::vector<std::string>& names) {
    std::vector<const char*> raw;
    raw.reserve(names.size() + 1);  // NULL is refused as such.
    for (const std::string& name : names) raw.push_back(name.c_str());
    return bw_client_push_names(client_.get(), granularity, first, static_cast<uint32_t>(raw.size()), raw.data());
  }
  // Nothing of it is queued: a row that it would name has no values.
  void ExpectNoNames(uint32_t granularity, uint32_t first, const std::vector<std::string>& names,
                     const std::string& words) {
    EXPECT_EQ(Name(granularity, first, names), BW_INVALID_ARGUMENT) << words;
    EXPECT_THAT(bw_last_error(), HasSubstr(words));
    EXPECT_EQ(client_.Counters().frames_queued, queued_);
  }
  void ExpectNames(uint32_t granularity, uint32_t first, const std::vector<std::string>& names) {
    EXPECT_EQ(Name(granularity, first, names), BW_OK) << bw_last_error();
    ++queued_;
  }
};

TEST_F(NamesTest, EachIsCheckedAndNamesItsRange) {
  ExpectNoNames(2, 0, {"a"}, "granularity is 2, must be 7..8");
  ExpectNoNames(kTensor, 0, {}, "count is 0, must be 1..16384");
  ExpectNoNames(kTensor, 1, {"a"}, "first is 1, must be 0..0");
  ExpectNoNames(kTensor, 0, {"a", ""}, "names[1] is empty, must have 1..256 bytes");
  ExpectNoNames(kTensor, 0, {"a", std::string(257, 'x')}, "names[1] is longer than 256 bytes");
  ExpectNoNames(kTensor, 0, {"a\nb"}, "names[0] has byte 0x0a at 1, must be UTF-8 without control characters");
  ExpectNoNames(kTensor, 0, {"ab\xff"}, "names[0] has byte 0xff at 2");
  ExpectNoNames(kTensor, 0, {"b", "a", "c", "a"}, "names[3] is \"a\" as names[1] is, each must be another");
  const char* none = nullptr;
  EXPECT_EQ(bw_client_push_names(client_.get(), kTensor, 0, 1, &none), BW_INVALID_ARGUMENT);
  EXPECT_THAT(bw_last_error(), HasSubstr("names[0] is empty"));
  EXPECT_EQ(bw_client_push_names(client_.get(), kTensor, 0, 1, nullptr), BW_INVALID_ARGUMENT);
  EXPECT_THAT(bw_last_error(), HasSubstr("names is NULL"));
  EXPECT_EQ(bw_client_push_names(nullptr, kTensor, 0, 1, &none), BW_INVALID_ARGUMENT);
  ExpectNames(kTensor, 0, {std::string(256, 'x'), "größe"});
}

TEST_F(NamesTest, TheMostFitAndOneMoreDoesNot) {
  std::vector<std::string> names;
  for (int i = 0; i < BW_NAMED_ROWS_MAX; ++i) names.push_back(std::to_string(100000 + i));
  ExpectNames(kModule, 0, names);
  ExpectNoNames(kModule, BW_NAMED_ROWS_MAX, {"more"}, "first is 16384, must be 0..16383");
  names.push_back("more");
  ExpectNoNames(kModule, 0, names, "count is 16385, must be 1..16384");
  names.clear();
  for (int i = 0; i < 1025; ++i) names.push_back(std::string(251, 'x') + std::to_string(1000 + i));
  ExpectNoNames(kTensor, 0, names, "names have 262400 bytes together, must have at most 262144");
  names.pop_back();
  ExpectNames(kTensor, 0, names);
}

TEST_F(NamesTest, FramesHaveValuesOfNamedRowsOnly) {
  block_ = {
      .signal = bw_signal_by_name("replica_sum_low"), .layer_count = 1, .head_count = 1, .values = values_.data()};
  ExpectRefused("of which this client has no rows");
  ExpectNames(kModule, 0, {"a", "b"});
  ExpectRefused("of which this client has no rows");
  ExpectNames(kTensor, 0, {"a", "b"});
  block_.layer_count = 2;
  ExpectAccepted();
  block_.layer_begin = 1;
  ExpectRefused("blocks[0] covers layers 1 + 2, must lie within 0..1");
  ExpectNoNames(kTensor, 3, {"d"}, "first is 3, must be 0..2");
  ExpectNames(kTensor, 1, {"b", "c"});  // What may not have arrived is said again.
  ExpectAccepted();
}

TEST_F(FrameTest, EventsSpectraAndResultsAreChecked) {
  const std::string text(257, 'x');
  bw_client* c = client_.get();
  EXPECT_EQ(bw_client_push_event(c, 0, 0, 0, nullptr), BW_INVALID_ARGUMENT);
  EXPECT_EQ(bw_client_push_event(c, 0, 14, 0, nullptr), BW_INVALID_ARGUMENT);
  EXPECT_EQ(bw_client_push_event(c, -1, 1, 0, nullptr), BW_INVALID_ARGUMENT);
  EXPECT_EQ(bw_client_push_event(c, 0, 1, 0, text.c_str()), BW_INVALID_ARGUMENT);
  EXPECT_EQ(bw_client_push_event(c, 0, 1, 0, text.c_str() + 1), BW_OK);
  EXPECT_EQ(bw_client_push_event(c, 0, 1, 0, "tab\t"), BW_INVALID_ARGUMENT);
  const std::vector<float> gram(512 * 513 / 2);
  EXPECT_EQ(bw_client_push_spectrum(c, 0, 3, 7, 1, 512, 1, gram.data()), BW_OK);
  EXPECT_EQ(bw_client_push_spectrum(c, 0, 3, 7, 1, 513, 1, gram.data()), BW_INVALID_ARGUMENT);
  EXPECT_THAT(bw_last_error(), HasSubstr("n is 513, must be 1..512"));
  EXPECT_EQ(bw_client_push_spectrum(c, 0, 4, 7, 1, 2, 1, gram.data()), BW_INVALID_ARGUMENT);
  EXPECT_EQ(bw_client_push_spectrum(c, 0, 3, 8, 1, 2, 1, gram.data()), BW_INVALID_ARGUMENT);
  EXPECT_EQ(bw_client_push_spectrum(c, 0, 3, 7, 4, 2, 1, gram.data()), BW_INVALID_ARGUMENT);
  EXPECT_EQ(bw_client_push_spectrum(c, 0, 3, 7, 1, 2, NAN, gram.data()), BW_INVALID_ARGUMENT);
  EXPECT_EQ(bw_client_push_spectrum(c, 0, 3, 7, 1, 2, 1, nullptr), BW_INVALID_ARGUMENT);
  EXPECT_EQ(bw_client_push_action_result(c, "", 0, 1, nullptr), BW_INVALID_ARGUMENT);
  EXPECT_EQ(bw_client_push_action_result(c, "a", 0, 2, nullptr), BW_INVALID_ARGUMENT);
  EXPECT_EQ(bw_client_push_action_result(c, "a", 0, 1, nullptr), BW_OK);
}

TEST(ClientTest, NullIsAnErrorNotACrash) {
  EXPECT_EQ(bw_client_create(nullptr, nullptr), BW_INVALID_ARGUMENT);
  EXPECT_EQ(bw_client_push(nullptr, nullptr), BW_INVALID_ARGUMENT);
  EXPECT_EQ(bw_client_push_event(nullptr, 0, 1, 0, nullptr), BW_INVALID_ARGUMENT);
  EXPECT_EQ(bw_client_poll(nullptr, nullptr), BW_INVALID_ARGUMENT);
  EXPECT_EQ(bw_client_get_counters(nullptr, nullptr), BW_INVALID_ARGUMENT);
  EXPECT_EQ(bw_client_flush(nullptr, 0), BW_INVALID_ARGUMENT);
  bw_client_destroy(nullptr);
}

size_t Threads() {
  size_t count = 0;
  DIR* tasks = opendir("/proc/self/task");
  while (readdir(tasks) != nullptr) ++count;
  closedir(tasks);
  return count;
}

TEST(ClientTest, NothingStartsBeforeTheFirstPush) {
  const size_t before = Threads();
  TestClient client({.server = "localhost:1"});
  EXPECT_EQ(client.Flush(0), BW_OK);
  EXPECT_EQ(client.Counters().link, BW_LINK_IDLE);
  EXPECT_EQ(client.Counters().sender_pid, 0);
  EXPECT_EQ(Threads(), before);
}

TEST(ClientTest, CountersOfAnOlderHeaderAreNotWrittenBeyond) {
  TestClient client({.server = "localhost:1"});
  bw_counters counters;
  std::memset(&counters, 0x5a, sizeof(counters));
  counters.struct_size = offsetof(bw_counters, frames_spooled);  // That of 1.1.
  ASSERT_EQ(bw_client_get_counters(client.get(), &counters), BW_OK) << bw_last_error();
  EXPECT_EQ(counters.frames_queued, 0);
  EXPECT_EQ(counters.struct_size, offsetof(bw_counters, frames_spooled));
  EXPECT_EQ(counters.spool_bytes, 0x5a5a5a5a5a5a5a5a);
  counters.struct_size = offsetof(bw_counters, frames_stripped);  // That of 1.2.
  ASSERT_EQ(bw_client_get_counters(client.get(), &counters), BW_OK) << bw_last_error();
  EXPECT_EQ(counters.spool_bytes, 0);
  EXPECT_EQ(counters.frames_stripped, 0x5a5a5a5a5a5a5a5a);
  counters.struct_size = sizeof(counters);
  ASSERT_EQ(bw_client_get_counters(client.get(), &counters), BW_OK) << bw_last_error();
  EXPECT_EQ(counters.frames_stripped, 0);
  counters.struct_size = offsetof(bw_counters, frames_spooled) - 1;
  EXPECT_EQ(bw_client_get_counters(client.get(), &counters), BW_INVALID_ARGUMENT);
}

TEST(CatalogueTest, ListsEverySignalByRisingId) {
  bw_signal_info info{};
  info.struct_size = sizeof(info);
  uint32_t last = 0, count = 0;
  for (; bw_signal_at(count, &info) == BW_OK; ++count) {
    EXPECT_GT(info.id, last);
    last = info.id;
    EXPECT_EQ(bw_signal_by_name(info.name), info.merge == 0 ? 0 : info.id) << info.name;
  }
  EXPECT_GT(count, 30);
  EXPECT_EQ(bw_signal_by_name("no_such_signal"), 0);
  EXPECT_EQ(bw_signal_by_name(nullptr), 0);
  EXPECT_EQ(bw_abi_version() >> 16, BW_API_VERSION_MAJOR);
}

}  // namespace
}  // namespace bellwether::client
