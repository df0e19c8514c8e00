// arithmetic_watch.h: whether layers other than attention compute right, by sums that exact
// arithmetic makes equal.
//
// A row of the law_ signals is one law at one place, "PLACE LAW" (signals.proto): the results that
// enter, joined by =, as in model.layers.3.mlp.up_proj dx=dW.  There is no list of places or laws
// here: what a client reports is judged, each in the same way.
//
// broken   (|difference| - alike) / sigma is beyond what chance gives.  sigma^2 is the variance, and
//          what roundings that are alike within a rank can add once ranks are added up.
// spoiled  what the call was given is finite and what it computed is not.
//
// One sample is enough.  Of a place the results stay that all its broken laws share, else all that
// they have.  All questions of a run share one chance of a false alarm, as in law_watch.h.
//
// Layers take turns, so a sample says nothing of a place that it did not ask.  A place that was wrong
// stays so until it has been asked again, and found right.
//
// Not thread-safe.

#ifndef BELLWETHER_SERVER_DETECT_ARITHMETIC_WATCH_H_
#define BELLWETHER_SERVER_DETECT_ARITHMETIC_WATCH_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "server/detect/finding.h"
#include "server/detect/judge_options.h"
#include "server/model/row_names.h"
#include "server/model/step_sample.h"

namespace bellwether::server {

// "model.layers.3.mlp.up_proj dx=dW": place, law, results.
struct LawName {
  std::string place, law;
  std::vector<std::string> results;
};
LawName ReadLawName(std::string_view row);

class ArithmeticWatch {
 public:
  explicit ArithmeticWatch(const ArithmeticOptions& options) : options_(options) {}
  void SetOptions(const ArithmeticOptions& options) { options_ = options; }

  // Judges a sample; `names` are those of modules, null = none.  False: there was nothing to judge.
  bool Observe(const StepSample& sample, const RowNames* names);
  // What is broken in the last sample: a finding for each law of the worst places, the worst first.
  std::vector<Finding>* findings() { return &findings_; }
  // Whether a place that was wrong has not been found right since.
  bool any_wrong() const { return !wrong_.empty(); }
  // A new attempt asks afresh.
  void Rewind() { wrong_.clear(); }
  int64_t questions() const { return questions_; }  // Of the last sample.
  int64_t samples() const { return samples_; }      // That were judged.

  template <class A>
  void Visit(A& a) {
    a(samples_), a(wrong_);
  }
  bool Consistent() const;

 private:
  struct Row;
  void Name(const std::vector<Row>& rows, const RowNames* names);

  ArithmeticOptions options_;
  int64_t samples_ = 0;          // k of the budget.
  std::vector<uint32_t> wrong_;  // Rows that were broken when they were last asked; rising.
  // Of the last sample.
  int64_t step_ = -1;
  int64_t questions_ = 0;
  double limit_ = 0;
  std::vector<Finding> findings_;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_DETECT_ARITHMETIC_WATCH_H_
