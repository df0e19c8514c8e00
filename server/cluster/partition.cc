#include "server/cluster/partition.h"

#include <string_view>

#include "bellwether/crc32c.h"

namespace bellwether::server {

uint32_t PartitionOf(const RunUuid& uuid) {
  return Crc32c(std::string_view(reinterpret_cast<const char*>(uuid.data()), uuid.size())) % kPartitions;
}

}  // namespace bellwether::server
