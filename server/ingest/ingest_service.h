// ingest_service.h: the gRPC face of ingest/.
//
// Holds one stream per rank, checks every message before anything of it is kept,
// and hands it to the sink with the bytes that came, which are logged as they are.
// A full queue is not an error: the next read starts only once the message was taken, so flow control reaches the
// sender and the client's ring drops and counts.  The training thread waits
// for nothing.  An Ack means durable, never merely received.

#ifndef BELLWETHER_SERVER_INGEST_INGEST_SERVICE_H_
#define BELLWETHER_SERVER_INGEST_INGEST_SERVICE_H_

#include <cstdint>
#include <set>
#include <string>

#include "absl/synchronization/mutex.h"
#include "bellwether/v1/ingest.grpc.pb.h"
#include "server/access/access.h"
#include "server/ingest/decode.h"
#include "server/ingest/ingest_sink.h"
#include "server/store/run_table.h"
#include "server/util/clock.h"
#include "server/util/counters.h"

namespace bellwether::server {

// Thread-safe: gRPC calls every method from its own threads.
class IngestService final : public v1::Ingest::WithRawCallbackMethod_Attach<v1::Ingest::Service> {
 public:
  struct Options {
    DecodeLimits limits;
    int streams_max = 4096;
    uint64_t window_bytes = 64 << 20;
    uint32_t message_bytes_max = 1 << 20;
    int64_t idle_ms_max = 30'000;  // No message for so long: cut.
    int64_t hello_ms_max = 5'000;  // No Hello for so long: cut.
    // What a Welcome promises, >= 2,000: CutStreams comes each second.
    uint32_t sign_of_life_ms = 2'500;
    uint32_t drain_retry_after_ms = 1000;
    std::string server_version;
    std::string page_url_prefix;     // Run pages are at prefix + name; may be "".
    Access* access = nullptr;        // Null: every client may write.
    const RunTable* runs = nullptr;  // What a uuid was called before; with access.
  };

  // All must outlive this object.
  IngestService(const Options& options, IngestSink* sink, Counters* counters, Clock* clock);
  ~IngestService() override;

  // The errors are listed in ingest.proto.
  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* Attach(grpc::CallbackServerContext* context) override;

  // Sends every stream the request to come back later and ends it; new ones are
  // refused.
  void Drain();
  // Ends streams that have been silent for idle_ms_max, or for hello_ms_max
  // without a Hello, and those whose identity may not write any more.  Sends a
  // message on streams that have received nothing from the server for long.
  // Call each second.
  void CutStreams();
  int streams_open() const;

 private:
  class Stream;

  const Options options_;
  IngestSink* const sink_;
  Clock* const clock_;
  Gauge* const streams_gauge_;
  Counter* const frames_taken_;
  Counter* const frames_duplicate_;
  Counter* const frames_refused_;
  Counter* const values_;
  Counter* const bytes_;
  Counter* const streams_refused_;
  Counter* const without_hello_;
  Counter* const fenced_;

  mutable absl::Mutex mutex_;
  std::set<Stream*> streams_ ABSL_GUARDED_BY(mutex_);
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_INGEST_INGEST_SERVICE_H_
