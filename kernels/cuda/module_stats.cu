// Size, extremes and shape of an activation: see module_stats.h.
//
// Work      a block for each 128 channels of a part of the rows, a warp a row, a thread four channels;
//           then a block each 128 channels adds the parts, and one block finds the top channel.
// Memory    reads the activation once, four elements at a time where all lie so.
// Numerics  double as on the CPU, in one order.
// Limits    compute capability 8.0.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "backends.h"
#include "cuda/block_sum.cuh"
#include "cuda/launch.h"
#include "error.h"
#include "module_stats_parts.h"

namespace bellwether::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kWidth = 4;
constexpr int kJoinThreads = 512;
constexpr int kTileThreads = 512;
constexpr int kTileParts = kTileThreads / kModuleTile;
static_assert(kModuleTile == 32 * kWidth);

template <class Element>
struct alignas(sizeof(Element) * kWidth) Four {
  Element at[kWidth];
};

// kWidth elements, or the `count` that there are; the others are 0.
template <class Element>
__device__ __forceinline__ void ReadFour(const Element* from, int count, bool aligned, float* to) {
  if (aligned && count == kWidth) {
    const auto four = *reinterpret_cast<const Four<Element>*>(from);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) to[i] = static_cast<float>(four.at[i]);
    return;
  }
#pragma unroll
  for (int i = 0; i < kWidth; ++i) to[i] = i < count ? static_cast<float>(from[i]) : 0.0f;
}

struct Totals {
  float largest = 0;
  int nonfinite = 0;  // Of a part's rows: 2^31 at most.
  double fourths = 0;
};

__device__ __forceinline__ double LargestOverBlock(double x, double* scratch) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x = fmax(x, __shfl_xor_sync(0xffffffffu, x, offset));
  __syncthreads();  // Of what came before: the scratch is free.
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
  __syncthreads();
  double largest = 0;
  for (unsigned warp = 0; warp < blockDim.x / 32; ++warp) largest = fmax(largest, scratch[warp]);
  return largest;
}

// Grid: [tiles, parts].  Block: kThreads.
template <class Element>
__global__ void __launch_bounds__(kThreads) PartsKernel(const ModuleStatsParams p, const ModuleParts parts) {
  __shared__ double sums_of[kWarps][kModuleTile];
  __shared__ double scratch[kWarps];
  const int warp = static_cast<int>(threadIdx.x / 32), in_tile = static_cast<int>(threadIdx.x % 32) * kWidth;
  const int64_t channel = int64_t{blockIdx.x} * kModuleTile + in_tile;
  const int count = static_cast<int>(min(int64_t{kWidth}, max(int64_t{0}, p.channels - channel)));
  const int64_t part = blockIdx.y, from = part * parts.rows, to = min(p.rows, from + parts.rows);
  const auto* const x = static_cast<const Element*>(p.data) + channel;
  const bool aligned = reinterpret_cast<uintptr_t>(p.data) % sizeof(Four<Element>) == 0 && p.row_stride % kWidth == 0;
  double sums[kWidth] = {};
  Totals totals;
  if (count > 0) {
#pragma unroll 4
    for (int64_t row = from + warp; row < to; row += kWarps) {
      float at[kWidth];
      ReadFour(x + row * p.row_stride, count, aligned, at);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const bool finite = (__float_as_uint(at[i]) & 0x7f800000u) != 0x7f800000u;
        const float kept = finite ? at[i] : 0.0f;
        const double value = kept, square = value * value;
        sums[i] += square;
        totals.largest = fmaxf(totals.largest, fabsf(kept));
        totals.nonfinite += finite ? 0 : 1;
        totals.fourths = fma(square, square, totals.fourths);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kWidth; ++i) sums_of[warp][in_tile + i] = sums[i];
  __syncthreads();
  auto* const squares = static_cast<double*>(p.workspace);
  const int64_t own = int64_t{blockIdx.x} * kModuleTile + threadIdx.x;
  if (threadIdx.x < kModuleTile && own < p.channels) {
    double sum = 0;
#pragma unroll
    for (int of = 0; of < kWarps; ++of) sum += sums_of[of][threadIdx.x];
    squares[part * p.channels + own] = sum;
  }
  const double largest = LargestOverBlock(totals.largest, scratch);
  const double nonfinite = SumOverBlock(totals.nonfinite, scratch);
  const double fourths = SumOverBlock(totals.fourths, scratch);
  if (threadIdx.x != 0) return;
  double* const out =
      squares + parts.parts * p.channels + (part * parts.tiles + int64_t{blockIdx.x}) * kModuleTotalCount;
  out[kModuleTotalLargest] = largest;
  out[kModuleTotalNonfinite] = nonfinite;
  out[kModuleTotalFourths] = fourths;
}

// Grid: tiles.  Block: kTileThreads.  Leaves the sums over all parts where the first part's were, and adds
// to the channels' sums.
__global__ void __launch_bounds__(kTileThreads) ModuleTilesKernel(const ModuleStatsParams p, const ModuleParts parts) {
  __shared__ double sums_of[kTileParts][kModuleTile];
  __shared__ double scratch[kTileThreads / 32];
  auto* const squares = static_cast<double*>(p.workspace);
  const int in_tile = static_cast<int>(threadIdx.x) % kModuleTile, of = static_cast<int>(threadIdx.x) / kModuleTile;
  const int64_t channel = int64_t{blockIdx.x} * kModuleTile + in_tile;
  double sum = 0;
  if (channel < p.channels) {
#pragma unroll 4
    for (int64_t part = of; part < parts.parts; part += kTileParts) sum += squares[part * p.channels + channel];
  }
  sums_of[of][in_tile] = sum;
  double* const totals = squares + parts.parts * p.channels + int64_t{blockIdx.x} * kModuleTotalCount;
  double largest = 0, nonfinite = 0, fourths = 0;
  for (int64_t part = threadIdx.x; part < parts.parts; part += kTileThreads) {
    const double* const here = totals + part * parts.tiles * kModuleTotalCount;
    largest = fmax(largest, here[kModuleTotalLargest]);
    nonfinite += here[kModuleTotalNonfinite];
    fourths += here[kModuleTotalFourths];
  }
  largest = LargestOverBlock(largest, scratch);  // Behind it all have read what is written below.
  nonfinite = SumOverBlock(nonfinite, scratch);
  fourths = SumOverBlock(fourths, scratch);
  if (of == 0 && channel < p.channels) {
    sum = 0;
#pragma unroll
    for (int from = 0; from < kTileParts; ++from) sum += sums_of[from][in_tile];
    squares[channel] = sum;
    if (p.channel_sumsq != nullptr) p.channel_sumsq[channel] += sum;
  }
  if (threadIdx.x != 0) return;
  totals[kModuleTotalLargest] = largest;
  totals[kModuleTotalNonfinite] = nonfinite;
  totals[kModuleTotalFourths] = fourths;
}

// Grid: 1.  Block: kJoinThreads.
__global__ void __launch_bounds__(kJoinThreads) ModuleJoinKernel(const ModuleStatsParams p, const ModuleParts parts) {
  __shared__ double scratch[kJoinThreads / 32];
  const auto* const squares = static_cast<const double*>(p.workspace);
  double sumsq = 0, top = 0, top_at = 0;
  for (int64_t channel = threadIdx.x; channel < p.channels; channel += kJoinThreads) {
    sumsq += squares[channel];
    const double all = p.channel_sumsq == nullptr ? 0 : p.channel_sumsq[channel];
    if (all > top) {
      top = all;
      top_at = static_cast<double>(channel);
    }
  }
  const double* const totals = squares + parts.parts * p.channels;
  double largest = 0, nonfinite = 0, fourths = 0;
  for (int64_t tile = threadIdx.x; tile < parts.tiles; tile += kJoinThreads) {
    const double* const of = totals + tile * kModuleTotalCount;
    largest = fmax(largest, of[kModuleTotalLargest]);
    nonfinite += of[kModuleTotalNonfinite];
    fourths += of[kModuleTotalFourths];
  }
  sumsq = SumOverBlock(sumsq, scratch);
  largest = LargestOverBlock(largest, scratch);
  nonfinite = SumOverBlock(nonfinite, scratch);
  fourths = SumOverBlock(fourths, scratch);
  const double top_sumsq = LargestOverBlock(top, scratch);
  // The first channel that has it, as the largest of what is smaller where the channel is larger.
  const double last = static_cast<double>(p.channels);
  const double before_last = LargestOverBlock(top == top_sumsq && top > 0 ? last - top_at : 0, scratch);
  if (threadIdx.x != 0) return;
  p.out[kModuleElements] += static_cast<double>(p.rows) * static_cast<double>(p.channels);
  p.out[kModuleSumsq] += sumsq;
  p.out[kModuleLargest] = fmax(p.out[kModuleLargest], largest);
  p.out[kModuleNonfinite] += nonfinite;
  p.out[kModuleFourths] += fourths;
  p.out[kModuleTopSumsq] = top_sumsq;
  p.out[kModuleTop] = top_sumsq > 0 ? last - before_last : 0;
}

}  // namespace

Status ModuleStats(const ModuleStatsParams& p, void* stream) {
  Gpu gpu;
  BELLWETHER_KERNELS_RETURN_IF_ERROR(FindGpu(&gpu));
  const auto on = static_cast<cudaStream_t>(stream);
  const ModuleParts parts = PartsOfModule(p.rows, p.channels);
  const dim3 grid(static_cast<unsigned>(parts.tiles), static_cast<unsigned>(parts.parts));
  if (p.dtype == DType::kBFloat16) {
    PartsKernel<__nv_bfloat16><<<grid, kThreads, 0, on>>>(p, parts);
  } else if (p.dtype == DType::kFloat16) {
    PartsKernel<__half><<<grid, kThreads, 0, on>>>(p, parts);
  } else {
    PartsKernel<float><<<grid, kThreads, 0, on>>>(p, parts);
  }
  BELLWETHER_KERNELS_RETURN_IF_ERROR(LaunchResult(cudaGetLastError(), "the statistics of an activation"));
  ModuleTilesKernel<<<static_cast<unsigned>(parts.tiles), kTileThreads, 0, on>>>(p, parts);
  BELLWETHER_KERNELS_RETURN_IF_ERROR(LaunchResult(cudaGetLastError(), "the statistics of an activation"));
  ModuleJoinKernel<<<1, kJoinThreads, 0, on>>>(p, parts);
  return LaunchResult(cudaGetLastError(), "the statistics of an activation");
}

}  // namespace bellwether::kernels::cuda
