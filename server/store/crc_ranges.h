// crc_ranges.h: checksums of any ranges of the same bytes, each at the same price
// however long it is: what all of them cost together is one pass over the bytes.
//
// Not thread-safe.

#ifndef BELLWETHER_SERVER_STORE_CRC_RANGES_H_
#define BELLWETHER_SERVER_STORE_CRC_RANGES_H_

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace bellwether::server {

class CrcRanges {
 public:
  // `bytes` must outlive it and stay as they are.  They are read as far as is asked.
  explicit CrcRanges(std::string_view bytes) : bytes_(bytes) {}

  // The CRC32C of what `before` is the checksum of, followed by bytes [begin, end):
  // what ExtendCrc32c() gives.  The range must lie within them and be below 4 GiB.
  uint32_t Extend(uint32_t before, size_t begin, size_t end);

 private:
  // Of bytes [0, end).
  uint32_t Prefix(size_t end);

  const std::string_view bytes_;
  std::vector<uint32_t> prefixes_ = {0};  // Of the first 0, 64, 128, ... bytes.
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_STORE_CRC_RANGES_H_
