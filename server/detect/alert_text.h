// alert_text.h: the sentence of an alert, and its cause; what to do: advice.h; its parts: server/model/alert_words.h.
//
// Pure functions; safe from any thread.

#ifndef BELLWETHER_SERVER_DETECT_ALERT_TEXT_H_
#define BELLWETHER_SERVER_DETECT_ALERT_TEXT_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "server/detect/finding.h"
#include "server/model/alert_transition.h"
#include "server/model/run_types.h"

namespace bellwether::server {

// "rounding drift", "logit growth", ..., "unknown".  `findings` worst first.
std::string CauseOf(Family family, const std::vector<Finding>& findings);
// What becomes of the loss while an alert of something else fires.
enum class LossState : uint8_t { kNotKnown, kNormal, kGone };

// "gpt: layer 1 head 3 (and 2 more) is drifting since step 2,750."
std::string SummaryOf(const RunDescription& run, const AlertTransition& change);
// The same where a finding has words of its own.
std::string OwnSummaryOf(const RunDescription& run, const std::string& words);
// What follows either: " ~269 steps (~5 min) left. Loss still normal."  `eta_words`: what comes then; "": the end.
std::string TailOf(const AlertTransition& change, std::string_view eta_words, LossState loss);
// Of an alert that goes on under repair.
std::string RepairSummaryOf(const RunDescription& run, const AlertTransition& change);
// "gpt: drift of layer 1 head 3 is over at step 4,150, after 1,400 steps (~23 min): ..."
std::string EndSummaryOf(const RunDescription& run, const AlertTransition& change, double step_seconds,
                         const std::string& why);
std::string RepairAdvice();
// Orders evidence, as messages have room for the first pieces alone.  Where `by_limits`, signals stand in the order
// in which they were found, and of each the head that is furthest beyond its limit comes first.  Else all stay, as
// what is told in words of its own.  At stage 5 the loss comes first.
void OrderEvidence(int32_t stage, bool by_limits, std::vector<Evidence>* evidence);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_DETECT_ALERT_TEXT_H_
