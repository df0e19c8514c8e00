// loss_turn.h: a loss that turns: for some steps far above the lowest that it was.
//
//   value    median of the 5 newest losses
//   level    lowest median of 16 losses so far, the 5 newest left out
//   far      of the level, of what was won since the first losses, and of how far neighbouring losses scatter,
//            whichever is most
//
// It needs 21 losses, no smooth course and no announcement.  A spike of data does the same and is over soon:
// so a turn is information until it lasts, unless the learning rate has just risen.
// Values that are not finite enter nothing.  Not thread-safe.

#ifndef BELLWETHER_SERVER_DETECT_LOSS_TURN_H_
#define BELLWETHER_SERVER_DETECT_LOSS_TURN_H_

#include <cstdint>
#include <vector>

#include "server/detect/announced_change.h"
#include "server/detect/finding.h"
#include "server/detect/judge_options.h"

namespace bellwether::server {

class LossTurn {
 public:
  explicit LossTurn(const LossOptions& options) : options_(options) {}

  void SetOptions(const LossOptions& options) { options_ = options; }
  void Observe(int64_t step, float loss);
  // Something may move the level, or the run goes on elsewhere: what is lowest is learnt anew.
  void Forget();
  bool holds() const { return above_ >= options_.turn_values; }
  // The first loss of those that are far above; -1: none is.
  int64_t since() const { return since_; }
  // Appends what holds now.  `rise`: of the learning rate, just before; null: it has not risen.
  void Find(const AnnouncedChange* rise, std::vector<Finding>* out) const;

  template <class A>
  void Visit(A& a) {
    a(newest_), a(known_), a(level_), a(spread_), a(start_), a(value_), a(limit_), a(above_), a(since_);
  }
  // After Visit with a reader: whether the sizes are legal.
  bool Consistent() const;

 private:
  LossOptions options_;
  std::vector<float> newest_;  // Oldest first.
  bool known_ = false;         // Whether level_ is.
  double level_ = 0, spread_ = 0;
  double start_ = 0;  // The highest that the level could have been.
  double value_ = 0, limit_ = 0;
  int32_t above_ = 0;  // Losses in a row.
  int64_t since_ = -1;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_DETECT_LOSS_TURN_H_
