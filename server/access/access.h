// access.h: the one place that decides what a caller's identity and rights are.
//
// A caller shows a certificate, which TLS has verified, or a bearer token, or
// nothing.  Identify() makes a Grant of it.  Every call and stream asks the
// grant before it does anything, over gRPC and HTTP alike.  Without an access
// file every caller that can connect may do everything.  The page is the
// exception: if it has a token, HTTP asks for it.
//
// Reload() reads the files again, and Tick() does when they change.  A bad file
// changes nothing.  Grants follow the files and the lists of certificates.  An
// open stream asks its grant at least once a second and ends if a right was
// taken away (CheckOpen).

#ifndef BELLWETHER_SERVER_ACCESS_ACCESS_H_
#define BELLWETHER_SERVER_ACCESS_ACCESS_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/access/access_file.h"
#include "server/access/audit_log.h"
#include "server/access/identity.h"
#include "server/access/passed_on.h"
#include "server/access/quota.h"
#include "server/access/secret_file.h"
#include "server/access/tls_files.h"
#include "server/access/token_file.h"
#include "server/util/clock.h"
#include "server/util/counters.h"

namespace bellwether::server {

// What a caller shows.
struct Credentials {
  enum class Face { kGrpc, kHttp };
  Face face = Face::kGrpc;
  // SAN URIs of a certificate that was verified; no value: none was shown.
  std::optional<std::vector<std::string>> certificate;
  // The certificate's whole chain as PEM, the caller's own first.  It is
  // checked again once it may have been revoked.  "" = no certificate, or no
  // such check.
  std::string certificate_pem;
  std::optional<std::string> token;
  // A seal of passed_on.h.  If it is set, it alone identifies the caller.
  std::optional<std::string> passed_on;
  std::string peer;  // Address, for logs and quotas.
};

class Access;

// One caller, for as long as its call or stream lasts.  Thread-safe; Access
// must outlive it.
class Grant {
 public:
  // UNAUTHENTICATED: the caller's certificate or token is no longer valid; the
  // message names the reason.  PERMISSION_DENIED: the caller may not do this;
  // the message names identity, role and run.  Both are counted and go into the
  // audit.
  absl::Status Check(Role role) const;
  absl::Status Check(Role role, std::string_view run) const;
  // Of every run there is.
  absl::Status CheckAll(Role role) const;
  // The same of a stream that is open; "" = of no run in particular.  Where it is an
  // error the stream is to end with it, and RecordEnd() is done.
  absl::Status CheckOpen(std::string_view call, Role role, std::string_view run) const;
  // The open stream `call` ends with `why`, the result of a Check() of `role`.
  // Writes that into the audit, bellwether_access_streams_ended_total, and the
  // log.  The log has it once for an identity and cause until the files change
  // again.
  void RecordEnd(std::string_view call, Role role, std::string_view run, const absl::Status& why) const;
  // Whether Check(role) would pass; neither counted nor in the audit.  Decides
  // what the caller is shown.
  bool May(Role role) const;
  // As Check(kRead, run), without a word of it: for lists.
  bool Sees(std::string_view run) const;
  bool SeesAll() const;
  // Whether the run is among the caller's, whatever the role.
  bool Covers(std::string_view run) const;
  // The error of Check() for a run that is not there; counted.
  absl::Status Refuse(Role role, std::string_view run) const;
  // False once the caller's certificate or token is no longer valid.
  bool valid() const { return identity() != nullptr; }
  // The identity's name; "" = no particular identity.
  const std::string& who() const { return who_; }
  const std::string& peer() const { return peer_; }
  // Another server asks for this caller; the call must not be passed on again.
  bool passed_on() const { return shown_.passed_on.has_value(); }
  // What another server of the cluster is shown for this caller, for one call.
  // REQUIRES: Access::SetPeers() was called.
  std::string PassOn(std::string_view method) const;

  // Writes a call and its result into the audit: every refusal, and with
  // `changes` what was done.
  void Note(std::string_view call, std::string_view run, const absl::Status& result, bool changes,
            std::string_view detail = {}) const;

  // Takes a trainer's stream into the quota of its tenant, if there is one.  Its
  // run counts once it is known.  RESOURCE_EXHAUSTED, with RetryInfo: names the
  // quota.
  absl::StatusOr<std::unique_ptr<StreamUse>> OpenStream() const;

 private:
  friend class Access;
  // Which entry or token the caller showed; the token itself is not kept.
  struct Shown {
    Credentials::Face face = Credentials::Face::kGrpc;
    std::optional<std::vector<std::string>> certificate;
    std::string certificate_pem;
    std::optional<TokenHash> token;
    std::optional<PassedOn> passed_on;
  };
  // Why the caller's identity is no longer valid.
  struct Gone {
    std::string reason;  // Label of the counter; "" = the identity is valid.
    std::string why;
  };
  Grant(Access* access, Shown shown, std::string peer, IdentityPtr identity, int64_t expires_unix_s, uint64_t version);
  IdentityPtr identity(Gone* gone = nullptr) const;

  Access* const access_;
  const Shown shown_;
  const std::string peer_;
  const std::string who_;
  mutable absl::Mutex mutex_;
  mutable IdentityPtr identity_ ABSL_GUARDED_BY(mutex_);
  mutable Gone gone_ ABSL_GUARDED_BY(mutex_);
  mutable int64_t expires_unix_s_ ABSL_GUARDED_BY(mutex_);
  mutable uint64_t version_ ABSL_GUARDED_BY(mutex_);
};
using GrantPtr = std::shared_ptr<const Grant>;

struct AccessOptions {
  std::string access_file;  // "" = every caller that can connect may do everything.
  std::string tokens_file;  // "" = no tokens but the page's.
  std::string page_token;   // "" = none.  Opens everything.
  AuditLog::Options audit;  // No path: no audit.
};

// Thread-safe.
class Access {
 public:
  // All must outlive it.  `tls` decides whether a certificate that opened a
  // connection still counts; null = it does.  Errors as ReadAccess() and
  // ReadTokens(), also if a token names no identity.  INTERNAL: the audit log
  // cannot be written.
  static absl::StatusOr<std::unique_ptr<Access>> Open(const AccessOptions& options, Counters* counters, Clock* clock,
                                                      const TlsWatch* tls = nullptr);

  // UNAUTHENTICATED: nothing was shown, or nothing that counts.  It is counted,
  // and in the audit as `call`.  A wrong token takes as long as a right one.  A
  // seal counts as nothing if it is not from a server of the cluster.
  absl::StatusOr<GrantPtr> Identify(const Credentials& credentials, std::string_view call);

  // From here on servers that seal with `key` may ask for their callers.
  // `now_unix_ms` is the time that all of them go by.  Without this call no
  // seal counts.
  void SetPeers(std::string key, std::function<int64_t()> now_unix_ms);
  // What another server is shown for a call of this one's own.  REQUIRES: as above.
  std::string PassOnAsServer(std::string_view method) const;

  // True if every caller that can connect may do everything.
  bool open() const { return options_.access_file.empty(); }
  // True if a token opens anything.
  bool has_tokens() const { return !open() || !options_.page_token.empty(); }
  // Reads both files again; on an error nothing changes.  Errors as Open(); the
  // caller reports them.
  absl::Status Reload();
  // Call each second: reloads what has changed, and reports an error.  Nothing:
  // nothing had changed.
  std::optional<absl::Status> Tick();

 private:
  friend class Grant;
  struct Known {
    AccessRules rules;
    std::vector<StoredToken> tokens;
  };
  struct Resolved {
    IdentityPtr identity;  // Null: `why`.
    int64_t expires_unix_s = INT64_MAX;
    const char* reason = "";  // Label of the counter.
    std::string why;
  };

  Access(const AccessOptions& options, Counters* counters, Clock* clock, const TlsWatch* tls);
  absl::StatusOr<std::shared_ptr<const Known>> Read() const;
  void Adopt(std::shared_ptr<const Known> known);
  Resolved Resolve(const Grant::Shown& shown) const;
  Resolved ResolvePassedOn(const Known& known, const PassedOn& passed_on) const;
  std::string Seal(const PassedOn& passed_on, std::string_view method) const;
  Resolved ResolveToken(const Known& known, const TokenHash& token) const;
  // For messages about a caller whose identity is no longer valid.
  const Identity& OrNobody(const IdentityPtr& identity) const { return identity != nullptr ? *identity : *nobody_; }
  // Of all that grants follow; both rise only.
  uint64_t version() const {
    return version_.load(std::memory_order_acquire) + (tls_ == nullptr ? 0 : tls_->generation());
  }
  Counter* refused(const char* reason) const;
  Counter* ended(const std::string& reason) const;
  // Whether this is the first report, at this version, that streams of `who`
  // end for this reason.
  bool IsNews(const std::string& who, const std::string& why);

  const AccessOptions options_;
  Counters* const counters_;
  Clock* const clock_;
  const TlsWatch* const tls_;  // Null: plaintext.
  const IdentityPtr everybody_;
  const IdentityPtr page_;
  const IdentityPtr server_;  // Another of the cluster, for itself.
  const IdentityPtr nobody_ = std::make_shared<const Identity>();
  TokenHash page_hash_{};
  std::unique_ptr<AuditLog> audit_;  // Null: none.
  Quotas quotas_;
  std::atomic<uint64_t> version_ = 0;
  mutable absl::Mutex mutex_;
  std::shared_ptr<const Known> known_ ABSL_GUARDED_BY(mutex_);
  std::string peer_key_ ABSL_GUARDED_BY(mutex_);
  std::function<int64_t()> peer_time_ ABSL_GUARDED_BY(mutex_);
  std::set<std::string> told_ ABSL_GUARDED_BY(mutex_);  // Of IsNews(), at told_version_.
  uint64_t told_version_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Mutex reload_mutex_;
  FileStamp access_stamp_ ABSL_GUARDED_BY(reload_mutex_), tokens_stamp_ ABSL_GUARDED_BY(reload_mutex_);
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_ACCESS_ACCESS_H_
