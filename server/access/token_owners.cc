#include "server/access/token_owners.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace bellwether::server {

bool HasOwner(const StoredToken& token, const AccessRules& rules) {
  return std::any_of(rules.entries.begin(), rules.entries.end(),
                     [&token](const auto& entry) { return entry.identity.name == token.identity; });
}

absl::Status CheckTokenOwners(const std::vector<StoredToken>& tokens, const std::string& tokens_file,
                              const AccessRules& rules, const std::string& access_file) {
  std::vector<std::string> findings;
  for (const StoredToken& token : tokens) {
    if (HasOwner(token, rules)) continue;
    findings.push_back(absl::StrCat(tokens_file, ": token ", TokenId(token.hash), " is of ", token.identity, ", whom ",
                                    access_file, " does not know: add the identity or revoke the token"));
  }
  return findings.empty() ? absl::OkStatus() : absl::InvalidArgumentError(absl::StrJoin(findings, "\n"));
}

}  // namespace bellwether::server
