// growth_watch.h: single weights that grow step after step, by a factor, while all others stand nearly still.
//
// An optimizer moves a weight by about the learning rate a step, so what it adds to a weight's size is bounded, and
// its share falls as the weight grows.  A weight decay of the wrong sign, a scale that is applied twice, or a kernel
// that pushes to one side makes a weight grow by the same share in every step.  That is seen in the root mean
// square of a parameter's elements long before the loss shows it.
//
// The growth of a parameter is d ln(RMS) / d step between two samples that cover it.  It is off if all of this holds:
//
// past    It is parameters.growth_rate_factor times its own largest growth of the last kGrowthBlock to
//         2 kGrowthBlock samples, or of all where there are fewer, but no less than kGrowthBlock.  Where the learning
//         rate is told and has risen, that largest growth rises with it.
// slow    It doubles the parameter in fewer than parameters.growth_doubling_steps.
// others  It is growth_rate_factor times the largest growth of other layers' parameters, but for one in 16 of them.
//
// It is told once the parameter has grown to parameters.growth_factor times what it was, over
// parameters.growth_samples of such samples in a row.  Two are enough if it is 1.5 times as far beyond its past.
// Growth that slows down to 0.6 of its fastest is not told: so weights do that began small.
//
// Biases, gains of norms and routers are no such weights.  In the first steps the growth is only judged where the
// learning rate is told, since it warms up.  While it is off it enters no past, until it has been so for
// parameters.relearn_samples.
//
// The state is 72 bytes a tensor.  Not thread-safe.

#ifndef BELLWETHER_SERVER_DETECT_GROWTH_WATCH_H_
#define BELLWETHER_SERVER_DETECT_GROWTH_WATCH_H_

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "server/detect/finding.h"
#include "server/detect/judge_options.h"
#include "server/detect/news.h"
#include "server/detect/parameter_role.h"
#include "server/model/row_names.h"
#include "server/model/step_sample.h"

namespace bellwether::server {

inline constexpr uint16_t kGrowthBlock = 8;  // Samples of the past that are forgotten together.

class GrowthWatch {
 public:
  explicit GrowthWatch(const ParametersOptions& options) : options_(options) {}
  void SetOptions(const ParametersOptions& options) { options_ = options; }

  struct Context {
    bool warming = false;     // The run is in its first steps.
    bool excused = false;     // Something announced may change what is usual: it is learnt, and not judged.
    int64_t quiet_steps = 0;  // After which what was off is news again.
  };
  // Judges a sample; `names` are those of tensors, null = none, and then nothing is.  False: there was nothing to
  // judge.
  bool Observe(const StepSample& sample, const RowNames* names, const Context& context);
  // What grows in the last sample: the first that began, first.
  const std::vector<Finding>& findings() const { return findings_; }
  // Puts them before the findings of its family, which say less.
  void AddTo(std::vector<Finding>* findings) const;
  // Weights are others from here on: a checkpoint was restored, or a new attempt begins.
  void Rewind();
  size_t memory_bytes() const { return rows_.capacity() * sizeof(Row) + places_.capacity() * sizeof(Place); }

  template <class A>
  void Visit(A& a) {
    a(news_), a(rate_), a(rows_);
  }
  bool Consistent() const;

 private:
  // The largest growth of a block of samples, and the largest per learning rate.
  struct High {
    float growth = 0, per_rate = 0;
    template <class A>
    void Visit(A& a) {
      a(growth), a(per_rate);
    }
  };
  struct Row {
    float size = 0;     // Root of the mean square in the last sample that covers it; 0: none yet.
    float growth = 0;   // Up to there.
    int64_t step = -1;  // Of that sample.
    High whole, now;    // Of the last whole block, and the one under way.
    uint16_t seen = 0;  // Growths that were learnt.
    uint16_t off = 0;   // Samples in a row.
    float from = 0;     // Its size before them,
    float fastest = 0;  // and its fastest growth in them.
    int64_t since = -1;
    bool told = false;
    template <class A>
    void Visit(A& a) {
      a(size), a(growth), a(step), a(whole), a(now), a(seen), a(off), a(from), a(fastest), a(since), a(told);
    }
  };
  struct Place {
    ParameterRole role = ParameterRole::kOther;
    int32_t layer = -1;
  };
  struct Growing {
    size_t row = 0;
    double usual = 0;  // Its own largest growth before.
  };

  bool IsJudged(size_t row) const;
  bool HasOutput(const RowNames& names) const;
  // Its own largest growth that is usual, at this learning rate; at least what is never off.
  double UsualOf(const Row& row, double rate) const;
  void Learn(double growth, double rate, Row* row) const;
  // What others grow than `row` and those of its layer; sorted_ is filled on the first call for a sample.
  double GrowthOfOthers(size_t row);
  void Judge(size_t row, double growth, double usual, int64_t before, double size);
  void Tell(int64_t step, const RowNames& names);

  ParametersOptions options_;
  News news_;
  double rate_ = -1;  // The learning rate of the last sample; -1: it was not told.
  std::vector<Row> rows_;
  std::vector<Place> places_;  // By row, of those that have a name.
  // Of the last sample.
  std::vector<std::pair<float, size_t>> sorted_;  // Growths of all that is judged, the largest first; and rows.
  std::vector<Growing> growing_;
  std::vector<Finding> findings_;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_DETECT_GROWTH_WATCH_H_
