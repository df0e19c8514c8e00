#include "server/cluster/partition_ownership.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace bellwether::server {

uint32_t PartitionOwnership::LaneOf(const RunUuid& uuid) const { return DatabaseOf(PartitionOf(uuid, databases_)); }

absl::Status PartitionOwnership::Admit(const RunUuid& uuid, std::string* address) const {
  const uint32_t partition = PartitionOf(uuid, databases_);
  {
    absl::MutexLock lock(&mutex_);
    if (partitions_[partition].served) return absl::OkStatus();
  }
  *address = owner_address_(partition);
  return absl::UnavailableError(absl::StrCat("partition ", partition, " is being taken over; come back in a moment"));
}

bool PartitionOwnership::Serves(RunId run) const {
  absl::MutexLock lock(&mutex_);
  return partitions_[PartitionOfRun(run)].served;
}

bool PartitionOwnership::HasWhole(RunId run) const {
  absl::MutexLock lock(&mutex_);
  return partitions_[PartitionOfRun(run)].whole;
}

RunId PartitionOwnership::NextRun(const RunUuid& uuid) {
  absl::MutexLock lock(&mutex_);
  return partitions_[PartitionOf(uuid, databases_)].next_run++;
}

void PartitionOwnership::RecordRun(RunId run) {
  absl::MutexLock lock(&mutex_);
  RunId& next = partitions_[PartitionOfRun(run)].next_run;
  next = std::max(next, run + 1);
}

void PartitionOwnership::BeginPartition(uint32_t partition) {
  absl::MutexLock lock(&mutex_);
  partitions_[partition].next_run = FirstRunOf(partition) + 1;
}

void PartitionOwnership::ServePartition(uint32_t partition) {
  absl::MutexLock lock(&mutex_);
  partitions_[partition].served = true;
}

void PartitionOwnership::CompletePartition(uint32_t partition) {
  absl::MutexLock lock(&mutex_);
  partitions_[partition].whole = partitions_[partition].served;
}

void PartitionOwnership::FencePartition(uint32_t partition) {
  absl::MutexLock lock(&mutex_);
  partitions_[partition].served = partitions_[partition].whole = false;
}

}  // namespace bellwether::server
