#include "server/app/connection_strings.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/access/secret_file.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

constexpr char kBlanks[] = " \t\r\n";

absl::StatusOr<std::string> ReadOne(const std::string& key, const std::string& file) {
  const auto text = ReadGuardedFile(file, Secrecy::kSecret);
  const auto wrong = [&](const std::string& what) {
    return absl::InvalidArgumentError(absl::StrCat(key, " = ", file, ": ", what));
  };
  if (!text.ok()) return wrong(std::string(text.status().message()));
  if (text->find_first_not_of(kBlanks) == std::string::npos) return wrong("is empty");
  return text->substr(0, text->find_last_not_of(kBlanks) + 1);
}

}  // namespace

absl::Status ReadConnectionStrings(const char* environment, ClusterOptions* cluster) {
  const std::string given = environment == nullptr ? "" : environment;
  cluster->dsns.clear();
  if (!given.empty()) {
    if (!cluster->dsn_files.empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat("cluster.dsn_files names ", cluster->dsn_files.size(),
                       " databases, BELLWETHER_CLUSTER_DSN is one: take one of the two away"));
    }
    cluster->dsns.push_back(given);
  } else if (!cluster->dsn_file.empty()) {
    BW_ASSIGN_OR_RETURN(std::string dsn, ReadOne("cluster.dsn_file", cluster->dsn_file));
    cluster->dsns.push_back(std::move(dsn));
  }
  std::vector<std::string> findings;
  for (size_t i = 0; i < cluster->dsn_files.size(); ++i) {
    auto dsn = ReadOne(absl::StrCat("cluster.dsn_files, entry ", i + 1), cluster->dsn_files[i]);
    if (dsn.ok()) {
      cluster->dsns.push_back(*std::move(dsn));
    } else {
      findings.push_back(std::string(dsn.status().message()));
    }
  }
  return findings.empty() ? absl::OkStatus() : absl::InvalidArgumentError(absl::StrJoin(findings, "\n"));
}

}  // namespace bellwether::server
