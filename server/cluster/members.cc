#include "server/cluster/members.h"

#include <set>
#include <thread>
#include <utility>

#include "server/cluster/identity.h"
#include "server/model/partition.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

constexpr int64_t kReadAnswerMs = 3000;

}  // namespace

absl::StatusOr<std::unique_ptr<Members>> Members::Open(const ClusterOptions& options, const std::string& owner,
                                                       PartitionHost* host, Counters* counters, Clock* clock,
                                                       const AskHoldings& ask) {
  BW_ASSIGN_OR_RETURN(const std::vector<std::string> names, CheckIdentity(options.dsns, kReadAnswerMs));
  std::unique_ptr<Members> members(new Members());
  for (uint32_t i = 0; i < options.dsns.size(); ++i) {
    const auto greet = [names, i](PgConnection* connection) { return CheckPlace(names, i, kReadAnswerMs, connection); };
    BW_ASSIGN_OR_RETURN(std::unique_ptr<Member> member,
                        Member::Open(options, i, owner, host, counters, clock, ask, greet));
    members->members_.push_back(std::move(member));
  }
  return members;
}

Members::~Members() { Leave(); }

void Members::Begin() {
  for (const auto& member : members_) member->Begin();
}

std::string Members::OwnerAddress(uint32_t partition) const {
  return members_[DatabaseOf(partition)]->OwnerAddress(PartitionInDatabase(partition));
}

bool Members::Serves(uint32_t partition) const {
  return members_[DatabaseOf(partition)]->Serves(PartitionInDatabase(partition));
}

Member::Spread Members::spread() const {
  std::set<std::string> others;
  Member::Spread all;
  for (const auto& member : members_) {
    const Member::Spread one = member->spread();
    others.insert(one.others.begin(), one.others.end());
    all.unserved += one.unserved;
  }
  all.others.assign(others.begin(), others.end());
  return all;
}

std::vector<Holding> Members::holdings() const {
  std::vector<Holding> all;
  for (const auto& member : members_) {
    const std::vector<Holding> one = member->holdings();
    all.insert(all.end(), one.begin(), one.end());
  }
  return all;
}

void Members::LookSoon(uint32_t partition) { members_[DatabaseOf(partition)]->LookSoon(); }

void Members::Announce() {
  for (const auto& member : members_) member->Announce();
}

void Members::Leave() {
  std::vector<std::thread> leaving;
  for (const auto& member : members_) leaving.emplace_back([raw = member.get()] { raw->Leave(); });
  for (std::thread& each : leaving) each.join();
}

}  // namespace bellwether::server
