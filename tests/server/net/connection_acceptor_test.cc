// Goal: a Unix socket's path is a server's own from bind() to its end, and no
// longer: what a dead one left behind is replaced, what another bound stays.
// Method: acceptors of one process on the same path; nothing is accepted.

#include "server/net/connection_acceptor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/support/temp_directory.h"

namespace bellwether::server {
namespace {

class ConnectionAcceptorTest : public testing::Test {
 protected:
  absl::StatusOr<std::unique_ptr<ConnectionAcceptor>> Listen() {
    return ConnectionAcceptor::Listen("unix:" + path_, {}, &counters_);
  }
  // 0 = nothing is there.
  ino_t Inode() const {
    struct stat info {};
    return lstat(path_.c_str(), &info) == 0 ? info.st_ino : 0;
  }

  TempDirectory folder_;
  const std::string path_ = folder_.path() + "/grpc.sock";
  Counters counters_;
};

TEST_F(ConnectionAcceptorTest, TheSocketIsItsOwnersAloneAndGoesWithIt) {
  auto acceptor = Listen();
  ASSERT_TRUE(acceptor.ok()) << acceptor.status();
  struct stat info {};
  ASSERT_EQ(stat(path_.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600u);
  (*acceptor)->Stop();
  EXPECT_EQ(Inode(), 0u);
  EXPECT_TRUE(Listen().ok()) << "the path is free again";
  EXPECT_EQ(Inode(), 0u) << "the destructor removes it, too";
}

TEST_F(ConnectionAcceptorTest, AnsweringSocketIsNotReplaced) {
  const auto first = Listen();
  const ino_t inode = Inode();
  const auto second = Listen();
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(second.status().message()), testing::HasSubstr("Address already in use"));
  EXPECT_EQ(Inode(), inode);
}

TEST_F(ConnectionAcceptorTest, AnothersSocketStaysWhenTheFirstEnds) {
  auto first = Listen();
  ASSERT_EQ(unlink(path_.c_str()), 0);  // By somebody who takes it for a dead one's.
  const auto second = Listen();
  ASSERT_TRUE(second.ok()) << second.status();
  const ino_t inode = Inode();
  (*first)->Stop();
  EXPECT_EQ(Inode(), inode);
  first->reset();
  EXPECT_EQ(Inode(), inode);
  (*second)->Stop();
  EXPECT_EQ(Inode(), 0u);
}

}  // namespace
}  // namespace bellwether::server
