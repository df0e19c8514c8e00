#include "cpu/lanczos.h"

#include <algorithm>
#include <cmath>

#include "bellwether/kernels/probe.h"
#include "cpu/symmetric_eigen.h"

namespace bellwether::kernels::cpu {
namespace {

constexpr double kConverged = 1e-6;  // of the value
constexpr double kBreakdown = 1e-13;
// Weight of the random part of a warm start.  A hint that is an eigenvector,
// but no longer the top one, would otherwise hide the top one for ever.
constexpr double kPerturbation = 0.1;

double Dot(const double* a, const double* b, int64_t n) {
  double sum[4] = {};
  int64_t i = 0;
  for (; i + 4 <= n; i += 4) {
    for (int lane = 0; lane < 4; ++lane) sum[lane] += a[i + lane] * b[i + lane];
  }
  for (; i < n; ++i) sum[0] += a[i] * b[i];
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

void AddScaled(double factor, const double* x, int64_t n, double* y) {
  for (int64_t i = 0; i < n; ++i) y[i] += factor * x[i];
}

double Normalize(double* x, int64_t n) {
  const double norm = std::sqrt(Dot(x, x, n));
  if (norm > 0) {
    for (int64_t i = 0; i < n; ++i) x[i] /= norm;
  }
  return norm;
}

// Unit vector of fixed pseudo-random numbers, another for every `seed`.
void FillRandom(uint64_t seed, int64_t n, double* x) {
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t hash = ProbeMix(ProbeMix(seed) ^ static_cast<uint64_t>(i));
    x[i] = static_cast<double>(static_cast<int64_t>(hash)) * 0x1p-63;
  }
  Normalize(x, n);
}

// Twice is enough: after the second pass what is left is rounding.
void Orthogonalize(const double* basis, int64_t count, int64_t n, double* x) {
  for (int pass = 0; pass < 2; ++pass) {
    for (int64_t i = 0; i < count; ++i) AddScaled(-Dot(basis + i * n, x, n), basis + i * n, n, x);
  }
}

void Multiply(int64_t n, const double* a, int64_t stride, const double* x, double* y) {
  for (int64_t i = 0; i < n; ++i) y[i] = Dot(a + i * stride, x, n);
}

class Lanczos {
 public:
  Lanczos(int64_t n, const double* a, int64_t stride, double* scratch)
      : n_(n), a_(a), stride_(stride), basis_(scratch) {
    alpha_ = basis_ + (kLanczosBasisMax + 1) * n;
    beta_ = alpha_ + kLanczosBasisMax;
    diagonal_ = beta_ + kLanczosBasisMax;
    off_diagonal_ = diagonal_ + kLanczosBasisMax;
    vectors_ = off_diagonal_ + kLanczosBasisMax;
    product_ = vectors_ + kLanczosBasisMax * kLanczosBasisMax;
    for (int64_t i = 0; i < n; ++i) trace_ += a[i * stride + i];
  }

  void Start(const double* hint) {
    FillRandom(0, n_, basis_);
    std::copy(hint, hint + n_, product_);
    if (Normalize(product_, n_) > 0) {
      for (int64_t i = 0; i < n_; ++i) basis_[i] = kPerturbation * basis_[i] + product_[i];
      Normalize(basis_, n_);
    }
  }

  // Basis vector size_ is there; adds the next one.
  void Step() {
    const double* v = basis_ + size_ * n_;
    double* next = basis_ + (size_ + 1) * n_;
    Multiply(n_, a_, stride_, v, next);
    alpha_[size_] = Dot(v, next, n_);
    Orthogonalize(basis_, size_ + 1, n_, next);
    beta_[size_] = Normalize(next, n_);
    ++size_;
    if (size_ < n_ && beta_[size_ - 1] <= kBreakdown * trace_) {
      // An invariant subspace without, perhaps, the top vector: go on outside.
      beta_[size_ - 1] = 0;
      FillRandom(static_cast<uint64_t>(size_), n_, next);
      Orthogonalize(basis_, size_, n_, next);
      Normalize(next, n_);
    }
  }

  Eigenpair Top(double* vector) {
    std::copy(alpha_, alpha_ + size_, diagonal_);
    std::copy(beta_, beta_ + size_, off_diagonal_);
    std::fill(vectors_, vectors_ + size_ * size_, 0.0);
    for (int64_t i = 0; i < size_; ++i) vectors_[i * size_ + i] = 1;
    TridiagonalEigen(size_, diagonal_, off_diagonal_, vectors_);
    const int64_t top = std::max_element(diagonal_, diagonal_ + size_) - diagonal_;
    std::fill(vector, vector + n_, 0.0);
    for (int64_t i = 0; i < size_; ++i) {
      AddScaled(vectors_[top * size_ + i], basis_ + i * n_, n_, vector);
    }
    Normalize(vector, n_);
    Multiply(n_, a_, stride_, vector, product_);
    Eigenpair pair;
    pair.value = Dot(vector, product_, n_);
    AddScaled(-pair.value, vector, n_, product_);
    pair.residual = std::sqrt(Dot(product_, product_, n_));
    return pair;
  }

  int64_t size() const { return size_; }

 private:
  const int64_t n_;
  const double* const a_;
  const int64_t stride_;
  double* const basis_;  // [size_ + 1][n]
  double* alpha_;        // The tridiagonal projection of a.
  double* beta_;
  double* diagonal_;
  double* off_diagonal_;
  double* vectors_;
  double* product_;  // [n]
  double trace_ = 0;
  int64_t size_ = 0;
};

}  // namespace

Eigenpair TopEigenpair(int64_t n, const double* a, int64_t stride, double* vector, double* scratch) {
  Lanczos lanczos(n, a, stride, scratch);
  lanczos.Start(vector);
  for (;;) {
    const int64_t size = std::min(n, lanczos.size() + kLanczosSteps);
    while (lanczos.size() < size) lanczos.Step();
    const Eigenpair pair = lanczos.Top(vector);
    if (size == n || size == kLanczosBasisMax || pair.residual <= kConverged * pair.value) {
      return pair;
    }
  }
}

}  // namespace bellwether::kernels::cpu
