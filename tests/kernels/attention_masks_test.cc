// Goal: masks, key bounds, sinks and values of their own width, in any combination and
// with all that attention had before, give the outputs, gradients, statistics and
// centring that attention.h states; what is hidden counts for nothing.
// Method: random combinations against float64 without tiles; the probe for statistics.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "bellwether/kernels/attention.h"
#include "tests/kernels/attention_problem.h"

namespace bellwether::kernels {
namespace {

constexpr double kHidden = -std::numeric_limits<double>::infinity();
constexpr AttentionMode kModes[] = {AttentionMode::kFa,    AttentionMode::kHp, AttentionMode::kHpm,
                                    AttentionMode::kPaper, AttentionMode::kSr, AttentionMode::kHpNolt,
                                    AttentionMode::kLt};

// A mask of any type and broadcast, and what it means.
struct TestMask {
  ProbeMask mask;
  std::vector<uint8_t> bytes;
  std::vector<float> floats;
  std::vector<BFloat16> brains;
  std::vector<Float16> halves;

  // Which of [batch][heads][q_len][k_len] it distinguishes is drawn, too.
  TestMask(MaskDType dtype, const AttentionShape& s, std::mt19937& random) {
    const auto flip = [&] { return random() % 2 == 0; };
    mask.dtype = dtype;
    int64_t size = 1;
    const auto stride = [&](int64_t extent, bool own) {
      const int64_t out = own ? size : 0;
      size *= own ? extent : 1;
      return out;
    };
    mask.key_stride = stride(s.k_len, true);
    mask.row_stride = stride(s.q_len, flip());
    mask.head_stride = stride(s.heads, flip());
    mask.batch_stride = stride(s.batch, flip());
    std::normal_distribution<double> normal;
    const double hidden[] = {-1e4, -std::numeric_limits<double>::infinity(), -5e4};
    for (int64_t i = 0; i < size; ++i) {
      const bool hides = random() % 3 == 0;
      const double value = hides ? hidden[random() % 3] : 2 * normal(random);
      bytes.push_back(hides ? 0 : static_cast<uint8_t>(1 + random() % 2));
      floats.push_back(static_cast<float>(value));
      cpu::Assign(brains.emplace_back(), value);
      cpu::Assign(halves.emplace_back(), value);
    }
    mask.data = dtype == MaskDType::kBool      ? static_cast<const void*>(bytes.data())
                : dtype == MaskDType::kFloat32 ? static_cast<const void*>(floats.data())
                : dtype == MaskDType::kFloat16 ? static_cast<const void*>(halves.data())
                                               : static_cast<const void*>(brains.data());
  }

  double operator()(int64_t b, int64_t h, int64_t t, int64_t j) const {
    const auto i =
        static_cast<size_t>(b * mask.batch_stride + h * mask.head_stride + t * mask.row_stride + j * mask.key_stride);
    if (bytes[i] == 0) return kHidden;
    switch (mask.dtype) {
      case MaskDType::kBool:
        return 0;
      case MaskDType::kFloat32:
        return static_cast<double>(floats[i]);
      case MaskDType::kFloat16:
        return static_cast<double>(cpu::ToFloat(halves[i]));
      case MaskDType::kBFloat16:
        break;
    }
    return static_cast<double>(cpu::ToFloat(brains[i]));
  }
};

double Largest(const std::vector<double>& exact) {
  double largest = 0.3;  // Where all is 0, what was cancelled is of the order of 1.
  for (const double x : exact) largest = std::max(largest, std::fabs(x));
  return largest;
}

template <typename T>
void ExpectNear(const char* name, const std::vector<double>& exact, const std::vector<T>& got, double bar,
                double terms = 0) {
  const double scale = std::max(terms, Largest(exact));
  for (size_t i = 0; i < exact.size(); ++i) {
    ASSERT_LE(std::fabs(static_cast<double>(cpu::ToFloat(got[i])) - exact[i]), bar * scale)
        << name << "[" << i << "] is " << static_cast<double>(cpu::ToFloat(got[i])) << ", exactly " << exact[i];
  }
}

template <typename Element>
void CheckRandomCall(uint32_t seed, double bar) {
  SCOPED_TRACE("seed " + std::to_string(seed) + ", bar " + std::to_string(bar));
  std::mt19937 random(seed);
  const auto draw = [&](std::initializer_list<int64_t> values) { return values.begin()[random() % values.size()]; };
  AttentionShape s;
  s.batch = draw({1, 2});
  s.kv_heads = draw({1, 2});
  s.heads = s.kv_heads * draw({1, 3});
  s.q_len = draw({1, 7, 40, 70});
  s.k_len = draw({1, 30, 65, 200});
  s.head_dim = draw({8, 24, 40});
  s.v_dim = draw({0, 8, 20, 64});
  AttentionProblem<Element> problem(s, kModes[random() % std::size(kModes)]);
  problem.FillRandom(seed);
  AttentionForwardParams& p = problem.params.forward;
  p.scale = static_cast<float>(1 / std::sqrt(static_cast<double>(p.head_dim)));
  p.causal = random() % 2 == 0;
  p.window = static_cast<int32_t>(draw({0, 0, 9}));
  p.softcap = static_cast<float>(draw({0, 0, 3}));
  std::vector<int32_t> bounds;
  if (random() % 2 == 0) {
    for (int64_t b = 0; b < s.batch; ++b) {
      bounds.push_back(static_cast<int32_t>(random() % static_cast<uint32_t>(s.k_len)) - 1);
      bounds.push_back(static_cast<int32_t>(random() % static_cast<uint32_t>(s.k_len + 2)));
    }
    p.key_bounds = bounds.data();
  }
  const TestMask mask(static_cast<MaskDType>(random() % 4), s, random);
  Bias bias;
  if (random() % 4 != 0) {
    p.mask = mask.mask;
    bias = std::cref(mask);
  }
  if (random() % 2 == 0) {
    std::normal_distribution<float> normal;
    std::vector<float> logits(static_cast<size_t>(s.heads));
    for (float& x : logits) x = normal(random);
    if (random() % 4 == 0) logits[0] = -std::numeric_limits<float>::infinity();
    problem.WantSinks(logits);
  }
  ASSERT_EQ(problem.Forward(2), Status::kOk) << LastErrorMessage();
  ASSERT_EQ(problem.Backward(2), Status::kOk) << LastErrorMessage();
  const ExactAttention exact(problem, false, bias);
  ExpectNear("o", exact.o, problem.o, bar);
  ExpectNear("dq", exact.dq, problem.dq, bar);
  ExpectNear("dk", exact.dk, problem.dk, bar);
  ExpectNear("dv", exact.dv, problem.dv, bar);
  ExpectNear("d_sinks", exact.d_sinks, problem.d_sinks, bar, exact.d_sink_terms);
  for (size_t i = 0; i < exact.lse.size(); ++i) {
    if (std::isfinite(exact.lse[i])) {
      ASSERT_NEAR(problem.lse[i], exact.lse[i], 1e-5) << i;
    } else {
      ASSERT_EQ(problem.lse[i], -std::numeric_limits<float>::infinity()) << i;
    }
  }
}

TEST(AttentionMasksTest, RandomCombinationsEqualFloat64) {
  for (uint32_t seed = 1; seed <= 150; ++seed) {
    CheckRandomCall<float>(seed, 3e-6);
    CheckRandomCall<BFloat16>(seed + 1000, 0x1p-5);
    CheckRandomCall<Float16>(seed + 2000, 0x1p-8);
    if (HasFatalFailure()) return;
  }
}

// A mask that shows what a plain form shows gives its bits.
TEST(AttentionMasksTest, AMaskInTheShapeOfCausalityChangesNoBit) {
  const AttentionShape s{.batch = 2, .heads = 4, .kv_heads = 2, .q_len = 50, .k_len = 90, .head_dim = 16};
  std::vector<uint8_t> bytes;
  for (int64_t t = 0; t < s.q_len; ++t) {
    for (int64_t j = 0; j < s.k_len; ++j) bytes.push_back(j <= t + 40);
  }
  for (const AttentionMode mode : kModes) {
    AttentionProblem<BFloat16> plain(s, mode), masked(s, mode);
    for (auto* problem : {&plain, &masked}) {
      problem->FillRandom(5);
      problem->WantStats();
      AttentionForwardParams& p = problem->params.forward;
      if (problem == &plain) {
        p.causal = true;
      } else {
        p.mask = {.data = bytes.data(), .row_stride = s.k_len, .key_stride = 1};
      }
      problem->params.center = true;
      ASSERT_EQ(problem->Forward(), Status::kOk);
      ASSERT_EQ(problem->Backward(), Status::kOk);
    }
    const auto same = [](const std::vector<BFloat16>& a, const std::vector<BFloat16>& b) {
      return std::equal(a.begin(), a.end(), b.begin(), [](BFloat16 x, BFloat16 y) { return x.bits == y.bits; });
    };
    EXPECT_TRUE(same(plain.o, masked.o)) << static_cast<int>(mode);
    EXPECT_TRUE(same(plain.dq, masked.dq));
    EXPECT_TRUE(same(plain.dk, masked.dk));
    EXPECT_TRUE(same(plain.dv, masked.dv));
    EXPECT_EQ(plain.lse, masked.lse);
    EXPECT_EQ(plain.stats, masked.stats);
  }
}

TEST(AttentionMasksTest, PaddingOfAnyContentChangesNothing) {
  const AttentionShape s{.batch = 2, .heads = 2, .kv_heads = 1, .q_len = 40, .k_len = 40, .head_dim = 16, .v_dim = 24};
  const int32_t bounds[] = {0, 33, 5, 40};
  std::vector<AttentionProblem<float>> problems;
  problems.reserve(2);
  for (const float filler : {0.0f, std::numeric_limits<float>::quiet_NaN()}) {
    AttentionProblem<float>& problem = problems.emplace_back(s, AttentionMode::kHp);
    problem.FillRandom(3);
    problem.params.forward.causal = true;
    problem.params.forward.key_bounds = bounds;
    problem.params.center = true;
    for (int64_t b = 0; b < 2; ++b) {
      for (int64_t j = 0; j < 40; ++j) {
        if (j >= bounds[2 * b] && j < bounds[2 * b + 1]) continue;
        std::fill_n(problem.k.begin() + (b * 40 + j) * 16, 16, filler);
        std::fill_n(problem.v.begin() + (b * 40 + j) * 24, 24, filler);
      }
    }
    ASSERT_EQ(problem.Forward(), Status::kOk);
    ASSERT_EQ(problem.Backward(), Status::kOk);
  }
  EXPECT_EQ(problems[0].o, problems[1].o);
  EXPECT_EQ(problems[0].dq, problems[1].dq);
  EXPECT_EQ(problems[0].dk, problems[1].dk);
  EXPECT_EQ(problems[0].dv, problems[1].dv);
  for (size_t c = 0; c < 24; ++c) EXPECT_EQ(problems[0].o[(40 * 2 + 4) * 24 + c], 0);  // It sees padding alone.
  for (size_t j = 33; j < 40; ++j) EXPECT_EQ(problems[0].dk[j * 16], 0);
}

TEST(AttentionMasksTest, CenteringIsOverTheKeysThatAreSeen) {
  const AttentionShape s{.q_len = 64, .k_len = 64};
  std::vector<uint8_t> bytes(64, 1);
  std::fill(bytes.begin() + 48, bytes.end(), 0);
  const int32_t bounds[] = {0, 48};
  for (const bool by_mask : {false, true}) {
    const auto run = [&](bool center) {
      AttentionProblem<float> problem(s);
      problem.FillRandom(2);
      for (size_t j = 0; j < 64; ++j) problem.k[j * 16] += j < 48 ? 50 : -5000;  // A common mode; padding.
      AttentionForwardParams& p = problem.params.forward;
      if (by_mask) p.mask = {.data = bytes.data(), .key_stride = 1};
      if (!by_mask) p.key_bounds = bounds;
      EXPECT_EQ(problem.Forward(), Status::kOk);
      for (float& x : problem.o) x += 0.01f;
      problem.params.center = center;
      EXPECT_EQ(problem.Backward(), Status::kOk);
      const ExactAttention exact(problem, false,
                                 [](int64_t, int64_t, int64_t, int64_t j) { return j < 48 ? 0 : kHidden; });
      double error = 0, leak = 0;
      for (size_t i = 0; i < exact.dq.size(); ++i) {
        error = std::max(error, std::fabs(static_cast<double>(problem.dq[i]) - exact.dq[i]));
      }
      for (size_t j = 0; j < 64; ++j) leak += static_cast<double>(problem.dk[j * 16 + 1]);
      for (size_t i = 48 * 16; i < 64 * 16; ++i) EXPECT_EQ(problem.dk[i], 0);
      return std::pair(error, std::fabs(leak));
    };
    const auto raw = run(false), centred = run(true);
    EXPECT_LT(centred.first, 0.1 * raw.first) << by_mask;
    EXPECT_LT(centred.second, 1e-4 * raw.second) << by_mask;
  }
}

TEST(AttentionMasksTest, TelemetryIsTheProbesUnderAMaskAndSinks) {
  const AttentionShape s{.batch = 2, .heads = 4, .kv_heads = 2, .q_len = 96, .k_len = 96, .head_dim = 16, .v_dim = 24};
  std::mt19937 random(7);
  for (int round = 0; round < 6; ++round) {
    SCOPED_TRACE(round);
    AttentionProblem<BFloat16> problem(s, AttentionMode::kFa);
    problem.FillRandom(4);
    const TestMask mask(static_cast<MaskDType>(round % 4), s, random);
    AttentionForwardParams& p = problem.params.forward;
    p.mask = mask.mask;
    p.causal = round % 2 == 0;
    p.softcap = round == 3 ? 4 : 0;
    if (round > 1) problem.WantSinks({0, 1, 2, -std::numeric_limits<float>::infinity()});
    problem.WantStats();
    ASSERT_EQ(problem.Forward(), Status::kOk);
    ASSERT_EQ(problem.Backward(), Status::kOk);
    std::vector<float> probed(static_cast<size_t>(kProbeStatCount) * 4, 0);
    for (size_t h = 0; h < 4; ++h) probed[kProbeLogitMax * 4 + h] = -std::numeric_limits<float>::infinity();
    const std::vector<uint8_t> visible(96, 1);
    ProbeParams probe = problem.Probed(probed.data());
    probe.visible = {.data = visible.data(), .key_stride = 1};
    ASSERT_EQ(Probe(probe, {}), Status::kOk) << LastErrorMessage();
    for (size_t stat = 0; stat < kProbeStatCount; ++stat) {
      if (stat == kProbeCommonModeSum || stat == kProbeSpreadSum) continue;  // Not of attention.
      for (size_t h = 0; h < 4; ++h) {
        const double ours = static_cast<double>(problem.stats[stat * 4 + h]);
        const double theirs = static_cast<double>(probed[stat * 4 + h]);
        // P here comes from an lse of 24 bits, delta from an o of 8.
        EXPECT_NEAR(ours, theirs, (stat < kProbeDeltaBiasSum ? 2e-6 : 2e-4) * (1 + std::fabs(theirs))) << stat;
      }
    }
  }
}

// |mean error of delta| over all rows, and the usual size of dP.
std::pair<double, double> DeltaBias(AttentionMode mode) {
  const AttentionShape s{.heads = 32, .kv_heads = 32, .q_len = 16, .k_len = 512, .head_dim = 64, .v_dim = 48};
  AttentionProblem<BFloat16> problem(s, mode);
  problem.FillScores([](int64_t j) { return j == 3 ? 0.0 : j % 2 == 0 ? 9.0 : -13.0; }, 21);
  std::mt19937 random(22);
  std::uniform_real_distribution<double> positive(0.5, 1.5);
  for (BFloat16& x : problem.d_o) cpu::Assign(x, positive(random));
  std::vector<uint8_t> bytes(512, 1);
  for (size_t j = 0; j < 512; ++j) bytes[j] = j % 2 == 1;  // The large scores are hidden.
  problem.params.forward.mask = {.data = bytes.data(), .key_stride = 1};
  problem.WantSinks(std::vector<float>(32, -8.0f));
  problem.WantStats();
  EXPECT_EQ(problem.Forward(), Status::kOk);
  EXPECT_EQ(problem.Backward(), Status::kOk);
  const ExactAttention exact(problem, false, [&](int64_t, int64_t, int64_t, int64_t j) {
    return bytes[static_cast<size_t>(j)] ? 0 : kHidden;
  });
  double bias = 0, usual = 0;
  for (size_t h = 0; h < 32; ++h) bias += static_cast<double>(problem.stats[kProbeDeltaBiasSum * 32 + h]);
  for (const double x : exact.dp_scale) usual += x;
  return {std::fabs(bias) / (32 * 16), usual / (32 * 16)};
}

TEST(AttentionMasksTest, FaIsBiasedUnderAMaskAndHpIsNot) {
  const auto [fa, dp] = DeltaBias(AttentionMode::kFa);
  EXPECT_GT(fa, 1e-4 * dp);
  EXPECT_LE(DeltaBias(AttentionMode::kHp).first, 1e-6 * dp);
  EXPECT_LE(DeltaBias(AttentionMode::kHpm).first, 1e-6 * dp);
}

TEST(AttentionMasksTest, ABadMaskIsRefusedWithItsField) {
  const auto refused = [](const std::string& words, const std::function<void(AttentionBackwardParams*)>& spoil) {
    AttentionProblem<BFloat16> problem({1, 2, 2, 8, 8, 16});
    spoil(&problem.params);
    Status got = AttentionForward(problem.params.forward, {});
    if (got == Status::kOk) got = AttentionBackward(problem.params, {});
    EXPECT_NE(got, Status::kOk) << words;
    EXPECT_NE(std::string(LastErrorMessage()).find(words), std::string::npos) << LastErrorMessage();
  };
  using Params = AttentionBackwardParams*;
  alignas(8) static const uint8_t bytes[128] = {};
  static const int32_t cu[] = {0, 8}, bounds[] = {0, 8};
  static const float sinks[2] = {};
  static float d_sinks[2];
  refused("mask_dtype is 9", [](Params p) { p->forward.mask = {.data = bytes, .dtype = static_cast<MaskDType>(9)}; });
  refused("mask is 0x", [](Params p) { p->forward.mask = {.data = bytes + 1, .dtype = MaskDType::kFloat32}; });
  for (const bool mask : {false, true}) {
    refused(mask ? "mask is given, but must be NULL" : "key_bounds is given, but must be NULL", [&](Params p) {
      p->forward.cu_seqlens_q = p->forward.cu_seqlens_k = cu;
      p->forward.sequences = 1;
      if (mask) p->forward.mask = {.data = bytes};
      if (!mask) p->forward.key_bounds = bounds;
    });
  }
  refused("v_dim is 1025", [](Params p) { p->forward.v_dim = 1025; });
  refused("v_dim is -1", [](Params p) { p->forward.v_dim = -1; });
  refused("sinks are given, but must be NULL with center", [](Params p) {
    p->forward.sinks = sinks;
    p->center = true;
  });
  refused("sinks (with d_sinks) is NULL", [](Params p) { p->d_sinks = d_sinks; });
}

}  // namespace
}  // namespace bellwether::kernels
