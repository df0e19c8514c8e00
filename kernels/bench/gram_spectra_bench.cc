// Full spectra of Gram matrices: cuSOLVER's batch on a GPU beside one core of the CPU, in
// one process, on the same matrices.
//
//   gram_spectra_bench [--grams 1024] [--rows 128] [--passes 20] [--cpu 32]
//
// Timed on the GPU: copying into pinned memory, both transfers and the eigenvalues; on the
// CPU: `cpu` of the matrices, told for all of them.  BELLWETHER_CUSOLVER names the library.
// Prints JSON: milliseconds, and how many signals of the `cpu` matrices differ.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "bellwether/kernels/gpu_spectra.h"
#include "bellwether/kernels/gram_spectrum.h"

namespace {

using namespace bellwether::kernels;

double MillisecondsOf(const auto& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
}

int Main(int argc, char** argv) {
  int64_t grams = 1024, rows = 128, passes = 20, of_cpu = 32;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i];
    int64_t* const value = name == "--grams"    ? &grams
                           : name == "--rows"   ? &rows
                           : name == "--passes" ? &passes
                           : name == "--cpu"    ? &of_cpu
                                                : nullptr;
    if (value == nullptr || (*value = std::atoll(argv[i + 1])) < 1) {
      std::fprintf(stderr, "usage: gram_spectra_bench [--grams N] [--rows N] [--passes N] [--cpu N]\n");
      return 2;
    }
  }
  of_cpu = std::min(of_cpu, grams);
  const auto each = static_cast<size_t>(rows * rows);
  std::vector<double> matrices(each * static_cast<size_t>(grams));
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  // Of weights with 32 columns more than rows, of which a few make each matrix.
  const int64_t columns = rows + 32;
  std::vector<double> w(static_cast<size_t>(rows * columns));
  for (int64_t m = 0; m < grams; ++m) {
    if (m < of_cpu) {
      for (double& value : w) value = static_cast<double>(normal(random));
      double* const g = matrices.data() + static_cast<size_t>(m) * each;
      for (int64_t i = 0; i < rows; ++i) {
        for (int64_t j = 0; j <= i; ++j) {
          double sum = 0;
          for (int64_t k = 0; k < columns; ++k) {
            sum += w[static_cast<size_t>(i * columns + k)] * w[static_cast<size_t>(j * columns + k)];
          }
          g[i * rows + j] = g[j * rows + i] = static_cast<double>(static_cast<float>(sum));
        }
      }
    } else {  // The same ones again: how long it takes does not depend on them.
      std::copy_n(matrices.data() + static_cast<size_t>(m % of_cpu) * each, each,
                  matrices.data() + static_cast<size_t>(m) * each);
    }
  }
  std::vector<double> by_gpu(static_cast<size_t>(rows * grams)), by_cpu(static_cast<size_t>(rows * of_cpu));
  std::vector<double> gpu_ms;
  bw_spectra* spectra = nullptr;
  if (bw_spectra_open(&spectra, std::getenv("BELLWETHER_CUSOLVER")) != 0) {
    std::fprintf(stderr, "no GPU: %s\n", bw_spectra_error());
  } else {
    for (int64_t pass = 0; pass <= passes; ++pass) {
      int failed = 0;
      const double ms = MillisecondsOf(
          [&] { failed = bw_spectra_eigenvalues(spectra, rows, grams, matrices.data(), by_gpu.data()); });
      if (failed != 0) {
        std::fprintf(stderr, "%s\n", bw_spectra_error());
        return 1;
      }
      if (pass > 0) gpu_ms.push_back(ms);  // The first one makes the buffers.
    }
    bw_spectra_close(spectra);
  }
  std::vector<double> copy(matrices.begin(),
                           matrices.begin() + static_cast<ptrdiff_t>(each * static_cast<size_t>(of_cpu)));
  const double cpu_ms = MillisecondsOf([&] { cpu::SymmetricEigenvalues(rows, of_cpu, copy.data(), by_cpu.data()); });
  int differ = 0;
  for (int64_t m = 0; m < of_cpu && !gpu_ms.empty(); ++m) {
    const GramSpectrum a = SpectrumOf(by_cpu.data() + m * rows, rows), b = SpectrumOf(by_gpu.data() + m * rows, rows);
    differ += std::memcmp(&a, &b, sizeof a) != 0;
  }
  std::printf("{\"grams\": %lld, \"rows\": %lld, \"cpu_one_core_ms\": %.2f", static_cast<long long>(grams),
              static_cast<long long>(rows), cpu_ms / static_cast<double>(of_cpu) * static_cast<double>(grams));
  if (!gpu_ms.empty()) {
    std::sort(gpu_ms.begin(), gpu_ms.end());
    std::printf(", \"gpu_ms\": {\"median\": %.2f, \"min\": %.2f, \"max\": %.2f}, \"signals_differ\": %d",
                gpu_ms[gpu_ms.size() / 2], gpu_ms.front(), gpu_ms.back(), differ);
  }
  std::printf("}\n");
  return differ == 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) { return Main(argc, argv); }
