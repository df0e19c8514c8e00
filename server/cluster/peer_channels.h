// peer_channels.h: connections to the other servers of a cluster.
//
// One channel a server for calls, made for the first call and closed when the server owns
// no partition any more.  A server that does not answer in time gets no call for a
// second, so that a server that hangs delays few callers.
//
// A stream has a connection of its own.  The other server closes connections at a certain
// age, and calls under way then have only the grace period (server.cc).  On the calls'
// connection a transfer could be cut at any time; on its own it has the whole age.  Nor do
// streams take places among the calls that a connection carries at once.
//
// Thread-safe.

#ifndef BELLWETHER_SERVER_CLUSTER_PEER_CHANNELS_H_
#define BELLWETHER_SERVER_CLUSTER_PEER_CHANNELS_H_

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "server/cluster/members.h"
#include "server/query/ports/peers.h"
#include "server/util/clock.h"
#include "server/util/counters.h"

namespace bellwether::server {

class PeerChannels final : public Peers {
 public:
  struct Options {
    std::shared_ptr<grpc::ChannelCredentials> credentials;
    std::function<std::string(const std::string& method)> seal_as_server;
    uint32_t databases = 1;           // Of the cluster.
    int calls_max = 64;               // Under way at once, streams beside.
    int streams_max = 256;            // Under way at once.
    int64_t call_ms_max = 30'000;     // Of one call, as of a query (query_engine.h).
    int64_t quiet_ms = 1000;          // For one that did not answer in time.
    int answer_bytes_max = 64 << 20;  // Of a message.
    int64_t taken_ms_max = 30'000;    // Of a message of an upload, until it is on its way.
    int64_t upload_ms_max = 300'000;  // Of its answer: the run is judged before.
  };

  // All must outlive this object.  `member` is null until the server has joined; until
  // then no server is asked.
  PeerChannels(Options options, const std::atomic<Members*>* member, Counters* counters, Clock* clock);
  ~PeerChannels() override;  // Waits for its streams; the caller cancels them.

  Spread spread() const override;
  std::vector<std::pair<uint32_t, uint64_t>> holdings() const override;
  Owner OwnerOf(const RunUuid& uuid) const override;
  Owner OwnerOfRun(RunId run) const override;
  absl::StatusOr<std::string> Call(const std::string& server, const std::string& method, const std::string& request,
                                   const std::string& seal, int64_t deadline_monotonic_ns) override;
  std::vector<Answer> CallAll(const std::vector<std::string>& servers, const std::string& method,
                              const std::string& request, const std::string& seal,
                              int64_t deadline_monotonic_ns) override;
  std::shared_ptr<PeerStream> Stream(const std::string& server, const std::string& method, const std::string& request,
                                     const std::string& seal, std::function<void(std::string)> on_message,
                                     std::function<void(const absl::Status&)> on_end) override;
  absl::StatusOr<std::shared_ptr<PeerUpload>> Upload(const std::string& server, const std::string& method,
                                                     const std::string& seal) override;
  std::string SealAsServer(const std::string& method) const override { return options_.seal_as_server(method); }

 private:
  struct Peer {
    std::shared_ptr<grpc::Channel> channel;
    int64_t quiet_until_ns = 0;
  };
  Owner OwnerOfPartition(uint32_t partition) const;
  std::vector<Answer> Ask(const std::vector<std::string>& servers, const std::string& method,
                          const std::string& request, const std::string& seal, int64_t left_ns);
  std::shared_ptr<grpc::Channel> NewChannel(const std::string& server, int connect_ms_max) const;
  // For calls.  UNAVAILABLE: it did not answer a moment ago.
  absl::StatusOr<std::shared_ptr<grpc::Channel>> ChannelTo(const std::string& server);
  // Takes a place among the streams, or says RESOURCE_EXHAUSTED and takes none.
  absl::Status OpenStream();
  void CloseStream(const grpc::Status& status);
  // Counts what came of a call, and remembers a server that did not answer.
  absl::Status Judge(const std::string& server, const grpc::Status& status);

  const Options options_;
  const std::atomic<Members*>* const member_;
  Clock* const clock_;
  Counter* const answered_;
  Counter* const unanswered_;
  Counter* const refused_;
  std::atomic<int> calls_ = 0;
  absl::Mutex mutex_;
  int streams_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<std::string, Peer> peers_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_CLUSTER_PEER_CHANNELS_H_
