// lanczos.cuh: the top eigenpair of a positive semidefinite matrix, by one
// block.  The method is one round of cpu/lanczos.cc.  Vectors are in fp32, and
// so are their products except the last, which are double.
//
// A step is nothing but latency, so it is short in barriers.  Two neighbouring
// threads own a row (of each 128) of every vector in registers.  A matrix of up
// to 128 rows lies in registers.  A warp takes four basis vectors' products at
// once.  What alpha and beta need falls off the orthogonalisation.  All is
// scaled by a power of two, so that the trace is 1 to 2.
//
// The tridiagonal projection has no negative element beside its diagonal, so
// its top eigenvector has none at all.  Bisection gives the value.  Inverse
// iteration from ones, shifted just above it, gives the vector.  One warp has a
// row of the projection in each lane.  The leading minors of the shifted
// projection are all positive above its top value: their recurrence needs no
// division, and their ratios are the pivots.

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
inline constexpr int kLanczosRows = kLanczosThreads / 2;  // of a vector, owned at once
inline constexpr float kLanczosBreakdown = 1e-7f;         // of the trace: what fp32 leaves
inline constexpr float kLanczosPerturbation = 0.1f;       // as on the CPU
static_assert(kLanczosSize == 32, "a lane for each step, and four for each warp");

// Shared memory beside the vectors.
struct LanczosScratch {
  double warps[kLanczosThreads / 32];
  // The tridiagonal projection: its diagonal, and beside it (beta[i] couples i and i + 1).
  double alpha[kLanczosSize], beta[kLanczosSize];
  double squares[kLanczosSize];  // squares[i]: of what couples i - 1 and i
  double top[kLanczosSize];
  alignas(16) float dots[kLanczosSize];
  float sums[kLanczosThreads / 32];
};

// kParts: 128 rows each.
template <int kParts>
class Lanczos {
 public:
  // Floats from one vector to the next: even and odd vectors' rows lie in different banks.
  static constexpr int kPitch = kParts * kLanczosRows + 16;
  static constexpr int64_t kFloats = int64_t{kLanczosSize + 2} * kPitch;

  // a [n][stride], symmetric, its trace positive and finite, n <= 128 kParts; vectors [kFloats]
  // in shared memory, aligned to 16 bytes.  With one part `a` is read here alone.
  __device__ Lanczos(int n, const float* a, int stride, double trace, float* vectors, LanczosScratch* scratch)
      : n_(n),
        stride_(stride),
        a_(a),
        basis_(vectors),
        work_(basis_ + kLanczosSize * kPitch),
        vector_(work_ + kPitch),
        s_(*scratch) {
    const int exponent = max(-126, min(126, -ilogb(trace)));
    scale_ = scalbnf(1.f, exponent);
    trace_ = static_cast<float>(trace * static_cast<double>(scale_));
    if constexpr (kParts == 1) {
      const int row = Row(0);
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        const int column = Column(i);
        held_[i] = row < n && column < n ? a[row * stride + column] * scale_ : 0.f;
      }
    }
  }

  // hint [n] in shared memory, 0 for none.
  __device__ void Run(const float* hint) {
    for (int i = threadIdx.x; i < kFloats; i += kLanczosThreads) basis_[i] = 0.f;
    for (int i = threadIdx.x; i < kLanczosSize; i += kLanczosThreads) {
      s_.dots[i] = 0.f;
      s_.alpha[i] = s_.beta[i] = s_.squares[i] = 0;
    }
    Start(hint);
    size_ = min(n_, kLanczosSize);
#pragma unroll 1
    for (int step = 0; step < size_; ++step) Step(step);
    FindTop();
  }

  // The unit Ritz vector [n], in shared memory, its value and |a v - value v|.
  __device__ const float* vector() const { return vector_; }
  __device__ double value() const { return value_ / static_cast<double>(scale_); }
  __device__ double residual() const { return residual_ / static_cast<double>(scale_); }

 private:
  using Mine = float[kParts];  // this pair's rows of a vector, in both its threads
  static constexpr int kHeld = kParts == 1 ? kLanczosRows / 2 : 1;

  static __device__ bool IsFirst() { return threadIdx.x % 2 == 0; }
  static __device__ int Row(int part) { return part * kLanczosRows + static_cast<int>(threadIdx.x) / 2; }
  // Of held_[i]: groups of four, this thread's and its neighbour's in turn.
  static __device__ int Column(int i) { return (i / 4 * 2 + static_cast<int>(threadIdx.x) % 2) * 4 + i % 4; }

  static __device__ void Store(const Mine& x, float* to) {
    if (!IsFirst()) return;
#pragma unroll
    for (int part = 0; part < kParts; ++part) to[Row(part)] = x[part];
  }

  template <class Term>
  __device__ double SumOverRows(const Term& term) {
    double sum = 0;
    if (IsFirst()) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) sum += term(part);
    }
    return SumOverBlock(sum, s_.warps);
  }

  __device__ double Length(const Mine& x) {
    return sqrt(SumOverRows([&](int part) {
      const double of = static_cast<double>(x[part]);
      return of * of;
    }));
  }

  __device__ void FillRandom(uint64_t seed, Mine& x) const {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const uint64_t hash = ProbeMix(ProbeMix(seed) ^ static_cast<uint64_t>(Row(part)));
      x[part] = Row(part) < n_ ? static_cast<float>(static_cast<int64_t>(hash)) * 0x1p-63f : 0.f;
    }
  }

  __device__ void Start(const float* hint) {
    Mine x, of_hint;
#pragma unroll
    for (int part = 0; part < kParts; ++part) of_hint[part] = Row(part) < n_ ? hint[Row(part)] : 0.f;
    const double hint_length = Length(of_hint);
    FillRandom(0, x);
    const double random_length = Length(x);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const double random = static_cast<double>(x[part]) / random_length;
      x[part] = static_cast<float>(hint_length > 0 ? static_cast<double>(kLanczosPerturbation) * random +
                                                         static_cast<double>(of_hint[part]) / hint_length
                                                   : random);
    }
    const double length = Length(x);  // Its barriers are behind the clearing of the basis.
#pragma unroll
    for (int part = 0; part < kParts; ++part) x[part] = static_cast<float>(static_cast<double>(x[part]) / length);
    Store(x, basis_);
    __syncthreads();
  }

  // y = a x, in registers and in work_, which all see; x in shared memory.
  __device__ void Multiply(const float* x, Mine& y) {
    if constexpr (kParts == 1) {
      float sums[4] = {};
#pragma unroll
      for (int i = 0; i < kHeld; i += 4) {
        const float4 of = *reinterpret_cast<const float4*>(x + Column(i));
        sums[0] = fmaf(held_[i], of.x, sums[0]);
        sums[1] = fmaf(held_[i + 1], of.y, sums[1]);
        sums[2] = fmaf(held_[i + 2], of.z, sums[2]);
        sums[3] = fmaf(held_[i + 3], of.w, sums[3]);
      }
      y[0] = (sums[0] + sums[1]) + (sums[2] + sums[3]);
      y[0] += __shfl_xor_sync(0xffffffffu, y[0], 1);
      Store(y, work_);
      __syncthreads();
    } else {  // Neighbouring threads take neighbouring columns, which are rows, too.
      for (int i = threadIdx.x; i < n_; i += kLanczosThreads) {
        float sum = 0;
#pragma unroll 4
        for (int j = 0; j < n_; ++j) sum = fmaf(a_[int64_t{j} * stride_ + i], x[j], sum);
        work_[i] = sum * scale_;
      }
      __syncthreads();
#pragma unroll
      for (int part = 0; part < kParts; ++part) y[part] = work_[Row(part)];
    }
  }

  // Where dots has the product with basis vector v: those of one of two threads lie together.
  static __device__ int DotPlace(int v) { return v % 2 * (kLanczosSize / 2) + v / 2; }

  // Products of work_ with the first `count` basis vectors, four a warp; all see them.
  __device__ void TakeDots(int count) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (4 * warp < count) {
      float sums[4] = {};
#pragma unroll 1
      for (int part = 0; part < kParts; ++part) {
        const int at = part * kLanczosRows + 4 * lane;
        const float4 x = *reinterpret_cast<const float4*>(work_ + at);
#pragma unroll
        for (int v = 0; v < 4; ++v) {
          const float4 b = *reinterpret_cast<const float4*>(basis_ + (4 * warp + v) * kPitch + at);
          sums[v] = fmaf(b.x, x.x, sums[v]);
          sums[v] = fmaf(b.y, x.y, sums[v]);
          sums[v] = fmaf(b.z, x.z, sums[v]);
          sums[v] = fmaf(b.w, x.w, sums[v]);
        }
      }
      // Half of the lanes take two of the sums each, a quarter one.
      const bool upper = lane & 16, odd = lane & 8;
      const float kept[2] = {upper ? sums[2] : sums[0], upper ? sums[3] : sums[1]};
      const float given[2] = {upper ? sums[0] : sums[2], upper ? sums[1] : sums[3]};
      const float first = kept[0] + __shfl_xor_sync(0xffffffffu, given[0], 16);
      const float second = kept[1] + __shfl_xor_sync(0xffffffffu, given[1], 16);
      float sum = (odd ? second : first) + __shfl_xor_sync(0xffffffffu, odd ? first : second, 8);
#pragma unroll
      for (int offset = 4; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
      if (lane % 8 == 0) s_.dots[DotPlace(4 * warp + lane / 8)] = sum;
    }
    __syncthreads();
  }

  // Takes the first `count` basis vectors out of x once; x is in work_, too, and all see it.
  __device__ void Project(int count, Mine& x) {
    TakeDots(count);
    const int mine = threadIdx.x % 2;
    Mine sum = {};
#pragma unroll(kParts == 1 ? kLanczosSize / 8 : 1)
    for (int i = 0; i < kLanczosSize / 2; i += 4) {
      if (2 * i >= count) break;
      const float4 dots = *reinterpret_cast<const float4*>(s_.dots + mine * (kLanczosSize / 2) + i);
      const float of[4] = {dots.x, dots.y, dots.z, dots.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          sum[part] = fmaf(of[j], basis_[(2 * (i + j) + mine) * kPitch + Row(part)], sum[part]);
        }
      }
    }
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      x[part] -= sum[part] + __shfl_xor_sync(0xffffffffu, sum[part], 1);
    }
  }

  // Once more, since what rounding leaves of the first time counts where little is left of x;
  // then x's length.
  __device__ float ProjectAgain(int count, Mine& x) {
    Store(x, work_);
    __syncthreads();
    Project(count, x);
    float sum = 0.f;
#pragma unroll
    for (int part = 0; part < kParts; ++part) sum = fmaf(x[part], x[part], sum);
#pragma unroll
    for (int offset = 16; offset > 1; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    if (threadIdx.x % 32 == 0) s_.sums[threadIdx.x / 32] = sum;
    __syncthreads();
    float total = 0.f;
#pragma unroll
    for (int warp = 0; warp < kLanczosThreads / 32; ++warp) total += s_.sums[warp];
    return sqrtf(total);
  }

  __device__ void Step(int step) {
    Mine x;
    Multiply(basis_ + step * kPitch, x);
    Project(step + 1, x);
    const float alpha = s_.dots[DotPlace(step)];
    if (threadIdx.x == 0) s_.alpha[step] = static_cast<double>(alpha);
    if (step + 1 == size_) return;
    float beta = ProjectAgain(step + 1, x), length = beta;
    if (beta <= kLanczosBreakdown * trace_) {
      // An invariant subspace without, perhaps, the top vector: go on outside.
      beta = 0.f;
      FillRandom(static_cast<uint64_t>(step + 1), x);
      Store(x, work_);
      __syncthreads();
      Project(step + 1, x);
      length = ProjectAgain(step + 1, x);
    }
    if (threadIdx.x == 0) {
      s_.beta[step] = static_cast<double>(beta);
      s_.squares[step + 1] = static_cast<double>(beta) * static_cast<double>(beta);
    }
    const float inverse = length > 0.f ? 1.f / length : 0.f;
#pragma unroll
    for (int part = 0; part < kParts; ++part) x[part] *= inverse;
    Store(x, basis_ + (step + 1) * kPitch);
    __syncthreads();
  }

  // Whether all eigenvalues of the projection lie below x: whether all leading minors of
  // x - projection are positive.  `minors`: this lane's and the one before.
  __device__ bool AllBelow(double x, double (&minors)[2]) const {
    const int lane = threadIdx.x % 32;
    double before = 0, minor = 1;
    bool positive = true;
#pragma unroll 4
    for (int i = 0; i < kLanczosSize; ++i) {
      const double next = fma(x - s_.alpha[i], minor, -(s_.squares[i] * before));
      before = minor;
      minor = next;
      positive = positive && minor > 0;
      if (i == lane) {
        minors[0] = minor;
        minors[1] = before;
      }
    }
    return positive;
  }

  // The projection's top eigenvector, in s_.top, by one warp.  Steps that there were none of are
  // rows of zeros.
  __device__ void FindTopOfProjection() {
    constexpr unsigned kAll = 0xffffffffu;
    constexpr int kRounds = 6;        // 33^-6 of the interval is left: less than the margin.
    constexpr double kMargin = 1e-8;  // 32 pivots of this size are no underflow.
    const int lane = threadIdx.x % 32;
    double low = s_.alpha[lane];
    double high = low + s_.beta[lane] + (lane > 0 ? s_.beta[lane - 1] : 0.);
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      low = fmax(low, __shfl_xor_sync(kAll, low, offset));
      high = fmax(high, __shfl_xor_sync(kAll, high, offset));
    }
    // The largest is 1 now, so that the minors stay in range.
    const double unit = 1 / high;
    __syncwarp();
    s_.alpha[lane] *= unit;
    s_.beta[lane] *= unit;
    s_.squares[lane] *= unit * unit;
    __syncwarp();
    low *= unit;
    high = 1 + kMargin;
    double minors[2] = {1, 1};
    for (int round = 0; round < kRounds; ++round) {
      const double width = (high - low) / 33;
      const bool mine = AllBelow(low + width * (lane + 1), minors);
      const unsigned below = __ballot_sync(kAll, mine);
      const int first = below == 0 ? 32 : __ffs(static_cast<int>(below)) - 1;
      if (first < 32) high = low + width * (first + 1);
      low += width * first;
    }
    AllBelow(high * (1 + kMargin), minors);

    // x - projection = L D L^T, L's elements beside the diagonal being -ratio.
    const double inverse = minors[1] / minors[0];  // of the pivot
    const double ratio = s_.beta[lane] * inverse;  // couples to the next
    double ratio_before = __shfl_up_sync(kAll, ratio, 1);
    if (lane == 0) ratio_before = 0;
    double top = lane < size_ ? 1 : 0;
    for (int iteration = 0; iteration < 3; ++iteration) {
      // Two recurrences y_i = factor_i y_(i - 1) + x_i, of which all terms are positive.
      double factor = ratio_before;
#pragma unroll
      for (int offset = 1; offset < 32; offset *= 2) {
        const double other = __shfl_up_sync(kAll, top, offset);
        const double more = __shfl_up_sync(kAll, factor, offset);
        if (lane >= offset) {
          top = fma(factor, other, top);
          factor *= more;
        }
      }
      top *= inverse;
      factor = ratio;
#pragma unroll
      for (int offset = 1; offset < 32; offset *= 2) {
        const double other = __shfl_down_sync(kAll, top, offset);
        const double more = __shfl_down_sync(kAll, factor, offset);
        if (lane + offset < 32) {
          top = fma(factor, other, top);
          factor *= more;
        }
      }
    }
    double largest = top;
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) largest = fmax(largest, __shfl_xor_sync(kAll, largest, offset));
    s_.top[lane] = top / largest;
  }

  __device__ void FindTop() {
    __syncthreads();
    if (threadIdx.x < 32) FindTopOfProjection();
    __syncthreads();
    Mine x, y;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      double sum = 0;
#pragma unroll(kParts == 1 ? 4 : 1)
      for (int v = threadIdx.x % 2; v < kLanczosSize; v += 2) {
        sum = fma(s_.top[v], static_cast<double>(basis_[v * kPitch + Row(part)]), sum);
      }
      x[part] = static_cast<float>(sum + __shfl_xor_sync(0xffffffffu, sum, 1));
    }
    const double length = Length(x);
#pragma unroll
    for (int part = 0; part < kParts; ++part) x[part] = static_cast<float>(static_cast<double>(x[part]) / length);
    Store(x, vector_);
    __syncthreads();
    Multiply(vector_, y);
    value_ = SumOverRows([&](int part) { return static_cast<double>(x[part]) * static_cast<double>(y[part]); });
    residual_ = sqrt(SumOverRows([&](int part) {
      const double rest = static_cast<double>(y[part]) - value_ * static_cast<double>(x[part]);
      return rest * rest;
    }));
  }

  const int n_, stride_;
  const float* const a_;
  float scale_, trace_;  // a power of two; the trace times it
  float held_[kHeld];    // of a times scale_: row Row(0), columns Column(i)
  float* const basis_;   // [kLanczosSize][kPitch]
  float* const work_;    // [kPitch]
  float* const vector_;  // [kPitch]
  LanczosScratch& s_;
  int size_ = 0;
  double value_ = 0, residual_ = 0;  // of a times scale_
};

}  // namespace bellwether::kernels::cuda

#endif  // BELLWETHER_KERNELS_CUDA_LANCZOS_CUH_
