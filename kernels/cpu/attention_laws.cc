// The laws: every element once for the sums, the sampled rows for what rounding adds.  Units are one
// sequence and key head; their sums are added in unit order, so the result does not depend on the
// threads.

#include "bellwether/kernels/attention_laws.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>
#include <new>

#include "backends.h"
#include "cpu/attention_rows.h"
#include "cpu/buffer.h"
#include "cpu/parallel.h"
#include "error.h"

namespace bellwether::kernels::cpu {
namespace {

constexpr int kSumStats = 4;  // sum, |sum|, squares, non-finite: the order of ColumnSum and of the outputs

// Sizes of rows, and their squares: what sums over rows are in proportion to.
enum Size : int { kOfA1 = 0, kOfA1Squared, kOfDo, kOfDoSquared, kSizes };

// What is known of all rows by some; of A1 and A2 one each for every projection.
enum Estimated : int {
  kA1Delta = 0,
  kA1Rounded = kA1Delta + kLawProjections,
  kA1Inside = kA1Rounded + kLawProjections,
  kA2Rounded = kA1Inside + kLawProjections,
  kA2Inside = kA2Rounded + kLawProjections,
  kA4Rounded = kA2Inside + kLawProjections,
  kA4Inside,
  kEstimates
};

constexpr Size SizeFor(int what) {
  if (what < kA1Inside) return kOfA1;
  if (what < kA2Rounded) return kOfA1Squared;
  if (what < kA2Inside) return kOfDo;
  if (what < kA4Rounded) return kOfDoSquared;
  return what == kA4Rounded ? kOfDo : kOfDoSquared;
}

struct Estimate {
  double value = 0;
  double square_error = 0;
};

// Of one query head's rows.
struct RowSample {
  void AddRow(double of_q, double of_d_o) {
    rows += 1;
    const double x[kSizes] = {of_q * of_d_o, of_q * of_d_o * of_q * of_d_o, of_d_o, of_d_o * of_d_o};
    for (int s = 0; s < kSizes; ++s) {
      all[s] += x[s];
      all_squares[s] += x[s] * x[s];
    }
  }

  void AddSampled(double of_q, double of_d_o, const double* y) {
    sampled += 1;
    const double x[kSizes] = {of_q * of_d_o, of_q * of_d_o * of_q * of_d_o, of_d_o, of_d_o * of_d_o};
    for (int s = 0; s < kSizes; ++s) {
      some[s] += x[s];
      some_squares[s] += x[s] * x[s];
    }
    for (int i = 0; i < kEstimates; ++i) {
      total[i] += y[i];
      squares[i] += y[i] * y[i];
      products[i] += y[i] * x[SizeFor(i)];
    }
  }

  bool Complete() const { return sampled == rows; }

  // Whether the sampled rows say something of the others.
  bool Tells(Size s) const { return Complete() || all[s] == 0 || (sampled >= 2 && some[s] > 0); }

  Estimate Of(int what) const {
    const Size s = SizeFor(what);
    if (Complete() || some[s] == 0 || sampled < 2) return {total[what], 0};
    const double rate = total[what] / some[s];
    const double left = squares[what] - rate * (2 * products[what] - rate * some_squares[s]);
    const double variance = std::max(left, 0.0) / some_squares[s] * (sampled / (sampled - 1));
    const double rest = std::max(all[s] - some[s], 0.0), rest_squares = std::max(all_squares[s] - some_squares[s], 0.0);
    const double share = rest / some[s];
    return {rate * all[s], variance * (share * share * some_squares[s] + rest_squares)};
  }

  double rows = 0, sampled = 0;
  double spread = 0;  // sum over the sampled rows of (n sum P^2 - w^2) / w^2: of P about its mean
  double all[kSizes] = {}, all_squares[kSizes] = {};    // of all rows
  double some[kSizes] = {}, some_squares[kSizes] = {};  // of the sampled
  double total[kEstimates] = {}, squares[kEstimates] = {}, products[kEstimates] = {};
};

// Of one sequence and key head, or of several sequences.
struct UnitSums {
  double a1[kLawProjections] = {}, a2[kLawProjections] = {};
  double a3 = 0, a3_size = 0, a4 = 0;        // a3_size: |sum k . dk| + sum over heads |sum q . dq|
  double results[4] = {};                    // variance of the results' roundings, by law
  double a2_dv[kLawProjections] = {};        // sum_j dv_j
  double a4_dv = 0;                          // sum v . dv
  double a2_doubtful[kLawProjections] = {};  // rows with output 0 that may see keys
  Estimate estimates[kEstimates];
  bool a1_untold = false, a24_untold = false;
  double dk[kSumStats] = {}, dv[kSumStats] = {};

  void Add(const UnitSums& from) {
    for (int i = 0; i < kLawProjections; ++i) {
      a1[i] += from.a1[i];
      a2[i] += from.a2[i];
      a2_dv[i] += from.a2_dv[i];
      a2_doubtful[i] += from.a2_doubtful[i];
    }
    a3 += from.a3;
    a3_size += from.a3_size;
    a4 += from.a4;
    a4_dv += from.a4_dv;
    for (int i = 0; i < 4; ++i) {
      results[i] += from.results[i];
      dk[i] += from.dk[i];
      dv[i] += from.dv[i];
    }
    for (int i = 0; i < kEstimates; ++i) {
      estimates[i].value += from.estimates[i].value;
      estimates[i].square_error += from.estimates[i].square_error;
    }
    a1_untold = a1_untold || from.a1_untold;
    a24_untold = a24_untold || from.a24_untold;
  }

  double Variance(int what) const {
    return estimates[what].value + kLawVarianceErrors * std::sqrt(estimates[what].square_error);
  }
};

struct HeadSums {
  double d_o[kSumStats] = {}, d_q[kSumStats] = {};
  double left_out = 0;
};

bool HasA1(const ProbeParams& p) {
  const bool every = SampledRows(p) == p.q_len;
  return p.dtype != DType::kFloat32 && !(p.softcap > 0) && (p.sinks == nullptr || every);
}
bool HasA2(const ProbeParams& p) {
  return p.dtype != DType::kFloat32 && (p.sinks == nullptr || SampledRows(p) == p.q_len);
}

// The sums of one tensor's columns.
class ColumnSums {
 public:
  static int64_t Size(int64_t dim) { return kColumnSums * Padded(dim); }

  ColumnSums(double* sums, int64_t dim) : sums_(sums), dim_(dim), stride_(Padded(dim)) {
    std::fill(sums_, sums_ + kColumnSums * stride_, 0.0);
  }

  void Add(const SimdKernels& simd, const SimdGrid& grid, const double* x, const double* before, const double* weight) {
    simd.columns(x, before, weight, stride_ / kPanel, grid, sums_, stride_);
  }

  double Of(int which, int64_t c) const { return sums_[which * stride_ + c]; }

  double Total(int which) const {
    double total = 0;
    for (int64_t c = 0; c < dim_; ++c) total += Of(which, c);
    return total;
  }

  void AddTo(double* sums) const {
    for (int i = 0; i < kSumStats; ++i) sums[i] += Total(kColumnSum + i);
    if (sums[kColumnNonfinite] > 0) std::fill(sums, sums + kColumnNonfinite, std::nan(""));
  }

  void Project(double* projections) const {
    for (int i = 0; i < kLawProjections; ++i) {
      for (int64_t c = 0; c < dim_; ++c) {
        const bool plus = ProbeMix(static_cast<uint64_t>(i * dim_ + c)) & 1;
        projections[i] += plus ? Of(kColumnSum, c) : -Of(kColumnSum, c);
      }
    }
  }

  // The same if all elements of a column are rounded alike, once.
  double Alike(int sum) const {
    double total = 0;
    for (int64_t c = 0; c < dim_; ++c) total += Of(sum, c) * Of(sum, c);
    return total / 12;
  }

  // What the roundings of the elements give; see "Results" of attention_laws.h.
  double Variance(bool weighted, double roundings) const {
    const int squares = weighted ? kColumnWeightedSq : kColumnUlpSquare,
              sum = weighted ? kColumnWeightedUlp : kColumnUlp;
    double total = 0;
    for (int64_t c = 0; c < dim_; ++c) {
      const double same = Of(kColumnSame, c) / std::max(Of(kColumnNotZero, c), 1.0);
      const double whole = std::clamp((same - kLawSameFrom) / (kLawSameTo - kLawSameFrom), 0.0, 1.0);
      const double alike = std::max(whole, same * same);  // One run of all that are the same, at most.
      total += (1 - alike) * Of(squares, c) + alike * Of(sum, c) * Of(sum, c);
    }
    return roundings * total / 12;
  }

 private:
  double* sums_;
  int64_t dim_, stride_;
};

struct Plan {
  explicit Plan(const AttentionLawsParams& params)
      : of(params.of),
        p(params.of.call),
        group(p.heads / p.kv_heads),
        units(p.batch * p.kv_heads),
        widest(Padded(std::max(p.head_dim, p.v_dim))),
        judged(p.dtype != DType::kFloat32),
        roundings(ResultRoundings(of)) {
    of_keys = roundings * (group > 1 ? 2 : 1);
    if (of.arithmetic == LawArithmetic::kAccumulated) {
      of_keys += static_cast<double>(group) * AccumulatedSteps(p.q_len);
    }
  }

  const GradedAttention& of;
  const ProbeParams& p;
  const int64_t group, units, widest;
  const bool judged;
  const double roundings;
  double of_keys;
};

template <typename Element>
class LawUnit {
 public:
  static int64_t ScratchSize(const Plan& plan) {
    return AttentionRows<Element>::ScratchSize(plan.p) + (8 + 4 * kColumnSums + 1) * plan.widest +
           Padded(plan.p.k_len) + 2 * kLawProjections * plan.widest;
  }

  LawUnit(const Plan& plan, double* scratch)
      : plan_(plan),
        p_(plan.p),
        grid_(plan.p.dtype),
        simd_(SelectSimdKernels()),
        widen_(simd_.widen[static_cast<int>(plan.p.dtype)]),
        rows_(plan.of, scratch) {
    double* next = scratch + AttentionRows<Element>::ScratchSize(plan.p);
    for (double*& row : row_) {
      row = next;
      next += plan.widest;
    }
    for (double*& sums : sums_) {
      sums = next;
      next += kColumnSums * plan.widest;
    }
    of_rows_ = next;
    next += plan.widest;
    bias_ = next;
    next += Padded(p_.k_len);
    signs_q_ = next;
    signs_v_ = signs_q_ + kLawProjections * plan.widest;
    for (int64_t i = 0; i < kLawProjections; ++i) {
      for (int64_t c = 0; c < plan.widest; ++c) {
        signs_q_[i * plan.widest + c] = Sign(i * p_.head_dim + c);
        signs_v_[i * plan.widest + c] = Sign(i * p_.v_dim + c);
      }
    }
  }

  void Run(int64_t batch, int64_t kv_head, UnitSums& sums, HeadSums* heads) {
    batch_ = batch;
    kv_head_ = kv_head;
    sums = {};
    AddKeys(sums);
    std::fill(of_rows_, of_rows_ + plan_.widest, 0.0);
    if (plan_.judged) rows_.Pack(batch, kv_head);
    for (int64_t h = 0; h < plan_.group; ++h) {
      heads[h] = {};
      AddHead(kv_head * plan_.group + h, sums, heads[h]);
    }
    for (int i = 0; plan_.judged && i < kLawProjections; ++i) {
      for (int64_t c = 0; c < p_.v_dim; ++c) sums.a2[i] -= signs_v_[i * plan_.widest + c] * of_rows_[c];
    }
  }

 private:
  static double Sign(int64_t at) { return ProbeMix(static_cast<uint64_t>(at)) & 1 ? 1 : -1; }

  // Widens a row, with zeros up to a panel.
  const double* Load(const Tensor4& from, int64_t head, int64_t token, int64_t dim, double* to) const {
    widen_(RowOf<Element>(from, batch_, head, token), dim, to);
    std::fill(to + dim, to + Padded(dim), 0.0);
    return to;
  }

  // Two rows take turns, so that the one before is still there; NaN equals nothing.
  void Forget() {
    for (int i = 0; i < 8; ++i) std::fill(row_[i], row_[i] + plan_.widest, std::nan(""));
  }

  void AddKeys(UnitSums& sums) {
    ColumnSums d_k(sums_[0], p_.head_dim), d_v(sums_[1], p_.v_dim);
    Forget();
    for (int64_t j = 0; j < p_.k_len; ++j) {
      const int64_t now = j & 1, before = now ^ 1;
      Load(p_.k, kv_head_, j, p_.head_dim, row_[4]);
      Load(plan_.of.d_k, kv_head_, j, p_.head_dim, row_[now]);
      d_k.Add(simd_, grid_.simd, row_[now], row_[before], row_[4]);
      Load(p_.v, kv_head_, j, p_.v_dim, row_[5]);
      Load(plan_.of.d_v, kv_head_, j, p_.v_dim, row_[2 + now]);
      d_v.Add(simd_, grid_.simd, row_[2 + now], row_[2 + before], row_[5]);
    }
    d_k.AddTo(sums.dk);
    d_v.AddTo(sums.dv);
    dv_alike_ = d_v.Alike(kColumnUlp);
    dv_alike_weighted_ = d_v.Alike(kColumnWeightedUlp);
    if (!plan_.judged) return;
    d_k.Project(sums.a1);
    d_v.Project(sums.a2);
    d_v.Project(sums.a2_dv);
    sums.a3 -= d_k.Total(kColumnProduct);
    sums.a3_size += std::fabs(d_k.Total(kColumnProduct));
    sums.a4_dv += d_v.Total(kColumnProduct);
    sums.a4 -= d_v.Total(kColumnProduct);
    sums.results[0] += d_k.Variance(false, plan_.of_keys);
    sums.results[1] += d_v.Variance(false, plan_.of_keys);
    sums.results[2] += d_k.Variance(true, plan_.of_keys);
    sums.results[3] += d_v.Variance(true, plan_.of_keys);
  }

  void AddHead(int64_t head, UnitSums& sums, HeadSums& of_head) {
    ColumnSums d_q(sums_[0], p_.head_dim), d_q_left_out(sums_[1], p_.head_dim);
    ColumnSums o(sums_[2], p_.v_dim), d_o(sums_[3], p_.v_dim);
    RowSample sample;
    Forget();
    for (int64_t row = 0; row < p_.q_len; ++row) {
      const int64_t now = row & 1, before = now ^ 1;
      const double* const x = Load(plan_.of.d_q, head, row, p_.head_dim, row_[now]);
      const double* const of_o = Load(p_.o, head, row, p_.v_dim, row_[2 + now]);
      const double* const gradient = Load(p_.d_o, head, row, p_.v_dim, row_[4]);
      const double* const q = Load(p_.q, head, row, p_.head_dim, row_[5]);
      d_o.Add(simd_, grid_.simd, gradient, gradient, gradient);
      const double o_square = plan_.judged ? simd_.dot(of_o, 1, of_o, p_.v_dim) : 1;
      bool doubtful = false;
      const RowKind kind = o_square == 0 || !std::isfinite(o_square)
                               ? KindOf(SeesNothing(head, row, o_square, doubtful), o_square)
                               : RowKind::kSeeing;
      if (kind == RowKind::kLeftOut) {
        of_head.left_out += 1;
        d_q_left_out.Add(simd_, grid_.simd, x, row_[before], q);
        continue;
      }
      d_q.Add(simd_, grid_.simd, x, row_[before], q);
      if (!plan_.judged) continue;
      o.Add(simd_, grid_.simd, of_o, row_[2 + before], gradient);
      if (kind == RowKind::kBlank) {
        for (int i = 0; doubtful && i < kLawProjections; ++i) {
          sums.a2_doubtful[i] += std::fabs(simd_.dot(signs_v_ + i * plan_.widest, 1, gradient, p_.v_dim));
        }
        continue;
      }
      if (p_.sinks == nullptr) simd_.add(gradient, p_.v_dim, of_rows_);
      sample.AddRow(static_cast<double>(p_.scale) * std::sqrt(simd_.dot(q, 1, q, p_.head_dim)),
                    std::sqrt(simd_.dot(gradient, 1, gradient, p_.v_dim)));
    }
    d_o.AddTo(of_head.d_o);
    d_q.AddTo(of_head.d_q);
    if (of_head.left_out > 0) d_q_left_out.AddTo(of_head.d_q);
    if (!plan_.judged) return;
    sums.a3 += d_q.Total(kColumnProduct);
    sums.a3_size += std::fabs(d_q.Total(kColumnProduct));
    sums.a4 += o.Total(kColumnProduct);
    sums.results[2] += d_q.Variance(true, plan_.roundings);
    sums.results[3] += o.Variance(true, plan_.roundings);
    AddSampledRows(head, sample, sums);
    for (int i = 0; i < kEstimates; ++i) {
      const Estimate estimate = sample.Of(i);
      sums.estimates[i].value += estimate.value;
      sums.estimates[i].square_error += estimate.square_error;
    }
    AddAccumulation(sample, sums);
    sums.a1_untold = sums.a1_untold || !sample.Tells(kOfA1);
    sums.a24_untold = sums.a24_untold || !sample.Tells(kOfDo);
  }

  // What is added to dv at a time is the same for all keys where rows are broad, and so is then its
  // rounding.
  void AddAccumulation(const RowSample& sample, UnitSums& sums) const {
    if (plan_.of.arithmetic != LawArithmetic::kAccumulated || sample.sampled == 0) return;
    const double step = static_cast<double>(AccumulatedRows(p_.q_len)), steps = AccumulatedSteps(p_.q_len);
    const double spread = std::sqrt(std::max(sample.spread, 0.0) / sample.sampled / step) / steps;
    const double ulps = std::ldexp(spread, grid_.bits);
    const double alike = std::clamp((kLawSpreadTo - ulps) / (kLawSpreadTo - kLawSpreadFrom), 0.0, 1.0);
    sums.results[1] += alike * steps * dv_alike_;
    sums.results[3] += alike * steps * dv_alike_weighted_;
  }

  // Of a row whose output is 0 or not finite.  doubtful: only its mask could say, which is not there.
  bool SeesNothing(int64_t head, int64_t row, double o_square, bool& doubtful) {
    const KeyRange keys = AllowedKeys(p_, batch_, row);
    if (keys.begin == keys.end) return true;
    if (p_.mask.data == nullptr) return false;
    if (!p_.mask.by_sample || SampledRows(p_) == p_.q_len) return HidesAll(p_, batch_, head, row, keys, bias_);
    doubtful = o_square == 0;
    return doubtful;
  }

  void AddSampledRows(int64_t head, RowSample& sample, UnitSums& sums) {
    const int64_t count = SampledRows(p_), tile = rows_.TileRows();
    for (int64_t i = 0; i < count; i += tile) {
      const int64_t some = std::min(tile, count - i);
      int64_t at[kPanel], samples[kPanel];
      for (int64_t r = 0; r < some; ++r) {
        samples[r] = i + r;
        at[r] = RowAt(p_, p_.seed, batch_, head, i + r);
      }
      AttentionRow found[kPanel];
      rows_.Run(head, at, samples, some, found);
      for (int64_t r = 0; r < some; ++r) AddSampledRow(found[r], rows_.Query(r), rows_.Gradient(r), sample, sums);
    }
  }

  void AddSampledRow(const AttentionRow& row, const double* q, const double* d_o, RowSample& sample, UnitSums& sums) {
    if (row.kind == RowKind::kUnknown) sums.a1_untold = sums.a24_untold = true;
    if (!HasWeights(row.kind)) return;
    const LawTerms t = simd_.law_terms(row.p, row.dp, row.panels, row.delta, {grid_.simd, DsFactor(p_), row.of_score});
    const double fp32 = 0x1p-24 * row.abs_d_o_o;
    constexpr double kTimes = 2;  // That each rounding counts.
    const double delta_variance = kTimes * (t.dp_variance + fp32 * fp32 + row.o_variance);
    const double scale = static_cast<double>(p_.scale);
    double y[kEstimates];
    for (int i = 0; i < kLawProjections; ++i) {
      const double q8 = scale * simd_.dot(signs_q_ + i * plan_.widest, 1, q, p_.head_dim);
      const double o8 = simd_.dot(signs_v_ + i * plan_.widest, 1, d_o, p_.v_dim);
      y[kA1Delta + i] = -q8 * row.delta_error * row.weight;
      y[kA1Rounded + i] = q8 * t.ds_error;
      y[kA1Inside + i] = q8 * q8 * (kTimes * t.ds_variance + delta_variance);
      y[kA2Rounded + i] = o8 * t.p_error;
      y[kA2Inside + i] = o8 * o8 * kTimes * (t.p_variance + row.of_row * row.weight * row.weight);
      if (p_.sinks != nullptr) sums.a1[i] -= q8 * t.ds;
    }
    if (row.weight > 0) sample.spread += t.keys * t.p_square / (row.weight * row.weight) - 1;
    y[kA4Rounded] = t.dp_p_error;
    y[kA4Inside] = 2 * kTimes * (t.dp_variance + row.of_row * row.delta * row.delta);
    for (int64_t c = 0; p_.sinks != nullptr && c < p_.v_dim; ++c) of_rows_[c] += row.weight * d_o[c];
    sample.AddSampled(scale * std::sqrt(simd_.dot(q, 1, q, p_.head_dim)), std::sqrt(simd_.dot(d_o, 1, d_o, p_.v_dim)),
                      y);
  }

  const Plan& plan_;
  const ProbeParams& p_;
  const LawGrid grid_;
  const SimdKernels& simd_;
  void (*const widen_)(const void*, int64_t, double*);
  AttentionRows<Element> rows_;
  int64_t batch_ = 0, kv_head_ = 0;
  double dv_alike_ = 0, dv_alike_weighted_ = 0;  // of one addition to dv
  double* row_[8];
  double* sums_[4];
  double* of_rows_;  // sum_T w_T dO_T
  double* bias_;
  double *signs_q_, *signs_v_;  // [projection][channel]
};

// How far roundings move a sum if all go the same way.
class Alike {
 public:
  void Add(const Estimate& channel) {
    (channel.value > 0 ? up_ : down_) += std::fabs(channel.value);
    square_error_ += channel.square_error;
  }
  void AddBothWays(double size) {
    up_ += std::fabs(size);
    down_ += std::fabs(size);
  }
  double Size() const { return std::max(up_, down_) + kLawAlikeErrors * std::sqrt(square_error_); }

 private:
  double up_ = 0, down_ = 0, square_error_ = 0;
};

// NaN is the largest: what is not known must not look like little.
double Larger(double a, double b) { return std::isnan(b) || b > a ? b : a; }

void AddTo(const LawOutputs& to, int stat, int64_t kv_head, double value) {
  float& out = to.kv_out[stat * to.kv_stat_stride + kv_head];
  out = static_cast<float>(static_cast<double>(out) + value);
}

void StoreVectorLaw(const LawOutputs& to, int64_t kv_head, const double* difference, int law, double variance,
                    double alike, bool untold) {
  for (int i = 0; i < kLawProjections; ++i) {
    AddTo(to, law * kLawProjections + i, kv_head, difference[i]);
    if (untold) alike = std::max(alike, std::fabs(difference[i]));
  }
  AddTo(to, kLawA1Variance + law, kv_head, variance);
  AddTo(to, kLawA1Alike + law, kv_head, alike);
}

void StoreLaws(const ProbeParams& p, int bits, const LawOutputs& to, int64_t kv_head, const UnitSums& sums) {
  double inside[2] = {}, alike[2] = {};
  for (int i = 0; i < kLawProjections; ++i) {
    Alike a1, a2;
    a1.Add(sums.estimates[kA1Delta + i]);
    a1.Add(sums.estimates[kA1Rounded + i]);
    a2.Add(sums.estimates[kA2Rounded + i]);
    a2.AddBothWays(kLawExpError * sums.a2_dv[i]);
    a2.AddBothWays(sums.a2_doubtful[i]);
    alike[0] = std::max(alike[0], a1.Size());
    alike[1] = std::max(alike[1], a2.Size());
    inside[0] = Larger(inside[0], sums.Variance(kA1Inside + i));
    inside[1] = Larger(inside[1], sums.Variance(kA2Inside + i));
  }
  if (HasA1(p)) StoreVectorLaw(to, kv_head, sums.a1, 0, sums.results[0] + inside[0], alike[0], sums.a1_untold);
  if (HasA2(p)) StoreVectorLaw(to, kv_head, sums.a2, 1, sums.results[1] + inside[1], alike[1], sums.a24_untold);
  AddTo(to, kLawA3, kv_head, sums.a3);
  AddTo(to, kLawA3Variance, kv_head, sums.results[2]);
  AddTo(to, kLawA3Alike, kv_head, std::isfinite(sums.a3_size) ? std::ldexp(sums.a3_size, -bits) : 0);
  Alike a4;
  a4.AddBothWays(sums.estimates[kA4Rounded].value);
  a4.Add({0, sums.estimates[kA4Rounded].square_error});
  a4.AddBothWays(kLawExpError * sums.a4_dv);
  AddTo(to, kLawA4, kv_head, sums.a4);
  AddTo(to, kLawA4Variance, kv_head, sums.results[3] + sums.Variance(kA4Inside));
  AddTo(to, kLawA4Alike, kv_head, sums.a24_untold ? std::max(a4.Size(), std::fabs(sums.a4)) : a4.Size());
}

void StoreAll(const Plan& plan, const LawOutputs& to, const UnitSums* units, const HeadSums* heads) {
  const ProbeParams& p = plan.p;
  for (int64_t kv_head = 0; kv_head < p.kv_heads; ++kv_head) {
    UnitSums total;
    for (int64_t batch = 0; batch < p.batch; ++batch) total.Add(units[batch * p.kv_heads + kv_head]);
    if (plan.judged) StoreLaws(p, LawGrid(p.dtype).bits, to, kv_head, total);
    for (int i = 0; i < kSumStats; ++i) {
      AddTo(to, kLawDkSum + i, kv_head, total.dk[i]);
      AddTo(to, kLawDvSum + i, kv_head, total.dv[i]);
    }
  }
  for (int64_t head = 0; head < p.heads; ++head) {
    double total[kLawHeadStatCount] = {};
    for (int64_t batch = 0; batch < p.batch; ++batch) {
      const HeadSums& of = heads[batch * p.heads + head];
      for (int i = 0; i < kSumStats; ++i) {
        total[kLawDoSum + i] += of.d_o[i];
        total[kLawDqSum + i] += of.d_q[i];
      }
      total[kLawRowsLeftOut] += of.left_out;
    }
    for (int stat = 0; stat < kLawHeadStatCount; ++stat) {
      float& out = to.out[stat * to.stat_stride + head];
      out = static_cast<float>(static_cast<double>(out) + total[stat]);
    }
  }
}

double Operations(const ProbeParams& p) {
  const double elements = static_cast<double>(p.batch * p.heads) * static_cast<double>(p.q_len + p.k_len) *
                          static_cast<double>(p.head_dim + p.v_dim);
  return elements + static_cast<double>(p.batch * p.heads) * static_cast<double>(SampledRows(p)) *
                        static_cast<double>(p.k_len) * static_cast<double>(p.head_dim + p.v_dim);
}

}  // namespace

Status AttentionLaws(const AttentionLawsParams& params, uint32_t threads) {
  const ProbeParams& p = params.of.call;
  if (p.batch == 0 || p.q_len == 0 || p.k_len == 0) return Status::kOk;
  const Plan plan(params);
  const uint32_t workers = UsefulThreads(threads, plan.units, Operations(p));
  Status status = Status::kOk;
  WithElement(p.dtype, [&]<typename Element>(const Element*) {
    const int64_t each = Padded(LawUnit<Element>::ScratchSize(plan));
    const Buffer scratch(each * static_cast<int64_t>(workers));
    const std::unique_ptr<UnitSums[]> units(new (std::nothrow) UnitSums[static_cast<size_t>(plan.units)]);
    const std::unique_ptr<HeadSums[]> heads(new (std::nothrow) HeadSums[static_cast<size_t>(p.batch * p.heads)]);
    if (scratch.data() == nullptr || units == nullptr || heads == nullptr) {
      status = Fail(Status::kDeviceError, "out of memory for the packed keys of %u threads", workers);
      return;
    }
    std::atomic<int64_t> next{0};
    ParallelFor(workers, workers, [&](int64_t worker) {
      LawUnit<Element> laws(plan, scratch.data() + worker * each);
      for (int64_t unit; (unit = next.fetch_add(1, std::memory_order_relaxed)) < plan.units;) {
        laws.Run(unit / p.kv_heads, unit % p.kv_heads, units[static_cast<size_t>(unit)],
                 heads.get() + unit * plan.group);
      }
    });
    StoreAll(plan, params.to, units.get(), heads.get());
  });
  return status;
}

}  // namespace bellwether::kernels::cpu
