#include "server/detect/measured_bank.h"

#include <cstring>

namespace bellwether::server {

MeasuredBank::MeasuredBank(DetectorBank* bank, Counters* counters, const Clock* clock)
    : bank_(bank),
      clock_(clock),
      cpu_(counters->histogram("bellwether_detector_tick_seconds", {{"backend", "cpu"}})),
      cuda_(counters->histogram("bellwether_detector_tick_seconds", {{"backend", "cuda"}})) {}

void MeasuredBank::Evaluate(kernels::BankRun* run) {
  const int64_t begin = clock_->MonotonicNanos();
  bank_->Evaluate(run);
  const auto passed = static_cast<double>(clock_->MonotonicNanos() - begin);
  (std::strcmp(bank_->backend(), "cpu") == 0 ? cpu_ : cuda_)->Observe(passed * 1e-9);
}

}  // namespace bellwether::server
