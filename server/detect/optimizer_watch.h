// optimizer_watch.h: what the optimizer's own steps say of its learning rate and its second moments.
//
// Of the parameters that a sample covers it reads how large the step was, against the parameter and against the
// learning rate, and how far gradients are beyond the second moment.
//
// change   A step changes parameters by more than learning.change_share of their size: the rate is too high.  Where
//          it never rose from its first value the warm-up is missing.  Names that say bias or norm are left out:
//          these may begin at 0.
// update   A step is larger than learning.update_factor learning rates, though Adam's is 1 at most while its second
//          moment holds what was seen: moments that have underflowed are divided by.
// lag      Gradients are learning.lag_level beyond what second moments expect, in two samples in a row: these
//          follow too slowly.  Embeddings are left out: their rows are met now and then.
// rises    The learning rate rises at once to learning.jump_factor times all that it was before.
// falls    It falls at once to 1/learning.fall_factor, from where it mattered.
//
// Without second moments (SGD, Muon) nothing is said of change, update and lag.
//
// Not thread-safe.

#ifndef BELLWETHER_SERVER_DETECT_OPTIMIZER_WATCH_H_
#define BELLWETHER_SERVER_DETECT_OPTIMIZER_WATCH_H_

#include <cstdint>
#include <vector>

#include "server/detect/finding.h"
#include "server/detect/judge_options.h"
#include "server/model/row_names.h"
#include "server/model/step_sample.h"

namespace bellwether::server {

class OptimizerWatch {
 public:
  explicit OptimizerWatch(const LearningOptions& options) : options_(options) {}
  void SetOptions(const LearningOptions& options) { options_ = options; }

  // Judges a sample.  `names` are those of tensors, null = none.
  void Observe(const StepSample& sample, const RowNames* names);
  std::vector<Finding>* findings() { return &findings_; }
  // Whether the learning rate was at its highest from the first step on.
  bool no_warmup() const;
  // Whether second moments were behind in the last sample that covered them.
  bool lags() const { return behind_.samples > 0; }
  // Where they were, a gradient norm that has jumped and stays needs no second sample: it gets their cause.  The same
  // where the largest lag of the steps up to the last sample is twice learning.lag_level, and twice that before.
  void NameJump(std::vector<Finding>* of_gradient) const;
  // Something was announced: a change of the rate is meant, and moments may begin anew.
  void Excuse();
  // A new attempt begins.
  void Forget();

  template <class A>
  void Visit(A& a) {
    a(has_moments_), a(rate_), a(rate_first_), a(rate_most_), a(first_step_);
    a(jump_), a(wide_), a(large_), a(behind_), a(excused_);
  }
  // What came later, which older states lack.
  template <class A>
  void VisitLater(A& a) {
    a(step_lag_), a(step_lag_before_);
  }
  bool Consistent() const { return excused_ >= 0; }

 private:
  // What one sample says, of the parameters that it covers.
  struct Steps;
  // What holds, since when.
  struct Held {
    int32_t samples = 0;  // That show it, less those that do not.
    int32_t rows = 0;     // Of parameters, the same.
    int64_t since = -1;
    float value = 0;  // The last one that did.
    template <class A>
    void Visit(A& a) {
      a(samples), a(rows), a(since), a(value);
    }
  };
  struct Jump {
    int64_t step = -1;  // -1: none.
    float from = 0, to = 0;
    template <class A>
    void Visit(A& a) {
      a(step), a(from), a(to);
    }
  };

  Steps StepsOf(const StepSample& sample, const RowNames* names) const;
  void FollowRate(const StepSample& sample);
  void JudgeJump(int64_t step);
  void JudgeSteps(const StepSample& sample, const Steps& steps);
  Finding& Add(SignalId signal, const char* detector, double value, double threshold, int64_t since);

  LearningOptions options_;
  bool has_moments_ = false;
  float rate_ = 0, rate_first_ = 0, rate_most_ = 0;  // 0: not told yet.
  int64_t first_step_ = -1;                          // Of rate_first_.
  Jump jump_;
  Held wide_, large_, behind_;
  float step_lag_ = 0, step_lag_before_ = 0;  // The largest of the steps up to the last samples; 0: not told.
  int32_t excused_ = 0;                       // Samples that are not held against moments.
  std::vector<Finding> findings_;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_DETECT_OPTIMIZER_WATCH_H_
