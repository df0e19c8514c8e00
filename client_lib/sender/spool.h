// spool.h: messages on disk, where the window in memory would have to thin.
//
// A folder of segments, each a file <first ordinal, 16 hexadecimal digits><suffix>:
// 8 bytes of magic, then records without gaps.  A record is the window's own
// (window.h) with a checksum before it:
//   0 u32 crc32c of all that follows   4 u32 body_bytes
//   8 u64 flags: 1 = last part, 2 = the body is packed (body_codec.h)
//  16 u64 ordinal   24 u64 ring_position   32 u64 frames_admitted   40 body
// Ordinals rise within a segment and from one to the next; they may leave out
// those that lie in the window.
//
// A frame is whole in one segment, and given out only if all of its records are
// there with the right checksum.  What one Append() was given is one write: after
// a kill it is there or it is not.  A process that opens the folder again cuts off
// what is torn, and begins a segment of its own.  A segment is deleted once all of it was freed.
// Nothing is synced: this is for a server that is away and a process that was
// killed, not for a machine that lost its power.
//
// Not thread-safe.

#ifndef BELLWETHER_CLIENT_LIB_SENDER_SPOOL_H_
#define BELLWETHER_CLIENT_LIB_SENDER_SPOOL_H_

#include <chrono>
#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <vector>

#include "client_lib/sender/body_codec.h"

namespace bellwether::client {

// A ClientMessage without its seq, and its place among the others.
struct HeldMessage {
  uint64_t ordinal = 0;
  bool last_part = false;        // The frame is whole with it.
  uint64_t frames_admitted = 0;  // Up to and with this message's frame.
  uint64_t ring_position = 0;    // Of its frame.
  std::string_view body;
};

class Spool {
 public:
  struct Options {
    std::string folder;  // Exists; no other process writes to it.
    std::string suffix = ".spool";
    uint64_t bytes_max = uint64_t{1} << 30;       // On disk, this folder.
    uint64_t free_bytes_min = uint64_t{1} << 30;  // The file system keeps this much free,
    double free_ratio_min = 0.05;                 // or this share of it if that is less.
    uint64_t segment_bytes = uint64_t{16} << 20;
  };
  // A place among the records.
  struct Cursor {
    uint64_t segment = 0;  // Its first ordinal; 0 = before the oldest.
    uint64_t offset = 0;
  };

  explicit Spool(Options options);
  ~Spool();
  Spool(const Spool&) = delete;
  Spool& operator=(const Spool&) = delete;

  // Takes over what is in the folder, up to and with `ordinal_max`; what lies
  // behind that, or is torn, is cut off.  False with trouble() set.
  bool Open(uint64_t ordinal_max);

  // Adds the messages of one frame, all or none of them.  False with trouble()
  // set: the cap or the disk's floor is reached or the disk is full (tried again
  // when something was freed, or kRetryAfter later), or the disk failed (never
  // tried again).  REQUIRES: ordinals rise.
  bool Append(const std::vector<HeldMessage>& messages);
  // Append() would not even try.
  bool refuses() const;
  const std::string& trouble() const { return trouble_; }

  // The record at the cursor or the next one behind it, without moving the
  // cursor; `message->body` is valid until the next call.  A frame that cannot
  // be read to its end ends its segment.  False past the newest record.
  bool Peek(Cursor* cursor, HeldMessage* message);
  // Moves the cursor past what Peek() has just given.
  void Advance(Cursor* cursor) const;

  // Writes to `*last` the newest record up to and with `ordinal` that ends a
  // frame (without a body); leaves it if there is none.  REQUIRES: `ordinal` does
  // not go back.
  void FindFrameEnd(uint64_t ordinal, HeldMessage* last);
  // Nothing up to and with `ordinal` is needed any more; whole segments are
  // deleted.
  void FreeUpTo(uint64_t ordinal);

  bool empty() const { return segments_.empty(); }
  uint64_t bytes() const { return bytes_; }
  // Of the newest record; 0 = none.
  uint64_t last_ordinal() const;
  // Up to and with the newest frame of which all is here; 0 = none.
  uint64_t last_frames_admitted() const;
  // Bytes that others have in use of the same cap.
  void set_other_bytes(uint64_t bytes) { other_bytes_ = bytes; }

 private:
  static constexpr std::chrono::seconds kRetryAfter{10};

  struct Segment {
    uint64_t first_ordinal = 0;
    uint64_t last_ordinal = 0;
    uint64_t bytes = 0;     // Up to here records are whole.
    HeldMessage last_part;  // The newest one that ends a frame, without a body.
    int fd = -1;
  };

  std::string PathOf(const Segment& segment) const;
  bool OpenFile(Segment* segment);
  void CloseOthers(const Segment* keep);
  // Takes a file that an earlier process left, up to its last whole frame.
  bool TakeOver(Segment* segment, uint64_t ordinal_max, bool newest);
  // Walks over the segment's records: how far it holds whole frames.  Without
  // `verify` only the last of them is compared with its checksum.
  bool FindLastFrame(Segment* segment, uint64_t ordinal_max, bool verify);
  bool StartSegment(uint64_t first_ordinal);
  bool HasRoom(uint64_t bytes);
  // Compares the checksum, and reads the body, if `body` is not null.
  bool ReadRecord(Segment* segment, uint64_t offset, std::string* body, HeldMessage* message, uint64_t* record_bytes);
  // Of a frame whose records from `offset` on are not yet given out.
  bool IsWholeFrame(Segment* segment, uint64_t offset);
  bool Refuse(std::string why, bool for_good);

  const Options options_;
  std::deque<Segment> segments_;  // Oldest first.
  bool writing_ = false;          // The newest one is ours to append to.
  uint64_t bytes_ = 0;
  uint64_t other_bytes_ = 0;
  Cursor found_;  // Where FindFrameEnd() goes on.
  Cursor peeked_at_;
  uint64_t peeked_bytes_ = 0;
  HeldMessage peeked_;
  BodyCodec codec_;
  std::string body_;     // Of `peeked_`.
  std::string stored_;   // As it lies in the file.
  Cursor whole_;         // The frames before it, in its segment, were found whole.
  std::string checked_;  // A body that is read for its checksum alone.
  std::string batch_;
  std::string trouble_;
  bool failed_ = false;
  bool full_ = false;
  std::chrono::steady_clock::time_point full_since_{};
  uint64_t unchecked_bytes_ = UINT64_MAX;  // Written since the disk's floor was looked at.
};

}  // namespace bellwether::client

#endif  // BELLWETHER_CLIENT_LIB_SENDER_SPOOL_H_
