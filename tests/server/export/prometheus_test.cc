// Goal: the page is right (values, labels, NaN), stays within its limit by the
// order that its header promises, never has a series twice, and pleases
// Prometheus' own checker.
// Method: synthetic runs whose values are known, pages parsed line by line,
// promtool check metrics on the whole; 1,000 runs under a clock.

#include "server/export/prometheus.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <initializer_list>
#include <map>
#include <memory>
#include <set>
#include <sstream>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/export/run_metrics.h"
#include "tests/support/memory_database.h"
#include "tests/support/row_snapshots.h"
#include "tests/support/synthetic_runs.h"
#include "tests/support/temp_directory.h"

namespace bellwether::server {
namespace {

constexpr int64_t kMinute = int64_t{60} * 1'000'000'000;

class PrometheusTest : public ::testing::Test {
 protected:
  void Publish(const SyntheticRun& run) { table_.Publish(MakeSnapshot(run, clock_.UnixNanos())); }
  void Publish(const SyntheticRun& run, const std::function<void(RunSnapshot*)>& edit) {
    auto copy = std::make_shared<RunSnapshot>(*MakeSnapshot(run, clock_.UnixNanos()));
    edit(copy.get());
    table_.Publish(copy);
  }
  Exporter& exporter(ExportOptions options = {}) {
    exporter_.reset();
    exporter_ = std::make_unique<Exporter>(options, &table_, &alerts_, &counters_, &clock_);
    return *exporter_;
  }
  // name{labels} -> value; fails on a series that is there twice.
  static std::map<std::string, double> Parse(const std::string& page) {
    std::map<std::string, double> series;
    std::istringstream lines(page);
    for (std::string line; std::getline(lines, line);) {
      if (line.empty() || line[0] == '#') continue;
      const size_t space = line.rfind(' ');
      EXPECT_TRUE(series.emplace(line.substr(0, space), std::strtod(line.c_str() + space, nullptr)).second) << line;
    }
    return series;
  }
  double suppressed(const char* level) {
    return counters_.counter("bellwether_series_suppressed_total", {{"level", level}})->value();
  }
  static int64_t CountOf(const std::map<std::string, double>& series, const std::string& part) {
    return std::count_if(series.begin(), series.end(), [&](const auto& s) { return absl::StrContains(s.first, part); });
  }

  FakeClock clock_;
  MemoryDatabase database_;
  AlertStore alerts_{&database_};
  RunTable table_;
  Counters counters_;
  std::unique_ptr<Exporter> exporter_;
};

TEST_F(PrometheusTest, ValuesOfRunLayerAndHead) {
  const SyntheticRun run{.name = "llama",
                         .layout = {.layers = 2, .heads = 4, .kv_heads = 2},
                         .steps = 2200,
                         .failing = {1, 2},
                         .stage = 1};
  Publish(run);
  const auto page = Parse(exporter().Render());
  EXPECT_EQ(page.at(R"(bellwether_run_step{run="llama"})"), 2200);
  EXPECT_EQ(page.at(R"(bellwether_run_stage{run="llama"})"), 1);
  EXPECT_EQ(page.at(R"(bellwether_run_eta_lower_steps{run="llama"})"), 820);
  EXPECT_EQ(
      page.count(
          R"(bellwether_run_info{run="llama",framework="torch 2.13.0",model="GPT",attention="flash",score_dtype="bf16",layers="2",heads="4",world="8"})"),
      1u);
  const StepSample sample = MakeSample(run, 2200);
  const float drift = sample.matrix(SignalId::kCommonModeSum)[6] / sample.matrix(SignalId::kSpreadSum)[6];
  EXPECT_FLOAT_EQ(static_cast<float>(page.at(R"(bellwether_layer_drift_ratio_max{run="llama",layer="1"})")), drift);
  EXPECT_FLOAT_EQ(static_cast<float>(page.at(R"(bellwether_head_drift_ratio{run="llama",layer="1",head="2"})")), drift);
  // Head 2 of 4 uses key head 1 of 2.
  EXPECT_FLOAT_EQ(static_cast<float>(page.at(R"(bellwether_head_key_leak_ratio{run="llama",layer="1",head="2"})")),
                  sample.matrix(SignalId::kKeyLeakSum)[3]);
  EXPECT_GT(page.at(R"(bellwether_layer_tied_rows_total{run="llama",layer="1",rule="bf16"})"), 0);
  EXPECT_EQ(page.at(R"(bellwether_run_tokens_total{run="llama"})"), 524288.0 * 2200);
  // What nobody measured makes no series.
  EXPECT_EQ(CountOf(page, "rule=\"eps\""), 0);
}

TEST_F(PrometheusTest, JudgedRatioIsAShareOfLayers) {
  const SyntheticRun run{.name = "a", .layout = {.layers = 4, .heads = 2, .kv_heads = 2}};
  Publish(run);
  const auto whole = Parse(exporter().Render());
  EXPECT_EQ(whole.at(R"(bellwether_run_judged_ratio{run="a",family="all"})"), 1);
  EXPECT_EQ(CountOf(whole, "bellwether_run_judged_ratio"), 1) << "a thousand runs that are whole cost one series each";
  Publish(run, [&](RunSnapshot* snapshot) {
    RunCoverage& coverage = snapshot->record.coverage;
    coverage = RunCoverage::Of({SignalId::kKeyLeakSum, SignalId::kKeyGradientSum}, 4, 0, snapshot->record.step);
    coverage.missed[0] = 0;  // The drift of layer 0.
  });
  const auto page = Parse(exporter().Render());
  const auto ratio = [&](const char* family) {
    return page.at(absl::StrCat("bellwether_run_judged_ratio{run=\"a\",family=\"", family, "\"}"));
  };
  EXPECT_EQ(ratio("drift"), 0.25);
  EXPECT_EQ(ratio("leak"), 1);
  for (const char* const family : {"all", "ties", "norm", "logits", "loss"}) EXPECT_EQ(ratio(family), 0) << family;
}

TEST_F(PrometheusTest, FramesLostByClientsAreExported) {
  Publish({.name = "a"}, [](RunSnapshot* run) {
    run->record.frames_dropped = 7;
    run->record.frames_stripped = 3;
  });
  const auto page = Parse(exporter().Render());
  EXPECT_EQ(page.at(R"(bellwether_run_frames_dropped_total{run="a",reason="client"})"), 7);
  EXPECT_EQ(page.at(R"(bellwether_run_frames_stripped_total{run="a"})"), 3);
}

TEST_F(PrometheusTest, NanIsExportedAndTheUnmeasuredIsNot) {
  Publish({.layout = {.layers = 2, .heads = 2, .kv_heads = 2}}, [](RunSnapshot* run) {
    auto sample = std::make_shared<StepSample>(*run->heads);
    const std::span<float> logits = sample->Add(SignalId::kLogitMax);
    logits[0] = std::nanf("");
    logits[2] = logits[3] = NotMeasured();
    run->heads = sample;
  });
  const auto page = Parse(exporter().Render());
  EXPECT_TRUE(std::isnan(page.at(R"(bellwether_layer_logit_max{run="run",layer="0"})")));
  EXPECT_EQ(page.count(R"(bellwether_layer_logit_max{run="run",layer="1"})"), 0u);
}

TEST_F(PrometheusTest, ExpertsHaveSeriesOfLayers) {
  Publish({.name = "moe", .layout = {.layers = 3, .heads = 2, .kv_heads = 2, .experts = 4}}, [](RunSnapshot* run) {
    auto sample = std::make_shared<StepSample>(*run->heads);
    const auto set = [&](SignalId id, std::initializer_list<float> values) {
      std::copy(values.begin(), values.end(), sample->Add(id).begin());
    };
    set(SignalId::kExpertDead, {0, 1, 0.5, 0, 0, 0, 0, 0});  // Layer 2 has no router.
    set(SignalId::kExpertLargestLoad, {60, 30});
    set(SignalId::kExpertIdealLoad, {20, 20});
    set(SignalId::kRouterEntropySum, {1, 4});
    set(SignalId::kRouterEntropyLargestSum, {8, 8});
    set(SignalId::kRouterLogitMax, {-2, std::nanf("")});
    run->heads = sample;
  });
  const auto page = Parse(exporter().Render());
  const auto value = [&](const char* name, int layer) {
    return page.at(absl::StrCat("bellwether_layer_", name, "{run=\"moe\",layer=\"", layer, "\"}"));
  };
  EXPECT_EQ(value("experts_dead", 0), 1.5);
  EXPECT_EQ(value("experts_dead", 1), 0);
  EXPECT_EQ(value("expert_load_max_ratio", 0), 3);
  EXPECT_EQ(value("router_entropy_ratio", 1), 0.5);
  EXPECT_EQ(value("router_logit_max", 0), -2);
  EXPECT_TRUE(std::isnan(value("router_logit_max", 1)));
  EXPECT_EQ(CountOf(page, "expert") + CountOf(page, "bellwether_layer_router_"), 8) << "no series of an expert";
}

TEST_F(PrometheusTest, SignalsOfSamplesAloneStayBetweenThem) {
  Publish({.name = "steps", .steps = 2203}, [](RunSnapshot* run) {
    auto sample = std::make_shared<StepSample>(*run->heads);
    sample->Add(SignalId::kMomentLagMax)[0] = 1.5;
    sample->Add(SignalId::kDataSeconds)[0] = 0.25;
    sample->Add(SignalId::kForwardSeconds)[0] = 0.5;
    sample->Add(SignalId::kLoss)[0] = 77;
    run->heads = sample;
    run->totals[SignalId::kSkippedSteps] = {3};
  });
  const auto page = Parse(exporter().Render());
  EXPECT_EQ(page.at(R"(bellwether_run_moment_lag_max{run="steps"})"), 1.5);
  EXPECT_EQ(page.at(R"(bellwether_run_phase_seconds{run="steps",phase="data"})"), 0.25);
  EXPECT_EQ(page.at(R"(bellwether_run_phase_seconds{run="steps",phase="forward"})"), 0.5);
  EXPECT_EQ(page.at(R"(bellwether_run_skipped_steps_total{run="steps"})"), 3);
  EXPECT_LT(page.at(R"(bellwether_run_loss{run="steps"})"), 77) << "the newest step tells its own";
}

TEST(AggregateRowTest, AggregatesMatchTheirNames) {
  const float nan = std::nanf("");
  EXPECT_EQ(AggregateRow(Aggregate::kMax, std::vector<float>{1, NotMeasured(), 3}), 3);
  EXPECT_EQ(AggregateRow(Aggregate::kMin, std::vector<float>{1, 2, 3}), 1);
  EXPECT_EQ(AggregateRow(Aggregate::kMedian, std::vector<float>{4, 1, 3, 2}), 2.5f);
  EXPECT_EQ(AggregateRow(Aggregate::kMedian, std::vector<float>{4, nan, 3, 9}), 4);
  EXPECT_EQ(AggregateRow(Aggregate::kSignedExtreme, std::vector<float>{-7, 3, 5}), -7);
  EXPECT_EQ(AggregateRow(Aggregate::kSum, std::vector<float>{1, NotMeasured(), 0.5}), 1.5f);
  EXPECT_TRUE(std::isnan(AggregateRow(Aggregate::kMax, std::vector<float>{nan, 3})));
  EXPECT_FALSE(IsNotMeasured(AggregateRow(Aggregate::kMax, std::vector<float>{nan, NotMeasured()})));
  EXPECT_TRUE(IsNotMeasured(AggregateRow(Aggregate::kMax, std::vector<float>{NotMeasured()})));
}

TEST_F(PrometheusTest, LabelValuesAreEscapedAndBounded) {
  Publish({}, [](RunSnapshot* run) {
    run->record.description.model = "a\"b\\c\nd\xff" + std::string(300, 'x');
    run->record.description.framework = "\xc3\xa4";
  });
  const std::string text = exporter().Render();
  EXPECT_THAT(text, ::testing::HasSubstr(R"(model="a\"b\\c d?xxx)"));
  EXPECT_THAT(text, ::testing::HasSubstr("framework=\"\xc3\xa4\""));
  EXPECT_EQ(CleanLabelValue(std::string(127, 'x') + "\xc3\xa4").size(), 127u);  // Cut at a character's end.
  EXPECT_EQ(CleanLabelValue("\xed\xa0\x80"), "???");                            // A surrogate.
}

TEST_F(PrometheusTest, AlertsOnceEachAndOnlyOfExportedRuns) {
  const SyntheticRun run{.id = 7, .name = "ill", .failing = {1, 0}, .stage = 1};
  Publish(run);
  Exporter& exporter = this->exporter();
  AlertTransition alert = MakeAlert(run, Severity::kWarning, "drift", 0);
  ASSERT_TRUE(alerts_.Post(alert).ok());
  alert.key = "drift/1/0/99";  // Another alert with the same labels.
  ASSERT_TRUE(alerts_.Post(alert).ok());
  alert.run = 8;  // Of a run that is not there.
  ASSERT_TRUE(alerts_.Post(alert).ok());
  auto page = Parse(exporter.Render());
  EXPECT_EQ(CountOf(page, "bellwether_alert_active"), 1);
  EXPECT_EQ(page.at(R"(bellwether_alert_active{run="ill",rule="drift",severity="warning",layer="1",head="0"})"), 1);
  EXPECT_EQ(page.at(R"(bellwether_alert_transitions_total{rule="drift",to="firing"})"), 3);
}

TEST_F(PrometheusTest, ASilencedAlertIsNotActiveUntilTheSilenceEnds) {
  const SyntheticRun run{.id = 7, .name = "ill", .failing = {1, 0}, .stage = 1};
  Publish(run);
  Exporter& exporter = this->exporter();
  const AlertTransition alert = MakeAlert(run, Severity::kWarning, "drift", 0);
  ASSERT_TRUE(alerts_.Post(alert).ok());
  ASSERT_TRUE(alerts_.Annotate(run.id, alert.key, {.silenced_until_unix_ns = clock_.UnixNanos() + kMinute}).ok());
  EXPECT_EQ(CountOf(Parse(exporter.Render()), "bellwether_alert_active"), 0);
  clock_.Advance(kMinute);
  EXPECT_EQ(CountOf(Parse(exporter.Render()), "bellwether_alert_active"), 1);
}

TEST_F(PrometheusTest, FalseAlarmsAreNotActiveAndLeaveTheRunHealthy) {
  const SyntheticRun run{.id = 7, .name = "ill", .failing = {1, 0}, .stage = 1};
  Publish(run);
  Exporter& exporter = this->exporter();
  const AlertTransition alert = MakeAlert(run, Severity::kWarning, "drift", 0);
  ASSERT_TRUE(alerts_.Post(alert).ok());
  auto page = Parse(exporter.Render());
  EXPECT_EQ(page.at(R"(bellwether_run_stage{run="ill"})"), 1);
  FalseAlarm said{.severity = Severity::kWarning};
  said.illness = IllnessOf(alert);
  ASSERT_TRUE(alerts_.Annotate(run.id, alert.key, {.false_alarms = {said}}).ok());
  page = Parse(exporter.Render());
  EXPECT_EQ(CountOf(page, "bellwether_alert_active"), 0);
  EXPECT_EQ(page.at(R"(bellwether_run_stage{run="ill"})"), 0);
}

TEST_F(PrometheusTest, SilentImportExportsNothingAndHidesNoNamesake) {
  Publish({.id = 1, .name = "twice", .steps = 100});
  const auto import = [](bool notifies) {
    return [notifies](RunSnapshot* run) {
      run->record.import_of = "a recording";
      run->record.import_notifies = notifies;
    };
  };
  Publish({.id = 2, .name = "twice", .steps = 200}, import(false));
  Publish({.id = 3, .name = "quiet"}, import(false));
  Publish({.id = 4, .name = "asked for"}, import(true));
  const auto page = Parse(exporter().Render());
  EXPECT_EQ(page.at(R"(bellwether_run_step{run="twice"})"), 100);
  EXPECT_EQ(CountOf(page, "run=\"quiet\""), 0);
  EXPECT_GT(CountOf(page, "run=\"asked for\""), 0);
}

TEST_F(PrometheusTest, OnlyTheNewestRunOfANameIsExported) {
  Publish({.id = 1, .name = "twice", .steps = 100});
  Publish({.id = 2, .name = "twice", .steps = 200});
  EXPECT_EQ(Parse(exporter().Render()).at(R"(bellwether_run_step{run="twice"})"), 200);
}

TEST_F(PrometheusTest, EndedAndSilentRunsLeave) {
  Publish({.id = 1, .name = "ended", .ended = true});
  Publish({.id = 2, .name = "silent"});
  Exporter& exporter = this->exporter();
  clock_.Advance(15 * kMinute - 1);
  EXPECT_EQ(CountOf(Parse(exporter.Render()), "bellwether_run_info{run=\"ended\""), 1);
  clock_.Advance(1);
  EXPECT_EQ(CountOf(Parse(exporter.Render()), "run=\"ended\""), 0);
  EXPECT_GT(CountOf(Parse(exporter.Render()), "run=\"silent\""), 0);
  clock_.Advance(24 * 60 * kMinute);
  EXPECT_EQ(CountOf(Parse(exporter.Render()), "run=\"silent\""), 0);
}

TEST_F(PrometheusTest, ASpentBudgetDropsInThePromisedOrder) {
  const SyntheticRun ill{.id = 1, .name = "ill", .failing = {1, 0}, .stage = 2};
  Publish(ill);
  Publish({.id = 2, .name = "well"});
  ASSERT_TRUE(alerts_.Post(MakeAlert(ill, Severity::kWarning, "drift", 0)).ok());
  Exporter& all = exporter();
  all.Render();  // Makes the counters that the sizes below include.
  const auto whole = Parse(all.Render());
  const auto total = static_cast<int64_t>(whole.size());
  EXPECT_EQ(suppressed("head"), 0);
  const int64_t heads = CountOf(whole, "bellwether_head_");
  ASSERT_GT(heads, 100);
  const auto page_at = [&](int64_t series_max) {
    auto page = Parse(exporter({.series_max = series_max}).Render());
    EXPECT_LE(static_cast<int64_t>(page.size()), series_max);
    return page;
  };
  // At the limit nothing is lost; one below, one head's series.
  EXPECT_EQ(static_cast<int64_t>(page_at(total).size()), total);
  EXPECT_EQ(suppressed("head"), 0);
  EXPECT_LT(CountOf(page_at(total - 1), "bellwether_head_"), heads);
  EXPECT_GT(suppressed("head"), 0);
  EXPECT_EQ(suppressed("layer"), 0);
  // Without room for heads the healthy run's layers go next, the ill one's stay.
  const auto no_heads = page_at(total - heads - 1);
  EXPECT_EQ(CountOf(no_heads, "bellwether_layer_drift_ratio_max{run=\"well\""), 0);
  EXPECT_GT(CountOf(no_heads, "bellwether_layer_drift_ratio_max{run=\"ill\""), 0);
  EXPECT_EQ(CountOf(no_heads, "bellwether_run_attempt"), 2);
  EXPECT_GT(suppressed("layer"), 0);
  EXPECT_EQ(suppressed("alert"), 0);
  // With room for what is the server's own and no more than an alert and the run's core.
  const int64_t own = static_cast<int64_t>(Parse(exporter({.series_max = 0}).Render()).size());
  EXPECT_GT(suppressed("alert"), 0);
  const auto one = page_at(own + 5);
  EXPECT_EQ(CountOf(one, "bellwether_alert_active"), 1);
  EXPECT_EQ(CountOf(one, "bellwether_run_info{run=\"ill\""), 1) << "the ill one's first";
  EXPECT_EQ(CountOf(one, "run=\"well\""), 0);
  const auto core = page_at(own + 9);
  EXPECT_EQ(CountOf(core, "bellwether_run_info"), 2);
  EXPECT_EQ(CountOf(core, "bellwether_run_stage"), 2);
  EXPECT_EQ(CountOf(core, "bellwether_run_step{"), 2);
  EXPECT_EQ(CountOf(core, "bellwether_run_last_report"), 2);
  EXPECT_EQ(CountOf(core, "bellwether_alert_active"), 1);
  EXPECT_EQ(CountOf(core, "bellwether_run_attempt"), 0);
  EXPECT_GT(suppressed("run"), 0);
}

TEST_F(PrometheusTest, TheWorstNamedRowsHaveSeries) {
  std::vector<float> z(30, 1.0f);
  z[7] = -40;
  const std::string deep(200, 'x');
  Publish({.name = "laws"}, [&](RunSnapshot* run) {
    SetRows(z, {}, run);
    auto rows = std::make_shared<RunRows>();
    for (size_t i = 0; i < z.size(); ++i) rows->modules.Add(absl::StrCat(deep, i, i % 2 == 0 ? " y=dx" : " dx=dW"));
    run->rows = rows;
  });
  const auto page = Parse(exporter({.rows = {.rows_top = 5}}).Render());
  EXPECT_EQ(CountOf(page, "bellwether_row_value"), 5);
  EXPECT_EQ(page.at(R"(bellwether_run_rows{run="laws",signal="law_z"})"), 30);
  const std::string label = absl::StrCat(deep.substr(0, 48), "...", deep.substr(0, 72 - 7), "7 dx=dW");
  EXPECT_EQ(page.at(absl::StrCat("bellwether_row_value{run=\"laws\",signal=\"law_z\",row=\"", label, "\"}")), -40)
      << "a long name keeps both of its ends";
}

TEST_F(PrometheusTest, TheLargestParametersAndModulesHaveSeries) {
  Publish({.name = "moe"}, [&](RunSnapshot* run) {
    auto rows = std::make_shared<RunRows>();
    for (const char* const name : {"embed", "layers.0.q", "layers.0.k", "head"}) rows->tensors.Add(name);
    for (const char* const name : {"layers.0", "layers.1"}) rows->modules.Add(name);
    run->rows = rows;
    StepSample sample;
    sample.Reset({.layers = 1, .heads = 1, .kv_heads = 1, .tensors = 4, .modules = 2});
    const auto put = [&sample](SignalId id, const std::vector<float>& values) {
      std::copy(values.begin(), values.end(), sample.Add(id).begin());
    };
    put(SignalId::kTensorGradSumsq, {4, 9, 1, 16});
    put(SignalId::kTensorGradMax, {1, std::nanf(""), 0, 2});
    put(SignalId::kTensorGradNonfinite, {0, 0, 7, 0});
    put(SignalId::kModuleSumsq, {16, 36});
    put(SignalId::kModuleElements, {4, 4});
    put(SignalId::kModuleTopSumsq, {4, 9});
    auto values = std::make_shared<RowValues>();
    values->Take(sample);
    run->row_values = values;
  });
  const std::string text = exporter({.rows = {.rows_top = 2}}).Render();
  const auto page = Parse(text);
  EXPECT_EQ(CountOf(page, "bellwether_tensor_grad_norm"), 2);
  EXPECT_EQ(page.at(R"(bellwether_tensor_grad_norm{run="moe",tensor="head"})"), 4);
  EXPECT_EQ(page.at(R"(bellwether_tensor_grad_norm{run="moe",tensor="layers.0.q"})"), 3);
  EXPECT_TRUE(std::isnan(page.at(R"(bellwether_tensor_grad_max{run="moe",tensor="layers.0.q"})"))) << "worst of all";
  EXPECT_EQ(CountOf(page, "bellwether_tensor_grad_nonfinite"), 1) << "zero has none";
  EXPECT_EQ(page.at(R"(bellwether_tensor_grad_nonfinite{run="moe",tensor="layers.0.k"})"), 7);
  EXPECT_EQ(page.at(R"(bellwether_module_rms{run="moe",module="layers.1"})"), 3);
  EXPECT_EQ(page.at(R"(bellwether_module_top_channel_share{run="moe",module="layers.0"})"), 0.25);
  EXPECT_EQ(page.at(R"(bellwether_run_rows{run="moe",signal="tensor_grad_norm"})"), 4);
  EXPECT_EQ(CountOf(page, "bellwether_row_value"), 0);
  EXPECT_THAT(text, testing::HasSubstr("Of the parameters with the largest now: a few, which change."));
}

TEST_F(PrometheusTest, RanksThatStandOutHaveSeriesBesideTheMedian) {
  constexpr int32_t kRanks = 4096;
  Publish({.name = "wide"}, [&](RunSnapshot* run) {
    run->rows = std::make_shared<RunRows>();
    StepSample sample;
    sample.Reset({.layers = 1, .heads = 1, .kv_heads = 1, .ranks = kRanks});
    const auto norms = sample.Add(SignalId::kRankGradNorm);
    for (int32_t rank = 0; rank < kRanks; ++rank) {
      norms[static_cast<size_t>(rank)] = 2 + static_cast<float>(rank) / 1e6f;
    }
    norms[1234] = 40;
    norms[7] = NotMeasured();
    auto values = std::make_shared<RowValues>();
    values->Take(sample);
    run->row_values = values;
  });
  const auto page = Parse(exporter({.rows = {.rows_top = 3}}).Render());
  EXPECT_EQ(CountOf(page, "bellwether_rank_grad_norm"), 3);
  EXPECT_EQ(page.at(R"(bellwether_rank_grad_norm{run="wide",rank="1234"})"), 40);
  EXPECT_TRUE(page.contains(R"(bellwether_rank_grad_norm{run="wide",rank="4095"})"));
  EXPECT_EQ(page.at(R"(bellwether_run_rank_grad_norm_max{run="wide"})"), 40);
  EXPECT_NEAR(page.at(R"(bellwether_run_rank_grad_norm_median{run="wide"})"), 2.002, 1e-3);
  EXPECT_EQ(page.at(R"(bellwether_run_rows{run="wide",signal="rank_grad_norm"})"), kRanks - 1);
}

TEST_F(PrometheusTest, RankWithoutANumberIsTheLargest) {
  Publish({.name = "broken"}, [](RunSnapshot* run) {
    run->rows = std::make_shared<RunRows>();
    StepSample sample;
    sample.Reset({.layers = 1, .heads = 1, .kv_heads = 1, .ranks = 3});
    const std::vector<float> norms = {1, std::nanf(""), 3};
    std::copy(norms.begin(), norms.end(), sample.Add(SignalId::kRankGradNorm).begin());
    auto values = std::make_shared<RowValues>();
    values->Take(sample);
    run->row_values = values;
  });
  const auto page = Parse(exporter({.rows = {.rows_top = 1}}).Render());
  EXPECT_TRUE(std::isnan(page.at(R"(bellwether_rank_grad_norm{run="broken",rank="1"})")));
  EXPECT_TRUE(std::isnan(page.at(R"(bellwether_run_rank_grad_norm_max{run="broken"})")));
  EXPECT_EQ(page.at(R"(bellwether_run_rank_grad_norm_median{run="broken"})"), 2) << "of those that have a number";
}

TEST_F(PrometheusTest, OwnSignalsHaveSeriesByTheirNames) {
  Publish({.name = "rl"}, [&](RunSnapshot* run) {
    auto rows = std::make_shared<RunRows>();
    rows->own_signals = {
        {.name = "kl"}, {.name = "load", .granularity = Granularity::kExpert}, {.name = "seen", .merge = Merge::kSum}};
    for (const OwnCell& cell : {OwnCell{1, 2, 0}, {1, 2, 1}, {1, 2, 2}, {0, 0, 0}, {2, 0, 0}}) rows->AddOwnCell(cell);
    run->rows = rows;
    StepSample sample;
    sample.Reset({.layers = 1, .heads = 1, .kv_heads = 1, .own = 5});
    const std::vector<float> mean = {5, -7, 6, 0, NotMeasured()};
    std::copy(mean.begin(), mean.end(), sample.Add(SignalId::kOwnMean).begin());
    sample.Add(SignalId::kOwnSum)[4] = 4096;
    auto values = std::make_shared<RowValues>();
    values->Take(sample);
    run->row_values = values;
  });
  const auto page = Parse(exporter({.rows = {.rows_top = 2}}).Render());
  EXPECT_EQ(CountOf(page, "bellwether_own_value"), 4);
  EXPECT_EQ(page.at(R"(bellwether_run_own_left_out{run="rl"})"), 1) << "load[2,0]";
  EXPECT_EQ(page.at(R"(bellwether_own_value{run="rl",signal="kl",row="kl"})"), 0) << "zero is a value";
  EXPECT_EQ(page.at(R"(bellwether_own_value{run="rl",signal="load",row="load[2,1]"})"), -7);
  EXPECT_EQ(page.at(R"(bellwether_own_value{run="rl",signal="seen",row="seen"})"), 4096);
}

TEST_F(PrometheusTest, RowsThatDoNotFitAreCounted) {
  Publish({.name = "laws"}, [&](RunSnapshot* run) {
    SetRows({3, 4, 5}, {}, run);
    auto rows = std::make_shared<RunRows>();
    for (const char* const name : {"a y=dx", "b y=dx", "c y=dx"}) rows->modules.Add(name);
    run->rows = rows;
  });
  exporter().Render();
  const auto whole = static_cast<int64_t>(Parse(exporter().Render()).size());
  const int64_t heads = CountOf(Parse(exporter().Render()), "bellwether_head_");
  EXPECT_EQ(suppressed("row"), 0);
  const auto page = Parse(exporter({.series_max = whole - heads - 1}).Render());
  EXPECT_EQ(CountOf(page, "bellwether_head_"), 0) << "heads leave first";
  EXPECT_EQ(CountOf(page, "bellwether_row_value"), 2);
  EXPECT_EQ(CountOf(page, "c y=dx"), 1) << "the worst stays";
  EXPECT_EQ(suppressed("row"), 1);
}

TEST_F(PrometheusTest, LiveRunsComeBeforeEndedRunsWithinTheLimit) {
  Publish({.id = 1, .name = "live"});
  for (RunId id = 2; id < 200; ++id)
    Publish({.id = id, .name = absl::StrCat("ended", id), .failing = {1, 0}, .stage = 3, .ended = true});
  exporter().Render();
  const int64_t own = static_cast<int64_t>(Parse(exporter({.series_max = 0}).Render()).size());
  const auto page = Parse(exporter({.series_max = own + 100}).Render());
  EXPECT_LE(static_cast<int64_t>(page.size()), own + 100);
  EXPECT_EQ(CountOf(page, "bellwether_run_info{run=\"live\""), 1);
  EXPECT_EQ(CountOf(page, "bellwether_run_info"), 25);
}

TEST_F(PrometheusTest, CountsItsOwnSeries) {
  Publish({});
  Exporter& exporter = this->exporter();
  exporter.Render();
  const auto page = Parse(exporter.Render());
  double told = 0;
  for (const char* level : kSeriesLevelNames)
    told += page.at(absl::StrCat("bellwether_series_exported{level=\"", level, "\"}"));
  EXPECT_EQ(told, static_cast<double>(page.size()));
}

TEST_F(PrometheusTest, CountersComeByTheCatalogueOnly) {
  counters_.counter("bellwether_ingest_values_total")->Add(5);
  counters_.counter("bellwether_not_in_the_catalogue_total")->Add(5);
  counters_.counter("bellwether_ingest_bytes_total", {{"job", "x"}})->Add(5);
  counters_.gauge("bellwether_ingest_frames_total", {{"result", "accepted"}})->Set(1);
  counters_.histogram("bellwether_ack_seconds")->Observe(0.003);
  const auto page = Parse(exporter().Render());
  EXPECT_EQ(page.at("bellwether_ingest_values_total"), 5);
  EXPECT_EQ(CountOf(page, "not_in_the_catalogue"), 0);
  EXPECT_EQ(CountOf(page, "bellwether_ingest_bytes_total"), 0);
  EXPECT_EQ(page.at(R"(bellwether_ack_seconds_bucket{le="+Inf"})"), 1);
  EXPECT_EQ(page.at(R"(bellwether_ack_seconds_bucket{le="0.0025"})"), 0);
  EXPECT_GT(page.at("process_resident_memory_bytes"), 1e6);
}

TEST_F(PrometheusTest, AThousandRunsWithinTheLimitAndASecond) {
  for (RunId id = 1; id <= 1000; ++id) {
    SyntheticRun run{
        .id = id, .name = absl::StrCat("run-", id), .layout = {.layers = 32, .heads = 32, .kv_heads = 8}, .steps = 100};
    if (id % 100 == 0) {
      run.failing = {1, 0};
      run.stage = 1;
    }
    Publish(run);
  }
  Exporter& exporter = this->exporter();
  const std::clock_t start = std::clock();  // Of the processor: others may have it meanwhile.
  const std::string text = exporter.Render();
  const double seconds = static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
  const auto page = Parse(text);
  RecordProperty("milliseconds", static_cast<int>(seconds * 1000));
  std::cout << page.size() << " series, " << text.size() << " bytes, " << seconds << " s\n";
  EXPECT_LE(page.size(), 20'000u);
  EXPECT_GT(page.size(), 15'000u);
  EXPECT_LE(seconds, 1.0);
  EXPECT_EQ(CountOf(page, "bellwether_run_info"), 1000);
  EXPECT_EQ(CountOf(page, "bellwether_layer_drift_ratio_max"), 10 * 32);
}

TEST_F(PrometheusTest, PromtoolAcceptsTheMetrics) {
  if (std::system("command -v promtool >/dev/null") != 0) GTEST_SKIP() << "promtool is not installed";
  const SyntheticRun run{.name = "ill", .failing = {1, 0}, .stage = 1};
  Publish(run);
  ASSERT_TRUE(alerts_.Post(MakeAlert(run, Severity::kWarning, "drift", 0)).ok());
  counters_.histogram("bellwether_ack_seconds")->Observe(0.003);
  const TempDirectory directory;
  const std::string path = directory.path() + "/page.prom";
  const auto check = [&path](const std::string& page) {
    std::ofstream(path) << page;
    return std::system(absl::StrCat("promtool check metrics < ", path, " 2>&1").c_str());
  };
  const std::string page = exporter().Render();
  EXPECT_EQ(check(page), 0);
  EXPECT_NE(check(page + "# HELP bad_total x\n# TYPE bad_total gauge\nbad_total 1\n"), 0) << "the check sees nothing";
}

}  // namespace
}  // namespace bellwether::server
