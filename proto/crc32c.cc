#include "bellwether/crc32c.h"

#include <array>
#include <cstring>
#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace bellwether {
namespace {

constexpr std::array<uint32_t, 256> MakeTable() {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t crc = i;
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78u : 0);
    table[i] = crc;
  }
  return table;
}
constexpr std::array<uint32_t, 256> kTable = MakeTable();

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) uint32_t ExtendCrc32cSse42(uint32_t crc, std::string_view bytes) {
  uint64_t state = ~crc;
  const char* p = bytes.data();
  size_t left = bytes.size();
  for (; left >= 8; left -= 8, p += 8) {
    uint64_t word;
    std::memcpy(&word, p, 8);
    state = _mm_crc32_u64(state, word);
  }
  auto low = static_cast<uint32_t>(state);
  for (; left > 0; --left, ++p) low = _mm_crc32_u8(low, static_cast<uint8_t>(*p));
  return ~low;
}
#endif

}  // namespace

uint32_t ExtendCrc32cPortable(uint32_t crc, std::string_view bytes) {
  crc = ~crc;
  for (const char c : bytes) crc = crc >> 8 ^ kTable[(crc ^ static_cast<uint8_t>(c)) & 0xff];
  return ~crc;
}

uint32_t ExtendCrc32c(uint32_t crc, std::string_view bytes) {
#if defined(__x86_64__)
  static const bool has_instruction = __builtin_cpu_supports("sse4.2");
  if (has_instruction) return ExtendCrc32cSse42(crc, bytes);
#endif
  return ExtendCrc32cPortable(crc, bytes);
}

}  // namespace bellwether
