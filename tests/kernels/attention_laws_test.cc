// Goal: the laws of attention and the shadow check are what attention_laws.h says, whatever the
// layout, the type, the threads and the mask; bad arguments are named.
// Method: small calls with gradients in double, rounded to the type; the sums once more by plain
// loops over all pairs of a row and a key.

#include "bellwether/kernels/attention_laws.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "bellwether/kernels/c_api.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/kernels/naive_probe.h"

namespace bellwether::kernels {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;
using testing::Operand;

struct LawsSize {
  int64_t batch = 2, heads = 4, kv_heads = 2, q_len = 13, k_len = 13, head_dim = 5, v_dim = 7;
  DType dtype = DType::kBFloat16;
  bool causal = true;
};

// A call whose gradients are right up to the rounding of the type.
struct LawsCall {
  explicit LawsCall(const LawsSize& s)
      : size(s),
        q(s.dtype, s.batch, s.heads, s.q_len, s.head_dim),
        k(s.dtype, s.batch, s.kv_heads, s.k_len, s.head_dim),
        v(s.dtype, s.batch, s.kv_heads, s.k_len, s.v_dim),
        o(s.dtype, s.batch, s.heads, s.q_len, s.v_dim),
        d_o(s.dtype, s.batch, s.heads, s.q_len, s.v_dim),
        d_q(s.dtype, s.batch, s.heads, s.q_len, s.head_dim),
        d_k(s.dtype, s.batch, s.kv_heads, s.k_len, s.head_dim),
        d_v(s.dtype, s.batch, s.kv_heads, s.k_len, s.v_dim) {
    std::mt19937 rng(5);
    for (Operand* each : {&q, &k, &v, &d_o}) each->FillNormal(rng);
    Grade();
    params.of.call.dtype = s.dtype;
    params.of.call.batch = s.batch;
    params.of.call.heads = s.heads;
    params.of.call.kv_heads = s.kv_heads;
    params.of.call.q_len = s.q_len;
    params.of.call.k_len = s.k_len;
    params.of.call.head_dim = s.head_dim;
    params.of.call.v_dim = s.v_dim;
    params.of.call.q = q.View();
    params.of.call.k = k.View();
    params.of.call.v = v.View();
    params.of.call.o = o.View();
    params.of.call.d_o = d_o.View();
    params.of.call.scale = kScale;
    params.of.call.causal = s.causal;
    params.of.d_q = d_q.View();
    params.of.d_k = d_k.View();
    params.of.d_v = d_v.View();
    out.assign(static_cast<size_t>(kLawHeadStatCount * s.heads), 0.0f);
    kv_out.assign(static_cast<size_t>(kLawKvStatCount * s.kv_heads), 0.0f);
    params.to = {s.heads, out.data(), s.kv_heads, kv_out.data()};
  }

  // P of a row.
  std::vector<double> Weights(int64_t b, int64_t h, int64_t t) const {
    const int64_t g = h / (size.heads / size.kv_heads);
    std::vector<double> p(static_cast<size_t>(size.k_len));
    double total = 0;
    for (int64_t j = 0; j < size.k_len; ++j) {
      if (size.causal && j > t + size.k_len - size.q_len) continue;
      double s = 0;
      for (int64_t c = 0; c < size.head_dim; ++c) s += q.Get(b, h, t, c) * k.Get(b, g, j, c);
      p[static_cast<size_t>(j)] = std::exp(static_cast<double>(kScale) * s);
      total += p[static_cast<size_t>(j)];
    }
    for (double& x : p) x /= total > 0 ? total : 1;  // A row that sees nothing has no weights.
    return p;
  }

  void Grade() {
    const int64_t group = size.heads / size.kv_heads;
    for (int64_t b = 0; b < size.batch; ++b) {
      for (int64_t g = 0; g < size.kv_heads; ++g) {
        std::vector<double> dk(static_cast<size_t>(size.k_len * size.head_dim));
        std::vector<double> dv(static_cast<size_t>(size.k_len * size.v_dim));
        for (int64_t h = g * group; h < (g + 1) * group; ++h) {
          for (int64_t t = 0; t < size.q_len; ++t) GradeRow(b, g, h, t, dk, dv);
        }
        for (int64_t j = 0; j < size.k_len; ++j) {
          for (int64_t c = 0; c < size.head_dim; ++c) {
            d_k.Set(b, g, j, c, dk[static_cast<size_t>(j * size.head_dim + c)]);
          }
          for (int64_t c = 0; c < size.v_dim; ++c) d_v.Set(b, g, j, c, dv[static_cast<size_t>(j * size.v_dim + c)]);
        }
      }
    }
  }

  void GradeRow(int64_t b, int64_t g, int64_t h, int64_t t, std::vector<double>& dk, std::vector<double>& dv) {
    const std::vector<double> p = Weights(b, h, t);
    std::vector<double> dp(p.size());
    double delta = 0;
    for (int64_t j = 0; j < size.k_len; ++j) {
      for (int64_t c = 0; c < size.v_dim; ++c) dp[static_cast<size_t>(j)] += d_o.Get(b, h, t, c) * v.Get(b, g, j, c);
      delta += p[static_cast<size_t>(j)] * dp[static_cast<size_t>(j)];
    }
    for (int64_t c = 0; c < size.v_dim; ++c) {
      double sum = 0;
      for (int64_t j = 0; j < size.k_len; ++j) {
        sum += p[static_cast<size_t>(j)] * v.Get(b, g, j, c);
        dv[static_cast<size_t>(j * size.v_dim + c)] += p[static_cast<size_t>(j)] * d_o.Get(b, h, t, c);
      }
      o.Set(b, h, t, c, sum);
    }
    for (int64_t c = 0; c < size.head_dim; ++c) {
      double sum = 0;
      for (int64_t j = 0; j < size.k_len; ++j) {
        const double ds =
            static_cast<double>(kScale) * p[static_cast<size_t>(j)] * (dp[static_cast<size_t>(j)] - delta);
        sum += ds * k.Get(b, g, j, c);
        dk[static_cast<size_t>(j * size.head_dim + c)] += ds * q.Get(b, h, t, c);
      }
      d_q.Set(b, h, t, c, sum);
    }
  }

  float Kv(int stat, int64_t head) const { return kv_out[static_cast<size_t>(stat * size.kv_heads + head)]; }
  float Head(int stat, int64_t head) const { return out[static_cast<size_t>(stat * size.heads + head)]; }

  static constexpr float kScale = 0.4f;
  LawsSize size;
  Operand q, k, v, o, d_o, d_q, d_k, d_v;
  std::vector<float> out, kv_out;
  AttentionLawsParams params;
};

double Product(const Operand& a, const Operand& b, int64_t head, bool absolute) {
  double sum = 0;
  for (int64_t batch = 0; batch < a.batch; ++batch) {
    for (int64_t t = 0; t < a.tokens; ++t) {
      for (int64_t c = 0; c < a.channels; ++c) {
        const double x = a.Get(batch, head, t, c) * b.Get(batch, head, t, c);
        sum += absolute ? std::fabs(x) : x;
      }
    }
  }
  return sum;
}

double Projected(const Operand& x, int64_t head, int projection) {
  double sum = 0;
  for (int64_t batch = 0; batch < x.batch; ++batch) {
    for (int64_t t = 0; t < x.tokens; ++t) {
      for (int64_t c = 0; c < x.channels; ++c) {
        const bool plus = ProbeMix(static_cast<uint64_t>(projection * x.channels + c)) & 1;
        sum += plus ? x.Get(batch, head, t, c) : -x.Get(batch, head, t, c);
      }
    }
  }
  return sum;
}

TEST(AttentionLawsTest, DifferencesAreThoseOfPlainLoops) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    LawsSize size;
    size.dtype = dtype;
    LawsCall call(size);
    ASSERT_EQ(AttentionLaws(call.params, {}), Status::kOk) << LastErrorMessage();
    for (int64_t g = 0; g < 2; ++g) {
      double a3 = -Product(call.k, call.d_k, g, false), a4 = -Product(call.v, call.d_v, g, false);
      double terms3 = Product(call.k, call.d_k, g, true), terms4 = Product(call.v, call.d_v, g, true);
      for (int64_t h = 2 * g; h < 2 * g + 2; ++h) {
        a3 += Product(call.q, call.d_q, h, false);
        a4 += Product(call.o, call.d_o, h, false);
        terms3 += Product(call.q, call.d_q, h, true);
        terms4 += Product(call.o, call.d_o, h, true);
      }
      EXPECT_NEAR(call.Kv(kLawA3, g), a3, 1e-6 * terms3);
      EXPECT_NEAR(call.Kv(kLawA4, g), a4, 1e-6 * terms4);
      for (int i = 0; i < kLawProjections; ++i) {
        double a2 = Projected(call.d_v, g, i);
        for (int64_t h = 2 * g; h < 2 * g + 2; ++h) a2 -= Projected(call.d_o, h, i);
        EXPECT_NEAR(call.Kv(kLawA1 + i, g), Projected(call.d_k, g, i), 1e-5);
        EXPECT_NEAR(call.Kv(kLawA2 + i, g), a2, 1e-5);
      }
    }
  }
}

TEST(AttentionLawsTest, RoundedGradientsAreWithinTheirVariance) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    for (const uint32_t rows : {0u, 8u}) {
      LawsSize size;
      size.q_len = size.k_len = 41;
      size.dtype = dtype;
      LawsCall call(size);
      call.params.of.call.rows_per_head = rows;
      ASSERT_EQ(AttentionLaws(call.params, {}), Status::kOk);
      for (int64_t g = 0; g < 2; ++g) {
        for (int law = 0; law < 4; ++law) {
          const bool projected = law < 2;
          const float deviation = std::sqrt(call.Kv(kLawA1Variance + law, g));
          const float alike = call.Kv(kLawA1Alike + law, g);
          EXPECT_GT(deviation, 0);
          EXPECT_GE(alike, 0);
          for (int i = 0; i < (projected ? kLawProjections : 1); ++i) {
            const float difference = call.Kv(projected ? law * kLawProjections + i : kLawA3 + law - 2, g);
            EXPECT_LT(std::fabs(difference) - alike, 5 * deviation) << "law " << law << " of head " << g;
          }
        }
      }
    }
  }
}

TEST(AttentionLawsTest, AFactorInOneHeadBreaksItsLaw) {
  LawsSize size;
  size.q_len = size.k_len = 64;
  LawsCall call(size);
  for (int64_t t = 0; t < size.q_len; ++t) {
    for (int64_t c = 0; c < size.head_dim; ++c) call.d_q.Set(0, 3, t, c, 1.5 * call.d_q.Get(0, 3, t, c));
  }
  call.params.of.call.rows_per_head = 16;
  ASSERT_EQ(AttentionLaws(call.params, {}), Status::kOk);
  EXPECT_GT(std::fabs(call.Kv(kLawA3, 1)), 10 * std::sqrt(call.Kv(kLawA3Variance, 1)));
  EXPECT_LT(std::fabs(call.Kv(kLawA3, 0)), 5 * std::sqrt(call.Kv(kLawA3Variance, 0)));
}

TEST(AttentionLawsTest, NonfiniteElementsAreCountedAndHideNothing) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    LawsSize size;
    size.dtype = dtype;
    LawsCall call(size);
    call.d_k.Set(1, 1, 3, 2, std::numeric_limits<double>::infinity());
    call.d_o.Set(0, 0, 12, 0, std::nan(""));
    ASSERT_EQ(AttentionLaws(call.params, {}), Status::kOk);
    EXPECT_EQ(call.Kv(kLawDkNonfinite, 0), 0);
    EXPECT_EQ(call.Kv(kLawDkNonfinite, 1), 1);
    EXPECT_TRUE(std::isnan(call.Kv(kLawDkSum, 1)));
    EXPECT_TRUE(std::isfinite(call.Kv(kLawDkSum, 0)));
    EXPECT_EQ(call.Head(kLawDoNonfinite, 0), 1);
    EXPECT_EQ(call.Head(kLawDoNonfinite, 1), 0);
    EXPECT_EQ(call.Head(kLawDqNonfinite, 0), 0);
    if (dtype == DType::kFloat32) {
      EXPECT_EQ(call.Kv(kLawA3, 1), 0) << "float32 has no laws";
      continue;
    }
    EXPECT_FALSE(std::isfinite(call.Kv(kLawA3, 1)));
    EXPECT_TRUE(std::isfinite(call.Kv(kLawA3, 0)));
    EXPECT_TRUE(std::isnan(call.Kv(kLawA2, 0)));
    EXPECT_TRUE(std::isnan(call.Kv(kLawA4, 0)));
  }
}

TEST(AttentionLawsTest, ResultsDoNotDependOnThreadsAndAreAdded) {
  LawsSize size;
  size.batch = 5;
  size.q_len = size.k_len = 70;
  size.head_dim = size.v_dim = 33;
  LawsCall one(size), many(size);
  ASSERT_EQ(AttentionLaws(one.params, {Backend::kCpu, nullptr, 1}), Status::kOk);
  ASSERT_EQ(AttentionLaws(many.params, {Backend::kCpu, nullptr, 3}), Status::kOk);
  EXPECT_EQ(one.kv_out, many.kv_out);
  EXPECT_EQ(one.out, many.out);
  ASSERT_EQ(AttentionLaws(many.params, {}), Status::kOk);
  EXPECT_FLOAT_EQ(many.Kv(kLawDkSumsq, 1), 2 * one.Kv(kLawDkSumsq, 1));
  EXPECT_FLOAT_EQ(many.Kv(kLawA2Variance, 0), 2 * one.Kv(kLawA2Variance, 0));
}

TEST(AttentionLawsTest, AShutGateMeasuresNothing) {
  LawsCall call({});
  uint64_t gate[kGateWords] = {0, 7};
  call.params.of.call.gate = gate;
  ASSERT_EQ(AttentionLaws(call.params, {}), Status::kOk);
  EXPECT_THAT(call.kv_out, Each(0));
  gate[kGateOpen] = 1;
  ASSERT_EQ(AttentionLaws(call.params, {}), Status::kOk);
  EXPECT_GT(call.Kv(kLawDkAbsSum, 0), 0);
}

TEST(AttentionLawsTest, RowsWithoutKeysHaveNoWeight) {
  for (const bool is_nan : {false, true}) {
    LawsSize size;
    size.k_len = 9;  // The first four of 13 rows see nothing.
    LawsCall call(size);
    for (int64_t b = 0; b < size.batch; ++b) {
      for (int64_t h = 0; h < size.heads; ++h) {
        for (int64_t t = 0; t < 4; ++t) {
          for (int64_t c = 0; c < size.v_dim; ++c) {
            call.d_o.Set(b, h, t, c, 100);
            call.o.Set(b, h, t, c, is_nan ? std::nan("") : 0.0);
          }
          for (int64_t c = 0; c < size.head_dim; ++c) call.d_q.Set(b, h, t, c, is_nan ? std::nan("") : 0.0);
        }
      }
    }
    ASSERT_EQ(AttentionLaws(call.params, {}), Status::kOk);
    EXPECT_EQ(call.Head(kLawRowsLeftOut, 2), is_nan ? 8 : 0);
    EXPECT_EQ(call.Head(kLawDqNonfinite, 2), is_nan ? 8 * size.head_dim : 0);
    for (int64_t g = 0; g < size.kv_heads; ++g) {
      EXPECT_LT(std::fabs(call.Kv(kLawA2, g)), 1);
      EXPECT_LT(std::fabs(call.Kv(kLawA3, g)), 1);
      EXPECT_LT(std::fabs(call.Kv(kLawA4, g)), 1);
    }
  }
}

TEST(AttentionLawsTest, TheShadowOfRoundedGradientsIsSmall) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
    LawsSize size;
    size.dtype = dtype;
    LawsCall call(size);
    std::vector<float> out(static_cast<size_t>(kShadowStatCount * size.heads));
    std::vector<float> kv_out(static_cast<size_t>(kShadowStatCount * size.kv_heads));
    const LawOutputs to = {size.heads, out.data(), size.kv_heads, kv_out.data()};
    ASSERT_EQ(AttentionShadow({call.params.of, to, 0}, {}), Status::kOk);
    EXPECT_THAT(kv_out, Each(0)) << "no keys were asked for";
    ASSERT_EQ(AttentionShadow({call.params.of, to, 6}, {Backend::kCpu, nullptr, 2}), Status::kOk);
    const auto check = [](const std::vector<float>& of, int64_t heads) {
      for (int64_t h = 0; h < heads; ++h) {
        for (int first : {0, static_cast<int>(kShadowTensorStatCount)}) {
          const auto at = [&](int stat) { return of[static_cast<size_t>((first + stat) * heads + h)]; };
          EXPECT_NEAR(at(kShadowDot) / std::sqrt(at(kShadowGotSumsq) * at(kShadowRefSumsq)), 1, 1e-4);
          EXPECT_LT(at(kShadowRest), at(kShadowVariance));
          EXPECT_GT(at(kShadowVarianceSq), 0);
        }
      }
    };
    check(out, size.heads);
    check(kv_out, size.kv_heads);
  }
}

TEST(AttentionLawsTest, TheShadowFindsAKeyThatIsOff) {
  LawsSize size;
  LawsCall call(size);
  for (int64_t c = 0; c < size.v_dim; ++c) call.d_v.Set(1, 1, 4, c, 1.2 * call.d_v.Get(1, 1, 4, c));
  std::vector<float> out(static_cast<size_t>(kShadowStatCount * size.heads));
  std::vector<float> kv_out(static_cast<size_t>(kShadowStatCount * size.kv_heads));
  const LawOutputs to = {size.heads, out.data(), size.kv_heads, kv_out.data()};
  ASSERT_EQ(AttentionShadow({call.params.of, to, 13}, {}), Status::kOk);
  const size_t rest = static_cast<size_t>((kShadowTensorStatCount + kShadowRest) * size.kv_heads);
  const size_t variance = static_cast<size_t>((kShadowTensorStatCount + kShadowVariance) * size.kv_heads);
  EXPECT_LT(kv_out[rest], kv_out[variance]);
  EXPECT_GT(kv_out[rest + 1], 10 * kv_out[variance + 1]);
}

// The factor of a tensor in standard deviations beyond what is alike; sign kept.
double FactorZ(const std::vector<float>& of, int tensor, int64_t heads, int64_t head) {
  const auto at = [&](int stat) {
    return static_cast<double>(of[static_cast<size_t>((tensor * kFactorTensorStatCount + stat) * heads + head)]);
  };
  const double beyond = std::max(std::fabs(at(kFactor)) - at(kFactorAlike), 0.0);
  return std::copysign(beyond, at(kFactor)) / std::sqrt(at(kFactorVariance));
}

TEST(AttentionLawsTest, AFactorNearOneIsFarFromRounding) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
    LawsSize size;
    size.dtype = dtype;
    LawsCall call(size);
    for (int64_t b = 0; b < size.batch; ++b) {
      for (int64_t t = 0; t < size.q_len; ++t) {
        for (int64_t c = 0; c < size.v_dim; ++c) call.d_v.Set(b, 1, t, c, 1.03 * call.d_v.Get(b, 1, t, c));
        for (int64_t c = 0; c < size.head_dim; ++c) call.d_q.Set(b, 2, t, c, 0.96 * call.d_q.Get(b, 2, t, c));
      }
    }
    std::vector<float> out(static_cast<size_t>(kShadowStatCount * size.heads));
    std::vector<float> kv_out(static_cast<size_t>(kShadowStatCount * size.kv_heads));
    std::vector<float> factors(static_cast<size_t>(kFactorStatCount * size.heads));
    std::vector<float> kv_factors(static_cast<size_t>(kFactorStatCount * size.kv_heads));
    const LawOutputs to = {size.heads, out.data(), size.kv_heads, kv_out.data()};
    ASSERT_EQ(AttentionShadow({call.params.of, to, 0, factors.data(), kv_factors.data()}, {}), Status::kOk);
    EXPECT_THAT(kv_factors, Each(0)) << "no keys were asked for";
    ASSERT_EQ(AttentionShadow({call.params.of, to, 13, factors.data(), kv_factors.data()}, {}), Status::kOk);
    if (dtype == DType::kFloat32) {
      EXPECT_THAT(factors, Each(0));
      EXPECT_THAT(kv_factors, Each(0));
      continue;
    }
    for (int tensor = 0; tensor < 2; ++tensor) {
      for (int64_t h = 0; h < size.heads; ++h) {
        const double z = FactorZ(factors, tensor, size.heads, h);
        EXPECT_LT(tensor == 1 && h == 2 ? z + 5 : std::fabs(z) - 2, 0) << z;
      }
      for (int64_t g = 0; g < size.kv_heads; ++g) {
        const double z = FactorZ(kv_factors, tensor, size.kv_heads, g);
        EXPECT_LT(tensor == 1 && g == 1 ? 5 - z : std::fabs(z) - 2, 0) << z;
      }
    }
    // The factor itself.
    const float* const of_dv = kv_factors.data() + kFactorTensorStatCount * size.kv_heads + 1;
    EXPECT_NEAR(1 + of_dv[kFactor * size.kv_heads] / of_dv[kFactorVariance * size.kv_heads], 1.03, 2e-3);
  }
}

TEST(AttentionLawsTest, SampledKeysComeFromTheirStrata) {
  for (uint64_t stratum = 0; stratum < 6; ++stratum) {
    const int64_t key = SampledKey(9, 1, 2, stratum, 6, 40);
    EXPECT_GE(key, static_cast<int64_t>(stratum * 40 / 6));
    EXPECT_LT(key, static_cast<int64_t>((stratum + 1) * 40 / 6));
  }
}

// ---- the C interface ----

struct CLawsCall {
  CLawsCall() {
    call.struct_size = sizeof(call);
    call.dtype = BW_BF16;
    call.batch = 1;
    call.heads = 2;
    call.kv_heads = 1;
    call.q_len = call.k_len = 3;
    call.head_dim = call.v_dim = 4;
    call.q = call.k = call.v = call.o = call.d_o = {data.data(), 0, 0, 4};
    call.scale = 0.5f;
    p.struct_size = sizeof(p);
    p.call = &call;
    p.d_q = p.d_k = p.d_v = {data.data(), 0, 0, 4};
    p.stat_stride = 2;
    p.out = out.data();
    p.kv_stat_stride = 1;
    p.kv_out = kv_out.data();
  }
  std::vector<uint16_t> data = std::vector<uint16_t>(12);
  std::vector<float> out = std::vector<float>(2 * BW_LAW_HEAD_STAT_COUNT, 7.0f);
  std::vector<float> kv_out = std::vector<float>(BW_LAW_KV_STAT_COUNT, 7.0f);
  bw_probe_params call{};
  bw_attention_laws_params p{};
};

struct LawsBreak {
  std::function<void(CLawsCall&)> change;
  bw_kernel_status status;
  std::string sentence;
};

TEST(AttentionLawsTest, BadArgumentsAreNamedAndNothingIsWritten) {
  constexpr bw_kernel_status kInvalid = BW_KERNEL_INVALID_ARGUMENT;
  const std::vector<LawsBreak> breaks = {
      {[](auto& c) { c.p.struct_size = 8; }, kInvalid, "struct_size is 8, but must be at least"},
      {[](auto& c) { c.p.call = nullptr; }, kInvalid, "params is NULL"},
      {[](auto& c) { c.call.struct_size = 8; }, kInvalid, "struct_size is 8, but must be at least"},
      {[](auto& c) { c.p.arithmetic = 3; }, kInvalid, "arithmetic is 3, but must be 0..2"},
      {[](auto& c) { c.call.backend = 2; }, kInvalid, "backend is 2, but must be 0..1"},
      {[](auto& c) { c.call.heads = 0; }, kInvalid, "heads is 0, but must be 1..65536"},
      {[](auto& c) { c.call.scale = 0; }, kInvalid, "scale is 0, but must be finite and > 0"},
      {[](auto& c) { c.call.drift_only = 1; }, kInvalid, "drift_only is 1"},
      {[](auto& c) { c.call.d_o.data = nullptr; }, kInvalid, "d_o is NULL"},
      {[](auto& c) { c.call.v = c.call.o = c.call.d_o = {}; }, kInvalid, "v, o and d_o are NULL, but must be given"},
      {[](auto& c) { c.p.d_q.data = nullptr; }, kInvalid, "d_q is NULL, but must point to data"},
      {[](auto& c) { c.p.d_k.data = nullptr; }, kInvalid, "d_k is NULL"},
      {[](auto& c) { c.p.d_v.data = static_cast<const char*>(c.p.d_v.data) + 1; }, kInvalid, "d_v is"},
      {[](auto& c) { c.p.stat_stride = 1; }, kInvalid, "stat_stride is 1, but must be 2.."},
      {[](auto& c) { c.p.out = nullptr; }, kInvalid, "out is NULL"},
      {[](auto& c) { c.p.kv_stat_stride = 0; }, kInvalid, "kv_stat_stride is 0, but must be 1.."},
      {[](auto& c) { c.p.kv_out = nullptr; }, kInvalid, "kv_out is NULL"},
  };
  for (const LawsBreak& one : breaks) {
    CLawsCall c;
    one.change(c);
    EXPECT_EQ(bw_attention_laws(&c.p), one.status) << one.sentence;
    EXPECT_THAT(bw_kernels_last_error(), HasSubstr(one.sentence));
    EXPECT_THAT(c.out, Each(7));
    EXPECT_THAT(c.kv_out, Each(7));
  }
  EXPECT_EQ(bw_attention_laws(nullptr), kInvalid);
}

TEST(AttentionLawsTest, TheCInterfaceOfTheShadowChecksItsKeys) {
  CLawsCall c;
  std::vector<float> out(2 * BW_SHADOW_STAT_COUNT), kv_out(BW_SHADOW_STAT_COUNT);
  bw_attention_shadow_params p{};
  p.struct_size = sizeof(p);
  p.call = &c.call;
  p.d_q = p.d_k = p.d_v = c.p.d_q;
  p.stat_stride = 2;
  p.out = out.data();
  p.kv_stat_stride = 1;
  p.kv_out = kv_out.data();
  p.keys_per_head = 2;
  EXPECT_EQ(bw_attention_shadow(&p), BW_KERNEL_OK) << bw_kernels_last_error();
  p.struct_size = offsetof(bw_attention_shadow_params, factors);
  EXPECT_EQ(bw_attention_shadow(&p), BW_KERNEL_OK) << "a caller from before 1.8";
  p.struct_size = sizeof(p);
  std::vector<float> factors(2 * BW_FACTOR_STAT_COUNT);
  p.factors = factors.data();
  EXPECT_EQ(bw_attention_shadow(&p), BW_KERNEL_INVALID_ARGUMENT);
  EXPECT_THAT(bw_kernels_last_error(), HasSubstr("kv_factors is NULL"));
  p.factors = nullptr;
  p.reserved = 1;
  EXPECT_EQ(bw_attention_shadow(&p), BW_KERNEL_INVALID_ARGUMENT);
  p.reserved = 0;
  const std::vector<uint8_t> mask(12, 1);
  c.call.mask = c.call.visible = mask.data();
  c.call.mask_dtype = BW_BOOL;
  c.call.mask_by_sample = 1;
  c.call.rows_per_head = 2;
  EXPECT_EQ(bw_attention_shadow(&p), BW_KERNEL_UNSUPPORTED);
  EXPECT_THAT(bw_kernels_last_error(), HasSubstr("keys_per_head is 2, but must be 0 with mask_by_sample"));
}

}  // namespace
}  // namespace bellwether::kernels
