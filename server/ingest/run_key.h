// run_key.h: the uuid under which the server keeps a run.  Its trainer gives a
// name and a uuid.
//
// A client that is given no uuid hashes the run's name, as any client can that
// knows or guesses the name.  Where callers have rights by name, a uuid must
// therefore not be enough to meet another's run, or to take its place first.  A
// uuid that does not follow from the name is kept as another, which follows
// from both.

#ifndef BELLWETHER_SERVER_INGEST_RUN_KEY_H_
#define BELLWETHER_SERVER_INGEST_RUN_KEY_H_

#include <string_view>

#include "server/model/run_types.h"

namespace bellwether::server {

// What a client of ours takes where it is given none (client_lib/src/run_uuid.h):
// FNV-1a of 128 bits, then murmur3's finalizer on both halves.
RunUuid UuidOfClient(std::string_view name);

// `said` if it is UuidOfClient(name), else 16 bytes of the SHA-256 of `said`
// and `name`.
RunUuid UuidOfBoth(const RunUuid& said, std::string_view name);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_INGEST_RUN_KEY_H_
