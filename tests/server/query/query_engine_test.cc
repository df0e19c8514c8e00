// Goal: every answer is what the store holds, every limit refuses max + 1 by
// name and counts it, and errors say field, value and legal range.
// Method: synthetic runs whose values are a formula, on the real store; the
// formula is evaluated again here.
#include "server/query/query_engine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/support/access_files.h"
#include "tests/support/query_stack.h"

namespace bellwether::server {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class QueryEngineTest : public ::testing::Test {
 protected:
  QueryEngineTest() : engine_(QueryEngine::Options(), stack_.stores()) {}
  CallContext context() const { return engine_.NewContext(); }

  static void ExpectRefused(const absl::Status& status, const std::string& field, const std::string& range) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr(field), HasSubstr(range)));
  }

  QueryStack stack_;
  QueryEngine engine_;
};

TEST_F(QueryEngineTest, ListsTheLiveThenTheWorstThenTheNewest) {
  stack_.AddRun({.name = "old", .steps = 5, .stage = 0, .last_report_unix_ns = 10});
  stack_.AddRun({.name = "new", .steps = 5, .stage = 0, .last_report_unix_ns = 20});
  stack_.AddRun({.name = "ill", .steps = 5, .stage = 3, .last_report_unix_ns = 5});
  stack_.AddRun({.name = "dead", .steps = 5, .stage = 4, .ended = true, .last_report_unix_ns = 1});
  v1::ListRunsRequest request;
  auto response = engine_.ListRuns(request, context());
  ASSERT_TRUE(response.ok()) << response.status();
  ASSERT_EQ(response->runs_size(), 4);
  EXPECT_EQ(response->runs(0).description().name(), "ill");
  EXPECT_EQ(response->runs(1).description().name(), "new");
  EXPECT_EQ(response->runs(2).description().name(), "old");
  EXPECT_EQ(response->runs(3).description().name(), "dead");
  request.set_live_only(true);
  request.set_limit(2);
  response = engine_.ListRuns(request, context());
  EXPECT_EQ(response->runs_size(), 2);
  EXPECT_EQ(response->total(), 3u);
  request.set_name_contains("ew");
  EXPECT_EQ(engine_.ListRuns(request, context())->total(), 1u);
}

TEST_F(QueryEngineTest, LimitsTakeTheirMaximumAndNoMore) {
  stack_.AddRun({.name = "r", .steps = 3});
  v1::ListRunsRequest runs;
  runs.set_limit(1000);
  EXPECT_TRUE(engine_.ListRuns(runs, context()).ok());
  runs.set_limit(1001);
  ExpectRefused(engine_.ListRuns(runs, context()).status(), "limit 1001", "0..1000");

  v1::ListAlertsRequest alerts;
  alerts.set_limit(1000);
  EXPECT_TRUE(engine_.ListAlerts(alerts, context()).ok());
  alerts.set_limit(1001);
  ExpectRefused(engine_.ListAlerts(alerts, context()).status(), "limit 1001", "0..1000");

  v1::TopHeadsRequest top;
  top.set_run("r");
  top.set_limit(1024);
  EXPECT_TRUE(engine_.TopHeads(top, context()).ok());
  top.set_limit(1025);
  ExpectRefused(engine_.TopHeads(top, context()).status(), "limit 1025", "0..1024");

  v1::CompareRunsRequest compare;
  compare.set_run("r");
  compare.set_baseline("r");
  compare.set_signal("drift_ratio");
  compare.set_limit(1024);
  EXPECT_TRUE(engine_.CompareRuns(compare, context()).ok());
  compare.set_limit(1025);
  ExpectRefused(engine_.CompareRuns(compare, context()).status(), "limit 1025", "0..1024");
  EXPECT_EQ(stack_.refused("limit"), 4);

  v1::GetSeriesRequest series;
  series.set_run("r");
  for (int i = 0; i < 64; ++i) series.add_series()->set_signal("loss");
  series.set_points_max(10'000);
  EXPECT_TRUE(engine_.GetSeries(series, context()).ok());
  series.set_points_max(10'001);
  ExpectRefused(engine_.GetSeries(series, context()).status(), "points_max 10001", "0..10000");
  EXPECT_EQ(stack_.refused("points_max"), 1);
  series.set_points_max(1);
  series.add_series()->set_signal("loss");
  ExpectRefused(engine_.GetSeries(series, context()).status(), "series 65", "1..64");
  EXPECT_EQ(stack_.refused("series"), 1);
}

TEST_F(QueryEngineTest, NamesWhatIsMissingOrWrong) {
  stack_.AddRun({.name = "r", .steps = 3});
  v1::GetRunRequest run;
  EXPECT_EQ(engine_.GetRun(run, context()).status().code(), absl::StatusCode::kInvalidArgument);
  run.set_run("nobody");
  const absl::Status missing = engine_.GetRun(run, context()).status();
  EXPECT_EQ(missing.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(missing.message()), HasSubstr("nobody"));

  v1::GetSeriesRequest series;
  series.set_run("r");
  v1::SeriesId* const id = series.add_series();
  id->set_signal("no_such");
  ExpectRefused(engine_.GetSeries(series, context()).status(), "no_such", "catalogue");
  id->set_signal("drift_ratio");
  id->set_layer(3);
  ExpectRefused(engine_.GetSeries(series, context()).status(), "series.layer 3", "0..2");
  id->set_layer(2);
  id->set_head(4);
  ExpectRefused(engine_.GetSeries(series, context()).status(), "series.head 4", "0..3");
  id->set_head(3);
  series.set_step_begin(-1);
  ExpectRefused(engine_.GetSeries(series, context()).status(), "step_begin -1", "0..");
  series.set_step_begin(10);
  series.set_step_end(10);
  ExpectRefused(engine_.GetSeries(series, context()).status(), "step_end 10", "11..");
  series.set_step_end(11);
  series.set_attempt(-2);
  ExpectRefused(engine_.GetSeries(series, context()).status(), "attempt -2", "-1..");
  series.set_attempt(-1);
  EXPECT_TRUE(engine_.GetSeries(series, context()).ok());
}

TEST_F(QueryEngineTest, FindsARunByUuid) {
  const RunId id = stack_.AddRun({.name = "r", .steps = 3});
  v1::GetRunRequest request;
  request.set_run(FormatUuid(stack_.runs().Get(id)->record.description.uuid));
  const auto run = engine_.GetRun(request, context());
  ASSERT_TRUE(run.ok());
  EXPECT_EQ(run->description().name(), "r");
  EXPECT_EQ(run->step(), 2);
  EXPECT_FLOAT_EQ(static_cast<float>(run->loss()), 4.0f / 3);
  EXPECT_THAT(run->signals(), ::testing::Contains("common_mode_sum"));
}

TEST_F(QueryEngineTest, SeriesAreTheMeasuredValues) {
  const QueryStack::RunSpec spec{.name = "r"};
  stack_.AddRun(spec);
  v1::GetSeriesRequest request;
  request.set_run("r");
  request.set_attempt(-1);
  v1::SeriesId* const id = request.add_series();
  id->set_signal("drift_ratio");
  id->set_layer(1);
  id->set_head(2);
  request.add_series()->set_signal("loss");
  auto response = engine_.GetSeries(request, context());
  ASSERT_TRUE(response.ok()) << response.status();
  const v1::Series& drift = response->series(0);
  ASSERT_EQ(drift.step_size(), 400);
  EXPECT_FALSE(drift.downsampled());
  for (int i = 0; i < 400; ++i) {
    EXPECT_EQ(drift.step(i), i);
    EXPECT_FLOAT_EQ(drift.mean(i), static_cast<float>(QueryStack::DriftRatio(spec, i, spec.failing))) << i;
  }
  EXPECT_EQ(response->series(1).step_size(), 400);

  request.set_step_begin(100);
  request.set_step_end(300);
  request.set_points_max(20);
  response = engine_.GetSeries(request, context());
  ASSERT_TRUE(response.ok());
  EXPECT_LE(response->series(0).step_size(), 20);
  EXPECT_GE(response->series(0).step_size(), 1);
  EXPECT_TRUE(response->series(0).downsampled());
}

TEST_F(QueryEngineTest, MatrixIsTheLastSampleAtOrBeforeTheStep) {
  const QueryStack::RunSpec spec{.name = "r", .every = 10};
  stack_.AddRun(spec);
  v1::GetMatrixRequest request;
  request.set_run("r");
  request.set_signal("drift_ratio");
  request.set_step(257);
  auto matrix = engine_.GetMatrix(request, context());
  ASSERT_TRUE(matrix.ok()) << matrix.status();
  EXPECT_EQ(matrix->step(), 250);
  ASSERT_EQ(matrix->values_size(), 12);
  for (int i = 0; i < 12; ++i) {
    EXPECT_FLOAT_EQ(matrix->values(i), static_cast<float>(QueryStack::DriftRatio(spec, 250, {i / 4, i % 4})));
  }
  request.set_step(-1);
  EXPECT_EQ(engine_.GetMatrix(request, context())->step(), 390);
  request.set_signal("wq_sigma");
  EXPECT_EQ(engine_.GetMatrix(request, context())->step(), -1);
  request.set_step(-2);
  ExpectRefused(engine_.GetMatrix(request, context()).status(), "step -2", "-1..");
}

TEST_F(QueryEngineTest, TopHeadsAreTheLargestWithTheirPeers) {
  const QueryStack::RunSpec spec{.name = "r"};
  stack_.AddRun(spec);
  v1::TopHeadsRequest request;
  request.set_run("r");
  request.set_step(-1);
  request.set_limit(2);
  auto top = engine_.TopHeads(request, context());
  ASSERT_TRUE(top.ok()) << top.status();
  EXPECT_EQ(top->signal(), "drift_ratio");
  EXPECT_EQ(top->step(), 399);
  ASSERT_EQ(top->heads_size(), 2);
  EXPECT_EQ(top->heads(0).layer(), 1u);
  EXPECT_EQ(top->heads(0).head(), 2u);
  EXPECT_EQ(top->heads(0).stage(), 1u);
  EXPECT_FLOAT_EQ(static_cast<float>(top->heads(0).value()),
                  static_cast<float>(QueryStack::DriftRatio(spec, 399, spec.failing)));
  EXPECT_EQ(top->heads(0).median(), 1);
  EXPECT_GE(top->heads(0).peer_score(), 5);
  EXPECT_EQ(top->heads(1).peer_score(), 0);
}

TEST_F(QueryEngineTest, AHeadThatIsNaNComesFirst) {
  stack_.AddRun({.name = "r", .nan = {.layer = 2, .head = 1}});
  v1::TopHeadsRequest request;
  request.set_run("r");
  request.set_step(-1);
  const auto top = engine_.TopHeads(request, context());
  ASSERT_TRUE(top.ok());
  EXPECT_EQ(top->heads(0).layer(), 2u);
  EXPECT_EQ(top->heads(0).head(), 1u);
  EXPECT_TRUE(std::isnan(top->heads(0).value()));
  EXPECT_EQ(top->heads(1).layer(), 1u);
}

TEST_F(QueryEngineTest, TheEndThatIsBadComesFirst) {
  QueryStack::RunSpec spec{.name = "r", .ends = true};
  spec.layout.experts = 5;
  stack_.AddRun(spec);
  v1::TopHeadsRequest request;
  request.set_run("r");
  request.set_step(-1);
  request.set_signal("expert_share");
  auto top = engine_.TopHeads(request, context());
  ASSERT_TRUE(top.ok()) << top.status();
  ASSERT_EQ(top->heads_size(), 5);
  EXPECT_EQ(top->heads(0).value(), 0) << "the dead expert";
  EXPECT_EQ(top->heads(0).head(), 0u);
  EXPECT_EQ(top->heads(4).value(), 2);
  request.set_signal("delta_bias_t");
  request.set_limit(1);
  top = engine_.TopHeads(request, context());
  ASSERT_TRUE(top.ok()) << top.status();
  EXPECT_EQ(top->heads(0).value(), -9) << "far below zero is as bad as far above";
}

TEST_F(QueryEngineTest, CompareFindsTheHeadAndTheStep) {
  const QueryStack::RunSpec ill{.name = "bf16", .steps = 400, .fails_at = 200};
  stack_.AddRun(ill);
  stack_.AddRun({.name = "fp32", .steps = 400, .failing = {}});
  v1::CompareRunsRequest request;
  request.set_run("bf16");
  request.set_baseline("fp32");
  request.set_signal("drift_ratio");
  const QueryEngine engine({.compare_log2_min = 0.49}, stack_.stores());
  const auto response = engine.CompareRuns(request, context());
  ASSERT_TRUE(response.ok()) << response.status();
  ASSERT_EQ(response->heads_size(), 1);  // The others are equal.
  EXPECT_EQ(response->heads(0).layer(), 1u);
  EXPECT_EQ(response->heads(0).head(), 2u);
  // log2 = (step - 200) / 50 >= 0.49 from step 224.5 on.
  EXPECT_EQ(response->heads(0).first_step(), 225);
  EXPECT_NEAR(response->heads(0).ratio(), 199.0 / 50, 1e-4);
  EXPECT_EQ(response->heads(0).band(), 0.49);
  EXPECT_EQ(response->heads_differing(), 1u);
  EXPECT_EQ(response->step_end(), 399);

  stack_.AddRun({.name = "wide", .layout = {.layers = 3, .heads = 8, .kv_heads = 2}, .steps = 5});
  request.set_baseline("wide");
  ExpectRefused(engine_.CompareRuns(request, context()).status(), "wide", "3 x 8");
}

TEST_F(QueryEngineTest, BaselinesOfOwnSignalsComeByName) {
  for (const char* const name : {"old", "new"}) {
    QueryStack::RunSpec spec{.name = name, .own_every = 5};
    stack_.AddRun(spec);
  }
  const RunRecord& old = stack_.runs().Find("old")->record;
  BaselinePercentiles bands{.run = old.id, .name = "old", .kind = KindOf(old.description), .own = {"z", "kl"}};
  for (const auto& [matrix, own] : {std::pair(SignalId::kOwnMax, 1), {SignalId::kOwnMean, 2}}) {
    Band band{.signal = matrix, .own = static_cast<uint16_t>(own), .range = 3, .values = 4};
    band.quantiles.fill(static_cast<float>(own));
    bands.bands.push_back(band);
  }
  ASSERT_TRUE(stack_.baselines().Put(bands).ok());
  v1::GetBaselineRequest request;
  request.set_run("new");
  request.set_signal("kl");
  auto baseline = engine_.GetBaseline(request, context());
  ASSERT_TRUE(baseline.ok()) << baseline.status();
  ASSERT_EQ(baseline->bands_size(), 1);
  EXPECT_EQ(baseline->bands(0).signal(), "kl");
  EXPECT_EQ(baseline->bands(0).band().max(), 2);
  EXPECT_EQ(baseline->bands(0).run().max(), (BandBegin(4) - 1) / 5 * 5) << "the newest of that stage";
  request.clear_signal();
  baseline = engine_.GetBaseline(request, context());
  ASSERT_EQ(baseline->bands_size(), 2);
  EXPECT_EQ(baseline->bands(1).signal(), "z");
  EXPECT_EQ(baseline->bands(1).run().max(), 11);
  request.set_signal("own_mean");
  EXPECT_EQ(engine_.GetBaseline(request, context())->bands_size(), 0);
  request.set_signal("reward");
  ExpectRefused(engine_.GetBaseline(request, context()).status(), "reward", "a signal of the run's own");
}

TEST_F(QueryEngineTest, BaselinesAreListedByKindAndTheirBandsMerged) {
  const RunId one = stack_.AddRun({.name = "one", .steps = 5});
  const RunId two = stack_.AddRun({.name = "two", .steps = 5});
  const RunId wide = stack_.AddRun({.name = "wide", .layout = {.layers = 1, .heads = 2, .kv_heads = 2}, .steps = 5});
  EXPECT_EQ(engine_.ListBaselines({}, context())->baselines_size(), 0);
  for (const RunId run : {one, two, wide}) {
    const RunDescription& description = stack_.runs().Get(run)->record.description;
    BaselinePercentiles bands{
        .run = run, .name = description.name, .uuid = description.uuid, .kind = KindOf(description), .step = 4000};
    for (const SignalId signal : {SignalId::kLogitMax, SignalId::kDriftRatio}) {
      Band band{.signal = signal, .range = 3, .values = 9};
      band.quantiles.fill(static_cast<float>(run));
      bands.bands.push_back(band);
    }
    ASSERT_TRUE(stack_.baselines().Put(bands).ok());
  }
  const auto list = engine_.ListBaselines({}, context());
  ASSERT_EQ(list->baselines_size(), 2);
  EXPECT_EQ(list->baselines(0).runs_size(), 2);
  EXPECT_EQ(list->baselines(0).runs(0).run(), "two");
  EXPECT_EQ(list->baselines(0).runs(0).run_uuid().size(), 16u);
  EXPECT_EQ(list->baselines(0).runs(0).step(), 4000);
  EXPECT_THAT(list->baselines(1).kind(), AllOf(HasSubstr("1 layers x 2 heads"), HasSubstr("flash, bf16")));

  const QueryStack::RunSpec spec{.name = "new", .steps = 300};
  stack_.AddRun(spec);
  v1::GetBaselineRequest request;
  request.set_run("new");
  auto baseline = engine_.GetBaseline(request, context());
  ASSERT_TRUE(baseline.ok()) << baseline.status();
  EXPECT_EQ(baseline->baseline().runs_size(), 2);
  ASSERT_EQ(baseline->bands_size(), 2);
  EXPECT_EQ(baseline->bands(0).signal(), "logit_max");
  EXPECT_EQ(baseline->bands(0).band().runs(), 2u);
  EXPECT_EQ(baseline->bands(0).band().step_begin(), 256);
  EXPECT_EQ(baseline->bands(0).band().min(), 1);
  EXPECT_EQ(baseline->bands(0).band().max(), 2);
  EXPECT_FALSE(baseline->bands(0).has_run()) << "it does not report that";
  request.set_signal("drift_ratio");
  baseline = engine_.GetBaseline(request, context());
  ASSERT_EQ(baseline->bands_size(), 1);
  EXPECT_EQ(baseline->bands(0).run().p50(), 1);
  EXPECT_FLOAT_EQ(static_cast<float>(baseline->bands(0).run().max()),
                  static_cast<float>(QueryStack::DriftRatio(spec, 299, spec.failing)));
  request.set_run("two");
  baseline = engine_.GetBaseline(request, context());
  ASSERT_EQ(baseline->baseline().runs_size(), 1) << "a run is not its own sibling";
  EXPECT_EQ(baseline->bands(0).band().max(), 1);
  EXPECT_FALSE(baseline->bands(0).has_run()) << "it did not get there";
  request.set_signal("no_such");
  ExpectRefused(engine_.GetBaseline(request, context()).status(), "no_such", "catalogue");
  request.set_run("nobody");
  EXPECT_EQ(engine_.GetBaseline(request, context()).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(QueryEngineTest, SiblingsWithoutReadAccessAreHidden) {
  AccessFiles files;
  files.Write("identities:\n- {name: a, roles: [read, act], runs: [\"a-*\"]}\n");
  files.AddToken("bw_a", "a");
  const std::unique_ptr<Access> access = files.Open(&stack_.counters());
  CallContext mine = context();
  mine.grant = *access->Identify({.token = "bw_a", .peer = "ipv4:10.0.0.1:1"}, "test");
  const RunId own = stack_.AddRun({.name = "a-new", .steps = 5});
  stack_.Post(stack_.MakeTransition(own, "drift/1/2/220", 0, AlertState::kFiring, Severity::kWarning));
  v1::GetBaselineRequest baseline;
  baseline.set_run("a-new");
  v1::GetAlertRequest alert;
  alert.set_run("a-new");
  alert.set_key("drift/1/2/220");
  float value = 1;
  for (const char* name : {"a-old", "b-old"}) {
    stack_.AddRun({.name = name, .steps = 5});
    const RunDescription description = stack_.runs().Find(name)->record.description;
    BaselinePercentiles bands{.run = stack_.runs().Find(name)->record.id,
                              .name = name,
                              .uuid = description.uuid,
                              .kind = KindOf(description),
                              .step = 4000};
    Band band{.signal = SignalId::kLogitMax, .range = 3, .values = 9};
    band.quantiles.fill(value++);
    bands.bands.push_back(band);
    ASSERT_TRUE(stack_.baselines().Put(bands).ok());
    const bool all_his = std::string_view(name) == "a-old";
    const auto told = engine_.GetBaseline(baseline, mine);
    ASSERT_EQ(told->bands_size(), 1);
    EXPECT_EQ(told->bands(0).band().runs(), 1u);
    EXPECT_EQ(told->bands(0).band().max(), 1) << name;
    EXPECT_EQ(engine_.GetAlert(alert, mine)->alert().last().siblings().empty(), !all_his);
    EXPECT_EQ(engine_.GetAlert(alert, mine)->alert().last().evidence(0).has_siblings(), all_his);
    EXPECT_EQ(engine_.GetAlert(alert, mine)->alert().history(0).siblings().empty(), !all_his);
    EXPECT_EQ(engine_.ListAlerts({}, mine)->alerts(0).last().evidence(0).has_siblings(), all_his);
  }
  EXPECT_EQ(engine_.GetBaseline(baseline, context())->bands(0).band().max(), 2);
  EXPECT_TRUE(engine_.GetAlert(alert, context())->alert().last().evidence(0).has_siblings());
}

TEST_F(QueryEngineTest, ConcurrentAcknowledgeAndSilenceBothHold) {
  const RunId run = stack_.AddRun({.name = "r", .steps = 5});
  for (int i = 0; i < 200; ++i) {
    const std::string key = absl::StrCat("drift/0/0/", i);
    stack_.Post(stack_.MakeTransition(run, key, 0, AlertState::kFiring, Severity::kWarning));
    v1::AcknowledgeAlertRequest acknowledge;
    v1::SilenceAlertRequest silence;
    for (auto* const request : {acknowledge.mutable_run(), silence.mutable_run()}) *request = "r";
    acknowledge.set_key(key);
    acknowledge.set_by("ann");
    silence.set_key(key);
    silence.set_by("bob");
    silence.set_seconds(60);
    std::thread other([&] { EXPECT_TRUE(engine_.SilenceAlert(silence, context()).ok()); });
    EXPECT_TRUE(engine_.AcknowledgeAlert(acknowledge, context()).ok());
    other.join();
    const AlertView alert = *stack_.alerts().Get(run, key);
    ASSERT_TRUE(alert.note.acknowledged) << i;
    ASSERT_GT(alert.note.silenced_until_unix_ns, 0) << i;
    EXPECT_EQ(alert.note.by, "ann");
  }
}

TEST_F(QueryEngineTest, AlertsAreFilteredAndComeWithTheirEvidence) {
  const RunId run = stack_.AddRun({.name = "r"});
  const RunId other = stack_.AddRun({.name = "other", .steps = 5});
  stack_.Post(stack_.MakeTransition(run, "drift/1/2/220", 0, AlertState::kFiring, Severity::kWarning));
  stack_.Post(stack_.MakeTransition(run, "drift/1/2/220", 1, AlertState::kFiring, Severity::kCritical));
  stack_.Post(stack_.MakeTransition(other, "ties/0/0/1", 0, AlertState::kResolved, Severity::kInfo));

  v1::ListAlertsRequest list;
  EXPECT_EQ(engine_.ListAlerts(list, context())->alerts_size(), 2);
  list.set_firing_only(true);
  EXPECT_EQ(engine_.ListAlerts(list, context())->alerts_size(), 1);
  list.set_firing_only(false);
  list.set_severity_min(v1::SEVERITY_WARNING);
  EXPECT_EQ(engine_.ListAlerts(list, context())->alerts_size(), 1);
  list.set_severity_min(v1::SEVERITY_UNSPECIFIED);
  list.set_run("other");
  ASSERT_EQ(engine_.ListAlerts(list, context())->alerts_size(), 1);
  EXPECT_EQ(engine_.ListAlerts(list, context())->alerts(0).last().run(), "other");

  v1::GetAlertRequest get;
  get.set_run("r");
  get.set_key("drift/1/2/220");
  const auto alert = engine_.GetAlert(get, context());
  ASSERT_TRUE(alert.ok()) << alert.status();
  EXPECT_EQ(alert->alert().last().severity(), v1::SEVERITY_CRITICAL);
  ASSERT_EQ(alert->alert().history_size(), 2);
  EXPECT_EQ(alert->alert().history(0).k(), 0u);
  EXPECT_EQ(alert->alert().last().run_uuid().size(), 16u);
  ASSERT_EQ(alert->window_size(), 2);
  EXPECT_EQ(alert->window(0).id().signal(), "drift_ratio");
  EXPECT_EQ(alert->window(0).id().head(), 2u);
  EXPECT_LE(alert->window(0).step(0), 220);
  EXPECT_GE(alert->window(0).step(alert->window(0).step_size() - 1), 220);
  EXPECT_EQ(alert->window(1).id().signal(), "loss");
  EXPECT_EQ(alert->alert().last().siblings(), "of 12 siblings");
  EXPECT_EQ(alert->alert().last().evidence(0).siblings().runs(), 12u);
  EXPECT_EQ(alert->alert().last().evidence(0).siblings().p99(), 1.9);
  EXPECT_FALSE(alert->alert().last().evidence(1).has_siblings());
  get.set_key("no/such");
  EXPECT_EQ(engine_.GetAlert(get, context()).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(QueryEngineTest, AnAlertsHistoryAndWindowAreBounded) {
  const RunId run = stack_.AddRun({.name = "r", .steps = 5});
  const QueryEngine engine({.history_max = 3, .alert_series_max = 2}, stack_.stores());
  v1::GetAlertRequest get;
  get.set_run("r");
  get.set_key("k");
  for (uint32_t k = 0; k < 4; ++k) {
    AlertTransition transition = stack_.MakeTransition(run, "k", k, AlertState::kFiring, Severity::kWarning);
    transition.evidence.resize(1);
    for (int32_t head = 0; head < static_cast<int32_t>(k); ++head) {
      transition.evidence.push_back({.signal = "rows", .where = {.layer = 0, .head = head}});
    }
    stack_.Post(transition);
    const auto alert = engine.GetAlert(get, context());
    ASSERT_TRUE(alert.ok()) << alert.status();
    // The newest stay.
    ASSERT_EQ(alert->alert().history_size(), std::min(static_cast<int>(k) + 1, 3));
    EXPECT_EQ(alert->alert().history(alert->alert().history_size() - 1).k(), k);
    EXPECT_EQ(alert->window_size(), std::min(static_cast<int>(k) + 1, 2));
  }
}

TEST_F(QueryEngineTest, AcknowledgementsAndSilencesAreKeptAndBounded) {
  const RunId run = stack_.AddRun({.name = "r", .steps = 5});
  stack_.Post(stack_.MakeTransition(run, "k", 0, AlertState::kFiring, Severity::kWarning));
  v1::SilenceAlertRequest silence;
  silence.set_run("r");
  silence.set_key("k");
  silence.set_seconds(3600);
  silence.set_by("ann");
  const auto silenced = engine_.SilenceAlert(silence, context());
  ASSERT_TRUE(silenced.ok()) << silenced.status();
  EXPECT_NEAR(static_cast<double>(silenced->silenced_until_unix_ns() - Clock::System()->UnixNanos()), 3600e9, 60e9);
  v1::AcknowledgeAlertRequest acknowledge;
  acknowledge.set_run("r");
  acknowledge.set_key("k");
  acknowledge.set_by("bob");
  acknowledge.set_comment("on it");
  const auto both = engine_.AcknowledgeAlert(acknowledge, context());
  ASSERT_TRUE(both.ok());
  EXPECT_TRUE(both->acknowledged());
  EXPECT_EQ(both->acknowledged_by(), "bob");
  EXPECT_EQ(both->silenced_until_unix_ns(), silenced->silenced_until_unix_ns());

  silence.set_seconds(2'592'000);
  EXPECT_TRUE(engine_.SilenceAlert(silence, context()).ok());
  silence.set_seconds(2'592'001);
  ExpectRefused(engine_.SilenceAlert(silence, context()).status(), "seconds 2592001", "1..2592000");
  silence.set_seconds(0);
  ExpectRefused(engine_.SilenceAlert(silence, context()).status(), "seconds 0", "1..2592000");
  acknowledge.set_by(std::string(128, 'x'));
  acknowledge.set_comment(std::string(256, 'x'));
  EXPECT_TRUE(engine_.AcknowledgeAlert(acknowledge, context()).ok());
  acknowledge.set_by(std::string(129, 'x'));
  ExpectRefused(engine_.AcknowledgeAlert(acknowledge, context()).status(), "by: 129 bytes", "at most 128");
  acknowledge.set_by("x");
  acknowledge.set_comment(std::string(257, 'x'));
  ExpectRefused(engine_.AcknowledgeAlert(acknowledge, context()).status(), "comment: 257 bytes", "at most 256");
  acknowledge.set_comment("a\nb");
  ExpectRefused(engine_.AcknowledgeAlert(acknowledge, context()).status(), "comment", "control");
  EXPECT_EQ(stack_.refused("by"), 1);
  EXPECT_EQ(stack_.refused("comment"), 1);
}

v1::MarkFalseAlarmRequest Mark(const std::string& key, const std::string& by, const std::string& reason,
                               bool undo = false) {
  v1::MarkFalseAlarmRequest request;
  request.set_run("r");
  request.set_key(key);
  request.set_by(by);
  request.set_reason(reason);
  request.set_undo(undo);
  return request;
}

TEST_F(QueryEngineTest, FalseAlarmMutesTheIllnessInItsRun) {
  const RunId run = stack_.AddRun({.name = "r", .steps = 5, .stage = 1});
  const auto post = [&](const std::string& key, uint32_t k, Severity severity, const std::string& cause,
                        int32_t layer = 1) {
    AlertTransition transition = stack_.MakeTransition(run, key, k, AlertState::kFiring, severity);
    transition.cause = cause;
    transition.strongest.layer = layer;
    transition.heads = {transition.strongest};
    stack_.Post(transition);
  };
  const auto alert = [this](const std::string& key) {
    v1::GetAlertRequest get;
    get.set_run("r");
    get.set_key(key);
    return engine_.GetAlert(get, context())->alert();
  };
  post("a1", 0, Severity::kWarning, "rounding drift");
  const auto marked = engine_.MarkFalseAlarm(Mark("a1", "ann", "known"), context());
  ASSERT_TRUE(marked.ok()) << marked.status();
  EXPECT_TRUE(marked->muted());
  EXPECT_EQ(marked->false_alarm().by(), "ann");
  EXPECT_EQ(marked->false_alarm().reason(), "known");
  EXPECT_EQ(marked->false_alarm().cause(), "rounding drift");
  EXPECT_EQ(marked->false_alarm().severity(), v1::SEVERITY_WARNING);
  EXPECT_GT(marked->false_alarm().time_unix_ns(), 0);

  // It comes back under another key; others do not.
  stack_.Post(stack_.MakeTransition(run, "a1", 1, AlertState::kResolved, Severity::kWarning));
  post("a2", 0, Severity::kWarning, "rounding drift");
  EXPECT_TRUE(alert("a2").muted());
  EXPECT_EQ(alert("a2").false_alarm().key(), "a1");
  EXPECT_EQ(alert("a2").last().state(), v1::ALERT_STATE_FIRING) << "it is there still";
  v1::GetRunRequest get_run;
  get_run.set_run("r");
  EXPECT_EQ(engine_.GetRun(get_run, context())->alerts_firing(), 0u);
  EXPECT_EQ(engine_.GetRun(get_run, context())->stage(), 0u);
  EXPECT_FALSE(engine_.GetRun(get_run, context())->eta().known());
  EXPECT_EQ(engine_.ListRuns({}, context())->runs(0).stage(), 0u);
  post("b1", 0, Severity::kWarning, "logit growth");
  post("a3", 0, Severity::kWarning, "rounding drift", 2);
  EXPECT_FALSE(alert("b1").muted());
  EXPECT_FALSE(alert("a3").muted());
  EXPECT_EQ(engine_.GetRun(get_run, context())->alerts_firing(), 2u);
  EXPECT_EQ(engine_.GetRun(get_run, context())->stage(), 1u);

  // What is worse than was judged is news.
  post("a2", 1, Severity::kCritical, "rounding drift");
  EXPECT_FALSE(alert("a2").muted());
  EXPECT_EQ(alert("a2").false_alarm().reason(), "known");
  EXPECT_EQ(engine_.GetRun(get_run, context())->alerts_firing(), 3u);
  EXPECT_TRUE(engine_.MarkFalseAlarm(Mark("a2", "bob", "still known"), context())->muted());

  // Undone by one key it is undone for all, and that stays to be seen.
  const auto undone = engine_.MarkFalseAlarm(Mark("a1", "eve", "it was real", /*undo=*/true), context());
  ASSERT_TRUE(undone.ok()) << undone.status();
  EXPECT_FALSE(undone->has_false_alarm());
  EXPECT_FALSE(alert("a2").muted());
  const v1::Alert history = alert("a2");
  ASSERT_EQ(history.false_alarm_history_size(), 3);
  EXPECT_EQ(history.false_alarm_history(1).by(), "bob");
  EXPECT_FALSE(history.false_alarm_history(1).undone());
  EXPECT_TRUE(history.false_alarm_history(2).undone());
  EXPECT_EQ(history.false_alarm_history(2).by(), "eve");
  EXPECT_EQ(alert("b1").false_alarm_history_size(), 0);
}

TEST_F(QueryEngineTest, FalseAlarmsAreBoundedAndNeedAReason) {
  const RunId run = stack_.AddRun({.name = "r", .steps = 5});
  stack_.Post(stack_.MakeTransition(run, "k", 0, AlertState::kFiring, Severity::kWarning));
  ExpectRefused(engine_.MarkFalseAlarm(Mark("k", "ann", ""), context()).status(), "reason \"\"", "why");
  ExpectRefused(engine_.MarkFalseAlarm(Mark("k", "ann", std::string(257, 'x')), context()).status(), "reason: 257",
                "at most 256");
  ExpectRefused(engine_.MarkFalseAlarm(Mark("k", std::string(129, 'x'), "y"), context()).status(), "by: 129",
                "at most 128");
  EXPECT_EQ(engine_.MarkFalseAlarm(Mark("no", "ann", "y"), context()).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(engine_.MarkFalseAlarm(Mark("k", "ann", "", true), context()).status().code(),
            absl::StatusCode::kFailedPrecondition);
  const QueryEngine engine({.false_alarms_max = 2}, stack_.stores());
  EXPECT_TRUE(engine.MarkFalseAlarm(Mark("k", "ann", "y"), context()).ok());
  EXPECT_TRUE(engine.MarkFalseAlarm(Mark("k", "ann", "", true), context()).ok());
  EXPECT_EQ(engine.MarkFalseAlarm(Mark("k", "ann", "y"), context()).status().code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(stack_.refused("false_alarms"), 1);
}

TEST_F(QueryEngineTest, AnAnnotationBecomesAnEvent) {
  stack_.AddRun({.name = "r", .steps = 5});
  v1::AnnotateRequest request;
  request.set_run("r");
  request.mutable_event()->set_step(3);
  request.mutable_event()->set_text("new data");
  ASSERT_TRUE(engine_.Annotate(request, context()).ok());
  v1::ListEventsRequest list;
  list.set_run("r");
  const auto events = engine_.ListEvents(list, context());
  ASSERT_TRUE(events.ok());
  ASSERT_EQ(events->events_size(), 1);
  EXPECT_EQ(events->events(0).kind(), v1::EVENT_KIND_ANNOTATION);
  EXPECT_EQ(events->events(0).step(), 3);
  EXPECT_EQ(events->events(0).text(), "new data");
  EXPECT_GE(events->events(0).time_unix_ns(), 1);

  request.mutable_event()->set_text(std::string(257, 'x'));
  ExpectRefused(engine_.Annotate(request, context()).status(), "event.text: 257", "at most 256");
  request.mutable_event()->set_text("");
  ExpectRefused(engine_.Annotate(request, context()).status(), "event.text", "words");
  request.mutable_event()->set_text("x");
  request.mutable_event()->set_attempt(1);
  ExpectRefused(engine_.Annotate(request, context()).status(), "event.attempt 1", "0..0");
  request.mutable_event()->set_attempt(0);
  request.mutable_event()->set_step(-1);
  ExpectRefused(engine_.Annotate(request, context()).status(), "event.step -1", "0..");
  // The log would take it, and nobody could read it again.
  request.mutable_event()->set_step((int64_t{1} << 53) + 1);
  ExpectRefused(engine_.Annotate(request, context()).status(), "event.step 9007199254740993", "0..9007199254740992");
  request.mutable_event()->set_step(1);
  request.mutable_event()->set_kind(static_cast<v1::EventKind>(14));
  ExpectRefused(engine_.Annotate(request, context()).status(), "event.kind 14", "0..13");
}

TEST_F(QueryEngineTest, EventsComeInPages) {
  stack_.AddRun({.name = "r", .steps = 9});
  v1::AnnotateRequest note;
  note.set_run("r");
  for (int step = 0; step < 5; ++step) {
    note.mutable_event()->set_step(step);
    note.mutable_event()->set_text("note");
    ASSERT_TRUE(engine_.Annotate(note, context()).ok());
  }
  v1::ListEventsRequest list;
  list.set_run("r");
  list.set_limit(2);
  std::vector<int64_t> steps;
  std::vector<uint64_t> next;
  do {
    const auto page = engine_.ListEvents(list, context());
    ASSERT_TRUE(page.ok()) << page.status();
    EXPECT_EQ(page->total(), 5u);
    for (const v1::Event& event : page->events()) steps.push_back(event.step());
    next.push_back(page->next_after());
    list.set_after(page->next_after());
  } while (list.after() != 0);
  EXPECT_THAT(steps, testing::ElementsAre(0, 1, 2, 3, 4));
  EXPECT_THAT(next, testing::ElementsAre(2, 4, 0));
  list.set_after(UINT64_MAX);
  EXPECT_EQ(engine_.ListEvents(list, context())->events_size(), 0);
  list.set_limit(1001);
  ExpectRefused(engine_.ListEvents(list, context()).status(), "limit 1001", "0..1000");
}

TEST_F(QueryEngineTest, RequestWithoutALimitGetsABoundedFirstPage) {
  stack_.AddRun({.name = "r", .steps = 5});
  QueryEngine::Options options;
  options.events_max = 3;
  const QueryEngine small(options, stack_.stores());
  v1::AnnotateRequest note;
  note.set_run("r");
  note.mutable_event()->set_text("note");
  for (int i = 0; i < 4; ++i) ASSERT_TRUE(engine_.Annotate(note, context()).ok());
  v1::ListEventsRequest list;
  list.set_run("r");
  const auto page = small.ListEvents(list, small.NewContext());
  ASSERT_TRUE(page.ok()) << page.status();
  EXPECT_EQ(page->events_size(), 3);
  EXPECT_EQ(page->total(), 4u);
  EXPECT_EQ(page->next_after(), 3u);
}

TEST_F(QueryEngineTest, QueryBeyondItsMemoryIsRefusedBeforeReading) {
  stack_.AddRun({.name = "r", .steps = 400});
  QueryEngine::Options options;
  options.memory = {.bytes_max = 100'000, .small_bytes = 1000, .wait_ns_max = 0};
  const QueryEngine small(options, stack_.stores());
  v1::GetSeriesRequest request;
  request.set_run("r");
  for (int i = 0; i < 64; ++i) request.add_series()->set_signal("loss");
  request.set_points_max(10'000);
  const absl::Status refused = small.GetSeries(request, small.NewContext()).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted) << refused;
  EXPECT_THAT(std::string(refused.message()), testing::HasSubstr("limits.query_memory_max"));
  EXPECT_EQ(stack_.refused("query_memory"), 1);
  request.mutable_series()->DeleteSubrange(1, 63);
  EXPECT_TRUE(small.GetSeries(request, small.NewContext()).ok());
  EXPECT_EQ(stack_.refused("query_memory"), 1);
}

TEST_F(QueryEngineTest, PassedDeadlineOrCancelledCallEndsTheQuery) {
  stack_.AddRun({.name = "r", .steps = 5});
  v1::GetSeriesRequest request;
  request.set_run("r");
  request.add_series()->set_signal("loss");
  CallContext late = context();
  late.deadline_monotonic_ns = Clock::System()->MonotonicNanos();
  EXPECT_EQ(engine_.GetSeries(request, late).status().code(), absl::StatusCode::kDeadlineExceeded);
  CallContext gone = context();
  gone.cancelled = [] { return true; };
  EXPECT_EQ(engine_.GetSeries(request, gone).status().code(), absl::StatusCode::kCancelled);
}

v1::ProposeActionRequest Proposal() {
  v1::ProposeActionRequest request;
  request.set_run("r");
  request.set_by("alice");
  request.mutable_action()->set_kind(v1::ACTION_KIND_CENTER_K);
  request.mutable_action()->set_value(1);
  return request;
}

TEST_F(QueryEngineTest, ActionsAreProposedAndDecided) {
  const RunId run = stack_.AddRun({.name = "r", .steps = 5});
  v1::ProposeActionRequest proposal = Proposal();
  proposal.mutable_action()->mutable_scope()->add_layers(2);
  proposal.mutable_action()->set_alert_key("a1");
  stack_.Post(stack_.MakeTransition(run, "a1", 0, AlertState::kFiring, Severity::kWarning));
  const auto proposed = engine_.ProposeAction(proposal, context());
  ASSERT_TRUE(proposed.ok()) << proposed.status();
  EXPECT_EQ(proposed->state(), v1::ACTION_STATE_PROPOSED);
  EXPECT_EQ(proposed->scope().layers(0), 2);
  EXPECT_EQ(proposed->run_uuid().size(), 16);
  v1::DecideActionRequest decision;
  decision.set_run("r");
  decision.set_id(proposed->id());
  decision.set_by("bob");
  decision.set_reason("fine");
  const auto approved = engine_.ApproveAction(decision, context());
  ASSERT_TRUE(approved.ok()) << approved.status();
  EXPECT_EQ(approved->state(), v1::ACTION_STATE_APPROVED);
  ASSERT_EQ(approved->history_size(), 2);
  EXPECT_EQ(approved->history(1).by(), "bob");
  EXPECT_EQ(approved->history(1).reason(), "fine");
  v1::ListActionsRequest list;
  list.set_run("r");
  const auto listed = engine_.ListActions(list, context());
  ASSERT_TRUE(listed.ok()) << listed.status();
  ASSERT_EQ(listed->actions_size(), 1);
  EXPECT_EQ(listed->audit_size(), 0);
  // An alert shows what was made of it.
  v1::GetAlertRequest alert;
  alert.set_run("r");
  alert.set_key("a1");
  const auto shown = engine_.GetAlert(alert, context());
  ASSERT_TRUE(shown.ok()) << shown.status();
  ASSERT_EQ(shown->actions_size(), 1);
  EXPECT_EQ(shown->actions(0).id(), proposed->id());
  // The advice says how to approve what waits, not what was decided.
  const auto advice_of = [&](const std::string& id) {
    AlertTransition told = stack_.MakeTransition(run, "a2", 0, AlertState::kFiring, Severity::kWarning);
    told.advice = absl::StrCat("Look. Proposed: centre; `bellwether action approve r ", id,
                               "` applies it; cost: ", proposed->cost(), ".");
    stack_.Post(told);
    alert.set_key("a2");
    const std::string shown_advice = engine_.GetAlert(alert, context())->alert().last().advice();
    const auto listed_alerts = engine_.ListAlerts({}, context());
    EXPECT_TRUE(listed_alerts.ok()) << listed_alerts.status();
    for (const v1::Alert& one : listed_alerts->alerts()) {
      EXPECT_TRUE(one.last().key() != "a2" || one.last().advice() == shown_advice);
    }
    return shown_advice;
  };
  EXPECT_EQ(advice_of(proposed->id()), "Look.");
  // Approved by the same call, if asked.
  proposal.set_approve(true);
  EXPECT_EQ(engine_.ProposeAction(proposal, context())->state(), v1::ACTION_STATE_APPROVED);
}

TEST_F(QueryEngineTest, UnknownAlertKeyIsAnsweredWithTheRunsKeys) {
  const RunId run = stack_.AddRun({.name = "r", .steps = 5});
  const RunId other = stack_.AddRun({.name = "other", .steps = 5});
  // Of a server of before, and of now.
  const std::string old_key = "drift/1/0/2750";
  for (const std::string& key : {old_key, std::string("a1")}) {
    stack_.Post(stack_.MakeTransition(run, key, 0, AlertState::kFiring, Severity::kWarning));
  }
  stack_.Post(stack_.MakeTransition(other, "c7", 0, AlertState::kFiring, Severity::kWarning));
  stack_.Post(stack_.MakeTransition(run, "b1", 0, AlertState::kResolved, Severity::kWarning));
  v1::AcknowledgeAlertRequest acknowledge;
  acknowledge.set_run("r");
  acknowledge.set_key(old_key);
  EXPECT_TRUE(engine_.AcknowledgeAlert(acknowledge, context()).ok()) << "an alert keeps the key that it had";
  for (const char* const typed : {"drift/1/3/2750", "a", "a11", ""}) {
    SCOPED_TRACE(typed);
    v1::GetAlertRequest get;
    get.set_run("r");
    get.set_key(typed);
    acknowledge.set_key(typed);
    v1::SilenceAlertRequest silence;
    silence.set_run("r");
    silence.set_key(typed);
    silence.set_seconds(60);
    for (const absl::Status& refused :
         {engine_.GetAlert(get, context()).status(), engine_.AcknowledgeAlert(acknowledge, context()).status(),
          engine_.SilenceAlert(silence, context()).status()}) {
      EXPECT_EQ(refused.code(), absl::StatusCode::kNotFound);
      EXPECT_THAT(std::string(refused.message()), testing::HasSubstr("it has b1, a1, drift/1/0/2750"));
    }
  }
  v1::ProposeActionRequest proposal = Proposal();
  for (const char* const typed : {"drift/1/3/2750", "b1"}) {  // Not there, and over.
    proposal.mutable_action()->set_alert_key(typed);
    const absl::Status refused = engine_.ProposeAction(proposal, context()).status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument) << typed;
    EXPECT_THAT(std::string(refused.message()), testing::HasSubstr("action.alert_key: alert \""));
  }
}

TEST_F(QueryEngineTest, IllegalRequestsAreRefusedByNameAndAudited) {
  stack_.AddRun({.name = "r", .steps = 5});
  const std::vector<std::pair<std::function<void(v1::ProposeActionRequest*)>, std::string>> wrong = {
      {[](v1::ProposeActionRequest* r) { r->mutable_action()->set_kind(static_cast<v1::ActionKind>(10)); },
       "action.kind 10: must be 1..9"},
      {[](v1::ProposeActionRequest* r) { r->mutable_action()->set_run_uuid("0123456789abcdef"); }, "action.run_uuid"},
      {[](v1::ProposeActionRequest* r) { r->mutable_action()->set_value(std::nan("")); }, "action.value"},
      {[](v1::ProposeActionRequest* r) { r->mutable_action()->set_apply_at_step(-1); }, "action.apply_at_step -1"},
      {[](v1::ProposeActionRequest* r) { r->mutable_action()->set_expires_unix_ns(1); }, "has passed already"},
      {[](v1::ProposeActionRequest* r) { r->mutable_action()->set_mode(std::string(33, 'x')); },
       "action.mode: 33 bytes: at most 32"},
      {[](v1::ProposeActionRequest* r) { r->mutable_action()->mutable_scope()->add_layers(UINT32_MAX); },
       "there is no layer 4294967295"},
      {[](v1::ProposeActionRequest* r) {
         for (int i = 0; i < 65; ++i) r->mutable_action()->mutable_scope()->add_heads();
       },
       "at most 64"},
      {[](v1::ProposeActionRequest* r) { r->clear_by(); }, "by \"\": must name who asks"},
      {[](v1::ProposeActionRequest* r) { r->set_by("policy"); }, "must be a person's name"},
      {[](v1::ProposeActionRequest* r) { r->set_by("rank 0"); }, "must be a person's name"},
      {[](v1::ProposeActionRequest* r) { r->set_by(std::string(129, 'x')); }, "by: 129 bytes: at most 128"},
      {[](v1::ProposeActionRequest* r) { r->set_reason("two\nlines"); }, "reason: must not hold control characters"},
  };
  v1::ListActionsRequest list;
  list.set_run("r");
  for (size_t i = 0; i < wrong.size(); ++i) {
    v1::ProposeActionRequest request = Proposal();
    wrong[i].first(&request);
    const absl::Status status = engine_.ProposeAction(request, context()).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << wrong[i].second;
    EXPECT_THAT(std::string(status.message()), HasSubstr(wrong[i].second));
    const auto listed = engine_.ListActions(list, context());
    ASSERT_EQ(listed->audit_size(), static_cast<int>(i) + 1);
    EXPECT_THAT(listed->audit(static_cast<int>(i)).refused(), HasSubstr(wrong[i].second));
    EXPECT_EQ(listed->actions_size(), 0);
  }
  v1::ProposeActionRequest nowhere = Proposal();
  nowhere.set_run("another");
  EXPECT_EQ(engine_.ProposeAction(nowhere, context()).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(QueryEngineTest, PoliciesAreSetByTextOrByMode) {
  stack_.AddRun({.name = "r", .steps = 5});
  v1::GetPolicyRequest get;
  get.set_run("r");
  EXPECT_EQ(engine_.GetPolicy(get, context())->mode(), v1::Policy::MODE_OBSERVE);
  v1::SetPolicyRequest set;
  set.set_run("r");
  set.set_by("alice");
  set.mutable_policy()->set_mode(v1::Policy::MODE_ENFORCE);
  EXPECT_EQ(engine_.SetPolicy(set, context())->yaml(), "mode: enforce\n");
  set.mutable_policy()->set_yaml("mode: propose\n");
  EXPECT_THAT(std::string(engine_.SetPolicy(set, context()).status().message()), HasSubstr("policy.mode"));
  set.mutable_policy()->clear_mode();
  EXPECT_EQ(engine_.SetPolicy(set, context())->yaml(), "mode: propose\n");
  set.mutable_policy()->set_yaml(std::string((64 << 10) + 1, '#'));
  EXPECT_THAT(std::string(engine_.SetPolicy(set, context()).status().message()), HasSubstr("at most 65536"));
  set.clear_policy();
  EXPECT_FALSE(engine_.SetPolicy(set, context())->own());  // The server's again.
}

TEST_F(QueryEngineTest, ServerInfoHasItsLimits) {
  const auto info = engine_.GetServerInfo({}, context());
  ASSERT_TRUE(info.ok());
  EXPECT_EQ(info->version(), "0.1.0");
  EXPECT_EQ(info->limits().at("query_points_per_series"), 10'000);
  EXPECT_EQ(info->limits().at("runs_live"), 1000);
  // Nobody is asked who he is here.
  EXPECT_TRUE(info->caller().name().empty() && info->caller().may_act() && info->caller().may_admin());
}

TEST_F(QueryEngineTest, WatchRequestsAreCheckedAndFilledIn) {
  const QueryStack::RunSpec spec{.name = "r", .steps = 300, .every = 7};
  const RunId run = stack_.AddRun(spec);
  v1::WatchRunRequest request;
  request.set_run("r");
  for (int i = 0; i < 8; ++i) request.add_signals("drift_ratio");
  ASSERT_TRUE(engine_.Prepare(&request).ok());
  EXPECT_EQ(request.min_interval_ms(), 1000u);
  const v1::WatchRunResponse response = engine_.Watch(*stack_.runs().Get(run), request);
  ASSERT_EQ(response.matrices_size(), 8);
  EXPECT_EQ(response.matrices(0).step(), 294);
  EXPECT_FLOAT_EQ(response.matrices(0).values(1 * 4 + 2),
                  static_cast<float>(QueryStack::DriftRatio(spec, 294, spec.failing)));
  request.add_signals("loss");
  ExpectRefused(engine_.Prepare(&request), "signals 9", "0..8");
  request.clear_signals();
  for (const uint32_t legal : {100u, 60'000u}) {
    request.set_min_interval_ms(legal);
    EXPECT_TRUE(engine_.Prepare(&request).ok());
  }
  for (const uint32_t illegal : {99u, 60'001u}) {
    request.set_min_interval_ms(illegal);
    ExpectRefused(engine_.Prepare(&request), "min_interval_ms", "100..60000");
  }
}

}  // namespace
}  // namespace bellwether::server
