// spectra_bank.h: where the eigenvalues of shipped Gram matrices are computed.
//
// Every bank gives the same values to about 1e-13 of a matrix's largest.  The
// signals made of them are rounded (kernels/gram_spectrum.h) and stand in the
// log.  So no decision depends on which bank it was.

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

// The GPU's, if `options` want one and it can be had with its cuSOLVER.
// Otherwise null, and one line of the log has the reason.  A missing cuSOLVER
// is no reason not to start, also with the detectors on the GPU: the CPU's
// spectra are as good.  `on_failure` is called once, from the caller's thread,
// with the reason for which the device is given up.
std::unique_ptr<SpectraBank> OpenGpuSpectra(const BankOptions& options,
                                            std::function<void(const std::string&)> on_failure);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_DETECT_SPECTRA_BANK_H_
