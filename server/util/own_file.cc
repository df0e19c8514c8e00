#include "server/util/own_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>

namespace bellwether::server {

OwnFile::~OwnFile() { LetGo(); }

void OwnFile::LetGo() {
  if (fd_ >= 0) close(fd_);
  fd_ = -1;
}

bool OwnFile::Take(const std::string& path) {
  LetGo();
  fd_ = open(path.c_str(), O_PATH | O_NOFOLLOW | O_CLOEXEC);
  path_ = path;
  return fd_ >= 0;
}

bool OwnFile::Rename(const std::string& to) {
  if (fd_ < 0 || rename(path_.c_str(), to.c_str()) != 0) return false;
  path_ = to;
  return true;
}

bool OwnFile::Remove() {
  struct stat own {
  }, there{};
  const bool is_own = fd_ >= 0 && fstat(fd_, &own) == 0 && lstat(path_.c_str(), &there) == 0 &&
                      own.st_dev == there.st_dev && own.st_ino == there.st_ino;
  const bool removed = is_own && unlink(path_.c_str()) == 0;
  LetGo();
  return removed;
}

}  // namespace bellwether::server
