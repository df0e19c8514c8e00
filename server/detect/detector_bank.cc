#include "server/detect/detector_bank.h"

namespace bellwether::server {
namespace {

class CpuDetectors final : public DetectorBank {
 public:
  void Evaluate(kernels::BankRun* run) override { kernels::cpu::EvaluateDetectors(run); }
  void Forget(uint64_t) override {}
  const char* backend() const override { return "cpu"; }
};

}  // namespace

DetectorBank* CpuDetectorBank() {
  static CpuDetectors bank;
  return &bank;
}

}  // namespace bellwether::server
