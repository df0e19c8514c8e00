// The probe: see probe.h.
//
// Work      a cluster of blocks per sequence, key head and 64 sampled rows (32 in fp32, 16
//           with drift_only) of the head's group; its blocks take tiles of keys in turn, and a block's warps
//           share rows and keys of a tile.  What the parts found is merged at the end.
// Memory    reads K, and V with d_o, once per so many rows; of q, o and d_o the sampled rows.
// Numerics  16-bit products are exact, sums fp32; parts of rows merge in fp32, a row's
//           numbers and a block's rows are added in double, blocks to `out` in fp32 and in
//           no fixed order.  Mean and spread of the scores are taken from the scores, tile
//           by tile and about each tile's own mean, so that a common mode thousands of
//           times the spread leaves the spread its digits.
// Forms     calls with a mask's tensor, row ranges or keys that no row sees have kernels of
//           their own, and so have dims above 256.  Keys outside V are zeros in the tiles.
// Limits    head_dim and v_dim 576 as far as shared memory goes, 2^30 tokens, 2^31 - 1
//           blocks, compute capability 8.0; keys longer than 1e19 and scores beyond fp32,
//           masked ones too, count as infinite.

#include <algorithm>

#include "backends.h"
#include "cuda/block_sum.cuh"
#include "cuda/cluster.cuh"
#include "cuda/probe_keys.cuh"
#include "cuda/probe_mask.cuh"
#include "cuda/probe_rows.cuh"
#include "cuda/probe_tiles.cuh"
#include "error.h"
#include "probe_sampling.h"

namespace bellwether::kernels::cuda {
namespace {

// What a kernel measures: rows of scores; with dO the error of delta, too; drift_only.
enum class Part { kScores, kDelta, kDrift };

template <class Element, Part kPart, Form kForm>
using ShapeOf = TileShape<Element, kPart == Part::kDrift, kForm>;

constexpr int kStagesMax = 2;  // of tiles of keys: one is used while the next arrives
constexpr int64_t kProbeTokensMax = int64_t{1} << 30;

struct ProbeKernelParams {
  ProbeParams p;
  KeyRange plain_v;     // V without `visible`
  int64_t group, rows;  // query heads of a key head; sampled rows of a query head
  int64_t row_tiles;    // of a sequence and key head
  int key_tiles;
  int cluster;             // blocks
  int stages;              // of keys, 1..kStagesMax
  int key_pitch, v_pitch;  // bytes of a tile's row; v_pitch 0 without d_o
  bool vectorized;
  MaskAccess mask_access;
};

// What a block knows of the place of one of its rows.
struct RowPlace {
  int head, row;   // head -1: no row
  int begin, end;  // allowed keys
};

template <class Element>
__device__ __forceinline__ const Element* RowOf(const Tensor4& t, int64_t batch, int64_t head, int64_t token) {
  return static_cast<const Element*>(t.data) + batch * t.batch_stride + head * t.head_stride + token * t.token_stride;
}

__device__ __forceinline__ RowPlace PlaceOf(const ProbeKernelParams& kernel, uint64_t seed, int64_t batch,
                                            int64_t kv_head, int64_t index) {
  if (index >= kernel.group * kernel.rows) return {-1, 0, 0, 0};
  const int64_t head = kv_head * kernel.group + index / kernel.rows;
  const int64_t row = RowAt(kernel.p, seed, batch, head, index % kernel.rows);
  const KeyRange keys = AllowedKeys(kernel.p, batch, row);
  return {static_cast<int>(head), static_cast<int>(row), static_cast<int>(keys.begin), static_cast<int>(keys.end)};
}

// What a thread knows of its two rows beside their places, where there is a mask.
struct MaskRows {
  // Where its rows begin in the mask's tensor.  MaskAccess::kChunks: in at[0] where the row begins of
  // which it reads a chunk for the warp, -1 without.
  int64_t at[2];
  int allowed[2];  // keys so far
  bool one_v;      // V is the same for all rows of the warp
};

// What it has asked for before a tile's keys were there.
struct MaskTile {
  bool in_v = false;  // key first_key + lane, if V is the same for all rows
  uint4 chunk = {};   // with MaskAccess::kChunks
};

// The chunk of a warp's tile that a lane reads: of row lane / kChunks.
template <int kWarpKeys>
inline constexpr int kChunks = kWarpKeys >= kChunkKeys ? kWarpKeys / kChunkKeys : 1;

template <int kWarpKeys>
__device__ __forceinline__ MaskTile LoadMask(const ProbeKernelParams& kernel, int64_t batch, int head, int first_key,
                                             bool visible, const MaskRows& rows) {
  const ProbeParams& p = kernel.p;
  const int lane = threadIdx.x % 32;
  MaskTile tile;
  const int key = first_key + lane;
  if (rows.one_v && lane < kWarpKeys && key < p.k_len) {
    tile.in_v = IsVisible(p, kernel.plain_v, batch, head, key);
  }
  if (kWarpKeys >= kChunkKeys && visible && kernel.mask_access == MaskAccess::kChunks && rows.at[0] >= 0) {
    const int begin = first_key + lane % kChunks<kWarpKeys> * kChunkKeys;
    if (begin < p.k_len) tile.chunk = ChunkAt(p.mask, rows.at[0] + begin, static_cast<int>(p.k_len) - begin);
  }
  return tile;
}

// Of both rows of this thread, which of its keys a bool tensor allows.  All lanes of a warp call it.
template <int kBlocks>
__device__ __forceinline__ void ChunksAllow(const MaskTile& tile, unsigned (&allowed)[2]) {
  constexpr int kOfRow = kChunks<8 * kBlocks>;
  const int lane = threadIdx.x % 32;
  unsigned word = ChunkBits(tile.chunk);
  if (kOfRow == 2) {
    const unsigned other = __shfl_xor_sync(0xffffffffu, word, 1);
    word = lane % 2 == 0 ? word | other << 16 : other | word << 16;
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    allowed[r] = OwnBits<kBlocks>(__shfl_sync(0xffffffffu, word, kOfRow * (lane / 4 + 8 * r)));
  }
}

// What a mask's tensor adds to the scores of the keys in `allowed`; those that it hides leave it.
template <int kCount>
__device__ __forceinline__ void AddBias(const ProbeKernelParams& kernel, int64_t at, int my_key, float (&bias)[kCount],
                                        unsigned& allowed) {
  const ProbeMask& mask = kernel.p.mask;
  const int k_len = static_cast<int>(kernel.p.k_len);
  if (kernel.mask_access == MaskAccess::kPairs && my_key + 4 * kCount - 7 < k_len) {
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      const float2 pair = BiasPairAt(mask, at + my_key + 4 * i);
      bias[i] = pair.x;
      bias[i + 1] = pair.y;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int key = my_key + i / 2 * 8 + i % 2;
      bias[i] = allowed >> i & 1 ? BiasAt(mask, at + key * mask.key_stride) : 0.f;
    }
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (bias[i] == -INFINITY) allowed &= ~(1u << i);
  }
}

// One thread's scores of one warp tile, for its two rows.
template <Part kPart, Form kForm, int kBlocks>
__device__ __forceinline__ void AddTile(const ProbeKernelParams& kernel, int64_t batch, const RowPlace (&place)[2],
                                        int first_key, int warp_keys, bool visible, bool whole,
                                        const float (&s)[kBlocks][4], const float (&dp)[kBlocks][4],
                                        const MaskTile& mask_tile, MaskRows& mask_rows, RowState (&state)[2]) {
  constexpr int kCount = 2 * kBlocks;
  constexpr bool kMasked = kForm != Form::kPlain;
  const ProbeParams& p = kernel.p;
  const int my_key = first_key + 2 * (threadIdx.x % 4);
  const int k_len = static_cast<int>(p.k_len);
  unsigned present = (1u << kCount) - 1;
  if (first_key + warp_keys > k_len) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (my_key + i / 2 * 8 + i % 2 >= k_len) present &= ~(1u << i);
    }
  }
  const bool chunks = kMasked && 8 * kBlocks >= kChunkKeys && visible && kernel.mask_access == MaskAccess::kChunks;
  unsigned of_v = present, of_chunks[2] = {present, present};
  if (kMasked && mask_rows.one_v) of_v = OwnBits<kBlocks>(__ballot_sync(0xffffffffu, mask_tile.in_v));
  if (chunks) ChunksAllow<kBlocks>(mask_tile, of_chunks);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float scores[kCount], gradients[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      scores[i] = s[i / 2][2 * r + i % 2] * p.scale;
      gradients[i] = kPart == Part::kDelta ? dp[i / 2][2 * r + i % 2] : 0.f;
    }
    unsigned in_v = of_v;
    if (kMasked && !mask_rows.one_v && place[r].head >= 0) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const int key = my_key + i / 2 * 8 + i % 2;
        if ((in_v >> i & 1) && !IsVisible(p, kernel.plain_v, batch, place[r].head, key)) in_v &= ~(1u << i);
      }
    }
    AddMoments(scores, in_v, state[r]);
    if (!visible) continue;
    unsigned allowed = (1u << kCount) - 1;
    if (!whole) allowed = OwnBits<kBlocks>(RangeBits(place[r].begin - first_key, place[r].end - first_key));
    float bias[kCount] = {};
    const bool biased = kMasked && !chunks && p.mask.data != nullptr && place[r].head >= 0;
    if (chunks) allowed &= of_chunks[r];
    if (biased) AddBias(kernel, mask_rows.at[r], my_key, bias, allowed);
    if (kMasked) mask_rows.allowed[r] += __popc(allowed);
#pragma unroll
    for (int i = 0; i < kCount; ++i) state[r].poison = fmaf(allowed >> i & 1 ? scores[i] : 0.f, 0.f, state[r].poison);
    if (kPart == Part::kDrift && !kMasked) continue;
    if (p.softcap > 0.f) {  // Apart, since it is long and mostly not needed.
#pragma unroll
      for (int i = 0; i < kCount; ++i) scores[i] = p.softcap * tanhf(scores[i] / p.softcap);
    }
    if (biased) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        scores[i] += bias[i];
        state[r].poison = fmaf(allowed >> i & 1 ? scores[i] : 0.f, 0.f, state[r].poison);
      }
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (allowed >> i & 1) continue;
      scores[i] = -INFINITY;
      gradients[i] = 0.f;
    }
    if (kPart == Part::kDrift) continue;
    if (my_key == 0) state[r].first_key = scores[0];
    AddScores<kCount, kPart == Part::kDelta>(scores, gradients, state[r]);
  }
}

// sum_c d_o[c] o[c] of the block's rows: a quarter or an eighth of a row a thread.
template <class Element, class Shape>
__device__ __forceinline__ void ComputeDeltaLp(const ProbeKernelParams& kernel, int64_t batch, const RowPlace* places,
                                               const unsigned char* d_o, double* delta_lp) {
  constexpr int kShare = kTileThreads / Shape::kRows;
  const int r = threadIdx.x / kShare;
  const RowPlace place = places[r];
  double sum = 0;
  if (place.head >= 0) {
    const Element* const o = RowOf<Element>(kernel.p.o, batch, place.head, place.row);
    const auto* const g = reinterpret_cast<const Element*>(d_o + r * kernel.v_pitch);
    for (int c = threadIdx.x % kShare; c < kernel.p.v_dim; c += kShare) {
      sum = fma(static_cast<double>(static_cast<float>(g[c])), static_cast<double>(static_cast<float>(o[c])), sum);
    }
  }
#pragma unroll
  for (int offset = 1; offset < kShare; offset *= 2) {
    sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  }
  if (threadIdx.x % kShare == 0) delta_lp[r] = sum;
}

// What registers leave room for.
template <class Element, Part kPart, Form kForm>
inline constexpr int kBlocksPerMultiprocessor = kForm == Form::kWide ||
                                                        (!ShapeOf<Element, kPart, kForm>::kTensorCores &&
                                                         (kPart == Part::kDelta ||
                                                          (kPart == Part::kScores && kForm == Form::kMasked)))
                                                    ? 1
                                                    : 2;

// Grid: [batch * kv_heads * row_tiles * cluster].  Block: kTileThreads.  Shared: SharedBytes().
template <class Element, Part kPart, Form kForm>
__global__ void __launch_bounds__(kTileThreads, kBlocksPerMultiprocessor<Element, kPart, kForm>)
    ProbeKernel(const __grid_constant__ ProbeKernelParams kernel) {
  using Shape = ShapeOf<Element, kPart, kForm>;
  constexpr int kRows = Shape::kRows, kKeys = Shape::kKeys;
  constexpr bool kDelta = kPart == Part::kDelta, kMasked = kForm != Form::kPlain;
  __shared__ RowState states[Shape::kKeyWarps][kRows];
  __shared__ RowPlace places[kRows];
  __shared__ int allowed_keys[kMasked ? Shape::kKeyWarps : 1][kRows];
  __shared__ double delta_lp[kRows], sums_of_keys[kKeySums<Shape>], scratch[Shape::kWarps];
  extern __shared__ __align__(16) unsigned char tiles[];

  const ProbeParams& p = kernel.p;
  if (p.gate != nullptr && p.gate[kGateOpen] == 0) return;  // All blocks alike.
  const uint64_t seed = p.seed + (p.gate != nullptr ? p.gate[kGateSeed] : 0);
  const int key_pitch = kernel.key_pitch, v_pitch = kernel.v_pitch;
  unsigned char* const queries = tiles;
  unsigned char* const gradients = queries + kRows * key_pitch;
  unsigned char* const first_stage = gradients + kRows * v_pitch;
  const int stage_bytes = kKeys * (key_pitch + v_pitch);

  const int rank = blockIdx.x % kernel.cluster;
  const int64_t unit = blockIdx.x / kernel.cluster;
  const int64_t row_tile = unit % kernel.row_tiles, sequence = unit / kernel.row_tiles;
  const int64_t kv_head = sequence % p.kv_heads, batch = sequence / p.kv_heads;
  const bool with_keys = row_tile == 0 && p.kv_out != nullptr;

  // Of the keys of its next tile that this thread copies from, whether they are in V: a bit each,
  // asked for a tile ahead.
  constexpr int kLanes = 8, kRowsApart = kTileThreads / kLanes;
  unsigned next_in_v = 0;
  const auto in_tile = [&](int key) {
    return key < p.k_len && (!kMasked || IsVisibleToGroup(p, kernel.plain_v, batch, kv_head, key));
  };
  const auto ask_for = [&](int tile) {
    if (!kMasked) return;
    next_in_v = 0;
#pragma unroll
    for (int r = 0; r < kKeys; r += kRowsApart) {
      next_in_v |= static_cast<unsigned>(in_tile(tile * kKeys + r + threadIdx.x / kLanes)) << r / kRowsApart;
    }
  };
  KeySums<Shape> key_sums;
  const auto load_keys = [&](int tile, int stage) {
    unsigned char* const keys = first_stage + stage * stage_bytes;
    const auto row_at = [&](const Tensor4& t) {
      return [&, tile, of = &t](int r) {
        const int key = tile * kKeys + r;
        const bool there = kMasked ? (next_in_v >> r / kRowsApart & 1) != 0 : key < p.k_len;
        return there ? RowOf<Element>(*of, batch, kv_head, key) : nullptr;
      };
    };
    LoadTile<Element>(keys, kKeys, key_pitch, p.head_dim, kernel.vectorized, p.k.data, row_at(p.k));
    if (kDelta) {
      LoadTile<Element>(keys + kKeys * key_pitch, kKeys, v_pitch, p.v_dim, kernel.vectorized, p.v.data, row_at(p.v));
    }
    CommitCopies();
    if (kMasked && with_keys && threadIdx.x % kLanes == 0) key_sums.in_v += __popc(next_in_v);
    ask_for(tile + kernel.cluster);
  };

  // 1. The first keys, which wait for nothing; where the rows are; their q and d_o.
  ask_for(rank);
  if (kernel.stages > 1 && rank < kernel.key_tiles) load_keys(rank, 0);
  if (threadIdx.x < kRows) {
    places[threadIdx.x] = PlaceOf(kernel, seed, batch, kv_head, row_tile * kRows + threadIdx.x);
  }
  __syncthreads();
  const auto query_at = [&](const Tensor4& t) {
    return [&, of = &t](int r) {
      const RowPlace at = places[r];
      return at.head < 0 ? nullptr : RowOf<Element>(*of, batch, at.head, at.row);
    };
  };
  LoadTile<Element>(queries, kRows, key_pitch, p.head_dim, kernel.vectorized, p.q.data, query_at(p.q));
  if (kDelta) {
    LoadTile<Element>(gradients, kRows, v_pitch, p.v_dim, kernel.vectorized, p.d_o.data, query_at(p.d_o));
  }
  CommitCopies();

  // 2. Over the keys.  Rows of this thread: lane / 4 and 8 more.
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first_row = warp % Shape::kRowWarps * 16, key_warp = warp / Shape::kRowWarps;
  const RowPlace place[2] = {places[first_row + lane / 4], places[first_row + lane / 4 + 8]};
  const bool active = places[first_row].head >= 0;  // Rows are dense from the first on.
  int any_begin = INT32_MAX, any_end = 0, all_begin = 0, all_end = INT32_MAX;
  for (int r = 0; r < 16; ++r) {
    const RowPlace& at = places[first_row + r];
    all_begin = max(all_begin, at.begin);
    all_end = min(all_end, at.end);
    if (at.begin == at.end) continue;
    any_begin = min(any_begin, at.begin);
    any_end = max(any_end, at.end);
  }
  RowState state[2] = {NoKeys(), NoKeys()};
  MaskRows mask_rows = {};
  if constexpr (kMasked) {
    const int last_row = first_row + 15;
    const int last_head = places[last_row].head >= 0 ? places[last_row].head
                                                     : static_cast<int>(kv_head * kernel.group + kernel.group - 1);
    mask_rows.one_v = p.visible.data == nullptr || p.visible.head_stride == 0 || places[first_row].head == last_head;
    if (p.mask.data != nullptr) {
      const bool chunks = Shape::kWarpKeys >= kChunkKeys && kernel.mask_access == MaskAccess::kChunks;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = first_row + (chunks ? lane / kChunks<Shape::kWarpKeys> % 16 : lane / 4 + 8 * r);
        const int64_t sample = (row_tile * kRows + row) % kernel.rows;
        const RowPlace& at = places[row];
        mask_rows.at[r] = at.head < 0 ? -1 : MaskRowAt(p.mask, batch, at.head, p.mask.by_sample ? sample : at.row);
      }
    }
  }
  int stage = 0;
  for (int tile = rank; tile < kernel.key_tiles; tile += kernel.cluster) {
    const int warp_key = key_warp * Shape::kWarpKeys;  // in the tile
    const int first_key = tile * kKeys + warp_key, end_key = first_key + Shape::kWarpKeys;
    const bool visible = first_key < any_end && end_key > any_begin;
    MaskTile mask_tile;
    if constexpr (kMasked) {
      if (active) {
        mask_tile = LoadMask<Shape::kWarpKeys>(kernel, batch, places[first_row].head, first_key, visible, mask_rows);
      }
    }
    if (kernel.stages == 1) {
      load_keys(tile, 0);
      WaitForCopies<0>();
    } else if (tile + kernel.cluster < kernel.key_tiles) {
      load_keys(tile + kernel.cluster, stage ^ 1);
      WaitForCopies<1>();
    } else {
      WaitForCopies<0>();
    }
    __syncthreads();
    const unsigned char* const keys = first_stage + stage * stage_bytes;
    if (active && first_key < p.k_len) {
      const bool whole = first_key >= all_begin && end_key <= all_end;
      float s[Shape::kBlocks][4], dp[Shape::kBlocks][4] = {};
      if constexpr (Shape::kOwnKeys) {
        float low[4], high[4];
        MultiplyWithNorms<Element>(queries, keys + warp_key * key_pitch, key_pitch, s, low, high);
        if (with_keys) AddNorms(low, high, &key_sums.norms);
      } else {
        Multiply<Element>(queries + first_row * key_pitch, keys + warp_key * key_pitch, key_pitch, s);
      }
      if (kDelta && visible) {
        Multiply<Element>(gradients + first_row * v_pitch, keys + kKeys * key_pitch + warp_key * v_pitch, v_pitch, dp);
      }
      AddTile<kPart, kForm>(kernel, batch, place, first_key, Shape::kWarpKeys, visible, whole, s, dp, mask_tile,
                            mask_rows, state);
    }
    if (with_keys) AddKeys<Element, Shape>(keys, key_pitch, static_cast<int>(p.head_dim), key_sums);
    __syncthreads();  // The tile is free.
    if (kernel.stages > 1) stage ^= 1;
  }

  // 3. A quad's columns; then everything into shared memory.
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int offset = 1; offset < 4; offset *= 2) {
      Merge(Neighbours(state[r], offset), state[r]);
    }
    if (lane % 4 == 0) states[key_warp][first_row + lane / 4 + 8 * r] = state[r];
    if constexpr (kMasked) {
      int allowed = mask_rows.allowed[r];
#pragma unroll
      for (int offset = 1; offset < 4; offset *= 2) allowed += __shfl_xor_sync(0xffffffffu, allowed, offset);
      if (lane % 4 == 0) allowed_keys[key_warp][first_row + lane / 4 + 8 * r] = allowed;
    }
  }
  if (kDelta) ComputeDeltaLp<Element, Shape>(kernel, batch, places, gradients, delta_lp);
  if (!kMasked) key_sums.in_v = 1;  // There are keys.
  if (with_keys) StoreKeys<Shape>(key_sums, sums_of_keys, scratch);
  SyncCluster(kernel.cluster);

  // 4. The first block merges and adds, with all of its threads, since the others wait for it.
  if (rank == 0) {
    constexpr int kShare = kTileThreads / kRows;  // threads of a row, neighbours
    const int mine = threadIdx.x / kShare;
    const RowPlace at = places[mine];
    RowState row = NoKeys();
    int allowed = 0;
    for (int part = threadIdx.x % kShare; part < kernel.cluster * Shape::kKeyWarps; part += kShare) {
      const int block = part / Shape::kKeyWarps, of_block = part % Shape::kKeyWarps;
      Merge(*OfBlock(&states[of_block][mine], block, kernel.cluster), row);
      if constexpr (kMasked) allowed += *OfBlock(&allowed_keys[of_block][mine], block, kernel.cluster);
    }
#pragma unroll
    for (int offset = 1; offset < kShare; offset *= 2) {
      Merge(Neighbours(row, offset), row);
      if constexpr (kMasked) allowed += __shfl_xor_sync(0xffffffffu, allowed, offset);
    }
    if (!kMasked) allowed = at.end - at.begin;
    double* const all_stats = reinterpret_cast<double*>(tiles);
    if (threadIdx.x % kShare == 0) {
      double* const stats = all_stats + mine * kProbeStatCount;
      const float sink = allowed > 0 && p.sinks != nullptr ? p.sinks[at.head] : -INFINITY;
      if constexpr (kPart == Part::kDrift) {
        DriftStats(row, sink, stats);
      } else {
        RowStats(row, allowed, sink, kDelta ? delta_lp[mine] : 0, stats);
      }
      if (allowed == 0) places[mine].head = -1;  // No row, then.
    }
    __syncthreads();
    constexpr int kGroups = kRows > 32 ? kRows / 32 : 1;  // of up to 32 rows, a lane each
    const int of_lane = warp % kGroups * 32 + lane;
    AddToHeads(p, of_lane < kRows ? places[of_lane].head : -1, warp / kGroups, Shape::kWarps / kGroups, kDelta,
               all_stats + of_lane * kProbeStatCount);
    if (with_keys) AddCoherence<Shape>(p, kernel.cluster, kv_head, sums_of_keys, scratch);
  }
  SyncCluster(kernel.cluster);  // No block ends while another reads what it found.
}

template <class Shape>
int SharedBytes(const ProbeKernelParams& kernel) {
  const int tiles = (Shape::kRows + kernel.stages * Shape::kKeys) * (kernel.key_pitch + kernel.v_pitch);
  return std::max(tiles, Shape::kRows * kProbeStatCount * int{sizeof(double)});
}

template <class Element, Part kPart, Form kForm>
Status Launch(const ProbeParams& p, const Gpu& gpu, void* stream) {
  using Shape = ShapeOf<Element, kPart, kForm>;
  constexpr int kStaticBytes = 12 * 1024;  // at most, of ProbeKernel's own arrays
  constexpr bool kWithDelta = kPart == Part::kDelta;
  ProbeKernelParams kernel = {};
  kernel.p = p;
  if (p.visible.data == nullptr) kernel.plain_v = VisibleKeys(p);
  if (p.mask.data != nullptr) kernel.mask_access = AccessOf(p.mask);
  kernel.group = p.heads / p.kv_heads;
  kernel.rows = SampledRows(p);
  kernel.row_tiles = (kernel.group * kernel.rows + Shape::kRows - 1) / Shape::kRows;
  kernel.key_tiles = static_cast<int>((p.k_len + Shape::kKeys - 1) / Shape::kKeys);
  kernel.key_pitch = TilePitch(p.head_dim, sizeof(Element));
  kernel.v_pitch = kWithDelta ? TilePitch(p.v_dim, sizeof(Element)) : 0;
  const auto is_vectorized = [&](const Tensor4& t, int64_t heads, int64_t tokens, int64_t dim) {
    return IsVectorized(p.dtype, t, p.batch, heads, tokens, dim);
  };
  kernel.vectorized =
      is_vectorized(p.q, p.heads, p.q_len, p.head_dim) && is_vectorized(p.k, p.kv_heads, p.k_len, p.head_dim) &&
      (!kWithDelta ||
       (is_vectorized(p.v, p.kv_heads, p.k_len, p.v_dim) && is_vectorized(p.d_o, p.heads, p.q_len, p.v_dim)));
  kernel.stages = kStagesMax;
  while (kernel.stages > 1 && SharedBytes<Shape>(kernel) + kStaticBytes > gpu.shared_bytes_max) {
    --kernel.stages;
  }
  Grid grid;
  grid.shared_bytes = SharedBytes<Shape>(kernel);
  if (grid.shared_bytes + kStaticBytes > gpu.shared_bytes_max) {
    return Fail(Status::kUnsupported,
                "head_dim is %lld and v_dim %lld, which takes %d bytes of shared memory, but this "
                "GPU has %d",
                static_cast<long long>(p.head_dim), static_cast<long long>(p.v_dim), grid.shared_bytes + kStaticBytes,
                gpu.shared_bytes_max);
  }
  const int64_t units_max = INT32_MAX / kClusterMax;
  if (p.batch > units_max / (p.kv_heads * kernel.row_tiles)) {
    return Fail(Status::kUnsupported, "batch is %lld, but at most %lld is built for these rows",
                static_cast<long long>(p.batch), static_cast<long long>(units_max / (p.kv_heads * kernel.row_tiles)));
  }
  grid.units = p.batch * p.kv_heads * kernel.row_tiles;
  grid.threads = kTileThreads;
  // As many blocks as run at once and no more: each has its rows to find and to merge.
  const int64_t at_once = int64_t{kBlocksPerMultiprocessor<Element, kPart, kForm>} * gpu.multiprocessors;
  kernel.cluster = 1;
  while (gpu.major >= 9 && kernel.cluster < kClusterMax && 2 * kernel.cluster <= kernel.key_tiles &&
         2 * kernel.cluster * grid.units <= at_once) {
    kernel.cluster *= 2;
  }
  grid.cluster = kernel.cluster;
  return LaunchClusters(ProbeKernel<Element, kPart, kForm>, kernel, grid, stream, "the probe");
}

template <class Element, Part kPart>
Status LaunchForm(const ProbeParams& p, const Gpu& gpu, void* stream) {
  constexpr int kDimMax = TileShape<Element, false, Form::kPlain>::kDimMax;
  if (p.head_dim > kDimMax || (p.d_o.data != nullptr && p.v_dim > kDimMax)) {
    return Launch<Element, kPart, Form::kWide>(p, gpu, stream);
  }
  // Ranges and a mask come with `visible`.
  if (HasNarrowV(p)) return Launch<Element, kPart, Form::kMasked>(p, gpu, stream);
  return Launch<Element, kPart, Form::kPlain>(p, gpu, stream);
}

template <class Element>
Status LaunchPart(const ProbeParams& p, const Gpu& gpu, void* stream) {
  if (p.drift_only) return LaunchForm<Element, Part::kDrift>(p, gpu, stream);
  if (p.d_o.data != nullptr) return LaunchForm<Element, Part::kDelta>(p, gpu, stream);
  return LaunchForm<Element, Part::kScores>(p, gpu, stream);
}

}  // namespace

Status Probe(const ProbeParams& p, void* stream) {
  Gpu gpu;
  BELLWETHER_KERNELS_RETURN_IF_ERROR(FindGpu(&gpu));
  const auto limit = [](const char* field, int64_t value, int64_t max) {
    if (value <= max) return Status::kOk;
    return Fail(Status::kUnsupported, "%s is %lld, but at most %lld is supported on a GPU", field,
                static_cast<long long>(value), static_cast<long long>(max));
  };
  constexpr int kDimMax = TileShape<float, false, Form::kWide>::kDimMax;
  BELLWETHER_KERNELS_RETURN_IF_ERROR(limit("head_dim", p.head_dim, kDimMax));
  if (p.d_o.data != nullptr) {
    BELLWETHER_KERNELS_RETURN_IF_ERROR(limit("v_dim", p.v_dim, kDimMax));
  }
  BELLWETHER_KERNELS_RETURN_IF_ERROR(limit("q_len", p.q_len, kProbeTokensMax));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(limit("k_len", p.k_len, kProbeTokensMax));
  if (p.batch == 0 || p.q_len == 0 || p.k_len == 0) return Status::kOk;
  switch (p.dtype) {
    case DType::kBFloat16:
      return LaunchPart<__nv_bfloat16>(p, gpu, stream);
    case DType::kFloat16:
      return LaunchPart<__half>(p, gpu, stream);
    case DType::kFloat32:
      break;
  }
  return LaunchPart<float>(p, gpu, stream);
}

}  // namespace bellwether::kernels::cuda
