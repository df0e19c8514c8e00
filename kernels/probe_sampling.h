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

constexpr KeyRange AllowedKeys(const ProbeParams& p, int64_t row) {
  const int64_t diagonal = row + p.k_len - p.q_len;
  const int64_t end = p.causal ? Clamp(diagonal + 1, 0, p.k_len) : p.k_len;
  const int64_t first = p.window > 0 ? diagonal - p.window + 1 : 0;
  return {Clamp(first, 0, end), end};
}

}  // namespace bellwether::kernels

#endif  // BELLWETHER_KERNELS_PROBE_SAMPLING_H_
