// Goal: norms, extremes and counts equal plain loops for every type, size and alignment, the same for
// any number of threads; what is not finite is counted and left out; a changed bit always shows;
// illegal arguments are refused by name, and nothing is written.
// Method: tensors of odd sizes against loops in long double.

#include "bellwether/kernels/tensor_stats.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "bellwether/kernels/c_api.h"
#include "cpu/element.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tensor_stats_parts.h"

namespace bellwether::kernels {
namespace {

// A part with its memory, which may begin one element behind an aligned address.
class PartOfTest {
 public:
  PartOfTest() = default;
  PartOfTest(const std::vector<float>& values, DType dtype, bool misaligned) : dtype_(dtype), misaligned_(misaligned) {
    bytes_.resize((values.size() + 1) * Size());
    for (size_t i = 0; i < values.size(); ++i) Set(i, values[i]);
  }

  void Set(size_t i, float value) {
    unsigned char* const to = bytes_.data() + (i + (misaligned_ ? 1 : 0)) * Size();
    const uint16_t half = dtype_ == DType::kBFloat16 ? cpu::ToBFloat16(value).bits : cpu::ToFloat16(value).bits;
    if (dtype_ == DType::kFloat32) {
      std::memcpy(to, &value, 4);
    } else {
      std::memcpy(to, &half, 2);
    }
  }

  uint32_t BitsAt(size_t i) const {
    uint32_t bits = 0;
    std::memcpy(&bits, bytes_.data() + (i + (misaligned_ ? 1 : 0)) * Size(), Size());
    return bits;
  }

  float At(size_t i) const {
    const uint32_t bits = BitsAt(i);
    if (dtype_ == DType::kBFloat16) return cpu::ToFloat(cpu::BFloat16{static_cast<uint16_t>(bits)});
    if (dtype_ == DType::kFloat16) return cpu::ToFloat(cpu::Float16{static_cast<uint16_t>(bits)});
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
  }

  bool given() const { return !bytes_.empty(); }
  TensorPart part() const { return {given() ? bytes_.data() + (misaligned_ ? Size() : 0) : nullptr, dtype_}; }

 private:
  size_t Size() const { return dtype_ == DType::kFloat32 ? 4 : 2; }

  DType dtype_ = DType::kFloat32;
  bool misaligned_ = false;
  std::vector<unsigned char> bytes_;
};

struct TensorOfTest {
  size_t elements = 0;
  PartOfTest g, w, u, m, v;
  double beta2 = 0.95, eps = 1e-8, steps = 3;

  TensorOfStep step() const {
    return {
        static_cast<int64_t>(elements), g.part(), w.part(), u.part(), m.part(), v.part(), beta2, eps, steps, nullptr};
  }
};

std::vector<float> NormalValues(size_t count, uint32_t seed, double scale) {
  std::mt19937 rng(seed);
  std::normal_distribution<double> normal;
  std::vector<float> values(count);
  for (float& value : values) value = static_cast<float>(scale * normal(rng));
  return values;
}

TensorOfTest MakeTensor(size_t elements, DType dtype, uint32_t seed, bool misaligned = false) {
  std::vector<float> v = NormalValues(elements, seed + 4, 1e-2), u = NormalValues(elements, seed + 1, 0.1), w = u;
  for (float& value : v) value *= value;
  for (size_t i = 0; i < elements; i += 3) w[i] += 0.01f;
  TensorOfTest t;
  t.elements = elements;
  t.g = {NormalValues(elements, seed, 1e-2), dtype, misaligned};
  t.w = {w, dtype, misaligned};
  t.u = {u, dtype, misaligned};
  t.m = {NormalValues(elements, seed + 3, 1e-3), DType::kFloat32, misaligned};
  t.v = {v, DType::kFloat32, misaligned};
  return t;
}

struct WantedStats {
  double of[kTensorStatCount];
  double size[kTensorStatCount];  // Sums of absolute terms.
};

WantedStats StatsByLoops(const TensorOfTest& t, double scale) {
  long double of[kTensorStatCount] = {}, dot_size = 0;
  uint64_t bits = 0;
  of[kTensorElements] = static_cast<double>(t.elements);
  for (size_t i = 0; i < t.elements; ++i) {
    const long double g = t.g.given() ? static_cast<long double>(t.g.At(i)) / scale : 0;
    const bool finite = std::isfinite(g);
    if (t.g.given()) {
      of[kTensorGradNonfinite] += !finite;
      of[kTensorGradZeros] += g == 0;
      if (finite) of[kTensorGradSumsq] += g * g;
      if (finite) of[kTensorGradMax] = std::max(of[kTensorGradMax], std::fabs(g));
    }
    if (t.w.given()) {
      const long double w = t.w.At(i);
      bits += uint64_t{t.w.BitsAt(i)} * (static_cast<uint32_t>(i) * 2654435761u | 1u);
      of[kTensorWeightNonfinite] += !std::isfinite(w);
      if (std::isfinite(w)) of[kTensorWeightSumsq] += w * w;
      if (std::isfinite(w)) of[kTensorWeightMax] = std::max(of[kTensorWeightMax], std::fabs(w));
      if (t.u.given()) {
        const long double u = t.u.At(i);
        of[kTensorChanged] += w != u;
        if (std::isfinite(w) && std::isfinite(u)) of[kTensorChangeSumsq] += (w - u) * (w - u);
      }
    }
    if (t.m.given()) {
      const long double m = t.m.At(i);
      of[kTensorMomentSumsq] += m * m;
      if (t.g.given() && finite) of[kTensorDot] += g * m;
      if (t.g.given() && finite) dot_size += std::fabs(g * m);
    }
    if (t.g.given() && t.v.given() && finite && g != 0) {
      const long double correction = 1 - std::pow(static_cast<long double>(t.beta2), t.steps);
      const long double v = (t.beta2 * t.v.At(i) + (1 - t.beta2) * g * g) / correction;
      of[kTensorLagSum] += g * g / std::max(v, static_cast<long double>(t.eps * t.eps));
    }
  }
  of[kTensorWeightBits] = static_cast<long double>(bits & kBitsMask);
  WantedStats wanted;
  for (int stat = 0; stat < kTensorStatCount; ++stat) {
    wanted.of[stat] = static_cast<double>(of[stat]);
    wanted.size[stat] = static_cast<double>(stat == kTensorDot ? dot_size : of[stat]);
  }
  return wanted;
}

std::vector<double> StatsOf(const std::vector<TensorOfTest>& tensors, const float* scale = nullptr,
                            uint32_t threads = 0) {
  std::vector<TensorOfStep> steps;
  for (const TensorOfTest& t : tensors) steps.push_back(t.step());
  std::vector<double> out(tensors.size() * kTensorStatCount, -1.0);
  const TensorStatsParams p{steps.data(), static_cast<int64_t>(steps.size()), scale, out.data(), nullptr};
  EXPECT_EQ(TensorStats(p, {.threads = threads}), Status::kOk) << bw_kernels_last_error();
  return out;
}

void ExpectStats(const std::vector<TensorOfTest>& tensors, const float* scale = nullptr) {
  const std::vector<double> once = StatsOf(tensors, scale);
  EXPECT_EQ(once, StatsOf(tensors, scale, 8));
  for (size_t i = 0; i < tensors.size(); ++i) {
    const WantedStats wanted = StatsByLoops(tensors[i], scale == nullptr ? 1.0 : static_cast<double>(*scale));
    for (int stat = 0; stat < kTensorStatCount; ++stat) {
      const double bar = stat == kTensorWeightBits ? 0 : 1e-12 * wanted.size[stat];
      EXPECT_NEAR(once[i * kTensorStatCount + static_cast<size_t>(stat)], wanted.of[stat], bar)
          << "tensor " << i << " stat " << stat;
    }
  }
}

TEST(TensorStatsTest, EqualPlainLoopsForEveryTypeAndSize) {
  std::vector<TensorOfTest> tensors;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const size_t elements : {0, 1, 7, 8, 511, 513, 4099, 32768, 32769, 100003}) {
      for (const bool misaligned : {false, true}) {
        tensors.push_back(MakeTensor(elements, dtype, static_cast<uint32_t>(tensors.size()), misaligned));
      }
    }
  }
  ExpectStats(tensors);
  const float scale = 1024;
  ExpectStats(tensors, &scale);
}

TEST(TensorStatsTest, AbsentTensorsGiveZero) {
  TensorOfTest whole = MakeTensor(1001, DType::kFloat32, 1);
  std::vector<TensorOfTest> tensors(6, whole);
  tensors[0].g = {};
  tensors[1].w = {};
  tensors[2].u = {};
  tensors[3].m = {};
  tensors[4].v = {};
  tensors[5].g = tensors[5].w = tensors[5].u = tensors[5].m = tensors[5].v = {};
  ExpectStats(tensors);
}

TEST(TensorStatsTest, NonfiniteElementsAreCountedAndLeftOut) {
  TensorOfTest t = MakeTensor(1000, DType::kBFloat16, 1);
  t.g.Set(3, NAN);
  t.g.Set(700, INFINITY);
  t.w.Set(5, -INFINITY);
  t.g.Set(8, 0);
  ExpectStats({t});
  const std::vector<double> out = StatsOf({t});
  EXPECT_EQ(out[kTensorGradNonfinite], 2);
  EXPECT_EQ(out[kTensorGradZeros], 1);
  EXPECT_EQ(out[kTensorWeightNonfinite], 1);
  EXPECT_TRUE(std::isfinite(out[kTensorGradSumsq]));
}

TEST(TensorStatsTest, AnyBitThatFlipsMovesTheSumOfBits) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    const TensorOfTest before = MakeTensor(40000, dtype, 1);
    const double bits = StatsOf({before})[kTensorWeightBits];
    for (const size_t at : {0, 1, 777, 32768, 39999}) {
      TensorOfTest after = before;
      after.w.Set(at, -after.w.At(at));
      EXPECT_NE(StatsOf({after})[kTensorWeightBits], bits) << at;
    }
    EXPECT_EQ(StatsOf({before})[kTensorWeightBits], bits);
  }
}

TEST(TensorStatsTest, GradientsThatVExpectsHaveALagOfOne) {
  TensorOfTest t;
  t.elements = 5;
  t.g = {{0.1f, -0.1f, 0.1f, -0.1f, 0.1f}, DType::kFloat32, false};
  t.v = {{0, 0, 0, 0, 0}, DType::kFloat32, false};
  t.steps = 1;  // The first step: v behind it is (1 - beta2) g^2, corrected to g^2.
  EXPECT_NEAR(StatsOf({t})[kTensorLagSum], 5, 1e-12);
  t.eps = 10;
  EXPECT_NEAR(StatsOf({t})[kTensorLagSum], 5 * 0.01 / 100, 1e-9);
}

TEST(TensorStatsTest, TheStepMayLieInMemory) {
  const TensorOfTest t = MakeTensor(100, DType::kFloat32, 1);
  const float two = 2;
  TensorOfStep step = t.step();
  step.steps = 1;
  step.steps_at = &two;
  std::vector<double> out(kTensorStatCount);
  ASSERT_EQ(TensorStats({&step, 1, nullptr, out.data(), nullptr}, {}), Status::kOk);
  EXPECT_EQ(out, StatsOf({t}));
}

TEST(TensorStatsTest, TheWorkspaceHoldsEachChunk) {
  const TensorOfTest small = MakeTensor(0, DType::kFloat32, 1), large = MakeTensor(32769, DType::kFloat32, 1);
  const std::vector<TensorOfStep> steps = {small.step(), large.step()};
  EXPECT_EQ(TensorStatsWorkspaceBytes({steps.data(), 2, nullptr, nullptr, nullptr}), 3 * 14 * 8);
}

TEST(TensorStatsTest, TheCInterfaceNamesTheBadArgument) {
  const std::vector<float> data = {1, 2, 3, 4};
  const auto call = [&](const auto& change) {
    std::vector<double> out(BW_TENSOR_STAT_COUNT);
    bw_tensor_of_step t{};
    t.elements = 4;
    t.grad.data = t.second.data = data.data();
    t.steps = 1;
    bw_tensor_stats_params p{};
    p.struct_size = sizeof(p);
    p.count = 1;
    p.tensors = &t;
    p.out = out.data();
    change(p, t);
    const bw_kernel_status status = bw_tensor_stats(&p);
    EXPECT_EQ(out[BW_TENSOR_GRAD_SUMSQ], status == BW_KERNEL_OK ? 30 : 0);
    return status == BW_KERNEL_OK ? std::string("fine") : std::string(bw_kernels_last_error());
  };
  using ::testing::HasSubstr;
  EXPECT_EQ(call([](auto&, auto&) {}), "fine");
  EXPECT_THAT(call([](auto& p, auto&) { p.count = -1; }), HasSubstr("count is -1, but must be 0..1048576"));
  EXPECT_THAT(call([](auto& p, auto&) { p.tensors = nullptr; }), HasSubstr("tensors is NULL"));
  EXPECT_THAT(call([](auto& p, auto&) { p.out = nullptr; }), HasSubstr("out is NULL"));
  EXPECT_THAT(call([](auto& p, auto&) { p.backend = 2; }), HasSubstr("backend is 2, but must be 0..1"));
  EXPECT_THAT(call([](auto&, auto& t) { t.elements = -1; }), HasSubstr("elements is -1, but must be 0.."));
  EXPECT_THAT(call([](auto&, auto& t) { t.grad.dtype = 3; }), HasSubstr("dtype is 3, but must be 0..2"));
  EXPECT_THAT(call([](auto&, auto& t) { t.beta2 = 1; }), HasSubstr("beta2 is 1, but must be"));
  EXPECT_THAT(call([](auto&, auto& t) { t.eps = -1; }), HasSubstr("eps is -1, but must be"));
  EXPECT_THAT(call([](auto&, auto& t) { t.steps = 0; }), HasSubstr("steps is 0, but must be"));
}

}  // namespace
}  // namespace bellwether::kernels
