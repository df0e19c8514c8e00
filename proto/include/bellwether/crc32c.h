// crc32c.h: the Castagnoli checksum (reflected polynomial 0x82f63b78) of records on
// disk: the server's log and database, a sender's spool.  Debian 12 packages no C++
// library that exports one.
//
// Pure; any thread.

#ifndef BELLWETHER_CRC32C_H_
#define BELLWETHER_CRC32C_H_

#include <cstdint>
#include <string_view>

namespace bellwether {

// Of what `crc` is the checksum of, followed by `bytes`; 0 = of nothing.  Uses
// the processor's instruction where there is one.
uint32_t ExtendCrc32c(uint32_t crc, std::string_view bytes);
inline uint32_t Crc32c(std::string_view bytes) { return ExtendCrc32c(0, bytes); }

// The same by table, on any processor: what the fast one is tested against.
uint32_t ExtendCrc32cPortable(uint32_t crc, std::string_view bytes);

}  // namespace bellwether

#endif  // BELLWETHER_CRC32C_H_
