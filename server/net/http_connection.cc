#include "server/net/http_connection.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <openssl/err.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "server/util/clock.h"

namespace bellwether::server {
namespace {

constexpr size_t kReadBytes = 4096;
constexpr int64_t kLingerNs = 1'000'000'000;
constexpr size_t kDrainBytesMax = 4 << 20;

void AddressOf(const sockaddr_storage& address, std::string* ip, int* port) {
  std::array<char, INET6_ADDRSTRLEN> text{};
  const auto& v4 = reinterpret_cast<const sockaddr_in&>(address);
  const auto& v6 = reinterpret_cast<const sockaddr_in6&>(address);
  if (address.ss_family == AF_INET && inet_ntop(AF_INET, &v4.sin_addr, text.data(), text.size()) != nullptr) {
    *ip = text.data();
    *port = ntohs(v4.sin_port);
  } else if (address.ss_family == AF_INET6 && inet_ntop(AF_INET6, &v6.sin6_addr, text.data(), text.size()) != nullptr) {
    *ip = text.data();
    *port = ntohs(v6.sin6_port);
  }
}

SSL* MakeSsl(SSL_CTX* context, int fd) {
  if (context == nullptr) return nullptr;
  SSL* const ssl = SSL_new(context);
  if (ssl == nullptr) return nullptr;
  SSL_set_fd(ssl, fd);
  SSL_set_accept_state(ssl);
  SSL_set_mode(ssl, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
  return ssl;
}

}  // namespace

HttpConnection::HttpConnection(int fd, SSL_CTX* tls, const Limits& limits, std::function<void()> closed)
    : fd_(fd),
      limits_(limits),
      closed_(std::move(closed)),
      ssl_(MakeSsl(tls, fd)),
      shook_hands_(tls == nullptr),
      write_ns_max_(limits.write_ns_max),
      waits_since_ns_(MonotonicNow()),
      deadline_ns_(waits_since_ns_ + limits.request_ns_max) {
  const int yes = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof(yes));
}

HttpConnection::~HttpConnection() {
  if (ssl_ != nullptr && shook_hands_ && !lingers_) SSL_shutdown(ssl_.get());
  close(fd_);
  closed_();
}

HttpConnection::Head HttpConnection::ReadHead() {
  if (!shook_hands_) {
    if (ssl_ == nullptr) return Head::kEnded;  // No memory for it.
    ERR_clear_error();
    if (const ssize_t done = TlsResult(SSL_do_handshake(ssl_.get())); done != 1) {
      if (done == -2) return Head::kPartial;
      // None: the peer has ended without a word of TLS, as a check of the port does.
      if (const unsigned long error = ERR_peek_error(); error != 0) {
        const char* const reason = ERR_reason_error_string(error);
        tls_error_ = reason != nullptr ? reason : "unknown";
      }
      return Head::kEnded;
    }
    shook_hands_ = true;
  }
  for (;;) {
    if (FindHead()) return head_end_ <= limits_.head_bytes_max ? Head::kComplete : Head::kTooLong;
    if (buffer_.size() > limits_.head_bytes_max) return Head::kTooLong;
    std::array<char, kReadBytes> part;
    const ssize_t got = Receive(part.data(), part.size());
    if (got == -2) return Head::kPartial;
    if (got <= 0) return Head::kEnded;
    if (std::exchange(idle_, false)) {
      waits_since_ns_ = MonotonicNow();
      deadline_ns_ = waits_since_ns_ + limits_.request_ns_max;
    }
    buffer_.append(part.data(), static_cast<size_t>(got));
  }
}

// An empty line: what cpp-httplib takes as the end of a head, and a little more.
bool HttpConnection::FindHead() {
  const size_t from = searched_ < 2 ? 0 : searched_ - 2;
  const size_t found = buffer_.find("\n\r\n", from);
  searched_ = buffer_.size();
  if (found == std::string::npos) return false;
  head_end_ = found + 3;
  return true;
}

std::string_view HttpConnection::PathRead() const {
  std::string_view line(buffer_.data(), buffer_.find('\n'));
  const size_t method = line.find(' ');
  if (method == std::string_view::npos || (line.substr(0, method) != "GET" && line.substr(0, method) != "HEAD"))
    return {};
  line.remove_prefix(method + 1);
  return line.substr(0, line.find_first_of("? "));
}

void HttpConnection::ExpectBody(std::optional<uint64_t> bytes) {
  framed_ = bytes.has_value();
  body_left_ = bytes.value_or(0);
}

bool HttpConnection::NextRequest(int64_t idle_ns_max) {
  if (!framed_ || read_ < head_end_ || body_left_ > 0) return false;
  buffer_.erase(0, read_);
  read_ = searched_ = head_end_ = 0;
  framed_ = false;
  ++requests_;
  idle_ = buffer_.empty();
  waits_since_ns_ = MonotonicNow();
  deadline_ns_ = waits_since_ns_ + (idle_ ? idle_ns_max : limits_.request_ns_max);
  return true;
}

void HttpConnection::Linger() {
  if (ssl_ != nullptr && shook_hands_) SSL_shutdown(ssl_.get());
  lingers_ = true;
  shutdown(fd_, SHUT_WR);
  waits_since_ns_ = MonotonicNow();
  deadline_ns_ = waits_since_ns_ + kLingerNs;
}

bool HttpConnection::Drain() {
  std::array<char, 16 << 10> part;
  for (;;) {
    const ssize_t got = recv(fd_, part.data(), part.size(), MSG_DONTWAIT);
    if (got < 0) return errno == EAGAIN || errno == EINTR;
    drained_ += static_cast<size_t>(got);
    if (got == 0 || drained_ > kDrainBytesMax) return false;
  }
}

void HttpConnection::Cut(bool writes) {
  cut_ = true;
  shutdown(fd_, writes ? SHUT_RDWR : SHUT_RD);
}

bool HttpConnection::gone() const {
  pollfd polled{fd_, POLLRDHUP, 0};
  return cut_ || poll(&polled, 1, 0) > 0;
}

bool HttpConnection::is_readable() const { return read_ < buffer_.size() || body_left_ > 0; }

bool HttpConnection::is_writable() const {
  pollfd polled{fd_, POLLOUT | POLLRDHUP, 0};
  if (poll(&polled, 1, static_cast<int>(write_ns_max_ / 1'000'000)) <= 0) return false;
  const int gone = POLLERR | POLLHUP | (cut_ ? 0 : POLLRDHUP);
  return (polled.revents & gone) == 0;
}

ssize_t HttpConnection::read(char* to, size_t size) {
  if (read_ < head_end_) {
    const size_t part = std::min(size, head_end_ - read_);
    std::memcpy(to, buffer_.data() + read_, part);
    read_ += part;
    return static_cast<ssize_t>(part);
  }
  size = static_cast<size_t>(std::min<uint64_t>(size, body_left_));
  if (size == 0) return 0;
  ssize_t got = -2;
  if (read_ < buffer_.size()) {
    got = static_cast<ssize_t>(std::min(size, buffer_.size() - read_));
    std::memcpy(to, buffer_.data() + read_, static_cast<size_t>(got));
    read_ += static_cast<size_t>(got);
  }
  while (got == -2) {
    got = Receive(to, size);
    if (got == -2 && !WaitUntil(deadline_ns_)) return -1;
  }
  if (got > 0) body_left_ -= static_cast<uint64_t>(got);
  return got;
}

ssize_t HttpConnection::write(const char* from, size_t size) {
  for (size_t written = 0; written < size;) {
    const ssize_t sent = Send(from + written, size - written);
    if (sent > 0) {
      written += static_cast<size_t>(sent);
    } else if (sent != -2 || write_ns_max_ == 0 || !WaitUntil(MonotonicNow() + write_ns_max_)) {
      return -1;
    }
  }
  return static_cast<ssize_t>(size);
}

ssize_t HttpConnection::Receive(char* to, size_t size) {
  if (ssl_ != nullptr) {
    ERR_clear_error();
    return TlsResult(SSL_read(ssl_.get(), to, static_cast<int>(std::min<size_t>(size, 1 << 20))));
  }
  const ssize_t got = recv(fd_, to, size, MSG_DONTWAIT);
  wants_to_write_ = false;
  return got < 0 && (errno == EAGAIN || errno == EINTR) ? -2 : got;
}

ssize_t HttpConnection::Send(const char* from, size_t size) {
  if (ssl_ != nullptr) {
    ERR_clear_error();
    return TlsResult(SSL_write(ssl_.get(), from, static_cast<int>(std::min<size_t>(size, 1 << 20))));
  }
  const ssize_t sent = send(fd_, from, size, MSG_DONTWAIT | MSG_NOSIGNAL);
  wants_to_write_ = true;
  return sent < 0 && (errno == EAGAIN || errno == EINTR) ? -2 : sent;
}

ssize_t HttpConnection::TlsResult(int result) {
  if (result > 0) return result;
  const int error = SSL_get_error(ssl_.get(), result);
  if (error == SSL_ERROR_ZERO_RETURN) return 0;
  wants_to_write_ = error == SSL_ERROR_WANT_WRITE;
  return wants_to_write_ || error == SSL_ERROR_WANT_READ ? -2 : -1;
}

bool HttpConnection::WaitUntil(int64_t until_ns) const {
  const int64_t left_ns = until_ns - MonotonicNow();
  if (left_ns <= 0) return false;
  pollfd polled{fd_, static_cast<short>(wants_to_write_ ? POLLOUT : POLLIN), 0};
  return poll(&polled, 1, static_cast<int>(left_ns / 1'000'000 + 1)) > 0;
}

void HttpConnection::get_remote_ip_and_port(std::string& ip, int& port) const {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  if (getpeername(fd_, reinterpret_cast<sockaddr*>(&address), &size) == 0) AddressOf(address, &ip, &port);
}

void HttpConnection::get_local_ip_and_port(std::string& ip, int& port) const {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  if (getsockname(fd_, reinterpret_cast<sockaddr*>(&address), &size) == 0) AddressOf(address, &ip, &port);
}

}  // namespace bellwether::server
