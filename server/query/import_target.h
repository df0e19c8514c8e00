// import_target.h: where an import goes: into this server's runs, or on to the
// server of the cluster that serves the run.
//
// The name that the call gives decides it, else the recording's first hello;
// until that is read what comes is kept.  The owner gets the very bytes, and
// does with them what it does for its own callers.
//
// Feed() and Finish() by one thread at a time, the rest by any.

#ifndef BELLWETHER_SERVER_QUERY_IMPORT_TARGET_H_
#define BELLWETHER_SERVER_QUERY_IMPORT_TARGET_H_

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "bellwether/v1/query.pb.h"
#include "server/query/query_engine.h"

namespace bellwether::server {

class ImportTarget {
 public:
  // Of what is kept until the owner is known; a hello is far smaller.
  static constexpr size_t kKeptBytesMax = 2 << 20;

  virtual ~ImportTarget() = default;
  // As RunImport.  In a cluster also UNAVAILABLE: no server serves the run just
  // now, or its owner does not answer.  The same import again goes on after
  // whatever came so far.
  virtual absl::Status Feed(const std::string& bytes) = 0;
  virtual absl::StatusOr<v1::ImportRunResponse> Finish() = 0;
  // Whether a call waits for another server, or may have to.
  virtual bool asks_others() const { return false; }
  // The import is no longer wanted: a call that waits for another server
  // returns.
  virtual void Cancel() {}
};

// `grant` as in CallContext; the engine must outlive the target.
std::unique_ptr<ImportTarget> OpenImport(const QueryEngine& engine, GrantPtr grant, const std::string& as_name,
                                         bool notify);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_QUERY_IMPORT_TARGET_H_
