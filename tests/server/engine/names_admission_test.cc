// Goal: names of rows are admitted as the memory has room for them, however fast they come and from however
// many ranks; a run that comes back counts once, and refusals fill no list of events.
// Method: a whole engine with room for a few messages of names, and ranks that say theirs.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "server/engine/engine.h"
#include "tests/support/ingest_trainer.h"
#include "tests/support/temp_directory.h"

namespace bellwether::server {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::SizeIs;

constexpr int32_t kEach = 1000;  // Names of a message.

class NamingRank final : public IngestTrainer {
 public:
  NamingRank(Engine* engine, uint32_t world, uint32_t rank, uint32_t attempt = 0, uint64_t first_seq = 0)
      : attempt_(attempt) {
    v1::ClientMessage message;
    message.mutable_hello()->set_rank(rank);
    message.mutable_hello()->mutable_run()->set_attempt(attempt);
    Greet(engine->ingest(), std::move(message), world, /*layers=*/1, first_seq);
  }
  ~NamingRank() override { session_->Detach(); }
  // `count` names from number `begin` on, behind `said` others.
  void Name(int32_t begin, int32_t count = kEach, int32_t said = 0) {
    v1::ClientMessage message;
    message.mutable_names()->set_attempt(attempt_);
    message.mutable_names()->set_granularity(v1::GRANULARITY_TENSOR);
    message.mutable_names()->set_first(static_cast<uint32_t>(said));
    for (int32_t i = 0; i < count; ++i) {
      message.mutable_names()->add_names("layers." + std::to_string(begin + i) + ".weight");
    }
    Put(std::move(message));
  }
  uint64_t seq() const { return seq_; }

 private:
  const uint32_t attempt_;
};

class NamesAdmissionTest : public testing::Test {
 protected:
  // With room for a run and `tensors` of it, and for half a message more.
  std::unique_ptr<Engine> Open(int32_t tensors) {
    Engine::Options options;
    options.storage_path = directory_.path() + "/data";
    Layout layout{.layers = 1, .heads = 2, .kv_heads = 2, .ranks = 1};
    layout.tensors = tensors + kEach / 2;
    options.admission.memory_max = Engine::AdmissionOf(options).own_bytes + RunMemoryBytesMax(layout);
    auto engine = Engine::Open(options, &counters_, Clock::System());
    EXPECT_TRUE(engine.ok()) << engine.status();
    return *std::move(engine);
  }
  static RunSnapshotPtr Applied(Engine* engine) {
    engine->ingest()->AwaitApplied(engine->runs()->Find("r")->record.id);
    return engine->runs()->Find("r");
  }
  static std::vector<RunEvent> Events(Engine* engine) {
    auto events = engine->database()->ListEvents(Applied(engine)->record.id, 0, 100);
    EXPECT_TRUE(events.ok()) << events.status();
    return *std::move(events);
  }
  static int32_t Tensors(Engine* engine) { return Applied(engine)->record.description.layout.tensors; }

  const TempDirectory directory_;
  Counters counters_;
};

TEST_F(NamesAdmissionTest, RanksTogetherGetNoMoreThanThereIs) {
  constexpr uint32_t kRanks = 8;
  const auto engine = Open(3 * kEach);
  std::vector<std::unique_ptr<NamingRank>> ranks;
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    ranks.push_back(std::make_unique<NamingRank>(engine.get(), kRanks, rank));
  }
  for (uint32_t rank = 0; rank < kRanks; ++rank) ranks[rank]->Name(static_cast<int32_t>(rank) * kEach);
  EXPECT_EQ(Tensors(engine.get()), 3 * kEach);
}

TEST_F(NamesAdmissionTest, OneRankGetsNoMoreInSeveralMessages) {
  const auto engine = Open(3 * kEach);
  NamingRank rank(engine.get(), 1, 0);
  for (int32_t i = 0; i < 6; ++i) rank.Name(i * kEach, kEach, i * kEach);
  EXPECT_EQ(Tensors(engine.get()), 3 * kEach);
}

TEST_F(NamesAdmissionTest, ReplicasThatNameTheSameCountOnce) {
  constexpr uint32_t kRanks = 8;
  const auto engine = Open(kEach);
  std::vector<std::unique_ptr<NamingRank>> ranks;
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    ranks.push_back(std::make_unique<NamingRank>(engine.get(), kRanks, rank));
  }
  for (uint32_t rank = 0; rank < kRanks; ++rank) ranks[rank]->Name(0);
  EXPECT_THAT(Events(engine.get()), testing::IsEmpty());
  EXPECT_EQ(Tensors(engine.get()), kEach);
}

TEST_F(NamesAdmissionTest, ARunThatComesBackCountsOnce) {
  uint64_t seq = 0;
  {
    const auto engine = Open(kEach);
    NamingRank rank(engine.get(), 1, 0);
    rank.Name(0);
    seq = rank.seq();
    EXPECT_EQ(Tensors(engine.get()), kEach);
  }
  const auto engine = Open(kEach);
  NamingRank rank(engine.get(), 1, 0, /*attempt=*/1, seq);
  rank.Name(0);
  EXPECT_THAT(Events(engine.get()), testing::IsEmpty());
  engine->Upkeep();
  Layout layout{.layers = 1, .heads = 2, .kv_heads = 2, .ranks = 1};
  layout.tensors = kEach;
  EXPECT_EQ(counters_.gauge("bellwether_runs_memory_bytes")->value(), static_cast<double>(RunMemoryBytesMax(layout)));
}

TEST_F(NamesAdmissionTest, ManyRefusalsAreFewEventsWithACount) {
  constexpr int kMessages = 70;
  const auto engine = Open(kEach);
  NamingRank rank(engine.get(), 1, 0);
  rank.Name(0);
  for (int i = 1; i <= kMessages; ++i) rank.Name(i * kEach, kEach, kEach);
  const std::vector<RunEvent> events = Events(engine.get());
  ASSERT_THAT(events, SizeIs(4)) << "the 1st, 4th, 16th and 64th";
  EXPECT_THAT(events[0].text, AllOf(HasSubstr("names left out"), HasSubstr("1000 named rows more")));
  EXPECT_THAT(events[3].text, HasSubstr("; 64 messages of 64000 names so far"));
  EXPECT_EQ(counters_.counter("bellwether_ingest_limit_refused_total", {{"limit", "memory"}})->value(), kMessages);
  rank.Name(kEach, kEach / 4, kEach);
  EXPECT_EQ(Tensors(engine.get()), kEach + kEach / 4) << "what fits is taken as before";
}

}  // namespace
}  // namespace bellwether::server
