// peers.h: the other servers of a cluster, as Query asks them.
//
// Calls go as bytes of the messages of query.proto, sealed for a caller (access's
// passed_on.h).  Server addresses are those under which clients reach them.
//
// Thread-safe; calls wait for their answer.

#ifndef BELLWETHER_SERVER_QUERY_PORTS_PEERS_H_
#define BELLWETHER_SERVER_QUERY_PORTS_PEERS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/model/run_types.h"

namespace bellwether::server {

// A call that answers more than once.  Thread-safe.
class PeerStream {
 public:
  virtual ~PeerStream() = default;
  // Asks for the next message; once for each call of on_message.
  virtual void Next() = 0;
  virtual void Cancel() = 0;
};

// A call that is sent several messages, and answers once.  Write() and Finish()
// by one thread at a time, the rest by any.
class PeerUpload {
 public:
  virtual ~PeerUpload() = default;
  // Waits until the message is on its way.  An error is the call's: it has ended.
  // UNAVAILABLE: the server takes nothing for too long, or is gone.
  virtual absl::Status Write(std::string message) = 0;
  // Nothing more comes: waits for the answer.  Errors as above.
  virtual absl::StatusOr<std::string> Finish() = 0;
  // What waits returns at once.
  virtual void Cancel() = 0;
};

class Peers {
 public:
  // Every call that asks more than one has so long for each of them.
  static constexpr int64_t kAskAllMs = 2000;

  struct Spread {
    std::vector<std::string> others;  // Addresses of those that own something.
    uint32_t unserved = 0;            // Partitions without a server now, or that are taken up or let go here.
  };
  struct Owner {
    bool here = false;
    std::string address;  // Of another server; "" = of none, for now.
  };
  struct Answer {
    std::string server;
    absl::StatusOr<std::string> bytes = absl::UnknownError("");
  };

  virtual ~Peers() = default;

  virtual Spread spread() const = 0;
  // What this server serves: partition and epoch, in order.
  virtual std::vector<std::pair<uint32_t, uint64_t>> holdings() const = 0;
  virtual Owner OwnerOf(const RunUuid& uuid) const = 0;
  virtual Owner OwnerOfRun(RunId run) const = 0;

  // What the server answers to `method` of service Query.  UNAVAILABLE: nothing,
  // or not in time; RESOURCE_EXHAUSTED: too many such calls are under way.
  virtual absl::StatusOr<std::string> Call(const std::string& server, const std::string& method,
                                           const std::string& request, const std::string& seal,
                                           int64_t deadline_monotonic_ns) = 0;
  // All of them at once, in their order; kAskAllMs for each at most.
  virtual std::vector<Answer> CallAll(const std::vector<std::string>& servers, const std::string& method,
                                      const std::string& request, const std::string& seal,
                                      int64_t deadline_monotonic_ns) = 0;
  // `on_message` and then `on_end`, once, come from other threads, and may come
  // before this returns; both are let go after on_end.
  virtual std::shared_ptr<PeerStream> Stream(const std::string& server, const std::string& method,
                                             const std::string& request, const std::string& seal,
                                             std::function<void(std::string)> on_message,
                                             std::function<void(const absl::Status&)> on_end) = 0;
  // RESOURCE_EXHAUSTED: as many streams as may be are open; UNAVAILABLE: it did not
  // answer a moment ago.
  virtual absl::StatusOr<std::shared_ptr<PeerUpload>> Upload(const std::string& server, const std::string& method,
                                                             const std::string& seal) = 0;
  // For a call of this server's own.
  virtual std::string SealAsServer(const std::string& method) const = 0;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_QUERY_PORTS_PEERS_H_
