#include "client_lib/src/regular_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace bellwether::client {
namespace {

const char* KindOf(mode_t mode) {
  if (S_ISFIFO(mode)) return "a FIFO";
  if (S_ISSOCK(mode)) return "a socket";
  if (S_ISDIR(mode)) return "a folder";
  if (S_ISCHR(mode) || S_ISBLK(mode)) return "a device";
  return "of an unknown kind";
}

bool IsRegular(const struct stat& info, std::string* error) {
  if (S_ISREG(info.st_mode)) return true;
  *error = std::string("it is ") + KindOf(info.st_mode) + ", must be a regular file";
  errno = EINVAL;
  return false;
}

int Fail(std::string* error) {
  *error = std::strerror(errno);
  return -1;
}

}  // namespace

bool CanBeRegularFile(const std::string& path, std::string* error) {
  struct stat info {};
  if (stat(path.c_str(), &info) == 0) return IsRegular(info, error);
  if (errno == ENOENT) return true;
  Fail(error);
  return false;
}

int OpenRegularFile(const std::string& path, int flags, mode_t mode, std::string* error) {
  // Before it is opened: that alone may wake a FIFO's reader or rewind a tape.
  if (!CanBeRegularFile(path, error)) return -1;
  const int fd = open(path.c_str(), (flags & ~O_TRUNC) | O_CLOEXEC | O_NONBLOCK | O_NOCTTY, mode);
  if (fd < 0) return Fail(error);
  struct stat info {};
  const bool usable = fstat(fd, &info) == 0 ? IsRegular(info, error) : Fail(error) == 0;
  if (usable && ((flags & O_TRUNC) == 0 || ftruncate(fd, 0) == 0 || Fail(error) == 0)) return fd;
  const int why = errno;
  close(fd);
  errno = why;
  return -1;
}

bool ReadRegularFile(const std::string& path, size_t bytes_max, std::string* text, std::string* error) {
  const int fd = OpenRegularFile(path, O_RDONLY, 0, error);
  if (fd < 0) return false;
  text->clear();
  char bytes[1 << 14];
  ssize_t got;
  // Not by its size: it may grow, and files of the kernel have none.
  while ((got = read(fd, bytes, sizeof(bytes))) != 0) {
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) break;
    text->append(bytes, static_cast<size_t>(got));
    if (text->size() > bytes_max) break;
  }
  if (got < 0) Fail(error);
  if (got > 0) *error = "it has more than " + std::to_string(bytes_max) + " bytes";
  close(fd);
  return got == 0;
}

}  // namespace bellwether::client
