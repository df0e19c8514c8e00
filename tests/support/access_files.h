// access_files.h: identities for a test, on real files.

#ifndef BELLWETHER_TESTS_SUPPORT_ACCESS_FILES_H_
#define BELLWETHER_TESTS_SUPPORT_ACCESS_FILES_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "server/access/access.h"
#include "server/access/secret_file.h"
#include "server/access/token_file.h"
#include "tests/support/temp_directory.h"

namespace bellwether::server {

class AccessFiles {
 public:
  void Write(const std::string& yaml) { EXPECT_TRUE(WriteSecretFile(access_file(), yaml, /*replace=*/true).ok()); }
  // `token` opens what `identity` may.
  void AddToken(const std::string& token, const std::string& identity, int64_t expires_unix_s = INT64_MAX) {
    tokens_.push_back({HashToken(token), identity, 0, expires_unix_s});
    WriteTokens();
  }
  void RemoveTokens() {
    tokens_.clear();
    WriteTokens();
  }

  std::string access_file() const { return directory_.path() + "/access.yml"; }
  std::string tokens_file() const { return directory_.path() + "/tokens"; }
  std::string audit_file() const { return directory_.path() + "/audit.log"; }
  AccessOptions options() const {
    return {.access_file = access_file(), .tokens_file = tokens_file(), .audit = {.path = audit_file()}};
  }
  std::unique_ptr<Access> Open(Counters* counters, Clock* clock = Clock::System()) const {
    auto access = Access::Open(options(), counters, clock);
    EXPECT_TRUE(access.ok()) << access.status();
    return access.ok() ? *std::move(access) : nullptr;
  }

  // Everything for a caller with this token, nothing for others.
  static std::unique_ptr<AccessFiles> WithToken(const std::string& token) {
    auto files = std::make_unique<AccessFiles>();
    files->Write("identities: [{name: holder, roles: [admin], runs: [\"*\"]}]\n");
    files->AddToken(token, "holder");
    return files;
  }

 private:
  void WriteTokens() { EXPECT_TRUE(server::WriteTokens(tokens_file(), tokens_).ok()); }

  TempDirectory directory_;
  std::vector<StoredToken> tokens_;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_TESTS_SUPPORT_ACCESS_FILES_H_
