// detector_bank.h: where the tests of all heads are evaluated.
//
// Every bank gives the same hits for the same run, bit for bit
// (kernels/detector_bank.h); they differ in speed.  Thread-safe.

#ifndef BELLWETHER_SERVER_DETECT_DETECTOR_BANK_H_
#define BELLWETHER_SERVER_DETECT_DETECTOR_BANK_H_

#include <cstdint>

#include "bellwether/kernels/detector_bank.h"

namespace bellwether::server {

class DetectorBank {
 public:
  virtual ~DetectorBank() = default;

  // Fills in the medians and hits of `run`, whose arrays stay as they are
  // meanwhile.  Never fails: what another device cannot do, the CPU does.
  virtual void Evaluate(kernels::BankRun* run) = 0;
  // No run of this key will come again.
  virtual void Forget(uint64_t key) = 0;
  // What bellwether_detector_tick_seconds calls it now: "cpu" or "cuda".
  virtual const char* backend() const = 0;
};

// The caller's own thread.  Lives as long as the process.
DetectorBank* CpuDetectorBank();

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_DETECT_DETECTOR_BANK_H_
