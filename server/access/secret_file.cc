#include "server/access/secret_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/util/regular_file.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

constexpr size_t kBytesMax = 1 << 20;

std::string Cause(const std::string& path) { return absl::StrCat(path, ": ", std::strerror(errno)); }

}  // namespace

absl::StatusOr<std::string> ReadGuardedFile(const std::string& path, Secrecy secrecy) {
  BW_ASSIGN_OR_RETURN(RegularFile file, ReadRegularFile(path, kBytesMax));
  const mode_t refused = secrecy == Secrecy::kSecret ? S_IRWXO | S_IWGRP : S_IWOTH | S_IWGRP;
  if ((file.mode & refused) != 0) {
    return absl::FailedPreconditionError(
        absl::StrFormat("%s: mode %04o lets others %s it; chmod %s", path, file.mode & 07777u,
                        secrecy == Secrecy::kSecret ? "use" : "change", secrecy == Secrecy::kSecret ? "600" : "644"));
  }
  return std::move(file.text);
}

absl::Status WriteSecretFile(const std::string& path, std::string_view text, bool replace, mode_t mode) {
  if (!replace && access(path.c_str(), F_OK) == 0) {
    return absl::AlreadyExistsError(absl::StrCat(path, ": is there already"));
  }
  std::string partial = path + ".XXXXXX";
  const int fd = mkostemp(partial.data(), O_CLOEXEC);
  if (fd < 0) return absl::InternalError(Cause(partial));
  const auto fail = [&](absl::Status status) {
    close(fd);
    unlink(partial.c_str());
    return status;
  };
  if (fchmod(fd, mode) != 0) return fail(absl::InternalError(Cause(partial)));
  for (size_t at = 0; at < text.size();) {
    const ssize_t put = write(fd, text.data() + at, text.size() - at);
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) return fail(absl::InternalError(Cause(partial)));
    at += static_cast<size_t>(put);
  }
  if (fsync(fd) != 0) return fail(absl::InternalError(Cause(partial)));
  // link() refuses what rename() would replace.
  if (!replace && link(partial.c_str(), path.c_str()) != 0) {
    return fail(errno == EEXIST ? absl::AlreadyExistsError(absl::StrCat(path, ": is there already"))
                                : absl::InternalError(Cause(path)));
  }
  if (!replace) unlink(partial.c_str());
  if (replace && rename(partial.c_str(), path.c_str()) != 0) return fail(absl::InternalError(Cause(path)));
  close(fd);
  return absl::OkStatus();
}

bool FileStamp::Changed(const std::string& path) {
  struct stat info {};
  const bool there = stat(path.c_str(), &info) == 0;
  const auto inode = there ? static_cast<int64_t>(info.st_ino) : 0;
  const auto size = there ? static_cast<int64_t>(info.st_size) : 0;
  const int64_t modified_ns = there ? int64_t{info.st_mtim.tv_sec} * 1'000'000'000 + info.st_mtim.tv_nsec : 0;
  const bool changed = !asked_ || inode != inode_ || size != size_ || modified_ns != modified_ns_;
  asked_ = true;
  inode_ = inode;
  size_ = size;
  modified_ns_ = modified_ns;
  return changed;
}

}  // namespace bellwether::server
