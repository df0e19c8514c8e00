// rocks_database.h: the database as the store's own parts see it: raw keys.
//
// Private to server/store.  A Database is always a RocksDatabase and a RunBatch
// always a RocksBatch; As() is the one cast.

#ifndef BELLWETHER_SERVER_STORE_ROCKS_DATABASE_H_
#define BELLWETHER_SERVER_STORE_ROCKS_DATABASE_H_

#include <rocksdb/db.h>
#include <rocksdb/write_batch.h>

#include <atomic>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "server/store/database.h"

namespace bellwether::server {

inline rocksdb::Slice ToSlice(std::string_view bytes) { return {bytes.data(), bytes.size()}; }
inline std::string_view FromSlice(rocksdb::Slice slice) { return {slice.data(), slice.size()}; }
absl::Status FromRocks(const rocksdb::Status& status);

// Builds a key: a prefix byte, then big-endian numbers.
class KeyBuilder {
 public:
  explicit KeyBuilder(char prefix) : key_(1, prefix) {}
  KeyBuilder& U8(uint8_t value) { return Append(value, 1); }
  KeyBuilder& U24(uint32_t value) { return Append(value, 3); }
  KeyBuilder& U32(uint32_t value) { return Append(value, 4); }
  KeyBuilder& U64(uint64_t value) { return Append(value, 8); }
  // Negative numbers sort first.
  KeyBuilder& I64(int64_t value) { return Append(static_cast<uint64_t>(value) ^ (uint64_t{1} << 63), 8); }
  // Ends with a zero byte: no key is a prefix of another.
  KeyBuilder& String(std::string_view value) {
    key_.append(value);
    key_.push_back('\0');
    return *this;
  }
  const std::string& key() const { return key_; }

 private:
  KeyBuilder& Append(uint64_t value, int bytes) {
    for (int shift = 8 * (bytes - 1); shift >= 0; shift -= 8) key_.push_back(static_cast<char>(value >> shift));
    return *this;
  }
  std::string key_;
};
// Big-endian number of `bytes` bytes at `offset` of a key that is long enough.
uint64_t KeyNumber(std::string_view key, size_t offset, int bytes);
inline int64_t KeyStep(std::string_view key, size_t offset) {
  return static_cast<int64_t>(KeyNumber(key, offset, 8) ^ (uint64_t{1} << 63));
}

class RocksDatabase;

class RocksBatch final : public RunBatch {
 public:
  explicit RocksBatch(const RocksDatabase* database) : database_(database) {}
  ~RocksBatch() override;
  void PutRun(const RunRecord& run) override;
  void PutRank(RunId run, const RankRecord& rank) override;
  void PutEvent(RunId run, const RunEvent& event) override;
  void PutState(const RunRecord& run, std::string_view state) override;
  void PutRows(RunId run, const RunRows& rows) override;

  static RocksBatch* As(RunBatch* batch) { return static_cast<RocksBatch*>(batch); }
  void Put(std::string_view key, std::string_view value);
  // Of a row whose value has `bytes`.
  void Delete(std::string_view key, size_t bytes);
  // Called once the batch can be read.
  void OnCommitted(std::function<void()> call) { committed_.push_back(std::move(call)); }
  // Called when it goes without having been committed.
  void OnAbandoned(std::function<void()> call) { abandoned_.push_back(std::move(call)); }

 private:
  friend class RocksDatabase;
  const RocksDatabase* const database_;
  rocksdb::WriteBatch batch_;
  int64_t superseded_bytes_ = 0;                       // Of rows that this batch deletes or replaces.
  std::vector<std::pair<RunId, std::string>> events_;  // Numbered by Commit.
  std::vector<std::function<void()>> committed_, abandoned_;
  bool is_shared_ = false;
};

class RocksDatabase final : public Database {
 public:
  static RocksDatabase* As(Database* database) { return static_cast<RocksDatabase*>(database); }
  static absl::StatusOr<std::unique_ptr<RocksDatabase>> Open(const Options& options);
  // Of a directory that no process has open: keeps what can be read.
  static absl::Status Repair(const Options& options);
  // Reads every block of a directory's files, whether it can be opened or not;
  // no process has it open.  Returns of each damaged file its name, rows and
  // what they are of.
  static std::vector<std::string> FindDamage(const std::string& directory);
  ~RocksDatabase() override;

  using Database::ListRuns;
  absl::StatusOr<std::vector<RunRecord>> ListRuns(RunId first, RunId end) const override;
  absl::StatusOr<RunRecord> GetRun(RunId run) const override;
  absl::Status DeleteRun(const RunRecord& run) override;
  absl::StatusOr<std::vector<RankRecord>> ListRanks(RunId run) const override;
  absl::StatusOr<std::string> GetState(RunId run) const override;
  absl::StatusOr<RunRows> GetRows(RunId run) const override;
  absl::StatusOr<std::vector<RunEvent>> ListEvents(RunId run, uint64_t skip, size_t count) const override;
  absl::StatusOr<uint64_t> CountEvents(RunId run) const override;
  std::unique_ptr<RunBatch> NewBatch() override { return std::make_unique<RocksBatch>(this); }
  absl::Status ShareBatch(RunBatch* batch) override;
  absl::Status Commit(std::unique_ptr<RunBatch> batch) override;
  absl::StatusOr<bool> PutTransition(AlertTransition* transition) override;
  absl::StatusOr<std::vector<AlertTransition>> ListTransitions(uint64_t after, size_t limit, RunId run) const override;
  uint64_t last_transition_id() const override;
  absl::Status PutAlertNote(RunId run, const std::string& key, const AlertNote& note) override;
  absl::StatusOr<AlertNote> GetAlertNote(RunId run, const std::string& key) const override;
  absl::Status PutTold(RunId run, uint32_t receiver, uint64_t id) override;
  absl::StatusOr<uint64_t> GetTold(RunId run, uint32_t receiver) const override;
  absl::StatusOr<size_t> PutAction(RunId run, const Action& action) override;
  absl::StatusOr<std::vector<Action>> ListActions(RunId run) const override;
  absl::StatusOr<bool> PutAudit(RunId run, Lsn lsn, const AuditEntry& entry) override;
  absl::StatusOr<std::vector<AuditEntry>> ListAudit(RunId run) const override;
  absl::Status PutBands(RunId run, std::string_view row) override;
  absl::Status DeleteBands(RunId run) override;
  absl::StatusOr<std::vector<BandsRow>> ListBands() const override;
  absl::Status TakeUpRows(const std::vector<SharedRow>& rows, bool only_missing) override;
  absl::Status ForgetRuns(RunId first, RunId end) override;
  bool is_shared() const override { return shared_ != nullptr; }
  uint32_t StoreOf(RunId run) const override;
  absl::Status KeepTransition(const AlertTransition& transition) override;
  absl::StatusOr<std::vector<AlertTransition>> FetchTransitions() override;
  absl::Status Flush() override;
  absl::Status CopyTo(const std::string& directory) override;
  int64_t bytes() const override;
  // Gives back the space of series' rows that were deleted or made shorter.
  absl::Status CompactSeries();

  // A view that later commits do not change.
  class Snapshot {
   public:
    explicit Snapshot(const RocksDatabase* database);
    ~Snapshot();
    Snapshot(const Snapshot&) = delete;
    Snapshot& operator=(const Snapshot&) = delete;
    // Keys that begin with `prefix`, from `from` on (at least the prefix), in
    // order; `visit` returns false to stop.
    absl::Status Scan(std::string_view prefix, std::string_view from,
                      const std::function<bool(std::string_view key, std::string_view value)>& visit) const;
    absl::StatusOr<std::string> Get(std::string_view key) const;  // NOT_FOUND
    // The last key <= `at` that begins with `prefix`; false if there is none.
    absl::StatusOr<bool> FindBefore(std::string_view prefix, std::string_view at, std::string* key,
                                    std::string* value) const;

   private:
    const RocksDatabase* const database_;
    const rocksdb::Snapshot* const snapshot_;
  };

 private:
  friend class RocksBatch;

  RocksDatabase() = default;
  // Rows that live for minutes have a family of their own: what replaces them
  // must not have to sink through all that is kept for years to free their space.
  rocksdb::ColumnFamilyHandle* FamilyOf(std::string_view key) const;
  // Rewrites that family if much of it is superseded.
  absl::Status CompactPassing();
  absl::Status Write(rocksdb::WriteBatch* batch);  // Lost by a crash, replayed from the WAL.
  // For what people have seen, or have seen once: transitions, notes, actions,
  // bands.
  absl::Status WriteDurably(rocksdb::WriteBatch* batch);
  absl::Status WriteSynced(rocksdb::WriteBatch* batch);  // The same, not shared.
  // To the shared store, if there is one, what belongs to runs.
  absl::Status Share(const rocksdb::WriteBatch& batch) const;
  // Whether it is stored; fills in its id then.
  absl::StatusOr<bool> FindTransition(const std::string& index, AlertTransition* transition) const;
  absl::StatusOr<bool> PutSharedTransition(const std::string& index, AlertTransition* transition);
  // Takes up all that the shared store has beyond this one.
  absl::Status FetchLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(fetch_mutex_);
  // After an error RocksDB takes nothing until Resume() is called: each second
  // at most.
  void GoOnAfterAnError();
  absl::Status Noted(absl::Status status);
  absl::Status LoadTransitionIds();
  // Deletes the rows of this kind of the run, some at a time.
  absl::Status DeleteRows(char kind, RunId run);
  // Brings what an older version wrote to kSchemaVersion.  FAILED_PRECONDITION: a
  // newer one wrote it.
  absl::Status Migrate();

  std::unique_ptr<rocksdb::DB> db_;
  rocksdb::ColumnFamilyHandle* lasting_ = nullptr;  // Owned: closed before db_.
  rocksdb::ColumnFamilyHandle* passing_ = nullptr;
  std::atomic<int64_t> superseded_bytes_ = 0;  // In passing_, since it was compacted.
  std::atomic<bool> series_deleted_ = false;   // Of a run, since the series were compacted.
  std::atomic<bool> failed_ = false;
  std::atomic<int64_t> resume_due_ns_ = 0;
  absl::Mutex fetch_mutex_;  // One fetches from the shared store, which may be silent, at a time.
  mutable absl::Mutex transitions_mutex_ ABSL_ACQUIRED_AFTER(fetch_mutex_);
  uint64_t last_transition_id_ ABSL_GUARDED_BY(transitions_mutex_) = 0;
  std::vector<AlertTransition> fetched_ ABSL_GUARDED_BY(transitions_mutex_);  // Of others, for FetchTransitions().
  // Indexes of those being put to the shared store: whose they are is not known yet.
  std::set<std::string> being_put_ ABSL_GUARDED_BY(transitions_mutex_);
  SharedRows* shared_ = nullptr;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_STORE_ROCKS_DATABASE_H_
