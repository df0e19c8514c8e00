// wal_search.h: a record of the log where nothing says where one begins.
//
// What lies there is a client's bytes, as a rule, and may look like headers all over: each
// that does is compared with its checksum, at a price that does not depend on how long it
// claims to be.  A record that is whole is passed over as a whole: nothing was written
// into it since, and without the salt nobody can make one.
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
