// alert_words.h: the words of an alert, the same wherever it reaches a person.
//
// The sentence of an alert is its summary (detect/alert_text.h).  These are its parts, and what is made of
// a transition where it is told: why, and what to do first.  Prometheus' rules have the same words
// (dashboards/alerts/rules.yml; a test compares).  Signals have the names of signal_title.h.
//
// Pure functions; safe from any thread.

#ifndef BELLWETHER_SERVER_MODEL_ALERT_WORDS_H_
#define BELLWETHER_SERVER_MODEL_ALERT_WORDS_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "server/model/alert_transition.h"

namespace bellwether::server {

// How an advice tells of an action that waits (server/act/proposals.h), and of one that need not.
inline constexpr char kProposedWords[] = "Proposed: ";
// Of one that the trainer would refuse as things stand.
inline constexpr char kNotAllowedWords[] = "Cannot be approved: ";
inline constexpr char kOnTrialWords[] = "Nothing for now: the repair is on trial, and its effect is judged soon.";
inline constexpr char kOnItsWayWords[] = "On its way by the policy: ";
// Since when heads of an alert are under repair, in its summary.
inline constexpr char kUnderRepair[] = "under repair since step ";

// "2,750"
std::string CountText(int64_t count);
// Three digits: "126", "0.0053", "6,920,000"; "NaN", "infinite".
std::string ValueText(double value);
// As a value of the signal: "86 %" of a share.
std::string SignalValueText(std::string_view signal, double value);
// Each "step 12345" becomes "step 12,345".
std::string WithStepsGrouped(std::string_view text);

// "~269 steps (~5 min)"; without the time where no step's was told.  "" if nothing is known.
std::string TimeLeftText(const Eta& eta);

// "layer 1 head 3 (and 2 more)"; "" of the run.
std::string PlaceText(const AlertTransition& alert);
// What happens: "layer 1 head 3 is drifting".
std::string HappensText(const AlertTransition& alert);
// Whether it is a rule of the server, not one that people wrote.
bool IsBuiltin(std::string_view rule);
// "drift"; a rule that people wrote has its name.
std::string NounOf(std::string_view rule, Severity severity = Severity::kWarning);

// "drift ratio 126 (limit 4)", "tied rows 86 % (limit 30 %) of layer 1 head 0" where that is not `known`.
std::string EvidenceText(const Evidence& piece, const Head& known);
// The detector of evidence that is within its limit yet.
inline constexpr char kNextInLine[] = "next in line";
// Evidence in its order, each piece once, and one of each signal, of the named head if it has any, before a second one:
// "drift ratio 126 (limit 4) since step 2,750; ...".  Without what is within its limit.
std::string WhyText(const AlertTransition& alert, size_t pieces_max);
// All of it.
std::string AllEvidenceText(const AlertTransition& alert);
// What to do first.  `link`: where it can be approved, or "".
std::string DoText(const AlertTransition& alert, const std::string& link);

// At most `bytes_max`, cut between characters.
std::string Clipped(std::string text, size_t bytes_max);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_MODEL_ALERT_WORDS_H_
