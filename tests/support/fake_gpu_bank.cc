// A library with the interface of libbellwether_bank.so and no GPU: it computes with the
// CPU and fails as devices fail.  BELLWETHER_FAKE_BANK_PASSES: passes that succeed before
// every further one fails [all]; BELLWETHER_FAKE_BANK_SPECTRA: likewise of spectra, -1 = it
// has no cuSOLVER; BELLWETHER_FAKE_BANK_ABI: what bw_bank_abi() says.

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "bellwether/kernels/gpu_bank.h"
#include "bellwether/kernels/gpu_spectra.h"
#include "bellwether/kernels/gram_spectrum.h"

namespace {

int64_t NumberOf(const char* name, int64_t otherwise) {
  const char* const text = std::getenv(name);
  return text == nullptr ? otherwise : std::atoll(text);
}

}  // namespace

struct bw_bank {
  std::atomic<int64_t> passes_left;
};

struct bw_spectra {
  int64_t passes_left;
};

extern "C" {

uint32_t bw_bank_abi(void) {
  return static_cast<uint32_t>(NumberOf("BELLWETHER_FAKE_BANK_ABI", bellwether::kernels::kBankAbi));
}

const char* bw_bank_error(void) { return "the fake device fell off the bus"; }

int bw_bank_open(bw_bank** bank, char* device) {
  *bank = new bw_bank{NumberOf("BELLWETHER_FAKE_BANK_PASSES", INT64_MAX)};
  std::snprintf(device, 256, "fake device");
  return 0;
}

void bw_bank_close(bw_bank* bank) { delete bank; }

int bw_bank_evaluate(bw_bank* bank, bellwether::kernels::BankRun* const* runs, int32_t count) {
  if (bank->passes_left-- <= 0) return 1;
  for (int32_t i = 0; i < count; ++i) bellwether::kernels::cpu::EvaluateDetectors(runs[i]);
  return 0;
}

int bw_bank_forget(bw_bank*, uint64_t) { return 0; }

const char* bw_spectra_error(void) { return "the fake device lost its cuSOLVER"; }

int bw_spectra_open(bw_spectra** spectra, const char*) {
  const int64_t passes = NumberOf("BELLWETHER_FAKE_BANK_SPECTRA", INT64_MAX);
  if (passes < 0) return 1;
  *spectra = new bw_spectra{passes};
  return 0;
}

void bw_spectra_close(bw_spectra* spectra) { delete spectra; }

int bw_spectra_eigenvalues(bw_spectra* spectra, int64_t n, int64_t count, const double* matrices, double* values) {
  if (spectra->passes_left-- <= 0) return 1;
  std::vector<double> copy(matrices, matrices + count * n * n);
  return bellwether::kernels::cpu::SymmetricEigenvalues(n, count, copy.data(), values) ? 0 : 1;
}

}  // extern "C"
