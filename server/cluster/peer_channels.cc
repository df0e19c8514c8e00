#include "server/cluster/peer_channels.h"

#include <grpcpp/generic/generic_stub.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/blocking_counter.h"
#include "server/access/passed_on.h"
#include "server/model/partition.h"
#include "server/util/await_for.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

// A try to connect: calls are asked of many servers and wait for none, a stream has nothing else.
constexpr int kConnectMs = 500;
constexpr int kStreamConnectMs = 5'000;

std::string PathOf(const std::string& method) { return absl::StrCat("/bellwether.v1.Query/", method); }

grpc::ByteBuffer ToBuffer(const std::string& bytes) {
  const grpc::Slice slice(bytes);
  return {&slice, 1};
}

std::string FromBuffer(const grpc::ByteBuffer& buffer) {
  std::vector<grpc::Slice> slices;
  std::string bytes;
  if (!buffer.Dump(&slices).ok()) return bytes;
  bytes.reserve(buffer.Length());
  for (const grpc::Slice& slice : slices) bytes.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  return bytes;
}

absl::Status FromGrpc(const grpc::Status& status) {
  return {static_cast<absl::StatusCode>(status.error_code()), status.error_message()};
}

// Messages of one call, one asked for at a time.  gRPC holds it until OnDone, which
// waits for the hold: it is released when nobody will ask again.
class BytesStream final : public PeerStream, public grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  struct Ends {
    std::function<void(std::string)> on_message;
    std::function<void(const grpc::Status&)> on_end;
  };

  static std::shared_ptr<BytesStream> Start(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                                            const std::string& request, const std::string& seal, Ends ends) {
    auto stream = std::make_shared<BytesStream>(channel, std::move(ends));
    stream->self_ = stream;
    stream->request_ = ToBuffer(request);
    stream->context_.AddMetadata(kPassedOnMetadatum, seal);
    stream->stub_.PrepareBidiStreamingCall(&stream->context_, PathOf(method), grpc::StubOptions(), stream.get());
    stream->StartWriteLast(&stream->request_, grpc::WriteOptions());
    stream->AddHold();
    stream->StartCall();
    return stream;
  }
  BytesStream(std::shared_ptr<grpc::Channel> channel, Ends ends) : stub_(std::move(channel)), ends_(std::move(ends)) {}

  void Next() override {
    absl::MutexLock lock(&mutex_);
    if (released_ || reading_) return;
    reading_ = true;
    StartRead(&response_);
  }
  void Cancel() override {
    context_.TryCancel();
    {
      absl::MutexLock lock(&mutex_);
      cancelled_ = true;
      if (released_ || reading_) return;
      released_ = true;
    }
    RemoveHold();
  }

  void OnReadDone(bool ok) override {
    bool over = !ok;
    {
      absl::MutexLock lock(&mutex_);
      reading_ = false;
      over = over || cancelled_;
      if (over) released_ = true;
    }
    if (over) {
      RemoveHold();
    } else {
      ends_.on_message(FromBuffer(response_));
    }
  }
  void OnDone(const grpc::Status& status) override {
    const std::shared_ptr<BytesStream> last = std::move(self_);
    ends_.on_end(status);
    ends_ = {};
  }

 private:
  grpc::TemplatedGenericStub<grpc::ByteBuffer, grpc::ByteBuffer> stub_;
  grpc::ClientContext context_;
  grpc::ByteBuffer request_, response_;
  Ends ends_;
  std::shared_ptr<BytesStream> self_;
  absl::Mutex mutex_;
  bool reading_ ABSL_GUARDED_BY(mutex_) = false;
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
  bool released_ ABSL_GUARDED_BY(mutex_) = false;  // The hold.
};

// Messages to one call, one under way at a time, and its answer.  The one read is
// asked for at the start and ends last: until then nothing that is written needs a hold.
class BytesUpload final : public PeerUpload, public grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  struct Limits {
    int64_t taken_ms_max = 0, answer_ms_max = 0;
  };
  static std::shared_ptr<BytesUpload> Start(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                                            const std::string& seal, const Limits& limits,
                                            std::function<void(const grpc::Status&)> on_end) {
    auto upload = std::make_shared<BytesUpload>(channel, limits, std::move(on_end));
    upload->self_ = upload;
    upload->context_.AddMetadata(kPassedOnMetadatum, seal);
    upload->stub_.PrepareBidiStreamingCall(&upload->context_, PathOf(method), grpc::StubOptions(), upload.get());
    upload->AddHold();  // Until the read is done: whatever is begun before comes from other threads.
    upload->StartRead(&upload->response_);
    upload->StartCall();
    return upload;
  }
  BytesUpload(std::shared_ptr<grpc::Channel> channel, const Limits& limits,
              std::function<void(const grpc::Status&)> on_end)
      : limits_(limits), stub_(std::move(channel)), on_end_(std::move(on_end)) {}

  absl::Status Write(std::string message) override {
    absl::MutexLock lock(&mutex_);
    if (!read_) {
      writing_ = true;
      request_ = ToBuffer(message);
      StartWrite(&request_);
    }
    const auto taken = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !writing_; };
    if (!AwaitFor(&mutex_, absl::Condition(&taken), absl::Milliseconds(limits_.taken_ms_max))) {
      context_.TryCancel();
      return absl::UnavailableError(absl::StrCat("the run's server takes nothing for ", limits_.taken_ms_max, " ms"));
    }
    if (!refused_ && !read_) return absl::OkStatus();
    return AwaitEnd();
  }
  absl::StatusOr<std::string> Finish() override {
    absl::MutexLock lock(&mutex_);
    if (!read_) StartWritesDone();
    BW_RETURN_IF_ERROR(AwaitEnd());
    return FromBuffer(response_);
  }
  void Cancel() override { context_.TryCancel(); }

  void OnWriteDone(bool ok) override {
    absl::MutexLock lock(&mutex_);
    writing_ = false;
    refused_ = refused_ || !ok;
  }
  void OnReadDone(bool) override {
    {
      absl::MutexLock lock(&mutex_);
      read_ = true;
    }
    RemoveHold();
  }
  void OnDone(const grpc::Status& status) override {
    const std::shared_ptr<BytesUpload> last = std::move(self_);
    std::exchange(on_end_, nullptr)(status);
    absl::MutexLock lock(&mutex_);
    writing_ = false;
    end_ = status;
  }

 private:
  // What the call came to; an OK without having been asked for is none.
  absl::Status AwaitEnd() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const auto ended = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return end_.has_value(); };
    if (!AwaitFor(&mutex_, absl::Condition(&ended), absl::Milliseconds(limits_.answer_ms_max))) {
      context_.TryCancel();
      return absl::UnavailableError(
          absl::StrCat("the run's server does not answer within ", limits_.answer_ms_max, " ms"));
    }
    if (end_->error_code() != grpc::StatusCode::UNAVAILABLE) return FromGrpc(*end_);
    return absl::UnavailableError(absl::StrCat("the run's server does not answer: ", end_->error_message()));
  }

  const Limits limits_;
  grpc::TemplatedGenericStub<grpc::ByteBuffer, grpc::ByteBuffer> stub_;
  grpc::ClientContext context_;
  std::function<void(const grpc::Status&)> on_end_;
  std::shared_ptr<BytesUpload> self_;
  grpc::ByteBuffer response_;  // Of the read, until OnDone.
  absl::Mutex mutex_;
  grpc::ByteBuffer request_ ABSL_GUARDED_BY(mutex_);  // Of the write under way.
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool refused_ ABSL_GUARDED_BY(mutex_) = false;  // A write failed: the call is ending.
  bool read_ ABSL_GUARDED_BY(mutex_) = false;     // The answer is here, or will not come.
  std::optional<grpc::Status> end_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

PeerChannels::PeerChannels(Options options, const std::atomic<Members*>* member, Counters* counters, Clock* clock)
    : options_(std::move(options)),
      member_(member),
      clock_(clock),
      answered_(counters->counter("bellwether_cluster_calls_total", {{"result", "answered"}})),
      unanswered_(counters->counter("bellwether_cluster_calls_total", {{"result", "unanswered"}})),
      refused_(counters->counter("bellwether_query_limit_refused_total", {{"limit", "cluster_calls"}})) {}

PeerChannels::~PeerChannels() {
  absl::MutexLock lock(&mutex_);
  const auto ended = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return streams_ == 0; };
  mutex_.Await(absl::Condition(&ended));
}

Peers::Spread PeerChannels::spread() const {
  const Members* const member = *member_;
  if (member == nullptr) return {.others = {}, .unserved = kPartitions * options_.databases};
  Member::Spread spread = member->spread();
  return {.others = std::move(spread.others), .unserved = spread.unserved};
}

std::vector<std::pair<uint32_t, uint64_t>> PeerChannels::holdings() const {
  const Members* const member = *member_;
  std::vector<std::pair<uint32_t, uint64_t>> holdings;
  if (member == nullptr) return holdings;
  for (const Holding& each : member->holdings()) holdings.emplace_back(each.partition, each.epoch);
  return holdings;
}

Peers::Owner PeerChannels::OwnerOfPartition(uint32_t partition) const {
  const Members* const member = *member_;
  if (member == nullptr) return {};
  if (member->Serves(partition)) return {.here = true, .address = ""};
  return {.here = false, .address = member->OwnerAddress(partition)};
}

Peers::Owner PeerChannels::OwnerOf(const RunUuid& uuid) const {
  return OwnerOfPartition(PartitionOf(uuid, options_.databases));
}
Peers::Owner PeerChannels::OwnerOfRun(RunId run) const { return OwnerOfPartition(PartitionOfRun(run)); }

std::shared_ptr<grpc::Channel> PeerChannels::NewChannel(const std::string& server, int connect_ms_max) const {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(options_.answer_bytes_max);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 20'000);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 8'000);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);  // Who waits for an answer sends nothing.
  // One that comes back is asked again within a second.
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, connect_ms_max);  // So long a try may last, too.
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
  // A connection of our own: tests run several servers in one process.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  return grpc::CreateCustomChannel(server, options_.credentials, arguments);
}

absl::StatusOr<std::shared_ptr<grpc::Channel>> PeerChannels::ChannelTo(const std::string& server) {
  const std::vector<std::string> others = spread().others;
  absl::MutexLock lock(&mutex_);
  std::erase_if(peers_, [&](const auto& peer) {
    return peer.first != server && !std::binary_search(others.begin(), others.end(), peer.first);
  });
  Peer& peer = peers_[server];
  if (clock_->MonotonicNanos() < peer.quiet_until_ns) {
    return absl::UnavailableError(absl::StrCat("server ", server, " did not answer a moment ago"));
  }
  if (peer.channel == nullptr) {
    peer.channel = NewChannel(server, kConnectMs);
  }
  return peer.channel;
}

absl::Status PeerChannels::Judge(const std::string& server, const grpc::Status& status) {
  const bool silent = status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED;
  const bool answered = !silent && status.error_code() != grpc::StatusCode::UNAVAILABLE;
  (answered ? answered_ : unanswered_)->Add();
  if (silent) {
    absl::MutexLock lock(&mutex_);
    const auto peer = peers_.find(server);
    if (peer != peers_.end()) peer->second.quiet_until_ns = clock_->MonotonicNanos() + options_.quiet_ms * 1'000'000;
  }
  if (answered) return FromGrpc(status);
  return absl::UnavailableError(absl::StrCat(
      "server ", server, ", which serves it, did not answer: ", status.error_message(), "; come back in a moment"));
}

std::vector<Peers::Answer> PeerChannels::Ask(const std::vector<std::string>& servers, const std::string& method,
                                             const std::string& request, const std::string& seal, int64_t left_ns) {
  if (servers.empty()) return {};
  struct Under {
    std::shared_ptr<grpc::Channel> channel;
    std::unique_ptr<grpc::TemplatedGenericStub<grpc::ByteBuffer, grpc::ByteBuffer>> stub;
    grpc::ClientContext context;
    grpc::ByteBuffer response;
    grpc::Status status;
  };
  std::vector<Answer> answers(servers.size());
  std::vector<std::unique_ptr<Under>> under(servers.size());
  const auto deadline = std::chrono::system_clock::now() + std::chrono::nanoseconds(std::max<int64_t>(left_ns, 0));
  const grpc::ByteBuffer bytes = ToBuffer(request);
  const auto places = static_cast<int>(servers.size());
  if (calls_.fetch_add(places) + places > options_.calls_max) {
    calls_ -= places;
    refused_->Add();
    for (size_t i = 0; i < servers.size(); ++i) {
      answers[i] = {servers[i], absl::ResourceExhaustedError(absl::StrCat("cluster_calls: ", options_.calls_max,
                                                                          " calls of other servers are under way"))};
    }
    return answers;
  }
  const absl::Cleanup release = [this, places] { calls_ -= places; };
  absl::BlockingCounter left(places);
  for (size_t i = 0; i < servers.size(); ++i) {
    answers[i].server = servers[i];
    auto channel = ChannelTo(servers[i]);
    if (!channel.ok()) {
      unanswered_->Add();
      answers[i].bytes = channel.status();
      left.DecrementCount();
      continue;
    }
    under[i] = std::make_unique<Under>();
    Under& call = *under[i];
    call.stub = std::make_unique<grpc::TemplatedGenericStub<grpc::ByteBuffer, grpc::ByteBuffer>>(*channel);
    call.context.set_deadline(deadline);
    call.context.AddMetadata(kPassedOnMetadatum, seal);
    call.stub->UnaryCall(&call.context, PathOf(method), grpc::StubOptions(), &bytes, &call.response,
                         [&call, &left](grpc::Status status) {
                           call.status = std::move(status);
                           left.DecrementCount();
                         });
  }
  left.Wait();
  for (size_t i = 0; i < servers.size(); ++i) {
    if (under[i] == nullptr) continue;
    const absl::Status status = Judge(servers[i], under[i]->status);
    if (status.ok()) {
      answers[i].bytes = FromBuffer(under[i]->response);
    } else {
      answers[i].bytes = status;
    }
  }
  return answers;
}

absl::StatusOr<std::string> PeerChannels::Call(const std::string& server, const std::string& method,
                                               const std::string& request, const std::string& seal,
                                               int64_t deadline_monotonic_ns) {
  const int64_t left_ns = std::min(deadline_monotonic_ns - clock_->MonotonicNanos(), options_.call_ms_max * 1'000'000);
  return std::move(Ask({server}, method, request, seal, left_ns).front().bytes);
}

std::vector<Peers::Answer> PeerChannels::CallAll(const std::vector<std::string>& servers, const std::string& method,
                                                 const std::string& request, const std::string& seal,
                                                 int64_t deadline_monotonic_ns) {
  const int64_t left_ns = std::min(deadline_monotonic_ns - clock_->MonotonicNanos(), kAskAllMs * 1'000'000);
  return Ask(servers, method, request, seal, left_ns);
}

std::shared_ptr<PeerStream> PeerChannels::Stream(const std::string& server, const std::string& method,
                                                 const std::string& request, const std::string& seal,
                                                 std::function<void(std::string)> on_message,
                                                 std::function<void(const absl::Status&)> on_end) {
  const auto channel = ChannelTo(server);
  if (!channel.ok()) {
    on_end(channel.status());
    return nullptr;
  }
  if (const absl::Status open = OpenStream(); !open.ok()) {
    on_end(open);
    return nullptr;
  }
  const auto ended = [this, on_end = std::move(on_end)](const grpc::Status& status) {
    on_end(FromGrpc(status));
    CloseStream(status);
  };
  return BytesStream::Start(NewChannel(server, kStreamConnectMs), method, request, seal,
                            {std::move(on_message), ended});
}

absl::StatusOr<std::shared_ptr<PeerUpload>> PeerChannels::Upload(const std::string& server, const std::string& method,
                                                                 const std::string& seal) {
  BW_RETURN_IF_ERROR(ChannelTo(server).status());
  BW_RETURN_IF_ERROR(OpenStream());
  return BytesUpload::Start(NewChannel(server, kStreamConnectMs), method, seal,
                            {.taken_ms_max = options_.taken_ms_max, .answer_ms_max = options_.upload_ms_max},
                            [this](const grpc::Status& status) { CloseStream(status); });
}

absl::Status PeerChannels::OpenStream() {
  {
    absl::MutexLock lock(&mutex_);
    if (streams_ < options_.streams_max) {
      ++streams_;
      return absl::OkStatus();
    }
  }
  refused_->Add();
  return absl::ResourceExhaustedError(
      absl::StrCat("cluster_calls: ", options_.streams_max, " streams of other servers are open"));
}

void PeerChannels::CloseStream(const grpc::Status& status) {
  (status.error_code() == grpc::StatusCode::UNAVAILABLE ? unanswered_ : answered_)->Add();
  absl::MutexLock lock(&mutex_);
  --streams_;
}

}  // namespace bellwether::server
