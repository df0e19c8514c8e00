// chunk.h: a few series of float32 over the same steps, as few bytes as we can.
//
// Bit for bit: every pattern comes back, NaN payloads included.  Steps are
// delta-coded (regular ones cost nothing, gaps and odd steps a few bytes).
// A value becomes a word in one of two ways, whichever looks shorter on a
// sample of the chunk:
//   as it is  its bits rotated left by one, so that the exponent is a byte of
//             its own and the sign is last: noise, counts;
//   walked    its distance, in the order of all floats, from the series'
//             previous step, the distance's sign last: whatever moves slowly.
// The words are split into four byte planes.  A plane that looks random is kept
// as it is; the others are one zstd frame with a block for each, since bytes of
// different planes have different statistics.
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
  size_t cells = 0;   // 1..kChunkCellsMax; steps * cells <= kChunkValuesMax
  size_t stride = 0;  // >= cells
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
// Only what it covers.
absl::Status DecodeChunkShape(std::string_view bytes, std::vector<int64_t>* steps, size_t* cells);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_STORE_CHUNK_H_
