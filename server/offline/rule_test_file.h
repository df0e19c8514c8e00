// rule_test_file.h: what a file of rule tests says.
//
//   rules_file: rules.yml          # beside this file; without it: built in
//   tests:
//   - name: a head that drifts is named
//     layout: {layers: 4, heads: 4, kv_heads: 4}
//     attention: {score_dtype: bf16, centred: false}
//     steps: 5000                  # the last one
//     every: 20                    # a sample of the heads each so many steps
//     series:                      # later ones go over earlier ones
//     - {signal: drift_ratio, values: {constant: 1}, noise: {deviation: 0.1, seed: 7, by_factors: true}}
//     - {signal: drift_ratio, heads: [[2, 1]], values: {exponential: {from: 1, doubling_steps: 300, begin: 2000}}}
//     - {signal: loss, values: '3-0.01x200 1x4800'}
//     events:
//     - {step: 4000, kind: centring_on}
//     only: [drift]                # alerts of other rules do not count
//     expect:                      # all that fires after the step
//     - {step: 3900, alerts: [{rule: drift, severity: warning, stage: 1, layer: 2, head: 1}]}
//     - {step: 4000, alerts: []}
//
// A derived signal is made of measured ones, of which those that the test does
// not say are filled in.  A series of the run has a value each step, one of the
// heads a value each sample; after its last value it is not measured.
//
// Pure functions; safe from any thread.

#ifndef BELLWETHER_SERVER_OFFLINE_RULE_TEST_FILE_H_
#define BELLWETHER_SERVER_OFFLINE_RULE_TEST_FILE_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "server/model/alert_transition.h"
#include "server/model/run_types.h"
#include "server/model/step_sample.h"
#include "server/offline/test_series.h"

namespace bellwether::server {

struct TestSeries {
  const SignalInfo* signal = nullptr;
  std::vector<Head> heads;  // Of the signal's matrix; of a run signal one, {0, 0}.
  int64_t every = 1;
  std::variant<std::vector<float>, TestFormula> values;
  double noise_deviation = 0;
  int64_t noise_seed = 0;
  bool noise_by_factors = false;
};

struct ExpectedAlert {
  std::string rule;
  // What is not said is not asked.
  std::optional<Severity> severity;
  std::optional<int64_t> stage, layer, head;
};

struct Expectation {
  int64_t step = 0;
  std::vector<ExpectedAlert> alerts;
};

struct RuleTest {
  std::string name;
  RunDescription run;
  int64_t steps = 0;
  std::vector<TestSeries> series;
  std::vector<RunEvent> events;  // By rising step.
  std::vector<std::string> only;
  std::vector<Expectation> expect;  // By rising step.
};

struct RuleTestFile {
  std::string rules_file;  // As written; empty = none.
  std::vector<RuleTest> tests;
};

// INVALID_ARGUMENT: every finding, a line each, as of a rules file.
absl::StatusOr<RuleTestFile> ParseRuleTests(std::string_view text, const std::string& name);
// As above, or what ReadRegularFile says.
absl::StatusOr<RuleTestFile> ReadRuleTests(const std::string& path);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_OFFLINE_RULE_TEST_FILE_H_
