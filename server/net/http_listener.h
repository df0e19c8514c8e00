// http_listener.h: takes the page's connections in cpp-httplib's place.
//
// cpp-httplib accepts whatever comes, and gives each connection a thread while
// it lives.  A client that sends nothing, or a byte at a time, then holds them
// all.  Here one thread waits for all connections (handshakes and heads of
// requests, http_connection.h).  A request has a worker only once its head is
// there, until its answer is out.  Probes have workers of their own: they are
// answered while all others are busy.
//
// An address has a limit of connections, and all together have connections_max.
// At connections_max the one that has waited longest for its request makes
// room.  A few connections beyond those are kept for health checks, probes and
// /metrics: any other request on them is answered with 503.  Of these, too, the
// one that has waited longest makes room, of its own address first.  Each
// connection that a limit closes, or answers so, is counted by the limit:
//   address      its address has so many already
//   connections  connections_max are open
//   descriptors  the process has none left: nothing is accepted for 10 ms
//   time         a request was begun, and did not come within request_seconds_max
//   head         a request's line and headers are longer than head_bytes_max
//   queue        queue_max requests wait for a worker (answered with 503)

#ifndef BELLWETHER_SERVER_NET_HTTP_LISTENER_H_
#define BELLWETHER_SERVER_NET_HTTP_LISTENER_H_

#include <openssl/ssl.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "server/net/http_connection.h"
#include "server/net/worker_pool.h"
#include "server/util/counters.h"

namespace bellwether::server {

class HttpListener {
 public:
  struct Options {
    int64_t per_address_max = 64;  // As connection_source.h counts them.
    size_t connections_max = 344;
    int64_t health_per_address_max = 8;  // Beyond those: connections for health checks.
    size_t health_connections_max = 64;
    size_t threads_max = 88;
    size_t queue_max = 256;
    size_t head_bytes_max = 32 << 10;
    int request_seconds_max = 10;  // From a request's first byte to its last.
    int write_seconds_max = 10;    // Of a reader that takes nothing.
    int idle_seconds_max = 5;      // Of a connection that is kept.
    int stop_seconds_max = 3;      // For answers that are under way when it stops.
    SSL_CTX* tls = nullptr;        // Null: plaintext.  Must outlive the listener.
  };
  // Reads the request whose head has come and writes its answer, on threads of
  // the pool; false: the connection must end.
  using Serve = std::function<bool(HttpConnection* connection)>;
  HttpListener(const Options& options, Serve serve, Counters* counters);
  ~HttpListener();  // As Stop().
  HttpListener(const HttpListener&) = delete;
  HttpListener& operator=(const HttpListener&) = delete;

  // Accepts from `listener`, which listens, and is closed by Stop().
  void Start(int listener);
  // Accepts no more and reads no more; answers that are under way have
  // stop_seconds_max, then their connections are cut.  Returns once all threads
  // have ended.
  void Stop();

 private:
  using ConnectionPtr = std::shared_ptr<HttpConnection>;

  void Run();
  void Accept();
  // Goes on with a connection that waits.
  void Progress(const ConnectionPtr& connection);
  void Hold(const ConnectionPtr& connection);
  void Watch(const ConnectionPtr& connection);
  void Forget(const ConnectionPtr& connection);
  // A handshake that failed, with its address; a line a second at most.
  void Tell(const HttpConnection& connection);
  void Dispatch(const ConnectionPtr& connection);
  void ServeOne(const ConnectionPtr& connection);
  // Answers without a worker, and ends the connection.
  void Turn(const ConnectionPtr& connection, const char* answer, Counter* counter);
  void TakeBack();
  void EndLate();
  // One of the per_address_max of its address, or for health checks.
  enum class Place : uint8_t { kAny, kHealth };
  struct Use {
    int64_t any = 0, health = 0;
  };
  // Where a connection of the address stands; nothing: nowhere.
  std::optional<Place> Admit(const std::string& source);
  bool TakePlace(const std::string& source);
  bool TakeHealthPlace(const std::string& source);
  // Ends the connection that has waited longest of those that stand there, of `source`
  // if that is not "".
  bool MakeRoom(Place place, const std::string& source);
  void Release(const std::string& source, Place place);

  const Options options_;
  const Serve serve_;
  Counter* const refused_address_;
  Counter* const refused_connections_;
  Counter* const refused_descriptors_;
  Counter* const refused_time_;
  Counter* const refused_head_;
  Counter* const refused_queue_;
  Counter* const handshakes_failed_;
  // Of the one thread.
  std::map<int, ConnectionPtr> waiting_;  // By descriptor.
  int64_t looked_ns_ = 0;                 // For late ones.
  int64_t told_ns_ = 0;                   // Of Tell().
  int64_t not_told_ = 0;
  int listener_ = -1;
  int epoll_fd_ = -1;
  int wake_fd_ = -1;
  std::thread thread_;

  std::atomic<bool> stopping_ = false;
  absl::Mutex mutex_;
  std::set<ConnectionPtr> served_ ABSL_GUARDED_BY(mutex_);
  std::vector<ConnectionPtr> returned_ ABSL_GUARDED_BY(mutex_);  // By workers.
  absl::Mutex sources_mutex_;                                    // Taken last: connections end in many places.
  std::map<std::string, Use> by_source_ ABSL_GUARDED_BY(sources_mutex_);
  size_t open_ ABSL_GUARDED_BY(sources_mutex_) = 0;  // For health checks beside.
  size_t health_open_ ABSL_GUARDED_BY(sources_mutex_) = 0;
  WorkerPool pool_;
  WorkerPool probes_;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_NET_HTTP_LISTENER_H_
