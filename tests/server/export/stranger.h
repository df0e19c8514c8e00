// stranger.h: a receiver that does to each connection whatever a test wants.

#ifndef BELLWETHER_TESTS_SERVER_EXPORT_STRANGER_H_
#define BELLWETHER_TESTS_SERVER_EXPORT_STRANGER_H_

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"

namespace bellwether::server {

// One connection after the other, until it is destroyed.
class Stranger {
 public:
  // What is done to a connection once it is there; it is closed afterwards.
  using Deed = std::function<void(Stranger*, int fd)>;

  explicit Stranger(Deed deed) : deed_(std::move(deed)) {
    listener_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    EXPECT_EQ(bind(listener_, reinterpret_cast<sockaddr*>(&address), size), 0);
    EXPECT_EQ(listen(listener_, 16), 0);
    EXPECT_EQ(getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size), 0);
    port_ = ntohs(address.sin_port);
    thread_ = std::thread([this] {
      while (!over()) {
        pollfd polled{listener_, POLLIN, 0};
        if (poll(&polled, 1, 10) <= 0) continue;
        const int fd = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
        ++connections_;
        if (fd >= 0) deed_(this, fd);
        if (fd >= 0) close(fd);
      }
    });
  }
  ~Stranger() {
    over_ = true;
    thread_.join();
    close(listener_);
  }
  int port() const { return port_; }
  std::string url(const std::string& scheme = "http") const {
    return absl::StrCat(scheme, "://127.0.0.1:", port_, "/x");
  }
  int connections() const { return connections_; }
  // Bytes that it got rid of.
  size_t sent() const { return sent_; }
  bool over() const { return over_; }

  // False: the other end has gone, or the test is over.
  bool Send(int fd, const std::string& text) {
    for (size_t at = 0; at < text.size();) {
      pollfd polled{fd, POLLOUT, 0};
      if (over()) return false;
      if (poll(&polled, 1, 10) == 0) continue;
      const ssize_t put = send(fd, text.data() + at, text.size() - at, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (put < 0 && errno != EAGAIN) return false;
      if (put > 0) at += static_cast<size_t>(put), sent_ += static_cast<size_t>(put);
    }
    return true;
  }
  // Again and again, with a pause, until the other end has gone.
  void SendOn(int fd, const std::string& text, std::chrono::milliseconds pause = {}) {
    while (Send(fd, text)) std::this_thread::sleep_for(pause);
  }
  // Takes what comes and says nothing until the other end has gone.
  void Hang(int fd) {
    std::array<char, 4096> some;
    while (!over()) {
      pollfd polled{fd, POLLIN, 0};
      if (poll(&polled, 1, 10) > 0 && recv(fd, some.data(), some.size(), MSG_DONTWAIT) <= 0) return;
    }
  }
  // Reads the head and the body of a request, as polite ones do.
  std::string TakeRequest(int fd) {
    std::string request;
    std::array<char, 4096> some;
    while (!over()) {
      const size_t head = request.find("\r\n\r\n");
      const size_t length = request.find("Content-Length: ");
      if (head != std::string::npos && length != std::string::npos &&
          request.size() >= head + 4 + std::stoul(request.substr(length + 16))) {
        break;
      }
      pollfd polled{fd, POLLIN, 0};
      if (poll(&polled, 1, 10) == 0) continue;
      const ssize_t got = recv(fd, some.data(), some.size(), MSG_DONTWAIT);
      if (got <= 0) break;
      request.append(some.data(), static_cast<size_t>(got));
    }
    return request;
  }

 private:
  const Deed deed_;
  int listener_ = -1;
  int port_ = 0;
  std::atomic<bool> over_ = false;
  std::atomic<int> connections_ = 0;
  std::atomic<size_t> sent_ = 0;
  std::thread thread_;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_TESTS_SERVER_EXPORT_STRANGER_H_
