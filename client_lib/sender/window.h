// window.h: encoded messages that are not yet durable, in the shared memory.
//
// A byte ring of whole messages, oldest first, numbered by ordinal without a
// gap.  A message leaves it when it is durable at the server (and readable in
// the file, where one is written).  With a spool, messages lie in the memory or
// on disk and are read as one sequence, by their ordinals; what the disk cannot
// give back is passed over and counted as dropped.
//
// Every change is made by writing the idle one of two SenderStates and then
// naming it with one atomic store.  So a process that maps the memory after a
// kill -9 finds either all of a change or nothing of it.  No message is lost,
// doubled or counted twice.
//
// Not thread-safe; one thread owns it.

#ifndef BELLWETHER_CLIENT_LIB_SENDER_WINDOW_H_
#define BELLWETHER_CLIENT_LIB_SENDER_WINDOW_H_

#include <cstdint>
#include <string_view>
#include <vector>

#include "client_lib/sender/spool.h"
#include "client_lib/src/shared_memory.h"

namespace bellwether::client {

class Window {
 public:
  // A place in the window.  Stays valid until the message it names is freed.
  struct Cursor {
    uint64_t position = 0;
    uint64_t ordinal = 0;  // Of the next message.
    uint64_t frames = 0;   // Whole ones before it.
    Spool::Cursor spool;
  };
  using Message = HeldMessage;

  // Goes on from the state in the memory.
  explicit Window(SharedMemory* memory);

  // `spool` outlives the window, or is taken away with nullptr.
  void SetSpool(Spool* spool) { spool_ = spool; }
  Spool* spool() const { return spool_; }

  // Changes of the state, kept by Commit().  Everything else in this class
  // calls Commit() itself.
  SenderState* mutable_state() { return &next_; }
  const SenderState& state() const { return next_; }
  void Commit();

  // Payload and headers of what is not yet durable and in the memory.
  uint64_t used_bytes() const { return next_.window_head - next_.window_tail; }
  bool empty() const { return next_.freed_ordinal == next_.appended_ordinal; }
  // What `body_bytes` of one message take.
  static uint64_t BytesFor(uint64_t body_bytes);

  // Room for one message at the end; write it, then call Append().  REQUIRES:
  // used_bytes() plus what was prepared stays within kWindowBytesMax.
  char* Prepare(uint64_t body_bytes);
  // Adds the prepared message.  It counts from the next Commit() on, together
  // with all others of its frame and the ring position that they came from.
  void Append(uint64_t body_bytes, bool last_part, uint64_t ring_position);

  // Adds the messages of a frame on disk, all or none; counts from the next
  // Commit() on.  False: the spool did not take them.  REQUIRES: spool().
  bool Spill(const std::vector<std::string_view>& bodies, uint64_t ring_position);

  // The oldest message, and the one after `cursor`.
  Cursor Begin() const;
  // False past the newest message.  `message->body` is valid until the next call
  // of anything here.
  bool Read(Cursor* cursor, Message* message);
  // The same of what is in the memory alone.
  bool ReadMemory(Cursor* cursor, Message* message) const;

  // Drops everything up to and with `ordinal` as durable.
  void FreeUpTo(uint64_t ordinal);
  // Publishes to the trainer's flush how far everything is durable, or dropped.
  void Settle();

 private:
  struct Record;

  Record* At(uint64_t position) const;
  // Steps over the unused end of the room.
  uint64_t SkipPad(uint64_t position) const;
  const Record* RecordAt(Cursor* cursor) const;  // Null past the newest.
  static Message MessageOf(const Record& record);
  void CountLost(uint64_t from, uint64_t through, uint64_t frames);
  // Frames that end at or before a message that is durable.
  void RecordDurable(const Message& message, uint64_t* settled);

  SharedMemory* memory_;
  SharedHeader* header_;
  SenderState next_;
  Spool* spool_ = nullptr;
  uint64_t high_water_ = 0;
};

}  // namespace bellwether::client

#endif  // BELLWETHER_CLIENT_LIB_SENDER_WINDOW_H_
