// http_exchange.h: one request to a stranger and the bounded start of its answer.

#ifndef BELLWETHER_SERVER_EXPORT_HTTP_EXCHANGE_H_
#define BELLWETHER_SERVER_EXPORT_HTTP_EXCHANGE_H_

#include <openssl/ssl.h>
#include <sys/socket.h>
#include <sys/types.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/export/http_post.h"

namespace bellwether::server {

// An event of the kernel by which one thread wakes another; -1 where there is
// none left: then waits end by their time alone.
int NewEventFd();
void CloseEventFd(int fd);
void SignalEventFd(int fd);

// How long may be waited: until a deadline, or until another thread says earlier.
class Patience {
 public:
  Patience(int64_t deadline_ns, const std::atomic<int64_t>* end_ns, int wake_fd)
      : deadline_ns_(deadline_ns), end_ns_(end_ns), wake_fd_(wake_fd) {}

  // Until `fd` has one of `events`.  False: the time is over.
  bool Wait(int fd, short events);
  void Shorten(int64_t deadline_ns) { deadline_ns_ = std::min(deadline_ns_, deadline_ns); }
  int64_t deadline_ns() const { return deadline_ns_; }
  void set_deadline_ns(int64_t deadline_ns) { deadline_ns_ = deadline_ns; }
  // Whether another thread ended it.
  bool stopped() const;

 private:
  int64_t deadline_ns_;
  const std::atomic<int64_t>* const end_ns_;
  const int wake_fd_;
};

struct HttpAnswer {
  int status = 0;
  std::string location;  // Of a redirect; raw.
  std::string text;      // The start of the body; raw, "" where it is packed.
  bool cut = false;      // It was not read to its end.
};

class HttpExchange {
 public:
  // `proxy`: of an HTTP proxy; without a host there is none.  All must outlive the object.
  HttpExchange(const UrlParts& url, const UrlParts& proxy, const HttpPostLimits& limits, Patience* patience)
      : url_(url), proxy_(proxy), limits_(limits), patience_(patience) {}
  ~HttpExchange();
  HttpExchange(const HttpExchange&) = delete;
  HttpExchange& operator=(const HttpExchange&) = delete;

  // Once.  UNAVAILABLE: there is no answer; then cause() is a word for the counter.
  // `lookup` keeps a look-up that did not end in time for the next exchange.
  absl::StatusOr<HttpAnswer> Run(std::string_view request, std::shared_ptr<NameLookup>* lookup);
  const char* cause() const { return cause_; }

 private:
  struct Address {
    sockaddr_storage address;
    socklen_t size;
  };
  friend struct NameLookup;

  absl::Status Fail(const char* cause, std::string_view text);
  absl::Status OutOfTime(std::string_view at);
  absl::Status Resolve(std::shared_ptr<NameLookup>* lookup, std::vector<Address>* found);
  absl::Status Connect(const std::vector<Address>& addresses);
  absl::Status ConnectTo(const Address& address);
  // Has the proxy connect to the url's host.
  absl::Status Tunnel();
  absl::Status ShakeHands();
  absl::Status Send(std::string_view request);
  // The head of the answer; what has come behind it is in buffer_.
  absl::StatusOr<HttpAnswer> ReadHead(std::string* head);
  void ReadBody(std::string_view head, HttpAnswer* answer);

  enum class Io { kDone, kEnded, kFailed, kOutOfTime };
  // Appends what comes, once.
  Io Receive(std::string* to, size_t bytes_max);
  // Waits for what TLS wants; `result` is what it returned.
  Io AwaitTls(int result);

  // Whose address is connected to.
  const UrlParts& next() const { return proxy_.host.empty() ? url_ : proxy_; }

  const UrlParts& url_;
  const UrlParts& proxy_;
  const HttpPostLimits& limits_;
  Patience* const patience_;
  const char* cause_ = "";
  int fd_ = -1;
  struct Free {
    void operator()(SSL* ssl) const { SSL_free(ssl); }
    void operator()(SSL_CTX* context) const { SSL_CTX_free(context); }
  };
  std::unique_ptr<SSL_CTX, Free> context_;
  std::unique_ptr<SSL, Free> ssl_;
  bool shook_hands_ = false;
  std::string buffer_;  // What came behind the head.
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_EXPORT_HTTP_EXCHANGE_H_
