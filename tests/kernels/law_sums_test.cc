// Goal: the sums equal plain loops for every type and layout, the same for any number of threads;
// illegal arguments are refused by name, and nothing is written.
// Method: small matrices against loops in long double with frexp() for the distances.

#include "bellwether/kernels/law_sums.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "bellwether/kernels/c_api.h"
#include "cpu/element.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace bellwether::kernels {
namespace {

struct Layout {
  int64_t kept, summed, kept_stride, summed_stride;
};

double DistanceAt(double x, DType dtype) {
  const int bits = dtype == DType::kFloat32 ? 24 : dtype == DType::kBFloat16 ? 8 : 11;
  const int least = dtype == DType::kFloat16 ? -14 : -126;
  int exponent = least + 1;
  if (x != 0) (void)std::frexp(x, &exponent);
  return std::ldexp(1.0, std::max(exponent - 1, least) - (bits - 1));
}

template <typename Element>
std::vector<double> SumsByLoops(const std::vector<Element>& x, DType dtype, const Layout& of) {
  std::vector<double> out;
  for (int64_t i = 0; i < of.kept; ++i) {
    long double sums[kLawSumStatCount] = {};
    for (int64_t j = 0; j < of.summed; ++j) {
      const float number = cpu::ToFloat(x[static_cast<size_t>(i * of.kept_stride + j * of.summed_stride)]);
      const auto value = static_cast<double>(number);
      const double distance = DistanceAt(value, dtype);
      sums[kLawSumSum] += value;
      sums[kLawSumAbsSum] += std::fabs(value);
      sums[kLawSumUlpSum] += distance;
      sums[kLawSumVariance] += distance * distance / 12;
      sums[kLawSumLowBits] += cpu::ToFloat(cpu::ToBFloat16(number)) != number ? 1 : 0;
    }
    out.insert(out.end(), sums, sums + kLawSumStatCount);
  }
  return out;
}

template <typename Element, typename From>
void ExpectSums(DType dtype, From from) {
  std::mt19937 rng(1);
  std::normal_distribution<double> normal;
  std::vector<Element> x;
  for (int i = 0; i < 300 * 100; ++i) {
    const double scale = std::ldexp(1.0, i % 40 - 30);  // Subnormals of float16 among them.
    x.push_back(from(static_cast<float>(scale * normal(rng))));
  }
  for (const Layout& of : {Layout{300, 77, 100, 1},
                           {77, 300, 1, 100},
                           {150, 30, 200, 3},
                           {30, 150, 3, 200},
                           {1, 30000, 0, 1},
                           {30000, 1, 1, 0},
                           {5, 9, 1, 1}}) {
    LawSumsParams p{dtype, x.data(), of.kept, of.summed, of.kept_stride, of.summed_stride, nullptr};
    std::vector<double> once(static_cast<size_t>(of.kept * kLawSumStatCount)), threaded = once;
    p.out = once.data();
    ASSERT_EQ(LawSums(p, {}), Status::kOk);
    p.out = threaded.data();
    ASSERT_EQ(LawSums(p, {.threads = 8}), Status::kOk);
    EXPECT_EQ(once, threaded);
    const std::vector<double> want = SumsByLoops(x, dtype, of);
    for (size_t i = 0; i < want.size(); ++i) {
      const size_t stat = i % kLawSumStatCount;
      if (stat == kLawSumLowBits && dtype == DType::kFloat16) continue;  // Of kFloat32 alone.
      EXPECT_NEAR(once[i], want[i], 1e-12 * (stat == kLawSumSum ? want[i + 1] : want[i])) << i;
    }
  }
}

TEST(LawSumsTest, EqualPlainLoopsForEveryTypeAndLayout) {
  ExpectSums<float>(DType::kFloat32, [](float x) { return x; });
  ExpectSums<cpu::BFloat16>(DType::kBFloat16, [](float x) { return cpu::ToBFloat16(x); });
  ExpectSums<cpu::Float16>(DType::kFloat16, [](float x) { return cpu::ToFloat16(x); });
}

TEST(LawSumsTest, NanStaysInItsRow) {
  const std::vector<float> x = {1, NAN, 2, 3};
  std::vector<double> out(2 * kLawSumStatCount, 1.0);
  ASSERT_EQ(LawSums({DType::kFloat32, x.data(), 2, 2, 2, 1, out.data()}, {}), Status::kOk);
  EXPECT_TRUE(std::isnan(out[kLawSumSum]));
  EXPECT_EQ(out[kLawSumStatCount + kLawSumSum], 6);  // Added to what was there.
}

TEST(LawSumsTest, TheCInterfaceNamesTheBadArgument) {
  const std::vector<float> data = {1, 2, 3, 4, 5, 6};
  const auto call = [&](const auto& change) {
    std::vector<double> out(2 * BW_LAW_SUM_STAT_COUNT);
    bw_law_sums_params p{};
    p.struct_size = sizeof(p);
    p.kept = 2;
    p.summed = 3;
    p.kept_stride = 3;
    p.summed_stride = 1;
    p.data = data.data();
    p.out = out.data();
    change(p);
    const bw_kernel_status status = bw_law_sums(&p);
    EXPECT_EQ(out[BW_LAW_SUM_STAT_COUNT], status == BW_KERNEL_OK ? 15 : 0);
    return status == BW_KERNEL_OK ? std::string("fine") : std::string(bw_kernels_last_error());
  };
  using ::testing::HasSubstr;
  EXPECT_EQ(call([](auto&) {}), "fine");
  EXPECT_THAT(call([](auto& p) { p.kept = -1; }), HasSubstr("kept is -1, but must be 0.."));
  EXPECT_THAT(call([](auto& p) { p.summed_stride = -1; }), HasSubstr("summed_stride is -1, but must be 0.."));
  EXPECT_THAT(call([](auto& p) { p.dtype = 3; }), HasSubstr("dtype is 3, but must be 0..2"));
  EXPECT_THAT(call([](auto& p) { p.data = nullptr; }), HasSubstr("data is NULL"));
  EXPECT_THAT(call([](auto& p) { p.out = nullptr; }), HasSubstr("out is NULL"));
  EXPECT_THAT(call([](auto& p) { p.backend = 2; }), HasSubstr("backend is 2, but must be 0..1"));
  EXPECT_THAT(call([](auto& p) { p.kept = p.summed = 1 << 25; }), HasSubstr("more than 2^48 elements"));
}

}  // namespace
}  // namespace bellwether::kernels
