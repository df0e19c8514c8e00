// fake_ingest.h: an Ingest server for tests of the client, in the test's process.
//
// Keeps what a server would have on disk in a Store that survives restarts, and
// checks what every server relies on: a seq is stored once and in order.

#ifndef BELLWETHER_TESTS_CLIENT_LIB_FAKE_INGEST_H_
#define BELLWETHER_TESTS_CLIENT_LIB_FAKE_INGEST_H_

#include <grpcpp/grpcpp.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "bellwether/v1/ingest.grpc.pb.h"

namespace bellwether::client {

// A folder of the test's own, removed at its end.
class TestFolder {
 public:
  TestFolder() {
    char name[] = "/tmp/bwclientXXXXXX";
    path_ = mkdtemp(name);
  }
  ~TestFolder() { (void)!std::system(("rm -rf " + path_).c_str()); }
  std::string operator/(const std::string& file) const { return path_ + "/" + file; }

 private:
  std::string path_;
};

// What a file holds; "" where there is none.
inline std::string ReadText(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// Waits until `condition` holds; false after `seconds`.
inline bool WaitUntil(const std::function<bool()>& condition, double seconds = 60) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::yield();
    usleep(1000);
  }
  return true;
}

struct IngestStore {
  std::mutex mutex;
  uint64_t epoch = 0;
  uint64_t durable_seq = 0;
  uint64_t duplicates = 0;                  // Seqs that were already durable.
  uint64_t gaps = 0;                        // Seqs that skipped one.
  std::vector<v1::ClientMessage> messages;  // With a seq, in order.
  std::vector<v1::Hello> hellos;
  std::vector<v1::Bye> byes;
  std::vector<std::string> tokens;
  uint64_t heartbeats = 0;
};

class FakeIngest final : public v1::Ingest::Service {
 public:
  using Stream = grpc::ServerReaderWriter<v1::ServerMessage, v1::ClientMessage>;

  struct Options {
    bool ack = true;
    uint64_t ack_every = 1;     // Acks come behind every n-th message...
    uint64_t end_after = 0;     // ...and the stream breaks behind this many; 0 = never.
    uint64_t window_bytes = 0;  // 0 = not said
    uint32_t message_bytes_max = 0;
    uint64_t ack_epoch_offset = 0;  // Not 0: acks of another session.
    grpc::Status refuse;            // Not OK: the answer to Hello.
    std::vector<v1::ServerMessage> after_welcome;
    std::string moved_to;
    size_t byes_lost = 0;      // The stream breaks at that many of the first goodbyes.
    uint32_t attempt_min = 0;  // Hellos of earlier attempts are fenced.
    std::shared_ptr<grpc::ServerCredentials> credentials = grpc::InsecureServerCredentials();
  };

  FakeIngest(std::string address, IngestStore* store, Options options) : store_(store), options_(std::move(options)) {
    grpc::ServerBuilder builder;
    builder.AddListeningPort(address, options_.credentials, &port_);
    builder.RegisterService(this);
    builder.SetMaxReceiveMessageSize(1 << 20);
    server_ = builder.BuildAndStart();
  }
  ~FakeIngest() override { Stop(); }

  int port() const { return port_; }
  bool started() const { return server_ != nullptr; }
  void Stop() {
    if (server_ != nullptr) server_->Shutdown(std::chrono::system_clock::now());
    server_.reset();
  }
  void Ack(bool on) { ack_ = on; }

  grpc::Status Attach(grpc::ServerContext* context, Stream* stream) override {
    v1::ClientMessage message;
    if (!stream->Read(&message) || !message.has_hello()) return {grpc::StatusCode::FAILED_PRECONDITION, "no Hello"};
    v1::ServerMessage answer;
    uint64_t epoch;
    {
      const std::lock_guard<std::mutex> lock(store_->mutex);
      const auto token = context->client_metadata().find("authorization");
      store_->tokens.push_back(
          token == context->client_metadata().end() ? "" : std::string(token->second.data(), token->second.size()));
      store_->hellos.push_back(message.hello());
      if (!options_.refuse.ok()) return options_.refuse;
      if (message.hello().run().attempt() < options_.attempt_min) return {grpc::StatusCode::ABORTED, "fenced"};
      epoch = ++store_->epoch;
      answer.mutable_welcome()->set_session_epoch(epoch);
      answer.mutable_welcome()->set_durable_seq(store_->durable_seq);
      answer.mutable_welcome()->set_window_bytes(options_.window_bytes);
      answer.mutable_welcome()->set_message_bytes_max(options_.message_bytes_max);
      answer.mutable_welcome()->set_page_url("http://page/run");
    }
    if (!options_.moved_to.empty()) {
      answer.mutable_moved()->set_address(options_.moved_to);
      stream->Write(answer);
      return grpc::Status::OK;
    }
    stream->Write(answer);
    for (const v1::ServerMessage& more : options_.after_welcome) stream->Write(more);
    uint64_t received = 0;
    while (stream->Read(&message)) {
      ++received;
      uint64_t durable = 0;
      {
        const std::lock_guard<std::mutex> lock(store_->mutex);
        if (message.has_heartbeat()) ++store_->heartbeats;
        if (message.has_bye()) {
          store_->byes.push_back(message.bye());
          if (store_->byes.size() <= options_.byes_lost) return {grpc::StatusCode::UNAVAILABLE, "planted"};
        }
        if (message.seq() == 0) continue;
        // A killed sender leaves messages in the link: read behind the next one's Hello, which was not told of them,
        // they would be stored by both.  A server fences as well.
        if (epoch != store_->epoch) return {grpc::StatusCode::UNAVAILABLE, "a newer session has come"};
        if (message.seq() <= store_->durable_seq) {
          ++store_->duplicates;
          continue;
        }
        if (message.seq() != store_->durable_seq + 1) ++store_->gaps;
        store_->durable_seq = message.seq();
        store_->messages.push_back(message);
        durable = store_->durable_seq;
      }
      if (options_.end_after != 0 && received >= options_.end_after) return {grpc::StatusCode::UNAVAILABLE, "planted"};
      if (!options_.ack || !ack_ || received % options_.ack_every != 0) continue;
      answer.mutable_ack()->set_session_epoch(epoch + options_.ack_epoch_offset);
      answer.mutable_ack()->set_durable_seq(durable);
      stream->Write(answer);
    }
    return grpc::Status::OK;
  }

 private:
  IngestStore* store_;
  const Options options_;
  std::atomic<bool> ack_{true};
  std::unique_ptr<grpc::Server> server_;
  int port_ = 0;
};

}  // namespace bellwether::client

#endif  // BELLWETHER_TESTS_CLIENT_LIB_FAKE_INGEST_H_
