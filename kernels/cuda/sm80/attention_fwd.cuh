// Stabilized attention, forward, compute capability 8.0 and later; see
// bellwether/kernels/attention.h and cuda/softmax.cuh for what it computes.
//
// Work      one CTA of four warps per tile of kRows query rows, longest first.  A
//           warp owns kTiles tiles of 16 rows, so that what it loads of K and V
//           serves all of them: S = Q K^T, softmax and O += P V stay in its
//           registers.  K and V of the next tile of keys are copied during the whole
//           step; where shared memory is short, V of this one during S and the softmax.
// Memory    Q, O once; K, V once per tile of query rows, mostly from L2: tiles are
//           ordered in sections of heads whose K and V fit it together.
// Numerics  S, O, l, lt in fp32; P rounded to the input type; O rounded once.
// Limits    strides multiples of 8 elements.

#ifndef BELLWETHER_KERNELS_CUDA_SM80_ATTENTION_FWD_CUH_
#define BELLWETHER_KERNELS_CUDA_SM80_ATTENTION_FWD_CUH_

#include <cuda_runtime.h>

#include <type_traits>

#include "bellwether/kernels/status.h"
#include "cuda/attention_bias.cuh"
#include "cuda/attention_fwd_outputs.cuh"
#include "cuda/attention_fwd_tiles.cuh"
#include "cuda/attention_masks.cuh"
#include "cuda/memory.cuh"
#include "cuda/registers.cuh"
#include "cuda/sm80/attention_params.h"
#include "cuda/sm80/products.cuh"
#include "cuda/sm80/row_maxima.cuh"
#include "cuda/sm80/shared_copy.cuh"
#include "cuda/softmax.cuh"
#include "cuda/standing_rows.cuh"
#include "cuda/store_rows.cuh"

namespace bellwether::kernels::cuda::sm80 {

// kCols keys a step.  kValueStages: of V, 1 or 2; with one, a step has a barrier more.
// kCount: rows can be counted for the statistics: in tiles that count by a loop of
// their own, kCountCols keys at a time, so that the others cost what they do without.
// kMasked: a mask, key bounds and sinks are honoured.
template <class T_, int kHeadDim_, int kTiles_, int kCols_, int kValueStages_, SoftmaxMode kMode_, bool kCount_,
          bool kMasked_>
struct FwdShape {
  using T = T_;
  using Seq = SequenceOf<kMasked_>;
  using Tile = FwdTileOf<Seq>;
  static constexpr bool kMasked = kMasked_;
  static constexpr int kHeadDim = kHeadDim_, kTiles = kTiles_, kCols = kCols_;
  static constexpr int kValueStages = kValueStages_;
  static constexpr SoftmaxMode kMode = kMode_;
  static constexpr bool kGeneral = true, kCount = kCount_;
  // lt is summed by the tensor cores, as a product with ones.
  static constexpr bool kOnes = kDividesByRounded<kMode>;
  static constexpr int kOutputs = kHeadDim + (kOnes ? 8 : 0);
  static constexpr bool kTop = kMode == SoftmaxMode::kPaper;  // keeps the two largest scores
  static constexpr bool kStanding = kDividesByRounded<kMode>;
  // Of S: what else is kept leaves fewer registers for operands ahead, and so does code
  // for 8.0.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  static constexpr bool kFewAhead = kTop || kOnes || kValueStages == 2;
#else
  static constexpr bool kFewAhead = kTop;
#endif
  static constexpr int kUnroll = kHeadDim == 128 && (kMasked || (kTop && kValueStages == 1)) ? 2
                                 : kHeadDim == 128 && kFewAhead                              ? 4
                                                                                             : kHeadDim / 16;
  static constexpr int kCountCols = kHeadDim <= 64 && kCols % 64 == 0 && !kMasked ? 64 : 32;
  static constexpr int kWarps = 4, kThreads = 32 * kWarps, kBlocks = 2;
  static constexpr int kWarpRows = 16 * kTiles, kRows = kWarpRows * kWarps;
  static constexpr int kQBytes = kRows * kHeadDim * 2, kKvBytes = kCols * kHeadDim * 2;
  // The tile, its keys and the warps' steps; these, Q, two stages of K, those of V.
  static constexpr int kPlaceBytes = 256;
  static constexpr int kSharedBytes = kPlaceBytes + kQBytes + (2 + kValueStages) * kKvBytes;
  static_assert(kSharedBytes <= 99 * 1024, "the least that any such GPU has");
};

// Masks the scores of one tile of 16 rows; `row` and `key` are this thread's first.
template <class Seq, int kScores>
__device__ __forceinline__ void MaskScores(float (&s)[kScores], const SequenceParams& p, const Seq& seq, int row,
                                           int key) {
  MaskAfter(s, LastKey(p, seq, row) - key, LastKey(p, seq, row + 8) - key);
  if (p.window > 0 || KeyBegin(seq) > 0) MaskBefore(s, FirstKey(p, seq, row) - key, FirstKey(p, seq, row + 8) - key);
}

// The keys of this CTA, from its sequence's first on; those from `begin` to `end` - 1 exist.
struct FwdKeys {
  const uint16_t *k, *v;
  int end, begin;
};

// Copies keys of step n, of K or V, `channels` of each.
template <class S>
__device__ __forceinline__ void CopyKeys(uint32_t to, int channels, const FwdKeys& keys, const uint16_t* from,
                                         const Strides& stride, int n) {
  TileCopier<S::kHeadDim, S::kCols, S::kThreads>::template Copy<S::kMasked>(to, from, stride.token, channels,
                                                                            n * S::kCols, keys.end, keys.begin);
}

// This warp's first row of its sequence.
template <class S>
__device__ __forceinline__ int WarpRow(const typename S::Tile& t) {
  return t.row + ThreadIndexAgain() / 32 * S::kWarpRows;
}

// The steps [begin, end) some of whose keys some of the warp's rows see, and those of
// which all rows see all.
struct WarpSteps {
  int begin, end, clear_begin, clear_end;
};
template <class S>
__device__ __forceinline__ WarpSteps StepsOfWarp(const SequenceParams& p, const typename S::Tile& t) {
  const int row = WarpRow<S>(t), last_row = row + S::kWarpRows - 1;
  const auto round_up = [](int keys) { return (keys + S::kCols - 1) / S::kCols; };
  const int end = row < t.sequence.q_len ? LastKey(p, t.sequence, last_row) + 1 : 0;
  return {max(FirstKey(p, t.sequence, row), 0) / S::kCols, round_up(max(end, 0)),
          round_up(max(FirstKey(p, t.sequence, last_row), 0)), max(LastKey(p, t.sequence, row) + 1, 0) / S::kCols};
}

// S = Q K^T of the keys of step n from `column` on, capped and masked.
template <class S, bool kCounted, int kUnroll, int kScores>
__device__ __forceinline__ void ComputeScores(float (&s)[S::kTiles][kScores], const FwdParams& p,
                                              const SharedCopy<typename S::Tile>& tile, uint32_t q_tile,
                                              uint32_t k_tile, bool masked, int n, int column) {
  const int thread = ThreadIndexAgain(), lane = thread % 32;
  InnerProduct<typename S::T, S::kHeadDim, kUnroll>(
      s, RowsReader<S::kHeadDim>(q_tile + thread / 32 * (S::kWarpRows * S::kHeadDim * 2), lane),
      ColumnsReader<S::kHeadDim>(k_tile, lane), column);
  if (p.score.cap_scale != 0.f) {
#pragma unroll
    for (int m = 0; m < S::kTiles; ++m) {
#pragma unroll
      for (int i = 0; i < kScores; ++i) s[m][i] = Tanh(s[m][i] * p.score.cap_scale);
    }
  }
  if (!masked && (!S::kMasked || p.mask.tensor.data == nullptr)) return;
  const typename S::Tile t = tile.Load();
  const int row = WarpRow<S>(t) + lane / 4,
            key = n * S::kCols + column + lane % 4 * 2;  // this thread's first
  if constexpr (S::kMasked) {
    if (p.mask.tensor.data != nullptr) {
      const int64_t at = MaskRowAt(p.mask.tensor, t.sequence.index, t.head, 0);
#pragma unroll
      for (int m = 0; m < S::kTiles; ++m) AddBias<!kCounted>(s[m], p.mask, at, t.sequence, row + 16 * m, key);
    }
    if (!masked) return;
  }
#pragma unroll
  for (int m = 0; m < S::kTiles; ++m) MaskScores(s[m], p.seq, t.sequence, row + 16 * m, key);
}

// In log2 units; -inf for none.
__device__ __forceinline__ float SinkOf(const MaskParams& p, int head) {
  return p.sinks != nullptr ? p.sinks[head] * kLog2E : -INFINITY;
}

// Shared memory of a CTA as addresses.
template <class S>
struct FwdShared {
  SharedCopy<typename S::Tile> tile;
  SharedCopy<FwdKeys> keys;
  SharedCopy<WarpSteps> steps;  // this warp's
  uint32_t q, k, v;

  __device__ __forceinline__ explicit FwdShared(uint32_t base)
      : tile(base),
        keys(tile.End()),
        steps(keys.End() + ThreadIndexAgain() / 32 * SharedCopy<WarpSteps>::kBytes),
        q(base + S::kPlaceBytes),
        k(q + S::kQBytes),
        v(k + 2 * S::kKvBytes) {
    static_assert(SharedCopy<typename S::Tile>::kBytes + SharedCopy<FwdKeys>::kBytes +
                      S::kWarps * SharedCopy<WarpSteps>::kBytes <=
                  S::kPlaceBytes);
  }
};

// What a warp keeps of its rows from step to step.
template <class S, bool kCounted>
struct FwdRows {
  using T = typename S::T;
  std::conditional_t<S::kStanding, StandingRows<T, kCounted>, SoftmaxRows<T, S::kMode, false, kCounted, S::kMasked>>
      rows[S::kTiles];
  float o[S::kTiles][S::kOutputs / 2];
  static constexpr bool kKeepsMaxima = S::kStanding && S::kCount && !kCounted;
  RowMaxima<S::kTiles> maxima;  // if kKeepsMaxima

  // `sink` in log2 units.
  __device__ __forceinline__ void BeginWithSink(float sink, int lane) {
#pragma unroll
    for (int m = 0; m < S::kTiles; ++m) {
      const float weight = rows[m].BeginWithSink(sink, lane % 4 == 0);
#pragma unroll
      for (int i = S::kHeadDim / 2; i < S::kOutputs / 2; ++i) o[m][i] = weight;
    }
  }
};

// P of the keys of step n from `column` on, and what they change of `w`.
template <class S, bool kCounted, int kUnroll, int kScores>
__device__ __forceinline__ void ComputeProbabilities(uint32_t (&probs)[S::kTiles][kScores / 2], FwdRows<S, kCounted>& w,
                                                     const FwdParams& p, const FwdShared<S>& sm, uint32_t k_tile,
                                                     bool masked, int n, int column) {
  float s[S::kTiles][kScores], largest[S::kTiles][2];
  ComputeScores<S, kCounted, kUnroll>(s, p, sm.tile, sm.q, k_tile, masked, n, column);
#pragma unroll
  for (int m = 0; m < S::kTiles; ++m) {
    float rescale[2];
    bool moved;
    if constexpr (S::kStanding) {
      w.rows[m].Largest(s[m], largest[m]);
      moved = true;
      if constexpr (kCounted) {  // One vote for most steps: what exceeds also nears.
        moved = __any_sync(0xffffffffu, w.rows[m].Nears(largest[m]));
        if (moved) w.rows[m].AddNear(s[m], largest[m], p.score.tie_window);
      }
      moved = moved && __any_sync(0xffffffffu, w.rows[m].Exceeds(largest[m], p.score.scale_log2));
      if (moved) w.rows[m].Move(largest[m], p.score.scale_log2, rescale);
    } else {
      w.rows[m].template Tile<true>(s[m], p.score, p.paper, p.seq.head_dim >> 16, rescale);
      if (kCounted && n == 0 && column == 0) w.rows[m].KeepFirstKey(s[m]);
      w.rows[m].Probabilities(s[m], probs[m]);
      moved = __any_sync(0xffffffffu, rescale[0] != 1.f || rescale[1] != 1.f);
    }
    if (moved) {  // Rare with anchors at integers.
#pragma unroll
      for (int i = 0; i < S::kOutputs / 2; ++i) w.o[m][i] *= rescale[i / 2 % 2];
    }
    if constexpr (S::kStanding) {
      w.rows[m].Exponentials(s[m], p.score.scale_log2, p.seq.head_dim >> 16);
      if (kCounted && n == 0 && column == 0) w.rows[m].KeepFirstKey(s[m]);
      w.rows[m].Probabilities(s[m], probs[m]);
    }
  }
  if constexpr (FwdRows<S, kCounted>::kKeepsMaxima) w.maxima.Add(largest, ThreadIndexAgain() % 32);
}

// O += P V of the same keys, from the last to the first, like the tiles.  The
// tensor cores cut off what is small beside the sum so far, and the first token
// often has most of the weight.
template <class S, int kPairs>
__device__ __forceinline__ void AddValues(float (&o)[S::kTiles][S::kOutputs / 2],
                                          const uint32_t (&probs)[S::kTiles][kPairs], uint32_t v_tile, int column) {
  const RowsReader<S::kHeadDim> v(v_tile, ThreadIndexAgain() % 32);
#pragma unroll
  for (int step = kPairs / 4 - 1; step >= 0; --step) {
    uint32_t a[S::kTiles][4];
    StepOf(probs, step, a);
    OuterStep<typename S::T, S::kHeadDim>(o, a, v, column + 16 * step);
    if constexpr (S::kOnes) SumStep<typename S::T>(o, S::kHeadDim / 2, a);
  }
}

// The steps [begin, end) from the last on, whose first copies are under way, and what
// they come to.  kCounted: the rows of this tile count for the statistics.  sink: if kMasked,
// in log2 units, -inf for none.
template <class S, bool kCounted>
__device__ __forceinline__ void RunTile(const FwdParams& p, const FwdShared<S>& sm, int begin, int end, float sink) {
  constexpr bool kTwoValues = S::kValueStages == 2;
  FwdRows<S, kCounted> w;
#pragma unroll
  for (int m = 0; m < S::kTiles; ++m) {
#pragma unroll
    for (int i = 0; i < S::kOutputs / 2; ++i) w.o[m][i] = 0.f;
  }
  if constexpr (S::kMasked) {
    if (sink != -INFINITY) w.BeginWithSink(sink, ThreadIndexAgain() % 32);
  }
  int stage = 0;  // of K, and of V if it has two, in bytes
#pragma unroll 1
  for (int n = end - 1; n >= begin; --n) {
    CopyWait<0>();
    __syncthreads();  // K is there, and every warp has read what the last step did.
    {
      const FwdKeys of = sm.keys.Load();
      const int other = S::kKvBytes - stage;
      if constexpr (!kTwoValues) {
        CopyKeys<S>(sm.v, p.seq.v_dim, of, of.v, p.v_stride, n);
        CopyCommit();
      }
      if (n > begin) {
        CopyKeys<S>(sm.k + other, p.seq.head_dim, of, of.k, p.k_stride, n - 1);
        if constexpr (kTwoValues) CopyKeys<S>(sm.v + other, p.seq.v_dim, of, of.v, p.v_stride, n - 1);
      }
      CopyCommit();
    }
    if constexpr (S::kMasked && !kCounted) {
      if (p.mask.tensor.data != nullptr && n > begin) {
        const typename S::Tile t = sm.tile.Load();
        const int lane = ThreadIndexAgain() % 32;
        if (lane < S::kWarpRows) {
          PrefetchBias(p.mask, MaskRowAt(p.mask.tensor, t.sequence.index, t.head, 0), t.sequence, WarpRow<S>(t) + lane,
                       (n - 1) * S::kCols, S::kCols);
        }
      }
    }
    const WarpSteps of_warp = sm.steps.Load();
    const bool needed = n >= of_warp.begin && n < of_warp.end;
    const bool masked = n < of_warp.clear_begin || n >= of_warp.clear_end;
    const uint32_t v_tile = sm.v + (kTwoValues ? stage : 0);
    const auto values_there = [] {
      if constexpr (!kTwoValues) {
        CopyWait<1>();
        __syncthreads();
      } else {
        __syncwarp();  // Else ptxas loads V so early that it spills.
      }
    };
    if constexpr (kCounted) {
      values_there();
      if (needed) {
#pragma unroll 1
        for (int column = S::kCols - S::kCountCols; column >= 0; column -= S::kCountCols) {
          uint32_t probs[S::kTiles][S::kCountCols / 4];
          ComputeProbabilities<S, true, S::kMasked ? 1 : S::kHeadDim / 16, S::kCountCols / 2>(
              probs, w, p, sm, sm.k + stage, masked, n, column);
          __syncwarp();
          AddValues<S>(w.o, probs, v_tile, column);
        }
      }
    } else {
      uint32_t probs[S::kTiles][S::kCols / 4];
      if (needed) {
        ComputeProbabilities<S, false, S::kUnroll, S::kCols / 2>(probs, w, p, sm, sm.k + stage, masked, n, 0);
      }
      values_there();
      if (needed) AddValues<S>(w.o, probs, v_tile, 0);
    }
    stage = S::kKvBytes - stage;
  }
  __syncthreads();  // The tile is there, even if it needs no key.
  const typename S::Tile t = sm.tile.Load();
  const int lane = ThreadIndexAgain() % 32;
  const typename S::Seq& seq = t.sequence;
#pragma unroll
  for (int m = 0; m < S::kTiles; ++m) {
    if constexpr (FwdRows<S, kCounted>::kKeepsMaxima) {
#pragma unroll
      for (int r = 0; r < 2; ++r) w.rows[m].max[r] = w.maxima.Of(m, r);
    }
    const int row = WarpRow<S>(t) + 16 * m + lane / 4;
    const auto place = [&](void* base, const Strides& stride, int at) -> uint16_t* {
      if (at >= seq.q_len) return nullptr;
      return static_cast<uint16_t*>(base) + seq.index * stride.batch + t.head * stride.head +
             (seq.q_start + at) * stride.token;
    };
    const auto store = [&](const uint32_t(&words)[kStoredColumns<S::kHeadDim> / 4], bool residual) {
      void* const base = residual ? p.o_lo : p.o;
      const Strides& stride = residual ? p.o_lo_stride : p.o_stride;
      StoreRows<kStoredColumns<S::kHeadDim>>(words, place(base, stride, row), place(base, stride, row + 8), p.seq.v_dim,
                                             lane);
    };
    FinishedRow done[2];
    WriteFwdSums(p, w.rows[m], row, t.head, seq, lane, done);
    if constexpr (S::kMasked) {
      MaskedKeys keys = {{}, SinkOf(p.mask, t.head)};  // Again, so that it is in no register meanwhile.
#pragma unroll
      for (int r = 0; kCounted && r < 2; ++r)
        keys.keys[r] = CountKeys(p.seq, p.mask.tensor, seq, t.head, row + 8 * r, lane);
      WriteFwdOutputs<S, kCounted>(p, w.rows[m], done, w.o[m], row, t.head, seq, lane, store, keys);
    } else {
      WriteFwdOutputs<S, kCounted>(p, w.rows[m], done, w.o[m], row, t.head, seq, lane, store);
    }
  }
}

// Grid: the tiles' numbers.  Block: S::kThreads.
template <class S>
__global__ void __launch_bounds__(S::kThreads, S::kBlocks) AttentionFwdKernel(const __grid_constant__ FwdParams p) {
  static_assert(kStatsBlockRows % S::kRows == 0);
  extern __shared__ __align__(128) unsigned char shared[];
  const FwdShared<S> sm(SharedAddress(shared));
  int begin, end;
  bool counted;
  float sink = -INFINITY;
  {
    typename S::Tile t;
    if (!LocateTile<S>(p, blockIdx.x, &t)) return;
    begin = t.begin;
    end = t.end;
    const typename S::Seq& seq = t.sequence;
    if constexpr (S::kMasked) sink = SinkOf(p.mask, t.head);
    counted = S::kCount && p.stats.Count(seq.index, t.row);
    const int kv_head = t.head / p.seq.group;
    const FwdKeys of = {TokensOf(p.k, p.k_stride, seq.index, kv_head, seq.k_start),
                        TokensOf(p.v, p.v_stride, seq.index, kv_head, seq.k_start), KeyEnd(seq), KeyBegin(seq)};
    if (threadIdx.x == 0) {
      sm.tile.Store(t);
      sm.keys.Store(of);
    }
    if (threadIdx.x % 32 == 0) sm.steps.Store(StepsOfWarp<S>(p.seq, t));
    if (begin < end) {
      TileCopier<S::kHeadDim, S::kRows, S::kThreads>::Copy(
          sm.q, TokensOf(p.q, p.q_stride, t.sequence.index, t.head, t.sequence.q_start), p.q_stride.token,
          p.seq.head_dim, t.row, t.sequence.q_len);
      CopyKeys<S>(sm.k, p.seq.head_dim, of, of.k, p.k_stride, end - 1);
      if constexpr (S::kValueStages == 2) CopyKeys<S>(sm.v, p.seq.v_dim, of, of.v, p.v_stride, end - 1);
    }
    CopyCommit();
  }
  if (counted) {
    if constexpr (S::kCount) RunTile<S, true>(p, sm, begin, end, sink);
  } else {
    RunTile<S, false>(p, sm, begin, end, sink);
  }
}

template <class S>
Status LaunchAttentionFwd(const FwdParams& p, int tiles, cudaStream_t stream) {
  const auto kernel = AttentionFwdKernel<S>;
  if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, S::kSharedBytes) != cudaSuccess) {
    return Status::kDeviceError;
  }
  kernel<<<tiles, S::kThreads, S::kSharedBytes, stream>>>(p);
  return cudaGetLastError() == cudaSuccess ? Status::kOk : Status::kDeviceError;
}

}  // namespace bellwether::kernels::cuda::sm80

#endif  // BELLWETHER_KERNELS_CUDA_SM80_ATTENTION_FWD_CUH_
