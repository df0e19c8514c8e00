// still_allowed.h: whether the caller that opened a stream may still have it.

#ifndef BELLWETHER_SERVER_QUERY_STILL_ALLOWED_H_
#define BELLWETHER_SERVER_QUERY_STILL_ALLOWED_H_

#include <string_view>

#include "server/access/access.h"
#include "server/query/call_access.h"
#include "server/util/grpc_status.h"

namespace bellwether::server {

// False: the stream is ending, or was ended here.  Its caller has no valid
// identity any more, or may not make the `call` about `run` any more ("" =
// about no particular run).  Null `grant`: no caller is asked for an identity.
// For StreamPump's thread.
template <typename Stream>
bool StillAllowed(const Grant* grant, const char* call, std::string_view run, Stream* stream) {
  if (stream->ending()) return false;
  if (grant == nullptr) return true;
  const absl::Status allowed = grant->CheckOpen(call, RuleOf(call).role, run);
  if (!allowed.ok()) stream->End(ToGrpc(allowed));
  return allowed.ok();
}

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_QUERY_STILL_ALLOWED_H_
