// probe_mask.h: what a mask's tensor adds to scores.  Shared by the reference and the fast
// path.

#ifndef BELLWETHER_KERNELS_CPU_PROBE_MASK_H_
#define BELLWETHER_KERNELS_CPU_PROBE_MASK_H_

#include <cstdint>
#include <limits>

#include "bellwether/kernels/probe.h"
#include "cpu/element.h"
#include "probe_sampling.h"

namespace bellwether::kernels::cpu {

// What is added to the score of a hidden key.
inline constexpr double kHiddenBias = -std::numeric_limits<double>::infinity();

inline double BiasOf(float value) { return value <= kHiddenFrom ? kHiddenBias : static_cast<double>(value); }
inline double BiasOf(Float16 value) { return BiasOf(ToFloat(value)); }
inline double BiasOf(BFloat16 value) {
  return ToFloat(value) <= kHiddenFromBf16 ? kHiddenBias : static_cast<double>(ToFloat(value));
}
inline double BiasOf(uint8_t allowed) { return allowed != 0 ? 0.0 : kHiddenBias; }

template <typename Element>
void ReadMaskRow(const ProbeMask& mask, int64_t at, KeyRange keys, double* bias) {
  const Element* const row = static_cast<const Element*>(mask.data) + at;
  for (int64_t j = keys.begin; j < keys.end; ++j) bias[j - keys.begin] = BiasOf(row[j * mask.key_stride]);
}

// bias[j - keys.begin] = what is added to the score of key j, kHiddenBias if it is hidden.
// row: of the mask.
inline void ReadMask(const ProbeMask& mask, int64_t batch, int64_t head, int64_t row, KeyRange keys, double* bias) {
  const int64_t at = batch * mask.batch_stride + head * mask.head_stride + row * mask.row_stride;
  switch (mask.dtype) {
    case MaskDType::kFloat32:
      return ReadMaskRow<float>(mask, at, keys, bias);
    case MaskDType::kBFloat16:
      return ReadMaskRow<BFloat16>(mask, at, keys, bias);
    case MaskDType::kFloat16:
      return ReadMaskRow<Float16>(mask, at, keys, bias);
    case MaskDType::kBool:
      break;
  }
  ReadMaskRow<uint8_t>(mask, at, keys, bias);
}

}  // namespace bellwether::kernels::cpu

#endif  // BELLWETHER_KERNELS_CPU_PROBE_MASK_H_
