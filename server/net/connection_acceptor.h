// connection_acceptor.h: listens in gRPC's place.
//
// gRPC 1.51's own listener stops accepting for good once the process has run
// out of descriptors (CVE-2023-4785), and counts nothing.  This one counts
// connections, in all and by address, and closes what is too much.  It waits 10
// ms when descriptors are short.  It hands each connection to gRPC, whose
// handshake timeout ends a client that sends nothing.
//
// gRPC does not report when a connection ends.  Its descriptor is then closed,
// or another socket by then, which fstat() shows by the inode.  So the count is
// made anew each second, and before anything is refused.

#ifndef BELLWETHER_SERVER_NET_CONNECTION_ACCEPTOR_H_
#define BELLWETHER_SERVER_NET_CONNECTION_ACCEPTOR_H_

#include <grpcpp/server_builder.h>
#include <sys/types.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/util/counters.h"
#include "server/util/own_file.h"

struct sockaddr_storage;

namespace bellwether::server {

struct ConnectionLimits {
  int64_t all_max = 8192;
  int64_t per_address_max = 2048;  // IPv6: per /64; Unix socket: per user
};

// Raises the soft limit of descriptors to the hard one, and returns it.
int64_t RaiseDescriptorLimit();

class ConnectionAcceptor {
 public:
  // Binds and listens; nothing is accepted before Start().  INVALID_ARGUMENT:
  // not host:port nor unix:/path.  UNAVAILABLE: the address cannot be bound,
  // with the reason.
  static absl::StatusOr<std::unique_ptr<ConnectionAcceptor>> Listen(const std::string& address,
                                                                    const ConnectionLimits& limits, Counters* counters);
  ~ConnectionAcceptor();  // As Stop().
  ConnectionAcceptor(const ConnectionAcceptor&) = delete;
  ConnectionAcceptor& operator=(const ConnectionAcceptor&) = delete;

  // The address as it was given, with the port that was bound.
  const std::string& address() const { return address_; }
  // Hands every connection to `target`, which must live until Stop() returns.
  void Start(grpc::experimental::ExternalConnectionAcceptor* target);
  // Accepts no more; connections that were handed on live.  A Unix socket's path is
  // removed, unless another's socket is there by now.
  void Stop();

 private:
  struct Open {
    ino_t inode;
    std::string source;
  };
  ConnectionAcceptor(const ConnectionLimits& limits, Counters* counters);
  absl::Status ListenUnix(const std::string& path);
  absl::Status ListenTcp(const std::string& host, const std::string& port);
  void Run();
  void AcceptAll(int listener);
  // False: it was refused, and closed.
  bool Admit(int fd, const std::string& source);
  bool IsFull(const std::string& source) const;
  void Recount();

  const ConnectionLimits limits_;
  Gauge* const open_gauge_;
  Counter* const refused_all_;
  Counter* const refused_address_;
  Counter* const refused_descriptors_;
  std::string address_;
  OwnFile unix_socket_;
  std::vector<int> listeners_;
  int stop_fd_ = -1;
  grpc::experimental::ExternalConnectionAcceptor* target_ = nullptr;
  std::thread thread_;
  // Of the thread.
  std::map<int, Open> open_;
  std::map<std::string, int64_t> by_source_;
  int64_t recounted_ns_ = 0;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_NET_CONNECTION_ACCEPTOR_H_
