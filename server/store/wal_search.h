// wal_search.h: finds a record of the log where the place of its beginning is
// unknown.
//
// The bytes there are a client's, as a rule, and may look like headers all
// over.  Each apparent header is compared with its checksum, at a price that
// does not depend on the length it claims.  A record that is whole is passed
// over as a whole: nothing was written into it since, and without the salt it
// cannot be forged.
//
// Not thread-safe.

#ifndef BELLWETHER_SERVER_STORE_WAL_SEARCH_H_
#define BELLWETHER_SERVER_STORE_WAL_SEARCH_H_

#include <cstdint>
#include <string_view>

#include "server/store/crc_ranges.h"
#include "server/store/wal_format.h"

namespace bellwether::server {

class WalSearch {
 public:
  // From `begin` of a segment on, which must outlive it.
  WalSearch(std::string_view segment, uint32_t salt, int64_t begin);

  // The offset of the first valid record at or after `offset` (8-aligned, not below
  // `begin`) with an LSN >= `expected`; -1 = none.
  int64_t Find(int64_t offset, Lsn expected, RecordView* record);

 private:
  const std::string_view segment_;
  const uint32_t salt_, salt_crc_;
  const int64_t begin_;
  CrcRanges crcs_;  // From begin_ on.
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_STORE_WAL_SEARCH_H_
