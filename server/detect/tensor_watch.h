// tensor_watch.h: what is wrong with a run's parameters, by what each of them tells of itself.
//
// A step is told of only if the optimizer took it: one that a loss scaler skips is none.
//
// not finite  a gradient of such a step has elements that are not.  In the backward pass the one
//             that the model names last comes first.
// still       a parameter has a gradient, and its bits stay as they are, in `frozen.samples` samples
//             that cover it.  Either all are, or some are while others move.
//
// A gradient of exactly 0 is none: an expert that no token was sent to, a head that is not used.
// Neither is one far smaller than those of the others.  The gradient of a key's bias is 0 but for
// rounding, and what rounding leaves may be too small to move it.
//
// A parameter of 16 bits may round a small change away.  One that has stood still now and then must
// do so for far longer than before.  Whether rounding can explain it is estimated as if the type had
// 16 bits, since the type is not told, and as if the step were as large as the learning rate.  While
// that rate rises from sample to sample, nothing is said that rounding can explain.
//
// Not thread-safe.

#ifndef BELLWETHER_SERVER_DETECT_TENSOR_WATCH_H_
#define BELLWETHER_SERVER_DETECT_TENSOR_WATCH_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "server/detect/finding.h"
#include "server/detect/judge_options.h"
#include "server/model/row_names.h"
#include "server/model/step_sample.h"

namespace bellwether::server {

// Of the gradients that are not finite, with the words for it; not its severity.  `names` are those of
// tensors, null = none.
std::optional<Finding> FindNonfiniteTensors(const StepSample& sample, const RowNames* names);

class TensorWatch {
 public:
  explicit TensorWatch(const FrozenOptions& options) : options_(options) {}
  void SetOptions(const FrozenOptions& options) { options_ = options; }

  // Judges a sample.  False: there was nothing to judge.
  bool Observe(const StepSample& sample, const RowNames* names);
  // What stands still in the last sample: the worst parameters, the worst first, or the run.
  std::vector<Finding>* findings() { return &findings_; }
  // A new attempt may have another optimizer.
  void Rewind();
  bool has_seen() const { return !rows_.empty(); }
  size_t memory_bytes() const { return rows_.capacity() * sizeof(Row); }

  template <class A>
  void Visit(A& a) {
    a(still_samples_), a(still_since_), a(rate_), a(rows_);
  }
  bool Consistent() const;

 private:
  // One parameter, of the samples that cover it and in which others move.
  struct Row {
    uint16_t moved = 0;    // In so many samples, at most kCountMax.
    uint16_t still = 0;    // In so many since it moved last.
    uint16_t longest = 0;  // Of those before.
    int64_t since = -1;    // The first of `still`.
    template <class A>
    void Visit(A& a) {
      a(moved), a(still), a(longest), a(since);
    }
  };
  struct Still;
  int32_t Hold(const Row& row) const;
  static void Move(Row* row);
  void NameRun(const StepSample& sample, size_t asked);
  void NameRows(std::vector<Still>* still, size_t moving, const RowNames* names);

  FrozenOptions options_;
  int32_t still_samples_ = 0;  // In a row in which nothing moved.
  int64_t still_since_ = -1;
  double rate_ = -1;       // The learning rate of the sample before; -1: not known.
  std::vector<Row> rows_;  // At most kNamedRowsMax.
  std::vector<Finding> findings_;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_DETECT_TENSOR_WATCH_H_
