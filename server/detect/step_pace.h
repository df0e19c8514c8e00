// step_pace.h: how long a run's steps take, and what that makes of spans that are given in steps.
//
// Spans in steps were chosen on runs whose steps take 3 s or less.  A run of reinforcement learning has two
// hundred steps of minutes each: it ends before what takes 700 steps is judged at all.  A step of minutes is also a
// mean over far more tokens, so that fewer of them tell as much.
//
// So where the median step takes context.slow_step_seconds or longer, spans are shorter while the run is young.  They
// are so by a power of two, 16 at most: the largest that is not above twice context.young_steps by the steps seen.  A
// window then spans as much of the run as there is.  Behind context.young_steps all is as in other runs, so that a slow
// drift of a long training with slow steps is found as well.
//
// Not thread-safe.

#ifndef BELLWETHER_SERVER_DETECT_STEP_PACE_H_
#define BELLWETHER_SERVER_DETECT_STEP_PACE_H_

#include <array>
#include <cstdint>

#include "server/detect/judge_options.h"
#include "server/model/step_sample.h"

namespace bellwether::server {

class StepPace {
 public:
  void Observe(const StepSample& sample);
  // Wall time of a step, the median of the newest 16 that were told; 0: none was.
  double seconds() const { return seconds_; }
  // By what spans are shorter in a run that was seen for `age` steps: a power of two, 1..16.
  int32_t Shorter(const ContextOptions& options, int64_t age) const;

  template <class A>
  void Visit(A& a) {
    for (float& value : newest_) a(value);
    a(told_), a(seconds_);
  }
  bool Consistent() const;

 private:
  std::array<float, 16> newest_{};
  int32_t told_ = 0;  // Of the newest, and how many of them there are until the first time round.
  double seconds_ = 0;
};

// The options of a run whose spans are shorter by a factor of `by`, 1..16.
JudgeOptions WithShorterSpans(const JudgeOptions& options, int32_t by);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_DETECT_STEP_PACE_H_
