// The specification of attention.h's forward: tiles of keys and a running
// maximum as on a GPU, double accumulators, rounding only where the mode rounds.
// Units are (sequence, head); rows go in groups of kPanel.

#include <algorithm>
#include <atomic>
#include <cmath>

#include "backends.h"
#include "cpu/attention_rounding.h"
#include "cpu/attention_row_stats.h"
#include "cpu/attention_sequence.h"
#include "cpu/buffer.h"
#include "cpu/parallel.h"
#include "cpu/probe_mask.h"
#include "error.h"

namespace bellwether::kernels::cpu {
namespace {

constexpr double kNegativeInfinity = kHiddenBias;

bool DividesByRounded(AttentionMode mode) {
  return mode == AttentionMode::kHp || mode == AttentionMode::kHpm || mode == AttentionMode::kSr ||
         mode == AttentionMode::kLt;
}

// A row between two tiles; log2 units.
struct RowState {
  double max = kNegativeInfinity;
  double anchor = kNegativeInfinity;
  double sum = 0;           // l
  double rounded_sum = 0;   // lt
  int64_t repeats = 0;      // C
  AttentionRowStats stats;  // if they are wanted

  // A sink counts as a key whose value is 0, but neither ties nor is rounded.
  void BeginWithSink(const AttentionForwardParams& p, float sink) {
    max = static_cast<double>(sink) * kLog2E;
    if (max == kNegativeInfinity) return;
    anchor = AnchorFor(p);
    sum = rounded_sum = std::exp2(max - anchor);
  }

  // Takes up a tile's scores x[0..count) and returns what acc, l and lt were
  // multiplied with; false if the tile has nothing for this row.
  bool Advance(const AttentionForwardParams& p, const double* x, int64_t count, double* rescale) {
    double next = max;
    bool nan = false;
    for (int64_t i = 0; i < count; ++i) {
      next = std::max(next, x[i]);
      nan |= x[i] != x[i];
    }
    if (nan) next = std::numeric_limits<double>::quiet_NaN();  // Of the whole row from here on.
    if (next == kNegativeInfinity) return false;
    if (p.mode == AttentionMode::kPaper) {
      const double threshold = next - static_cast<double>(p.paper_eps) * kLog2E;
      if (!(max >= threshold)) repeats = 0;
      for (int64_t i = 0; i < count; ++i) repeats += x[i] >= threshold;
    }
    max = next;
    const double wanted = AnchorFor(p);
    const double moved = anchor >= wanted ? anchor : wanted;
    *rescale = anchor == kNegativeInfinity ? 0 : std::exp2(anchor - moved);
    anchor = moved;
    sum *= *rescale;
    rounded_sum *= *rescale;
    return true;
  }

  double AnchorFor(const AttentionForwardParams& p) const {
    if (p.mode == AttentionMode::kHp || p.mode == AttentionMode::kHpm) return std::ceil(max);
    if (p.mode != AttentionMode::kPaper || repeats <= 1) return max;
    const double shift = max > 0 ? (static_cast<double>(p.paper_beta) - 1) * max : -max;
    const double most = p.dtype == DType::kFloat16 ? kPaperShiftMaxFloat16 : kPaperShiftMaxBFloat16;
    return max + std::clamp(shift, kPaperShiftMin, most);
  }
};

template <typename Element>
class ForwardUnit {
 public:
  ForwardUnit(const AttentionForwardParams& p, int64_t tile_keys, int64_t keys_max, double* scratch)
      : p_(p),
        simd_(SelectSimdKernels()),
        packer_(simd_, p.dtype, p.head_dim),
        value_packer_(simd_, p.dtype, ValueDim(p)),
        tile_keys_(tile_keys),
        width_(packer_.width()),
        value_width_(value_packer_.width()),
        counted_rows_(StatsRowsOf(p)) {
    values_ = scratch;  // First K, before it is turned.
    keys_ = values_ + keys_max * std::max(width_, value_width_);
    queries_ = keys_ + keys_max * width_;
    turned_queries_ = queries_ + kPanel * width_;
    acc_ = turned_queries_ + kPanel * width_;
    scores_ = acc_ + kPanel * value_width_;
    weights_ = scores_ + kPanel * tile_keys_;
    bias_ = weights_ + kPanel * tile_keys_;
    seen_ = bias_ + tile_keys_;
  }

  static int64_t ScratchSize(const AttentionForwardParams& p, int64_t tile_keys, int64_t keys_max) {
    const int64_t width = RoundUp(p.head_dim), value_width = RoundUp(ValueDim(p));
    return keys_max * (std::max(width, value_width) + width) + kPanel * (2 * width + value_width) +
           2 * (kPanel + 1) * tile_keys;
  }

  // Of sequence number `index`.  stats: [kProbeStatCount], or null.
  void Run(const AttentionSequence& sequence, int64_t index, int64_t head, double* stats) {
    s_ = sequence;
    index_ = index;
    head_ = head;
    stats_ = stats;
    if (stats != nullptr) ClearSums(stats);
    const int64_t kv_head = head / (p_.heads / p_.kv_heads);
    const int64_t padded = RoundUp(s_.k_len);
    packer_.Keys(p_.k, s_, kv_head, padded, values_);
    packer_.Panels(values_, padded, keys_);
    value_packer_.Keys(p_.v, s_, kv_head, padded, values_);
    for (int64_t row = 0; row < s_.q_len; row += kPanel) {
      RunRows(row, std::min(kPanel, s_.q_len - row));
    }
  }

 private:
  void RunRows(int64_t first, int64_t count) {
    packer_.Rows(p_.q, s_.batch, head_, s_.q_begin + first, count, kPanel, queries_);
    packer_.Panels(queries_, kPanel, turned_queries_);
    std::fill(acc_, acc_ + kPanel * value_width_, 0.0);
    RowState rows[kPanel];
    for (int64_t r = 0; p_.sinks != nullptr && r < count; ++r) rows[r].BeginWithSink(p_, p_.sinks[head_]);
    const int64_t begin = AllowedKeysOf(p_, s_, first).first / tile_keys_ * tile_keys_;
    const int64_t end = AllowedKeysOf(p_, s_, first + count - 1).end;
    for (int64_t key = begin; key < end; key += tile_keys_) {
      RunTile(first, count, key, std::min(key + tile_keys_, end), rows);
    }
    for (int64_t r = 0; r < count; ++r) {
      Finish(rows[r], s_.q_begin + first + r, acc_ + r * value_width_);
      AddStats(rows[r], first + r);
    }
  }

  void RunTile(int64_t first, int64_t count, int64_t key, int64_t key_end, RowState* rows) {
    const int64_t padded = RoundUp(key_end - key);
    for (int64_t j = 0; j < padded; j += kPanel) {
      for (int64_t r = 0; r < kPanel; r += simd_.tile_rows) {
        simd_.tile(turned_queries_ + r, kPanel, keys_ + (key + j) * width_, kPanel, width_,
                   scores_ + r * tile_keys_ + j, tile_keys_);
      }
    }
    std::fill(weights_, weights_ + padded * kPanel, 0.0);
    for (int64_t r = 0; r < count; ++r) {
      const AllowedKeys allowed = AllowedKeysOf(p_, s_, first + r);
      const int64_t from = std::max(allowed.first - key, int64_t{0});
      const int64_t to = std::min(allowed.end, key_end) - key;
      double* x = scores_ + r * tile_keys_;
      if (from >= to) continue;
      if (p_.mask.data != nullptr) {
        MaskedScores(first + r, {key + from, key + to}, x + from, &rows[r].stats);
      } else {
        if (stats_ != nullptr && p_.softcap > 0) CheckRaw(x + from, to - from, &rows[r].stats);
        ToScores(p_, x + from, to - from);
        if (stats_ != nullptr) rows[r].stats.Add(x + from, to - from, key + from);
      }
      for (int64_t j = from; j < to; ++j) x[j] *= kLog2E;
      double rescale = 0;
      if (!rows[r].Advance(p_, x + from, to - from, &rescale)) continue;
      double* acc = acc_ + r * value_width_;
      for (int64_t c = 0; c < value_width_; ++c) acc[c] *= rescale;
      for (int64_t j = from; j < to; ++j) {
        const double weight = std::exp2(x[j] - rows[r].anchor);
        const double rounded = Rounded<Element>(weight);
        rows[r].sum += weight;
        rows[r].rounded_sum += rounded;
        weights_[j * kPanel + r] = rounded;
      }
    }
    for (int64_t r = 0; r < kPanel; r += simd_.tile_rows) {
      for (int64_t c = 0; c < value_width_; c += kPanel) {
        simd_.accumulate_tile(weights_ + r, kPanel, values_ + key * value_width_ + c, value_width_, padded,
                              acc_ + r * value_width_ + c, value_width_);
      }
    }
  }

  // q.k of the keys `keys` to S, -inf where the mask hides the key.  Hidden keys count for
  // nothing, not even where they are NaN.
  void MaskedScores(int64_t row, KeyRange keys, double* x, AttentionRowStats* stats) {
    const int64_t count = keys.end - keys.begin;
    ReadMask(p_.mask, s_.batch, head_, row, keys, bias_);
    int64_t seen = 0, first_seen = 0;
    for (int64_t j = 0; j < count; ++j) {
      if (bias_[j] == kHiddenBias) continue;
      if (seen == 0) first_seen = keys.begin + j;
      seen_[seen++] = x[j];
    }
    if (stats_ != nullptr) CheckRaw(seen_, seen, stats);
    ToScores(p_, seen_, seen);
    for (int64_t j = 0, i = 0; j < count; ++j) {
      x[j] = bias_[j] == kHiddenBias ? kNegativeInfinity : seen_[i] += bias_[j];
      i += bias_[j] != kHiddenBias;
    }
    if (stats_ != nullptr) stats->Add(seen_, seen, first_seen);
  }

  void CheckRaw(const double* dots, int64_t count, AttentionRowStats* stats) const {
    for (int64_t j = 0; j < count; ++j) {
      const double score = dots[j] * static_cast<double>(p_.scale);
      stats->CheckRaw(&score, 1);
    }
  }

  // Of rows that do not count only the largest score.
  void AddStats(const RowState& row, int64_t at) {
    if (stats_ == nullptr) return;
    const float* const sink = p_.sinks == nullptr ? nullptr : p_.sinks + head_;
    if (counted_rows_.Count(index_, at)) return row.stats.AddTo(sink, stats_);
    double other[kProbeStatCount];
    ClearSums(other);
    row.stats.AddTo(sink, other);
    stats_[kProbeLogitMax] = std::max(stats_[kProbeLogitMax], other[kProbeLogitMax]);
  }

  // `token` counts from the tensor's first.
  void Finish(const RowState& row, int64_t token, const double* acc) {
    const double divisor = DividesByRounded(p_.mode) ? row.rounded_sum : row.sum;
    const bool empty = row.sum == 0;
    Element* o = const_cast<Element*>(RowOf<Element>(p_.o, s_.batch, head_, token));
    BFloat16* o_lo =
        p_.o_lo.data == nullptr ? nullptr : const_cast<BFloat16*>(RowOf<BFloat16>(p_.o_lo, s_.batch, head_, token));
    for (int64_t c = 0; c < ValueDim(p_); ++c) {
      const double exact = empty ? 0 : acc[c] / divisor;
      if (p_.mode == AttentionMode::kSr) {
        AssignStochastically(o[c], exact, RoundingBits(p_.seed, s_.batch, head_, token, c));
      } else {
        Assign(o[c], exact);
      }
      if (o_lo != nullptr) Assign(o_lo[c], exact - static_cast<double>(ToFloat(o[c])));
    }
    const int64_t at = s_.batch * p_.lse_batch_stride + head_ * p_.lse_head_stride + token;
    p_.lse[at] = static_cast<float>(empty ? kNegativeInfinity : (row.anchor + std::log2(row.sum)) * kLn2);
    if (p_.anchor == nullptr) return;
    p_.anchor[at] = empty ? 0.0f : static_cast<float>(row.anchor);
    p_.rounded_sum[at] = empty ? 0.0f : static_cast<float>(row.rounded_sum);
  }

  const AttentionForwardParams& p_;
  const SimdKernels& simd_;
  const RowPacker<Element> packer_, value_packer_;
  const int64_t tile_keys_, width_, value_width_;
  const StatsRows counted_rows_;
  AttentionSequence s_{};
  int64_t index_ = 0, head_ = 0;
  double* stats_ = nullptr;
  double *values_, *keys_, *queries_, *turned_queries_, *acc_;
  double* scores_;        // [kPanel][tile_keys]
  double* weights_;       // [tile_keys][kPanel]
  double *bias_, *seen_;  // [tile_keys]: of one row; the scores that a mask leaves of it
};

// Adds the units' sums to the caller's, in their order, so that nothing depends on
// the threads.
void StoreStats(const AttentionForwardParams& p, const double* sums) {
  for (int64_t h = 0; h < p.heads; ++h) {
    double total[kProbeStatCount];
    ClearSums(total);
    for (int64_t i = 0; i < SequenceCount(p); ++i) {
      MergeSums(sums + (i * p.heads + h) * kProbeStatCount, total);
    }
    ProbeParams to;
    to.stat_stride = p.stat_stride;
    to.out = p.stats;
    StoreSums(to, h, total);
  }
}

}  // namespace

Status AttentionForward(const AttentionForwardParams& p, uint32_t threads, int64_t tile_keys) {
  if (p.batch == 0 || p.q_len == 0) return Status::kOk;
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckAttentionSequences(p));
  const int64_t units = SequenceCount(p) * p.heads;
  const int64_t keys_max = RoundUp(LongestKeys(p));
  const double operations = 2.0 * static_cast<double>(p.batch * p.heads * p.q_len) * static_cast<double>(keys_max) *
                            static_cast<double>(p.head_dim);
  const uint32_t workers = UsefulThreads(threads, units, operations);
  tile_keys = RoundUp(tile_keys);
  const int64_t each = ForwardUnit<float>::ScratchSize(p, tile_keys, keys_max);
  const Buffer scratch(each * static_cast<int64_t>(workers));
  const Buffer stats(p.stats == nullptr ? 0 : units * kProbeStatCount);
  if (scratch.data() == nullptr || (p.stats != nullptr && stats.data() == nullptr)) {
    return Fail(Status::kDeviceError, "out of memory for the packed keys of %u threads", workers);
  }
  std::atomic<int64_t> next{0};
  WithElement(p.dtype, [&]<typename Element>(const Element*) {
    ParallelFor(workers, workers, [&](int64_t worker) {
      ForwardUnit<Element> forward(p, tile_keys, keys_max, scratch.data() + worker * each);
      for (int64_t unit; (unit = next.fetch_add(1, std::memory_order_relaxed)) < units;) {
        forward.Run(SequenceAt(p, unit / p.heads), unit / p.heads, unit % p.heads,
                    p.stats == nullptr ? nullptr : stats.data() + unit * kProbeStatCount);
      }
    });
  });
  if (p.stats != nullptr) StoreStats(p, stats.data());
  return Status::kOk;
}

}  // namespace bellwether::kernels::cpu
