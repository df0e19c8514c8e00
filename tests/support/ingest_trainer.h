// ingest_trainer.h: a rank that speaks to an IngestSink in this process.

#ifndef BELLWETHER_TESTS_SUPPORT_INGEST_TRAINER_H_
#define BELLWETHER_TESTS_SUPPORT_INGEST_TRAINER_H_

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
#include "server/ingest/ingest_sink.h"
#include "tests/support/client_messages.h"

namespace bellwether::server {

// Ignores every call unless a test overrides it; sends what a test hands to Put().
// A class that overrides detaches the session in its destructor: the engine's threads
// call until then.
class IngestTrainer : public SessionOwner {
 public:
  void OnOpen(uint64_t) override {}
  void OnDurable(uint64_t) override {}
  void OnRoom() override {}
  void OnFenced() override {}
  void OnDeeper(const std::vector<Head>&) override {}
  void OnAction(const Action&) override {}

 protected:
  // As HelloOf(); its next message is numbered `first_seq` + 1.
  void Greet(IngestSink* ingest, v1::ClientMessage message, uint32_t world, uint32_t layers, uint64_t first_seq = 0) {
    seq_ = first_seq;
    message = HelloOf(std::move(message), world, layers);
    const auto plain = Decode(message, nullptr, {});
    EXPECT_TRUE(plain.ok()) << plain.status();
    auto opened = ingest->Open(std::get<HelloMessage>(plain->body), message.SerializeAsString(), this);
    EXPECT_TRUE(opened.ok()) << opened.status();
    session_ = *std::move(opened);
  }

  void PutLoss(int64_t step, uint32_t attempt = 0) { Put(LossFrame(step, attempt)); }

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

#endif  // BELLWETHER_TESTS_SUPPORT_INGEST_TRAINER_H_
