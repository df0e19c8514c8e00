// Goal: any server of a cluster answers for all runs: which of several of a name,
// where it is, when that is not known, what a list misses; and what was passed on is
// never passed on again.
// Method: two real query engines, each the other's peer without a wire, and peers
// that say what a test wants.

#include "server/query/run_router.h"

#include <gmock/gmock.h>

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "server/query/call_access.h"
#include "server/query/query_engine.h"
#include "tests/support/query_stack.h"

namespace bellwether::server {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr char kKey[] = "a key of thirty-two bytes or more";

// One server.  Its runs are those of its stack; peers are called directly.
struct Node final : Peers {
  explicit Node(const std::string& name) : address(name), router(this, &stack.runs(), &clock) {
    access = *Access::Open({}, &counters, Clock::System());  // Nobody is asked who he is.
    access->SetPeers(kKey, [] { return int64_t{1'700'000'000'000}; });
    QueryStores stores = stack.stores();
    stores.router = &router;
    engine = std::make_unique<QueryEngine>(QueryEngine::Options(), stores);
  }

  // What it answers to a call that was passed on.
  absl::StatusOr<std::string> Take(const std::string& method, const std::string& bytes, const std::string& seal) {
    taken.push_back(method);
    if (!failure.ok()) return failure;
    auto grant = access->Identify({.passed_on = seal, .peer = "peer"}, method);
    if (!grant.ok()) return grant.status();
    CallContext context;
    context.grant = *grant;
    if (method == "GetRun") return Serve(method, bytes, context, &QueryEngine::GetRun);
    if (method == "ListRuns") return Serve(method, bytes, context, &QueryEngine::ListRuns);
    if (method == "ListAlerts") return Serve(method, bytes, context, &QueryEngine::ListAlerts);
    if (method == "GetMatrix") return Serve(method, bytes, context, &QueryEngine::GetMatrix);
    if (method == "GetSeries") return Serve(method, bytes, context, &QueryEngine::GetSeries);
    if (method == "CompareRuns") return Serve(method, bytes, context, &QueryEngine::CompareRuns);
    if (method == "Annotate") return Serve(method, bytes, context, &QueryEngine::Annotate);
    return absl::UnimplementedError(method);
  }
  template <typename Request, typename Response>
  absl::StatusOr<std::string> Serve(const std::string& method, const std::string& bytes, const CallContext& context,
                                    absl::StatusOr<Response> (QueryEngine::*call)(const Request&, const CallContext&)
                                        const) {
    Request request;
    EXPECT_TRUE(request.ParseFromString(bytes));
    auto response = CallFor(*engine, method.c_str(), std::move(request), context, call);
    if (!response.ok()) return response.status();
    return response->SerializeAsString();
  }
  // What a caller of this server gets.
  template <typename Request, typename Response>
  absl::StatusOr<Response> Ask(const char* method, Request request,
                               absl::StatusOr<Response> (QueryEngine::*call)(const Request&, const CallContext&)
                                   const) {
    CallContext context = engine->NewContext();
    context.grant = *access->Identify({.peer = "ipv4:10.0.0.1:1"}, method);
    return CallFor(*engine, method, std::move(request), context, call);
  }
  absl::StatusOr<v1::Run> GetRun(const std::string& run) {
    v1::GetRunRequest request;
    request.set_run(run);
    return Ask("GetRun", request, &QueryEngine::GetRun);
  }

  // Peers
  Spread spread() const override {
    Spread spread{.others = {}, .unserved = unserved};
    for (const auto& [name, other] : others) spread.others.push_back(name);
    return spread;
  }
  std::vector<std::pair<uint32_t, uint64_t>> holdings() const override { return {{3, 7}, {40, 2}}; }
  Owner OwnerOf(const RunUuid& uuid) const override {
    for (const auto& [name, other] : others) {
      if (other->stack.runs().Find(FormatUuid(uuid)) != nullptr) return {.here = false, .address = name};
    }
    return {.here = unserved == 0, .address = ""};
  }
  Owner OwnerOfRun(RunId) const override { return {.here = true, .address = ""}; }
  absl::StatusOr<std::string> Call(const std::string& server, const std::string& method, const std::string& request,
                                   const std::string& seal, int64_t) override {
    return others.at(server)->Take(method, request, seal);
  }
  std::vector<Answer> CallAll(const std::vector<std::string>& servers, const std::string& method,
                              const std::string& request, const std::string& seal, int64_t) override {
    std::vector<Answer> answers;
    for (const std::string& server : servers) answers.push_back({server, Call(server, method, request, seal, 0)});
    return answers;
  }
  std::shared_ptr<PeerStream> Stream(const std::string&, const std::string&, const std::string&, const std::string&,
                                     std::function<void(std::string)>,
                                     std::function<void(const absl::Status&)>) override {
    return nullptr;
  }
  absl::StatusOr<std::shared_ptr<PeerUpload>> Upload(const std::string&, const std::string&,
                                                     const std::string&) override {
    return absl::UnimplementedError("Upload");
  }
  std::string SealAsServer(const std::string& method) const override { return access->PassOnAsServer(method); }

  const std::string address;
  QueryStack stack;
  FakeClock clock;
  Counters counters;
  std::unique_ptr<Access> access;
  RunRouter router;
  std::unique_ptr<QueryEngine> engine;
  std::map<std::string, Node*> others;
  uint32_t unserved = 0;
  absl::Status failure;
  std::vector<std::string> taken;  // Methods that others passed on to it.
};

class RunRouterTest : public ::testing::Test {
 protected:
  RunRouterTest() : a_("a:1"), b_("b:1") {
    a_.others["b:1"] = &b_;
    b_.others["a:1"] = &a_;
  }
  // Runs of a stack have uuids by their number: a number of their own for each.
  RunId Add(Node* node, const std::string& name, int64_t started_ns, char uuid) {
    const RunId run = node->stack.AddRun({.name = name, .steps = 3});
    node->stack.Edit(run, [&](RunSnapshot* snapshot) {
      snapshot->record.started_unix_ns = started_ns;
      snapshot->record.description.uuid.fill(static_cast<uint8_t>(uuid));
    });
    return run;
  }

  Node a_, b_;
};

TEST_F(RunRouterTest, RunOfAnotherServerIsFoundByNameAndUuid) {
  Add(&b_, "llama", 5, 'b');
  RunUuid uuid;
  uuid.fill('b');
  for (const std::string& asked : {std::string("llama"), FormatUuid(uuid)}) {
    const auto run = a_.GetRun(asked);
    ASSERT_TRUE(run.ok()) << run.status();
    EXPECT_EQ(run->SerializeAsString(), b_.GetRun(asked)->SerializeAsString());
  }
}

TEST_F(RunRouterTest, AnyServerFindsTheNewestRunOfAName) {
  Add(&a_, "twice", 10, 'a');
  Add(&b_, "twice", 20, 'b');
  for (Node* const node : {&a_, &b_}) {
    const auto run = node->GetRun("twice");
    ASSERT_TRUE(run.ok()) << run.status();
    EXPECT_EQ(run->started_unix_ns(), 20) << node->address;
  }
}

TEST_F(RunRouterTest, LocationOfARunIsCachedForASecond) {
  Add(&b_, "llama", 5, 'b');
  ASSERT_TRUE(a_.GetRun("llama").ok());
  EXPECT_THAT(b_.taken, ElementsAre("GetRun", "GetRun")) << "found, then asked";
  ASSERT_TRUE(a_.GetRun("llama").ok());
  EXPECT_EQ(b_.taken.size(), 3u);
  a_.clock.Advance(RunRouter::kKnownMs * 1'000'000);
  ASSERT_TRUE(a_.GetRun("llama").ok());
  EXPECT_EQ(b_.taken.size(), 5u);
}

TEST_F(RunRouterTest, UnknownRunIsNotFoundOnlyAfterAllServersAnswered) {
  EXPECT_TRUE(absl::IsNotFound(a_.GetRun("nobodys").status()));
  b_.failure = absl::UnavailableError("away");
  const absl::Status silent = a_.GetRun("nobodys").status();
  EXPECT_TRUE(absl::IsUnavailable(silent)) << silent;
  EXPECT_THAT(std::string(silent.message()), HasSubstr("b:1"));
  b_.failure = absl::OkStatus();
  a_.unserved = 3;
  EXPECT_TRUE(absl::IsUnavailable(a_.GetRun("nobodys").status()));
  RunUuid uuid;
  uuid.fill('x');
  EXPECT_TRUE(absl::IsUnavailable(a_.GetRun(FormatUuid(uuid)).status()));
  a_.unserved = 0;
  // One that is being taken up by the server that was asked is not gone either.
  b_.unserved = 1;
  EXPECT_TRUE(absl::IsUnavailable(a_.GetRun("nobodys").status()));
}

TEST_F(RunRouterTest, ForwardedCallIsNotForwardedAgain) {
  Add(&a_, "as", 1, 'a');
  const std::string seal = a_.access->PassOnAsServer("GetRun");
  v1::GetRunRequest request;
  request.set_run("as");
  const auto answer = b_.Take("GetRun", request.SerializeAsString(), seal);
  EXPECT_TRUE(absl::IsNotFound(answer.status())) << answer.status();
  EXPECT_TRUE(a_.taken.empty()) << "b asked a, which had asked b";
  const auto list = b_.Take("ListRuns", "", b_.access->PassOnAsServer("ListRuns"));
  ASSERT_TRUE(list.ok());
  v1::ListRunsResponse runs;
  ASSERT_TRUE(runs.ParseFromString(*list));
  EXPECT_EQ(runs.runs_size(), 0);
  EXPECT_TRUE(a_.taken.empty());
}

TEST_F(RunRouterTest, ListHoldsEachRunOnceAndNamesUnansweredServers) {
  Add(&a_, "one", 1, 'a');
  Add(&b_, "two", 2, 'b');
  // Moving: both tell of it.
  Add(&a_, "moving", 3, 'm');
  Add(&b_, "moving", 3, 'm');
  for (Node* const node : {&a_, &b_}) {
    const auto list = node->Ask("ListRuns", v1::ListRunsRequest(), &QueryEngine::ListRuns);
    ASSERT_TRUE(list.ok()) << list.status();
    std::vector<std::string> names;
    for (const v1::Run& run : list->runs()) names.push_back(run.description().name());
    EXPECT_THAT(names, ::testing::UnorderedElementsAre("one", "two", "moving")) << node->address;
    EXPECT_EQ(list->total(), 3u);
    EXPECT_EQ(list->unanswered_size(), 0);
  }
  v1::ListRunsRequest few;
  few.set_limit(2);
  EXPECT_EQ(a_.Ask("ListRuns", few, &QueryEngine::ListRuns)->runs_size(), 2);
  b_.failure = absl::UnavailableError("away");
  a_.unserved = 7;
  const auto list = a_.Ask("ListRuns", v1::ListRunsRequest(), &QueryEngine::ListRuns);
  ASSERT_TRUE(list.ok()) << list.status();
  EXPECT_EQ(list->runs_size(), 2);
  EXPECT_THAT(list->unanswered(), ElementsAre("b:1"));
  EXPECT_EQ(list->partitions_unserved(), 7u);
  few.set_limit(1'000'000);
  EXPECT_TRUE(absl::IsInvalidArgument(a_.Ask("ListRuns", few, &QueryEngine::ListRuns).status()));
}

TEST_F(RunRouterTest, MovedRunIsFoundAgain) {
  Add(&b_, "llama", 5, 'b');
  ASSERT_TRUE(a_.GetRun("llama").ok());
  // From b to a: known to be b's for a second yet.
  const RunSnapshotPtr run = b_.stack.runs().Find("llama");
  b_.stack.runs().Remove(run->record.id);
  Add(&a_, "llama", 5, 'b');
  const auto moved = a_.GetRun("llama");
  EXPECT_TRUE(moved.ok()) << moved.status();
}

TEST_F(RunRouterTest, RunsOfTwoServersCompareAsOnOneServer) {
  // Alike but for one head, which doubles each 50 steps from a step on.
  const QueryStack::RunSpec failing = {.name = "failing", .failing = {.layer = 1, .head = 2}, .fails_at = 173};
  const QueryStack::RunSpec healthy = {.name = "healthy", .fails_at = 1 << 20};
  const auto add = [](Node* node, const QueryStack::RunSpec& spec, char uuid) {
    const RunId run = node->stack.AddRun(spec);
    node->stack.Edit(
        run, [uuid](RunSnapshot* snapshot) { snapshot->record.description.uuid.fill(static_cast<uint8_t>(uuid)); });
  };
  Node alone("alone:1"), third("c:1");
  add(&alone, failing, 'a');
  add(&alone, healthy, 'b');
  add(&a_, failing, 'a');
  add(&b_, healthy, 'b');
  third.others["a:1"] = &a_;
  third.others["b:1"] = &b_;
  v1::CompareRunsRequest request;
  request.set_run("failing");
  request.set_baseline("healthy");
  request.set_signal("drift_ratio");
  const auto expected = alone.Ask("CompareRuns", request, &QueryEngine::CompareRuns);
  ASSERT_TRUE(expected.ok()) << expected.status();
  ASSERT_EQ(expected->heads_differing(), 1u);
  ASSERT_GT(expected->heads(0).first_step(), 173);
  for (Node* const asked : {&a_, &b_, &third}) {
    const auto compared = asked->Ask("CompareRuns", request, &QueryEngine::CompareRuns);
    ASSERT_TRUE(compared.ok()) << asked->address << ": " << compared.status();
    EXPECT_EQ(compared->SerializeAsString(), expected->SerializeAsString()) << asked->address;
  }
  request.set_run("healthy");
  request.set_baseline("failing");
  EXPECT_EQ(a_.Ask("CompareRuns", request, &QueryEngine::CompareRuns)->SerializeAsString(),
            alone.Ask("CompareRuns", request, &QueryEngine::CompareRuns)->SerializeAsString());
  // Refused in the caller's words; and what an owner does not say is not made up.
  request.set_signal("nothing");
  EXPECT_TRUE(absl::IsInvalidArgument(a_.Ask("CompareRuns", request, &QueryEngine::CompareRuns).status()));
  request.set_signal("drift_ratio");
  b_.failure = absl::UnavailableError("away");
  EXPECT_TRUE(absl::IsUnavailable(third.Ask("CompareRuns", request, &QueryEngine::CompareRuns).status()));
}

TEST_F(RunRouterTest, MayAskOthersUnlessBothRunsAreKnownHere) {
  Add(&a_, "one", 1, 'a');
  Add(&b_, "two", 2, 'b');
  const GrantPtr grant = *a_.access->Identify({.peer = "ipv4:10.0.0.1:1"}, "CompareRuns");
  v1::CompareRunsRequest request;
  request.set_run("one");
  request.set_baseline("one");
  request.set_signal("drift_ratio");
  ASSERT_TRUE(a_.Ask("CompareRuns", request, &QueryEngine::CompareRuns).ok());
  EXPECT_FALSE(MayAskOthers(*a_.engine, grant.get(), request)) << "it is known that it is here";
  request.set_baseline("two");
  EXPECT_TRUE(MayAskOthers(*a_.engine, grant.get(), request));
  ASSERT_TRUE(a_.Ask("CompareRuns", request, &QueryEngine::CompareRuns).ok());
  EXPECT_TRUE(MayAskOthers(*a_.engine, grant.get(), request)) << "it is known that it is not";
}

TEST_F(RunRouterTest, AServerSaysWhatItServesAndInWhichEpoch) {
  const auto info = a_.Ask("GetServerInfo", v1::GetServerInfoRequest(), &QueryEngine::GetServerInfo);
  ASSERT_TRUE(info.ok()) << info.status();
  ASSERT_EQ(info->partitions_size(), 2);
  EXPECT_EQ(info->partitions(0).number(), 3u);
  EXPECT_EQ(info->partitions(0).epoch(), 7u);
}

}  // namespace
}  // namespace bellwether::server
