// Goal: what this process made is removed wherever it was renamed to, and what
// somebody else put in its place stays, also where its inode's number might be
// the same.
// Method: files and a bound socket in a folder, replaced between making and removing.

#include "server/util/own_file.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "tests/support/temp_directory.h"

namespace bellwether::server {
namespace {

class OwnFileTest : public testing::Test {
 protected:
  std::string Write(const std::string& name) {
    const std::string path = folder_.path() + "/" + name;
    std::ofstream(path) << "here";
    return path;
  }
  static bool IsThere(const std::string& path) {
    return std::filesystem::exists(std::filesystem::symlink_status(path));
  }

  TempDirectory folder_;
};

TEST_F(OwnFileTest, OwnedFileIsRemovedOnce) {
  const std::string path = Write("a");
  OwnFile own;
  EXPECT_FALSE(own.Remove()) << "nothing was taken";
  ASSERT_TRUE(own.Take(path));
  EXPECT_TRUE(own.Remove());
  EXPECT_FALSE(IsThere(path));
  Write("a");
  EXPECT_FALSE(own.Remove());
  EXPECT_TRUE(IsThere(path));
}

TEST_F(OwnFileTest, RenamedFileIsStillOwned) {
  const std::string from = Write("a"), to = Write("b");
  OwnFile own;
  ASSERT_TRUE(own.Take(from));
  ASSERT_TRUE(own.Rename(to));
  Write("a");
  EXPECT_TRUE(own.Remove());
  EXPECT_TRUE(IsThere(from));
  EXPECT_FALSE(IsThere(to));
  EXPECT_FALSE(own.Rename(from)) << "nothing is held";
}

TEST_F(OwnFileTest, ReplacementByAnotherIsNotRemoved) {
  const std::string path = Write("a");
  OwnFile own;
  ASSERT_TRUE(own.Take(path));
  // The first would free the inode for the others, were it not held.
  for (int i = 0; i < 8; ++i) std::filesystem::rename(Write("b"), path);
  EXPECT_FALSE(own.Remove());
  EXPECT_TRUE(IsThere(path));
  ASSERT_TRUE(own.Take(path));
  std::filesystem::remove(path);
  EXPECT_FALSE(own.Remove()) << "it is gone";
  ASSERT_TRUE(own.Take(Write("a")));
  std::filesystem::rename(path, folder_.path() + "/c");
  std::filesystem::create_symlink(folder_.path() + "/c", path);
  EXPECT_FALSE(own.Remove()) << "a link to it is another's";
  EXPECT_TRUE(IsThere(path));
}

TEST_F(OwnFileTest, MissingFileCannotBeTaken) {
  OwnFile own;
  EXPECT_FALSE(own.Take(folder_.path() + "/nothing"));
  EXPECT_EQ(errno, ENOENT);
  Write("nothing");
  EXPECT_FALSE(own.Remove());
}

TEST_F(OwnFileTest, ABoundSocketIsAFileToo) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string path = folder_.path() + "/s";
  path.copy(address.sun_path, sizeof(address.sun_path) - 1);
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  ASSERT_EQ(bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  OwnFile own;
  ASSERT_TRUE(own.Take(path));
  EXPECT_TRUE(own.Remove());
  EXPECT_FALSE(IsThere(path));
  close(fd);
}

}  // namespace
}  // namespace bellwether::server
