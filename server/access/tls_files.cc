#include "server/access/tls_files.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/access/token_file.h"
#include "server/util/log.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

constexpr int64_t kDaySeconds = 86'400;
constexpr int64_t kWarnSeconds = 14 * kDaySeconds;

using BioPtr = std::unique_ptr<BIO, OpensslFree<BIO_free>>;
using StackPtr = std::unique_ptr<STACK_OF(X509), decltype([](STACK_OF(X509) * stack) { sk_X509_free(stack); })>;
using StoreContextPtr = std::unique_ptr<X509_STORE_CTX, OpensslFree<X509_STORE_CTX_free>>;
using NamesPtr = std::unique_ptr<GENERAL_NAMES, OpensslFree<GENERAL_NAMES_free>>;

BioPtr Reading(std::string_view text) { return BioPtr(BIO_new_mem_buf(text.data(), static_cast<int>(text.size()))); }

int64_t UnixSeconds(const ASN1_TIME* time) {
  std::tm parts{};
  return ASN1_TIME_to_tm(time, &parts) == 1 ? timegm(&parts) : 0;
}

// Puts `text` where `*fd` leads, at once; a new descriptor if it is -1.
absl::Status Publish(const std::string& text, int* fd) {
  const int fresh = memfd_create("bellwether-tls", MFD_CLOEXEC);
  const bool whole = fresh >= 0 && write(fresh, text.data(), text.size()) == static_cast<ssize_t>(text.size());
  if (whole && *fd < 0) {
    *fd = fresh;
    return absl::OkStatus();
  }
  const bool swapped = whole && dup3(fresh, *fd, O_CLOEXEC) >= 0;
  const int error = errno;
  if (fresh >= 0) close(fresh);
  return swapped ? absl::OkStatus() : absl::InternalError(absl::StrCat("memfd_create: ", std::strerror(error)));
}

absl::StatusOr<std::vector<X509Ptr>> ReadCertificates(const std::string& path, std::string* pem) {
  BW_ASSIGN_OR_RETURN(const std::string text, ReadGuardedFile(path, Secrecy::kIntegrity));
  std::vector<X509Ptr> certificates = ParseCertificates(text);
  if (certificates.empty()) return absl::InvalidArgumentError(absl::StrCat(path, ": holds no certificate in PEM"));
  absl::StrAppend(pem, text, "\n");
  return certificates;
}

absl::StatusOr<KeyPtr> ReadKey(const std::string& path, std::string* pem) {
  BW_ASSIGN_OR_RETURN(std::string text, ReadGuardedFile(path, Secrecy::kSecret));
  // A key that wants a passphrase is refused, not asked about.
  KeyPtr key(PEM_read_bio_PrivateKey(
      Reading(text).get(), nullptr, [](char*, int, int, void*) { return -1; }, nullptr));
  if (key != nullptr) absl::StrAppend(pem, text, "\n");
  OPENSSL_cleanse(text.data(), text.size());
  ERR_clear_error();
  if (key == nullptr)
    return absl::InvalidArgumentError(absl::StrCat(path, ": holds no private key in PEM without a passphrase"));
  return key;
}

// What TLS would say to this chain: X509_V_OK, or why not.  `prepare` sets what
// is to be looked at otherwise.
template <typename Prepare>
int Verify(X509_STORE* store, const std::vector<X509Ptr>& chain, const Prepare& prepare) {
  const StackPtr rest(sk_X509_new_null());
  for (size_t i = 1; i < chain.size(); ++i) sk_X509_push(rest.get(), chain[i].get());
  const StoreContextPtr context(X509_STORE_CTX_new());
  X509_STORE_CTX_init(context.get(), store, chain[0].get(), rest.get());
  X509_STORE_CTX_set_default(context.get(), "ssl_client");
  prepare(context.get());
  const int error = X509_verify_cert(context.get()) == 1 ? X509_V_OK : X509_STORE_CTX_get_error(context.get());
  ERR_clear_error();
  return error;
}

// Which Counter a store's refusals count in.
int CounterIndex() {
  static const int index = X509_STORE_get_ex_new_index(0, nullptr, nullptr, nullptr, nullptr);
  return index;
}

// Of an authority without a list nothing was taken back.
int OnVerifiedAgain(int ok, X509_STORE_CTX* context) {
  if (X509_STORE_CTX_get_error(context) != X509_V_ERR_UNABLE_TO_GET_CRL) return ok;
  X509_STORE_CTX_set_error(context, X509_V_OK);
  return 1;
}

// In a handshake, which counts.
int OnVerified(int ok, X509_STORE_CTX* context) {
  ok = OnVerifiedAgain(ok, context);
  const int error = X509_STORE_CTX_get_error(context);
  auto* const revoked =
      static_cast<Counter*>(X509_STORE_get_ex_data(X509_STORE_CTX_get0_store(context), CounterIndex()));
  if (error == X509_V_ERR_CERT_REVOKED && revoked != nullptr) revoked->Add();
  return ok;
}

absl::Status AddRevocations(const std::string& path, int64_t now_unix_s, TlsMaterial* material) {
  BW_ASSIGN_OR_RETURN(const std::string text, ReadGuardedFile(path, Secrecy::kIntegrity));
  const std::vector<CrlPtr> lists = ParseRevocations(text);
  if (lists.empty()) return absl::InvalidArgumentError(absl::StrCat(path, ": holds no revocation list in PEM"));
  for (const CrlPtr& list : lists) {
    const auto signed_it = [&list](const X509Ptr& authority) {
      return X509_NAME_cmp(X509_get_subject_name(authority.get()), X509_CRL_get_issuer(list.get())) == 0 &&
             X509_CRL_verify(list.get(), X509_get0_pubkey(authority.get())) == 1;
    };
    if (std::none_of(material->client_ca.begin(), material->client_ca.end(), signed_it)) {
      ERR_clear_error();
      return absl::FailedPreconditionError(
          absl::StrCat(path, ": holds a list that nobody of tls.client_ca_file has signed"));
    }
    const ASN1_TIME* const next = X509_CRL_get0_nextUpdate(list.get());
    if (next != nullptr && UnixSeconds(next) <= now_unix_s) {
      return absl::FailedPreconditionError(
          absl::StrCat(path, ": was to be replaced by a newer list before ", FormatUnixSeconds(UnixSeconds(next))));
    }
    X509_STORE_add_crl(material->client_store.get(), list.get());
  }
  // Also of the authorities between: what one of them signed goes with it.
  X509_STORE_set_flags(material->client_store.get(), X509_V_FLAG_CRL_CHECK | X509_V_FLAG_CRL_CHECK_ALL);
  X509_STORE_set_verify_cb(material->client_store.get(), OnVerified);
  return absl::OkStatus();
}

// What is wrong with several files: a line each, with the code of the first.
class Findings {
 public:
  void Add(const absl::Status& status) {
    if (status.ok()) return;
    all_ = all_.ok() ? status : absl::Status(all_.code(), absl::StrCat(all_.message(), "\n", status.message()));
  }
  template <typename T>
  bool Take(absl::StatusOr<T> read, T* target) {
    Add(read.status());
    if (read.ok()) *target = *std::move(read);
    return read.ok();
  }
  const absl::Status& status() const { return all_; }

 private:
  absl::Status all_;
};

// Of material->chain, read from `path`; says when its first certificate expires.
absl::Status CheckTimes(const std::string& path, int64_t now_unix_s, TlsMaterial* material) {
  material->expires_unix_s = INT64_MAX;
  for (const X509Ptr& certificate : material->chain) {
    const int64_t expires = UnixSeconds(X509_get0_notAfter(certificate.get()));
    material->expires_unix_s = std::min(material->expires_unix_s, expires);
  }
  if (now_unix_s >= material->expires_unix_s) {
    return absl::FailedPreconditionError(
        absl::StrCat(path, ": expired at ", FormatUnixSeconds(material->expires_unix_s)));
  }
  if (const int64_t begins = UnixSeconds(X509_get0_notBefore(material->chain[0].get())); now_unix_s < begins) {
    return absl::FailedPreconditionError(absl::StrCat(path, ": counts only from ", FormatUnixSeconds(begins)));
  }
  return absl::OkStatus();
}

}  // namespace

std::vector<CrlPtr> ParseRevocations(std::string_view pem) {
  std::vector<CrlPtr> lists;
  const BioPtr bio = Reading(pem);
  while (X509_CRL* const next = PEM_read_bio_X509_CRL(bio.get(), nullptr, nullptr, nullptr)) lists.emplace_back(next);
  ERR_clear_error();
  return lists;
}

std::vector<X509Ptr> ParseCertificates(std::string_view pem) {
  std::vector<X509Ptr> certificates;
  const BioPtr bio = Reading(pem);
  while (X509* const next = PEM_read_bio_X509(bio.get(), nullptr, nullptr, nullptr)) certificates.emplace_back(next);
  ERR_clear_error();  // The last one is that there are no more.
  return certificates;
}

std::vector<std::string> UrisOf(X509* certificate) {
  std::vector<std::string> uris;
  const NamesPtr names(
      static_cast<GENERAL_NAMES*>(X509_get_ext_d2i(certificate, NID_subject_alt_name, nullptr, nullptr)));
  for (int i = 0; names != nullptr && i < sk_GENERAL_NAME_num(names.get()); ++i) {
    const GENERAL_NAME* const name = sk_GENERAL_NAME_value(names.get(), i);
    if (name->type != GEN_URI) continue;
    const ASN1_IA5STRING* const text = name->d.uniformResourceIdentifier;
    uris.emplace_back(reinterpret_cast<const char*>(ASN1_STRING_get0_data(text)), ASN1_STRING_length(text));
  }
  return uris;
}

std::vector<std::string> HostsOf(X509* certificate) {
  std::vector<std::string> hosts;
  const NamesPtr names(
      static_cast<GENERAL_NAMES*>(X509_get_ext_d2i(certificate, NID_subject_alt_name, nullptr, nullptr)));
  for (int i = 0; names != nullptr && i < sk_GENERAL_NAME_num(names.get()); ++i) {
    const GENERAL_NAME* const name = sk_GENERAL_NAME_value(names.get(), i);
    if (name->type == GEN_DNS) {
      const ASN1_IA5STRING* const text = name->d.dNSName;
      hosts.emplace_back(reinterpret_cast<const char*>(ASN1_STRING_get0_data(text)), ASN1_STRING_length(text));
    } else if (name->type == GEN_IPADD) {
      const ASN1_OCTET_STRING* const bytes = name->d.iPAddress;
      std::array<char, INET6_ADDRSTRLEN> text{};
      const int family = ASN1_STRING_length(bytes) == 4 ? AF_INET : AF_INET6;
      if (family == AF_INET6 && ASN1_STRING_length(bytes) != 16) continue;
      if (inet_ntop(family, ASN1_STRING_get0_data(bytes), text.data(), text.size()) != nullptr) {
        hosts.emplace_back(text.data());
      }
    }
  }
  return hosts;
}

std::string PemOf(X509* certificate, const STACK_OF(X509) * chain) {
  const BioPtr bio(BIO_new(BIO_s_mem()));
  if (certificate != nullptr) PEM_write_bio_X509(bio.get(), certificate);
  for (int i = 0; chain != nullptr && i < sk_X509_num(chain); ++i) {
    PEM_write_bio_X509(bio.get(), sk_X509_value(chain, i));
  }
  char* text = nullptr;
  const auto size = BIO_get_mem_data(bio.get(), &text);
  return size > 0 ? std::string(text, static_cast<size_t>(size)) : std::string();
}

absl::StatusOr<std::shared_ptr<const TlsMaterial>> ReadTls(const TlsFiles& files, int64_t now_unix_s) {
  auto material = std::make_shared<TlsMaterial>();
  Findings findings;
  const bool chain = findings.Take(ReadCertificates(files.certificate, &material->identity_pem), &material->chain);
  const bool key = findings.Take(ReadKey(files.key, &material->identity_pem), &material->key);
  if (chain && key && X509_check_private_key(material->chain[0].get(), material->key.get()) != 1) {
    findings.Add(absl::FailedPreconditionError(absl::StrCat(files.key, ": is not the key of ", files.certificate)));
  }
  if (chain) findings.Add(CheckTimes(files.certificate, now_unix_s, material.get()));
  if (!files.client_ca.empty()) {
    if (findings.Take(ReadCertificates(files.client_ca, &material->client_ca_pem), &material->client_ca)) {
      material->client_store.reset(X509_STORE_new());
      for (const X509Ptr& certificate : material->client_ca) {
        X509_STORE_add_cert(material->client_store.get(), certificate.get());
      }
      if (!files.crl.empty()) findings.Add(AddRevocations(files.crl, now_unix_s, material.get()));
    } else if (!files.crl.empty()) {  // Signed by whom is not known, but it is to be there.
      findings.Add(ReadGuardedFile(files.crl, Secrecy::kIntegrity).status());
    }
  }
  ERR_clear_error();
  BW_RETURN_IF_ERROR(findings.status());
  return material;
}

absl::StatusOr<std::unique_ptr<TlsWatch>> TlsWatch::Open(const TlsFiles& files, Counters* counters, Clock* clock) {
  std::unique_ptr<TlsWatch> watch(new TlsWatch(files, counters, clock));
  (void)watch->Changed();
  BW_ASSIGN_OR_RETURN(auto material, ReadTls(files, clock->UnixMillis() / 1000));
  BW_RETURN_IF_ERROR(watch->Adopt(std::move(material)));
  return watch;
}

TlsWatch::~TlsWatch() {
  for (const int fd : {identity_fd_, client_ca_fd_}) {
    if (fd >= 0) close(fd);
  }
}

std::string TlsWatch::identity_path() const { return absl::StrCat("/proc/self/fd/", identity_fd_); }

std::string TlsWatch::client_ca_path() const {
  return client_ca_fd_ < 0 ? "" : absl::StrCat("/proc/self/fd/", client_ca_fd_);
}

std::shared_ptr<const TlsMaterial> TlsWatch::material() const {
  absl::MutexLock lock(&mutex_);
  return material_;
}

bool TlsWatch::Changed() {
  bool changed = certificate_stamp_.Changed(files_.certificate);
  changed = key_stamp_.Changed(files_.key) || changed;
  changed = (!files_.crl.empty() && crl_stamp_.Changed(files_.crl)) || changed;
  return (!files_.client_ca.empty() && ca_stamp_.Changed(files_.client_ca)) || changed;
}

absl::Status TlsWatch::Adopt(std::shared_ptr<const TlsMaterial> material) {
  BW_RETURN_IF_ERROR(Publish(material->identity_pem, &identity_fd_));
  if (!material->client_ca_pem.empty()) BW_RETURN_IF_ERROR(Publish(material->client_ca_pem, &client_ca_fd_));
  counters_->gauge("bellwether_tls_certificate_expiry_timestamp_seconds")
      ->Set(static_cast<double>(material->expires_unix_s));
  if (material->client_store != nullptr) {
    X509_STORE_set_ex_data(material->client_store.get(), CounterIndex(),
                           counters_->counter("bellwether_tls_revoked_refused_total"));
  }
  absl::MutexLock lock(&mutex_);
  material_ = std::move(material);
  verdicts_.clear();
  generation_.fetch_add(1, std::memory_order_acq_rel);
  return absl::OkStatus();
}

absl::Status TlsWatch::CheckClient(std::string_view chain_pem) const {
  const std::shared_ptr<const TlsMaterial> material = this->material();
  const std::vector<X509Ptr> chain = ParseCertificates(chain_pem);
  if (material->client_store == nullptr) return absl::OkStatus();  // None was asked for.
  if (chain.empty()) return absl::UnauthenticatedError("no certificate");
  const int error = Verify(material->client_store.get(), chain, [](X509_STORE_CTX*) {});
  if (error == X509_V_OK) return absl::OkStatus();
  return absl::UnauthenticatedError(X509_verify_cert_error_string(error));
}

CertificateVerdict TlsWatch::CheckAgain(std::string_view chain_pem) const {
  const TokenHash hash = HashToken(chain_pem);
  std::shared_ptr<const TlsMaterial> material;
  {
    absl::MutexLock lock(&mutex_);
    const auto known = verdicts_.find(hash);
    if (known != verdicts_.end()) return known->second;
    material = material_;
  }
  const std::vector<X509Ptr> chain = ParseCertificates(chain_pem);
  if (material->client_store == nullptr || chain.empty()) return {};  // None was asked for.
  const int error = Verify(material->client_store.get(), chain, [](X509_STORE_CTX* context) {
    X509_STORE_CTX_set_flags(context, X509_V_FLAG_NO_CHECK_TIME);
    X509_STORE_CTX_set_verify_cb(context, OnVerifiedAgain);
  });
  CertificateVerdict verdict;
  if (error == X509_V_ERR_CERT_REVOKED) {
    verdict = {"certificate_revoked", "the certificate was revoked"};
  } else if (error != X509_V_OK) {
    verdict = {"certificate_untrusted",
               absl::StrCat("nobody of tls.client_ca_file stands for the certificate any more: ",
                            X509_verify_cert_error_string(error))};
  }
  absl::MutexLock lock(&mutex_);
  if (material != material_) return verdict;  // Asked again: the generation has risen.
  if (verdicts_.size() >= kVerdictsMax) verdicts_.clear();
  verdicts_.emplace(hash, verdict);
  return verdict;
}

void TlsWatch::Tick() {
  const int64_t now_unix_s = clock_->UnixMillis() / 1000;
  if (Changed()) {
    auto material = ReadTls(files_, now_unix_s);
    const absl::Status adopted = material.ok() ? Adopt(*material) : material.status();
    counters_->counter("bellwether_tls_reloads_total", {{"result", adopted.ok() ? "taken" : "refused"}})->Add();
    if (!adopted.ok()) {
      LogError("the certificate stays as it was: {}", std::string(adopted.message()));
      return;
    }
    LogInfo("certificate read again from {}, good until {}", files_.certificate,
            FormatUnixSeconds((*material)->expires_unix_s));
    warned_unix_s_ = 0;
  }
  const int64_t expires = this->material()->expires_unix_s;
  if (expires - now_unix_s < kWarnSeconds && now_unix_s - warned_unix_s_ > kDaySeconds) {
    warned_unix_s_ = now_unix_s;
    LogWarning("{} expires at {}", files_.certificate, FormatUnixSeconds(expires));
  }
}

}  // namespace bellwether::server
