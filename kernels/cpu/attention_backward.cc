// The specification of attention.h's backward.  Units are (sequence, key head):
// dK and dV sum over the group's heads in double and are rounded once.  Rows go
// in groups of kRows, keys in tiles of kKeys.

#include <algorithm>
#include <atomic>
#include <cmath>

#include "backends.h"
#include "cpu/attention_rounding.h"
#include "cpu/attention_sequence.h"
#include "cpu/buffer.h"
#include "cpu/parallel.h"
#include "cpu/probe_mask.h"
#include "error.h"

namespace bellwether::kernels::cpu {
namespace {

constexpr int64_t kRows = 32;
constexpr int64_t kKeys = 128;
// Of the error of delta, per head: the rows of probe.h from kProbeDeltaBiasSum on.
constexpr int64_t kDeltaStats = kProbeStatCount - kProbeDeltaBiasSum;

template <typename Element>
class BackwardUnit {
 public:
  BackwardUnit(const AttentionBackwardParams& b, int64_t keys_max, double* scratch)
      : b_(b),
        p_(b.forward),
        simd_(SelectSimdKernels()),
        packer_(simd_, p_.dtype, p_.head_dim),
        value_packer_(simd_, p_.dtype, ValueDim(p_)),
        width_(packer_.width()),
        value_width_(value_packer_.width()),
        counted_rows_(StatsRowsOf(p_)) {
    const auto take = [&](int64_t rows, int64_t width) {
      double* const at = scratch;
      scratch += rows * width;
      return at;
    };
    key_rows_ = take(keys_max, std::max(width_, value_width_));  // First V, before it is turned.
    for (double** const keys : {&keys_, &dk_}) *keys = take(keys_max, width_);
    for (double** const values : {&values_, &dv_}) *values = take(keys_max, value_width_);
    for (double** const rows : {&queries_, &turned_queries_, &dq_}) *rows = take(kRows, width_);
    for (double** const rows : {&d_o_, &turned_d_o_}) *rows = take(kRows, value_width_);
    for (double** const tile : {&scores_, &dp_, &turned_ds_}) *tile = take(kRows, kKeys);
    bias_ = take(1, std::max(kKeys, keys_max));
    visible_ = take(1, keys_max);
    mean_key_ = take(1, width_);
  }

  static int64_t ScratchSize(const AttentionForwardParams& p, int64_t keys_max) {
    const int64_t width = RoundUp(p.head_dim), value_width = RoundUp(ValueDim(p));
    return keys_max * (std::max(width, value_width) + 2 * width + 2 * value_width + 1) +
           kRows * (3 * width + 2 * value_width + 3 * kKeys) + std::max(kKeys, keys_max) + width;
  }

  // stats: [heads of the group][kDeltaStats].  d_sinks: [heads of the group]
  void Run(const AttentionSequence& sequence, int64_t index, int64_t kv_head, double* stats, double* d_sinks) {
    s_ = sequence;
    index_ = index;
    const int64_t group = p_.heads / p_.kv_heads;
    const int64_t padded = RoundUp(s_.k_len);
    value_packer_.Keys(p_.v, s_, kv_head, padded, key_rows_);
    value_packer_.Panels(key_rows_, padded, values_);
    packer_.Keys(p_.k, s_, kv_head, padded, key_rows_);
    packer_.Panels(key_rows_, padded, keys_);
    if (b_.center) {
      FindVisible(kv_head * group, group);
      Mean(key_rows_, mean_key_);
    }
    std::fill(dk_, dk_ + padded * width_, 0.0);
    std::fill(dv_, dv_ + padded * value_width_, 0.0);
    for (int64_t h = 0; h < group; ++h) {
      head_ = kv_head * group + h;
      stats_ = stats + h * kDeltaStats;
      d_sink_ = d_sinks + h;
      for (int64_t row = 0; row < s_.q_len; row += kRows) {
        RunRows(row, std::min(kRows, s_.q_len - row));
      }
    }
    StoreKeys(kv_head);
  }

 private:
  struct Row {
    double delta = 0;  // what dS subtracts
    double lse = 0;    // L, or the anchor in log2 units
    double rounded_sum = 0;
    double exact = 0;    // sum P dP
    double row_sum = 0;  // sum of the rounded dS
    AllowedKeys allowed{};
    bool sees = false;  // any key
  };

  // visible_[j] = 1 for the keys that centring is about, 0 for the others.
  void FindVisible(int64_t first_head, int64_t group) {
    const bool masked = p_.mask.data != nullptr;
    std::fill(visible_, visible_ + s_.k_len, 0.0);
    std::fill(visible_ + s_.seen_begin, visible_ + s_.seen_end, masked ? 0.0 : 1.0);
    const int64_t heads = p_.mask.head_stride == 0 ? 1 : group;
    for (int64_t row = 0; masked && row < s_.q_len; ++row) {
      const AllowedKeys allowed = AllowedKeysOf(p_, s_, row);
      for (int64_t h = 0; allowed.first < allowed.end && h < heads; ++h) {
        ReadMask(p_.mask, s_.batch, first_head + h, row, {allowed.first, allowed.end}, bias_);
        for (int64_t j = allowed.first; j < allowed.end; ++j) {
          if (bias_[j - allowed.first] != kHiddenBias) visible_[j] = 1;
        }
      }
    }
  }

  // Of the visible keys' rows.
  void Mean(const double* rows, double* mean) const {
    double count = 0;
    std::fill(mean, mean + width_, 0.0);
    for (int64_t j = 0; j < s_.k_len; ++j) {
      if (visible_[j] == 0) continue;
      count += 1;
      for (int64_t c = 0; c < width_; ++c) mean[c] += rows[j * width_ + c];
    }
    for (int64_t c = 0; c < width_; ++c) mean[c] /= std::max(count, 1.0);
  }

  void RunRows(int64_t first, int64_t count) {
    const int64_t token = s_.q_begin + first;
    packer_.Rows(p_.q, s_.batch, head_, token, count, kRows, queries_);
    value_packer_.Rows(b_.d_o, s_.batch, head_, token, count, kRows, d_o_);
    Turn(queries_, width_, turned_queries_);
    Turn(d_o_, value_width_, turned_d_o_);
    std::fill(dq_, dq_ + kRows * width_, 0.0);
    Row rows[kRows];
    for (int64_t r = 0; r < count; ++r) rows[r] = Prepare(first + r, d_o_ + r * value_width_);
    const int64_t begin = rows[0].allowed.first / kKeys * kKeys;
    const int64_t end = rows[count - 1].allowed.end;
    for (int64_t key = begin; key < end; key += kKeys) {
      RunTile(first, rows, count, key, std::min(key + kKeys, end));
    }
    for (int64_t r = 0; r < count; ++r) {
      StoreQueries(rows[r], token + r, dq_ + r * width_);
      if (b_.d_sinks != nullptr) *d_sink_ -= SinkWeight(rows[r]) * rows[r].delta;
      if (counted_rows_.Count(index_, first + r)) AddStats(rows[r]);
    }
  }

  // [kRows][width] to [width][kRows].
  static void Turn(const double* rows, int64_t width, double* turned) {
    for (int64_t r = 0; r < kRows; ++r) {
      for (int64_t c = 0; c < width; ++c) turned[c * kRows + r] = rows[r * width + c];
    }
  }

  Row Prepare(int64_t row, const double* d_o) const {
    const int64_t token = s_.q_begin + row;
    const Element* o = RowOf<Element>(p_.o, s_.batch, head_, token);
    const BFloat16* o_lo = p_.o_lo.data == nullptr ? nullptr : RowOf<BFloat16>(p_.o_lo, s_.batch, head_, token);
    double delta = 0;
    for (int64_t c = 0; c < ValueDim(p_); ++c) {
      double value = static_cast<double>(ToFloat(o[c]));
      if (o_lo != nullptr) value += static_cast<double>(ToFloat(o_lo[c]));
      delta += d_o[c] * value;
    }
    const int64_t at = s_.batch * p_.lse_batch_stride + head_ * p_.lse_head_stride + token;
    Row out;
    out.delta = static_cast<double>(static_cast<float>(delta));
    out.allowed = AllowedKeysOf(p_, s_, row);
    out.rounded_sum = p_.rounded_sum == nullptr ? 0 : static_cast<double>(p_.rounded_sum[at]);
    out.lse = static_cast<double>(p_.anchor == nullptr ? p_.lse[at] : p_.anchor[at]);
    return out;
  }

  // The probability that dS and dV are made of.
  double Weight(const Row& row, double score) const {
    if (p_.mode != AttentionMode::kHpm) return std::exp(score - row.lse);
    return Rounded<Element>(std::exp2(score * kLog2E - row.lse)) / row.rounded_sum;
  }

  // The probability that the sink has in a row.
  double SinkWeight(const Row& row) const {
    const auto sink = static_cast<double>(p_.sinks[head_]);
    if (sink == kHiddenBias) return 0;
    if (p_.mode != AttentionMode::kHpm) return std::exp(sink - row.lse);
    return std::exp2(sink * kLog2E - row.lse) / row.rounded_sum;
  }

  void RunTile(int64_t first, Row* rows, int64_t count, int64_t key, int64_t key_end) {
    const int64_t padded = RoundUp(key_end - key);
    for (int64_t j = 0; j < padded; j += kPanel) {
      for (int64_t r = 0; r < kRows; r += simd_.tile_rows) {
        const int64_t at = r * kKeys + j;
        simd_.tile(turned_queries_ + r, kRows, keys_ + (key + j) * width_, kPanel, width_, scores_ + at, kKeys);
        simd_.tile(turned_d_o_ + r, kRows, values_ + (key + j) * value_width_, kPanel, value_width_, dp_ + at, kKeys);
      }
    }
    for (int64_t r = 0; r < count; ++r) {
      RunRowOfTile(first + r, &rows[r], key, padded, scores_ + r * kKeys, dp_ + r * kKeys);
    }
    for (int64_t r = 0; r < kRows; ++r) {
      if (r >= count) {  // Rows that do not exist.
        std::fill(scores_ + r * kKeys, scores_ + r * kKeys + padded, 0.0);
        std::fill(dp_ + r * kKeys, dp_ + r * kKeys + padded, 0.0);
      }
      for (int64_t j = 0; j < padded; ++j) turned_ds_[j * kRows + r] = dp_[r * kKeys + j];
    }
    for (int64_t c = 0; c < width_; c += kPanel) {
      for (int64_t r = 0; r < kRows; r += simd_.tile_rows) {
        simd_.accumulate_tile(turned_ds_ + r, kRows, key_rows_ + key * width_ + c, width_, padded, dq_ + r * width_ + c,
                              width_);
      }
      for (int64_t j = 0; j < padded; j += simd_.tile_rows) {
        simd_.accumulate_tile(dp_ + j, kKeys, queries_ + c, width_, kRows, dk_ + (key + j) * width_ + c, width_);
      }
    }
    for (int64_t c = 0; c < value_width_; c += kPanel) {
      for (int64_t j = 0; j < padded; j += simd_.tile_rows) {
        simd_.accumulate_tile(scores_ + j, kKeys, d_o_ + c, value_width_, kRows, dv_ + (key + j) * value_width_ + c,
                              value_width_);
      }
    }
  }

  // Turns scores into the rounded P and dP into the rounded dS.
  void RunRowOfTile(int64_t at, Row* row, int64_t key, int64_t padded, double* scores, double* dp) const {
    const auto cap = static_cast<double>(p_.softcap);
    const int64_t from = std::clamp<int64_t>(row->allowed.first - key, 0, padded);
    const int64_t to = std::clamp<int64_t>(row->allowed.end - key, from, padded);
    std::fill(scores, scores + from, 0.0);
    std::fill(dp, dp + from, 0.0);
    std::fill(scores + to, scores + padded, 0.0);
    std::fill(dp + to, dp + padded, 0.0);
    ToScores(p_, scores + from, to - from);
    const bool masked = p_.mask.data != nullptr && from < to;
    if (masked) ReadMask(p_.mask, s_.batch, head_, at, {key + from, key + to}, bias_);
    for (int64_t j = from; j < to; ++j) {
      if (masked && bias_[j - from] == kHiddenBias) {
        scores[j] = dp[j] = 0;  // Whatever they were.
        continue;
      }
      row->sees = true;
      const double weight = Weight(*row, masked ? scores[j] + bias_[j - from] : scores[j]);
      row->exact += weight * dp[j];
      double ds = weight * (dp[j] - row->delta);
      if (cap > 0) ds *= 1 - scores[j] / cap * (scores[j] / cap);
      scores[j] = Rounded<Element>(weight);
      dp[j] = Rounded<Element>(ds);
      row->row_sum += dp[j];
    }
  }

  void StoreQueries(const Row& row, int64_t token, const double* sums) const {
    Element* dq = const_cast<Element*>(RowOf<Element>(b_.dq, s_.batch, head_, token));
    for (int64_t c = 0; c < p_.head_dim; ++c) {
      const double mean = b_.center ? row.row_sum * mean_key_[c] : 0;
      Assign(dq[c], static_cast<double>(p_.scale) * (sums[c] - mean));
    }
  }

  void StoreKeys(int64_t kv_head) {
    if (b_.center) {
      Mean(dk_, mean_key_);
      for (int64_t j = 0; j < s_.k_len; ++j) {
        for (int64_t c = 0; visible_[j] != 0 && c < width_; ++c) dk_[j * width_ + c] -= mean_key_[c];
      }
    }
    for (int64_t j = 0; j < s_.k_len; ++j) {
      const int64_t token = s_.k_begin + j;
      Element* dk = const_cast<Element*>(RowOf<Element>(b_.dk, s_.batch, kv_head, token));
      Element* dv = const_cast<Element*>(RowOf<Element>(b_.dv, s_.batch, kv_head, token));
      for (int64_t c = 0; c < p_.head_dim; ++c) Assign(dk[c], static_cast<double>(p_.scale) * dk_[j * width_ + c]);
      for (int64_t c = 0; c < ValueDim(p_); ++c) Assign(dv[c], dv_[j * value_width_ + c]);
    }
  }

  void AddStats(const Row& row) {
    if (!row.sees) return;
    const double error = row.delta - row.exact;
    stats_[kProbeDeltaBiasSum - kProbeDeltaBiasSum] += error;
    stats_[kProbeDeltaBiasSumsq - kProbeDeltaBiasSum] += error * error;
    stats_[kProbeDeltaAbsSum - kProbeDeltaBiasSum] += std::fabs(row.exact);
    stats_[kProbeDeltaErrorAbsSum - kProbeDeltaBiasSum] += std::fabs(error);
  }

  const AttentionBackwardParams& b_;
  const AttentionForwardParams& p_;
  const SimdKernels& simd_;
  const RowPacker<Element> packer_, value_packer_;
  const int64_t width_, value_width_;
  const StatsRows counted_rows_;
  AttentionSequence s_{};
  int64_t index_ = 0, head_ = 0;
  double *stats_ = nullptr, *d_sink_ = nullptr;
  double *key_rows_, *keys_, *values_, *dk_, *dv_;
  double *queries_, *turned_queries_, *d_o_, *turned_d_o_, *dq_;
  double* scores_;     // [kRows][kKeys]: S, then the rounded P
  double* dp_;         // [kRows][kKeys]: dP, then the rounded dS
  double* turned_ds_;  // [kKeys][kRows]
  double* bias_;       // of one row
  double* visible_;    // [keys]
  double* mean_key_;
};

// Unit by unit, so that the sum does not depend on the threads.
void StoreStats(const AttentionForwardParams& p, const double* stats) {
  for (int64_t i = 0; i < SequenceCount(p); ++i) {
    for (int64_t h = 0; h < p.heads; ++h) {
      for (int64_t stat = 0; stat < kDeltaStats; ++stat) {
        float& out = p.stats[(kProbeDeltaBiasSum + stat) * p.stat_stride + h];
        out = static_cast<float>(static_cast<double>(out) + stats[(i * p.heads + h) * kDeltaStats + stat]);
      }
    }
  }
}

void StoreSinks(const AttentionBackwardParams& b, const double* sums) {
  const AttentionForwardParams& p = b.forward;
  for (int64_t h = 0; h < p.heads; ++h) {
    double total = 0;
    for (int64_t i = 0; i < SequenceCount(p); ++i) total += sums[i * p.heads + h];
    b.d_sinks[h] = static_cast<float>(total);
  }
}

}  // namespace

Status AttentionBackward(const AttentionBackwardParams& b, uint32_t threads) {
  const AttentionForwardParams& p = b.forward;
  if (p.batch == 0) {
    if (b.d_sinks != nullptr) StoreSinks(b, nullptr);
    return Status::kOk;
  }
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckAttentionSequences(p));
  const int64_t group = p.heads / p.kv_heads;
  const int64_t units = SequenceCount(p) * p.kv_heads;
  const int64_t keys_max = RoundUp(LongestKeys(p));
  const double operations = 5.0 * static_cast<double>(p.batch * p.heads * p.q_len) * static_cast<double>(keys_max) *
                            static_cast<double>(p.head_dim);
  const uint32_t workers = UsefulThreads(threads, units, operations);
  const int64_t each = BackwardUnit<float>::ScratchSize(p, keys_max);
  const Buffer scratch(each * static_cast<int64_t>(workers));
  const Buffer stats(units * group * kDeltaStats), d_sinks(units * group);
  if (scratch.data() == nullptr || stats.data() == nullptr || d_sinks.data() == nullptr) {
    return Fail(Status::kDeviceError, "out of memory for the packed keys of %u threads", workers);
  }
  std::fill(stats.data(), stats.data() + units * group * kDeltaStats, 0.0);
  std::fill(d_sinks.data(), d_sinks.data() + units * group, 0.0);
  std::atomic<int64_t> next{0};
  WithElement(p.dtype, [&]<typename Element>(const Element*) {
    ParallelFor(workers, workers, [&](int64_t worker) {
      BackwardUnit<Element> backward(b, keys_max, scratch.data() + worker * each);
      for (int64_t unit; (unit = next.fetch_add(1, std::memory_order_relaxed)) < units;) {
        backward.Run(SequenceAt(p, unit / p.kv_heads), unit / p.kv_heads, unit % p.kv_heads,
                     stats.data() + unit * group * kDeltaStats, d_sinks.data() + unit * group);
      }
    });
  });
  if (p.stats != nullptr) StoreStats(p, stats.data());
  if (b.d_sinks != nullptr) StoreSinks(b, d_sinks.data());
  return Status::kOk;
}

}  // namespace bellwether::kernels::cpu
