// The two 2n x 2n Gram matrices of spectral.h, per query head.

#include <atomic>
#include <cmath>
#include <limits>

#include "backends.h"
#include "cpu/buffer.h"
#include "cpu/gram.h"
#include "cpu/parallel.h"
#include "cpu/symmetric_eigen.h"
#include "error.h"

namespace bellwether::kernels::cpu {
namespace {

struct Pair {
  const float* now;
  const float* before;
  int64_t row_stride;
};

double Change(const Pair& w, int64_t i, int64_t j) {
  const int64_t at = i * w.row_stride + j;
  return static_cast<double>(w.now[at]) - static_cast<double>(w.before[at]);
}

// norm(before) / norm(change), or 1 if either is 0.  Makes the two halves of A
// alike in size; dM does not depend on it.
double Balance(const Pair& w, int64_t rows, int64_t columns) {
  double change = 0, before = 0;
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j) {
      const double d = Change(w, i, j);
      const double b = static_cast<double>(w.before[i * w.row_stride + j]);
      change += d * d;
      before += b * b;
    }
  }
  return change > 0 && before > 0 ? std::sqrt(before / change) : 1.0;
}

// Effective rank from squared singular values; NaN if there are none.
double EffectiveRank(const double* squares, int64_t count) {
  double total = 0;
  for (int64_t i = 0; i < count; ++i) total += std::max(squares[i], 0.0);
  if (!(total > 0)) return std::numeric_limits<double>::quiet_NaN();
  double entropy = 0;
  for (int64_t i = 0; i < count; ++i) {
    const double p = std::max(squares[i], 0.0) / total;
    if (p > 0) entropy -= p * std::log(p);
  }
  return std::exp(entropy);
}

double MeasureHead(const Pair& q, const Pair& k, int64_t rows, int64_t columns, double* scratch) {
  const int64_t n = 2 * rows;
  const int64_t padded = PaddedRows(n);
  double* a = scratch;
  double* b = a + padded * padded;
  double* factor = b + padded * padded;
  double* chunk = factor + padded * padded;
  const double c = Balance(q, rows, columns);
  if (!std::isfinite(c)) return std::numeric_limits<double>::quiet_NaN();
  ComputeGram(n, columns, chunk, a, [&](int64_t i, int64_t j, int64_t count, double* out) {
    for (int64_t t = 0; t < count; ++t) {
      out[t * padded] =
          i < rows ? c * Change(q, i, j + t) : static_cast<double>(q.before[(i - rows) * q.row_stride + j + t]);
    }
  });
  ComputeGram(n, columns, chunk, b, [&](int64_t i, int64_t j, int64_t count, double* out) {
    for (int64_t t = 0; t < count; ++t) {
      out[t * padded] =
          i < rows ? static_cast<double>(k.before[i * k.row_stride + j + t]) / c : Change(k, i - rows, j + t);
    }
  });
  double trace = 0;
  for (int64_t i = 0; i < n; ++i) trace += a[i * padded + i] + b[i * padded + i];
  if (!std::isfinite(trace)) return std::numeric_limits<double>::quiet_NaN();

  const int64_t rank = PivotedCholesky(padded, a, factor);
  // half [rank][n] = R^T B B^T over a's memory, then middle = half R.
  double* half = a;
  for (int64_t r = 0; r < rank; ++r) {
    double* row = half + r * padded;
    std::fill(row, row + padded, 0.0);
    for (int64_t i = 0; i < n; ++i) {
      const double x = factor[r * padded + i];
      for (int64_t j = 0; j < padded; ++j) row[j] += x * b[i * padded + j];
    }
  }
  double* middle = b;
  for (int64_t r = 0; r < rank; ++r) {
    for (int64_t s = 0; s < rank; ++s) {
      double sum = 0;
      for (int64_t j = 0; j < n; ++j) sum += half[r * padded + j] * factor[s * padded + j];
      middle[r * rank + s] = sum;
    }
  }
  double* diagonal = chunk;
  double* off_diagonal = chunk + padded;
  Tridiagonalize(rank, middle, diagonal, off_diagonal, chunk + 2 * padded);
  TridiagonalEigen(rank, diagonal, off_diagonal, nullptr);
  return EffectiveRank(diagonal, rank);
}

}  // namespace

Status IncrementRank(const IncrementRankParams& p, uint32_t threads) {
  const int64_t padded = PaddedRows(2 * p.rows);
  const int64_t each = padded * (3 * padded + kGramColumns);
  const double operations =
      static_cast<double>(p.heads) * 8 * static_cast<double>(p.rows * p.rows) * static_cast<double>(p.columns + p.rows);
  const uint32_t workers = UsefulThreads(threads, p.heads, operations);
  Buffer scratch(each * static_cast<int64_t>(workers));
  if (scratch.data() == nullptr) {
    return Fail(Status::kDeviceError, "out of memory for %u pairs of Gram matrices", workers);
  }
  const int64_t group = p.heads / p.kv_heads;
  std::atomic<int64_t> next{0};
  ParallelFor(workers, workers, [&](int64_t worker) {
    for (int64_t head; (head = next.fetch_add(1, std::memory_order_relaxed)) < p.heads;) {
      const int64_t q_at = head * p.q_head_stride;
      const int64_t k_at = head / group * p.k_head_stride;
      p.effective_rank[head] = static_cast<float>(MeasureHead({p.wq + q_at, p.wq_before + q_at, p.q_row_stride},
                                                              {p.wk + k_at, p.wk_before + k_at, p.k_row_stride}, p.rows,
                                                              p.columns, scratch.data() + worker * each));
    }
  });
  return Status::kOk;
}

}  // namespace bellwether::kernels::cpu
