// change_watch.h: the loss after an announced change, held against its level before it.
//
// An announced change excuses trends for a while, never a state.  What the loss
// was before the change is kept across it, and a loss that stays far above that
// is told at once, whatever was announced.
//
//   level, spread  median and robust deviation of the newest losses before it;
//                  of a restored checkpoint: what the loss was at its step
//   start          the highest level so far: what an untrained model has
//
// How far is far depends on what was changed.  A learning rate, a batch size or
// a restored checkpoint has no reason to move the level by much.  Other data,
// another sequence length and a checkpoint of which nothing is known have one:
// there only a loss counts that has lost most of what was won.
//
// What had risen before a change is not put down to it, nor excused by it: that
// stays LossWatch's.
//
// Values that are not finite enter nothing.  Not thread-safe.

#ifndef BELLWETHER_SERVER_DETECT_CHANGE_WATCH_H_
#define BELLWETHER_SERVER_DETECT_CHANGE_WATCH_H_

#include <cstdint>
#include <vector>

#include "server/detect/announced_change.h"
#include "server/detect/finding.h"
#include "server/detect/judge_options.h"

namespace bellwether::server {

// What LossWatch knows of a loss that is off its course.
struct LossCourse {
  int64_t off_since = -1;  // -1: it is not.
  double minimum = 0, scatter = 0;
};

class ChangeWatch {
 public:
  explicit ChangeWatch(const LossOptions& options) : options_(options) {}

  void SetOptions(const LossOptions& options) { options_ = options; }
  void Observe(int64_t step, float loss);
  // `start` as above.  A change within `settle_steps` of another one is held
  // against what was before both.  True: the loss had risen before by more than
  // the change may cost, which therefore excuses nothing of it.
  bool Announce(const AnnouncedChange& change, double start, const LossCourse& course, int64_t settle_steps);
  // The run goes on from `step` in a new attempt: what came behind it is gone.
  // True: it goes on behind a rise.
  bool Rewind(int64_t step, double start, const LossCourse& course);
  // Appends what holds now.
  void Find(int64_t step, std::vector<Finding>* out) const;

  template <class A>
  void Visit(A& a) {
    a(newest_), a(curve_steps_), a(curve_), a(curve_stride_), a(last_step_);
    a(change_), a(known_), a(may_move_), a(of_checkpoint_), a(level_), a(spread_), a(start_), a(kept_step_), a(until_);
    a(holds_), a(since_), a(above_), a(below_);
  }
  // After Visit with a reader: whether the sizes are legal.
  bool Consistent() const;

 private:
  double gain() const { return start_ > level_ ? start_ - level_ : 0; }
  bool start_is_known() const;
  double LostRise() const;   // Above the level: most of what was won is lost.
  double BeginRise() const;  // Above the level: far.
  double HoldRise() const;   // Above the level: not back yet.
  double LevelAt(int64_t step) const;
  void Keep(double level, double spread, double start);
  void BeginAnew();

  LossOptions options_;
  std::vector<float> newest_;  // Oldest first; since the last change that took a reference.
  // The level by step, thinned out as it grows: what a checkpoint's loss was.
  std::vector<int64_t> curve_steps_;
  std::vector<float> curve_;
  int64_t curve_stride_ = 1;
  int64_t last_step_ = -1;

  AnnouncedChange change_;
  bool known_ = false;  // Whether level_, spread_ and start_ are.
  bool may_move_ = false;
  bool of_checkpoint_ = false;  // They are those of a restored checkpoint.
  double level_ = 0, spread_ = 0, start_ = 0;
  int64_t kept_step_ = -1;  // Of the change before which they were taken.
  int64_t until_ = -1;      // So long a rise is put down to the change.
  bool holds_ = false;
  int64_t since_ = -1;             // The first of the values above it.
  int32_t above_ = 0, below_ = 0;  // Values in a row.
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_DETECT_CHANGE_WATCH_H_
