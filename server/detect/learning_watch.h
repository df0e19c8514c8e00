// learning_watch.h: whether a run learns at all, by numbers that every job has: loss, gradient norm, learning rate
// and sigma(W_Q).
//
// constant  The loss is the same to the last bit, or the gradient norm or the learning rate is 0, for
//           learning.equal_values in a row.
// still     sigma(W_Q) of every head is the same to the last bit, for kStillSamples in a row, after it has always
//           changed.  One is enough where two samples in a row tell of no step of the optimizer, and all before did.
//           A run whose weights of attention never moved says nothing of its optimizer.
// adds up   The gradient norm rises from value to value, learning.rising_values long, by no more each time, to
//           learning.rising_factor times all of its past: gradients that are not set to zero.  Or it has risen as
//           far, no faster at the end, and no longer scatters: a sum changes by little from step to step.
// scale     The gradient norm jumps by learning.scale_factor, up or down, and stays there, while the loss is what
//           it was: a loss scale that was taken off twice, or not at all.
//
// The past are the last 64 to 96 values (PastRange).  Values that are not finite enter nothing.
//
// Not thread-safe.

#ifndef BELLWETHER_SERVER_DETECT_LEARNING_WATCH_H_
#define BELLWETHER_SERVER_DETECT_LEARNING_WATCH_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "server/detect/finding.h"
#include "server/detect/judge_options.h"
#include "server/detect/past_range.h"
#include "server/model/run_types.h"
#include "server/model/step_sample.h"

namespace bellwether::server {

class LearningWatch {
 public:
  explicit LearningWatch(const LearningOptions& options) : options_(options) {}
  void SetOptions(const LearningOptions& options) { options_ = options; }

  // Judges a sample.  `explodes`: something is known to make gradients large.  False: it has none of the numbers.
  // `lags`: second moments are behind, so that a gradient that has grown is no wrong scale.
  bool Observe(const StepSample& sample, bool explodes = false, bool lags = false);
  std::vector<Finding>* findings() { return &findings_; }
  // Something announced may change what is usual: the past is none.  What is the same stays so.
  void Excuse();
  // A new attempt begins.
  void Forget();
  size_t memory_bytes() const { return norms_.capacity() * sizeof(float); }

  // What there was nothing of in older states.
  template <class A>
  void VisitLater(A& a) {
    a(stepped_), a(stepless_);
  }
  template <class A>
  void Visit(A& a) {
    a(loss_), a(gradient_), a(rate_), a(sigma_), a(sigma_bits_), a(sigma_moved_), a(norms_), a(next_);
    a(norms_step_), a(past_), a(loss_past_), a(scaled_), a(scaled_since_), a(adding_since_), a(level_), a(values_);
  }
  bool Consistent() const;

 private:
  // A value that does not change.
  struct Same {
    float value = 0;
    int32_t count = 0;  // In a row, the first included; 0: none yet.
    int64_t since = -1;
    // Counts one more of `value`.
    void Add(float next, int64_t step);
    template <class A>
    void Visit(A& a) {
      a(value), a(count), a(since);
    }
  };

  void JudgeLoss(const StepSample& sample);
  void JudgeRate(const StepSample& sample);
  void JudgeSigma(const StepSample& sample);
  void JudgeGradient(const StepSample& sample, bool explodes, bool lags);
  // `*level`: what it is held against.
  bool AddsUp(float norm, float* level) const;
  bool AddsUpSmoothly(float* level) const;
  Finding& Add(SignalId signal, const char* detector, double value, double threshold, double baseline, int64_t since);

  LearningOptions options_;
  Same loss_, gradient_, rate_, sigma_;
  uint64_t sigma_bits_ = 0;  // Of all heads of the sample before.
  uint16_t sigma_moved_ = 0;
  uint16_t stepped_ = 0, stepless_ = 0;  // Samples that told of a step of the optimizer; in a row that did not.
  std::vector<float> norms_;             // The newest, a ring once it is full.
  uint32_t next_ = 0;
  std::vector<int64_t> norms_step_;
  PastRange<32> past_, loss_past_;
  int32_t scaled_ = 0;  // Values in a row beyond the past by the factor.
  int64_t scaled_since_ = -1;
  int64_t adding_since_ = -1;  // -1: it does not add up.
  float level_ = 0;            // That it then lies above.
  int32_t values_ = 0;         // Gradient norms so far.
  std::vector<Finding> findings_;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_DETECT_LEARNING_WATCH_H_
