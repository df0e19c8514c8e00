// Goal: whatever a client can get wrong is refused before anything is allocated
// for it, with the field, its value and the legal range in the words; and what
// is right arrives bit for bit.
// Method: a valid message of each kind, then each field at its limit and one
// beyond it.

#include "server/ingest/decode.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <functional>
#include <limits>
#include <memory>
#include <string>

#include "server/ingest/log_records.h"
#include "server/model/row_names.h"

namespace bellwether::server {
namespace {

using testing::AllOf;
using testing::HasSubstr;

constexpr Layout kLayout{4, 8, 2, 64, 1024};

v1::ClientMessage ValidHello() {
  v1::ClientMessage message;
  v1::Hello* hello = message.mutable_hello();
  hello->set_protocol(kProtocolVersion);
  hello->set_rank(1);
  v1::RunDescription* run = hello->mutable_run();
  run->set_name("gpt/seed-4");
  run->set_uuid(std::string(16, '\7'));
  run->set_world(2);
  run->set_reporters(2);
  run->mutable_layout()->set_layers(4);
  run->mutable_layout()->set_heads(8);
  run->mutable_layout()->set_kv_heads(2);
  return message;
}

v1::ClientMessage ValidFrame() {
  v1::ClientMessage message;
  message.set_seq(1);
  v1::Frame* frame = message.mutable_frame();
  frame->set_step(10);
  frame->set_parts(1);
  v1::Block* block = frame->add_blocks();
  block->set_signal(v1::SIGNAL_WQ_SIGMA);
  block->set_layer_begin(1);
  block->set_layer_count(3);
  block->set_head_begin(2);
  block->set_head_count(2);
  for (int i = 0; i < 6; ++i) block->add_values(static_cast<float>(i));
  return message;
}

std::string Refusal(const v1::ClientMessage& message, const Layout* layout) {
  const auto decoded = Decode(message, layout, {});
  EXPECT_FALSE(decoded.ok());
  EXPECT_EQ(decoded.status().code(), absl::StatusCode::kInvalidArgument);
  return std::string(decoded.status().message());
}

TEST(DecodeTest, AHelloArrivesWhole) {
  const auto decoded = Decode(ValidHello(), nullptr, {});
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  const auto& hello = std::get<HelloMessage>(decoded->body);
  EXPECT_EQ(hello.run.name, "gpt/seed-4");
  EXPECT_EQ(hello.run.layout.kv_heads, 2);
  EXPECT_EQ(hello.rank, 1u);
}

TEST(DecodeTest, EachFieldOfAHelloHasItsRange) {
  using Change = std::function<void(v1::Hello*)>;
  const std::pair<Change, const char*> wrong[] = {
      {[](v1::Hello* h) { h->mutable_run()->set_name(""); }, "hello.run.name"},
      {[](v1::Hello* h) { h->mutable_run()->set_name(std::string(129, 'a')); }, "hello.run.name"},
      {[](v1::Hello* h) { h->mutable_run()->set_name("a b"); }, "hello.run.name"},
      {[](v1::Hello* h) { h->mutable_run()->set_uuid("short"); }, "16 bytes"},
      {[](v1::Hello* h) { h->mutable_run()->set_world(0); }, "hello.run.world = 0: must be in [1, 4096]"},
      {[](v1::Hello* h) { h->mutable_run()->set_world(4097); }, "hello.run.world = 4097"},
      {[](v1::Hello* h) { h->mutable_run()->set_reporters(3); }, "hello.run.reporters = 3: must be in [1, 2]"},
      {[](v1::Hello* h) { h->mutable_run()->mutable_layout()->set_experts(4097); },
       "experts = 4097: must be in [0, 4096]"},
      {[](v1::Hello* h) { h->mutable_run()->mutable_layout()->set_ranks(4097); }, "ranks = 4097: must be in [0, 4096]"},
      {[](v1::Hello* h) { h->set_rank(2); }, "hello.rank = 2: must be in [0, 1]"},
      {[](v1::Hello* h) { h->mutable_run()->mutable_layout()->set_layers(513); }, "layers = 513: must be in [1, 512]"},
      {[](v1::Hello* h) { h->mutable_run()->mutable_layout()->set_layers(1000000); }, "layers = 1000000"},
      {[](v1::Hello* h) { h->mutable_run()->mutable_layout()->set_heads(1025); }, "heads = 1025: must be in [1, 1024]"},
      {[](v1::Hello* h) { h->mutable_run()->mutable_layout()->set_kv_heads(3); }, "a divisor of heads = 8"},
      {[](v1::Hello* h) { h->mutable_run()->set_framework(std::string(65, 'a')); }, "hello.run.framework is 65 bytes"},
      {[](v1::Hello* h) { h->mutable_run()->set_model("a\nb"); }, "control character 10"},
      {[](v1::Hello* h) { h->mutable_run()->set_launch_unix_ms(-1); }, "hello.run.launch_unix_ms = -1: must be in [0,"},
      {[](v1::Hello* h) {
         for (int i = 0; i < 17; ++i) (*h->mutable_run()->mutable_labels())[std::to_string(i)] = std::string(1, 'x');
       },
       "at most 16"},
  };
  for (const auto& [change, words] : wrong) {
    v1::ClientMessage message = ValidHello();
    change(message.mutable_hello());
    EXPECT_THAT(Refusal(message, nullptr), HasSubstr(words));
  }
}

TEST(DecodeTest, LimitsAreLegal) {
  v1::ClientMessage message = ValidHello();
  v1::RunDescription* run = message.mutable_hello()->mutable_run();
  run->set_world(4096);
  run->set_reporters(4096);
  run->mutable_layout()->set_layers(512);
  run->mutable_layout()->set_heads(1024);
  run->mutable_layout()->set_kv_heads(1024);
  run->set_name(std::string(128, 'a'));
  EXPECT_TRUE(Decode(message, nullptr, {}).ok());
}

TEST(DecodeTest, AnotherProtocolIsAFailedPrecondition) {
  v1::ClientMessage message = ValidHello();
  message.mutable_hello()->set_protocol(2);
  EXPECT_EQ(Decode(message, nullptr, {}).status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST(DecodeTest, TheFirstMessageMustBeAHelloAndOnlyIt) {
  EXPECT_EQ(Decode(ValidFrame(), nullptr, {}).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(Refusal(ValidHello(), &kLayout), HasSubstr("only the first message"));
}

TEST(DecodeTest, EveryBitOfAValueArrives) {
  v1::ClientMessage message = ValidFrame();
  auto* values = message.mutable_frame()->mutable_blocks(0)->mutable_values();
  const float odd[] = {std::numeric_limits<float>::quiet_NaN(),
                       std::numeric_limits<float>::infinity(),
                       -0.0f,
                       std::numeric_limits<float>::denorm_min(),
                       1e38f,
                       std::bit_cast<float>(0xffc12345u)};
  for (int i = 0; i < 6; ++i) values->Set(i, odd[i]);
  const auto decoded = Decode(message, &kLayout, {});
  ASSERT_TRUE(decoded.ok());
  const auto& frame = std::get<RankFrame>(decoded->body);
  for (size_t i = 0; i < 6; ++i) {
    EXPECT_EQ(std::bit_cast<uint32_t>(frame.values[i]), std::bit_cast<uint32_t>(odd[i]));
  }
}

TEST(DecodeTest, LossCountersArriveAndAreZeroFromOlderClients) {
  v1::ClientMessage hello = ValidHello(), frame = ValidFrame(), heartbeat;
  const auto stripped = [&] {
    const auto decoded_hello = Decode(hello, nullptr, {}), decoded_frame = Decode(frame, &kLayout, {}),
               decoded_heartbeat = Decode(heartbeat, &kLayout, {});
    EXPECT_TRUE(decoded_hello.ok() && decoded_frame.ok() && decoded_heartbeat.ok());
    return std::vector<uint64_t>{std::get<HelloMessage>(decoded_hello->body).stripped_total,
                                 std::get<RankFrame>(decoded_frame->body).stripped_total,
                                 std::get<HeartbeatMessage>(decoded_heartbeat->body).stripped_total};
  };
  heartbeat.mutable_heartbeat();
  EXPECT_THAT(stripped(), testing::ElementsAre(0, 0, 0));
  hello.mutable_hello()->set_stripped_total(5);
  frame.mutable_frame()->set_stripped_total(6);
  frame.mutable_frame()->set_dropped_ring_total(10);
  frame.mutable_frame()->set_dropped_window_total(20);
  heartbeat.mutable_heartbeat()->set_stripped_total(7);
  EXPECT_THAT(stripped(), testing::ElementsAre(5, 6, 7));
  EXPECT_EQ(std::get<RankFrame>(Decode(frame, &kLayout, {})->body).dropped_total, 30u);
}

TEST(DecodeTest, LossCountersBeyondTheirRangeAreRefused) {
  constexpr uint64_t kMax = uint64_t{1} << 53;
  using Change = std::function<void(v1::ClientMessage*, uint64_t)>;
  const std::pair<Change, const char*> fields[] = {
      {[](v1::ClientMessage* m, uint64_t n) { m->mutable_hello()->set_dropped_total(n); }, "hello.dropped_total"},
      {[](v1::ClientMessage* m, uint64_t n) { m->mutable_hello()->set_stripped_total(n); }, "hello.stripped_total"},
      {[](v1::ClientMessage* m, uint64_t n) { m->mutable_frame()->set_dropped_ring_total(n); },
       "frame.dropped_ring_total"},
      {[](v1::ClientMessage* m, uint64_t n) { m->mutable_frame()->set_dropped_window_total(n); },
       "frame.dropped_window_total"},
      {[](v1::ClientMessage* m, uint64_t n) { m->mutable_frame()->set_stripped_total(n); }, "frame.stripped_total"},
      {[](v1::ClientMessage* m, uint64_t n) { m->mutable_heartbeat()->set_dropped_total(n); },
       "heartbeat.dropped_total"},
      {[](v1::ClientMessage* m, uint64_t n) { m->mutable_heartbeat()->set_stripped_total(n); },
       "heartbeat.stripped_total"},
  };
  for (const auto& [change, name] : fields) {
    const std::string field = name;
    const bool is_hello = field.starts_with("hello");
    v1::ClientMessage message = is_hello ? ValidHello() : ValidFrame();
    if (field.starts_with("heartbeat")) message.clear_seq();
    change(&message, kMax);
    EXPECT_TRUE(Decode(message, is_hello ? nullptr : &kLayout, {}).ok()) << field;
    change(&message, kMax + 1);
    EXPECT_THAT(Refusal(message, is_hello ? nullptr : &kLayout),
                HasSubstr(field + " = 9007199254740993: must be in [0, 9007199254740992]"));
  }
}

TEST(DecodeTest, LoggedMessagesAreReadBeyondTodaysLimits) {
  v1::ClientMessage frame = ValidFrame();
  frame.mutable_frame()->set_dropped_ring_total(UINT64_MAX);
  frame.mutable_frame()->set_dropped_window_total(UINT64_MAX);
  WalRecord record;
  record.kind = WalKind::kMessage;
  record.payload = frame.SerializeAsString();
  const auto decoded = DecodeRecord(record, &kLayout, {});
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  EXPECT_EQ(std::get<RankFrame>(decoded->body).dropped_total, UINT64_MAX) << "a sum does not wrap";
}

TEST(DecodeTest, EachFieldOfAFrameHasItsRange) {
  using Change = std::function<void(v1::Frame*)>;
  const std::pair<Change, const char*> wrong[] = {
      {[](v1::Frame* f) { f->set_step(-1); }, "frame.step = -1"},
      {[](v1::Frame* f) { f->set_parts(0); }, "frame.parts = 0: must be in [1, 1024]"},
      {[](v1::Frame* f) { f->set_part(1); }, "frame.part = 1: must be in [0, 0]"},
      {[](v1::Frame* f) { f->clear_blocks(); }, "number of frame.blocks = 0"},
      {[](v1::Frame* f) {
         for (int i = 0; i < 128; ++i) *f->add_blocks() = f->blocks(0);
       },
       "number of frame.blocks = 129: must be in [1, 128]"},
      {[](v1::Frame* f) { f->mutable_blocks(0)->set_signal(static_cast<v1::Signal>(0)); }, "blocks[0].signal = 0"},
      {[](v1::Frame* f) { f->mutable_blocks(0)->set_signal(static_cast<v1::Signal>(-7)); }, "blocks[0].signal = -7"},
      {[](v1::Frame* f) { f->mutable_blocks(0)->set_signal(v1::SIGNAL_DRIFT_RATIO); }, "a measured signal"},
      {[](v1::Frame* f) { f->mutable_blocks(0)->set_layer_begin(2); }, "layer_begin = 2: must be in [0, 1]"},
      {[](v1::Frame* f) { f->mutable_blocks(0)->set_layer_count(4000000000u); }, "layer_count = 4000000000"},
      {[](v1::Frame* f) { f->mutable_blocks(0)->set_head_begin(7); }, "head_begin = 7: must be in [0, 6]"},
      {[](v1::Frame* f) { f->mutable_blocks(0)->set_signal(v1::SIGNAL_WK_SIGMA); },
       "head_begin = 2: must be in [0, 0]"},
      {[](v1::Frame* f) { f->mutable_blocks(0)->add_values(1); }, "values = 7: must be layer_count * head_count = 6"},
  };
  for (const auto& [change, words] : wrong) {
    v1::ClientMessage message = ValidFrame();
    change(message.mutable_frame());
    EXPECT_THAT(Refusal(message, &kLayout), HasSubstr(words));
  }
}

TEST(DecodeTest, SignalsOfNewerClientsAreLeftOutAndCounted) {
  v1::ClientMessage message = ValidFrame();
  v1::Frame* const frame = message.mutable_frame();
  v1::Block newer;
  // One is a known signal's number in 16 bits.
  for (const int number : {39, 65536 + static_cast<int>(v1::SIGNAL_WQ_SIGMA)}) {
    newer.set_signal(static_cast<v1::Signal>(number));
    newer.set_layer_count(4000000000u);  // Of a shape that is not known either.
    newer.add_values(7);
    *frame->add_blocks() = newer;
  }
  frame->mutable_blocks()->SwapElements(0, 1);
  *frame->add_blocks() = frame->blocks(1);
  const auto decoded = Decode(message, &kLayout, {});
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  const auto& plain = std::get<RankFrame>(decoded->body);
  EXPECT_THAT(plain.unknown_signals, testing::ElementsAre(39, 65536 + static_cast<int>(v1::SIGNAL_WQ_SIGMA)));
  EXPECT_EQ(plain.unknown_values, 3u);
  ASSERT_EQ(plain.blocks.size(), 2u);
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(plain.blocks[i].signal, SignalId::kWqSigma);
    EXPECT_EQ(plain.blocks[i].offset, 6 * i);
    for (size_t k = 0; k < 6; ++k) EXPECT_EQ(plain.values[6 * i + k], static_cast<float>(k));
  }
  // Nothing else may be in it.
  frame->clear_blocks();
  *frame->add_blocks() = newer;
  const auto nothing = Decode(message, &kLayout, {});
  ASSERT_TRUE(nothing.ok()) << nothing.status();
  EXPECT_TRUE(std::get<RankFrame>(nothing->body).blocks.empty());
}

v1::ClientMessage ValidNames() {
  v1::ClientMessage message;
  message.set_seq(1);
  v1::Names* names = message.mutable_names();
  names->set_attempt(2);
  names->set_granularity(v1::GRANULARITY_TENSOR);
  names->set_first(5);
  names->add_names("model.embed_tokens.weight");
  names->add_names("gewichte.größe");
  return message;
}

TEST(DecodeTest, NamesArriveWholeAndAtTheirLimits) {
  const auto decoded = Decode(ValidNames(), &kLayout, {});
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  const auto& names = std::get<NamesMessage>(decoded->body);
  EXPECT_EQ(names.attempt, 2u);
  EXPECT_EQ(names.granularity, Granularity::kTensor);
  EXPECT_EQ(names.first, 5);
  EXPECT_THAT(names.names, testing::ElementsAre("model.embed_tokens.weight", "gewichte.größe"));
  v1::ClientMessage most = ValidNames();
  most.mutable_names()->set_granularity(v1::GRANULARITY_MODULE);
  most.mutable_names()->set_first(0);
  while (most.names().names_size() < kNamedRowsMax) most.mutable_names()->add_names(std::string(kRowNameBytesMax, 'a'));
  EXPECT_TRUE(Decode(most, &kLayout, {}).ok());
}

TEST(DecodeTest, EachFieldOfNamesHasItsRange) {
  using Change = std::function<void(v1::Names*)>;
  const std::pair<Change, const char*> wrong[] = {
      {[](v1::Names* n) { n->set_attempt(2u << 30); }, "names.attempt = 2147483648: must be in [0, 1073741824]"},
      {[](v1::Names* n) { n->set_granularity(v1::GRANULARITY_HEAD); },
       "names.granularity = 2: must be TENSOR or MODULE"},
      {[](v1::Names* n) { n->clear_granularity(); }, "names.granularity = 0"},
      {[](v1::Names* n) { n->clear_names(); }, "number of names.names = 0: must be in [1, 16384]"},
      {[](v1::Names* n) {
         while (n->names_size() <= kNamedRowsMax) n->add_names("x");
       },
       "number of names.names = 16385"},
      {[](v1::Names* n) { n->set_first(16383); }, "names.first = 16383: must be in [0, 16382]"},
      {[](v1::Names* n) { n->set_first(UINT32_MAX); }, "names.first = 4294967295"},
      {[](v1::Names* n) { n->set_names(1, ""); }, "bytes of names.names[1] = 0: must be in [1, 256]"},
      {[](v1::Names* n) { n->set_names(1, std::string(257, 'a')); }, "bytes of names.names[1] = 257"},
      {[](v1::Names* n) { n->set_names(0, "a\nb"); }, "names.names[0] holds control character 10"},
      {[](v1::Names* n) { n->set_names(0, std::string("a\0b", 3)); }, "names.names[0] holds control character 0"},
      {[](v1::Names* n) { n->set_names(1, "ab\xff"); }, "names.names[1] holds byte 255 at 2: must be UTF-8"},
      {[](v1::Names* n) { n->set_names(1, "\xc3"); }, "names.names[1] holds byte 195 at 0: must be UTF-8"},
  };
  for (const auto& [change, words] : wrong) {
    v1::ClientMessage message = ValidNames();
    change(message.mutable_names());
    EXPECT_THAT(Refusal(message, &kLayout), HasSubstr(words));
  }
}

// How many rows a run has by name is known where its names are (RowMaps).
TEST(DecodeTest, BlocksOfOtherRowsHaveTheirRanges) {
  v1::ClientMessage message = ValidFrame();
  v1::Block* block = message.mutable_frame()->mutable_blocks(0);
  block->set_signal(v1::SIGNAL_REPLICA_SUM_LOW);
  block->set_head_begin(0);
  block->set_head_count(1);
  block->set_layer_count(3);
  block->mutable_values()->Truncate(3);
  block->set_layer_begin(kNamedRowsMax - 3);
  EXPECT_TRUE(Decode(message, &kLayout, {}).ok());
  block->set_layer_begin(kNamedRowsMax - 2);
  EXPECT_THAT(Refusal(message, &kLayout), HasSubstr("layer_begin = 16382: must be in [0, 16381]"));
  block->set_layer_begin(0);
  block->set_head_count(2);
  EXPECT_THAT(Refusal(message, &kLayout), HasSubstr("head_count = 2: must be in [1, 1]"));
}

v1::OwnValues* AddOwn(v1::Frame* frame) {
  v1::OwnValues* own = frame->add_own();
  own->set_name("load");
  own->set_granularity(v1::GRANULARITY_EXPERT);
  own->set_merge(v1::MERGE_SUM);
  own->set_layer(3);
  own->set_head(4000);
  own->add_values(1);
  own->add_values(2);
  return own;
}

TEST(DecodeTest, OwnValuesArriveWhole) {
  v1::ClientMessage message = ValidFrame();
  v1::OwnValues* own = AddOwn(message.mutable_frame());
  own->set_unit("tokens");
  own->set_help("of each expert");
  own->set_low(0);
  const auto decoded = Decode(message, &kLayout, {});
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  const auto& frame = std::get<RankFrame>(decoded->body);
  ASSERT_THAT(frame.own, testing::SizeIs(1));
  const OwnBlock& block = frame.own[0];
  EXPECT_EQ(block.signal.name, "load");
  EXPECT_EQ(block.signal.unit, "tokens");
  EXPECT_EQ(block.signal.help, "of each expert");
  EXPECT_EQ(block.signal.granularity, Granularity::kExpert);
  EXPECT_EQ(block.signal.merge, Merge::kSum);
  EXPECT_EQ(block.signal.low, 0);
  EXPECT_FALSE(block.signal.high.has_value());
  EXPECT_EQ(block.layer, 3);
  EXPECT_EQ(block.head, 4000);
  ASSERT_EQ(block.count, 2u);
  EXPECT_EQ(frame.values[block.offset + 1], 2);
  message.mutable_frame()->clear_blocks();
  EXPECT_TRUE(Decode(message, &kLayout, {}).ok()) << "a part may have nothing else";
}

TEST(DecodeTest, LimitsThatWereOnceTakenAreReadAgain) {
  v1::ClientMessage message = ValidFrame();
  v1::OwnValues* own = AddOwn(message.mutable_frame());
  own->set_low(2);
  own->set_high(1);
  WalRecord record;
  record.kind = WalKind::kMessage;
  record.payload = message.SerializeAsString();
  EXPECT_TRUE(DecodeRecord(record, &kLayout, {}).ok()) << "a server of before has acknowledged it";
}

TEST(DecodeTest, EachFieldOfOwnValuesHasItsRange) {
  using Change = std::function<void(v1::OwnValues*)>;
  const std::pair<Change, const char*> wrong[] = {
      {[](v1::OwnValues* o) { o->set_name("KL"); }, "frame.own[0].name: must match [a-z][a-z0-9_./-]{0,63}"},
      {[](v1::OwnValues* o) { o->set_name(""); }, "own[0].name"},
      {[](v1::OwnValues* o) { o->set_name(std::string(65, 'a')); }, "own[0].name"},
      {[](v1::OwnValues* o) { o->set_granularity(v1::GRANULARITY_TENSOR); }, "own[0].granularity = 7: must be RUN"},
      {[](v1::OwnValues* o) { o->set_granularity(v1::GRANULARITY_OWN); }, "own[0].granularity = 9"},
      {[](v1::OwnValues* o) { o->set_merge(v1::MERGE_EQUAL); }, "own[0].merge = 4: must be in [1, 3]"},
      {[](v1::OwnValues* o) { o->clear_merge(); }, "own[0].merge = 0"},
      {[](v1::OwnValues* o) { o->clear_values(); }, "number of frame.own[0].values = 0: must be in [1, 1024]"},
      {[](v1::OwnValues* o) { o->set_head(4095); }, "own[0].head = 4095: must be in [0, 4094]"},
      {[](v1::OwnValues* o) { o->set_layer(512); }, "own[0].layer = 512: must be in [0, 511]"},
      {[](v1::OwnValues* o) { o->set_layer(UINT32_MAX); }, "own[0].layer = 4294967295"},
      {[](v1::OwnValues* o) { o->set_granularity(v1::GRANULARITY_RUN); }, "number of frame.own[0].values = 2"},
      {[](v1::OwnValues* o) { o->set_granularity(v1::GRANULARITY_LAYER); }, "own[0].head = 4000: must be in [0, 0]"},
      {[](v1::OwnValues* o) { o->set_unit(std::string(33, 'u')); }, "own[0].unit"},
      {[](v1::OwnValues* o) { o->set_help("a\nb"); }, "own[0].help holds control character 10"},
      {[](v1::OwnValues* o) { o->set_low(std::numeric_limits<double>::quiet_NaN()); }, "own[0].low"},
      {[](v1::OwnValues* o) { o->set_high(std::numeric_limits<double>::infinity()); }, "own[0].high"},
      {[](v1::OwnValues* o) { o->set_low(2), o->set_high(1.5); },
       "frame.own[0].low = 2: must be at most frame.own[0].high = 1.5"},
  };
  for (const auto& [change, words] : wrong) {
    v1::ClientMessage message = ValidFrame();
    change(AddOwn(message.mutable_frame()));
    EXPECT_THAT(Refusal(message, &kLayout), HasSubstr(words));
  }
  v1::ClientMessage many = ValidFrame();
  for (int i = 0; i < 513; ++i) AddOwn(many.mutable_frame());
  EXPECT_THAT(Refusal(many, &kLayout), HasSubstr("number of frame.own = 513: must be in [0, 512]"));
}

// A client says what its rows are; these rows the server has made.
TEST(DecodeTest, NoBlockHasOwnValues) {
  v1::ClientMessage message = ValidFrame();
  message.mutable_frame()->mutable_blocks(0)->set_signal(v1::SIGNAL_OWN_MEAN);
  EXPECT_THAT(Refusal(message, &kLayout), HasSubstr("blocks[0].signal = 130"));
  v1::ClientMessage names = ValidNames();
  names.mutable_names()->set_granularity(v1::GRANULARITY_OWN);
  EXPECT_THAT(Refusal(names, &kLayout), HasSubstr("names.granularity = 9: must be TENSOR or MODULE"));
}

TEST(DecodeTest, SeqIsRequiredOnlyForLoggedMessages) {
  v1::ClientMessage frame = ValidFrame();
  frame.set_seq(0);
  EXPECT_THAT(Refusal(frame, &kLayout), AllOf(HasSubstr("seq = 0"), HasSubstr("at least 1")));
  v1::ClientMessage bye;
  bye.mutable_bye();
  bye.set_seq(3);
  EXPECT_THAT(Refusal(bye, &kLayout), HasSubstr("seq = 3"));
}

TEST(DecodeTest, AnEmptyMessageIsRefused) {
  v1::ClientMessage empty;
  empty.set_seq(1);
  Refusal(empty, &kLayout);
}

TEST(DecodeTest, ASpectrumIsATriangle) {
  v1::ClientMessage message;
  message.set_seq(1);
  v1::Spectrum* spectrum = message.mutable_spectrum();
  spectrum->set_kind(v1::SPECTRUM_KIND_WQ_GRAM);
  spectrum->set_n(3);
  for (int i = 0; i < 6; ++i) spectrum->add_upper(1);
  EXPECT_TRUE(Decode(message, &kLayout, {}).ok());
  spectrum->set_upper(0, std::numeric_limits<float>::quiet_NaN());
  EXPECT_TRUE(Decode(message, &kLayout, {}).ok()) << "what is not finite is data: the stream goes on";
  spectrum->set_scale(std::numeric_limits<float>::infinity());
  EXPECT_THAT(Refusal(message, &kLayout), HasSubstr("spectrum.scale = inf: must be finite"));
  spectrum->set_scale(1);
  spectrum->add_upper(1);
  EXPECT_THAT(Refusal(message, &kLayout), HasSubstr("n (n + 1) / 2 = 6"));
  spectrum->set_n(513);
  EXPECT_THAT(Refusal(message, &kLayout), HasSubstr("spectrum.n = 513: must be in [1, 512]"));
}

TEST(DecodeTest, TheServersOwnRecordsComeBack) {
  WalRecord record;
  record.kind = WalKind::kStepClosed;
  record.payload = EncodeStepClosed({2, 1234567890123});
  const auto closed = DecodeRecord(record, &kLayout, {});
  ASSERT_TRUE(closed.ok());
  EXPECT_EQ(std::get<StepClosedMessage>(closed->body).step, 1234567890123);
  record.payload = "nonsense";
  EXPECT_EQ(DecodeRecord(record, &kLayout, {}).status().code(), absl::StatusCode::kDataLoss);
  record.kind = WalKind::kRunSilent;
  EXPECT_EQ(DecodeRecord(record, nullptr, {}).status().code(), absl::StatusCode::kDataLoss);
  record.payload = EncodeRunSilent({1'700'000'000'123});
  const auto silent = DecodeRecord(record, nullptr, {});
  ASSERT_TRUE(silent.ok()) << silent.status();
  EXPECT_EQ(std::get<RunSilentMessage>(silent->body).last_report_unix_ms, 1'700'000'000'123);
}

TEST(DecodeTest, DecodedHelloHasTheRecordsAttempt) {
  v1::ClientMessage message = ValidHello();
  message.mutable_hello()->mutable_run()->set_attempt(1);
  message.mutable_hello()->mutable_run()->set_launch_unix_ms(1'790'000'000'000);
  WalRecord record{.kind = WalKind::kHello, .attempt = 4, .time_unix_ms = 1'790'000'000'001};
  record.payload = message.SerializeAsString();
  const auto here = DecodeRecord(record, nullptr, {});
  ASSERT_TRUE(here.ok()) << here.status();
  EXPECT_EQ(std::get<HelloMessage>(here->body).run.attempt, 4);
  EXPECT_EQ(std::get<HelloMessage>(here->body).run.launch_unix_ms, 1'790'000'000'000);
  record.time_unix_ms -= 7'200'000;  // No launch that was credible then.
  const auto ahead = DecodeRecord(record, nullptr, {});
  ASSERT_TRUE(ahead.ok()) << ahead.status();
  EXPECT_EQ(std::get<HelloMessage>(ahead->body).run.launch_unix_ms, 0);
}

TEST(DecodeTest, CapabilitiesBecomeAKindMask) {
  v1::ClientMessage message = ValidHello();
  message.mutable_hello()->add_capabilities(v1::ACTION_KIND_CENTER_K);
  message.mutable_hello()->add_capabilities(v1::ACTION_KIND_STOP);
  message.mutable_hello()->add_capabilities(static_cast<v1::ActionKind>(77));  // Of a newer client.
  message.mutable_hello()->set_ranks_agree(true);
  const auto decoded = Decode(message, nullptr, {});
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  EXPECT_EQ(std::get<HelloMessage>(decoded->body).kinds_mask, 1u << 2 | 1u << 8);
  EXPECT_TRUE(std::get<HelloMessage>(decoded->body).ranks_agree);
}

TEST(DecodeTest, AnActionResultHasItsRanges) {
  v1::ClientMessage message;
  message.set_seq(1);
  v1::ActionResult* result = message.mutable_action_result();
  result->set_id("a-1");
  result->set_step(7);
  EXPECT_TRUE(Decode(message, &kLayout, {}).ok());
  result->set_step(-1);
  EXPECT_THAT(Refusal(message, &kLayout), HasSubstr("action_result.step = -1"));
  result->set_step(7);
  result->set_attempt(2u << 30);
  EXPECT_THAT(Refusal(message, &kLayout), HasSubstr("action_result.attempt"));
  result->set_attempt(0);
  result->set_id(std::string(65, 'x'));
  EXPECT_THAT(Refusal(message, &kLayout), HasSubstr("action_result.id is 65 bytes long: at most 64"));
  result->set_id("a-1");
  result->set_reason("two\nlines");
  EXPECT_THAT(Refusal(message, &kLayout), HasSubstr("action_result.reason holds control character"));
}

TEST(DecodeTest, RecordsOfFalseAlarmsComeBack) {
  FalseAlarm said{.key = "a1", .by = "ann", .reason = "new data", .time_unix_ns = 7};
  said.severity = Severity::kCritical;
  said.step = 90;
  said.illness = {.cause = "logit growth", .rule = "", .places = {"layer 1", "layer 2"}};
  said.undone = true;
  WalRecord record;
  record.kind = WalKind::kFalseAlarm;
  record.payload = EncodeFalseAlarm({said});
  const auto read = DecodeRecord(record, nullptr, {});
  ASSERT_TRUE(read.ok()) << read.status();
  const FalseAlarm& back = std::get<FalseAlarmMessage>(read->body).said;
  EXPECT_EQ(back.key, "a1");
  EXPECT_EQ(back.by, "ann");
  EXPECT_EQ(back.reason, "new data");
  EXPECT_EQ(back.time_unix_ns, 7);
  EXPECT_EQ(back.severity, Severity::kCritical);
  EXPECT_EQ(back.step, 90);
  EXPECT_TRUE(back.undone);
  EXPECT_TRUE(Covers(said.illness, back.illness) && Covers(back.illness, said.illness));
  for (size_t size = 0; size < record.payload.size(); ++size) {
    WalRecord cut = record;
    cut.payload.resize(size);
    EXPECT_EQ(DecodeRecord(cut, nullptr, {}).status().code(), absl::StatusCode::kDataLoss) << size;
  }
}

TEST(DecodeTest, RecordsOfActionsComeBack) {
  ActionRequestMessage request;
  request.request = {.verb = ActionRequest::Verb::kUndo, .id = "a-1", .by = "alice", .reason = "enough"};
  request.request.action.scope.heads = {{1, 2}};
  request.malformed = "why not";
  PolicyMessage policy;
  policy.text = std::make_shared<const std::string>("mode: enforce\n");
  policy.own = true;
  policy.by = "bob";
  WalRecord record;
  record.kind = WalKind::kActionRequest;
  record.payload = EncodeActionRequest(request);
  const auto asked = DecodeRecord(record, &kLayout, {});
  ASSERT_TRUE(asked.ok()) << asked.status();
  const auto& back = std::get<ActionRequestMessage>(asked->body);
  EXPECT_EQ(back.request.verb, ActionRequest::Verb::kUndo);
  EXPECT_EQ(back.request.by, "alice");
  EXPECT_EQ(back.request.id, "a-1");
  EXPECT_EQ(back.request.reason, "enough");
  EXPECT_EQ(back.malformed, "why not");
  EXPECT_EQ(back.request.action.scope, request.request.action.scope);
  for (size_t size = 0; size < record.payload.size(); ++size) {
    WalRecord cut = record;
    cut.payload.resize(size);
    EXPECT_EQ(DecodeRecord(cut, &kLayout, {}).status().code(), absl::StatusCode::kDataLoss) << size;
  }
  record.kind = WalKind::kPolicy;
  record.payload = EncodePolicy(policy);
  const auto set = DecodeRecord(record, nullptr, {});
  ASSERT_TRUE(set.ok()) << set.status();
  EXPECT_EQ(*std::get<PolicyMessage>(set->body).text, "mode: enforce\n");
  EXPECT_TRUE(std::get<PolicyMessage>(set->body).own);
  EXPECT_EQ(std::get<PolicyMessage>(set->body).by, "bob");
  record.kind = WalKind::kActionSent;
  record.payload = EncodeActionSent({"a-1"});
  EXPECT_EQ(std::get<ActionSentMessage>(DecodeRecord(record, nullptr, {})->body).id, "a-1");
}

}  // namespace
}  // namespace bellwether::server
