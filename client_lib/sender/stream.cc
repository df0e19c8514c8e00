#include "client_lib/sender/stream.h"

#include <google/protobuf/io/coded_stream.h>
#include <grpcpp/support/proto_buffer_reader.h>

#include <cstring>

namespace bellwether::client {
namespace {

constexpr char kMethod[] = "/bellwether.v1.Ingest/Attach";

grpc::ByteBuffer MakeBuffer(uint64_t seq, std::string_view body) {
  using google::protobuf::io::CodedOutputStream;
  constexpr uint8_t kSeqTag = v1::ClientMessage::kSeqFieldNumber << 3;  // A varint.
  uint8_t prefix[11];
  size_t prefix_bytes = 0;
  if (seq != 0) {
    prefix[0] = kSeqTag;
    prefix_bytes = static_cast<size_t>(CodedOutputStream::WriteVarint64ToArray(seq, prefix + 1) - prefix);
  }
  grpc_slice slice = grpc_slice_malloc(prefix_bytes + body.size());
  std::memcpy(GRPC_SLICE_START_PTR(slice), prefix, prefix_bytes);
  if (!body.empty()) std::memcpy(GRPC_SLICE_START_PTR(slice) + prefix_bytes, body.data(), body.size());
  const grpc::Slice owned(slice, grpc::Slice::STEAL_REF);
  return grpc::ByteBuffer(&owned, 1);
}

}  // namespace

Stream::Stream(std::shared_ptr<grpc::Channel> channel, const std::string& token, std::function<void()> wake)
    : stub_(std::move(channel)), wake_(std::move(wake)) {
  if (!token.empty()) context_.AddMetadata("authorization", "Bearer " + token);
  context_.set_wait_for_ready(false);
  stub_.PrepareBidiStreamingCall(&context_, kMethod, {}, this);
  AddHold();  // Writes start outside of reactions; let go when reading ends.
  StartRead(&read_buffer_);
  StartCall();
}

Stream::~Stream() {
  context_.TryCancel();
  std::unique_lock<std::mutex> lock(mutex_);
  done_.wait(lock, [this] { return status_.has_value(); });
}

void Stream::Send(uint64_t seq, std::string_view body) {
  grpc::ByteBuffer buffer = MakeBuffer(seq, body);
  const std::lock_guard<std::mutex> lock(mutex_);
  outbox_bytes_ += buffer.Length();
  outbox_.push_back(std::move(buffer));
  if (!writing_) StartNextWrite();
}

void Stream::Send(const v1::ClientMessage& message) { Send(0, message.SerializeAsString()); }

void Stream::CloseWrites() {
  const std::lock_guard<std::mutex> lock(mutex_);
  close_writes_ = true;
  if (!writing_) StartNextWrite();
}

void Stream::StartNextWrite() {
  if (reads_ended_) return;  // The hold is gone; the call may end at any moment.
  if (!outbox_.empty()) {
    writing_ = true;
    grpc::WriteOptions options;
    if (outbox_.size() > 1) options.set_buffer_hint();  // Several to a packet.
    StartWrite(&outbox_.front(), options);
  } else if (close_writes_ && !writes_closed_) {
    writes_closed_ = true;
    StartWritesDone();
  }
}

size_t Stream::outbox_bytes() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return outbox_bytes_;
}

std::vector<v1::ServerMessage> Stream::TakeMessages() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(messages_, {});
}

std::optional<grpc::Status> Stream::status() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return status_;
}

void Stream::OnWriteDone(bool ok) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    writing_ = false;
    outbox_bytes_ -= outbox_.front().Length();
    outbox_.pop_front();
    if (ok) StartNextWrite();
  }
  wake_();
}

void Stream::OnReadDone(bool ok) {
  bool broken = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (ok) {
      v1::ServerMessage message;
      grpc::ProtoBufferReader reader(&read_buffer_);
      broken = !message.ParseFromZeroCopyStream(&reader);
      if (!broken) messages_.push_back(std::move(message));
    } else {
      reads_ended_ = true;
    }
  }
  if (broken) context_.TryCancel();
  if (ok) {
    StartRead(&read_buffer_);
  } else {
    RemoveHold();
  }
  wake_();
}

void Stream::OnDone(const grpc::Status& status) {
  // Nothing of this object may be touched after the lock is let go.
  const std::function<void()> wake = wake_;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    status_ = status;
    done_.notify_all();
  }
  wake();
}

}  // namespace bellwether::client
