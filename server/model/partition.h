// partition.h: which part of all runs a run belongs to, and how its number says so.
//
// Runs are spread over the cluster's databases, and over kPartitions partitions of
// each, by their uuid; a partition is what one server owns, and what moves.  It is
// counted through: those of database d begin at d * kPartitions.  A run's number is
// unique in the cluster: its upper half is the partition, so that any row, record or
// message tells its own.  All of this is stored: never change it.
//
// The database is chosen by what the hash leaves after the partition: by the same
// bits each of two databases would have half of its partitions empty.
//
// Pure; any thread.

#ifndef BELLWETHER_SERVER_MODEL_PARTITION_H_
#define BELLWETHER_SERVER_MODEL_PARTITION_H_

#include <cstdint>

#include "server/model/run_types.h"

namespace bellwether::server {

inline constexpr uint32_t kPartitions = 64;    // Of a database.
inline constexpr uint32_t kDatabasesMax = 16;  // Of a cluster.

// REQUIRES: 1 <= databases <= kDatabasesMax.
uint32_t PartitionOf(const RunUuid& uuid, uint32_t databases);

// The database that has the partition, and its number there: column p.
constexpr uint32_t DatabaseOf(uint32_t partition) { return partition / kPartitions; }
constexpr uint32_t PartitionInDatabase(uint32_t partition) { return partition % kPartitions; }

// Runs of partition p have the numbers [FirstRunOf(p), FirstRunOf(p + 1)).
constexpr RunId FirstRunOf(uint32_t partition) { return (RunId{partition} + 1) << 32; }
// REQUIRES: run >= FirstRunOf(0).
constexpr uint32_t PartitionOfRun(RunId run) { return static_cast<uint32_t>((run >> 32) - 1); }

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_MODEL_PARTITION_H_
