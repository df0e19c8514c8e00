// A library with the interface of libbellwether_bank.so and no GPU: it computes with the
// CPU and fails as devices fail.  BELLWETHER_FAKE_BANK_PASSES: passes that succeed before
// every further one fails [all]; BELLWETHER_FAKE_BANK_ABI: what bw_bank_abi() says.

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "bellwether/kernels/gpu_bank.h"

namespace {

int64_t NumberOf(const char* name, int64_t otherwise) {
  const char* const text = std::getenv(name);
  return text == nullptr ? otherwise : std::atoll(text);
}

}  // namespace

struct bw_bank {
  std::atomic<int64_t> passes_left;
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

}  // extern "C"
