#include "server/store/file_system.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

absl::Status ErrnoStatus(const char* what, const std::string& path, int error) {
  const std::string text = absl::StrCat(what, " ", path, ": ", std::strerror(error));
  if (error == ENOENT) return absl::NotFoundError(text);
  if (error == ENOSPC || error == EDQUOT) return absl::ResourceExhaustedError(text);
  if (error == EWOULDBLOCK) return absl::FailedPreconditionError(text);
  return absl::InternalError(text);
}

constexpr int64_t kZerosAtOnce = 256 << 10;

class RealFile final : public File {
 public:
  RealFile(int fd, std::string path) : fd_(fd), path_(std::move(path)) {}
  ~RealFile() override { ::close(fd_); }

  absl::Status WriteAt(int64_t offset, std::string_view bytes) override {
    while (!bytes.empty()) {
      const ssize_t n = ::pwrite(fd_, bytes.data(), bytes.size(), offset);
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) return ErrnoStatus("write", path_, n < 0 ? errno : EIO);
      bytes.remove_prefix(static_cast<size_t>(n));
      offset += n;
    }
    return absl::OkStatus();
  }

  absl::StatusOr<size_t> ReadAt(int64_t offset, size_t size, char* out) const override {
    size_t got = 0;
    while (got < size) {
      const ssize_t n = ::pread(fd_, out + got, size - got, offset + static_cast<int64_t>(got));
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return ErrnoStatus("read", path_, errno);
      if (n == 0) break;
      got += static_cast<size_t>(n);
    }
    return got;
  }

  absl::Status Sync() override {
    // EINTR is an error like any other: a second fdatasync could report success
    // for pages that the first one lost.
    return ::fdatasync(fd_) == 0 ? absl::OkStatus() : ErrnoStatus("fdatasync", path_, errno);
  }

  absl::StatusOr<int64_t> Size() const override {
    struct stat info;
    if (::fstat(fd_, &info) != 0) return ErrnoStatus("stat", path_, errno);
    return static_cast<int64_t>(info.st_size);
  }

  absl::Status FillWithZeros(int64_t bytes, const FileSystem::GoOn& go_on) {
    // Allocating first finds a full disk before anything is written; writing
    // the zeros makes later fdatasyncs free of metadata.
    const int error = ::posix_fallocate(fd_, 0, bytes);
    if (error != 0 && error != EOPNOTSUPP && error != EINVAL) return ErrnoStatus("allocate", path_, error);
    const std::string zeros(static_cast<size_t>(std::min(bytes, kZerosAtOnce)), '\0');
    for (int64_t done = 0; done < bytes; done += kZerosAtOnce) {
      if (go_on && !go_on(done)) return absl::CancelledError(absl::StrCat(path_, " is not needed any more"));
      const int64_t n = std::min(bytes - done, kZerosAtOnce);
      BW_RETURN_IF_ERROR(WriteAt(done, std::string_view(zeros).substr(0, static_cast<size_t>(n))));
      // To the disk as they come: the log's own fdatasyncs wait behind them.  Not by
      // fdatasync, which would also write the file system's journal each time.  What
      // it cannot do the fsync below does, and reports.
      (void)::sync_file_range(fd_, done, n,
                              SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER);
    }
    return ::fsync(fd_) == 0 ? absl::OkStatus() : ErrnoStatus("fsync", path_, errno);
  }

  int fd() const { return fd_; }

 private:
  const int fd_;
  const std::string path_;
};

absl::StatusOr<std::unique_ptr<RealFile>> OpenFile(const std::string& path, int flags) {
  const int fd = ::open(path.c_str(), flags | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (fd < 0) return ErrnoStatus("open", path, errno);
  return std::make_unique<RealFile>(fd, path);
}

class RealFileSystem final : public FileSystem {
 public:
  absl::Status MakeDirectory(const std::string& path) override {
    std::error_code error;
    if (path.empty() || std::filesystem::is_directory(path, error)) return absl::OkStatus();
    const std::string parent = std::filesystem::path(path).parent_path().string();
    BW_RETURN_IF_ERROR(MakeDirectory(parent));
    if (::mkdir(path.c_str(), 0700) != 0 && errno != EEXIST) return ErrnoStatus("make directory", path, errno);
    // Each of them: what is synced inside a folder is worth nothing if the folder is not there after a power cut.
    return SyncDirectory(parent.empty() ? "." : parent);
  }

  absl::StatusOr<std::vector<std::string>> List(const std::string& directory) override {
    std::error_code error;
    std::vector<std::string> names;
    for (std::filesystem::directory_iterator it(directory, error), end; !error && it != end; it.increment(error)) {
      names.push_back(it->path().filename().string());
    }
    if (error) return ErrnoStatus("list", directory, error.value());
    return names;
  }

  absl::StatusOr<std::unique_ptr<File>> Create(const std::string& path, int64_t bytes, const GoOn& go_on) override {
    BW_ASSIGN_OR_RETURN(std::unique_ptr<RealFile> file, OpenFile(path, O_RDWR | O_CREAT | O_TRUNC));
    if (absl::Status status = file->FillWithZeros(bytes, go_on); !status.ok()) {
      ::unlink(path.c_str());
      return status;
    }
    return file;
  }

  absl::StatusOr<std::unique_ptr<File>> Open(const std::string& path) override { return OpenFile(path, O_RDWR); }

  absl::Status Rename(const std::string& from, const std::string& to) override {
    return ::rename(from.c_str(), to.c_str()) == 0 ? absl::OkStatus() : ErrnoStatus("rename", from, errno);
  }

  absl::Status Remove(const std::string& path) override {
    return ::unlink(path.c_str()) == 0 ? absl::OkStatus() : ErrnoStatus("remove", path, errno);
  }

  absl::Status SyncDirectory(const std::string& path) override { return SyncPath(path); }

  absl::StatusOr<std::unique_ptr<File>> Lock(const std::string& path) override {
    BW_ASSIGN_OR_RETURN(std::unique_ptr<RealFile> file, OpenFile(path, O_RDWR | O_CREAT));
    if (::flock(file->fd(), LOCK_EX | LOCK_NB) != 0) {
      if (errno != EWOULDBLOCK) return ErrnoStatus("lock", path, errno);
      return absl::FailedPreconditionError(absl::StrCat(path, " is held by another process: one server per directory"));
    }
    return file;
  }
};

}  // namespace

FileSystem* FileSystem::Real() {
  static RealFileSystem real;
  return &real;
}

absl::Status SyncPath(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return ErrnoStatus("open", path, errno);
  const int error = ::fsync(fd) == 0 ? 0 : errno;
  ::close(fd);
  return error == 0 ? absl::OkStatus() : ErrnoStatus("fsync", path, error);
}

}  // namespace bellwether::server
