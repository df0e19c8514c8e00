// client_check.h: a client's certificate against the revocation list, for gRPC.
//
// gRPC 1.51 reads lists from a folder in OpenSSL's own form, and again only under
// new names.  This check is asked when a handshake is done, before anything is
// read of the connection, and knows the list of that moment.

#ifndef BELLWETHER_SERVER_ACCESS_CLIENT_CHECK_H_
#define BELLWETHER_SERVER_ACCESS_CLIENT_CHECK_H_

#include <grpcpp/security/tls_certificate_verifier.h>

#include <memory>

#include "server/access/tls_files.h"

namespace bellwether::server {

// `watch` outlives every server that has it.
std::shared_ptr<grpc::experimental::CertificateVerifier> ClientCheck(const TlsWatch* watch);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_ACCESS_CLIENT_CHECK_H_
