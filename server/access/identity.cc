#include "server/access/identity.h"

#include <algorithm>

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
  if (!own_run.empty() && run == own_run) return true;
  return std::any_of(runs.begin(), runs.end(), [run](const std::string& glob) { return GlobMatches(glob, run); });
}

bool Identity::CoversAll() const { return std::find(runs.begin(), runs.end(), "*") != runs.end(); }

bool GlobMatches(std::string_view pattern, std::string_view text) {
  size_t p = 0, t = 0;
  size_t star = std::string_view::npos, resume = 0;  // The last *, and where its match ends so far.
  while (t < text.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      resume = t;
    } else if (p < pattern.size() && (pattern[p] == '?' || pattern[p] == text[t])) {
      ++p;
      ++t;
    } else if (star != std::string_view::npos) {
      p = star + 1;
      t = ++resume;
    } else {
      return false;
    }
  }
  while (p < pattern.size() && pattern[p] == '*') ++p;
  return p == pattern.size();
}

}  // namespace bellwether::server
