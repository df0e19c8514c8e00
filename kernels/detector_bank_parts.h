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

// The sum of the first three finite values of a series, going from `age` in steps of 1 or
// -1 and no further than `last`.
struct EndSum {
  float sum = 0;
  int32_t found = 0;
  int32_t next_age = 0;
};

constexpr int32_t kEndValues = 3;

constexpr EndSum SumOfEnd(const WindowView& view, int64_t head, int32_t age, int32_t last, int32_t direction,
                          bool relative) {
  EndSum end;
  const int32_t most = (last - age) * direction + 1;
  for (int32_t i = 0; i < most && end.found < kEndValues; ++i, age += direction) {
    const float value = view.Value(head, age, relative);
    if (IsFinite(value)) {
      end.sum += value;
      ++end.found;
    }
  }
  end.next_age = age;
  return end;
}

constexpr float RiseIn(const WindowView& view, int64_t head, int32_t newest, bool relative) {
  const int32_t first = view.rows - newest;
  const EndSum oldest = SumOfEnd(view, head, first, view.rows - 1, 1, relative);
  const EndSum latest = SumOfEnd(view, head, view.rows - 1, first, -1, relative);
  const bool apart = oldest.found == kEndValues && latest.found == kEndValues && latest.next_age + 1 >= oldest.next_age;
  return apart && oldest.sum > 0 && IsFinite(latest.sum) ? latest.sum / oldest.sum : 1.0f;
}

constexpr double ThresholdOf(const BankTest& test, float median) {
  return ThresholdOf(test.absolute, test.factor, test.floor, static_cast<double>(median));
}

constexpr bool PassesTrend(const BankTest& test, const BankWindow& window, double z, double r2, double doubling_steps) {
  return z >= test.z_min && r2 >= test.r2_min && doubling_steps <= window.doubling_steps_max;
}

}  // namespace bellwether::kernels

#endif  // BELLWETHER_KERNELS_DETECTOR_BANK_PARTS_H_
