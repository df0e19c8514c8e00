#include "server/access/access.h"

#include <algorithm>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "server/access/token_owners.h"
#include "server/util/glob.h"
#include "server/util/log.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

constexpr uint8_t kAllRoles = 15;
constexpr size_t kToldMax = kIdentitiesMax;  // Lines about streams that end, until the files change again.

IdentityPtr WithEverything(const std::string& name) {
  return std::make_shared<const Identity>(Identity{.name = name, .roles = kAllRoles, .runs = {"*"}});
}

std::string NameOfNobody(const Identity& identity) { return identity.name.empty() ? "whoever asks" : identity.name; }

}  // namespace

Grant::Grant(Access* access, Shown shown, std::string peer, IdentityPtr identity, int64_t expires_unix_s,
             uint64_t version)
    : access_(access),
      shown_(std::move(shown)),
      peer_(std::move(peer)),
      who_(identity->name),
      identity_(std::move(identity)),
      expires_unix_s_(expires_unix_s),
      version_(version) {}

IdentityPtr Grant::identity(Gone* gone) const {
  const uint64_t version = access_->version();
  absl::MutexLock lock(&mutex_);
  if (version != version_) {
    const Access::Resolved resolved = access_->Resolve(shown_);
    identity_ = resolved.identity;
    gone_ = {};
    if (identity_ == nullptr) {
      const bool revoked = std::string_view(resolved.reason) == "token_wrong";  // It was right at the beginning.
      gone_ = {.reason = resolved.reason, .why = revoked ? std::string("the token was revoked") : resolved.why};
    } else if (identity_->name != who_) {  // Who has become somebody else begins anew.
      gone_ = {.reason = "identity", .why = absl::StrCat("it is ", NameOfNobody(*identity_), "'s now")};
      identity_ = nullptr;
    }
    expires_unix_s_ = resolved.expires_unix_s;
    version_ = version;
  }
  if (identity_ != nullptr && expires_unix_s_ != INT64_MAX && access_->clock_->UnixMillis() / 1000 >= expires_unix_s_) {
    identity_ = nullptr;
    gone_ = {.reason = "token_expired",
             .why = absl::StrCat("the token expired at ", FormatUnixSeconds(expires_unix_s_))};
  }
  if (gone != nullptr) *gone = gone_;
  return identity_;
}

absl::Status Grant::Refuse(Role role, std::string_view run) const {
  const IdentityPtr held = this->identity();
  const Identity& identity = access_->OrNobody(held);
  const bool has_role = identity.Has(role);
  access_->refused(has_role ? "run" : "role")->Add();
  if (!has_role)
    return absl::PermissionDeniedError(absl::StrCat(NameOfNobody(identity), " lacks the role ", NameOf(role)));
  return absl::PermissionDeniedError(absl::StrCat(
      NameOfNobody(identity), " has the role ", NameOf(role), " but not for ",
      run.empty() ? std::string("every run")
                  : absl::StrCat("run \"", absl::string_view(run.data(), std::min<size_t>(run.size(), 128)), "\"")));
}

absl::Status Grant::Check(Role role) const {
  Gone gone;
  const IdentityPtr identity = this->identity(&gone);
  if (identity == nullptr) {
    access_->refused("gone")->Add();
    return absl::UnauthenticatedError(
        absl::StrCat("what was shown at the beginning does not count any more: ", gone.why));
  }
  return identity->Has(role) ? absl::OkStatus() : Refuse(role, "");
}

absl::Status Grant::Check(Role role, std::string_view run) const {
  BW_RETURN_IF_ERROR(Check(role));
  return Covers(run) ? absl::OkStatus() : Refuse(role, run);
}

absl::Status Grant::CheckAll(Role role) const {
  BW_RETURN_IF_ERROR(Check(role));
  const IdentityPtr identity = this->identity();
  return identity != nullptr && identity->CoversAll() ? absl::OkStatus() : Refuse(role, "");
}

absl::Status Grant::CheckOpen(std::string_view call, Role role, std::string_view run) const {
  const absl::Status allowed = run.empty() ? Check(role) : Check(role, run);
  if (!allowed.ok()) RecordEnd(call, role, run, allowed);
  return allowed;
}

void Grant::RecordEnd(std::string_view call, Role role, std::string_view run, const absl::Status& why) const {
  Gone gone;
  const IdentityPtr identity = this->identity(&gone);
  if (identity != nullptr) gone.reason = identity->Has(role) ? "run" : "role";
  access_->ended(gone.reason)->Add();
  Note(call, run, why, /*changes=*/true);
  std::string who = who_;
  if (who.empty() && shown_.certificate.has_value()) who = absl::StrJoin(*shown_.certificate, ", ");
  if (who.empty()) who = "whoever asks";
  if (access_->IsNews(who, gone.why.empty() ? gone.reason : gone.why)) {
    LogWarning("open streams of {} end: {}", who, std::string(why.message()));
  }
}

bool Grant::May(Role role) const {
  const IdentityPtr identity = this->identity();
  return identity != nullptr && identity->Has(role);
}

bool Grant::Sees(std::string_view run) const {
  const IdentityPtr identity = this->identity();
  return identity != nullptr && identity->Has(Role::kRead) && identity->Covers(run);
}

bool Grant::SeesAll() const {
  const IdentityPtr identity = this->identity();
  return identity != nullptr && identity->Has(Role::kRead) && identity->CoversAll();
}

bool Grant::Covers(std::string_view run) const {
  const IdentityPtr identity = this->identity();
  return identity != nullptr && identity->Covers(run);
}

std::string Grant::PassOn(std::string_view method) const {
  const IdentityPtr held = identity();
  PassedOn passed_on{.from = peer_};
  if (held == access_->everybody_) {
    passed_on.who = PassedOn::Who::kEverybody;
  } else if (held == access_->page_) {
    passed_on.who = PassedOn::Who::kPage;
  } else {  // Also of one who is nobody any more: the other server finds that, too.
    passed_on.who = PassedOn::Who::kNamed;
    passed_on.name = who_;
    if (held != nullptr) passed_on.own_run = held->own_run;
  }
  return access_->Seal(passed_on, method);
}

void Grant::Note(std::string_view call, std::string_view run, const absl::Status& result, bool changes,
                 std::string_view detail) const {
  const bool refused = absl::IsPermissionDenied(result) || absl::IsUnauthenticated(result);
  if (access_->audit_ == nullptr || (!refused && !changes)) return;
  access_->audit_->Write({.who = who_,
                          .from = peer_,
                          .call = std::string(call),
                          .run = std::string(run),
                          .result = result,
                          .detail = std::string(detail)});
}

absl::StatusOr<std::unique_ptr<StreamUse>> Grant::OpenStream() const {
  const IdentityPtr identity = this->identity();
  if (identity == nullptr || identity->tenant.empty()) return nullptr;
  return access_->quotas_.Open(identity->tenant, peer_);
}

Access::Access(const AccessOptions& options, Counters* counters, Clock* clock, const TlsWatch* tls)
    : options_(options),
      counters_(counters),
      clock_(clock),
      tls_(tls),
      everybody_(WithEverything("")),
      page_(WithEverything("")),
      server_(std::make_shared<const Identity>(
          Identity{.name = "", .roles = static_cast<uint8_t>(Role::kRead), .runs = {"*"}})),
      page_hash_(HashToken(options.page_token)),
      quotas_(counters, clock) {
  // A rate of what has not happened yet is 0, not nothing.
  for (const char* reason : {"token_missing", "token_wrong", "token_expired", "certificate_unknown",
                             "certificate_revoked", "certificate_untrusted", "role", "run", "gone", "passed_on"}) {
    refused(reason);
  }
  for (const char* reason : {"token_missing", "token_wrong", "token_expired", "certificate_unknown",
                             "certificate_revoked", "certificate_untrusted", "role", "run", "identity", "passed_on"}) {
    ended(reason);
  }
}

absl::StatusOr<std::unique_ptr<Access>> Access::Open(const AccessOptions& options, Counters* counters, Clock* clock,
                                                     const TlsWatch* tls) {
  std::unique_ptr<Access> access(new Access(options, counters, clock, tls));
  BW_ASSIGN_OR_RETURN(std::shared_ptr<const Known> known, access->Read());
  access->Adopt(std::move(known));
  if (!options.audit.path.empty()) {
    BW_ASSIGN_OR_RETURN(access->audit_, AuditLog::Open(options.audit, counters, clock));
  }
  absl::MutexLock lock(&access->reload_mutex_);
  (void)access->access_stamp_.Changed(options.access_file);
  (void)access->tokens_stamp_.Changed(options.tokens_file);
  return access;
}

absl::StatusOr<std::shared_ptr<const Access::Known>> Access::Read() const {
  auto known = std::make_shared<Known>();
  if (options_.access_file.empty()) return known;
  BW_ASSIGN_OR_RETURN(known->rules, ReadAccess(options_.access_file));
  if (const absl::Status shadows = CheckShadows(known->rules, options_.access_file); !shadows.ok()) {
    LogWarning("{}", std::string(shadows.message()));
  }
  if (options_.tokens_file.empty()) return known;
  auto tokens = ReadTokens(options_.tokens_file);
  std::error_code unknown;  // Set where it cannot be told: it may be there, and hold tokens.
  // Where it is not there nobody has been given one yet.
  if (!tokens.ok() && (std::filesystem::exists(options_.tokens_file, unknown) || unknown)) return tokens.status();
  if (tokens.ok()) known->tokens = *std::move(tokens);
  const absl::Status owners = CheckTokenOwners(known->tokens, options_.tokens_file, known->rules, options_.access_file);
  if (!owners.ok()) {
    // The others count all the same: one of them may have been revoked.
    LogWarning("{}; until then it is left out", std::string(owners.message()));
    std::erase_if(known->tokens, [&known](const StoredToken& token) { return !HasOwner(token, known->rules); });
  }
  return known;
}

void Access::Adopt(std::shared_ptr<const Known> known) {
  quotas_.Set(known->rules.tenants);
  absl::MutexLock lock(&mutex_);
  known_ = std::move(known);
  version_.fetch_add(1, std::memory_order_acq_rel);
}

Counter* Access::refused(const char* reason) const {
  return counters_->counter("bellwether_access_refused_total", {{"reason", reason}});
}

Counter* Access::ended(const std::string& reason) const {
  return counters_->counter("bellwether_access_streams_ended_total", {{"reason", reason}});
}

bool Access::IsNews(const std::string& who, const std::string& why) {
  const uint64_t version = this->version();
  absl::MutexLock lock(&mutex_);
  if (version != told_version_) told_.clear();
  told_version_ = version;
  return told_.size() < kToldMax && told_.insert(absl::StrCat(who, ": ", why)).second;
}

Access::Resolved Access::ResolveToken(const Known& known, const TokenHash& token) const {
  const std::string_view shown(reinterpret_cast<const char*>(token.data()), token.size());
  const auto equal = [shown](const TokenHash& hash) {
    return ConstantTimeEquals(shown, {reinterpret_cast<const char*>(hash.data()), hash.size()});
  };
  // All of them, whichever fits.
  const StoredToken* found = nullptr;
  for (const StoredToken& stored : known.tokens) {
    if (equal(stored.hash)) found = &stored;
  }
  const bool is_page = equal(page_hash_);
  if (!options_.page_token.empty() && is_page) return {.identity = page_};
  if (found == nullptr) return {.reason = "token_wrong", .why = "the token is wrong"};
  if (clock_->UnixMillis() / 1000 >= found->expires_unix_s) {
    return {.reason = "token_expired",
            .why = absl::StrCat("the token expired at ", FormatUnixSeconds(found->expires_unix_s))};
  }
  for (const AccessRules::Entry& entry : known.rules.entries) {
    if (entry.identity.name == found->identity) {
      return {.identity = std::make_shared<const Identity>(entry.identity), .expires_unix_s = found->expires_unix_s};
    }
  }
  return {.reason = "token_wrong", .why = "the token is wrong"};
}

Access::Resolved Access::ResolvePassedOn(const Known& known, const PassedOn& passed_on) const {
  switch (passed_on.who) {
    case PassedOn::Who::kServer:
      return {.identity = server_};
    case PassedOn::Who::kEverybody:
      if (open()) return {.identity = everybody_};
      return {.reason = "passed_on",
              .why = "another server asks nobody who he is, and this one does: give all the same access_file"};
    case PassedOn::Who::kPage:
      if (open() || !options_.page_token.empty()) return {.identity = page_};
      return {.reason = "passed_on", .why = "this server has no page token: give all servers the same"};
    case PassedOn::Who::kNamed:
      break;
  }
  for (const AccessRules::Entry& entry : known.rules.entries) {
    if (entry.identity.name != passed_on.name) continue;
    Identity identity = entry.identity;
    if (entry.run_of_certificate) identity.own_run = passed_on.own_run;
    return {.identity = std::make_shared<const Identity>(std::move(identity))};
  }
  return {.reason = "passed_on",
          .why = absl::StrCat("the access_file of this server does not know ", passed_on.name,
                              ", for whom another asks: give all servers the same")};
}

Access::Resolved Access::Resolve(const Grant::Shown& shown) const {
  // The door comes first: it opened for this certificate, whoever comes in by it.
  if (tls_ != nullptr && !shown.certificate_pem.empty()) {
    CertificateVerdict verdict = tls_->CheckAgain(shown.certificate_pem);
    if (!verdict.good()) return {.reason = verdict.reason, .why = std::move(verdict.why)};
  }
  if (shown.passed_on.has_value()) {
    std::shared_ptr<const Known> known;
    {
      absl::MutexLock lock(&mutex_);
      known = known_;
    }
    return ResolvePassedOn(*known, *shown.passed_on);
  }
  const bool page_asks = shown.face == Credentials::Face::kHttp && !options_.page_token.empty();
  if (open() && !page_asks && (!shown.token.has_value() || options_.page_token.empty()))
    return {.identity = everybody_};
  std::shared_ptr<const Known> known;
  {
    absl::MutexLock lock(&mutex_);
    known = known_;
  }
  if (shown.token.has_value()) return ResolveToken(*known, *shown.token);
  if (shown.certificate.has_value()) {
    for (const AccessRules::Entry& entry : known->rules.entries) {
      for (const std::string& glob : entry.certificates) {
        for (const std::string& uri : *shown.certificate) {
          if (!GlobMatches(glob, uri)) continue;
          Identity identity = entry.identity;
          if (entry.run_of_certificate) identity.own_run = uri.substr(glob.size() - 1);
          return {.identity = std::make_shared<const Identity>(std::move(identity))};
        }
      }
    }
    if (!open()) {
      return {.reason = "certificate_unknown",
              .why = absl::StrCat(
                  "the certificate is of no identity here; its names: ",
                  shown.certificate->empty() ? "none (a SAN URI is wanted)" : absl::StrJoin(*shown.certificate, ", "))};
    }
  }
  for (const AccessRules::Entry& entry : known->rules.entries) {
    if (entry.anonymous) return {.identity = std::make_shared<const Identity>(entry.identity)};
  }
  return {.reason = "token_missing",
          .why =
              "this server wants a token (authorization: Bearer TOKEN; in a browser open /?token=TOKEN once) or a "
              "certificate"};
}

absl::StatusOr<GrantPtr> Access::Identify(const Credentials& credentials, std::string_view call) {
  Grant::Shown shown{.face = credentials.face, .certificate = credentials.certificate};
  if (tls_ != nullptr) shown.certificate_pem = credentials.certificate_pem;
  // One that is too long is hashed no further; it is none that we gave.
  if (credentials.token.has_value()) {
    shown.token = HashToken(std::string_view(*credentials.token).substr(0, kTokenBytesMax + 1));
  }
  const uint64_t version = this->version();
  std::string peer = credentials.peer;
  Resolved resolved;
  if (credentials.passed_on.has_value()) {
    std::string key;
    std::function<int64_t()> now;
    {
      absl::MutexLock lock(&mutex_);
      key = peer_key_;
      now = peer_time_;
    }
    const auto opened = OpenPassedOn(*credentials.passed_on, call, key, now == nullptr ? 0 : now());
    if (opened.ok()) {
      shown.passed_on = *opened;
      if (!opened->from.empty()) peer = absl::StrCat(opened->from, " by ", credentials.peer);
    } else {
      resolved = {.reason = "passed_on", .why = std::string(opened.status().message())};
    }
  }
  if (resolved.why.empty()) resolved = Resolve(shown);
  if (resolved.identity == nullptr) {
    refused(resolved.reason)->Add();
    const absl::Status status = absl::UnauthenticatedError(resolved.why);
    if (audit_ != nullptr) {
      audit_->Write(
          {.who = "", .from = credentials.peer, .call = std::string(call), .run = "", .result = status, .detail = ""});
    }
    return status;
  }
  return GrantPtr(new Grant(this, std::move(shown), std::move(peer), std::move(resolved.identity),
                            resolved.expires_unix_s, version));
}

void Access::SetPeers(std::string key, std::function<int64_t()> now_unix_ms) {
  absl::MutexLock lock(&mutex_);
  peer_key_ = std::move(key);
  peer_time_ = std::move(now_unix_ms);
}

std::string Access::Seal(const PassedOn& passed_on, std::string_view method) const {
  std::string key;
  std::function<int64_t()> now;
  {
    absl::MutexLock lock(&mutex_);
    key = peer_key_;
    now = peer_time_;
  }
  return SealPassedOn(passed_on, method, key, now());
}

std::string Access::PassOnAsServer(std::string_view method) const {
  return Seal({.who = PassedOn::Who::kServer}, method);
}

absl::Status Access::Reload() {
  absl::MutexLock lock(&reload_mutex_);
  if (audit_ != nullptr) audit_->Reopen();
  if (open()) return absl::OkStatus();
  (void)access_stamp_.Changed(options_.access_file);
  (void)tokens_stamp_.Changed(options_.tokens_file);
  auto known = Read();
  // Nobody's call: the files changed, or somebody with a shell sent a signal.
  if (audit_ != nullptr) audit_->Write({.who = "bellwetherd", .call = "identities", .result = known.status()});
  if (!known.ok()) return known.status();
  Adopt(*std::move(known));
  LogInfo("identities read again from {}", options_.access_file);
  return absl::OkStatus();
}

std::optional<absl::Status> Access::Tick() {
  if (open()) return std::nullopt;
  bool changed = false;
  {
    absl::MutexLock lock(&reload_mutex_);
    changed = access_stamp_.Changed(options_.access_file);
    changed = tokens_stamp_.Changed(options_.tokens_file) || changed;
  }
  if (!changed) return std::nullopt;
  absl::Status read = Reload();
  if (!read.ok()) LogError("identities stay as they were: {}", std::string(read.message()));
  return read;
}

}  // namespace bellwether::server
