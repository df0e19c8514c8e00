// Goal: a client that said goodbye is told OK once that is durable, and not before.
// Method: the service on a channel within the process, before a sink whose log the test is.

#include "server/ingest/ingest_service.h"

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "absl/synchronization/notification.h"

namespace bellwether::server {
namespace {

// Says of everything that it is durable, but of a goodbye what the test says.
class Sink final : public IngestSink {
 public:
  explicit Sink(bool takes_goodbyes) : takes_goodbyes_(takes_goodbyes) {}
  absl::StatusOr<std::shared_ptr<IngestSession>> Open(const HelloMessage&, std::string, SessionOwner* owner) override {
    owner_ = owner;
    owner->OnOpen(0);
    return std::make_shared<Session>(this);
  }
  void MakeDurable() { owner_->OnGoodbye(); }
  absl::Notification said_goodbye;

 private:
  class Session final : public IngestSession {
   public:
    explicit Session(Sink* sink) : sink_(sink) {}
    uint64_t epoch() const override { return 1; }
    const Layout& layout() const override { return layout_; }
    absl::StatusOr<Taken> Put(IngestMessage&, std::string&) override { return Taken::kTaken; }
    void Heartbeat(const HeartbeatMessage&) override {}
    bool Bye(IngestMessage, std::string) override {
      sink_->said_goodbye.Notify();
      return sink_->takes_goodbyes_;
    }
    void Detach() override {}

   private:
    Sink* const sink_;
    const Layout layout_{1, 2, 2, 64, 0};
  };
  const bool takes_goodbyes_;
  SessionOwner* owner_ = nullptr;
};

// A stream that has said goodbye, and what it was answered.
class Client {
 public:
  explicit Client(Sink* sink) : service_({}, sink, &counters_, Clock::System()) {
    grpc::ServerBuilder builder;
    builder.RegisterService(&service_);
    server_ = builder.BuildAndStart();
    stub_ = v1::Ingest::NewStub(server_->InProcessChannel({}));
    stream_ = stub_->Attach(&context_);
    v1::ClientMessage hello;
    hello.mutable_hello()->set_protocol(kProtocolVersion);
    v1::RunDescription* const run = hello.mutable_hello()->mutable_run();
    run->set_name("r");
    run->set_uuid(std::string(16, 'u'));
    run->set_world(1);
    run->set_reporters(1);
    run->mutable_layout()->set_layers(1);
    run->mutable_layout()->set_heads(2);
    run->mutable_layout()->set_kv_heads(2);
    EXPECT_TRUE(stream_->Write(hello));
    v1::ClientMessage bye;
    bye.mutable_bye()->set_reason(v1::BYE_REASON_FINISHED);
    EXPECT_TRUE(stream_->Write(bye));
    reader_ = std::thread([this] {
      v1::ServerMessage message;
      while (stream_->Read(&message)) continue;
      status_ = stream_->Finish();
      answered.Notify();
    });
  }
  ~Client() {
    context_.TryCancel();
    reader_.join();
    server_->Shutdown();
  }
  grpc::StatusCode AwaitAnswer() {
    answered.WaitForNotification();
    return status_.error_code();
  }
  absl::Notification answered;

 private:
  Counters counters_;
  IngestService service_;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<v1::Ingest::Stub> stub_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::ClientMessage, v1::ServerMessage>> stream_;
  std::thread reader_;
  grpc::Status status_;
};

TEST(IngestServiceTest, AGoodbyeIsAnsweredOnceItIsDurable) {
  Sink sink(/*takes_goodbyes=*/true);
  Client client(&sink);
  sink.said_goodbye.WaitForNotification();
  EXPECT_FALSE(client.answered.WaitForNotificationWithTimeout(absl::Milliseconds(200)));
  sink.MakeDurable();
  EXPECT_EQ(client.AwaitAnswer(), grpc::StatusCode::OK);
}

TEST(IngestServiceTest, AGoodbyeThatIsNotLoggedIsNotOk) {
  Sink sink(/*takes_goodbyes=*/false);
  Client client(&sink);
  EXPECT_EQ(client.AwaitAnswer(), grpc::StatusCode::UNAVAILABLE);
}

}  // namespace
}  // namespace bellwether::server
