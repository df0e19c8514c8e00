// loss_step.h: a loss that from one step on is higher, and stays so.
//
// The newest 10 to 64 losses are held against the 64 before them, for each number of them.  They are a step if
//
//   more     their means differ by step_sigma standard errors, of values cut off at 3 deviations of the median;
//            of few values by more: they are of one stretch of the data more easily
//   far      and by step_rise_of_level of the level
//   sharp    the last ones before it are as low as all before, the first ones after it as high as all after.
//            Two levels are likelier, by e^2 and by more where the past wanders, than one that rises
//   new      the past has not wandered by a third as much
//   lasting  three of four are above the level, and the newest ones still are
//   flat     they rise no more: what rises from step to step is no step
//
// Easy batches are told by how many of their labels repeat the one before, where the job says so.  What that
// explains is taken off, which leaves the scatter smaller by a third in text.  Whichever of both says more holds.
//
// Such a step gives the loss's other findings their cause.  One that is above all of its past (rank_jump.h) is a
// warning by itself: 8 losses after it.
//
// Losses that are not above 0 have no level to rise from, and are not judged.  Not thread-safe.

#ifndef BELLWETHER_SERVER_DETECT_LOSS_STEP_H_
#define BELLWETHER_SERVER_DETECT_LOSS_STEP_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "server/detect/finding.h"
#include "server/detect/judge_options.h"
#include "server/detect/rank_jump.h"

namespace bellwether::server {

class LossStep {
 public:
  explicit LossStep(const LossOptions& options) : options_(options) {}

  void SetOptions(const LossOptions& options) { options_ = options; }
  // `repeated`: share of labels; NaN: not known.  `looks`: it is a usual batch's, of which a step may be found.
  void Observe(int64_t step, float loss, float repeated, bool looks);
  // Something may move the level, or the run goes on elsewhere.
  void Forget();
  bool holds() const { return holds_ || higher_.holds(); }
  // The first loss of the new level; -1: there is none.
  int64_t since() const { return holds_ ? since_ : higher_.holds() ? higher_.since() : -1; }
  // Adds a loss above all of its past, where no warning is found yet.  Name() says the rest.
  void Find(std::vector<Finding>* found) const;
  // Gives what is found of the loss, a warning at least and of no known cause, its cause.  Losses that wander, as of
  // data that is not shuffled, jump by chance, so that most steps are no warning by themselves.
  void Name(std::vector<Finding>* found) const;
  size_t memory_bytes() const { return newest_.capacity() * sizeof(Loss) + higher_.memory_bytes(); }

  template <class A>
  void Visit(A& a) {
    a(newest_), a(holds_), a(since_), a(level_), a(value_), a(limit_), a(held_), a(higher_);
  }
  // After Visit with a reader: whether the sizes are legal.
  bool Consistent() const;

 private:
  struct Loss {
    int64_t step = -1;
    float loss = 0, repeated = 0;
    template <class A>
    void Visit(A& a) {
      a(step), a(loss), a(repeated);
    }
  };
  struct Step {
    double score = 0, level = 0, rise = 0;
  };
  // Of the newest `count`; score 0: none.
  Step StepOf(const std::vector<double>& values, size_t count) const;
  // Less what the share of repeated labels explains, by the values before the newest `count`; empty: nothing.
  std::vector<double> Explained(size_t count) const;
  void Look();

  LossOptions options_;
  std::vector<Loss> newest_;  // Oldest first.
  bool holds_ = false;
  int64_t since_ = -1;
  double level_ = 0, value_ = 0, limit_ = 0;
  int32_t held_ = 0;  // Losses.
  RankJump higher_;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_DETECT_LOSS_STEP_H_
