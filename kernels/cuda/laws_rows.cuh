// laws_rows.cuh: rows of queries in two passes over their keys.
//
// The first pass leaves of each row the maximum and the sum of its softmax and delta = sum P dP; a
// small kernel merges what the parts of the keys gave.  The second, which knows them, adds up what
// rounding P and dS to the type does.  Tiles and products are the probe's (probe_tiles.cuh).
//
// Work      a block per sequence, key head, 64 rows of the head's group (32 in fp32), and part of
//           the keys: tiles `part`, `part` + parts, ...  Tiles that no row sees are left out.
// Numerics  products of 16-bit types exact, sums fp32.

#ifndef BELLWETHER_KERNELS_CUDA_LAWS_ROWS_CUH_
#define BELLWETHER_KERNELS_CUDA_LAWS_ROWS_CUH_

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "bellwether/kernels/attention_laws.h"
#include "cuda/launch.h"
#include "cuda/laws_pairs.cuh"
#include "cuda/laws_rounding.cuh"
#include "cuda/probe_mask.cuh"
#include "cuda/probe_rows.cuh"
#include "cuda/probe_tiles.cuh"
#include "error.h"
#include "probe_sampling.h"

namespace bellwether::kernels::cuda {

// What part of the keys leaves of a row; first -inf: no key.
struct LawRowPart {
  float first, l, weighted_dp;
};

// What is known of a row after the first pass; inverse_l 0: it sees no key.
struct LawRow {
  float first, inverse_l, delta, weight;  // weight: the sum of P, less than 1 with a sink
};

// What the second pass adds up of a row's keys.
enum LawInside : int {
  kInsidePError = 0,  // R(P) - P, R rounds to the type
  kInsidePBases,      // bases of P, squared, and what roundings of scores add to them
  kInsidePErrorOfDp,  // dP (R(P) - P)
  kInsidePBasesOfDp,  // dP^2, the same
  kInsideDsError,     // R(dS) - dS
  kInsideDsVariance,  // of dS, P's rounding included
  kInsideCount
};

// A row, and which keys it sees before the mask's tensor is asked.
struct LawPlace {
  int head, row;
  int begin, end;
  int64_t mask_at;  // where its row of the mask begins; kUniform: all its keys have the same score
};
inline constexpr int64_t kUniform = -1;
inline constexpr int64_t kUnknown = -2;  // Its scores are not known: NaN.

struct LawRowsParams {
  ProbeParams p;
  int64_t group, rows;  // query heads of a key head; rows of a query head
  int64_t row_tiles;    // of a sequence and key head
  int key_tiles, parts, stages, key_pitch, v_pitch;
  bool vectorized, composed;
  LawInsideOf roundings;
  // Rows are numbered [batch][heads][rows].
  LawPlace* places;      // [rows]
  LawRowPart* of_parts;  // [parts][rows]
  LawRow* known;         // [rows]
  float* inside;         // [parts][rows][kInsideCount]
};

__host__ __device__ inline int64_t AllRows(const LawRowsParams& k) { return k.p.batch * k.p.heads * k.rows; }

template <class Element>
__device__ __forceinline__ const Element* LawRowOf(const Tensor4& t, int64_t batch, int64_t head, int64_t token) {
  return static_cast<const Element*>(t.data) + batch * t.batch_stride + head * t.head_stride + token * t.token_stride;
}

// A score as the softmax sees it, of the product q . k; -inf where the mask hides the key.  *slope: of
// the softcap.
template <class Element>
__device__ __forceinline__ float ScoreOf(const ProbeParams& p, bool composed, float product, const LawPlace& at,
                                         int key, float* slope = nullptr) {
  if (key < at.begin || key >= at.end) return -INFINITY;
  if (at.mask_at == kUnknown) return NAN;
  const bool uniform = at.mask_at == kUniform;
  if (uniform && slope == nullptr) return 0.f;
  float score = p.scale * (composed ? RoundTo<Element>(product) : product);
  if (p.softcap > 0.f) {
    const float bent = tanhf(score / p.softcap);
    score = p.softcap * bent;
    if (slope != nullptr) *slope = 1.f - bent * bent;
  }
  if (uniform) return 0.f;  // The softcap is passed all the same.
  if (p.mask.data == nullptr) return score;
  const float bias = BiasAt(p.mask, at.mask_at + key * p.mask.key_stride);
  return bias == -INFINITY ? bias : score + bias;
}

__device__ __forceinline__ void MergeParts(const LawRowPart& b, LawRowPart& a) {
  if (b.first == -INFINITY) {
    a.l += b.l;  // A NaN stays.
    return;
  }
  const float first = fmaxf(a.first, b.first);
  const float of_a = a.first == -INFINITY ? 0.f : expf(a.first - first), of_b = expf(b.first - first);
  a.l = a.l * of_a + b.l * of_b;
  a.weighted_dp = a.weighted_dp * of_a + b.weighted_dp * of_b;
  a.first = first;
}

// What one score adds to the sums of the second pass.
template <class Element>
__device__ __forceinline__ void AddInside(float score, float dp, const LawRow& row, const LawInsideOf& roundings,
                                          float of_scores, float (&sums)[kInsideCount]) {
  if (score == -INFINITY) return;
  const float p = expf(score - row.first) * row.inverse_l;
  if (p == 0.f) return;
  const float more = dp - row.delta, ds = p * more;
  const LawAdded of_p = AddedToP<Element>(p), of_ds = AddedToDs<Element>(ds, roundings);
  constexpr float kFp32 = 0x1p-24f, kVariance = static_cast<float>(kVarianceOfBase<Element>);
  const float squares = fmaf(of_scores * p, p, of_p.squares), sum_error = kFp32 * p;
  sums[kInsidePError] += of_p.error;
  sums[kInsidePBases] += squares;
  sums[kInsidePErrorOfDp] = fmaf(dp, of_p.error, sums[kInsidePErrorOfDp]);
  sums[kInsidePBasesOfDp] = fmaf(dp * dp, squares, sums[kInsidePBasesOfDp]);
  sums[kInsideDsError] += of_ds.error;
  const float variance = kVariance * fmaf(squares * more, more, of_ds.squares);
  sums[kInsideDsVariance] += fmaf(sum_error * sum_error, fmaf(dp, dp, row.delta * row.delta), variance);
}

// Whether any element of a row is not 0.  All lanes of the warp take part.
template <class Element>
__device__ __forceinline__ bool AnyIn(const Element* row, int64_t dim, int lane) {
  bool any = false;
  for (int64_t c = lane; c < dim; c += 32) any |= static_cast<float>(row[c]) != 0.f;
  return __any_sync(~0u, any);
}

// Where each row is, a warp a row.  One that sees no key and came out as 0 or NaN has none, and so has
// one that no gradient comes to.  Another is a mean of values.  Of which values is not known in float16
// where attention is written out (cpu/attention_rows.h says why): its scores are NaN.
template <class Element>
__global__ void __launch_bounds__(kLawThreads) LawPlacesKernel(const __grid_constant__ LawRowsParams kernel) {
  const ProbeParams& p = kernel.p;
  if (p.gate != nullptr && p.gate[kGateOpen] == 0) return;
  const uint64_t seed = p.seed + (p.gate != nullptr ? p.gate[kGateSeed] : 0);
  const int lane = threadIdx.x % 32;
  const int64_t index = int64_t{blockIdx.x} * kLawWarps + threadIdx.x / 32;
  if (index >= AllRows(kernel)) return;
  const int64_t sample = index % kernel.rows, head = index / kernel.rows % p.heads,
                batch = index / kernel.rows / p.heads;
  const int64_t row = RowAt(p, seed, batch, head, sample), mask_row = p.mask.by_sample ? sample : row;
  KeyRange keys = AllowedKeys(p, batch, row);
  int64_t mask_at = p.mask.data != nullptr ? MaskRowAt(p.mask, batch, head, mask_row) : 0;
  if (SeesNothing(p, batch, head, row, mask_row, lane, 32, ~0u)) {
    const RowOutput output = OutputIs<Element>(p, batch, head, row, lane, 32, ~0u);
    if (output != RowOutput::kCounts) {
      keys = {0, 0};
    } else {
      if (keys.begin >= keys.end) keys = {0, p.k_len};
      mask_at = kUniform;
      if (!AnyIn(LawRowOf<Element>(p.d_o, batch, head, row), p.v_dim, lane)) {
        keys = {0, 0};  // Padding: what it comes to does no harm.
      } else if (std::is_same_v<Element, __half> && kernel.composed) {
        mask_at = kUnknown;
      }
    }
  }
  if (lane != 0) return;
  kernel.places[index] = {static_cast<int>(head), static_cast<int>(row), static_cast<int>(keys.begin),
                          static_cast<int>(keys.end), mask_at};
}

enum class LawPass { kRows, kInside };

// Grid: [batch * kv_heads * row_tiles * parts].  Block: kTileThreads.  Shared: LawRowsBytes().
template <class Element, Form kForm, LawPass kPass>
__global__ void __launch_bounds__(kTileThreads, kForm == Form::kWide || sizeof(Element) == 4 ? 1 : 2)
    LawRowsKernel(const __grid_constant__ LawRowsParams kernel) {
  using Shape = TileShape<Element, false, kForm>;
  constexpr int kRows = Shape::kRows, kKeys = Shape::kKeys, kCount = 2 * Shape::kBlocks;
  constexpr bool kFirst = kPass == LawPass::kRows;
  constexpr int kNumbers = kFirst ? 3 : int{kInsideCount};
  __shared__ float of_warps[Shape::kKeyWarps][kRows][kNumbers];
  __shared__ LawPlace places[kRows];
  extern __shared__ __align__(16) unsigned char tiles[];

  const ProbeParams& p = kernel.p;
  if (p.gate != nullptr && p.gate[kGateOpen] == 0) return;
  const int key_pitch = kernel.key_pitch, v_pitch = kernel.v_pitch;
  unsigned char* const queries = tiles;
  unsigned char* const gradients = queries + kRows * key_pitch;
  unsigned char* const first_stage = gradients + kRows * v_pitch;
  const int stage_bytes = kKeys * (key_pitch + v_pitch);

  const int part = blockIdx.x % kernel.parts;
  const int64_t unit = blockIdx.x / kernel.parts;
  const int64_t row_tile = unit % kernel.row_tiles, sequence = unit / kernel.row_tiles;
  const int64_t kv_head = sequence % p.kv_heads, batch = sequence / p.kv_heads;
  const int64_t first_index = sequence * kernel.group * kernel.rows + row_tile * kRows;

  if (threadIdx.x < kRows) {
    const bool there = row_tile * kRows + threadIdx.x < kernel.group * kernel.rows;
    places[threadIdx.x] = there ? kernel.places[first_index + threadIdx.x] : LawPlace{-1, 0, 0, 0, 0};
  }
  __syncthreads();
  const auto query_at = [&](const Tensor4& t) {
    return [&, of = &t](int r) {
      const LawPlace& at = places[r];
      return at.head < 0 ? nullptr : LawRowOf<Element>(*of, batch, at.head, at.row);
    };
  };
  LoadTile<Element>(queries, kRows, key_pitch, p.head_dim, kernel.vectorized, p.q.data, query_at(p.q));
  LoadTile<Element>(gradients, kRows, v_pitch, p.v_dim, kernel.vectorized, p.d_o.data, query_at(p.d_o));
  CommitCopies();

  // Keys that any row of the block, and of the warp, sees.
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first_row = warp % Shape::kRowWarps * 16, key_warp = warp / Shape::kRowWarps;
  int begin = INT32_MAX, end = 0, warp_begin = INT32_MAX, warp_end = 0;
  for (int r = 0; r < kRows; ++r) {
    const LawPlace& at = places[r];
    if (at.begin >= at.end) continue;
    begin = min(begin, at.begin);
    end = max(end, at.end);
    if (r / 16 != first_row / 16) continue;
    warp_begin = min(warp_begin, at.begin);
    warp_end = max(warp_end, at.end);
  }
  // The first of this part's tiles that has such keys.
  int tile = part;
  if (begin < end) tile += (begin / kKeys - part + kernel.parts - 1) / kernel.parts * kernel.parts;
  if (tile < part) tile = part;
  const int tiles_end = begin < end ? (end + kKeys - 1) / kKeys : 0;
  const auto load_keys = [&](int of, int stage) {
    unsigned char* const keys = first_stage + stage * stage_bytes;
    const auto row_at = [&](const Tensor4& t) {
      return [&, of, from = &t](int r) {
        const int key = of * kKeys + r;
        return key < p.k_len ? LawRowOf<Element>(*from, batch, kv_head, key) : nullptr;
      };
    };
    LoadTile<Element>(keys, kKeys, key_pitch, p.head_dim, kernel.vectorized, p.k.data, row_at(p.k));
    LoadTile<Element>(keys + kKeys * key_pitch, kKeys, v_pitch, p.v_dim, kernel.vectorized, p.v.data, row_at(p.v));
    CommitCopies();
  };
  LawRowPart state[2] = {{-INFINITY, 0, 0}, {-INFINITY, 0, 0}};
  LawRow known[2] = {};
  float inside[2][kInsideCount] = {}, of_scores[2] = {};
  if constexpr (!kFirst) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = first_row + lane / 4 + 8 * r;
      if (places[row].head >= 0) known[r] = kernel.known[first_index + row];
      of_scores[r] = SquaresOfScores<Element>(kernel.roundings, known[r].first);
    }
  }
  int stage = 0;
  if (kernel.stages > 1 && tile < tiles_end) load_keys(tile, 0);
  for (; tile < tiles_end; tile += kernel.parts) {
    if (kernel.stages == 1) {
      load_keys(tile, 0);
      WaitForCopies<0>();
    } else if (tile + kernel.parts < tiles_end) {
      load_keys(tile + kernel.parts, stage ^ 1);
      WaitForCopies<1>();
    } else {
      WaitForCopies<0>();
    }
    __syncthreads();
    const unsigned char* const keys = first_stage + stage * stage_bytes;
    const int warp_key = key_warp * Shape::kWarpKeys;  // in the tile
    const int first_key = tile * kKeys + warp_key;
    if (first_key < warp_end && first_key + Shape::kWarpKeys > warp_begin) {
      float s[Shape::kBlocks][4], dp[Shape::kBlocks][4];
      Multiply<Element>(queries + first_row * key_pitch, keys + warp_key * key_pitch, key_pitch, s);
      Multiply<Element>(gradients + first_row * v_pitch, keys + kKeys * key_pitch + warp_key * v_pitch, v_pitch, dp);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const LawPlace& at = places[first_row + lane / 4 + 8 * r];
        if (kFirst) {
          // The maximum first: one exponential a score.
          float scores[kCount], first = state[r].first;
#pragma unroll
          for (int i = 0; i < kCount; ++i) {
            const int key = first_key + i / 2 * 8 + 2 * (lane % 4) + i % 2;
            scores[i] = ScoreOf<Element>(p, kernel.composed, s[i / 2][2 * r + i % 2], at, key);
            first = fmaxf(first, scores[i]);
            if (isnan(scores[i])) state[r].l = NAN;
          }
          if (first == -INFINITY) continue;
          const float before = state[r].first == -INFINITY ? 0.f : expf(state[r].first - first);
          float l = 0, weighted = 0;
#pragma unroll
          for (int i = 0; i < kCount; ++i) {
            if (scores[i] == -INFINITY) continue;
            const float gradient = dp[i / 2][2 * r + i % 2];
            const float weight = expf(scores[i] - first);
            l += weight;
            weighted = fmaf(weight, kernel.composed ? RoundTo<Element>(gradient) : gradient, weighted);
          }
          state[r].l = fmaf(state[r].l, before, l);
          state[r].weighted_dp = fmaf(state[r].weighted_dp, before, weighted);
          state[r].first = first;
        } else {
#pragma unroll
          for (int i = 0; i < kCount; ++i) {
            const int key = first_key + i / 2 * 8 + 2 * (lane % 4) + i % 2;
            const float gradient = dp[i / 2][2 * r + i % 2];
            AddInside<Element>(ScoreOf<Element>(p, kernel.composed, s[i / 2][2 * r + i % 2], at, key),
                               kernel.composed ? RoundTo<Element>(gradient) : gradient, known[r], kernel.roundings,
                               of_scores[r], inside[r]);
          }
        }
      }
    }
    __syncthreads();  // The tile is free.
    if (kernel.stages > 1) stage ^= 1;
  }
  WaitForCopies<0>();  // Of the rows, if there was no key.

  // A quad's columns; then the warps that share rows.
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float* const to = of_warps[key_warp][first_row + lane / 4 + 8 * r];
    if constexpr (kFirst) {
#pragma unroll
      for (int offset = 1; offset < 4; offset *= 2) {
        const LawRowPart other = {__shfl_xor_sync(0xffffffffu, state[r].first, offset),
                                  __shfl_xor_sync(0xffffffffu, state[r].l, offset),
                                  __shfl_xor_sync(0xffffffffu, state[r].weighted_dp, offset)};
        MergeParts(other, state[r]);
      }
      if (lane % 4 == 0) {
        to[0] = state[r].first;
        to[1] = state[r].l;
        to[2] = state[r].weighted_dp;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kInsideCount; ++i) {
#pragma unroll
        for (int offset = 1; offset < 4; offset *= 2)
          inside[r][i] += __shfl_xor_sync(0xffffffffu, inside[r][i], offset);
        if (lane % 4 == 0) to[i] = inside[r][i];
      }
    }
  }
  __syncthreads();
  if (threadIdx.x >= kRows || places[threadIdx.x].head < 0) return;
  const int64_t index = part * AllRows(kernel) + first_index + threadIdx.x;
  if constexpr (kFirst) {
    LawRowPart all = {-INFINITY, 0, 0};
#pragma unroll
    for (int w = 0; w < Shape::kKeyWarps; ++w) {
      const float* const of = of_warps[w][threadIdx.x];
      MergeParts({of[0], of[1], of[2]}, all);
    }
    kernel.of_parts[index] = all;
  } else {
#pragma unroll
    for (int i = 0; i < kInsideCount; ++i) {
      float sum = 0;
#pragma unroll
      for (int w = 0; w < Shape::kKeyWarps; ++w) sum += of_warps[w][threadIdx.x][i];
      kernel.inside[index * kInsideCount + i] = sum;
    }
  }
}

// Grid: a thread per row.
static __global__ void __launch_bounds__(256) LawMergeKernel(const __grid_constant__ LawRowsParams kernel) {
  if (kernel.p.gate != nullptr && kernel.p.gate[kGateOpen] == 0) return;
  const int64_t rows = AllRows(kernel), index = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (index >= rows) return;
  LawRowPart all = {-INFINITY, 0, 0};
  for (int part = 0; part < kernel.parts; ++part) MergeParts(kernel.of_parts[part * rows + index], all);
  LawRow known = {0, 0, 0, 0};
  if (all.first != -INFINITY || isnan(all.l)) {
    const float sink = kernel.p.sinks != nullptr ? kernel.p.sinks[index / kernel.rows % kernel.p.heads] : -INFINITY;
    // The sink takes its part of the maximum and of the sum.
    const float first = fmaxf(all.first, sink);
    const float factor = expf(all.first - first), l = all.l * factor;
    known.first = first;
    known.inverse_l = 1.f / (sink == -INFINITY ? l : l + expf(sink - first));
    known.delta = all.weighted_dp * factor * known.inverse_l;
    known.weight = sink == -INFINITY ? known.inverse_l * l : l * known.inverse_l;
  }
  kernel.known[index] = known;
}

template <class Element>
Status LaunchPlaces(const LawRowsParams& kernel, void* stream, const char* name) {
  Grid grid;
  grid.threads = kLawThreads;
  grid.units = (AllRows(kernel) + kLawWarps - 1) / kLawWarps;
  return LaunchClusters(LawPlacesKernel<Element>, kernel, grid, stream, name);
}

inline constexpr int64_t kLawTokensMax = int64_t{1} << 30;

inline Status CheckLawLimits(const GradedAttention& of) {
  const ProbeParams& p = of.call;
  const auto limit = [](const char* field, int64_t value, int64_t max) {
    if (value <= max) return Status::kOk;
    return Fail(Status::kUnsupported, "%s is %lld, but at most %lld is supported on a GPU", field,
                static_cast<long long>(value), static_cast<long long>(max));
  };
  constexpr int kDimMax = TileShape<float, false, Form::kWide>::kDimMax;
  BELLWETHER_KERNELS_RETURN_IF_ERROR(limit("head_dim", p.head_dim, kDimMax));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(limit("v_dim", p.v_dim, kDimMax));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(limit("q_len", p.q_len, kLawTokensMax));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(limit("k_len", p.k_len, kLawTokensMax));
  return limit("arithmetic", static_cast<int>(of.arithmetic), static_cast<int>(LawArithmetic::kComposed));
}

template <class Shape>
int LawRowsBytes(const LawRowsParams& kernel) {
  return (Shape::kRows + kernel.stages * Shape::kKeys) * (kernel.key_pitch + kernel.v_pitch);
}

inline constexpr int kLawRowsStaticBytes = 12 * 1024;  // at most, of the kernel's own arrays

// As the CPU's DsFactor() and ScoreRoundings().
inline LawInsideOf RoundingsInside(const ProbeParams& p, bool composed) {
  const float scale = std::fabs(p.scale), factor = scale > 0.f ? std::min(scale, 1.f) : 1.f;
  int exponent;
  const int of_scores = (std::frexp(scale, &exponent) != 0.5f ? 1 : 0) + (p.softcap > 0.f ? 3 : 0);
  const auto in_fp32 = static_cast<float>(kLawScoreRoundings * static_cast<double>(p.head_dim));
  return {factor, 1.f / factor, composed ? static_cast<float>(of_scores) : 0.f, in_fp32};
}

// What the launches of these rows share, but for memory.  p: rows_per_head as wanted.
template <class Element, Form kForm>
Status PlanRows(const ProbeParams& p, bool composed, const Gpu& gpu, LawRowsParams* kernel) {
  using Shape = TileShape<Element, false, kForm>;
  kernel->p = p;
  kernel->composed = composed;
  kernel->roundings = RoundingsInside(p, composed);
  kernel->group = p.heads / p.kv_heads;
  kernel->rows = SampledRows(p);
  kernel->row_tiles = (kernel->group * kernel->rows + Shape::kRows - 1) / Shape::kRows;
  kernel->key_tiles = static_cast<int>((p.k_len + Shape::kKeys - 1) / Shape::kKeys);
  kernel->key_pitch = TilePitch(p.head_dim, sizeof(Element));
  kernel->v_pitch = TilePitch(p.v_dim, sizeof(Element));
  const auto is_vectorized = [&](const Tensor4& t, int64_t heads, int64_t tokens, int64_t dim) {
    return IsVectorized(p.dtype, t, p.batch, heads, tokens, dim);
  };
  kernel->vectorized =
      is_vectorized(p.q, p.heads, p.q_len, p.head_dim) && is_vectorized(p.k, p.kv_heads, p.k_len, p.head_dim) &&
      is_vectorized(p.v, p.kv_heads, p.k_len, p.v_dim) && is_vectorized(p.d_o, p.heads, p.q_len, p.v_dim);
  kernel->stages = 2;
  if (LawRowsBytes<Shape>(*kernel) + kLawRowsStaticBytes > gpu.shared_bytes_max) kernel->stages = 1;
  const int bytes = LawRowsBytes<Shape>(*kernel) + kLawRowsStaticBytes;
  if (bytes > gpu.shared_bytes_max) {
    return Fail(Status::kUnsupported,
                "head_dim is %lld and v_dim %lld, which takes %d bytes of shared memory, but this GPU has %d",
                static_cast<long long>(p.head_dim), static_cast<long long>(p.v_dim), bytes, gpu.shared_bytes_max);
  }
  const int64_t units = p.batch * p.kv_heads * kernel->row_tiles;
  // Two blocks a multiprocessor, and two tiles a block.
  const int64_t wanted = units > 0 ? 2 * gpu.multiprocessors / units : 1;
  kernel->parts = static_cast<int>(std::clamp<int64_t>(std::min<int64_t>(wanted, kernel->key_tiles / 2), 1, 16));
  if (units > INT32_MAX / kernel->parts) {
    return Fail(Status::kUnsupported, "batch is %lld, but that is too many for these rows",
                static_cast<long long>(p.batch));
  }
  return Status::kOk;
}

template <class Element, Form kForm, LawPass kPass>
Status LaunchRows(const LawRowsParams& kernel, void* stream, const char* name) {
  Grid grid;
  grid.units = kernel.p.batch * kernel.p.kv_heads * kernel.row_tiles * kernel.parts;
  grid.threads = kTileThreads;
  grid.shared_bytes = LawRowsBytes<TileShape<Element, false, kForm>>(kernel);
  return LaunchClusters(LawRowsKernel<Element, kForm, kPass>, kernel, grid, stream, name);
}

inline Status LaunchMerge(const LawRowsParams& kernel, void* stream, const char* name) {
  Grid grid;
  grid.threads = 256;
  grid.units = (AllRows(kernel) + 255) / 256;
  return LaunchClusters(LawMergeKernel, kernel, grid, stream, name);
}

}  // namespace bellwether::kernels::cuda

#endif  // BELLWETHER_KERNELS_CUDA_LAWS_ROWS_CUH_
