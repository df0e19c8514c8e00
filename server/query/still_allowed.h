// still_allowed.h: whether who opened a stream may have it still.

#ifndef BELLWETHER_SERVER_QUERY_STILL_ALLOWED_H_
#define BELLWETHER_SERVER_QUERY_STILL_ALLOWED_H_

#include <string_view>

#include "server/access/access.h"
#include "server/query/call_access.h"
#include "server/util/grpc_status.h"

namespace bellwether::server {

// False: the stream is ending, or was ended here because its caller is nobody any
// more, or may not make the `call` about `run` ("" = about none in particular) any
// more.  Null `grant`: no caller is identified.  For StreamPump's thread.
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
