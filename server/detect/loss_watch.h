// loss_watch.h: the run-level series: loss and gradient norm, every step.
//
// Impulse: a value `impulse_sigma` standard deviations above the mean of the
// values before it (never itself).  It enters the window only once it has
// lasted `persist_steps` and is the new normal; until then the window stands
// still.  An impulse is information: data spikes do it and are over soon.
// Jump, of the gradient norm alone: it is above all of its past (rank_jump.h).
// Off course: the smoothed loss stays above its own minimum.
// Values that are not finite enter nothing; rule "nonfinite" speaks of them.
//
// Not thread-safe.

#ifndef BELLWETHER_SERVER_DETECT_LOSS_WATCH_H_
#define BELLWETHER_SERVER_DETECT_LOSS_WATCH_H_

#include <cmath>
#include <cstdint>
#include <vector>

#include "server/detect/finding.h"
#include "server/detect/judge_options.h"
#include "server/detect/rank_jump.h"

namespace bellwether::server {

// The newest values of one series and how a further one stands to them.
class ValueWindow {
 public:
  // `value` in standard deviations above the mean; 0 until the window is full.
  double Score(double value, int32_t size) const;
  double mean() const;
  bool full(int32_t size) const { return values_.size() == static_cast<size_t>(size); }
  void Push(float value, int32_t size);
  // Keeps the newest `size` values at most.
  void Shrink(int32_t size);
  void Clear();

  template <class A>
  void Visit(A& a) {
    a(values_), a(next_);
  }

 private:
  std::vector<float> values_;  // A ring once it is full.
  uint32_t next_ = 0;
};

class LossWatch {
 public:
  explicit LossWatch(const LossOptions& options) : options_(options) {}

  // Goes on under other thresholds with what it has seen.
  void SetOptions(const LossOptions& options);
  void ObserveLoss(int64_t step, float loss);
  void ObserveGradient(int64_t step, float gradient);
  // Appends what holds now.  `course_alone`: no spikes.
  void FindLoss(int64_t step, bool course_alone, std::vector<Finding>* out) const;
  void FindGradient(int64_t step, std::vector<Finding>* out) const;
  // The largest smoothed loss so far; 0: none yet.
  double highest() const { return start_; }
  // Since when the smoothed loss has been off its course; -1: it is not.
  int64_t off_course_since() const { return high_since_; }
  // The minimum that it is held against, and how far single losses scattered there.
  double minimum() const { return minimum_; }
  double scatter() const { return noise_ * std::sqrt(static_cast<double>(options_.mean_values)); }
  // Something announced may raise both: what is normal is learnt anew.  With
  // `keep_course` a loss that is off its course stays held against the past.
  void Excuse(bool keep_course);

  template <class A>
  void Visit(A& a) {
    a(loss_), a(recent_), a(gradient_);
    a(minimum_known_), a(minimum_), a(smoothed_), a(noise_), a(start_), a(rise_), a(high_since_);
  }
  // What came later, which older states lack.
  template <class A>
  void VisitLater(A& a) {
    a(gradient_jump_);
  }
  bool Consistent() const { return gradient_jump_.Consistent(); }

 private:
  // An excursion of one series beyond its window.
  struct Impulse {
    ValueWindow window;
    int64_t since = -1;  // -1: none.
    int32_t values = 0;
    double value = 0;
    double threshold = 0;
    double baseline = 0;
    template <class A>
    void Visit(A& a) {
      a(window), a(since), a(values), a(value), a(threshold), a(baseline);
    }
  };
  // `value` and the window are in the same scale (ln for gradients).
  void Follow(int64_t step, float value, double least_rise, Impulse* impulse) const;

  LossOptions options_;
  Impulse loss_;
  Impulse gradient_;        // In ln.
  RankJump gradient_jump_;  // As well.
  ValueWindow recent_;      // Of the smoothed loss.
  bool minimum_known_ = false;
  double minimum_ = 0;
  double smoothed_ = 0;
  double noise_ = 0;  // Standard error of the smoothed loss at its minimum.
  double start_ = 0;  // The largest smoothed loss so far.
  double rise_ = 0;   // Above the minimum: off course.
  int64_t high_since_ = -1;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_DETECT_LOSS_WATCH_H_
