// run_uuid.h: a run's uuid from its name, when the trainer gives none.
//
// FNV-1a of 128 bits, then murmur3's finalizer on both halves: stable over
// versions and machines, the same for all ranks and attempts of a name.  Not a
// secret and not collision-proof against an adversary; runs that must not share
// a uuid get one from their owner.

#ifndef BELLWETHER_CLIENT_LIB_SRC_RUN_UUID_H_
#define BELLWETHER_CLIENT_LIB_SRC_RUN_UUID_H_

#include <cstdint>

namespace bellwether::client {

void RunUuidFromName(const char* name, uint8_t (&uuid)[16]);

}  // namespace bellwether::client

#endif  // BELLWETHER_CLIENT_LIB_SRC_RUN_UUID_H_
