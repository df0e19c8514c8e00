// signal_mix.h: the four kinds of series that the storage bar is about, with
// full float32 mantissas: a norm (random walk of 2e-4), a signed sum (noise), a
// mean (AR(1)) and a tie count (mostly 0).

#ifndef BELLWETHER_TESTS_SUPPORT_SIGNAL_MIX_H_
#define BELLWETHER_TESTS_SUPPORT_SIGNAL_MIX_H_

#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

namespace bellwether::testing_support {

// Four series, [steps][heads] each.
inline std::vector<std::vector<float>> SignalMix(uint32_t seed, size_t steps, size_t heads) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  std::vector<std::vector<float>> mix(4, std::vector<float>(steps * heads));
  for (size_t h = 0; h < heads; ++h) {
    double log_norm = std::log(3 + normal(random) * 0.3);
    double mean = 0;
    const double level = 6 + normal(random);
    for (size_t t = 0; t < steps; ++t) {
      const size_t i = t * heads + h;
      log_norm += 2e-4 * normal(random);
      mean = 0.95 * mean + 0.05 * normal(random);
      mix[0][i] = static_cast<float>(std::exp(log_norm));
      mix[1][i] = static_cast<float>(1e-3 * normal(random));
      mix[2][i] = static_cast<float>(level + mean);
      mix[3][i] = random() % 20 == 0 ? static_cast<float>(random() % 5) : 0;
    }
  }
  return mix;
}

}  // namespace bellwether::testing_support

#endif  // BELLWETHER_TESTS_SUPPORT_SIGNAL_MIX_H_
