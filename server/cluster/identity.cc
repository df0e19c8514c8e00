#include "server/cluster/identity.h"

#include <algorithm>
#include <memory>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "server/cluster/link.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

struct Known {
  std::string name;
  std::string databases;  // "": it was in no cluster yet.
};

constexpr char kKnown[] = "SELECT name, databases FROM bellwether.identity WHERE one = 1";

absl::StatusOr<Known> FromRow(const PgResult& row) {
  if (row.rows() != 1) return absl::FailedPreconditionError("bellwether.identity has no row");
  return Known{std::string(row.Text(0, 0)), std::string(row.Text(0, 1))};
}

// Names it, if nobody has.
absl::StatusOr<Known> Ask(SharedPgLink* link) {
  std::random_device random;
  const std::string name = absl::StrCat(absl::Hex(static_cast<uint64_t>(random()) << 32 | random(), absl::kZeroPad16));
  BW_RETURN_IF_ERROR(link->Ask({"INSERT INTO bellwether.identity (one, name) VALUES (1, $1) "
                                "ON CONFLICT (one) DO NOTHING",
                                {name}})
                         .status());
  BW_ASSIGN_OR_RETURN(const auto row, link->Ask({kKnown, {}}));
  return FromRow(row);
}

std::string Entry(size_t place, size_t count) {
  return count == 1 ? "the connection string" : absl::StrCat("cluster.dsn_files: entry ", place + 1);
}

absl::Status Refusal(size_t place, size_t count, const Known& known) {
  const std::vector<std::string> of = absl::StrSplit(known.databases, ' ');
  const auto at = std::find(of.begin(), of.end(), known.name) - of.begin();
  const std::string says =
      absl::StrCat(Entry(place, count), " leads to database ", at + 1, " of the ", of.size(), " of its cluster");
  const std::string rule =
      "which databases a cluster has, and their order, cannot be changed (docs/operate/cluster.md)";
  if (static_cast<size_t>(at) == place && of.size() == count) {
    return absl::FailedPreconditionError(absl::StrCat(says, ", but the others are not those that it knows: ", rule));
  }
  return absl::FailedPreconditionError(
      absl::StrCat(says, ", and stands here as ", place + 1, " of ", count, ": ", rule));
}

}  // namespace

absl::StatusOr<std::vector<std::string>> CheckIdentity(const std::vector<std::string>& dsns, int64_t answer_ms) {
  std::vector<std::unique_ptr<SharedPgLink>> links;
  std::vector<Known> all;
  std::vector<std::string> names;
  for (const std::string& dsn : dsns) {
    const size_t place = links.size();
    links.push_back(std::make_unique<SharedPgLink>(dsn, answer_ms));
    absl::StatusOr<Known> known = Ask(links.back().get());
    if (!known.ok()) {
      // Away: taken for what the first says, until somebody gets there.
      std::vector<std::string> told;
      if (place > 0) told = absl::StrSplit(all[0].databases, ' ', absl::SkipEmpty());
      if (!absl::IsUnavailable(known.status()) || place >= told.size()) {
        return absl::Status(known.status().code(),
                            absl::StrCat(Entry(place, dsns.size()), ": ", std::string(known.status().message())));
      }
      known = Known{told[place], all[0].databases};
    }
    const auto twin = std::find(names.begin(), names.end(), known->name);
    if (twin != names.end()) {
      return absl::FailedPreconditionError(absl::StrCat("cluster.dsn_files: entries ", twin - names.begin() + 1,
                                                        " and ", names.size() + 1, " lead to the same database"));
    }
    names.push_back(known->name);
    all.push_back(*std::move(known));
  }
  const std::string databases = absl::StrJoin(names, " ");
  for (size_t i = 0; i < all.size(); ++i) {
    if (!all[i].databases.empty() && all[i].databases != databases) return Refusal(i, all.size(), all[i]);
  }
  for (size_t i = 0; i < all.size(); ++i) {
    if (!all[i].databases.empty()) continue;
    BW_RETURN_IF_ERROR(
        links[i]
            ->Ask({"UPDATE bellwether.identity SET databases = $1 WHERE one = 1 AND databases = ''", {databases}})
            .status());
    // Another server with another list may have been quicker.
    BW_ASSIGN_OR_RETURN(const Known known, Ask(links[i].get()));
    if (known.databases != databases) return Refusal(i, all.size(), known);
  }
  return names;
}

absl::Status CheckPlace(const std::vector<std::string>& names, size_t place, int64_t answer_ms,
                        PgConnection* connection) {
  BW_ASSIGN_OR_RETURN(const auto rows, connection->Run({{kKnown, {}}}, answer_ms));
  BW_ASSIGN_OR_RETURN(const Known known, FromRow(rows.front()));
  const bool right = known.name == names[place] && known.databases == absl::StrJoin(names, " ");
  return right ? absl::OkStatus() : Refusal(place, names.size(), known);
}

}  // namespace bellwether::server
