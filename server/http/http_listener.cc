#include "server/http/http_listener.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "server/util/connection_source.h"

namespace bellwether::server {
namespace {

constexpr useconds_t kShortOfDescriptorsUs = 10'000;

}  // namespace

HttpListener::HttpListener(const Options& options, std::function<void(int fd)> serve, Counters* counters)
    : options_(options),
      serve_(std::move(serve)),
      refused_address_(counters->counter("bellwether_http_connections_refused_total", {{"limit", "address"}})),
      refused_descriptors_(counters->counter("bellwether_http_connections_refused_total", {{"limit", "descriptors"}})),
      pool_(options.threads_max, options.queue_max) {}

HttpListener::~HttpListener() { Stop(); }

void HttpListener::Start(int listener) {
  listener_ = listener;
  stop_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  thread_ = std::thread([this] { Run(); });
}

void HttpListener::Stop() {
  if (!thread_.joinable()) return;
  const uint64_t one = 1;
  (void)!write(stop_fd_, &one, sizeof(one));
  thread_.join();
  close(listener_);
  close(stop_fd_);
  pool_.Shutdown();
}

void HttpListener::Run() {
  pollfd polled[] = {{stop_fd_, POLLIN, 0}, {listener_, POLLIN, 0}};
  while ((polled[0].revents & POLLIN) == 0) {
    if (poll(polled, 2, -1) > 0 && polled[1].revents != 0) Accept();
  }
}

void HttpListener::Accept() {
  sockaddr_storage peer{};
  socklen_t size = sizeof(peer);
  const int fd = accept4(listener_, reinterpret_cast<sockaddr*>(&peer), &size, SOCK_CLOEXEC);
  if (fd < 0) {
    if (errno != EMFILE && errno != ENFILE && errno != ENOBUFS && errno != ENOMEM) return;
    refused_descriptors_->Add();
    usleep(kShortOfDescriptorsUs);
    return;
  }
  const std::string source = ConnectionSource(fd, peer);
  if (!Admit(source)) {
    refused_address_->Add();
    close(fd);
    return;
  }
  const timeval read_max{options_.read_seconds_max, 0}, write_max{options_.write_seconds_max, 0};
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &read_max, sizeof(read_max));
  setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &write_max, sizeof(write_max));
  pool_.Enqueue([this, fd, source] {
    serve_(fd);
    Release(source);
  });
}

bool HttpListener::Admit(const std::string& source) {
  absl::MutexLock lock(&mutex_);
  int64_t& open = by_source_[source];
  if (open >= options_.per_address_max) return false;
  ++open;
  return true;
}

void HttpListener::Release(const std::string& source) {
  absl::MutexLock lock(&mutex_);
  const auto found = by_source_.find(source);
  if (--found->second == 0) by_source_.erase(found);
}

}  // namespace bellwether::server
