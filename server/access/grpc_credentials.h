// grpc_credentials.h: what a gRPC caller shows.

#ifndef BELLWETHER_SERVER_ACCESS_GRPC_CREDENTIALS_H_
#define BELLWETHER_SERVER_ACCESS_GRPC_CREDENTIALS_H_

#include <grpcpp/server_context.h>

#include "server/access/access.h"

namespace bellwether::server {

// The certificate that TLS verified, the metadatum authorization: Bearer ..., of
// several of which none counts, and what another server passes on (passed_on.h).
Credentials CredentialsOf(const grpc::ServerContextBase& context);

// Access::Identify() with them.  With a null `access` no caller is asked, and
// the grant is null too.
absl::StatusOr<GrantPtr> Identify(Access* access, const grpc::ServerContextBase& context, const char* call);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_ACCESS_GRPC_CREDENTIALS_H_
