#include "server/engine/policy_in_force.h"

#include <memory>
#include <string>

namespace bellwether::server {

PolicyMessage ServerPolicy(const PolicyPtr& policy) {
  return {.text = std::make_shared<const std::string>(policy->text), .by = kServerName};
}

}  // namespace bellwether::server
