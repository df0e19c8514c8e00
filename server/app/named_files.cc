#include "server/app/named_files.h"

#include <algorithm>
#include <filesystem>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "server/access/access_file.h"
#include "server/access/tls_files.h"
#include "server/access/token_file.h"
#include "server/access/token_owners.h"
#include "server/act/policy.h"
#include "server/app/connection_strings.h"
#include "server/detect/rules_file.h"

namespace bellwether::server {
namespace {

// Lines, each with its key, none twice.
class KeyedFindings {
 public:
  void Add(const std::string& key, const absl::Status& status) {
    if (status.ok()) return;
    for (const absl::string_view line : absl::StrSplit(status.message(), '\n')) Put(absl::StrCat(key, ": ", line));
  }
  // Those that have their keys.
  void Add(const absl::Status& status) {
    if (status.ok()) return;
    for (const absl::string_view line : absl::StrSplit(status.message(), '\n')) Put(std::string(line));
  }
  // Of several files: a line begins with its file, whose key is the first of `keys`.
  using Keys = std::vector<std::pair<std::string, std::string>>;  // Key and file.
  void Add(const Keys& keys, const absl::Status& status) {
    if (status.ok()) return;
    for (const absl::string_view line : absl::StrSplit(status.message(), '\n')) {
      const auto of = std::find_if(keys.begin(), keys.end(), [line](const auto& key) {
        return !key.second.empty() && absl::StartsWith(line, absl::StrCat(key.second, ": "));
      });
      Put(of == keys.end() ? std::string(line) : absl::StrCat(of->first, ": ", line));
    }
  }
  absl::Status status() const {
    return lines_.empty() ? absl::OkStatus() : absl::InvalidArgumentError(absl::StrJoin(lines_, "\n"));
  }

 private:
  void Put(std::string line) {
    if (std::find(lines_.begin(), lines_.end(), line) == lines_.end()) lines_.push_back(std::move(line));
  }
  std::vector<std::string> lines_;
};

template <typename T>
absl::Status ReadInto(absl::StatusOr<T> read, T* target) {
  if (read.ok()) *target = *std::move(read);
  return read.status();
}

}  // namespace

absl::Status ReadNamedFiles(const char* dsn, ServerOptions* options) {
  KeyedFindings findings;
  if (!options->rules_file.empty()) {
    findings.Add("rules_file", ReadInto(ReadRules(options->rules_file), &options->engine.rules));
  }
  if (!options->policy_file.empty()) {
    findings.Add("policy_file", ReadInto(ReadPolicy(options->policy_file), &options->engine.policy));
  }
  if (!options->access.access_file.empty()) {
    findings.Add("access_file", ReadAccess(options->access.access_file).status());
  }
  findings.Add(ReadConnectionStrings(dsn, &options->cluster));
  return findings.status();
}

absl::Status CheckNamedFiles(const ServerOptions& options, int64_t now_unix_s) {
  KeyedFindings findings;
  const std::string &access_file = options.access.access_file, &tokens_file = options.access.tokens_file;
  const auto access = access_file.empty() ? AccessRules() : ReadAccess(access_file);
  if (access.ok()) findings.Add("access_file", CheckShadows(*access, access_file));
  if (!tokens_file.empty()) {
    const auto tokens = ReadTokens(tokens_file);
    std::error_code unknown;
    if (!tokens.ok() && !std::filesystem::exists(tokens_file, unknown) && !unknown) {
      findings.Add("tokens_file", absl::NotFoundError(
                                      absl::StrCat(tokens_file,
                                                   ": is not there: until `bellwether token create` writes it no token "
                                                   "opens anything")));
    } else {
      findings.Add("tokens_file", tokens.status());
    }
    if (tokens.ok() && access.ok() && !access_file.empty()) {
      findings.Add("tokens_file", CheckTokenOwners(*tokens, tokens_file, *access, access_file));
    }
  }
  if (!options.tls.on()) return findings.status();
  const TlsFiles& peer = options.cluster.peer;
  const KeyedFindings::Keys keys = {{"tls.cert_file", options.tls.certificate},    {"tls.key_file", options.tls.key},
                                    {"tls.client_ca_file", options.tls.client_ca}, {"tls.crl_file", options.tls.crl},
                                    {"cluster.peer_cert_file", peer.certificate},  {"cluster.peer_key_file", peer.key},
                                    {"cluster.peer_ca_file", peer.client_ca}};
  findings.Add(keys, ReadTls(options.tls, now_unix_s).status());
  if (peer.on() || !peer.client_ca.empty()) {
    TlsFiles shown = options.tls;
    shown.crl.clear();
    if (peer.on()) {
      shown.certificate = peer.certificate;
      shown.key = peer.key;
    }
    if (!peer.client_ca.empty()) shown.client_ca = peer.client_ca;
    findings.Add(keys, ReadTls(shown, now_unix_s).status());
  }
  return findings.status();
}

}  // namespace bellwether::server
