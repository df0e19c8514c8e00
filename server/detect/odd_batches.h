// odd_batches.h: which of the newest batches are no data like those before, by what a step has lost.
//
// A step changes the weights by little, so a loss that jumps within one step is the batch's.  Of each step:
// the mean loss, the largest of a sequence, how far that one lies above the mean, and the share of labels that
// repeat the one before.  A score is (value - median) / (90 % quantile - median) of the last 96 usual steps.
//
//   odd, far odd   a score is beyond limits that one healthy step in some hundreds, or some thousands, passes
//   bad            an odd batch of which some sequences are usual, or whose labels repeat, or that is worse than
//                  chance: no change of the training makes a batch so
//                  Where neighbours in the past are alike, the first must also leave the step before it at once, by
//                  more than any has
//   found          so many far odd of the 4 newest, or odd of the 6 newest, that chance has them in
//                  kChance of all looks, two of them bad, after a step that was usual.  How often a single
//                  batch is odd the run tells itself.
//
// What grows over several steps is no odd batch.  It needs 32 steps.  What is odd enters no past until it has
// been so for `relearn` steps in a row.  Values that are not known are NaN.
//
// Not thread-safe.

#ifndef BELLWETHER_SERVER_DETECT_ODD_BATCHES_H_
#define BELLWETHER_SERVER_DETECT_ODD_BATCHES_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace bellwether::server {

class OddBatches {
 public:
  struct Batch {
    int64_t step = 0;
    float mean = 0, largest = 0, repeated = 0;
  };
  // Judges a batch.  `rates_rose`: weights may have moved by more than usual.
  void Observe(const Batch& batch, int32_t relearn, bool rates_rose);
  // Learns it unjudged.
  void Learn(const Batch& batch);

  bool found() const { return found_ && quiet_ == 0; }
  // The group that was found is over, with this batch.
  bool ended() const { return found_ && quiet_ == kQuiet; }
  // Odd batches are about: a loss that is up may be theirs.
  bool lasts() const { return found_ && quiet_ < kQuiet; }
  // The newest batch may be bad by itself, as far as is known.
  bool looks_bad() const { return group_ == 0 || (group_jumped_ && newest_[0].bad); }
  int64_t first_step() const { return group_first_; }
  int64_t last_step() const { return group_last_; }
  int32_t count() const { return group_; }
  // Of the newest batch; NaN where it is not known, or what it is held against.
  double score_of_mean() const { return scores_[kMean]; }
  double score_of_repeated() const { return scores_[kRepeated]; }
  // Of the usual steps; NaN: too few.
  double usual_mean() const { return usual_mean_; }
  double usual_largest() const { return usual_largest_; }
  // The worst of the group.
  double worst_mean() const { return worst_mean_; }
  double worst_largest() const { return worst_largest_; }
  double worst_repeated() const { return worst_repeated_; }
  void Clear() { *this = {}; }
  size_t memory_bytes() const { return recent_.size() * kPast * sizeof(float); }

  template <class A>
  void Visit(A& a) {
    for (Recent& recent : recent_) a(recent.values), a(recent.next);
    for (Odd& odd : newest_) a(odd.level), a(odd.bad);
    a(start_), a(before_), a(in_row_), a(odd_rate_), a(far_rate_), a(looks_), a(group_), a(group_far_), a(quiet_);
    a(group_first_), a(group_last_), a(group_jumped_), a(found_), a(worst_mean_), a(worst_largest_);
    a(worst_repeated_), a(usual_mean_), a(usual_largest_);
  }
  bool Consistent() const;

 private:
  static constexpr size_t kPast = 96;
  static constexpr int32_t kQuiet = 6;  // Usual batches after which a group is over.
  enum Series { kMean, kLargest, kAbove, kRepeated, kSeries };
  struct Recent {
    std::vector<float> values;  // A ring once it is full.
    uint32_t next = 0;
    void Push(float value);
  };
  struct Odd {
    uint8_t level = 0;  // 1: odd, 2: far odd.
    bool bad = false;
  };
  static std::array<float, kSeries> SeriesOf(const Batch& batch);
  void Add(const std::array<float, kSeries>& values);
  // Sets scores_.
  void Score(const std::array<float, kSeries>& values);
  // Whether one of these values, whose scores are odd, is new: it does not follow from what is like its neighbours.
  bool Leaves(const std::array<float, kSeries>& values) const;
  void CloseGroup();

  std::array<Recent, kSeries> recent_;
  std::array<Odd, kQuiet> newest_;  // The newest first.
  std::array<double, kSeries> scores_{};
  float start_ = 0;    // The first mean loss; 0: none yet.
  double before_ = 0;  // The largest score of the step before.
  int32_t in_row_ = 0;
  // Odd ones of the looks lately, those of groups that were found left out.
  double odd_rate_ = 0, far_rate_ = 0, looks_ = 0;
  int32_t group_ = 0, group_far_ = 0, quiet_ = 0;
  int64_t group_first_ = -1, group_last_ = -1;
  bool group_jumped_ = false, found_ = false;
  double worst_mean_ = 0, worst_largest_ = 0, worst_repeated_ = 0;
  double usual_mean_ = 0, usual_largest_ = 0;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_DETECT_ODD_BATCHES_H_
