#include "server/store/crc_ranges.h"

#include <array>

#include "bellwether/crc32c.h"

namespace bellwether::server {
namespace {

constexpr size_t kStride = 64;
// Polynomials modulo the checksum's, as it writes them: the highest bit is x^0.
constexpr uint32_t kPolynomial = 0x82f63b78, kOne = 1u << 31, kByte = kOne >> 8;  // x^8

uint32_t Multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (; a != 0; a <<= 1) {
    if ((a & kOne) != 0) product ^= b;
    b = b >> 1 ^ ((b & 1) != 0 ? kPolynomial : 0);
  }
  return product;
}

// x^8 to the power of each value of each byte of a length.
using Powers = std::array<std::array<uint32_t, 256>, 4>;

Powers MakePowers() {
  Powers powers;
  uint32_t base = kByte;
  for (auto& of_byte : powers) {
    of_byte[0] = kOne;
    for (size_t i = 1; i < of_byte.size(); ++i) of_byte[i] = Multiply(of_byte[i - 1], base);
    base = Multiply(of_byte.back(), base);
  }
  return powers;
}

// What `crc` adds to the checksum of `n` bytes behind it.
uint32_t Shift(uint32_t crc, size_t n) {
  static const Powers powers = MakePowers();
  for (size_t i = 0; i < powers.size() && n > 0; ++i, n >>= 8) crc = Multiply(powers[i][n & 0xff], crc);
  return crc;
}

}  // namespace

uint32_t CrcRanges::Prefix(size_t end) {
  const size_t index = end / kStride;
  while (prefixes_.size() <= index) {
    prefixes_.push_back(ExtendCrc32c(prefixes_.back(), bytes_.substr((prefixes_.size() - 1) * kStride, kStride)));
  }
  return ExtendCrc32c(prefixes_[index], bytes_.substr(index * kStride, end % kStride));
}

uint32_t CrcRanges::Extend(uint32_t before, size_t begin, size_t end) {
  // Of A and of A followed by B is known; the checksum of B is what they differ by.
  return Prefix(end) ^ Shift(Prefix(begin) ^ before, end - begin);
}

}  // namespace bellwether::server
