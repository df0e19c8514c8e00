// Goal: own signals that are not finite, beyond their limits or off their own past are found, with no rules
// file; healthy noise of whatever kind is not.
// Method: made-up series of named signals; the watch alone, and through RunJudge.

#include "server/detect/own_watch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "server/detect/archive.h"
#include "server/detect/rules_file.h"
#include "server/detect/run_judge.h"

namespace bellwether::server {
namespace {

using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;
using testing::SizeIs;

constexpr float kOwnNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kOwnInf = std::numeric_limits<float>::infinity();

// Signals of which each has `cells` cells, of the run if it is one.
std::shared_ptr<RunRows> RowsOf(std::vector<OwnSignal> signals, int32_t cells = 1) {
  auto rows = std::make_shared<RunRows>();
  for (OwnSignal& signal : signals) {
    if (cells > 1) signal.granularity = Granularity::kExpert;
    rows->own_signals.push_back(signal);
  }
  for (size_t i = 0; i < signals.size(); ++i) {
    for (int32_t cell = 0; cell < cells; ++cell) rows->AddOwnCell({static_cast<int32_t>(i), 0, cell});
  }
  return rows;
}

// Of merge rule mean.
StepSample OwnSample(int64_t step, const std::vector<float>& values) {
  StepSample sample;
  Layout layout{.layers = 4, .heads = 4, .kv_heads = 4};
  layout.own = static_cast<int32_t>(values.size());
  sample.Reset(layout);
  sample.step = step;
  std::copy(values.begin(), values.end(), sample.Add(SignalId::kOwnMean).begin());
  return sample;
}

// The watch alone, fed step by step.
struct Watched {
  explicit Watched(std::vector<OwnSignal> signals, int32_t cells = 1) : rows(RowsOf(std::move(signals), cells)) {}
  const std::vector<Finding>& At(const std::vector<float>& values) {
    watch.Observe(OwnSample(step++, values), rows.get(), {.quiet_steps = 100});
    return *watch.findings();
  }
  std::shared_ptr<RunRows> rows;
  OwnWatch watch{OwnOptions()};
  int64_t step = 0;
};

TEST(OwnWatchTest, NanAfterFiniteValuesIsFound) {
  Watched run({{.name = "kl"}, {.name = "loss/aux"}});
  for (int i = 0; i < 20; ++i) EXPECT_THAT(run.At({0.1f, 2}), IsEmpty());
  const std::vector<Finding> found = run.At({kOwnNan, 2});
  ASSERT_THAT(found, SizeIs(1));
  EXPECT_EQ(found[0].summary, "kl is NaN at step 20, after finite values");
  EXPECT_EQ(found[0].severity, Severity::kWarning);
  EXPECT_STREQ(found[0].facts[0].signal, "kl");
  EXPECT_TRUE(found[0].news);
  EXPECT_FALSE(run.At({kOwnNan, 2}).at(0).news) << "told";
  EXPECT_THAT(run.At({0.1f, 2}), IsEmpty());
  EXPECT_THAT(run.At({0.1f, -kOwnInf}).at(0).summary, HasSubstr("loss/aux is -inf at step 23"));
}

TEST(OwnWatchTest, NanFromTheStartIsNoFault) {
  Watched run({{.name = "eval/score"}});
  for (int i = 0; i < 500; ++i) EXPECT_THAT(run.At({i % 5 == 0 ? 1.0f : kOwnNan}), IsEmpty());
}

TEST(OwnWatchTest, ValuesBeyondDeclaredLimitsAreFound) {
  Watched run({{.name = "clip_share", .low = 0.1, .high = 0.7}});
  EXPECT_THAT(run.At({0.1f}), IsEmpty()) << "the nearest float of a limit is within it";
  EXPECT_THAT(run.At({0.7f}), IsEmpty());
  ASSERT_THAT(run.At({0.75f}), SizeIs(1)) << "at the first value, too";
  EXPECT_EQ(run.At({1.5f}).at(0).summary, "clip_share is 1.5 at step 3, above its high limit of 0.7");
  EXPECT_EQ(run.At({0}).at(0).summary, "clip_share is 0 at step 4, below its low limit of 0.1");
  EXPECT_EQ(run.At({0}).at(0).facts[0].threshold, 0.1);
  EXPECT_EQ(run.At({0}).at(0).first_step, 2);
}

TEST(OwnWatchTest, CellsAreNamedTogetherAndStayBounded) {
  Watched run({{.name = "router_logit", .high = 10}}, 300);
  std::vector<float> values(300, 1);
  values[7] = values[9] = 50;
  EXPECT_EQ(run.At(values).at(0).summary,
            "router_logit[0,7] is 50 at step 0, above its high limit of 10; also wrong: router_logit[0,9]");
  values.assign(300, 60);
  const std::vector<Finding> found = run.At(values);
  EXPECT_THAT(found, SizeIs(kOwnWrongMax));
  EXPECT_THAT(found[0].summary, HasSubstr("router_logit[0,0] is 60"));
  EXPECT_THAT(found[0].summary, HasSubstr(" and 295 more"));
  size_t news = 2;
  for (const Finding& finding : found) news += finding.news ? 1 : 0;
  EXPECT_EQ(news, kNewsMax) << "one alert is not told for each";
}

TEST(OwnWatchTest, NamesOfTheFieldAreKnownHoweverTheyArePrefixed) {
  for (const char* falls :
       {"reward", "train/reward", "critic/rewards/mean", "actor/entropy", "mean_entropy", "rewards/format_reward/mean",
        "train/rewards/length/mean", "objective/rlhf_reward", "objective/scores", "critic/score/mean", "ess",
        "rollout_corr/rollout_is_eff_sample_size", "training/rollout_actor_probs_pearson_corr", "rewards/accuracies",
        "rewards/margins", "mean_token_accuracy", "critic/vf_explained_var"}) {
    EXPECT_EQ(PastOf(falls), PastSide::kFalls) << falls;
  }
  for (const char* rises : {"kl",
                            "objective/kl",
                            "actor/ppo_kl",
                            "approx_kl",
                            "policy/approxkl_avg",
                            "actor/kl_loss",
                            "rollout_corr/k3_kl",
                            "rollout_corr/chi2_token",
                            "rollout_corr/chi2_seq",
                            "chi2",
                            "clip_ratio",
                            "clip_ratio/region_mean",
                            "train/clip_ratio/high_max",
                            "ppo_clip_ratio",
                            "cispo_clip_ratio",
                            "actor/pg_clipfrac",
                            "critic/vf_clipfrac",
                            "policy/clipfrac_avg",
                            "response_length/clip_ratio",
                            "completions/clipped_ratio",
                            "loss/kl",
                            "training/rollout_probs_diff_mean",
                            "sampling/sampling_logp_difference/mean"}) {
    EXPECT_EQ(PastOf(rises), PastSide::kRises) << rises;
  }
  for (const char* late :
       {"router_z", "moe/z_loss", "aux_loss", "moe/load_balancing_loss", "seq_load_balancing_loss"}) {
    EXPECT_EQ(PastOf(late), PastSide::kRisesLate) << late;
  }
  for (const char* none :
       {"reward_std", "kl_coef", "entropy_loss", "tokens_seen", "/mean", "mean_", "clip_share", "rewards/format/std",
        "rewards/chosen", "rewards/rejected", "critic/score/max", "loss/score", "/"}) {
    EXPECT_EQ(PastOf(none), PastSide::kNone) << none;
  }
}

using Series = std::function<double(int64_t step, std::mt19937_64* random)>;

double Normal(std::mt19937_64* random) { return std::normal_distribution<double>()(*random); }

// The first step at which the signal was found off its past, and how severely it was in the end; -1: never.
struct PastOutcome {
  int64_t first = -1;
  Severity worst = Severity::kNone;
};
PastOutcome Follow(const std::string& name, int64_t steps, uint64_t seed, const Series& series) {
  Watched run({{.name = name}});
  std::mt19937_64 random(seed);
  PastOutcome outcome;
  for (int64_t step = 0; step < steps; ++step) {
    for (const Finding& finding : run.At({static_cast<float>(series(step, &random))})) {
      if (outcome.first < 0) outcome.first = step;
      outcome.worst = std::max(outcome.worst, finding.severity);
    }
  }
  return outcome;
}

// A process with a memory of itself, of unit deviation.
Series Wandering(double memory, const std::function<double(int64_t, double)>& shape) {
  return [memory, shape, x = 0.0](int64_t step, std::mt19937_64* random) mutable {
    x = memory * x + std::sqrt(1 - memory * memory) * Normal(random);
    return shape(step, x);
  };
}

TEST(OwnWatchTest, HealthySeriesHaveNoFinding) {
  struct Kind {
    const char* what;
    const char* signal;
    std::function<Series()> make;
  };
  const Kind kinds[] = {
      {"white noise", "reward", [] { return Wandering(0, [](int64_t, double x) { return 0.5 + 0.1 * x; }); }},
      {"around zero", "reward", [] { return Wandering(0, [](int64_t, double x) { return x; }); }},
      {"memory of 50", "reward", [] { return Wandering(0.98, [](int64_t, double x) { return 0.3 * x; }); }},
      {"memory of 200", "reward", [] { return Wandering(0.995, [](int64_t, double x) { return 1 + 0.3 * x; }); }},
      {"shares of 8", "reward",
       [] { return [](int64_t, std::mt19937_64* r) { return std::binomial_distribution<int>(8, 0.3)(*r) / 8.0; }; }},
      {"rare successes", "reward",
       [] { return [](int64_t, std::mt19937_64* r) { return std::binomial_distribution<int>(64, 0.01)(*r) / 64.0; }; }},
      {"heavy tails", "kl",
       [] {
         return [](int64_t, std::mt19937_64* r) { return 0.1 + 0.02 * std::abs(std::student_t_distribution<>(3)(*r)); };
       }},
      {"by factors", "kl", [] { return Wandering(0.9, [](int64_t, double x) { return 0.05 * std::exp(0.7 * x); }); }},
      {"by factors, slowly", "kl",
       [] { return Wandering(0.99, [](int64_t, double x) { return 0.05 * std::exp(0.5 * x); }); }},
      {"of either sign", "ppo_kl", [] { return Wandering(0.5, [](int64_t, double x) { return 1e-4 + 1e-3 * x; }); }},
      {"growth from zero", "kl",
       [] {
         return Wandering(0.5, [](int64_t s, double x) {
           return 6 * (1 - std::exp(-static_cast<double>(s) / 3000)) * std::exp(0.2 * x);
         });
       }},
      {"decay", "entropy",
       [] {
         return Wandering(
             0.5, [](int64_t s, double x) { return 0.1 + 2.5 * std::exp(-static_cast<double>(s) / 1000) + 0.02 * x; });
       }},
      {"season", "entropy",
       [] {
         return Wandering(
             0, [](int64_t s, double x) { return 1 + 0.4 * std::sin(static_cast<double>(s) / 200) + 0.03 * x; });
       }},
      {"slow season", "entropy",
       [] {
         return Wandering(
             0, [](int64_t s, double x) { return 1 + 0.8 * std::sin(static_cast<double>(s) / 800) + 0.03 * x; });
       }},
      {"clipped tokens of 4096, rarely", "clip_ratio/region_mean",
       [] {
         return [](int64_t, std::mt19937_64* r) { return std::binomial_distribution<int>(4096, 0.001)(*r) / 4096.0; };
       }},
      {"clipped tokens, by factors", "actor/pg_clipfrac",
       [] { return Wandering(0.9, [](int64_t, double x) { return 0.002 * std::exp(0.8 * x); }); }},
      {"chi2, with heavy tails", "rollout_corr/chi2_seq",
       [] {
         return [](int64_t, std::mt19937_64* r) {
           return 0.01 * std::exp(std::abs(std::student_t_distribution<>(4)(*r)));
         };
       }},
      {"samples that count", "rollout_corr/rollout_is_eff_sample_size",
       [] { return Wandering(0.9, [](int64_t, double x) { return 1 / (1 + 0.02 * std::exp(0.7 * x)); }); }},
      {"answers that become longer", "response_length/clip_ratio",
       [] {
         return Wandering(0.5, [](int64_t s, double x) {
           return 0.3 * (1 - std::exp(-static_cast<double>(s) / 2000)) * std::exp(0.2 * x);
         });
       }},
      {"balance of experts", "aux_loss",
       [] {
         return Wandering(
             0.9, [](int64_t s, double x) { return 1 + 0.5 * std::exp(-static_cast<double>(s) / 500) + 0.01 * x; });
       }},
      {"spikes", "router_z",
       [] { return Wandering(0, [](int64_t s, double x) { return s % 97 == 0 ? 400 : 10 + x; }); }},
      {"memory of 100, around zero", "reward", [] { return Wandering(0.99, [](int64_t, double x) { return x; }); }},
      {"by factors, with memory of 200", "entropy",
       [] { return Wandering(0.995, [](int64_t, double x) { return 1.5 * std::exp(0.5 * x); }); }},
      {"around zero, with memory of 200", "reward",
       [] { return Wandering(0.995, [](int64_t, double x) { return x; }); }},
      {"constant", "kl", [] { return Wandering(0, [](int64_t, double) { return 0.0; }); }},
  };
  for (const Kind& kind : kinds) {
    int found = 0;
    for (uint64_t seed = 0; seed < 20; ++seed) {
      found += Follow(kind.signal, 10000, seed, kind.make()).first >= 0 ? 1 : 0;
    }
    EXPECT_EQ(found, 0) << kind.what;
  }
}

TEST(OwnWatchTest, LeavingThePastIsFoundSoon) {
  struct Fault {
    const char* what;
    const char* signal;
    Series series;
  };
  const auto at = [](int64_t step, double length) {
    return std::clamp(static_cast<double>(step - 2000) / length, 0.0, 1.0);
  };
  const Fault faults[] = {
      {"the reward collapses", "reward",
       Wandering(0.5, [&](int64_t s, double x) { return 0.8 - 0.7 * at(s, 20) + 0.03 * x; })},
      {"the entropy collapses", "entropy",
       Wandering(0.9, [&](int64_t s, double x) { return 2 - 1.9 * at(s, 30) + 0.05 * x; })},
      {"the policy leaves its reference", "kl",
       Wandering(0.5, [&](int64_t s, double x) { return 0.05 * std::exp(4 * at(s, 20) + 0.2 * x); })},
      {"the router's logits explode", "router_z",
       Wandering(0.5, [&](int64_t s, double x) { return 10 * std::exp(3 * at(s, 10) + 0.05 * x); })},
      {"few samples have all the weight", "rollout_corr/rollout_is_eff_sample_size",
       Wandering(0.5, [&](int64_t s, double x) { return 0.9 - 0.8 * at(s, 20) + 0.01 * x; })},
      {"most tokens are clipped", "clip_ratio/region_mean",
       Wandering(0.5, [&](int64_t s, double x) { return 0.01 * std::exp(4 * at(s, 20) + 0.2 * x); })},
      {"the router sends all to one expert", "aux_loss",
       Wandering(0.5, [&](int64_t s, double x) { return 1 + 7 * at(s, 20) + 0.02 * x; })},
      {"a constant reward falls", "reward", [](int64_t s, std::mt19937_64*) { return s < 2000 ? 1.0 : 0.0; }},
  };
  for (const Fault& fault : faults) {
    for (uint64_t seed = 0; seed < 5; ++seed) {
      const PastOutcome outcome = Follow(fault.signal, 2300, seed, fault.series);
      EXPECT_GE(outcome.first, 2000) << fault.what;
      EXPECT_LE(outcome.first, 2050) << fault.what;
      EXPECT_EQ(outcome.worst, Severity::kWarning) << fault.what << ": it stays";
    }
  }
}

TEST(OwnWatchTest, OnlyTheBadSideIsFound) {
  EXPECT_LT(Follow("reward", 2300, 1, [](int64_t s, auto*) { return s < 2000 ? 1.0 : 9.0; }).first, 0);
  EXPECT_LT(Follow("kl", 2300, 1, [](int64_t s, auto*) { return s < 2000 ? 1.0 : 0.1; }).first, 0);
  EXPECT_LT(Follow("tokens_seen", 2300, 1, [](int64_t s, auto*) { return s < 2000 ? 1.0 : 99.0; }).first, 0);
}

TEST(OwnWatchTest, AShortDipIsInformation) {
  const PastOutcome dip =
      Follow("reward", 4000, 1,
             Wandering(0, [](int64_t s, double x) { return (s >= 2000 && s < 2040 ? 0.1 : 0.8) + 0.02 * x; }));
  EXPECT_EQ(dip.worst, Severity::kInfo);
}

TEST(OwnWatchTest, ANewLevelIsTheNewNormal) {
  Watched run({{.name = "reward"}});
  int64_t last = -1;
  for (int64_t step = 0; step < 4000; ++step) {
    if (!run.At({step < 1000 ? 1.0f : 0.2f}).empty()) last = step;
  }
  EXPECT_NEAR(static_cast<double>(last), 1000 + 4 * OwnOptions().relearn_batches, 8);
}

TEST(OwnWatchTest, PastsBeyondTheRoomAreCounted) {
  Watched run({{.name = "reward"}}, static_cast<int32_t>(kOwnPastsMax) + 10);
  run.At(std::vector<float>(kOwnPastsMax + 10, 1));
  EXPECT_EQ(run.watch.cells_left_out(), 10u);
  EXPECT_LT(run.watch.memory_bytes(), kOwnPastsMax * 1024);
}

TEST(OwnWatchTest, PoliciesThatWereTheSameAndAreNotAreApart) {
  Watched run({{.name = "training/rollout_probs_diff_mean"}, {.name = "loss/aux"}});
  for (int i = 0; i < 40; ++i) EXPECT_THAT(run.At({0, 0}), IsEmpty());
  EXPECT_THAT(run.At({1e-6f, 1}), IsEmpty()) << "one value";
  EXPECT_THAT(run.At({0, 1}), IsEmpty());
  for (int i = 0; i < 40; ++i) run.At({0, 1});
  EXPECT_THAT(run.At({1e-6f, 1}), IsEmpty());
  const std::vector<Finding> found = run.At({2e-6f, 1});
  ASSERT_THAT(found, SizeIs(1));
  EXPECT_EQ(found[0].severity, Severity::kWarning);
  EXPECT_EQ(found[0].cause, "rollout apart");
  EXPECT_THAT(found[0].summary,
              HasSubstr("training/rollout_probs_diff_mean was exactly 0 and is 2e-06, since step 82"));
  EXPECT_THAT(run.At({0, 1}), IsEmpty()) << "the same again";
}

TEST(OwnWatchTest, PoliciesThatWereTheSameButForRoundingAreApart) {
  Watched run({{.name = "rollout_corr/k3_kl"}});
  for (int i = 0; i < 40; ++i) EXPECT_THAT(run.At({i % 3 == 0 ? 0 : 3e-14f}), IsEmpty());
  for (int i = 0; i < 10; ++i) EXPECT_THAT(run.At({9e-7f}), IsEmpty()) << "rounding";
  for (int i = 0; i < 40; ++i) EXPECT_THAT(run.At({1e-8f}), IsEmpty());
  EXPECT_THAT(run.At({0.1f}), IsEmpty()) << "one value";
  const std::vector<Finding> found = run.At({0.2f});
  ASSERT_THAT(found, SizeIs(1));
  EXPECT_EQ(found[0].cause, "rollout apart");
  EXPECT_THAT(found[0].summary, HasSubstr("rollout_corr/k3_kl was 0 but for rounding and is 0.2, since step 90"));
}

TEST(OwnWatchTest, PoliciesThatWereNeverTheSameAreNotJudgedSo) {
  Watched run({{.name = "rollout_corr/kl"}});
  for (int i = 0; i < 200; ++i) EXPECT_THAT(run.At({i % 20 == 0 ? 1e-4f : 0}), IsEmpty());
  for (int i = 0; i < 200; ++i) EXPECT_THAT(run.At({1e-4f}), IsEmpty());
}

TEST(OwnWatchTest, APastIsToldBesideALimitThatIsBroken) {
  Watched run({{.name = "kl"}, {.name = "clip_share", .high = 0.7}});
  for (int i = 0; i < 400; ++i) EXPECT_THAT(run.At({i % 3 == 0 ? 0.1f : 0.12f, 0.5f}), IsEmpty());
  EXPECT_TRUE(run.At({0.1f, 1}).at(0).news);
  std::vector<std::string> told;
  for (int i = 0; i < 200; ++i) {
    const Finding found = run.At({5, 1}).at(0);
    if (found.news) told.push_back(found.summary);
  }
  ASSERT_THAT(told, SizeIs(2)) << "as information, and as a warning";
  EXPECT_THAT(told[0], testing::StartsWith("clip_share is 1 at step"));
  EXPECT_THAT(told[0], HasSubstr("; kl has risen to 5, from 0.1"));
  EXPECT_THAT(told[1], HasSubstr("kl has risen to 5, from 0.1"));
}

TEST(OwnWatchTest, AnExcusedSampleTeachesNothing) {
  Watched run({{.name = "reward"}});
  for (int i = 0; i < 1000; ++i) run.At({1});
  for (int i = 0; i < 200; ++i) {
    run.watch.Observe(OwnSample(run.step++, {0}), run.rows.get(), {.excused = true, .quiet_steps = 100});
    EXPECT_THAT(*run.watch.findings(), IsEmpty());
  }
  run.watch.Forget();
  for (int i = 0; i < 2000; ++i) EXPECT_THAT(run.At({0.1f}), IsEmpty()) << "learnt anew";
}

TEST(OwnWatchTest, RoutersMaySettleInTheFirstSteps) {
  Watched run({{.name = "router_z"}});
  for (int i = 0; i < 600; ++i) {
    run.watch.Observe(OwnSample(run.step++, {i < 500 ? 1.0f : 50.0f}), run.rows.get(), {.warming = true});
    EXPECT_THAT(*run.watch.findings(), IsEmpty());
  }
}

// Through the judge, as a server has it.
struct JudgedOwn {
  explicit JudgedOwn(const std::string& yaml = "") : rows(RowsOf({{.name = "kl", .high = 9.0}, {.name = "reward"}})) {
    description.name = "r";
    description.layout = {.layers = 4, .heads = 4, .kv_heads = 4};
    description.layout.own = 2;
    options = (*ParseRules(yaml, "r.yml"))->options;
    Begin();
  }
  void Begin() {
    judge = std::make_unique<RunJudge>(options, description);
    judge->SetRows(rows);
  }
  void To(int64_t last, float kl, float reward) {
    for (; next <= last; ++next) judge->Observe(OwnSample(next, {kl, reward}), &out);
  }
  std::shared_ptr<RunRows> rows;
  RunDescription description;
  JudgeOptions options;
  std::unique_ptr<RunJudge> judge;
  int64_t next = 0;
  std::vector<AlertTransition> out;
};

TEST(OwnJudgeTest, OneAlertTellsOfEachOnceAndEnds) {
  JudgedOwn run;
  run.To(99, 0.1f, 1);
  EXPECT_THAT(run.out, IsEmpty());
  run.To(104, kOwnNan, 1);
  ASSERT_THAT(run.out, SizeIs(1));
  EXPECT_EQ(run.out[0].rule, "own");
  EXPECT_EQ(run.out[0].severity, Severity::kWarning);
  EXPECT_EQ(run.out[0].summary, "r: kl is NaN at step 100, after finite values.");
  EXPECT_EQ(run.out[0].evidence.at(0).signal, "kl");
  EXPECT_THAT(run.out[0].advice, Not(IsEmpty()));
  EXPECT_EQ(run.out[0].stage, 0);
  run.To(200, 0.1f, 1);
  run.To(220, 10, kOwnInf);
  ASSERT_THAT(run.out, SizeIs(2)) << "the same alert, told again";
  EXPECT_EQ(run.out[1].key, run.out[0].key);
  EXPECT_EQ(run.out[1].summary, "r: kl is 10 at step 201, above its high limit of 9; also wrong: reward.");
  run.To(2000, 0.1f, 1);
  ASSERT_THAT(run.out, SizeIs(3));
  EXPECT_EQ(run.out[2].state, AlertState::kResolved);
}

TEST(OwnJudgeTest, InformationBecomesAWarning) {
  JudgedOwn run;
  run.To(1000, 0.1f, 1);
  run.To(1300, 0.1f, 0.1f);
  ASSERT_THAT(run.out, SizeIs(2));
  EXPECT_EQ(run.out[0].severity, Severity::kInfo);
  EXPECT_THAT(run.out[0].summary, HasSubstr("r: reward has fallen to 0.1, from 1 (limit 0.5), since step 1,0"));
  EXPECT_EQ(run.out[1].severity, Severity::kWarning);
}

TEST(OwnJudgeTest, SwitchesTurnItOff) {
  JudgedOwn off("off: [own]");
  off.To(1000, 0.1f, 1);
  off.To(1300, kOwnNan, 0.1f);
  EXPECT_THAT(off.out, IsEmpty());
  JudgedOwn past("off: [own.past]");
  past.To(1000, 0.1f, 1);
  past.To(1300, 0.1f, 0.1f);
  EXPECT_THAT(past.out, IsEmpty());
  past.To(1301, kOwnNan, 0.1f);
  EXPECT_THAT(past.out, SizeIs(1));
}

TEST(OwnJudgeTest, AnnouncedChangesAreExcused) {
  JudgedOwn run;
  run.To(1000, 0.1f, 1);
  run.judge->OnEvent({.step = 1000, .kind = EventKind::kData}, &run.out);
  run.To(2000, 0.1f, 0.1f);
  EXPECT_THAT(run.out, IsEmpty());
}

TEST(OwnJudgeTest, SavedAtAnyStepItGoesOnTheSame) {
  const auto all = [](int64_t saved) {
    JudgedOwn run;
    const auto to = [&](int64_t last, float kl, float reward) {
      if (saved >= run.next && saved <= last) {
        run.To(saved, kl, reward);
        const std::string state = run.judge->Save();
        run.Begin();
        EXPECT_TRUE(run.judge->Restore(state));
        EXPECT_EQ(run.judge->Save(), state);
      }
      run.To(last, kl, reward);
    };
    to(500, 0.1f, 1);
    to(505, kOwnNan, 1);
    to(1000, 0.1f, 1);
    to(1010, 0.1f, 0.1f);
    to(3000, 0.1f, 0.1f);
    std::string told;
    for (const AlertTransition& change : run.out) told += change.key + " " + change.summary + "\n";
    return told;
  };
  const std::string plain = all(-1);
  EXPECT_THAT(plain, HasSubstr("reward has fallen"));
  for (const int64_t saved : {3, 400, 501, 502, 700, 1003, 1011, 1500}) EXPECT_EQ(all(saved), plain) << saved;
}

}  // namespace
}  // namespace bellwether::server
