// spectra_bank.h: where the eigenvalues of shipped Gram matrices are computed.
//
// Every bank gives the same values to about 1e-13 of a matrix's largest; what is
// made of them is rounded (kernels/gram_spectrum.h), and what was made is in the
// log, so that no decision depends on which bank it was.

#ifndef BELLWETHER_SERVER_DETECT_SPECTRA_BANK_H_
#define BELLWETHER_SERVER_DETECT_SPECTRA_BANK_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "server/detect/bank_choice.h"

namespace bellwether::server {

class SpectraBank {
 public:
  virtual ~SpectraBank() = default;

  // Eigenvalues [count][n], in no order, of finite symmetric matrices
  // [count][n][n], which are destroyed; n in 1..512.  Never fails: what another
  // device cannot do, the CPU does.  One call at a time.
  virtual void Eigenvalues(int64_t n, int64_t count, double* matrices, double* values) = 0;
  // What bellwether_spectra_seconds calls it now: "cpu" or "cuda".
  virtual const char* backend() const = 0;
};

// The caller's own thread.  Lives as long as the process; any thread.
SpectraBank* CpuSpectraBank();

// The GPU's, if `options` want one and it can be had with its cuSOLVER; null
// otherwise, and one line of the log says why.  Where the detectors are on the
// GPU, that is no reason not to start: the CPU's spectra are as good.
// `on_failure` is told once, from the caller's thread, why the device is given up.
std::unique_ptr<SpectraBank> OpenGpuSpectra(const BankOptions& options,
                                            std::function<void(const std::string&)> on_failure);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_DETECT_SPECTRA_BANK_H_
