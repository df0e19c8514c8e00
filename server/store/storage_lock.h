// storage_lock.h: keeps servers out of a storage folder while something else reads it.

#ifndef BELLWETHER_SERVER_STORE_STORAGE_LOCK_H_
#define BELLWETHER_SERVER_STORE_STORAGE_LOCK_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "server/store/file_system.h"

namespace bellwether::server {

// Holds the locks of the log and of the database.  They go with the object, and that of
// the database also when this process closes any file of that name: never open it.
class StorageLock {
 public:
  static constexpr char kFileName[] = "LOCK";  // In wal and in db.

  // FAILED_PRECONDITION: a server, or another process like this one, has them.
  static absl::StatusOr<std::unique_ptr<StorageLock>> Take(const std::string& storage_path);
  ~StorageLock();
  StorageLock(const StorageLock&) = delete;
  StorageLock& operator=(const StorageLock&) = delete;

 private:
  StorageLock() = default;
  std::unique_ptr<File> log_;
  struct DatabaseLock;
  std::unique_ptr<DatabaseLock> database_;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_STORE_STORAGE_LOCK_H_
