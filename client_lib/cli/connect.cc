#include "cli/connect.h"

#include <algorithm>
#include <utility>

#include "cli/trouble.h"
#include "client_lib/src/regular_file.h"

namespace bellwether::cli {
namespace {

constexpr char kDefaultServer[] = "127.0.0.1:7070";
// A series of 64 x 10,000 points has 11 MB; gRPC's own limit is 4.
constexpr int kMessageBytesMax = 64 << 20;

constexpr size_t kFileBytesMax = 1 << 20;

// Empty `path` = nothing to read.  False with `*why` set if it cannot be.
bool ReadFile(const char* flag, const std::string& path, std::string* text, std::string* why) {
  std::string error;
  if (path.empty() || client::ReadRegularFile(path, kFileBytesMax, text, &error)) return true;
  *why = std::string(flag) + " " + path + ": " + error;
  return false;
}

std::string Trim(std::string text) {
  text.erase(text.find_last_not_of(" \t\r\n") + 1);
  text.erase(0, text.find_first_not_of(" \t\r\n"));
  return text;
}

// Null with `*why` set if a file cannot be read.
std::shared_ptr<grpc::ChannelCredentials> Credentials(const ConnectOptions& options, std::string* why) {
  if (options.tls_ca.empty() && options.tls_cert.empty()) return grpc::InsecureChannelCredentials();
  grpc::SslCredentialsOptions tls;
  if (!ReadFile("--tls-ca", options.tls_ca, &tls.pem_root_certs, why) ||
      !ReadFile("--tls-cert", options.tls_cert, &tls.pem_cert_chain, why) ||
      !ReadFile("--tls-key", options.tls_key, &tls.pem_private_key, why)) {
    return nullptr;
  }
  return grpc::SslCredentials(tls);
}

bool IsLocal(const std::string& address) {
  for (const char* const prefix : {"unix:", "127.", "localhost:", "[::1]:"}) {
    if (address.rfind(prefix, 0) == 0) return true;
  }
  return false;
}

// Whether somebody accepts connections there.  On loopback the refusal is
// immediate; the timeout is for a port that swallows packets.
bool Answers(grpc::Channel* channel, std::chrono::milliseconds timeout) {
  const auto deadline = std::chrono::system_clock::now() + std::min(timeout, std::chrono::milliseconds(2000));
  for (;;) {
    const grpc_connectivity_state state = channel->GetState(/*try_to_connect=*/true);
    if (state == GRPC_CHANNEL_READY) return true;
    if (state == GRPC_CHANNEL_TRANSIENT_FAILURE || state == GRPC_CHANNEL_SHUTDOWN) return false;
    if (!channel->WaitForStateChange(state, deadline)) return false;
  }
}

std::shared_ptr<grpc::Channel> NewChannel(const std::string& address,
                                          const std::shared_ptr<grpc::ChannelCredentials>& credentials) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(kMessageBytesMax);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 20'000);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 8'000);
  return grpc::CreateCustomChannel(address, credentials, arguments);
}

}  // namespace

Connection::Connection(std::string address, std::string token, const ConnectOptions& options,
                       std::shared_ptr<grpc::ChannelCredentials> credentials)
    : address_(std::move(address)),
      token_(std::move(token)),
      options_(options),
      channel_(NewChannel(address_, credentials)),
      stub_(v1::Query::NewStub(channel_)) {}

Connection::Connection(const PrivateServer& server, std::string token, const ConnectOptions& options,
                       std::shared_ptr<grpc::ChannelCredentials> credentials)
    : Connection(server.grpc, std::move(token), options, std::move(credentials)) {
  page_ = server.page.empty() || server.page.find("://") != std::string::npos ? server.page : "http://" + server.page;
  page_token_ = server.token;
}

void Connection::Prepare(grpc::ClientContext* context, bool long_call) const {
  if (!token_.empty()) context->AddMetadata("authorization", "Bearer " + token_);
  if (!long_call) context->set_deadline(std::chrono::system_clock::now() + options_.timeout);
}

std::unique_ptr<Connection> TryConnect(const ConnectOptions& options, ExitCode* code, std::string* why) {
  if (options.tls_cert.empty() != options.tls_key.empty()) {
    *why = "--tls-cert and --tls-key belong together";
    *code = kUsage;
    return nullptr;
  }
  if (const std::string must = options.server.empty() ? "" : WhyNoAddress(options.server); !must.empty()) {
    *why = "--server \"" + options.server + "\": " + must;
    *code = kUsage;
    return nullptr;
  }
  std::string token;
  if (!options.token_file.empty()) {
    if (!ReadFile("--token-file", options.token_file, &token, why)) {
      *code = kUsage;
      return nullptr;
    }
    token = Trim(token);
    if (token.empty()) {
      *why = "--token-file " + options.token_file + ": holds no token";
      *code = kUsage;
      return nullptr;
    }
  }
  if (!token.empty() && options.tls_ca.empty() && !options.server.empty() && !IsLocal(options.server)) {
    *why = "the token is not sent to " + options.server + " without TLS: give --tls-ca";
    *code = kUsage;
    return nullptr;
  }
  const auto credentials = Credentials(options, why);
  if (credentials == nullptr) {
    *code = kUsage;
    return nullptr;
  }
  if (!options.server.empty()) return std::make_unique<Connection>(options.server, token, options, credentials);

  auto connection = std::make_unique<Connection>(kDefaultServer, token, options, credentials);
  if (Answers(&connection->channel(), options.timeout)) return connection;
  if (const PrivateServer own = FindPrivateServer(); !own.grpc.empty()) {
    return std::make_unique<Connection>(own, token.empty() ? own.token : token, options, credentials);
  }
  const std::string earlier = EarlierRuns("bellwether open");
  *why = std::string("no server is named: give --server HOST:PORT, or set BELLWETHER_SERVER. Nothing answers at ") +
         kDefaultServer + ", and you have no private server running; " +
         (earlier.empty() ? "bellwetherd starts one" : earlier);
  *code = kUnreachable;
  return nullptr;
}

std::unique_ptr<Connection> Connect(const ConnectOptions& options, ExitCode* code) {
  std::string why;
  std::unique_ptr<Connection> connection = TryConnect(options, code, &why);
  if (connection == nullptr) Complain(why);
  return connection;
}

std::unique_ptr<Connection> ConnectTo(const PrivateServer& server, const ConnectOptions& options) {
  return std::make_unique<Connection>(server, server.token, options, grpc::InsecureChannelCredentials());
}

std::string Explain(Connection* connection, const grpc::Status& status) {
  switch (status.error_code()) {
    case grpc::StatusCode::UNAVAILABLE:
    case grpc::StatusCode::DEADLINE_EXCEEDED:
      return WhyUnreachable(*connection, status);
    case grpc::StatusCode::UNAUTHENTICATED:
    case grpc::StatusCode::PERMISSION_DENIED:
      return "denied by " + connection->address() + ": " + status.error_message() +
             // Of a name; a server that knows its callers by name takes none.
             (status.error_message().find("approvers") != std::string::npos
                  ? " (see --by; where the server knows you by name, --token-file or --tls-cert)"
                  : " (see --token-file, --tls-cert)");
    default:
      return status.error_message() + Suggestion(connection, status);
  }
}

ExitCode CodeOf(const grpc::Status& status) {
  switch (status.error_code()) {
    case grpc::StatusCode::OK:
      return kOk;
    case grpc::StatusCode::UNAVAILABLE:
    case grpc::StatusCode::DEADLINE_EXCEEDED:
      return kUnreachable;
    case grpc::StatusCode::UNAUTHENTICATED:
    case grpc::StatusCode::PERMISSION_DENIED:
      return kDenied;
    case grpc::StatusCode::INVALID_ARGUMENT:
    case grpc::StatusCode::OUT_OF_RANGE:
      return kUsage;
    default:
      return kFailed;
  }
}

ExitCode Report(Connection* connection, const grpc::Status& status) {
  if (!status.ok()) Complain(Explain(connection, status));
  return CodeOf(status);
}

Interrupt::Interrupt() {
  sigemptyset(&signals_);
  sigaddset(&signals_, SIGINT);
  sigaddset(&signals_, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &signals_, &before_);
  struct sigaction ignore {};
  ignore.sa_handler = SIG_IGN;
  sigaction(SIGPIPE, &ignore, &pipe_before_);
}

Interrupt::~Interrupt() {
  stop_ = true;
  if (thread_.joinable()) thread_.join();
  sigaction(SIGPIPE, &pipe_before_, nullptr);
  pthread_sigmask(SIG_SETMASK, &before_, nullptr);
}

void Interrupt::Watch(grpc::ClientContext* context) {
  if (thread_.joinable()) {
    stop_ = true;
    thread_.join();
    stop_ = false;
  }
  if (context == nullptr) return;
  thread_ = std::thread([this, context] {
    const timespec tick{.tv_sec = 0, .tv_nsec = 50'000'000};
    while (!stop_) {
      if (sigtimedwait(&signals_, nullptr, &tick) < 0) continue;
      happened_ = true;
      context->TryCancel();
    }
  });
}

bool Interrupt::Sleep(std::chrono::milliseconds time) {
  const timespec wait{.tv_sec = time.count() / 1000, .tv_nsec = time.count() % 1000 * 1'000'000};
  if (sigtimedwait(&signals_, nullptr, &wait) >= 0) happened_ = true;
  return !happened_;
}

}  // namespace bellwether::cli
