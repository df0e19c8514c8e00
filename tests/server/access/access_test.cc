// Goal: who somebody is follows from what he shows and from the files alone; what
// is not legal in a file is said and changes nothing; a grant follows reloads.
// Method: real files, tables of what must pass and what must not, near misses
// included.  The handshakes are in tests/fault/test_access.py.

#include "server/access/access.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <sstream>

#include "tests/support/access_files.h"

namespace bellwether::server {
namespace {

using ::testing::HasSubstr;

constexpr char kRules[] = R"(
identities:
- {name: trainers, certificates: ["spiffe://b/trainer/*"], roles: [write], runs: ["llama-?"]}
- {name: per-run, certificates: ["spiffe://b/run/*"], roles: [write], runs: ["$1"]}
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

TEST_F(AccessTest, RolesAndRunsAreBothAskedFor) {
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

TEST_F(AccessTest, WithoutAFileEverybodyMayAndThePageWantsItsToken) {
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

TEST(AccessFileTest, SaysWhatIsNotLegal) {
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

TEST(TokenFileTest, ComesBackAsItWasWritten) {
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

TEST(AuditLogTest, RotatesAndNobodyHidesSomebody) {
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
