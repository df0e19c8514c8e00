#include "server/store/storage_lock.h"

#include <rocksdb/env.h>

#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "server/util/status_macros.h"

namespace bellwether::server {

struct StorageLock::DatabaseLock {
  rocksdb::FileLock* held = nullptr;
};

absl::StatusOr<std::unique_ptr<StorageLock>> StorageLock::Take(const std::string& storage_path) {
  std::unique_ptr<StorageLock> lock(new StorageLock);
  BW_ASSIGN_OR_RETURN(lock->log_, FileSystem::Real()->Lock(absl::StrCat(storage_path, "/wal/", kFileName)));
  auto database = std::make_unique<DatabaseLock>();
  const rocksdb::Status status =
      rocksdb::Env::Default()->LockFile(absl::StrCat(storage_path, "/db/", kFileName), &database->held);
  if (!status.ok()) return absl::FailedPreconditionError(absl::StrCat(storage_path, "/db: ", status.ToString()));
  lock->database_ = std::move(database);
  return lock;
}

StorageLock::~StorageLock() {
  if (database_ != nullptr) (void)rocksdb::Env::Default()->UnlockFile(database_->held);
}

}  // namespace bellwether::server
