#include "server/store/chunk_rows.h"

namespace bellwether::server {

std::vector<std::string> MakeSummaryRows(std::span<const SpanSummary> spans, size_t cells) {
  std::vector<std::string> rows;
  for (size_t cell = 0; cell < cells; cell += kGroupCells) {
    rows.push_back(EncodeSpans(spans, cell, std::min(cell + kGroupCells, cells)));
  }
  return rows;
}

ChunkRows MakeChunkRows(uint16_t signal, const ChunkInput& input) {
  ChunkRows rows;
  for (size_t cell = 0; cell < input.cells; cell += kGroupCells) {
    ChunkInput group = input;
    group.values += cell;
    group.cells = std::min(kGroupCells, input.cells - cell);
    rows.chunks.push_back(std::make_shared<const std::string>(EncodeChunk(group)));
  }
  if (signal != kMetaSignal) rows.summaries = MakeSummaryRows(Summarize(input), input.cells);
  return rows;
}

}  // namespace bellwether::server
