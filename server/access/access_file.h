// access_file.h: the rights of each identity, as a file.
//
//   tenants:
//     research: {streams_max: 512, runs_max: 64, frames_per_second_max: 2000}
//   identities:
//   - name: trainers
//     tenant: research
//     certificates: ["spiffe://bellwether/trainer/*"]   # SAN URIs
//     roles: [write]
//     runs: ["llama-*"]
//   - name: per-run
//     certificates: ["spiffe://bellwether/run/*"]
//     roles: [write]
//     runs: ["$1", "$1-*"]  # $1 is what the * of the certificate's name stands for, to the letter
//   - name: alice           # by token: bellwether token create alice
//     roles: [read, act]
//     runs: ["*"]
//   - name: guests
//     anonymous: true       # a caller that shows neither certificate nor token
//     roles: [read]
//     runs: ["public-*"]
//
// The first identity that names a certificate counts.  Every key and range is
// in docs/operate/security.md.  Pure functions; safe from any thread.

#ifndef BELLWETHER_SERVER_ACCESS_ACCESS_FILE_H_
#define BELLWETHER_SERVER_ACCESS_ACCESS_FILE_H_

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "server/access/identity.h"

namespace bellwether::server {

inline constexpr size_t kIdentitiesMax = 1024;
inline constexpr size_t kTenantsMax = 256;
inline constexpr size_t kGlobsMax = 64;  // Of an identity's runs, or certificates.
inline constexpr size_t kAccessBytesMax = 256 << 10;

struct AccessRules {
  struct Entry {
    Identity identity;
    std::vector<std::string> certificates;
    bool run_of_certificate = false;  // runs has "$1", or what begins so
    bool anonymous = false;
  };
  std::vector<Entry> entries;
  std::map<std::string, Quota> tenants;
};

// INVALID_ARGUMENT: every finding, a line each, `file:line:column: ...`.
absl::StatusOr<AccessRules> ParseAccess(std::string_view text, const std::string& file);
// INVALID_ARGUMENT, a line each: certificates that an entry before takes, so that
// their own never counts.  Such a file is read all the same.
absl::Status CheckShadows(const AccessRules& rules, const std::string& file);
// NOT_FOUND: no such file.  FAILED_PRECONDITION: others may write it.
absl::StatusOr<AccessRules> ReadAccess(const std::string& path);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_ACCESS_ACCESS_FILE_H_
