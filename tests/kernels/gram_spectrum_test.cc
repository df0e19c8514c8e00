// Goal: the signals of a Gram matrix are those of the singular values that LAPACK finds in
// the weights themselves, whatever the matrix: any size, no gap, rank-deficient, zero, of
// any scale; what is no Gram matrix is told apart.
// Method: weights made from a seed, their Grams rounded to float32 as clients ship them.

#include "bellwether/kernels/gram_spectrum.h"

#include <gtest/gtest.h>
#include <lapacke.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

namespace bellwether::kernels {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

// [rows][columns], row-major.
struct Matrix {
  int64_t rows = 0, columns = 0;
  std::vector<double> values;
  double& at(int64_t i, int64_t j) { return values[static_cast<size_t>(i * columns + j)]; }
  double at(int64_t i, int64_t j) const { return values[static_cast<size_t>(i * columns + j)]; }
};

Matrix Random(int64_t rows, int64_t columns, uint32_t seed, double scale = 1) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  Matrix m{rows, columns, std::vector<double>(static_cast<size_t>(rows * columns))};
  // As float32 weights are.
  for (double& value : m.values) value = static_cast<double>(static_cast<float>(scale * normal(random)));
  return m;
}

Matrix Product(const Matrix& a, const Matrix& b, bool a_transposed) {
  const int64_t rows = a_transposed ? a.columns : a.rows, inner = a_transposed ? a.rows : a.columns;
  Matrix c{rows, b.columns, std::vector<double>(static_cast<size_t>(rows * b.columns))};
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t k = 0; k < inner; ++k) {
      const double x = a_transposed ? a.at(k, i) : a.at(i, k);
      for (int64_t j = 0; j < b.columns; ++j) c.at(i, j) += x * b.at(k, j);
    }
  }
  return c;
}

std::vector<float> GramOf(const Matrix& w) {
  std::vector<float> upper;
  for (int64_t i = 0; i < w.rows; ++i) {
    for (int64_t j = i; j < w.rows; ++j) {
      double sum = 0;
      for (int64_t k = 0; k < w.columns; ++k) sum += w.at(i, k) * w.at(j, k);
      upper.push_back(static_cast<float>(sum));
    }
  }
  return upper;
}

// Falling.
std::vector<double> SingularValues(Matrix w) {
  std::vector<double> values(static_cast<size_t>(std::min(w.rows, w.columns)));
  EXPECT_EQ(LAPACKE_dgesdd(LAPACK_ROW_MAJOR, 'N', static_cast<int>(w.rows), static_cast<int>(w.columns),
                           w.values.data(), static_cast<int>(w.columns), values.data(), nullptr,
                           static_cast<int>(w.rows), nullptr, static_cast<int>(w.columns)),
            0);
  return values;
}

double EffectiveRank(const std::vector<double>& sigma) {
  double total = 0, entropy = 0;
  for (const double s : sigma) total += s * s;
  for (const double s : sigma) {
    const double p = s * s / total;
    if (p > 0) entropy -= p * std::log(p);
  }
  return std::exp(entropy);
}

std::vector<double> Eigenvalues(int64_t n, std::vector<double> matrix) {
  std::vector<double> values(static_cast<size_t>(n));
  EXPECT_TRUE(cpu::SymmetricEigenvalues(n, 1, matrix.data(), values.data()));
  return values;
}

GramSpectrum Spectrum(int64_t n, const std::vector<float>& upper) {
  EXPECT_EQ(ClassifyGram(upper.data(), n), GramKind::kGram);
  std::vector<double> matrix(static_cast<size_t>(n * n));
  ExpandGram(upper.data(), n, matrix.data());
  return SpectrumOf(Eigenvalues(n, std::move(matrix)).data(), n);
}

void ExpectEqual(const Matrix& w, const char* what) {
  const std::vector<double> sigma = SingularValues(w);
  double squares = 0;
  for (const double s : sigma) squares += s * s;
  const GramSpectrum found = Spectrum(w.rows, GramOf(w));
  // Half a bit of the result, and float32's rounding of the Gram.
  const double tolerance = std::ldexp(1, -kGramResultBits) + 1e-6;
  EXPECT_NEAR(found.sigma / sigma[0], 1, tolerance) << what;
  EXPECT_NEAR(found.stable_rank / (squares / sigma[0] / sigma[0]), 1, tolerance) << what;
  EXPECT_NEAR(found.effective_rank / EffectiveRank(sigma), 1, 1e-4) << what;
  // Of a second value below the rounding of the first one's square nothing is known.
  const double ratio = sigma.size() < 2 ? 0 : sigma[1] / sigma[0];
  EXPECT_NEAR(found.top2_ratio, ratio, ratio < 1e-3 ? 1e-3 : 2e-5) << what;
}

TEST(GramSpectrumTest, EigenvaluesAreLapacks) {
  for (const int64_t n : {1, 2, 3, 5, 16, 63, 64, 65, 128, 256}) {
    const Matrix w = Random(n, n + 7, static_cast<uint32_t>(n));
    std::vector<double> matrix(static_cast<size_t>(n * n));
    ExpandGram(GramOf(w).data(), n, matrix.data());
    std::vector<double> expected(static_cast<size_t>(n)), copy = matrix;
    ASSERT_EQ(LAPACKE_dsyev(LAPACK_ROW_MAJOR, 'N', 'U', static_cast<int>(n), copy.data(), static_cast<int>(n),
                            expected.data()),
              0);
    std::vector<double> found = Eigenvalues(n, std::move(matrix));
    std::sort(found.begin(), found.end());
    for (size_t i = 0; i < found.size(); ++i) {
      // Both are backward stable: a few n epsilon of the largest.
      EXPECT_NEAR(found[i], expected[i], 1e-14 * static_cast<double>(n) * expected.back()) << n << ", " << i;
    }
  }
}

TEST(GramSpectrumTest, SignalsAreThoseOfTheSingularValues) {
  for (const int64_t n : {1, 2, 8, 64, 128}) {
    ExpectEqual(Random(n, 4 * n, static_cast<uint32_t>(n)), "random");
    ExpectEqual(Random(n, n, static_cast<uint32_t>(n + 1)), "square: a bulk without a gap");
    ExpectEqual(Random(n, 2 * n, static_cast<uint32_t>(n + 2), 1e-12), "tiny");
    ExpectEqual(Random(n, 2 * n, static_cast<uint32_t>(n + 3), 1e12), "huge");
  }
  Matrix pushed = Random(64, 256, 9);
  for (int64_t j = 0; j < 256; ++j) pushed.at(3, j) *= 100;
  ExpectEqual(pushed, "one direction pushed");
  ExpectEqual(Random(64, 5, 10), "of rank 5");
  ExpectEqual(Random(64, 1, 11), "of rank 1");
}

TEST(GramSpectrumTest, IdentityZeroAndWhatIsNotFinite) {
  std::vector<double> ones(10, 4.0), zeros(10, 0.0);
  const GramSpectrum identity = SpectrumOf(ones.data(), 10);
  EXPECT_EQ(identity.sigma, 2);
  EXPECT_EQ(identity.stable_rank, 10);
  EXPECT_NEAR(identity.effective_rank, 10, 1e-4);
  EXPECT_EQ(identity.top2_ratio, 1);
  zeros[3] = -1e-9;  // Rounding.
  const GramSpectrum zero = SpectrumOf(zeros.data(), 10);
  EXPECT_EQ(zero.sigma, 0);
  EXPECT_EQ(zero.stable_rank, 0);
  EXPECT_EQ(zero.effective_rank, 0);
  EXPECT_EQ(zero.top2_ratio, 0);
  for (const double bad : {static_cast<double>(kNan), static_cast<double>(kInf)}) {
    ones[7] = bad;
    const GramSpectrum found = SpectrumOf(ones.data(), 10);
    EXPECT_TRUE(std::isnan(found.sigma) && std::isnan(found.stable_rank) && std::isnan(found.effective_rank) &&
                std::isnan(found.top2_ratio));
  }
}

TEST(GramSpectrumTest, ResultsHaveNoMoreBitsThanTheyAreRoundedTo) {
  std::mt19937 random(4);
  std::uniform_real_distribution<double> uniform(0.1, 10);
  for (int i = 0; i < 100; ++i) {
    double values[3] = {uniform(random), uniform(random), uniform(random)};
    const GramSpectrum exact = SpectrumOf(values, 3);
    for (double& value : values) value *= 1 + 1e-13;
    const GramSpectrum near = SpectrumOf(values, 3);
    EXPECT_EQ(exact.sigma, near.sigma);
    EXPECT_EQ(exact.effective_rank, near.effective_rank);
    int exponent = 0;
    const double scaled = std::ldexp(std::frexp(static_cast<double>(exact.sigma), &exponent), kGramResultBits);
    EXPECT_EQ(scaled, std::nearbyint(scaled));
  }
}

TEST(GramSpectrumTest, ClassifiesNonfiniteAndInvalidGrams) {
  const std::vector<float> good = GramOf(Random(8, 20, 1));
  EXPECT_EQ(ClassifyGram(good.data(), 8), GramKind::kGram);
  const std::vector<float> zero(36);
  EXPECT_EQ(ClassifyGram(zero.data(), 8), GramKind::kGram);
  for (const size_t at : {size_t{0}, size_t{5}, size_t{35}}) {
    for (const float bad : {kNan, kInf, -kInf}) {
      std::vector<float> upper = good;
      upper[at] = bad;
      EXPECT_EQ(ClassifyGram(upper.data(), 8), GramKind::kNonfinite);
    }
  }
  std::vector<float> upper = good;
  upper[35] = -1e-3f;  // Of the diagonal.
  EXPECT_EQ(ClassifyGram(upper.data(), 8), GramKind::kNotAGram);
  upper = good;
  upper[1] = 2 * upper[0] + 2 * upper[8];
  EXPECT_EQ(ClassifyGram(upper.data(), 8), GramKind::kNotAGram) << "more than Cauchy and Schwarz allow";
}

// Of one head: W_Q, W_K before and how they change.
struct Change {
  Matrix q, dq, k, dk;
};

double RankByServer(const Change& w, double c) {
  const int64_t n = w.q.rows, columns = w.q.columns;
  Matrix a = Random(2 * n, columns, 0), b = a;
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < columns; ++j) {
      a.at(i, j) = c * w.dq.at(i, j);
      a.at(n + i, j) = w.q.at(i, j);
      b.at(i, j) = w.k.at(i, j) / c;
      b.at(n + i, j) = w.dk.at(i, j);
    }
  }
  const std::vector<float> upper_a = GramOf(a), upper_b = GramOf(b);
  EXPECT_EQ(ClassifyGram(upper_a.data(), 2 * n), GramKind::kGram);
  EXPECT_EQ(ClassifyGram(upper_b.data(), 2 * n), GramKind::kGram);
  std::vector<double> matrix(static_cast<size_t>(4 * n * n)), scratch(static_cast<size_t>(8 * n * n));
  IncrementMatrix(upper_a.data(), upper_b.data(), 2 * n, matrix.data(), scratch.data());
  return static_cast<double>(SpectrumOf(Eigenvalues(2 * n, std::move(matrix)).data(), 2 * n).effective_rank);
}

double RankBySvd(const Change& w) {
  Matrix change = Product(w.dq, w.k, true);
  const Matrix other = Product(w.q, w.dk, true);
  for (size_t i = 0; i < change.values.size(); ++i) change.values[i] += other.values[i];
  return EffectiveRank(SingularValues(change));
}

TEST(GramSpectrumTest, TheIncrementsRankIsThatOfTheProduct) {
  for (const int64_t n : {2, 16, 64}) {
    const auto seed = static_cast<uint32_t>(10 * n);
    const int64_t columns = 3 * n;
    Change w{Random(n, columns, seed), Random(n, columns, seed + 1, 1e-4), Random(n, columns, seed + 2),
             Random(n, columns, seed + 3, 1e-4)};
    EXPECT_NEAR(RankByServer(w, 1e4) / RankBySvd(w), 1, 1e-3) << "random, n = " << n;
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = 0; j < columns; ++j) w.dq.at(i, j) = 1e-4 * w.q.at(0, i % columns) * w.k.at(0, j);
    }
    EXPECT_NEAR(RankByServer(w, 1e4) / RankBySvd(w), 1, 1e-3) << "dW_Q of rank 1, n = " << n;
    for (double& value : w.dk.values) value = 0;
    EXPECT_NEAR(RankByServer(w, 1e4) / RankBySvd(w), 1, 1e-3) << "and W_K as it was, n = " << n;
    for (double& value : w.dq.values) value = 0;
    EXPECT_EQ(RankByServer(w, 1), 0) << "nothing changed, n = " << n;
  }
}

}  // namespace
}  // namespace bellwether::kernels
