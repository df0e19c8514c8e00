#include "bellwether/kernels/gram_spectrum.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>

#include "cpu/symmetric_eigen.h"

namespace bellwether::kernels {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
// Of a float32 matrix, what is below this share of its largest value is rounding.
constexpr double kSingleEpsilon = 0x1p-24;

float Rounded(double value) {
  if (!(std::fabs(value) > 0) || !std::isfinite(value)) return static_cast<float>(value);
  int exponent = 0;
  const double fraction = std::frexp(value, &exponent);
  return static_cast<float>(
      std::ldexp(std::nearbyint(std::ldexp(fraction, kGramResultBits)), exponent - kGramResultBits));
}

}  // namespace

GramSpectrum SpectrumOf(const double* eigenvalues, int64_t n) {
  double total = 0, first = 0, second = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (!std::isfinite(eigenvalues[i])) return {kNan, kNan, kNan, kNan};
    const double value = std::max(eigenvalues[i], 0.0);
    total += value;
    if (value > first) {
      second = first;
      first = value;
    } else {
      second = std::max(second, value);
    }
  }
  if (first == 0) return {};
  double entropy = 0;
  for (int64_t i = 0; i < n; ++i) {
    const double p = std::max(eigenvalues[i], 0.0) / total;
    if (p > 0) entropy -= p * std::log(p);
  }
  return {Rounded(std::sqrt(first)), Rounded(total / first), Rounded(std::exp(entropy)),
          Rounded(std::sqrt(second / first))};
}

GramKind ClassifyGram(const float* upper, int64_t n) {
  double largest = 0;
  const float* row = upper;
  double diagonal[kGramRowsMax];
  for (int64_t i = 0; i < n; row += n - i, ++i) {
    for (int64_t j = 0; j < n - i; ++j) {
      if (!std::isfinite(row[j])) return GramKind::kNonfinite;
    }
    diagonal[i] = static_cast<double>(row[0]);
    if (diagonal[i] < 0) return GramKind::kNotAGram;
    largest = std::max(largest, diagonal[i]);
  }
  row = upper;
  for (int64_t i = 0; i < n; row += n - i, ++i) {
    for (int64_t j = 1; j < n - i; ++j) {
      const double most = 1.001 * std::sqrt(diagonal[i] * diagonal[i + j]) + 1e-6 * largest;
      if (std::fabs(static_cast<double>(row[j])) > most) return GramKind::kNotAGram;
    }
  }
  return GramKind::kGram;
}

void ExpandGram(const float* upper, int64_t n, double* matrix) {
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = i; j < n; ++j) matrix[i * n + j] = matrix[j * n + i] = static_cast<double>(*upper++);
  }
}

void IncrementMatrix(const float* upper_a, const float* upper_b, int64_t n, double* matrix, double* scratch) {
  double* const factor = scratch;
  double* const half = scratch + n * n;
  ExpandGram(upper_a, n, half);
  const int64_t rank = cpu::PivotedCholesky(n, half, factor, kSingleEpsilon);
  double* const b = matrix;
  ExpandGram(upper_b, n, b);
  // half [rank][n] = R^T (B B^T), then the matrix = half R.
  for (int64_t r = 0; r < rank; ++r) {
    double* const row = half + r * n;
    std::fill(row, row + n, 0.0);
    for (int64_t i = 0; i < n; ++i) {
      const double x = factor[r * n + i];
      for (int64_t j = 0; j < n; ++j) row[j] += x * b[i * n + j];
    }
  }
  std::fill(matrix, matrix + n * n, 0.0);
  for (int64_t r = 0; r < rank; ++r) {
    for (int64_t s = 0; s <= r; ++s) {
      double sums[4] = {};
      int64_t j = 0;
      for (; j + 4 <= n; j += 4) {
        for (int64_t k = 0; k < 4; ++k) sums[k] += half[r * n + j + k] * factor[s * n + j + k];
      }
      for (; j < n; ++j) sums[0] += half[r * n + j] * factor[s * n + j];
      matrix[r * n + s] = matrix[s * n + r] = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    }
  }
}

namespace cpu {

bool SymmetricEigenvalues(int64_t n, int64_t count, double* matrices, double* values) {
  const auto scratch = std::make_unique<double[]>(static_cast<size_t>(2 * n));
  bool ok = true;
  for (int64_t m = 0; m < count; ++m) {
    double* const diagonal = values + m * n;
    Tridiagonalize(n, matrices + m * n * n, diagonal, scratch.get(), scratch.get() + n);
    ok = TridiagonalEigen(n, diagonal, scratch.get(), nullptr) && ok;
  }
  return ok;
}

}  // namespace cpu
}  // namespace bellwether::kernels
