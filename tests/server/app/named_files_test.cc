// Goal: every file that the configuration names and that cannot be used is said, all at once, each
// with its key, before a server starts with them.
// Method: real files of real certificates, one or several of them taken away, opened to others or
// exchanged.

#include "server/app/named_files.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "server/access/access.h"
#include "tests/support/access_files.h"
#include "tests/support/temp_directory.h"

namespace bellwether::server {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int64_t kNow = 1'800'000'000;

class NamedFilesTest : public ::testing::Test {
 protected:
  void SetUp() override {
    access_.Write("identities: [{name: alice, roles: [read], runs: [\"*\"]}]\n");
    access_.AddToken("alices", "alice");
    options_.access = access_.options();
  }
  std::string path(const std::string& name) const { return folder_.path() + "/" + name; }
  void Write(const std::string& name, const std::string& text) { std::ofstream(path(name)) << text; }
  std::string Checked() const { return std::string(CheckNamedFiles(options_, kNow).message()); }

  TempDirectory folder_;
  AccessFiles access_;
  ServerOptions options_;
};

TEST_F(NamedFilesTest, FilesThatAreGoodGiveNoFinding) {
  EXPECT_EQ(Checked(), "");
  EXPECT_EQ(ReadNamedFiles(nullptr, &options_).message(), "");
  EXPECT_EQ(CheckNamedFiles(ServerOptions(), kNow).message(), "") << "none is named";
}

TEST_F(NamedFilesTest, TokensThatAreMissingAreSaid) {
  options_.access.tokens_file = path("none");
  EXPECT_THAT(Checked(), HasSubstr(absl::StrCat("tokens_file: ", path("none"), ": is not there: until `bellwether ")));
}

TEST_F(NamedFilesTest, TokensThatOthersMayWriteAreSaid) {
  ASSERT_EQ(chmod(access_.tokens_file().c_str(), 0666), 0);
  EXPECT_THAT(Checked(), HasSubstr(absl::StrCat("tokens_file: ", access_.tokens_file(), ": mode 0666 lets others")));
}

TEST_F(NamedFilesTest, EveryTokenOfNoIdentityIsSaid) {
  access_.AddToken("carols", "carol");
  access_.AddToken("daves", "dave");
  EXPECT_THAT(Checked(), AllOf(HasSubstr("tokens_file: "), HasSubstr("is of carol, whom "), HasSubstr("is of dave, ")));
}

TEST_F(NamedFilesTest, EachUnreadableFileIsSaidWithItsKey) {
  options_.rules_file = path("rules.yml");
  options_.policy_file = folder_.path();
  options_.access.access_file = path("access.yml");
  options_.cluster.dsn_files = {path("one"), path("two")};
  const std::string read(ReadNamedFiles(nullptr, &options_).message());
  for (const std::string& key :
       {"rules_file: " + path("rules.yml") + ": cannot be read: ",
        "policy_file: " + folder_.path() + ": is a directory",
        "access_file: " + path("access.yml") + ": cannot be read: ",
        "cluster.dsn_files, entry 1 = " + path("one") + ": ", "cluster.dsn_files, entry 2 = " + path("two") + ": "}) {
    EXPECT_THAT(read, HasSubstr(key));
  }
  options_.tls = {path("cert.pem"), path("key.pem"), path("ca.pem"), path("crl.pem")};
  options_.cluster.peer = {path("peer.pem"), path("peer.key"), path("peer_ca.pem"), ""};
  const std::string checked = Checked();
  for (const std::string& key :
       {"tls.cert_file: " + path("cert.pem"), "tls.key_file: " + path("key.pem"),
        "tls.client_ca_file: " + path("ca.pem"), "tls.crl_file: " + path("crl.pem"),
        "cluster.peer_cert_file: " + path("peer.pem"), "cluster.peer_key_file: " + path("peer.key"),
        "cluster.peer_ca_file: " + path("peer_ca.pem")}) {
    EXPECT_THAT(checked, HasSubstr(key + ": cannot be read: No such file"));
  }
}

TEST_F(NamedFilesTest, FindingsInsideAFileHaveItsKeyToo) {
  Write("rules.yml", "none: 1\nneither: 2\n");
  options_.rules_file = path("rules.yml");
  EXPECT_THAT(std::string(ReadNamedFiles(nullptr, &options_).message()),
              AllOf(HasSubstr(absl::StrCat("rules_file: ", path("rules.yml"), ":1:1: none is unknown")),
                    HasSubstr(absl::StrCat("rules_file: ", path("rules.yml"), ":2:1: neither is unknown"))));
}

TEST_F(NamedFilesTest, EachFileThatIsNoPemIsSaid) {
  for (const char* name : {"cert.pem", "key.pem", "ca.pem"}) {
    Write(name, "nothing\n");
    ASSERT_EQ(chmod(path(name).c_str(), 0600), 0);
  }
  options_.tls = {path("cert.pem"), path("key.pem"), path("ca.pem"), ""};
  EXPECT_THAT(Checked(), AllOf(HasSubstr("tls.cert_file: " + path("cert.pem") + ": holds no certificate in PEM"),
                               HasSubstr("tls.key_file: " + path("key.pem") + ": holds no private key in PEM"),
                               HasSubstr("tls.client_ca_file: " + path("ca.pem") + ": holds no certificate in PEM")));
}

TEST_F(NamedFilesTest, AFileThatTwoKeysShareIsSaidOnce) {
  options_.tls = {path("cert.pem"), path("key.pem"), path("ca.pem"), ""};
  options_.cluster.peer.client_ca = path("peer_ca.pem");
  const std::string checked = Checked();
  EXPECT_EQ(checked.find("tls.cert_file: "), checked.rfind("tls.cert_file: ")) << checked;
  EXPECT_THAT(checked, HasSubstr("cluster.peer_ca_file: "));
}

TEST_F(NamedFilesTest, TokensMayBeMissingAtAStartButNotUnreadable) {
  Counters counters;
  AccessOptions access = options_.access;
  access.tokens_file = path("none");
  EXPECT_TRUE(Access::Open(access, &counters, Clock::System()).ok());
  access.tokens_file = path("loop");  // What root cannot read either.
  std::filesystem::create_symlink("loop", path("loop"));
  EXPECT_THAT(std::string(Access::Open(access, &counters, Clock::System()).status().message()),
              HasSubstr("loop: cannot be read: "));
}

}  // namespace
}  // namespace bellwether::server
