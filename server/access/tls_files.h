// tls_files.h: the server's certificate and key, and the authorities of
// clients.
//
// Files are checked whenever they change.  A bad or half replaced file is
// reported and not used: gRPC and HTTP both serve from the newest that was
// good.

#ifndef BELLWETHER_SERVER_ACCESS_TLS_FILES_H_
#define BELLWETHER_SERVER_ACCESS_TLS_FILES_H_

#include <openssl/ssl.h>
#include <openssl/x509.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/access/secret_file.h"
#include "server/access/token_file.h"
#include "server/util/clock.h"
#include "server/util/counters.h"

namespace bellwether::server {

struct TlsFiles {
  std::string certificate;  // PEM, the server's first, then what signed it; "" = no TLS
  std::string key;          // PEM
  std::string client_ca;    // PEM of the authorities of clients; "" = no certificate is asked for
  std::string crl;          // PEM, lists of what those have taken back; "" = none.  Needs client_ca.
  bool on() const { return !certificate.empty(); }
};

template <auto free>
struct OpensslFree {
  template <typename T>
  void operator()(T* object) const {
    free(object);
  }
};
using X509Ptr = std::unique_ptr<X509, OpensslFree<X509_free>>;
using KeyPtr = std::unique_ptr<EVP_PKEY, OpensslFree<EVP_PKEY_free>>;
using CrlPtr = std::unique_ptr<X509_CRL, OpensslFree<X509_CRL_free>>;
using StorePtr = std::unique_ptr<X509_STORE, OpensslFree<X509_STORE_free>>;

// What the files held at one time.
struct TlsMaterial {
  std::vector<X509Ptr> chain;  // >= 1; the server's own first
  KeyPtr key;
  std::vector<X509Ptr> client_ca;  // Empty: no client certificates.
  StorePtr client_store;           // Of client_ca, with the revocation lists; null if no certificate is asked for.
  int64_t expires_unix_s = 0;      // Of the first to expire.
  std::string identity_pem;        // Key and chain.
  std::string client_ca_pem;
};

// The message of an error is a line for each file that is bad, which it names.
// NOT_FOUND.  FAILED_PRECONDITION: a key that others may read, a certificate that
// has expired or is of another key, or a revocation list that is past its next
// update or not signed by client_ca.  INVALID_ARGUMENT: no PEM.
absl::StatusOr<std::shared_ptr<const TlsMaterial>> ReadTls(const TlsFiles& files, int64_t now_unix_s);

std::vector<X509Ptr> ParseCertificates(std::string_view pem);
std::vector<CrlPtr> ParseRevocations(std::string_view pem);
// SAN entries of the type URI.
std::vector<std::string> UrisOf(X509* certificate);
// SAN entries of a server: DNS names and addresses, in their order.
std::vector<std::string> HostsOf(X509* certificate);
// PEM of what a peer showed: its own certificate, then what it sent beside it;
// null = nothing.
std::string PemOf(X509* certificate, const STACK_OF(X509) * chain);

// What becomes of a certificate behind its handshake.
struct CertificateVerdict {
  const char* reason = "";  // "" = it is good; else certificate_revoked or certificate_untrusted.
  std::string why;
  bool good() const { return reason[0] == '\0'; }
};
inline constexpr size_t kVerdictsMax = 4096;  // That are kept, of one material.

// The newest good material.  Thread-safe.
class TlsWatch {
 public:
  // Errors as ReadTls().  All must outlive it.
  static absl::StatusOr<std::unique_ptr<TlsWatch>> Open(const TlsFiles& files, Counters* counters, Clock* clock);

  ~TlsWatch();
  TlsWatch(const TlsWatch&) = delete;
  TlsWatch& operator=(const TlsWatch&) = delete;

  std::shared_ptr<const TlsMaterial> material() const;
  // The same for gRPC, which wants files and looks at them by itself: paths in
  // memory of this process, of key and chain in one, and of client_ca ("" = none).
  std::string identity_path() const;
  std::string client_ca_path() const;
  // Checks a client's certificate as TLS does, with the revocation list of this
  // moment: gRPC's own check knows client_ca only.  `chain_pem` is what the
  // client showed, its own first.  UNAUTHENTICATED: names the reason.
  absl::Status CheckClient(std::string_view chain_pem) const;
  // The same of a certificate that a handshake let in before, but for the time:
  // as everywhere in TLS, it counts at the handshake, and a list that is overdue
  // ends no stream.  Each certificate is looked at once per generation().
  CertificateVerdict CheckAgain(std::string_view chain_pem) const;
  // Rises whenever there is new material.
  uint64_t generation() const { return generation_.load(std::memory_order_acquire); }
  // Call each second: reads what has changed.  A bad file leaves what there
  // was, is reported once, and counts in
  // bellwether_tls_reloads_total{result="refused"}.
  void Tick();

 private:
  TlsWatch(const TlsFiles& files, Counters* counters, Clock* clock)
      : files_(files), counters_(counters), clock_(clock) {}
  bool Changed();
  absl::Status Adopt(std::shared_ptr<const TlsMaterial> material);

  const TlsFiles files_;
  Counters* const counters_;
  Clock* const clock_;
  FileStamp certificate_stamp_, key_stamp_, ca_stamp_, crl_stamp_;  // Of Tick()'s thread.
  int64_t warned_unix_s_ = 0;
  int identity_fd_ = -1, client_ca_fd_ = -1;
  std::atomic<uint64_t> generation_ = 0;
  mutable absl::Mutex mutex_;
  std::shared_ptr<const TlsMaterial> material_ ABSL_GUARDED_BY(mutex_);
  mutable std::map<TokenHash, CertificateVerdict> verdicts_ ABSL_GUARDED_BY(mutex_);  // By SHA-256 of the PEM.
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_ACCESS_TLS_FILES_H_
