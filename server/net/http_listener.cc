#include "server/net/http_listener.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "server/util/await_for.h"
#include "server/util/clock.h"
#include "server/util/connection_source.h"
#include "server/util/log.h"

namespace bellwether::server {
namespace {

constexpr int64_t kLookNs = 200'000'000;  // So often for connections that are late.
constexpr int64_t kSecondNs = 1'000'000'000;
constexpr int64_t kTellNs = kSecondNs;  // Between two lines about handshakes.
constexpr size_t kProbeThreads = 2;
constexpr char kTooLong[] =
    "HTTP/1.1 431 Request Header Fields Too Large\r\nConnection: close\r\nContent-Length: 0\r\n\r\n";
constexpr char kBusy[] =
    "HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n";

Counter* Refused(Counters* counters, const char* limit) {
  return counters->counter("bellwether_http_connections_refused_total", {{"limit", limit}});
}

bool IsProbe(std::string_view path) { return path == "/-/healthy" || path == "/-/ready"; }

}  // namespace

HttpListener::HttpListener(const Options& options, Serve serve, Counters* counters)
    : options_(options),
      serve_(std::move(serve)),
      refused_address_(Refused(counters, "address")),
      refused_connections_(Refused(counters, "connections")),
      refused_descriptors_(Refused(counters, "descriptors")),
      refused_time_(Refused(counters, "time")),
      refused_head_(Refused(counters, "head")),
      refused_queue_(Refused(counters, "queue")),
      handshakes_failed_(counters->counter("bellwether_http_handshakes_failed_total")),
      pool_(options.threads_max, options.queue_max),
      probes_(kProbeThreads, options.connections_max) {}

HttpListener::~HttpListener() { Stop(); }

void HttpListener::Start(int listener) {
  listener_ = listener;
  fcntl(listener_, F_SETFL, fcntl(listener_, F_GETFL) | O_NONBLOCK);  // A peer may be gone before it is taken.
  epoll_fd_ = epoll_create1(EPOLL_CLOEXEC);
  wake_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  for (const int fd : {listener_, wake_fd_}) {
    epoll_event event{.events = EPOLLIN, .data = {.fd = fd}};
    epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, fd, &event);
  }
  thread_ = std::thread([this] { Run(); });
}

void HttpListener::Stop() {
  if (!thread_.joinable()) return;
  stopping_ = true;
  const uint64_t one = 1;
  (void)!write(wake_fd_, &one, sizeof(one));
  thread_.join();
  close(listener_);
  waiting_.clear();
  std::vector<ConnectionPtr> returned;
  {
    absl::MutexLock lock(&mutex_);
    returned.swap(returned_);
    for (const ConnectionPtr& connection : served_) connection->Cut(/*writes=*/false);
    const auto none = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return served_.empty(); };
    AwaitFor(&mutex_, absl::Condition(&none), absl::Seconds(options_.stop_seconds_max));
    for (const ConnectionPtr& connection : served_) connection->Cut(/*writes=*/true);
  }
  returned.clear();
  pool_.Shutdown();
  probes_.Shutdown();
  close(epoll_fd_);
  close(wake_fd_);
}

void HttpListener::Run() {
  std::array<epoll_event, 64> events;
  while (!stopping_) {
    const int wait_ms = waiting_.empty() ? -1 : static_cast<int>(kLookNs / 1'000'000);
    const int count = epoll_wait(epoll_fd_, events.data(), static_cast<int>(events.size()), wait_ms);
    for (int i = 0; i < count; ++i) {
      const int fd = events[static_cast<size_t>(i)].data.fd;
      if (fd == listener_) {
        Accept();
      } else if (fd == wake_fd_) {
        uint64_t times;
        (void)!read(wake_fd_, &times, sizeof(times));
      } else if (const auto found = waiting_.find(fd); found != waiting_.end()) {
        Progress(ConnectionPtr(found->second));
      }
    }
    TakeBack();
    EndLate();
  }
}

void HttpListener::Accept() {
  sockaddr_storage peer{};
  socklen_t size = sizeof(peer);
  const int fd = accept4(listener_, reinterpret_cast<sockaddr*>(&peer), &size, SOCK_CLOEXEC | SOCK_NONBLOCK);
  if (fd < 0) {
    if (errno != EMFILE && errno != ENFILE && errno != ENOBUFS && errno != ENOMEM) return;
    refused_descriptors_->Add();
    usleep(kShortOfDescriptorsUs);
    return;
  }
  const std::string source = ConnectionSource(fd, peer);
  const std::optional<Place> place = Admit(source);
  if (!place.has_value()) {
    close(fd);
    return;
  }
  const HttpConnection::Limits limits{.head_bytes_max = options_.head_bytes_max,
                                      .request_ns_max = options_.request_seconds_max * kSecondNs,
                                      .write_ns_max = options_.write_seconds_max * kSecondNs};
  const auto connection =
      std::make_shared<HttpConnection>(fd, options_.tls, limits, [this, source, place] { Release(source, *place); });
  connection->Stand(source, *place == Place::kHealth);
  Hold(connection);
}

std::optional<HttpListener::Place> HttpListener::Admit(const std::string& source) {
  if (TakePlace(source)) return Place::kAny;
  if (TakeHealthPlace(source)) return Place::kHealth;
  return std::nullopt;
}

bool HttpListener::TakePlace(const std::string& source) {
  for (bool tried = false;; tried = true) {
    {
      absl::MutexLock lock(&sources_mutex_);
      const auto his = by_source_.find(source);
      if (his != by_source_.end() && his->second.any >= options_.per_address_max) return false;
      if (open_ < options_.connections_max) {
        ++by_source_[source].any;
        ++open_;
        return true;
      }
    }
    if (tried) return false;
    refused_connections_->Add();
    if (!MakeRoom(Place::kAny, "")) return false;  // All are being served.
  }
}

bool HttpListener::TakeHealthPlace(const std::string& source) {
  for (bool tried = false;; tried = true) {
    bool his_own = false;
    {
      absl::MutexLock lock(&sources_mutex_);
      const auto his = by_source_.find(source);
      his_own = his != by_source_.end() && his->second.health >= options_.health_per_address_max;
      if (!his_own && health_open_ < options_.health_connections_max) {
        ++by_source_[source].health;
        ++health_open_;
        return true;
      }
    }
    if (!tried) refused_address_->Add();
    if (tried || !MakeRoom(Place::kHealth, his_own ? source : "")) return false;
  }
}

bool HttpListener::MakeRoom(Place place, const std::string& source) {
  ConnectionPtr oldest;
  for (const auto& [fd, connection] : waiting_) {
    if (connection->health_only() != (place == Place::kHealth)) continue;
    if (!source.empty() && connection->source() != source) continue;
    if (oldest == nullptr || connection->waits_since_ns() < oldest->waits_since_ns()) oldest = connection;
  }
  if (oldest == nullptr) return false;
  Forget(oldest);
  return true;  // Its end, below, gives its place back.
}

void HttpListener::Progress(const ConnectionPtr& connection) {
  if (connection->lingers()) {
    if (!connection->Drain()) Forget(connection);
    return;
  }
  switch (connection->ReadHead()) {
    case HttpConnection::Head::kPartial:
      return Watch(connection);
    case HttpConnection::Head::kComplete:
      return Dispatch(connection);
    case HttpConnection::Head::kTooLong:
      return Turn(connection, kTooLong, refused_head_);
    case HttpConnection::Head::kEnded:
      if (!connection->tls_error().empty()) Tell(*connection);
      return Forget(connection);
  }
}

void HttpListener::Tell(const HttpConnection& connection) {
  handshakes_failed_->Add();
  const int64_t now_ns = MonotonicNow();
  if (told_ns_ != 0 && now_ns - told_ns_ < kTellNs) {
    ++not_told_;
    return;
  }
  told_ns_ = now_ns;
  std::string ip = "an address that is gone";
  int port = 0;
  connection.get_remote_ip_and_port(ip, port);
  LogWarning("the page's port: the TLS handshake of {} failed: {} ({} more before, without a line)", ip,
             connection.tls_error(), std::exchange(not_told_, 0));
}

void HttpListener::Hold(const ConnectionPtr& connection) {
  waiting_[connection->fd()] = connection;
  epoll_event event{.events = EPOLLIN, .data = {.fd = connection->fd()}};
  epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, connection->fd(), &event);
}

void HttpListener::Watch(const ConnectionPtr& connection) {
  const bool write = connection->wants_to_write() && !connection->lingers();
  epoll_event event{.events = write ? EPOLLOUT : EPOLLIN, .data = {.fd = connection->fd()}};
  epoll_ctl(epoll_fd_, EPOLL_CTL_MOD, connection->fd(), &event);
}

void HttpListener::Forget(const ConnectionPtr& connection) {
  epoll_ctl(epoll_fd_, EPOLL_CTL_DEL, connection->fd(), nullptr);
  waiting_.erase(connection->fd());
}

void HttpListener::Turn(const ConnectionPtr& connection, const char* answer, Counter* counter) {
  counter->Add();
  connection->WriteWithin(0);
  connection->write(answer, std::strlen(answer));
  connection->Linger();
  Watch(connection);
}

void HttpListener::Dispatch(const ConnectionPtr& connection) {
  const bool probe = IsProbe(connection->PathRead());
  if (connection->health_only() && !probe && connection->PathRead() != "/metrics") {
    return Turn(connection, kBusy, refused_address_);
  }
  // A probe's answer fits into the kernel's buffer, unless its reader wants to hold the thread.
  connection->WriteWithin(probe ? 0 : options_.write_seconds_max * kSecondNs);
  Forget(connection);
  {
    absl::MutexLock lock(&mutex_);
    served_.insert(connection);
  }
  if ((probe ? probes_ : pool_).Enqueue([this, connection] { ServeOne(connection); })) return;
  {
    absl::MutexLock lock(&mutex_);
    served_.erase(connection);
  }
  Hold(connection);
  Turn(connection, kBusy, refused_queue_);
}

void HttpListener::ServeOne(const ConnectionPtr& connection) {
  if (!stopping_) {
    const bool more = serve_(connection.get()) && connection->NextRequest(options_.idle_seconds_max * kSecondNs);
    if (!more) connection->Linger();
  }
  {
    absl::MutexLock lock(&mutex_);
    served_.erase(connection);
    if (stopping_) return;
    returned_.push_back(connection);
  }
  const uint64_t one = 1;
  (void)!write(wake_fd_, &one, sizeof(one));
}

void HttpListener::TakeBack() {
  std::vector<ConnectionPtr> returned;
  {
    absl::MutexLock lock(&mutex_);
    returned.swap(returned_);
  }
  for (const ConnectionPtr& connection : returned) {
    Hold(connection);
    Progress(connection);  // What came with the request before is seen by nobody else.
  }
}

void HttpListener::EndLate() {
  const int64_t now_ns = MonotonicNow();
  if (now_ns - looked_ns_ < kLookNs) return;
  looked_ns_ = now_ns;
  std::vector<ConnectionPtr> late;
  for (const auto& [fd, connection] : waiting_) {
    if (connection->deadline_ns() <= now_ns) late.push_back(connection);
  }
  for (const ConnectionPtr& connection : late) {
    if (connection->began()) refused_time_->Add();
    Forget(connection);
  }
}

void HttpListener::Release(const std::string& source, Place place) {
  absl::MutexLock lock(&sources_mutex_);
  --(place == Place::kAny ? open_ : health_open_);
  const auto found = by_source_.find(source);
  --(place == Place::kAny ? found->second.any : found->second.health);
  if (found->second.any + found->second.health == 0) by_source_.erase(found);
}

}  // namespace bellwether::server
