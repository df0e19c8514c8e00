#include "server/net/connection_acceptor.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/util/clock.h"
#include "server/util/connection_source.h"
#include "server/util/host_port.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

constexpr int kRecountMs = 1000;
constexpr int64_t kRecountNsMin = 10'000'000;  // Between two, however much comes.
constexpr unsigned kUnconfirmedMs = 8'000;     // As the keepalive's timeout.

}  // namespace

int64_t RaiseDescriptorLimit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return 1024;
  if (limit.rlim_cur < limit.rlim_max) {
    const rlim_t before = std::exchange(limit.rlim_cur, limit.rlim_max);
    if (setrlimit(RLIMIT_NOFILE, &limit) != 0) limit.rlim_cur = before;
  }
  return static_cast<int64_t>(limit.rlim_cur);
}

ConnectionAcceptor::ConnectionAcceptor(const ConnectionLimits& limits, Counters* counters)
    : limits_(limits),
      open_gauge_(counters->gauge("bellwether_connections")),
      refused_all_(counters->counter("bellwether_connections_refused_total", {{"limit", "all"}})),
      refused_address_(counters->counter("bellwether_connections_refused_total", {{"limit", "address"}})),
      refused_descriptors_(counters->counter("bellwether_connections_refused_total", {{"limit", "descriptors"}})) {}

absl::StatusOr<std::unique_ptr<ConnectionAcceptor>> ConnectionAcceptor::Listen(const std::string& address,
                                                                               const ConnectionLimits& limits,
                                                                               Counters* counters) {
  std::unique_ptr<ConnectionAcceptor> acceptor(new ConnectionAcceptor(limits, counters));
  acceptor->stop_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (absl::StartsWith(address, "unix:")) {
    acceptor->address_ = address;
    BW_RETURN_IF_ERROR(acceptor->ListenUnix(address.substr(5)));
    return acceptor;
  }
  BW_ASSIGN_OR_RETURN(const HostPort place, SplitHostPort("grpc.listen_address", address));
  if (place.host.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("grpc.listen_address = ", address, ": must be host:port or unix:/path"));
  }
  acceptor->address_ = place.host;
  BW_RETURN_IF_ERROR(acceptor->ListenTcp(place.host, std::to_string(place.port)));
  return acceptor;
}

absl::Status ConnectionAcceptor::ListenUnix(const std::string& path) {
  const auto refuse = [&path] {
    return absl::UnavailableError(
        absl::StrCat("grpc.listen-address = unix:", path, ": cannot be bound: ", std::strerror(errno)));
  };
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof(address.sun_path)) {
    return absl::InvalidArgumentError(absl::StrCat("grpc.listen-address = unix:", path, ": must be a path of 1 to ",
                                                   sizeof(address.sun_path) - 1, " bytes"));
  }
  path.copy(address.sun_path, path.size());
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return refuse();
  listeners_.push_back(fd);
  // One that a dead server left behind goes; one that answers does not.
  struct stat info {};
  if (lstat(path.c_str(), &info) == 0 && S_ISSOCK(info.st_mode)) {
    const int probe = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const bool answers = probe >= 0 && connect(probe, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0;
    if (probe >= 0) close(probe);
    if (answers) {
      errno = EADDRINUSE;
      return refuse();
    }
    unlink(path.c_str());
  }
  // Before bind(), so that the path has this mode from its first moment on.
  if (fchmod(fd, 0600) != 0 || bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0 ||
      !unix_socket_.Take(path) || listen(fd, SOMAXCONN) != 0) {
    return refuse();
  }
  return absl::OkStatus();
}

absl::Status ConnectionAcceptor::ListenTcp(const std::string& host, const std::string& port) {
  const std::string bare = BareHost(host);
  const auto refuse = [&](const char* why) {
    return absl::UnavailableError(absl::StrCat("grpc.listen-address = ", host, ":", port, ": cannot be bound: ", why));
  };
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  if (const int error = getaddrinfo(bare.c_str(), port.c_str(), &hints, &found); error != 0)
    return refuse(gai_strerror(error));
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> free_it(found, &freeaddrinfo);
  uint16_t bound_port = 0;
  int error = 0;
  // A name may stand for several; with port 0 all of them get the first one's.
  for (const addrinfo* at = found; at != nullptr; at = at->ai_next) {
    sockaddr_storage address{};
    std::memcpy(&address, at->ai_addr, at->ai_addrlen);
    // The port lies at the same place in both families.
    if (bound_port != 0) reinterpret_cast<sockaddr_in&>(address).sin_port = htons(bound_port);
    const int fd = socket(at->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) {
      error = errno;
      continue;
    }
    const int yes = 1, no = 0;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
    if (at->ai_family == AF_INET6) setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, bare == "::" ? &no : &yes, sizeof(yes));
    if (bind(fd, reinterpret_cast<sockaddr*>(&address), at->ai_addrlen) != 0 || listen(fd, SOMAXCONN) != 0) {
      error = errno;
      close(fd);
      continue;
    }
    listeners_.push_back(fd);
    socklen_t size = sizeof(address);
    if (getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) == 0) {
      bound_port = ntohs(reinterpret_cast<const sockaddr_in&>(address).sin_port);
    }
  }
  if (listeners_.empty()) return refuse(std::strerror(error));
  absl::StrAppend(&address_, ":", bound_port);
  return absl::OkStatus();
}

ConnectionAcceptor::~ConnectionAcceptor() {
  Stop();
  if (stop_fd_ >= 0) close(stop_fd_);
}

void ConnectionAcceptor::Start(grpc::experimental::ExternalConnectionAcceptor* target) {
  target_ = target;
  thread_ = std::thread([this] { Run(); });
}

void ConnectionAcceptor::Stop() {
  if (thread_.joinable()) {
    const uint64_t one = 1;
    (void)!write(stop_fd_, &one, sizeof(one));
    thread_.join();
  }
  // While it still answers: then no other server takes the path in this moment.
  (void)unix_socket_.Remove();
  for (const int fd : listeners_) close(fd);
  listeners_.clear();
}

void ConnectionAcceptor::Run() {
  std::vector<pollfd> polled = {{stop_fd_, POLLIN, 0}};
  for (const int fd : listeners_) polled.push_back({fd, POLLIN, 0});
  while ((polled[0].revents & POLLIN) == 0) {
    const int ready = poll(polled.data(), polled.size(), kRecountMs);
    const int64_t now_ns = MonotonicNow();
    if (now_ns - recounted_ns_ >= int64_t{kRecountMs} * 1'000'000) Recount();
    for (size_t i = 1; ready > 0 && i < polled.size(); ++i) {
      if (polled[i].revents != 0) AcceptAll(polled[i].fd);
    }
  }
}

void ConnectionAcceptor::AcceptAll(int listener) {
  // A few at a time: a flood must not hold up the end.
  for (int i = 0; i < 64; ++i) {
    sockaddr_storage peer{};
    socklen_t size = sizeof(peer);
    const int fd = accept4(listener, reinterpret_cast<sockaddr*>(&peer), &size, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) {
      if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
        refused_descriptors_->Add();
        usleep(kShortOfDescriptorsUs);
      }
      if (errno == ECONNABORTED || errno == EINTR) continue;
      return;
    }
    // Reset already: gRPC would look at it, and say so.
    socklen_t still = sizeof(peer);
    if (peer.ss_family != AF_UNIX && getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &still) != 0) {
      close(fd);
      continue;
    }
    if (!Admit(fd, ConnectionSource(fd, peer))) continue;
    if (peer.ss_family != AF_UNIX) {
      // What gRPC's own listener sets; what is sent and not confirmed for so long ends the connection.
      const int yes = 1;
      const unsigned unconfirmed_ms = kUnconfirmedMs;
      setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof(yes));
      setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &unconfirmed_ms, sizeof(unconfirmed_ms));
    }
    grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters connection;
    connection.listener_fd = -1;
    connection.fd = fd;
    target_->HandleNewConnection(&connection);
  }
}

bool ConnectionAcceptor::Admit(int fd, const std::string& source) {
  if (IsFull(source) && MonotonicNow() - recounted_ns_ >= kRecountNsMin) Recount();
  if (IsFull(source)) {
    (static_cast<int64_t>(open_.size()) >= limits_.all_max ? refused_all_ : refused_address_)->Add();
    close(fd);
    return false;
  }
  struct stat info {};
  fstat(fd, &info);
  // Its descriptor may be that of one that has ended since the last count.
  const auto before = open_.find(fd);
  if (before != open_.end() && --by_source_[before->second.source] == 0) by_source_.erase(before->second.source);
  open_[fd] = {info.st_ino, source};
  ++by_source_[source];
  open_gauge_->Set(static_cast<double>(open_.size()));
  return true;
}

bool ConnectionAcceptor::IsFull(const std::string& source) const {
  if (static_cast<int64_t>(open_.size()) >= limits_.all_max) return true;
  const auto found = by_source_.find(source);
  return found != by_source_.end() && found->second >= limits_.per_address_max;
}

void ConnectionAcceptor::Recount() {
  recounted_ns_ = MonotonicNow();
  for (auto it = open_.begin(); it != open_.end();) {
    struct stat info {};
    if (fstat(it->first, &info) == 0 && S_ISSOCK(info.st_mode) && info.st_ino == it->second.inode) {
      ++it;
      continue;
    }
    if (--by_source_[it->second.source] == 0) by_source_.erase(it->second.source);
    it = open_.erase(it);
  }
  open_gauge_->Set(static_cast<double>(open_.size()));
}

}  // namespace bellwether::server
