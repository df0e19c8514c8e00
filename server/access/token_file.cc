#include "server/access/token_file.h"

#include <openssl/crypto.h>
#include <openssl/rand.h>
#include <openssl/sha.h>

#include <algorithm>
#include <set>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/time.h"
#include "server/access/secret_file.h"
#include "server/util/regular_file.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

constexpr char kHead[] =
    "# Tokens of bellwetherd, as hashes; `bellwether token` writes this file.\n"
    "# hash identity created expires\n";

bool ParseHash(absl::string_view text, TokenHash* hash) {
  constexpr absl::string_view kPrefix = "sha256:";
  if (!absl::StartsWith(text, kPrefix)) return false;
  text.remove_prefix(kPrefix.size());
  if (text.size() != 2 * hash->size() || text.find_first_not_of("0123456789abcdef") != absl::string_view::npos)
    return false;
  const std::string bytes = absl::HexStringToBytes(text);
  std::copy(bytes.begin(), bytes.end(), hash->begin());
  return true;
}

bool ParseTime(absl::string_view text, int64_t* unix_s) {
  if (text == "never") {
    *unix_s = INT64_MAX;
    return true;
  }
  absl::Time time;
  std::string ignored;
  if (!absl::ParseTime(absl::RFC3339_sec, text, &time, &ignored)) return false;
  *unix_s = absl::ToUnixSeconds(time);
  return true;
}

}  // namespace

TokenHash HashToken(std::string_view token) {
  TokenHash hash;
  SHA256(reinterpret_cast<const unsigned char*>(token.data()), token.size(), hash.data());
  return hash;
}

std::string TokenId(const TokenHash& hash) {
  return absl::BytesToHexString({reinterpret_cast<const char*>(hash.data()), 6});
}

absl::StatusOr<std::string> NewToken() {
  std::array<unsigned char, 32> bytes;
  if (RAND_bytes(bytes.data(), static_cast<int>(bytes.size())) != 1) {
    return absl::InternalError("the system gives no random numbers");
  }
  return "bw_" + absl::BytesToHexString({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
}

bool ConstantTimeEquals(std::string_view a, std::string_view b) {
  return a.size() == b.size() && CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

absl::StatusOr<std::vector<StoredToken>> ParseTokens(std::string_view text, const std::string& file) {
  BW_RETURN_IF_ERROR(CheckUtf8(text, file));
  std::vector<StoredToken> tokens;
  std::vector<std::string> findings;
  std::set<TokenHash> seen;
  int number = 0;
  for (const absl::string_view line : absl::StrSplit(absl::string_view(text.data(), text.size()), '\n')) {
    ++number;
    const std::vector<absl::string_view> words = absl::StrSplit(line, absl::ByAnyChar(" \t\r"), absl::SkipEmpty());
    if (words.empty() || words[0][0] == '#') continue;
    const auto report = [&](absl::string_view what) {
      findings.push_back(absl::StrCat(file, ":", number, ": ", what));
    };
    StoredToken token;
    if (tokens.size() == kTokensMax) {
      report(absl::StrCat("more than ", kTokensMax, " tokens"));
      break;
    }
    if (words.size() != 4) {
      report("must be `sha256:<64 digits> identity created expires`");
    } else if (!ParseHash(words[0], &token.hash)) {
      report("the hash must be sha256: and 64 lower-case hexadecimal digits");
    } else if (!ParseTime(words[2], &token.created_unix_s) || !ParseTime(words[3], &token.expires_unix_s)) {
      report("times must be as 2026-11-22T06:30:00Z, or never");
    } else if (!seen.insert(token.hash).second) {
      report("this hash stands twice");
    } else {
      token.identity = std::string(words[1]);
      tokens.push_back(std::move(token));
    }
  }
  if (!findings.empty()) return absl::InvalidArgumentError(absl::StrJoin(findings, "\n"));
  return tokens;
}

std::string FormatTokens(const std::vector<StoredToken>& tokens) {
  std::string text = kHead;
  for (const StoredToken& token : tokens) {
    absl::StrAppend(
        &text, "sha256:", absl::BytesToHexString({reinterpret_cast<const char*>(token.hash.data()), token.hash.size()}),
        " ", token.identity, " ", FormatUnixSeconds(token.created_unix_s), " ", FormatUnixSeconds(token.expires_unix_s),
        "\n");
  }
  return text;
}

absl::StatusOr<std::vector<StoredToken>> ReadTokens(const std::string& path) {
  BW_ASSIGN_OR_RETURN(const std::string text, ReadGuardedFile(path, Secrecy::kIntegrity));
  return ParseTokens(text, path);
}

absl::Status WriteTokens(const std::string& path, const std::vector<StoredToken>& tokens) {
  return WriteSecretFile(path, FormatTokens(tokens), /*replace=*/true, 0600, Secrecy::kIntegrity);
}

std::string FormatUnixSeconds(int64_t unix_s) {
  if (unix_s == INT64_MAX) return "never";
  return absl::FormatTime("%Y-%m-%dT%H:%M:%SZ", absl::FromUnixSeconds(unix_s), absl::UTCTimeZone());
}

}  // namespace bellwether::server
