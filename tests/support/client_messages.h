// client_messages.h: what a client says that has little to say.

#ifndef BELLWETHER_TESTS_SUPPORT_CLIENT_MESSAGES_H_
#define BELLWETHER_TESTS_SUPPORT_CLIENT_MESSAGES_H_

#include <cstdint>
#include <string>

#include "bellwether/v1/ingest.pb.h"
#include "server/ingest/decode.h"

namespace bellwether::server {

// Greets as run "r", or as the one that `message` names, of two heads a layer.
inline v1::ClientMessage HelloOf(v1::ClientMessage message, uint32_t world, uint32_t layers) {
  message.mutable_hello()->set_protocol(kProtocolVersion);
  v1::RunDescription* const run = message.mutable_hello()->mutable_run();
  if (run->name().empty()) run->set_name("r");
  if (run->uuid().empty()) run->set_uuid(std::string(16, 'u'));
  run->set_world(world);
  run->set_reporters(world);
  run->mutable_layout()->set_layers(layers);
  run->mutable_layout()->set_heads(2);
  run->mutable_layout()->set_kv_heads(2);
  return message;
}

// The frame of a step that has a loss and nothing else, without its seq.
inline v1::ClientMessage LossFrame(int64_t step, uint32_t attempt) {
  v1::ClientMessage message;
  v1::Frame* const frame = message.mutable_frame();
  frame->set_attempt(attempt);
  frame->set_step(step);
  frame->set_parts(1);
  v1::Block* const block = frame->add_blocks();
  block->set_signal(v1::SIGNAL_LOSS);
  block->set_layer_count(1);
  block->set_head_count(1);
  block->add_values(1);
  return message;
}

}  // namespace bellwether::server

#endif  // BELLWETHER_TESTS_SUPPORT_CLIENT_MESSAGES_H_
