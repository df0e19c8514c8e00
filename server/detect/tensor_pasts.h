// tensor_pasts.h: parameters whose gradient norm, update ratio or second-moment lag leaves its own past.
//
// All is judged in logarithms.  What all parameters share in a sample, as a large batch or a schedule, is
// taken off each of them first: the median of how far they are from the middle of what they were.  Where a
// sample covers few of them, it waits for others, a whole turn at most, so that there is a median.  Fewer than
// eight parameters share nothing.  What is left of each is held against its own past, of 64 to 96 samples that cover
// it.  It is off if it lies beyond all of them by parameters.range_factor times their range, and by a factor of
// parameters.rise_factor.  A burst, which is over before it counts, is remembered: what comes again must go as far
// beyond it.  Gradients that fall must do so by parameters.fall_factor; the others may fall.  So no distribution is
// assumed, and what varies much may do so.
//
// What is shared is held against its own past in the same way, by parameters.shared_factor, and says that all of them
// have left it.  An update ratio is held against the highest of the run, too: a schedule that begins again comes back
// to it.
//
// parameters.hold_samples in a row are information, parameters.persist_samples a warning.  Until it has
// been off for parameters.relearn_samples a value enters no past; then the past begins afresh.
//
// The factors are those for as many tensors as a run can have (kNamedRowsMax), however few there are.
//
// The state is 84 bytes a tensor.  Not thread-safe.

#ifndef BELLWETHER_SERVER_DETECT_TENSOR_PASTS_H_
#define BELLWETHER_SERVER_DETECT_TENSOR_PASTS_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "server/detect/finding.h"
#include "server/detect/judge_options.h"
#include "server/detect/news.h"
#include "server/detect/past_range.h"
#include "server/model/row_names.h"
#include "server/model/step_sample.h"

namespace bellwether::server {

class TensorPasts {
 public:
  explicit TensorPasts(const ParametersOptions& options) : options_(options) {}
  void SetOptions(const ParametersOptions& options) { options_ = options; }

  struct Context {
    bool excused = false;     // Something announced may change what is usual: it is learnt, and not judged.
    int64_t quiet_steps = 0;  // After which what was off is news again.
  };
  // Judges a sample; `names` are those of tensors, null = none.  False: there was nothing to judge.
  bool Observe(const StepSample& sample, const RowNames* names, const Context& context);
  // What is out of its past in the last sample: the worst parameters, the worst first, or all of them.
  std::vector<Finding>* findings() { return &findings_; }
  // A new attempt begins.
  void Rewind();
  bool has_seen() const { return seen_; }
  size_t memory_bytes() const;

  template <class A>
  void Visit(A& a) {
    a(seen_), a(excused_), a(news_);
    for (Signal& signal : signals_) a(signal);
  }
  // What earlier versions did not save.
  template <class A>
  void VisitLater(A& a) {
    for (Signal& signal : signals_) a(signal.waiting);
  }
  bool Consistent() const;

 private:
  static constexpr size_t kSignals = 3;
  // Logarithms are kept as 256 times themselves: within 0.4 %.
  using Past = PastRange<32, int16_t>;
  struct Series {
    Past past;
    // The furthest that it was in bursts, that is off for fewer samples than count.
    int16_t burst_low = 32767, burst_high = -32767;
    int16_t last = 0;    // While it is off.
    uint16_t off = 0;    // Samples in a row.
    uint32_t since = 0;  // The step of the first of them, which must fit.
    template <class A>
    void Visit(A& a) {
      a(past), a(burst_low), a(burst_high), a(last), a(off), a(since);
    }
  };
  // A parameter that a sample covers.
  struct Covered {
    uint32_t row = 0, step = 0;  // The step must fit.
    float log = 0;
    template <class A>
    void Visit(A& a) {
      a(row), a(step), a(log);
    }
  };
  struct Signal {
    std::vector<Series> rows;                                 // At most kNamedRowsMax.
    std::vector<Covered> waiting;                             // Fewer than make a median, each once.
    Series all;                                               // Of what they share,
    float shared = 0;                                         // which was this in the last sample,
    float highest = -std::numeric_limits<float>::infinity();  // and this at most.
    template <class A>
    void Visit(A& a) {
      a(rows), a(all), a(shared), a(highest);
    }
  };
  struct Off {
    size_t signal = 0, row = 0;
    double beyond = 0;  // Of the limit, as a logarithm.
    double value = 0, limit = 0, usual = 0;
    int64_t since = 0;
    uint16_t samples = 0;
  };

  // The limits of a past as logarithms; infinite where there is none.
  struct Limits {
    double low, high;
  };
  Limits LimitsOf(const Series& series, double rise, bool may_fall) const;
  // The next value of a series; true if it has been off for long enough.  An excused sample is only learnt.
  bool Take(double x, const Limits& limits, int64_t step, Series* series);
  void Judge(size_t which, const StepSample& sample);
  // What covered_ shares: enough of it.
  void JudgeShared(size_t which, int64_t step);
  void JudgeRow(size_t which, const Covered& covered);
  // Judges those that wait by what was shared before.
  void JudgeWaiting(size_t which);
  void Tell(const RowNames* names);

  ParametersOptions options_;
  bool seen_ = false;
  bool excused_ = false;  // The last sample was.
  News news_;
  std::array<Signal, kSignals> signals_;
  // Of the last sample.
  std::vector<Off> off_, all_off_;
  bool any_news_ = false;
  std::vector<Covered> covered_, without_past_;
  std::vector<double> moved_;
  std::vector<Finding> findings_;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_DETECT_TENSOR_PASTS_H_
