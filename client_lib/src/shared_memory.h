// shared_memory.h: what the trainer and bellwether-sender share.
//
// One memfd holds, in this order: SharedHeader, the command ring (sender to
// trainer), the frame ring (trainer to sender), and the window of encoded but
// unacknowledged messages, which only the sender touches.  The window lives
// here and not in the sender so that a killed sender loses nothing: the next
// one finds every message with the seq it already has.
//
// The trainer holds a POSIX record lock on byte 0 of the file for as long as it
// lives and has not called exec.  Unlike a pid it cannot be recycled, and
// unlike a pidfd it works across pid namespaces; the sender asks for it.
//
// Both sides are built together and the sender is started by the library, so
// the layout needs no compatibility, only kSharedVersion to notice a mix-up.

#ifndef BELLWETHER_CLIENT_LIB_SRC_SHARED_MEMORY_H_
#define BELLWETHER_CLIENT_LIB_SRC_SHARED_MEMORY_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace bellwether::client {

inline constexpr uint64_t kSharedMagic = 0x31676e6952774200;  // "\0BwRing1"
inline constexpr uint32_t kSharedVersion = 5;
inline constexpr uint32_t kRingFramesDefault = 256;
inline constexpr uint32_t kRingFramesMax = 4096;
inline constexpr uint64_t kRingBytesMax = uint64_t{64} << 30;  // Address space; untouched pages cost nothing.
inline constexpr uint32_t kCommandSlots = 64;
inline constexpr uint32_t kCommandPayloadMax = 4092;
inline constexpr uint32_t kPathMax = 4096;
inline constexpr uint32_t kServerMax = 256;
inline constexpr uint32_t kRunNameMax = 128;
inline constexpr uint32_t kActionIdMax = 128;
inline constexpr uint32_t kReasonMax = 256;
// Numbers of the protos, which this side must not include; the sender asserts
// that they still agree.
inline constexpr uint32_t kEventKindMax = 13;
inline constexpr uint32_t kSpectrumKindMax = 3;
inline constexpr uint32_t kActionKindMax = 9;
inline constexpr uint32_t kEventKindAttach = 5;
inline constexpr uint32_t kEventKindDetach = 6;

// What a sender may have on disk.
inline constexpr uint64_t kSpoolBytesDefault = uint64_t{1} << 30;
inline constexpr uint64_t kSpoolBytesMin = uint64_t{1} << 20;
inline constexpr uint64_t kSpoolBytesMax = uint64_t{1} << 44;
inline constexpr int64_t kLaunchUnixMsMax = int64_t{1} << 53;

// Encoded, unacknowledged messages: the limit, and the room for it.  A message
// is never split at the end of the room, so that it needs one message more.
inline constexpr uint64_t kWindowBytesMax = uint64_t{64} << 20;
inline constexpr uint64_t kWindowRoomBytes = kWindowBytesMax + (uint64_t{2} << 20);

static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free,
              "shared between processes");

// A short text that one process writes and another reads, whole or not at all.
class SharedText {
 public:
  static constexpr size_t kBytes = 256;  // With the closing zero.

  // Cuts what is too long.  One writer at a time.
  void Set(std::string_view text);
  // Writes the text and a zero to `out`.  Gives up on a writer that died
  // half-way and then writes what there is.
  void Get(char (&out)[kBytes]) const;

 private:
  std::atomic<uint64_t> version_{0};  // Odd while it is being written.
  std::atomic<uint64_t> words_[kBytes / 8]{};
};

// How the trainer is to be found by the sender, and what the run is.  Strings
// are zero-terminated; empty = not given.
struct SenderConfig {
  uint32_t rank, world, reporters, attempt;
  uint32_t layers, heads, kv_heads, head_dim, seq_len;
  uint32_t window, actions_mask, experts;
  uint8_t causal, centred, qk_norm, step_from_attach, ranks_agree;
  int64_t launch_unix_ms;
  double weight_decay;
  float softcap;
  uint8_t run_uuid[16];
  char run[kRunNameMax + 1];
  char server[kServerMax + 1];
  char framework[65];
  char model[129];
  char attention_kernel[65];
  char score_dtype[17];
  char record_path[kPathMax];
  char tls_ca[kPathMax];
  char tls_cert[kPathMax];
  char tls_key[kPathMax];
  char token_file[kPathMax];
  char log_path[kPathMax];
  char spool_dir[kPathMax];
  uint64_t spool_bytes;  // Not 0 if spool_dir is given.
};

// Everything that a restarted sender goes on from.  Messages are numbered by
// `ordinal`, 1, 2, 3, ...; on the wire seq = seq_base + ordinal, and seq_base is
// known from the first Welcome on.
struct SenderState {
  uint64_t ring_taken;        // Ring position of the next frame to take.
  uint64_t window_head;       // Byte positions of the window's end
  uint64_t window_tail;       // and start.
  uint64_t appended_ordinal;  // Newest message in the window.
  uint64_t freed_ordinal;     // Newest message that left it as durable.
  uint64_t sent_ordinal;      // Newest message ever handed to a stream.
  uint64_t recorded_ordinal;  // Newest message readable in the file.
  int64_t seq_base;
  uint64_t frames_admitted;  // Frames, events, ... that entered the window.
  uint64_t frames_dropped;   // That did not.
  uint64_t frames_sent;      // Whole frames handed to a stream or the file.
  uint64_t frames_durable;
  uint64_t frames_spooled;   // Admitted to the disk, not to the memory.
  uint64_t frames_lost;      // Admitted, then lost with a part of the disk; also in frames_dropped.
  uint64_t frames_stripped;  // Admitted without their heads.
  uint64_t lost_from;        // The newest such messages; 0 = none.
  uint64_t lost_through;
  uint64_t spool_number;      // Of the spool's folder; 0 = none yet.
  uint64_t window_bytes_max;  // As the server last said; 0 = not yet.
  uint32_t message_bytes_max;
  uint8_t seq_base_known;
  uint8_t record_started;
  uint8_t detached;  // The newest attach or detach event is a detach.
};

enum class TrainerState : uint32_t { kOpen = 0, kClosed = 1 };

// How the last sender ended; kCrashed stands while one runs.
enum class SenderEnd : uint32_t { kCrashed = 0, kDone = 1, kFailed = 2 };

struct CommandSlot {
  uint32_t type;
  uint32_t payload_bytes;
  double value;
  uint8_t payload[kCommandPayloadMax + 4];
};

struct SharedHeader {
  uint64_t magic;
  uint32_t version;
  uint32_t slot_count;
  uint64_t slot_bytes;
  uint64_t values_max;  // Floats that fit a slot.
  uint64_t commands_offset, ring_offset, window_offset, total_bytes;

  // Written by the trainer.
  alignas(64) std::atomic<uint64_t> head;  // Ring positions pushed so far.
  std::atomic<uint64_t> dropped_ring;
  std::atomic<uint64_t> flush_position;  // Make durable up to here soon.
  std::atomic<uint64_t> command_tail;
  std::atomic<TrainerState> trainer_state;

  // Written by the sender.
  alignas(64) std::atomic<uint64_t> tail;  // Ring positions taken so far.
  std::atomic<uint64_t> settled;           // Durable, or dropped and counted, up to here.
  std::atomic<uint64_t> command_head;
  std::atomic<uint64_t> frames_sent;
  std::atomic<uint64_t> frames_acked;
  std::atomic<uint64_t> frames_dropped_window;
  std::atomic<uint64_t> frames_stripped;
  std::atomic<uint64_t> frames_spooled;
  std::atomic<uint64_t> spool_bytes;
  std::atomic<uint64_t> reconnects;
  std::atomic<uint32_t> link;  // bw_link_state
  std::atomic<uint32_t> sampling_period_steps;
  std::atomic<uint32_t> sender_pid;
  std::atomic<SenderEnd> sender_end;
  std::atomic<uint32_t> state_index;  // Which of state[2] counts.
  SenderState state[2];

  // Written by the trainer's watchdog.
  alignas(64) std::atomic<uint64_t> sender_restarts;

  SharedText error;  // By the sender, or by the watchdog while there is none.
  SharedText page_url;
  SenderConfig config;
};

// A mapping of the shared file.  Owns the mapping and the descriptor.
class SharedMemory {
 public:
  struct Layout {
    uint32_t slot_count = 0;
    uint64_t values_max = 0;
  };

  SharedMemory() = default;
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  // Makes a new zeroed file, close-on-exec, and takes the trainer's lock.
  // Returns 0 or an errno.
  int Create(const Layout& layout);
  // Maps a file that Create() made.  Returns 0 or an errno; EPROTO if it is
  // not such a file or one of another version.
  int Open(int fd);

  bool valid() const { return base_ != nullptr; }
  int fd() const { return fd_; }
  SharedHeader* header() const { return reinterpret_cast<SharedHeader*>(base_); }
  CommandSlot* commands() const { return reinterpret_cast<CommandSlot*>(base_ + header()->commands_offset); }
  char* ring() const { return base_ + header()->ring_offset; }
  char* window() const { return base_ + header()->window_offset; }

  // False once the process that called Create() is gone.  Sender only.
  bool TrainerHoldsLock() const;
  // Gives the window's pages back to the system.  Sender only.
  void ReleaseWindowPages();

 private:
  int Map(size_t bytes);

  char* base_ = nullptr;
  size_t bytes_ = 0;
  int fd_ = -1;
};

// Bytes of a slot that holds `values_max` floats.
uint64_t SlotBytes(uint64_t values_max);

}  // namespace bellwether::client

#endif  // BELLWETHER_CLIENT_LIB_SRC_SHARED_MEMORY_H_
