#include "server/query/run_router.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

absl::Status NotFound(const std::string& run) {
  return absl::NotFoundError(absl::StrCat("run \"", run.substr(0, 128), "\": no run has this name or uuid"));
}

absl::Status NotKnown(const std::string& run, const std::string& why) {
  return absl::UnavailableError(absl::StrCat("run \"", run.substr(0, 128), "\": ", why, "; come back in a moment"));
}

}  // namespace

std::optional<RunRouter::Location> RunRouter::Here(const std::string& run) const {
  const RunSnapshotPtr here = runs_->Find(run);
  if (here == nullptr || !peers_->OwnerOfRun(here->record.id).here) return std::nullopt;
  return Location{"", FormatUuid(here->record.description.uuid), here->record.description.name};
}

absl::Status RunRouter::Absent(const std::string& run) const {
  RunUuid uuid;
  if (ParseUuid(run, &uuid)) {
    const Peers::Owner owner = peers_->OwnerOf(uuid);
    if (!owner.here && owner.address.empty()) return NotKnown(run, "its partition is being taken over");
  } else if (peers_->spread().unserved > 0) {
    return NotKnown(run, "runs are being taken over");
  }
  return NotFound(run);
}

std::optional<RunRouter::Location> RunRouter::Known(const std::string& run) {
  absl::MutexLock lock(&mutex_);
  const auto found = known_.find(run);
  if (found == known_.end() || clock_->MonotonicNanos() >= found->second.until_ns) return std::nullopt;
  return found->second.place;
}

void RunRouter::Forget(const std::string& run) {
  absl::MutexLock lock(&mutex_);
  known_.erase(run);
}

void RunRouter::Learn(const std::string& run, const Location& place) {
  const int64_t now_ns = clock_->MonotonicNanos();
  absl::MutexLock lock(&mutex_);
  if (known_.size() >= kKnownMax) {
    std::erase_if(known_, [now_ns](const auto& known) { return now_ns >= known.second.until_ns; });
    if (known_.size() >= kKnownMax) known_.clear();
  }
  known_[run] = {place, now_ns + kKnownMs * 1'000'000};
}

absl::StatusOr<RunRouter::Location> RunRouter::Find(const std::string& run, int64_t deadline_monotonic_ns) {
  if (std::optional<Location> known = Known(run)) return *std::move(known);
  RunUuid uuid;
  BW_ASSIGN_OR_RETURN(const Location place, ParseUuid(run, &uuid) ? FindByUuid(run, uuid, deadline_monotonic_ns)
                                                                  : FindByName(run, deadline_monotonic_ns));
  Learn(run, place);
  return place;
}

absl::StatusOr<RunRouter::Location> RunRouter::FindByUuid(const std::string& run, const RunUuid& uuid,
                                                          int64_t deadline_monotonic_ns) {
  const Peers::Owner owner = peers_->OwnerOf(uuid);
  if (owner.here) {
    if (std::optional<Location> here = Here(run)) return *std::move(here);
    return NotFound(run);
  }
  if (owner.address.empty()) return NotKnown(run, "its partition is being taken over");
  v1::GetRunRequest request;
  request.set_run(run);
  BW_ASSIGN_OR_RETURN(const std::string bytes, peers_->Call(owner.address, "GetRun", request.SerializeAsString(),
                                                            peers_->SealAsServer("GetRun"), deadline_monotonic_ns));
  v1::Run found;
  if (!found.ParseFromString(bytes)) return absl::InternalError("another server's answer cannot be read");
  return Location{owner.address, run, found.description().name()};
}

absl::StatusOr<RunRouter::Location> RunRouter::FindByName(const std::string& run, int64_t deadline_monotonic_ns) {
  v1::GetRunRequest request;
  request.set_run(run);
  const Peers::Spread spread = peers_->spread();
  const std::vector<Peers::Answer> answers = peers_->CallAll(spread.others, "GetRun", request.SerializeAsString(),
                                                             peers_->SealAsServer("GetRun"), deadline_monotonic_ns);
  std::optional<Location> newest = Here(run);
  int64_t started_ns = 0;
  if (newest.has_value()) {
    const RunSnapshotPtr here = runs_->Find(newest->uuid);
    started_ns = here == nullptr ? 0 : here->record.started_unix_ns;
  }
  std::vector<std::string> silent;
  for (const Peers::Answer& answer : answers) {
    if (!answer.bytes.ok()) {
      if (!absl::IsNotFound(answer.bytes.status())) silent.push_back(answer.server);
      continue;
    }
    v1::Run found;
    if (!found.ParseFromString(*answer.bytes) || found.description().uuid().size() != RunUuid().size()) {
      silent.push_back(answer.server);
      continue;
    }
    RunUuid uuid;
    std::copy(found.description().uuid().begin(), found.description().uuid().end(), uuid.begin());
    Location place{answer.server, FormatUuid(uuid), found.description().name()};
    // Of two that began at once any server takes the same.
    if (newest.has_value() && std::pair(found.started_unix_ns(), place.uuid) <= std::pair(started_ns, newest->uuid)) {
      continue;
    }
    started_ns = found.started_unix_ns();
    newest = std::move(place);
  }
  if (newest.has_value()) return *std::move(newest);
  if (!silent.empty()) return NotKnown(run, absl::StrCat(absl::StrJoin(silent, ", "), " did not answer"));
  // A partition may have left one of them before he was asked, and not be here yet.
  const uint32_t unserved = std::max(spread.unserved, peers_->spread().unserved);
  if (unserved > 0) return NotKnown(run, absl::StrCat(unserved, " partitions are being taken over"));
  return NotFound(run);
}

}  // namespace bellwether::server
