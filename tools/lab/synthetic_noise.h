// synthetic_noise.h: the random numbers of a synthetic run, by its kind.
//
// Not thread-safe.

#ifndef BELLWETHER_TOOLS_LAB_SYNTHETIC_NOISE_H_
#define BELLWETHER_TOOLS_LAB_SYNTHETIC_NOISE_H_

#include <cmath>
#include <cstdint>
#include <random>

#include "tools/lab/synthetic_run.h"

namespace bellwether::server {

class SyntheticNoise {
 public:
  SyntheticNoise(SyntheticKind kind, uint64_t seed) : kind_(kind), random_(seed) {}

  SyntheticKind kind() const { return kind_; }
  double Normal() { return normal_(random_); }
  double Uniform() { return uniform_(random_); }
  bool Misses(double share) { return kind_ == SyntheticKind::kMissing && Uniform() < share; }

  // Of variance 1.  `kept`: the correlation of `slow`, the part that is kept, with that of the last value;
  // `slow_share`: its share of the variance in a run as recorded; `heavy`: degrees of Student's t of
  // heavy tails.
  double Of(SyntheticKind kind, double kept, double slow_share, int heavy, double* slow) {
    const auto correlated = [&] {
      *slow = kept * *slow + std::sqrt(1 - kept * kept) * Normal();
      return *slow;
    };
    switch (kind) {
      case SyntheticKind::kAr90:
      case SyntheticKind::kAr98:
        return correlated();
      case SyntheticKind::kHeavyTails:
        return StudentT(heavy);
      default:
        if (slow_share == 0) return Normal();
        return std::sqrt(slow_share) * correlated() + std::sqrt(1 - slow_share) * Normal();
    }
  }

  // Student's t, of variance 1; 3 degrees or more.
  double StudentT(int degrees) {
    double squares = 0;
    for (int i = 0; i < degrees; ++i) {
      const double x = Normal();
      squares += x * x;
    }
    return Normal() / std::sqrt(squares / (degrees - 2));
  }

 private:
  const SyntheticKind kind_;
  std::mt19937_64 random_;
  std::normal_distribution<double> normal_;
  std::uniform_real_distribution<double> uniform_;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_TOOLS_LAB_SYNTHETIC_NOISE_H_
