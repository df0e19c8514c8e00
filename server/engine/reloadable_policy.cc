#include "server/engine/reloadable_policy.h"

#include <memory>
#include <string>

namespace bellwether::server {

absl::StatusOr<PolicyPtr> ReloadablePolicy::Find(std::string_view text) {
  return FindText(text, [](std::string_view unknown) { return ParsePolicy(unknown, "policy"); });
}

PolicyMessage ServerPolicy(const PolicyPtr& policy) {
  return {.text = std::make_shared<const std::string>(policy->text), .by = kServerName};
}

}  // namespace bellwether::server
