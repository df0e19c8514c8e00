// pipeline_trainer.h: a rank that speaks to a Pipeline in this process.

#ifndef BELLWETHER_TESTS_SUPPORT_PIPELINE_TRAINER_H_
#define BELLWETHER_TESTS_SUPPORT_PIPELINE_TRAINER_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "server/ingest/decode.h"
#include "server/pipeline.h"

namespace bellwether::server {

// Hears nothing unless a test overrides what it listens to; says what a test
// hands to Put().  Who overrides detaches the session in its own destructor:
// the pipeline's threads call until then.
class PipelineTrainer : public SessionOwner {
 public:
  void OnOpen(uint64_t) override {}
  void OnDurable(uint64_t) override {}
  void OnRoom() override {}
  void OnFenced() override {}
  void OnDeeper(const std::vector<Head>&) override {}
  void OnAction(const Action&) override {}

 protected:
  // Greets as run "r", or as the one that `message` names, of two heads a layer.
  // Its next message is numbered `first_seq` + 1.
  void Greet(Pipeline* pipeline, v1::ClientMessage message, uint32_t world, uint32_t layers, uint64_t first_seq = 0) {
    seq_ = first_seq;
    message.mutable_hello()->set_protocol(kProtocolVersion);
    v1::RunDescription* const run = message.mutable_hello()->mutable_run();
    if (run->name().empty()) run->set_name("r");
    if (run->uuid().empty()) run->set_uuid(std::string(16, 'u'));
    run->set_world(world);
    run->set_reporters(world);
    run->mutable_layout()->set_layers(layers);
    run->mutable_layout()->set_heads(2);
    run->mutable_layout()->set_kv_heads(2);
    const auto plain = Decode(message, nullptr, {});
    EXPECT_TRUE(plain.ok()) << plain.status();
    auto opened = pipeline->Open(std::get<HelloMessage>(plain->body), message.SerializeAsString(), this);
    EXPECT_TRUE(opened.ok()) << opened.status();
    session_ = *std::move(opened);
  }

  // The frame of a step that has a loss and nothing else.
  void PutLoss(int64_t step, uint32_t attempt = 0) {
    v1::ClientMessage frame;
    frame.mutable_frame()->set_attempt(attempt);
    frame.mutable_frame()->set_step(step);
    frame.mutable_frame()->set_parts(1);
    v1::Block* const block = frame.mutable_frame()->add_blocks();
    block->set_signal(v1::SIGNAL_LOSS);
    block->set_layer_count(1);
    block->set_head_count(1);
    block->add_values(1);
    Put(std::move(frame));
  }

  void Put(v1::ClientMessage message) {
    message.set_seq(++seq_);
    auto plain = Decode(message, &session_->layout(), {});
    ASSERT_TRUE(plain.ok()) << plain.status();
    std::string payload = message.SerializeAsString();
    auto taken = session_->Put(*plain, payload);
    // A shard under a sanitizer may be a whole queue behind what is durable.
    while (taken.ok() && *taken == IngestSession::Taken::kBusy) {
      absl::SleepFor(absl::Milliseconds(1));
      taken = session_->Put(*plain, payload);
    }
    ASSERT_TRUE(taken.ok()) << taken.status();
    ASSERT_EQ(*taken, IngestSession::Taken::kTaken);
  }

  std::shared_ptr<IngestSession> session_;
  uint64_t seq_ = 0;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_TESTS_SUPPORT_PIPELINE_TRAINER_H_
