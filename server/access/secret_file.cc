#include "server/access/secret_file.h"

#include <fcntl.h>
#include <grp.h>
#include <pwd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/util/regular_file.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

constexpr size_t kBytesMax = 1 << 20;

std::string Cause(const std::string& path) { return absl::StrCat(path, ": ", std::strerror(errno)); }

// What a file of that kind must not allow.
mode_t Refused(Secrecy secrecy) { return secrecy == Secrecy::kSecret ? S_IRWXO | S_IWGRP : S_IWOTH | S_IWGRP; }

std::string UserName() {
  std::array<char, 4096> memory;
  passwd entry{};
  passwd* found = nullptr;
  (void)getpwuid_r(geteuid(), &entry, memory.data(), memory.size(), &found);
  return found != nullptr ? found->pw_name : absl::StrCat(geteuid());
}

std::string GroupName() {
  std::array<char, 4096> memory;
  group entry{};
  group* found = nullptr;
  (void)getgrgid_r(getegid(), &entry, memory.data(), memory.size(), &found);
  return found != nullptr ? found->gr_name : absl::StrCat(getegid());
}

// Of a file that this process may not read: what an operator does about it.
std::string Remedy(const std::string& path) {
  const std::string user = UserName(), group = GroupName();
  struct stat info {};
  if (stat(path.c_str(), &info) != 0) {
    const std::string folder = std::filesystem::path(path).parent_path().string();
    return absl::StrCat("; user ", user, " must be able to enter its folder: sudo chgrp ", group, " ", folder,
                        " && sudo chmod g+x ", folder);
  }
  return absl::StrCat("; user ", user, " must be able to read it: sudo chgrp ", group, " ", path, " && sudo chmod 640 ",
                      path);
}

// As the file that it is to replace.
absl::Status KeepOwner(int fd, const std::string& path, Secrecy secrecy) {
  struct stat before {};
  if (stat(path.c_str(), &before) != 0 || !S_ISREG(before.st_mode)) return absl::OkStatus();
  mode_t mode = before.st_mode & 0777 & ~Refused(secrecy);
  if (fchown(fd, before.st_uid, before.st_gid) != 0) {
    if (geteuid() == 0) return absl::InternalError(Cause(path));
    // Who is not root gives no file away, but may keep a group of his own; another's rights are not that group's.
    if (fchown(fd, static_cast<uid_t>(-1), before.st_gid) != 0) mode &= ~mode_t{S_IRWXG};
  }
  return fchmod(fd, mode) == 0 ? absl::OkStatus() : absl::InternalError(Cause(path));
}

}  // namespace

absl::StatusOr<std::string> ReadGuardedFile(const std::string& path, Secrecy secrecy) {
  absl::StatusOr<RegularFile> read = ReadRegularFile(path, kBytesMax);
  if (!read.ok() && absl::StrContains(read.status().message(), std::strerror(EACCES))) {
    return absl::Status(read.status().code(), absl::StrCat(read.status().message(), Remedy(path)));
  }
  BW_ASSIGN_OR_RETURN(RegularFile file, std::move(read));
  const mode_t refused = Refused(secrecy);
  if ((file.mode & refused) != 0) {
    return absl::FailedPreconditionError(
        absl::StrFormat("%s: mode %04o lets others %s it; chmod %s", path, file.mode & 07777u,
                        secrecy == Secrecy::kSecret ? "use" : "change", secrecy == Secrecy::kSecret ? "600" : "644"));
  }
  return std::move(file.text);
}

absl::Status WriteSecretFile(const std::string& path, std::string_view text, bool replace, mode_t mode,
                             Secrecy secrecy) {
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
  if (replace) {
    if (const absl::Status kept = KeepOwner(fd, path, secrecy); !kept.ok()) return fail(kept);
  }
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
