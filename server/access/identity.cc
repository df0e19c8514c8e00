#include "server/access/identity.h"

#include <algorithm>

#include "server/util/glob.h"

namespace bellwether::server {

const char* NameOf(Role role) {
  switch (role) {
    case Role::kRead:
      return "read";
    case Role::kWrite:
      return "write";
    case Role::kAct:
      return "act";
    case Role::kAdmin:
      return "admin";
  }
  return "";
}

bool Identity::Covers(std::string_view run) const {
  if (!own_run.empty() && run.starts_with(own_run)) {
    const std::string_view rest = run.substr(own_run.size());
    const auto fits = [rest](const std::string& glob) { return GlobMatches(glob, rest); };
    if (std::any_of(behind_own_run.begin(), behind_own_run.end(), fits)) return true;
  }
  return std::any_of(runs.begin(), runs.end(), [run](const std::string& glob) { return GlobMatches(glob, run); });
}

bool Identity::CoversAll() const { return std::find(runs.begin(), runs.end(), "*") != runs.end(); }

}  // namespace bellwether::server
