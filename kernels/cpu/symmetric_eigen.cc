#include "cpu/symmetric_eigen.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace bellwether::kernels::cpu {
namespace {

constexpr double kEpsilon = std::numeric_limits<double>::epsilon();

// Applies I - 2 u u^T from both sides to the trailing block of a from `first`
// on: with p = 2 A u and w = p - (u.p) u, A becomes A - u w^T - w u^T.
void Reflect(int64_t n, int64_t first, const double* u, double* w, double* a) {
  double along = 0;
  for (int64_t i = first; i < n; ++i) {
    double sum = 0;
    for (int64_t j = first; j < n; ++j) sum += a[i * n + j] * u[j];
    w[i] = 2 * sum;
    along += u[i] * w[i];
  }
  for (int64_t i = first; i < n; ++i) w[i] -= along * u[i];
  for (int64_t i = first; i < n; ++i) {
    for (int64_t j = first; j < n; ++j) a[i * n + j] -= u[i] * w[j] + w[i] * u[j];
  }
}

// One implicit QL sweep on the unreduced block first..last.
void Sweep(int64_t n, int64_t first, int64_t last, double* d, double* e, double* vectors) {
  // Wilkinson's shift: the eigenvalue of the leading 2 x 2 next to d[first].
  const double g0 = (d[first + 1] - d[first]) / (2 * e[first]);
  const double shift = d[first] - e[first] / (g0 + std::copysign(std::hypot(g0, 1.0), g0));
  double bulge = d[last] - shift;
  double cosine = 1, sine = 1, carried = 0;
  for (int64_t i = last - 1; i >= first; --i) {
    const double f = sine * e[i];
    const double b = cosine * e[i];
    const double r = std::hypot(f, bulge);
    e[i + 1] = r;
    if (r == 0) {  // The block splits here by itself.
      d[i + 1] -= carried;
      e[last] = 0;
      return;
    }
    sine = f / r;
    cosine = bulge / r;
    const double base = d[i + 1] - carried;
    const double t = (d[i] - base) * sine + 2 * cosine * b;
    carried = sine * t;
    d[i + 1] = base + carried;
    bulge = cosine * t - b;
    if (vectors == nullptr) continue;
    double* lower = vectors + i * n;
    double* upper = lower + n;
    for (int64_t k = 0; k < n; ++k) {
      const double x = upper[k];
      upper[k] = sine * lower[k] + cosine * x;
      lower[k] = cosine * lower[k] - sine * x;
    }
  }
  d[first] -= carried;
  e[first] = bulge;
  e[last] = 0;
}

}  // namespace

void Tridiagonalize(int64_t n, double* a, double* diagonal, double* off_diagonal, double* scratch) {
  double* u = diagonal;  // Entries beyond the current column are still free.
  for (int64_t column = 0; column + 1 < n; ++column) {
    const int64_t first = column + 1;
    double norm = 0;
    for (int64_t i = first; i < n; ++i) norm = std::hypot(norm, a[i * n + column]);
    const double pivot = a[first * n + column];
    off_diagonal[column] = pivot <= 0 ? norm : -norm;
    diagonal[column] = a[column * n + column];
    if (norm == 0) continue;
    double squares = 0;
    for (int64_t i = first; i < n; ++i) {
      u[i] = a[i * n + column] / norm;
      if (i == first) u[i] -= off_diagonal[column] / norm;
      squares += u[i] * u[i];
    }
    const double length = std::sqrt(squares);
    for (int64_t i = first; i < n; ++i) u[i] /= length;
    Reflect(n, first, u, scratch, a);
  }
  if (n > 0) {
    diagonal[n - 1] = a[n * n - 1];
    off_diagonal[n - 1] = 0;
  }
}

bool TridiagonalEigen(int64_t n, double* diagonal, double* off_diagonal, double* vectors) {
  constexpr int kSweepsMax = 60;  // 2-3 are usual.
  for (int64_t first = 0; first < n; ++first) {
    for (int sweeps = 0;; ++sweeps) {
      int64_t last = first;
      while (last + 1 < n) {
        const double scale = std::fabs(diagonal[last]) + std::fabs(diagonal[last + 1]);
        if (std::fabs(off_diagonal[last]) <= kEpsilon * scale) break;
        ++last;
      }
      if (last == first) break;
      if (sweeps == kSweepsMax) return false;
      Sweep(n, first, last, diagonal, off_diagonal, vectors);
    }
  }
  return true;
}

int64_t PivotedCholesky(int64_t n, double* a, double* factor, double epsilon) {
  double largest = 0;
  for (int64_t i = 0; i < n; ++i) largest = std::max(largest, a[i * n + i]);
  const double stop = static_cast<double>(n) * epsilon * largest;
  int64_t rank = 0;
  for (; rank < n; ++rank) {
    int64_t pivot = 0;
    for (int64_t i = 1; i < n; ++i) {
      if (a[i * n + i] > a[pivot * n + pivot]) pivot = i;
    }
    const double value = a[pivot * n + pivot];
    if (!(value > stop)) break;
    double* column = factor + rank * n;
    const double root = std::sqrt(value);
    for (int64_t i = 0; i < n; ++i) column[i] = a[i * n + pivot] / root;
    for (int64_t i = 0; i < n; ++i) {
      if (column[i] == 0) continue;
      for (int64_t j = 0; j < n; ++j) a[i * n + j] -= column[i] * column[j];
    }
    for (int64_t i = 0; i < n; ++i) a[i * n + pivot] = a[pivot * n + i] = 0;
  }
  return rank;
}

}  // namespace bellwether::kernels::cpu
