// file_system.h: the few file operations of the log, so that tests can lose
// power, fill the disk and fail an fsync.
//
// Thread-safe, except that a File's calls must not overlap a write of the same
// range.

#ifndef BELLWETHER_SERVER_STORE_FILE_SYSTEM_H_
#define BELLWETHER_SERVER_STORE_FILE_SYSTEM_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace bellwether::server {

class File {
 public:
  virtual ~File() = default;
  // All of it or an error; after an error any part of it may be there.
  virtual absl::Status WriteAt(int64_t offset, std::string_view bytes) = 0;
  // Up to `size` bytes into `out`; fewer only at the end of the file.
  virtual absl::StatusOr<size_t> ReadAt(int64_t offset, size_t size, char* out) const = 0;
  // fdatasync.  After an error nothing is known of what was not synced before.
  virtual absl::Status Sync() = 0;
  virtual absl::StatusOr<int64_t> Size() const = 0;
};

// Errors: NOT_FOUND, RESOURCE_EXHAUSTED (disk full), FAILED_PRECONDITION
// (locked by another process), INTERNAL (anything else), with path and cause.
class FileSystem {
 public:
  virtual ~FileSystem() = default;
  static FileSystem* Real();

  // Mode 0700, with parents; durable when it returns.
  virtual absl::Status MakeDirectory(const std::string& path) = 0;
  virtual absl::StatusOr<std::vector<std::string>> List(const std::string& directory) = 0;
  // A new file of `bytes` zeros that are on disk when this returns, mode 0600;
  // replaces what was there.  Nothing is left behind on error.  Its room is taken
  // first; `go_on`, if there is one, is called with the zeros written so far before
  // more of them are, may wait, and ends it with CANCELLED by returning false.
  using GoOn = std::function<bool(int64_t written)>;
  virtual absl::StatusOr<std::unique_ptr<File>> Create(const std::string& path, int64_t bytes, const GoOn& go_on) = 0;
  absl::StatusOr<std::unique_ptr<File>> Create(const std::string& path, int64_t bytes) {
    return Create(path, bytes, nullptr);
  }
  virtual absl::StatusOr<std::unique_ptr<File>> Open(const std::string& path) = 0;
  virtual absl::Status Rename(const std::string& from, const std::string& to) = 0;
  virtual absl::Status Remove(const std::string& path) = 0;
  // Makes creations, renames and removals in it durable.
  virtual absl::Status SyncDirectory(const std::string& path) = 0;
  // Holds `path` for this process until the result is destroyed.
  virtual absl::StatusOr<std::unique_ptr<File>> Lock(const std::string& path) = 0;
};

// Makes a file, or a folder's entries, durable.
absl::Status SyncPath(const std::string& path);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_STORE_FILE_SYSTEM_H_
