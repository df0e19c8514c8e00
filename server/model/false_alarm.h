// false_alarm.h: what people said of an illness, and which illness an alert is of.
//
// An alert's key ends with it, and what comes back has a new one.  To people it is the
// same illness if it has the same cause at the same place.  A place is the run, a layer
// (heads of a layer are one place), an expert of a layer, or a tensor, module or own
// signal by its name.

#ifndef BELLWETHER_SERVER_MODEL_FALSE_ALARM_H_
#define BELLWETHER_SERVER_MODEL_FALSE_ALARM_H_

#include <cstdint>
#include <string>
#include <vector>

#include "server/model/alert_transition.h"

namespace bellwether::server {

struct Illness {
  std::string cause;
  std::string rule;                 // Where the cause is unknown: of two rules it is two illnesses.
  std::vector<std::string> places;  // Sorted; empty = the run as a whole.
};

// Of a transition that fires: one that resolves has neither cause nor evidence.
Illness IllnessOf(const AlertTransition& firing);

// Whether a judgment of `judged` is one of `found`: the same cause, at no other place.
bool Covers(const Illness& judged, const Illness& found);

struct FalseAlarm {
  std::string key;  // Of the alert of which it was said; not stored.
  std::string by;
  std::string reason;
  int64_t time_unix_ns = 0;
  Severity severity = Severity::kNone;  // Of the alert then, as `step`.
  int64_t step = 0;
  Illness illness;
  bool undone = false;  // What was said before is taken back.
};

// What was said last of the illness, of all that was `said`, oldest first; null: nothing.
const FalseAlarm* LastSaid(const std::vector<FalseAlarm>& said, const Illness& illness);

// Whether that mutes an alert of the illness.  What is worse than was judged is news.
bool Mutes(const FalseAlarm* said, Severity severity);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_MODEL_FALSE_ALARM_H_
