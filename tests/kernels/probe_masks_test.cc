// Goal: the probe honours every part of a mask, alone and with the others: the diagonal at
// either end, windows on both sides, row ranges, tensors of every type and broadcast, by
// token and by sampled row, sinks and softcap.
// Method: calls that a seed makes up, held to naive_probe.h.  Keys and values that no row
// sees are NaN.  A failure prints its seed; some seeds are new in each run.

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "bellwether/kernels/probe.h"
#include "gtest/gtest.h"
#include "tests/kernels/probe_expectations.h"

namespace bellwether::kernels {
namespace {

using testing::Case;
using testing::MaskTensor;

class Maker {
 public:
  explicit Maker(uint32_t seed) : rng_(seed) {}

  int64_t Any(int64_t first, int64_t last) { return std::uniform_int_distribution<int64_t>(first, last)(rng_); }
  bool Chance(double p) { return std::bernoulli_distribution(p)(rng_); }
  double Normal(double deviation) { return std::normal_distribution<double>(0, deviation)(rng_); }

  Case Make() {
    const int64_t group = Any(1, 3), kv_heads = Any(1, 2);
    const int64_t q_len = Any(1, Chance(0.1) ? 300 : 40);
    const int64_t k_len = Chance(0.5) ? q_len : Any(1, 60);
    Case a(static_cast<DType>(Any(0, 2)), Any(1, 3), group * kv_heads, kv_heads, q_len, k_len, Any(1, 12), Any(1, 12));
    a.q.FillNormal(rng_, 0.3);
    a.k.FillNormal(rng_, 0.5);
    a.v.FillNormal(rng_, 1);
    a.d_o.FillNormal(rng_);
    a.p.seed = static_cast<uint64_t>(Any(0, 1 << 30));
    a.p.head_offset = Any(0, 5);
    if (Chance(0.5)) a.p.rows_per_head = static_cast<uint32_t>(Any(1, q_len));
    if (Chance(0.25)) a.p.softcap = 3;
    a.p.causal = Chance(0.5);
    a.p.top_left = Chance(0.5);
    if (Chance(0.3)) a.p.window = static_cast<int32_t>(Any(1, k_len + 3));
    if (Chance(0.3)) a.p.window_right = static_cast<int32_t>(Any(1, k_len + 3));
    if (Chance(0.4)) GiveRanges(a);
    if (Chance(0.6)) GiveMask(a);
    if (Chance(0.3)) GiveSinks(a);
    if (a.p.ranges.data != nullptr || a.p.mask.data != nullptr || Chance(0.1)) {
      const bool alike = a.p.mask.data == nullptr || (a.mask->heads == 1 && !a.p.mask.by_sample);
      a.SetVisible(!alike || Chance(0.3));
    }
    Poison(a);
    a.ComputeOutput();
    return a;
  }

 private:
  // Documents, padding, or anything.
  void GiveRanges(Case& a) {
    const int64_t batches = Chance(0.5) ? a.p.batch : 1, kind = Any(0, 2);
    const int64_t rows = kind == 1 && !a.p.causal && Chance(0.5) ? 1 : a.p.q_len;
    std::vector<int32_t> values;
    for (int64_t b = 0; b < batches; ++b) {
      const int64_t length = Any(1, 20), padding = Any(0, a.p.k_len);
      for (int64_t t = 0; t < rows; ++t) {
        int64_t begin = t / length * length, end = begin + length, diagonal = t;
        if (kind == 1) {
          begin = padding;
          end = a.p.k_len;
          diagonal = t + a.p.k_len - a.p.q_len;
        } else if (kind == 2) {
          begin = Any(-3, a.p.k_len + 2);
          end = Any(-3, a.p.k_len + 2);
          diagonal = Any(-1, a.p.k_len);
        }
        for (int64_t x : {begin, end, diagonal}) values.push_back(static_cast<int32_t>(x));
      }
    }
    a.SetRanges(std::move(values), batches, rows);
  }

  double Bias() {
    constexpr double kBiases[] = {-std::numeric_limits<double>::infinity(), -1e30, -10000, -9999, -9984, -9000, 0, 0};
    return Chance(0.5) ? Normal(2) : kBiases[Any(0, 7)];
  }

  void GiveMask(Case& a) {
    const bool by_sample = a.p.rows_per_head > 0 && Chance(0.4);
    const auto extent = [&](int64_t of) { return Chance(0.5) ? of : 1; };
    const int64_t rows = by_sample ? a.p.rows_per_head : a.p.q_len;
    MaskTensor mask(static_cast<MaskDType>(Any(0, 3)), extent(a.p.batch), extent(a.p.heads), extent(rows),
                    Chance(0.8) ? a.p.k_len : 1);
    const double allowed = Chance(0.3) ? 0.1 : 0.7;
    for (int64_t b = 0; b < mask.batch; ++b) {
      for (int64_t j = 0; j < mask.keys; ++j) {
        const bool padding = Chance(0.2);
        for (int64_t h = 0; h < mask.heads; ++h) {
          for (int64_t r = 0; r < mask.rows; ++r) {
            const bool hidden = padding || !Chance(allowed);
            const bool additive = mask.dtype != MaskDType::kBool;
            mask.Set(b, h, r, j, !additive ? !hidden : hidden && Chance(0.8) ? -INFINITY : Bias());
          }
        }
      }
    }
    a.SetMask(std::move(mask), by_sample);
  }

  void GiveSinks(Case& a) {
    std::vector<float> sinks;
    for (int64_t h = 0; h < a.p.heads; ++h) {
      const int64_t kind = Any(0, 9);
      sinks.push_back(kind == 0   ? -INFINITY
                      : kind == 1 ? NAN
                      : kind == 2 ? INFINITY
                      : kind == 3 ? 900.f
                                  : static_cast<float>(Normal(4)));
    }
    a.SetSinks(std::move(sinks));
  }

  // What no row sees must not be looked at.
  static void Poison(Case& a) {
    const int64_t group = a.p.heads / a.p.kv_heads;
    for (int64_t b = 0; b < a.p.batch; ++b) {
      for (int64_t j = 0; j < a.p.k_len; ++j) {
        for (int64_t g = 0; g < a.p.kv_heads; ++g) {
          bool seen = false;
          for (int64_t h = g * group; h < (g + 1) * group; ++h) seen = seen || a.InV(b, h, j);
          if (seen) continue;
          a.k.Set(b, g, j, 0, NAN);
          a.v.Set(b, g, j, 0, NAN);
        }
      }
    }
  }

  std::mt19937 rng_;
};

void CheckSeed(uint32_t seed) {
  SCOPED_TRACE("seed " + std::to_string(seed));
  Case a = Maker(seed).Make();
  Check(a, true);
  Check(a, false);
}

TEST(ProbeMasksTest, AnyMaskEqualsAnIndependentComputation) {
  for (uint32_t seed = 0; seed < 300 && !HasFailure(); ++seed) CheckSeed(seed);
  std::random_device fresh;
  for (int i = 0; i < 30 && !HasFailure(); ++i) CheckSeed(fresh());
}

TEST(ProbeMasksTest, DriftAloneIsThatOfTheWholeProbe) {
  for (uint32_t seed = 0; seed < 100 && !HasFailure(); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Case a = Maker(seed).Make();
    a.Bind(false);
    ASSERT_EQ(Probe(a.p, {}), Status::kOk) << LastErrorMessage();
    const std::vector<float> whole = a.out, keys = a.kv_out;
    a.Bind(false);
    a.p.drift_only = true;
    ASSERT_EQ(Probe(a.p, {}), Status::kOk) << LastErrorMessage();
    EXPECT_EQ(a.kv_out, keys);
    for (int stat : {kProbeRows, kProbeCommonModeSum, kProbeSpreadSum, kProbeNonfiniteRows}) {
      for (int64_t h = 0; h < a.p.heads; ++h) EXPECT_EQ(a.Out(stat, h), whole[a.At(stat, h)]) << stat;
    }
  }
}

// One call, said in several ways.
TEST(ProbeMasksTest, EachWayToSayAMaskGivesTheSameNumbers) {
  const auto run = [](const auto& change) {
    Case a(DType::kFloat32, 2, 2, 1, 70, 70, 8, 8);
    std::mt19937 rng(3);
    a.q.FillNormal(rng);
    a.k.FillNormal(rng, 1);
    change(a);
    a.Bind(false);
    EXPECT_EQ(Probe(a.p, {}), Status::kOk) << LastErrorMessage();
    return std::pair(a.out, a.kv_out);
  };
  const auto plain = run([](Case& a) {
    a.p.causal = true;
    a.p.window = 20;
  });
  const auto by_range = run([](Case& a) {
    std::vector<int32_t> ranges;
    for (int t = 0; t < 70; ++t) ranges.insert(ranges.end(), {t - 19, t + 1, 0});
    a.SetRanges(std::move(ranges), 1, 70);
    a.SetVisible(false);
  });
  const auto by_window = run([](Case& a) {
    a.p.top_left = true;
    a.p.window = 20;
    a.p.window_right = 1;
  });
  const auto by_tensor = run([](Case& a) {
    MaskTensor mask(MaskDType::kBFloat16, 1, 1, 70, 70);
    for (int64_t t = 0; t < 70; ++t) {
      for (int64_t j = 0; j < 70; ++j) mask.Set(0, 0, t, j, j <= t && j > t - 20 ? 0 : -INFINITY);
    }
    a.SetMask(std::move(mask));
    a.SetVisible(false);
  });
  EXPECT_EQ(by_window, plain);
  EXPECT_EQ(by_range, plain);
  EXPECT_EQ(by_tensor, plain);
}

}  // namespace
}  // namespace bellwether::kernels
