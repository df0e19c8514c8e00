// Stabilized attention, backward of head dims up to 256, Hopper; see
// bellwether/kernels/attention.h and attention_bwd.cuh, whose other kernels it shares.
//
// Work      one CTA per tile of 64 keys.  Of a step's 64 queries each of two warpgroups has 32 for the scores, S^T = K
//           Q^T and dP^T = V dO^T, and of the 256 channels each has 128 for the rest: dV += P^T dO, dK += dS^T Q, dQ =
//           dS K.  So P^T and dS^T go through shared memory to both, and dK and dV of 64 x 256 fit the registers.
//           S^T of the next step is issued behind dQ and dK of this one, dP^T runs under the exponentials, dV under
//           dS^T; dQ is added to global memory from the registers while dK and S^T run.  Warpgroup 0 loads.
// Memory    Q, dO once per tile of keys, from L2; dQ sums: 4 bytes an element added per tile of keys.
//           Shared memory: a step reads and writes some 480 KB of it, 3,750 cycles beside 2,560 of products.
// Numerics  as attention_bwd.cuh.
// Limits    strides multiples of 8 elements.

#ifndef BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_BWD_SPLIT_CUH_
#define BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_BWD_SPLIT_CUH_

#include <cuda.h>
#include <cuda_runtime.h>

#include "bellwether/kernels/status.h"
#include "cuda/accumulator_sums.cuh"
#include "cuda/attention_bwd_errors.cuh"
#include "cuda/attention_bwd_rows.cuh"
#include "cuda/attention_bwd_scores.cuh"
#include "cuda/attention_bwd_tiles.cuh"
#include "cuda/attention_bwd_turns.cuh"
#include "cuda/attention_masks.cuh"
#include "cuda/registers.cuh"
#include "cuda/sm90/attention_bwd_launch.h"
#include "cuda/sm90/attention_bwd_produce.cuh"
#include "cuda/sm90/ptx.cuh"
#include "cuda/sm90/tiles.cuh"
#include "cuda/sm90/wgmma.cuh"
#include "cuda/softmax.cuh"
#include "cuda/store_rows.cuh"

namespace bellwether::kernels::cuda::sm90 {

// The booleans are BwdShape's.
template <class T_, bool kGeneral_, bool kRounded_, bool kRowSums_, bool kCount_>
struct BwdSplitShape {
  using T = T_;
  using Keys = BwdSplitShape;
  static constexpr int kHeadDim = 256;
  static constexpr bool kGeneral = kGeneral_, kRounded = kRounded_, kRowSums = kRowSums_, kCount = kCount_;
  static constexpr int kCols = 64;                        // keys a CTA
  static constexpr int kRows = 64;                        // queries a step
  static constexpr int kScoreRows = kRows / 2;            // of a warpgroup
  static constexpr int kChannels = kHeadDim / 2;          // of a warpgroup
  static constexpr int kStages = 2;                       // of Q, of dO
  static constexpr int kThreads = 384;
  static constexpr int kHalves = kHeadDim / 64;           // boxes of a row
  static constexpr int kKvBytes = kCols * kHeadDim * 2, kQBytes = kRows * kHeadDim * 2;
  static constexpr int kScoreBytes = kCols * kRows * 2;   // of P or dS
  static constexpr int kRowBytes = kRows * 4;             // of L, delta or 1 / lt
  // What a consumer thread has of a step's dQ: see attention_bwd_rows.cuh.
  static constexpr int kQueryThreads = 256, kQueryTiles = 1, kQueryColumns = kChannels;
  static constexpr int kOutputs = kHeadDim, kSplits = 1;
  static constexpr bool kSumsKeys = false;
  static __device__ int QueryRow(int thread) { return thread % 128 / 32 * 16 + thread % 32 / 4; }
  static __device__ int QueryColumn(int thread) { return thread / 128 * kChannels; }
  static constexpr int kSharedBytes = 2 * kKvBytes + 2 * kStages * kQBytes + 3 * kStages * kRowBytes + 3 * kScoreBytes +
                                      1024 + 128;
  static_assert(kSharedBytes <= 227 * 1024 - 64);  // beside them the tile
};

template <class S>
struct BwdSplitShared {
  uint32_t k, v, q, d_o, probs, ds, lse, delta, inverse;
  uint32_t kv_full, q_full, q_empty, d_o_full, d_o_empty, ds_full, ds_empty;

  __device__ explicit BwdSplitShared(char* raw) {
    k = (SharedAddress(raw) + 1023u) & ~1023u;
    v = k + S::kKvBytes;
    q = v + S::kKvBytes;
    d_o = q + S::kStages * S::kQBytes;
    probs = d_o + S::kStages * S::kQBytes;
    ds = probs + 2 * S::kScoreBytes;
    lse = ds + S::kScoreBytes;
    delta = lse + S::kStages * S::kRowBytes;
    inverse = delta + S::kStages * S::kRowBytes;
    kv_full = inverse + S::kStages * S::kRowBytes;
    q_full = kv_full + 8;
    q_empty = q_full + 8 * S::kStages;
    d_o_full = q_empty + 8 * S::kStages;
    d_o_empty = d_o_full + 8 * S::kStages;
    ds_full = d_o_empty + 8 * S::kStages;
    ds_empty = ds_full + 8;
  }
};

// D[64 keys, 32 queries] = A[64 keys, 256] B[32 queries, 256]^T.
template <class S>
__device__ __forceinline__ void IssueSplitScores(float (&d)[S::kScoreRows / 2], uint64_t a, uint64_t b) {
#pragma unroll
  for (int i = 0; i < S::kHeadDim / 16; ++i) {
    Wgmma<typename S::T, S::kScoreRows, false, false>::Ss(d, a + (i / 4) * (S::kCols * 8) + (i % 4) * 2,
                                                          b + (i / 4) * (S::kRows * 8) + (i % 4) * 2, i > 0);
  }
}

// D[64 keys, 128 channels] += A[64 keys, 64 queries] B[64 queries, 128 channels].
template <class S>
__device__ __forceinline__ void IssueSplitKeys(float (&d)[S::kChannels / 2], uint64_t a, uint64_t b) {
#pragma unroll
  for (int i = 0; i < S::kRows / 16; ++i) {
    Wgmma<typename S::T, S::kChannels, false, true>::Ss(d, a + i * 2, b + i * 128, 1);
  }
}

// dQ[64 queries, 128 channels] = dS[64 queries, 64 keys] K[64 keys, 128 channels]; dS lies transposed.
template <class S>
__device__ __forceinline__ void IssueSplitQueries(float (&d)[S::kChannels / 2], uint64_t ds, uint64_t k) {
#pragma unroll
  for (int i = 0; i < S::kCols / 16; ++i) {
    Wgmma<typename S::T, S::kChannels, true, true>::Ss(d, ds + i * 128, k + i * 128, i > 0);
  }
}

// Leaves a warpgroup's 32 queries of P^T or dS^T at `to`, where a key's row has all 64.
template <class S>
__device__ __forceinline__ void StoreSplitScores(uint32_t to, const uint32_t (&words)[S::kScoreRows / 4]) {
  const int thread = ThreadIndexAgain() - 128;
  const int row = thread % 128 / 32 * 16 + thread % 16;
  const int first = thread / 128 * (S::kScoreRows / 8) + thread % 32 / 16;
#pragma unroll
  for (int i = 0; i < S::kScoreRows / 4; i += 4) {
    StoreMatrices(to + row * 128 + ((first + i / 2) ^ row % 8) * 16, words[i], words[i + 1], words[i + 2],
                  words[i + 3]);
  }
  ProxyFence();
}

// Adds a warpgroup's dQ of one step.
template <class S>
__device__ __forceinline__ void AddSplitQueries(const AttentionBwdParams& p, const BwdTile* tile, int head, int m,
                                                const float (&dq)[S::kChannels / 2]) {
  const BwdTile t = *tile;
  const int thread = ThreadIndexAgain() - 128;
  const int64_t row = RowBase(p, t.sequence, head) + m * S::kRows;
  if (S::kGeneral && p.turns != nullptr) AwaitTurn<S>(p, t, m, head, thread / 32, thread % 32);
  AddToSums<S::kChannels / 2, S::kQueryThreads>(p.dq_sum + row * S::kHeadDim, thread, dq);
}

// Adds rowsum(dS) of every step, as the products read it.  By a warp that has nothing else to do, two queries a lane:
// a column of ones beside K, as attention_bwd.cuh has it, takes registers of the consumers.
template <class S>
__device__ __forceinline__ void BwdSplitSumRows(const AttentionBwdParams& p, const BwdSplitShared<S>& sm,
                                                const BwdTile* tile) {
  constexpr int kTurn = S::kQueryThreads / 32;
  uint32_t parity = 0;
#pragma unroll 1
  for (int g = 0; g < p.seq.group; ++g) {
#pragma unroll 1
    for (int m = tile->first_tile; m < tile->end_tile; ++m, parity ^= 1) {
      float even = 0.f, odd = 0.f;
      BarrierWait(sm.ds_full, parity);
      const int lane = ThreadIndexAgain() % 32;
#pragma unroll 4
      for (int row = 0; row < S::kCols; ++row) {
        const int word = LoadShared(sm.ds + row * 128 + (lane / 4 ^ row % 8) * 16 + lane % 4 * 4);
        const float2 pair = UnpackPair<typename S::T>(static_cast<uint32_t>(word));
        even += pair.x;
        odd += pair.y;
      }
      BarrierArrive(sm.ds_empty);
      const BwdTile t = *tile;  // Its loads come late, since 24 registers are few.
      const int head = t.kv_head * p.seq.group + g;
      if (S::kGeneral && p.turns != nullptr) AwaitTurn<S>(p, t, m, head, kTurn, lane);
      float* const sums = p.ds_sum + RowBase(p, t.sequence, head) + m * S::kRows + lane * 2;
      ReduceAdd(sums, even);
      ReduceAdd(sums + 1, odd);
      if (S::kGeneral && p.turns != nullptr) PassTurn<S>(p, t, m, head, kTurn, lane);
    }
  }
}

// A warpgroup's channels of 64 keys of dV or dK.
template <class S>
__device__ __forceinline__ void StoreSplitKeys(const AttentionBwdParams& p, const BwdTile& t, void* base,
                                               const Strides& stride, float scale, const float (&x)[S::kChannels / 2]) {
  const int thread = ThreadIndexAgain() - 128, lane = thread % 32, channel = S::QueryColumn(thread);
  const int key = t.key + S::QueryRow(thread);
  const Sequence& seq = t.sequence;
  const auto place = [&](int at) -> uint16_t* {
    if (at >= seq.k_len) return nullptr;
    return static_cast<uint16_t*>(base) + seq.index * stride.batch + t.kv_head * stride.head +
           (seq.k_start + at) * stride.token + channel;
  };
  uint32_t words[S::kChannels / 4];
#pragma unroll
  for (int i = 0; i < S::kChannels / 4; ++i) words[i] = PackPair<typename S::T>(x[2 * i] * scale, x[2 * i + 1] * scale);
  StoreRows<S::kChannels>(words, place(key), place(key + 8), p.seq.head_dim - channel, lane);
}

// `tile` is t in shared memory, for what would otherwise stay in registers.
template <class S>
__device__ __forceinline__ void BwdSplitConsume(const AttentionBwdParams& p, const BwdSplitShared<S>& sm,
                                                const BwdTile& t, const BwdTile* tile, int warpgroup) {
  using T = typename S::T;
  static_assert(S::kRows == S::kCols, "of both the tiles are alike");
  constexpr int kScores = S::kScoreRows / 2, kPairs = S::kScoreRows / 4;
  // Made anew where they are used: kept, they take registers that are short.
  const auto rows_of = [](uint32_t tile, int group) { return TileDescriptor(tile + group * S::kScoreRows * 128, 0, 1024); };
  const auto channels_of = [](uint32_t tile, int group) {
    return TileDescriptor(tile + group * 2 * S::kRows * 128, S::kRows * 128, 1024);
  };
  // The same in all lanes, so that what comes of it lies in uniform registers.
  const auto group_again = [] { return __shfl_sync(0xffffffffu, ThreadIndexAgain() / 128 - 1, 0); };

  float dk[S::kChannels / 2], dv[S::kChannels / 2];
#pragma unroll
  for (int i = 0; i < S::kChannels / 2; ++i) dk[i] = dv[i] = 0.f;
  const int tiles = t.end_tile - t.first_tile;
  const int steps = tiles > 0 ? p.seq.group * tiles : 0;

  if (steps > 0) {
    int m = t.first_tile, head = t.kv_head * p.seq.group;
    float s[kScores];
    BarrierWait(sm.kv_full, 0);
    BarrierWait(sm.q_full, 0);
    PinRegisters(dk);
    PinRegisters(dv);
    WgmmaFence();
    IssueSplitScores<S>(s, rows_of(sm.k, 0), rows_of(sm.q, warpgroup));
    WgmmaCommit();
    WgmmaWait<0>();
    PinRegisters(s);
    uint32_t step = 0;
    // counted: the rows of this step count for the statistics.
    const auto run_step = [&](auto is_last, auto counted) {
      constexpr bool kLast = decltype(is_last)::value;
      float dp[kScores];
      uint32_t words[kPairs];
      // The rings' positions come from the number of the step.
      const auto stage = [&] { return step % S::kStages; };
      BarrierWait(sm.d_o_full + 8 * stage(), step / S::kStages & 1);
      WgmmaFence();
      IssueSplitScores<S>(dp, rows_of(sm.v, 0), rows_of(sm.d_o + stage() * S::kQBytes, group_again()));
      WgmmaCommit();
      // S of this step is there already; dP runs under its exponentials.
      if constexpr (S::kGeneral) {
        if (p.score.cap_scale != 0.f) {
#pragma unroll
          for (int i = 0; i < kScores; ++i) s[i] = Tanh(s[i] * p.score.cap_scale);
        }
      }
      const BwdTile here = *tile;
      const int thread = ThreadIndexAgain() - 128, first_query = thread / 128 * S::kScoreRows + thread % 4 * 2;
      if (NeedsMask<S::kGeneral>(p.seq, here.sequence, here.key, S::kCols, m * S::kRows, S::kRows)) {
        MaskTransposed<S::kGeneral>(s, p.seq, here.sequence, here.key + S::QueryRow(thread), m * S::kRows + first_query);
      }
      const uint32_t of_rows = stage() * S::kRowBytes + first_query * 4;
      const uint32_t lse = sm.lse + of_rows, delta = sm.delta + of_rows;
      [[maybe_unused]] const uint32_t inverse = sm.inverse + of_rows;
      ToProbabilities<T, S::kRounded>(s, s, p.score.scale_log2, lse, inverse);
#pragma unroll
      for (int i = 0; i < kPairs; ++i) words[i] = PackPair<T>(s[2 * i], s[2 * i + 1]);
      // P's buffers alternate: a warpgroup that passed the barrier behind dS had finished dV of the step before.
      const uint32_t probs_buffer = (step & 1) * S::kScoreBytes;
      StoreSplitScores<S>(sm.probs + probs_buffer, words);
      NamedSync(1, 256);
      PinRegisters(dv);
      WgmmaFence();
      IssueSplitKeys<S>(dv, rows_of(sm.probs + probs_buffer, 0), channels_of(sm.d_o + stage() * S::kQBytes, group_again()));
      WgmmaCommit();
      WgmmaWait<1>();
      PinRegisters(dp);
      if constexpr (decltype(counted)::value) {
        const BwdTile of = *tile;
        AddErrors<1, kScores>(p.errors + RowBase(p, of.sequence, head) + m * S::kRows + group_again() * S::kScoreRows,
                              delta, ThreadIndexAgain() % 32, [&](int i, float d) { return s[i] * (dp[i] - d); });
      }
      if constexpr (S::kGeneral) {
        if (p.score.cap_scale != 0.f) {
          ApplyCapDerivative<S::kRounded>(dp, s, p.score.scale_log2, lse, delta, inverse);
        }
      }
#pragma unroll
      for (int i = 0; i < kScores; i += 4) {
        const float2 d = LoadShared2(delta + i * 8);
        words[i / 2] = PackPair<T>(s[i] * (dp[i] - d.x), s[i + 1] * (dp[i + 1] - d.y));
        words[i / 2 + 1] = PackPair<T>(s[i + 2] * (dp[i + 2] - d.x), s[i + 3] * (dp[i + 3] - d.y));
      }
      // dS has one buffer: a warpgroup that passed the barrier behind P had finished the step before.
      if constexpr (S::kRowSums) BarrierWait(sm.ds_empty, (step & 1) ^ 1);
      StoreSplitScores<S>(sm.ds, words);
      if constexpr (S::kRowSums) BarrierArrive(sm.ds_full);
      NamedSync(1, 256);

      float dq[S::kChannels / 2];
      const int group = group_again();
      PinRegisters(dk);
      WgmmaFence();
      IssueSplitQueries<S>(dq, rows_of(sm.ds, 0), channels_of(sm.k, group));
      WgmmaCommit();
      IssueSplitKeys<S>(dk, rows_of(sm.ds, 0), channels_of(sm.q + stage() * S::kQBytes, group));
      WgmmaCommit();
      if constexpr (!kLast) {
        const int next = (step + 1) % S::kStages;
        BarrierWait(sm.q_full + 8 * next, (step + 1) / S::kStages & 1);
        WgmmaFence();
        IssueSplitScores<S>(s, rows_of(sm.k, 0), rows_of(sm.q + next * S::kQBytes, group_again()));
        WgmmaCommit();
        WgmmaWait<2>();  // dV, dQ
      } else {
        WgmmaWait<1>();
      }
      PinRegisters(dq);
      AddSplitQueries<S>(p, tile, head, m, dq);
      BarrierArrive(sm.d_o_empty + 8 * stage());  // here, since ptxas moves the next wait above the additions, but not above this
      WgmmaWait<0>();            // dK, and S of the next step
      PinRegisters(dv);
      PinRegisters(dk);
      PinRegisters(s);
      BarrierArrive(sm.q_empty + 8 * stage());
      if (S::kGeneral && p.turns != nullptr) {
        const int thread = ThreadIndexAgain() - 128;
        PassTurn<S>(p, *tile, m, head, thread / 32, thread % 32);
      }
      if (++m == tile->end_tile) {
        m = tile->first_tile;
        ++head;
      }
    };
    // What counts has code of its own, so that the other steps cost what they do without.
    const auto run = [&](auto is_last) {
      if constexpr (S::kCount) {
        if (p.stats.Count(tile->sequence.index, m * S::kRows)) return run_step(is_last, std::true_type{});
      }
      run_step(is_last, std::false_type{});
    };
    for (; step + 1 < static_cast<uint32_t>(steps); ++step) run(std::false_type{});
    run(std::true_type{});
    PinRegisters(dv);
    PinRegisters(dk);
  }

  const BwdTile done = *tile;
  StoreSplitKeys<S>(p, done, p.dv, p.dv_stride, 1.f, dv);
  StoreSplitKeys<S>(p, done, p.dk, p.dk_stride, p.scale, dk);
}

// Grid: kv_heads * key_tiles.  Block: S::kThreads.
template <class S>
__global__ void __launch_bounds__(S::kThreads, 1)
    AttentionBwdSplitKernel(const __grid_constant__ AttentionBwdParams p, const __grid_constant__ BwdMaps maps) {
  extern __shared__ char raw[];
  const BwdSplitShared<S> sm(raw);
  __shared__ BwdTile tile;
  BwdTile t;
  if (!LocateBwdTile<S>(p, blockIdx.x, &t)) return;
  if (threadIdx.x == 0) {
    tile = t;
    BarrierInit(sm.kv_full, 1);
    for (int i = 0; i < S::kStages; ++i) {
      BarrierInit(sm.q_full + 8 * i, 1);
      BarrierInit(sm.d_o_full + 8 * i, 1);
      // Every consumer thread reads L and delta, and every one arrives.
      BarrierInit(sm.q_empty + 8 * i, 256);
      BarrierInit(sm.d_o_empty + 8 * i, 256);
    }
    BarrierInit(sm.ds_full, 256);
    BarrierInit(sm.ds_empty, 32);
    BarrierInitFence();
  }
  __syncthreads();
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  if (warpgroup == 0) {
    RegistersShrink<24>();
    if (threadIdx.x == 0) {
      BwdProduce<S>(p, maps, sm, t);
    } else if (S::kRowSums && threadIdx.x / 32 == 1) {
      BwdSplitSumRows<S>(p, sm, &tile);
    }
  } else {
    RegistersGrow<240>();
    BwdSplitConsume<S>(p, sm, t, &tile, warpgroup - 1);
  }
}

template <class S>
Status LaunchAttentionBwdSplit(const AttentionBwdParams& p, const BwdMaps& maps, cudaStream_t stream) {
  const auto kernel = AttentionBwdSplitKernel<S>;
  if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, S::kSharedBytes) != cudaSuccess) {
    return Status::kDeviceError;
  }
  // Of the shape the other kernels read only what all shapes share.
  using Rows = BwdSplitShape<typename S::T, false, false, false, false>;
  LaunchBwdAround<Rows>(
      p, stream, [&] { kernel<<<p.seq.kv_heads * p.key_tiles, S::kThreads, S::kSharedBytes, stream>>>(p, maps); });
  return cudaGetLastError() == cudaSuccess ? Status::kOk : Status::kDeviceError;
}

// For attention_bwd_shapes.cuh.
template <class T>
struct BwdSplitKernels {
  template <bool kGeneral, bool kRounded, bool kRowSums>
  static constexpr bool kExact = !kGeneral;

  template <bool kGeneral, bool kRounded, bool kRowSums, bool kCount>
  static BwdLauncher Make() {
    using S = BwdSplitShape<T, kGeneral, kRounded, kRowSums, kCount>;
    return {S::kRows, S::kCols, S::kCount, LaunchAttentionBwdSplit<S>};
  }
};

}  // namespace bellwether::kernels::cuda::sm90

#endif  // BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_BWD_SPLIT_CUH_
