#include "server/access/access_file.h"

#include <algorithm>
#include <array>
#include <set>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/access/secret_file.h"
#include "server/util/glob.h"
#include "server/util/status_macros.h"
#include "server/util/strict_yaml.h"

namespace bellwether::server {
namespace {

constexpr char kNameCharacters[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.@/-";
constexpr char kOwnRun[] = "$1";

struct QuotaField {
  const char* key;
  int64_t Quota::*value;
  int64_t max;
};
constexpr QuotaField kQuotaFields[] = {{"connections_max", &Quota::connections_max, 1'000'000},
                                       {"streams_max", &Quota::streams_max, 1'000'000},
                                       {"runs_max", &Quota::runs_max, 1'000'000},
                                       {"frames_per_second_max", &Quota::frames_per_second_max, 1'000'000'000},
                                       {"bytes_per_second_max", &Quota::bytes_per_second_max, int64_t{1} << 40}};

// With what a role holds.
uint8_t Bits(size_t word) {
  constexpr std::array<uint8_t, 4> kBits = {1, 2, 4 | 1, 15};
  return kBits[word];
}
constexpr const char* kRoles[] = {"read", "write", "act", "admin"};

class Reader {
 public:
  explicit Reader(const std::string& file) : yaml_(file) {}

  absl::StatusOr<AccessRules> Read(std::string_view text) {
    const auto root = yaml_.Load(text, kAccessBytesMax);
    if (root.has_value()) {
      yaml_.ForEach(*root, "", [this](const std::string& key, const YAML::Node& at, const YAML::Node& value) {
        if (key == "tenants") {
          Tenants(value);
        } else if (key == "identities") {
          for (const YAML::Node& entry : yaml_.List(value, "identities", kIdentitiesMax)) Entry(entry);
        } else {
          yaml_.Report(at, absl::StrCat(key, ": unknown key; known: tenants, identities"));
        }
      });
      for (const auto& [at, tenant] : tenants_asked_) {
        if (!rules_.tenants.contains(tenant)) {
          yaml_.Report(at, absl::StrCat("tenant = ", tenant, ": must be one of tenants"));
        }
      }
    }
    BW_RETURN_IF_ERROR(yaml_.status());
    return std::move(rules_);
  }

 private:
  void Tenants(const YAML::Node& node) {
    yaml_.ForEach(node, "tenants", [this](const std::string& name, const YAML::Node& at, const YAML::Node& value) {
      if (!IsName(name)) yaml_.Report(at, NameFinding("tenants", name));
      if (rules_.tenants.size() == kTenantsMax) {
        yaml_.Report(at, absl::StrCat("tenants: more than ", kTenantsMax));
        return;
      }
      Quota quota;
      yaml_.ForEach(value, absl::StrCat("tenants.", name),
                    [&](const std::string& key, const YAML::Node& key_at, const YAML::Node& number) {
                      for (const QuotaField& field : kQuotaFields) {
                        if (key == field.key) {
                          yaml_.Integer(number, absl::StrCat("tenants.", name, ".", key), 1, field.max,
                                        &(quota.*field.value));
                          return;
                        }
                      }
                      yaml_.Report(key_at, absl::StrCat("tenants.", name, ".", key,
                                                        ": unknown key; known: connections_max, streams_max, runs_max, "
                                                        "frames_per_second_max, bytes_per_second_max"));
                    });
      rules_.tenants[name] = quota;
    });
  }

  void Entry(const YAML::Node& node) {
    AccessRules::Entry entry;
    bool has_runs = false;
    const bool is_map =
        yaml_.ForEach(node, "identities", [&](const std::string& key, const YAML::Node& at, const YAML::Node& value) {
          if (key == "name") {
            yaml_.Text(value, "identities.name", 64, &entry.identity.name);
          } else if (key == "tenant") {
            if (yaml_.Text(value, "identities.tenant", 64, &entry.identity.tenant)) {
              tenants_asked_.emplace_back(value, entry.identity.tenant);
            }
          } else if (key == "certificates") {
            entry.certificates = Globs(value, "identities.certificates", 1024);
          } else if (key == "anonymous") {
            yaml_.Flag(value, "identities.anonymous", &entry.anonymous);
          } else if (key == "roles") {
            for (const YAML::Node& role : yaml_.List(value, "identities.roles", std::size(kRoles))) {
              size_t word = 0;
              if (yaml_.Choice(role, "identities.roles", kRoles, &word)) entry.identity.roles |= Bits(word);
            }
          } else if (key == "runs") {
            has_runs = true;
            entry.identity.runs = Globs(value, "identities.runs", 128);
          } else {
            yaml_.Report(at, absl::StrCat("identities.", key,
                                          ": unknown key; known: name, tenant, certificates, anonymous, roles, runs"));
          }
        });
    if (!is_map) return;
    const std::string& name = entry.identity.name;
    if (!IsName(name)) {
      yaml_.Report(node, NameFinding("identities.name", name));
    } else if (!names_.insert(name).second) {
      yaml_.Report(node, absl::StrCat("identities.name = ", name, ": stands twice"));
    }
    if (entry.identity.roles == 0) yaml_.Report(node, absl::StrCat(name, ": has no roles: read, write, act, admin"));
    if (!has_runs) yaml_.Report(node, absl::StrCat(name, ": has no runs; all of them are [\"*\"]"));
    std::erase_if(entry.identity.runs, [&](const std::string& glob) {
      if (!glob.starts_with(kOwnRun)) return false;
      entry.identity.behind_own_run.push_back(glob.substr(std::size(kOwnRun) - 1));
      return true;
    });
    for (const std::vector<std::string>* const globs : {&entry.identity.runs, &entry.identity.behind_own_run}) {
      for (const std::string& glob : *globs) {
        const size_t at = glob.find('$');
        if (at == std::string::npos || at + 1 == glob.size() ||
            !absl::ascii_isdigit(static_cast<unsigned char>(glob[at + 1])))
          continue;
        yaml_.Report(node,
                     absl::StrCat(name, ": runs has ", glob.substr(at, 2), ": only $1 is known, at the beginning"));
      }
    }
    entry.run_of_certificate = !entry.identity.behind_own_run.empty();
    if (entry.run_of_certificate) {
      const bool named = !entry.certificates.empty() &&
                         std::all_of(entry.certificates.begin(), entry.certificates.end(), [](const std::string& glob) {
                           return glob.find_first_of("*?") == glob.size() - 1 && glob.back() == '*';
                         });
      if (!named) yaml_.Report(node, absl::StrCat(name, ": runs has $1: certificates must end in their only *"));
    }
    if (entry.anonymous) {
      if (!entry.certificates.empty()) yaml_.Report(node, absl::StrCat(name, ": is anonymous and has certificates"));
      if (anonymous_) yaml_.Report(node, absl::StrCat(name, ": a second anonymous identity"));
      anonymous_ = true;
    }
    rules_.entries.push_back(std::move(entry));
  }

  std::vector<std::string> Globs(const YAML::Node& node, const std::string& path, size_t bytes_max) {
    std::vector<std::string> globs;
    for (const YAML::Node& entry : yaml_.List(node, path, kGlobsMax)) {
      std::string glob;
      if (yaml_.Text(entry, path, bytes_max, &glob)) globs.push_back(std::move(glob));
    }
    return globs;
  }

  // Names stand in the audit beside those of what is no person.
  static bool IsName(const std::string& name) {
    return !name.empty() && name.size() <= 64 && name.find_first_not_of(kNameCharacters) == std::string::npos &&
           name != "server" && name != "policy";
  }
  static std::string NameFinding(const std::string& path, const std::string& name) {
    return absl::StrCat(path, " = \"", name,
                        "\": must be 1 to 64 of letters, digits and _.@/-, and not server or policy");
  }

  StrictYaml yaml_;
  AccessRules rules_;
  std::set<std::string> names_;
  std::vector<std::pair<YAML::Node, std::string>> tenants_asked_;
  bool anonymous_ = false;
};

}  // namespace

absl::StatusOr<AccessRules> ParseAccess(std::string_view text, const std::string& file) {
  return Reader(file).Read(text);
}

absl::Status CheckShadows(const AccessRules& rules, const std::string& file) {
  std::vector<std::string> findings;
  for (auto at = rules.entries.begin(); at != rules.entries.end(); ++at) {
    for (const std::string& glob : at->certificates) {
      // A pattern is covered if it fits another to the letter; a ? stands for no *.
      const auto covers = [&glob](const std::string& before) {
        const bool wild = glob.find('*') != std::string::npos && before.find('?') != std::string::npos;
        return !wild && GlobMatches(before, glob);
      };
      const auto by = std::find_if(rules.entries.begin(), at, [&covers](const AccessRules::Entry& entry) {
        return std::any_of(entry.certificates.begin(), entry.certificates.end(), covers);
      });
      if (by == at) continue;
      findings.push_back(
          absl::StrCat(file, ": ", at->identity.name, ": certificates ", glob, " is taken by ", by->identity.name,
                       ", which stands before it: the first that fits counts, so put ", at->identity.name, " first"));
    }
  }
  return findings.empty() ? absl::OkStatus() : absl::InvalidArgumentError(absl::StrJoin(findings, "\n"));
}

absl::StatusOr<AccessRules> ReadAccess(const std::string& path) {
  BW_ASSIGN_OR_RETURN(const std::string text, ReadGuardedFile(path, Secrecy::kIntegrity));
  return ParseAccess(text, path);
}

}  // namespace bellwether::server
