#include "server/store/wal_reserve.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace bellwether::server {

absl::Status WalReserve::GiveUp(const std::vector<WalSegment>& segments, size_t files_max) {
  size_t room = 0;
  {
    absl::MutexLock lock(&mutex_);
    room = files_max - std::min(files_max, paths_.size());
  }
  absl::Status status;
  std::vector<std::string> kept;
  for (const WalSegment& segment : segments) {
    if (status.ok() && kept.size() < room && segment.bytes == segment_bytes_) {
      const std::string path = absl::StrCat(directory_, "/reuse-", segment.number, ".tmp");
      status = fs_->Rename(segment.path, path);
      if (status.ok()) {
        kept.push_back(path);
        continue;
      }
    }
    status.Update(fs_->Remove(segment.path));
  }
  if (status.ok()) status = fs_->SyncDirectory(directory_);
  if (!status.ok()) {
    for (const std::string& path : kept) fs_->Remove(path).IgnoreError();
    return status;
  }
  // Not before: a segment's old name must never lead to what is written from here on.
  absl::MutexLock lock(&mutex_);
  paths_.insert(paths_.end(), kept.begin(), kept.end());
  return absl::OkStatus();
}

std::string WalReserve::Take() {
  absl::MutexLock lock(&mutex_);
  if (paths_.empty()) return "";
  std::string path = std::move(paths_.back());
  paths_.pop_back();
  return path;
}

void WalReserve::Shrink(size_t files_max) {
  std::vector<std::string> remove;
  {
    absl::MutexLock lock(&mutex_);
    const auto keep = static_cast<ptrdiff_t>(std::min(files_max, paths_.size()));
    remove.assign(paths_.begin() + keep, paths_.end());
    paths_.resize(static_cast<size_t>(keep));
  }
  for (const std::string& path : remove) fs_->Remove(path).IgnoreError();  // Else the next start does.
}

}  // namespace bellwether::server
