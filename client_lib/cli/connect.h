// connect.h: finds a server and speaks to it.

#ifndef BELLWETHER_CLI_CONNECT_H_
#define BELLWETHER_CLI_CONNECT_H_

#include <grpcpp/grpcpp.h>
#include <signal.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>

#include "bellwether/v1/query.grpc.pb.h"
#include "cli/exit_code.h"
#include "cli/output.h"
#include "cli/private_server.h"

namespace bellwether::cli {

struct ConnectOptions {
  std::string server;  // Empty: see Connect().
  std::string tls_ca, tls_cert, tls_key;
  std::string token_file;
  std::chrono::milliseconds timeout{10'000};
};

class Connection {
 public:
  Connection(std::string address, std::string token, const ConnectOptions& options,
             std::shared_ptr<grpc::ChannelCredentials> credentials);
  // To the user's private server.
  Connection(const PrivateServer& server, std::string token, const ConnectOptions& options,
             std::shared_ptr<grpc::ChannelCredentials> credentials);

  v1::Query::Stub& stub() { return *stub_; }
  grpc::Channel& channel() { return *channel_; }
  const std::string& address() const { return address_; }
  const ConnectOptions& options() const { return options_; }
  // Of a private server alone: its page, and the token that opens it.
  bool is_private() const { return !page_.empty(); }
  const std::string& page() const { return page_; }
  const std::string& page_token() const { return page_token_; }

  // With the token, and with the timeout unless the call is a long one.
  void Prepare(grpc::ClientContext* context, bool long_call = false) const;

 private:
  const std::string address_;
  const std::string token_;
  const ConnectOptions options_;
  std::string page_, page_token_;
  const std::shared_ptr<grpc::Channel> channel_;
  const std::unique_ptr<v1::Query::Stub> stub_;
};

// The server is the first of these: options.server (which has --server or
// BELLWETHER_SERVER); 127.0.0.1:7070 if a server answers there; the user's
// private server by its ready file ($XDG_STATE_HOME or ~/.local/state,
// bellwether/server.json).  nullptr: the error was printed, and `*code` is the
// exit code.
std::unique_ptr<Connection> Connect(const ConnectOptions& options, ExitCode* code);
// Your private server, whatever else answers.  Never null.
std::unique_ptr<Connection> ConnectTo(const PrivateServer& server, const ConnectOptions& options);
// As Connect(); the error goes into `*why` instead.
std::unique_ptr<Connection> TryConnect(const ConnectOptions& options, ExitCode* code, std::string* why);

// What a call's failure means, as a sentence and as an exit code.  May ask the server again, or
// what else is at its address (trouble.h).
std::string Explain(Connection* connection, const grpc::Status& status);
ExitCode CodeOf(const grpc::Status& status);
// Prints the error of a call that failed and returns the exit code.
ExitCode Report(Connection* connection, const grpc::Status& status);

// While it lives, Ctrl-C and SIGTERM cancel a call instead of killing the
// process, and writing to a closed pipe fails.  Make it before the first
// Connect(): threads inherit the mask.
class Interrupt {
 public:
  Interrupt();
  ~Interrupt();
  Interrupt(const Interrupt&) = delete;
  Interrupt& operator=(const Interrupt&) = delete;

  // From now on a signal cancels `context`, until the next Watch(); nullptr =
  // none.  A signal that comes between two calls cancels the next.
  void Watch(grpc::ClientContext* context);
  // Waits; false: a signal came.  REQUIRES: no call is watched.
  bool Sleep(std::chrono::milliseconds time);
  bool happened() const { return happened_; }

 private:
  sigset_t signals_;
  sigset_t before_;
  struct sigaction pipe_before_;
  std::atomic<bool> happened_ = false;
  std::atomic<bool> stop_ = false;
  std::thread thread_;
};

}  // namespace bellwether::cli

#endif  // BELLWETHER_CLI_CONNECT_H_
