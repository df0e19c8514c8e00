// proposals.h: what an alert says of the actions that were made for it.

#ifndef BELLWETHER_SERVER_PROPOSALS_H_
#define BELLWETHER_SERVER_PROPOSALS_H_

#include <vector>

#include "server/act/policy.h"
#include "server/store/action.h"
#include "server/store/transition.h"

namespace bellwether::server {

// Adds to the advice a sentence for each action of `changed` that waits or is
// on its way because of this alert: what it is, its cost, and how it is
// approved.  Changes nothing else.  Thread-safe.
// Where there is none yet, a new alert says what the policy will do first, and
// when.
void AddProposals(const std::vector<Action>& changed, const Policy& policy, Transition* transition);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_PROPOSALS_H_
