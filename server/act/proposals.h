// proposals.h: the sentence in an alert about the actions that were made for
// it.

#ifndef BELLWETHER_SERVER_ACT_PROPOSALS_H_
#define BELLWETHER_SERVER_ACT_PROPOSALS_H_

#include <string>
#include <vector>

#include "server/act/policy.h"
#include "server/model/action.h"
#include "server/model/alert_transition.h"

namespace bellwether::server {

// A sentence for each of `actions` that waits or is on its way because of this
// alert: what it is, its cost, and how it is approved, or why it cannot be; "" = none.  What the
// alert's advice names already is left out.  Thread-safe.
std::string ProposalText(const std::vector<Action>& actions, const AlertTransition& transition);

// Adds ProposalText() of `changed` to the advice.  Changes nothing else.
// Thread-safe.  If there is no action yet, a new alert says what the policy
// will do first, and when.
void AddProposals(const std::vector<Action>& changed, const Policy& policy, AlertTransition* transition);

// Takes out of an alert's advice the sentences of those of the run's `actions`
// that no longer wait for approval.  Thread-safe.
void HideEndedProposals(const std::string& run_name, const std::vector<Action>& actions, std::string* advice);
// The advice of an alert as of now: without proposals that have ended, with those of `actions` that wait for it.
// While a repair is on trial it begins with kOnTrialWords.  Thread-safe.
std::string AdviceNow(const std::vector<Action>& actions, const AlertTransition& transition);
// Whether there may be any.
bool SpeaksOfProposals(const std::string& advice);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_ACT_PROPOSALS_H_
