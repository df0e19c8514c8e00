// sample_cursor.h: walks over all samples of one signal and attempt, in order.
//
// Holds one decoded chunk of the whole signal at a time.  The reader must
// outlive it.  Not thread-safe.

#ifndef BELLWETHER_SERVER_STORE_SAMPLE_CURSOR_H_
#define BELLWETHER_SERVER_STORE_SAMPLE_CURSOR_H_

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "server/store/series_reader.h"

namespace bellwether::server {

class SampleCursor {
 public:
  SampleCursor(const SeriesReader* reader, uint16_t signal, uint32_t attempt, size_t cells)
      : reader_(reader), signal_(signal), attempt_(attempt), cells_(cells) {}

  absl::Status Start();  // To the first sample.
  absl::Status Next();   // REQUIRES: valid().

  bool valid() const { return row_ < steps_.size(); }
  int64_t step() const { return steps_[row_]; }
  std::span<const float> row() const { return {values_.data() + row_ * cells_, cells_}; }

 private:
  enum class Place { kChunk, kWindow, kMemory };
  struct Extent {
    int64_t first_step = 0;
    Place place = Place::kChunk;
    bool operator<(const Extent& o) const {
      return first_step != o.first_step ? first_step < o.first_step : place < o.place;
    }
  };
  absl::Status Load(const Extent& extent);
  absl::Status Add(const Chunk& chunk, size_t first_cell);
  absl::Status LoadNext();

  const SeriesReader* const reader_;
  const uint16_t signal_;
  const uint32_t attempt_;
  const size_t cells_;
  std::vector<Extent> extents_;
  size_t next_extent_ = 0;
  std::vector<int64_t> steps_;
  std::vector<float> values_;  // [steps][cells]
  size_t row_ = 0;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_STORE_SAMPLE_CURSOR_H_
