// truth.h: what became of a recorded run, whatever anybody said of it.
//
//   t_sigma  first step at which a head's sigma(W_Q) is above 20 and has at
//            least doubled within 500 steps
//   heads    those of which that holds within 500 steps from t_sigma on, the
//            first to do so first
//   t_loss   the mean of the 50 losses after it, and of those after the 199
//            steps that follow, is 0.5 above the least such mean so far
//
// Memory: 500 steps of sigma, 50 of loss.  Not thread-safe.

#ifndef BELLWETHER_TOOLS_LAB_TRUTH_H_
#define BELLWETHER_TOOLS_LAB_TRUTH_H_

#include <cstdint>
#include <deque>
#include <limits>
#include <vector>

#include "server/model/run_types.h"
#include "server/model/step_sample.h"

namespace bellwether::server {

struct Truth {
  int64_t t_sigma = -1, t_loss = -1;  // Steps; -1 = never.
  std::vector<Head> heads;
  int64_t steps = 0;  // The last step.
};

class TruthFinder {
 public:
  // Samples in order of their steps; one without the signal says nothing of it.
  void Observe(const StepSample& sample);
  const Truth& truth() const { return truth_; }

 private:
  void ObserveNorms(const StepSample& sample);
  void ObserveLoss(int64_t step, double loss);

  struct Norms {
    int64_t step;
    std::vector<float> sigma;  // [layers][heads]
  };

  Truth truth_;
  std::deque<Norms> norms_;
  std::deque<double> losses_;
  double least_mean_ = std::numeric_limits<double>::infinity();
  int64_t means_off_ = 0;  // How many in a row have been 0.5 above.
};

}  // namespace bellwether::server

#endif  // BELLWETHER_TOOLS_LAB_TRUTH_H_
