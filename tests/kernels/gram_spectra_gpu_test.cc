// Goal: eigenvalues by cuSOLVER are the CPU's, and what is made of them the same floats: all
// sizes, many in a batch, more than a pass holds, rank-deficient, zero, repeated.  Needs a
// GPU and cuSOLVER; skips without one unless BELLWETHER_REQUIRE_GPU=1.
// Method: the same random matrices through both.  BELLWETHER_CUSOLVER names the library.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "bellwether/kernels/gpu_spectra.h"
#include "bellwether/kernels/gram_spectrum.h"

namespace bellwether::kernels {
namespace {

class GramSpectraGpuTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (bw_spectra_open(&spectra_, std::getenv("BELLWETHER_CUSOLVER")) == 0) return;
    const char* const required = std::getenv("BELLWETHER_REQUIRE_GPU");
    ASSERT_FALSE(required != nullptr && std::strcmp(required, "1") == 0) << bw_spectra_error();
    GTEST_SKIP() << bw_spectra_error();
  }
  void TearDown() override {
    if (spectra_ != nullptr) bw_spectra_close(spectra_);
  }

  // `count` Gram matrices of weights [n][columns]; how many floats differ.
  int Compare(int64_t n, int64_t count, int64_t columns, double scale = 1) {
    std::mt19937 random(static_cast<uint32_t>(n * 1000 + count));
    std::normal_distribution<float> normal;
    const auto each = static_cast<size_t>(n * n);
    std::vector<double> matrices(each * static_cast<size_t>(count));
    std::vector<float> w(static_cast<size_t>(n * columns)), upper(static_cast<size_t>(GramTriangle(n)));
    for (int64_t m = 0; m < count; ++m) {
      for (float& value : w) value = static_cast<float>(scale) * normal(random);
      size_t at = 0;
      for (int64_t i = 0; i < n; ++i) {
        for (int64_t j = i; j < n; ++j) {
          double sum = 0;
          for (int64_t k = 0; k < columns; ++k) {
            sum += static_cast<double>(w[static_cast<size_t>(i * columns + k)]) *
                   static_cast<double>(w[static_cast<size_t>(j * columns + k)]);
          }
          upper[at++] = static_cast<float>(sum);
        }
      }
      ExpandGram(upper.data(), n, matrices.data() + static_cast<size_t>(m) * each);
    }
    std::vector<double> gpu(static_cast<size_t>(n * count)), cpu = gpu;
    EXPECT_EQ(bw_spectra_eigenvalues(spectra_, n, count, matrices.data(), gpu.data()), 0) << bw_spectra_error();
    EXPECT_TRUE(cpu::SymmetricEigenvalues(n, count, matrices.data(), cpu.data()));
    int differ = 0;
    for (int64_t m = 0; m < count; ++m) {
      double* const mine = cpu.data() + m * n;
      double* const theirs = gpu.data() + m * n;
      const GramSpectrum a = SpectrumOf(mine, n), b = SpectrumOf(theirs, n);
      differ += std::memcmp(&a, &b, sizeof a) != 0;
      std::sort(mine, mine + n);
      std::sort(theirs, theirs + n);
      for (int64_t i = 0; i < n; ++i) {
        EXPECT_NEAR(theirs[i], mine[i], 1e-13 * static_cast<double>(n) * std::abs(mine[n - 1])) << n << ", " << i;
      }
    }
    return differ;
  }

  bw_spectra* spectra_ = nullptr;
};

TEST_F(GramSpectraGpuTest, GpuSpectraEqualTheCpus) {
  int differ = 0;
  for (const int64_t n : {1, 2, 3, 31, 32, 33, 64, 65, 128, 200, 256}) differ += Compare(n, 6, n + 40);
  differ += Compare(512, 2, 64);
  differ += Compare(128, 300, 200, 1e-3);
  differ += Compare(256, 200, 30);  // 100 MiB: two passes.
  EXPECT_EQ(differ, 0) << "signals differ between GPU and CPU";
}

TEST_F(GramSpectraGpuTest, ZeroAndRepeatedValues) {
  const int64_t n = 64;
  std::vector<double> matrices(static_cast<size_t>(2 * n * n)), values(static_cast<size_t>(2 * n), -1);
  for (int64_t i = 0; i < n; ++i) matrices[static_cast<size_t>(n * n + i * n + i)] = 9;
  ASSERT_EQ(bw_spectra_eigenvalues(spectra_, n, 2, matrices.data(), values.data()), 0) << bw_spectra_error();
  for (int64_t i = 0; i < n; ++i) {
    EXPECT_EQ(values[static_cast<size_t>(i)], 0);
    EXPECT_NEAR(values[static_cast<size_t>(n + i)], 9, 1e-12);
  }
}

TEST_F(GramSpectraGpuTest, EmptyBatchesSucceedAndSizesAreChecked) {
  EXPECT_EQ(bw_spectra_eigenvalues(spectra_, 5, 0, nullptr, nullptr), 0);
  EXPECT_NE(bw_spectra_eigenvalues(spectra_, 513, 1, nullptr, nullptr), 0);
  EXPECT_NE(std::strstr(bw_spectra_error(), "513"), nullptr) << bw_spectra_error();
}

TEST(GramSpectraTest, WithoutCusolverItSaysSo) {
  bw_spectra* spectra = nullptr;
  EXPECT_NE(bw_spectra_open(&spectra, "/no/such/libcusolver.so"), 0);
  EXPECT_NE(std::strstr(bw_spectra_error(), "/no/such/libcusolver.so"), nullptr) << bw_spectra_error();
}

}  // namespace
}  // namespace bellwether::kernels
