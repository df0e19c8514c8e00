// synthetic_places.h: what a synthetic run reports of its tensors, experts, ranks, sequences, own signals
// and laws, so that the families that judge them have something quiet to judge.
//
// In ln, per place, with unit noise u of the run's kind and U that all places of a signal share:
//   x(step) = level + trend(step) + sigma u + shared U
// Measured were recordings of the benchmark's train split (instabilities/README.md), from step 200 on: 20
// healthy ones, and 95 others before their fault.  These are 43,782 steps of decoders with 2 or 3 layers.  Each
// place's straight line in ln(step) was taken off, and then the median of all places.  In brackets: 5 and 95 %.
//
//   signal               level  places  sigma                 shared  trend
//   gradient norm        -2.8   1.4     0.20 (0.085 to 0.43)  0.21    step^0.39 (-0.57 to 2.1)
//   its largest element  -2.2 of the norm   0.29 (0.17 to 0.51)
//   change over rate     -1.49  0.18    0.10 (0.02 to 0.24)
//   second-moment lag    -0.06  0.25    0.14 (0.04 to 0.39)   0.13
//   largest lag of all   0.39           0.19 (0.07 to 0.31)
//   weight RMS           -3.5 (gains of norms: 0)  0.25, and 0.002 AR(0.9)    grows as below
//   expert's share       0      0.18    0.18 (0.11 to 0.35)
//   router's entropy     -0.10          0.012
//   sequence, largest over mean  0.196  0.092
//   repeated labels      ln 0.22             0.33
//   reward, KL, entropy  0.51, 1.0, 4.5      0.125, 0.095, 0.020
//
//   * Neighbours are not correlated there (the median correlation is -0.15 to 0.15), but for weights (0.67).
//     Kurtoses are 2.6 to 3.6, 95 % of gradient norms' below 6.7.  So noise is white and normal in a run as
//     recorded.  Heavy tails are Student's t with 5 degrees of freedom, of kurtosis 9.  With 3, an element of a
//     gradient is 10^4 times as large as ever once in 360,000 values.  No recorded one is, and one that is so alone
//     is what a flipped bit looks like.
//   * A trend of gradients goes on to step 1,000, as far as recordings say so.
//   * A weight is the root of r^2 (1 + (a A^0.6)^2), with A the sum of the learning rates, of 0.9 at step
//     900, and ln a of -0.1 with a standard deviation of 0.86.  Recorded weights grow by 0.30 in ln (-0.03 to 1.36).
//   * An own signal that compares two policies is 0 exactly, as recorded.
//   * In each step the loss has the noise of synthetic_run.h, 0.08, of the run's kind, where correlations
//     count in steps: so do those of sequences and own signals.
//   * The learning rate warms up over 100 steps to 1e-3 and falls to a tenth by a cosine.
//   * A sample covers the changes of a sixteenth of the tensors in turn, the attention laws of one layer, and
//     those of a layer's linear modules.
//
// Assumed, as no recording reports it: the norm of a rank's gradient has the noise of the recorded runs' own
// gradient norms (0.29), whose batch is as small.  Attention laws and shadow check are as far off as independent
// roundings can make them, which is what their limits are made for: normal numbers of variance 1, and means of 16
// squares.  Laws of modules are so, too, where recorded ones are at most 0.005 off.  Neither has heavy tails:
// that would be a fault.
//
// Not thread-safe.

#ifndef BELLWETHER_TOOLS_LAB_SYNTHETIC_PLACES_H_
#define BELLWETHER_TOOLS_LAB_SYNTHETIC_PLACES_H_

#include <cstdint>
#include <vector>

#include "server/model/row_names.h"
#include "server/model/run_types.h"
#include "server/model/step_sample.h"
#include "tools/lab/synthetic_noise.h"
#include "tools/lab/synthetic_run.h"

namespace bellwether::server {

class SyntheticPlaces {
 public:
  explicit SyntheticPlaces(const SyntheticOptions& options);

  // Adds what is no head to the run's layout.
  void Describe(RunDescription* run) const;
  const RunRows& rows() const { return rows_; }
  // The noise of the loss, in ln; of white, correlated or other noise as the kind says.
  double NextLoss(int64_t step);
  // To a sample of any step, with its loss and gradient norm.
  void AddEach(StepSample* sample);
  // To one of a step that samples.
  void AddSampled(StepSample* sample);

 private:
  struct Place {
    double level = 0, exponent = 0, noise = 0;
    double slow = 0;  // State of the correlated noise, of variance 1.
    double wave_steps = 0, wave_begin = 0;
  };
  // The table above.
  struct Statistics {
    double level, places, noise, noise_places, exponent = 0, exponent_places = 0;  // noise_places: of ln sigma.
  };
  struct Weight {
    double size = 0, growth = 0, slow = 0;
    bool is_gain = false;
  };

  Place Make(const Statistics& statistics);
  std::vector<Place> Make(size_t count, const Statistics& statistics);
  void MakeTensors();
  // The next value of a place, as x above without what is shared.  `gap`: values since the last one.
  double Next(int64_t step, double gap, Place* place);
  double RateAt(int64_t step) const;
  double SumOfRates(int64_t step) const;
  // `value` of a row's number.
  template <typename Value>
  void Put(SignalId signal, StepSample* sample, const Value& value);
  template <typename Value>
  void PutScalar(SignalId signal, StepSample* sample, const Value& value);
  void AddTensors(StepSample* sample, double gap);
  void AddExperts(StepSample* sample, double gap);
  void AddLaws(StepSample* sample);

  const SyntheticOptions options_;
  SyntheticNoise random_;
  RunRows rows_;
  std::vector<Place> gradients_, largest_, changes_, lags_, loads_, entropies_, ranks_, own_;
  Place shared_gradient_, shared_lag_, lag_, sequences_, repeated_, loss_;
  std::vector<Weight> weights_;
  int64_t sampled_at_ = -1, turn_ = 0;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_TOOLS_LAB_SYNTHETIC_PLACES_H_
