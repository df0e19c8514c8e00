// series_keys.h: where a run's series lie in the database.
//
// Private to server/store.  A signal's matrix is read row-major as cells.
// * A chunk and its summary ('s', 'm') hold kGroupCells of them.
// * A window ('w') has a few steps that the packer will put into chunks.
// * Unfinished rows ('p') of a chunk that is still in memory are for a restart
//   alone.  Windows and unfinished rows have up to kPartCells.  Signal 0 is the
//   step itself: its time and the ranks that reported.

#ifndef BELLWETHER_SERVER_STORE_SERIES_KEYS_H_
#define BELLWETHER_SERVER_STORE_SERIES_KEYS_H_

#include <cstdint>

#include "server/store/rocks_database.h"

namespace bellwether::server {

inline constexpr size_t kGroupCells = 8;
inline constexpr size_t kPartCells = 1024;
inline constexpr uint8_t kMetaSignal = 0;
static_assert(kPartCells % kGroupCells == 0);

// <prefix> <run> <signal> <group or part> <attempt> <step>
inline constexpr size_t kSeriesPrefixBytes = 1 + 8 + 1 + 4;
inline constexpr size_t kSeriesKeyBytes = kSeriesPrefixBytes + 4 + 8;

struct SeriesAddress {
  RunId run = 0;
  uint8_t signal = 0;
  uint32_t index = 0;  // Group or part.
};
inline std::string SeriesPrefix(char prefix, const SeriesAddress& a) {
  return KeyBuilder(prefix).U64(a.run).U8(a.signal).U32(a.index).key();
}
inline std::string SeriesRowKey(char prefix, const SeriesAddress& a, uint32_t attempt, int64_t step) {
  return KeyBuilder(prefix).U64(a.run).U8(a.signal).U32(a.index).U32(attempt).I64(step).key();
}
inline uint8_t KeySignal(std::string_view key) { return static_cast<uint8_t>(key[9]); }
inline uint32_t KeyIndex(std::string_view key) { return static_cast<uint32_t>(KeyNumber(key, 10, 4)); }
inline uint32_t KeyAttempt(std::string_view key) { return static_cast<uint32_t>(KeyNumber(key, 14, 4)); }
inline int64_t KeyFirstStep(std::string_view key) { return KeyStep(key, 18); }

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_STORE_SERIES_KEYS_H_
