#include "server/access/authority.h"

#include <arpa/inet.h>
#include <openssl/ec.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/rand.h>
#include <openssl/x509v3.h>

#include <algorithm>
#include <array>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

constexpr char kHostCharacters[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-._*";
constexpr char kUriCharacters[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-._~:/@%+=";

using BioPtr = std::unique_ptr<BIO, OpensslFree<BIO_free>>;
using IntegerPtr = std::unique_ptr<ASN1_INTEGER, OpensslFree<ASN1_INTEGER_free>>;
using TimePtr = std::unique_ptr<ASN1_TIME, OpensslFree<ASN1_TIME_free>>;
using ExtensionPtr = std::unique_ptr<X509_EXTENSION, OpensslFree<X509_EXTENSION_free>>;

absl::Status OpensslError(const char* what) {
  std::array<char, 256> text{};
  ERR_error_string_n(ERR_get_error(), text.data(), text.size());
  ERR_clear_error();
  return absl::InternalError(absl::StrCat(what, ": ", text.data()));
}

std::string TextOf(BIO* bio) {
  char* data = nullptr;
  const long size = BIO_get_mem_data(bio, &data);
  return std::string(data, static_cast<size_t>(size));
}

// Which extension has which value, in OpenSSL's own words.
using Extensions = std::vector<std::pair<int, std::string>>;

// A certificate for `key`, signed by `issuer` with `issuer_key`; by itself if null.
absl::StatusOr<X509Ptr> Sign(const std::string& name, const Validity& validity, const Extensions& extensions,
                             EVP_PKEY* key, X509* issuer, EVP_PKEY* issuer_key) {
  X509Ptr certificate(X509_new());
  X509* const x = certificate.get();
  std::array<unsigned char, 16> serial{};
  if (RAND_bytes(serial.data(), static_cast<int>(serial.size())) != 1) return OpensslError("random numbers");
  serial[0] = static_cast<unsigned char>((serial[0] & 0x7f) | 0x40);  // Positive, and always 16 bytes.
  BIGNUM* const number = BN_bin2bn(serial.data(), static_cast<int>(serial.size()), nullptr);
  BN_to_ASN1_INTEGER(number, X509_get_serialNumber(x));
  BN_free(number);
  X509_set_version(x, X509_VERSION_3);
  ASN1_TIME_set(X509_getm_notBefore(x), validity.begin_unix_s);
  ASN1_TIME_set(X509_getm_notAfter(x), validity.begin_unix_s + validity.days * 86'400);
  X509_NAME_add_entry_by_txt(X509_get_subject_name(x), "CN", MBSTRING_UTF8,
                             reinterpret_cast<const unsigned char*>(name.c_str()), -1, -1, 0);
  X509_set_issuer_name(x, X509_get_subject_name(issuer == nullptr ? x : issuer));
  X509_set_pubkey(x, key);
  X509V3_CTX context;
  X509V3_set_ctx_nodb(&context);
  X509V3_set_ctx(&context, issuer == nullptr ? x : issuer, x, nullptr, nullptr, 0);
  for (const auto& [nid, value] : extensions) {
    const ExtensionPtr extension(X509V3_EXT_conf_nid(nullptr, &context, nid, value.c_str()));
    if (extension == nullptr || X509_add_ext(x, extension.get(), -1) != 1) return OpensslError(value.c_str());
  }
  if (X509_sign(x, issuer_key, EVP_sha256()) == 0) return OpensslError("signing");
  return certificate;
}

absl::StatusOr<IssuedCertificate> ToPem(X509* certificate, EVP_PKEY* key) {
  const BioPtr certificate_text(BIO_new(BIO_s_mem())), key_text(BIO_new(BIO_s_secmem()));
  if (PEM_write_bio_X509(certificate_text.get(), certificate) != 1 ||
      PEM_write_bio_PrivateKey(key_text.get(), key, nullptr, nullptr, 0, nullptr, nullptr) != 1) {
    return OpensslError("writing PEM");
  }
  return IssuedCertificate{TextOf(certificate_text.get()), TextOf(key_text.get())};
}

absl::StatusOr<KeyPtr> NewKey() {
  KeyPtr key(EVP_EC_gen("P-256"));
  if (key == nullptr) return OpensslError("making a key");
  return key;
}

absl::StatusOr<IssuedCertificate> Issue(const std::string& name, const Validity& validity, const Extensions& extensions,
                                        X509* issuer, EVP_PKEY* issuer_key) {
  BW_ASSIGN_OR_RETURN(const KeyPtr key, NewKey());
  BW_ASSIGN_OR_RETURN(const X509Ptr certificate, Sign(name, validity, extensions, key.get(), issuer, issuer_key));
  return ToPem(certificate.get(), key.get());
}

}  // namespace

absl::StatusOr<IssuedCertificate> NewAuthority(const std::string& name, const Validity& validity) {
  BW_ASSIGN_OR_RETURN(const KeyPtr key, NewKey());
  BW_ASSIGN_OR_RETURN(const X509Ptr certificate, Sign(name, validity,
                                                      {{NID_basic_constraints, "critical,CA:TRUE,pathlen:0"},
                                                       {NID_key_usage, "critical,keyCertSign,cRLSign"},
                                                       {NID_subject_key_identifier, "hash"}},
                                                      key.get(), nullptr, key.get()));
  return ToPem(certificate.get(), key.get());
}

absl::StatusOr<Authority> Authority::Load(const std::string& certificate_pem, const std::string& key_pem) {
  std::vector<X509Ptr> certificates = ParseCertificates(certificate_pem);
  const BioPtr bio(BIO_new_mem_buf(key_pem.data(), static_cast<int>(key_pem.size())));
  KeyPtr key(PEM_read_bio_PrivateKey(
      bio.get(), nullptr, [](char*, int, int, void*) { return -1; }, nullptr));
  ERR_clear_error();
  if (certificates.empty() || key == nullptr) return absl::InvalidArgumentError("no certificate and key in PEM");
  if (X509_check_private_key(certificates[0].get(), key.get()) != 1) {
    ERR_clear_error();
    return absl::InvalidArgumentError("the key is not the certificate's");
  }
  return Authority(std::move(certificates[0]), std::move(key));
}

absl::StatusOr<IssuedCertificate> Authority::IssueServer(const std::vector<std::string>& hosts,
                                                         const Validity& validity) const {
  std::string names;
  for (const std::string& host : hosts) {
    std::array<unsigned char, 16> ignored{};
    const bool address =
        inet_pton(AF_INET, host.c_str(), ignored.data()) == 1 || inet_pton(AF_INET6, host.c_str(), ignored.data()) == 1;
    if (!address &&
        (host.empty() || host.size() > 253 || host.find_first_not_of(kHostCharacters) != std::string::npos)) {
      return absl::InvalidArgumentError(absl::StrCat("host \"", host, "\": must be a DNS name or an address"));
    }
    absl::StrAppend(&names, names.empty() ? "" : ",", address ? "IP:" : "DNS:", host);
  }
  if (names.empty()) return absl::InvalidArgumentError("a server's certificate needs a host");
  return Issue(hosts[0].substr(0, 64), validity,
               {{NID_basic_constraints, "critical,CA:FALSE"},
                {NID_key_usage, "critical,digitalSignature"},
                {NID_ext_key_usage, "serverAuth"},
                {NID_subject_key_identifier, "hash"},
                {NID_authority_key_identifier, "keyid"},
                {NID_subject_alt_name, names}},
               certificate_.get(), key_.get());
}

absl::StatusOr<IssuedCertificate> Authority::IssueClient(const std::string& name, const std::string& uri,
                                                         const Validity& validity) const {
  const size_t scheme = uri.find("://");
  if (scheme == std::string::npos || scheme == 0 || scheme + 3 == uri.size() || uri.size() > 1024 ||
      uri.find_first_not_of(kUriCharacters) != std::string::npos) {
    return absl::InvalidArgumentError(absl::StrCat("uri \"", uri, "\": must be as spiffe://bellwether/run/llama"));
  }
  return Issue(name.substr(0, 64), validity,
               {{NID_basic_constraints, "critical,CA:FALSE"},
                {NID_key_usage, "critical,digitalSignature"},
                {NID_ext_key_usage, "clientAuth"},
                {NID_subject_key_identifier, "hash"},
                {NID_authority_key_identifier, "keyid"},
                {NID_subject_alt_name, absl::StrCat("URI:", uri)}},
               certificate_.get(), key_.get());
}

absl::StatusOr<std::string> Authority::Revoke(const std::string& before, const std::string& certificate_pem,
                                              int64_t now_unix_s) const {
  EVP_PKEY* const own = X509_get0_pubkey(certificate_.get());
  CrlPtr list;
  int64_t number = 0;
  if (!before.empty()) {
    std::vector<CrlPtr> lists = ParseRevocations(before);
    if (lists.size() != 1 || X509_CRL_verify(lists[0].get(), own) != 1) {
      ERR_clear_error();
      return absl::InvalidArgumentError("not one revocation list of this authority");
    }
    list = std::move(lists[0]);
    const IntegerPtr last(
        static_cast<ASN1_INTEGER*>(X509_CRL_get_ext_d2i(list.get(), NID_crl_number, nullptr, nullptr)));
    if (last != nullptr) (void)ASN1_INTEGER_get_int64(&number, last.get());
  } else {
    list.reset(X509_CRL_new());
    X509_CRL_set_version(list.get(), X509_CRL_VERSION_2);
    X509_CRL_set_issuer_name(list.get(), X509_get_subject_name(certificate_.get()));
  }
  const TimePtr now(ASN1_TIME_set(nullptr, now_unix_s));
  if (!certificate_pem.empty()) {
    const std::vector<X509Ptr> revoked = ParseCertificates(certificate_pem);
    if (revoked.empty() || X509_verify(revoked[0].get(), own) != 1) {
      ERR_clear_error();
      return absl::InvalidArgumentError("not a certificate of this authority");
    }
    X509_REVOKED* held = nullptr;
    if (X509_CRL_get0_by_cert(list.get(), &held, revoked[0].get()) != 0) {
      return absl::AlreadyExistsError("the certificate has been taken back before");
    }
    X509_REVOKED* const entry = X509_REVOKED_new();
    X509_REVOKED_set_serialNumber(entry, X509_get_serialNumber(revoked[0].get()));
    X509_REVOKED_set_revocationDate(entry, now.get());
    X509_CRL_add0_revoked(list.get(), entry);
    X509_CRL_sort(list.get());
  }
  // A clock that is behind ours must not refuse what was just made.
  const TimePtr begin(ASN1_TIME_set(nullptr, now_unix_s - 300));
  X509_CRL_set1_lastUpdate(list.get(), begin.get());
  X509_CRL_set1_nextUpdate(list.get(), X509_get0_notAfter(certificate_.get()));
  const IntegerPtr next(ASN1_INTEGER_new());
  ASN1_INTEGER_set_int64(next.get(), number + 1);
  X509_CRL_add1_ext_i2d(list.get(), NID_crl_number, next.get(), 0, X509V3_ADD_REPLACE);
  if (X509_CRL_sign(list.get(), key_.get(), EVP_sha256()) == 0) return OpensslError("signing");
  const BioPtr text(BIO_new(BIO_s_mem()));
  if (PEM_write_bio_X509_CRL(text.get(), list.get()) != 1) return OpensslError("writing PEM");
  return TextOf(text.get());
}

}  // namespace bellwether::server
