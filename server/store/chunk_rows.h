// chunk_rows.h: a signal's chunk as the rows that it is stored in.
//
// Private to server/store.  A row holds a group of kGroupCells cells: enough
// values for zstd to learn from, few enough to read one series quickly.
//
// Pure; any thread.

#ifndef BELLWETHER_SERVER_STORE_CHUNK_ROWS_H_
#define BELLWETHER_SERVER_STORE_CHUNK_ROWS_H_

#include <algorithm>
#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "server/store/chunk.h"
#include "server/store/series_keys.h"
#include "server/store/series_summary.h"

namespace bellwether::server {

// A row each, by group.
struct ChunkRows {
  std::vector<std::shared_ptr<const std::string>> chunks;  // None for a derived signal.
  std::vector<std::string> summaries;                      // None for the step itself.
};
ChunkRows MakeChunkRows(uint16_t signal, const ChunkInput& input);
std::vector<std::string> MakeSummaryRows(std::span<const SpanSummary> spans, size_t cells);

// A signal with fewer cells than a group has makes up for it with more steps.
inline size_t StepsForCells(size_t steps, size_t cells) {
  return std::min(kChunkStepsMax, steps * std::max<size_t>(1, kGroupCells / cells));
}

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_STORE_CHUNK_ROWS_H_
