// stream.h: one Attach call, as a queue of bytes out and of messages in.
//
// gRPC's own threads move the bytes; the owner looks in when it likes, and is
// woken by `wake`.  One StartWrite is in flight, the rest waits in an outbox
// that the owner bounds by outbox_bytes().  The stream knows nothing of seqs.
//
// Thread-safe.  The destructor cancels what still runs and waits for gRPC to
// let go, which it does at once.

#ifndef BELLWETHER_CLIENT_LIB_SENDER_STREAM_H_
#define BELLWETHER_CLIENT_LIB_SENDER_STREAM_H_

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "bellwether/v1/ingest.pb.h"

namespace bellwether::client {

class Stream final : private grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  // Starts the call.  `wake` is called from gRPC's threads after every change
  // and must not block.
  Stream(std::shared_ptr<grpc::Channel> channel, const std::string& token, std::function<void()> wake);
  ~Stream() override;
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  // Queues a message: `seq` (0 = none) and a ClientMessage without it.
  void Send(uint64_t seq, std::string_view body);
  void Send(const v1::ClientMessage& message);
  // No Send() after it; what is queued still goes out.
  void CloseWrites();

  // Queued or in flight.
  size_t outbox_bytes() const;
  // What came since the last call, oldest first.
  std::vector<v1::ServerMessage> TakeMessages();
  // The call's end, once it has ended.
  std::optional<grpc::Status> status() const;

 private:
  void OnWriteDone(bool ok) override;
  void OnReadDone(bool ok) override;
  void OnDone(const grpc::Status& status) override;

  void StartNextWrite();  // REQUIRES: mutex_ held.

  grpc::ClientContext context_;
  grpc::GenericStub stub_;
  const std::function<void()> wake_;

  mutable std::mutex mutex_;
  std::condition_variable done_;
  std::deque<grpc::ByteBuffer> outbox_;  // The front one is in flight if writing_.
  size_t outbox_bytes_ = 0;
  bool writing_ = false;
  bool close_writes_ = false;
  bool writes_closed_ = false;
  bool reads_ended_ = false;
  grpc::ByteBuffer read_buffer_;
  std::vector<v1::ServerMessage> messages_;
  std::optional<grpc::Status> status_;
};

}  // namespace bellwether::client

#endif  // BELLWETHER_CLIENT_LIB_SENDER_STREAM_H_
