// Goal: the sums equal plain loops for every type, layout and grid; what is not finite is counted;
// illegal arguments are refused by name, and nothing is written.
// Method: small tensors against loops in long double with frexp() for the distances.

#include "bellwether/kernels/law_products.h"

#include <array>
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

using Out = std::array<double, kLawProductStatCount>;
using Strides = std::array<int64_t, 3>;

// Numbers in one of the types, in memory of their own.
struct Numbers {
  Numbers(DType type, size_t count, unsigned seed, double scale = 1) : dtype(type) {
    std::mt19937 rng(seed);
    std::normal_distribution<double> normal;
    for (size_t i = 0; i < count; ++i) Append(scale * normal(rng));
  }
  void Append(double x) {
    if (dtype == DType::kFloat32) f32.push_back(static_cast<float>(x));
    if (dtype == DType::kBFloat16) b16.push_back(cpu::ToBFloat16(static_cast<float>(x)));
    if (dtype == DType::kFloat16) f16.push_back(cpu::ToFloat16(static_cast<float>(x)));
  }
  double At(int64_t i) const {
    const auto at = static_cast<size_t>(i);
    if (dtype == DType::kFloat32) return static_cast<double>(f32[at]);
    return static_cast<double>(dtype == DType::kBFloat16 ? cpu::ToFloat(b16[at]) : cpu::ToFloat(f16[at]));
  }
  const void* Data() const {
    if (dtype == DType::kFloat32) return f32.data();
    return dtype == DType::kBFloat16 ? static_cast<const void*>(b16.data()) : f16.data();
  }
  LawOperand Operand(const Strides& strides, Grid grid) const {
    LawOperand operand{Data(), dtype, grid};
    std::copy(strides.begin(), strides.end(), operand.strides);
    return operand;
  }
  DType dtype;
  std::vector<float> f32;
  std::vector<cpu::BFloat16> b16;
  std::vector<cpu::Float16> f16;
};

double Ulp(double x, Grid grid) {
  const int bits = grid == Grid::kFloat32 ? 24 : grid == Grid::kBFloat16 ? 8 : 11;
  const int least = grid == Grid::kFloat16 ? -14 : -126;
  int exponent = least + 1;
  if (x != 0) (void)std::frexp(x, &exponent);
  return std::ldexp(1.0, std::max(exponent - 1, least) - (bits - 1));
}

Out Naive(const Numbers& x, const Strides& of_x, Grid x_grid, const Numbers& y, const Strides& of_y, Grid y_grid,
          const Strides& extents) {
  std::array<long double, kLawProductStatCount> sums{};
  for (int64_t i = 0; i < extents[0]; ++i) {
    for (int64_t j = 0; j < extents[1]; ++j) {
      for (int64_t k = 0; k < extents[2]; ++k) {
        const double a = x.At(i * of_x[0] + j * of_x[1] + k * of_x[2]);
        const double b = y.At(i * of_y[0] + j * of_y[1] + k * of_y[2]);
        sums[kLawProductSum] += static_cast<long double>(a) * b;
        sums[kLawProductAbsSum] += std::fabs(a * b);
        if (x_grid != Grid::kNone) sums[kLawProductXVariance] += std::pow(Ulp(a, x_grid) * b, 2) / 12;
        if (y_grid != Grid::kNone) sums[kLawProductYVariance] += std::pow(Ulp(b, y_grid) * a, 2) / 12;
      }
    }
  }
  Out out{};
  std::transform(sums.begin(), sums.end(), out.begin(), [](long double s) { return static_cast<double>(s); });
  return out;
}

LawProduct Product(const LawOperand& x, const LawOperand& y, const Strides& extents) {
  LawProduct product{{}, x, y};
  std::copy(extents.begin(), extents.end(), product.extents);
  return product;
}

void ExpectNear(const Out& got, const Out& want) {
  for (int stat = 0; stat < kLawProductStatCount; ++stat) {
    const auto at = static_cast<size_t>(stat);
    EXPECT_NEAR(got[at], want[at], 1e-12 * (stat == kLawProductSum ? want[kLawProductAbsSum] : want[at])) << stat;
  }
}

TEST(LawProductsTest, EqualsPlainLoopsForEveryTypeLayoutAndThreadCount) {
  const Strides extents = {3, 70, 41};
  const std::vector<Strides> layouts = {{70 * 41, 41, 1},                         // in one piece
                                        {70 * 48, 48, 1},                         // padded rows
                                        {1, 3, 3 * 70},                           // turned around
                                        {0, 0, 1},        {1, 0, 0}, {0, 0, 0}};  // broadcast
  const std::array<DType, 3> types = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
  const std::array<Grid, 5> grids = {Grid::kNone, Grid::kFloat32, Grid::kTf32, Grid::kBFloat16, Grid::kFloat16};
  size_t turn = 0;
  for (DType of_x : types) {
    for (DType of_y : types) {
      const Numbers x(of_x, 3 * 70 * 48, 1), y(of_y, 3 * 70 * 48, 2, 1e-3);
      for (const Strides& x_layout : layouts) {
        for (const Strides& y_layout : layouts) {
          const Grid x_grid = grids[turn % 5], y_grid = grids[++turn % 5];
          const LawProduct product = Product(x.Operand(x_layout, x_grid), y.Operand(y_layout, y_grid), extents);
          Out once{}, threaded{};
          ASSERT_EQ(LawProducts({&product, 1, once.data()}, {}), Status::kOk) << LastErrorMessage();
          ASSERT_EQ(LawProducts({&product, 1, threaded.data()}, {.threads = 8}), Status::kOk);
          EXPECT_EQ(once, threaded);
          ExpectNear(once, Naive(x, x_layout, x_grid, y, y_layout, y_grid, extents));
        }
      }
    }
  }
}

TEST(LawProductsTest, LongTensorsAreCutIntoPieces) {
  const Strides extents = {2, 3, 100'001}, strides = {3 * 100'001, 100'001, 1}, rows = {0, 100'001, 1};
  const Numbers x(DType::kBFloat16, 600'006, 3), y(DType::kFloat16, 600'006, 4);
  const std::array<LawProduct, 2> products = {
      Product(x.Operand(strides, Grid::kBFloat16), y.Operand(strides, Grid::kNone), extents),
      Product(x.Operand(rows, Grid::kNone), y.Operand(strides, Grid::kFloat16), extents)};
  std::array<Out, 2> out{}, threaded{};
  ASSERT_EQ(LawProducts({products.data(), 2, out[0].data()}, {}), Status::kOk) << LastErrorMessage();
  ASSERT_EQ(LawProducts({products.data(), 2, threaded[0].data()}, {.threads = 4}), Status::kOk);
  EXPECT_EQ(out, threaded);
  ExpectNear(out[0], Naive(x, strides, Grid::kBFloat16, y, strides, Grid::kNone, extents));
  ExpectNear(out[1], Naive(x, rows, Grid::kNone, y, strides, Grid::kFloat16, extents));
}

TEST(LawProductsTest, TheDistanceOfSubnormalsStaysTheSame) {
  Numbers x(DType::kFloat16, 0, 0);
  for (double value : {0.0, std::ldexp(1.0, -24), std::ldexp(1.0, -15), std::ldexp(1.0, -14)}) x.Append(value);
  Numbers one(DType::kFloat32, 0, 0);
  one.Append(1);
  const LawProduct product =
      Product(x.Operand({0, 0, 1}, Grid::kFloat16), one.Operand({0, 0, 0}, Grid::kNone), {1, 1, 4});
  Out out{};
  ASSERT_EQ(LawProducts({&product, 1, out.data()}, {}), Status::kOk) << LastErrorMessage();
  EXPECT_DOUBLE_EQ(out[kLawProductXVariance], 4 * std::ldexp(1.0, -48) / 12);
  EXPECT_EQ(out[kLawProductYVariance], 0);
}

TEST(LawProductsTest, NonfiniteElementsAreCountedAndSeenInTheSum) {
  Numbers x(DType::kBFloat16, 20, 5), y(DType::kFloat32, 19, 6);
  x.b16[3] = cpu::ToBFloat16(NAN);
  x.b16[17] = cpu::ToBFloat16(INFINITY);
  y.Append(-INFINITY);
  const LawProduct product =
      Product(x.Operand({0, 0, 1}, Grid::kBFloat16), y.Operand({0, 0, 1}, Grid::kNone), {1, 1, 20});
  Out out{};
  ASSERT_EQ(LawProducts({&product, 1, out.data()}, {}), Status::kOk) << LastErrorMessage();
  EXPECT_EQ(out[kLawProductXNonfinite], 2);
  EXPECT_EQ(out[kLawProductYNonfinite], 1);
  EXPECT_FALSE(std::isfinite(out[kLawProductSum]));
}

TEST(LawProductsTest, SumsAreAddedToWhatIsThere) {
  Numbers x(DType::kFloat32, 0, 0);
  x.Append(3);
  const LawProduct product = Product(x.Operand({0, 0, 0}, Grid::kNone), x.Operand({0, 0, 0}, Grid::kNone), {1, 1, 1});
  LawProduct empty = product;
  empty.extents[1] = 0;
  empty.x.data = nullptr;
  const std::array<LawProduct, 2> products = {product, empty};
  std::array<Out, 2> out{};
  out[0][kLawProductSum] = out[1][kLawProductSum] = 1;
  ASSERT_EQ(LawProducts({products.data(), 2, out[0].data()}, {}), Status::kOk) << LastErrorMessage();
  EXPECT_EQ(out[0][kLawProductSum], 10);
  EXPECT_EQ(out[1][kLawProductSum], 1);
}

TEST(LawProductsTest, TheCInterfaceNamesTheBadArgument) {
  const std::array<float, 6> data = {1, 2, 3, 4, 5, 6};
  const auto call = [&](const auto& change) {
    bw_law_product product = {{1, 2, 3}, {data.data(), BW_F32, BW_GRID_F32, {0, 3, 1}}, {}};
    product.y = product.x;
    std::array<double, BW_LAW_PRODUCT_STAT_COUNT> out{};
    bw_law_products_params p{};
    p.struct_size = sizeof(p);
    p.count = 1;
    p.products = &product;
    p.out = out.data();
    change(p, product);
    const bw_kernel_status status = bw_law_products(&p);
    EXPECT_EQ(out[BW_LAW_PRODUCT_SUM], status == BW_KERNEL_OK ? 91 : 0);
    return status == BW_KERNEL_OK ? std::string("fine") : std::string(bw_kernels_last_error());
  };
  using ::testing::HasSubstr;
  EXPECT_EQ(call([](auto&, auto&) {}), "fine");
  EXPECT_THAT(call([](auto& p, auto&) { p.count = 17; }), HasSubstr("count is 17, but must be 1..16"));
  EXPECT_THAT(call([](auto& p, auto&) { p.count = 0; }), HasSubstr("count is 0, but must be 1..16"));
  EXPECT_THAT(call([](auto& p, auto&) { p.reserved = 1; }), HasSubstr("reserved is 1"));
  EXPECT_THAT(call([](auto& p, auto&) { p.products = nullptr; }), HasSubstr("products is NULL"));
  EXPECT_THAT(call([](auto& p, auto&) { p.backend = 2; }), HasSubstr("backend is 2, but must be 0..1"));
  EXPECT_THAT(call([](auto&, auto& c) { c.x.data = nullptr; }), HasSubstr("x is NULL"));
  EXPECT_THAT(call([](auto&, auto& c) { c.y.dtype = 3; }), HasSubstr("dtype is 3, but must be 0..2"));
  EXPECT_THAT(call([](auto&, auto& c) { c.y.grid = 5; }), HasSubstr("grid is 5, but must be 0..4"));
  EXPECT_THAT(call([](auto&, auto& c) { c.x.strides[1] = -1; }), HasSubstr("stride is -1, but must be 0.."));
  EXPECT_THAT(call([](auto&, auto& c) { c.extents[0] = -1; }), HasSubstr("extent is -1, but must be 0.."));
  EXPECT_THAT(call([](auto&, auto& c) { c.extents[0] = c.extents[1] = c.extents[2] = 1 << 20; }),
              HasSubstr("more than 2^48 elements"));
}

}  // namespace
}  // namespace bellwether::kernels
