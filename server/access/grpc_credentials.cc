#include "server/access/grpc_credentials.h"

#include <grpc/grpc_security_constants.h>
#include <grpcpp/security/auth_context.h>

#include <iterator>
#include <string>

#include "absl/strings/match.h"

namespace bellwether::server {

Credentials CredentialsOf(const grpc::ServerContextBase& context) {
  Credentials credentials{.face = Credentials::Face::kGrpc, .peer = context.peer()};
  const std::shared_ptr<const grpc::AuthContext> auth = context.auth_context();
  if (auth != nullptr && auth->IsPeerAuthenticated()) {
    std::vector<std::string>& uris = credentials.certificate.emplace();
    for (const grpc::string_ref& uri : auth->FindPropertyValues(GRPC_PEER_URI_PROPERTY_NAME)) {
      uris.emplace_back(uri.data(), uri.size());
    }
    // His own may stand in both: that is no harm.
    for (const char* const name : {GRPC_X509_PEM_CERT_PROPERTY_NAME, GRPC_X509_PEM_CERT_CHAIN_PROPERTY_NAME}) {
      for (const grpc::string_ref& pem : auth->FindPropertyValues(name)) {
        credentials.certificate_pem.append(pem.data(), pem.size());
      }
    }
  }
  const auto passed_on = context.client_metadata().find(kPassedOnMetadatum);
  if (passed_on != context.client_metadata().end()) {
    credentials.passed_on = std::string(passed_on->second.data(), passed_on->second.size());
  }
  const auto [begin, end] = context.client_metadata().equal_range("authorization");
  if (begin == end) return credentials;
  constexpr absl::string_view kBearer = "Bearer ";
  const absl::string_view value(begin->second.data(), begin->second.size());
  const bool usable = std::next(begin) == end && absl::StartsWithIgnoreCase(value, kBearer);
  credentials.token = usable ? std::string(value.substr(kBearer.size())) : std::string();
  return credentials;
}

absl::StatusOr<GrantPtr> Identify(Access* access, const grpc::ServerContextBase& context, const char* call) {
  if (access == nullptr) return GrantPtr();
  return access->Identify(CredentialsOf(context), call);
}

}  // namespace bellwether::server
