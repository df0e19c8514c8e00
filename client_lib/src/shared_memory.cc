#include "client_lib/src/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <new>

#include "client_lib/src/frame_ring.h"

namespace bellwether::client {
namespace {

uint64_t AlignUp(uint64_t value, uint64_t alignment) { return (value + alignment - 1) / alignment * alignment; }

struct Offsets {
  uint64_t commands, ring, window, total;
};

Offsets OffsetsOf(const SharedMemory::Layout& layout) {
  constexpr uint64_t kPage = 4096;
  Offsets at{};
  at.commands = AlignUp(sizeof(SharedHeader), kPage);
  at.ring = AlignUp(at.commands + kCommandSlots * sizeof(CommandSlot), kPage);
  at.window = AlignUp(at.ring + layout.slot_count * SlotBytes(layout.values_max), kPage);
  at.total = at.window + kWindowRoomBytes;
  return at;
}

}  // namespace

uint64_t SlotBytes(uint64_t values_max) {
  const uint64_t bytes = AlignUp(kSlotValuesOffsetMax + values_max * sizeof(float), 64);
  // An odd number of cache lines: slots at a power-of-two distance would all
  // fall into the same few cache sets.
  return bytes | 64;
}

void SharedText::Set(std::string_view text) {
  char bytes[kBytes] = {};
  std::memcpy(bytes, text.data(), text.size() < kBytes ? text.size() : kBytes - 1);
  // A writer that died half-way left it odd.
  const uint64_t writing = version_.load(std::memory_order_relaxed) | 1;
  version_.store(writing, std::memory_order_relaxed);
  for (size_t i = 0; i < kBytes / 8; ++i) {
    uint64_t word;
    std::memcpy(&word, bytes + 8 * i, 8);
    // Release: whoever sees a new word sees the odd version too.
    words_[i].store(word, std::memory_order_release);
  }
  version_.store(writing + 1, std::memory_order_release);
}

void SharedText::Get(char (&out)[kBytes]) const {
  constexpr int kTries = 100;
  for (int i = 0; i < kTries; ++i) {
    const uint64_t before = version_.load(std::memory_order_acquire);
    for (size_t w = 0; w < kBytes / 8; ++w) {
      const uint64_t word = words_[w].load(std::memory_order_acquire);
      std::memcpy(out + 8 * w, &word, 8);
    }
    if (before % 2 == 0 && version_.load(std::memory_order_relaxed) == before) break;
  }
  out[kBytes - 1] = '\0';
}

SharedMemory::~SharedMemory() {
  if (base_ != nullptr) munmap(base_, bytes_);
  if (fd_ >= 0) close(fd_);
}

int SharedMemory::Map(size_t bytes) {
  void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
  if (base == MAP_FAILED) return errno;
  base_ = static_cast<char*>(base);
  bytes_ = bytes;
  return 0;
}

int SharedMemory::Create(const Layout& layout) {
  fd_ = memfd_create("bellwether", MFD_CLOEXEC);
  if (fd_ < 0) return errno;
  const Offsets at = OffsetsOf(layout);
  if (ftruncate(fd_, static_cast<off_t>(at.total)) != 0) return errno;
  struct flock lock {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_len = 1;
  if (fcntl(fd_, F_SETLK, &lock) != 0) return errno;
  if (const int error = Map(at.total); error != 0) return error;
  auto* header = new (base_) SharedHeader{};
  header->slot_count = layout.slot_count;
  header->slot_bytes = SlotBytes(layout.values_max);
  header->values_max = layout.values_max;
  header->commands_offset = at.commands;
  header->ring_offset = at.ring;
  header->window_offset = at.window;
  header->total_bytes = at.total;
  header->version = kSharedVersion;
  header->magic = kSharedMagic;
  return 0;
}

int SharedMemory::Open(int fd) {
  fd_ = fd;
  struct stat info {};
  if (fstat(fd, &info) != 0) return errno;
  if (static_cast<uint64_t>(info.st_size) < sizeof(SharedHeader)) return EPROTO;
  if (const int error = Map(static_cast<size_t>(info.st_size)); error != 0) return error;
  const SharedHeader& h = *header();
  if (h.magic != kSharedMagic || h.version != kSharedVersion) return EPROTO;
  if (h.slot_count < 2 || h.slot_count > kRingFramesMax || h.values_max > kRingBytesMax) return EPROTO;
  const Offsets at = OffsetsOf({.slot_count = h.slot_count, .values_max = h.values_max});
  const bool same = h.slot_bytes == SlotBytes(h.values_max) && h.commands_offset == at.commands &&
                    h.ring_offset == at.ring && h.window_offset == at.window && h.total_bytes == at.total &&
                    at.total == static_cast<uint64_t>(info.st_size);
  return same ? 0 : EPROTO;
}

bool SharedMemory::TrainerHoldsLock() const {
  struct flock lock {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_len = 1;
  return fcntl(fd_, F_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

void SharedMemory::ReleaseWindowPages() {
  // Not every file system can; then the pages simply stay.
  (void)fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(header()->window_offset),
                  static_cast<off_t>(kWindowRoomBytes));
}

}  // namespace bellwether::client
