#include "client_lib/src/run_uuid.h"

namespace bellwether::client {
namespace {

__extension__ typedef unsigned __int128 Uint128;

uint64_t Mix(uint64_t k) {
  k = (k ^ (k >> 33)) * 0xff51afd7ed558ccd;
  k = (k ^ (k >> 33)) * 0xc4ceb9fe1a85ec53;
  return k ^ (k >> 33);
}

}  // namespace

void RunUuidFromName(const char* name, uint8_t (&uuid)[16]) {
  const Uint128 prime = (Uint128{1} << 88) + 0x13b;
  Uint128 hash = (Uint128{0x6c62272e07bb0142} << 64) | 0x62b821756295c58d;
  for (const char* c = name; *c != '\0'; ++c) hash = (hash ^ static_cast<uint8_t>(*c)) * prime;
  const uint64_t low = Mix(static_cast<uint64_t>(hash));
  const uint64_t high = Mix(static_cast<uint64_t>(hash >> 64) ^ low);
  for (int i = 0; i < 8; ++i) {
    uuid[i] = static_cast<uint8_t>(high >> (56 - 8 * i));
    uuid[8 + i] = static_cast<uint8_t>(low >> (56 - 8 * i));
  }
}

}  // namespace bellwether::client
