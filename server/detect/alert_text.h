// alert_text.h: the words of an alert: cause and summary; what to do: advice.h.
//
// Pure functions; safe from any thread.

#ifndef BELLWETHER_SERVER_DETECT_ALERT_TEXT_H_
#define BELLWETHER_SERVER_DETECT_ALERT_TEXT_H_

#include <string>
#include <vector>

#include "server/detect/finding.h"
#include "server/model/alert_transition.h"
#include "server/model/run_types.h"

namespace bellwether::server {

// "rounding drift", "logit growth", ..., "unknown".  `findings` worst first.
std::string CauseOf(Family family, const std::vector<Finding>& findings);
// One sentence: run, heads, numbers against thresholds, since when, ETA.
std::string SummaryOf(const RunDescription& run, const AlertTransition& change);
// Of an alert that goes on under repair.
std::string RepairSummaryOf(const RunDescription& run, const AlertTransition& change);
std::string RepairAdvice();

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_DETECT_ALERT_TEXT_H_
