// gpu_spectra.h: eigenvalues of many small symmetric matrices on a GPU, by cuSOLVER.
//
// A part of libbellwether_bank.so (gpu_bank.h; bw_bank_abi() speaks for both).  cuSOLVER
// itself is opened at run time, because it is larger than all of Bellwether: it comes with
// the CUDA Toolkit 12.6 or later and with PyTorch.
//
// Every function returns 0, or not 0 and has a sentence in bw_spectra_error(); then no
// eigenvalue was written, and the handle is of no use any more but to be closed.  One call
// at a time for a handle; it shares nothing with a bw_bank.

#ifndef BELLWETHER_KERNELS_GPU_SPECTRA_H_
#define BELLWETHER_KERNELS_GPU_SPECTRA_H_

#include <cstdint>

#include "bellwether/kernels/gpu_bank.h"

extern "C" {

struct bw_spectra;

// The sentence of the calling thread's last failure; "" before the first.
BW_BANK_EXPORT const char* bw_spectra_error(void);
// Opens device 0.  `cusolver`: the library as dlopen takes it, or null or "" for
// libcusolver.so of a version that is known.
BW_BANK_EXPORT int bw_spectra_open(bw_spectra** spectra, const char* cusolver);
BW_BANK_EXPORT void bw_spectra_close(bw_spectra* spectra);
// What cpu::SymmetricEigenvalues() does: eigenvalues [count][n], rising, of finite symmetric
// matrices [count][n][n], which stay as they are; n in 1..512.  Ends when they are there.
BW_BANK_EXPORT int bw_spectra_eigenvalues(bw_spectra* spectra, int64_t n, int64_t count, const double* matrices,
                                          double* values);

}  // extern "C"

#endif  // BELLWETHER_KERNELS_GPU_SPECTRA_H_
