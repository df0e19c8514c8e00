// sender.h: the loop of bellwether-sender.
//
// ring -> window (-> spool) -> {stream, file}; acknowledgements free the window.  Looks
// into the ring every 1 ms while frames come and every 5 ms otherwise, so that a push
// needs no system call to wake it.  Ends when the trainer has closed its client
// or is gone and everything is durable, or kDrainSeconds later; what is not
// durable then stays in the spool, for the next attempt, or is given up.

#ifndef BELLWETHER_CLIENT_LIB_SENDER_SENDER_H_
#define BELLWETHER_CLIENT_LIB_SENDER_SENDER_H_

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>

#include "client_lib/sender/command_queue.h"
#include "client_lib/sender/intake.h"
#include "client_lib/sender/orphaned_spools.h"
#include "client_lib/sender/recorder.h"
#include "client_lib/sender/sender_log.h"
#include "client_lib/sender/session.h"
#include "client_lib/sender/spool.h"
#include "client_lib/sender/spool_folder.h"
#include "client_lib/sender/window.h"

namespace bellwether::client {

// For a signal's handler: a sender whose trainer has ended sends no more.  What
// is left goes to its folder, if it has one, and is counted.
void AskToEnd();

class Sender {
 public:
  // `memory` outlives the sender.
  explicit Sender(SharedMemory* memory);
  ~Sender();

  // Runs to the end and leaves in the header how it ended.
  void Run();

 private:
  using Clock = std::chrono::steady_clock;

  void Wake();
  void StartRecorder();
  // Without one, if the folder cannot be used: that is said once.
  void StartSpool();
  void StepSpool();
  // Leaves what is not durable to the next attempt.
  bool KeepOnDisk();
  void Record(Clock::time_point now, bool flush);
  void FreeDurable();
  // Notices that the trainer is done; true once the sender may end.
  bool IsFinished(Clock::time_point now);
  void FinishRecording();
  void Wait(bool busy);
  SenderEnd End();

  SharedMemory* memory_;
  SharedHeader* header_;
  SenderLog log_;
  std::unique_ptr<SpoolFolder> folder_;  // Without a spool: null, as the next.
  std::unique_ptr<Spool> spool_;         // Outlives the window.
  Window window_;
  Intake intake_;
  CommandQueue commands_;
  std::unique_ptr<Session> session_;                 // Without a server: null.
  std::unique_ptr<OrphanedSpools> orphaned_spools_;  // Of earlier attempts; null once they are sent.
  std::unique_ptr<Recorder> recorder_;               // Not recording, or it failed: null.
  Window::Cursor record_cursor_;
  Clock::time_point next_flush_{};
  Clock::time_point next_lock_check_{};
  Clock::time_point ending_since_{};
  Clock::time_point bye_since_{};
  bool trainer_died_ = false;

  std::mutex mutex_;
  std::condition_variable condition_;
  bool woken_ = false;
};

}  // namespace bellwether::client

#endif  // BELLWETHER_CLIENT_LIB_SENDER_SENDER_H_
