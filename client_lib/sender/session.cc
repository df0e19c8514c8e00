#include "client_lib/sender/session.h"

#include <unistd.h>

#include <algorithm>

#include "bellwether/client.h"
#include "client_lib/sender/credentials.h"

namespace bellwether::client {
namespace {

constexpr std::chrono::milliseconds kOwnStall{1000};
constexpr int kMovesMax = 4;  // Addresses followed in a row before backing off.

bool IsFinal(grpc::StatusCode code) {
  switch (code) {
    case grpc::StatusCode::INVALID_ARGUMENT:
    case grpc::StatusCode::FAILED_PRECONDITION:
    case grpc::StatusCode::UNIMPLEMENTED:
    case grpc::StatusCode::ABORTED:
      return true;
    default:
      return false;
  }
}

// Somebody has to put a token or a role right first, and will not restart the job for it.
bool IsRefusal(grpc::StatusCode code) {
  return code == grpc::StatusCode::UNAUTHENTICATED || code == grpc::StatusCode::PERMISSION_DENIED;
}

std::string Describe(const grpc::Status& status) {
  static constexpr const char* kNames[] = {
      "OK",        "CANCELLED",      "UNKNOWN",           "INVALID_ARGUMENT",   "DEADLINE_EXCEEDED",
      "NOT_FOUND", "ALREADY_EXISTS", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION",
      "ABORTED",   "OUT_OF_RANGE",   "UNIMPLEMENTED",     "INTERNAL",           "UNAVAILABLE",
      "DATA_LOSS", "UNAUTHENTICATED"};
  const auto code = static_cast<size_t>(status.error_code());
  return std::string(code < std::size(kNames) ? kNames[code] : "unknown status") + ": " + status.error_message();
}

int64_t NowUnixNs() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::system_clock::now().time_since_epoch())
      .count();
}

}  // namespace

Session::Session(const Parts& parts)
    : parts_(parts),
      header_(parts.memory->header()),
      window_(parts.window),
      backoff_(static_cast<uint64_t>(NowUnixNs()) ^ static_cast<uint64_t>(getpid()) << 32),
      address_(header_->config.server),
      durable_ordinal_(window_->state().freed_ordinal),
      cursor_(window_->Begin()) {
  SetLink(BW_LINK_CONNECTING);
  unreachable_since_ = Clock::now();
}

LossTotals Session::Losses() const {
  const SenderState& state = window_->state();
  return {.dropped = header_->dropped_ring.load(std::memory_order_relaxed) + state.frames_dropped,
          .stripped = state.frames_stripped};
}

void Session::Step(Clock::time_point now) {
  if (phase_ == Phase::kFailed) return;
  parts_.commands->Pump();
  if (phase_ == Phase::kWaiting) {
    if (now >= next_try_) Connect(now);
    return;
  }
  // Who was stopped himself has not listened.
  if (now - stepped_at_ > kOwnStall) heard_at_ = now;
  stepped_at_ = now;
  for (const v1::ServerMessage& message : stream_->TakeMessages()) {
    heard_at_ = now;
    Handle(message, now);
    if (phase_ != Phase::kConnecting && phase_ != Phase::kStreaming) return;
  }
  if (const std::optional<grpc::Status> status = stream_->status(); status.has_value()) {
    for (const v1::ServerMessage& message : stream_->TakeMessages()) Handle(message, now);
    if (phase_ == Phase::kConnecting || phase_ == Phase::kStreaming) OnEnd(*status, now);
    return;
  }
  if ((phase_ == Phase::kConnecting || draining_) && now >= deadline_) {
    RetryLater(draining_ ? "the server drains and does not end" : "no answer to Hello", now);
    return;
  }
  if (phase_ != Phase::kStreaming || bye_said_) return;
  if (silence_max_.count() > 0 && now - heard_at_ > silence_max_) {
    RetryLater("nothing heard for " + std::to_string(silence_max_.count()) + " ms: the link is cut or the server hangs",
               now);
    return;
  }
  if (now >= next_heartbeat_) {
    stream_->Send(MakeHeartbeat(NowUnixNs(), Losses()));
    next_heartbeat_ = now + kHeartbeat;
  }
  if (!takes_own_ && parts_.intake->own_seen()) {
    parts_.log->Once(
        "own", "the server is older than this client and does not know signals of the job's own: it leaves them out");
  }
  if (!draining_ && now >= throttled_until_) SendFromWindow(now);
}

void Session::Connect(Clock::time_point now) {
  Connection connection = OpenConnection(header_->config, address_);
  if (!connection.warning.empty()) parts_.log->Once("secret", connection.warning);
  if (!connection.error.empty()) {
    RetryLater(connection.error, now);
    return;
  }
  const SenderState& state = window_->state();
  const bool holds = state.seq_base_known != 0 && !window_->empty();
  const auto first_unacked = static_cast<uint64_t>(state.seq_base + static_cast<int64_t>(state.freed_ordinal) + 1);
  stream_ = std::make_unique<Stream>(connection.channel, connection.token, parts_.wake);
  v1::ClientMessage hello = parts_.hello != nullptr ? *parts_.hello : MakeHello(header_->config);
  hello.mutable_hello()->set_first_unacked_seq(holds ? first_unacked : 0);
  hello.mutable_hello()->set_dropped_total(Losses().dropped);
  hello.mutable_hello()->set_stripped_total(Losses().stripped);
  stream_->Send(hello);
  phase_ = Phase::kConnecting;
  draining_ = false;
  deadline_ = now + kWelcomeWithin;
}

void Session::Handle(const v1::ServerMessage& message, Clock::time_point now) {
  switch (message.body_case()) {
    case v1::ServerMessage::kWelcome:
      if (phase_ != Phase::kConnecting) return;
      phase_ = Phase::kStreaming;
      welcomed_at_ = now;
      acked_ = false;
      next_heartbeat_ = now + kHeartbeat;
      throttled_until_ = {};
      OnWelcome(message.welcome());
      return;
    case v1::ServerMessage::kAck: {
      const SenderState& state = window_->state();
      if (message.ack().session_epoch() != epoch_ || phase_ != Phase::kStreaming) return;
      const int64_t ordinal = static_cast<int64_t>(message.ack().durable_seq()) - state.seq_base;
      // Never beyond what was sent, whatever the server says.
      if (ordinal > static_cast<int64_t>(durable_ordinal_)) {
        durable_ordinal_ = std::min(static_cast<uint64_t>(ordinal), state.sent_ordinal);
        acked_ = true;
      }
      return;
    }
    case v1::ServerMessage::kSampling:
      parts_.commands->PushSampling(message.sampling());
      return;
    case v1::ServerMessage::kAction:
      OnAction(message.action());
      return;
    case v1::ServerMessage::kThrottle:
      throttled_until_ = now + std::chrono::milliseconds(message.throttle().retry_after_ms());
      header_->error.Set("throttled by the server: " + message.throttle().reason());
      return;
    case v1::ServerMessage::kMoved:
      address_ = message.moved().address();
      stream_.reset();
      phase_ = Phase::kWaiting;
      if (++moves_ > kMovesMax) {
        RetryLater("the servers send this run in a circle", now);
      } else {
        next_try_ = now;
      }
      return;
    case v1::ServerMessage::kDrain:
      draining_ = true;
      deadline_ = now + kDrainWithin;
      retry_after_ = std::chrono::milliseconds(message.drain().retry_after_ms());
      return;
    case v1::ServerMessage::BODY_NOT_SET:
      return;  // Of a newer server.
  }
}

void Session::OnWelcome(const v1::Welcome& welcome) {
  SenderState* state = window_->mutable_state();
  const auto durable = static_cast<int64_t>(welcome.durable_seq());
  if (state->seq_base_known == 0) {
    state->seq_base = durable - static_cast<int64_t>(state->freed_ordinal);
    state->seq_base_known = 1;
  } else if (durable > state->seq_base + static_cast<int64_t>(state->sent_ordinal)) {
    durable_ordinal_ = state->sent_ordinal;
    state->seq_base = durable - static_cast<int64_t>(state->sent_ordinal);
  } else if (durable < state->seq_base + static_cast<int64_t>(state->freed_ordinal)) {
    state->seq_base = durable - static_cast<int64_t>(state->freed_ordinal);
    parts_.log->Once("store", "the server no longer has what it acknowledged; going on behind what it has");
  } else {
    durable_ordinal_ = std::max(durable_ordinal_, static_cast<uint64_t>(durable - state->seq_base));
  }
  state->window_bytes_max = welcome.window_bytes();
  state->message_bytes_max = welcome.message_bytes_max();
  window_->Commit();
  silence_max_ = std::chrono::milliseconds(int64_t{welcome.sign_of_life_ms()} * kSignsMissedMax);
  takes_own_ = welcome.own_signals_max() > 0;
  epoch_ = welcome.session_epoch();
  cursor_ = window_->Begin();
  backoff_.Reset();
  retry_after_ = std::chrono::milliseconds(0);
  moves_ = 0;
  if (welcomed_before_) header_->reconnects.fetch_add(1, std::memory_order_relaxed);
  welcomed_before_ = true;
  header_->error.Set("");
  header_->page_url.Set(welcome.page_url());
  SetLink(BW_LINK_STREAMING);
  if (welcome.has_sampling()) parts_.commands->PushSampling(welcome.sampling());
}

void Session::OnAction(const v1::Action& action) {
  std::string why;
  if (parts_.commands->PushAction(action, &why)) return;
  v1::ClientMessage message;
  v1::ActionResult* result = message.mutable_action_result();
  result->set_id(action.id());
  result->set_attempt(header_->config.attempt);
  result->set_reason(why);
  if (!parts_.intake->AppendOwn(message))
    parts_.log->Once("action", "an action could neither be passed on nor refused: " + why);
}

void Session::SendFromWindow(Clock::time_point) {
  while (stream_->outbox_bytes() < kOutboxBytesMax) {
    Window::Message message;
    Window::Cursor next = cursor_;
    // What the Welcome or an early Ack made durable is not sent again.
    do {
      if (!window_->Read(&next, &message)) {
        cursor_ = next;
        return;
      }
    } while (message.ordinal <= durable_ordinal_);
    SenderState* state = window_->mutable_state();
    if (message.ordinal > state->sent_ordinal) {
      // Before it is sent: a Welcome after a crash is judged by it.
      state->sent_ordinal = message.ordinal;
      if (message.last_part) state->frames_sent = std::max(state->frames_sent, message.frames_admitted);
      window_->Commit();
    }
    stream_->Send(static_cast<uint64_t>(state->seq_base + static_cast<int64_t>(message.ordinal)), message.body);
    cursor_ = next;
  }
}

void Session::OnEnd(const grpc::Status& status, Clock::time_point now) {
  if (bye_said_ && status.ok()) {
    phase_ = Phase::kWaiting;
    next_try_ = Clock::time_point::max();
    return;
  }
  if (IsFinal(status.error_code())) {
    failure_ = status.error_code();
    Fail(Describe(status));
    return;
  }
  RetryLater(status.ok() ? "the server closed the stream" : Describe(status), now,
             IsRefusal(status.error_code())                         ? Cause::kRefused
             : status.error_code() == grpc::StatusCode::UNAVAILABLE ? Cause::kMaybePlanned
                                                                    : Cause::kOther);
}

void Session::RetryLater(const std::string& why, Clock::time_point now, Cause cause) {
  if (phase_ == Phase::kStreaming) unreachable_since_ = now;
  if (now - unreachable_since_ > kRetryFor) {
    Fail("given up after 7 days: " + why);
    return;
  }
  // Connections grow old and servers are started anew: that is told once the first try
  // after it has failed, too, or the link does not last.
  bool quiet = false;
  if (phase_ == Phase::kStreaming) {
    cuts_soon_ = !acked_ && now - welcomed_at_ < kCutSoon ? cuts_soon_ + 1 : 0;
    quiet = cause == Cause::kMaybePlanned && cuts_soon_ < kCutSoonMax;
  }
  stream_.reset();
  phase_ = Phase::kWaiting;
  bye_said_ = false;
  std::chrono::milliseconds wait = backoff_.Next();
  // What a person must put right is not asked about more often than needed.
  if (cause == Cause::kRefused) wait = std::max(wait, std::chrono::milliseconds(1000));
  if (draining_ || retry_after_.count() > 0) {
    wait += retry_after_;
    retry_after_ = std::chrono::milliseconds(0);
  }
  draining_ = false;
  next_try_ = now + wait;
  const std::string text = address_ + ": " + why;
  // Where it had moved to is gone, or leads nowhere: the next try begins anew.
  address_ = header_->config.server;
  moves_ = 0;
  header_->error.Set(text);
  SetLink(BW_LINK_CONNECTING);  // Whoever sees that finds the reason.
  if (quiet) return;
  parts_.log->Once(cause == Cause::kRefused ? "refused" : "unreachable",
                   text + "; training goes on, frames wait (" +
                       (window_->spool() != nullptr ? "32 MiB, then on disk)" : "64 MiB, then thinned)"));
}

void Session::Fail(const std::string& why) {
  stream_.reset();
  phase_ = Phase::kFailed;
  header_->error.Set(address_ + ": " + why);
  parts_.log->Once("failed", address_ + ": " + why + "; not tried again");
}

void Session::SendBye(v1::ByeReason reason, const std::string& detail) {
  const SenderState& state = window_->state();
  const auto last = static_cast<uint64_t>(state.seq_base + static_cast<int64_t>(state.sent_ordinal));
  stream_->Send(MakeBye(reason, last, detail));
  stream_->CloseWrites();
  bye_said_ = true;
}

}  // namespace bellwether::client
