#include "client_lib/sender/window.h"

#include <algorithm>

namespace bellwether::client {
namespace {

constexpr uint32_t kPad = 1;  // Nothing up to the end of the room.
constexpr uint32_t kLastPart = 2;
// Pages are given back after an outage, not after every busy second.
constexpr uint64_t kReleasePagesAbove = uint64_t{8} << 20;

}  // namespace

struct Window::Record {
  uint32_t body_bytes;
  uint32_t flags;
  uint64_t ordinal;
  uint64_t ring_position;
  uint64_t frames_admitted;
};

Window::Window(SharedMemory* memory) : memory_(memory), header_(memory->header()) {
  static_assert(sizeof(Record) == 32);
  next_ = header_->state[header_->state_index.load(std::memory_order_acquire) % 2];
}

void Window::Commit() {
  const uint32_t idle = 1 - header_->state_index.load(std::memory_order_relaxed) % 2;
  header_->state[idle] = next_;
  header_->state_index.store(idle, std::memory_order_release);
  header_->frames_sent.store(next_.frames_sent, std::memory_order_relaxed);
  header_->frames_acked.store(next_.frames_durable, std::memory_order_relaxed);
  header_->frames_dropped_window.store(next_.frames_dropped, std::memory_order_relaxed);
}

uint64_t Window::BytesFor(uint64_t body_bytes) { return sizeof(Record) + (body_bytes + 7) / 8 * 8; }

Window::Record* Window::At(uint64_t position) const {
  return reinterpret_cast<Record*>(memory_->window() + position % kWindowRoomBytes);
}

uint64_t Window::SkipPad(uint64_t position) const {
  const uint64_t left = kWindowRoomBytes - position % kWindowRoomBytes;
  if (left < sizeof(Record) || (At(position)->flags & kPad) != 0) return position + left;
  return position;
}

char* Window::Prepare(uint64_t body_bytes) {
  const uint64_t left = kWindowRoomBytes - next_.window_head % kWindowRoomBytes;
  if (left < BytesFor(body_bytes)) {
    if (left >= sizeof(Record)) At(next_.window_head)->flags = kPad;
    next_.window_head += left;
  }
  return reinterpret_cast<char*>(At(next_.window_head) + 1);
}

void Window::Append(uint64_t body_bytes, bool last_part, uint64_t ring_position) {
  Record* record = At(next_.window_head);
  record->body_bytes = static_cast<uint32_t>(body_bytes);
  record->flags = last_part ? kLastPart : 0;
  record->ordinal = ++next_.appended_ordinal;
  record->ring_position = ring_position;
  if (last_part) ++next_.frames_admitted;
  record->frames_admitted = next_.frames_admitted;
  next_.window_head += BytesFor(body_bytes);
  high_water_ = std::max(high_water_, next_.window_head % kWindowRoomBytes);
}

Window::Cursor Window::Begin() const { return {next_.window_tail, next_.freed_ordinal + 1}; }

bool Window::Read(Cursor* cursor, Message* message) const {
  if (cursor->ordinal > next_.appended_ordinal) return false;
  // Emptying the window moves its start; a cursor at its end moves along.
  if (cursor->ordinal == next_.freed_ordinal + 1) cursor->position = next_.window_tail;
  cursor->position = SkipPad(cursor->position);
  const Record* record = At(cursor->position);
  *message = {record->ordinal,
              (record->flags & kLastPart) != 0,
              record->frames_admitted,
              {reinterpret_cast<const char*>(record + 1), record->body_bytes}};
  cursor->position += BytesFor(record->body_bytes);
  ++cursor->ordinal;
  return true;
}

void Window::FreeUpTo(uint64_t ordinal) {
  ordinal = std::min(ordinal, next_.appended_ordinal);
  if (ordinal <= next_.freed_ordinal) return;
  uint64_t settled = 0;
  while (next_.freed_ordinal < ordinal) {
    next_.window_tail = SkipPad(next_.window_tail);
    const Record* record = At(next_.window_tail);
    next_.window_tail += BytesFor(record->body_bytes);
    next_.freed_ordinal = record->ordinal;
    if ((record->flags & kLastPart) != 0) {
      next_.frames_durable = record->frames_admitted;
      settled = record->ring_position + 1;
    }
  }
  const bool now_empty = empty();
  // From the start again, so that a quiet link touches few pages.
  if (now_empty) next_.window_head = next_.window_tail = 0;
  Commit();
  if (now_empty) {
    if (high_water_ > kReleasePagesAbove) memory_->ReleaseWindowPages();
    high_water_ = 0;
  }
  if (settled > header_->settled.load(std::memory_order_relaxed))
    header_->settled.store(settled, std::memory_order_release);
}

void Window::Settle() {
  if (empty()) header_->settled.store(next_.ring_taken, std::memory_order_release);
}

}  // namespace bellwether::client
