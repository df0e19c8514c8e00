// http_connection.h: one connection to the page's port, as cpp-httplib's stream.
//
// cpp-httplib bounds neither a line, nor a chunked or zipped body, nor the time
// in which a request comes.  Here it reads a request's head only once that is
// there, head_bytes_max at most, and of its body what was allowed before: beyond
// that the connection seems to have ended.  A request has request_ns_max from its
// first byte to its last; an answer may take as long as it takes, while the
// reader takes something every write_ns_max.

#ifndef BELLWETHER_SERVER_NET_HTTP_CONNECTION_H_
#define BELLWETHER_SERVER_NET_HTTP_CONNECTION_H_

#include <httplib.h>
#include <openssl/ssl.h>
#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

namespace bellwether::server {

// Not thread-safe, but for Cut(): one thread at a time waits for a head, or serves.
class HttpConnection final : public httplib::Stream {
 public:
  struct Limits {
    size_t head_bytes_max = 32 << 10;
    int64_t request_ns_max = 10'000'000'000;
    int64_t write_ns_max = 10'000'000'000;
  };
  enum class Head {
    kPartial,  // more must come
    kComplete,
    kTooLong,
    kEnded,  // by the peer, or its TLS was refused
  };

  // Owns `fd`, which must not block.  Null `tls`: plaintext.  `closed` is called last.
  HttpConnection(int fd, SSL_CTX* tls, const Limits& limits, std::function<void()> closed);
  ~HttpConnection() override;  // Closes.
  HttpConnection(const HttpConnection&) = delete;
  HttpConnection& operator=(const HttpConnection&) = delete;

  int fd() const { return fd_; }
  // Whose it is, and whether it is there for health checks alone: the listener's.
  void Stand(std::string source, bool health_only) {
    source_ = std::move(source);
    health_only_ = health_only;
  }
  const std::string& source() const { return source_; }
  bool health_only() const { return health_only_; }
  SSL* ssl() const { return ssl_.get(); }

  // Goes on with the handshake and takes what has come of a head; never waits.
  Head ReadHead();
  // Why TLS refused the peer, or the peer us; "" = it has not.
  const std::string& tls_error() const { return tls_error_; }
  // Whether the handshake waits to write rather than to read.
  bool wants_to_write() const { return wants_to_write_; }
  // When what is waited for must have come, on the monotonic clock.
  int64_t deadline_ns() const { return deadline_ns_; }
  // Whether something of a request has come.
  bool began() const { return !lingers_ && !buffer_.empty(); }
  // When the wait began.
  int64_t waits_since_ns() const { return waits_since_ns_; }
  // "/-/ready" of "GET /-/ready?x HTTP/1.1"; empty for another method than GET and
  // HEAD.  REQUIRES: ReadHead() has returned kComplete.
  std::string_view PathRead() const;

  // That a body of so many bytes belongs to the head; nothing: its end is not known,
  // and none of it is read.
  void ExpectBody(std::optional<uint64_t> bytes);
  // Forgets the request.  False: something of it was not read, so that where the next
  // one begins is not known, and the connection must end.
  bool NextRequest(int64_t idle_ns_max);

  // Requests that were answered before this one.
  int64_t requests() const { return requests_; }
  // From now on; 0 = never waits, for answers that fit into the kernel's buffer.
  void WriteWithin(int64_t write_ns_max) { write_ns_max_ = write_ns_max; }
  // Says that nothing more will be written, and waits until the peer has read it: what
  // it is still sending would otherwise take the answer from it.
  void Linger();
  // Throws away what comes; false once the peer has ended, or sent too much.
  bool Drain();
  bool lingers() const { return lingers_; }

  // Whether the peer has ended, or this side was cut.  Not for what it may still read.
  bool gone() const;

  // Ends reading (`writes` too: everything) from another thread.
  void Cut(bool writes);

  bool is_readable() const override;
  bool is_writable() const override;  // Waits, and is false once the peer is gone.
  ssize_t read(char* to, size_t size) override;
  ssize_t write(const char* from, size_t size) override;  // All of it, or -1.
  void get_remote_ip_and_port(std::string& ip, int& port) const override;
  void get_local_ip_and_port(std::string& ip, int& port) const override;
  // None: cpp-httplib asks only whether select() could take it, and nothing here selects.
  socket_t socket() const override { return INVALID_SOCKET; }

 private:
  struct SslFree {
    void operator()(SSL* ssl) const { SSL_free(ssl); }
  };
  // Bytes, 0 at the peer's end, -1 on an error, -2 if that would wait (wants_to_write_ says for what).
  ssize_t Receive(char* to, size_t size);
  ssize_t Send(const char* from, size_t size);
  ssize_t TlsResult(int result);
  // Until it can be read or written, as was wanted; false at `until_ns`.
  bool WaitUntil(int64_t until_ns) const;
  bool FindHead();

  const int fd_;
  const Limits limits_;
  const std::function<void()> closed_;
  const std::unique_ptr<SSL, SslFree> ssl_;
  std::string source_;
  std::string tls_error_;
  bool health_only_ = false;
  bool shook_hands_;
  bool wants_to_write_ = false;
  bool idle_ = false;  // Kept, and nothing of another request has come.
  bool lingers_ = false;
  std::atomic<bool> cut_ = false;
  int64_t write_ns_max_;
  int64_t waits_since_ns_;
  int64_t deadline_ns_;
  std::string buffer_;   // Of the request, and perhaps of the next one.
  size_t read_ = 0;      // Of the buffer, by cpp-httplib.
  size_t searched_ = 0;  // Of the buffer, for the head's end.
  size_t head_end_ = 0;  // 0 = not there yet
  size_t drained_ = 0;
  uint64_t body_left_ = 0;
  int64_t requests_ = 0;
  bool framed_ = false;  // ExpectBody() was told a length.
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_NET_HTTP_CONNECTION_H_
