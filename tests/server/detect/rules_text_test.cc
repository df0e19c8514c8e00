// Goal: what is said of rules are the numbers in force; the committed pages are
// the ones that the tables give.
// Method: explanations of small rules files; the files of docs and deploy.

#include "server/detect/rules_text.h"

#include <gmock/gmock.h>

#include <fstream>
#include <sstream>

#include "server/detect/rules_file.h"
#include "server/detect/thresholds.h"

namespace bellwether::server {
namespace {

using testing::HasSubstr;
using testing::Not;

std::string Committed(const std::string& path) {
  std::ifstream file(std::string(BELLWETHER_SOURCE) + "/" + path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

std::string Explain(const std::string& yaml, const std::string& rule = "") {
  const auto rules = ParseRules(yaml, "r.yml");
  EXPECT_TRUE(rules.ok()) << rules.status();
  const auto text = ExplainRules((*rules)->options, rule);
  return text.ok() ? *text : std::string(text.status().message());
}

TEST(RulesTextTest, NumbersAreThoseInForce) {
  const std::string plain = Explain("", "drift.growth");
  EXPECT_THAT(plain, HasSubstr("above 4 times the median head"));
  EXPECT_THAT(plain, Not(HasSubstr("built in")));
  EXPECT_THAT(plain, Not(HasSubstr("{")));
  const std::string changed = Explain("thresholds: {drift: {grown_factor: 6}}", "drift.growth");
  EXPECT_THAT(changed, HasSubstr("above 6 (built in: 4) times"));
  EXPECT_THAT(Explain("off: [drift]", "drift.leak"), HasSubstr("drift.leak (off)"));
  EXPECT_THAT(Explain("", "drifting"), HasSubstr("no rule \"drifting\"; there are drift, drift.growth"));
}

TEST(RulesTextTest, EveryThresholdThatARuleReadsIsSaid) {
  for (const Threshold& row : Thresholds()) {
    if (std::string(row.help).find("no rule asks for it") != std::string::npos) continue;
    JudgeOptions options;
    const double value = row.Get(options);
    row.Set(value < row.high ? value + 1 : value - 1, &options);
    const auto text = ExplainRules(options, "");
    ASSERT_TRUE(text.ok());
    EXPECT_THAT(*text, HasSubstr("(built in: " + NumberText(value) + ")"))
        << row.path() << ": rules explain does not say it";
  }
}

TEST(RulesTextTest, OwnRulesAreSentences) {
  const std::string yaml = R"(
rules:
- {name: gone, signal: entropy_ratio, detector: level, below: 0.05, stage: 4, severity: warning, hold_batches: 5, advice: look}
- {name: far, signal: grad_norm, detector: impulse, stage: 5, severity: info, scale: log, batch_steps: 1, hold_batches: 1}
- {name: off_course, signal: drift_ratio, detector: cusum, stage: 1, severity: critical, benjamini_hochberg: 0.01}
- {name: up, signal: logit_max, scope: layer, detector: growth, above: 50, stage: 4, severity: warning, eta_level: 1000}
- {name: odd, signal: wq_sigma, detector: peers, factor: 0.25, stage: 3, severity: warning}
- {name: kl, signal: kl, detector: level, above: 1, stage: 5, severity: warning}
- {name: z, signal: router_z, detector: level, above: 9, scope: row, rows: 'router_z[3,*', stage: 5, severity: warning}
)";
  EXPECT_EQ(Explain(yaml, "gone"),
            "gone\n  A head's entropy_ratio is below 0.05, for 5 batches of 20 steps: a warning, stage 4. It resolves "
            "after 1000 "
            "steps without evidence and then stays quiet for 500.\n  Other than by default: below 0.05, hold_batches 5 "
            "(default: "
            "3).\n  Cause: unknown.\n  Advice: look\n");
  EXPECT_THAT(Explain(yaml, "far"),
              HasSubstr("The run's grad_norm is 6 standard deviations (of its logarithm) above the mean of "
                        "the 64 batches before it, for 1 batch of 1 step: information, stage 5."));
  EXPECT_THAT(Explain(yaml, "off_course"), HasSubstr("by sums of 12 standard deviations beyond 1 a batch"));
  EXPECT_THAT(Explain(yaml, "off_course"), HasSubstr("at most 0.01 is expected to be chance"));
  EXPECT_THAT(Explain(yaml, "off_course"), HasSubstr("Not while keys are centred"));
  EXPECT_THAT(Explain(yaml, "up"), HasSubstr("The max over the heads of a layer of logit_max is above 50 and grows"));
  EXPECT_THAT(Explain(yaml, "kl"),
              HasSubstr("The max over the cells of the run of the job's own signal kl is above 1"));
  EXPECT_THAT(Explain(yaml, "z"),
              HasSubstr("A cell of the job's own signal router_z (of those named router_z[3,*) is above 9"));
  EXPECT_THAT(Explain(yaml, "odd"), HasSubstr("is below 0.25 times the median head"));
  EXPECT_THAT(Explain(yaml), HasSubstr("all rules\n"));
}

TEST(RulesTextTest, TheCommittedPagesAreTheGeneratedOnes) {
  EXPECT_EQ(Committed("docs/reference/rules.md"), RulesReference())
      << "bellwetherd rules reference > docs/reference/rules.md";
  EXPECT_EQ(Committed("deploy/rules/builtin.yml"), BuiltinRulesFile())
      << "bellwetherd rules defaults > deploy/rules/builtin.yml";
}

TEST(RulesTextTest, BuiltInRulesFileEqualsTheDefaults) {
  const auto rules = ParseRules(BuiltinRulesFile(), "builtin.yml");
  ASSERT_TRUE(rules.ok()) << rules.status();
  for (const Threshold& row : Thresholds())
    EXPECT_EQ(row.Get((*rules)->options), row.Get(JudgeOptions())) << row.path();
}

}  // namespace
}  // namespace bellwether::server
