// token_owners.h: whether each token is of an identity that there is.

#ifndef BELLWETHER_SERVER_ACCESS_TOKEN_OWNERS_H_
#define BELLWETHER_SERVER_ACCESS_TOKEN_OWNERS_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "server/access/access_file.h"
#include "server/access/token_file.h"

namespace bellwether::server {

bool HasOwner(const StoredToken& token, const AccessRules& rules);

// INVALID_ARGUMENT: a line for each token of `tokens_file` that is of no identity of
// `access_file`.
absl::Status CheckTokenOwners(const std::vector<StoredToken>& tokens, const std::string& tokens_file,
                              const AccessRules& rules, const std::string& access_file);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_ACCESS_TOKEN_OWNERS_H_
