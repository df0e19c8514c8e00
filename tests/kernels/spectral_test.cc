// Goal: sigma, residual, stable rank and direction are those of the exact
// decomposition, in any layout and type, also where power iteration fails: no
// gap, rank deficient, zero, tiny and huge.
// Method: LAPACK's singular values in fp64 as the oracle; seeded matrices.

#include "bellwether/kernels/spectral.h"

#include <lapacke.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <random>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/kernels/naive_probe.h"

namespace bellwether::kernels {
namespace {

using Matrix = std::vector<double>;  // [rows][columns]

Matrix Make(int64_t rows, int64_t columns, const std::function<double(int64_t, int64_t)>& f) {
  Matrix m;
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j) m.push_back(static_cast<double>(static_cast<float>(f(i, j))));
  }
  return m;
}

Matrix Random(int64_t rows, int64_t columns, uint32_t seed, double scale = 1) {
  std::mt19937 rng(seed);
  std::normal_distribution<double> normal;
  return Make(rows, columns, [&](int64_t, int64_t) { return scale * normal(rng); });
}

std::vector<double> SingularValues(Matrix m, int64_t rows, int64_t columns) {
  std::vector<double> s(static_cast<size_t>(std::min(rows, columns)));
  EXPECT_EQ(LAPACKE_dgesdd(LAPACK_ROW_MAJOR, 'N', static_cast<lapack_int>(rows), static_cast<lapack_int>(columns),
                           m.data(), static_cast<lapack_int>(columns), s.data(), nullptr, static_cast<lapack_int>(rows),
                           nullptr, static_cast<lapack_int>(columns)),
            0);
  return s;
}

struct Result {
  float sigma = -1, residual = -1, stable_rank = -1, overlap = -1;
  std::vector<float> direction, gram;
};

Result Measure(const Matrix& m, int64_t rows, int64_t columns, std::vector<float> direction = {}) {
  const std::vector<float> weight(m.begin(), m.end());
  Result r;
  r.direction = direction.empty() ? std::vector<float>(static_cast<size_t>(rows)) : direction;
  r.gram.resize(static_cast<size_t>(rows * rows));
  const SpectralParams p{.heads = 1,
                         .rows = rows,
                         .columns = columns,
                         .weight = weight.data(),
                         .row_stride = columns,
                         .column_stride = 1,
                         .sigma = &r.sigma,
                         .residual = &r.residual,
                         .stable_rank = &r.stable_rank,
                         .direction = r.direction.data(),
                         .overlap = &r.overlap,
                         .gram = r.gram.data()};
  EXPECT_EQ(SpectralNorms(p, {}), Status::kOk) << LastErrorMessage();
  return r;
}

// Bound of the rounding to float32 plus 1e-7 of the method.
void ExpectMatchesLapack(const Matrix& m, int64_t rows, int64_t columns) {
  const Result r = Measure(m, rows, columns);
  const std::vector<double> s = SingularValues(m, rows, columns);
  double squares = 0;
  for (double x : s) squares += x * x;
  EXPECT_LE(std::fabs(static_cast<double>(r.sigma) - s[0]), 1.6e-7 * s[0]);
  EXPECT_LE(std::fabs(static_cast<double>(r.stable_rank) - squares / (s[0] * s[0])), 4e-7 * squares / (s[0] * s[0]));
  // The direction: |W^T v| = sigma for a unit v.
  double norm = 0, length = 0;
  for (int64_t j = 0; j < columns; ++j) {
    double sum = 0;
    for (int64_t i = 0; i < rows; ++i) {
      sum += m[static_cast<size_t>(i * columns + j)] * static_cast<double>(r.direction[static_cast<size_t>(i)]);
    }
    norm += sum * sum;
  }
  for (float x : r.direction) length += static_cast<double>(x) * static_cast<double>(x);
  EXPECT_LE(std::fabs(std::sqrt(norm) - s[0]), 1e-6 * s[0]);
  EXPECT_LE(std::fabs(length - 1), 1e-6);
  // The residual, of the exact G, up to what float32 makes of the direction.
  EXPECT_LE(static_cast<double>(r.residual), 1e-3 * s[0] * s[0]);
}

TEST(SpectralTest, MatchesLapackOnRandomMatricesOfEveryShape) {
  for (auto [rows, columns] : std::vector<std::pair<int64_t, int64_t>>{
           {1, 1}, {1, 9}, {9, 1}, {3, 5}, {31, 33}, {64, 64}, {64, 384}, {65, 7}, {128, 1000}}) {
    SCOPED_TRACE(::testing::Message() << rows << "x" << columns);
    ExpectMatchesLapack(Random(rows, columns, 1), rows, columns);
  }
}

TEST(SpectralTest, ABulkWithoutAGapIsNoWorse) {
  for (uint32_t seed = 0; seed < 5; ++seed) {
    ExpectMatchesLapack(Random(128, 4096, seed), 128, 4096);
    ExpectMatchesLapack(Random(256, 300, seed), 256, 300);
  }
  ExpectMatchesLapack(Random(512, 600, 9), 512, 600);
}

TEST(SpectralTest, RepeatedTopValuesAndRankDeficiency) {
  ExpectMatchesLapack(Make(40, 40, [](int64_t i, int64_t j) { return i == j ? 3.0 : 0.0; }), 40, 40);
  ExpectMatchesLapack(Make(64, 64, [](int64_t i, int64_t j) { return i == j ? (i == 63 ? 5.0 : 1.0) : 0.0; }), 64, 64);
  ExpectMatchesLapack(
      Make(50, 60,
           [](int64_t i, int64_t j) { return (1.0 + static_cast<double>(i)) / (2.0 + static_cast<double>(j)); }),
      50, 60);
  // Rank 2 in 100 rows, most of them zero.
  const Matrix a = Random(100, 30, 4);
  ExpectMatchesLapack(
      Make(100, 30, [&](int64_t i, int64_t j) { return i % 50 == 7 ? a[static_cast<size_t>(i * 30 + j)] : 0.0; }), 100,
      30);
}

TEST(SpectralTest, ScaleDoesNotMatter) {
  for (double scale : {1e-37, 1e-30, 1e-10, 1e10, 1e18, 1e36}) {
    SCOPED_TRACE(scale);
    const Matrix m = Random(40, 50, 3, scale);
    const Result r = Measure(m, 40, 50);
    const std::vector<double> s = SingularValues(m, 40, 50);
    EXPECT_LE(std::fabs(static_cast<double>(r.sigma) / s[0] - 1), 1.6e-7);
    EXPECT_GE(r.stable_rank, 1);
  }
}

TEST(SpectralTest, ZeroAndNonfiniteMatricesAreThemselves) {
  const Result zero = Measure(Matrix(12), 3, 4, {1, 0, 0});
  EXPECT_EQ(zero.sigma, 0);
  EXPECT_EQ(zero.residual, 0);
  EXPECT_EQ(zero.stable_rank, 0);
  EXPECT_TRUE(std::isnan(zero.overlap));
  EXPECT_THAT(zero.direction, ::testing::Each(0));
  for (float bad : {NAN, INFINITY}) {
    Matrix m = Random(3, 4, 1);
    m[5] = static_cast<double>(bad);
    const Result r = Measure(m, 3, 4, {0, 1, 0});
    EXPECT_TRUE(std::isnan(r.sigma));
    EXPECT_TRUE(std::isnan(r.residual));
    EXPECT_TRUE(std::isnan(r.stable_rank));
    EXPECT_TRUE(std::isnan(r.overlap));
    EXPECT_THAT(r.direction, ::testing::ElementsAre(0, 1, 0)) << "kept for the next sample";
  }
}

TEST(SpectralTest, AWarmStartCannotHideANewTopDirection) {
  // Exact eigenvectors of a diagonal matrix, and the stale one as the hint.
  const Matrix m = Make(64, 64, [](int64_t i, int64_t j) { return i != j ? 0.0 : i == 5 ? 2.0 : i == 9 ? 1.9 : 0.1; });
  std::vector<float> stale(64);
  stale[9] = 1;
  const Result r = Measure(m, 64, 64, stale);
  EXPECT_FLOAT_EQ(r.sigma, 2);
  EXPECT_NEAR(r.overlap, 0, 1e-6);
  EXPECT_NEAR(std::fabs(r.direction[5]), 1, 1e-6);
}

TEST(SpectralTest, OverlapIsTheCosineAndTheSignIsKept) {
  const Matrix m = Random(16, 40, 5);
  const Result first = Measure(m, 16, 40);
  EXPECT_TRUE(std::isnan(first.overlap)) << "nothing before";
  std::vector<float> turned = first.direction;
  for (float& x : turned) x *= -3;  // Any length, and turned round.
  const Result second = Measure(m, 16, 40, turned);
  EXPECT_FLOAT_EQ(second.overlap, 1);
  for (size_t i = 0; i < 16; ++i) EXPECT_NEAR(second.direction[i], -first.direction[i], 1e-6);
  const Result nan_hint = Measure(m, 16, 40, std::vector<float>(16, NAN));
  EXPECT_EQ(nan_hint.sigma, first.sigma);
  EXPECT_TRUE(std::isnan(nan_hint.overlap));
}

TEST(SpectralTest, AnyLayoutAndTypeGivesTheSame) {
  constexpr int64_t kHeads = 3, kRows = 24, kColumns = 70;
  std::mt19937 rng(6);
  std::normal_distribution<float> normal;
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    testing::Operand w(dtype, 1, kHeads, kRows, kColumns);
    w.Fill([&](int64_t, int64_t, int64_t, int64_t) { return static_cast<double>(normal(rng)); });
    // Conv1D: one [columns][heads * rows] matrix.
    std::vector<float> floats(kHeads * kRows * kColumns);
    std::vector<uint16_t> halves(floats.size());
    for (int64_t h = 0; h < kHeads; ++h) {
      for (int64_t i = 0; i < kRows; ++i) {
        for (int64_t j = 0; j < kColumns; ++j) {
          const auto at = static_cast<size_t>(j * kHeads * kRows + h * kRows + i);
          floats[at] = w.floats[w.At(0, h, i, j)];
          halves[at] = w.halves[w.At(0, h, i, j)];
        }
      }
    }
    std::vector<float> linear(kHeads), conv(kHeads), threaded(kHeads);
    SpectralParams p{.dtype = dtype,
                     .heads = kHeads,
                     .rows = kRows,
                     .columns = kColumns,
                     .weight = w.View().data,
                     .head_stride = w.head_stride,
                     .row_stride = w.token_stride,
                     .column_stride = 1,
                     .sigma = linear.data()};
    ASSERT_EQ(SpectralNorms(p, {}), Status::kOk);
    p.sigma = threaded.data();
    ASSERT_EQ(SpectralNorms(p, {.threads = 8}), Status::kOk);
    EXPECT_EQ(threaded, linear);
    p.weight =
        dtype == DType::kFloat32 ? static_cast<const void*>(floats.data()) : static_cast<const void*>(halves.data());
    p.head_stride = kRows;
    p.row_stride = 1;
    p.column_stride = kHeads * kRows;
    p.sigma = conv.data();
    ASSERT_EQ(SpectralNorms(p, {}), Status::kOk);
    EXPECT_EQ(conv, linear);
    for (int64_t h = 0; h < kHeads; ++h) {
      Matrix m;
      for (int64_t i = 0; i < kRows; ++i) {
        for (int64_t j = 0; j < kColumns; ++j) m.push_back(w.Get(0, h, i, j));
      }
      EXPECT_LE(
          std::fabs(static_cast<double>(linear[static_cast<size_t>(h)]) / SingularValues(m, kRows, kColumns)[0] - 1),
          1.6e-7);
    }
  }
}

TEST(SpectralTest, GramIsWWTransposed) {
  const Matrix m = Random(13, 21, 8);
  const Result r = Measure(m, 13, 21);
  for (size_t i = 0; i < 13; ++i) {
    for (size_t j = 0; j < 13; ++j) {
      double sum = 0;
      for (size_t c = 0; c < 21; ++c) sum += m[i * 21 + c] * m[j * 21 + c];
      EXPECT_NEAR(static_cast<double>(r.gram[i * 13 + j]), sum, 1e-5);
    }
  }
}

// ---- increment rank ----

double LapackIncrementRank(const Matrix& q, const Matrix& q0, const Matrix& k, const Matrix& k0, int64_t rows,
                           int64_t columns) {
  Matrix m(static_cast<size_t>(columns * columns));
  for (int64_t a = 0; a < columns; ++a) {
    for (int64_t b = 0; b < columns; ++b) {
      double sum = 0;
      for (int64_t i = 0; i < rows; ++i) {
        const auto ia = static_cast<size_t>(i * columns + a);
        const auto ib = static_cast<size_t>(i * columns + b);
        sum += (q[ia] - q0[ia]) * k0[ib] + q0[ia] * (k[ib] - k0[ib]);
      }
      m[static_cast<size_t>(a * columns + b)] = sum;
    }
  }
  const std::vector<double> s = SingularValues(m, columns, columns);
  double total = 0, entropy = 0;
  for (double x : s) total += x * x;
  for (double x : s) {
    if (x > 0) entropy -= x * x / total * std::log(x * x / total);
  }
  return std::exp(entropy);
}

float IncrementRankOf(const Matrix& q, const Matrix& q0, const Matrix& k, const Matrix& k0, int64_t rows,
                      int64_t columns) {
  const std::vector<float> wq(q.begin(), q.end()), wq0(q0.begin(), q0.end()), wk(k.begin(), k.end()),
      wk0(k0.begin(), k0.end());
  float rank = -1;
  const IncrementRankParams p{.heads = 1,
                              .kv_heads = 1,
                              .rows = rows,
                              .columns = columns,
                              .wq = wq.data(),
                              .wq_before = wq0.data(),
                              .wk = wk.data(),
                              .wk_before = wk0.data(),
                              .q_row_stride = columns,
                              .k_row_stride = columns,
                              .effective_rank = &rank};
  EXPECT_EQ(IncrementRank(p, {}), Status::kOk) << LastErrorMessage();
  return rank;
}

Matrix Plus(const Matrix& a, const Matrix& b, double factor) {
  Matrix sum;
  for (size_t i = 0; i < a.size(); ++i) {
    sum.push_back(static_cast<double>(static_cast<float>(a[i] + factor * b[i])));
  }
  return sum;
}

TEST(IncrementRankTest, MatchesLapackOfTheFullMatrix) {
  for (auto [rows, columns] : std::vector<std::pair<int64_t, int64_t>>{{4, 10}, {32, 48}, {48, 32}}) {
    const Matrix q0 = Random(rows, columns, 1), k0 = Random(rows, columns, 2);
    for (double step : {1e-4, 1e-2, 10.0}) {
      const Matrix q = Plus(q0, Random(rows, columns, 3), step);
      const Matrix k = Plus(k0, Random(rows, columns, 4), step / 3);
      const double expected = LapackIncrementRank(q, q0, k, k0, rows, columns);
      EXPECT_LE(std::fabs(static_cast<double>(IncrementRankOf(q, q0, k, k0, rows, columns)) / expected - 1), 1e-5)
          << rows << "x" << columns << " step " << step;
    }
  }
}

TEST(IncrementRankTest, APushAlongOneDirectionHasRankOne) {
  // dW_Q = u kbar^T with W_K fixed: dM = kbar (W_K^T u)^T.
  const Matrix q0 = Random(16, 40, 1), k0 = Random(16, 40, 2);
  const Matrix u = Random(16, 1, 3), kbar = Random(1, 40, 4);
  const Matrix push =
      Make(16, 40, [&](int64_t i, int64_t j) { return u[static_cast<size_t>(i)] * kbar[static_cast<size_t>(j)]; });
  EXPECT_NEAR(IncrementRankOf(Plus(q0, push, 1), q0, k0, k0, 16, 40), 1, 1e-3);
}

TEST(IncrementRankTest, RankIsNanWithoutChangeAndFiniteFromZeroWeights) {
  const Matrix a = Random(5, 9, 1), b = Random(5, 9, 2), zero(45);
  EXPECT_TRUE(std::isnan(IncrementRankOf(a, a, b, b, 5, 9)));
  EXPECT_TRUE(std::isnan(IncrementRankOf(zero, zero, zero, zero, 5, 9)));
  EXPECT_NEAR(static_cast<double>(IncrementRankOf(a, zero, b, b, 5, 9)), LapackIncrementRank(a, zero, b, b, 5, 9),
              1e-4);
  Matrix bad = a;
  bad[7] = NAN;
  EXPECT_TRUE(std::isnan(IncrementRankOf(bad, a, b, b, 5, 9)));
}

TEST(IncrementRankTest, GroupedHeadsReadTheirKeyHead) {
  constexpr int64_t kRows = 4, kColumns = 6, kSize = kRows * kColumns;
  const Matrix q = Random(4 * kRows, kColumns, 1), q0 = Random(4 * kRows, kColumns, 2);
  const Matrix k = Random(2 * kRows, kColumns, 3), k0 = Random(2 * kRows, kColumns, 4);
  const std::vector<float> wq(q.begin(), q.end()), wq0(q0.begin(), q0.end()), wk(k.begin(), k.end()),
      wk0(k0.begin(), k0.end());
  for (uint32_t threads : {0u, 4u}) {
    std::vector<float> rank(4);
    const IncrementRankParams p{.heads = 4,
                                .kv_heads = 2,
                                .rows = kRows,
                                .columns = kColumns,
                                .wq = wq.data(),
                                .wq_before = wq0.data(),
                                .wk = wk.data(),
                                .wk_before = wk0.data(),
                                .q_head_stride = kSize,
                                .q_row_stride = kColumns,
                                .k_head_stride = kSize,
                                .k_row_stride = kColumns,
                                .effective_rank = rank.data()};
    ASSERT_EQ(IncrementRank(p, {.threads = threads}), Status::kOk);
    for (int64_t h = 0; h < 4; ++h) {
      const auto part = [](const Matrix& m, int64_t head) {
        return Matrix(m.begin() + head * kSize, m.begin() + (head + 1) * kSize);
      };
      EXPECT_FLOAT_EQ(rank[static_cast<size_t>(h)],
                      static_cast<float>(LapackIncrementRank(part(q, h), part(q0, h), part(k, h / 2), part(k0, h / 2),
                                                             kRows, kColumns)));
    }
  }
}

}  // namespace
}  // namespace bellwether::kernels
