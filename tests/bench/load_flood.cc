#include "tests/bench/load_flood.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdlib>
#include <deque>

namespace bellwether {
namespace {

constexpr int kThreads = 4;
constexpr size_t kStallsEach = 250;

// The start of a TLS record that announces a ClientHello of 512 bytes.
constexpr std::array<uint8_t, 9> kHalfHello = {0x16, 0x03, 0x01, 0x02, 0x00, 0x01, 0x00, 0x01, 0xfc};

// The other end has closed it.
bool IsOver(int fd) {
  pollfd polled{fd, POLLIN, 0};
  return poll(&polled, 1, 0) != 0;
}

}  // namespace

LoadFlood::LoadFlood(const std::string& address, Kind kind)
    : host_(address.substr(0, address.rfind(':'))),
      port_(std::atoi(address.substr(address.rfind(':') + 1).c_str())),
      kind_(kind) {
  for (int i = 0; i < kThreads; ++i) threads_.emplace_back([this, i] { Run(i); });
}

LoadFlood::~LoadFlood() {
  ended_ = true;
  for (std::thread& thread : threads_) thread.join();
}

int LoadFlood::Open(int number, uint32_t source) const {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return -1;
  sockaddr_in from{}, to{};
  from.sin_family = to.sin_family = AF_INET;
  from.sin_addr.s_addr = htonl(0x7f000002 + (static_cast<uint32_t>(number) * 2 + source % 2));
  to.sin_port = htons(static_cast<uint16_t>(port_));
  inet_pton(AF_INET, host_.c_str(), &to.sin_addr);
  // Closed by a reset: ports that linger would end the flood by themselves.
  const linger reset{1, 0};
  setsockopt(fd, SOL_SOCKET, SO_LINGER, &reset, sizeof(reset));
  const int yes = 1;
  setsockopt(fd, IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &yes, sizeof(yes));
  if (bind(fd, reinterpret_cast<sockaddr*>(&from), sizeof(from)) == 0 &&
      connect(fd, reinterpret_cast<sockaddr*>(&to), sizeof(to)) == 0) {
    return fd;
  }
  close(fd);
  return -1;
}

void LoadFlood::Run(int number) {
  std::deque<int> open;
  for (uint32_t i = 0; !ended_; ++i) {
    if (kind_ == Kind::kStalls) {
      while (!open.empty() && (open.size() > kStallsEach || IsOver(open.front()))) {
        close(open.front());
        open.pop_front();
      }
      if (open.size() == kStallsEach) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        continue;
      }
    }
    const int fd = Open(number, i);
    if (fd < 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      continue;
    }
    ++opened_;
    if (kind_ == Kind::kConnections) {
      close(fd);
    } else {
      (void)!send(fd, kHalfHello.data(), kHalfHello.size(), MSG_NOSIGNAL);
      open.push_back(fd);
    }
  }
  for (const int fd : open) close(fd);
}

}  // namespace bellwether
