// Goal: a client that said goodbye is told OK once that is durable, and not before;
// it hears and says the number of its attempt that it knows.  Its bytes are logged as they came.
// Method: the service on a channel within the process, before a sink whose log the test is.

#include "server/ingest/ingest_service.h"

#include <gmock/gmock.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include "absl/synchronization/notification.h"
#include "tests/support/client_messages.h"

namespace bellwether::server {
namespace {

// Says of everything that it is durable, but of a goodbye what the test says; calls
// every attempt kAttempt, and hands out an action of it at once.
class Sink final : public IngestSink {
 public:
  static constexpr uint32_t kAttempt = 5;
  explicit Sink(bool takes_goodbyes) : takes_goodbyes_(takes_goodbyes) {}
  absl::StatusOr<std::shared_ptr<IngestSession>> Open(const HelloMessage&, std::string, SessionOwner* owner) override {
    owner_ = owner;
    owner->OnAction({.id = "a", .attempt = kAttempt});
    owner->OnOpen(0);
    return std::make_shared<Session>(this);
  }
  void MakeDurable() { owner_->OnGoodbye(); }
  absl::Notification said_goodbye;
  std::vector<uint32_t> attempts;  // Of what was put before the goodbye.
  std::vector<std::string> payloads;

 private:
  class Session final : public IngestSession {
   public:
    explicit Session(Sink* sink) : sink_(sink) {}
    uint64_t epoch() const override { return 1; }
    uint32_t attempt() const override { return kAttempt; }
    const Layout& layout() const override { return layout_; }
    absl::StatusOr<Taken> Put(IngestMessage& message, std::string& payload) override {
      sink_->payloads.push_back(payload);
      v1::ClientMessage logged;
      EXPECT_TRUE(logged.ParseFromString(payload));
      if (const auto* frame = std::get_if<RankFrame>(&message.body)) {
        EXPECT_EQ(logged.frame().attempt(), frame->attempt);
        sink_->attempts.push_back(frame->attempt);
      } else if (const auto* event = std::get_if<RunEvent>(&message.body)) {
        EXPECT_EQ(logged.event().attempt(), event->attempt);
        sink_->attempts.push_back(event->attempt);
      } else if (const auto* gram = std::get_if<ShippedGram>(&message.body)) {
        EXPECT_EQ(logged.spectrum().attempt(), gram->attempt);
        sink_->attempts.push_back(gram->attempt);
      } else {
        const auto& answer = std::get<ActionResultMessage>(message.body);
        EXPECT_EQ(logged.action_result().attempt(), answer.attempt);
        sink_->attempts.push_back(answer.attempt);
      }
      return Taken::kTaken;
    }
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

// A stream that tells of attempt `kTold` and has said goodbye, and what it was answered.
class Client {
 public:
  static constexpr uint32_t kTold = 2;
  explicit Client(Sink* sink) : service_({}, sink, &counters_, Clock::System()) {
    grpc::ServerBuilder builder;
    builder.RegisterService(&service_);
    server_ = builder.BuildAndStart();
    stub_ = v1::Ingest::NewStub(server_->InProcessChannel({}));
    stream_ = stub_->Attach(&context_);
    v1::ClientMessage hello;
    hello.mutable_hello()->mutable_run()->set_attempt(kTold);
    EXPECT_TRUE(stream_->Write(HelloOf(std::move(hello), /*world=*/1, /*layers=*/1)));
    v1::ClientMessage frame = LossFrame(/*step=*/0, kTold), event, gram, answer;
    frame.set_seq(1);
    event.set_seq(2);
    event.mutable_event()->set_attempt(kTold);
    event.mutable_event()->set_kind(v1::EVENT_KIND_ANNOTATION);
    gram.set_seq(3);
    gram.mutable_spectrum()->set_attempt(kTold);
    gram.mutable_spectrum()->set_kind(v1::SPECTRUM_KIND_WQ_GRAM);
    gram.mutable_spectrum()->set_n(1);
    gram.mutable_spectrum()->add_upper(1);
    gram.mutable_spectrum()->set_scale(1);
    answer.set_seq(4);
    answer.mutable_action_result()->set_attempt(kTold);
    answer.mutable_action_result()->set_id("a");
    for (const v1::ClientMessage& message : {frame, event, gram, answer}) EXPECT_TRUE(stream_->Write(message));
    event.set_seq(5);
    event.mutable_event()->set_attempt(kTold - 1);  // Of another, as it says.
    EXPECT_TRUE(stream_->Write(event));
    v1::ClientMessage bye;
    bye.mutable_bye()->set_reason(v1::BYE_REASON_FINISHED);
    EXPECT_TRUE(stream_->Write(bye));
    reader_ = std::thread([this] {
      v1::ServerMessage message;
      while (stream_->Read(&message)) {
        if (message.has_action()) action_attempt = message.action().attempt();
      }
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
  uint32_t action_attempt = 0;  // Once it is answered.

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

TEST(IngestServiceTest, AttemptsAreTranslatedBetweenClientAndRun) {
  Sink sink(/*takes_goodbyes=*/false);
  Client client(&sink);
  client.answered.WaitForNotification();
  EXPECT_THAT(sink.attempts, testing::ElementsAre(5, 5, 5, 5, 1));
  EXPECT_EQ(client.action_attempt, Client::kTold);
}

// A stream of bytes that are written by hand.
class RawClient {
 public:
  explicit RawClient(Sink* sink) : service_({}, sink, &counters_, Clock::System()) {
    grpc::ServerBuilder builder;
    builder.RegisterService(&service_);
    server_ = builder.BuildAndStart();
    grpc::GenericStub stub(server_->InProcessChannel({}));
    stream_ = stub.PrepareCall(&context_, "/bellwether.v1.Ingest/Attach", &queue_);
    stream_->StartCall(nullptr);
    Await();
  }
  ~RawClient() {
    context_.TryCancel();
    server_->Shutdown();
  }
  void Write(const std::string& bytes) {
    const grpc::Slice slice(bytes);
    stream_->Write(grpc::ByteBuffer(&slice, 1), nullptr);
    Await();
  }
  // Until the server has ended the stream.
  void ReadAll() {
    do {
      stream_->Read(&answer_, nullptr);
    } while (Await());
  }

 private:
  bool Await() {
    void* tag = nullptr;
    bool ok = false;
    return queue_.Next(&tag, &ok) && ok;
  }

  Counters counters_;
  IngestService service_;
  std::unique_ptr<grpc::Server> server_;
  grpc::ClientContext context_;
  grpc::CompletionQueue queue_;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> stream_;
  grpc::ByteBuffer answer_;
};

TEST(IngestServiceTest, ReceivedBytesAreLoggedAsTheyCame) {
  Sink sink(/*takes_goodbyes=*/false);
  RawClient client(&sink);
  v1::ClientMessage hello;
  hello.mutable_hello()->mutable_run()->set_attempt(Sink::kAttempt);
  client.Write(HelloOf(std::move(hello), /*world=*/1, /*layers=*/1).SerializeAsString());
  // The parts of a message in the order in which protobuf does not write them.
  v1::ClientMessage seq, body = LossFrame(/*step=*/0, Sink::kAttempt), again;
  seq.set_seq(1);
  body.clear_seq();
  std::string bytes = seq.SerializeAsString() + body.SerializeAsString();
  ASSERT_TRUE(again.ParseFromString(bytes));
  if (again.SerializeAsString() == bytes) bytes = body.SerializeAsString() + seq.SerializeAsString();
  client.Write(bytes);
  v1::ClientMessage bye;
  bye.mutable_bye()->set_reason(v1::BYE_REASON_FINISHED);
  client.Write(bye.SerializeAsString());
  client.ReadAll();
  EXPECT_THAT(sink.payloads, testing::ElementsAre(bytes));
}

TEST(IngestServiceTest, BytesThatAreNoMessageEndTheStream) {
  Sink sink(/*takes_goodbyes=*/true);
  RawClient client(&sink);
  client.Write(HelloOf({}, /*world=*/1, /*layers=*/1).SerializeAsString());
  client.Write("\xff\xff\xff");
  client.ReadAll();
  EXPECT_THAT(sink.payloads, testing::IsEmpty());
}

TEST(IngestServiceTest, AGoodbyeThatIsNotLoggedIsNotOk) {
  Sink sink(/*takes_goodbyes=*/false);
  Client client(&sink);
  EXPECT_EQ(client.AwaitAnswer(), grpc::StatusCode::UNAVAILABLE);
}

}  // namespace
}  // namespace bellwether::server
