// gpu_bank.h: the detector bank on a GPU, through libbellwether_bank.so.
//
// Shards call Evaluate() with one run each.  While a pass is under way the runs
// of the others gather, and the next caller takes them all along.  One pass
// serves as many runs as wait, without a thread of its own and without a timer.
//
// When the device fails, the runs of that pass and all later ones are evaluated
// by the CPU.  No tick is lost, and no decision differs.  It is reported once.

#ifndef BELLWETHER_SERVER_DETECT_GPU_BANK_H_
#define BELLWETHER_SERVER_DETECT_GPU_BANK_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/detect/detector_bank.h"

struct bw_bank;

namespace bellwether::server {

class GpuBank final : public DetectorBank {
 public:
  // Series of one pass; what is beyond waits for the next.
  static constexpr int64_t kSeriesPerPassMax = int64_t{64} << 20;

  // UNAVAILABLE: no library, no driver or no device.  FAILED_PRECONDITION: a
  // library of another build.  `on_failure` is called once, from any thread,
  // with the reason for which the device is given up.
  static absl::StatusOr<std::unique_ptr<GpuBank>> Open(const std::string& library,
                                                       std::function<void(const std::string&)> on_failure);
  ~GpuBank() override;

  void Evaluate(kernels::BankRun* run) override;
  void Forget(uint64_t key) override;
  const char* backend() const override { return failed_ ? "cpu" : "cuda"; }

  const std::string& device() const { return device_; }
  int64_t passes() const { return passes_; }

 private:
  struct Library;
  struct Waiting {
    kernels::BankRun* run = nullptr;
    bool done = false;
  };

  explicit GpuBank(std::function<void(const std::string&)> on_failure);
  // Evaluates `batch`; false: the device failed, and nothing was written.
  bool RunPass(const std::vector<Waiting*>& batch, const std::vector<uint64_t>& forgotten);

  const std::function<void(const std::string&)> on_failure_;
  std::unique_ptr<Library> library_;
  bw_bank* bank_ = nullptr;
  std::string device_;
  std::atomic<bool> failed_ = false;
  std::atomic<int64_t> passes_ = 0;

  absl::Mutex mutex_;
  bool in_pass_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<Waiting*> waiting_ ABSL_GUARDED_BY(mutex_);
  std::vector<uint64_t> forgotten_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_DETECT_GPU_BANK_H_
