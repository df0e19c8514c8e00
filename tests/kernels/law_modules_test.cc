// Goal: sums of norms, of logits and of equal rows are what plain loops give, for every type, and
// the same for any number of threads; illegal arguments are refused by name.
// Method: small matrices against loops in long double; a few cases by hand.

#include "bellwether/kernels/law_modules.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "bellwether/kernels/c_api.h"
#include "cpu/element.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace bellwether::kernels {
namespace {

double NeighbourDistance(double x, DType dtype) {
  const int bits = dtype == DType::kFloat32 ? 24 : dtype == DType::kBFloat16 ? 8 : 11;
  const int least = dtype == DType::kFloat16 ? -14 : -126;
  int exponent = least + 1;
  if (x != 0) (void)std::frexp(x, &exponent);
  return std::ldexp(1.0, std::max(exponent - 1, least) - (bits - 1));
}

float Stored(DType dtype, double x) {
  const auto value = static_cast<float>(x);
  if (dtype == DType::kBFloat16) return cpu::ToFloat(cpu::ToBFloat16(value));
  return dtype == DType::kFloat16 ? cpu::ToFloat(cpu::ToFloat16(value)) : value;
}

// A matrix of a type, with more between its rows, and its numbers.
struct Rows {
  Rows(DType of, int64_t rows, int64_t width, double scale, unsigned seed) : dtype(of), n(width) {
    std::mt19937 rng(seed);
    std::normal_distribution<double> normal;
    for (int64_t i = 0; i < rows * (width + 3); ++i) Push(scale * normal(rng));
  }
  void Push(double x) {
    values.push_back(static_cast<double>(Stored(dtype, x)));
    const auto value = static_cast<float>(x);
    if (dtype == DType::kFloat32) floats.push_back(value);
    if (dtype == DType::kBFloat16) halves.push_back(cpu::ToBFloat16(value).bits);
    if (dtype == DType::kFloat16) halves.push_back(cpu::ToFloat16(value).bits);
  }
  double At(int64_t i, int64_t j) const { return values[static_cast<size_t>(i * (n + 3) + j)]; }
  LawMatrix Matrix() const {
    const void* const data = dtype == DType::kFloat32 ? static_cast<const void*>(floats.data()) : halves.data();
    return {data, dtype, n + 3};
  }
  DType dtype;
  int64_t n;
  std::vector<double> values;
  std::vector<float> floats;
  std::vector<uint16_t> halves;
};

struct NormCase {
  DType dtype, gradient;
  bool centred;
  int64_t rows, n;
  double d_x = 0.1;  // 3e-8: much of it underflows in kFloat16.
};

void ExpectNear(double got, long double want, long double size, const std::string& what) {
  EXPECT_NEAR(got, static_cast<double>(want), static_cast<double>(1e-12L * size + 1e-290L)) << what;
}

void ExpectNormSums(const NormCase& of) {
  const Rows x(of.dtype, of.rows, of.n, 2, 1), y(of.dtype, of.rows, of.n, 1, 2),
      d_y(of.gradient, of.rows, of.n, 0.1, 3);
  const Rows first(of.gradient, of.rows, of.n, of.d_x, 4), second(DType::kFloat32, of.rows, of.n, 1e-3, 5);
  std::vector<double> gain, shift;
  for (int64_t j = 0; j < of.n; ++j) {
    gain.push_back(0.5 + 0.01 * static_cast<double>(j));
    shift.push_back(of.centred ? 0.1 : 0);
  }
  const auto rows = static_cast<size_t>(of.rows), n = static_cast<size_t>(of.n);
  LawNormsParams p;
  p.rows = of.rows;
  p.n = of.n;
  p.x = x.Matrix();
  p.y = y.Matrix();
  p.d_x = {{first.Matrix(), second.Matrix()}, 2};
  p.d_y = {{d_y.Matrix()}, 1};
  p.gain = gain.data();
  p.shift = shift.data();
  p.eps = 1e-5;
  p.centred = of.centred;
  const auto run = [&](uint32_t threads) {
    std::vector<double> out(rows * kLawNormRowCount + n * kLawNormFeatureCount + 2);
    p.row_stats = out.data();
    p.feature_stats = out.data() + rows * kLawNormRowCount;
    p.rest = p.feature_stats + n * kLawNormFeatureCount;
    EXPECT_EQ(LawNorms(p, {.threads = threads}), Status::kOk);
    return out;
  };
  const std::vector<double> got = run(1);
  EXPECT_EQ(got, run(8));

  const double* const features = got.data() + rows * kLawNormRowCount;
  std::vector<long double> sums(n), variances(n), alikes(n), sizes(n);
  long double unlike = 0, whole = 0;
  for (int64_t i = 0; i < of.rows; ++i) {
    long double mean = 0, squares = 0;
    for (int64_t j = 0; j < of.n; ++j) mean += x.At(i, j);
    mean = of.centred ? mean / static_cast<long double>(of.n) : 0;
    for (int64_t j = 0; j < of.n; ++j) squares += (x.At(i, j) - mean) * (x.At(i, j) - mean);
    const long double square = squares / static_cast<long double>(of.n) + 1e-5, r = std::sqrt(square);
    const long double off = std::fabs(mean) / r, small = 1e-5 / square;
    long double scale = 0, scale_size = 0, variance = 0, total = 0, total_size = 0, total_variance = 0, gained = 0;
    long double lost = 0, c_lost = 0;
    for (int64_t j = 0; j < of.n; ++j) {
      const auto at = static_cast<size_t>(j);
      const long double c = x.At(i, j) - mean, w = y.At(i, j) - shift[at], g = d_y.At(i, j);
      const long double d_x = first.At(i, j) + second.At(i, j);
      const long double y_ulp = NeighbourDistance(y.At(i, j), of.dtype),
                        g_ulp = NeighbourDistance(d_y.At(i, j), of.gradient);
      const long double d_x_ulp2 = std::pow(NeighbourDistance(first.At(i, j), of.gradient), 2) +
                                   std::pow(NeighbourDistance(second.At(i, j), DType::kFloat32), 2);
      scale += c * d_x - small * w * g;
      scale_size += std::fabs(c * d_x) + std::fabs(small * w * g);
      variance += c * c * d_x_ulp2 + small * small * (g * g * y_ulp * y_ulp + w * w * g_ulp * g_ulp);
      total += d_x;
      total_size += std::fabs(d_x);
      total_variance += d_x_ulp2;
      const long double least = NeighbourDistance(0, of.gradient);
      const long double zero = std::fabs(first.At(i, j)) <= 16 * least ? least / 2 : 0;
      lost += zero;
      c_lost += std::fabs(c) * zero;
      gained += gain[at] * g * gain[at] * g;
      const double product = (y.At(i, j) - shift[at]) * d_y.At(i, j);
      const long double ulp = NeighbourDistance(Stored(of.dtype, product), of.dtype);
      sums[at] += product;
      sizes[at] += std::fabs(product);
      variances[at] += (g * g * y_ulp * y_ulp + ulp * ulp) / 12;
      alikes[at] += (std::fabs(g) * y_ulp + ulp) / 2 + 0x1p-20L * 2 * off * gain[at] * std::fabs(g);
      const long double left = y.At(i, j) - (c / r * gain[at] + shift[at]);
      unlike += left * left;
      whole += y.At(i, j) * y.At(i, j);
    }
    const auto row = [&](int stat) { return got[static_cast<size_t>(stat) * rows + static_cast<size_t>(i)]; };
    const long double within = 0x1p-20L * (1 + 2 * off);
    ExpectNear(row(kLawNormScaleDifference), scale, scale_size, "scale");
    ExpectNear(row(kLawNormScaleVariance), variance / 12, variance, "its variance");
    const long double alike = within * std::sqrt(squares * gained) / r + c_lost;
    ExpectNear(row(kLawNormScaleAlike), alike, alike, "alike");
    ExpectNear(row(kLawNormOff), off, 1, "off");
    ExpectNear(row(kLawNormMeanDifference), of.centred ? total : 0, total_size, "mean");
    ExpectNear(row(kLawNormMeanVariance), of.centred ? total_variance / 12 : 0, total_variance, "its variance");
    const long double of_mean = within * std::sqrt(static_cast<long double>(of.n) * gained) / r + lost;
    ExpectNear(row(kLawNormMeanAlike), of.centred ? of_mean : 0, of_mean, "alike");
  }
  for (size_t j = 0; j < n; ++j) {
    ExpectNear(features[kLawNormSum * n + j], sums[j], sizes[j], "a feature");
    ExpectNear(features[kLawNormVariance * n + j], variances[j], variances[j], "its variance");
    ExpectNear(features[kLawNormAlike * n + j], alikes[j], alikes[j], "alike");
    ExpectNear(features[kLawNormAbsSum * n + j], sizes[j], sizes[j], "its size");
  }
  ExpectNear(features[kLawNormFeatureCount * n], unlike, unlike, "unlike");
  ExpectNear(features[kLawNormFeatureCount * n + 1], whole, whole, "all");
}

TEST(LawModulesTest, SumsOfNormsEqualPlainLoops) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const bool centred : {false, true}) {
      ExpectNormSums({dtype, dtype, centred, 150, 67});
      ExpectNormSums({dtype, DType::kFloat32, centred, 3, 200});
      ExpectNormSums({dtype, dtype, centred, 20, 90, 3e-8});
      ExpectNormSums({dtype, dtype, centred, 1, 1});
    }
  }
}

void ExpectLogits(DType dtype, double scale) {
  const int64_t rows = 40, classes = 333;
  Rows z(dtype, rows, classes, scale, 7);
  std::vector<double> out(static_cast<size_t>(rows * kLawLogitStatCount)), again = out;
  ASSERT_EQ(LawLogits({rows, classes, z.Matrix(), out.data()}, {}), Status::kOk);
  ASSERT_EQ(LawLogits({rows, classes, z.Matrix(), again.data()}, {.threads = 8}), Status::kOk);
  EXPECT_EQ(out, again);
  for (int64_t i = 0; i < rows; ++i) {
    long double top = -std::numeric_limits<long double>::infinity(), total = -1, size = 0;
    for (int64_t j = 0; j < classes; ++j) top = std::max<long double>(top, z.At(i, j));
    for (int64_t j = 0; j < classes; ++j) {
      const long double below = std::max<long double>(z.At(i, j) - top, -87);
      total += std::exp(below);
      size += std::exp(below) * below;
    }
    const auto row = static_cast<size_t>(i);
    const double unsure = static_cast<double>(total / (1 + total));
    const double roundings = static_cast<double>(1 + 2 * std::log1p(total) - size / (1 + total));
    // Where next to nothing is left the loop's own sum has lost it in the one.
    EXPECT_NEAR(out[row], unsure, 1e-6 * unsure + 1e-18) << scale;
    EXPECT_NEAR(out[static_cast<size_t>(rows) + row], roundings, 1e-6 * roundings) << scale;
  }
}

TEST(LawModulesTest, LogitsSayHowSureTheyAre) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const double scale : {0.0, 1.0, 10.0, 100.0}) ExpectLogits(dtype, scale);
  }
}

TEST(LawModulesTest, ASureRowKeepsWhatIsLeft) {
  const std::vector<float> z = {0, -60, -61, -1000, 5, -INFINITY, -INFINITY, 5, 0, 1, NAN, 0};
  std::vector<double> out(3 * kLawLogitStatCount);
  ASSERT_EQ(LawLogits({3, 4, {z.data(), DType::kFloat32, 4}, out.data()}, {}), Status::kOk);
  EXPECT_NEAR(out[0], std::exp(-60.0) + std::exp(-61.0), 1e-6 * std::exp(-60.0));
  EXPECT_NEAR(out[1], 0.5, 1e-12);  // Two are the likeliest.
  EXPECT_TRUE(std::isnan(out[2]) && std::isnan(out[5]));
}

template <typename Element, typename From>
void ExpectEqualRows(DType dtype, From from) {
  std::mt19937 rng(11);
  std::normal_distribution<double> normal;
  const int64_t rows = 5000, width = 40;
  for (const bool transposed : {false, true}) {
    std::vector<Element> x(static_cast<size_t>(rows * width));
    const int64_t row_stride = transposed ? 1 : width, column_stride = transposed ? rows : 1;
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < width; ++j) {
        const auto at = [&](int64_t row) -> Element& {
          return x[static_cast<size_t>(row * row_stride + j * column_stride)];
        };
        at(i) = from(static_cast<float>(normal(rng)));
        if (i >= 100 && i < 120) at(i) = at(3);
        if (i >= 2000 && i < 2500) at(i) = from(j % 2 == 0 ? 0.0f : -0.0f);
      }
    }
    std::vector<double> out(kEqualGroups * kLawEqualStatCount, 1.0);
    LawEqualRowsParams p;
    p.rows = rows;
    p.width = width;
    p.data = x.data();
    p.dtype = dtype;
    p.row_stride = row_stride;
    p.column_stride = column_stride;
    p.out = out.data();
    ASSERT_EQ(LawEqualRows(p, {}), Status::kOk);
    for (int group = 0; group < kEqualGroups; ++group) {
      const double* const of = out.data() + group * kLawEqualStatCount;
      EXPECT_EQ(of[kLawEqualThere], 1 + 4500);
      EXPECT_EQ(of[kLawEqualAlike], 1 + (4500 - 21) + 21 * 21);
    }
  }
}

TEST(LawModulesTest, EqualRowsAreCountedAndNoOthers) {
  ExpectEqualRows<float>(DType::kFloat32, [](float x) { return x; });
  ExpectEqualRows<cpu::BFloat16>(DType::kBFloat16, [](float x) { return cpu::ToBFloat16(x); });
  ExpectEqualRows<cpu::Float16>(DType::kFloat16, [](float x) { return cpu::ToFloat16(x); });
}

TEST(LawModulesTest, TheCInterfaceNamesWhatIsWrong) {
  const std::vector<float> data(64, 1.0f);
  const std::vector<double> vector(8, 1.0);
  std::vector<double> out(256);
  const auto norms = [&](const auto& change) {
    bw_law_norms_params p{};
    p.struct_size = sizeof(p);
    p.rows = p.n = 8;
    const bw_law_matrix matrix = {data.data(), BW_F32, 0, 8};
    p.x = p.y = p.d_x[0] = p.d_y[0] = matrix;
    p.d_x_parts = p.d_y_parts = 1;
    p.gain = p.shift = vector.data();
    p.eps = 1e-5;
    p.row_stats = out.data();
    p.feature_stats = out.data() + 64;
    p.rest = out.data() + 128;
    change(p);
    return bw_law_norms(&p) == BW_KERNEL_OK ? std::string("fine") : std::string(bw_kernels_last_error());
  };
  using ::testing::HasSubstr;
  EXPECT_EQ(norms([](auto&) {}), "fine");
  EXPECT_THAT(norms([](auto& p) { p.rows = -1; }), HasSubstr("rows is -1"));
  EXPECT_THAT(norms([](auto& p) { p.d_x_parts = 5; }), HasSubstr("d_x_parts is 5, but must be 1..4"));
  EXPECT_THAT(norms([](auto& p) { p.d_y_parts = 0; }), HasSubstr("d_y_parts is 0"));
  EXPECT_THAT(norms([](auto& p) { p.centred = 2; }), HasSubstr("centred is 2"));
  EXPECT_THAT(norms([](auto& p) { p.y.data = nullptr; }), HasSubstr("y is NULL"));
  EXPECT_THAT(norms([](auto& p) { p.gain = nullptr; }), HasSubstr("gain is NULL"));
  EXPECT_THAT(norms([](auto& p) { p.x.dtype = 9; }), HasSubstr("dtype is 9"));
  EXPECT_THAT(norms([](auto& p) { p.eps = NAN; }), HasSubstr("eps is nan"));
  EXPECT_THAT(norms([](auto& p) { p.inside = -1; }), HasSubstr("inside is -1"));
  EXPECT_THAT(norms([](auto& p) { p.rows = p.n = 1 << 25; }), HasSubstr("more than 2^48 elements"));

  bw_law_logits_params logits{};
  logits.struct_size = sizeof(logits);
  logits.rows = logits.classes = 8;
  logits.z = {data.data(), BW_F32, 0, 8};
  EXPECT_EQ(bw_law_logits(&logits), BW_KERNEL_INVALID_ARGUMENT);
  EXPECT_THAT(bw_kernels_last_error(), HasSubstr("out is NULL"));

  bw_law_equal_rows_params equal{};
  equal.struct_size = sizeof(equal);
  equal.rows = equal.width = 8;
  equal.row_stride = 8;
  equal.column_stride = 1;
  equal.out = out.data();
  EXPECT_EQ(bw_law_equal_rows(&equal), BW_KERNEL_INVALID_ARGUMENT);
  EXPECT_THAT(bw_kernels_last_error(), HasSubstr("data is NULL"));
  equal.rows = int64_t{1} << 31;
  EXPECT_EQ(bw_law_equal_rows(&equal), BW_KERNEL_INVALID_ARGUMENT);
  EXPECT_THAT(bw_kernels_last_error(), HasSubstr("rows is 2147483648"));
  EXPECT_EQ(bw_law_equal_rows_scratch_bytes(5), 16 * 4 * 12);
  EXPECT_EQ(bw_law_equal_rows_scratch_bytes(-1), 0);
}

}  // namespace
}  // namespace bellwether::kernels
