#include "server/ingest/run_key.h"

#include <openssl/sha.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>

namespace bellwether::server {
namespace {

__extension__ typedef unsigned __int128 Uint128;

uint64_t Mix(uint64_t k) {
  k = (k ^ (k >> 33)) * 0xff51afd7ed558ccd;
  k = (k ^ (k >> 33)) * 0xc4ceb9fe1a85ec53;
  return k ^ (k >> 33);
}

}  // namespace

RunUuid UuidOfClient(std::string_view name) {
  const Uint128 prime = (Uint128{1} << 88) + 0x13b;
  Uint128 hash = (Uint128{0x6c62272e07bb0142} << 64) | 0x62b821756295c58d;
  for (const char c : name) hash = (hash ^ static_cast<uint8_t>(c)) * prime;
  const uint64_t low = Mix(static_cast<uint64_t>(hash));
  const uint64_t high = Mix(static_cast<uint64_t>(hash >> 64) ^ low);
  RunUuid uuid{};
  for (size_t i = 0; i < 8; ++i) {
    uuid[i] = static_cast<uint8_t>(high >> (56 - 8 * i));
    uuid[8 + i] = static_cast<uint8_t>(low >> (56 - 8 * i));
  }
  return uuid;
}

RunUuid UuidOfBoth(const RunUuid& said, std::string_view name) {
  if (said == UuidOfClient(name)) return said;
  std::string both(said.begin(), said.end());
  both.append(name);
  std::array<unsigned char, SHA256_DIGEST_LENGTH> hash;
  SHA256(reinterpret_cast<const unsigned char*>(both.data()), both.size(), hash.data());
  RunUuid uuid{};
  std::copy_n(hash.begin(), uuid.size(), uuid.begin());
  return uuid;
}

}  // namespace bellwether::server
