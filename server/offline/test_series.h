// test_series.h: made-up series for tests of rules.
//
// Values are written as promtool writes them, with one operator more:
//
//   1.5        one value          1.5x3      it and 3 more
//   1+0.5x3    1 1.5 2 2.5        1-0.5x3    1 0.5 0 -0.5
//   1*2x3      1 2 4 8            _ or _x3   not measured, once or 3 times
//   NaN +Inf -Inf
//
// or as a formula of the step.  Noise is normal, of a generator that is the
// same on every machine.
//
// Not thread-safe.

#ifndef BELLWETHER_SERVER_OFFLINE_TEST_SERIES_H_
#define BELLWETHER_SERVER_OFFLINE_TEST_SERIES_H_

#include <cstdint>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace bellwether::server {

inline constexpr size_t kTestValuesMax = 1'000'000;

// NotMeasured() where the notation says so.  INVALID_ARGUMENT: names the word
// that is none.
absl::StatusOr<std::vector<float>> ExpandValues(std::string_view notation);

// value(step), with the parameters that the kind has.
struct TestFormula {
  enum class Kind : uint8_t { kConstant, kRamp, kExponential };
  Kind kind = Kind::kConstant;
  double from = 0;
  double to = 0;              // Of a ramp, at `end`.
  int64_t begin = 0;          // `from` until then.
  int64_t end = 0;            // Of a ramp; it stays there.
  double doubling_steps = 1;  // Of an exponential; below 0: it halves.

  double At(int64_t step) const;
};

class TestNoise {
 public:
  TestNoise(double deviation, uint64_t seed, bool by_factors)
      : deviation_(deviation), by_factors_(by_factors), random_(seed) {}

  // `value` with the next piece of noise on it.
  double On(double value);

 private:
  double deviation_;
  bool by_factors_;  // exp(noise) times, instead of plus.
  std::mt19937_64 random_;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_OFFLINE_TEST_SERIES_H_
