// The shadow check of attention: see attention_laws.h.
//
// Work      two passes of the sampled rows over their keys (laws_rows.cuh), or of all rows where keys
//           are asked for.  Then blocks of eight rows, or keys, pass over the other side's tokens and
//           add up exact values, variances and channels, a thread a channel.  One block a head judges.
// Memory    scratch on the stream (laws_scratch.h): 16 bytes a channel of a sampled row or key and
//           part of the tokens; 48 bytes a row of the passes.
// Numerics  fp32 sums of fp32 products, of which each part of the tokens has its own; the comparison
//           is in double.  Every sum has one order.
// Limits    as the laws; no kernel here adds up dk and dv in the type (`arithmetic` 2).

#include <algorithm>

#include "backends.h"
#include "cuda/laws_pairs.cuh"
#include "cuda/laws_rows.cuh"
#include "cuda/laws_scratch.h"
#include "error.h"

namespace bellwether::kernels::cuda {
namespace {

constexpr int kItems = 8;       // rows or keys of a block, one a warp
constexpr int kTokens = 32;     // of the other side at a time
constexpr int kChannels = 256;  // of a block
constexpr int kAlike = 4;       // kinds of roundings that may be alike in a row
static_assert(kItems * 32 == kLawThreads && kTokens == 32);

// Of a row the error of delta, dO . o less the exact one, and its variance.
struct ShadowRow {
  float delta_error, delta_variance;
};

// Where the sampled rows, or keys, of one side are.
struct ShadowSide {
  int64_t heads, items;  // query heads and rows of a head; key heads and keys of a head
  int groups;            // of kItems
  int slots;             // of kChannels
  int parts;             // of the tokens
  int spread;            // threads that share a channel, each with some of the tokens
  float4* sums;          // [parts * spread][batch][heads][items][head_dim + v_dim]
};

struct ShadowParams {
  LawRowsParams rows;   // those of the two passes
  ProbeParams sampled;  // with the sampled rows
  GradedAttention of;
  ShadowRow* deltas;  // [rows of the passes]
  ShadowSide queries, keys;
  LawOutputs to;
  float *factors, *kv_factors;  // null: not wanted
  double roundings, key_roundings;
  int item_pitch;  // floats: head_dim and v_dim, each to a multiple of 16
  int v_at;        // floats, where v_dim begins
};

__device__ __forceinline__ uint64_t SeedOf(const ProbeParams& p) {
  return p.seed + (p.gate != nullptr ? p.gate[kGateSeed] : 0);
}

// The number of a row in the passes, by its number among the sampled ones.
__device__ __forceinline__ int64_t PassRow(const ShadowParams& kernel, int64_t batch, int64_t head, int64_t sample) {
  const bool every = kernel.rows.rows != SampledRows(kernel.sampled);
  const int64_t row = every ? RowAt(kernel.sampled, SeedOf(kernel.sampled), batch, head, sample) : sample;
  return (batch * kernel.sampled.heads + head) * kernel.rows.rows + row;
}

__device__ __forceinline__ int64_t KeyAt(const ShadowParams& kernel, int64_t batch, int64_t kv_head, int64_t item) {
  const ProbeParams& p = kernel.sampled;
  if (kernel.keys.items == p.k_len) return item;
  const int64_t first_head = p.head_offset + kv_head * (p.heads / p.kv_heads);
  return SampledKey(SeedOf(p), static_cast<uint64_t>(batch), static_cast<uint64_t>(first_head),
                    static_cast<uint64_t>(item), static_cast<uint64_t>(kernel.keys.items),
                    static_cast<uint64_t>(p.k_len));
}

// Grid: a warp per row of the passes.
template <class Element>
__global__ void __launch_bounds__(kLawThreads) ShadowDeltaKernel(const __grid_constant__ ShadowParams kernel) {
  const ProbeParams& p = kernel.rows.p;
  if (p.gate != nullptr && p.gate[kGateOpen] == 0) return;
  const int64_t all = AllRows(kernel.rows), at = int64_t{blockIdx.x} * kLawWarps + threadIdx.x / 32;
  if (at >= all) return;
  const int lane = threadIdx.x % 32;
  const int64_t head = at / kernel.rows.rows % p.heads, batch = at / kernel.rows.rows / p.heads;
  const LawPlace place = kernel.rows.places[at];
  const Element* const o = LawRowOf<Element>(p.o, batch, head, place.row);
  const Element* const d_o = LawRowOf<Element>(p.d_o, batch, head, place.row);
  double delta = 0;
  float products = 0, residual = 0;
  for (int c = lane; c < p.v_dim; c += 32) {
    const float x = static_cast<float>(d_o[c]), y = static_cast<float>(o[c]);
    delta = fma(static_cast<double>(x), static_cast<double>(y), delta);
    products += fabsf(x * y);
    const float base = x * BaseOf<Element>(y);
    residual = fmaf(base, base, residual);
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    delta += __shfl_xor_sync(0xffffffffu, delta, offset);
    products += __shfl_xor_sync(0xffffffffu, products, offset);
    residual += __shfl_xor_sync(0xffffffffu, residual, offset);
  }
  if (lane != 0) return;
  float of_p = 0;
  for (int part = 0; part < kernel.rows.parts; ++part) {
    of_p += kernel.rows.inside[(part * all + at) * kInsideCount + kInsidePBasesOfDp];
  }
  constexpr float kVariance = static_cast<float>(kVarianceOfBase<Element>), kFp32 = 0x1p-24f;
  constexpr float kBit = 1.f / (1 << kSignificand<Element>);
  const float in_fp32 = kFp32 * products;
  ShadowRow& to = kernel.deltas[at];
  to.delta_error = static_cast<float>(delta - static_cast<double>(kernel.rows.known[at].delta));
  to.delta_variance = 2 * (kVariance * (of_p + kBit * kBit * residual) + in_fp32 * in_fp32);
}

// What a pair of a row and a key adds to the sums: .x .y .z times the element, .w times its square.
//   of v or dO  P, P's rounding, 0, its variance
//   of k        dS, P, dS's rounding, its variance
//   of q        dS, e P, dS's rounding, the variances of dS and delta
struct PairWeights {
  float4 of_keys, of_values;
};

template <class Element, bool kOfKeys>
__device__ __forceinline__ PairWeights WeightsOf(const LawRow& row, const ShadowRow& delta,
                                                 const LawInsideOf& roundings, float score, float dp, float slope) {
  PairWeights weights = {};
  if (score == -INFINITY || row.inverse_l == 0.f) return weights;
  const float p = expf(score - row.first) * row.inverse_l;
  if (p == 0.f) return weights;
  constexpr float kFp32 = 0x1p-24f, kVariance = static_cast<float>(kVarianceOfBase<Element>);
  const float more = dp - row.delta, ds = p * more;
  const LawAdded of_p = AddedToP<Element>(p), of_ds = AddedToDs<Element>(ds, roundings);
  const float in_fp32 = kFp32 * p;
  const float p_variance = 2 * kVariance * fmaf(SquaresOfScores<Element>(roundings, row.first) * p, p, of_p.squares);
  const float ds_variance = 2 * kVariance * of_ds.squares + p_variance * more * more +
                            2 * in_fp32 * in_fp32 * fmaf(dp, dp, row.delta * row.delta);
  weights.of_values = {p, of_p.error, 0.f, p_variance};
  const float sloped = p * slope;
  weights.of_keys.x = ds * slope;
  weights.of_keys.y = kOfKeys ? delta.delta_error * sloped : sloped;
  weights.of_keys.z = of_ds.error * slope;
  weights.of_keys.w = ds_variance * slope * slope + (kOfKeys ? delta.delta_variance * sloped * sloped : 0.f);
  return weights;
}

// Eight channels, or four, of a tile's row and of an item.
template <class Element>
__device__ __forceinline__ float DotOf(const float* item, const unsigned char* token, int padded) {
  constexpr int kWidth = kVectorBytes / sizeof(Element);
  float sum = 0;
  for (int c = 0; c < padded; c += kWidth) {
    const auto x = *reinterpret_cast<const LawVector<Element, kWidth>*>(token + c * sizeof(Element));
#pragma unroll
    for (int i = 0; i < kWidth; i += 4) {
      const float4 y = *reinterpret_cast<const float4*>(item + c + i);
      sum = fmaf(static_cast<float>(x.at[i]), y.x, sum);
      sum = fmaf(static_cast<float>(x.at[i + 1]), y.y, sum);
      sum = fmaf(static_cast<float>(x.at[i + 2]), y.z, sum);
      sum = fmaf(static_cast<float>(x.at[i + 3]), y.w, sum);
    }
  }
  return sum;
}

// Grid: [batch * heads * groups * slots * parts] of a side.  Block: kLawThreads.  Shared: items, tokens.
template <class Element, bool kOfKeys>
__global__ void __launch_bounds__(kLawThreads, 2) ShadowSumsKernel(const __grid_constant__ ShadowParams kernel) {
  __shared__ PairWeights weights[kTokens][kItems];
  __shared__ unsigned used[kItems];
  extern __shared__ __align__(16) unsigned char shared[];
  const ProbeParams& p = kernel.sampled;
  if (p.gate != nullptr && p.gate[kGateOpen] == 0) return;
  const ShadowSide& side = kOfKeys ? kernel.keys : kernel.queries;
  const int key_pitch = kernel.rows.key_pitch, v_pitch = kernel.rows.v_pitch;
  auto* const items = reinterpret_cast<float*>(shared);
  unsigned char* const tokens = shared + kItems * kernel.item_pitch * sizeof(float);

  int64_t place = blockIdx.x;
  const int part = static_cast<int>(place % side.parts);
  place /= side.parts;
  const int slot = static_cast<int>(place % side.slots);
  place /= side.slots;
  const int64_t first_item = place % side.groups * kItems;
  place /= side.groups;
  const int64_t head = place % side.heads, batch = place / side.heads, group = kernel.rows.group;
  const int64_t kv_head = kOfKeys ? head : head / group;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  // 1. This warp's item: a row with its dO, or a key with its value.
  const bool has_item = first_item + warp < side.items;
  int64_t item_token = 0, pass_row = 0;
  if (has_item) {
    if (kOfKeys) {
      item_token = KeyAt(kernel, batch, head, first_item + warp);
    } else {
      pass_row = PassRow(kernel, batch, head, first_item + warp);
      item_token = kernel.rows.places[pass_row].row;
    }
  }
  float* const item = items + warp * kernel.item_pitch;
  const auto fill = [&](const Tensor4& t, float* to, int64_t dim, int padded) {
    const Element* const from = LawRowOf<Element>(t, batch, head, item_token);
    for (int c = lane; c < padded; c += 32) to[c] = has_item && c < dim ? static_cast<float>(from[c]) : 0.f;
  };
  fill(kOfKeys ? p.k : p.q, item, p.head_dim, kernel.v_at);
  fill(kOfKeys ? p.v : p.d_o, item + kernel.v_at, p.v_dim, kernel.item_pitch - kernel.v_at);
  LawPlace my_place = {-1, 0, 0, 0, 0};
  LawRow my_row = {};
  if (!kOfKeys && has_item) {
    my_place = kernel.rows.places[pass_row];
    my_row = kernel.rows.known[pass_row];
  }

  // 2. Over the other side's tokens.
  const int channel = slot * kChannels + threadIdx.x / side.spread;
  const int my_share = threadIdx.x % side.spread;
  const bool is_key_channel = channel < p.head_dim;
  const bool has_channel = threadIdx.x / side.spread < kChannels && channel < p.head_dim + p.v_dim;
  const int in_token = is_key_channel ? channel * static_cast<int>(sizeof(Element))
                                      : kTokens * key_pitch + (channel - static_cast<int>(p.head_dim)) *
                                                                  static_cast<int>(sizeof(Element));
  const int channel_pitch = is_key_channel ? key_pitch : v_pitch;
  float4 sums[kItems] = {};
  const int64_t of_head = kOfKeys ? p.q_len : p.k_len, tiles_of_head = (of_head + kTokens - 1) / kTokens;
  const int64_t tiles = (kOfKeys ? group : 1) * tiles_of_head;
  for (int64_t tile = part; tile < tiles; tile += side.parts) {
    const int64_t token_head = kOfKeys ? kv_head * group + tile / tiles_of_head : kv_head;
    const int64_t first_token = tile % tiles_of_head * kTokens;
    const int64_t token = first_token + lane;
    // Whether any pair of the tile counts.
    LawPlace at = my_place;
    int64_t key = token;
    if (kOfKeys) {
      pass_row = (batch * p.heads + token_head) * p.q_len + token;
      if (token < p.q_len) {
        at = kernel.rows.places[pass_row];
      }
      key = item_token;
    }
    const bool counts = has_item && token < of_head && key >= at.begin && key < at.end;
    if (__syncthreads_or(counts) == 0) continue;  // All have left the tile before.
    const auto row_at = [&](const Tensor4& t) {
      return [&, from = &t](int r) {
        return first_token + r < of_head ? LawRowOf<Element>(*from, batch, token_head, first_token + r) : nullptr;
      };
    };
    const Tensor4& of_key_dim = kOfKeys ? p.q : p.k;
    const Tensor4& of_v_dim = kOfKeys ? p.d_o : p.v;
    LoadTile<Element>(tokens, kTokens, key_pitch, p.head_dim, kernel.rows.vectorized, of_key_dim.data,
                      row_at(of_key_dim));
    LoadTile<Element>(tokens + kTokens * key_pitch, kTokens, v_pitch, p.v_dim, kernel.rows.vectorized, of_v_dim.data,
                      row_at(of_v_dim));
    CommitCopies();
    WaitForCopies<0>();
    __syncthreads();
    PairWeights pair = {};
    if (counts) {
      const bool composed = kernel.rows.composed;
      LawRow row = my_row;
      ShadowRow delta = {};
      if (kOfKeys) {
        row = kernel.rows.known[pass_row];
        delta = kernel.deltas[pass_row];
      }
      const float product = DotOf<Element>(item, tokens + lane * key_pitch, kernel.v_at);
      const float dp = DotOf<Element>(item + kernel.v_at, tokens + kTokens * key_pitch + lane * v_pitch,
                                      kernel.item_pitch - kernel.v_at);
      float slope = 1.f;
      const float score = ScoreOf<Element>(p, composed, product, at, static_cast<int>(key), &slope);
      pair = WeightsOf<Element, kOfKeys>(row, delta, kernel.rows.roundings, score, composed ? RoundTo<Element>(dp) : dp,
                                         slope);
    }
    weights[lane][warp] = pair;
    // NaN is used, too.
    const unsigned mine = __ballot_sync(~0u, !(pair.of_values.x == 0.f));
    if (lane == 0) used[warp] = mine;
    __syncthreads();
    unsigned any = 0;
#pragma unroll
    for (int i = 0; i < kItems; ++i) any |= used[i];
    if (has_channel) {
      for (int t = my_share; t < kTokens; t += side.spread) {
        if ((any >> t & 1) == 0) continue;  // What no item sees may be anything.
        float x = static_cast<float>(*reinterpret_cast<const Element*>(tokens + in_token + t * channel_pitch));
        if (!isfinite(x)) x = 0;  // Who sees it is not finite himself.
        const float xx = x * x;
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
          const float4 w = is_key_channel ? weights[t][i].of_keys : weights[t][i].of_values;
          sums[i].x = fmaf(w.x, x, sums[i].x);
          sums[i].y = fmaf(w.y, x, sums[i].y);
          sums[i].z = fmaf(w.z, x, sums[i].z);
          sums[i].w = fmaf(w.w, xx, sums[i].w);
        }
      }
    }
    __syncthreads();  // The tile and its weights are free.
  }
  if (!has_channel) return;
  const int64_t dims = p.head_dim + p.v_dim;
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if (first_item + i >= side.items) continue;
    const int64_t of_part = int64_t{part} * side.spread + my_share;
    const int64_t number = ((of_part * p.batch + batch) * side.heads + head) * side.items + first_item + i;
    side.sums[number * dims + channel] = sums[i];
  }
}

// What an item adds, in the order of ShadowStat; then to the factor, its variance, and what is alike.
struct ShadowSums {
  static constexpr int kFactors = 2 + kAlike;
  double of[kShadowTensorStatCount] = {};
  double factor[kFactors] = {};
};

// One tensor's row or key against its reference, by a warp.  first: of the tensor's channels.
template <class Element>
__device__ __forceinline__ void Compare(const ShadowParams& kernel, const ShadowSide& side, int64_t number,
                                        const Element* got, int dim, int first, bool of_values, float delta_error,
                                        float delta_variance, float of_row, double times, ShadowSums& to) {
  constexpr int kCount = kAlike;
  const ProbeParams& p = kernel.sampled;
  const int lane = threadIdx.x % 32;
  const int64_t dims = p.head_dim + p.v_dim, apart = p.batch * side.heads * side.items * dims;
  const double scale = of_values ? 1.0 : static_cast<double>(p.scale);
  double gram[kCount][kCount] = {}, with[kCount] = {}, square = 0, dot = 0, got2 = 0, exact2 = 0, variance = 0;
  double along = 0, alike[kCount] = {};
  for (int c = lane; c < dim; c += 32) {
    float4 sums = {};
    for (int part = 0; part < side.parts * side.spread; ++part) {
      const float4 more = side.sums[part * apart + number * dims + first + c];
      sums.x += more.x;
      sums.y += more.y;
      sums.z += more.z;
      sums.w += more.w;
    }
    const double exact = scale * static_cast<double>(sums.x);
    double channels[kCount];
    channels[0] = of_values ? static_cast<double>(sums.y) : -scale * static_cast<double>(delta_error * sums.y);
    channels[1] = scale * static_cast<double>(sums.z);
    const double inside = channels[0] + channels[1];
    channels[2] = static_cast<double>(RoundTo<Element>(static_cast<float>(exact))) - exact;
    channels[3] = static_cast<double>(RoundTo<Element>(static_cast<float>(exact + inside))) - exact - inside;
    const float base = BaseNear<Element>(static_cast<float>(exact));
    variance += scale * scale * static_cast<double>(sums.w + delta_variance * sums.y * sums.y) +
                2 * static_cast<double>(of_row) * exact * exact +
                times * kVarianceOfBase<Element> * static_cast<double>(base) * static_cast<double>(base);
    const float value = static_cast<float>(got[c]);
    const double x = static_cast<double>(value), difference = x - exact;
    square += difference * difference;
    dot += x * exact;
    got2 += x * x;
    exact2 += exact * exact;
    along += exact * difference;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      with[i] += difference * channels[i];
      alike[i] += exact * channels[i];
#pragma unroll
      for (int j = 0; j <= i; ++j) gram[i][j] += channels[i] * channels[j];
    }
  }
  const auto sum = [](double& x) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  };
  sum(square);
  sum(dot);
  sum(got2);
  sum(exact2);
  sum(variance);
  sum(along);
  if (!isfinite(got2) || !isfinite(exact2) || !isfinite(variance)) return;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    sum(with[i]);
    sum(alike[i]);
#pragma unroll
    for (int j = 0; j <= i; ++j) sum(gram[i][j]);
#pragma unroll
    for (int j = 0; j < i; ++j) gram[j][i] = gram[i][j];
  }
  // The best multiples from 0 to 1, one after the other, three times round.
  double multiples[kCount] = {};
#pragma unroll
  for (int round = 0; round < 3; ++round) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      double left = with[i];
#pragma unroll
      for (int j = 0; j < kCount; ++j) left -= multiples[j] * gram[i][j];
      const double best = multiples[i] + left / fmax(gram[i][i], 1e-300);
      multiples[i] = fmin(fmax(best, 0.), 1.);
    }
  }
  double rest = square;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    double of_channel = -2 * with[i];
#pragma unroll
    for (int j = 0; j < kCount; ++j) of_channel += multiples[j] * gram[i][j];
    rest += multiples[i] * of_channel;
  }
  to.of[kShadowDot] += dot;
  to.of[kShadowGotSumsq] += got2;
  to.of[kShadowRefSumsq] += exact2;
  to.of[kShadowRest] += fmax(rest, 0.);
  to.of[kShadowVariance] += variance;
  to.of[kShadowVarianceSq] += variance * variance;
  if (exact2 == 0) return;
  const double weight = 1 / (variance + dim * kShadowFactorFloor);
  to.factor[0] += along * weight;
  to.factor[1] += exact2 * weight;
#pragma unroll
  for (int i = 0; i < kCount; ++i) to.factor[2 + i] += alike[i] * weight;
}

// Grid: [heads of a side].  Block: kLawThreads, an item a warp.
template <class Element, bool kOfKeys>
__global__ void __launch_bounds__(kLawThreads, 1) ShadowJudgeKernel(const __grid_constant__ ShadowParams kernel) {
  constexpr int kFactors = ShadowSums::kFactors;
  __shared__ double of_warps[kLawWarps][kShadowStatCount];
  __shared__ double factors_of_warps[kLawWarps][2 * kFactors];
  const ProbeParams& p = kernel.sampled;
  if (p.gate != nullptr && p.gate[kGateOpen] == 0) return;
  const ShadowSide& side = kOfKeys ? kernel.keys : kernel.queries;
  const int64_t head = blockIdx.x;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const auto key_dim = static_cast<int>(p.head_dim), v_dim = static_cast<int>(p.v_dim);
  ShadowSums first, second;  // of o and dq; of dk and dv
  for (int64_t i = warp; i < p.batch * side.items; i += kLawWarps) {
    const int64_t batch = i / side.items, item = i % side.items;
    const int64_t number = (batch * side.heads + head) * side.items + item;
    if (kOfKeys) {
      const int64_t key = KeyAt(kernel, batch, head, item);
      const auto* const d_k = LawRowOf<Element>(kernel.of.d_k, batch, head, key);
      const auto* const d_v = LawRowOf<Element>(kernel.of.d_v, batch, head, key);
      Compare<Element>(kernel, side, number, d_k, key_dim, 0, false, 1.f, 0.f, 0.f, kernel.key_roundings, first);
      Compare<Element>(kernel, side, number, d_v, v_dim, key_dim, true, 0.f, 0.f, 0.f, kernel.key_roundings, second);
    } else {
      const int64_t at = PassRow(kernel, batch, head, item);
      const LawPlace place = kernel.rows.places[at];
      if (kernel.rows.known[at].inverse_l == 0.f || place.mask_at == kUnknown) continue;  // It sees no key.
      const ShadowRow delta = kernel.deltas[at];
      const float of_row = OfScoresInFp32(kernel.rows.roundings, kernel.rows.known[at].first);
      const auto* const o = LawRowOf<Element>(p.o, batch, head, place.row);
      const auto* const d_q = LawRowOf<Element>(kernel.of.d_q, batch, head, place.row);
      Compare<Element>(kernel, side, number, o, v_dim, key_dim, true, 0.f, 0.f, 0.f, kernel.roundings, first);
      Compare<Element>(kernel, side, number, d_q, key_dim, 0, false, delta.delta_error, delta.delta_variance, of_row,
                       kernel.roundings, second);
    }
  }
  if (lane == 0) {
#pragma unroll
    for (int i = 0; i < kShadowTensorStatCount; ++i) {
      of_warps[warp][i] = first.of[i];
      of_warps[warp][kShadowTensorStatCount + i] = second.of[i];
    }
#pragma unroll
    for (int i = 0; i < kFactors; ++i) {
      factors_of_warps[warp][i] = first.factor[i];
      factors_of_warps[warp][kFactors + i] = second.factor[i];
    }
  }
  __syncthreads();
  const int64_t stride = kOfKeys ? kernel.to.kv_stat_stride : kernel.to.stat_stride;
  float* const factors = kOfKeys ? kernel.kv_factors : kernel.factors;
  if (threadIdx.x < 2 && factors != nullptr) {
    double of[kFactors] = {};
    for (int w = 0; w < kLawWarps; ++w) {
#pragma unroll
      for (int i = 0; i < kFactors; ++i) of[i] += factors_of_warps[w][threadIdx.x * kFactors + i];
    }
    double more = 0, less = 0;
#pragma unroll
    for (int i = 2; i < kFactors; ++i) (of[i] > 0 ? more : less) += of[i];
    float* const to = factors + threadIdx.x * kFactorTensorStatCount * stride + head;
    to[kFactor * stride] += static_cast<float>(of[0]);
    to[kFactorVariance * stride] += static_cast<float>(of[1]);
    to[kFactorAlike * stride] += static_cast<float>(fmax(more, -less) + kLawExpError * of[1]);
  }
  if (threadIdx.x >= kShadowStatCount) return;
  double sum = 0;
  for (int w = 0; w < kLawWarps; ++w) sum += of_warps[w][threadIdx.x];
  float* const out = (kOfKeys ? kernel.to.kv_out : kernel.to.out) + head;
  out[threadIdx.x * stride] += static_cast<float>(sum);
}

void PlanSide(const ProbeParams& p, const Gpu& gpu, int64_t heads, int64_t items, int64_t tokens, ShadowSide* side) {
  const auto dims = static_cast<int>(p.head_dim + p.v_dim);
  side->heads = heads;
  side->items = items;
  side->groups = static_cast<int>((items + kItems - 1) / kItems);
  side->slots = (dims + kChannels - 1) / kChannels;
  side->spread = 1;
  while (side->spread < 8 && 2 * side->spread * dims <= kLawThreads) side->spread *= 2;
  const int64_t units = std::max<int64_t>(p.batch * heads * side->groups * side->slots, 1);
  // Two blocks a multiprocessor, and four tiles a block.
  const int64_t wanted = std::min<int64_t>(2 * gpu.multiprocessors / units, tokens / (4 * kTokens));
  side->parts = static_cast<int>(std::clamp<int64_t>(wanted, 1, 16));
}

template <class Element, bool kOfKeys>
Status LaunchSide(const ShadowParams& kernel, void* stream, const char* name) {
  const ShadowSide& side = kOfKeys ? kernel.keys : kernel.queries;
  Grid grid;
  grid.threads = kLawThreads;
  grid.units = kernel.sampled.batch * side.heads * side.groups * side.slots * side.parts;
  grid.shared_bytes = kItems * kernel.item_pitch * static_cast<int>(sizeof(float)) +
                      kTokens * (kernel.rows.key_pitch + kernel.rows.v_pitch);
  if (grid.units == 0) return Status::kOk;
  BELLWETHER_KERNELS_RETURN_IF_ERROR(LaunchClusters(ShadowSumsKernel<Element, kOfKeys>, kernel, grid, stream, name));
  grid.units = side.heads;
  grid.shared_bytes = 0;
  return LaunchClusters(ShadowJudgeKernel<Element, kOfKeys>, kernel, grid, stream, name);
}

template <class Element, Form kForm>
Status Launch(const AttentionShadowParams& a, const Gpu& gpu, void* stream) {
  constexpr char kName[] = "the shadow check of attention";
  const ProbeParams& p = a.of.call;
  const bool composed = a.of.arithmetic == LawArithmetic::kComposed, with_keys = a.keys_per_head > 0;
  ShadowParams kernel = {};
  kernel.sampled = p;
  kernel.of = a.of;
  kernel.to = a.to;
  if (p.dtype != DType::kFloat32) {
    kernel.factors = a.factors;
    kernel.kv_factors = a.kv_factors;
  }
  ProbeParams of_passes = p;
  if (with_keys) of_passes.rows_per_head = 0;
  BELLWETHER_KERNELS_RETURN_IF_ERROR((PlanRows<Element, kForm>(of_passes, composed, gpu, &kernel.rows)));
  kernel.roundings = composed ? 4 : 2;
  kernel.key_roundings = kernel.roundings * (p.heads > p.kv_heads ? 2 : 1);
  const auto padded = [](int64_t dim) { return static_cast<int>((dim + 15) / 16 * 16); };
  kernel.v_at = padded(p.head_dim);
  kernel.item_pitch = kernel.v_at + padded(p.v_dim);
  PlanSide(p, gpu, p.heads, SampledRows(p), p.k_len, &kernel.queries);
  if (with_keys) {
    const int64_t keys = std::min<int64_t>(a.keys_per_head, p.k_len);
    PlanSide(p, gpu, p.kv_heads, keys, p.heads / p.kv_heads * p.q_len, &kernel.keys);
  }
  LawRowsParams& rows = kernel.rows;
  const int64_t all_rows = AllRows(rows), dims = p.head_dim + p.v_dim;
  const auto blocks = [&](const ShadowSide& side) {
    return p.batch * side.heads * side.groups * side.slots * side.parts;
  };
  if (blocks(kernel.queries) > INT32_MAX || blocks(kernel.keys) > INT32_MAX || all_rows / kLawWarps >= INT32_MAX) {
    return Fail(Status::kUnsupported, "batch is %lld, but that is too many for these heads and rows",
                static_cast<long long>(p.batch));
  }
  const auto numbers = [&](const ShadowSide& side) {
    return int64_t{side.parts} * side.spread * p.batch * side.heads * side.items * dims;
  };
  LawScratch scratch(stream);
  const size_t places = scratch.Add<LawPlace>(all_rows);
  const size_t known = scratch.Add<LawRow>(all_rows);
  const size_t of_parts = scratch.Add<LawRowPart>(rows.parts * all_rows);
  const size_t inside = scratch.Add<float>(rows.parts * all_rows * kInsideCount);
  const size_t deltas = scratch.Add<ShadowRow>(all_rows);
  const size_t of_queries = scratch.Add<float4>(numbers(kernel.queries));
  const size_t of_keys = scratch.Add<float4>(numbers(kernel.keys));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(scratch.Allocate());
  rows.places = scratch.At<LawPlace>(places);
  rows.known = scratch.At<LawRow>(known);
  rows.of_parts = scratch.At<LawRowPart>(of_parts);
  rows.inside = scratch.At<float>(inside);
  kernel.deltas = scratch.At<ShadowRow>(deltas);
  kernel.queries.sums = scratch.At<float4>(of_queries);
  kernel.keys.sums = scratch.At<float4>(of_keys);

  BELLWETHER_KERNELS_RETURN_IF_ERROR(LaunchPlaces<Element>(rows, stream, kName));
  BELLWETHER_KERNELS_RETURN_IF_ERROR((LaunchRows<Element, kForm, LawPass::kRows>(rows, stream, kName)));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(LaunchMerge(rows, stream, kName));
  BELLWETHER_KERNELS_RETURN_IF_ERROR((LaunchRows<Element, kForm, LawPass::kInside>(rows, stream, kName)));
  Grid grid;
  grid.threads = kLawThreads;
  grid.units = (all_rows + kLawWarps - 1) / kLawWarps;
  BELLWETHER_KERNELS_RETURN_IF_ERROR(LaunchClusters(ShadowDeltaKernel<Element>, kernel, grid, stream, kName));
  BELLWETHER_KERNELS_RETURN_IF_ERROR((LaunchSide<Element, false>(kernel, stream, kName)));
  return with_keys ? LaunchSide<Element, true>(kernel, stream, kName) : Status::kOk;
}

template <class Element>
Status LaunchForm(const AttentionShadowParams& a, const Gpu& gpu, void* stream) {
  constexpr int kDimMax = TileShape<Element, false, Form::kMasked>::kDimMax;
  const bool wide = a.of.call.head_dim > kDimMax || a.of.call.v_dim > kDimMax;
  return wide ? Launch<Element, Form::kWide>(a, gpu, stream) : Launch<Element, Form::kMasked>(a, gpu, stream);
}

}  // namespace

Status AttentionShadow(const AttentionShadowParams& a, void* stream) {
  Gpu gpu;
  BELLWETHER_KERNELS_RETURN_IF_ERROR(FindGpu(&gpu));
  const ProbeParams& p = a.of.call;
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckLawLimits(a.of));
  if (a.keys_per_head > 0 && p.mask.data != nullptr && p.mask.by_sample && SampledRows(p) != p.q_len) {
    return Fail(Status::kUnsupported, "keys_per_head is %u, but must be 0 with mask_by_sample", a.keys_per_head);
  }
  if (p.batch == 0 || p.q_len == 0 || p.k_len == 0) return Status::kOk;
  switch (p.dtype) {
    case DType::kBFloat16:
      return LaunchForm<__nv_bfloat16>(a, gpu, stream);
    case DType::kFloat16:
      return LaunchForm<__half>(a, gpu, stream);
    case DType::kFloat32:
      break;
  }
  return LaunchForm<float>(a, gpu, stream);
}

}  // namespace bellwether::kernels::cuda
