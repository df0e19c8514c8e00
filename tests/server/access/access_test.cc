// Goal: who somebody is follows from what he shows and from the files alone; what
// is not legal in a file is said and changes nothing; a grant follows reloads.
// Method: real files, tables of what must pass and what must not, near misses
// included.  The handshakes are in tests/fault/test_access.py.

#include "server/access/access.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <pwd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <sstream>

#include "server/access/authority.h"
#include "server/access/secret_file.h"
#include "server/access/tls_files.h"
#include "tests/support/access_files.h"

namespace bellwether::server {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr char kRules[] = R"(
identities:
- {name: trainers, certificates: ["spiffe://b/trainer/*"], roles: [write], runs: ["llama-?"]}
- {name: per-run, certificates: ["spiffe://b/run/*"], roles: [write], runs: ["$1"]}
- {name: users, certificates: ["spiffe://b/user/*"], roles: [write], runs: ["$1-*"]}
- {name: alice, roles: [read, act], runs: ["*"]}
- {name: bob, roles: [read], runs: ["llama-*"]}
)";

class AccessTest : public ::testing::Test {
 protected:
  void SetUp() override {
    files_.Write(kRules);
    files_.AddToken("alices", "alice");
    files_.AddToken("bobs", "bob");
    files_.AddToken("old", "bob", 1'000'000'000);
    access_ = files_.Open(&counters_);
    ASSERT_NE(access_, nullptr);
  }
  absl::StatusOr<GrantPtr> WithToken(const std::string& token) {
    return access_->Identify({.token = token, .peer = "ipv4:10.0.0.1:1"}, "GetRun");
  }
  absl::StatusOr<GrantPtr> WithCertificate(const std::string& uri) {
    return access_->Identify({.certificate = {{uri}}}, "Attach");
  }
  double refused(const char* reason) {
    return counters_.counter("bellwether_access_refused_total", {{"reason", reason}})->value();
  }
  std::string audit() {
    std::ifstream file(files_.audit_file());
    std::stringstream text;
    text << file.rdbuf();
    return text.str();
  }

  Counters counters_;
  AccessFiles files_;
  std::unique_ptr<Access> access_;
};

TEST_F(AccessTest, TokensCountWholeAndUntilTheyExpire) {
  ASSERT_TRUE(WithToken("alices").ok());
  EXPECT_EQ((*WithToken("alices"))->who(), "alice");
  for (const char* wrong : {"", "alice", "alicess", "Alices", "bobs "}) {
    EXPECT_EQ(WithToken(wrong).status().code(), absl::StatusCode::kUnauthenticated) << wrong;
  }
  EXPECT_EQ(refused("token_wrong"), 5);
  EXPECT_THAT(std::string(WithToken("old").status().message()), HasSubstr("expired at 2001-09-09T01:46:40Z"));
  EXPECT_EQ(refused("token_expired"), 1);
  EXPECT_EQ(access_->Identify({}, "GetRun").status().code(), absl::StatusCode::kUnauthenticated);
  EXPECT_EQ(refused("token_missing"), 1);
  EXPECT_THAT(audit(), ::testing::Not(HasSubstr("Alices")));
}

TEST_F(AccessTest, RightsNeedRoleAndRun) {
  const GrantPtr bob = *WithToken("bobs");
  EXPECT_TRUE(bob->Check(Role::kRead, "llama-1").ok());
  EXPECT_TRUE(bob->Sees("llama-1"));
  EXPECT_FALSE(bob->Sees("gpt"));
  EXPECT_EQ(bob->Check(Role::kRead, "gpt").code(), absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(bob->Check(Role::kAct, "llama-1").message(), "bob lacks the role act");
  EXPECT_EQ(bob->CheckAll(Role::kRead).code(), absl::StatusCode::kPermissionDenied);
  const GrantPtr alice = *WithToken("alices");
  EXPECT_TRUE(alice->CheckAll(Role::kAct).ok());
  EXPECT_FALSE(alice->Check(Role::kWrite).ok()) << "act holds read alone";
  EXPECT_FALSE(alice->Check(Role::kAdmin).ok());
}

TEST_F(AccessTest, CertificatesByTheirUri) {
  const GrantPtr trainer = *WithCertificate("spiffe://b/trainer/7");
  EXPECT_EQ(trainer->who(), "trainers");
  EXPECT_TRUE(trainer->Check(Role::kWrite, "llama-1").ok());
  EXPECT_FALSE(trainer->Check(Role::kWrite, "llama-12").ok());
  EXPECT_FALSE(trainer->Sees("llama-1")) << "write holds no read";
  // The run of a certificate is that run, whatever letters it has.
  const GrantPtr star = *WithCertificate("spiffe://b/run/*");
  EXPECT_TRUE(star->Check(Role::kWrite, "*").ok());
  EXPECT_FALSE(star->Check(Role::kWrite, "llama-1").ok());
  const GrantPtr user = *WithCertificate("spiffe://b/user/carol");
  EXPECT_TRUE(user->Check(Role::kWrite, "carol-first").ok());
  for (const char* other : {"carol", "carolx-first", "dave-first", "xcarol-first"}) {
    EXPECT_FALSE(user->Check(Role::kWrite, other).ok()) << other;
  }
  EXPECT_FALSE((*WithCertificate("spiffe://b/user/*"))->Check(Role::kWrite, "dave-first").ok());
  for (const char* unknown : {"spiffe://b/train", "spiffe://c/trainer/7", "xspiffe://b/trainer/7"}) {
    EXPECT_EQ(WithCertificate(unknown).status().code(), absl::StatusCode::kUnauthenticated) << unknown;
  }
  // A token that is shown counts, and a wrong one is not made good by a certificate.
  EXPECT_FALSE(access_->Identify({.certificate = {{"spiffe://b/trainer/7"}}, .token = "x"}, "Attach").ok());
}

TEST_F(AccessTest, GrantsFollowTheFiles) {
  const GrantPtr bob = *WithToken("bobs");
  files_.Write("identities: [{name: alice, roles: [read], runs: []}, {name: bob, roles: [read], runs: [\"gpt\"]}]");
  access_->Tick();
  EXPECT_TRUE(bob->Sees("gpt"));
  EXPECT_FALSE(bob->Sees("llama-1"));
  // Not legal: nothing changes.
  files_.Write("identities: [{name: bob, roles: [reed], runs: [\"*\"]}]");
  access_->Tick();
  EXPECT_TRUE(bob->Sees("gpt"));
  files_.Write("identities: [{name: alice, roles: [read], runs: []}, {name: bob, roles: [read], runs: [\"gpt\"]}]");
  files_.RemoveTokens();
  access_->Tick();
  EXPECT_FALSE(bob->valid());
  EXPECT_EQ(bob->Check(Role::kRead, "gpt").code(), absl::StatusCode::kUnauthenticated);
}

TEST_F(AccessTest, ATokenOfNoIdentityStopsNoOther) {
  files_.AddToken("carols", "carol");
  files_.AddToken("alices-new", "alice");
  access_->Tick();
  EXPECT_TRUE(WithToken("alices-new").ok());
  EXPECT_TRUE(WithToken("bobs").ok());
  EXPECT_FALSE(WithToken("carols").ok());
  files_.RemoveTokens();
  files_.AddToken("carols", "carol");
  access_->Tick();
  EXPECT_FALSE(WithToken("bobs").ok()) << "it was revoked";
}

TEST_F(AccessTest, AnOpenStreamEndsWithWhyAndIsCounted) {
  const auto ended = [this](const char* reason) {
    return counters_.counter("bellwether_access_streams_ended_total", {{"reason", reason}})->value();
  };
  const GrantPtr alice = *WithToken("alices"), bob = *WithToken("bobs"), trainer = *WithCertificate("spiffe://b/run/x");
  EXPECT_TRUE(bob->CheckOpen("WatchRun", Role::kRead, "llama-1").ok());
  EXPECT_TRUE(bob->CheckOpen("WatchAlerts", Role::kRead, "").ok());
  // One run is taken from him: what is of all goes on, with what he sees still.
  files_.Write(R"(
identities:
- {name: alice, roles: [write], runs: ["*"]}
- {name: bob, roles: [read], runs: ["llama-2"]}
- {name: other, certificates: ["spiffe://b/run/*"], roles: [write], runs: ["$1"]}
)");
  access_->Tick();
  EXPECT_TRUE(bob->CheckOpen("WatchAlerts", Role::kRead, "").ok());
  const absl::Status run = bob->CheckOpen("WatchRun", Role::kRead, "llama-1");
  EXPECT_EQ(run.code(), absl::StatusCode::kPermissionDenied);
  EXPECT_THAT(std::string(run.message()), HasSubstr("bob has the role read but not for run \"llama-1\""));
  EXPECT_EQ(ended("run"), 1);
  EXPECT_EQ(alice->CheckOpen("events", Role::kRead, "").message(), "alice lacks the role read");
  EXPECT_EQ(ended("role"), 1);
  EXPECT_THAT(std::string(trainer->CheckOpen("Attach", Role::kWrite, "x").message()), HasSubstr("it is other's now"));
  EXPECT_EQ(ended("identity"), 1);
  files_.RemoveTokens();
  access_->Tick();
  const absl::Status gone = bob->CheckOpen("WatchAlerts", Role::kRead, "");
  EXPECT_EQ(gone.code(), absl::StatusCode::kUnauthenticated);
  EXPECT_THAT(std::string(gone.message()), HasSubstr("the token was revoked"));
  EXPECT_EQ(ended("token_wrong"), 1);
  EXPECT_THAT(audit(), HasSubstr("\"call\":\"WatchAlerts\""));
}

// A server's files with an authority of their own.
class CertificateTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const Validity validity{.begin_unix_s = Clock::System()->UnixMillis() / 1000 - 60, .days = 10};
    const auto ca = NewAuthority("ca", validity), other = NewAuthority("other", validity);
    ASSERT_TRUE(ca.ok() && other.ok());
    authority_ = std::make_unique<Authority>(*Authority::Load(ca->certificate, ca->key));
    ca_ = ca->certificate;
    other_ca_ = other->certificate;
    const auto server = authority_->IssueServer({"localhost"}, validity);
    ASSERT_TRUE(server.ok());
    Put("ca", ca_);
    Put("server", server->certificate);
    Put("key", server->key);
    Put("crl", *authority_->Revoke("", "", Now()));
    for (const char* name : {"lost", "kept"}) {
      certificates_[name] =
          authority_->IssueClient(name, std::string("spiffe://b/trainer/") + name, validity)->certificate;
    }
    auto tls = TlsWatch::Open({Path("server"), Path("key"), Path("ca"), Path("crl")}, &counters_, Clock::System());
    ASSERT_TRUE(tls.ok()) << tls.status();
    tls_ = *std::move(tls);
    files_.Write(kRules);
    auto access = Access::Open(files_.options(), &counters_, Clock::System(), tls_.get());
    ASSERT_TRUE(access.ok()) << access.status();
    access_ = *std::move(access);
  }
  static int64_t Now() { return Clock::System()->UnixMillis() / 1000; }
  std::string Path(const std::string& name) const { return directory_.path() + "/" + name; }
  void Put(const std::string& name, const std::string& text) {
    ASSERT_TRUE(WriteSecretFile(Path(name), text, /*replace=*/true).ok());
  }
  absl::StatusOr<GrantPtr> Enter(const std::string& name) {
    return access_->Identify(
        {.certificate = {{"spiffe://b/trainer/" + name}}, .certificate_pem = certificates_[name], .peer = "x"},
        "Attach");
  }
  double ended(const char* reason) {
    return counters_.counter("bellwether_access_streams_ended_total", {{"reason", reason}})->value();
  }

  Counters counters_;
  TempDirectory directory_;
  AccessFiles files_;
  std::string ca_, other_ca_;
  std::unique_ptr<Authority> authority_;
  std::map<std::string, std::string> certificates_;
  std::unique_ptr<TlsWatch> tls_;
  std::unique_ptr<Access> access_;
};

TEST_F(CertificateTest, RevokedCertificateEndsStreamsAndOpensNoMore) {
  const GrantPtr lost = *Enter("lost"), kept = *Enter("kept");
  EXPECT_TRUE(lost->CheckOpen("Attach", Role::kWrite, "llama-1").ok());
  Put("crl", *authority_->Revoke("", certificates_["lost"], Now()));
  tls_->Tick();
  const absl::Status refused = lost->CheckOpen("Attach", Role::kWrite, "llama-1");
  EXPECT_EQ(refused.code(), absl::StatusCode::kUnauthenticated);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("the certificate was revoked"));
  EXPECT_EQ(ended("certificate_revoked"), 1);
  EXPECT_TRUE(kept->CheckOpen("Attach", Role::kWrite, "llama-1").ok());
  // Nor does the connection that is open already bring a new call, with a good token either.
  EXPECT_EQ(Enter("lost").status().code(), absl::StatusCode::kUnauthenticated);
  files_.AddToken("alices", "alice");
  access_->Tick();
  EXPECT_TRUE(access_->Identify({.certificate_pem = certificates_["kept"], .token = "alices"}, "GetRun").ok());
  EXPECT_FALSE(access_->Identify({.certificate_pem = certificates_["lost"], .token = "alices"}, "GetRun").ok());
  EXPECT_TRUE(Enter("kept").ok());
  // Of the handshake alone; the stream's end is counted beside it.
  EXPECT_EQ(counters_.counter("bellwether_tls_revoked_refused_total")->value(), 0);
  // A list that takes it off again: who shows it anew may come.
  Put("crl", *authority_->Revoke("", "", Now()));
  tls_->Tick();
  EXPECT_TRUE(Enter("lost").ok());
}

TEST_F(CertificateTest, HostsOfACertificateAreThoseItWasMadeFor) {
  const std::vector<std::string> hosts = {"bellwether.example.org", "localhost", "10.0.0.1", "::1"};
  const auto issued = authority_->IssueServer(hosts, {.begin_unix_s = Now(), .days = 1});
  ASSERT_TRUE(issued.ok());
  EXPECT_EQ(HostsOf(ParseCertificates(issued->certificate).at(0).get()), hosts);
}

TEST_F(CertificateTest, CertificateOfRemovedAuthorityIsUntrusted) {
  const GrantPtr kept = *Enter("kept");
  Put("crl", other_ca_);  // No list: nothing changes.
  tls_->Tick();
  EXPECT_TRUE(kept->CheckOpen("Attach", Role::kWrite, "llama-1").ok());
  std::remove(Path("crl").c_str());
  Put("ca", other_ca_);
  const auto without_list = TlsWatch::Open({Path("server"), Path("key"), Path("ca"), ""}, &counters_, Clock::System());
  ASSERT_TRUE(without_list.ok()) << without_list.status();
  const CertificateVerdict verdict = (*without_list)->CheckAgain(certificates_["kept"]);
  EXPECT_STREQ(verdict.reason, "certificate_untrusted");
  EXPECT_THAT(verdict.why, HasSubstr("nobody of tls.client_ca_file stands for the certificate"));
  EXPECT_FALSE((*without_list)->CheckAgain(certificates_["kept"]).good()) << "kept from the first time";
}

TEST_F(CertificateTest, ExpiryAloneEndsNoOpenStream) {
  const Validity past{.begin_unix_s = Now() - 20 * 86'400, .days = 10};
  certificates_["old"] = authority_->IssueClient("old", "spiffe://b/trainer/old", past)->certificate;
  EXPECT_FALSE(tls_->CheckClient(certificates_["old"]).ok()) << "no handshake";
  EXPECT_TRUE(tls_->CheckAgain(certificates_["old"]).good());
  Put("crl", *authority_->Revoke("", certificates_["old"], Now()));
  tls_->Tick();
  EXPECT_STREQ(tls_->CheckAgain(certificates_["old"]).reason, "certificate_revoked");
}

TEST_F(AccessTest, WithoutAccessFileOnlyThePageNeedsAToken) {
  const auto open = Access::Open({.page_token = "page"}, &counters_, Clock::System());
  ASSERT_TRUE(open.ok());
  EXPECT_TRUE((*open)->Identify({}, "Attach").ok());
  EXPECT_FALSE((*open)->Identify({.face = Credentials::Face::kHttp}, "/").ok());
  EXPECT_FALSE((*open)->Identify({.face = Credentials::Face::kHttp, .token = "pag"}, "/").ok());
  const auto page = (*open)->Identify({.face = Credentials::Face::kHttp, .token = "page"}, "/");
  ASSERT_TRUE(page.ok());
  EXPECT_TRUE((*page)->CheckAll(Role::kAdmin).ok());
  EXPECT_EQ((*page)->who(), "") << "a name would stand in the audit for whoever has it";
}

TEST(AccessFileTest, IllegalEntriesAreNamed) {
  for (const auto& [text, words] : {
           std::pair{"identities: [{name: a, roles: [reed], runs: []}]", "must be one of read, write, act, admin"},
           {"identities: [{name: a, runs: []}]", "a: has no roles"},
           {"identities: [{name: a, roles: [read]}]", "a: has no runs"},
           {"identities: [{name: server, roles: [read], runs: []}]", "not server or policy"},
           {"identities: [{name: \"rank 0\", roles: [read], runs: []}]", "must be 1 to 64 of letters"},
           {"identities: [{name: a, roles: [read], runs: []}, {name: a, roles: [read], runs: []}]", "stands twice"},
           {"identities: [{name: a, tenant: t, roles: [read], runs: []}]", "tenant = t: must be one of tenants"},
           {"identities: [{name: a, roles: [read], runs: [$1]}]", "must end in their only *"},
           {"identities: [{name: a, roles: [read], runs: [], token: x}]", "identities.token: unknown key"},
           {"tenants: {t: {streams_max: 0}}", "must be a whole number in [1, 1000000]"},
       }) {
    const auto rules = ParseAccess(text, "access.yml");
    ASSERT_FALSE(rules.ok()) << text;
    EXPECT_THAT(std::string(rules.status().message()), HasSubstr(words)) << text;
    EXPECT_THAT(std::string(rules.status().message()), HasSubstr("access.yml:1:"));
  }
}

TEST(SecretFileTest, AReplacedFileKeepsOwnerGroupAndMode) {
  TempDirectory directory;
  const std::string path = directory.path() + "/key";
  struct stat info {};
  ASSERT_TRUE(WriteSecretFile(path, "1", /*replace=*/false).ok());
  ASSERT_EQ(stat(path.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 07777, 0600u);
  const uid_t owner = geteuid() == 0 ? 12'345 : geteuid();
  const gid_t group = geteuid() == 0 ? 23'456 : getegid();
  ASSERT_EQ(chown(path.c_str(), owner, group), 0);
  ASSERT_EQ(chmod(path.c_str(), 0640), 0);
  ASSERT_TRUE(WriteSecretFile(path, "2", /*replace=*/true).ok());
  ASSERT_EQ(stat(path.c_str(), &info), 0);
  EXPECT_EQ(info.st_uid, owner);
  EXPECT_EQ(info.st_gid, group);
  EXPECT_EQ(info.st_mode & 07777, 0640u);
  // What would be refused is not kept.
  ASSERT_EQ(chmod(path.c_str(), 0666), 0);
  ASSERT_TRUE(WriteSecretFile(path, "3", /*replace=*/true).ok());
  ASSERT_EQ(stat(path.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 07777, 0640u);
  ASSERT_EQ(chmod(path.c_str(), 0664), 0);
  ASSERT_TRUE(WriteSecretFile(path, "4", /*replace=*/true, 0644, Secrecy::kIntegrity).ok());
  ASSERT_EQ(stat(path.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 07777, 0644u);
}

TEST(SecretFileTest, AnUnreadableFileNamesTheUserAndWhatHelps) {
  TempDirectory directory;
  const std::string path = directory.path() + "/key";
  ASSERT_TRUE(WriteSecretFile(path, "1", /*replace=*/false).ok());
  ASSERT_EQ(chmod(path.c_str(), 0), 0);
  ASSERT_EQ(chmod(directory.path().c_str(), 0755), 0);
  const bool root = geteuid() == 0;
  if (root) {
    ASSERT_EQ(seteuid(65'534), 0);
  }
  const auto read = ReadGuardedFile(path, Secrecy::kSecret);
  const passwd* const user = getpwuid(geteuid());
  const std::string name = user != nullptr ? user->pw_name : std::to_string(geteuid());
  if (root) {
    ASSERT_EQ(seteuid(0), 0);
  }
  EXPECT_THAT(std::string(read.status().message()),
              AllOf(HasSubstr(path + ": cannot be read: Permission denied; user " + name + " must be able to read it"),
                    HasSubstr("sudo chgrp "), HasSubstr(" " + path + " && sudo chmod 640 " + path)));
}

TEST(AccessFileTest, CertificatesThatAnEntryBeforeTakesAreNamed) {
  const auto rules = ParseAccess(R"(
identities:
- {name: all, certificates: ["spiffe://b/client/*"], roles: [read], runs: ["*"]}
- {name: alice, certificates: ["spiffe://b/client/alice", "spiffe://b/other/alice"], roles: [read], runs: ["*"]}
- {name: some, certificates: ["spiffe://b/client/a?"], roles: [read], runs: ["*"]}
- {name: others, certificates: ["spiffe://b/*"], roles: [read], runs: ["*"]}
)",
                                 "access.yml");
  ASSERT_TRUE(rules.ok()) << rules.status();
  EXPECT_EQ(
      CheckShadows(*rules, "access.yml").message(),
      "access.yml: alice: certificates spiffe://b/client/alice is taken by all, which stands before it: the first "
      "that fits counts, so put alice first\n"
      "access.yml: some: certificates spiffe://b/client/a? is taken by all, which stands before it: the first "
      "that fits counts, so put some first");
  const auto wild = ParseAccess(
      "identities:\n- {name: a, certificates: [\"x?\"], roles: [read], runs: []}\n"
      "- {name: b, certificates: [\"x*\"], roles: [read], runs: []}\n",
      "access.yml");
  ASSERT_TRUE(wild.ok()) << wild.status();
  EXPECT_TRUE(CheckShadows(*wild, "access.yml").ok()) << "a longer name is b's";
}

TEST(TokenFileTest, TokensSurviveFormatAndParse) {
  const std::vector<StoredToken> tokens = {{HashToken("a"), "alice", 1'700'000'000, INT64_MAX},
                                           {HashToken("b"), "bob", 1'700'000'001, 1'800'000'000}};
  const auto read = ParseTokens(FormatTokens(tokens), "tokens");
  ASSERT_TRUE(read.ok()) << read.status();
  ASSERT_EQ(read->size(), 2u);
  EXPECT_EQ((*read)[1].hash, tokens[1].hash);
  EXPECT_EQ((*read)[1].expires_unix_s, 1'800'000'000);
  EXPECT_EQ((*read)[0].expires_unix_s, INT64_MAX);
  for (const char* bad : {"sha256:00 a never never", "md5:00 a never never", "x"}) {
    EXPECT_FALSE(ParseTokens(bad, "tokens").ok()) << bad;
  }
  EXPECT_FALSE(ParseTokens(FormatTokens({tokens[0], tokens[0]}), "tokens").ok()) << "twice";
  const std::string one = *NewToken(), other = *NewToken();
  EXPECT_EQ(one.size(), 67u) << "bw_ and 256 bits";
  EXPECT_NE(one, other);
}

TEST(AuditLogTest, RotatesAndKeepsNamedRefusalsUnderAnonymousFlood) {
  TempDirectory directory;
  Counters counters;
  const std::string path = directory.path() + "/audit.log";
  auto log = AuditLog::Open({.path = path, .bytes_max = 65'536, .files_max = 2}, &counters, Clock::System());
  ASSERT_TRUE(log.ok());
  for (int i = 0; i < 1'000; ++i) {
    (*log)->Write(
        {.who = "", .from = "x", .call = "y", .run = "", .result = absl::UnauthenticatedError("z"), .detail = ""});
  }
  EXPECT_GE(counters.counter("bellwether_audit_suppressed_total")->value(), 900);
  (*log)->Write({.who = "bob",
                 .from = "x",
                 .call = "SetPolicy",
                 .run = "",
                 .result = absl::PermissionDeniedError("no"),
                 .detail = ""});
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  EXPECT_THAT(text.str(), HasSubstr("\"who\":\"bob\""));
  EXPECT_THAT(text.str(), HasSubstr("\"refusals_not_kept\":"));
  for (int i = 0; i < 2'000; ++i) {
    (*log)->Write({.who = "bob",
                   .from = "x",
                   .call = "Annotate",
                   .run = "",
                   .result = absl::OkStatus(),
                   .detail = "line\n\"2\""});
  }
  EXPECT_TRUE(std::ifstream(path + ".1").good());
  EXPECT_FALSE(std::ifstream(path + ".2").good());
}

}  // namespace
}  // namespace bellwether::server
