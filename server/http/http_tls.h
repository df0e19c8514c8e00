// http_tls.h: TLS of the page's port.
//
// 1.2 and later.  A certificate of a client is asked for and must be good if one
// is shown; none is no reason to end the handshake: browsers come by token.

#ifndef BELLWETHER_SERVER_HTTP_HTTP_TLS_H_
#define BELLWETHER_SERVER_HTTP_HTTP_TLS_H_

#include <openssl/ssl.h>

#include <memory>

#include "server/access/tls_files.h"

namespace bellwether::server {

struct SslContextFree {
  void operator()(SSL_CTX* context) const { SSL_CTX_free(context); }
};
using SslContextPtr = std::unique_ptr<SSL_CTX, SslContextFree>;

// Each handshake takes the certificate that `watch` has then; `watch` must outlive
// what is returned.  Null where OpenSSL refuses, for want of memory or of ciphers.
SslContextPtr MakePageTls(TlsWatch* watch);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_HTTP_HTTP_TLS_H_
