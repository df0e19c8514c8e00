// wal_reserve.h: files of segments that a log gave up, kept to be written again.
//
// They have names that no log reads, which the next start removes.
//
// Thread-safe.

#ifndef BELLWETHER_SERVER_STORE_WAL_RESERVE_H_
#define BELLWETHER_SERVER_STORE_WAL_RESERVE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "server/store/file_system.h"
#include "server/store/wal_recovery.h"

namespace bellwether::server {

class WalReserve {
 public:
  // Of segments of `segment_bytes`; `file_system` must outlive it.
  WalReserve(FileSystem* file_system, const std::string& directory, int64_t segment_bytes)
      : fs_(file_system), directory_(directory), segment_bytes_(segment_bytes) {}

  // Takes the files of segments that are the log's no more: `files_max` are held at
  // most, the others removed.  An error is the first of the disk's: none of these is
  // held then, and those that cannot be removed either are left to the next start.
  absl::Status GiveUp(const std::vector<WalSegment>& segments, size_t files_max);
  // The path of one, which is the caller's from now on; "" = there is none.
  std::string Take();
  bool empty() const {
    absl::MutexLock lock(&mutex_);
    return paths_.empty();
  }
  // Removes all but `files_max`.
  void Shrink(size_t files_max);

 private:
  FileSystem* const fs_;
  const std::string directory_;
  const int64_t segment_bytes_;
  mutable absl::Mutex mutex_;
  std::vector<std::string> paths_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_STORE_WAL_RESERVE_H_
