#include "client_lib/sender/window.h"

#include <algorithm>

namespace bellwether::client {
namespace {

constexpr uint32_t kWindowPad = 1;  // Nothing up to the end of the room.
constexpr uint32_t kWindowLastPart = 2;
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
  // Lost ones are passed over as if they were durable.
  header_->frames_acked.store(next_.frames_durable - std::min(next_.frames_durable, next_.frames_lost),
                              std::memory_order_relaxed);
  header_->frames_spooled.store(next_.frames_spooled, std::memory_order_relaxed);
  header_->frames_dropped_window.store(next_.frames_dropped, std::memory_order_relaxed);
  header_->frames_stripped.store(next_.frames_stripped, std::memory_order_relaxed);
}

uint64_t Window::BytesFor(uint64_t body_bytes) { return sizeof(Record) + (body_bytes + 7) / 8 * 8; }

Window::Record* Window::At(uint64_t position) const {
  return reinterpret_cast<Record*>(memory_->window() + position % kWindowRoomBytes);
}

uint64_t Window::SkipPad(uint64_t position) const {
  const uint64_t left = kWindowRoomBytes - position % kWindowRoomBytes;
  if (left < sizeof(Record) || (At(position)->flags & kWindowPad) != 0) return position + left;
  return position;
}

char* Window::Prepare(uint64_t body_bytes) {
  const uint64_t left = kWindowRoomBytes - next_.window_head % kWindowRoomBytes;
  if (left < BytesFor(body_bytes)) {
    if (left >= sizeof(Record)) At(next_.window_head)->flags = kWindowPad;
    next_.window_head += left;
  }
  return reinterpret_cast<char*>(At(next_.window_head) + 1);
}

void Window::Append(uint64_t body_bytes, bool last_part, uint64_t ring_position) {
  Record* record = At(next_.window_head);
  record->body_bytes = static_cast<uint32_t>(body_bytes);
  record->flags = last_part ? kWindowLastPart : 0;
  record->ordinal = ++next_.appended_ordinal;
  record->ring_position = ring_position;
  if (last_part) ++next_.frames_admitted;
  record->frames_admitted = next_.frames_admitted;
  next_.window_head += BytesFor(body_bytes);
  high_water_ = std::max(high_water_, next_.window_head % kWindowRoomBytes);
}

bool Window::Spill(const std::vector<std::string_view>& bodies, uint64_t ring_position) {
  std::vector<Message> messages;
  for (const std::string_view body : bodies) {
    const bool last_part = messages.size() + 1 == bodies.size();
    messages.push_back({.ordinal = next_.appended_ordinal + messages.size() + 1,
                        .last_part = last_part,
                        .frames_admitted = next_.frames_admitted + (last_part ? 1 : 0),
                        .ring_position = ring_position,
                        .body = body});
  }
  if (!spool_->Append(messages)) return false;
  next_.appended_ordinal += messages.size();
  ++next_.frames_admitted;
  ++next_.frames_spooled;
  return true;
}

Window::Cursor Window::Begin() const {
  return {.position = next_.window_tail, .ordinal = next_.freed_ordinal + 1, .frames = next_.frames_durable};
}

const Window::Record* Window::RecordAt(Cursor* cursor) const {
  cursor->position = std::max(cursor->position, next_.window_tail);
  if (cursor->position >= next_.window_head) return nullptr;
  cursor->position = SkipPad(cursor->position);
  return At(cursor->position);
}

Window::Message Window::MessageOf(const Record& record) {
  return {record.ordinal,
          (record.flags & kWindowLastPart) != 0,
          record.frames_admitted,
          record.ring_position,
          {reinterpret_cast<const char*>(&record + 1), record.body_bytes}};
}

bool Window::ReadMemory(Cursor* cursor, Message* message) const {
  const Record* record = RecordAt(cursor);
  if (record == nullptr) return false;
  *message = MessageOf(*record);
  cursor->position += BytesFor(record->body_bytes);
  return true;
}

bool Window::Read(Cursor* cursor, Message* message) {
  if (cursor->ordinal <= next_.freed_ordinal) {
    cursor->ordinal = next_.freed_ordinal + 1;
    cursor->frames = next_.frames_durable;
  }
  if (cursor->ordinal > next_.appended_ordinal) return false;
  const Record* record = RecordAt(cursor);
  bool on_disk = spool_ != nullptr && spool_->Peek(&cursor->spool, message);
  while (on_disk && message->ordinal < cursor->ordinal) {
    spool_->Advance(&cursor->spool);
    on_disk = spool_->Peek(&cursor->spool, message);
  }
  if (on_disk && (record == nullptr || message->ordinal < record->ordinal)) {
    spool_->Advance(&cursor->spool);
  } else if (record != nullptr) {
    *message = MessageOf(*record);
    cursor->position += BytesFor(record->body_bytes);
  } else {
    CountLost(cursor->ordinal, next_.appended_ordinal, next_.frames_admitted - cursor->frames);
    cursor->ordinal = next_.appended_ordinal + 1;
    cursor->frames = next_.frames_admitted;
    return false;
  }
  const uint64_t before = message->frames_admitted - (message->last_part ? 1 : 0);
  if (message->ordinal > cursor->ordinal) CountLost(cursor->ordinal, message->ordinal - 1, before - cursor->frames);
  cursor->ordinal = message->ordinal + 1;
  cursor->frames = message->frames_admitted;
  return true;
}

void Window::CountLost(uint64_t from, uint64_t through, uint64_t frames) {
  if (through <= next_.lost_through) return;  // Passed over before.
  next_.lost_from = from;
  next_.lost_through = through;
  next_.frames_lost += frames;
  next_.frames_dropped += frames;
  Commit();
}

void Window::RecordDurable(const Message& message, uint64_t* settled) {
  if (!message.last_part || message.frames_admitted <= next_.frames_durable) return;
  next_.frames_durable = message.frames_admitted;
  *settled = message.ring_position + 1;
}

void Window::FreeUpTo(uint64_t ordinal) {
  if (next_.lost_from != 0 && next_.lost_from <= ordinal + 1) ordinal = std::max(ordinal, next_.lost_through);
  ordinal = std::min(ordinal, next_.appended_ordinal);
  if (ordinal <= next_.freed_ordinal) return;
  uint64_t settled = 0;
  while (next_.window_tail < next_.window_head) {
    const uint64_t tail = SkipPad(next_.window_tail);
    const Record* record = At(tail);
    if (record->ordinal > ordinal) break;
    next_.window_tail = tail + BytesFor(record->body_bytes);
    RecordDurable(MessageOf(*record), &settled);
  }
  Message spooled;
  if (spool_ != nullptr) spool_->FindFrameEnd(ordinal, &spooled);
  RecordDurable(spooled, &settled);
  next_.freed_ordinal = ordinal;
  if (empty()) next_.frames_durable = next_.frames_admitted;
  const bool memory_empty = next_.window_tail == next_.window_head;
  // From the start of the room again, so that a quiet link touches few pages.
  // Positions never go back: a cursor may still be where the last message was.
  if (memory_empty) {
    next_.window_tail = next_.window_head =
        (next_.window_head + kWindowRoomBytes - 1) / kWindowRoomBytes * kWindowRoomBytes;
  }
  Commit();
  // Behind the commit: who is killed between both must not miss them.
  if (spool_ != nullptr) spool_->FreeUpTo(ordinal);
  if (memory_empty) {
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
