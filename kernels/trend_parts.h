// trend_parts.h: the arithmetic of a trend's fit, once for the CPU and the GPU: both
// must come to the same bits, so that a run is judged alike on either.  Private to kernels/.
//
// That holds as long as no compiler joins a product and a sum: the sources that include
// this are compiled with -ffp-contract=off and --fmad=false.

#ifndef BELLWETHER_KERNELS_TREND_PARTS_H_
#define BELLWETHER_KERNELS_TREND_PARTS_H_

#include <cstdint>

namespace bellwether::kernels {

inline constexpr double kLn2 = 0.693147180559945309417;

// ln x of a float above 0, to 2e-16 of 1 + |ln x|.  The libraries' logarithms differ in
// the last bit.  2 artanh s with s = (m - 1) / (m + 1), x = m 2^e, m within sqrt 2 of 1:
// |s| < 0.172, so the twelfth term is below 1e-18.
constexpr double LogOf(float value) {
  const auto bits = __builtin_bit_cast(uint64_t, static_cast<double>(value));
  auto exponent = static_cast<int>(bits >> 52) - 1023;
  auto m = __builtin_bit_cast(double, (bits & 0xfffffffffffffu) | 0x3ff0000000000000u);
  if (m > 1.41421356237309504880) {
    m *= 0.5;
    ++exponent;
  }
  const double s = (m - 1) / (m + 1);
  const double z = s * s;
  double sum = 0;
  for (int k = 11; k >= 0; --k) sum = sum * z + 1.0 / (2 * k + 1);
  return exponent * kLn2 + 2 * (s * sum);
}

// Finite and above 0: what a logarithm can be taken of.
constexpr bool IsPositive(float value) { return value > 0 && value <= 3.402823466e38f; }

// Share of the variance of y that the least-squares line explains; 0 if there is none.
constexpr double LeastSquaresR2(const double* x, const double* y, int n) {
  double mean_x = 0, mean_y = 0;
  for (int i = 0; i < n; ++i) {
    mean_x += x[i] / n;
    mean_y += y[i] / n;
  }
  double xx = 0, xy = 0, yy = 0;
  for (int i = 0; i < n; ++i) {
    xx += (x[i] - mean_x) * (x[i] - mean_x);
    xy += (x[i] - mean_x) * (y[i] - mean_y);
    yy += (y[i] - mean_y) * (y[i] - mean_y);
  }
  return xx > 0 && yy > 0 ? xy * xy / (xx * yy) : 0;
}

struct LineFit {
  double r2 = 0;
  double variance = 0;  // Of S, widened.
};

// What the line intercept + slope x leaves of y.
constexpr LineFit FitOfLine(const double* x, const double* y, int n, double slope, double intercept) {
  double mean_y = 0;
  for (int i = 0; i < n; ++i) mean_y += y[i] / n;
  double left = 0, total = 0, product = 0, last = 0;
  for (int i = 0; i < n; ++i) {
    const double residual = y[i] - intercept - slope * x[i];
    left += residual * residual;
    total += (y[i] - mean_y) * (y[i] - mean_y);
    if (i > 0) product += residual * last;
    last = residual;
  }
  LineFit fit;
  fit.r2 = total > 0 && left < total ? 1 - left / total : 0;
  // Residuals that are only rounding tell nothing of correlation.
  double phi = left > 1e-12 * total ? product / left : 0;
  phi = phi < 0 ? 0 : phi > 0.9 ? 0.9 : phi;
  fit.variance = n * (n - 1.0) * (2.0 * n + 5.0) / 18.0 * (1 + phi) / (1 - phi);
  return fit;
}

// S moved by one towards 0, as Mann and Kendall have it.
constexpr double Shrunk(int64_t sign_sum) { return static_cast<double>(sign_sum - ((sign_sum > 0) - (sign_sum < 0))); }

}  // namespace bellwether::kernels

#endif  // BELLWETHER_KERNELS_TREND_PARTS_H_
