// advice.h: what to do about an alert, as data.
//
// Each case of a family has one row: when it holds, what to do first, what then.
// An alert tells the row that holds; the runbooks in dashboards/alerts/runbooks
// have the same rows as a table, which a test compares.
//
// Pure functions; safe from any thread.

#ifndef BELLWETHER_SERVER_DETECT_ADVICE_H_
#define BELLWETHER_SERVER_DETECT_ADVICE_H_

#include <cstdint>
#include <limits>
#include <string>
#include <string_view>

#include "server/detect/finding.h"
#include "server/model/alert_transition.h"
#include "server/model/run_types.h"

namespace bellwether::server {

// What the advice of an alert depends on.
struct AdviceState {
  Severity severity = Severity::kWarning;
  int32_t stage = 0;                                        // The alert's; 5 once the loss is gone.
  double sigma = std::numeric_limits<double>::quiet_NaN();  // Largest sigma(W_Q) of its heads; NaN = not known.
  double sigma_max = 30;        // Up to this one a run is repaired as it goes on (norm.rescue_sigma_max).
  std::string_view cause = {};  // Of the sign that leads.
};

// Whether the first thing to do is to stop or to go back: nothing later asks for more.
bool GoesBack(Family family, const RunDescription& run, const AdviceState& state);

// `begin`: the step from before which a checkpoint is good.
std::string AdviceText(Family family, const RunDescription& run, const AdviceState& state, int64_t begin);
// The first sentence of that, which the runbook has, too.
std::string FirstAction(Family family, const RunDescription& run, const AdviceState& state);

// The family's rows, in Markdown.
std::string RunbookTable(Family family);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_DETECT_ADVICE_H_
