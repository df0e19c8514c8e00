// intake.h: from the ring into the window, thinning when the window fills.
//
// The window holds window_bytes_max() of messages.  As it fills, fewer and
// fewer frames are let in, so that a long outage is remembered coarsely and not
// forgotten:
// * all below one half, every 2nd below 3/4, every 4th below 7/8, every 8th
//   below 15/16;
// * then only signals of the run (loss, norms: a few bytes), then nothing;
// * spectra below one half, events and action results as long as they fit.
//
// What is not let in is counted, and the next frame carries the count.  A frame
// that is stripped of its heads is counted apart, and marked.  With a spool
// everything goes to disk from one half on, and thinning begins only where the
// disk does not take it.
//
// Not thread-safe.

#ifndef BELLWETHER_CLIENT_LIB_SENDER_INTAKE_H_
#define BELLWETHER_CLIENT_LIB_SENDER_INTAKE_H_

#include <cstdint>
#include <string>

#include "client_lib/sender/frame_encoder.h"
#include "client_lib/sender/window.h"
#include "client_lib/src/frame_ring.h"

namespace bellwether::client {

class Intake {
 public:
  Intake(SharedMemory* memory, Window* window);

  // Takes at most `slots_max` frames; returns how many.
  int Take(int slots_max);
  // Nothing is left in the ring.
  bool drained() const;
  // Counts what the ring still holds as dropped; for a link that failed.
  void DropRest();

  // What the window may hold: min(64 MiB, the server's limit).
  uint64_t window_bytes_max() const;

  // Appends a message of the sender's own that is no frame of the trainer.
  // False if it does not fit.
  bool AppendOwn(const v1::ClientMessage& message);

  // The job has signals of its own.
  bool own_seen() const { return encoder_.own_seen(); }

 private:
  void TakeOne(const char* slot);
  // Encodes and appends what the thinning lets in.  False = drop.
  bool Admit(const char* slot);
  EncodeContext Context() const;
  bool AppendAll();
  // To disk instead.
  bool SpillAll();

  SharedMemory* memory_;
  SharedHeader* header_;
  Window* window_;
  RingConsumer ring_;
  FrameEncoder encoder_;
  std::string spill_;  // Encoded messages on their way to the disk.
  uint64_t frames_seen_ = 0;
};

}  // namespace bellwether::client

#endif  // BELLWETHER_CLIENT_LIB_SENDER_INTAKE_H_
