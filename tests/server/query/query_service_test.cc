// Goal: the service answers over gRPC as the engine does; its streams deliver,
// resync, end and are counted as query_service.h says; nothing that is open
// holds up a shutdown.
// Method: a real server and client over loopback.  A slow reader is one that
// does not read until the backlog is posted.  Waits have a deadline.
#include "server/query/query_service.h"

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "tests/support/access_files.h"
#include "tests/support/query_stack.h"

namespace bellwether::server {
namespace {

using ::testing::HasSubstr;

constexpr auto kLong = std::chrono::seconds(60);

// Waits until `condition` holds, for what has no notification of its own.
bool Eventually(const std::function<bool()>& condition) {
  const absl::Time deadline = absl::Now() + absl::Seconds(60);
  while (!condition()) {
    if (absl::Now() > deadline) return false;
    std::this_thread::yield();
  }
  return true;
}

class QueryServiceTest : public ::testing::Test {
 protected:
  void Start(QueryService::Options options = {}, QueryEngine::Options engine_options = {}) {
    engine_ = std::make_unique<QueryEngine>(engine_options, stack_.stores());
    service_ = std::make_unique<QueryService>(options, engine_.get());
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(service_.get());
    server_ = builder.BuildAndStart();
    ASSERT_NE(server_, nullptr);
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);  // A window that does not grow: a slow reader is soon felt.
    address_ = absl::StrCat("127.0.0.1:", port);
    stub_ = v1::Query::NewStub(grpc::CreateCustomChannel(address_, grpc::InsecureChannelCredentials(), arguments));
  }

  void TearDown() override {
    if (server_ != nullptr) Stop();
  }

  // How long it took.
  absl::Duration Stop() {
    const absl::Time start = absl::Now();
    service_->Shutdown();
    server_->Shutdown(std::chrono::system_clock::now() + kLong);
    server_->Wait();
    const absl::Duration took = absl::Now() - start;
    server_.reset();
    service_.reset();
    return took;
  }

  static std::unique_ptr<grpc::ClientContext> Context() {
    auto context = std::make_unique<grpc::ClientContext>();
    context->set_deadline(std::chrono::system_clock::now() + kLong);
    return context;
  }

  uint64_t Post(RunId run, const std::string& key, size_t bytes = 40) {
    return stack_.Post(stack_.MakeTransition(run, key, 0, AlertState::kFiring, Severity::kWarning, bytes)).id;
  }

  grpc::Status GetRun(const std::string& name, v1::Run* run, const std::string& token = "") {
    const auto context = Context();
    if (!token.empty()) context->AddMetadata("authorization", token);
    v1::GetRunRequest request;
    request.set_run(name);
    return stub_->GetRun(context.get(), request, run);
  }

  QueryStack stack_;
  std::string address_;
  std::unique_ptr<QueryEngine> engine_;
  std::unique_ptr<QueryService> service_;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<v1::Query::Stub> stub_;
};

TEST_F(QueryServiceTest, AnswersAsTheEngineDoesAndCounts) {
  Start();
  stack_.AddRun({.name = "r", .steps = 5});
  v1::Run run;
  ASSERT_TRUE(GetRun("r", &run).ok());
  EXPECT_EQ(run.description().name(), "r");
  const grpc::Status missing = GetRun("nobody", &run);
  EXPECT_EQ(missing.error_code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_THAT(missing.error_message(), HasSubstr("nobody"));
  const auto handled = [this](const char* code) {
    return stack_.counters()
        .counter("grpc_server_handled_total", {{"grpc_type", "unary"},
                                               {"grpc_service", "bellwether.v1.Query"},
                                               {"grpc_method", "GetRun"},
                                               {"grpc_code", code}})
        ->value();
  };
  EXPECT_EQ(handled("OK"), 1);
  EXPECT_EQ(handled("NotFound"), 1);
}

TEST_F(QueryServiceTest, CallsNeedTheRightToken) {
  const auto files = AccessFiles::WithToken("s3cret");
  const auto access = files->Open(&stack_.counters());
  Start({.access = access.get()});
  stack_.AddRun({.name = "r", .steps = 5});
  v1::Run run;
  EXPECT_EQ(GetRun("r", &run).error_code(), grpc::StatusCode::UNAUTHENTICATED);
  EXPECT_EQ(GetRun("r", &run, "Bearer s3creT").error_code(), grpc::StatusCode::UNAUTHENTICATED);
  EXPECT_EQ(GetRun("r", &run, "s3cret").error_code(), grpc::StatusCode::UNAUTHENTICATED);
  EXPECT_TRUE(GetRun("r", &run, "Bearer s3cret").ok());
  const auto context = Context();
  const auto stream = stub_->WatchAlerts(context.get(), {});
  v1::WatchAlertsResponse response;
  EXPECT_FALSE(stream->Read(&response));
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::UNAUTHENTICATED);
  const auto import_context = Context();
  v1::ImportRunResponse imported;
  const auto import = stub_->ImportRun(import_context.get(), &imported);
  import->WritesDone();
  EXPECT_EQ(import->Finish().error_code(), grpc::StatusCode::UNAUTHENTICATED);
}

TEST_F(QueryServiceTest, OpenStreamsEndWithTheirToken) {
  AccessFiles files;
  files.Write("identities: [{name: holder, roles: [admin], runs: [\"*\"]}]\n");
  files.AddToken("s3cret", "holder");
  const auto access = files.Open(&stack_.counters());
  Start({.access = access.get()});
  stack_.AddRun({.name = "r", .steps = 5});
  stack_.set_exported(std::string(1 << 20, 'x'));
  stack_.set_export_endless(true);
  struct Open {
    std::unique_ptr<grpc::ClientContext> context;
    std::function<grpc::Status()> end;
  };
  const auto open_all = [&] {
    const auto context = [](Open* open) {
      open->context = Context();
      open->context->AddMetadata("authorization", "Bearer s3cret");
      return open->context.get();
    };
    // One that has begun: of what is refused before that nothing is counted.
    const auto read_all = [](auto stream, auto response) {
      EXPECT_TRUE(stream->Read(&response));
      return [stream, response]() mutable {
        while (stream->Read(&response)) {
        }
        return stream->Finish();
      };
    };
    std::vector<Open> all(4);
    std::shared_ptr alerts = stub_->WatchAlerts(context(&all[0]), {});
    all[0].end = read_all(alerts, v1::WatchAlertsResponse());
    v1::WatchRunRequest watch;
    watch.set_run("r");
    std::shared_ptr run = stub_->WatchRun(context(&all[1]), watch);
    all[1].end = read_all(run, v1::WatchRunResponse());
    v1::ExportRunRequest request;
    request.set_run("r");
    std::shared_ptr exported = stub_->ExportRun(context(&all[2]), request);
    all[2].end = read_all(exported, v1::ExportRunResponse());
    const auto imported = std::make_shared<v1::ImportRunResponse>();
    std::shared_ptr import = stub_->ImportRun(context(&all[3]), imported.get());
    all[3].end = [import, imported] { return import->Finish(); };
    return all;
  };
  const auto ended = [this](const char* reason) {
    return stack_.counters().counter("bellwether_access_streams_ended_total", {{"reason", reason}})->value();
  };
  auto open = open_all();
  ASSERT_TRUE(Eventually([this] { return service_->streams_open() == 4; }));
  files.Write("identities: [{name: holder, roles: [admin], runs: [\"s\"]}, {name: b, roles: [read], runs: []}]\n");
  access->Tick();
  // WatchAlerts and an import without a name are of no run in particular.
  for (const size_t i : {1, 2}) {
    const grpc::Status status = open[i].end();
    EXPECT_EQ(status.error_code(), grpc::StatusCode::PERMISSION_DENIED) << i;
    EXPECT_EQ(status.error_message(), "holder has the role read but not for run \"r\"") << i;
  }
  EXPECT_EQ(ended("run"), 2);
  files.Write("identities: [{name: holder, roles: [act], runs: [\"*\"]}]\n");
  access->Tick();
  EXPECT_EQ(open[3].end().error_message(), "holder lacks the role write");
  EXPECT_EQ(ended("role"), 1);
  files.RemoveTokens();
  access->Tick();
  const grpc::Status status = open[0].end();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAUTHENTICATED);
  EXPECT_THAT(status.error_message(), HasSubstr("the token was revoked"));
  EXPECT_EQ(ended("token_wrong"), 1);
  EXPECT_TRUE(Eventually([this] { return service_->streams_open() == 0; }));
}

TEST_F(QueryServiceTest, TheClientsDeadlineHolds) {
  Start();
  v1::ServerInfo info;
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() - std::chrono::seconds(1));
  EXPECT_EQ(stub_->GetServerInfo(&context, {}, &info).error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
}

TEST_F(QueryServiceTest, RefusesWhatDoesNotFitIntoTheQueue) {
  Start({.threads = 1, .queue_max = 2});
  const RunId run = stack_.AddRun({.name = "r", .steps = 5});
  Post(run, "k");
  absl::Notification go;
  std::atomic<int> inside = 0;
  stack_.set_before_note([&] {
    ++inside;
    go.WaitForNotification();
  });
  struct Call {
    grpc::ClientContext context;
    v1::Alert alert;
    v1::AcknowledgeAlertRequest request;
    grpc::Status status;
    absl::Notification done;
  };
  std::vector<std::unique_ptr<Call>> calls;
  const auto start = [&] {
    calls.push_back(std::make_unique<Call>());
    Call* const call = calls.back().get();
    call->request.set_run("r");
    call->request.set_key("k");
    stub_->async()->AcknowledgeAlert(&call->context, &call->request, &call->alert, [call](grpc::Status status) {
      call->status = status;
      call->done.Notify();
    });
  };
  start();  // Runs.
  ASSERT_TRUE(Eventually([&] { return inside == 1; }));
  for (int i = 0; i < 3; ++i) start();  // Two wait; the third does not fit.
  ASSERT_TRUE(Eventually([this] { return stack_.refused("queue") >= 1; }));
  go.Notify();
  int ok = 0, refused = 0;
  for (const auto& call : calls) {
    call->done.WaitForNotification();
    if (call->status.ok()) ++ok;
    if (call->status.error_code() == grpc::StatusCode::RESOURCE_EXHAUSTED) {
      ++refused;
      EXPECT_THAT(call->status.error_message(), HasSubstr("queue: 2"));
    }
  }
  EXPECT_EQ(ok, 3);
  EXPECT_EQ(refused, 1);
}

TEST_F(QueryServiceTest, WatchAlertsGivesHistoryThenLife) {
  Start();
  const RunId run = stack_.AddRun({.name = "r", .steps = 5});
  const uint64_t first = Post(run, "a");
  const auto context = Context();
  const auto stream = stub_->WatchAlerts(context.get(), {});
  v1::WatchAlertsResponse response;
  ASSERT_TRUE(stream->Read(&response));
  EXPECT_EQ(response.transition().id(), first);
  EXPECT_EQ(response.transition().run_uuid().size(), 16u);
  ASSERT_TRUE(stream->Read(&response));
  EXPECT_TRUE(response.caught_up());
  EXPECT_EQ(response.caught_up_id(), first);
  const uint64_t second = Post(run, "b");
  ASSERT_TRUE(stream->Read(&response));
  EXPECT_EQ(response.transition().id(), second);
  context->TryCancel();
  EXPECT_FALSE(stream->Read(&response));
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::CANCELLED);
  EXPECT_TRUE(Eventually([this] { return service_->streams_open() == 0; }));
}

TEST_F(QueryServiceTest, WatchAlertsHasNoGapAndNoDuplicateUnderPosts) {
  Start();
  const RunId run = stack_.AddRun({.name = "r", .steps = 5});
  constexpr int kPosters = 3, kEach = 200;
  std::vector<std::thread> posters;
  for (int p = 0; p < kPosters; ++p) {
    posters.emplace_back([this, run, p] {
      for (int i = 0; i < kEach; ++i) Post(run, absl::StrCat("p", p, "/", i));
    });
  }
  uint64_t last = 0;
  // Reconnects in the middle of it, as a client does.
  for (const int until : {100, 350, kPosters * kEach}) {
    const auto context = Context();
    v1::WatchAlertsRequest request;
    request.set_after_id(last);
    const auto stream = stub_->WatchAlerts(context.get(), request);
    v1::WatchAlertsResponse response;
    while (last < static_cast<uint64_t>(until) && stream->Read(&response)) {
      if (response.body_case() != v1::WatchAlertsResponse::kTransition) continue;
      ASSERT_EQ(response.transition().id(), last + 1);
      last = response.transition().id();
    }
    EXPECT_EQ(last, static_cast<uint64_t>(until));
    context->TryCancel();
    stream->Finish();
  }
  for (std::thread& poster : posters) poster.join();
}

TEST_F(QueryServiceTest, ASlowReaderIsToldToResync) {
  Start({.alerts = {.behind_bytes_max = 256 << 10}});
  const RunId run = stack_.AddRun({.name = "r", .steps = 5});
  const auto context = Context();
  auto stream = stub_->WatchAlerts(context.get(), {});
  v1::WatchAlertsResponse response;
  ASSERT_TRUE(stream->Read(&response));
  ASSERT_TRUE(response.caught_up());
  // Not read: gRPC's windows fill, then the bound is passed.
  constexpr uint64_t kPosts = 400;
  for (uint64_t i = 0; i < kPosts; ++i) Post(run, absl::StrCat("k", i), 8 << 10);
  uint64_t last = 0, resync = 0;
  while (stream->Read(&response)) {
    if (response.body_case() == v1::WatchAlertsResponse::kResyncFrom) {
      resync = response.resync_from();
    } else {
      ASSERT_EQ(response.transition().id(), last + 1);
      last = response.transition().id();
    }
  }
  EXPECT_TRUE(stream->Finish().ok());
  EXPECT_EQ(resync, last);
  EXPECT_LT(last, kPosts);
  const auto again = Context();
  v1::WatchAlertsRequest request;
  request.set_after_id(resync);
  stream = stub_->WatchAlerts(again.get(), request);
  while (last < kPosts && stream->Read(&response)) {
    ASSERT_EQ(response.transition().id(), last + 1);
    last = response.transition().id();
  }
  EXPECT_EQ(last, kPosts);
  again->TryCancel();
  stream->Finish();
}

TEST_F(QueryServiceTest, WatchesHaveALimit) {
  Start({.streams_max = 2});
  stack_.AddRun({.name = "r", .steps = 5});
  std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
  std::vector<std::unique_ptr<grpc::ClientReader<v1::WatchAlertsResponse>>> streams;
  v1::WatchAlertsResponse response;
  for (int i = 0; i < 3; ++i) {
    contexts.push_back(Context());
    streams.push_back(stub_->WatchAlerts(contexts.back().get(), {}));
    EXPECT_EQ(streams.back()->Read(&response), i < 2);
  }
  const grpc::Status refused = streams[2]->Finish();
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(refused.error_message(), HasSubstr("streams: 2"));
  EXPECT_EQ(stack_.refused("streams"), 1);
  contexts[0]->TryCancel();
  streams[0]->Finish();
  // The place is free again.
  ASSERT_TRUE(Eventually([this] { return service_->streams_open() == 1; }));
  contexts.push_back(Context());
  const auto next = stub_->WatchAlerts(contexts.back().get(), {});
  EXPECT_TRUE(next->Read(&response));
  for (const auto& context : contexts) context->TryCancel();
  next->Finish();
  streams[1]->Finish();
}

TEST_F(QueryServiceTest, WatchAlertsRefusesWhatItCannotWatch) {
  Start();
  const auto code = [this](const v1::WatchAlertsRequest& request) {
    const auto context = Context();
    const auto stream = stub_->WatchAlerts(context.get(), request);
    v1::WatchAlertsResponse response;
    EXPECT_FALSE(stream->Read(&response));
    return stream->Finish().error_code();
  };
  v1::WatchAlertsRequest request;
  request.set_run("nobody");
  EXPECT_EQ(code(request), grpc::StatusCode::NOT_FOUND);
  request.clear_run();
  request.set_after_id(1);
  EXPECT_EQ(code(request), grpc::StatusCode::OUT_OF_RANGE);
  request.set_after_id(0);
  request.set_severity_min(static_cast<v1::Severity>(4));
  EXPECT_EQ(code(request), grpc::StatusCode::INVALID_ARGUMENT);
}

TEST_F(QueryServiceTest, WatchRunFollowsUntilTheRunEnds) {
  Start();
  const RunId run = stack_.AddRun({.name = "r", .steps = 5});
  v1::WatchRunRequest request;
  request.set_run("r");
  request.add_signals("drift_ratio");
  request.set_min_interval_ms(100);
  const auto start = std::chrono::steady_clock::now();
  const auto context = Context();
  const auto stream = stub_->WatchRun(context.get(), request);
  v1::WatchRunResponse response;
  ASSERT_TRUE(stream->Read(&response));
  EXPECT_EQ(response.run().step(), 4);
  ASSERT_EQ(response.matrices_size(), 1);
  EXPECT_EQ(response.matrices(0).values_size(), 12);
  stack_.Edit(run, [](RunSnapshot* snapshot) { snapshot->record.step = 5; });
  ASSERT_TRUE(stream->Read(&response));
  EXPECT_EQ(response.run().step(), 5);
  // Not before its interval, which began when the first was sent: that this thread heard of it late changes nothing.
  EXPECT_GE(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(100));
  stack_.Edit(run, [](RunSnapshot* snapshot) { snapshot->record.ended = true; });
  ASSERT_TRUE(stream->Read(&response));
  EXPECT_TRUE(response.run().ended());
  EXPECT_FALSE(stream->Read(&response));
  EXPECT_TRUE(stream->Finish().ok());

  request.set_min_interval_ms(99);
  const auto refused_context = Context();
  const auto refused = stub_->WatchRun(refused_context.get(), request);
  EXPECT_FALSE(refused->Read(&response));
  EXPECT_EQ(refused->Finish().error_code(), grpc::StatusCode::INVALID_ARGUMENT);
}

TEST_F(QueryServiceTest, ExportComesInBoundedChunksAndWhole) {
  Start();
  stack_.AddRun({.name = "r", .steps = 5});
  std::string bytes(1'000'000, 'x');
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<char>(i * 7919 >> 3);
  stack_.set_exported(bytes);
  v1::ExportRunRequest request;
  request.set_run("r");
  const auto context = Context();
  const auto stream = stub_->ExportRun(context.get(), request);
  v1::ExportRunResponse response;
  std::string got;
  while (stream->Read(&response)) {
    EXPECT_LE(response.chunk().size(), size_t{256} << 10);
    got += response.chunk();
  }
  EXPECT_TRUE(stream->Finish().ok());
  EXPECT_TRUE(got == bytes);
}

TEST_F(QueryServiceTest, ImportTakesChunksUpToTheirLimit) {
  Start();
  const auto import = [this](const std::string& name, const std::vector<std::string>& chunks,
                             v1::ImportRunResponse* response) {
    const auto context = Context();
    const auto stream = stub_->ImportRun(context.get(), response);
    v1::ImportRunRequest request;
    request.set_as_name(name);
    for (const std::string& chunk : chunks) {
      request.set_chunk(chunk);
      if (!stream->Write(request)) break;
      request.clear_as_name();
    }
    stream->WritesDone();
    return stream->Finish();
  };
  v1::ImportRunResponse response;
  const std::string first = "BWRUN" + std::string((256 << 10) - 5, 'a');
  const grpc::Status whole = import("new", {first, "tail"}, &response);
  ASSERT_TRUE(whole.ok()) << whole.error_message();
  EXPECT_EQ(response.run().description().name(), "new");
  EXPECT_EQ(response.frames(), 10u);
  EXPECT_TRUE(stack_.imported() == first + "tail");
  EXPECT_EQ(import("new", {first}, &response).error_code(), grpc::StatusCode::ALREADY_EXISTS);
  EXPECT_EQ(import("x", {"GARBAGE"}, &response).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(import("x", {}, &response).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  const grpc::Status large = import("x", {first + "b"}, &response);
  EXPECT_EQ(large.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(large.error_message(), HasSubstr("at most 262144"));
  EXPECT_EQ(stack_.refused("chunk"), 1);
  const grpc::Status name = import(std::string(129, 'n'), {first}, &response);
  EXPECT_THAT(name.error_message(), HasSubstr("as_name: 129 bytes"));
  EXPECT_TRUE(Eventually([this] { return service_->streams_open() == 0; }));
}

TEST_F(QueryServiceTest, ASilentImportAndAnUnreadExportEnd) {
  Start({.transfer_idle_ms_max = 200});
  stack_.AddRun({.name = "r", .steps = 5});
  v1::ImportRunResponse imported;
  const auto import_context = Context();
  const auto import = stub_->ImportRun(import_context.get(), &imported);
  EXPECT_EQ(import->Finish().error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);

  stack_.set_exported(std::string(1 << 20, 'x'));
  stack_.set_export_endless(true);
  v1::ExportRunRequest request;
  request.set_run("r");
  const auto context = Context();
  const auto stream = stub_->ExportRun(context.get(), request);
  // Nothing is read: the transfer's thread must come free all the same.
  const auto exported = [this] {
    return stack_.counters()
               .counter("grpc_server_handled_total", {{"grpc_type", "server_stream"},
                                                      {"grpc_service", "bellwether.v1.Query"},
                                                      {"grpc_method", "ExportRun"},
                                                      {"grpc_code", "OK"}})
               ->value() == 1;
  };
  ASSERT_TRUE(Eventually([&] { return stack_.exports_started() == 1; }));
  ASSERT_TRUE(Eventually([&] { return stack_.exports_running() == 0; }));
  v1::ExportRunResponse response;
  while (stream->Read(&response)) {
  }
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  EXPECT_FALSE(exported());
}

// A caller whose window is smaller than any answer, and that does not read.
class UnreadTest : public QueryServiceTest {
 protected:
  void SetUp() override { stack_.AddRun({.name = "r", .steps = 5}); }
  void Start(const QueryService::Options& options, const QueryEngine::Options& engine_options = {}) {
    QueryServiceTest::Start(options, engine_options);
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
    arguments.SetInt(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, 5);
    channel_ = grpc::CreateCustomChannel(address_, grpc::InsecureChannelCredentials(), arguments);
  }
  // As a stream, since a unary call's answer is read by itself.
  std::unique_ptr<grpc::ClientReader<v1::GetMatrixResponse>> GetMatrix(grpc::ClientContext* context) {
    v1::GetMatrixRequest request;
    request.set_run("r");
    request.set_signal("drift_ratio");
    request.set_step(-1);
    const grpc::internal::RpcMethod method("/bellwether.v1.Query/GetMatrix",
                                           grpc::internal::RpcMethod::SERVER_STREAMING);
    return std::unique_ptr<grpc::ClientReader<v1::GetMatrixResponse>>(
        grpc::internal::ClientReaderFactory<v1::GetMatrixResponse>::Create(channel_.get(), method, context, request));
  }
  double reserved() { return stack_.counters().gauge("bellwether_query_memory_bytes")->value(); }

  std::shared_ptr<grpc::Channel> channel_;
};

TEST_F(UnreadTest, UnreadAnswersAreCountedAndBounded) {
  Start({}, {.memory = {.bytes_max = 256 << 10, .wait_ns_max = 0}});
  std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
  std::vector<std::unique_ptr<grpc::ClientReader<v1::GetMatrixResponse>>> calls;
  const auto refused = [this] { return stack_.refused("query_memory"); };
  // A call counts 16 KiB and its answer: three fit into a quarter.
  for (int i = 0; i < 4; ++i) {
    contexts.push_back(Context());
    calls.push_back(GetMatrix(contexts.back().get()));
    ASSERT_TRUE(Eventually([&] { return reserved() + refused() >= (i + 1) * (16 << 10) || refused() > 0; })) << i;
  }
  EXPECT_EQ(refused(), 1);
  const grpc::Status status = calls.back()->Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED) << status.error_message();
  // They come back with their callers.
  for (const auto& context : contexts) context->TryCancel();
  EXPECT_TRUE(Eventually([&] { return reserved() == 0; }));
  v1::Run run;
  EXPECT_TRUE(GetRun("r", &run).ok());
}

TEST_F(UnreadTest, AnAnswerMustBeTakenInTime) {
  Start({.answer_ms_max = 1});
  const auto context = Context();
  const auto call = GetMatrix(context.get());
  const auto answered = [this] {
    return stack_.counters()
        .counter("grpc_server_handled_total", {{"grpc_type", "unary"},
                                               {"grpc_service", "bellwether.v1.Query"},
                                               {"grpc_method", "GetMatrix"},
                                               {"grpc_code", "OK"}})
        ->value();
  };
  ASSERT_TRUE(Eventually([&] { return answered() == 1; }));
  EXPECT_TRUE(Eventually([&] { return reserved() == 0; }));
  context->TryCancel();
  call->Finish();
}

TEST_F(UnreadTest, UnreadExportFreesItsPlace) {
  for (const bool endless : {false, true}) {
    Start({.transfers_max = 1, .transfer_idle_ms_max = 1, .answer_ms_max = 1});
    const auto stub = v1::Query::NewStub(channel_);
    stack_.set_exported("one chunk");
    stack_.set_export_endless(endless);
    v1::ExportRunRequest request;
    request.set_run("r");
    const int before = stack_.exports_started();
    const auto context = Context();
    const auto stream = stub->ExportRun(context.get(), request);
    ASSERT_TRUE(Eventually([&] { return stack_.exports_started() > before; }));
    EXPECT_TRUE(Eventually([this] { return service_->streams_open() == 0; })) << endless;
    context->TryCancel();
    Stop();
  }
}

TEST_F(UnreadTest, ImportWithUnreadAnswerFreesItsPlace) {
  Start({.transfers_max = 1, .answer_ms_max = 1});
  const auto stub = v1::Query::NewStub(channel_);
  v1::ImportRunResponse response;
  const auto context = Context();
  const auto stream = stub->ImportRun(context.get(), &response);
  v1::ImportRunRequest request;
  request.set_as_name("new");
  request.set_chunk("BWRUN");
  ASSERT_TRUE(stream->Write(request));
  ASSERT_TRUE(stream->WritesDone());
  ASSERT_TRUE(Eventually([this] { return stack_.imported() == "BWRUN"; }));
  EXPECT_TRUE(Eventually([this] { return service_->streams_open() == 0; }));
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::CANCELLED);
}

TEST_F(QueryServiceTest, TransfersHaveALimit) {
  Start({.transfers_max = 2});
  std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
  std::vector<std::unique_ptr<grpc::ClientWriter<v1::ImportRunRequest>>> imports;
  v1::ImportRunResponse responses[3];
  for (int i = 0; i < 2; ++i) {
    contexts.push_back(Context());
    imports.push_back(stub_->ImportRun(contexts.back().get(), &responses[i]));
    ASSERT_TRUE(Eventually([&] { return service_->streams_open() == static_cast<size_t>(i) + 1; }));
  }
  contexts.push_back(Context());
  const auto third = stub_->ImportRun(contexts.back().get(), &responses[2]);
  EXPECT_EQ(third->Finish().error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(stack_.refused("transfers"), 1);
  for (int i = 0; i < 2; ++i) {
    contexts[static_cast<size_t>(i)]->TryCancel();
    EXPECT_EQ(imports[static_cast<size_t>(i)]->Finish().error_code(), grpc::StatusCode::CANCELLED);
  }
}

TEST_F(QueryServiceTest, ShutdownWaitsForNoStream) {
  Start();
  const RunId run = stack_.AddRun({.name = "r", .steps = 5});
  stack_.set_exported(std::string(1 << 20, 'x'));
  stack_.set_export_endless(true);
  // One of each, and a reader of alerts with a write stuck in the window.
  const auto alerts_context = Context(), slow_context = Context(), run_context = Context(), export_context = Context(),
             import_context = Context();
  const auto alerts = stub_->WatchAlerts(alerts_context.get(), {});
  const auto slow = stub_->WatchAlerts(slow_context.get(), {});
  v1::WatchRunRequest watch;
  watch.set_run("r");
  const auto watched = stub_->WatchRun(run_context.get(), watch);
  v1::ExportRunRequest request;
  request.set_run("r");
  const auto exported = stub_->ExportRun(export_context.get(), request);
  v1::ImportRunResponse response;
  const auto import = stub_->ImportRun(import_context.get(), &response);
  ASSERT_TRUE(Eventually([this] { return service_->streams_open() == 5; }));
  v1::WatchAlertsResponse alert;
  ASSERT_TRUE(alerts->Read(&alert));
  for (int i = 0; i < 100; ++i) Post(run, absl::StrCat("k", i), 8 << 10);
  v1::WatchRunResponse snapshot;
  ASSERT_TRUE(watched->Read(&snapshot));

  // The clients read on another thread, as clients do once they are told.
  std::thread reader([&] {
    while (alerts->Read(&alert)) {
    }
    EXPECT_EQ(alerts->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
    EXPECT_FALSE(watched->Read(&snapshot));
    EXPECT_EQ(watched->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
    EXPECT_EQ(import->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
  });
  service_->Shutdown();
  reader.join();
  // Calls that come now are refused, streams too.
  v1::Run late;
  EXPECT_EQ(GetRun("r", &late).error_code(), grpc::StatusCode::UNAVAILABLE);
  // `slow` and `exported` never read; their writes are stuck in flow control.
  // The server's deadline cuts those, and nothing of the service is left.
  const absl::Time start = absl::Now();
  server_->Shutdown(std::chrono::system_clock::now() + std::chrono::milliseconds(200));
  server_->Wait();
  EXPECT_LT(absl::Now() - start, absl::Seconds(20));
  EXPECT_EQ(service_->streams_open(), 0u);
  server_.reset();
  service_.reset();
  v1::WatchAlertsResponse rest;
  while (slow->Read(&rest)) {
  }
  EXPECT_EQ(slow->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
  v1::ExportRunResponse chunk;
  while (exported->Read(&chunk)) {
  }
  EXPECT_EQ(exported->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
}

TEST_F(QueryServiceTest, ShutdownOfIdleStreamsIsPrompt) {
  Start();
  stack_.AddRun({.name = "r", .steps = 5});
  std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
  std::vector<std::unique_ptr<grpc::ClientReader<v1::WatchAlertsResponse>>> streams;
  v1::WatchAlertsResponse response;
  for (int i = 0; i < 20; ++i) {
    contexts.push_back(Context());
    streams.push_back(stub_->WatchAlerts(contexts.back().get(), {}));
    ASSERT_TRUE(streams.back()->Read(&response));
  }
  EXPECT_LT(Stop(), absl::Seconds(10));
  for (const auto& stream : streams) {
    EXPECT_FALSE(stream->Read(&response));
    EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
  }
}

}  // namespace
}  // namespace bellwether::server
