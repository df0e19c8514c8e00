// Goal: a test of rules passes when exactly the expected alerts fire and says
// what it saw when not; its series are what their notation says.
// Method: notations and their values; small test files, right and wrong; the
// tests that lie beside the shipped rules.

#include "server/offline/rule_tests.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <fstream>

#include "server/detect/thresholds.h"
#include "server/offline/test_series.h"
#include "tests/support/temp_directory.h"

namespace bellwether::server {
namespace {

using testing::Each;
using testing::ElementsAre;
using testing::Field;
using testing::HasSubstr;
using testing::IsEmpty;

std::vector<float> Values(const std::string& notation) {
  const auto values = ExpandValues(notation);
  EXPECT_TRUE(values.ok()) << values.status();
  return values.ok() ? *values : std::vector<float>();
}

TEST(TestSeriesTest, ExpandsAsPromtoolDoes) {
  EXPECT_THAT(Values("1+0.5x3"), ElementsAre(1, 1.5, 2, 2.5));
  EXPECT_THAT(Values("1-0.5x3"), ElementsAre(1, 0.5, 0, -0.5));
  EXPECT_THAT(Values("-2+4x3"), ElementsAre(-2, 2, 6, 10));
  EXPECT_THAT(Values(" 1x2  5"), ElementsAre(1, 1, 1, 5));
  EXPECT_THAT(Values("0x2"), ElementsAre(0, 0, 0)) << "not a hexadecimal number";
  EXPECT_THAT(Values("1*2x3"), ElementsAre(1, 2, 4, 8));
  EXPECT_THAT(Values("1e-2x0"), ElementsAre(0.01f));
  const auto missing = Values("_x2 1 _");
  ASSERT_EQ(missing.size(), 4u);
  EXPECT_TRUE(IsNotMeasured(missing[0]) && IsNotMeasured(missing[1]) && IsNotMeasured(missing[3]));
  EXPECT_EQ(missing[2], 1);
  const auto odd = Values("NaN +Inf -Inf");
  EXPECT_TRUE(std::isnan(odd[0]) && !IsNotMeasured(odd[0]));
  EXPECT_EQ(odd[1], INFINITY);
  EXPECT_EQ(odd[2], -INFINITY);
  for (const char* bad : {"", " ", "a", "1x", "1+x3", "1+2", "1x-1", "1/2x3", "_y", "1x1000001", "1x3x"}) {
    EXPECT_FALSE(ExpandValues(bad).ok()) << bad;
  }
  EXPECT_EQ(Values("1x999999").size(), 1'000'000u);
  EXPECT_FALSE(ExpandValues("1x999999 2").ok());
}

TEST(TestSeriesTest, FormulasAreFunctionsOfTheStep) {
  const TestFormula ramp{.kind = TestFormula::Kind::kRamp, .from = 1, .to = 3, .begin = 100, .end = 200};
  EXPECT_EQ(ramp.At(0), 1);
  EXPECT_EQ(ramp.At(150), 2);
  EXPECT_EQ(ramp.At(500), 3);
  const TestFormula doubles{.kind = TestFormula::Kind::kExponential, .from = 2, .begin = 100, .doubling_steps = 50};
  EXPECT_EQ(doubles.At(100), 2);
  EXPECT_DOUBLE_EQ(doubles.At(200), 8);
}

TEST(TestSeriesTest, NoiseIsNormalAndTheSameEveryTime) {
  TestNoise once(1, 7, false);
  TestNoise again(1, 7, false);
  TestNoise other(1, 8, false);
  double sum = 0;
  double squares = 0;
  for (int i = 0; i < 10'000; ++i) {
    const double x = once.On(0);
    EXPECT_EQ(x, again.On(0));
    EXPECT_NE(x, other.On(0));
    sum += x;
    squares += x * x;
  }
  EXPECT_NEAR(sum / 10'000, 0, 0.05);
  EXPECT_NEAR(squares / 10'000, 1, 0.05);
  EXPECT_NEAR(TestNoise(1, 7, false).On(0), 0.31, 10) << "finite";
  EXPECT_GT(TestNoise(3, 7, true).On(1), 0);
}

constexpr char kRules[] =
    "rules:\n- {name: gone, signal: entropy_ratio, detector: level, below: 0.1, stage: 4, severity: warning, "
    "hold_batches: 2}\n";
constexpr char kTest[] = R"(rules_file: rules.yml
tests:
- name: one head is named
  layout: {layers: 2, heads: 2}
  steps: 1100
  series:
  - {signal: entropy_ratio, values: {constant: 0.5}, noise: {deviation: 0.01, seed: 3}}
  - {signal: entropy_ratio, heads: [[1, 0]], values: '0.5x49 0.01x50'}
  expect:
  - {step: 1000, alerts: []}
  - {step: 1040, alerts: [{rule: gone, severity: warning, stage: 4, layer: 1, head: 0}]}
)";

class RuleTestsTest : public testing::Test {
 protected:
  absl::StatusOr<std::vector<RuleTestResult>> Run(const std::string& test, const std::string& rules = kRules) {
    std::ofstream(folder_.path() + "/rules.yml") << rules;
    std::ofstream(folder_.path() + "/test.yml") << test;
    return RunRuleTests(folder_.path() + "/test.yml");
  }
  // The failures of the only test.
  std::vector<std::string> Failures(const std::string& test) {
    const auto results = Run(test);
    EXPECT_TRUE(results.ok()) << results.status();
    return results.ok() && results->size() == 1 ? results->front().failures : std::vector<std::string>{"no result"};
  }
  std::string Findings(const std::string& test) {
    const auto results = Run(test);
    return results.ok() ? "" : std::string(results.status().message());
  }
  static std::string With(const std::string& what, const std::string& by) {
    std::string test = kTest;
    const size_t at = test.find(what);
    EXPECT_NE(at, std::string::npos) << what;
    return test.replace(at, what.size(), by);
  }

  TempDirectory folder_;
};

TEST_F(RuleTestsTest, PassesWhenExactlyTheExpectedFires) {
  EXPECT_THAT(Failures(kTest), IsEmpty());
  EXPECT_THAT(Failures(With("severity: warning, stage: 4, layer: 1, head: 0", "layer: 1")), IsEmpty())
      << "what is not said is not asked";
}

TEST_F(RuleTestsTest, FailureShowsTheObservedAlerts) {
  const std::string saw = "got [{rule: gone, severity: warning, stage: 4, layer: 1, head: 0}]";
  for (const auto& [what, by] : std::vector<std::pair<std::string, std::string>>{
           {"head: 0}]}", "head: 1}]}"},
           {"layer: 1,", "layer: 0,"},
           {"stage: 4", "stage: 3"},
           {"severity: warning", "severity: critical"},
           {"rule: gone", "rule: drift"},
           {"{step: 1040, alerts: [{rule: gone, severity: warning, stage: 4, layer: 1, head: 0}]}",
            "{step: 1040, alerts: []}"},
           {"head: 0}]}", "head: 0}, {rule: gone}]}"}}) {
    EXPECT_THAT(Failures(With(what, by)),
                ElementsAre(testing::AllOf(testing::StartsWith("step 1040: expected ["), HasSubstr(saw))))
        << by;
  }
  EXPECT_THAT(Failures(With("{step: 1000, alerts: []}", "{step: 1000, alerts: [{rule: gone}]}")),
              ElementsAre("step 1000: expected [{rule: gone}], got []"));
}

TEST_F(RuleTestsTest, OtherRulesCountUnlessLeftOut) {
  const std::string nan = With("  expect:", "  - {signal: loss, values: '3-0.001x1019 NaNx80'}\n  expect:");
  EXPECT_THAT(Failures(nan), ElementsAre(HasSubstr("rule: nonfinite, severity: critical, stage: 5")));
  std::string only = nan;
  only.insert(only.find("  expect:"), "  only: [gone]\n");
  EXPECT_THAT(Failures(only), IsEmpty());
}

TEST_F(RuleTestsTest, EventsReachTheJudge) {
  EXPECT_THAT(Failures(With("  expect:", "  events: [{step: 1000, kind: learning_rate, value: 1}]\n  expect:")),
              ElementsAre(HasSubstr("got []")))
      << "the change excuses it";
}

TEST_F(RuleTestsTest, DerivedSignalsFollowFromTheirParts) {
  // Both ratios want the common mode, in either order.
  for (const char* order : {"drift_ratio, values: {constant: 3}}\n  - {signal: common_mode, values: {constant: 6}}",
                            "common_mode, values: {constant: 6}}\n  - {signal: drift_ratio, values: {constant: 3}}"}) {
    const std::string test =
        std::string("rules_file: rules.yml\ntests:\n- name: a\n  steps: 1000\n  series:\n  - {signal: ") + order +
        "\n  - {signal: delta_bias_t, values: {constant: -7}}\n"
        "  expect: [{step: 1000, alerts: [{rule: r}, {rule: c}, {rule: t}]}]\n";
    const auto results = Run(test, R"(rules:
- {name: r, signal: drift_ratio, detector: level, above: 2.99, stage: 1, severity: info}
- {name: r_more, signal: drift_ratio, detector: level, above: 3.01, stage: 1, severity: info}
- {name: c, signal: common_mode, detector: level, above: 5.99, stage: 1, severity: info}
- {name: c_more, signal: common_mode, detector: level, above: 6.01, stage: 1, severity: info}
- {name: t, signal: delta_bias_t, detector: level, below: -6.99, stage: 1, severity: info}
- {name: t_more, signal: delta_bias_t, detector: level, below: -7.01, stage: 1, severity: info}
)");
    ASSERT_TRUE(results.ok()) << results.status();
    EXPECT_THAT(results->front().failures, IsEmpty()) << order;
  }
}

TEST_F(RuleTestsTest, FindingsHaveTheirPlace) {
  EXPECT_THAT(Findings(With("steps: 1100", "steps: 0")),
              HasSubstr("test.yml:5:10: tests[0].steps = 0: must be a whole number in [1, 200000]"));
  EXPECT_THAT(Findings(With("constant: 0.5", "constnt: 0.5")),
              HasSubstr("constnt is unknown; known: constant, ramp, exponential"));
  EXPECT_THAT(Findings(With("[[1, 0]]", "[[2, 0]]")),
              HasSubstr("tests[0].series[1].heads[0][0] = 2: must be a whole number in [0, 1]"));
  EXPECT_THAT(Findings(With("[[1, 0]]", "[[1]]")), HasSubstr("must be [layer, head]"));
  EXPECT_THAT(Findings(With("0.5x49 0.01x50", "0.5x49 oops")), HasSubstr("\"oops\" is no value"));
  EXPECT_THAT(Findings(With("step: 1040", "step: 1101")), HasSubstr("must be at most steps = 1100"));
  EXPECT_THAT(Findings(With("  steps: 1100\n", "")), HasSubstr("tests[0].steps is missing"));
  EXPECT_THAT(Findings(With("heads: 2}", "heads: 4, kv_heads: 3}")), HasSubstr("kv_heads = 3: must divide heads = 4"));
  EXPECT_THAT(
      Findings(With("  expect:", "  - {signal: entropy_sum, values: '1'}\n  - {signal: rows, values: '1'}\n  expect:")),
      HasSubstr("entropy_ratio follows from entropy_sum and rows"));
  EXPECT_THAT(Findings(With("rules.yml", "none.yml")), HasSubstr("none.yml: cannot be read"));
}

TEST_F(RuleTestsTest, FindingsInTheRulesAreFindings) {
  const auto results = Run(kTest, "rules: [{name: gone}]");
  ASSERT_FALSE(results.ok());
  EXPECT_EQ(results.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(results.status().message()), HasSubstr("rules.yml:1:9: rules[0].signal is missing"));
}

// A run that one built-in rule or test finds, and no other.
struct Found {
  const char* off;
  const char* series;  // Of the ill head, or of the run; the others have `rest`.
  const char* rest;
  int64_t step;
  const char* rule;
};

class OffTest : public RuleTestsTest, public testing::WithParamInterface<Found> {};

TEST_P(OffTest, DisablingATestSilencesItAlone) {
  const Found& found = GetParam();
  std::string test =
      "rules_file: rules.yml\ntests:\n- name: a\n  steps: " + std::to_string(found.step) + "\n  series:\n";
  if (*found.rest != '\0') test += std::string("  - {") + found.rest + "}\n";
  test += std::string("  - {") + found.series + "}\n  expect: [{step: " + std::to_string(found.step) + ", alerts: [";
  const std::string fires = test + "{rule: " + found.rule + "}]}]\n";
  for (int i = 0; i < kBuiltins; ++i) {
    const std::string off = NameOf(static_cast<Builtin>(i));
    const bool silences = off == found.off || std::string(found.off).starts_with(off + ".");
    const auto results = Run(silences ? test + "]}]\n" : fires, "off: [" + off + "]\n");
    ASSERT_TRUE(results.ok()) << results.status();
    EXPECT_THAT(results->front().failures, IsEmpty()) << "off: " << off;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Builtins, OffTest,
    testing::Values(
        Found{
            "drift.growth",
            "signal: drift_ratio, heads: [[2, 1]], values: {exponential: {from: 1, begin: 2000, doubling_steps: 300}}",
            "signal: drift_ratio, values: {constant: 1}", 3000, "drift"},
        Found{"drift.level",
              "signal: drift_ratio, heads: [[2, 1]], values: {exponential: {from: 9, doubling_steps: 3000}}",
              "signal: drift_ratio, values: {constant: 1}", 3000, "drift"},
        Found{
            "drift.common_mode",
            "signal: common_mode, heads: [[2, 1]], values: {exponential: {from: 20, begin: 1000, doubling_steps: 300}}",
            "signal: common_mode, values: {constant: 1}", 2400, "drift"},
        Found{"drift.leak", "signal: key_leak, heads: [[2, 1]], values: {constant: 0.01}",
              "signal: key_leak, values: {constant: 0.0001}", 1500, "drift"},
        Found{
            "ties",
            "signal: tied_fraction_bf16, heads: [[2, 1]], values: {ramp: {from: 0.05, to: 0.5, begin: 100, end: 101}}",
            "signal: tied_fraction_bf16, values: {constant: 0.05}", 1500, "ties"},
        Found{"norm",
              "signal: wq_sigma, heads: [[2, 1]], values: {exponential: {from: 3, begin: 1000, doubling_steps: 500}}",
              "signal: wq_sigma, values: {constant: 3}", 2500, "norm"},
        Found{"logits",
              "signal: logit_max, heads: [[2, 1]], values: {ramp: {from: 20, to: 1500, begin: 100, end: 101}}",
              "signal: logit_max, values: {constant: 20}", 1500, "logits"},
        Found{
            "loss",
            "signal: loss, values: {ramp: {from: 2, to: 4, begin: 1500, end: 1501}}, noise: {deviation: 0.02, seed: 5}",
            "", 1900, "loss"},
        Found{"gradient",
              "signal: grad_norm, values: {ramp: {from: 0.5, to: 50, begin: 1500, end: 1501}}, noise: {deviation: 0.1, "
              "by_factors: true}",
              "", 1600, "gradient"},
        Found{"nonfinite", "signal: wq_sigma, heads: [[2, 1]], values: NaN", "signal: wq_sigma, values: '1x1'", 20,
              "nonfinite"},
        Found{"overhead", "signal: hook_seconds, values: {constant: 0.5}",
              "signal: step_seconds, values: {constant: 1}", 300, "overhead"}),
    [](const auto& found) {
      std::string name = found.param.off;
      std::replace_if(
          name.begin(), name.end(), [](char c) { return c == '.'; }, '_');
      return name;
    });

TEST(ShippedRulesTest, ShippedRulesPassTheirTests) {
  for (const char* file : {"builtin_test.yml", "example_test.yml"}) {
    const auto results = RunRuleTests(std::string(BELLWETHER_SOURCE) + "/deploy/rules/" + file);
    ASSERT_TRUE(results.ok()) << results.status();
    EXPECT_GE(results->size(), 3u);
    for (const RuleTestResult& result : *results)
      EXPECT_THAT(result.failures, IsEmpty()) << file << ": " << result.name;
  }
}

}  // namespace
}  // namespace bellwether::server
