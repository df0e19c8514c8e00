// Goal: the inner loops of every instruction set do the same, whichever this
// machine's dispatch would choose; exp, conversions and masks are right.
// Method: each set that the processor has, against plain loops on seeded
// numbers and on special values.

#include "kernels/cpu/simd.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/kernels/naive_probe.h"

namespace bellwether::kernels::cpu {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

struct alignas(64) Panels {
  double x[8 * kPanel] = {};
};

class SimdTest : public ::testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    const SimdKernels* sets[kSimdSetsMax];
    if (GetParam() >= UsableSimdKernels(sets)) GTEST_SKIP() << "not on this processor";
    simd_ = sets[GetParam()];
  }
  const SimdKernels* simd_ = nullptr;
};

TEST_P(SimdTest, TilesEqualPlainProducts) {
  constexpr int64_t kDepth = 29;
  std::mt19937 rng(1);
  std::normal_distribution<double> normal;
  alignas(64) double b[kDepth * kPanel], out[kPanel * kPanel];
  std::vector<double> a(kDepth * 11);
  for (double& x : a) x = normal(rng);
  for (double& x : b) x = normal(rng);
  ASSERT_EQ(kPanel % simd_->tile_rows, 0);
  simd_->tile(a.data(), 11, b, kPanel, kDepth, out, kPanel);
  simd_->accumulate_tile(a.data(), 11, b, kPanel, kDepth, out, kPanel);
  for (int64_t r = 0; r < simd_->tile_rows; ++r) {
    for (int64_t lane = 0; lane < kPanel; ++lane) {
      double sum = 0;
      for (int64_t c = 0; c < kDepth; ++c) sum += a[static_cast<size_t>(c * 11 + r)] * b[c * kPanel + lane];
      EXPECT_NEAR(out[r * kPanel + lane], 2 * sum, 1e-13);
    }
  }
}

TEST_P(SimdTest, SumsUseAnAccurateExponential) {
  for (double x : {0.0, -1e-17, -1e-9, -0.3, -0.34657, -0.34658, -1.0, -20.0, -300.0, -700.0}) {
    Panels p, dp;
    for (double& s : p.x) s = kMaskedScore;
    p.x[0] = 5;
    p.x[9] = 5 + x;
    dp.x[9] = 3;
    const ScoreSums sums = simd_->sum(p.x, dp.x, 2, 5);
    const double difference = p.x[9] - 5;
    EXPECT_NEAR(sums.l, 1 + std::exp(difference), 4e-15);
    EXPECT_LE(std::fabs(sums.weighted_dp - 3 * std::exp(difference)), 1e-14 * std::exp(difference) + 1e-300);
    EXPECT_NEAR(sums.weighted_score, difference * std::exp(difference), 4e-15);
    EXPECT_EQ(simd_->sum(p.x, nullptr, 2, 5).weighted_dp, 0);
  }
}

TEST_P(SimdTest, ScanFindsTheTwoLargestAndWhatIsNotFinite) {
  for (int at = 0; at < 16; ++at) {
    Panels p;
    for (int i = 0; i < 16; ++i) p.x[i] = -static_cast<double>(i) - 10;
    p.x[at] = 2;
    ScoreScan scan = simd_->scan(p.x, 2);
    EXPECT_EQ(scan.first, 2);
    EXPECT_EQ(scan.second, at == 0 ? -11 : -10);
    EXPECT_FALSE(scan.nonfinite);
    for (double bad : {kInf, -kInf, std::nan(""), 3.5e38, -3.5e38}) {
      p.x[at] = bad;
      EXPECT_TRUE(simd_->scan(p.x, 2).nonfinite) << bad << " at " << at;
    }
    for (double& x : p.x) x = kMaskedScore;
    p.x[at] = -7;
    scan = simd_->scan(p.x, 2);
    EXPECT_EQ(scan.first, -7);
    EXPECT_EQ(scan.second, kMaskedScore);
    EXPECT_FALSE(scan.nonfinite) << "masked is not infinite";
  }
}

TEST_P(SimdTest, CapIsTanhAndKeepsMasks) {
  Panels p;
  const std::vector<double> scores = {0, 1e-9, -1e-3, 0.5, -2, 30, -1e4, kMaskedScore};
  std::copy(scores.begin(), scores.end(), p.x);
  simd_->cap(p.x, 1, 2.5);
  for (size_t i = 0; i + 1 < scores.size(); ++i) {
    EXPECT_NEAR(p.x[i], 2.5 * std::tanh(scores[i] / 2.5), 2e-15);
  }
  EXPECT_EQ(p.x[7], kMaskedScore);
}

TEST_P(SimdTest, WidensEveryHalfExactly) {
  std::vector<uint16_t> all(65536);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
  std::vector<double> bf16(all.size()), fp16(all.size());
  simd_->widen[1](all.data(), 65536, bf16.data());
  simd_->widen[2](all.data(), 65536, fp16.data());
  for (size_t i = 0; i < all.size(); ++i) {
    const double b = static_cast<double>(testing::FromBf16(all[i]));
    const double f = static_cast<double>(testing::FromFp16(all[i]));
    ASSERT_TRUE(bf16[i] == b || (std::isnan(bf16[i]) && std::isnan(b))) << i;
    ASSERT_TRUE(fp16[i] == f || (std::isnan(fp16[i]) && std::isnan(f))) << i;
  }
  const float floats[3] = {1.5f, -0.0f, 3e38f};
  double wide[3];
  simd_->widen[0](floats, 3, wide);
  EXPECT_THAT(wide, ::testing::ElementsAre(1.5, 0.0, static_cast<double>(3e38f)));
}

// The numbers of bfloat16.
constexpr SimdGrid kGrid = {int64_t{1023 - 126} << 52, int64_t{7} << 52};

double BFloat16Ulp(double x) { return std::ldexp(1.0, (x == 0 ? -126 : std::max(std::ilogb(x), -126)) - 7); }

TEST_P(SimdTest, RoundsToTheNumbersOfAType) {
  std::mt19937 rng(3);
  std::normal_distribution<double> normal;
  Panels p;
  for (double& x : p.x) x = static_cast<double>(static_cast<float>(normal(rng) * std::exp2(8 * normal(rng))));
  p.x[0] = 0;
  p.x[1] = 1 + 0x1p-8;  // As near to 1 as to the next, and 1 is even.
  p.x[2] = -0x1.8p-133;
  Panels rounded = p;
  simd_->round(rounded.x, 8, 2, kGrid);
  for (int i = 0; i < 8 * kPanel; ++i) {
    const float want = testing::FromBf16(testing::RoundBf16(static_cast<float>(p.x[i])));
    EXPECT_EQ(rounded.x[i], 2 * static_cast<double>(want)) << p.x[i];
  }
}

TEST_P(SimdTest, ProbabilitiesAndTheirTermsEqualPlainLoops) {
  std::mt19937 rng(4);
  std::normal_distribution<double> normal;
  Panels scores, dp;
  double total = 0, delta = 0, first = kMaskedScore;
  for (int i = 0; i < 8 * kPanel; ++i) {
    scores.x[i] = i % 5 == 3 ? kMaskedScore : normal(rng);
    dp.x[i] = i % 5 == 3 ? 0 : normal(rng);
    first = std::max(first, scores.x[i]);
  }
  Panels p;
  for (int i = 0; i < 8 * kPanel; ++i) {
    p.x[i] = scores.x[i] == kMaskedScore ? 0 : std::exp(scores.x[i] - first);
    total += p.x[i];
  }
  for (int i = 0; i < 8 * kPanel; ++i) delta += (p.x[i] /= total) * dp.x[i];
  EXPECT_NEAR(simd_->weigh(scores.x, 8, first), total, 1e-13);
  EXPECT_NEAR(simd_->normalise(scores.x, dp.x, 8, 1 / total), delta, 1e-14);
  constexpr double kOfScore = 3e-4;
  LawTerms want = {};
  for (int i = 0; i < 8 * kPanel; ++i) {
    ASSERT_NEAR(scores.x[i], p.x[i], 1e-15);
    const double x = scores.x[i], about = dp.x[i] - delta, ds = x * about;
    if (x == 0) continue;
    const auto error = [](double of) { return std::nearbyint(of / BFloat16Ulp(of)) * BFloat16Ulp(of) - of; };
    const double of_p = BFloat16Ulp(x) * BFloat16Ulp(x) / 12 + kOfScore * x * x,
                 of_ds = BFloat16Ulp(ds) * BFloat16Ulp(ds) / 12;
    want.keys += 1;
    want.p_square += x * x;
    want.p_error += error(x);
    want.p_variance += of_p;
    want.dp_p_error += dp.x[i] * error(x);
    want.dp_variance += dp.x[i] * dp.x[i] * of_p;
    want.ds += ds;
    want.ds_error += error(ds);
    want.ds_variance += of_ds + of_p * about * about + 0x1p-48 * x * x * (dp.x[i] * dp.x[i] + delta * delta);
  }
  const LawTerms got = simd_->law_terms(scores.x, dp.x, 8, delta, {kGrid, 0.125, kOfScore});
  EXPECT_EQ(got.keys, want.keys);
  EXPECT_NEAR(got.p_square, want.p_square, 1e-14);
  EXPECT_NEAR(got.p_error, want.p_error, 1e-14);
  EXPECT_NEAR(got.p_variance, want.p_variance, 1e-10 * want.p_variance);
  EXPECT_NEAR(got.dp_p_error, want.dp_p_error, 1e-14);
  EXPECT_NEAR(got.dp_variance, want.dp_variance, 1e-10 * want.dp_variance);
  EXPECT_NEAR(got.ds, want.ds, 1e-14);
  EXPECT_NEAR(got.ds_error, want.ds_error, 1e-14);
  EXPECT_NEAR(got.ds_variance, want.ds_variance, 1e-10 * want.ds_variance);
}

TEST_P(SimdTest, NumbersThatUnderflowLoseNoMoreThanThemselves) {
  constexpr SimdGrid kHalf = {int64_t{-14 + 1023} << 52, int64_t{10} << 52};
  const auto terms = [&](double of_p, double of_dp, double factor) {
    Panels p, dp;
    for (int i = 0; i < kPanel; ++i) p.x[i] = dp.x[i] = 0;
    p.x[0] = of_p;
    dp.x[0] = of_dp;
    return simd_->law_terms(p.x, dp.x, 1, 0, {kHalf, factor, 0});
  };
  // A P that comes out as 0, and one between 0 and the least number.
  EXPECT_EQ(terms(0x1p-40, 1, 1).p_error, -0x1p-40);
  EXPECT_EQ(terms(0x1p-40, 1, 1).p_variance, 0x1p-80);
  EXPECT_EQ(terms(0x1.8p-25, 1, 1).p_error, 0x1p-26);
  EXPECT_DOUBLE_EQ(terms(0x1.8p-25, 1, 1).p_variance, 0x1p-48 / 12);
  // A dS that is a number of the type, while an eighth of it is between two.
  const LawTerms half = terms(0x1p-3, 0x1.001p-10, 0.125), plain = terms(0x1p-3, 0x1.001p-10, 1);
  EXPECT_EQ(half.ds_error, -0x1p-25);
  EXPECT_NEAR(half.ds_variance - plain.ds_variance, (0x1p-42 - 0x1p-46) / 12, 1e-3 * 0x1p-42 / 12);
  EXPECT_EQ(terms(0x1p-3, 0x1.001p-3, 0.125).ds_error, terms(0x1p-3, 0x1.001p-3, 1).ds_error);
}

TEST_P(SimdTest, ColumnsAddUpElementsAndTheirDistances) {
  alignas(64) double x[kPanel] = {1, -3, 0, 2.5, kInf, std::nan(""), 4, 0};
  alignas(64) double before[kPanel] = {1, 3, 0, 2.5, kInf, std::nan(""), 5, 1};
  alignas(64) double weight[kPanel] = {2, 2, 2, -1, 1, 1, 0, 1};
  alignas(64) double sums[kColumnSums * kPanel] = {};
  for (int turn = 0; turn < 2; ++turn) simd_->columns(x, before, weight, 1, kGrid, sums, kPanel);
  const auto at = [&](int which, int c) { return sums[which * kPanel + c]; };
  EXPECT_EQ(at(kColumnSum, 1), -6);
  EXPECT_EQ(at(kColumnAbs, 1), 6);
  EXPECT_EQ(at(kColumnSquare, 3), 12.5);
  EXPECT_EQ(at(kColumnUlp, 0), 2 * 0x1p-7);
  EXPECT_EQ(at(kColumnUlpSquare, 1), 2 * 0x1p-12);
  EXPECT_EQ(at(kColumnProduct, 3), -5);
  EXPECT_EQ(at(kColumnWeightedSq, 0), 2 * 4 * 0x1p-14);
  EXPECT_EQ(at(kColumnWeightedUlp, 3), -2 * 0x1p-6);
  const double nonfinite[kPanel] = {0, 0, 0, 0, 2, 2, 0, 0}, same[kPanel] = {2, 0, 0, 2, 2, 0, 0, 0};
  const double not_zero[kPanel] = {2, 2, 0, 2, 2, 2, 2, 0};
  for (int c = 0; c < kPanel; ++c) {
    EXPECT_EQ(at(kColumnNonfinite, c), nonfinite[c]) << c;
    EXPECT_EQ(at(kColumnSame, c), same[c]) << c;
    EXPECT_EQ(at(kColumnNotZero, c), not_zero[c]) << c;
  }
}

TEST_P(SimdTest, SmallLoopsEqualPlainLoops) {
  std::mt19937 rng(2);
  std::normal_distribution<double> normal;
  constexpr int64_t kDim = 13;
  double rows[kPanel * kDim];
  for (double& x : rows) x = normal(rng);
  alignas(64) double panel[kPanel * kDim];
  simd_->transpose(rows, kDim, panel);
  alignas(64) double squares[kPanel];
  simd_->square_lanes(panel, kDim, squares);
  std::vector<double> sum(kDim, 1.0);
  simd_->add(rows + kDim, kDim, sum.data());
  for (int64_t lane = 0; lane < kPanel; ++lane) {
    double expected = 0;
    for (int64_t c = 0; c < kDim; ++c) {
      EXPECT_EQ(panel[c * kPanel + lane], rows[lane * kDim + c]);
      expected += rows[lane * kDim + c] * rows[lane * kDim + c];
    }
    EXPECT_NEAR(squares[lane], expected, 1e-13);
    EXPECT_NEAR(simd_->dot(panel + lane, kPanel, rows + lane * kDim, kDim), expected, 1e-13);
  }
  for (int64_t c = 0; c < kDim; ++c) EXPECT_EQ(sum[static_cast<size_t>(c)], 1 + rows[kDim + c]);
  double spread = 0;
  for (int64_t i = 0; i < kDim; ++i) spread += (panel[i] - 0.25) * (panel[i] - 0.25);
  EXPECT_NEAR(simd_->spread(panel, kDim, 0.25), spread, 1e-13);
}

INSTANTIATE_TEST_SUITE_P(Sets, SimdTest, ::testing::Range(0, kSimdSetsMax));

}  // namespace
}  // namespace bellwether::kernels::cpu
