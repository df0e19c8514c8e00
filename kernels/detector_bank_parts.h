// detector_bank_parts.h: the tests' arithmetic, once for the CPU and the GPU.  Private to
// kernels/; compiled as trend_parts.h says.

#ifndef BELLWETHER_KERNELS_DETECTOR_BANK_PARTS_H_
#define BELLWETHER_KERNELS_DETECTOR_BANK_PARTS_H_

#include <cstdint>

#include "bellwether/kernels/detector_bank.h"

namespace bellwether::kernels {

constexpr int32_t RowOf(int32_t window, int32_t rows, int32_t next, int32_t age) {
  return (next + window - rows + age) % window;
}

// A window as the tests read it, on either device.
struct WindowView {
  const float* ring;
  const float* ring_median;
  const float* ring_step;
  int64_t heads;
  int32_t window, rows, next;

  constexpr float Value(int64_t head, int32_t age, bool relative) const {
    const int32_t row = RowOf(window, rows, next, age);
    return ring[row * heads + head] / (relative ? ring_median[row] : 1.0f);
  }
  constexpr float Step(int32_t age) const { return ring_step[RowOf(window, rows, next, age)]; }
};

constexpr bool IsFinite(float value) { return value >= -3.402823466e38f && value <= 3.402823466e38f; }

constexpr float RiseIn(const WindowView& view, int64_t head, int32_t newest, bool relative) {
  constexpr int kEnds = 3;
  const int32_t begin = view.rows - newest;
  float sums[2] = {0, 0};
  int32_t stopped[2] = {0, 0};
  for (int end = 0; end < 2; ++end) {
    const int32_t direction = end == 0 ? 1 : -1;
    int32_t age = end == 0 ? begin : view.rows - 1;
    int found = 0;
    for (; found < kEnds && age >= begin && age < view.rows; age += direction) {
      const float value = view.Value(head, age, relative);
      if (!IsFinite(value)) continue;
      sums[end] += value;
      ++found;
    }
    stopped[end] = age;
    if (found < kEnds) return 1.0f;
  }
  const float oldest = sums[0];
  const float latest = sums[1];
  return stopped[1] + 1 >= stopped[0] && oldest > 0 && IsFinite(latest) ? latest / oldest : 1.0f;
}

constexpr double ThresholdOf(const BankTest& test, float median) {
  return ThresholdOf(test.absolute, test.factor, test.floor, static_cast<double>(median));
}

constexpr bool PassesTrend(const BankTest& test, const BankWindow& window, double z, double r2, double doubling_steps) {
  return z >= test.z_min && r2 >= test.r2_min && doubling_steps <= window.doubling_steps_max;
}

}  // namespace bellwether::kernels

#endif  // BELLWETHER_KERNELS_DETECTOR_BANK_PARTS_H_
