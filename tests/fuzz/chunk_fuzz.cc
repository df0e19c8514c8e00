// Any bytes are a chunk or an error; any floats come back bit for bit.

#include <cstring>
#include <vector>

#include "server/store/chunk.h"
#include "tests/fuzz/fuzz.h"

namespace bellwether::server {
namespace {

void RoundTrip(FuzzInput input) {
  const size_t cells = 1 + input.Take<uint8_t>() % 16;
  const size_t gap = 1 + input.Take<uint8_t>() % 5;
  std::vector<float> values(input.rest().size() / sizeof(float) / cells * cells);
  if (values.empty() || values.size() / cells > kChunkStepsMax) return;
  std::memcpy(values.data(), input.rest().data(), values.size() * sizeof(float));
  std::vector<int64_t> steps(values.size() / cells);
  for (size_t i = 0; i < steps.size(); ++i) steps[i] = static_cast<int64_t>(i * gap + (i > 3 ? i % gap : 0));
  const std::string bytes =
      EncodeChunk({.steps = steps, .values = values.data(), .cells = cells, .stride = cells, .zstd_level = 1});
  Chunk chunk;
  FUZZ_CHECK(DecodeChunk(bytes, &chunk).ok());
  FUZZ_CHECK(chunk.steps == steps && chunk.cells == cells && chunk.values.size() == values.size());
  FUZZ_CHECK(std::memcmp(chunk.values.data(), values.data(), values.size() * sizeof(float)) == 0);
}

void Decode(std::string_view bytes) {
  Chunk chunk;
  std::vector<int64_t> steps;
  size_t cells = 0;
  const bool shaped = DecodeChunkShape(bytes, &steps, &cells).ok();
  if (!DecodeChunk(bytes, &chunk).ok()) return;
  FUZZ_CHECK(shaped && chunk.steps == steps && chunk.cells == cells);
  FUZZ_CHECK(chunk.values.size() == steps.size() * cells && chunk.values.size() <= kChunkValuesMax);
}

}  // namespace
}  // namespace bellwether::server

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const bellwether::FuzzInput rest(data + 1, size - 1);
  if ((data[0] & 1) != 0) {
    bellwether::server::RoundTrip(rest);
  } else {
    bellwether::server::Decode(rest.rest());
  }
  return 0;
}
