// probe_sampling.h: which rows the probe looks at, and which keys they may see.  One
// definition for the CPU and the GPU, which sample the same rows.  Private to kernels/.

#ifndef BELLWETHER_KERNELS_PROBE_SAMPLING_H_
#define BELLWETHER_KERNELS_PROBE_SAMPLING_H_

#include <cstdint>

#include "bellwether/kernels/probe.h"

namespace bellwether::kernels {

constexpr int64_t SampledRows(const ProbeParams& p) {
  const bool every = p.rows_per_head == 0 || p.rows_per_head >= p.q_len;
  return every ? p.q_len : p.rows_per_head;
}

// Row number `index` of the sampled rows; they ascend.  seed: p.seed and what its gate adds.
constexpr int64_t RowAt(const ProbeParams& p, uint64_t seed, int64_t batch, int64_t head, int64_t index) {
  const int64_t rows = SampledRows(p);
  if (rows == p.q_len) return index;
  return SampledRow(seed, static_cast<uint64_t>(batch), static_cast<uint64_t>(p.head_offset + head),
                    static_cast<uint64_t>(index), static_cast<uint64_t>(rows), static_cast<uint64_t>(p.q_len));
}

// Allowed keys are begin..end-1.
struct KeyRange {
  int64_t begin;
  int64_t end;
};

constexpr int64_t Clamp(int64_t x, int64_t low, int64_t high) { return x < low ? low : x > high ? high : x; }

// What ranges, causality and windows leave of the keys.
constexpr KeyRange AllowedKeys(const ProbeParams& p, int64_t batch, int64_t row) {
  KeyRange keys = {0, p.k_len};
  int64_t diagonal = p.top_left ? row : row + p.k_len - p.q_len;
  if (p.ranges.data != nullptr) {
    const int32_t* const given = p.ranges.data + batch * p.ranges.batch_stride + row * p.ranges.row_stride;
    keys = {given[0], given[1]};
    diagonal = given[2];
  }
  if (p.causal && diagonal + 1 < keys.end) keys.end = diagonal + 1;
  if (p.window_right > 0 && diagonal + p.window_right < keys.end) keys.end = diagonal + p.window_right;
  if (p.window > 0 && diagonal - p.window + 1 > keys.begin) keys.begin = diagonal - p.window + 1;
  keys.end = Clamp(keys.end, 0, p.k_len);
  keys.begin = Clamp(keys.begin, 0, keys.end);
  return keys;
}

// V without `visible`: what neighbouring rows may see overlaps or adjoins.
constexpr KeyRange VisibleKeys(const ProbeParams& p) {
  const KeyRange first = AllowedKeys(p, 0, 0), last = AllowedKeys(p, 0, p.q_len - 1);
  return {first.begin, last.end};
}

// Whether V is not simply all keys.
constexpr bool HasNarrowV(const ProbeParams& p) {
  if (p.visible.data != nullptr) return true;
  const KeyRange keys = VisibleKeys(p);
  return keys.begin > 0 || keys.end < p.k_len;
}

// Whether a key is in V of a query head.  plain: VisibleKeys().
constexpr bool IsVisible(const ProbeParams& p, KeyRange plain, int64_t batch, int64_t head, int64_t key) {
  const ProbeVisible& v = p.visible;
  if (v.data == nullptr) return key >= plain.begin && key < plain.end;
  return v.data[batch * v.batch_stride + head * v.head_stride + key * v.key_stride] != 0;
}

// Whether it is in V of any query head of a key head.
constexpr bool IsVisibleToGroup(const ProbeParams& p, KeyRange plain, int64_t batch, int64_t kv_head, int64_t key) {
  const int64_t group = p.heads / p.kv_heads;
  const int64_t different = p.visible.data != nullptr && p.visible.head_stride != 0 ? group : 1;
  for (int64_t h = kv_head * group; h < kv_head * group + different; ++h) {
    if (IsVisible(p, plain, batch, h, key)) return true;
  }
  return false;
}

}  // namespace bellwether::kernels

#endif  // BELLWETHER_KERNELS_PROBE_SAMPLING_H_
