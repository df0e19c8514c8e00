// loss_watch.h: the run-level series: loss and gradient norm, every step.
//
// Impulse: a value `impulse_sigma` above the mean of the `window_steps` values
// before it (never itself), the window frozen until it is over.  An impulse
// that ends within `recovery_steps` was a data spike and no alert.  Diverging:
// the smoothed loss stays above its own minimum.  NaN enters no window.
//
// Not thread-safe.

#ifndef BELLWETHER_SERVER_DETECT_LOSS_WATCH_H_
#define BELLWETHER_SERVER_DETECT_LOSS_WATCH_H_

#include <cstdint>
#include <vector>

#include "server/detect/finding.h"
#include "server/detect/judge_options.h"

namespace bellwether::server {

class LossWatch {
 public:
  explicit LossWatch(const LossOptions& options) : options_(options) {}

  // Values that were not measured: pass NaN with measured = false.
  void Observe(int64_t step, bool has_loss, float loss, bool has_gradient,
               float gradient);
  void Findings(int64_t step, std::vector<Finding>* loss,
                std::vector<Finding>* gradient) const;
  // A spike or a higher level is expected: the minimum is taken anew.
  void Excuse();

  template <class A>
  void Visit(A& a) {
    a(recent_), a(recent_next_), a(minimum_), a(smoothed_), a(noise_),
        a(high_since_), a(above_), a(start_), a(rise_);
    a(gradients_), a(gradient_next_), a(gradient_base_),
        a(gradient_high_since_), a(gradient_now_);
  }

 private:
  LossOptions options_;
  std::vector<float> recent_;  // The last mean_steps losses, a ring.
  uint32_t recent_next_ = 0;
  double minimum_ = 0;
  double smoothed_ = 0;
  double start_ = 0;  // The largest smoothed loss so far.
  double rise_ = 0;   // Above the minimum: diverging.
  double noise_ =
      0;  // Standard deviation of the smoothed loss, from the values in it.
  int64_t high_since_ = -1;
  uint8_t above_ = 0;
  std::vector<float> gradients_;
  uint32_t gradient_next_ = 0;
  double gradient_base_ = 0;
  double gradient_now_ = 0;
  int64_t gradient_high_since_ = -1;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_DETECT_LOSS_WATCH_H_
