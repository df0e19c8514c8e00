// Goal: one server believes another for whom it asks, and nobody else: no other key,
// method, time or text, and never more than its own files give him.
// Method: seals that are right, and each changed in one thing.

#include "server/access/passed_on.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "server/access/access.h"
#include "tests/support/access_files.h"

namespace bellwether::server {
namespace {

using ::testing::HasSubstr;

constexpr char kKey[] = "a key of thirty-two bytes or more";
constexpr int64_t kNow = 1'700'000'000'000;

TEST(PassedOnTest, SealedIdentityOpensUnchanged) {
  const PassedOn passed_on = {PassedOn::Who::kNamed, "alice", "llama:1\n2:3", "ipv4:10.0.0.7:5"};
  const auto opened = OpenPassedOn(SealPassedOn(passed_on, "GetRun", kKey, kNow), "GetRun", kKey, kNow);
  ASSERT_TRUE(opened.ok()) << opened.status();
  EXPECT_EQ(opened->who, passed_on.who);
  EXPECT_EQ(opened->name, passed_on.name);
  EXPECT_EQ(opened->own_run, passed_on.own_run);
  EXPECT_EQ(opened->from, passed_on.from);
}

TEST(PassedOnTest, IsForOneMethodOneKeyAndAMinute) {
  const std::string seal = SealPassedOn({PassedOn::Who::kServer, "", "", ""}, "GetRun", kKey, kNow);
  EXPECT_TRUE(OpenPassedOn(seal, "GetRun", kKey, kNow + kPassedOnMsMax).ok());
  EXPECT_TRUE(OpenPassedOn(seal, "GetRun", kKey, kNow - kPassedOnMsMax).ok());
  EXPECT_FALSE(OpenPassedOn(seal, "GetRun", kKey, kNow + kPassedOnMsMax + 1).ok());
  EXPECT_FALSE(OpenPassedOn(seal, "GetRun", kKey, kNow - kPassedOnMsMax - 1).ok());
  EXPECT_FALSE(OpenPassedOn(seal, "SetPolicy", kKey, kNow).ok());
  EXPECT_FALSE(OpenPassedOn(seal, "GetRun", "another key", kNow).ok());
  EXPECT_FALSE(OpenPassedOn(seal, "GetRun", "", kNow).ok());
}

TEST(PassedOnTest, NoByteOfItCanBeChanged) {
  const std::string seal = SealPassedOn({PassedOn::Who::kNamed, "bob", "", "x"}, "GetRun", kKey, kNow);
  for (size_t i = 0; i < seal.size(); ++i) {
    std::string changed = seal;
    changed[i] = changed[i] == 'A' ? 'B' : 'A';
    const auto opened = OpenPassedOn(changed, "GetRun", kKey, kNow);
    // The last letter of base64 has bits that say nothing.
    if (opened.ok()) {
      EXPECT_EQ(opened->name, "bob") << i;
    }
  }
  for (const char* const none : {"", ".", "a.b", "####.####"}) {
    EXPECT_FALSE(OpenPassedOn(none, "GetRun", kKey, kNow).ok()) << none;
  }
  EXPECT_FALSE(OpenPassedOn(std::string(kPassedOnBytesMax + 1, 'a'), "GetRun", kKey, kNow).ok());
}

class PassOnTest : public ::testing::Test {
 protected:
  void SetUp() override {
    files_.Write(R"(
identities:
- {name: alice, roles: [read, act], runs: ["llama-*"]}
- {name: per-run, certificates: ["spiffe://b/run/*"], roles: [write], runs: ["$1"]}
)");
    files_.AddToken("alices", "alice");
    access_ = files_.Open(&counters_);
    ASSERT_NE(access_, nullptr);
    access_->SetPeers(kKey, [] { return kNow; });
  }
  absl::StatusOr<GrantPtr> Shown(const std::string& seal, const char* method = "GetRun") {
    return access_->Identify({.passed_on = seal, .peer = "ipv4:10.0.0.2:1"}, method);
  }

  Counters counters_;
  AccessFiles files_;
  std::unique_ptr<Access> access_;
};

TEST_F(PassOnTest, PassedOnIdentityHasRightsFromLocalFiles) {
  const auto alice = access_->Identify({.token = "alices", .peer = "ipv4:10.0.0.1:1"}, "GetRun");
  ASSERT_TRUE(alice.ok()) << alice.status();
  EXPECT_FALSE((*alice)->passed_on());
  const auto passed = Shown((*alice)->PassOn("GetRun"));
  ASSERT_TRUE(passed.ok()) << passed.status();
  EXPECT_TRUE((*passed)->passed_on());
  EXPECT_EQ((*passed)->who(), "alice");
  EXPECT_EQ((*passed)->peer(), "ipv4:10.0.0.1:1 by ipv4:10.0.0.2:1");
  EXPECT_TRUE((*passed)->Check(Role::kAct, "llama-7").ok());
  EXPECT_FALSE((*passed)->Check(Role::kAct, "gpt").ok());
  EXPECT_FALSE((*passed)->Check(Role::kAdmin, "llama-7").ok());

  // And loses them as any other, in the middle of a stream, too.
  files_.Write("identities:\n- {name: someone, roles: [read], runs: [\"*\"]}\n");
  files_.RemoveTokens();
  ASSERT_TRUE(access_->Reload().ok());
  EXPECT_FALSE((*passed)->valid());
}

TEST_F(PassOnTest, ARunOfACertificateIsPassedOnToo) {
  const auto rank = access_->Identify({.certificate = {{"spiffe://b/run/gpt"}}}, "GetRun");
  ASSERT_TRUE(rank.ok()) << rank.status();
  const auto passed = Shown((*rank)->PassOn("GetRun"));
  ASSERT_TRUE(passed.ok()) << passed.status();
  EXPECT_TRUE((*passed)->Covers("gpt"));
  EXPECT_FALSE((*passed)->Covers("llama-7"));
}

TEST_F(PassOnTest, UnrestrictedRightsElsewhereAreRefusedHere) {
  // The other server has no access file, or a page token that this one has not.
  for (const PassedOn::Who who : {PassedOn::Who::kEverybody, PassedOn::Who::kPage}) {
    const auto grant = Shown(SealPassedOn({who, "", "", ""}, "GetRun", kKey, kNow));
    EXPECT_TRUE(absl::IsUnauthenticated(grant.status()));
    EXPECT_THAT(std::string(grant.status().message()), HasSubstr("give all"));
  }
  EXPECT_TRUE(absl::IsUnauthenticated(
      Shown(SealPassedOn({PassedOn::Who::kNamed, "mallory", "", ""}, "GetRun", kKey, kNow)).status()));
  EXPECT_EQ(counters_.counter("bellwether_access_refused_total", {{"reason", "passed_on"}})->value(), 3);
}

TEST_F(PassOnTest, AServerItselfMayOnlyRead) {
  const auto server = Shown(access_->PassOnAsServer("GetRun"));
  ASSERT_TRUE(server.ok()) << server.status();
  EXPECT_TRUE((*server)->Check(Role::kRead, "any").ok());
  for (const Role role : {Role::kWrite, Role::kAct, Role::kAdmin}) EXPECT_FALSE((*server)->Check(role, "any").ok());
}

TEST_F(PassOnTest, ATokenBesideASealCountsForNothing) {
  const auto grant = access_->Identify({.token = "alices", .passed_on = "forged"}, "GetRun");
  EXPECT_TRUE(absl::IsUnauthenticated(grant.status()));
}

TEST_F(PassOnTest, SingleServerRefusesPassedOnIdentities) {
  Counters counters;
  const auto alone = files_.Open(&counters);
  ASSERT_NE(alone, nullptr);
  EXPECT_TRUE(absl::IsUnauthenticated(
      alone->Identify({.passed_on = SealPassedOn({PassedOn::Who::kServer, "", "", ""}, "GetRun", "", 0)}, "GetRun")
          .status()));
}

}  // namespace
}  // namespace bellwether::server
