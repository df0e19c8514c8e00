#include "client_lib/sender/command_queue.h"

#include <cstring>

#include "bellwether/client.h"

namespace bellwether::client {

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
  v1::Action small = action;
  small.clear_history();  // Of no use to the trainer.
  std::string payload = small.SerializeAsString();
  if (payload.size() > kCommandPayloadMax) {
    *why = "the action has " + std::to_string(payload.size()) + " bytes, at most " + std::to_string(kCommandPayloadMax) + " reach the trainer";
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
