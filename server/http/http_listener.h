// http_listener.h: takes the page's connections in cpp-httplib's place.
//
// cpp-httplib accepts whatever comes, and gives each connection a thread while it
// lives: a single address could hold them all.  Here an address has so many at
// once, waiting ones too; more of it are closed as they come, and counted.  While
// the pool's queue is full nothing is accepted, and when descriptors are short
// nothing for 10 ms: those connections wait in the kernel.

#ifndef BELLWETHER_SERVER_HTTP_HTTP_LISTENER_H_
#define BELLWETHER_SERVER_HTTP_HTTP_LISTENER_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <thread>

#include "absl/synchronization/mutex.h"
#include "server/http/worker_pool.h"
#include "server/util/counters.h"

namespace bellwether::server {

class HttpListener {
 public:
  struct Options {
    int64_t per_address_max = 64;  // As connection_source.h counts them.
    size_t threads_max = 88;
    size_t queue_max = 256;
    int read_seconds_max = 10;
    int write_seconds_max = 10;
  };
  // `serve` is called on the pool's threads, and closes the connection.
  HttpListener(const Options& options, std::function<void(int fd)> serve, Counters* counters);
  ~HttpListener();  // As Stop().
  HttpListener(const HttpListener&) = delete;
  HttpListener& operator=(const HttpListener&) = delete;

  // Accepts from `listener`, which listens, and is closed by Stop().
  void Start(int listener);
  // Accepts no more; returns once what was accepted has been served.
  void Stop();

 private:
  void Run();
  void Accept();
  bool Admit(const std::string& source);
  void Release(const std::string& source);

  const Options options_;
  const std::function<void(int fd)> serve_;
  Counter* const refused_address_;
  Counter* const refused_descriptors_;
  WorkerPool pool_;
  int listener_ = -1;
  int stop_fd_ = -1;
  std::thread thread_;
  absl::Mutex mutex_;
  std::map<std::string, int64_t> by_source_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_HTTP_HTTP_LISTENER_H_
