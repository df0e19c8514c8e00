// orphaned_spools.h: sends what earlier senders of this run and rank left on disk.
//
// It is sent before the run's own stream is opened, with the Hello of the
// attempt that the frames are of.  A server takes an attempt's frames until the
// next attempt sends a Hello at that rank, and refuses them from then on.  So
// the log of the server reads as if it had never been away.  Frames that it
// refuses are counted as dropped by this client, and reported once.  So is what
// was lost with the memory of a sender that was killed together with its
// trainer.
//
// A folder that is locked belongs to a sender that still drains.  It is waited
// for, as long as a sender may take to end.
//
// Not thread-safe; Step() is to be called every few milliseconds.

#ifndef BELLWETHER_CLIENT_LIB_SENDER_ORPHANED_SPOOLS_H_
#define BELLWETHER_CLIENT_LIB_SENDER_ORPHANED_SPOOLS_H_

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>

#include "client_lib/sender/command_queue.h"
#include "client_lib/sender/intake.h"
#include "client_lib/sender/sender_log.h"
#include "client_lib/sender/session.h"
#include "client_lib/sender/spool.h"
#include "client_lib/sender/spool_folder.h"
#include "client_lib/sender/window.h"

namespace bellwether::client {

class OrphanedSpools {
 public:
  using Clock = std::chrono::steady_clock;

  struct Parts {
    SharedHeader* header;  // Of this client: where the server is, and what to show as its trouble.
    SenderLog* log;
    std::function<void()> wake;
    std::function<void(uint64_t frames)> dropped;  // So many frames will never arrive.
  };
  // Looks for folders with a number below `own`.
  OrphanedSpools(const Parts& parts, uint64_t own);
  ~OrphanedSpools();

  void Step(Clock::time_point now);
  bool done() const { return numbers_.empty(); }
  // On disk, as far as is known.
  uint64_t bytes() const;

 private:
  // One folder, as its sender was.
  struct Sending;

  void Next(Clock::time_point now);
  bool Restore(Sending* sending) const;
  void Finish(const std::string& trouble);
  // For a later attempt.
  void LeaveAlone(const std::string& why);

  const Parts parts_;
  std::deque<uint64_t> numbers_;  // The front one is `sending_`, or waited for.
  uint64_t waiting_bytes_ = 0;    // Of all but the front one.
  std::unique_ptr<Sending> sending_;
  Clock::time_point busy_since_{};
  Clock::time_point next_look_{};
};

}  // namespace bellwether::client

#endif  // BELLWETHER_CLIENT_LIB_SENDER_ORPHANED_SPOOLS_H_
