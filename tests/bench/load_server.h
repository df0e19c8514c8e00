// load_server.h: a real bellwetherd over TLS with client certificates, on cores
// of its own.  It has a folder of its own and two tenants, "quiet" and "noisy".
// It can have less, or more, of what keeps strangers out.
//
// Not thread-safe.

#ifndef BELLWETHER_TESTS_BENCH_LOAD_SERVER_H_
#define BELLWETHER_TESTS_BENCH_LOAD_SERVER_H_

#include <grpcpp/grpcpp.h>
#include <sys/types.h>

#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace bellwether {

// "0,2-4" -> 0, 2, 3, 4.  Exits the program if it is neither that nor "".
std::vector<int> ParseCpus(const std::string& text);
// The calling thread, and those that it starts from now on; empty = as it is.
void PinToCpus(const std::vector<int>& cpus);

// What a caller must show.
enum class Guard {
  kUnixSocket,    // Nothing: the socket's mode guards it.
  kLoopback,      // Nothing, over TCP.
  kCertificates,  // A certificate, over TLS; identities, tenants and audit with it.
  kTokens,        // The same, and a token with each call.
};

class LoadServer {
 public:
  struct Options {
    Guard guard = Guard::kCertificates;
    std::string binary;                  // bellwetherd; `bellwether` lies beside it.
    std::filesystem::path folder;        // Made, and removed at the end; "" = under the system's temporary one.
    std::vector<int> cpus;               // Empty = any.
    double noisy_frames_per_second = 0;  // The noisy tenant's quota; 0 = none.
    std::string config;                  // More lines of its configuration.
  };

  // Returns when it serves; exits the program if it does not start.
  explicit LoadServer(const Options& options);
  ~LoadServer();  // Kills it, removes the folder.
  LoadServer(const LoadServer&) = delete;
  LoadServer& operator=(const LoadServer&) = delete;

  // A connection of its own, as `tenant`.
  std::shared_ptr<grpc::Channel> Connect(const std::string& tenant) const;
  const std::string& address() const { return address_; }  // host:port, or unix:path
  // Kills it with SIGKILL and starts it again, at another address.  Returns the seconds from its start until it
  // serves.
  double KillAndRestart();
  // A page's body, from the port for HTTP.  REQUIRES: it asks for no certificates.
  std::string HttpGet(const std::string& path) const;
  std::filesystem::path data() const { return folder_ / "data"; }
  double CpuSeconds() const;
  // Now, and the most since the start, in MiB.
  double ResidentMib() const;
  double ResidentMaxMib() const;
  double DataMib() const;  // On disk, log included.
  // What it has sent to the disk since its start, zeros for the log included.
  double WrittenMib() const;

 private:
  bool guarded() const { return options_.guard == Guard::kCertificates || options_.guard == Guard::kTokens; }
  void WriteGuards() const;
  std::shared_ptr<grpc::ChannelCredentials> CredentialsOf(const std::string& tenant) const;
  void Tool(const std::vector<std::string>& words) const;
  void Start();
  // Of a file in /proc/PID whose lines begin with a field; 0 if it is not there.
  double ProcNumber(const std::string& file, const std::string& field) const;

  const Options options_;
  std::filesystem::path folder_;
  std::string address_, http_;
  pid_t pid_ = 0;
  mutable std::map<std::string, std::shared_ptr<grpc::ChannelCredentials>> credentials_;  // By tenant.
};

}  // namespace bellwether

#endif  // BELLWETHER_TESTS_BENCH_LOAD_SERVER_H_
