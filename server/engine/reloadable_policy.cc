#include "server/engine/reloadable_policy.h"

#include <memory>
#include <string>

namespace bellwether::server {

PolicyMessage ServerPolicy(const PolicyPtr& policy) {
  return {.text = std::make_shared<const std::string>(policy->text), .by = kServerName};
}

}  // namespace bellwether::server
