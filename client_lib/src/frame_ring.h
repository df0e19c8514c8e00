// frame_ring.h: the ring that frames cross on their way to the sender.
//
// One producer (the training thread) and one consumer (the sender), fixed
// slots, no locks.  Positions count up for ever; slot = position mod slots.
// The producer drops the newest frame when the ring is full, and counts it.
// A position is given back to the producer only after the consumer has put the
// frame into the window, so a killed sender loses nothing.

#ifndef BELLWETHER_CLIENT_LIB_SRC_FRAME_RING_H_
#define BELLWETHER_CLIENT_LIB_SRC_FRAME_RING_H_

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "bellwether/client.h"
#include "client_lib/src/shared_memory.h"

namespace bellwether::client {

enum class SlotKind : uint32_t { kFrame = 1, kEvent = 2, kSpectrum = 3, kActionResult = 4, kNames = 5 };

struct BlockHeader {
  uint32_t signal;
  uint32_t layer_begin;
  uint32_t layer_count;
  uint32_t head_begin;
  uint32_t head_count;
  uint32_t reserved;
};

struct OwnHeader {
  double low, high;
  uint32_t granularity, merge, layer, head, count, limits;
  uint32_t text_bytes[3];  // Name, unit, help.
  uint32_t reserved;
};
static_assert(sizeof(OwnHeader) == 56);
// With its values and texts.
constexpr uint64_t OwnBytes(const OwnHeader& own) {
  const uint64_t texts = uint64_t{own.text_bytes[0]} + own.text_bytes[1] + own.text_bytes[2];
  return (sizeof(OwnHeader) + uint64_t{own.count} * sizeof(float) + texts + 7) / 8 * 8;
}

// First bytes of a slot.  What follows depends on the kind:
// * a frame: BlockHeader[block_count], then the blocks' values at
//   SlotValuesOffset(block_count), then `n` own values of text_bytes[0] bytes together:
//   each an OwnHeader, its values, its three texts, and zeros up to 8 bytes;
// * a spectrum: its values at SlotValuesOffset(0);
// * an event: its value as a double, then its text;
// * an action result: its id, then its reason;
// * names of rows: each with a zero byte behind it.
struct alignas(64) SlotHeader {
  SlotKind kind;
  uint32_t block_count;
  int64_t step;
  int64_t time_unix_ns;
  uint32_t partial_rows;
  uint32_t event_kind;      // Or the spectrum's kind, or 1 = action applied, or the names' granularity.
  uint32_t layer, head, n;  // Spectrum.  Names: the first row, 0, and how many.  Frame: n own values.
  float scale;
  uint32_t text_bytes[2];  // Event: text.  Action result: id, reason.  Names: all.  Frame: own values.
};
static_assert(sizeof(SlotHeader) == 64);

inline constexpr uint32_t kBlocksMax = 256;

constexpr uint64_t SlotValuesOffset(uint32_t block_count) {
  return (sizeof(SlotHeader) + block_count * sizeof(BlockHeader) + 63) / 64 * 64;
}
inline constexpr uint64_t kSlotValuesOffsetMax = SlotValuesOffset(kBlocksMax);
static_assert(BW_NAMES_BYTES_MAX <= uint64_t{BW_SPECTRUM_ROWS_MAX} * (BW_SPECTRUM_ROWS_MAX + 1) / 2 * sizeof(float),
              "names fit every slot, since a spectrum does");
static_assert(sizeof(SlotHeader) + kActionIdMax + kReasonMax <= kSlotValuesOffsetMax, "texts fit every slot");

// Where own values begin, behind so many floats.
constexpr uint64_t SlotOwnOffset(uint32_t block_count, uint64_t values) {
  return (SlotValuesOffset(block_count) + values * sizeof(float) + 7) / 8 * 8;
}

inline BlockHeader* SlotBlocks(char* slot) { return reinterpret_cast<BlockHeader*>(slot + sizeof(SlotHeader)); }

// The trainer's end.  One thread at a time.
class RingProducer {
 public:
  explicit RingProducer(const SharedMemory& memory)
      : header_(memory.header()),
        slots_(memory.ring()),
        slot_bytes_(header_->slot_bytes),
        slot_count_(header_->slot_count) {}

  // Where the next frame goes; nullptr if the ring is full, which is counted.
  char* Reserve() {
    if (head_ - tail_seen_ >= slot_count_) {
      tail_seen_ = header_->tail.load(std::memory_order_acquire);
      if (head_ - tail_seen_ >= slot_count_) {
        CountDrop();
        return nullptr;
      }
    }
    return slots_ + index_ * slot_bytes_;
  }

  // Hands over what was written to the reserved slot.
  void Commit() {
    if (++index_ == slot_count_) index_ = 0;
    header_->head.store(++head_, std::memory_order_release);
  }

  // There is one writer, so that a load and a store do what a locked add would.
  void CountDrop() {
    header_->dropped_ring.store(header_->dropped_ring.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  }

 private:
  SharedHeader* header_;
  char* slots_;
  uint64_t slot_bytes_;
  uint64_t slot_count_;
  uint64_t head_ = 0;
  uint64_t tail_seen_ = 0;
  uint64_t index_ = 0;  // head_ mod slot_count_, without the division.
};

// The sender's end.  One thread.
class RingConsumer {
 public:
  explicit RingConsumer(const SharedMemory& memory) : header_(memory.header()), slots_(memory.ring()) {}

  // The slot at `position`; nullptr if nothing was pushed there yet.
  char* At(uint64_t position) const {
    if (position >= header_->head.load(std::memory_order_acquire)) return nullptr;
    return slots_ + position % header_->slot_count * header_->slot_bytes;
  }
  // Gives everything below `position` back to the producer.
  void Release(uint64_t position) { header_->tail.store(position, std::memory_order_release); }

 private:
  SharedHeader* header_;
  char* slots_;
};

}  // namespace bellwether::client

#endif  // BELLWETHER_CLIENT_LIB_SRC_FRAME_RING_H_
