// http_post.h: JSON to an address that people configured, at whose other end is
// a stranger.
//
// A receiver decides by its status alone.  Name, connection, TLS, request and
// answer share one time limit.  A head has head_bytes_max, interim ones
// included.  Of a body no more is read than shows what is wrong.  Nothing is
// unpacked, and no redirect is followed.  A receiver's text is reported as one
// line of clean text.
//
// The sockets are our own.  cpp-httplib's client bounds none of that, and
// libcurl would bring LDAP, Kerberos and GnuTLS into the bundle.

#ifndef BELLWETHER_SERVER_EXPORT_HTTP_POST_H_
#define BELLWETHER_SERVER_EXPORT_HTTP_POST_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/util/counters.h"

namespace bellwether::server {

struct UrlParts {
  std::string origin;  // Scheme, host and port, as they stand there.
  std::string path;    // Begins with a slash.
  bool tls = false;
  std::string host;  // An IPv6 address without its brackets.
  int port = 0;
};

// INVALID_ARGUMENT names the fault of the url: it must be http or https and
// hold neither a user nor a password.
absl::StatusOr<UrlParts> SplitUrl(const std::string& url);
// Of an HTTP proxy: as SplitUrl(), but http alone, and no path.
absl::StatusOr<UrlParts> SplitProxyUrl(const std::string& url);

struct HttpPostLimits {
  int64_t timeout_ns = 10'000'000'000;  // From the look-up of the name to the head of the answer.
  size_t head_bytes_max = 16 << 10;
  size_t body_bytes_max = 64 << 10;   // What is left is not read; the connection ends.
  int64_t body_ns_max = 250'000'000;  // Behind the head, whatever of the body has come then.
  size_t shown_bytes_max = 200;
};

struct NameLookup;

// bellwether_notification_attempts_failed_total{channel,cause}: name, connect,
// tls, timeout, answer (no HTTP, or beyond a limit), proxy, redirect, status, stop.
// bellwether_notification_answers_cut_total{channel}: bodies that were not read
// to their end.
class HttpPoster {
 public:
  // `proxy`: of SplitProxyUrl(); without a host there is none.  To an https url it is asked for a tunnel, so that
  // it sees neither alerts nor answers.  `counters` must outlive the object.
  HttpPoster(UrlParts url, UrlParts proxy, const HttpPostLimits& limits, const std::string& channel,
             Counters* counters);
  ~HttpPoster();
  HttpPoster(const HttpPoster&) = delete;
  HttpPoster& operator=(const HttpPoster&) = delete;

  // POSTs `body` as application/json.  UNAVAILABLE: no answer, or one that is
  // not 2xx; the message names which, in text that may be logged.  One caller
  // at a time.
  absl::Status Post(const std::string& body);

  // Whatever is under way or begins later ends at that monotonic time.  Thread-safe.
  void EndBy(int64_t monotonic_ns);

 private:
  const UrlParts url_, proxy_;
  const HttpPostLimits limits_;
  const std::string channel_;
  Counters* const counters_;
  Counter* const cut_;
  const int wake_fd_;
  std::atomic<int64_t> end_ns_ = std::numeric_limits<int64_t>::max();
  std::shared_ptr<NameLookup> lookup_;  // One that did not end in its time.
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_EXPORT_HTTP_POST_H_
