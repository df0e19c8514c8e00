// Goal: the CPU attention is its specification: every mode right on scores that
// break softmax kernels, the same whatever the tiling, packing and threads; its
// features; the telemetry; and fa's delta is biased where hp's is not.
// Method: constructed scores and random inputs against float64 without tiles.

#include "bellwether/kernels/attention.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "backends.h"
#include "cpu/attention_rounding.h"
#include "tests/kernels/attention_problem.h"

namespace bellwether::kernels {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr AttentionMode kAllModes[] = {AttentionMode::kFa,    AttentionMode::kHp, AttentionMode::kHpm,
                                       AttentionMode::kPaper, AttentionMode::kSr, AttentionMode::kHpNolt,
                                       AttentionMode::kLt};

// Rounding changes a number by at most this share of it.
template <typename Element>
constexpr double kRoundoff = std::is_same_v<Element, BFloat16> ? 0x1p-8 : 0x1p-11;

// Relative to the largest value of a row.
template <typename Element>
double ErrorOfO(const AttentionProblem<Element>& problem, const ExactAttention& exact) {
  double error = 0;
  for (size_t i = 0; i < exact.o.size(); ++i) {
    EXPECT_TRUE(std::isfinite(problem.O(i)));
    error = std::max(error, std::fabs(problem.O(i) - exact.o[i]) / std::fabs(exact.o[i]));
  }
  return error;
}

double Relative(const std::vector<double>& exact, const std::function<double(size_t)>& value) {
  double error = 0, scale = 0;
  for (size_t i = 0; i < exact.size(); ++i) {
    error = std::max(error, std::fabs(value(i) - exact[i]));
    scale = std::max(scale, std::fabs(exact[i]));
    if (!std::isfinite(value(i))) return kInfinity;
  }
  return error / scale;
}

template <typename Element>
double Relative(const std::vector<double>& exact, const std::vector<Element>& got) {
  return Relative(exact, [&](size_t i) { return static_cast<double>(cpu::ToFloat(got[i])); });
}

// Scores with the rest well below, as the names say.
struct Vector {
  const char* name;
  std::function<double(int64_t)> score;
};

double Rest(double maximum, int64_t j) { return maximum - 6 - 0.01 * static_cast<double>(j); }

std::vector<Vector> Vectors() {
  std::vector<Vector> vectors;
  for (const double rm : {3.0, 0.0, 1e-4, -4.0, -120.0, 15.0, 30.0, 95.0, 300.0}) {
    vectors.push_back({"a tie in one tile", [rm](int64_t j) { return j == 10 || j == 20 ? rm : Rest(rm, j); }});
    vectors.push_back({"a tie across tiles", [rm](int64_t j) { return j == 10 || j == 200 ? rm : Rest(rm, j); }});
  }
  for (const double gap : {9e-4, 1.9e-3}) {
    vectors.push_back({"a near tie", [gap](int64_t j) { return j == 10 ? 3.0 : j == 20 ? 3.0 - gap : Rest(3, j); }});
  }
  vectors.push_back({"a tie, then a larger one", [](int64_t j) {
                       return j == 5 || j == 6 ? 3.0 : j == 150 ? 5.0 : Rest(3, j);
                     }});
  vectors.push_back({"one, then a larger tie", [](int64_t j) {
                       return j == 5 ? 3.0 : j == 150 || j == 151 ? 5.0 : Rest(3, j);
                     }});
  vectors.push_back({"all equal", [](int64_t) { return 1.25; }});
  vectors.push_back({"minus fifty", [](int64_t j) { return j == 0 ? -50.0 : -80.0; }});
  return vectors;
}

template <typename Element>
class AttentionVectorTest : public testing::Test {};
using HalfTypes = testing::Types<BFloat16, Float16>;
TYPED_TEST_SUITE(AttentionVectorTest, HalfTypes);

TYPED_TEST(AttentionVectorTest, EveryModeIsRightWhereMaximaRepeat) {
  for (const Vector& vector : Vectors()) {
    for (const AttentionMode mode : kAllModes) {
      for (const float beta : {2.0f, 8.0f}) {
        AttentionProblem<TypeParam> problem({}, mode);
        problem.FillScores(vector.score);
        problem.params.forward.paper_beta = beta;
        ASSERT_EQ(cpu::AttentionForward(problem.params.forward, 1, 64), Status::kOk);
        const ExactAttention exact(problem);
        SCOPED_TRACE(std::string(vector.name) + ", mode " + std::to_string(static_cast<int>(mode)));
        const bool precise = mode == AttentionMode::kHp || mode == AttentionMode::kHpm;
        // P is rounded and O is (sr: to either side); hp divides by what P was
        // rounded to and keeps what O loses.
        const double roundings = precise ? 0.25 : mode == AttentionMode::kSr ? 3 : 2;
        EXPECT_LE(ErrorOfO(problem, exact), roundings * kRoundoff<TypeParam>);
        EXPECT_LE(std::fabs(static_cast<double>(problem.lse[0]) - exact.lse[0]),
                  1e-5 * std::max(1.0, std::fabs(exact.lse[0])));
      }
    }
  }
}

TEST(AttentionTest, ThePaperShiftsRowsWithATieAndNoOthers) {
  const auto same = [](const std::function<double(int64_t)>& score, float eps) {
    // Many values: few of the outputs round differently.
    const AttentionShape shape{.heads = 16, .kv_heads = 16};
    AttentionProblem<BFloat16> fa(shape, AttentionMode::kFa), paper(shape, AttentionMode::kPaper);
    fa.FillScores(score);
    paper.FillScores(score);
    paper.params.forward.paper_eps = eps;
    EXPECT_EQ(cpu::AttentionForward(fa.params.forward, 1, 64), Status::kOk);
    EXPECT_EQ(cpu::AttentionForward(paper.params.forward, 1, 64), Status::kOk);
    for (size_t i = 0; i < fa.o.size(); ++i) {
      if (fa.o[i].bits != paper.o[i].bits) return false;
    }
    return true;
  };
  const auto with_gap = [](double gap) {
    // Many lesser keys, so that shifting P changes how it rounds.
    return [gap](int64_t j) { return j == 10 ? 3.0 : j == 70 ? 3.0 - gap : 1.5 - 0.003 * static_cast<double>(j); };
  };
  EXPECT_TRUE(same(with_gap(1), 1e-3f));
  EXPECT_FALSE(same(with_gap(0), 1e-3f));
  EXPECT_FALSE(same(with_gap(9e-4), 1e-3f));
  EXPECT_TRUE(same(with_gap(1.9e-3), 1e-3f));
  EXPECT_FALSE(same(with_gap(1.9e-3), 1.955e-3f));
  // A larger one in the same tile: the tie is none.
  EXPECT_TRUE(same([](int64_t j) { return j == 5 || j == 6 ? 3.0 : j == 50 ? 5.0 : -1.0; }, 1e-3f));
}

TEST(AttentionTest, RowsWithoutKeysAreZero) {
  for (const AttentionMode mode : kAllModes) {
    AttentionProblem<BFloat16> problem({.heads = 2, .q_len = 20, .k_len = 8}, mode);
    problem.FillRandom(3);
    problem.params.forward.causal = true;  // The first 12 rows see nothing.
    ASSERT_EQ(problem.Forward(), Status::kOk);
    ASSERT_EQ(problem.Backward(), Status::kOk);
    for (size_t t = 0; t < 12; ++t) {
      EXPECT_EQ(problem.lse[t], -std::numeric_limits<float>::infinity());
      for (size_t c = 0; c < 16; ++c) {
        EXPECT_EQ(problem.O(t * 16 + c), 0);
        EXPECT_EQ(cpu::ToFloat(problem.dq[t * 16 + c]), 0);
      }
    }
    EXPECT_TRUE(std::isfinite(problem.lse[12]));
    for (const BFloat16 x : problem.dk) EXPECT_TRUE(std::isfinite(cpu::ToFloat(x)));
  }
}

TEST(AttentionTest, TilesAndTheOrderOfKeysHardlyMatter) {
  const AttentionShape shape{.q_len = 40, .k_len = 500};
  for (const AttentionMode mode : kAllModes) {
    AttentionProblem<BFloat16> problem(shape, mode);
    problem.FillRandom(5);
    ASSERT_EQ(cpu::AttentionForward(problem.params.forward, 1, 128), Status::kOk);
    const ExactAttention exact(problem);
    const auto compare = [&](const AttentionProblem<BFloat16>& other) {
      // P is rounded against the running anchor; an integer one rounds it alike.
      const bool anchored = mode == AttentionMode::kHp || mode == AttentionMode::kHpm;
      double error = 0;
      for (size_t i = 0; i < problem.o.size(); ++i) {
        error = std::max(error, std::fabs(problem.O(i) - other.O(i)));
      }
      EXPECT_LE(error, anchored ? 2e-5 : 0x1p-6) << static_cast<int>(mode);
    };
    for (const int64_t tile : {8, 64, 176}) {
      AttentionProblem<BFloat16> other(shape, mode);
      other.FillRandom(5);
      ASSERT_EQ(cpu::AttentionForward(other.params.forward, 1, tile), Status::kOk);
      compare(other);
    }
    AttentionProblem<BFloat16> reversed(shape, mode);
    reversed.FillRandom(5);
    for (auto* x : {&reversed.k, &reversed.v}) {
      for (size_t j = 0; j < 250; ++j) {
        std::swap_ranges(x->begin() + static_cast<ptrdiff_t>(j * 16), x->begin() + static_cast<ptrdiff_t>(j * 16 + 16),
                         x->begin() + static_cast<ptrdiff_t>((499 - j) * 16));
      }
    }
    ASSERT_EQ(reversed.Forward(), Status::kOk);
    compare(reversed);
  }
}

struct Feature {
  const char* name;
  AttentionShape shape;
  bool causal;
  int32_t window;
  float softcap;
};

const Feature kFeatures[] = {
    {"full", {2, 2, 2, 37, 37, 24}, false, 0, 0},
    {"causal, fewer rows than keys", {1, 2, 2, 33, 70, 64}, true, 0, 0},
    {"GQA", {2, 6, 2, 40, 40, 16}, true, 0, 0},
    {"window", {1, 2, 1, 150, 150, 16}, true, 20, 0},
    {"window without causal", {1, 1, 1, 50, 300, 16}, false, 9, 0},
    {"softcap", {1, 2, 2, 50, 60, 16}, true, 0, 3},
    {"one row, one key", {1, 1, 1, 1, 1, 1}, true, 0, 0},
    {"odd head dim", {1, 2, 1, 20, 20, 100}, true, 0, 0},
};

template <typename Element>
AttentionProblem<Element> Prepared(const Feature& feature, AttentionMode mode) {
  AttentionProblem<Element> problem(feature.shape, mode);
  problem.FillRandom(11);
  AttentionForwardParams& p = problem.params.forward;
  p.scale = static_cast<float>(1 / std::sqrt(static_cast<double>(p.head_dim)));
  p.causal = feature.causal;
  p.window = feature.window;
  p.softcap = feature.softcap;
  return problem;
}

template <typename Element>
void CheckAgainstExact(const Feature& feature, AttentionMode mode, double bar) {
  SCOPED_TRACE(std::string(feature.name) + ", mode " + std::to_string(static_cast<int>(mode)));
  AttentionProblem<Element> problem = Prepared<Element>(feature, mode);
  ASSERT_EQ(problem.Forward(), Status::kOk);
  ASSERT_EQ(problem.Backward(), Status::kOk);
  const ExactAttention exact(problem);
  EXPECT_LE(Relative(exact.o, [&](size_t i) { return problem.O(i); }), bar);
  if (feature.shape.k_len == 1) return;  // dQ and dK are 0 there.
  EXPECT_LE(Relative(exact.dq, problem.dq), bar);
  EXPECT_LE(Relative(exact.dk, problem.dk), bar);
  EXPECT_LE(Relative(exact.dv, problem.dv), bar);
}

TEST(AttentionTest, EveryFeatureIsRightInEveryMode) {
  for (const Feature& feature : kFeatures) {
    for (const AttentionMode mode : kAllModes) {
      CheckAgainstExact<float>(feature, mode, 1e-6);
      CheckAgainstExact<BFloat16>(feature, mode, 0x1p-6);
      CheckAgainstExact<Float16>(feature, mode, 0x1p-9);
    }
  }
}

TEST(AttentionTest, CenteredBackwardEqualsGradientThroughCenteredKeys) {
  for (const Feature& feature : kFeatures) {
    if (feature.softcap > 0 || feature.shape.k_len == 1) continue;
    SCOPED_TRACE(feature.name);
    AttentionProblem<float> problem = Prepared<float>(feature, AttentionMode::kHp);
    problem.params.center = true;
    ASSERT_EQ(problem.Forward(), Status::kOk);
    ASSERT_EQ(problem.Backward(), Status::kOk);
    // Exactly, dS has rows of sum 0: neither gradient changes.
    const ExactAttention exact(problem, true);
    EXPECT_LE(Relative(exact.dq, problem.dq), 1e-6);
    EXPECT_LE(Relative(exact.dk, problem.dk), 1e-6);
  }
}

// A wrong delta makes the rows of dS sum to something; then centring matters.
TEST(AttentionTest, CenteringTakesTheCommonModeOutOfBothGradients) {
  const AttentionShape shape{.q_len = 64, .k_len = 64};
  const auto run = [&](bool center) {
    AttentionProblem<float> problem(shape);
    problem.FillRandom(2);
    for (size_t j = 0; j < 64; ++j) problem.k[j * 16] += 50;  // A common mode.
    EXPECT_EQ(problem.Forward(), Status::kOk);
    for (float& x : problem.o) x += 0.01f;
    problem.params.center = center;
    EXPECT_EQ(problem.Backward(), Status::kOk);
    const ExactAttention exact(problem);
    double leak = 0;
    for (size_t t = 0; t < 64; ++t) leak += static_cast<double>(problem.dk[t * 16 + 1]);
    return std::pair(Relative(exact.dq, problem.dq), std::fabs(leak));
  };
  const auto raw = run(false), centred = run(true);
  EXPECT_LT(centred.first, 0.1 * raw.first);
  EXPECT_LT(centred.second, 1e-4 * raw.second);
}

TEST(AttentionTest, PackedSequencesAndThreadsChangeNoBit) {
  const int32_t q_ends[] = {0, 0, 17, 18, 60}, k_ends[] = {0, 5, 25, 25, 90};
  const AttentionShape shape{.heads = 4, .kv_heads = 2, .q_len = 60, .k_len = 90};
  for (const AttentionMode mode : {AttentionMode::kHp, AttentionMode::kHpm, AttentionMode::kPaper}) {
    AttentionProblem<BFloat16> packed(shape, mode);
    packed.FillRandom(9);
    packed.params.forward.causal = true;
    packed.params.center = true;
    packed.params.forward.cu_seqlens_q = q_ends;
    packed.params.forward.cu_seqlens_k = k_ends;
    packed.params.forward.sequences = 4;
    packed.WantStats();
    ASSERT_EQ(packed.Forward(3), Status::kOk);
    ASSERT_EQ(packed.Backward(3), Status::kOk);
    AttentionProblem<BFloat16> one(shape, mode);
    one.FillRandom(9);
    one.WantStats();
    for (int s = 0; s < 4; ++s) {  // Views into the same arrays.
      AttentionBackwardParams p = one.params;
      p.forward.causal = true;
      p.center = true;
      p.forward.q_len = q_ends[s + 1] - q_ends[s];
      p.forward.k_len = k_ends[s + 1] - k_ends[s];
      const auto shift = [](Tensor4* t, int64_t token) {
        if (t->data != nullptr) t->data = static_cast<const char*>(t->data) + token * 16 * 2;
      };
      for (Tensor4* t : {&p.forward.q, &p.forward.o, &p.forward.o_lo, &p.d_o, &p.dq}) {
        shift(t, q_ends[s]);
      }
      for (Tensor4* t : {&p.forward.k, &p.forward.v, &p.dk, &p.dv}) shift(t, k_ends[s]);
      for (float** x : {&p.forward.lse, &p.forward.anchor, &p.forward.rounded_sum}) {
        if (*x != nullptr) *x += q_ends[s];
      }
      if (p.forward.k_len == 0) continue;
      ASSERT_EQ(AttentionForward(p.forward, {}), Status::kOk);
      ASSERT_EQ(AttentionBackward(p, {}), Status::kOk);
    }
    const auto equal = [](const auto& a, const auto& b) {
      return std::equal(a.begin(), a.end(), b.begin(), [](auto x, auto y) { return x.bits == y.bits; });
    };
    EXPECT_TRUE(equal(packed.dk, one.dk));
    EXPECT_TRUE(equal(packed.dv, one.dv));
    for (size_t h = 0; h < 4; ++h) {
      for (size_t t = 0; t < 60; ++t) {
        if (t == 17) continue;  // The sequence without keys.
        for (size_t c = 0; c < 16; ++c) {
          const size_t i = (h * 60 + t) * 16 + c;
          ASSERT_EQ(packed.o[i].bits, one.o[i].bits);
          ASSERT_EQ(packed.dq[i].bits, one.dq[i].bits);
        }
      }
    }
    for (size_t i = 0; i < packed.stats.size(); ++i) {
      EXPECT_NEAR(packed.stats[i], one.stats[i], 1e-6 * (1 + std::fabs(packed.stats[i])));
    }
  }
}

TEST(AttentionTest, TelemetryIsTheProbes) {
  AttentionProblem<BFloat16> problem({2, 4, 2, 96, 96, 16}, AttentionMode::kHpm);
  problem.FillRandom(4);
  for (BFloat16& x : problem.q) cpu::Assign(x, 4 * static_cast<double>(cpu::ToFloat(x)));
  AttentionForwardParams& p = problem.params.forward;
  p.causal = true;
  problem.WantStats();
  ASSERT_EQ(problem.Forward(), Status::kOk);
  ASSERT_EQ(problem.Backward(), Status::kOk);
  std::vector<float> probed(static_cast<size_t>(kProbeStatCount) * 4, 0);
  ASSERT_EQ(Probe(problem.Probed(probed.data()), {}), Status::kOk);
  for (size_t stat = 0; stat < kProbeStatCount; ++stat) {
    for (size_t h = 0; h < 4; ++h) {
      const float ours = problem.stats[stat * 4 + h], theirs = probed[stat * 4 + h];
      SCOPED_TRACE(stat);
      if (stat == kProbeCommonModeSum || stat == kProbeSpreadSum) {
        EXPECT_EQ(ours, 0);
      } else if (stat == kProbeDeltaAbsSum) {
        EXPECT_NEAR(ours, theirs, 1e-3 * theirs);  // Of P as hpm rounds it.
      } else if (stat < kProbeDeltaBiasSum) {
        EXPECT_FLOAT_EQ(ours, theirs);
      } else if (stat == kProbeDeltaErrorAbsSum) {
        EXPECT_LT(ours, 0.1 * theirs);  // What hpm is for.
      }
    }
  }
  EXPECT_GT(problem.stats[kProbeTiedRowsBf16 * 4], 0);
}

TEST(AttentionTest, EveryHeadHasSampledRows) {
  for (const int64_t batch : {1, 3, 16}) {
    for (const int64_t q_len : {1, 384, 385, 1024, 4096}) {
      for (const bool packed : {false, true}) {
        for (uint64_t seed = 0; seed < 8; ++seed) {
          static const int32_t starts[1] = {0};
          AttentionForwardParams p;
          p.batch = packed ? 1 : batch;
          p.q_len = packed ? batch * q_len : q_len;
          p.sequences = packed ? batch : 0;
          p.cu_seqlens_q = packed ? starts : nullptr;
          p.seed = seed;
          const StatsRows rows = StatsRowsOf(p);
          int64_t counted = 0;
          for (int64_t s = 0; s < batch; ++s) {
            for (int64_t row = 0; row < q_len; ++row) counted += rows.Count(s, row);
          }
          EXPECT_GT(counted, 0) << batch << " x " << q_len << (packed ? " packed" : "");
          EXPECT_LE(rows.every, int64_t{kStatsEveryDefault});
          const int64_t blocks = batch * ((q_len + kStatsBlockRows - 1) / kStatsBlockRows);
          EXPECT_LE(counted * rows.every, (blocks + rows.every) * kStatsBlockRows);
          p.stats_every = 1;
          EXPECT_TRUE(StatsRowsOf(p).Count(batch - 1, q_len - 1));
        }
      }
    }
  }
}

// Seeds whose phases differ, so that every row counts for one of them.
TEST(AttentionTest, PartsOfTheRowsAddUpToAll) {
  constexpr uint32_t kEvery = 3;
  AttentionProblem<BFloat16> problem({2, 2, 1, 900, 40, 16}, AttentionMode::kHp);
  problem.FillRandom(6);
  AttentionForwardParams& p = problem.params.forward;
  const auto run = [&](uint32_t every) {
    problem.WantStats(every);
    EXPECT_EQ(problem.Forward(), Status::kOk);
    EXPECT_EQ(problem.Backward(), Status::kOk);
    return problem.stats;
  };
  const std::vector<float> all = run(1);
  std::vector<float> sum(all.size(), 0);
  std::vector<bool> had(kEvery, false);
  for (p.seed = 0; p.seed < 64; ++p.seed) {
    p.stats_every = kEvery;
    const StatsRows rows = StatsRowsOf(p);
    ASSERT_EQ(rows.every, int64_t{kEvery});
    ASSERT_EQ(rows.stride, 1);
    if (had[static_cast<size_t>(rows.phase)]) continue;
    had[static_cast<size_t>(rows.phase)] = true;
    const std::vector<float> part = run(kEvery);
    for (size_t i = 0; i < part.size(); ++i) sum[i] += part[i];
    for (size_t h = 0; h < 2; ++h) {
      EXPECT_GT(part[kProbeRows * 2 + h], 0);
      EXPECT_LT(part[kProbeRows * 2 + h], 1800);
      EXPECT_EQ(part[kProbeLogitMax * 2 + h], all[kProbeLogitMax * 2 + h]);  // Of all rows.
    }
  }
  EXPECT_EQ(std::count(had.begin(), had.end(), true), kEvery);
  for (size_t i = 0; i < all.size(); ++i) {
    if (i / 2 == kProbeLogitMax) continue;
    EXPECT_NEAR(sum[i], all[i], 1e-5 * (1 + std::fabs(all[i]))) << i;
  }
}

using Fill = std::function<void(AttentionProblem<BFloat16>*)>;
constexpr AttentionShape kBiasShape{1, 32, 32, 16, 512, 64};

// |mean error of delta| over all rows.
double MeanError(AttentionMode mode, const Fill& fill) {
  AttentionProblem<BFloat16> problem(kBiasShape, mode);
  fill(&problem);
  problem.WantStats();
  EXPECT_EQ(problem.Forward(), Status::kOk);
  EXPECT_EQ(problem.Backward(), Status::kOk);
  double sum = 0;
  for (size_t h = 0; h < 32; ++h) {
    sum += static_cast<double>(problem.stats[kProbeDeltaBiasSum * 32 + h]);
  }
  return std::fabs(sum) / (32 * 16);
}

// The usual size of dP, which the bias is judged beside.
double UsualDp(const Fill& fill) {
  AttentionProblem<BFloat16> problem(kBiasShape);
  fill(&problem);
  const ExactAttention exact(problem);
  double sum = 0;
  for (const double x : exact.dp_scale) sum += x;
  return sum / (32 * 16);
}

// dO and V of one sign: all errors of a row push the same way.
void FillSameSign(AttentionProblem<BFloat16>* p, const std::function<double(int64_t)>& score) {
  p->FillScores(score, 21);
  std::mt19937 random(22);
  std::uniform_real_distribution<double> positive(0.5, 1.5);
  for (BFloat16& x : p->d_o) cpu::Assign(x, positive(random));
}

TEST(AttentionTest, FaIsBiasedAndHpIsNot) {
  const std::pair<const char*, std::function<double(int64_t)>> cases[] = {
      {"two ties", [](int64_t j) { return j == 3 || j == 400 ? 0.0 : -13.0; }},
      {"sink", [](int64_t j) { return j == 0 ? 0.0 : -11.0; }},
      {"broad", [](int64_t j) { return 1e-3 * std::sin(static_cast<double>(j)); }},
  };
  for (const auto& [name, score] : cases) {
    const Fill fill = [&score = score](AttentionProblem<BFloat16>* p) { FillSameSign(p, score); };
    SCOPED_TRACE(name);
    const double dp = UsualDp(fill);
    const double fa = MeanError(AttentionMode::kFa, fill);
    EXPECT_GT(fa, 1e-4 * dp);
    EXPECT_LE(MeanError(AttentionMode::kHp, fill), 1e-6 * dp);
    EXPECT_LE(MeanError(AttentionMode::kHpm, fill), 1e-6 * dp);
    EXPECT_LE(MeanError(AttentionMode::kSr, fill), 0.1 * fa);
  }
}

TEST(AttentionTest, HpmIsUnbiasedEvenWhereRoundedKeysCarryOtherValues) {
  const Fill fill = [](AttentionProblem<BFloat16>* p) {
    FillSameSign(p, [](int64_t j) { return j % 2 == 0 ? 0.0 : -1.5e-3; });
    for (size_t i = 0; i < p->v.size(); ++i) {
      if (i / 64 % 2 == 1) cpu::Assign(p->v[i], static_cast<double>(cpu::ToFloat(p->v[i])) / 2);
    }
  };
  const double dp = UsualDp(fill);
  EXPECT_GT(MeanError(AttentionMode::kFa, fill), 1e-4 * dp);
  EXPECT_LE(MeanError(AttentionMode::kHpm, fill), 1e-6 * dp);
}

TEST(AttentionTest, StochasticRoundingIsUnbiasedAndRepeats) {
  for (const double x : {1.0 + 0x1p-10, -3.003, 1e-6, 2000.7}) {
    double sum16 = 0, sum_bf = 0;
    constexpr int kDraws = 20000;
    for (int i = 0; i < kDraws; ++i) {
      Float16 half;
      BFloat16 brain;
      cpu::AssignStochastically(half, x, cpu::RoundingBits(7, 0, 1, i, 3));
      cpu::AssignStochastically(brain, x, cpu::RoundingBits(7, 0, 1, i, 3));
      EXPECT_LE(std::fabs(static_cast<double>(cpu::ToFloat(brain)) - x), std::fabs(x) * 0x1p-7);
      sum16 += static_cast<double>(cpu::ToFloat(half));
      sum_bf += static_cast<double>(cpu::ToFloat(brain));
    }
    EXPECT_NEAR(sum_bf / kDraws, x, std::fabs(x) * 1e-4);
    EXPECT_NEAR(sum16 / kDraws, x, std::max(std::fabs(x) * 1e-4, 0x1p-24 * 0.02));
  }
  EXPECT_EQ(cpu::RoundingBits(1, 2, 3, 4, 5), cpu::RoundingBits(1, 2, 3, 4, 5));
  EXPECT_NE(cpu::RoundingBits(1, 2, 3, 4, 5), cpu::RoundingBits(2, 2, 3, 4, 5));
}

TEST(AttentionTest, RoundingIsToNearestEven) {
  // The paper's worked example.
  EXPECT_EQ(cpu::Rounded<BFloat16>(-2.40711545 + -2.296875), -4.71875);
  std::mt19937_64 random(1);
  for (int i = 0; i < 200000; ++i) {
    const double x =
        std::ldexp(static_cast<double>(static_cast<int64_t>(random())), static_cast<int>(random() % 320) - 210);
    BFloat16 brain;
    Float16 half;
    cpu::Assign(brain, x);
    cpu::Assign(half, x);
    ASSERT_EQ(cpu::Rounded<BFloat16>(x), static_cast<double>(cpu::ToFloat(brain))) << x;
    ASSERT_EQ(cpu::Rounded<Float16>(x), static_cast<double>(cpu::ToFloat(half))) << x;
  }
}

TEST(AttentionTest, ANanStaysInItsSequenceAndHead) {
  AttentionProblem<BFloat16> problem({2, 2, 2, 20, 20, 16});
  problem.FillRandom(6);
  cpu::Assign(problem.k[5 * 16], std::numeric_limits<double>::quiet_NaN());
  ASSERT_EQ(problem.Forward(), Status::kOk);
  ASSERT_EQ(problem.Backward(), Status::kOk);
  EXPECT_TRUE(std::isnan(problem.O(0)));
  EXPECT_TRUE(std::isnan(problem.lse[0]));
  for (size_t i = 20 * 16; i < problem.o.size(); ++i) {
    ASSERT_TRUE(std::isfinite(problem.O(i)));
    ASSERT_TRUE(std::isfinite(cpu::ToFloat(problem.dk[i])));
  }
}

TEST(AttentionTest, NanQueryGivesANanRow) {
  for (const AttentionMode mode : kAllModes) {
    AttentionProblem<BFloat16> problem({.q_len = 3, .k_len = 200}, mode);
    problem.FillRandom(6);
    cpu::Assign(problem.q[16], std::numeric_limits<double>::quiet_NaN());
    ASSERT_EQ(problem.Forward(), Status::kOk);
    EXPECT_TRUE(std::isnan(problem.O(16)));
    EXPECT_TRUE(std::isnan(problem.lse[1]));
    EXPECT_TRUE(std::isfinite(problem.O(0)) && std::isfinite(problem.O(32)));
  }
}

TEST(AttentionTest, BadParamsAreRefusedWithTheFieldAndItsRange) {
  const auto refused = [](Status status, const std::string& words,
                          const std::function<void(AttentionBackwardParams*)>& spoil) {
    AttentionProblem<BFloat16> problem({2, 4, 2, 8, 8, 16});
    spoil(&problem.params);
    Status got = AttentionForward(problem.params.forward, {});
    if (got == Status::kOk) got = AttentionBackward(problem.params, {});
    EXPECT_EQ(got, status) << words;
    EXPECT_NE(std::string(LastErrorMessage()).find(words), std::string::npos) << LastErrorMessage();
  };
  using Params = AttentionBackwardParams*;
  const Status bad = Status::kInvalidArgument;
  refused(bad, "kv_heads is 3", [](Params p) { p->forward.kv_heads = 3; });
  refused(bad, "scale is 0", [](Params p) { p->forward.scale = 0; });
  refused(bad, "softcap is -1", [](Params p) { p->forward.softcap = -1; });
  refused(bad, "window is -1", [](Params p) { p->forward.window = -1; });
  refused(bad, "mode is 7", [](Params p) { p->forward.mode = static_cast<AttentionMode>(7); });
  refused(bad, "o_lo is given", [](Params p) { p->forward.mode = AttentionMode::kFa; });
  refused(bad, "anchor is NULL", [](Params p) { p->forward.mode = AttentionMode::kHpm; });
  refused(bad, "paper_beta is 1", [](Params p) {
    p->forward.mode = AttentionMode::kPaper;
    p->forward.o_lo = {};
    p->forward.paper_beta = 1;
  });
  refused(bad, "lse is NULL", [](Params p) { p->forward.lse = nullptr; });
  refused(bad, "sequences is 1", [](Params p) { p->forward.sequences = 1; });
  refused(bad, "stat_stride is 0", [](Params p) {
    static float stats[kProbeStatCount * 4];
    p->forward.stats = stats;
  });
  refused(bad, "stats_every is 0", [](Params p) {
    static float stats[kProbeStatCount * 4];
    p->forward.stats = stats;
    p->forward.stat_stride = 4;
    p->forward.stats_every = 0;
  });
  refused(bad, "softcap is 5, but must be 0 with center", [](Params p) {
    p->forward.softcap = 5;
    p->center = true;
  });
  refused(bad, "cu_seqlens_k[1] is 9", [](Params p) {
    static const int32_t q[] = {0, 8}, k[] = {0, 9};
    p->forward.batch = 1;
    p->forward.sequences = 1;
    p->forward.cu_seqlens_q = q;
    p->forward.cu_seqlens_k = k;
  });
  refused(Status::kUnsupported, "head_dim is 1025", [](Params p) { p->forward.head_dim = 1025; });
}

}  // namespace
}  // namespace bellwether::kernels
