// authority.h: a small certificate authority, for operators without one.  It
// has a key and a self-signed certificate, which signs the certificates of a
// server and of clients.
//
// Keys are EC P-256, signatures SHA-256.  A certificate holds its purpose: a
// client's cannot serve, a server's cannot ask.  A client is known by its SAN
// URI, and so is not known by a name that the server's host check reads.
//
// Pure functions except for the random numbers; safe from any thread.

#ifndef BELLWETHER_SERVER_ACCESS_AUTHORITY_H_
#define BELLWETHER_SERVER_ACCESS_AUTHORITY_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/access/tls_files.h"

namespace bellwether::server {

// What is issued, as PEM.
struct IssuedCertificate {
  std::string certificate;
  std::string key;
};

struct Validity {
  int64_t begin_unix_s = 0;
  int64_t days = 0;  // 1..36500
};

// INTERNAL: OpenSSL's words.
absl::StatusOr<IssuedCertificate> NewAuthority(const std::string& name, const Validity& validity);

class Authority {
 public:
  // INVALID_ARGUMENT: no PEM, or the key of another certificate.
  static absl::StatusOr<Authority> Load(const std::string& certificate_pem, const std::string& key_pem);

  // For every host: a DNS name or an address.  INVALID_ARGUMENT: none, or one is
  // neither.
  absl::StatusOr<IssuedCertificate> IssueServer(const std::vector<std::string>& hosts, const Validity& validity) const;
  // INVALID_ARGUMENT: `uri` is not scheme://...
  absl::StatusOr<IssuedCertificate> IssueClient(const std::string& name, const std::string& uri,
                                                const Validity& validity) const;
  // The list `before` ("" = none yet), PEM, and the certificate beside it ("" =
  // none: an empty list).  It counts as long as the authority does.
  // INVALID_ARGUMENT: not a list, or not a certificate, of this authority.
  // ALREADY_EXISTS: it holds the certificate.
  absl::StatusOr<std::string> Revoke(const std::string& before, const std::string& certificate_pem,
                                     int64_t now_unix_s) const;

 private:
  Authority(X509Ptr certificate, KeyPtr key) : certificate_(std::move(certificate)), key_(std::move(key)) {}
  X509Ptr certificate_;
  KeyPtr key_;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_ACCESS_AUTHORITY_H_
