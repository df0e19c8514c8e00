// ingest_sink.h: what a stream hands its messages to.
//
// The engine implements it: server/engine/ingest_coordinator.h.

#ifndef BELLWETHER_SERVER_INGEST_INGEST_SINK_H_
#define BELLWETHER_SERVER_INGEST_INGEST_SINK_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/ingest/message.h"

namespace bellwether::server {

// What a session reports to the stream that holds it.  Called from the log's
// and the shards' threads; quick, and never under a lock that Put() takes.
class SessionOwner {
 public:
  virtual ~SessionOwner() = default;
  // The Hello is durable: everything up to `durable_seq` is, too.
  virtual void OnOpen(uint64_t durable_seq) = 0;
  virtual void OnDurable(uint64_t seq) = 0;
  virtual void OnGoodbye() {}   // The Bye is durable, and with it all before; nothing follows.
  virtual void OnRoom() = 0;    // After Put() returned kBusy; try again.
  virtual void OnFenced() = 0;  // A newer session holds this (run, rank).
  // Another server of the cluster serves this run now, at `address` if that is not
  // "".  As far as the session goes it is fenced.
  virtual void OnMoved(const std::string& address) {
    (void)address;
    OnFenced();
  }
  // The client is asked to look deeper at these heads, at most 64, and at no other.
  virtual void OnDeeper(const std::vector<Head>& heads) = 0;
  // The client is handed an action; it may have it already.
  virtual void OnAction(const Action& action) = 0;
};

// One stream's claim on a (run, rank).
class IngestSession {
 public:
  virtual ~IngestSession() = default;
  virtual uint64_t epoch() const = 0;
  // The attempt of its Hello as the run counts it.  It may be another number
  // than the Hello had (launches.h).  Messages that are put bear this one, and
  // so do actions that the owner is handed.
  virtual uint32_t attempt() const = 0;
  virtual const Layout& layout() const = 0;

  enum class Taken {
    kTaken,
    kDuplicate,  // seq was taken before; it is acknowledged as usual.
    kBusy,       // Not taken; OnRoom() follows.
    kFenced,     // Not taken; OnFenced() was or will be called.
  };
  // `payload` is the serialized v1.ClientMessage.  With kBusy neither argument
  // was touched.  UNAVAILABLE: the log failed.  Sequenced messages only.
  virtual absl::StatusOr<Taken> Put(IngestMessage& message, std::string& payload) = 0;
  virtual void Heartbeat(const HeartbeatMessage& heartbeat) = 0;
  // The last words.  OnGoodbye() follows, unless another session comes first; false: they
  // are nowhere, since the session is fenced or the log takes nothing.
  virtual bool Bye(IngestMessage message, std::string payload) = 0;
  // No call to the owner is in flight or follows.
  virtual void Detach() = 0;
};

// The error of Open() for a run that the server at `address` serves, and back.
absl::Status MovedTo(const std::string& address);
std::optional<std::string> MovedAddress(const absl::Status& status);

class IngestSink {
 public:
  virtual ~IngestSink() = default;
  // Registers the session, fences the one before it and calls OnOpen() once the
  // Hello is durable.  RESOURCE_EXHAUSTED: runs or ranks at their limit.
  // FAILED_PRECONDITION: the run is known with another layout in this attempt.
  // ABORTED: a later attempt has begun at that rank, or a later launch.
  // UNAVAILABLE: draining, or the log failed, or the run is another server's
  // (MovedAddress).
  virtual absl::StatusOr<std::shared_ptr<IngestSession>> Open(const HelloMessage& hello, std::string payload,
                                                              SessionOwner* owner) = 0;
};

// What an import of a recording asks for besides (run_import.h).
class ImportSink : public IngestSink {
 public:
  // Waits until everything taken from `run` so far is applied and shown.
  virtual void AwaitApplied(RunId run) = 0;
  // Ends a run of which nothing more will be heard, as if it had been silent for too long.
  virtual void EndUnheard(RunId run) = 0;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_INGEST_INGEST_SINK_H_
