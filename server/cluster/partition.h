// partition.h: which part of all runs a run belongs to, and how its number says so.
//
// Runs are spread over kPartitions partitions by their uuid; a partition is what
// one server owns, and what moves.  A run's number is unique in the cluster: its
// upper half is the partition, so that any row, record or message tells its own.
// Both are stored: never change them.
//
// Pure; any thread.

#ifndef BELLWETHER_SERVER_CLUSTER_PARTITION_H_
#define BELLWETHER_SERVER_CLUSTER_PARTITION_H_

#include <cstdint>

#include "server/store/run_types.h"

namespace bellwether::server {

inline constexpr uint32_t kPartitions = 64;

uint32_t PartitionOf(const RunUuid& uuid);

// Runs of partition p have the numbers [FirstRunOf(p), FirstRunOf(p + 1)).
constexpr RunId FirstRunOf(uint32_t partition) { return (RunId{partition} + 1) << 32; }
// REQUIRES: run >= FirstRunOf(0).
constexpr uint32_t PartitionOfRun(RunId run) { return static_cast<uint32_t>((run >> 32) - 1); }

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_CLUSTER_PARTITION_H_
