// token_file.h: bearer tokens, of which only hashes are kept.
//
//   sha256:<64 hexadecimal digits> <identity> <created> <expires>
//
// one a line; times as 2026-11-22T06:30:00Z, or "never"; # begins a comment.  A
// token is "bw_" and 256 random bits, so that a plain SHA-256 of it tells
// nothing and needs no salt; its id is the first 12 digits of the hash.

#ifndef BELLWETHER_SERVER_ACCESS_TOKEN_FILE_H_
#define BELLWETHER_SERVER_ACCESS_TOKEN_FILE_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace bellwether::server {

inline constexpr size_t kTokensMax = 4096;
inline constexpr size_t kTokenBytesMax = 512;  // Of one that is shown.

using TokenHash = std::array<uint8_t, 32>;

struct StoredToken {
  TokenHash hash{};
  std::string identity;
  int64_t created_unix_s = 0;
  int64_t expires_unix_s = INT64_MAX;  // INT64_MAX = never
};

TokenHash HashToken(std::string_view token);
// The first 12 digits.
std::string TokenId(const TokenHash& hash);
// 256 bits of the system's random numbers.  INTERNAL: there are none.
absl::StatusOr<std::string> NewToken();

// Compares in a time that depends on the lengths only.
bool ConstantTimeEquals(std::string_view a, std::string_view b);

// INVALID_ARGUMENT: every finding, a line each, `file:line: ...`.
absl::StatusOr<std::vector<StoredToken>> ParseTokens(std::string_view text, const std::string& file);
std::string FormatTokens(const std::vector<StoredToken>& tokens);

// NOT_FOUND: no such file.  FAILED_PRECONDITION: others may write it.
absl::StatusOr<std::vector<StoredToken>> ReadTokens(const std::string& path);
// Whole or not at all; a new file has mode 0600, another keeps owner, group and
// mode.  INTERNAL: it cannot be written.
absl::Status WriteTokens(const std::string& path, const std::vector<StoredToken>& tokens);

// "2026-11-22T06:30:00Z", or "never".
std::string FormatUnixSeconds(int64_t unix_s);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_ACCESS_TOKEN_FILE_H_
