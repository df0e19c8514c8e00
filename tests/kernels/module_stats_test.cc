// Goal: size, extremes and shape of an activation equal plain loops for every type, size and alignment,
// the same for any number of threads; calls add up; what is not finite is counted and left out; illegal
// arguments are refused by name, and nothing is written.
// Method: matrices of odd sizes against loops in long double.

#include "bellwether/kernels/module_stats.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "bellwether/kernels/c_api.h"
#include "cpu/element.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "module_stats_parts.h"

namespace bellwether::kernels {
namespace {

// Rows lie `stride` elements apart, behind `offset` elements.
class Activation {
 public:
  Activation(int64_t rows, int64_t channels, DType dtype, int64_t stride, int64_t offset)
      : rows_(rows), channels_(channels), stride_(stride), offset_(offset), dtype_(dtype) {
    bytes_.resize(static_cast<size_t>(rows * stride + offset + channels) * Size());
  }

  void Set(int64_t row, int64_t channel, float value) {
    unsigned char* const to = bytes_.data() + static_cast<size_t>(row * stride_ + channel + offset_) * Size();
    const uint16_t half = dtype_ == DType::kBFloat16 ? cpu::ToBFloat16(value).bits : cpu::ToFloat16(value).bits;
    if (dtype_ == DType::kFloat32) {
      std::memcpy(to, &value, 4);
    } else {
      std::memcpy(to, &half, 2);
    }
  }

  float At(int64_t row, int64_t channel) const {
    const unsigned char* const from = bytes_.data() + static_cast<size_t>(row * stride_ + channel + offset_) * Size();
    uint16_t half;
    float value;
    std::memcpy(&half, from, 2);
    if (dtype_ == DType::kBFloat16) return cpu::ToFloat(cpu::BFloat16{half});
    if (dtype_ == DType::kFloat16) return cpu::ToFloat(cpu::Float16{half});
    std::memcpy(&value, from, 4);
    return value;
  }

  int64_t rows() const { return rows_; }
  int64_t channels() const { return channels_; }
  ModuleStatsParams params() const {
    return {dtype_, bytes_.data() + static_cast<size_t>(offset_) * Size(), rows_, channels_, stride_, nullptr, nullptr,
            nullptr};
  }

 private:
  size_t Size() const { return dtype_ == DType::kFloat32 ? 4 : 2; }

  int64_t rows_, channels_, stride_, offset_;
  DType dtype_;
  std::vector<unsigned char> bytes_;
};

Activation NormalActivation(int64_t rows, int64_t channels, DType dtype, uint32_t seed, int64_t padding = 0,
                            int64_t offset = 0) {
  std::mt19937 rng(seed);
  std::normal_distribution<double> normal;
  Activation x(rows, channels, dtype, channels + padding, offset);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t channel = 0; channel < channels; ++channel) {
      x.Set(row, channel, static_cast<float>(normal(rng) * (channel == channels / 3 ? 5 : 1)));
    }
  }
  return x;
}

struct ModuleResult {
  std::vector<double> out = std::vector<double>(kModuleStatCount, 0.0);
  std::vector<double> channels;

  bool operator==(const ModuleResult&) const = default;
};

ModuleResult ModuleByLoops(const Activation& x) {
  ModuleResult wanted;
  long double sumsq = 0, fourths = 0, top = 0;
  std::vector<long double> sums(static_cast<size_t>(x.channels()));
  for (int64_t row = 0; row < x.rows(); ++row) {
    for (int64_t channel = 0; channel < x.channels(); ++channel) {
      const long double value = x.At(row, channel);
      wanted.out[kModuleNonfinite] += !std::isfinite(value);
      if (!std::isfinite(value)) continue;
      sumsq += value * value;
      fourths += value * value * value * value;
      wanted.out[kModuleLargest] = std::max(wanted.out[kModuleLargest], static_cast<double>(std::fabs(value)));
      sums[static_cast<size_t>(channel)] += value * value;
    }
  }
  for (size_t channel = 0; channel < sums.size(); ++channel) {
    if (sums[channel] > top) top = sums[channel], wanted.out[kModuleTop] = static_cast<double>(channel);
    wanted.channels.push_back(static_cast<double>(sums[channel]));
  }
  wanted.out[kModuleElements] = static_cast<double>(x.rows() * x.channels());
  wanted.out[kModuleSumsq] = static_cast<double>(sumsq);
  wanted.out[kModuleFourths] = static_cast<double>(fourths);
  wanted.out[kModuleTopSumsq] = static_cast<double>(top);
  return wanted;
}

ModuleResult StatsOfParts(const std::vector<Activation>& parts, uint32_t threads = 0) {
  ModuleResult found;
  found.channels.resize(static_cast<size_t>(parts[0].channels()));
  for (const Activation& x : parts) {
    ModuleStatsParams p = x.params();
    p.channel_sumsq = found.channels.data();
    p.out = found.out.data();
    EXPECT_EQ(ModuleStats(p, {.threads = threads}), Status::kOk) << bw_kernels_last_error();
  }
  return found;
}

void ExpectModule(const Activation& x) {
  const ModuleResult found = StatsOfParts({x}), wanted = ModuleByLoops(x);
  EXPECT_EQ(found, StatsOfParts({x}, 8));
  for (size_t stat = 0; stat < kModuleStatCount; ++stat) {
    EXPECT_NEAR(found.out[stat], wanted.out[stat], 1e-12 * wanted.out[stat])
        << "stat " << stat << " of " << x.rows() << " x " << x.channels();
  }
  for (size_t i = 0; i < wanted.channels.size(); ++i) {
    ASSERT_NEAR(found.channels[i], wanted.channels[i], 1e-12 * wanted.channels[i]) << "channel " << i;
  }
}

TEST(ModuleStatsTest, EqualPlainLoopsForEveryTypeAndSize) {
  uint32_t seed = 0;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const int64_t rows : {1, 31, 33, 1000}) {
      for (const int64_t channels : {1, 7, 127, 129, 517}) {
        ExpectModule(NormalActivation(rows, channels, dtype, ++seed));
      }
    }
    ExpectModule(NormalActivation(65, 24, dtype, ++seed, 3, 1));
    ExpectModule(NormalActivation(40, 140000, dtype, ++seed));
  }
}

TEST(ModuleStatsTest, CallsAddUpToOneOfAllRows) {
  const Activation whole = NormalActivation(100, 37, DType::kFloat32, 1);
  std::vector<Activation> parts;
  for (const int64_t from : {0, 60}) {
    parts.emplace_back(from == 0 ? 60 : 40, 37, DType::kFloat32, 37, 0);
    for (int64_t row = 0; row < parts.back().rows(); ++row) {
      for (int64_t channel = 0; channel < 37; ++channel) parts.back().Set(row, channel, whole.At(from + row, channel));
    }
  }
  const ModuleResult found = StatsOfParts(parts), wanted = ModuleByLoops(whole);
  for (size_t stat = 0; stat < kModuleStatCount; ++stat) {
    EXPECT_NEAR(found.out[stat], wanted.out[stat], 1e-12 * wanted.out[stat]) << stat;
  }
}

TEST(ModuleStatsTest, NonfiniteElementsAreCountedAndLeftOut) {
  Activation x = NormalActivation(50, 20, DType::kBFloat16, 1);
  x.Set(3, 4, NAN);
  x.Set(40, 4, INFINITY);
  x.Set(49, 19, -INFINITY);
  ExpectModule(x);
  EXPECT_EQ(StatsOfParts({x}).out[kModuleNonfinite], 3);
}

TEST(ModuleStatsTest, TheTopChannelIsTheFirstOfEquals) {
  Activation x(10, 3000, DType::kFloat32, 3000, 0);
  EXPECT_EQ(StatsOfParts({x}).out[kModuleTop], 0);
  for (const int64_t channel : {2999, 1024, 2048}) x.Set(5, channel, -3);
  EXPECT_EQ(StatsOfParts({x}).out[kModuleTop], 1024);
  EXPECT_EQ(StatsOfParts({x}).out[kModuleTopSumsq], 9);
}

TEST(ModuleStatsTest, WithoutSumsOfChannelsThereIsNoTop) {
  const Activation x = NormalActivation(10, 9, DType::kFloat32, 1);
  std::vector<double> out(kModuleStatCount, 0.0), wanted = ModuleByLoops(x).out;
  wanted[kModuleTop] = wanted[kModuleTopSumsq] = 0;
  ModuleStatsParams p = x.params();
  p.out = out.data();
  ASSERT_EQ(ModuleStats(p, {}), Status::kOk);
  EXPECT_THAT(out, ::testing::Pointwise(::testing::DoubleNear(1e-9), wanted));
}

TEST(ModuleStatsTest, TheWorkspaceIsBounded) {
  for (const int64_t rows : {1, 100, 1 << 20, INT32_MAX}) {
    for (const int64_t channels : {1, 4096, 131072}) {
      const size_t bytes = ModuleStatsWorkspaceBytes({.rows = rows, .channels = channels});
      EXPECT_GT(bytes, 0u);
      EXPECT_LE(bytes, 1'100'000u) << rows << " x " << channels;
      const ModuleParts parts = PartsOfModule(rows, channels);
      EXPECT_GE(parts.parts * parts.rows, rows);
      EXPECT_LT((parts.parts - 1) * parts.rows, rows);
    }
  }
  EXPECT_LE(ModuleStatsWorkspaceBytes({.rows = 1 << 20, .channels = 1 << 24}), (size_t{1} << 24) * 82 / 10);
}

TEST(ModuleStatsTest, TheCInterfaceNamesTheBadArgument) {
  const std::vector<float> data = {1, 2, 3, 4};
  const auto call = [&](const auto& change) {
    std::vector<double> out(BW_MODULE_STAT_COUNT), channels(2);
    bw_module_stats_params p{};
    p.struct_size = sizeof(p);
    p.rows = p.channels = p.row_stride = 2;
    p.data = data.data();
    p.out = out.data();
    p.channel_sumsq = channels.data();
    change(p);
    const bw_kernel_status status = bw_module_stats(&p);
    EXPECT_EQ(out[BW_MODULE_SUMSQ], status == BW_KERNEL_OK ? 30 : 0);
    return status == BW_KERNEL_OK ? std::string("fine") : std::string(bw_kernels_last_error());
  };
  using ::testing::HasSubstr;
  EXPECT_EQ(call([](auto&) {}), "fine");
  EXPECT_THAT(call([](auto& p) { p.rows = -1; }), HasSubstr("rows is -1, but must be 0..2147483647"));
  EXPECT_THAT(call([](auto& p) { p.channels = 1 << 25; }), HasSubstr("channels is 33554432, but must be 0..16777216"));
  EXPECT_THAT(call([](auto& p) { p.rows = INT32_MAX, p.channels = 1 << 24; }), HasSubstr("more than 2^48 elements"));
  EXPECT_THAT(call([](auto& p) { p.row_stride = -1; }), HasSubstr("row_stride is -1, but must be 0.."));
  EXPECT_THAT(call([](auto& p) { p.dtype = 3; }), HasSubstr("dtype is 3, but must be 0..2"));
  EXPECT_THAT(call([](auto& p) { p.data = nullptr; }), HasSubstr("data is NULL"));
  EXPECT_THAT(call([](auto& p) { p.out = nullptr; }), HasSubstr("out is NULL"));
  EXPECT_THAT(call([](auto& p) { p.backend = 2; }), HasSubstr("backend is 2, but must be 0..1"));
}

}  // namespace
}  // namespace bellwether::kernels
