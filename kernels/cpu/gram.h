// gram.h: Gram matrices of weight rows, in double.

#ifndef BELLWETHER_KERNELS_CPU_GRAM_H_
#define BELLWETHER_KERNELS_CPU_GRAM_H_

#include <algorithm>
#include <cstdint>

#include "cpu/simd.h"

namespace bellwether::kernels::cpu {

inline constexpr int64_t kGramColumns = 64;  // At a time: 512 rows are 256 KiB.

inline int64_t PaddedRows(int64_t rows) { return (rows + kPanel - 1) / kPanel * kPanel; }

// gram [padded][padded] = W W^T, padded = PaddedRows(rows), zero beyond `rows`.
// chunk [kGramColumns][padded] is scratch.  load(i, j, count, out) writes
// elements (i, j..j+count-1) to out[0], out[padded], out[2 padded], ...
template <typename Load>
void ComputeGram(int64_t rows, int64_t columns, double* chunk, double* gram, const Load& load) {
  const int64_t padded = PaddedRows(rows);
  const SimdKernels& simd = SelectSimdKernels();
  std::fill(gram, gram + padded * padded, 0.0);
  std::fill(chunk, chunk + kGramColumns * padded, 0.0);
  for (int64_t j = 0; j < columns; j += kGramColumns) {
    const int64_t count = std::min(kGramColumns, columns - j);
    for (int64_t i = 0; i < rows; ++i) load(i, j, count, chunk + i);
    for (int64_t i = 0; i < padded; i += simd.tile_rows) {
      for (int64_t panel = i / kPanel * kPanel; panel < padded; panel += kPanel) {
        simd.accumulate_tile(chunk + i, padded, chunk + panel, padded, count, gram + i * padded + panel, padded);
      }
    }
  }
  for (int64_t i = 0; i < padded; ++i) {
    for (int64_t j = 0; j < i; ++j) gram[i * padded + j] = gram[j * padded + i];
  }
}

}  // namespace bellwether::kernels::cpu

#endif  // BELLWETHER_KERNELS_CPU_GRAM_H_
