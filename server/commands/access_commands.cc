#include "server/commands/access_commands.h"

#include <fcntl.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>
#include <sys/file.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstring>
#include <filesystem>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/access/access_file.h"
#include "server/access/authority.h"
#include "server/access/secret_file.h"
#include "server/access/token_file.h"
#include "server/util/clock.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

constexpr char kDefaultUri[] = "spiffe://bellwether/client/";
constexpr mode_t kPublic = 0644;

int64_t NowSeconds() { return Clock::System()->UnixMillis() / 1000; }

// A clock that is behind ours must not refuse what was just made.
Validity From(int64_t days) { return {.begin_unix_s = NowSeconds() - 300, .days = days}; }

std::string Beside(const std::string& folder, const std::string& file) {
  return (std::filesystem::path(folder) / file).string();
}

std::string HostName() {
  std::array<char, HOST_NAME_MAX + 1> name{};
  return gethostname(name.data(), name.size() - 1) == 0 ? std::string(name.data()) : std::string();
}

absl::Status Write(const std::string& folder, const std::string& name, const IssuedCertificate& issued, bool replace) {
  const std::string key = Beside(folder, name + ".key"), pem = Beside(folder, name + ".pem");
  for (const std::string& path : {key, pem}) {
    if (!replace && std::filesystem::exists(path)) return absl::AlreadyExistsError(path + ": is there already");
  }
  BW_RETURN_IF_ERROR(WriteSecretFile(key, issued.key, replace));
  BW_RETURN_IF_ERROR(WriteSecretFile(pem, issued.certificate, replace, kPublic, Secrecy::kIntegrity));
  std::printf("wrote %s and %s\n", pem.c_str(), key.c_str());
  return absl::OkStatus();
}

absl::StatusOr<Authority> LoadAuthority(const std::string& folder) {
  BW_ASSIGN_OR_RETURN(const std::string certificate, ReadGuardedFile(Beside(folder, "ca.pem"), Secrecy::kIntegrity));
  BW_ASSIGN_OR_RETURN(const std::string key, ReadGuardedFile(Beside(folder, "ca.key"), Secrecy::kSecret));
  return Authority::Load(certificate, key);
}

// This machine by its names, and `more`.
std::vector<std::string> Hosts(const std::vector<std::string>& more) {
  std::vector<std::string> hosts = more;
  for (const std::string& host : {HostName(), std::string("localhost"), std::string("127.0.0.1"), std::string("::1")}) {
    if (!host.empty() && std::find(hosts.begin(), hosts.end(), host) == hosts.end()) hosts.push_back(host);
  }
  return hosts;
}

// The names of the server's certificate that is there: others know the server by them.
absl::StatusOr<std::vector<std::string>> HostsSoFar(const std::string& folder) {
  const std::string path = Beside(folder, "server.pem");
  if (!std::filesystem::exists(path)) return std::vector<std::string>();
  BW_ASSIGN_OR_RETURN(const std::string text, ReadGuardedFile(path, Secrecy::kIntegrity));
  const std::vector<X509Ptr> certificates = ParseCertificates(text);
  if (certificates.empty()) return std::vector<std::string>();
  return HostsOf(certificates[0].get());
}

// One process at a time changes the file, so that none loses what another added.
absl::StatusOr<int> Lock(const std::string& path) {
  const std::string lock_path = path + ".lock";
  const int lock = open(lock_path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (lock >= 0 && flock(lock, LOCK_EX) == 0) return lock;
  const int error = errno;
  if (lock >= 0) close(lock);
  return absl::InternalError(absl::StrCat(lock_path, ": ", std::strerror(error)));
}

// `certificate` "" = none: makes an empty list where there is none.
absl::Status Revoke(const std::string& folder, const std::string& certificate) {
  const std::string path = Beside(folder, "crl.pem");
  BW_ASSIGN_OR_RETURN(const Authority authority, LoadAuthority(folder));
  std::string shown;
  if (!certificate.empty()) {
    BW_ASSIGN_OR_RETURN(shown, ReadGuardedFile(certificate, Secrecy::kIntegrity));
  }
  BW_ASSIGN_OR_RETURN(const int lock, Lock(path));
  const auto unlock = absl::MakeCleanup([lock] { close(lock); });
  std::string before;
  if (std::filesystem::exists(path)) {
    BW_ASSIGN_OR_RETURN(before, ReadGuardedFile(path, Secrecy::kIntegrity));
  }
  const absl::StatusOr<std::string> list = authority.Revoke(before, shown, NowSeconds());
  if (!list.ok()) {
    return absl::Status(list.status().code(),
                        absl::StrCat(certificate.empty() ? path : certificate, ": ", list.status().message()));
  }
  BW_RETURN_IF_ERROR(WriteSecretFile(path, *list, /*replace=*/true, kPublic, Secrecy::kIntegrity));
  std::printf("wrote %s\n", path.c_str());
  return absl::OkStatus();
}

absl::Status MakeAuthority(const std::string& folder, const std::vector<std::string>& hosts, int64_t days,
                           int64_t authority_days) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) return absl::InternalError(absl::StrCat(folder, ": ", error.message()));
  BW_ASSIGN_OR_RETURN(const IssuedCertificate issued, NewAuthority("Bellwether authority", From(authority_days)));
  BW_RETURN_IF_ERROR(Write(folder, "ca", issued, /*replace=*/false));
  BW_ASSIGN_OR_RETURN(const Authority authority, Authority::Load(issued.certificate, issued.key));
  BW_ASSIGN_OR_RETURN(const IssuedCertificate server, authority.IssueServer(hosts, From(days)));
  BW_RETURN_IF_ERROR(Write(folder, "server", server, /*replace=*/false));
  return Revoke(folder, "");
}

absl::Status Show(const std::string& path) {
  BW_ASSIGN_OR_RETURN(const std::string text, ReadGuardedFile(path, Secrecy::kIntegrity));
  const std::vector<X509Ptr> certificates = ParseCertificates(text);
  if (certificates.empty()) return absl::InvalidArgumentError(absl::StrCat(path, ": holds no certificate in PEM"));
  for (const X509Ptr& certificate : certificates) {
    const std::unique_ptr<BIO, OpensslFree<BIO_free>> out(BIO_new_fp(stdout, BIO_NOCLOSE));
    BIO_printf(out.get(), "subject  ");
    X509_NAME_print_ex(out.get(), X509_get_subject_name(certificate.get()), 0, XN_FLAG_RFC2253);
    BIO_printf(out.get(), "\nissuer   ");
    X509_NAME_print_ex(out.get(), X509_get_issuer_name(certificate.get()), 0, XN_FLAG_RFC2253);
    BIO_printf(out.get(), "\nfrom     ");
    ASN1_TIME_print(out.get(), X509_get0_notBefore(certificate.get()));
    BIO_printf(out.get(), "\nuntil    ");
    ASN1_TIME_print(out.get(), X509_get0_notAfter(certificate.get()));
    BIO_printf(out.get(), "\n");
    const int names = X509_get_ext_by_NID(certificate.get(), NID_subject_alt_name, -1);
    if (names >= 0) {
      BIO_printf(out.get(), "names    ");
      X509V3_EXT_print(out.get(), X509_get_ext(certificate.get(), names), 0, 0);
      BIO_printf(out.get(), "\n");
    }
  }
  return absl::OkStatus();
}

// Reads the tokens, lets `change` change them, writes them back.
template <typename Change>
absl::Status ChangeTokens(const std::string& path, Change change) {
  BW_ASSIGN_OR_RETURN(const int lock, Lock(path));
  const auto unlock = absl::MakeCleanup([lock] { close(lock); });
  std::vector<StoredToken> tokens;
  if (std::filesystem::exists(path)) {
    BW_ASSIGN_OR_RETURN(tokens, ReadTokens(path));
  }
  BW_RETURN_IF_ERROR(change(&tokens));
  return WriteTokens(path, tokens);
}

// "90d", "12h"; "never" = INT64_MAX.
absl::StatusOr<int64_t> ParseExpiry(const std::string& text) {
  if (text == "never") return INT64_MAX;
  int64_t count = 0;
  const int64_t unit = absl::EndsWith(text, "d") ? 86'400 : absl::EndsWith(text, "h") ? 3'600 : 0;
  if (unit == 0 || !absl::SimpleAtoi(text.substr(0, text.size() - 1), &count) || count < 1 || count > 36'500) {
    return absl::InvalidArgumentError(absl::StrCat("--expires = ", text, ": must be 1h to 36500d, or never"));
  }
  return NowSeconds() + count * unit;
}

int ExitCodeOf(const absl::Status& status) { return status.ok() ? kCommandOk : Report(status); }

}  // namespace

void AccessCommands::AddTo(CLI::App* app) {
  CLI::App* const cert = app->add_subcommand("cert", "certificates of an authority of one's own, for TLS");
  cert->require_subcommand(1);
  const auto days = [this](CLI::App* command) {
    command->add_option("--days", days_, "how long it counts")->check(CLI::Range(1, 36'500))->capture_default_str();
  };
  const auto hosts = [this](CLI::App* command) {
    command->add_option("--host", hosts_, "a name or address of the server, beside this machine's own; may be repeated")
        ->allow_extra_args(false);
  };
  cert_init_ = cert->add_subcommand("init", "make an authority and a server's certificate in a folder");
  cert_init_->add_option("folder", folder_, "where to: ca.pem, ca.key, server.pem, server.key, crl.pem")->required();
  hosts(cert_init_);
  days(cert_init_);
  cert_server_ = cert->add_subcommand(
      "server", "make the server's certificate anew, with the names that it had; a running server takes it up");
  cert_server_->add_option("folder", folder_, "where ca.pem and ca.key are")->required();
  hosts(cert_server_);
  days(cert_server_);
  cert_client_ = cert->add_subcommand("client", "make a client's certificate");
  cert_client_->add_option("folder", folder_, "where ca.pem and ca.key are")->required();
  cert_client_->add_option("name", name_, "its files' name, and the end of its URI")->required();
  cert_client_->add_option("--uri", uri_,
                           "the name by which access_file knows it [" + std::string(kDefaultUri) + "NAME]");
  cert_client_->add_option("--out", out_, "another folder for the files");
  cert_client_->add_flag("--replace", replace_, "in the place of the files that are there, as to renew them");
  days(cert_client_);
  cert_revoke_ = cert->add_subcommand("revoke", "take a client's certificate back; a running server refuses it");
  cert_revoke_->add_option("folder", folder_, "where ca.pem and ca.key are, and crl.pem is written")->required();
  cert_revoke_->add_option("certificate", file_, "its PEM; without it crl.pem is written anew, as it was or empty");
  cert_show_ = cert->add_subcommand("show", "say whose a certificate is and how long it counts");
  cert_show_->add_option("file", file_, "the PEM")->required();

  CLI::App* const token = app->add_subcommand("token", "tokens of access_file's identities");
  token->require_subcommand(1);
  const auto file = [this](CLI::App* command) {
    command->add_option("--file", file_, "the server's tokens_file")->required();
  };
  token_create_ = token->add_subcommand("create", "make a token and print it once; only its hash is kept");
  file(token_create_);
  token_create_->add_option("identity", name_, "whose, as access_file names it")->required();
  token_create_->add_option("--expires", expires_, "when: 12h, 90d, never [never]");
  token_create_->add_option("--out", out_, "write it to this file, mode 0600, instead of printing it");
  token_list_ = token->add_subcommand("list", "list whose tokens there are");
  file(token_list_);
  token_revoke_ = token->add_subcommand("revoke", "take a token back; a running server ends its streams");
  file(token_revoke_);
  token_revoke_->add_option("id", id_, "as token list shows it")->required();
}

std::optional<int> AccessCommands::Run() const {
  if (cert_init_->parsed()) return CertInit();
  if (cert_server_->parsed()) return CertServer();
  if (cert_client_->parsed()) return CertClient();
  if (cert_revoke_->parsed()) return CertRevoke();
  if (cert_show_->parsed()) return CertShow();
  if (token_create_->parsed()) return TokenCreate();
  if (token_list_->parsed()) return TokenList();
  if (token_revoke_->parsed()) return TokenRevoke();
  return std::nullopt;
}

int AccessCommands::CertInit() const {
  return ExitCodeOf(MakeAuthority(folder_, Hosts(hosts_), days_, authority_days_));
}

int AccessCommands::CertServer() const {
  return ExitCodeOf([this]() -> absl::Status {
    BW_ASSIGN_OR_RETURN(const Authority authority, LoadAuthority(folder_));
    BW_ASSIGN_OR_RETURN(std::vector<std::string> hosts, HostsSoFar(folder_));
    for (const std::string& host : hosts_) {
      if (std::find(hosts.begin(), hosts.end(), host) == hosts.end()) hosts.push_back(host);
    }
    hosts = Hosts(hosts);
    BW_ASSIGN_OR_RETURN(const IssuedCertificate issued, authority.IssueServer(hosts, From(days_)));
    BW_RETURN_IF_ERROR(Write(folder_, "server", issued, /*replace=*/true));
    std::printf("for %s\n", absl::StrJoin(hosts, ", ").c_str());
    return absl::OkStatus();
  }());
}

int AccessCommands::CertClient() const {
  return ExitCodeOf([this]() -> absl::Status {
    if (name_.empty() || name_ == "ca" || name_ == "server" || name_[0] == '.' || absl::StrContains(name_, '/')) {
      return absl::InvalidArgumentError(
          absl::StrCat("name \"", name_, "\": must be a file's name, and not ca or server"));
    }
    BW_ASSIGN_OR_RETURN(const Authority authority, LoadAuthority(folder_));
    BW_ASSIGN_OR_RETURN(const IssuedCertificate issued,
                        authority.IssueClient(name_, uri_.empty() ? kDefaultUri + name_ : uri_, From(days_)));
    const absl::Status written = Write(out_.empty() ? folder_ : out_, name_, issued, replace_);
    if (!absl::IsAlreadyExists(written)) return written;
    return absl::AlreadyExistsError(absl::StrCat(written.message(), "; --replace makes it anew"));
  }());
}

int AccessCommands::CertRevoke() const { return ExitCodeOf(Revoke(folder_, file_)); }

int AccessCommands::CertShow() const { return ExitCodeOf(Show(file_)); }

int AccessCommands::TokenCreate() const {
  return ExitCodeOf([this]() -> absl::Status {
    // Checked as access_file checks it, so that no other word can enter the file.
    BW_RETURN_IF_ERROR(
        ParseAccess(absl::StrCat("identities: [{name: \"", name_, "\", roles: [read], runs: []}]"), "identity")
            .status());
    BW_ASSIGN_OR_RETURN(const int64_t expires, ParseExpiry(expires_.empty() ? "never" : expires_));
    BW_ASSIGN_OR_RETURN(const std::string token, NewToken());
    if (!out_.empty()) BW_RETURN_IF_ERROR(WriteSecretFile(out_, token + "\n", /*replace=*/false));
    BW_RETURN_IF_ERROR(ChangeTokens(file_, [&](std::vector<StoredToken>* tokens) -> absl::Status {
      if (tokens->size() >= kTokensMax)
        return absl::ResourceExhaustedError(absl::StrCat(file_, ": holds ", kTokensMax, " tokens"));
      tokens->push_back({HashToken(token), name_, NowSeconds(), expires});
      return absl::OkStatus();
    }));
    if (out_.empty()) {
      std::printf("%s\n", token.c_str());
    } else {
      std::printf("wrote %s: token %s of %s, until %s\n", out_.c_str(), TokenId(HashToken(token)).c_str(),
                  name_.c_str(), FormatUnixSeconds(expires).c_str());
    }
    return absl::OkStatus();
  }());
}

int AccessCommands::TokenList() const {
  const auto tokens = ReadTokens(file_);
  if (!tokens.ok()) return Report(tokens.status());
  std::printf("%-12s  %-24s  %-20s  %s\n", "ID", "IDENTITY", "CREATED", "EXPIRES");
  for (const StoredToken& token : *tokens) {
    std::printf("%-12s  %-24s  %-20s  %s%s\n", TokenId(token.hash).c_str(), token.identity.c_str(),
                FormatUnixSeconds(token.created_unix_s).c_str(), FormatUnixSeconds(token.expires_unix_s).c_str(),
                token.expires_unix_s <= NowSeconds() ? " (expired)" : "");
  }
  return kCommandOk;
}

int AccessCommands::TokenRevoke() const {
  return ExitCodeOf(ChangeTokens(file_, [this](std::vector<StoredToken>* tokens) -> absl::Status {
    const size_t removed =
        std::erase_if(*tokens, [this](const StoredToken& token) { return TokenId(token.hash) == id_; });
    if (removed == 0) return absl::NotFoundError(absl::StrCat(file_, ": has no token ", id_, "; see token list"));
    return absl::OkStatus();
  }));
}

}  // namespace bellwether::server
