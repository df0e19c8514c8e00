// checkpoint_socket.h: how `bellwetherd backup` asks a running server for a
// copy.
//
// The socket is <storage>/checkpoint.sock, in a folder that only the server's
// user (and root) may enter.  A program that connects gets one line.  It is
// `ok` once everything durable stands in <storage>/checkpoint, or `error WHY`.
// The copy is removed when the connection ends.  One at a time.  Thread-safe.

#ifndef BELLWETHER_SERVER_NET_CHECKPOINT_SOCKET_H_
#define BELLWETHER_SERVER_NET_CHECKPOINT_SOCKET_H_

#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace bellwether::server {

class CheckpointSocket {
 public:
  // `write` makes the copy in the directory that it is given, which is missing.
  using Write = std::function<absl::Status(const std::string& directory)>;

  // UNAVAILABLE: the socket cannot be made.
  static absl::StatusOr<std::unique_ptr<CheckpointSocket>> Start(const std::string& storage_path, Write write);
  ~CheckpointSocket();

  // Asks the server of `storage_path` and calls `use` with the copy's directory
  // while it is there.  NOT_FOUND: no server runs there.
  static absl::Status Ask(const std::string& storage_path,
                          const std::function<absl::Status(const std::string& directory)>& use);

 private:
  CheckpointSocket(std::string storage_path, Write write, int listener, int stop)
      : storage_path_(std::move(storage_path)), write_(std::move(write)), listener_(listener), stop_(stop) {}
  void Serve();
  void Answer(int client);

  const std::string storage_path_;
  const Write write_;
  const int listener_, stop_;  // stop_: an eventfd.
  std::thread thread_;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_NET_CHECKPOINT_SOCKET_H_
