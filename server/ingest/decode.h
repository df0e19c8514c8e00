// decode.h: the wire's messages into plain ones, or a reason why not.
//
// Everything a client can get wrong is found here, before anything of it is
// kept: every range, every size, every count.  An error is
// INVALID_ARGUMENT and names the field, its value and the legal range.  NaN and
// infinity are values like any other.
//
// One thing is no mistake: a signal that this server does not know is a newer client's.  Its values are
// left out and counted in the frame, and the rest of the frame is taken.

#ifndef BELLWETHER_SERVER_INGEST_DECODE_H_
#define BELLWETHER_SERVER_INGEST_DECODE_H_

#include <cstdint>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "bellwether/v1/ingest.pb.h"
#include "server/ingest/decode_limits.h"
#include "server/ingest/message.h"

namespace bellwether::server {

inline constexpr uint32_t kProtocolVersion = 1;
// What hello.client_version begins with where the server itself imports a recording
// (run_import.h); which one follows.
inline constexpr std::string_view kImportOf = "import of ";

// [a-zA-Z0-9_.:/-]{1,128}
bool IsRunName(std::string_view name);

// `layout` is that of the stream's Hello, nullptr before it: then only a Hello
// passes (FAILED_PRECONDITION otherwise).
absl::StatusOr<IngestMessage> Decode(const v1::ClientMessage& message, const Layout* layout,
                                     const DecodeLimits& limits);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_INGEST_DECODE_H_
