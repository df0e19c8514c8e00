#include "server/model/partition.h"

#include <string_view>

#include "bellwether/crc32c.h"

namespace bellwether::server {

uint32_t PartitionOf(const RunUuid& uuid, uint32_t databases) {
  const uint32_t hash = Crc32c(std::string_view(reinterpret_cast<const char*>(uuid.data()), uuid.size()));
  return hash / kPartitions % databases * kPartitions + hash % kPartitions;
}

}  // namespace bellwether::server
