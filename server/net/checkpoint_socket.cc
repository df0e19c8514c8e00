#include "server/net/checkpoint_socket.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "server/util/log.h"

namespace bellwether::server {
namespace {

constexpr char kSocket[] = "checkpoint.sock";
constexpr char kDirectory[] = "checkpoint";

// A socket's path has 107 bytes, a folder's 4,095: the folder is opened first.
struct SocketPath {
  explicit SocketPath(const std::string& folder) : fd(::open(folder.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC)) {
    address.sun_family = AF_UNIX;
    const std::string path = absl::StrCat("/proc/self/fd/", fd, "/", kSocket);
    std::strncpy(address.sun_path, path.c_str(), sizeof(address.sun_path) - 1);
  }
  ~SocketPath() {
    if (fd >= 0) ::close(fd);
  }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&address); }

  const int fd;
  sockaddr_un address{};
};

void RemoveCopy(const std::string& storage_path) {
  std::error_code error;
  std::filesystem::remove_all(absl::StrCat(storage_path, "/", kDirectory), error);
  if (error) LogWarning("{}/{}: cannot be removed: {}", storage_path, kDirectory, error.message());
}

}  // namespace

absl::StatusOr<std::unique_ptr<CheckpointSocket>> CheckpointSocket::Start(const std::string& storage_path,
                                                                          Write write) {
  RemoveCopy(storage_path);  // Of a server that was killed.
  const SocketPath path(storage_path);
  ::unlink(path.address.sun_path);
  const int listener = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (listener < 0 || ::bind(listener, path.get(), sizeof(path.address)) != 0 || ::listen(listener, 4) != 0) {
    const int error = errno;
    if (listener >= 0) ::close(listener);
    return absl::UnavailableError(absl::StrCat(storage_path, "/", kSocket, ": ", std::strerror(error)));
  }
  std::unique_ptr<CheckpointSocket> made(
      new CheckpointSocket(storage_path, std::move(write), listener, ::eventfd(0, EFD_CLOEXEC)));
  made->thread_ = std::thread([raw = made.get()] { raw->Serve(); });
  return made;
}

CheckpointSocket::~CheckpointSocket() {
  const uint64_t one = 1;
  (void)!::write(stop_, &one, sizeof(one));
  thread_.join();
  ::close(listener_);
  ::close(stop_);
  std::error_code ignored;
  std::filesystem::remove(absl::StrCat(storage_path_, "/", kSocket), ignored);
}

void CheckpointSocket::Serve() {
  for (;;) {
    pollfd waiting[2] = {{listener_, POLLIN, 0}, {stop_, POLLIN, 0}};
    if (::poll(waiting, 2, -1) < 0 && errno != EINTR) return;
    if ((waiting[1].revents & POLLIN) != 0) return;
    if ((waiting[0].revents & POLLIN) == 0) continue;
    const int client = ::accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
    if (client < 0) continue;
    Answer(client);
    ::close(client);
  }
}

void CheckpointSocket::Answer(int client) {
  RemoveCopy(storage_path_);
  const absl::Status written = write_(absl::StrCat(storage_path_, "/", kDirectory));
  const std::string line = written.ok() ? "ok\n" : absl::StrCat("error ", std::string(written.message()), "\n");
  if (::send(client, line.data(), line.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(line.size()) && written.ok()) {
    // Until the other end has what it wants, or is gone, or we are to stop.
    pollfd waiting[2] = {{client, POLLIN | POLLHUP, 0}, {stop_, POLLIN, 0}};
    while (::poll(waiting, 2, -1) < 0 && errno == EINTR) continue;
  }
  RemoveCopy(storage_path_);
}

absl::Status CheckpointSocket::Ask(const std::string& storage_path,
                                   const std::function<absl::Status(const std::string& directory)>& use) {
  const SocketPath path(storage_path);
  const int server = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (server < 0 || ::connect(server, path.get(), sizeof(path.address)) != 0) {
    const int error = errno;
    if (server >= 0) ::close(server);
    if (error == ENOENT || error == ECONNREFUSED) {
      return absl::NotFoundError(absl::StrCat("storage.path ", storage_path, ": no server runs there"));
    }
    return absl::UnavailableError(absl::StrCat(storage_path, "/", kSocket, ": ", std::strerror(error)));
  }
  std::string line;
  char byte = 0;
  while (line.size() < 4096 && ::read(server, &byte, 1) == 1 && byte != '\n') line.push_back(byte);
  absl::Status status;
  if (line == "ok") {
    status = use(absl::StrCat(storage_path, "/", kDirectory));
  } else if (line.empty()) {
    status = absl::UnavailableError("the server ended before it had made its copy");
  } else {
    status = absl::UnavailableError(absl::StripPrefix(line, "error "));
  }
  ::close(server);
  return status;
}

}  // namespace bellwether::server
