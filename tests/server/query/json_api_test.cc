// Goal: the JSON forms are stable: a transition's line key by key, and each
// unary call of service Query under its name.
// Method: the exact text of a transition; the service's descriptor as the list
// of methods.
#include "server/query/json_api.h"

#include <gmock/gmock.h>
#include <google/protobuf/util/json_util.h>
#include <gtest/gtest.h>

#include <bit>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>

#include "bellwether/v1/query.grpc.pb.h"
#include "server/query/json_text.h"
#include "tests/support/query_stack.h"

namespace bellwether::server {
namespace {

using ::testing::HasSubstr;

TEST(TransitionToJsonTest, TransitionHasTheDocumentedJson) {
  AlertTransition transition;
  transition.run_name = "gpt";
  transition.step = 300;
  transition.first_step = 220;
  transition.state = AlertState::kFiring;
  transition.severity = Severity::kWarning;
  transition.stage = 1;
  transition.rule = "drift";
  transition.key = "drift/1/2/220";
  transition.k = 3;
  transition.strongest = {.layer = 1, .head = 2};
  transition.heads = {{1, 2}, {0, 3}};
  transition.eta = {.known = true, .steps = 1200, .lower_steps = 900, .upper_steps = 1600};
  transition.evidence = {{.signal = "drift_ratio", .value = 4.5},
                         {.signal = "key_leak", .value = std::numeric_limits<double>::quiet_NaN()},
                         {.signal = "drift_ratio", .value = 4.0}};
  transition.summary = "L1 \"H2\"";
  transition.cause = "rounding drift";
  transition.heads_total = 5;
  transition.advice = "Centre the keys.";
  EXPECT_EQ(TransitionToJson(transition),
            R"({"run":"gpt","step":300,"state":"firing","severity":"warning","stage":1,"layer":1,"head":2,)"
            R"("heads":[[1,2],[0,3]],"eta_steps":1200.0,"eta_lower_steps":900.0,"eta_upper_steps":1600.0,)"
            R"("eta_seconds":null,"evidence":{"drift_ratio":4.5,"key_leak":null},)"
            R"("rule":"drift","key":"drift/1/2/220","k":3,"first_step":220,"summary":"L1 \"H2\"",)"
            R"("cause":"rounding drift","heads_total":5,"advice":"Centre the keys.","tensors":[],"experts":[],)"
            R"("ranks":[],"modules":[],"sequences":null})");
}

TEST(TransitionToJsonTest, UuidFollowsTheNameWhereItIsKnown) {
  AlertTransition transition;
  transition.run_name = "gpt";
  EXPECT_EQ(nlohmann::json::parse(TransitionToJson(transition, "0a1b"))["run_uuid"], "0a1b");
  EXPECT_FALSE(nlohmann::json::parse(TransitionToJson(transition)).contains("run_uuid"));
}

TEST(TransitionToJsonTest, PlacesOfOtherKindsComeFromTheEvidence) {
  AlertTransition transition;
  transition.evidence = {
      {.signal = "tensor_grad_norm", .text = "layers.0.q.weight, layers.1.q.weight, ..."},
      {.signal = "tensor_weight_rms", .text = "layers.1.q.weight"},
      {.signal = "tensor_update_ratio", .text = "all parameters"},
      {.signal = "expert_load", .where = {1, 3}},
      {.signal = "expert_largest_share", .where = {1, -1}},
      {.signal = "differing_rank", .value = 4},
      {.signal = "law_z", .text = "layers.2.mlp A2"},
      {.signal = "loss_sequence_max", .text = "9.1 (a1b2), 8.7 (c3d4)"},
      {.signal = "a_signal_of_the_users_own", .text = "not a tensor"},
  };
  const auto json = nlohmann::json::parse(TransitionToJson(transition));
  EXPECT_EQ(json["tensors"], nlohmann::json::parse(R"(["layers.0.q.weight", "layers.1.q.weight"])"));
  EXPECT_EQ(json["experts"], nlohmann::json::parse("[[1, 3]]"));
  EXPECT_EQ(json["ranks"], nlohmann::json::parse("[4]"));
  EXPECT_EQ(json["modules"], nlohmann::json::parse(R"(["layers.2.mlp"])"));
  EXPECT_EQ(json["sequences"], "9.1 (a1b2), 8.7 (c3d4)");
}

TEST(TransitionToJsonTest, UnknownValuesAreNull) {
  AlertTransition transition;
  transition.state = AlertState::kResolved;
  transition.severity = Severity::kCritical;
  transition.run_name = "bad \xff utf8\n";
  const std::string line = TransitionToJson(transition);
  EXPECT_EQ(line.find('\n'), std::string::npos);
  const auto json = nlohmann::json::parse(line);
  EXPECT_TRUE(json["layer"].is_null());
  EXPECT_TRUE(json["head"].is_null());
  EXPECT_TRUE(json["eta_steps"].is_null());
  EXPECT_EQ(json["heads"], nlohmann::json::array());
  EXPECT_EQ(json["evidence"], nlohmann::json::object());
  EXPECT_EQ(json["state"], "resolved");
  EXPECT_EQ(json["severity"], "critical");
}

// Every kind of field, with values that are hard to write.
v1::ListActionsResponse HardActions() {
  v1::ListActionsResponse hard;
  v1::Action& action = *hard.add_actions();
  action.set_id("a \"quoted\" \\ <b>\n\x01\u00fc");
  action.set_value(-0.1);
  action.mutable_scope()->add_layers(4294967295u);
  action.set_expires_unix_ns(INT64_MIN);
  action.set_kind(static_cast<v1::ActionKind>(77));
  hard.add_actions();
  hard.add_audit()->set_time_unix_ns(INT64_MAX);
  return hard;
}

TEST(JsonTextTest, JsonEqualsProtobufsOwn) {
  v1::GetSeriesResponse series;
  v1::Series& one = *series.add_series();
  one.set_values(UINT64_MAX);
  for (const float value : {0.0f, 1.5f, 0.1f, 16777216.0f, 100000.0f, -7e-7f, std::numeric_limits<float>::infinity(),
                            -std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    one.add_step(static_cast<int64_t>(one.step_size()) - 5);
    one.add_mean(value);
  }
  v1::CompareRunsResponse compared;
  for (const double value : {0.1, 1e300, 5e-324, -1.0 / 3}) compared.add_heads()->set_ratio(value);
  v1::ServerInfo info;
  (*info.mutable_options())["a \"key\""] = "x";
  (*info.mutable_limits())["points"] = 1e4;
  v1::WatchAlertsResponse watched;
  watched.set_caught_up_id(0);
  v1::Run run;
  run.mutable_description()->set_uuid(std::string("\0\xff\x10 bytes", 9));
  run.mutable_description()->mutable_layout();
  const v1::ListActionsResponse actions = HardActions();
  for (const google::protobuf::Message* const message : std::initializer_list<const google::protobuf::Message*>{
           &series, &compared, &info, &watched, &run, &actions, &v1::ListEventsResponse::default_instance(),
           &v1::GetServerInfoRequest::default_instance()}) {
    google::protobuf::util::JsonPrintOptions options;
    options.always_print_primitive_fields = true;
    options.preserve_proto_field_names = true;
    std::string expected;
    ASSERT_TRUE(google::protobuf::util::MessageToJsonString(*message, &expected, options).ok());
    const std::string text = ToJsonText(*message);
    EXPECT_EQ(nlohmann::json::parse(text), nlohmann::json::parse(expected)) << text << "\n" << expected;
    // And what it says is what was meant.
    std::unique_ptr<google::protobuf::Message> back(message->New());
    ASSERT_TRUE(google::protobuf::util::JsonStringToMessage(text, back.get()).ok()) << text;
    EXPECT_EQ(ToJsonText(*back), text);
  }
}

TEST(JsonTextTest, EveryNumberComesBackBitForBit) {
  v1::Series numbers;
  for (uint64_t bits = 1; bits < 0x7f800000; bits = bits * 5 / 4 + 1) {
    numbers.add_mean(std::bit_cast<float>(static_cast<uint32_t>(bits)));
    numbers.add_mean(-numbers.mean(numbers.mean_size() - 1));
  }
  numbers.add_mean(-0.0f);
  numbers.add_mean(std::numeric_limits<float>::max());
  v1::Series back;
  ASSERT_TRUE(google::protobuf::util::JsonStringToMessage(ToJsonText(numbers), &back).ok());
  EXPECT_EQ(back.SerializeAsString(), numbers.SerializeAsString());
}

TEST(JsonTextTest, TextThatIsNoUtf8IsShownAsSuch) {
  v1::GetRunRequest request;
  request.set_run("a\xff");
  EXPECT_EQ(ToJsonText(request), "{\"run\":\"a\xef\xbf\xbd\"}");
}

class CallJsonTest : public ::testing::Test {
 protected:
  CallJsonTest() : engine_(QueryEngine::Options(), stack_.stores()) {
    stack_.AddRun({.name = "r", .nan = {.layer = 0, .head = 0}});
  }
  QueryStack stack_;
  QueryEngine engine_;
};

TEST_F(CallJsonTest, KnowsEveryUnaryMethodAndNoOther) {
  std::set<std::string> unary;
  const auto* const service =
      google::protobuf::DescriptorPool::generated_pool()->FindServiceByName("bellwether.v1.Query");
  ASSERT_NE(service, nullptr);
  for (int i = 0; i < service->method_count(); ++i) {
    const auto* const method = service->method(i);
    if (!method->client_streaming() && !method->server_streaming()) unary.insert(method->name());
  }
  std::set<std::string> known;
  for (const std::string_view name : JsonMethods()) known.emplace(name);
  EXPECT_EQ(known, unary);
  EXPECT_EQ(CallJson(engine_, "WatchAlerts", "").status().code(), absl::StatusCode::kUnimplemented);
}

TEST_F(CallJsonTest, UsesTheProtosNamesAndShowsEveryField) {
  const auto text = CallJson(engine_, "GetRun", R"({"run": "r"})");
  ASSERT_TRUE(text.ok()) << text.status();
  const auto json = nlohmann::json::parse(*text);
  EXPECT_EQ(json["description"]["name"], "r");
  EXPECT_EQ(json["step"], "399");
  EXPECT_EQ(json["alerts_firing"], 0);
  EXPECT_EQ(json["ended"], false);
}

TEST_F(CallJsonTest, NanIsAString) {
  const auto text = CallJson(engine_, "TopHeads", R"({"run": "r", "step": -1, "limit": 1})");
  ASSERT_TRUE(text.ok()) << text.status();
  EXPECT_EQ(nlohmann::json::parse(*text)["heads"][0]["value"], "NaN");
}

TEST_F(CallJsonTest, AnEmptyBodyIsAnEmptyRequest) {
  const auto text = CallJson(engine_, "ListRuns", "");
  ASSERT_TRUE(text.ok());
  EXPECT_EQ(nlohmann::json::parse(*text)["total"], 1);
}

TEST_F(CallJsonTest, RefusesWhatIsNotTheRequest) {
  for (const char* const body : {"{", "[]", R"({"rum": "r"})", R"({"run": 5})", "\xff"}) {
    const absl::Status status = CallJson(engine_, "GetRun", body).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << body;
    EXPECT_THAT(std::string(status.message()), HasSubstr("GetRunRequest"));
  }
  EXPECT_EQ(CallJson(engine_, "GetRun", R"({"run": "x"})").status().code(), absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace bellwether::server
