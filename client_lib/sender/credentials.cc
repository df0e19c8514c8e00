#include "client_lib/sender/credentials.h"

#include <sys/stat.h>

#include <cstring>

#include "client_lib/src/regular_file.h"

namespace bellwether::client {
namespace {

constexpr size_t kSecretBytesMax = 1 << 20;

// Empty `path` = nothing to read.  False with `*error` set if it cannot be.
bool ReadFile(const char* path, std::string* text, std::string* error) {
  if (path[0] == '\0') return true;
  std::string why;
  if (ReadRegularFile(path, kSecretBytesMax, text, &why)) return true;
  *error = std::string("cannot read ") + path + ": " + why;
  return false;
}

void WarnIfOpen(const char* path, std::string* warning) {
  struct stat info {};
  if (path[0] != '\0' && stat(path, &info) == 0 && (info.st_mode & S_IRWXO) != 0) {
    *warning = std::string(path) + " can be read by every user of this machine";
  }
}

}  // namespace

bool IsLocalServer(std::string_view address) {
  return address.rfind("unix:", 0) == 0 || address.rfind("127.", 0) == 0 || address.rfind("localhost:", 0) == 0 ||
         address.rfind("[::1]:", 0) == 0;
}

grpc::ChannelArguments ClientChannelArguments(std::string_view address) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 20'000);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 8'000);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  if (IsLocalServer(address)) arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  return arguments;
}

Connection OpenConnection(const SenderConfig& config, const std::string& address) {
  Connection connection;
  grpc::SslCredentialsOptions tls;
  if (!ReadFile(config.tls_ca, &tls.pem_root_certs, &connection.error) ||
      !ReadFile(config.tls_cert, &tls.pem_cert_chain, &connection.error) ||
      !ReadFile(config.tls_key, &tls.pem_private_key, &connection.error) ||
      !ReadFile(config.token_file, &connection.token, &connection.error)) {
    return connection;
  }
  while (!connection.token.empty() && std::strchr(" \r\n\t", connection.token.back()) != nullptr)
    connection.token.pop_back();
  const bool encrypted = config.tls_ca[0] != '\0';
  if (!connection.token.empty() && !encrypted && !IsLocalServer(address)) {
    connection.error = "the token is not sent to " + address + " without TLS";
    return connection;
  }
  WarnIfOpen(config.tls_key, &connection.warning);
  WarnIfOpen(config.token_file, &connection.warning);
  connection.channel =
      grpc::CreateCustomChannel(address, encrypted ? grpc::SslCredentials(tls) : grpc::InsecureChannelCredentials(),
                                ClientChannelArguments(address));
  return connection;
}

}  // namespace bellwether::client
