// lag_watch.h: second moments that do not follow, in any step, by moment_lag_max of stats=steps.
//
// The largest lag since the sample before is off if it is above parameters.lag_level, and lies beyond all of its
// past by parameters.range_factor times the past's range, as logarithms.  Spikes of the loss came behind such a
// level where it was found (StableAdamW).  But small batches lie above it now and then, and every run does in its
// first steps, so the level alone would name healthy runs.
//
// The past are 128 to 192 samples (PastRange).  What is off enters none until it has been so for
// parameters.relearn_samples; then it is the new normal.  One sample is information, parameters.lag_samples in a
// row are a warning.
//
// Not thread-safe.

#ifndef BELLWETHER_SERVER_DETECT_LAG_WATCH_H_
#define BELLWETHER_SERVER_DETECT_LAG_WATCH_H_

#include <cstdint>
#include <vector>

#include "server/detect/finding.h"
#include "server/detect/judge_options.h"
#include "server/detect/news.h"
#include "server/detect/past_range.h"
#include "server/model/step_sample.h"

namespace bellwether::server {

class LagWatch {
 public:
  explicit LagWatch(const ParametersOptions& options) : options_(options) {}
  void SetOptions(const ParametersOptions& options) { options_ = options; }

  struct Context {
    bool excused = false;     // Something announced may change what is usual: it is learnt, and not judged.
    int64_t quiet_steps = 0;  // After which what was off is news again.
  };
  // Judges a sample.  False: it tells of no lag, or is excused.
  bool Observe(const StepSample& sample, const Context& context);
  // Adds what is off in the last sample to the findings of its family; the worst stays first.
  void AddTo(std::vector<Finding>* findings) const;
  // A new attempt begins.
  void Rewind();
  bool has_seen() const { return seen_; }

  template <class A>
  void Visit(A& a) {
    a(seen_), a(excused_), a(past_), a(off_), a(since_), a(news_);
  }
  bool Consistent() const { return past_.Consistent(); }

 private:
  ParametersOptions options_;
  bool seen_ = false;
  bool excused_ = false;  // The last sample was.
  PastRange<64> past_;
  uint16_t off_ = 0;  // Samples in a row.
  int64_t since_ = -1;
  News news_;
  std::vector<Finding> findings_;  // One at most.
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_DETECT_LAG_WATCH_H_
