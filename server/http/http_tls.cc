#include "server/http/http_tls.h"

namespace bellwether::server {
namespace {

// The certificate of this moment, for one handshake; a rotated one is for the next.
int ChooseCertificate(SSL* ssl, void* watch) {
  const std::shared_ptr<const TlsMaterial> material = static_cast<const TlsWatch*>(watch)->material();
  const std::unique_ptr<STACK_OF(X509), void (*)(STACK_OF(X509)*)> rest(sk_X509_new_null(),
                                                                        [](STACK_OF(X509) * s) { sk_X509_free(s); });
  for (size_t i = 1; i < material->chain.size(); ++i) sk_X509_push(rest.get(), material->chain[i].get());
  if (SSL_use_cert_and_key(ssl, material->chain[0].get(), material->key.get(), rest.get(), 1) != 1) return 0;
  if (material->client_store == nullptr) return 1;
  SSL_set1_verify_cert_store(ssl, material->client_store.get());
  for (const X509Ptr& authority : material->client_ca) SSL_add_client_CA(ssl, authority.get());
  SSL_set_verify(ssl, SSL_VERIFY_PEER, nullptr);  // One that is shown must be good; none is none.
  return 1;
}

}  // namespace

SslContextPtr MakePageTls(TlsWatch* watch) {
  SslContextPtr context(SSL_CTX_new(TLS_server_method()));
  if (context == nullptr) return nullptr;
  SSL_CTX_set_min_proto_version(context.get(), TLS1_2_VERSION);
  SSL_CTX_set_options(context.get(), SSL_OP_NO_RENEGOTIATION | SSL_OP_NO_COMPRESSION | SSL_OP_NO_TICKET);
  // A resumed session would keep a certificate that has been taken back.
  SSL_CTX_set_session_cache_mode(context.get(), SSL_SESS_CACHE_OFF);
  SSL_CTX_set_num_tickets(context.get(), 0);
  SSL_CTX_set_cert_cb(context.get(), ChooseCertificate, watch);
  if (SSL_CTX_set_cipher_list(context.get(), "ECDHE+AESGCM:ECDHE+CHACHA20") != 1) return nullptr;
  return context;
}

}  // namespace bellwether::server
