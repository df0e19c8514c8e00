// tls_files.h: the server's certificate and key, and who may sign clients'.
//
// Files are checked whenever they change, and what is bad, or half replaced, is
// told and goes no further: both faces serve from the newest that was good.

#ifndef BELLWETHER_SERVER_ACCESS_TLS_FILES_H_
#define BELLWETHER_SERVER_ACCESS_TLS_FILES_H_

#include <openssl/ssl.h>
#include <openssl/x509.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/access/secret_file.h"
#include "server/util/clock.h"
#include "server/util/counters.h"

namespace bellwether::server {

struct TlsFiles {
  std::string certificate;  // PEM, the server's first, then what signed it; "" = no TLS
  std::string key;          // PEM
  std::string client_ca;    // PEM, who may sign clients' certificates; "" = none are asked for
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
using StorePtr = std::unique_ptr<X509_STORE, OpensslFree<X509_STORE_free>>;

// What the files held at one time.
struct TlsMaterial {
  std::vector<X509Ptr> chain;  // >= 1; the server's own first
  KeyPtr key;
  std::vector<X509Ptr> client_ca;  // Empty: no client certificates.
  StorePtr client_store;           // Of client_ca; null likewise.
  int64_t expires_unix_s = 0;      // Of the first to expire.
  std::string identity_pem;        // Key and chain.
  std::string client_ca_pem;
};

// NOT_FOUND, FAILED_PRECONDITION (a key that others may read; a certificate that
// has expired, or is of another key), INVALID_ARGUMENT (no PEM): names the file.
absl::StatusOr<std::shared_ptr<const TlsMaterial>> ReadTls(const TlsFiles& files, int64_t now_unix_s);

std::vector<X509Ptr> ParseCertificates(std::string_view pem);
// SAN entries of the type URI.
std::vector<std::string> UrisOf(X509* certificate);

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
  // Call each second: reads what has changed; a bad file leaves what there was,
  // is told once, and counts in bellwether_tls_reloads_total{result="refused"}.
  void Tick();

 private:
  TlsWatch(const TlsFiles& files, Counters* counters, Clock* clock)
      : files_(files), counters_(counters), clock_(clock) {}
  bool Changed();
  absl::Status Adopt(std::shared_ptr<const TlsMaterial> material);

  const TlsFiles files_;
  Counters* const counters_;
  Clock* const clock_;
  FileStamp certificate_stamp_, key_stamp_, ca_stamp_;  // Of Tick()'s thread.
  int64_t warned_unix_s_ = 0;
  int identity_fd_ = -1, client_ca_fd_ = -1;
  mutable absl::Mutex mutex_;
  std::shared_ptr<const TlsMaterial> material_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_ACCESS_TLS_FILES_H_
