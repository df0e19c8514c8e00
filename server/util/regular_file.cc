#include "server/util/regular_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "server/util/clean_text.h"

namespace bellwether::server {

absl::StatusOr<RegularFile> ReadRegularFile(const std::string& path, size_t bytes_max) {
  const auto cause = [&path] { return absl::StrCat(path, ": cannot be read: ", std::strerror(errno)); };
  // A pipe that nobody writes opens at once, and is refused below.
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return absl::NotFoundError(cause());
  const auto close_it = absl::MakeCleanup([fd] { close(fd); });
  struct stat info {};
  if (fstat(fd, &info) != 0) return absl::InternalError(cause());
  if (!S_ISREG(info.st_mode)) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, S_ISDIR(info.st_mode) ? ": is a directory, " : ": ", "is no plain file"));
  }
  const auto size_now = static_cast<size_t>(info.st_size);
  if (size_now > bytes_max) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": is ", size_now, " bytes long: at most ", bytes_max));
  }
  RegularFile file{std::string(size_now + 1, '\0'), info.st_mode};
  size_t size = 0;
  for (;;) {
    const ssize_t got = read(fd, file.text.data() + size, file.text.size() - size);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return absl::InternalError(cause());
    if (got == 0) break;
    size += static_cast<size_t>(got);
    if (size > bytes_max) return absl::InvalidArgumentError(absl::StrCat(path, ": grows while it is read"));
    if (size == file.text.size()) file.text.resize(2 * size);
  }
  file.text.resize(size);
  return file;
}

absl::Status CheckUtf8(std::string_view text, const std::string& file) {
  size_t line = 1;
  size_t column = 1;
  for (size_t at = 0; at < text.size();) {
    const size_t length = Utf8Length(text.substr(at));
    if (length == 0) {
      return absl::InvalidArgumentError(absl::StrCat(file, ":", line, ":", column, ": byte ",
                                                     static_cast<int>(static_cast<unsigned char>(text[at])),
                                                     " is no UTF-8: the file must be text in UTF-8"));
    }
    ++column;
    if (text[at] == '\n') {
      ++line;
      column = 1;
    }
    at += length;
  }
  return absl::OkStatus();
}

}  // namespace bellwether::server
