#include "server/export/http_exchange.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <openssl/err.h>
#include <openssl/x509v3.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <thread>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "server/util/clock.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

constexpr size_t kAddressesMax = 8;
constexpr std::string_view kVersion = "HTTP/1.";
constexpr size_t kStatusLineBytes = 12;  // "HTTP/1.1 200".

// The value of a header's line, "" if there is none; names are those of HTTP, whatever their case.
std::string_view HeaderOf(std::string_view head, std::string_view name) {
  while (!head.empty()) {
    const size_t end = std::min(head.find('\n'), head.size() - 1);
    std::string_view line = head.substr(0, end);
    head.remove_prefix(end + 1);
    const size_t colon = line.find(':');
    if (colon == name.size() &&
        absl::EqualsIgnoreCase(absl::string_view(line.data(), colon), absl::string_view(name.data(), name.size()))) {
      line.remove_prefix(colon + 1);
      const absl::string_view value = absl::StripAsciiWhitespace(absl::string_view(line.data(), line.size()));
      return {value.data(), value.size()};
    }
  }
  return {};
}

// Behind the empty line that ends a head; npos: it has not come.
size_t EndOfHead(std::string_view text) {
  const size_t crlf = text.find("\n\r\n"), lf = text.find("\n\n");
  if (crlf == std::string_view::npos && lf == std::string_view::npos) return std::string_view::npos;
  return crlf < lf ? crlf + 3 : lf + 2;
}

// 0: what has come cannot be the start of an HTTP answer; -1: it still can.
int StatusOf(std::string_view text) {
  if (text.substr(0, kVersion.size()) != kVersion.substr(0, text.size())) return 0;
  if (text.size() < kStatusLineBytes) return -1;
  int status = 0;
  const char* const digits = text.data() + kStatusLineBytes - 3;
  const auto [end, error] = std::from_chars(digits, digits + 3, status);
  const bool ends = text.size() == kStatusLineBytes || !absl::ascii_isdigit(text[kStatusLineBytes]);
  return error == std::errc() && end == digits + 3 && text[kStatusLineBytes - 4] == ' ' && ends && status >= 100
             ? status
             : 0;
}

// The start of a chunked body, without its framing.
std::string Unchunk(std::string_view raw) {
  std::string text;
  while (!raw.empty()) {
    size_t size = 0;
    const auto [stopped, error] = std::from_chars(raw.data(), raw.data() + raw.size(), size, 16);
    const size_t line = raw.find('\n');
    if (error != std::errc() || size == 0 || line == std::string_view::npos) break;
    raw.remove_prefix(line + 1);
    text += raw.substr(0, size);
    raw.remove_prefix(std::min(size, raw.size()));
    const size_t behind = raw.find('\n');  // The chunk's own line end.
    raw = behind == std::string_view::npos ? std::string_view() : raw.substr(behind + 1);
  }
  return text;
}

}  // namespace

int NewEventFd() { return eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK); }

void CloseEventFd(int fd) {
  if (fd >= 0) close(fd);
}

void SignalEventFd(int fd) {
  const uint64_t one = 1;
  if (fd >= 0 && write(fd, &one, sizeof(one)) < 0) return;  // Full: it is signalled already.
}

// getaddrinfo() can neither be bounded nor ended, so it has a thread of its own
// and whatever outlives its caller lies here.
struct NameLookup {
  const int done_fd = NewEventFd();
  absl::Mutex mutex;
  bool done ABSL_GUARDED_BY(mutex) = false;
  int error ABSL_GUARDED_BY(mutex) = 0;
  std::vector<HttpExchange::Address> found ABSL_GUARDED_BY(mutex);

  ~NameLookup() { CloseEventFd(done_fd); }

  void Run(const std::string& host, int port, int flags) {
    addrinfo hints{};
    hints.ai_family = AF_UNSPEC;
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = AI_NUMERICSERV | flags;
    addrinfo* list = nullptr;
    const int failed = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &list);
    {
      absl::MutexLock lock(&mutex);
      error = failed;
      for (const addrinfo* at = list; failed == 0 && at != nullptr && found.size() < kAddressesMax; at = at->ai_next) {
        std::memcpy(&found.emplace_back().address, at->ai_addr, at->ai_addrlen);
        found.back().size = at->ai_addrlen;
      }
      done = true;
    }
    if (failed == 0) freeaddrinfo(list);
    SignalEventFd(done_fd);
  }
};

bool Patience::stopped() const { return MonotonicNow() >= end_ns_->load(); }

bool Patience::Wait(int fd, short events) {
  for (;;) {
    const int64_t left_ns = std::min(deadline_ns_, end_ns_->load()) - MonotonicNow();
    if (left_ns <= 0) return false;
    std::array<pollfd, 2> polled{pollfd{fd, events, 0}, pollfd{wake_fd_, POLLIN, 0}};
    const auto left_ms = static_cast<int>(std::min<int64_t>(left_ns / 1'000'000 + 1, 60'000));
    if (poll(polled.data(), polled.size(), left_ms) < 0 && errno != EINTR) return false;
    uint64_t count = 0;  // The end was moved: looked at above.
    if (polled[1].revents != 0 && read(wake_fd_, &count, sizeof(count)) < 0) continue;
    if (polled[0].revents != 0) return true;
  }
}

HttpExchange::~HttpExchange() {
  if (ssl_ != nullptr && shook_hands_) SSL_shutdown(ssl_.get());
  if (fd_ >= 0) close(fd_);
}

absl::Status HttpExchange::Fail(const char* cause, std::string_view text) {
  cause_ = cause;
  return absl::UnavailableError(absl::string_view(text.data(), text.size()));
}

absl::Status HttpExchange::OutOfTime(std::string_view at) {
  const absl::string_view where(at.data(), at.size());
  if (patience_->stopped()) return Fail("stop", absl::StrCat("given up at the server's end, ", where));
  return Fail("timeout", absl::StrCat("not within ", absl::SixDigits(static_cast<double>(limits_.timeout_ns) * 1e-9),
                                      " s: ", where));
}

absl::Status HttpExchange::Resolve(std::shared_ptr<NameLookup>* lookup, std::vector<Address>* found) {
  if (*lookup == nullptr) {
    *lookup = std::make_shared<NameLookup>();
    (*lookup)->Run(next().host, next().port, AI_NUMERICHOST);
    bool is_address = false;
    {
      absl::MutexLock lock(&(*lookup)->mutex);
      is_address = (*lookup)->error == 0;
    }
    if (!is_address) {
      *lookup = std::make_shared<NameLookup>();
      std::thread([shared = *lookup, host = next().host, port = next().port] { shared->Run(host, port, 0); }).detach();
    }
  }
  const NameLookup* const asked = lookup->get();
  if (!patience_->Wait(asked->done_fd, POLLIN)) return OutOfTime("its name is looked up");
  const std::shared_ptr<NameLookup> ended = std::move(*lookup);
  lookup->reset();
  absl::MutexLock lock(&ended->mutex);
  if (ended->error != 0) return Fail("name", absl::StrCat("its name is not found: ", gai_strerror(ended->error)));
  *found = ended->found;
  return absl::OkStatus();
}

absl::Status HttpExchange::ConnectTo(const Address& address) {
  if (fd_ >= 0) close(fd_);
  fd_ = socket(address.address.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd_ < 0) return Fail("connect", std::strerror(errno));
  const int yes = 1;
  setsockopt(fd_, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof(yes));
  if (connect(fd_, reinterpret_cast<const sockaddr*>(&address.address), address.size) == 0) return absl::OkStatus();
  if (errno != EINPROGRESS) return Fail("connect", std::strerror(errno));
  if (!patience_->Wait(fd_, POLLOUT)) return OutOfTime("connecting");
  int error = 0;
  socklen_t size = sizeof(error);
  if (getsockopt(fd_, SOL_SOCKET, SO_ERROR, &error, &size) != 0) error = errno;
  return error == 0 ? absl::OkStatus() : Fail("connect", std::strerror(error));
}

// Each address of a name gets its part of the time that is left, so that a silent one leaves some for the next.
absl::Status HttpExchange::Connect(const std::vector<Address>& addresses) {
  const int64_t deadline_ns = patience_->deadline_ns();
  absl::Status connected = Fail("name", "its name has no address");
  for (size_t i = 0; i < addresses.size() && !patience_->stopped(); ++i) {
    const auto left = static_cast<int64_t>(addresses.size() - i);
    patience_->set_deadline_ns(MonotonicNow() + (deadline_ns - MonotonicNow()) / left);
    connected = ConnectTo(addresses[i]);
    if (connected.ok()) break;
  }
  patience_->set_deadline_ns(deadline_ns);
  return connected.ok() || !patience_->stopped() ? connected : OutOfTime("connecting");
}

HttpExchange::Io HttpExchange::AwaitTls(int result) {
  const int error = SSL_get_error(ssl_.get(), result);
  if (error == SSL_ERROR_ZERO_RETURN) return Io::kEnded;
  if (error != SSL_ERROR_WANT_READ && error != SSL_ERROR_WANT_WRITE) return Io::kFailed;
  return patience_->Wait(fd_, error == SSL_ERROR_WANT_READ ? POLLIN : POLLOUT) ? Io::kDone : Io::kOutOfTime;
}

absl::Status HttpExchange::Tunnel() {
  const bool address = absl::StrContains(url_.host, ':');
  const std::string host =
      address ? absl::StrCat("[", url_.host, "]:", url_.port) : absl::StrCat(url_.host, ":", url_.port);
  BW_RETURN_IF_ERROR(
      Send(absl::StrCat("CONNECT ", host, " HTTP/1.1\r\nHost: ", host, "\r\nUser-Agent: bellwetherd\r\n\r\n")));
  std::string head;
  BW_ASSIGN_OR_RETURN(const HttpAnswer answer, ReadHead(&head));
  if (answer.status < 200 || answer.status > 299)
    return Fail("proxy", absl::StrCat("the proxy answered ", answer.status));
  // Who speaks first in TLS is this end.
  if (!buffer_.empty()) return Fail("proxy", "the proxy sent more than its answer");
  return absl::OkStatus();
}

// By the system's authorities; the certificate must be the host's.
absl::Status HttpExchange::ShakeHands() {
  ERR_clear_error();
  context_.reset(SSL_CTX_new(TLS_client_method()));
  if (context_ != nullptr) SSL_CTX_set_default_verify_paths(context_.get());
  if (context_ != nullptr) ssl_.reset(SSL_new(context_.get()));
  if (ssl_ == nullptr) return Fail("tls", "TLS: no memory for it");
  SSL_set_verify(ssl_.get(), SSL_VERIFY_PEER, nullptr);
  SSL_set_mode(ssl_.get(), SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
  in6_addr address{};
  const char* const host = url_.host.c_str();
  bool named = false;
  if (inet_pton(AF_INET, host, &address) == 1 || inet_pton(AF_INET6, host, &address) == 1) {
    named = X509_VERIFY_PARAM_set1_ip_asc(SSL_get0_param(ssl_.get()), host) == 1;
  } else {
    named = SSL_set_tlsext_host_name(ssl_.get(), host) == 1 && SSL_set1_host(ssl_.get(), host) == 1;
  }
  if (!named || SSL_set_fd(ssl_.get(), fd_) != 1) return Fail("tls", "TLS: the host's name cannot be asked for");
  for (;;) {
    ERR_clear_error();
    const int done = SSL_connect(ssl_.get());
    if (done == 1) break;
    const Io waited = AwaitTls(done);
    if (waited == Io::kDone) continue;
    if (waited == Io::kOutOfTime) return OutOfTime("in the TLS handshake");
    const long verified = SSL_get_verify_result(ssl_.get());
    const char* const reason = ERR_reason_error_string(ERR_peek_last_error());
    return Fail("tls", absl::StrCat("TLS: ", verified != X509_V_OK ? X509_verify_cert_error_string(verified)
                                             : reason != nullptr   ? reason
                                                                   : "the connection ended in the handshake"));
  }
  shook_hands_ = true;
  return absl::OkStatus();
}

absl::Status HttpExchange::Send(std::string_view request) {
  while (!request.empty()) {
    Io waited = Io::kDone;
    if (ssl_ != nullptr) {
      ERR_clear_error();
      const int sent =
          SSL_write(ssl_.get(), request.data(), static_cast<int>(std::min<size_t>(request.size(), 1 << 20)));
      if (sent > 0) {
        request.remove_prefix(static_cast<size_t>(sent));
        continue;
      }
      waited = AwaitTls(sent);
    } else {
      const ssize_t sent = send(fd_, request.data(), request.size(), MSG_NOSIGNAL);
      if (sent >= 0) {
        request.remove_prefix(static_cast<size_t>(sent));
        continue;
      }
      if (errno == EINTR) continue;
      if (errno != EAGAIN) break;
      waited = patience_->Wait(fd_, POLLOUT) ? Io::kDone : Io::kOutOfTime;
    }
    if (waited == Io::kOutOfTime) return OutOfTime("the request was not taken");
    if (waited != Io::kDone) break;  // It may have answered before it ended: that is read.
  }
  return absl::OkStatus();
}

HttpExchange::Io HttpExchange::Receive(std::string* to, size_t bytes_max) {
  std::array<char, 4096> part;
  const size_t size = std::min(part.size(), bytes_max);
  for (;;) {
    ssize_t got = 0;
    Io waited = Io::kDone;
    if (ssl_ != nullptr) {
      ERR_clear_error();
      got = SSL_read(ssl_.get(), part.data(), static_cast<int>(size));
      if (got <= 0) waited = AwaitTls(static_cast<int>(got));
    } else {
      got = recv(fd_, part.data(), size, 0);
      if (got < 0 && errno == EINTR) continue;
      if (got == 0 || (got < 0 && errno != EAGAIN)) return got == 0 ? Io::kEnded : Io::kFailed;
      if (got < 0) waited = patience_->Wait(fd_, POLLIN) ? Io::kDone : Io::kOutOfTime;
    }
    if (got > 0) {
      // Whoever always has something to send must not outlast its time either.
      to->append(part.data(), static_cast<size_t>(got));
      return MonotonicNow() < patience_->deadline_ns() && !patience_->stopped() ? Io::kDone : Io::kOutOfTime;
    }
    if (waited != Io::kDone) return waited;
  }
}

absl::StatusOr<HttpAnswer> HttpExchange::ReadHead(std::string* head) {
  size_t came = 0;  // Of all heads.
  for (;;) {
    const int status = StatusOf(buffer_);
    if (status == 0) return Fail("answer", "answered what is no HTTP");
    const size_t end = EndOfHead(buffer_);
    if (status > 0 && end != std::string_view::npos && end <= limits_.head_bytes_max - came) {
      *head = buffer_.substr(0, end);
      buffer_.erase(0, end);
      came += end;
      if (status < 200 && status != 101) continue;  // An interim one.
      return HttpAnswer{.status = status, .location = std::string(HeaderOf(*head, "location")), .text = {}};
    }
    if (came + buffer_.size() >= limits_.head_bytes_max) {
      return Fail("answer", absl::StrCat("answered with a head of more than ", limits_.head_bytes_max, " bytes"));
    }
    switch (Receive(&buffer_, limits_.head_bytes_max - came - buffer_.size())) {
      case Io::kDone:
        break;
      case Io::kOutOfTime:
        return OutOfTime(buffer_.empty() && came == 0 ? "no answer" : "its head did not end");
      case Io::kEnded:
        return Fail("answer", buffer_.empty() ? "ended the connection without an answer" : "ended within its head");
      case Io::kFailed:
        return Fail("answer", "broke the connection without an answer");
    }
  }
}

void HttpExchange::ReadBody(std::string_view head, HttpAnswer* answer) {
  patience_->Shorten(MonotonicNow() + limits_.body_ns_max);
  const std::string_view coding = HeaderOf(head, "transfer-encoding"), packed = HeaderOf(head, "content-encoding");
  const std::string_view length = HeaderOf(head, "content-length");
  const bool chunked = absl::EndsWithIgnoreCase(absl::string_view(coding.data(), coding.size()), "chunked");
  uint64_t bytes = 0;
  const bool counted = coding.empty() && absl::SimpleAtoi(absl::string_view(length.data(), length.size()), &bytes);
  const bool none = answer->status == 204 || answer->status == 304;
  const auto whole = [&] {
    if (none || (counted && buffer_.size() >= bytes)) return true;
    return chunked && (buffer_ == "0\r\n\r\n" || absl::EndsWith(buffer_, "\r\n0\r\n\r\n"));
  };
  bool ended = whole();
  while (!ended) {
    if (buffer_.size() >= limits_.body_bytes_max) break;
    const Io received = Receive(&buffer_, limits_.body_bytes_max - buffer_.size());
    ended = whole() || received == Io::kEnded;
    if (received != Io::kDone) break;
  }
  answer->cut = !ended;
  if (!packed.empty() && packed != "identity") return;
  answer->text = chunked ? Unchunk(buffer_) : buffer_;
}

absl::StatusOr<HttpAnswer> HttpExchange::Run(std::string_view request, std::shared_ptr<NameLookup>* lookup) {
  std::vector<Address> addresses;
  BW_RETURN_IF_ERROR(Resolve(lookup, &addresses));
  BW_RETURN_IF_ERROR(Connect(addresses));
  if (url_.tls && !proxy_.host.empty()) BW_RETURN_IF_ERROR(Tunnel());
  if (url_.tls) BW_RETURN_IF_ERROR(ShakeHands());
  BW_RETURN_IF_ERROR(Send(request));
  std::string head;
  BW_ASSIGN_OR_RETURN(HttpAnswer answer, ReadHead(&head));
  ReadBody(head, &answer);
  return answer;
}

}  // namespace bellwether::server
