// http_server.h: the page, /metrics, the probes and the JSON calls.
//
//   /                       the page (its files beside it)
//   /metrics                text format 0.0.4; of all runs, so for callers that may see all
//   /-/healthy              200 while the process serves; wants no token
//   /-/ready                200 while acknowledged means durable, else 503 and why
//   /-/reload               POST: reads the rules file again; 403 where that is off
//   /api/v1/<Method>        json_gateway.h; 503 while too many run (call_slots.h)
//   /api/v1/events          event_stream.h; 503 when too many are open
//
// Every answer carries a content security policy that allows this server only.
// A caller without the right to ask is refused (access.h).  With TLS
// (http_tls.h) a client's certificate counts as its token does.  A body comes
// with its length, plain.  The page works under a path prefix of a reverse
// proxy: it uses relative addresses only.

#ifndef BELLWETHER_SERVER_HTTP_HTTP_SERVER_H_
#define BELLWETHER_SERVER_HTTP_HTTP_SERVER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/access/access.h"
#include "server/access/tls_files.h"
#include "server/http/call_slots.h"
#include "server/http/event_stream.h"
#include "server/store/alert_store.h"
#include "server/store/run_table.h"
#include "server/util/counters.h"

namespace bellwether::server {

struct HttpOptions {
  std::string host = "127.0.0.1";  // An address or a name of this machine.
  int port = 7071;                 // 0 = any free one
  std::vector<std::string> hosts;  // Names by which browsers may call this server.
  int workers_max = 24;            // Requests served at once, streams beside.
  int queue_max = 256;             // Requests that wait for a worker, and as many connections beyond those served.
  // Of all connections, from one address (util/connection_source.h).
  int64_t connections_per_address_max = 64;
  size_t body_bytes_max = 1 << 20;
  int keepalive_seconds = 5;  // Of an idle connection.
  int keepalive_requests_max = 1000;
  int request_seconds_max = 10;  // From a request's first byte to its last.
  int write_seconds_max = 10;    // Of a reader that takes nothing of an answer.
  CallSlots::Options calls;
  EventHub::Options events;
};

// What is served.  All must outlive the server; called from many threads.
struct HttpSources {
  std::function<std::string()> metrics;
  std::function<absl::Status()> ready;
  std::function<absl::Status()> reload;  // Null: off.
  // query/json_api.h.  `cancelled`: whether the caller has gone away; `memory` is kept
  // until the answer is out.
  std::function<absl::StatusOr<std::string>(const std::string& method, const std::string& body, const GrantPtr& grant,
                                            const std::function<bool()>& cancelled,
                                            std::shared_ptr<const void>* memory)>
      call;
  std::vector<std::string_view> methods;  // The methods of `call`; labels name no others.
  Access* access = nullptr;               // Null: no caller is asked for an identity, and grants are null.
  TlsWatch* tls = nullptr;                // Null: plaintext.
  EventHub::ToJson transition_json;
  const RunTable* runs = nullptr;
  std::function<bool()> others;  // As EventHub's; null = this server is alone.
  AlertStore* alerts = nullptr;
  Counters* counters = nullptr;
};

// Thread-safe.
class HttpServer {
 public:
  // Binds and serves.  UNAVAILABLE: the address cannot be bound.
  static absl::StatusOr<std::unique_ptr<HttpServer>> Start(const HttpOptions& options, HttpSources sources);
  // As Stop().
  virtual ~HttpServer() = default;

  // The port that was bound.
  virtual int port() const = 0;
  // Ends the streams and what is still being sent, gives answers that are under
  // way 3 s, then cuts their connections, and returns once all threads have ended.
  virtual void Stop() = 0;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_HTTP_HTTP_SERVER_H_
