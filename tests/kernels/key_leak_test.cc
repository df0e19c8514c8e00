// Goal: the leak is the norm of the summed gradient per sequence, not of the
// sum over sequences, and a bad head spoils only itself.
// Method: gradients small enough to sum by hand, and random ones against plain
// loops, in padded and transposed memory.

#include "bellwether/kernels/key_leak.h"

#include <cmath>
#include <random>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/kernels/naive_probe.h"

namespace bellwether::kernels {
namespace {

using testing::Operand;

struct Leaks {
  std::vector<float> leak, gradient;
};

Leaks Measure(const Operand& d_k, uint32_t threads = 0, float start = 0) {
  const auto heads = static_cast<size_t>(d_k.heads);
  Leaks result{std::vector<float>(heads, start), std::vector<float>(heads, start)};
  const KeyLeakParams p{.dtype = d_k.dtype,
                        .batch = d_k.batch,
                        .kv_heads = d_k.heads,
                        .k_len = d_k.tokens,
                        .head_dim = d_k.channels,
                        .d_k = d_k.View(),
                        .leak_sum = result.leak.data(),
                        .gradient_sum = result.gradient.data()};
  EXPECT_EQ(KeyLeak(p, {.threads = threads}), Status::kOk) << LastErrorMessage();
  return result;
}

TEST(KeyLeakTest, OppositeLeaksOfTwoSequencesDoNotCancel) {
  Operand d_k(DType::kFloat32, 2, 1, 2, 2);
  // Sequence 0 sums to (3, 4), sequence 1 to (-3, -4).
  d_k.Fill([](int64_t b, int64_t, int64_t t, int64_t c) {
    const double sign = b == 0 ? 1 : -1;
    return sign * (t == 0 ? 1.0 : c == 0 ? 2.0 : 3.0);
  });
  const Leaks leaks = Measure(d_k, 0, 1);
  EXPECT_FLOAT_EQ(leaks.leak[0], 1 + 10);
  EXPECT_FLOAT_EQ(leaks.gradient[0], static_cast<float>(1 + 2 * (std::sqrt(2.0) + std::sqrt(13.0))));
}

TEST(KeyLeakTest, ABalancedGradientLeaksExactlyNothing) {
  Operand d_k(DType::kBFloat16, 1, 1, 64, 16);
  d_k.Fill([](int64_t, int64_t, int64_t t, int64_t c) {
    return (t % 2 == 0 ? 1 : -1) * (0.1 + static_cast<double>(t / 2 + c));
  });
  EXPECT_EQ(Measure(d_k).leak[0], 0);
  EXPECT_GE(Measure(d_k).gradient[0], 64);
}

TEST(KeyLeakTest, EqualsPlainLoopsForEveryTypeLayoutAndThreadCount) {
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (int64_t tokens : {1, 300, 301}) {
      Operand d_k(dtype, 3, 4, tokens, 37);
      std::mt19937 rng(3);
      d_k.FillNormal(rng, 0.01);
      const Leaks leaks = Measure(d_k);
      for (int64_t h = 0; h < 4; ++h) {
        double leak = 0, gradient = 0;
        for (int64_t b = 0; b < 3; ++b) {
          std::vector<double> sum(37);
          for (int64_t t = 0; t < tokens; ++t) {
            double squares = 0;
            for (int64_t c = 0; c < 37; ++c) {
              sum[static_cast<size_t>(c)] += d_k.Get(b, h, t, c);
              squares += d_k.Get(b, h, t, c) * d_k.Get(b, h, t, c);
            }
            gradient += std::sqrt(squares);
          }
          double squares = 0;
          for (double x : sum) squares += x * x;
          leak += std::sqrt(squares);
        }
        EXPECT_FLOAT_EQ(leaks.leak[static_cast<size_t>(h)], static_cast<float>(leak));
        EXPECT_FLOAT_EQ(leaks.gradient[static_cast<size_t>(h)], static_cast<float>(gradient));
      }
      EXPECT_EQ(Measure(d_k, 8).leak, leaks.leak);
      EXPECT_EQ(Measure(d_k, 8).gradient, leaks.gradient);
    }
  }
}

TEST(KeyLeakTest, NanStaysInItsHead) {
  Operand d_k(DType::kFloat16, 2, 3, 5, 8);
  d_k.Fill([](int64_t, int64_t, int64_t, int64_t) { return 1.0; });
  d_k.Set(1, 1, 4, 7, NAN);
  const Leaks leaks = Measure(d_k);
  EXPECT_TRUE(std::isnan(leaks.leak[1]));
  EXPECT_TRUE(std::isnan(leaks.gradient[1]));
  for (size_t h : {size_t{0}, size_t{2}}) {
    EXPECT_FLOAT_EQ(leaks.leak[h], static_cast<float>(2 * 5 * std::sqrt(8.0)));
  }
}

}  // namespace
}  // namespace bellwether::kernels
