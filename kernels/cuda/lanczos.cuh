// lanczos.cuh: the top eigenpair of a positive semidefinite matrix, by one block; the
// method of cpu/lanczos.cc, one round of it, with vectors in fp32 and their products in
// double.
//
// The tridiagonal projection has no negative element beside its diagonal, so its top
// eigenvector has none at all: bisection gives the value, and inverse iteration from ones,
// shifted just above it, the vector; the shifted matrix is definite and needs no pivots.

#ifndef BELLWETHER_KERNELS_CUDA_LANCZOS_CUH_
#define BELLWETHER_KERNELS_CUDA_LANCZOS_CUH_

#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

#include "bellwether/kernels/probe.h"
#include "bellwether/kernels/spectral.h"
#include "cuda/block_sum.cuh"

namespace bellwether::kernels::cuda {

inline constexpr int kLanczosThreads = 256;
inline constexpr int kLanczosSize = static_cast<int>(kLanczosSteps);
inline constexpr double kLanczosBreakdown = 1e-7;    // of the trace: what fp32 leaves
inline constexpr double kLanczosPerturbation = 0.1;  // as on the CPU

// Shared memory beside the vectors.
struct LanczosScratch {
  double warps[kLanczosThreads / 32];
  double alpha[kLanczosSize], beta[kLanczosSize];  // The tridiagonal projection.
  double pivots[kLanczosSize], ratios[kLanczosSize], top[kLanczosSize];
  float dots[kLanczosSize + 1];
};

// Floats of the vectors: the basis and two more, and a partial product for each thread.
constexpr int64_t LanczosFloats(int64_t n) { return (kLanczosSteps + 3) * n + kLanczosThreads; }

class Lanczos {
 public:
  // a [n][stride], symmetric; vectors [LanczosFloats(n)] in shared memory.
  __device__ Lanczos(int n, const float* a, int stride, double trace, float* vectors,
                     LanczosScratch* scratch)
      : n_(n),
        stride_(stride),
        a_(a),
        trace_(trace),
        basis_(vectors),
        vector_(basis_ + (kLanczosSize + 1) * n),
        product_(vector_ + n),
        partial_(product_ + n),
        s_(*scratch) {}

  // hint [n] in shared memory, 0 for none.
  __device__ void Run(const float* hint) {
    const double length = sqrt(Dot(hint, hint));
    FillRandom(0, basis_);
    Normalize(basis_);
    if (length > 0) {
      for (int i = threadIdx.x; i < n_; i += kLanczosThreads) {
        basis_[i] = static_cast<float>(kLanczosPerturbation * static_cast<double>(basis_[i]) +
                                       static_cast<double>(hint[i]) / length);
      }
      Normalize(basis_);
    }
    size_ = min(n_, kLanczosSize);
    for (int step = 0; step < size_; ++step) Step(step);
    FindTop();
  }

  // The unit Ritz vector [n], in shared memory, its value and |a v - value v|.
  __device__ const float* vector() const { return vector_; }
  __device__ double value() const { return value_; }
  __device__ double residual() const { return residual_; }

 private:
  __device__ double Dot(const float* x, const float* y) {
    double sum = 0;
    for (int i = threadIdx.x; i < n_; i += kLanczosThreads) {
      sum = fma(static_cast<double>(x[i]), static_cast<double>(y[i]), sum);
    }
    return SumOverBlock(sum, s_.warps);
  }

  // Also waits for what was written to x before, and for itself.
  __device__ double Normalize(float* x) {
    __syncthreads();
    const double norm = sqrt(Dot(x, x));
    if (norm > 0) {
      for (int i = threadIdx.x; i < n_; i += kLanczosThreads) {
        x[i] = static_cast<float>(static_cast<double>(x[i]) / norm);
      }
    }
    __syncthreads();
    return norm;
  }

  __device__ void FillRandom(uint64_t seed, float* x) {
    for (int i = threadIdx.x; i < n_; i += kLanczosThreads) {
      const uint64_t hash = ProbeMix(ProbeMix(seed) ^ static_cast<uint64_t>(i));
      x[i] = static_cast<float>(static_cast<int64_t>(hash)) * 0x1p-63f;
    }
  }

  // y = a x: neighbouring threads take neighbouring columns, which are rows, too.
  __device__ void Multiply(const float* x, float* y) {
    int lanes = 32;
    while (lanes < n_ && lanes < kLanczosThreads) lanes *= 2;
    const int part = threadIdx.x / lanes, parts = kLanczosThreads / lanes;
    for (int first = 0; first < n_; first += lanes) {
      const int i = first + threadIdx.x % lanes;
      float sum = 0;
      if (i < n_) {
#pragma unroll 8
        for (int j = part; j < n_; j += parts) {
          sum = fmaf(a_[int64_t{j} * stride_ + i], x[j], sum);
        }
      }
      partial_[threadIdx.x] = sum;
      __syncthreads();
      if (part == 0 && i < n_) {
        for (int other = 1; other < parts; ++other) sum += partial_[other * lanes + threadIdx.x];
        y[i] = sum;
      }
      __syncthreads();
    }
  }

  // Takes the first `count` basis vectors out of x: twice is enough.
  __device__ void Orthogonalize(int count, float* x) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int pass = 0; pass < 2; ++pass) {
      for (int v = warp; v < count; v += kLanczosThreads / 32) {
        const float* const b = basis_ + v * n_;
        float sum = 0;
        for (int i = lane; i < n_; i += 32) sum = fmaf(b[i], x[i], sum);
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2) {
          sum += __shfl_xor_sync(0xffffffffu, sum, offset);
        }
        if (lane == 0) s_.dots[v] = sum;
      }
      __syncthreads();
      for (int i = threadIdx.x; i < n_; i += kLanczosThreads) {
        float sum = x[i];
        for (int v = 0; v < count; ++v) sum = fmaf(-s_.dots[v], basis_[v * n_ + i], sum);
        x[i] = sum;
      }
      __syncthreads();
    }
  }

  __device__ void Step(int step) {
    const float* const v = basis_ + step * n_;
    float* const next = basis_ + (step + 1) * n_;
    Multiply(v, next);
    const double alpha = Dot(v, next);
    Orthogonalize(step + 1, next);
    double beta = Normalize(next);
    if (step + 1 < n_ && beta <= kLanczosBreakdown * trace_) {
      // An invariant subspace without, perhaps, the top vector: go on outside.
      beta = 0;
      FillRandom(static_cast<uint64_t>(step + 1), next);
      __syncthreads();
      Orthogonalize(step + 1, next);
      Normalize(next);
    }
    if (threadIdx.x == 0) {
      s_.alpha[step] = alpha;
      s_.beta[step] = beta;
    }
    __syncthreads();
  }

  // Whether all eigenvalues of the projection lie below x.
  __device__ bool AllBelow(double x) const {
    double pivot = s_.alpha[0] - x;
    for (int i = 1; i < size_ && pivot < 0; ++i) {
      pivot = s_.alpha[i] - x - s_.beta[i - 1] * s_.beta[i - 1] / pivot;
    }
    return pivot < 0;
  }

  // A bound just above the projection's top eigenvalue, by one warp.
  __device__ double BoundTop() const {
    constexpr int kRounds = 11;  // 33^-11 of the interval is left: less than rounding.
    double low = s_.alpha[0], high = 0;
    for (int i = 0; i < size_; ++i) {
      low = fmax(low, s_.alpha[i]);
      high = fmax(high,
                  s_.alpha[i] + (i > 0 ? s_.beta[i - 1] : 0.) + (i + 1 < size_ ? s_.beta[i] : 0.));
    }
    high *= 1 + 1e-14;
    for (int round = 0; round < kRounds; ++round) {
      const double width = (high - low) / 33;
      const double mine = low + width * (threadIdx.x % 32 + 1);
      const unsigned below = __ballot_sync(0xffffffffu, AllBelow(mine));
      const int first = below == 0 ? 32 : __ffs(static_cast<int>(below)) - 1;
      if (first < 32) high = low + width * (first + 1);
      low += width * first;
    }
    return high * (1 + 1e-14);
  }

  // The projection's top eigenvector, in s_.top, by one thread.
  __device__ void IterateInversely(double shift) {
    double pivot = shift - s_.alpha[0];
    for (int i = 0; i < size_; ++i) {
      pivot = fmax(pivot, 1e-16 * shift);
      s_.pivots[i] = 1 / pivot;
      s_.ratios[i] = i + 1 < size_ ? s_.beta[i] / pivot : 0.;
      if (i + 1 < size_) pivot = shift - s_.alpha[i + 1] - s_.beta[i] * s_.ratios[i];
      s_.top[i] = 1;
    }
    for (int iteration = 0; iteration < 3; ++iteration) {
      double largest = 0;
      for (int i = 1; i < size_; ++i) s_.top[i] += s_.ratios[i - 1] * s_.top[i - 1];
      for (int i = size_ - 1; i >= 0; --i) {
        s_.top[i] *= s_.pivots[i];
        if (i + 1 < size_) s_.top[i] += s_.ratios[i] * s_.top[i + 1];
        largest = fmax(largest, s_.top[i]);
      }
      for (int i = 0; i < size_; ++i) s_.top[i] /= largest;
    }
  }

  __device__ void FindTop() {
    if (threadIdx.x < 32) {
      const double shift = BoundTop();
      if (threadIdx.x == 0) IterateInversely(shift);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < n_; i += kLanczosThreads) {
      double sum = 0;
      for (int v = 0; v < size_; ++v)
        sum = fma(s_.top[v], static_cast<double>(basis_[v * n_ + i]), sum);
      vector_[i] = static_cast<float>(sum);
    }
    Normalize(vector_);
    Multiply(vector_, product_);
    value_ = Dot(vector_, product_);
    double squares = 0;
    for (int i = threadIdx.x; i < n_; i += kLanczosThreads) {
      const double rest =
          static_cast<double>(product_[i]) - value_ * static_cast<double>(vector_[i]);
      squares = fma(rest, rest, squares);
    }
    residual_ = sqrt(SumOverBlock(squares, s_.warps));
  }

  const int n_, stride_;
  const float* const a_;
  const double trace_;
  float* const basis_;    // [kLanczosSize + 1][n]
  float* const vector_;   // [n]
  float* const product_;  // [n]
  float* const partial_;  // [kLanczosThreads]
  LanczosScratch& s_;
  int size_ = 0;
  double value_ = 0, residual_ = 0;
};

}  // namespace bellwether::kernels::cuda

#endif  // BELLWETHER_KERNELS_CUDA_LANCZOS_CUH_
