// policy_text.h: a policy in sentences, and the page that is made of its tables.
//
// Pure functions; safe from any thread.

#ifndef BELLWETHER_SERVER_ACT_POLICY_TEXT_H_
#define BELLWETHER_SERVER_ACT_POLICY_TEXT_H_

#include <string>

#include "server/act/policy.h"

namespace bellwether::server {

// What is done about which alert, with the numbers in force.
std::string ExplainPolicy(const Policy& policy);

// docs/reference/policy.md.
std::string PolicyReference();

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_ACT_POLICY_TEXT_H_
