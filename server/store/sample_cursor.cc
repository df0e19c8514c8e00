#include "server/store/sample_cursor.h"

#include <algorithm>
#include <set>
#include <string>

#include "server/util/status_macros.h"

namespace bellwether::server {

absl::Status SampleCursor::Start() {
  std::set<Extent> extents;
  for (const MemoryBlock& block : reader_->memory()) {
    if (block.signal != signal_ || block.attempt != attempt_ || block.first_cell != 0) continue;
    std::vector<int64_t> steps;
    size_t cells = 0;
    if (block.open != nullptr) {
      steps = block.open->steps;
    } else {
      BW_RETURN_IF_ERROR(DecodeChunkShape(*block.bytes, &steps, &cells));
    }
    extents.insert({steps.front(), Place::kMemory});
  }
  const SeriesAddress address{.run = reader_->run(), .signal = signal_, .index = 0};
  for (const auto& [prefix, place] : {std::pair('s', Place::kChunk), std::pair('w', Place::kWindow)}) {
    const std::string key = SeriesRowKey(prefix, address, attempt_, 0).substr(0, kSeriesPrefixBytes + 4);
    const Place where = place;
    BW_RETURN_IF_ERROR(reader_->snapshot().Scan(key, {}, [&](std::string_view found, std::string_view) {
      extents.insert({KeyFirstStep(found), where});
      return true;
    }));
  }
  extents_.assign(extents.begin(), extents.end());
  return LoadNext();
}

absl::Status SampleCursor::Next() {
  ++row_;
  return valid() ? absl::OkStatus() : LoadNext();
}

// The next extent with a step above the last one: a window may be seen twice,
// in memory and stored, while it moves.
absl::Status SampleCursor::LoadNext() {
  const bool any = !steps_.empty();
  const int64_t last = any ? steps_.back() : 0;
  while (next_extent_ < extents_.size()) {
    BW_RETURN_IF_ERROR(Load(extents_[next_extent_++]));
    row_ = any ? static_cast<size_t>(std::upper_bound(steps_.begin(), steps_.end(), last) - steps_.begin()) : 0;
    if (valid()) return absl::OkStatus();
    steps_.assign(1, last);  // Keeps the place.
    row_ = 1;
  }
  return absl::OkStatus();
}

absl::Status SampleCursor::Add(const Chunk& chunk, size_t first_cell) {
  if (first_cell == 0) {
    steps_ = chunk.steps;
    values_.assign(steps_.size() * cells_, NotMeasured());
  }
  if (chunk.steps != steps_ || first_cell + chunk.cells > cells_) {
    return absl::DataLossError("stored series: groups of one signal differ in their steps");
  }
  for (size_t t = 0; t < steps_.size(); ++t) {
    std::copy_n(chunk.values.begin() + static_cast<ptrdiff_t>(t * chunk.cells), chunk.cells,
                values_.begin() + static_cast<ptrdiff_t>(t * cells_ + first_cell));
  }
  return absl::OkStatus();
}

absl::Status SampleCursor::Load(const Extent& extent) {
  Chunk chunk;
  if (extent.place == Place::kMemory) {
    for (const MemoryBlock& block : reader_->memory()) {
      if (block.signal != signal_ || block.attempt != attempt_) continue;
      if (block.open != nullptr) {
        if (block.open->steps.front() == extent.first_step) BW_RETURN_IF_ERROR(Add(*block.open, block.first_cell));
        continue;
      }
      BW_RETURN_IF_ERROR(DecodeChunkShape(*block.bytes, &chunk.steps, &chunk.cells));
      if (chunk.steps.front() != extent.first_step) continue;
      BW_RETURN_IF_ERROR(DecodeChunk(*block.bytes, &chunk));
      BW_RETURN_IF_ERROR(Add(chunk, block.first_cell));
    }
    return absl::OkStatus();
  }
  const bool chunked = extent.place == Place::kChunk;
  const size_t cells_each = chunked ? kGroupCells : kPartCells;
  for (size_t cell = 0; cell < cells_; cell += cells_each) {
    const SeriesAddress address{
        .run = reader_->run(), .signal = signal_, .index = static_cast<uint32_t>(cell / cells_each)};
    const absl::StatusOr<std::string> bytes =
        reader_->snapshot().Get(SeriesRowKey(chunked ? 's' : 'w', address, attempt_, extent.first_step));
    if (cell > 0 && absl::IsNotFound(bytes.status())) break;  // The signal had fewer cells then.
    BW_RETURN_IF_ERROR(bytes.status());
    BW_RETURN_IF_ERROR(DecodeChunk(*bytes, &chunk));
    BW_RETURN_IF_ERROR(Add(chunk, cell));
  }
  return absl::OkStatus();
}

}  // namespace bellwether::server
