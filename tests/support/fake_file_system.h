// fake_file_system.h: files that lose what was not synced.
//
// Every write is remembered until its file is synced, every directory entry
// until its directory is.  Crash() keeps what is durable plus an arbitrary
// subset of the sectors and entries that were under way, which is more than
// a disk would promise and less than a test could hope.  Faults can be armed.
// Thread-safe.

#ifndef BELLWETHER_TESTS_SUPPORT_FAKE_FILE_SYSTEM_H_
#define BELLWETHER_TESTS_SUPPORT_FAKE_FILE_SYSTEM_H_

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "server/store/file_system.h"

namespace bellwether::server {

class FakeFileSystem final : public FileSystem {
 public:
  static constexpr int64_t kSector = 512;

  FakeFileSystem() = default;
  // The files of `other`, which has restarted, and no fault.
  FakeFileSystem(const FakeFileSystem& other) {
    absl::MutexLock lock(&other.mutex_);
    for (const auto& [path, inode] : other.entries_) entries_[path] = std::make_shared<Inode>(*inode);
    durable_entries_ = entries_;
  }

  absl::Status MakeDirectory(const std::string&) override { return absl::OkStatus(); }

  absl::StatusOr<std::vector<std::string>> List(const std::string& directory) override {
    absl::MutexLock lock(&mutex_);
    std::vector<std::string> names;
    for (const auto& [path, inode] : entries_) {
      if (path.rfind(directory + "/", 0) == 0) names.push_back(path.substr(directory.size() + 1));
    }
    return names;
  }

  using FileSystem::Create;
  absl::StatusOr<std::unique_ptr<File>> Create(const std::string& path, int64_t bytes, const GoOn& go_on) override {
    for (int64_t written = 0; go_on && written < bytes; written += kSector) {
      if (!go_on(written)) return absl::CancelledError(path);
    }
    absl::MutexLock lock(&mutex_);
    if (Goes()) return Dead();
    if (full_) return absl::ResourceExhaustedError("disk full");
    auto inode = std::make_shared<Inode>();
    inode->now.assign(static_cast<size_t>(bytes), '\0');
    inode->durable = inode->now;
    entries_[path] = inode;
    return std::make_unique<FakeFile>(this, inode, generation_);
  }

  absl::StatusOr<std::unique_ptr<File>> Open(const std::string& path) override {
    absl::MutexLock lock(&mutex_);
    const auto found = entries_.find(path);
    if (found == entries_.end()) return absl::NotFoundError(path);
    return std::make_unique<FakeFile>(this, found->second, generation_);
  }

  absl::Status Rename(const std::string& from, const std::string& to) override {
    absl::MutexLock lock(&mutex_);
    if (Goes()) return Dead();
    if (FailsChange()) return absl::InternalError("rename: I/O error");
    entries_[to] = entries_.at(from);
    entries_.erase(from);
    return absl::OkStatus();
  }

  absl::Status Remove(const std::string& path) override {
    absl::MutexLock lock(&mutex_);
    if (Goes()) return Dead();
    if (FailsChange()) return absl::InternalError("unlink: I/O error");
    entries_.erase(path);
    return absl::OkStatus();
  }

  absl::Status SyncDirectory(const std::string&) override {
    absl::MutexLock lock(&mutex_);
    if (Goes()) return Dead();
    if (FailsChange()) return absl::InternalError("fsync: I/O error");
    durable_entries_ = entries_;
    return absl::OkStatus();
  }

  absl::StatusOr<std::unique_ptr<File>> Lock(const std::string&) override {
    absl::MutexLock lock(&mutex_);
    return std::make_unique<FakeFile>(this, std::make_shared<Inode>(), generation_);
  }

  // ---- faults ----
  // The power goes: whatever is called from now on fails.
  void CutPower() {
    absl::MutexLock lock(&mutex_);
    dead_ = true;
  }
  // The same with the so-many-th change or sync from now on; a write may then have
  // happened in part.
  void CutPowerAt(int64_t change) {
    absl::MutexLock lock(&mutex_);
    cut_at_ = changes_ + change;
  }
  bool has_power() const {
    absl::MutexLock lock(&mutex_);
    return !dead_;
  }
  // After CutPower(), and once it is not in use: what the disk holds.
  template <typename Random>
  void Restart(Random& random) {
    absl::MutexLock lock(&mutex_);
    const auto coin = [&random] { return (random() & 1) != 0; };
    auto entries = durable_entries_;
    for (const auto& [path, inode] : entries_) {
      if (entries.count(path) == 0 && coin()) entries[path] = inode;
    }
    for (const auto& [path, inode] : durable_entries_) {
      if (entries_.count(path) == 0 && coin()) entries.erase(path);
    }
    for (auto& [path, inode] : entries) {
      const auto size = static_cast<int64_t>(inode->now.size());
      for (int64_t sector = 0; sector < size; sector += kSector) {
        const auto n = static_cast<size_t>(std::min(kSector, size - sector));
        const auto at = static_cast<size_t>(sector);
        if (coin()) std::memcpy(inode->durable.data() + at, inode->now.data() + at, n);
      }
      inode->now = inode->durable;
    }
    entries_ = entries;
    durable_entries_ = entries;
    ++generation_;
    dead_ = false;
    cut_at_ = -1;
  }
  void FailNextSync() { Arm(&fail_sync_); }
  // The next write stops half way with an error.
  void FailNextWrite() { Arm(&fail_write_); }
  // The so-many-th change or sync of a directory from now on does nothing.
  void FailDirectoryChange(int change) {
    absl::MutexLock lock(&mutex_);
    fail_change_ = change;
  }
  void SetFull(bool full) {
    absl::MutexLock lock(&mutex_);
    full_ = full;
  }
  int64_t syncs() const {
    absl::MutexLock lock(&mutex_);
    return syncs_;
  }

 private:
  struct Inode {
    std::string now, durable;
  };

  class FakeFile final : public File {
   public:
    FakeFile(FakeFileSystem* fs, std::shared_ptr<Inode> inode, int generation)
        : fs_(fs), inode_(std::move(inode)), generation_(generation) {}

    absl::Status WriteAt(int64_t offset, std::string_view bytes) override {
      absl::MutexLock lock(&fs_->mutex_);
      if (fs_->dead_ || generation_ != fs_->generation_) return Dead();
      const bool goes = fs_->Goes();
      const bool fails = std::exchange(fs_->fail_write_, false);
      if (fails) bytes = bytes.substr(0, bytes.size() / 2);
      const auto end = static_cast<size_t>(offset) + bytes.size();
      if (inode_->now.size() < end) inode_->now.resize(end, '\0');
      if (inode_->durable.size() < end) inode_->durable.resize(end, '\0');
      inode_->now.replace(static_cast<size_t>(offset), bytes.size(), bytes);
      if (goes) return Dead();
      return fails ? absl::InternalError("write: I/O error") : absl::OkStatus();
    }
    absl::StatusOr<size_t> ReadAt(int64_t offset, size_t size, char* out) const override {
      absl::MutexLock lock(&fs_->mutex_);
      if (static_cast<size_t>(offset) >= inode_->now.size()) return size_t{0};
      const size_t n = std::min(size, inode_->now.size() - static_cast<size_t>(offset));
      std::memcpy(out, inode_->now.data() + offset, n);
      return n;
    }
    absl::Status Sync() override {
      absl::MutexLock lock(&fs_->mutex_);
      if (generation_ != fs_->generation_ || fs_->Goes()) return Dead();
      if (std::exchange(fs_->fail_sync_, false)) {
        inode_->now = inode_->durable;  // The kernel drops what it could not write.
        return absl::InternalError("fdatasync: I/O error");
      }
      ++fs_->syncs_;
      inode_->durable = inode_->now;
      return absl::OkStatus();
    }
    absl::StatusOr<int64_t> Size() const override {
      absl::MutexLock lock(&fs_->mutex_);
      return static_cast<int64_t>(inode_->now.size());
    }

   private:
    FakeFileSystem* const fs_;
    const std::shared_ptr<Inode> inode_;
    const int generation_;
  };

  // Whether there is no power for this change.
  bool Goes() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (++changes_ == cut_at_) dead_ = true;
    return dead_;
  }
  bool FailsChange() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return fail_change_ > 0 && --fail_change_ == 0; }
  static absl::Status Dead() { return absl::InternalError("no power"); }
  void Arm(bool* fault) {
    absl::MutexLock lock(&mutex_);
    *fault = true;
  }

  mutable absl::Mutex mutex_;
  std::map<std::string, std::shared_ptr<Inode>> entries_, durable_entries_;
  int generation_ = 0, fail_change_ = 0;
  bool dead_ = false, full_ = false, fail_sync_ = false, fail_write_ = false;
  int64_t syncs_ = 0, changes_ = 0, cut_at_ = -1;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_TESTS_SUPPORT_FAKE_FILE_SYSTEM_H_
