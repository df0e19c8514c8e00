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
inline constexpr uint16_t kMetaSignal = 0;
static_assert(kPartCells % kGroupCells == 0);

// <prefix> <run> <signal> <group or part> <attempt> <step>.  A signal's low byte comes first, so that data
// of the time when it had no other byte, and the group had four, reads the same.
inline constexpr size_t kSeriesPrefixBytes = 1 + 8 + 2 + 3;
inline constexpr size_t kSeriesKeyBytes = kSeriesPrefixBytes + 4 + 8;

struct SeriesAddress {
  RunId run = 0;
  uint16_t signal = 0;
  uint32_t index = 0;  // Group or part, below 2^24.
};
inline KeyBuilder SignalKey(char prefix, RunId run, uint16_t signal) {
  KeyBuilder key(prefix);
  key.U64(run).U8(static_cast<uint8_t>(signal)).U8(static_cast<uint8_t>(signal >> 8));
  return key;
}
inline std::string SeriesPrefix(char prefix, const SeriesAddress& a) {
  return SignalKey(prefix, a.run, a.signal).U24(a.index).key();
}
inline std::string SeriesRowKey(char prefix, const SeriesAddress& a, uint32_t attempt, int64_t step) {
  return SignalKey(prefix, a.run, a.signal).U24(a.index).U32(attempt).I64(step).key();
}
inline uint16_t KeySignal(std::string_view key) {
  return static_cast<uint16_t>(static_cast<uint8_t>(key[9]) | static_cast<uint8_t>(key[10]) << 8);
}
inline uint32_t KeyIndex(std::string_view key) { return static_cast<uint32_t>(KeyNumber(key, 11, 3)); }
inline uint32_t KeyAttempt(std::string_view key) { return static_cast<uint32_t>(KeyNumber(key, 14, 4)); }
inline int64_t KeyFirstStep(std::string_view key) { return KeyStep(key, 18); }

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_STORE_SERIES_KEYS_H_
