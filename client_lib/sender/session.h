// session.h: the link to a server, over all its connections.
//
// Connects, says Hello, waits for Welcome, sends what the window holds, frees
// what is acknowledged, and comes back after every loss with the same seqs:
//   seq = seq_base + ordinal, seq_base = what the first Welcome said is durable.
// A later Welcome with durable_seq d means, for the messages held:
//   d within what was sent    everything up to d is durable; resend after it;
//   d below what was freed    the server lost its store: the next seq is d + 1;
//   d above what was sent     another writer was here: the next seq is d + 1.
//
// Answers that no patience cures (INVALID_ARGUMENT, FAILED_PRECONDITION,
// UNIMPLEMENTED, ABORTED = fenced) end the link for good; everything else, a
// refused token or role too, is tried again with Backoff for kRetryFor.
//
// A link that is cut in silence is found by what the server promised: to say
// something every sign_of_life_ms.  TCP finds it too, but not where a proxy
// between us goes on confirming what is sent.
//
// Not thread-safe; Step() is to be called every few milliseconds.

#ifndef BELLWETHER_CLIENT_LIB_SENDER_SESSION_H_
#define BELLWETHER_CLIENT_LIB_SENDER_SESSION_H_

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "client_lib/sender/command_queue.h"
#include "client_lib/sender/intake.h"
#include "client_lib/sender/messages.h"
#include "client_lib/sender/sender_log.h"
#include "client_lib/sender/stream.h"
#include "client_lib/sender/window.h"
#include "client_lib/src/backoff.h"

namespace bellwether::client {

class Session {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::seconds kHeartbeat{10};
  static constexpr std::chrono::seconds kWelcomeWithin{20};
  static constexpr std::chrono::seconds kDrainWithin{15};
  static constexpr int kSignsMissedMax = 3;  // Then the link counts as cut.
  // Links cut so soon, so often in a row and before an Ack, are broken: no server's restart is that.
  static constexpr std::chrono::seconds kCutSoon{60};
  static constexpr int kCutSoonMax = 3;
  static constexpr std::chrono::hours kRetryFor{7 * 24};
  static constexpr size_t kOutboxBytesMax = 1 << 20;

  struct Parts {
    SharedMemory* memory;
    Window* window;
    Intake* intake;
    CommandQueue* commands;
    SenderLog* log;
    std::function<void()> wake;
    const v1::ClientMessage* hello = nullptr;  // Null: of the memory's configuration.  Outlives the session.
  };
  explicit Session(const Parts& parts);

  // Does whatever can be done now.
  void Step(Clock::time_point now);

  bool failed() const { return phase_ == Phase::kFailed; }
  // What the server said when it failed; ABORTED = a newer session has the run and rank.
  grpc::StatusCode failure() const { return failure_; }
  bool streaming() const { return phase_ == Phase::kStreaming; }
  uint64_t durable_ordinal() const { return durable_ordinal_; }

  // Says Bye behind everything sent.  REQUIRES: streaming().
  void SendBye(v1::ByeReason reason, const std::string& detail);
  bool bye_said() const { return bye_said_; }  // On this stream.
  // The server has closed the stream after the Bye.
  bool bye_done() const { return bye_said_ && phase_ != Phase::kStreaming; }

 private:
  enum class Phase { kWaiting, kConnecting, kStreaming, kFailed };

  void Connect(Clock::time_point now);
  void Handle(const v1::ServerMessage& message, Clock::time_point now);
  void OnWelcome(const v1::Welcome& welcome);
  void OnAction(const v1::Action& action);
  void OnEnd(const grpc::Status& status, Clock::time_point now);
  // kRefused: the caller's token or role was.  kMaybePlanned: how connections that have
  // grown old end, and servers that are stopped.
  enum class Cause { kOther, kRefused, kMaybePlanned };
  void RetryLater(const std::string& why, Clock::time_point now, Cause cause = Cause::kOther);
  void Fail(const std::string& why);
  void SendFromWindow(Clock::time_point now);
  LossTotals Losses() const;
  void SetLink(uint32_t link) { header_->link.store(link, std::memory_order_relaxed); }

  const Parts parts_;
  SharedHeader* const header_;
  Window* const window_;
  Backoff backoff_;
  Phase phase_ = Phase::kWaiting;
  std::unique_ptr<Stream> stream_;
  std::string address_;
  int moves_ = 0;  // In a row, without a Welcome.
  Clock::time_point next_try_{};
  Clock::time_point deadline_{};  // Of the Welcome, or of a drain.
  Clock::time_point unreachable_since_{};
  Clock::time_point next_heartbeat_{};
  Clock::time_point throttled_until_{};
  Clock::time_point welcomed_at_{};
  bool takes_own_ = false;        // The server knows OwnValues.
  bool acked_ = false;            // Since then.
  int cuts_soon_ = 0;             // In a row.
  Clock::time_point heard_at_{};  // From the server.
  Clock::time_point stepped_at_{};
  std::chrono::milliseconds silence_max_{0};  // 0 = this server promised nothing.
  std::chrono::milliseconds retry_after_{0};
  uint64_t epoch_ = 0;
  uint64_t durable_ordinal_;
  Window::Cursor cursor_;
  bool draining_ = false;
  bool welcomed_before_ = false;
  bool bye_said_ = false;
  grpc::StatusCode failure_ = grpc::StatusCode::OK;
};

}  // namespace bellwether::client

#endif  // BELLWETHER_CLIENT_LIB_SENDER_SESSION_H_
