// scale_watch.h: tensors that do not fit in 8 bits, since a scale of theirs does not, by stats=fp8.
//
// A wrong scale, or one that stays while its tensor grows, clamps the largest elements to the largest number of the
// format, or makes the small ones 0.  Of each row, an input, a weight or a gradient of a module, two shares are
// judged: of the elements that are at the largest number, and of those that have become 0.
//
// A share is off above parameters.saturated_share or parameters.flushed_share, if it is kScaleBeyond times what is
// usual, the smallest of the row's first kScaleSamples.  Many scales in one tensor, or many elements that are equal,
// put a steady share there by themselves.  Before that is known, and whatever is usual, kScaleFar times the level is
// off.  A row that has had more than half of its elements there from the start is not judged.
//
// One sample says nothing: with delayed scaling the first step has no scale yet.  parameters.scale_samples in a row
// that cover the row are a warning, until the share is usual again.  No change of the training makes it right, so
// none excuses it.
//
// The state is 48 bytes a row.  Not thread-safe.

#ifndef BELLWETHER_SERVER_DETECT_SCALE_WATCH_H_
#define BELLWETHER_SERVER_DETECT_SCALE_WATCH_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "server/detect/finding.h"
#include "server/detect/judge_options.h"
#include "server/detect/news.h"
#include "server/model/row_names.h"
#include "server/model/step_sample.h"

namespace bellwether::server {

inline constexpr double kScaleBeyond = 4, kScaleFar = 10;
inline constexpr uint16_t kScaleSamples = 4;

class ScaleWatch {
 public:
  explicit ScaleWatch(const ParametersOptions& options) : options_(options) {}
  void SetOptions(const ParametersOptions& options) { options_ = options; }

  // Judges a sample; `names` are those of modules, null = none, and then nothing is.  What was off is news again
  // after `quiet_steps`.  False: it tells of no tensor in 8 bits.
  bool Observe(const StepSample& sample, const RowNames* names, int64_t quiet_steps);
  // Puts what is off before the findings of its family, which may follow from it.
  void AddTo(std::vector<Finding>* findings) const;
  // A new attempt begins, which may scale otherwise.
  void Rewind();
  size_t memory_bytes() const { return rows_.capacity() * sizeof(Row); }

  template <class A>
  void Visit(A& a) {
    a(news_), a(rows_);
  }
  bool Consistent() const { return rows_.size() <= static_cast<size_t>(kNamedRowsMax); }

 private:
  struct Course {
    float usual = 0, value = 0;  // Value: of the last sample that covers the row.
    uint16_t seen = 0;           // Samples that `usual` is of, kScaleSamples at most.
    uint16_t off = 0;            // In a row.
    bool told = false;
    int64_t since = -1;
    template <class A>
    void Visit(A& a) {
      a(usual), a(value), a(seen), a(off), a(told), a(since);
    }
  };
  enum Share { kSaturated, kFlushed, kShares };
  struct Row {
    std::array<Course, kShares> of;
    template <class A>
    void Visit(A& a) {
      for (Course& course : of) a(course);
    }
  };
  struct Off {
    size_t row;
    Share share;
    double limit;
  };

  double LevelOf(Share share) const { return share == kSaturated ? options_.saturated_share : options_.flushed_share; }
  double LimitOf(const Course& course, double level) const;
  void Tell(const std::vector<Off>& off, const RowNames& names);

  ParametersOptions options_;
  News news_;
  std::vector<Row> rows_;
  std::vector<Finding> findings_;  // Of the last sample.
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_DETECT_SCALE_WATCH_H_
