// The detector bank on a GPU: see detector_bank.h and gpu_bank.h.
//
// Work      1. a block per track: its new row into the ring, its median by radix selection;
//           2. a block per 256 heads: thresholds and rises, a ballot per warp and test;
//           3. a warp per fit that those call for, out of one list.
// Memory    4 bytes a series sent, 4 written to the ring, 24 read where a rise is asked for
//           (the ends of its window); a fit reads its window.
// Numerics  as on the CPU, bit for bit: no fused products (--fmad=false), sums in the CPU's
//           order, selections exact.
// Limits    those of detector_bank.h.

#include <algorithm>
#include <cstdint>

#include "cuda/detector_bank.cuh"
#include "detector_bank_parts.h"
#include "trend_parts.h"

namespace bellwether::kernels::cuda {
namespace {

constexpr int kFitWarps = 4;
constexpr int kSlopesMax = kBankRowsMax * (kBankRowsMax - 1) / 2;

__device__ uint32_t OrderedKey(float value) {
  const uint32_t bits = __float_as_uint(value);
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

__device__ float FromOrderedKey(uint32_t key) {
  return __uint_as_float((key & 0x80000000u) != 0 ? key & 0x7fffffffu : ~key);
}

// The whole block calls it; every thread has the result.
__device__ float LowerMedianOfBlock(const float* values, int64_t count) {
  __shared__ uint32_t buckets[256];
  __shared__ uint32_t prefix;
  __shared__ int64_t rank;
  const int thread = static_cast<int>(threadIdx.x);
  uint32_t known = 0;  // Which bits of `prefix` are settled.
  for (int shift = 24; shift >= 0; shift -= 8) {
    buckets[thread] = 0;
    __syncthreads();
    const uint32_t wanted = known != 0 ? prefix : 0;
    for (int64_t i = thread; i < count; i += kBankThreads) {
      const float value = values[i];
      const uint32_t key = OrderedKey(value);
      if (IsFinite(value) && (key & known) == wanted) atomicAdd(&buckets[key >> shift & 255u], 1u);
    }
    __syncthreads();
    if (thread == 0) {
      if (known == 0) {
        int64_t finite = 0;
        for (const uint32_t bucket : buckets) finite += bucket;
        rank = finite == 0 ? -1 : (finite - 1) / 2;
      }
      int64_t left = rank;
      uint32_t bucket = 0;
      for (; left >= 0 && left >= buckets[bucket]; ++bucket) left -= buckets[bucket];
      rank = left;
      prefix = wanted | bucket << shift;
    }
    __syncthreads();
    known |= 255u << shift;
    if (rank < 0) return __uint_as_float(0x7fc00000u);
  }
  return FromOrderedKey(prefix) + 0.0f;
}

// Grid: [tracks].  Block: [kBankThreads].
__global__ void __launch_bounds__(kBankThreads) SettleKernel(const DevicePass pass) {
  DeviceTrack& track = pass.tracks[blockIdx.x];
  if (!track.fresh) return;
  if (track.row != nullptr) {
    float* const out = track.ring + track.slot * track.heads;
    for (int64_t i = threadIdx.x; i < track.heads; i += kBankThreads) out[i] = track.row[i];
  }
  const float median = LowerMedianOfBlock(track.newest, track.heads);
  if (threadIdx.x != 0) return;
  track.median = median;
  if (track.slot >= 0) track.ring_median[track.slot] = median;
  pass.medians[blockIdx.x] = median;
}

__device__ WindowView ViewOf(const DeviceTrack& track) {
  return {track.ring, track.ring_median, track.ring_step, track.heads, track.window, track.rows, track.next};
}

// Adds a request for every lane with `windows`; the whole warp calls it.
__device__ void RequestFits(const DevicePass& pass, FitRequest request) {
  const uint32_t lanes = __ballot_sync(~0u, request.windows != 0);
  if (lanes == 0) return;
  const int lane = static_cast<int>(threadIdx.x % 32);
  uint32_t first = 0;
  if (lane == 0) first = atomicAdd(pass.fit_count, static_cast<uint32_t>(__popc(lanes)));
  first = __shfl_sync(~0u, first, 0);
  if (request.windows != 0) {
    pass.fits[first + static_cast<uint32_t>(__popc(lanes & ((1u << lane) - 1)))] = request;
  }
}

// Grid: [chunks].  Block: [kBankThreads], a thread a head.
__global__ void __launch_bounds__(kBankThreads) TestKernel(const DevicePass pass) {
  const Chunk chunk = pass.chunks[blockIdx.x];
  const DeviceRun& run = pass.runs[chunk.run];
  const int64_t head = int64_t{chunk.first_head} + threadIdx.x;
  const bool inside = head < run.heads;
  const int64_t row_words = 2 * HitWords(run.heads);
  for (int t = 0; t < run.tests; ++t) {
    const BankTest& test = run.test[t];
    const DeviceTrack& track = pass.tracks[run.first_track + test.track];
    bool hit = false;
    FitRequest request = {chunk.run, static_cast<int32_t>(head), t, 0};
    if (inside && track.newest != nullptr && test.windows != 0) {
      hit = static_cast<double>(track.newest[head]) > ThresholdOf(test, track.median);
      if (hit && test.windows > 0) {
        hit = false;
        for (int w = 0; w < test.windows; ++w) {
          const BankWindow& window = test.window[w];
          if (!(RiseIn(ViewOf(track), head, window.rows, test.relative) >= window.rise_min)) continue;
          if (test.trend)
            request.windows |= 1 << w;
          else
            hit = true;
        }
      }
    }
    const uint32_t word = __ballot_sync(~0u, hit);
    const int64_t at = head / 32;
    if (threadIdx.x % 32 == 0 && at < row_words) run.hits[t * row_words + at] = word;
    RequestFits(pass, request);
  }
}

// What a warp fits in.
struct FitScratch {
  double time[kBankRowsMax];
  double log_value[kBankRowsMax];
  uint64_t keys[kSlopesMax];
};

__device__ uint64_t OrderedKey(double value) {
  const auto bits = static_cast<uint64_t>(__double_as_longlong(value));
  return bits >> 63 != 0 ? ~bits : bits | uint64_t{1} << 63;
}

__device__ double FromOrderedKey(uint64_t key) {
  return __longlong_as_double(static_cast<int64_t>(key >> 63 != 0 ? key & ~(uint64_t{1} << 63) : ~key));
}

// The key of rank `rank` among `count`: bit by bit, the largest one that at most `rank`
// keys lie below.
__device__ uint64_t SelectKey(const uint64_t* keys, int count, int rank) {
  uint64_t found = 0;
  for (int bit = 63; bit >= 0; --bit) {
    const uint64_t candidate = found | uint64_t{1} << bit;
    int below = 0;
    for (int i = static_cast<int>(threadIdx.x % 32); i < count; i += 32) below += keys[i] < candidate;
    if (__reduce_add_sync(~0u, below) <= rank) found = candidate;
  }
  return found;
}

// The whole warp calls it; every lane has the result.
__device__ bool PassesFit(const BankTest& test, const BankWindow& window, const WindowView& view, int64_t head,
                          FitScratch* scratch) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  int n = 0;
  for (int first = 0; first < window.rows; first += 32) {
    const int i = first + lane;
    const int32_t age = view.rows - window.rows + i;
    const float value = i < window.rows ? view.Value(head, age, test.relative) : 0.f;
    const uint32_t usable = __ballot_sync(~0u, IsPositive(value));
    if (IsPositive(value)) {
      const int at = n + __popc(usable & ((1u << lane) - 1));
      scratch->time[at] = view.Step(age);
      scratch->log_value[at] = LogOf(value);
    }
    n += __popc(usable);
  }
  __syncwarp();
  if (n < (test.points_min > 3 ? test.points_min : 3)) return false;
  const double* const x = scratch->time;
  const double* const y = scratch->log_value;
  // Sums whose order matters: every lane goes through all of them.
  if (LeastSquaresR2(x, y, n) < test.r2_min) return false;

  int sign_sum = 0, slopes = 0;
  for (int i = 0; i < n; ++i) {
    for (int first = i + 1; first < n; first += 32) {
      const int j = first + lane;
      const double rise = j < n ? y[j] - y[i] : 0;
      sign_sum += (rise > 0) - (rise < 0);
      const bool sloped = j < n && x[j] > x[i];
      const uint32_t lanes = __ballot_sync(~0u, sloped);
      if (sloped) {
        scratch->keys[slopes + __popc(lanes & ((1u << lane) - 1))] = OrderedKey(rise / (x[j] - x[i]));
      }
      slopes += __popc(lanes);
    }
  }
  sign_sum = __reduce_add_sync(~0u, sign_sum);
  __syncwarp();
  if (slopes == 0) return false;
  const double slope = FromOrderedKey(SelectKey(scratch->keys, slopes, slopes / 2));
  __syncwarp();
  for (int i = lane; i < n; i += 32) scratch->keys[i] = OrderedKey(y[i] - slope * x[i]);
  __syncwarp();
  const double intercept = FromOrderedKey(SelectKey(scratch->keys, n, n / 2));
  __syncwarp();
  const LineFit fit = FitOfLine(x, y, n, slope, intercept);
  const double z = Shrunk(sign_sum) / sqrt(fit.variance);
  const double doubling = slope > 0 ? kLn2 / slope : __longlong_as_double(0x7ff0000000000000);
  return PassesTrend(test, window, z, fit.r2, doubling);
}

// Grid: any.  Block: [32 kFitWarps].  Shared: kFitWarps FitScratch.
__global__ void __launch_bounds__(32 * kFitWarps) FitKernel(const DevicePass pass) {
  extern __shared__ __align__(16) unsigned char shared[];
  FitScratch* const scratch = reinterpret_cast<FitScratch*>(shared) + threadIdx.x / 32;
  const uint32_t count = *pass.fit_count;
  for (uint32_t i = blockIdx.x * kFitWarps + threadIdx.x / 32; i < count; i += gridDim.x * kFitWarps) {
    const FitRequest request = pass.fits[i];
    const DeviceRun& run = pass.runs[request.run];
    const BankTest& test = run.test[request.test];
    const DeviceTrack& track = pass.tracks[run.first_track + test.track];
    bool passes = false;
    for (int w = 0; w < test.windows && !passes; ++w) {
      if ((request.windows >> w & 1) == 0) continue;
      passes = PassesFit(test, test.window[w], ViewOf(track), request.head, scratch);
      __syncwarp();
    }
    if (passes && threadIdx.x % 32 == 0) {
      const int64_t row_words = 2 * HitWords(run.heads);
      atomicOr(&run.hits[request.test * row_words + request.head / 32], 1u << (request.head % 32));
    }
  }
}

}  // namespace

cudaError_t LaunchDetectorPass(const DevicePass& pass, int multiprocessors, cudaStream_t stream) {
  constexpr int kFitBytes = kFitWarps * static_cast<int>(sizeof(FitScratch));
  if (pass.track_count == 0) return cudaSuccess;
  SettleKernel<<<pass.track_count, kBankThreads, 0, stream>>>(pass);
  if (pass.chunk_count > 0) {
    TestKernel<<<pass.chunk_count, kBankThreads, 0, stream>>>(pass);
    const cudaError_t allowed = cudaFuncSetAttribute(FitKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kFitBytes);
    if (allowed != cudaSuccess) return allowed;
    FitKernel<<<3 * multiprocessors, 32 * kFitWarps, kFitBytes, stream>>>(pass);
  }
  return cudaGetLastError();
}

}  // namespace bellwether::kernels::cuda
