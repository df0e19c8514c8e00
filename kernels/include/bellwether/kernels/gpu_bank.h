// gpu_bank.h: libbellwether_bank.so, the detector bank on a GPU.
//
// bellwetherd opens the library at start, so that one program serves machines
// with and without a GPU; both come from one build, which bw_bank_abi()
// verifies.  The library keeps a copy of every run's windows on the device and
// adds a row to it per batch.  The host's arrays stay the truth, from which the
// copy is made anew when a row was missed.
//
// Every function but bw_bank_abi() returns 0, or not 0 and has a sentence in
// bw_bank_error().  After an error nothing was written to any run, and the bank
// can only be closed.  One call at a time.

#ifndef BELLWETHER_KERNELS_GPU_BANK_H_
#define BELLWETHER_KERNELS_GPU_BANK_H_

#include <cstdint>

#include "bellwether/kernels/detector_bank.h"

#if defined(__GNUC__)
#define BW_BANK_EXPORT __attribute__((visibility("default")))
#else
#define BW_BANK_EXPORT
#endif

namespace bellwether::kernels {

// Changes with the meaning of the structs, and of gpu_spectra.h; their size is added.
inline constexpr uint32_t kBankAbi = (2u << 16) + static_cast<uint32_t>(sizeof(BankRun));

}  // namespace bellwether::kernels

extern "C" {

struct bw_bank;

BW_BANK_EXPORT uint32_t bw_bank_abi(void);
// The sentence of the calling thread's last failure; "" before the first.
BW_BANK_EXPORT const char* bw_bank_error(void);
// Opens device 0.  `device`: at least 256 bytes, receives its name.
BW_BANK_EXPORT int bw_bank_open(bw_bank** bank, char* device);
BW_BANK_EXPORT void bw_bank_close(bw_bank* bank);
// What cpu::EvaluateDetectors() does, for `count` runs of different keys in one pass.
BW_BANK_EXPORT int bw_bank_evaluate(bw_bank* bank, bellwether::kernels::BankRun* const* runs, int32_t count);
// Frees the copy of a run that will not come again; unknown keys are none.
BW_BANK_EXPORT int bw_bank_forget(bw_bank* bank, uint64_t key);

}  // extern "C"

#endif  // BELLWETHER_KERNELS_GPU_BANK_H_
