// loss_start.h: a loss that has risen since the first steps of the run, while its weights have moved far.
//
// A fine-tune begins at a low loss.  A learning rate that is too high for it loses that within some steps, before
// there is a course to leave.  Two weak witnesses make one:
//
//   first  the lower one of the first loss, and the median of the first 3
//   value  median of the 12 newest losses: loss.start_rise of the first above it, and by 0.7 of how far
//          neighbouring losses scatter
//   moved  median over heads of |ln(sigma(W_Q) / sigma(W_Q) of the first sample)|: loss.start_moved or more
//
// Training from the start moves weights as far, and its loss falls.  A healthy fine-tune has moved them by some
// hundredths by then.  It is looked for in the first kStartSteps steps of the run, and holds on while the loss is up by
// half of that.  Values that are not finite enter nothing.  Not thread-safe.

#ifndef BELLWETHER_SERVER_DETECT_LOSS_START_H_
#define BELLWETHER_SERVER_DETECT_LOSS_START_H_

#include <cstdint>
#include <vector>

#include "server/detect/finding.h"
#include "server/detect/judge_options.h"
#include "server/model/step_sample.h"

namespace bellwether::server {

class LossStart {
 public:
  explicit LossStart(const LossOptions& options) : options_(options) {}

  void SetOptions(const LossOptions& options) { options_ = options; }
  // `no_warmup`: the learning rate was at its highest from the first step on.
  void Observe(const StepSample& sample, bool no_warmup);
  // The run goes on elsewhere, or begins again: its first losses are not those of what it has now.
  void End();
  bool holds() const { return since_ >= 0; }
  // Appends what holds now.
  void Find(std::vector<Finding>* out) const;
  size_t memory_bytes() const { return first_sigma_.capacity() * sizeof(float); }

  template <class A>
  void Visit(A& a) {
    a(first_step_), a(first_), a(newest_), a(first_sigma_), a(moved_), a(rate_), a(since_), a(ended_), a(no_warmup_);
  }
  // After Visit with a reader: whether the sizes are legal.
  bool Consistent() const;

 private:
  double first() const;  // REQUIRES: first_ is full.
  double value() const;
  double MovedBy(const StepSample& sample);

  LossOptions options_;
  int64_t first_step_ = -1;
  std::vector<float> first_, newest_;  // Losses, oldest first.
  std::vector<float> first_sigma_;     // By head.
  double moved_ = 0;                   // In the newest sample that has sigma(W_Q).
  double rate_ = 0;                    // The newest learning rate; 0: it was not told.
  int64_t since_ = -1;                 // -1: it does not hold.
  bool ended_ = false;                 // Nothing is looked for any more.
  bool no_warmup_ = false;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_DETECT_LOSS_START_H_
