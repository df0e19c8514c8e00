// Largest singular value and ranks of each head's weights: see spectral.h.
//
// Work      one block per head: Gram matrix, then 32 steps of Lanczos on it; two blocks on a
//           multiprocessor, since one alone waits for itself in Lanczos.  A block is all
//           latency, so weights of several layers share a launch.
// Memory    reads the weights once for each 128 rows.  The Gram matrix stays in shared
//           memory for up to 128 rows, and lies in the caller's `gram` beyond.
// Numerics  Gram matrix in fp32 (gram.cuh), vectors in fp32 (lanczos.cuh), the top of their
//           projection and what is told of it in double.  fp32 weights count to 2^-18 of each, which leaves sigma
//           within 4e-6 of the exact Ritz value, and 1e-6 with hundreds of columns; the CPU
//           may go on to more steps, where 32 leave a residual.
// Limits    512 rows, from 129 on with `gram`; 2^31 - 1 blocks; compute capability 8.0.
//           Squares of weights must be in fp32's range.

#include <algorithm>

#include "backends.h"
#include "cuda/gram.cuh"
#include "cuda/lanczos.cuh"
#include "error.h"

namespace bellwether::kernels::cuda {
namespace {

constexpr int kThreads = kGramThreads;
static_assert(kThreads == kLanczosThreads);

constexpr int kWeightsMax = 32;  // of a launch: parameters have 4 KB

struct SpectralKernelParams {
  SpectralParams each[kWeightsMax];  // of one type and number of rows
  bool vectorized[kWeightsMax];
  int heads_max;
};
static_assert(sizeof(SpectralKernelParams) <= 4096);

// Columns that the Gram matrix has in shared memory: eight rows lie in different banks.
constexpr int SharedStride(int64_t rows) { return static_cast<int>((rows + 15) / 16 * 16 + 8); }

constexpr bool IsGramShared(int64_t rows) { return rows <= kGramTile; }

// Whole blocks of rows, as ComputeGram asks.
constexpr int64_t GramBytes(int64_t rows) {
  const int64_t whole = (rows + kGramBlock - 1) / kGramBlock * kGramBlock;
  return IsGramShared(rows) ? whole * SharedStride(rows) * int64_t{sizeof(float)} : 0;
}

constexpr int kLargeParts = static_cast<int>(kSpectralRowsMax) / kLanczosRows;
constexpr int64_t LanczosBytes(int64_t rows) {
  return (IsGramShared(rows) ? Lanczos<1>::kFloats : Lanczos<kLargeParts>::kFloats) * int64_t{sizeof(float)};
}

// The index of v's element of largest magnitude, the first of several.  Whole warps call it.
__device__ int FindLargest(const float* v, int n) {
  float largest = -1.f;
  int index = 0;
  for (int i = threadIdx.x % 32; i < n; i += 32) {
    if (fabsf(v[i]) > largest) largest = fabsf(v[i]), index = i;
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    const float other = __shfl_xor_sync(0xffffffffu, largest, offset);
    const int other_index = __shfl_xor_sync(0xffffffffu, index, offset);
    if (other > largest || (other == largest && other_index < index)) {
      largest = other, index = other_index;
    }
  }
  return index;
}

// Replaces the head's direction by v and tells how far it turned.
__device__ void StoreDirection(const SpectralParams& p, const int64_t& head, const float* before, const float* v,
                               double* scratch) {
  if (p.direction == nullptr) return;
  double cosine = 0, squares = 0;
  for (int i = threadIdx.x; i < p.rows; i += kThreads) {
    cosine += static_cast<double>(before[i]) * static_cast<double>(v[i]);
    squares += static_cast<double>(before[i]) * static_cast<double>(before[i]);
  }
  cosine = SumOverBlock(cosine, scratch);
  squares = SumOverBlock(squares, scratch);
  const int largest = FindLargest(v, static_cast<int>(p.rows));
  const bool had_one = squares > 0;
  const bool flip = had_one ? cosine < 0 : v[largest] < 0;
  for (int i = threadIdx.x; i < p.rows; i += kThreads) {
    p.direction[head * p.rows + i] = flip ? -v[i] : v[i];
  }
  if (p.overlap == nullptr || threadIdx.x != 0) return;
  const double overlap = fabs(cosine) / sqrt(squares);
  p.overlap[head] = had_one && v[largest] != 0 ? static_cast<float>(fmin(overlap, 1.0)) : NAN;
}

// One head.  kShared: the Gram matrix is in shared memory.
template <class Element, bool kShared>
__device__ __forceinline__ void Solve(const SpectralParams& p, const int64_t& head, bool vectorized,
                                      unsigned char* shared, float* before, LanczosScratch& scratch) {
  using Solver = Lanczos<kShared ? 1 : kLargeParts>;
  const int n = static_cast<int>(p.rows), stride = kShared ? SharedStride(n) : n;
  float* gram = nullptr;
  if constexpr (kShared) {
    gram = reinterpret_cast<float*>(shared);
  } else {
    gram = p.gram + head * n * n;
  }
  unsigned char* const stages = shared + GramBytes(n);

  // 1. The Gram matrix and its trace.
  ComputeGram<kShared>(p, static_cast<const Element*>(p.weight) + head * p.head_stride, vectorized, stages, gram,
                       stride);
  double trace = 0;
  for (int i = threadIdx.x; i < n; i += kThreads) {
    trace += static_cast<double>(gram[int64_t{i} * stride + i]);
  }
  trace = SumOverBlock(trace, scratch.warps);
  if (kShared && p.gram != nullptr) {
    for (int i = threadIdx.x; i < n * n; i += kThreads) {
      p.gram[head * n * n + i] = gram[i / n * stride + i % n];
    }
  }

  // 2. The direction before; 0 if it is not finite.
  double sum = 0;
  for (int i = threadIdx.x; i < n; i += kThreads) {
    before[i] = p.direction != nullptr ? p.direction[head * n + i] : 0.f;
    sum += static_cast<double>(fabsf(before[i]));
  }
  const bool had_one = isfinite(SumOverBlock(sum, scratch.warps));
  for (int i = threadIdx.x; !had_one && i < n; i += kThreads) before[i] = 0.f;
  __syncthreads();

  // 3. The top eigenpair.  Every weight's square is in the trace, which tells whether all
  //    are finite.
  const auto store = [&](double theta, double residual, double stable_rank) {
    if (threadIdx.x != 0) return;
    p.sigma[head] = static_cast<float>(sqrt(theta));
    if (p.residual != nullptr) p.residual[head] = static_cast<float>(residual);
    if (p.stable_rank != nullptr) p.stable_rank[head] = static_cast<float>(stable_rank);
  };
  if (!isfinite(trace)) {
    store(NAN, NAN, NAN);
    if (p.overlap != nullptr && threadIdx.x == 0) p.overlap[head] = NAN;
    return;
  }
  float* const vectors = reinterpret_cast<float*>(stages);
  if (trace == 0) {
    for (int i = threadIdx.x; i < n; i += kThreads) vectors[i] = 0.f;
    __syncthreads();
    store(0, 0, 0);
    StoreDirection(p, head, before, vectors, scratch.warps);
    return;
  }
  Solver lanczos(n, gram, stride, trace, vectors, &scratch);
  lanczos.Run(before);
  store(lanczos.value(), lanczos.residual(), trace / lanczos.value());
  StoreDirection(p, head, before, lanczos.vector(), scratch.warps);
}

// Grid: [weights * heads_max].  Block: kThreads.  Shared: what Launch asks for.
template <class Element>
__global__ void __launch_bounds__(kThreads, 2) SpectralKernel(const __grid_constant__ SpectralKernelParams kernel) {
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ LanczosScratch scratch;
  __shared__ float before[kSpectralRowsMax];
  const int weight = static_cast<int>(blockIdx.x) / kernel.heads_max;
  __shared__ SpectralParams p;  // In registers it would spill.
  if (threadIdx.x < sizeof(p) / sizeof(int)) {
    reinterpret_cast<int*>(&p)[threadIdx.x] = reinterpret_cast<const int*>(&kernel.each[weight])[threadIdx.x];
  }
#if __CUDA_ARCH__ >= 900
  const int64_t head = static_cast<int>(blockIdx.x) % kernel.heads_max;
#else  // Code for 8.0 would spill it.
  __shared__ int64_t head;
  if (threadIdx.x == 0) head = static_cast<int>(blockIdx.x) % kernel.heads_max;
#endif
  __syncthreads();
  if (head >= p.heads) return;
  if (IsGramShared(p.rows)) {
    Solve<Element, true>(p, head, kernel.vectorized[weight], shared, before, scratch);
  } else {
    Solve<Element, false>(p, head, kernel.vectorized[weight], shared, before, scratch);
  }
}

template <class Element>
Status Launch(const SpectralParams* each, int count, const Gpu& gpu, void* stream) {
  constexpr int kStaticBytes = 6 * 1024;  // at most, of SpectralKernel's own arrays
  SpectralKernelParams kernel = {};
  for (int i = 0; i < count; ++i) {
    const SpectralParams& p = kernel.each[i] = each[i];
    Tensor4 view;
    view.data = p.weight;
    view.head_stride = p.head_stride;
    view.token_stride = p.row_stride;
    // The last vector of a row may be cut short, so any number of columns will do.
    kernel.vectorized[i] =
        p.column_stride == 1 && IsVectorized(p.dtype, view, 1, p.heads, p.rows, GramShape<Element>::kColumns);
    kernel.heads_max = std::max(kernel.heads_max, static_cast<int>(p.heads));
  }
  if (kernel.heads_max == 0) return Status::kOk;
  const int64_t rows = each[0].rows;
  const int64_t stages = kGramStages * GramShape<Element>::StageBytes(static_cast<int>(rows));
  Grid grid;
  grid.units = int64_t{count} * kernel.heads_max;
  grid.threads = kThreads;
  grid.shared_bytes = static_cast<int>(GramBytes(rows) + std::max(stages, LanczosBytes(rows)));
  if (grid.shared_bytes + kStaticBytes > gpu.shared_bytes_max) {
    return Fail(Status::kUnsupported, "rows is %lld, which takes %d bytes of shared memory, but this GPU has %d",
                static_cast<long long>(rows), grid.shared_bytes + kStaticBytes, gpu.shared_bytes_max);
  }
  return LaunchClusters(SpectralKernel<Element>, kernel, grid, stream, "the spectral norms");
}

}  // namespace

Status SpectralNorms(const SpectralParams* each, int64_t count, void* stream) {
  Gpu gpu;
  BELLWETHER_KERNELS_RETURN_IF_ERROR(FindGpu(&gpu));
  for (int64_t i = 0; i < count; ++i) {
    const SpectralParams& p = each[i];
    if (p.heads == 0 || IsGramShared(p.rows) || p.gram != nullptr) continue;
    return Fail(Status::kUnsupported,
                "gram is NULL, but on a GPU must be given for more than %d rows, and rows is %lld", kGramTile,
                static_cast<long long>(p.rows));
  }
  for (int64_t first = 0, next; first < count; first = next) {
    const SpectralParams& p = each[first];
    next = first + 1;
    while (next < count && next - first < kWeightsMax && each[next].dtype == p.dtype && each[next].rows == p.rows)
      ++next;
    const int together = static_cast<int>(next - first);
    Status status = Status::kOk;
    switch (p.dtype) {
      case DType::kBFloat16:
        status = Launch<__nv_bfloat16>(&p, together, gpu, stream);
        break;
      case DType::kFloat16:
        status = Launch<__half>(&p, together, gpu, stream);
        break;
      case DType::kFloat32:
        status = Launch<float>(&p, together, gpu, stream);
        break;
    }
    BELLWETHER_KERNELS_RETURN_IF_ERROR(status);
  }
  return Status::kOk;
}

}  // namespace bellwether::kernels::cuda
