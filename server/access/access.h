// access.h: the one place that says who a caller is and what he may do.
//
// A caller shows a certificate, which TLS has verified, or a bearer token, or
// nothing.  Identify() makes a Grant of it, which every call and stream asks
// before it does anything; the same for gRPC and HTTP.  Without an access file
// whoever may connect may do everything, but for the page, whose token HTTP
// asks for where there is one.
//
// The files are read again by Reload() and, when they change, by Tick(); a bad
// one changes nothing.  Grants follow them and the lists of certificates: what
// was taken away is away from the next question of an open stream on, which is
// asked each second at the latest and ends the stream (CheckOpen).

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
  // The same whole, as PEM, his own first, to look at it again once it may have
  // been taken back; "" = none, or nobody looks.
  std::string certificate_pem;
  std::optional<std::string> token;
  // A seal of passed_on.h; then nothing else says who he is.
  std::optional<std::string> passed_on;
  std::string peer;  // Address, for logs and quotas.
};

class Access;

// One caller, for as long as his call or stream lasts.  Thread-safe; Access
// must outlive it.
class Grant {
 public:
  // UNAUTHENTICATED: he is nobody any more; says why.  PERMISSION_DENIED: he may
  // not; names identity, role and run.  Counted, and for the audit.
  absl::Status Check(Role role) const;
  absl::Status Check(Role role, std::string_view run) const;
  // Of every run there is.
  absl::Status CheckAll(Role role) const;
  // The same of a stream that is open; "" = of no run in particular.  Where it is an
  // error the stream is to end with it, and NoteEnd() is done.
  absl::Status CheckOpen(std::string_view call, Role role, std::string_view run) const;
  // The open stream `call` ends with `why`, which a Check() of `role` said: into
  // the audit, bellwether_access_streams_ended_total, and the log, there once for
  // an identity and cause until the files change again.
  void RecordEnd(std::string_view call, Role role, std::string_view run, const absl::Status& why) const;
  // Whether Check(role) would pass, without a word of it: for what he is shown.
  bool May(Role role) const;
  // As Check(kRead, run), without a word of it: for lists.
  bool Sees(std::string_view run) const;
  bool SeesAll() const;
  // Whether the run is among his, whatever the role.
  bool Covers(std::string_view run) const;
  // What Check() says where the run is not; counted.
  absl::Status Refuse(Role role, std::string_view run) const;
  // False once he is nobody any more.
  bool valid() const { return identity() != nullptr; }
  // The identity's name; "" = nobody in particular.
  const std::string& who() const { return who_; }
  const std::string& peer() const { return peer_; }
  // Another server asks for him, which must not be passed on again.
  bool passed_on() const { return shown_.passed_on.has_value(); }
  // What another server of the cluster is shown for this caller, for one call.
  // REQUIRES: Access::SetPeers() was called.
  std::string PassOn(std::string_view method) const;

  // What he asked and what came of it, into the audit: every refusal, and with
  // `changes` what was done.
  void Note(std::string_view call, std::string_view run, const absl::Status& result, bool changes,
            std::string_view detail = {}) const;

  // A trainer's stream in the quota of his tenant, if there is one.
  // Its run counts once it is known.  RESOURCE_EXHAUSTED, with RetryInfo: names the quota.
  absl::StatusOr<std::unique_ptr<StreamUse>> OpenStream() const;

 private:
  friend class Access;
  // Which entry or token he showed; the token itself is not kept.
  struct Shown {
    Credentials::Face face = Credentials::Face::kGrpc;
    std::optional<std::vector<std::string>> certificate;
    std::string certificate_pem;
    std::optional<TokenHash> token;
    std::optional<PassedOn> passed_on;
  };
  // Why he is nobody any more.
  struct Gone {
    std::string reason;  // Label of the counter; "" = he is not.
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
  std::string access_file;  // "" = whoever may connect may do everything.
  std::string tokens_file;  // "" = no tokens but the page's.
  std::string page_token;   // "" = none.  Opens everything.
  AuditLog::Options audit;  // No path: no audit.
};

// Thread-safe.
class Access {
 public:
  // All must outlive it.  `tls`: who says whether a certificate that opened a
  // connection still counts; null = it does.  Errors as ReadAccess() and ReadTokens(),
  // also where a token names no identity; INTERNAL: the audit log cannot be written.
  static absl::StatusOr<std::unique_ptr<Access>> Open(const AccessOptions& options, Counters* counters, Clock* clock,
                                                      const TlsWatch* tls = nullptr);

  // UNAUTHENTICATED: nothing was shown, or nothing that counts.  Counted, and
  // in the audit as `call`.  Takes as long for a wrong token as for a right one.
  // What was passed on by anybody but a server of the cluster is nothing, too.
  absl::StatusOr<GrantPtr> Identify(const Credentials& credentials, std::string_view call);

  // From here on servers that seal with `key` are believed whom they ask for;
  // `now_unix_ms` is the time that all of them go by.  Never called: nobody is.
  void SetPeers(std::string key, std::function<int64_t()> now_unix_ms);
  // What another server is shown for a call of this one's own.  REQUIRES: as above.
  std::string PassOnAsServer(std::string_view method) const;

  // True if everybody who may connect may do everything.
  bool open() const { return options_.access_file.empty(); }
  // True if a token opens anything.
  bool has_tokens() const { return !open() || !options_.page_token.empty(); }
  // Reads both files again; else nothing changes.  Errors as Open(); the caller
  // tells them.
  absl::Status Reload();
  // Call each second: reloads what has changed.
  void Tick();

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
  // For messages about somebody who is nobody any more.
  const Identity& OrNobody(const IdentityPtr& identity) const { return identity != nullptr ? *identity : *nobody_; }
  // Of all that grants follow; both rise only.
  uint64_t version() const {
    return version_.load(std::memory_order_acquire) + (tls_ == nullptr ? 0 : tls_->generation());
  }
  Counter* refused(const char* reason) const;
  Counter* ended(const std::string& reason) const;
  // Whether nobody was told yet, at this version, that streams of `who` end for this.
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
