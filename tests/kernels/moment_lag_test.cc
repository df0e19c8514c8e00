// Goal: the lag of some elements equals plain loops, as a maximum over calls, and a step that is not
// taken changes nothing.
// Method: made-up gradients and moments; the C interface with one bad argument at a time.

#include "bellwether/kernels/moment_lag.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "bellwether/kernels/c_api.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace bellwether::kernels {
namespace {

constexpr size_t kLagElements = 5003;

struct LagOfTest {
  std::vector<float> g = std::vector<float>(kLagElements), v = std::vector<float>(kLagElements);

  explicit LagOfTest(unsigned seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal(0, 1e-3f);
    for (float& x : g) x = normal(random);
    for (float& x : v) x = normal(random) * normal(random);
    for (float& x : v) x = std::fabs(x);
  }

  MomentLagPart Part(int64_t begin, int64_t stride) const {
    MomentLagPart part;
    part.grad = g.data() + begin;
    part.second = v.data() + begin;
    part.stride = stride;
    part.count = (static_cast<int64_t>(kLagElements) - begin + stride - 1) / stride;
    part.beta2 = 0.99;
    part.eps = 1e-6;
    part.steps = 4;
    return part;
  }

  double ByLoops(size_t begin, size_t stride, double scale) const {
    double sum = 0, count = 0;
    for (size_t i = begin; i < kLagElements; i += stride, count += 1) {
      const double square = std::pow(static_cast<double>(g[i]) / scale, 2);
      if (!std::isfinite(g[i])) continue;
      const double expected = (0.99 * static_cast<double>(v[i]) + 0.01 * square) / (1 - std::pow(0.99, 4));
      sum += square / std::max(expected, 1e-12);
    }
    return sum / count;
  }
};

TEST(MomentLagTest, EqualsPlainLoops) {
  const LagOfTest of(1);
  const float scale = 8;
  for (const int64_t stride : {1, 2, 7, 1001, 5003}) {
    for (const int64_t begin : {int64_t{0}, stride - 1}) {
      const MomentLagPart part = of.Part(begin, stride);
      for (const float* scaled : {static_cast<const float*>(nullptr), &scale}) {
        double out[kMomentLagStatCount] = {};
        ASSERT_EQ(MomentLags({&part, 1, scaled, nullptr, out}, {}), Status::kOk);
        const double wanted =
            of.ByLoops(static_cast<size_t>(begin), static_cast<size_t>(stride), scaled == nullptr ? 1 : 8);
        EXPECT_NEAR(out[kMomentLagMax], wanted, 1e-12 * wanted);
        EXPECT_EQ(out[kMomentLagSaturated], 0);
      }
    }
  }
}

TEST(MomentLagTest, KeepsTheLargestOfSeveralSteps) {
  LagOfTest of(2);
  double out[kMomentLagStatCount] = {};
  double largest = 0;
  for (const float times : {1.0f, 5.0f, 0.5f}) {
    for (float& x : of.g) x *= times;
    const MomentLagPart part = of.Part(0, 3);
    ASSERT_EQ(MomentLags({&part, 1, nullptr, nullptr, out}, {}), Status::kOk);
    largest = std::max(largest, of.ByLoops(0, 3, 1));
    EXPECT_NEAR(out[kMomentLagMax], largest, 1e-12 * largest);
  }
}

TEST(MomentLagTest, SaturatedElementsAreCounted) {
  LagOfTest of(3);
  of.g[0] = INFINITY;
  of.g[1] = std::nanf("");
  of.g[2] = -std::numeric_limits<float>::max() / 2;
  of.g[3] = -std::numeric_limits<float>::max();
  const MomentLagPart part = of.Part(0, 1);
  double out[kMomentLagStatCount] = {};
  for (int step = 1; step <= 2; ++step) {
    ASSERT_EQ(MomentLags({&part, 1, nullptr, nullptr, out}, {}), Status::kOk);
    EXPECT_EQ(out[kMomentLagSaturated], 3 * step);
  }
  EXPECT_TRUE(std::isfinite(out[kMomentLagMax]));
}

TEST(MomentLagTest, AStepThatIsNotTakenChangesNothing) {
  const LagOfTest of(4);
  const MomentLagPart part = of.Part(0, 1);
  double out[kMomentLagStatCount] = {0.25, 7};
  const float skip = 1;
  ASSERT_EQ(MomentLags({&part, 1, nullptr, &skip, out}, {}), Status::kOk);
  EXPECT_THAT(out, ::testing::ElementsAre(0.25, 7));
}

TEST(MomentLagTest, APartWithoutAGradientIsLeftOut) {
  const LagOfTest of(5);
  const MomentLagPart parts[] = {{}, of.Part(0, 1)};
  double out[2 * kMomentLagStatCount] = {0.5, 1, 0, 0};
  ASSERT_EQ(MomentLags({parts, 2, nullptr, nullptr, out}, {}), Status::kOk);
  EXPECT_EQ(out[kMomentLagMax], 0.5);
  EXPECT_EQ(out[kMomentLagSaturated], 1);
  EXPECT_GT(out[kMomentLagStatCount + kMomentLagMax], 0);
}

TEST(MomentLagTest, TheStepMayLieInMemory) {
  const LagOfTest of(6);
  MomentLagPart parts[] = {of.Part(0, 1), of.Part(0, 1)};
  const float three = 3;
  parts[1].steps = 1;
  parts[1].steps_at = &three;
  double out[2 * kMomentLagStatCount] = {};
  ASSERT_EQ(MomentLags({parts, 2, nullptr, nullptr, out}, {}), Status::kOk);
  EXPECT_EQ(out[0], out[kMomentLagStatCount]);
}

TEST(MomentLagTest, TheCInterfaceNamesTheBadArgument) {
  const std::vector<float> data = {1, 2, 3, 4};
  const auto call = [&](const auto& change) {
    std::vector<double> out(BW_MOMENT_LAG_STAT_COUNT);
    bw_moment_lag_part part{};
    part.grad = part.second = data.data();
    part.count = 4;
    part.stride = 1;
    part.steps = 1;
    bw_moment_lags_params p{};
    p.struct_size = sizeof(p);
    p.count = 1;
    p.parts = &part;
    p.out = out.data();
    change(p, part);
    const bw_kernel_status status = bw_moment_lags(&p);
    EXPECT_EQ(out[BW_MOMENT_LAG_MAX] > 0, status == BW_KERNEL_OK);
    return status == BW_KERNEL_OK ? std::string("fine") : std::string(bw_kernels_last_error());
  };
  using ::testing::HasSubstr;
  EXPECT_EQ(call([](auto&, auto&) {}), "fine");
  EXPECT_THAT(call([](auto& p, auto&) { p.count = 17; }), HasSubstr("count is 17, but must be 0..16"));
  EXPECT_THAT(call([](auto& p, auto&) { p.parts = nullptr; }), HasSubstr("parts is NULL"));
  EXPECT_THAT(call([](auto& p, auto&) { p.out = nullptr; }), HasSubstr("out is NULL"));
  EXPECT_THAT(call([](auto& p, auto&) { p.backend = 2; }), HasSubstr("backend is 2, but must be 0..1"));
  EXPECT_THAT(call([](auto&, auto& part) { part.second = nullptr; }), HasSubstr("second is NULL"));
  EXPECT_THAT(call([](auto&, auto& part) { part.count = 0; }), HasSubstr("count is 0, but must be 1.."));
  EXPECT_THAT(call([](auto&, auto& part) { part.stride = 0; }), HasSubstr("stride is 0, but must be 1.."));
  EXPECT_THAT(call([](auto&, auto& part) { part.grad_dtype = 3; }), HasSubstr("dtype is 3, but must be 0..2"));
  EXPECT_THAT(call([](auto&, auto& part) { part.beta2 = 1; }), HasSubstr("beta2 is 1, but must be"));
  EXPECT_THAT(call([](auto&, auto& part) { part.eps = -1; }), HasSubstr("eps is -1, but must be"));
  EXPECT_THAT(call([](auto&, auto& part) { part.steps = 0; }), HasSubstr("steps is 0, but must be"));
}

}  // namespace
}  // namespace bellwether::kernels
