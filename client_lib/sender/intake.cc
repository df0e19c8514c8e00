#include "client_lib/sender/intake.h"

#include <algorithm>

namespace bellwether::client {
namespace {

constexpr uint32_t kMessageBytesMaxDefault = 1 << 20;
constexpr uint32_t kMessageBytesMaxFloor = 8 << 10;  // One row of 1,024 heads must fit.

// Of how many frames one is let in; 0 = signals of the run only.
uint64_t ThinningPeriod(uint64_t used, uint64_t max) {
  if (used < max / 2) return 1;
  if (used < max / 4 * 3) return 2;
  if (used < max / 8 * 7) return 4;
  if (used < max / 16 * 15) return 8;
  return 0;
}

}  // namespace

Intake::Intake(SharedMemory* memory, Window* window)
    : memory_(memory), header_(memory->header()), window_(window), ring_(*memory) {
  ring_.Release(window_->state().ring_taken);  // Killed between the two?
}

uint64_t Intake::window_bytes_max() const {
  const uint64_t said = window_->state().window_bytes_max;
  return said == 0 ? kWindowBytesMax : std::min(said, kWindowBytesMax);
}

int Intake::Take(int slots_max) {
  int taken = 0;
  while (taken < slots_max) {
    const char* slot = ring_.At(window_->state().ring_taken);
    if (slot == nullptr) break;
    TakeOne(slot);
    ++taken;
  }
  return taken;
}

bool Intake::drained() const { return ring_.At(window_->state().ring_taken) == nullptr; }

void Intake::TakeOne(const char* slot) {
  SenderState* state = window_->mutable_state();
  if (!Admit(slot)) ++state->frames_dropped;
  ++state->ring_taken;
  window_->Commit();
  ring_.Release(state->ring_taken);
}

void Intake::DropRest() {
  SenderState* state = window_->mutable_state();
  while (ring_.At(state->ring_taken) != nullptr) {
    ++state->frames_dropped;
    ++state->ring_taken;
  }
  window_->Commit();
  ring_.Release(state->ring_taken);
}

EncodeContext Intake::Context() const {
  const uint32_t said = window_->state().message_bytes_max;
  EncodeContext context;
  context.attempt = header_->config.attempt;
  context.dropped_ring_total = header_->dropped_ring.load(std::memory_order_relaxed);
  context.dropped_window_total = window_->state().frames_dropped;
  context.stripped_total = window_->state().frames_stripped;
  context.message_bytes_max =
      said == 0 ? kMessageBytesMaxDefault : std::clamp(said, kMessageBytesMaxFloor, kMessageBytesMaxDefault);
  context.values_max = header_->values_max;
  context.slot_bytes = header_->slot_bytes;
  return context;
}

bool Intake::Admit(const char* slot) {
  const auto& slot_header = *reinterpret_cast<const SlotHeader*>(slot);
  SenderState* state = window_->mutable_state();
  if (slot_header.kind == SlotKind::kEvent) {
    if (slot_header.event_kind == kEventKindDetach) state->detached = 1;
    if (slot_header.event_kind == kEventKindAttach) state->detached = 0;
  }
  EncodeContext context = Context();
  const uint64_t period = ThinningPeriod(window_->used_bytes(), window_bytes_max());
  const Spool* spool = window_->spool();
  if (period != 1 && spool != nullptr && !spool->refuses()) {
    if (!encoder_.Encode(slot, context)) return false;
    if (SpillAll()) return true;
  }
  if (slot_header.kind == SlotKind::kFrame && period > 1 && frames_seen_++ % period != 0) return false;
  if (slot_header.kind == SlotKind::kSpectrum && period != 1) return false;
  context.run_signals_only = period == 0;
  if (!encoder_.Encode(slot, context)) return false;
  if (AppendAll()) {
    if (encoder_.stripped()) ++state->frames_stripped;
    return true;
  }
  return period == 1 && spool != nullptr && SpillAll();
}

bool Intake::SpillAll() {
  spill_.clear();
  std::vector<size_t> ends;
  for (const v1::ClientMessage& message : encoder_.messages()) {
    message.AppendToString(&spill_);
    ends.push_back(spill_.size());
  }
  std::vector<std::string_view> bodies;
  size_t begin = 0;
  for (const size_t end : ends) {
    bodies.push_back(std::string_view(spill_).substr(begin, end - begin));
    begin = end;
  }
  return window_->Spill(bodies, window_->state().ring_taken);
}

bool Intake::AppendAll() {
  uint64_t bytes = 0;
  for (const v1::ClientMessage& message : encoder_.messages()) bytes += Window::BytesFor(message.ByteSizeLong());
  // A frame alone may be larger than what the server would like to be held.
  const uint64_t limit = window_->empty() ? kWindowBytesMax : window_bytes_max();
  if (window_->used_bytes() + bytes > limit) return false;
  const uint64_t position = window_->state().ring_taken;
  size_t left = encoder_.messages().size();
  for (const v1::ClientMessage& message : encoder_.messages()) {
    const uint64_t body_bytes = message.ByteSizeLong();
    auto* body = reinterpret_cast<uint8_t*>(window_->Prepare(body_bytes));
    message.SerializeWithCachedSizesToArray(body);
    window_->Append(body_bytes, --left == 0, position);
  }
  return true;
}

bool Intake::AppendOwn(const v1::ClientMessage& message) {
  const uint64_t body_bytes = message.ByteSizeLong();
  if (window_->used_bytes() + Window::BytesFor(body_bytes) > kWindowBytesMax) return false;
  auto* body = reinterpret_cast<uint8_t*>(window_->Prepare(body_bytes));
  message.SerializeWithCachedSizesToArray(body);
  // Not the last part of any frame: the trainer's counts do not include it.
  window_->Append(body_bytes, false, 0);
  window_->Commit();
  return true;
}

}  // namespace bellwether::client
