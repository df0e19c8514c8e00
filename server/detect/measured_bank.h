// measured_bank.h: a detector bank whose ticks are counted and timed, as
// bellwether_detector_tick_seconds.

#ifndef BELLWETHER_SERVER_DETECT_MEASURED_BANK_H_
#define BELLWETHER_SERVER_DETECT_MEASURED_BANK_H_

#include "server/detect/detector_bank.h"
#include "server/util/clock.h"
#include "server/util/counters.h"

namespace bellwether::server {

// Thread-safe; all arguments must outlive it.
class MeasuredBank final : public DetectorBank {
 public:
  MeasuredBank(DetectorBank* bank, Counters* counters, const Clock* clock);

  void Evaluate(kernels::BankRun* run) override;
  void Forget(uint64_t key) override { bank_->Forget(key); }
  const char* backend() const override { return bank_->backend(); }

 private:
  DetectorBank* const bank_;
  const Clock* const clock_;
  Histogram* const cpu_;
  Histogram* const cuda_;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_DETECT_MEASURED_BANK_H_
