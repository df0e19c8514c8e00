// Attention's laws: see attention_laws.h.
//
// Work      one pass over the eight tensors (laws_pairs.cuh); two passes of the sampled rows over
//           their keys, for what rounds inside (laws_rows.cuh); then one block a key head adds up.
// Memory    each of q, k, v, o, dO, dq, dk, dv once; k and v once more for 64 sampled rows and pass.
//           Scratch lives on the stream: laws_scratch.h.
// Numerics  double but for four tokens of a lane and products of tiles; every sum has one order, so
//           that a call gives the same bits each time.
// Limits    head_dim and v_dim 576 as far as shared memory goes, 2^30 tokens, 2^31 - 1 blocks, compute
//           capability 8.0; no kernel of a GPU adds up dk and dv in the type (`arithmetic` 2).

#include <algorithm>

#include "backends.h"
#include "cuda/laws_columns.cuh"
#include "cuda/laws_pairs.cuh"
#include "cuda/laws_rows.cuh"
#include "cuda/laws_scratch.h"
#include "cuda/laws_totals.cuh"
#include "error.h"

namespace bellwether::kernels::cuda {
namespace {

// Grid: [kv_heads].  Block: kLawThreads.
__global__ void __launch_bounds__(kLawThreads) LawTotalsKernel(const __grid_constant__ LawTotalsParams kernel) {
  __shared__ double scratch[kLawThreads], errors[kLawThreads];
  __shared__ bool unknowns[kLawThreads];
  __shared__ double keys[kLawSumCount], values[kLawSumCount], queries[kLawSumCount], outputs[kLawSumCount];
  __shared__ double inside[kLawOfRowsCount], inside_error2[kLawOfRowsCount], sinks[2 * kLawProjections];
  __shared__ bool unknown[2];  // of A1; of A2 and A4
  const ProbeParams& p = kernel.pairs.p;
  if (p.gate != nullptr && p.gate[kGateOpen] == 0) return;
  const int64_t kv_head = blockIdx.x, group = p.heads / p.kv_heads;
  SumBlocks(kernel.pairs, PairOf::kKeys, kv_head, scratch, keys);
  SumBlocks(kernel.pairs, PairOf::kValues, kv_head, scratch, values);

  // 1. The heads' own numbers, and what the group of them adds to the laws.
  double weighted[kLawProjections] = {}, q_dot = 0, o_dot = 0, not_known = 0;  // Of thread 0.
  for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
    SumBlocks(kernel.pairs, PairOf::kQueries, head, scratch, queries);
    SumBlocks(kernel.pairs, PairOf::kOutputs, head, scratch, outputs);
    if (threadIdx.x == 0) {
      float* const out = kernel.to.out + head;
      for (int i = 0; i < 4; ++i) {  // sum, sum of absolute values, of squares, not finite
        const auto add = [&](int row, const double* of) {
          const bool nan = i < 3 && of[kLawNonfinite] > 0;
          AddTo(out + row * kernel.to.stat_stride, nan ? static_cast<double>(NAN) : of[kLawTotal + i]);
        };
        add(kLawDoSum + i, outputs);
        add(kLawDqSum + i, queries);
      }
      if (kernel.with_laws) AddTo(out + kLawRowsLeftOut * kernel.to.stat_stride, outputs[kLawLeftOut]);
#pragma unroll
      for (int i = 0; i < kLawProjections; ++i) weighted[i] += outputs[kLawProjection + i];
      q_dot += queries[kLawDot];
      o_dot += outputs[kLawDot];
      not_known += outputs[kLawUnknown];
    }
  }
  float* const out = kernel.to.kv_out + kv_head;
  const auto add = [&](int row, double x) { AddTo(out + row * kernel.to.kv_stat_stride, x); };
  if (threadIdx.x == 0) {
    for (int i = 0; i < 4; ++i) {
      const auto sums = [&](int row, const double* of) {
        add(row, i < 3 && of[kLawNonfinite] > 0 ? static_cast<double>(NAN) : of[kLawTotal + i]);
      };
      sums(kLawDkSum + i, keys);
      sums(kLawDvSum + i, values);
    }
  }
  if (!kernel.with_laws) return;

  // 2. What rounds inside.
  {
    constexpr int kTurns = kLawThreads / kLawOfRowsCount;
    const int number = threadIdx.x % kLawOfRowsCount, turn = threadIdx.x / kLawOfRowsCount;
    RowEstimate estimate;
    for (int64_t i = turn; turn < kTurns && i < p.batch * group; i += kTurns) {
      AddEstimate(kernel, i / group * p.heads + kv_head * group + i % group, number, estimate);
    }
    __syncthreads();
    scratch[threadIdx.x] = estimate.sum;
    errors[threadIdx.x] = estimate.error2;
    unknowns[threadIdx.x] = estimate.unknown;
    __syncthreads();
    if (threadIdx.x < kLawOfRowsCount) {
      double sum = 0, error2 = 0;
      for (int i = 0; i < kTurns; ++i) {
        sum += scratch[i * kLawOfRowsCount + threadIdx.x];
        error2 += errors[i * kLawOfRowsCount + threadIdx.x];
      }
      inside[threadIdx.x] = sum;
      inside_error2[threadIdx.x] = error2;
    } else if (threadIdx.x < kLawOfRowsCount + 2 * kLawProjections) {
      const int which = threadIdx.x - kLawOfRowsCount;
      const int64_t chunks = RowChunks(kernel.rows);
      double sum = 0;
      for (int64_t i = 0; p.sinks != nullptr && i < p.batch * group * chunks; ++i) {
        const int64_t at = (i / chunks / group * p.heads + kv_head * group + i / chunks % group) * chunks + i % chunks;
        sum += kernel.numbers[at * kRowNumbers + kRowSinkA1 + which];
      }
      sinks[which] = sum;
    } else if (threadIdx.x >= kLawThreads - 2) {
      const int which = threadIdx.x - (kLawThreads - 2);
      const int begin = which == 0 ? 0 : int{kRowsA2Variance},
                end = which == 0 ? int{kRowsA2Variance} : int{kLawOfRowsCount};
      bool any = false;
      for (int i = 0; i < kTurns * kLawOfRowsCount; ++i) {
        any |= unknowns[i] && i % kLawOfRowsCount >= begin && i % kLawOfRowsCount < end;
      }
      unknown[which] = any;
    }
  }
  const auto sum_heads = [&](PairOf which, int64_t heads, int64_t first, int64_t count, auto of_head) {
    const LawHead* const of = kernel.heads.heads[static_cast<int>(which)];
    double sum = 0;
    for (int64_t i = threadIdx.x; i < p.batch * count; i += kLawThreads) {
      sum += of_head(of[i / count * heads + first + i % count]);
    }
    return SumOverBlock(sum, scratch);
  };
  const auto plain = [&](const LawHead& head) { return kernel.variance_scale * head.plain; };
  const auto partners = [&](const LawHead& head) { return kernel.variance_scale * head.partners; };
  const auto size = [](const LawHead& head) { return fabs(head.product); };
  __syncthreads();  // The scratch is free.
  const double of_k = kernel.key_roundings * sum_heads(PairOf::kKeys, p.kv_heads, kv_head, 1, plain);
  const double of_v = kernel.key_roundings * sum_heads(PairOf::kValues, p.kv_heads, kv_head, 1, plain);
  const double of_qk = kernel.roundings * sum_heads(PairOf::kQueries, p.heads, kv_head * group, group, partners) +
                       kernel.key_roundings * sum_heads(PairOf::kKeys, p.kv_heads, kv_head, 1, partners);
  const double of_ov = kernel.roundings * sum_heads(PairOf::kOutputs, p.heads, kv_head * group, group, partners) +
                       kernel.key_roundings * sum_heads(PairOf::kValues, p.kv_heads, kv_head, 1, partners);
  const double a3_size = sum_heads(PairOf::kQueries, p.heads, kv_head * group, group, size) +
                         sum_heads(PairOf::kKeys, p.kv_heads, kv_head, 1, size);
  if (threadIdx.x != 0) return;

  // 3. The laws.
  const auto with_errors = [&](int number) {
    return inside[number] + kLawVarianceErrors * sqrt(inside_error2[number]);
  };
  const auto largest = [&](int first) {
    double x = with_errors(first);
    for (int i = 1; i < kLawProjections; ++i) x = fmax(x, with_errors(first + i));
    return x;
  };
  const auto told = [&](int which, double alike, double difference) {
    return unknown[which] ? fmax(alike, fabs(difference)) : alike;
  };
  if (kernel.with_a1) {
    double alike = 0, widest = 0;
    for (int i = 0; i < kLawProjections; ++i) {
      const double difference = OrNan(keys[kLawProjection + i] - sinks[i]);
      const double delta = inside[kRowsA1Delta + i], ds = inside[kRowsA1Ds + i];
      const double up = fmax(delta, 0.) + fmax(ds, 0.), down = -fmin(delta, 0.) - fmin(ds, 0.);
      const double error2 = inside_error2[kRowsA1Delta + i] + inside_error2[kRowsA1Ds + i];
      add(kLawA1 + i, difference);
      alike = fmax(alike, fmax(up, down) + kLawAlikeErrors * sqrt(error2));
      widest = fmax(widest, fabs(difference));
    }
    add(kLawA1Variance, of_k + largest(kRowsA1Variance));
    add(kLawA1Alike, told(0, alike, widest));
  }
  if (kernel.with_a2) {
    double alike = 0, widest = 0;
    for (int i = 0; i < kLawProjections; ++i) {
      const double of_group = p.sinks != nullptr ? sinks[kLawProjections + i] : weighted[i];
      const double difference = OrNan(values[kLawProjection + i] - of_group);
      const double of_p = inside[kRowsA2P + i], exponential = kLawExpError * fabs(values[kLawProjection + i]);
      add(kLawA2 + i, difference);
      alike = fmax(alike, fabs(of_p) + exponential + not_known + kLawAlikeErrors * sqrt(inside_error2[kRowsA2P + i]));
      widest = fmax(widest, fabs(difference));
    }
    add(kLawA2Variance, of_v + largest(kRowsA2Variance));
    add(kLawA2Alike, told(1, alike, widest));
  }
  const double a4 = OrNan(o_dot - values[kLawDot]);
  add(kLawA3, OrNan(q_dot - keys[kLawDot]));
  add(kLawA4, a4);
  add(kLawA3Variance, of_qk);
  // Half a distance of numbers, 2^-bits, by what an ulp's square / 12 is of the number itself.
  add(kLawA3Alike, isfinite(a3_size) ? sqrt(3 * kernel.variance_scale) * a3_size : 0.);
  add(kLawA4Variance, of_ov + with_errors(kRowsA4Variance));
  add(kLawA4Alike, told(1,
                        fabs(inside[kRowsA4P]) + kLawExpError * fabs(values[kLawDot]) +
                            kLawAlikeErrors * sqrt(inside_error2[kRowsA4P]),
                        a4));
}

bool AllVectorized(const GradedAttention& a) {
  const ProbeParams& p = a.call;
  const auto is = [&](const Tensor4& t, int64_t heads, int64_t tokens, int64_t dim) {
    return IsVectorized(p.dtype, t, p.batch, heads, tokens, dim);
  };
  return is(p.q, p.heads, p.q_len, p.head_dim) && is(a.d_q, p.heads, p.q_len, p.head_dim) &&
         is(p.o, p.heads, p.q_len, p.v_dim) && is(p.d_o, p.heads, p.q_len, p.v_dim) &&
         is(p.k, p.kv_heads, p.k_len, p.head_dim) && is(a.d_k, p.kv_heads, p.k_len, p.head_dim) &&
         is(p.v, p.kv_heads, p.k_len, p.v_dim) && is(a.d_v, p.kv_heads, p.k_len, p.v_dim);
}

// Where the blocks of the pairs are; returns how many.
int64_t PlanPairs(const GradedAttention& a, int width, const Gpu& gpu, LawPairsParams* kernel) {
  const ProbeParams& p = a.call;
  kernel->p = p;
  LawPair* const pairs = kernel->pairs;
  const auto plan = [&](PairOf which, const Tensor4& graded, const Tensor4& partner, int64_t heads, int64_t tokens,
                        int64_t dim) {
    LawPair& pair = pairs[static_cast<int>(which)];
    pair.graded = graded;
    pair.partner = partner;
    pair.heads = heads;
    pair.tokens = tokens;
    pair.dim = static_cast<int>(dim);
    const int vectors = (pair.dim + width - 1) / width;
    pair.lanes = 1;
    while (pair.lanes < 32 && pair.lanes < vectors) pair.lanes *= 2;
    pair.slices = (vectors + 31) / 32;
    return p.batch * heads * pair.slices * pair.lanes * tokens;  // lanes in all
  };
  const int64_t lanes = plan(PairOf::kKeys, a.d_k, p.k, p.kv_heads, p.k_len, p.head_dim) +
                        plan(PairOf::kValues, a.d_v, p.v, p.kv_heads, p.k_len, p.v_dim) +
                        plan(PairOf::kQueries, a.d_q, p.q, p.heads, p.q_len, p.head_dim) +
                        plan(PairOf::kOutputs, p.d_o, p.o, p.heads, p.q_len, p.v_dim);
  // 32 tokens a thread pay for the end of a block; fewer where there were too few blocks.
  constexpr int kTokensMax = 32;
  kernel->of_thread = static_cast<int>(
      std::clamp<int64_t>(lanes / (int64_t{8} * gpu.multiprocessors * kLawThreads), 2, kTokensMax) / 2 * 2);
  kernel->held = 32 * width;
  int64_t blocks = 0;
  for (int i = 0; i < static_cast<int>(PairOf::kCount); ++i) {
    LawPair& pair = pairs[i];
    const int64_t of_block = int64_t{kernel->of_thread} * (kLawThreads / pair.lanes);
    pair.chunks = static_cast<int>((pair.tokens + of_block - 1) / of_block);
    pair.first_block = blocks;
    blocks += p.batch * pair.heads * pair.slices * pair.chunks;
  }
  return blocks;
}

// The rows, which float32 has none of.
template <class Element, Form kForm>
Status LaunchInside(const LawTotalsParams& totals, double* numbers, void* stream, const char* name) {
  const LawRowsParams& rows = totals.rows;
  BELLWETHER_KERNELS_RETURN_IF_ERROR(LaunchPlaces<Element>(rows, stream, name));
  BELLWETHER_KERNELS_RETURN_IF_ERROR((LaunchRows<Element, kForm, LawPass::kRows>(rows, stream, name)));
  BELLWETHER_KERNELS_RETURN_IF_ERROR(LaunchMerge(rows, stream, name));
  BELLWETHER_KERNELS_RETURN_IF_ERROR((LaunchRows<Element, kForm, LawPass::kInside>(rows, stream, name)));
  const LawOfRowsParams of = {rows, totals.pairs, numbers};
  Grid grid;
  grid.units = rows.p.batch * rows.p.heads * RowChunks(rows);
  grid.threads = kLawThreads;
  return LaunchClusters(LawOfRowsKernel<Element, TileShape<Element, false, kForm>::kDimMax>, of, grid, stream, name);
}

template <class Element, Form kForm>
Status Launch(const AttentionLawsParams& a, const Gpu& gpu, void* stream) {
  constexpr char kName[] = "the laws of attention";
  constexpr int kWidth = kVectorBytes / sizeof(Element);
  constexpr bool kWithLaws = sizeof(Element) == 2;
  const ProbeParams& p = a.of.call;
  const bool composed = a.of.arithmetic == LawArithmetic::kComposed;
  LawTotalsParams totals = {};
  LawRowsParams& rows = totals.rows;
  if (kWithLaws) BELLWETHER_KERNELS_RETURN_IF_ERROR((PlanRows<Element, kForm>(p, composed, gpu, &rows)));
  const bool vectorized = AllVectorized(a.of);
  const int64_t blocks = PlanPairs(a.of, vectorized ? kWidth : 1, gpu, &totals.pairs);
  const int64_t row_blocks = kWithLaws ? p.batch * p.heads * RowChunks(rows) : 0;
  if (blocks > INT32_MAX || row_blocks > INT32_MAX) {
    return Fail(Status::kUnsupported, "batch is %lld, but that is too many for these heads and tokens",
                static_cast<long long>(p.batch));
  }
  totals.to = a.to;
  totals.variance_scale = kVarianceOfBase<Element>;
  totals.roundings = composed ? 4 : 2;
  totals.key_roundings = totals.roundings * (p.heads > p.kv_heads ? 2 : 1);
  totals.with_laws = kWithLaws;
  totals.every_row = SampledRows(p) == p.q_len;
  totals.with_a2 = p.sinks == nullptr || totals.every_row;
  totals.with_a1 = totals.with_a2 && p.softcap == 0;

  LawScratch scratch(stream);
  const int64_t all_rows = kWithLaws ? AllRows(rows) : 0, queries = p.batch * p.heads, keys = p.batch * p.kv_heads;
  const int64_t tokens = queries * p.q_len;
  const auto slices = [&](PairOf which) { return int64_t{totals.pairs.pairs[static_cast<int>(which)].slices}; };
  const size_t sums = scratch.Add<double>(blocks * kLawSumCount);
  const size_t columns = scratch.Add<float>(blocks * kLawColumnCount * totals.pairs.held);
  const size_t q_sizes = scratch.Add<float>(slices(PairOf::kQueries) * tokens);
  const size_t do_sizes = scratch.Add<float>(slices(PairOf::kOutputs) * tokens);
  const size_t heads = scratch.Add<LawHead>(2 * (queries + keys));
  const size_t sizes = scratch.Add<double>(queries * kLawSizeCount);
  const size_t numbers = scratch.Add<double>(row_blocks * kRowNumbers);
  const size_t places = scratch.Add<LawPlace>(all_rows);
  const size_t known = scratch.Add<LawRow>(all_rows);
  const size_t of_parts = scratch.Add<LawRowPart>(rows.parts * all_rows);
  const size_t inside = scratch.Add<float>(rows.parts * all_rows * kInsideCount);
  BELLWETHER_KERNELS_RETURN_IF_ERROR(scratch.Allocate());
  totals.pairs.sums = scratch.At<double>(sums);
  totals.pairs.columns = scratch.At<float>(columns);
  totals.pairs.q_sizes = scratch.At<float>(q_sizes);
  totals.pairs.do_sizes = scratch.At<float>(do_sizes);
  totals.heads.pairs = totals.pairs;
  LawHead* const of_heads = scratch.At<LawHead>(heads);
  for (int i = 0; i < static_cast<int>(PairOf::kCount); ++i) {
    totals.heads.heads[i] = of_heads + (i < 2 ? i * keys : 2 * keys + (i - 2) * queries);
  }
  totals.heads.sizes = scratch.At<double>(sizes);
  totals.numbers = scratch.At<double>(numbers);
  rows.places = scratch.At<LawPlace>(places);
  rows.known = scratch.At<LawRow>(known);
  rows.of_parts = scratch.At<LawRowPart>(of_parts);
  rows.inside = scratch.At<float>(inside);

  Grid grid;
  grid.units = blocks;
  grid.threads = kLawThreads;
  BELLWETHER_KERNELS_RETURN_IF_ERROR(
      vectorized ? LaunchClusters(LawPairsKernel<Element, kWidth>, totals.pairs, grid, stream, kName)
                 : LaunchClusters(LawPairsKernel<Element, 1>, totals.pairs, grid, stream, kName));
  if constexpr (kWithLaws) {
    grid.units = keys + queries;
    BELLWETHER_KERNELS_RETURN_IF_ERROR(LaunchClusters(LawHeadsKernel, totals.heads, grid, stream, kName));
    BELLWETHER_KERNELS_RETURN_IF_ERROR(
        (LaunchInside<Element, kForm>(totals, scratch.At<double>(numbers), stream, kName)));
  }
  grid.units = p.kv_heads;
  return LaunchClusters(LawTotalsKernel, totals, grid, stream, kName);
}

template <class Element>
Status LaunchForm(const AttentionLawsParams& a, const Gpu& gpu, void* stream) {
  constexpr int kDimMax = TileShape<Element, false, Form::kMasked>::kDimMax;
  const bool wide = a.of.call.head_dim > kDimMax || a.of.call.v_dim > kDimMax;
  return wide ? Launch<Element, Form::kWide>(a, gpu, stream) : Launch<Element, Form::kMasked>(a, gpu, stream);
}

}  // namespace

Status AttentionLaws(const AttentionLawsParams& a, void* stream) {
  Gpu gpu;
  BELLWETHER_KERNELS_RETURN_IF_ERROR(FindGpu(&gpu));
  const ProbeParams& p = a.of.call;
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckLawLimits(a.of));
  if (p.batch == 0 || p.q_len == 0 || p.k_len == 0) return Status::kOk;
  switch (p.dtype) {
    case DType::kBFloat16:
      return LaunchForm<__nv_bfloat16>(a, gpu, stream);
    case DType::kFloat16:
      return LaunchForm<__half>(a, gpu, stream);
    case DType::kFloat32:
      break;
  }
  return Launch<float, Form::kMasked>(a, gpu, stream);
}

}  // namespace bellwether::kernels::cuda
