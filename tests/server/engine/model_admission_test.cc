// Goal: a run that comes back with another model is refused, and the words name each number that differs, as it
// is held and as it is offered, and what to do.
// Method: a whole engine, and hellos of one run.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <variant>

#include "server/engine/engine.h"
#include "tests/support/ingest_trainer.h"
#include "tests/support/temp_directory.h"

namespace bellwether::server {
namespace {

using testing::HasSubstr;

class ModelRank final : public IngestTrainer {
 public:
  ~ModelRank() override { Leave(); }
  void Leave() {
    if (session_ != nullptr) session_->Detach();
    session_ = nullptr;
  }
  // The refusal of a run of 2 layers, 4 heads and 8 experts that `change` changes; "" if it is taken.
  std::string Open(Engine* engine, const std::function<void(v1::Layout*)>& change) {
    Leave();
    v1::ClientMessage message = HelloOf({}, /*world=*/1, /*layers=*/2);
    v1::Layout* const layout = message.mutable_hello()->mutable_run()->mutable_layout();
    layout->set_heads(4);
    layout->set_experts(8);
    layout->set_seq_len(64);
    change(layout);
    const auto plain = Decode(message, nullptr, {});
    EXPECT_TRUE(plain.ok()) << plain.status();
    auto opened = engine->ingest()->Open(std::get<HelloMessage>(plain->body), message.SerializeAsString(), this);
    if (!opened.ok()) {
      EXPECT_EQ(opened.status().code(), absl::StatusCode::kFailedPrecondition);
      return std::string(opened.status().message());
    }
    session_ = *std::move(opened);
    return "";
  }
};

TEST(ModelAdmissionTest, AnotherModelIsRefusedByEachNumber) {
  const TempDirectory directory;
  Counters counters;
  Engine::Options options;
  options.storage_path = directory.path() + "/data";
  auto engine = Engine::Open(options, &counters, Clock::System());
  ASSERT_TRUE(engine.ok()) << engine.status();
  ModelRank rank;
  const auto refusal = [&](const std::function<void(v1::Layout*)>& change) { return rank.Open(engine->get(), change); };
  ASSERT_EQ(refusal([](v1::Layout*) {}), "");
  EXPECT_EQ(refusal([](v1::Layout* l) { l->set_experts(16); }),
            "hello.run.layout.experts = 16 (the run has 8): another model needs another run; give it another name "
            "(BELLWETHER_RUN) than r");
  EXPECT_THAT(refusal([](v1::Layout* l) { l->set_layers(3), l->set_heads(8), l->set_seq_len(128); }),
              HasSubstr("hello.run.layout.layers = 3 (the run has 2), heads = 8 (4), seq_len = 128 (64): another"));
  EXPECT_THAT(refusal([](v1::Layout* l) { l->set_kv_heads(4); }), HasSubstr("kv_heads = 4 (the run has 2): another"));
  EXPECT_EQ(refusal([](v1::Layout* l) { l->set_experts(0); }), "") << "they are not known yet";
}

}  // namespace
}  // namespace bellwether::server
