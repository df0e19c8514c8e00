// chunk.h: a few series of float32 over the same steps, as few bytes as we can.
//
// Bit for bit: every pattern comes back, NaN payloads included.  Steps are
// delta-coded (regular ones cost nothing, gaps and odd steps a few bytes).
// Values are xored with the previous step of their series, split into four
// byte planes and compressed by zstd: a slow walk leaves zeros in the high
// planes.  Beside a chunk stands a summary per series, so that a long range is
// drawn without decoding it.
//
// Any thread; compressor contexts are kept per thread.

#ifndef BELLWETHER_SERVER_STORE_CHUNK_H_
#define BELLWETHER_SERVER_STORE_CHUNK_H_

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace bellwether::server {

inline constexpr size_t kChunkStepsMax = 4096;
inline constexpr size_t kChunkCellsMax = 4096;
inline constexpr size_t kChunkValuesMax = size_t{1} << 22;

// What is encoded: values[step * stride + cell].
struct ChunkInput {
  std::span<const int64_t> steps;  // Rising, 1..kChunkStepsMax
  const float* values = nullptr;
  size_t cells = 0;                // 1..kChunkCellsMax; steps * cells <= kChunkValuesMax
  size_t stride = 0;               // >= cells
  int zstd_level = 1;
};
std::string EncodeChunk(const ChunkInput& input);

struct Chunk {
  std::vector<int64_t> steps;
  size_t cells = 0;
  std::vector<float> values;  // [steps][cells]
};
// DATA_LOSS, leaving `*chunk` unspecified, on anything EncodeChunk did not
// write.  Never reads beyond `bytes`, never takes more memory than the limits.
absl::Status DecodeChunk(std::string_view bytes, Chunk* chunk);
// Only the steps.
absl::Status DecodeChunkSteps(std::string_view bytes, std::vector<int64_t>* steps);

// One series of a chunk.  Cells that were not measured count nowhere; a
// measured NaN counts in `nans` and in nothing else.
struct SeriesSummary {
  float min = 0, mean = 0, max = 0;  // Over the numbers; NaN if there are none.
  float last = 0;                    // Newest measured value, may be NaN.
  uint16_t numbers = 0;
  uint16_t nans = 0;
};
struct ChunkSummary {
  int64_t first_step = 0, last_step = 0;
  uint32_t steps = 0;
  std::vector<SeriesSummary> series;  // [cells]
};
ChunkSummary Summarize(const ChunkInput& input);
std::string EncodeSummary(const ChunkSummary& summary);
absl::Status DecodeSummary(std::string_view bytes, ChunkSummary* summary);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_STORE_CHUNK_H_
