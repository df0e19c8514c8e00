// announced_change.h: something about a run that was changed on purpose, and its words.
//
// Pure functions; safe from any thread.

#ifndef BELLWETHER_SERVER_DETECT_ANNOUNCED_CHANGE_H_
#define BELLWETHER_SERVER_DETECT_ANNOUNCED_CHANGE_H_

#include <cstdint>
#include <limits>
#include <string>

#include "server/model/run_types.h"

namespace bellwether::server {

struct AnnouncedChange {
  EventKind kind = EventKind::kNone;
  int64_t step = -1;
  // NaN = not known.  `from` is told of the learning rate only; of a restore
  // `to` is the step of the checkpoint.
  double from = std::numeric_limits<double>::quiet_NaN();
  double to = std::numeric_limits<double>::quiet_NaN();

  template <class A>
  void Visit(A& a) {
    a(kind), a(step), a(from), a(to);
  }
};

// Whether `kind` announces a change that may disturb what is measured.
bool IsChange(EventKind kind);
// "the learning rate rose tenfold at step 1,000"
std::string WordsOf(const AnnouncedChange& change);
// What to do about a loss that has risen with it.
std::string AdviceOn(const AnnouncedChange& change);
// "1,000"
std::string StepWords(int64_t step);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_DETECT_ANNOUNCED_CHANGE_H_
