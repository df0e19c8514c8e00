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
        width_(packer_.width()),
        counted_rows_(StatsRowsOf(p_)) {
    for (double** const keys : {&key_rows_, &keys_, &values_, &dk_, &dv_}) {
      *keys = scratch;
      scratch += keys_max * width_;
    }
    for (double** const rows : {&queries_, &turned_queries_, &d_o_, &turned_d_o_, &dq_}) {
      *rows = scratch;
      scratch += kRows * width_;
    }
    for (double** const tile : {&scores_, &dp_, &turned_ds_}) {
      *tile = scratch;
      scratch += kRows * kKeys;
    }
    mean_key_ = scratch;
  }

  static int64_t ScratchSize(int64_t head_dim, int64_t keys_max) {
    return RoundUp(head_dim) * (5 * keys_max + 5 * kRows + 1) + 3 * kRows * kKeys;
  }

  // stats: [heads of the group][kDeltaStats]
  void Run(const AttentionSequence& sequence, int64_t index, int64_t kv_head, double* stats) {
    s_ = sequence;
    index_ = index;
    const int64_t group = p_.heads / p_.kv_heads;
    const int64_t padded = RoundUp(s_.k_len);
    packer_.Rows(p_.v, s_.batch, kv_head, s_.k_begin, s_.k_len, padded, key_rows_);
    packer_.Panels(key_rows_, padded, values_);
    packer_.Rows(p_.k, s_.batch, kv_head, s_.k_begin, s_.k_len, padded, key_rows_);
    packer_.Panels(key_rows_, padded, keys_);
    Mean(key_rows_, mean_key_);
    std::fill(dk_, dk_ + padded * width_, 0.0);
    std::fill(dv_, dv_ + padded * width_, 0.0);
    for (int64_t h = 0; h < group; ++h) {
      head_ = kv_head * group + h;
      stats_ = stats + h * kDeltaStats;
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
  };

  void Mean(const double* rows, double* mean) const {
    std::fill(mean, mean + width_, 0.0);
    for (int64_t j = 0; j < s_.k_len; ++j) {
      for (int64_t c = 0; c < width_; ++c) mean[c] += rows[j * width_ + c];
    }
    const auto count = static_cast<double>(std::max<int64_t>(s_.k_len, 1));
    for (int64_t c = 0; c < width_; ++c) mean[c] /= count;
  }

  void RunRows(int64_t first, int64_t count) {
    const int64_t token = s_.q_begin + first;
    packer_.Rows(p_.q, s_.batch, head_, token, count, kRows, queries_);
    packer_.Rows(b_.d_o, s_.batch, head_, token, count, kRows, d_o_);
    Turn(queries_, turned_queries_);
    Turn(d_o_, turned_d_o_);
    std::fill(dq_, dq_ + kRows * width_, 0.0);
    Row rows[kRows];
    for (int64_t r = 0; r < count; ++r) rows[r] = Prepare(first + r, d_o_ + r * width_);
    const int64_t begin = rows[0].allowed.first / kKeys * kKeys;
    const int64_t end = rows[count - 1].allowed.end;
    for (int64_t key = begin; key < end; key += kKeys) {
      RunTile(rows, count, key, std::min(key + kKeys, end));
    }
    for (int64_t r = 0; r < count; ++r) {
      StoreQueries(rows[r], token + r, dq_ + r * width_);
      if (counted_rows_.Count(index_, first + r)) AddStats(rows[r]);
    }
  }

  // [kRows][width] to [width][kRows].
  void Turn(const double* rows, double* turned) const {
    for (int64_t r = 0; r < kRows; ++r) {
      for (int64_t c = 0; c < width_; ++c) turned[c * kRows + r] = rows[r * width_ + c];
    }
  }

  Row Prepare(int64_t row, const double* d_o) const {
    const int64_t token = s_.q_begin + row;
    const Element* o = RowOf<Element>(p_.o, s_.batch, head_, token);
    const BFloat16* o_lo = p_.o_lo.data == nullptr ? nullptr : RowOf<BFloat16>(p_.o_lo, s_.batch, head_, token);
    double delta = 0;
    for (int64_t c = 0; c < p_.head_dim; ++c) {
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

  void RunTile(Row* rows, int64_t count, int64_t key, int64_t key_end) {
    const int64_t padded = RoundUp(key_end - key);
    for (int64_t j = 0; j < padded; j += kPanel) {
      for (int64_t r = 0; r < kRows; r += simd_.tile_rows) {
        const int64_t at = r * kKeys + j;
        simd_.tile(turned_queries_ + r, kRows, keys_ + (key + j) * width_, kPanel, width_, scores_ + at, kKeys);
        simd_.tile(turned_d_o_ + r, kRows, values_ + (key + j) * width_, kPanel, width_, dp_ + at, kKeys);
      }
    }
    for (int64_t r = 0; r < count; ++r) {
      RunRowOfTile(&rows[r], key, padded, scores_ + r * kKeys, dp_ + r * kKeys);
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
        const int64_t at = (key + j) * width_ + c;
        simd_.accumulate_tile(dp_ + j, kKeys, queries_ + c, width_, kRows, dk_ + at, width_);
        simd_.accumulate_tile(scores_ + j, kKeys, d_o_ + c, width_, kRows, dv_ + at, width_);
      }
    }
  }

  // Turns scores into the rounded P and dP into the rounded dS.
  void RunRowOfTile(Row* row, int64_t key, int64_t padded, double* scores, double* dp) const {
    const auto cap = static_cast<double>(p_.softcap);
    const int64_t from = std::clamp<int64_t>(row->allowed.first - key, 0, padded);
    const int64_t to = std::clamp<int64_t>(row->allowed.end - key, from, padded);
    std::fill(scores, scores + from, 0.0);
    std::fill(dp, dp + from, 0.0);
    std::fill(scores + to, scores + padded, 0.0);
    std::fill(dp + to, dp + padded, 0.0);
    ToScores(p_, scores + from, to - from);
    for (int64_t j = from; j < to; ++j) {
      const double weight = Weight(*row, scores[j]);
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
        for (int64_t c = 0; c < width_; ++c) dk_[j * width_ + c] -= mean_key_[c];
      }
    }
    for (int64_t j = 0; j < s_.k_len; ++j) {
      const int64_t token = s_.k_begin + j;
      Element* dk = const_cast<Element*>(RowOf<Element>(b_.dk, s_.batch, kv_head, token));
      Element* dv = const_cast<Element*>(RowOf<Element>(b_.dv, s_.batch, kv_head, token));
      for (int64_t c = 0; c < p_.head_dim; ++c) {
        Assign(dk[c], static_cast<double>(p_.scale) * dk_[j * width_ + c]);
        Assign(dv[c], dv_[j * width_ + c]);
      }
    }
  }

  void AddStats(const Row& row) {
    if (row.allowed.first >= row.allowed.end) return;
    const double error = row.delta - row.exact;
    stats_[kProbeDeltaBiasSum - kProbeDeltaBiasSum] += error;
    stats_[kProbeDeltaBiasSumsq - kProbeDeltaBiasSum] += error * error;
    stats_[kProbeDeltaAbsSum - kProbeDeltaBiasSum] += std::fabs(row.exact);
    stats_[kProbeDeltaErrorAbsSum - kProbeDeltaBiasSum] += std::fabs(error);
  }

  const AttentionBackwardParams& b_;
  const AttentionForwardParams& p_;
  const SimdKernels& simd_;
  const RowPacker<Element> packer_;
  const int64_t width_;
  const StatsRows counted_rows_;
  AttentionSequence s_{};
  int64_t index_ = 0, head_ = 0;
  double* stats_ = nullptr;
  double *key_rows_, *keys_, *values_, *dk_, *dv_;
  double *queries_, *turned_queries_, *d_o_, *turned_d_o_, *dq_;
  double* scores_;     // [kRows][kKeys]: S, then the rounded P
  double* dp_;         // [kRows][kKeys]: dP, then the rounded dS
  double* turned_ds_;  // [kKeys][kRows]
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

}  // namespace

Status AttentionBackward(const AttentionBackwardParams& b, uint32_t threads) {
  const AttentionForwardParams& p = b.forward;
  if (p.batch == 0) return Status::kOk;
  BELLWETHER_KERNELS_RETURN_IF_ERROR(CheckAttentionSequences(p));
  const int64_t group = p.heads / p.kv_heads;
  const int64_t units = SequenceCount(p) * p.kv_heads;
  const int64_t keys_max = RoundUp(LongestKeys(p));
  const double operations = 5.0 * static_cast<double>(p.batch * p.heads * p.q_len) * static_cast<double>(keys_max) *
                            static_cast<double>(p.head_dim);
  const uint32_t workers = UsefulThreads(threads, units, operations);
  const int64_t each = BackwardUnit<float>::ScratchSize(p.head_dim, keys_max);
  const Buffer scratch(each * static_cast<int64_t>(workers));
  const Buffer stats(units * group * kDeltaStats);
  if (scratch.data() == nullptr || stats.data() == nullptr) {
    return Fail(Status::kDeviceError, "out of memory for the packed keys of %u threads", workers);
  }
  std::fill(stats.data(), stats.data() + units * group * kDeltaStats, 0.0);
  std::atomic<int64_t> next{0};
  WithElement(p.dtype, [&]<typename Element>(const Element*) {
    ParallelFor(workers, workers, [&](int64_t worker) {
      BackwardUnit<Element> backward(b, keys_max, scratch.data() + worker * each);
      for (int64_t unit; (unit = next.fetch_add(1, std::memory_order_relaxed)) < units;) {
        backward.Run(SequenceAt(p, unit / p.kv_heads), unit / p.kv_heads, unit % p.kv_heads,
                     stats.data() + unit * group * kDeltaStats);
      }
    });
  });
  if (p.stats != nullptr) StoreStats(p, stats.data());
  return Status::kOk;
}

}  // namespace bellwether::kernels::cpu
