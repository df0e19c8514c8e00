// corruption_watch.h: weights and gradients that jump from one sample to the next, at one place alone.
//
// An optimizer moves all weights by little and alike.  A flipped bit of an exponent, a broken device or a
// tensor that was overwritten moves one.
//
// weight    sigma(W_Q) or sigma(W_K) of a head, or the root mean square of a parameter, has risen to
//           corruption.weight_factor times what it was in the sample before, and more where steps lie between
// gradient  the largest element of a parameter's gradient is corruption.gradient_factor times the largest of its
//           own past
//
// At one place alone: the median of all places of the same kind has changed by less than kSharedMax.  Where there
// are fewer than kPlacesMin to compare with, the factor is squared.
//
// A weight that has jumped stays so: it is found until it is back, or for corruption.relearn_samples, and its
// reference is what it was before.  A gradient is found in its sample only.
//
// Not thread-safe.

#ifndef BELLWETHER_SERVER_DETECT_CORRUPTION_WATCH_H_
#define BELLWETHER_SERVER_DETECT_CORRUPTION_WATCH_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "server/detect/finding.h"
#include "server/detect/judge_options.h"
#include "server/model/row_names.h"
#include "server/model/run_types.h"
#include "server/model/step_sample.h"

namespace bellwether::server {

class CorruptionWatch {
 public:
  explicit CorruptionWatch(const CorruptionOptions& options) : options_(options) {}
  void SetOptions(const CorruptionOptions& options) { options_ = options; }

  // Judges a sample.  `names` are those of tensors, null = none.  False: there was nothing to judge.
  bool Observe(const StepSample& sample, const RowNames* names);
  // The worst first.
  std::vector<Finding>* findings() { return &findings_; }
  // Whether a weight of this layer has jumped and is not back.
  bool spoils(int32_t layer) const;
  // Weights are others from here on: a checkpoint was restored, or a new attempt begins.
  void Forget();
  size_t memory_bytes() const;

  template <class A>
  void Visit(A& a) {
    for (std::vector<Place>& places : weights_) a(places);
    a(gradients_);
  }
  bool Consistent() const;

 private:
  // One head or parameter.
  struct Place {
    float value = 0;     // The reference; 0: none yet.  Of a gradient: the largest of its past, which fades.
    int64_t step = -1;   // At which it was so.
    int64_t since = -1;  // At which it jumped; -1: it has not.
    uint16_t count = 0;  // Samples: of a gradient's past, or since a weight has jumped.
    template <class A>
    void Visit(A& a) {
      a(value), a(step), a(since), a(count);
    }
  };
  enum Kind : uint8_t { kQueries, kKeys, kTensors };
  static constexpr int kKinds = 3;
  struct Jump {
    size_t place;
    double from, to;
    int64_t from_step, since;
  };

  void JudgeWeights(Kind kind, const StepSample& sample, std::span<const float> values);
  void JudgeGradients(const StepSample& sample);
  void Name(const StepSample& sample, const RowNames* names);

  CorruptionOptions options_;
  std::array<std::vector<Place>, kKinds> weights_;
  std::vector<Place> gradients_;
  int32_t heads_ = 0, kv_heads_ = 0;
  std::array<std::vector<Jump>, kKinds> jumps_;  // Of the last sample.
  std::vector<Jump> spikes_;
  std::vector<Finding> findings_;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_DETECT_CORRUPTION_WATCH_H_
