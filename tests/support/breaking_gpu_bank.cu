// libbellwether_bank.so with a device that breaks: it passes every call on to the real library beside it,
// and after BELLWETHER_BREAKING_BANK_PASSES passes [100] runs a kernel that traps.  The context is lost to
// the whole process then, as after a real fault; what follows is the real library's own handling of it.

#include <dlfcn.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "bellwether/kernels/gpu_bank.h"

namespace {

__global__ void Trap() { __trap(); }

int64_t PassesBefore() {
  const char* const text = std::getenv("BELLWETHER_BREAKING_BANK_PASSES");
  return text == nullptr ? 100 : std::atoll(text);
}

std::atomic<int64_t> passes{0};

template <typename Function>
Function* Real(const char* name) {
  static void* const library = [] {
    Dl_info here;
    dladdr(reinterpret_cast<void*>(&PassesBefore), &here);
    std::string path = here.dli_fname;
    path = path.substr(0, path.rfind('/') + 1) + "libbellwether_bank.so";
    void* const opened = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (opened == nullptr) std::fprintf(stderr, "%s\n", dlerror());
    return opened;
  }();
  auto* const function = library == nullptr ? nullptr : reinterpret_cast<Function*>(dlsym(library, name));
  if (function == nullptr) std::abort();
  return function;
}

}  // namespace

extern "C" {

uint32_t bw_bank_abi(void) { return Real<uint32_t()>("bw_bank_abi")(); }

const char* bw_bank_error(void) { return Real<const char*()>("bw_bank_error")(); }

int bw_bank_open(bw_bank** bank, char* device) { return Real<int(bw_bank**, char*)>("bw_bank_open")(bank, device); }

void bw_bank_close(bw_bank* bank) { Real<void(bw_bank*)>("bw_bank_close")(bank); }

int bw_bank_evaluate(bw_bank* bank, bellwether::kernels::BankRun* const* runs, int32_t count) {
  if (passes++ == PassesBefore()) {
    Trap<<<1, 1>>>();
    cudaDeviceSynchronize();
  }
  return Real<int(bw_bank*, bellwether::kernels::BankRun* const*, int32_t)>("bw_bank_evaluate")(bank, runs, count);
}

int bw_bank_forget(bw_bank* bank, uint64_t key) { return Real<int(bw_bank*, uint64_t)>("bw_bank_forget")(bank, key); }

}  // extern "C"
