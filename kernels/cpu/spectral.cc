// Per head: Gram matrix in double, then Lanczos on it.  Units are heads.

#include <atomic>
#include <cmath>
#include <limits>

#include "backends.h"
#include "cpu/buffer.h"
#include "cpu/element.h"
#include "cpu/gram.h"
#include "cpu/lanczos.h"
#include "cpu/parallel.h"
#include "error.h"

namespace bellwether::kernels::cpu {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Writes what is known of a head to the outputs that the caller asked for.
void Store(const SpectralParams& p, int64_t head, double theta, double residual, double trace) {
  p.sigma[head] = static_cast<float>(std::sqrt(theta));
  if (p.residual != nullptr) p.residual[head] = static_cast<float>(residual);
  if (p.stable_rank != nullptr) {
    p.stable_rank[head] = theta == 0 ? 0.0f : static_cast<float>(trace / theta);
  }
}

// Replaces the head's direction by v and tells how far it turned.
void StoreDirection(const SpectralParams& p, int64_t head, const double* v) {
  if (p.direction == nullptr) return;
  float* direction = p.direction + head * p.rows;
  double cosine = 0, squares = 0;
  int64_t largest = 0;
  for (int64_t i = 0; i < p.rows; ++i) {
    cosine += static_cast<double>(direction[i]) * v[i];
    squares += static_cast<double>(direction[i]) * static_cast<double>(direction[i]);
    if (std::fabs(v[i]) > std::fabs(v[largest])) largest = i;
  }
  const bool had_one = std::isfinite(squares) && squares > 0;
  const bool flip = had_one ? cosine < 0 : v[largest] < 0;
  for (int64_t i = 0; i < p.rows; ++i) direction[i] = static_cast<float>(flip ? -v[i] : v[i]);
  if (p.overlap == nullptr) return;
  const bool has_one = v[largest] != 0;
  const double overlap = std::fabs(cosine) / std::sqrt(squares);
  p.overlap[head] = had_one && has_one ? static_cast<float>(std::min(overlap, 1.0)) : kNan;
}

void LoadHint(const SpectralParams& p, int64_t head, double* vector) {
  bool finite = p.direction != nullptr;
  for (int64_t i = 0; finite && i < p.rows; ++i) {
    vector[i] = static_cast<double>(p.direction[head * p.rows + i]);
    finite = std::isfinite(vector[i]);
  }
  if (!finite) std::fill(vector, vector + p.rows, 0.0);
}

template <typename Element>
void MeasureHead(const SpectralParams& p, int64_t head, double* scratch) {
  const int64_t padded = PaddedRows(p.rows);
  double* gram = scratch;
  double* chunk = gram + padded * padded;
  double* vector = chunk + kGramColumns * padded;
  double* lanczos = vector + padded;
  const Element* weight = static_cast<const Element*>(p.weight) + head * p.head_stride;
  ComputeGram(p.rows, p.columns, chunk, gram, [&](int64_t i, int64_t j, int64_t count, double* out) {
    const Element* row = weight + i * p.row_stride + j * p.column_stride;
    for (int64_t c = 0; c < count; ++c) {
      out[c * padded] = static_cast<double>(ToFloat(row[c * p.column_stride]));
    }
  });
  double trace = 0;
  for (int64_t i = 0; i < p.rows; ++i) trace += gram[i * padded + i];
  if (p.gram != nullptr) {
    float* out = p.gram + head * p.rows * p.rows;
    for (int64_t i = 0; i < p.rows; ++i) {
      for (int64_t j = 0; j < p.rows; ++j) {
        out[i * p.rows + j] = static_cast<float>(gram[i * padded + j]);
      }
    }
  }
  // Every weight's square is in the trace, so it tells whether all are finite.
  if (!std::isfinite(trace)) {
    Store(p, head, std::nan(""), std::nan(""), trace);
    if (p.overlap != nullptr) p.overlap[head] = kNan;
    return;
  }
  if (trace == 0) {
    std::fill(vector, vector + p.rows, 0.0);
    Store(p, head, 0, 0, 0);
    StoreDirection(p, head, vector);
    return;
  }
  LoadHint(p, head, vector);
  const Eigenpair top = TopEigenpair(p.rows, gram, padded, vector, lanczos);
  Store(p, head, top.value, top.residual, trace);
  StoreDirection(p, head, vector);
}

}  // namespace

Status SpectralNorms(const SpectralParams& p, uint32_t threads) {
  const int64_t padded = PaddedRows(p.rows);
  const int64_t each = padded * (padded + kGramColumns + 1) + LanczosScratch(p.rows) + kPanel;
  const double operations =
      static_cast<double>(p.heads * p.rows * p.rows) * static_cast<double>(p.columns + 2 * kLanczosSteps);
  const uint32_t workers = UsefulThreads(threads, p.heads, operations);
  // Units are runs of heads, one per worker, so that each allocates once.
  Buffer scratch(each * static_cast<int64_t>(workers));
  if (scratch.data() == nullptr) {
    return Fail(Status::kDeviceError, "out of memory for %u Gram matrices", workers);
  }
  std::atomic<int64_t> next{0};
  WithElement(p.dtype, [&]<typename Element>(const Element*) {
    ParallelFor(workers, workers, [&](int64_t worker) {
      for (int64_t head; (head = next.fetch_add(1, std::memory_order_relaxed)) < p.heads;) {
        MeasureHead<Element>(p, head, scratch.data() + worker * each);
      }
    });
  });
  return Status::kOk;
}

}  // namespace bellwether::kernels::cpu
