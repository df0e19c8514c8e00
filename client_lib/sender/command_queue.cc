#include "client_lib/sender/command_queue.h"

#include <google/protobuf/util/json_util.h>

#include <cstring>

#include "bellwether/client.h"

namespace bellwether::client {
namespace {

// What the trainer needs to apply it, as client.h says; it may hold no protobuf,
// or another one.
std::string ToJson(const v1::Action& action) {
  v1::Action small;
  small.set_id(action.id());
  small.set_attempt(action.attempt());
  small.set_kind(action.kind());
  if (action.has_scope()) *small.mutable_scope() = action.scope();
  small.set_mode(action.mode());
  small.set_value(action.value());
  small.set_apply_at_step(action.apply_at_step());
  small.set_expires_unix_ns(action.expires_unix_ns());
  small.set_undoes(action.undoes());
  google::protobuf::util::JsonPrintOptions options;
  options.preserve_proto_field_names = true;
  std::string json;
  // Fails on broken type information only, not on any value.
  (void)google::protobuf::util::MessageToJsonString(small, &json, options);
  return json;
}

}  // namespace

void CommandQueue::PushSampling(const v1::Sampling& sampling) {
  header_->sampling_period_steps.store(sampling.period_steps(), std::memory_order_relaxed);
  // The newest word on sampling is the only one that matters.
  if (!waiting_.empty() && waiting_.back().type == BW_COMMAND_SAMPLING) waiting_.pop_back();
  std::string payload = sampling.SerializeAsString();
  if (payload.size() > kCommandPayloadMax || waiting_.size() >= kWaitingMax) return;
  waiting_.push_back({BW_COMMAND_SAMPLING, static_cast<double>(sampling.period_steps()), std::move(payload)});
  Pump();
}

bool CommandQueue::PushAction(const v1::Action& action, std::string* why) {
  std::string payload = ToJson(action);
  if (payload.size() > kCommandPayloadMax) {
    *why = "the action has " + std::to_string(payload.size()) + " bytes as JSON, at most " +
           std::to_string(kCommandPayloadMax) + " reach the trainer";
    return false;
  }
  if (waiting_.size() >= kWaitingMax) {
    *why = "the trainer does not take its commands";
    return false;
  }
  waiting_.push_back({BW_COMMAND_ACTION, action.value(), std::move(payload)});
  Pump();
  return true;
}

void CommandQueue::Pump() {
  uint64_t head = header_->command_head.load(std::memory_order_relaxed);
  while (!waiting_.empty() && head - header_->command_tail.load(std::memory_order_acquire) < kCommandSlots) {
    const Command& command = waiting_.front();
    CommandSlot& slot = memory_->commands()[head % kCommandSlots];
    slot.type = command.type;
    slot.value = command.value;
    slot.payload_bytes = static_cast<uint32_t>(command.payload.size());
    std::memcpy(slot.payload, command.payload.data(), command.payload.size());
    header_->command_head.store(++head, std::memory_order_release);
    waiting_.pop_front();
  }
}

}  // namespace bellwether::client
