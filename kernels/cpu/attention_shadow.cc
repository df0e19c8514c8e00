// The shadow check: sampled rows and sampled keys in double beside what the kernel returned.  Units
// are one sequence and key head; their sums are added in unit order.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <iterator>
#include <memory>
#include <new>
#include <utility>

#include "backends.h"
#include "bellwether/kernels/attention_laws.h"
#include "cpu/attention_rows.h"
#include "cpu/buffer.h"
#include "cpu/parallel.h"
#include "error.h"

namespace bellwether::kernels::cpu {
namespace {

constexpr int kTensor = kShadowTensorStatCount;
constexpr double kTimes = 2;  // That each rounding counts.
constexpr int kChannelsMax = 5;

// What a tensor's factor is found from, before what is alike is added up: `alike` by channel.
struct FactorSums {
  double factor = 0, variance = 0, alike[kChannelsMax] = {};
};

struct ShadowSums {
  double of[kShadowStatCount] = {};
  FactorSums factors[2];
};

// A row or key of one tensor: what it is, what rounding may add, and what came out.  [dim] each.
struct Compared {
  static constexpr int kArrays = 8;

  Compared(double* memory, int64_t size)
      : dim(size),
        exact(memory),
        variance(memory + size),
        channels{memory + 2 * size, memory + 3 * size, memory + 4 * size, memory + 5 * size, memory + 6 * size},
        left(memory + 7 * size) {}

  // Sets all but `left`, which holds what came out, to 0.
  void Clear(int of_inside) {
    std::fill(exact, left, 0.0);
    inside = of_inside;
  }

  int64_t dim;
  double *exact, *variance;
  double* channels[kChannelsMax];  // Those of roundings inside; Add() fills the two of the result's own.
  double* left;
  int inside = 0;  // how many of them
};

// Adds a row whose `left` is what the kernel returned to one of the two tensors.
void AddCompared(Compared& row, const LawGrid& grid, double roundings, int tensor, ShadowSums& to) {
  double* const sums = to.of + tensor * kTensor;
  FactorSums& factor = to.factors[tensor];
  const int count = row.inside + 2;
  double dot = 0, got_square = 0, exact_square = 0, variance = 0, along = 0, alike[kChannelsMax] = {};
  for (int64_t c = 0; c < row.dim; ++c) {
    const double exact = row.exact[c], got = row.left[c];
    double within = 0;
    for (int i = 0; i < row.inside; ++i) within += row.channels[i][c];
    row.channels[row.inside][c] = grid.Rounded(exact) - exact;
    row.channels[row.inside + 1][c] = grid.Rounded(exact + within) - exact - within;
    dot += got * exact;
    got_square += got * got;
    exact_square += exact * exact;
    variance += row.variance[c] + roundings * grid.Variance(exact);
    row.left[c] = got - exact;
    along += exact * row.left[c];
    for (int i = 0; i < count; ++i) alike[i] += exact * row.channels[i][c];
  }
  if (!std::isfinite(got_square) || !std::isfinite(exact_square) || !std::isfinite(variance)) return;
  // The best multiples from 0 to 1, each in its turn, the others kept.
  double used[kChannelsMax] = {};
  for (int turn = 0; turn < 3; ++turn) {
    for (int i = 0; i < count; ++i) {
      const double* const channel = row.channels[i];
      double part = 0, size = 0;
      for (int64_t c = 0; c < row.dim; ++c) {
        part += row.left[c] * channel[c];
        size += channel[c] * channel[c];
      }
      const double now = std::clamp(used[i] + part / std::max(size, 1e-300), 0.0, 1.0), more = now - used[i];
      used[i] = now;
      for (int64_t c = 0; c < row.dim; ++c) row.left[c] -= more * channel[c];
    }
  }
  double rest = 0;
  for (int64_t c = 0; c < row.dim; ++c) rest += row.left[c] * row.left[c];
  sums[kShadowDot] += dot;
  sums[kShadowGotSumsq] += got_square;
  sums[kShadowRefSumsq] += exact_square;
  sums[kShadowRest] += rest;
  sums[kShadowVariance] += variance;
  sums[kShadowVarianceSq] += variance * variance;
  if (exact_square == 0) return;
  const double weight = 1 / (variance + static_cast<double>(row.dim) * kShadowFactorFloor);
  factor.factor += along * weight;
  factor.variance += exact_square * weight;
  for (int i = 0; i < count; ++i) factor.alike[i] += alike[i] * weight;
}

// Of one probability and its gradient.
struct Term {
  Term(const LawGrid& grid, double factor, const AttentionRow& row, int64_t at) : p(row.p[at]) {
    const double dp = row.dp[at], slope = row.slope != nullptr ? row.slope[at] : 1, about = dp - row.delta;
    if (!(p > 0)) return;
    const double d_s = p * about, fp32 = 0x1p-24 * p;
    const LawGrid::Added to_p = grid.Inside(p, 1), to_ds = grid.Inside(d_s, factor);
    const double of_p = to_p.variance + row.of_score * p * p;
    p_error = to_p.error;
    p_variance = kTimes * of_p;
    ds = d_s * slope;
    ds_error = to_ds.error * slope;
    const double own = to_ds.variance + of_p * about * about + fp32 * fp32 * (dp * dp + row.delta * row.delta);
    ds_variance = kTimes * own * slope * slope;
    sloped = p * slope;
  }
  double p, sloped = 0, p_error = 0, p_variance = 0, ds = 0, ds_error = 0, ds_variance = 0;
};

double DeltaVariance(const LawGrid& grid, double factor, const SimdKernels& simd, const AttentionRow& row) {
  const LawTerms terms = simd.law_terms(row.p, row.dp, row.panels, row.delta, {grid.simd, factor, row.of_score});
  const double fp32 = 0x1p-24 * row.abs_d_o_o;
  // A residual of o that is kept in the type leaves this much.
  return kTimes * (terms.dp_variance + fp32 * fp32 + std::ldexp(row.o_variance, -2 * grid.bits));
}

struct Plan {
  explicit Plan(const AttentionShadowParams& params)
      : of(params.of),
        p(params.of.call),
        group(p.heads / p.kv_heads),
        units(p.batch * p.kv_heads),
        keys(std::min<int64_t>(params.keys_per_head, p.k_len)),
        widest(Padded(std::max(p.head_dim, p.v_dim))),
        roundings(ResultRoundings(of)) {}

  const GradedAttention& of;
  const ProbeParams& p;
  const int64_t group, units, keys, widest;
  const double roundings;
};

// The weights of keys that one tile of rows has in products with K and V.
enum Weight : int { kP = 0, kPError, kPVariance, kDs, kSloped, kDsError, kDsVariance, kWeights };

template <typename Element>
class ShadowUnit {
 public:
  static int64_t ScratchSize(const Plan& plan) {
    const int64_t keys = Padded(plan.p.k_len);
    return AttentionRows<Element>::ScratchSize(plan.p) + 4 * keys * plan.widest + kWeights * keys * kPanel +
           kWeights * kPanel * plan.widest + Compared::kArrays * plan.widest + plan.keys * KeySize(plan);
  }

  ShadowUnit(const Plan& plan, double* scratch)
      : plan_(plan),
        p_(plan.p),
        grid_(plan.p.dtype),
        ds_factor_(DsFactor(plan.p)),
        simd_(SelectSimdKernels()),
        widen_(simd_.widen[static_cast<int>(plan.p.dtype)]),
        rows_(plan.of, scratch) {
    const int64_t keys = Padded(p_.k_len);
    double* next = scratch + AttentionRows<Element>::ScratchSize(p_);
    const auto take = [&next](int64_t size) { return std::exchange(next, next + size); };
    for (double** each : {&k_, &k_squares_, &v_, &v_squares_}) *each = take(keys * plan.widest);
    for (double*& weights : weights_) weights = take(keys * kPanel);
    for (double*& product : products_) product = take(kPanel * plan.widest);
    row_ = take(Compared::kArrays * plan.widest);
    of_keys_ = take(plan.keys * KeySize(plan));
  }

  void Run(int64_t batch, int64_t kv_head, ShadowSums& kv_sums, ShadowSums* heads) {
    batch_ = batch;
    kv_head_ = kv_head;
    kv_sums = {};
    rows_.Pack(batch, kv_head);
    Unpack(p_.k, p_.head_dim, k_, k_squares_);
    Unpack(p_.v, p_.v_dim, v_, v_squares_);
    for (int64_t h = 0; h < plan_.group; ++h) {
      heads[h] = {};
      ForEachTile(kv_head * plan_.group + h, SampledRows(p_), true,
                  [&](int64_t head, const AttentionRow* tile, int64_t count) { AddRows(head, tile, count, heads[h]); });
    }
    if (plan_.keys > 0) AddKeys(kv_sums);
  }

 private:
  // Of one sampled key: dk and dv as Compared, the sum in the type and the part to be added to it.
  static int64_t KeySize(const Plan& plan) { return (2 * Compared::kArrays + 4) * plan.widest; }

  // [key][channel] with zeros up to a panel.  Elements that are not finite are 0 here: the probability
  // of a key that they belong to is 0 or not finite itself.
  void Unpack(const Tensor4& from, int64_t dim, double* to, double* squares) const {
    std::fill(to, to + Padded(p_.k_len) * plan_.widest, 0.0);
    for (int64_t j = 0; j < p_.k_len; ++j) {
      double* const row = to + j * plan_.widest;
      widen_(RowOf<Element>(from, batch_, kv_head_, j), dim, row);
      for (int64_t c = 0; c < dim; ++c) row[c] = std::isfinite(row[c]) ? row[c] : 0;
    }
    for (int64_t i = 0; i < Padded(p_.k_len) * plan_.widest; ++i) squares[i] = to[i] * to[i];
  }

  // sampled: the first `count` sampled rows, else rows.
  template <typename Visit>
  void ForEachTile(int64_t head, int64_t count, bool sampled, const Visit& visit) {
    const int64_t tile = rows_.TileRows();
    for (int64_t i = 0; i < count; i += tile) {
      const int64_t some = std::min(tile, count - i);
      int64_t at[kPanel], samples[kPanel];
      for (int64_t r = 0; r < some; ++r) {
        samples[r] = i + r;
        at[r] = sampled ? RowAt(p_, p_.seed, batch_, head, i + r) : i + r;
      }
      AttentionRow found[kPanel];
      rows_.Run(head, at, samples, some, found);
      visit(head, found, some);
    }
  }

  static bool Sees(const AttentionRow& row) { return HasWeights(row.kind); }

  void AddRows(int64_t head, const AttentionRow* tile, int64_t count, ShadowSums& sums) {
    int64_t begin = Padded(p_.k_len), end = 0;
    for (int64_t r = 0; r < count; ++r) {
      if (!Sees(tile[r])) continue;
      begin = std::min(begin, tile[r].first);
      end = std::max(end, tile[r].first + tile[r].panels * kPanel);
    }
    if (begin >= end) return;
    WeighKeys(tile, count, begin, end);
    Multiply(begin, end);
    for (int64_t r = 0; r < count; ++r) {
      if (!Sees(tile[r])) continue;
      AddOutput(head, tile[r], r, sums);
      AddQueryGradient(head, tile[r], r, sums);
    }
  }

  // weights_[which][key][row of the tile]
  void WeighKeys(const AttentionRow* tile, int64_t count, int64_t begin, int64_t end) {
    const int64_t rows = rows_.TileRows();
    for (double* weights : weights_) std::fill(weights, weights + (end - begin) * rows, 0.0);
    for (int64_t r = 0; r < count; ++r) {
      if (!Sees(tile[r])) continue;
      for (int64_t j = 0; j < tile[r].panels * kPanel; ++j) {
        const Term t(grid_, ds_factor_, tile[r], j);
        const int64_t at = (tile[r].first - begin + j) * rows + r;
        weights_[kP][at] = t.p;
        weights_[kPError][at] = t.p_error;
        weights_[kPVariance][at] = t.p_variance;
        weights_[kDs][at] = t.ds;
        weights_[kSloped][at] = t.sloped;
        weights_[kDsError][at] = t.ds_error;
        weights_[kDsVariance][at] = t.ds_variance;
      }
    }
  }

  // products_[which][row of the tile][channel]
  void Multiply(int64_t begin, int64_t end) {
    const int64_t rows = rows_.TileRows();
    const double* const by[kWeights] = {v_, v_, v_squares_, k_, k_, k_, k_squares_};
    for (int which = 0; which < kWeights; ++which) {
      const int64_t dim = Padded(which <= kPVariance ? p_.v_dim : p_.head_dim);
      for (int64_t c = 0; c < dim; c += kPanel) {
        simd_.tile(weights_[which], rows, by[which] + begin * plan_.widest + c, plan_.widest, end - begin,
                   products_[which] + c, plan_.widest);
      }
    }
  }

  const double* Product(int which, int64_t r) const { return products_[which] + r * plan_.widest; }

  void AddOutput(int64_t head, const AttentionRow& row, int64_t r, ShadowSums& sums) {
    Compared o(row_, p_.v_dim);
    o.Clear(1);
    std::copy_n(Product(kP, r), p_.v_dim, o.exact);
    std::copy_n(Product(kPVariance, r), p_.v_dim, o.variance);
    std::copy_n(Product(kPError, r), p_.v_dim, o.channels[0]);
    widen_(RowOf<Element>(p_.o, batch_, head, row.row), p_.v_dim, o.left);
    AddCompared(o, grid_, plan_.roundings, 0, sums);
  }

  void AddQueryGradient(int64_t head, const AttentionRow& row, int64_t r, ShadowSums& sums) {
    const double scale = static_cast<double>(p_.scale), delta_variance = DeltaVariance(grid_, ds_factor_, simd_, row);
    Compared dq(row_, p_.head_dim);
    dq.Clear(2);
    for (int64_t c = 0; c < p_.head_dim; ++c) {
      const double pk = Product(kSloped, r)[c];
      dq.exact[c] = scale * Product(kDs, r)[c];
      dq.variance[c] = scale * scale * (Product(kDsVariance, r)[c] + delta_variance * pk * pk) +
                       kTimes * row.of_row * dq.exact[c] * dq.exact[c];
      dq.channels[0][c] = -scale * row.delta_error * pk;
      dq.channels[1][c] = scale * Product(kDsError, r)[c];
    }
    widen_(RowOf<Element>(plan_.of.d_q, batch_, head, row.row), p_.head_dim, dq.left);
    AddCompared(dq, grid_, plan_.roundings, 1, sums);
  }

  // Of a sampled key.
  Compared KeyGradient(int64_t i) const { return {of_keys_ + i * KeySize(plan_), p_.head_dim}; }
  Compared ValueGradient(int64_t i) const {
    return {of_keys_ + i * KeySize(plan_) + Compared::kArrays * plan_.widest, p_.v_dim};
  }
  // What it is in the type so far, then what is to be added: of dk, of dv.
  double* InType(int64_t i, bool of_values) const {
    return of_keys_ + i * KeySize(plan_) + (2 * Compared::kArrays + (of_values ? 2 : 0)) * plan_.widest;
  }

  int64_t KeyAt(int64_t i) const {
    if (plan_.keys == p_.k_len) return i;
    return SampledKey(p_.seed, static_cast<uint64_t>(batch_),
                      static_cast<uint64_t>(p_.head_offset + kv_head_ * plan_.group), static_cast<uint64_t>(i),
                      static_cast<uint64_t>(plan_.keys), static_cast<uint64_t>(p_.k_len));
  }

  void AddKeys(ShadowSums& sums) {
    const bool accumulated = plan_.of.arithmetic == LawArithmetic::kAccumulated;
    std::fill(of_keys_, of_keys_ + plan_.keys * KeySize(plan_), 0.0);
    const int64_t step = AccumulatedRows(p_.q_len);
    bool unknown = false;  // Whether a gradient came to a row of which no weight is known.
    for (int64_t h = 0; h < plan_.group; ++h) {
      ForEachTile(kv_head_ * plan_.group + h, p_.q_len, false, [&](int64_t, const AttentionRow* tile, int64_t count) {
        for (int64_t r = 0; r < count; ++r) {
          if (tile[r].kind == RowKind::kUnknown) unknown = true;
          if (Sees(tile[r])) AddRowToKeys(tile[r], rows_.Query(r), rows_.Gradient(r), accumulated);
        }
        const int64_t next = tile[count - 1].row + 1;
        if (accumulated && (next % step == 0 || next == p_.q_len)) AddParts();
      });
    }
    if (unknown) return;  // No key is compared, as where a reference is not finite.
    const double roundings = plan_.roundings * (plan_.group > 1 ? 2 : 1);
    for (int64_t i = 0; i < plan_.keys; ++i) {
      Compared dk = KeyGradient(i), dv = ValueGradient(i);
      dk.inside = accumulated ? 3 : 2;
      dv.inside = accumulated ? 2 : 1;
      if (accumulated) {
        for (int64_t c = 0; c < dk.dim; ++c) dk.channels[2][c] = InType(i, false)[c] - dk.exact[c];
        for (int64_t c = 0; c < dv.dim; ++c) dv.channels[1][c] = InType(i, true)[c] - dv.exact[c];
      }
      widen_(RowOf<Element>(plan_.of.d_k, batch_, kv_head_, KeyAt(i)), dk.dim, dk.left);
      widen_(RowOf<Element>(plan_.of.d_v, batch_, kv_head_, KeyAt(i)), dv.dim, dv.left);
      AddCompared(dk, grid_, roundings, 0, sums);
      AddCompared(dv, grid_, roundings, 1, sums);
    }
  }

  void AddRowToKeys(const AttentionRow& row, const double* q, const double* d_o, bool parts) {
    const double scale = static_cast<double>(p_.scale), delta_variance = DeltaVariance(grid_, ds_factor_, simd_, row);
    for (int64_t i = 0; i < plan_.keys; ++i) {
      const int64_t at = KeyAt(i) - row.first;
      if (at < 0 || at >= row.panels * kPanel || row.p[at] == 0) continue;
      const Term t(grid_, ds_factor_, row, at);
      Compared dk = KeyGradient(i), dv = ValueGradient(i);
      const double variance = scale * scale * (t.ds_variance + delta_variance * t.sloped * t.sloped);
      for (int64_t c = 0; c < dk.dim; ++c) {
        dk.exact[c] += scale * t.ds * q[c];
        dk.variance[c] += variance * q[c] * q[c];
        dk.channels[0][c] -= scale * row.delta_error * t.sloped * q[c];
        dk.channels[1][c] += scale * t.ds_error * q[c];
      }
      for (int64_t c = 0; c < dv.dim; ++c) {
        dv.exact[c] += t.p * d_o[c];
        dv.variance[c] += t.p_variance * d_o[c] * d_o[c];
        dv.channels[0][c] += t.p_error * d_o[c];
      }
      if (!parts) continue;
      double *const to_dk = InType(i, false) + plan_.widest, *const to_dv = InType(i, true) + plan_.widest;
      for (int64_t c = 0; c < dk.dim; ++c) to_dk[c] += scale * (t.ds + t.ds_error) * q[c];
      for (int64_t c = 0; c < dv.dim; ++c) to_dv[c] += (t.p + t.p_error) * d_o[c];
    }
  }

  void AddParts() {
    for (int64_t i = 0; i < plan_.keys; ++i) {
      for (const bool of_values : {false, true}) {
        Compared to = of_values ? ValueGradient(i) : KeyGradient(i);
        double *const total = InType(i, of_values), *const part = total + plan_.widest;
        for (int64_t c = 0; c < to.dim; ++c) {
          total[c] = grid_.Rounded(total[c] + part[c]);
          to.variance[c] += kTimes * grid_.Variance(total[c]);
          part[c] = 0;
        }
      }
    }
  }

  const Plan& plan_;
  const ProbeParams& p_;
  const LawGrid grid_;
  const double ds_factor_;
  const SimdKernels& simd_;
  void (*const widen_)(const void*, int64_t, double*);
  AttentionRows<Element> rows_;
  int64_t batch_ = 0, kv_head_ = 0;
  double *k_, *k_squares_, *v_, *v_squares_;
  double* weights_[kWeights];
  double* products_[kWeights];
  double* row_;
  double* of_keys_;
};

// of: the sums of `heads` heads of each sequence.
void Store(const ShadowSums* of, int64_t batch, int64_t heads, int64_t stride, float* out) {
  for (int64_t head = 0; head < heads; ++head) {
    for (int stat = 0; stat < kShadowStatCount; ++stat) {
      float& to = out[stat * stride + head];
      double total = static_cast<double>(to);
      for (int64_t b = 0; b < batch; ++b) total += of[b * heads + head].of[stat];
      to = static_cast<float>(total);
    }
  }
}

// The same of what the tensors' factors are found from.
void StoreFactors(const ShadowSums* of, int64_t batch, int64_t heads, int64_t stride, float* out) {
  for (int64_t head = 0; head < heads; ++head) {
    for (int tensor = 0; tensor < 2; ++tensor) {
      double factor = 0, variance = 0, more = 0, less = 0;
      for (int64_t b = 0; b < batch; ++b) {
        factor += of[b * heads + head].factors[tensor].factor;
        variance += of[b * heads + head].factors[tensor].variance;
      }
      for (int i = 0; i < kChannelsMax; ++i) {
        double channel = 0;
        for (int64_t b = 0; b < batch; ++b) channel += of[b * heads + head].factors[tensor].alike[i];
        (channel > 0 ? more : less) += channel;
      }
      float* const to = out + tensor * kFactorTensorStatCount * stride + head;
      to[kFactor * stride] += static_cast<float>(factor);
      to[kFactorVariance * stride] += static_cast<float>(variance);
      to[kFactorAlike * stride] += static_cast<float>(std::max(more, -less) + kLawExpError * variance);
    }
  }
}

double Operations(const Plan& plan) {
  const ProbeParams& p = plan.p;
  const double rows = static_cast<double>(7 * SampledRows(p) + (plan.keys > 0 ? p.q_len : 0));
  return static_cast<double>(p.batch * p.heads) * rows * static_cast<double>(p.k_len) *
         static_cast<double>(p.head_dim + p.v_dim);
}

}  // namespace

Status AttentionShadow(const AttentionShadowParams& params, uint32_t threads) {
  const ProbeParams& p = params.of.call;
  if (p.batch == 0 || p.q_len == 0 || p.k_len == 0) return Status::kOk;
  const Plan plan(params);
  const uint32_t workers = UsefulThreads(threads, plan.units, Operations(plan));
  Status status = Status::kOk;
  WithElement(p.dtype, [&]<typename Element>(const Element*) {
    const int64_t each = Padded(ShadowUnit<Element>::ScratchSize(plan));
    const Buffer scratch(each * static_cast<int64_t>(workers));
    const std::unique_ptr<ShadowSums[]> units(new (std::nothrow) ShadowSums[static_cast<size_t>(plan.units)]);
    const std::unique_ptr<ShadowSums[]> heads(new (std::nothrow) ShadowSums[static_cast<size_t>(p.batch * p.heads)]);
    if (scratch.data() == nullptr || units == nullptr || heads == nullptr) {
      status = Fail(Status::kDeviceError, "out of memory for the keys of %u threads", workers);
      return;
    }
    std::atomic<int64_t> next{0};
    ParallelFor(workers, workers, [&](int64_t worker) {
      ShadowUnit<Element> shadow(plan, scratch.data() + worker * each);
      for (int64_t unit; (unit = next.fetch_add(1, std::memory_order_relaxed)) < plan.units;) {
        shadow.Run(unit / p.kv_heads, unit % p.kv_heads, units[static_cast<size_t>(unit)],
                   heads.get() + unit * plan.group);
      }
    });
    Store(heads.get(), p.batch, p.heads, params.to.stat_stride, params.to.out);
    if (plan.keys > 0) Store(units.get(), p.batch, p.kv_heads, params.to.kv_stat_stride, params.to.kv_out);
    if (params.factors == nullptr || p.dtype == DType::kFloat32) return;
    StoreFactors(heads.get(), p.batch, p.heads, params.to.stat_stride, params.factors);
    if (plan.keys > 0) {
      StoreFactors(units.get(), p.batch, p.kv_heads, params.to.kv_stat_stride, params.kv_factors);
    }
  });
  return status;
}

}  // namespace bellwether::kernels::cpu
