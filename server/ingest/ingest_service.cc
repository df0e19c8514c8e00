#include "server/ingest/ingest_service.h"

#include <grpcpp/alarm.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/access/grpc_credentials.h"
#include "server/ingest/encode.h"
#include "server/ingest/run_key.h"
#include "server/util/grpc_status.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

// Who does not read what is left for him, nor his stream's end, loses both then.
constexpr int64_t kEndNsMax = 5'000'000'000;

// A run counts its attempts by itself (launches.h), and a client by what it was told:
// each is spoken to in its own numbers.  True: the part was changed.
template <typename Part>
bool RenumberOne(uint32_t from, uint32_t to, Part* part) {
  if (part->attempt() != from) return false;
  part->set_attempt(to);
  return true;
}

bool Renumber(uint32_t from, uint32_t to, v1::ClientMessage* message) {
  if (from == to) return false;
  switch (message->body_case()) {
    case v1::ClientMessage::kFrame:
      return RenumberOne(from, to, message->mutable_frame());
    case v1::ClientMessage::kNames:
      return RenumberOne(from, to, message->mutable_names());
    case v1::ClientMessage::kSpectrum:
      return RenumberOne(from, to, message->mutable_spectrum());
    case v1::ClientMessage::kEvent:
      return RenumberOne(from, to, message->mutable_event());
    case v1::ClientMessage::kActionResult:
      return RenumberOne(from, to, message->mutable_action_result());
    case v1::ClientMessage::kHello:
    case v1::ClientMessage::kHeartbeat:
    case v1::ClientMessage::kBye:
    case v1::ClientMessage::BODY_NOT_SET:
      break;  // Of no attempt, or not decoded.
  }
  return false;
}

// The message's bytes in one piece.  False: gRPC cannot give them.
bool TakeBytes(grpc::ByteBuffer* received, std::string* bytes) {
  std::vector<grpc::Slice> slices;
  if (!received->Dump(&slices).ok()) return false;
  bytes->clear();
  bytes->reserve(received->Length());
  for (const grpc::Slice& slice : slices) bytes->append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  received->Clear();
  return true;
}

}  // namespace

// One per Attach(); deletes itself in OnDone().
//
// gRPC's reactions, the log's thread and the shards' threads meet here, under
// `mutex_`.  Nothing is called on the session while it is held, because the
// session calls back under its own lock.
class IngestService::Stream final : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>,
                                    public SessionOwner {
 public:
  Stream(IngestService* service, grpc::CallbackServerContext* context, GrantPtr grant, std::unique_ptr<StreamUse> use)
      : service_(service),
        context_(context),
        grant_(std::move(grant)),
        use_(std::move(use)),
        began_ns_(service->clock_->MonotonicNanos()),
        last_heard_ns_(began_ns_) {}

  void Start() { StartRead(&received_); }

  // ---- gRPC ----
  void OnReadDone(bool ok) override {
    if (!ok) {
      End(grpc::Status::OK);
      return;
    }
    {
      // What comes behind the end is not taken: he may write no more, or sends it again.
      absl::MutexLock lock(&mutex_);
      if (end_.has_value()) return;
    }
    last_heard_ns_.store(service_->clock_->MonotonicNanos(), std::memory_order_relaxed);
    TakeIncoming();
  }

  void OnWriteDone(bool ok) override {
    absl::MutexLock lock(&mutex_);
    writing_ = false;
    if (!ok) outgoing_.clear();
    WriteNext();
  }

  void OnCancel() override { End(grpc::Status::CANCELLED); }

  void OnDone() override {
    if (session_ != nullptr) session_->Detach();
    if (pause_ != nullptr) {
      absl::MutexLock lock(&pause_->mutex);
      pause_->stream = nullptr;
    }
    {
      absl::MutexLock lock(&service_->mutex_);
      service_->streams_.erase(this);
      service_->streams_gauge_->Set(static_cast<double>(service_->streams_.size()));
    }
    delete this;
  }

  // ---- session ----
  void OnOpen(uint64_t durable_seq) override {
    v1::ServerMessage message;
    v1::Welcome* welcome = message.mutable_welcome();
    {
      absl::MutexLock lock(&mutex_);
      if (session_ == nullptr) {  // Open() has not returned yet.
        opened_with_ = durable_seq;
        return;
      }
      welcome->set_session_epoch(session_->epoch());
    }
    welcome->set_durable_seq(durable_seq);
    welcome->set_window_bytes(service_->options_.window_bytes);
    welcome->set_server_version(service_->options_.server_version);
    welcome->set_message_bytes_max(service_->options_.message_bytes_max);
    welcome->set_own_signals_max(kOwnSignalsMax);
    welcome->set_sign_of_life_ms(service_->options_.sign_of_life_ms);
    if (!service_->options_.page_url_prefix.empty()) {
      welcome->set_page_url(service_->options_.page_url_prefix + run_name_);
    }
    absl::MutexLock lock(&mutex_);
    outgoing_.push_back(std::move(message));
    welcomed_ = true;
    durable_seq_ = std::max(durable_seq_, durable_seq);
    acked_seq_ = std::max(acked_seq_, durable_seq);
    for (v1::ServerMessage& action : held_) outgoing_.push_back(std::move(action));
    held_.clear();
    WriteNext();
  }

  void OnDurable(uint64_t seq) override {
    absl::MutexLock lock(&mutex_);
    durable_seq_ = std::max(durable_seq_, seq);
    WriteNext();
  }

  // Not before: a client that was told OK says it to nobody else, should this server die.
  void OnGoodbye() override { End(grpc::Status::OK); }

  void OnRoom() override { Offer(); }

  void OnFenced() override {
    service_->fenced_->Add();
    End({grpc::StatusCode::ABORTED, "a newer session holds this run and rank"});
  }

  void OnMoved(const std::string& address) override {
    if (!address.empty()) SendMoved(address);
    End({grpc::StatusCode::UNAVAILABLE, "another server of the cluster serves this run now; come back"});
  }

  void OnDeeper(const std::vector<Head>& heads) override {
    v1::ServerMessage message;
    v1::Sampling* sampling = message.mutable_sampling();
    for (const Head& head : heads) {
      v1::HeadId* id = sampling->add_deeper();
      id->set_layer(static_cast<uint32_t>(head.layer));
      id->set_head(static_cast<uint32_t>(head.head));
    }
    Send(std::move(message));
  }

  void OnAction(const Action& action) override {
    v1::ServerMessage message;
    *message.mutable_action() = ToWire(action);
    absl::MutexLock lock(&mutex_);
    // Nothing comes before the Welcome, and the shard may be quicker than the log.
    (welcomed_ ? outgoing_ : held_).push_back(std::move(message));
    WriteNext();
  }

  // ---- service ----
  void Drain() {
    v1::ServerMessage message;
    message.mutable_drain()->set_retry_after_ms(service_->options_.drain_retry_after_ms);
    Send(std::move(message));
    End({grpc::StatusCode::UNAVAILABLE, "the server is draining; come back"});
  }

  void CutIfSilentSince(int64_t since_ns) {
    if (last_heard_ns_.load(std::memory_order_relaxed) < since_ns) {
      End({grpc::StatusCode::DEADLINE_EXCEEDED,
           absl::StrCat("no message for ", service_->options_.idle_ms_max, " ms")});
    }
  }

  void CutIfNotGreetedSince(int64_t since_ns) {
    if (greeted_.load(std::memory_order_relaxed) || began_ns_ >= since_ns) return;
    absl::MutexLock lock(&mutex_);
    if (end_.has_value()) return;
    service_->without_hello_->Add();
    EndLocked({grpc::StatusCode::DEADLINE_EXCEEDED,
               absl::StrCat("hello: none came for ", service_->options_.hello_ms_max, " ms")});
  }

  void CancelIfEndingSince(int64_t since_ns) {
    absl::MutexLock lock(&mutex_);
    if (end_.has_value() && !finished_ && end_ns_ < since_ns) context_->TryCancel();
  }

  // So that the client can tell a silent server from a link that is cut.
  void SpeakIfMuteSince(int64_t since_ns) {
    absl::MutexLock lock(&mutex_);
    if (!welcomed_ || writing_ || last_spoke_ns_ >= since_ns) return;
    sign_due_ = true;
    WriteNext();
  }

  void CutIfNotAllowed() {
    std::string run;
    {
      absl::MutexLock lock(&mutex_);
      if (session_ == nullptr || end_.has_value()) return;
      run = run_name_;
    }
    if (grant_ == nullptr) return;
    if (const absl::Status allowed = grant_->CheckOpen("Attach", Role::kWrite, run); !allowed.ok()) {
      End(ToGrpc(allowed));
    }
  }

 private:
  // What an alarm knows of the stream: it may come when that is gone.
  struct Pause {
    absl::Mutex mutex;
    Stream* stream ABSL_GUARDED_BY(mutex) = nullptr;
  };

  // Decodes what was received and passes it on.  Only one at a time: the next read
  // starts when this one was taken.
  void TakeIncoming() {
    std::string payload;
    if (!TakeBytes(&received_, &payload) || !incoming_.ParseFromString(payload)) {
      End(grpc::Status::OK);  // As gRPC ends a stream whose message it cannot parse.
      return;
    }
    if (incoming_.body_case() == v1::ClientMessage::kBye && session_ != nullptr) {
      auto message = Decode(incoming_, &session_->layout(), service_->options_.limits);
      if (!message.ok()) {
        End(ToGrpc(message.status()));
      } else if (!session_->Bye(*std::move(message), std::move(payload))) {
        End({grpc::StatusCode::UNAVAILABLE, "the goodbye could not be logged; come back"});
      }
      return;
    }
    if (session_ != nullptr && Renumber(told_attempt_, session_->attempt(), &incoming_)) {
      payload = incoming_.SerializeAsString();
    }
    auto message = Decode(incoming_, session_ == nullptr ? nullptr : &session_->layout(), service_->options_.limits);
    if (!message.ok()) {
      service_->frames_refused_->Add();
      End(ToGrpc(message.status()));
      return;
    }
    if (auto* heartbeat = std::get_if<HeartbeatMessage>(&message->body)) {
      session_->Heartbeat(*heartbeat);
      ReadNext();
      return;
    }
    service_->bytes_->Add(static_cast<double>(payload.size()));
    if (session_ == nullptr) {
      told_attempt_ = incoming_.hello().run().attempt();
      Open(std::get<HelloMessage>(std::move(message->body)), std::move(payload));
      return;
    }
    pending_ = *std::move(message);
    pending_payload_ = std::move(payload);
    Offer();
  }

  // What the run with the Hello's uuid is called here; "" = there is none.
  std::string KnownAs(const HelloMessage& hello) const {
    if (service_->options_.runs == nullptr) return "";
    const RunSnapshotPtr known = service_->options_.runs->Find(FormatUuid(hello.run.uuid));
    return known == nullptr ? "" : known->record.description.name;
  }

  // Gives the run the uuid under which it is kept, also in what becomes its record.
  // A run that is here by its uuid and this name, from when there were no rights by
  // name, stays what it is.
  void ResolveUuid(HelloMessage* hello, std::string* payload) {
    if (grant_ == nullptr || service_->options_.access->open() || KnownAs(*hello) == hello->run.name) return;
    const RunUuid uuid = UuidOfBoth(hello->run.uuid, hello->run.name);
    if (uuid == hello->run.uuid) return;
    hello->run.uuid = uuid;
    incoming_.mutable_hello()->mutable_run()->set_uuid(uuid.data(), uuid.size());
    *payload = incoming_.SerializeAsString();
  }

  // May this caller write this run?  A uuid that is here under another name is
  // that run, whatever the Hello calls it; its name is not told.
  absl::Status Admit(const HelloMessage& hello) {
    if (grant_ == nullptr) return absl::OkStatus();
    BW_RETURN_IF_ERROR(grant_->Check(Role::kWrite, hello.run.name));
    const std::string known = KnownAs(hello);
    if (!known.empty() && known != hello.run.name && !grant_->Check(Role::kWrite, known).ok()) {
      return absl::PermissionDeniedError(
          absl::StrCat("run \"", hello.run.name, "\": its uuid is that of a run which this caller may not write"));
    }
    return use_ == nullptr ? absl::OkStatus() : use_->EnterRun(FormatUuid(hello.run.uuid));
  }

  void Open(HelloMessage hello, std::string payload) {
    greeted_.store(true, std::memory_order_relaxed);
    ResolveUuid(&hello, &payload);
    {
      absl::MutexLock lock(&mutex_);
      run_name_ = hello.run.name;
    }
    const absl::Status admitted = Admit(hello);
    if (grant_ != nullptr) grant_->Note("Attach", hello.run.name, admitted, true, absl::StrCat("rank ", hello.rank));
    if (!admitted.ok()) {
      End(ToGrpc(admitted));
      return;
    }
    auto session = service_->sink_->Open(hello, std::move(payload), this);
    if (!session.ok()) {
      const std::optional<std::string> moved = MovedAddress(session.status());
      if (moved.has_value()) SendMoved(*moved);
      End(moved.has_value() ? grpc::Status(grpc::StatusCode::UNAVAILABLE, std::string(session.status().message()))
                            : ToGrpc(session.status()));
      return;
    }
    std::optional<uint64_t> opened_with;
    {
      absl::MutexLock lock(&mutex_);
      session_ = *std::move(session);
      opened_with = opened_with_;
    }
    if (opened_with.has_value()) OnOpen(*opened_with);
    ReadNext();
  }

  void SendMoved(const std::string& address) {
    v1::ServerMessage message;
    message.mutable_moved()->set_address(address);
    Send(std::move(message));
  }

  // Hands `pending_` to the session, or waits for OnRoom().
  void Offer() {
    const auto* frame = std::get_if<RankFrame>(&pending_.body);
    const double values = frame == nullptr ? 0 : static_cast<double>(frame->values.size());
    const auto bytes = static_cast<int64_t>(pending_payload_.size());
    const auto taken = session_->Put(pending_, pending_payload_);
    if (!taken.ok()) {
      End(ToGrpc(taken.status()));
      return;
    }
    switch (*taken) {
      case IngestSession::Taken::kBusy:
      case IngestSession::Taken::kFenced:
        return;
      case IngestSession::Taken::kTaken:
        service_->frames_taken_->Add();
        service_->values_->Add(values);
        break;
      case IngestSession::Taken::kDuplicate:
        service_->frames_duplicate_->Add();
        break;
    }
    if (const int64_t wait_ns = use_ == nullptr ? 0 : use_->Charge(bytes); wait_ns > 0) {
      ReadLater(wait_ns);
    } else {
      ReadNext();
    }
  }

  // The tenant is beyond his rate: he is told to wait, and is read no further
  // meanwhile, whether he waits or not.
  void ReadLater(int64_t wait_ns) {
    v1::ServerMessage message;
    message.mutable_throttle()->set_retry_after_ms(
        static_cast<uint32_t>(std::clamp<int64_t>(wait_ns / 1'000'000 + 1, 1, 3'600'000)));
    message.mutable_throttle()->set_reason("the tenant is beyond his rate");
    Send(std::move(message));
    last_heard_ns_.store(service_->clock_->MonotonicNanos() + wait_ns, std::memory_order_relaxed);
    const auto pause = std::make_shared<Pause>();
    {
      absl::MutexLock lock(&pause->mutex);
      pause->stream = this;
    }
    pause_ = pause;
    alarm_ = std::make_unique<grpc::Alarm>();
    alarm_->Set(std::chrono::system_clock::now() + std::chrono::nanoseconds(wait_ns), [pause](bool) {
      absl::MutexLock lock(&pause->mutex);
      if (pause->stream != nullptr) pause->stream->ReadNext();
    });
  }

  void ReadNext() {
    absl::MutexLock lock(&mutex_);
    if (!finished_ && !end_.has_value()) StartRead(&received_);
  }

  void Send(v1::ServerMessage message) {
    absl::MutexLock lock(&mutex_);
    outgoing_.push_back(std::move(message));
    WriteNext();
  }

  void WriteNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (writing_ || finished_) return;
    if (!outgoing_.empty()) {
      writing_message_ = std::move(outgoing_.front());
      outgoing_.erase(outgoing_.begin());
      // It comes after the Welcome, so that there is a session.
      if (writing_message_.has_action()) {
        RenumberOne(session_->attempt(), told_attempt_, writing_message_.mutable_action());
      }
    } else if ((durable_seq_ > acked_seq_ || sign_due_) && session_ != nullptr) {
      acked_seq_ = durable_seq_;
      writing_message_.Clear();
      writing_message_.mutable_ack()->set_session_epoch(session_->epoch());
      writing_message_.mutable_ack()->set_durable_seq(acked_seq_);
    } else {
      if (end_.has_value()) {
        finished_ = true;
        Finish(*end_);
      }
      return;
    }
    writing_ = true;
    sign_due_ = false;
    last_spoke_ns_ = service_->clock_->MonotonicNanos();
    const grpc::Slice bytes(writing_message_.SerializeAsString());
    writing_bytes_ = grpc::ByteBuffer(&bytes, 1);
    StartWrite(&writing_bytes_);
  }

  // Finishes once what is queued has been written.
  void End(grpc::Status status) {
    absl::MutexLock lock(&mutex_);
    if (!end_.has_value()) EndLocked(std::move(status));
  }

  void EndLocked(grpc::Status status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    end_ = std::move(status);
    end_ns_ = service_->clock_->MonotonicNanos();
    WriteNext();
  }

  IngestService* const service_;
  grpc::CallbackServerContext* const context_;
  const GrantPtr grant_;                  // Null: nobody is asked.
  const std::unique_ptr<StreamUse> use_;  // Null: no quota.
  const int64_t began_ns_;
  std::atomic<bool> greeted_ = false;  // A Hello has come.
  std::shared_ptr<Pause> pause_;       // The last one, and its alarm.
  std::unique_ptr<grpc::Alarm> alarm_;
  std::atomic<int64_t> last_heard_ns_;
  grpc::ByteBuffer received_;
  v1::ClientMessage incoming_;  // Parsed from it.
  std::shared_ptr<IngestSession> session_;
  uint32_t told_attempt_ = 0;  // By the Hello; session_->attempt() is what the run calls it.
  std::string run_name_;
  IngestMessage pending_;
  std::string pending_payload_;

  absl::Mutex mutex_;
  std::vector<v1::ServerMessage> outgoing_ ABSL_GUARDED_BY(mutex_);
  std::vector<v1::ServerMessage> held_ ABSL_GUARDED_BY(mutex_);  // Until the Welcome.
  bool welcomed_ ABSL_GUARDED_BY(mutex_) = false;
  v1::ServerMessage writing_message_;
  grpc::ByteBuffer writing_bytes_;  // Its own.
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<grpc::Status> end_ ABSL_GUARDED_BY(mutex_);
  int64_t end_ns_ ABSL_GUARDED_BY(mutex_) = 0;
  std::optional<uint64_t> opened_with_ ABSL_GUARDED_BY(mutex_);
  uint64_t durable_seq_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t acked_seq_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t last_spoke_ns_ ABSL_GUARDED_BY(mutex_) = 0;
  bool sign_due_ ABSL_GUARDED_BY(mutex_) = false;
};

namespace {

// A reactor that only says no.
class Refusal final : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  explicit Refusal(const grpc::Status& status) { Finish(status); }
  void OnDone() override { delete this; }
};

}  // namespace

IngestService::IngestService(const Options& options, IngestSink* sink, Counters* counters, Clock* clock)
    : options_(options),
      sink_(sink),
      clock_(clock),
      streams_gauge_(counters->gauge("bellwether_ingest_streams")),
      frames_taken_(counters->counter("bellwether_ingest_frames_total", {{"result", "taken"}})),
      frames_duplicate_(counters->counter("bellwether_ingest_frames_total", {{"result", "duplicate"}})),
      frames_refused_(counters->counter("bellwether_ingest_frames_total", {{"result", "refused"}})),
      values_(counters->counter("bellwether_ingest_values_total")),
      bytes_(counters->counter("bellwether_ingest_bytes_total")),
      streams_refused_(counters->counter("bellwether_ingest_limit_refused_total", {{"limit", "streams"}})),
      without_hello_(counters->counter("bellwether_ingest_limit_refused_total", {{"limit", "hello"}})),
      fenced_(counters->counter("bellwether_ingest_limit_refused_total", {{"limit", "writers"}})) {}

IngestService::~IngestService() = default;

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* IngestService::Attach(
    grpc::CallbackServerContext* context) {
  absl::StatusOr<GrantPtr> grant = Identify(options_.access, *context, "Attach");
  if (!grant.ok()) return new Refusal(ToGrpc(grant.status()));
  if (*grant != nullptr) {
    if (const absl::Status allowed = (*grant)->Check(Role::kWrite); !allowed.ok()) {
      (*grant)->Note("Attach", "", allowed, true);
      return new Refusal(ToGrpc(allowed));
    }
  }
  // Before the Hello: else whoever has a quota could hold the streams of all others without one.
  std::unique_ptr<StreamUse> use;
  if (*grant != nullptr) {
    absl::StatusOr<std::unique_ptr<StreamUse>> opened = (*grant)->OpenStream();
    if (!opened.ok()) {
      (*grant)->Note("Attach", "", opened.status(), true);
      return new Refusal(ToGrpc(opened.status()));
    }
    use = *std::move(opened);
  }
  Stream* stream = nullptr;
  {
    absl::MutexLock lock(&mutex_);
    if (draining_) return new Refusal({grpc::StatusCode::UNAVAILABLE, "the server is draining; come back"});
    if (static_cast<int>(streams_.size()) >= options_.streams_max) {
      streams_refused_->Add();
      return new Refusal({grpc::StatusCode::RESOURCE_EXHAUSTED,
                          absl::StrCat("streams: ", options_.streams_max, " are open, which is the limit")});
    }
    stream = new Stream(this, context, *std::move(grant), std::move(use));
    streams_.insert(stream);
    streams_gauge_->Set(static_cast<double>(streams_.size()));
  }
  stream->Start();
  return stream;
}

void IngestService::Drain() {
  absl::MutexLock lock(&mutex_);
  draining_ = true;
  for (Stream* stream : streams_) stream->Drain();
}

void IngestService::CutStreams() {
  const int64_t now_ns = clock_->MonotonicNanos();
  const int64_t heard_since = now_ns - options_.idle_ms_max * 1'000'000;
  // The next call comes in a second.
  const int64_t spoke_since = now_ns - (int64_t{options_.sign_of_life_ms} - 1'000) * 1'000'000;
  absl::MutexLock lock(&mutex_);
  for (Stream* stream : streams_) {
    stream->CutIfSilentSince(heard_since);
    stream->CutIfNotGreetedSince(now_ns - options_.hello_ms_max * 1'000'000);
    stream->SpeakIfMuteSince(spoke_since);
    stream->CutIfNotAllowed();
    stream->CancelIfEndingSince(now_ns - kEndNsMax);
  }
}

int IngestService::streams_open() const {
  absl::MutexLock lock(&mutex_);
  return static_cast<int>(streams_.size());
}

}  // namespace bellwether::server
