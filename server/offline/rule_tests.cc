#include "server/offline/rule_tests.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/detect/rule_fields.h"
#include "server/detect/rules_file.h"
#include "server/detect/run_judge.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

// Of a part of a derived signal that a test does not say.
constexpr float kPart = 1024;

// The samples of a test's made-up run.
class TestRun {
 public:
  explicit TestRun(const RuleTest& test) : test_(test) {
    for (const TestSeries& series : test.series) {
      noise_.emplace_back(series.noise_deviation, static_cast<uint64_t>(series.noise_seed), series.noise_by_factors);
    }
  }

  // Steps in order: noise goes on from one to the next.
  const StepSample& At(int64_t step) {
    sample_.Reset(test_.run.layout);
    sample_.step = step;
    // By signal, in the order of the file: later series go over earlier ones.
    std::vector<const SignalInfo*> derived;
    std::map<SignalId, std::vector<float>> wanted;
    for (size_t i = 0; i < test_.series.size(); ++i) {
      const TestSeries& series = test_.series[i];
      if (step % series.every != 0) continue;
      std::span<float> to;
      if (series.signal->derived) {
        std::vector<float>& values = wanted[series.signal->id];
        if (values.empty()) {
          derived.push_back(series.signal);
          values.assign(static_cast<size_t>(ShapeOf(*series.signal, test_.run.layout).size()), NotMeasured());
        }
        to = values;
      } else {
        to = sample_.Add(series.signal->id);
      }
      Fill(series, step, &noise_[i], to);
    }
    for (const SignalInfo* signal : derived) SetParts(*signal, wanted[signal->id]);
    return sample_;
  }

 private:
  void Fill(const TestSeries& series, int64_t step, TestNoise* noise, std::span<float> to) const {
    const auto at = static_cast<size_t>(step / series.every);
    const auto* const listed = std::get_if<std::vector<float>>(&series.values);
    const int32_t heads = ShapeOf(*series.signal, test_.run.layout).heads;
    for (const Head& head : series.heads) {
      float& value = to[static_cast<size_t>(head.layer * heads + head.head)];
      if (listed == nullptr) {
        value = static_cast<float>(std::get<TestFormula>(series.values).At(step));
      } else {
        value = at < listed->size() ? (*listed)[at] : NotMeasured();
      }
      if (series.noise_deviation > 0 && std::isfinite(value)) value = static_cast<float>(noise->On(value));
    }
  }

  // Measured values from which the derived ones follow.
  void SetParts(const SignalInfo& signal, const std::vector<float>& values) {
    const bool numerator_known = sample_.has(signal.numerator);
    if (!numerator_known && !sample_.has(signal.denominator)) {
      for (float& part : sample_.Add(signal.denominator)) part = kPart;
    }
    sample_.Add(numerator_known ? signal.denominator : signal.numerator);
    // Only now: adding a matrix moves the others.
    const std::span<float> numerator = sample_.Add(signal.numerator);
    const std::span<float> denominator = sample_.Add(signal.denominator);
    for (size_t i = 0; i < values.size(); ++i) {
      float& part = numerator_known ? denominator[i] : numerator[i];
      if (IsNotMeasured(values[i])) {
        part = NotMeasured();
      } else if (signal.numerator == signal.denominator) {
        part = values[i] * values[i];
      } else if (signal.root) {
        part = numerator_known ? numerator[i] / (values[i] * values[i]) : values[i] * values[i] * denominator[i];
      } else if (numerator_known) {
        const float ratio = numerator[i] / values[i];
        part = signal.denominator_root ? ratio * ratio : ratio;
      } else {
        part = values[i] * (signal.denominator_root ? std::sqrt(denominator[i]) : denominator[i]);
      }
    }
  }

  const RuleTest& test_;
  std::vector<TestNoise> noise_;
  StepSample sample_;
};

std::string Describe(const std::string& rule, const std::string& severity, const std::string& rest) {
  return absl::StrCat("{rule: ", rule, severity.empty() ? "" : ", severity: " + severity, rest, "}");
}
std::string Describe(const ExpectedAlert& alert) {
  const auto said = [](const char* name, const std::optional<int64_t>& value) {
    return value ? absl::StrCat(", ", name, ": ", *value) : std::string();
  };
  return Describe(alert.rule, alert.severity ? NameOf(*alert.severity) : "",
                  said("stage", alert.stage) + said("layer", alert.layer) + said("head", alert.head));
}
std::string Describe(const AlertTransition& alert) {
  return Describe(
      alert.rule, NameOf(alert.severity),
      absl::StrCat(", stage: ", alert.stage, ", layer: ", alert.strongest.layer, ", head: ", alert.strongest.head));
}

bool Matches(const ExpectedAlert& expected, const AlertTransition& alert) {
  return expected.rule == alert.rule && (!expected.severity || *expected.severity == alert.severity) &&
         (!expected.stage || *expected.stage == alert.stage) &&
         (!expected.layer || *expected.layer == alert.strongest.layer) &&
         (!expected.head || *expected.head == alert.strongest.head);
}

// "" if exactly what was expected fires.
std::string Compare(const Expectation& expectation, const std::map<std::string, AlertTransition>& firing,
                    const std::vector<std::string>& only) {
  std::vector<const AlertTransition*> left;
  for (const auto& [key, alert] : firing) {
    if (only.empty() || std::find(only.begin(), only.end(), alert.rule) != only.end()) left.push_back(&alert);
  }
  std::vector<std::string> all;
  for (const AlertTransition* alert : left) all.push_back(Describe(*alert));
  std::vector<std::string> wanted;
  bool met = true;
  for (const ExpectedAlert& expected : expectation.alerts) {
    wanted.push_back(Describe(expected));
    const auto found =
        std::find_if(left.begin(), left.end(), [&](const AlertTransition* alert) { return Matches(expected, *alert); });
    met = met && found != left.end();
    if (found != left.end()) left.erase(found);
  }
  if (met && left.empty()) return "";
  return absl::StrCat("step ", expectation.step, ": expected [", absl::StrJoin(wanted, ", "), "], got [",
                      absl::StrJoin(all, ", "), "]");
}

}  // namespace

std::vector<std::string> RunRuleTest(const RuleTest& test, const JudgeOptions& options) {
  TestRun run(test);
  RunJudge judge(options, test.run);
  std::map<std::string, AlertTransition> firing;
  std::vector<AlertTransition> transitions;
  std::vector<std::string> failures;
  size_t next_event = 0;
  size_t next_expectation = 0;
  for (int64_t step = 0; step <= test.steps; ++step) {
    for (; next_event < test.events.size() && test.events[next_event].step == step; ++next_event) {
      judge.OnEvent(test.events[next_event], &transitions);
    }
    if (const StepSample& sample = run.At(step); !sample.signals().empty()) judge.Observe(sample, &transitions);
    for (AlertTransition& transition : transitions) {
      if (transition.state == AlertState::kFiring) {
        firing[transition.key] = std::move(transition);
      } else {
        firing.erase(transition.key);
      }
    }
    transitions.clear();
    for (; next_expectation < test.expect.size() && test.expect[next_expectation].step == step; ++next_expectation) {
      const std::string failure = Compare(test.expect[next_expectation], firing, test.only);
      if (!failure.empty()) failures.push_back(failure);
    }
  }
  return failures;
}

absl::StatusOr<std::vector<RuleTestResult>> RunRuleTests(const std::string& path) {
  BW_ASSIGN_OR_RETURN(const RuleTestFile file, ReadRuleTests(path));
  JudgeOptions options;
  if (!file.rules_file.empty()) {
    // Beside the file that names it; an absolute path stays one.
    const std::filesystem::path rules = std::filesystem::path(path).parent_path() / file.rules_file;
    BW_ASSIGN_OR_RETURN(const RuleSetPtr set, ReadRules(rules.string()));
    options = set->options;
  }
  std::vector<RuleTestResult> results;
  for (const RuleTest& test : file.tests) results.push_back({test.name, RunRuleTest(test, options)});
  return results;
}

}  // namespace bellwether::server
