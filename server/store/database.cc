#include "server/store/database.h"

#include <rocksdb/cache.h>
#include <rocksdb/db.h>
#include <rocksdb/env.h>
#include <rocksdb/options.h>
#include <rocksdb/sst_file_reader.h>
#include <rocksdb/table.h>
#include <rocksdb/utilities/checkpoint.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <map>
#include <memory>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/store/file_system.h"
#include "server/store/record_codec.h"
#include "server/store/rocks_database.h"
#include "server/store/rocks_log.h"
#include "server/store/storage_lock.h"
#include "server/util/byte_io.h"
#include "server/util/clock.h"
#include "server/util/log.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

// Superseded rows below this, or this part of all bytes, are not worth a
// compaction.
constexpr int64_t kSupersededBytesMin = 64 << 10;
constexpr int64_t kSupersededPart = 32;

std::string RunKey(RunId run) { return KeyBuilder('r').U64(run).key(); }
std::string StateKey(RunId run, bool ended) { return KeyBuilder(ended ? 'J' : 'j').U64(run).key(); }
std::string RowsKey(RunId run) { return KeyBuilder('n').U64(run).key(); }
std::string TransitionKey(uint64_t id) { return KeyBuilder('t').U64(id).key(); }
std::string TransitionIndex(const AlertTransition& transition) {
  return KeyBuilder('T').U64(transition.run).String(transition.key).U32(transition.k).key();
}
std::string BandsKey(RunId run) { return KeyBuilder('b').U64(run).key(); }
KeyBuilder ActionKey(RunId run) { return KeyBuilder('A').U64(run); }
KeyBuilder AuditKey(RunId run) { return KeyBuilder('q').U64(run); }
std::string ToldKey(RunId run, uint32_t receiver) { return KeyBuilder('d').U64(run).U32(receiver).key(); }
std::string RecordKey(RunId run, const std::string& key) { return KeyBuilder('a').U64(run).String(key).key(); }

// What RocksDB has to say goes where all the rest goes.  In a file of its own it
// would meet a full disk, and it does not survive that: after a failed write the
// next one is an assertion.
class RocksLogger final : public rocksdb::Logger {
 public:
  RocksLogger() : rocksdb::Logger(rocksdb::WARN_LEVEL) {}
  using rocksdb::Logger::Logv;
  void Logv(const char* format, va_list arguments) override { Say(rocksdb::WARN_LEVEL, format, arguments); }
  void Logv(const rocksdb::InfoLogLevel level, const char* format, va_list arguments) override {
    if (level >= rocksdb::WARN_LEVEL && level <= rocksdb::FATAL_LEVEL) Say(level, format, arguments);
  }

 private:
  static void Say(rocksdb::InfoLogLevel level, const char* format, va_list arguments) {
    char text[1024];
    std::vsnprintf(text, sizeof(text), format, arguments);
    if (std::strstr(text, "DB::Open() failed") != nullptr) return;  // Open() says why.
    if (level >= rocksdb::ERROR_LEVEL) {
      LogError("database: {}", text);
    } else {
      LogWarning("database: {}", text);
    }
  }
};

// How many changes `after` has behind the last one of `before`.  A long history
// loses its middle, so that its length says nothing.
size_t FreshChanges(const Action& before, const Action& after) {
  if (before.history.empty()) return after.history.size();
  const ActionChange& last = before.history.back();
  for (size_t i = after.history.size(); i > 0; --i) {
    if (after.history[i - 1] == last) return after.history.size() - i;
  }
  return after.history.size() > before.history.size() ? after.history.size() - before.history.size() : 0;
}

constexpr char kSchemaKey[] = "v", kLostIdsKey[] = "i";
constexpr uint64_t kTransitionBytesMin = 16;
constexpr int64_t kResumeNanos = 1'000'000'000;
// Every kind of row of which a run has several or one, but its record.  Its transitions are
// numbered over all runs, and are found by the index, T.
constexpr std::string_view kKindsOfRuns = "ksmwpeadjJAnqbx";
constexpr size_t kRowsDeletedAtOnce = 4096;

// A key's kind and run, for people.
std::string DescribeKey(std::string_view key) {
  const std::string kind = absl::StrCat("row ", std::string(key.substr(0, 1)));
  return key.size() < 9 || key[0] == 't' ? kind : absl::StrCat(kind, " of run ", KeyNumber(key, 1, 8));
}

struct RocksOptions {
  rocksdb::DBOptions database;
  std::vector<rocksdb::ColumnFamilyDescriptor> families;
};

RocksOptions MakeOptions(const Database::Options& options) {
  rocksdb::BlockBasedTableOptions table;
  table.block_cache = rocksdb::NewLRUCache(static_cast<size_t>(options.cache_bytes));
  table.block_size = 16 << 10;
  // Almost all reads are ranges, which a filter cannot help.
  table.index_block_restart_interval = 16;  // Neighbouring keys share most of their bytes.
  rocksdb::DBOptions rocks;
  rocks.create_if_missing = true;
  rocks.create_missing_column_families = true;
  rocks.max_background_jobs = 2;
  rocks.max_open_files = 512;
  rocks.avoid_unnecessary_blocking_io = true;
  // A batch that spans both families is on disk as a whole or not at all.
  rocks.atomic_flush = true;
  // Without its own log RocksDB keeps what was flushed, and on a clean close
  // all: the WAL's truncation needs the former, the restart is quicker with the latter.
  rocks.avoid_flush_during_shutdown = false;
  // What it writes in the background goes to the disk as it comes, a little at a
  // time, by threads that give way: acknowledgements wait for the same disk and
  // processors (docs/benchmarks.md, L3).
  rocks.bytes_per_sync = 512 << 10;
  rocks.strict_bytes_per_sync = true;
  for (const auto pool : {rocksdb::Env::LOW, rocksdb::Env::HIGH}) {
    rocksdb::Env::Default()->LowerThreadPoolCPUPriority(pool);
  }
  rocks.info_log = std::make_shared<RocksLogger>();
  rocksdb::ColumnFamilyOptions lasting;
  lasting.compression = rocksdb::kNoCompression;  // Chunks are compressed already.
  lasting.write_buffer_size = static_cast<size_t>(options.write_buffer_bytes);
  lasting.table_factory.reset(rocksdb::NewBlockBasedTableFactory(table));
  // Small and superseded often: sorted runs are merged as soon as there are
  // four, and into one when half as much as the oldest has come on top of it.  With
  // two almost every flush wrote all of it again, for which acknowledgements waited.
  rocksdb::ColumnFamilyOptions passing = lasting;
  passing.compaction_style = rocksdb::kCompactionStyleUniversal;
  passing.level0_file_num_compaction_trigger = 4;
  passing.compaction_options_universal.max_size_amplification_percent = 50;
  return {rocks, {{rocksdb::kDefaultColumnFamilyName, lasting}, {"passing", passing}}};
}

}  // namespace

absl::Status FromRocks(const rocksdb::Status& status) {
  if (status.ok()) return absl::OkStatus();
  const std::string text = absl::StrCat("database: ", status.ToString());
  if (status.IsNotFound()) return absl::NotFoundError(text);
  if (status.IsCorruption()) return absl::DataLossError(text);
  if (status.IsNoSpace()) return absl::ResourceExhaustedError(text);
  return absl::InternalError(text);
}

uint64_t KeyNumber(std::string_view key, size_t offset, int bytes) {
  uint64_t value = 0;
  for (int i = 0; i < bytes; ++i) value = value << 8 | static_cast<uint8_t>(key[offset + static_cast<size_t>(i)]);
  return value;
}

void RocksBatch::PutRun(const RunRecord& run) { Put(RunKey(run.id), EncodeRunRecord(run)); }
void RocksBatch::PutRank(RunId run, const RankRecord& rank) {
  Put(KeyBuilder('k').U64(run).U32(rank.rank).key(), EncodeRankRecord(rank));
}
void RocksBatch::PutEvent(RunId run, const RunEvent& event) { events_.emplace_back(run, EncodeRunEvent(event)); }
void RocksBatch::PutState(const RunRecord& run, std::string_view state) {
  const std::string packed = PackState(state);
  Put(StateKey(run.id, run.ended), packed);
  if (run.ended) {
    Delete(StateKey(run.id, /*ended=*/false), packed.size());
  } else {
    superseded_bytes_ += static_cast<int64_t>(packed.size());  // The state before.
  }
}
void RocksBatch::PutRows(RunId run, const RunRows& rows) {
  const std::string packed = PackState(EncodeRunRows(rows));
  superseded_bytes_ += static_cast<int64_t>(packed.size());  // The rows before.
  Put(RowsKey(run), packed);
}
void RocksBatch::Put(std::string_view key, std::string_view value) {
  batch_.Put(database_->FamilyOf(key), ToSlice(key), ToSlice(value));
}
void RocksBatch::Delete(std::string_view key, size_t bytes) {
  batch_.Delete(database_->FamilyOf(key), ToSlice(key));
  superseded_bytes_ += static_cast<int64_t>(bytes);
}

rocksdb::ColumnFamilyHandle* RocksDatabase::FamilyOf(std::string_view key) const {
  return key.starts_with('w') || key.starts_with('p') || key.starts_with('j') ? passing_ : lasting_;
}

RocksDatabase::Snapshot::Snapshot(const RocksDatabase* database)
    : database_(database), snapshot_(database->db_->GetSnapshot()) {}
RocksDatabase::Snapshot::~Snapshot() { database_->db_->ReleaseSnapshot(snapshot_); }

absl::Status RocksDatabase::Snapshot::Scan(
    std::string_view prefix, std::string_view from,
    const std::function<bool(std::string_view key, std::string_view value)>& visit) const {
  rocksdb::ReadOptions options;
  options.snapshot = snapshot_;
  std::string end(prefix);
  while (!end.empty() && static_cast<uint8_t>(end.back()) == 0xff) end.pop_back();
  if (!end.empty()) end.back() = static_cast<char>(end.back() + 1);
  const rocksdb::Slice upper = ToSlice(end);
  if (!end.empty()) options.iterate_upper_bound = &upper;
  const std::unique_ptr<rocksdb::Iterator> it(database_->db_->NewIterator(options, database_->FamilyOf(prefix)));
  for (it->Seek(ToSlice(std::max(prefix, from))); it->Valid(); it->Next()) {
    if (!visit(FromSlice(it->key()), FromSlice(it->value()))) break;
  }
  return FromRocks(it->status());
}

absl::StatusOr<std::string> RocksDatabase::Snapshot::Get(std::string_view key) const {
  rocksdb::ReadOptions options;
  options.snapshot = snapshot_;
  std::string value;
  BW_RETURN_IF_ERROR(FromRocks(database_->db_->Get(options, database_->FamilyOf(key), ToSlice(key), &value)));
  return value;
}

absl::StatusOr<bool> RocksDatabase::Snapshot::FindBefore(std::string_view prefix, std::string_view at, std::string* key,
                                                         std::string* value) const {
  rocksdb::ReadOptions options;
  options.snapshot = snapshot_;
  const rocksdb::Slice lower = ToSlice(prefix);
  options.iterate_lower_bound = &lower;
  const std::unique_ptr<rocksdb::Iterator> it(database_->db_->NewIterator(options, database_->FamilyOf(prefix)));
  it->SeekForPrev(ToSlice(at));
  BW_RETURN_IF_ERROR(FromRocks(it->status()));
  if (!it->Valid() || !it->key().starts_with(ToSlice(prefix))) return false;
  key->assign(it->key().data(), it->key().size());
  value->assign(it->value().data(), it->value().size());
  return true;
}

absl::StatusOr<std::unique_ptr<RocksDatabase>> RocksDatabase::Open(const Database::Options& options) {
  if (options.directory.empty()) return absl::InvalidArgumentError("the database needs a directory");
  if (options.cache_bytes < 0 || options.write_buffer_bytes < 64 << 10) {
    return absl::InvalidArgumentError("database: cache_bytes < 0 or write_buffer_bytes < 64 KiB");
  }
  BW_RETURN_IF_ERROR(FileSystem::Real()->MakeDirectory(options.directory));
  if (const std::vector<std::string> damage = FindRocksLogsDamage(options.directory); !damage.empty()) {
    return absl::DataLossError(absl::StrCat(absl::StrJoin(damage, "; "),
                                            ". Nothing was changed; bellwetherd check-data --repair goes on without"));
  }
  const RocksOptions rocks = MakeOptions(options);
  std::unique_ptr<RocksDatabase> database(new RocksDatabase);
  rocksdb::DB* db = nullptr;
  std::vector<rocksdb::ColumnFamilyHandle*> families;
  const rocksdb::Status opened = rocksdb::DB::Open(rocks.database, options.directory, rocks.families, &families, &db);
  if (opened.IsIOError() && absl::StrContains(opened.ToString(), "LOCK: Resource temporarily unavailable")) {
    return absl::FailedPreconditionError(absl::StrCat(options.directory, "/", StorageLock::kFileName,
                                                      " is held by another process: one server per directory"));
  }
  BW_RETURN_IF_ERROR(FromRocks(opened));
  database->db_.reset(db);
  database->lasting_ = families[0];
  database->passing_ = families[1];
  database->shared_ = options.shared;
  BW_RETURN_IF_ERROR(database->Migrate());
  BW_RETURN_IF_ERROR(database->LoadTransitionIds());
  return database;
}

absl::Status RocksDatabase::Repair(const Database::Options& options) {
  uint64_t lost_max = 0;  // As many transitions fitted into what may be dropped.
  BW_ASSIGN_OR_RETURN(const std::vector<std::string> names, FileSystem::Real()->List(options.directory));
  for (const std::string& name : names) {
    if (!name.ends_with(".log")) continue;
    BW_ASSIGN_OR_RETURN(const auto file, FileSystem::Real()->Open(absl::StrCat(options.directory, "/", name)));
    BW_ASSIGN_OR_RETURN(const int64_t bytes, file->Size());
    lost_max += static_cast<uint64_t>(bytes) / kTransitionBytesMin;
  }
  const RocksOptions rocks = MakeOptions(options);
  BW_RETURN_IF_ERROR(FromRocks(rocksdb::RepairDB(options.directory, rocks.database, rocks.families)));
  if (lost_max == 0) return absl::OkStatus();
  BW_ASSIGN_OR_RETURN(const auto repaired, Open(options));
  std::string id;
  ByteWriter(&id).Put(repaired->last_transition_id() + lost_max);
  rocksdb::WriteBatch batch;
  batch.Put(kLostIdsKey, id);
  return repaired->WriteSynced(&batch);
}

std::vector<std::string> RocksDatabase::FindDamage(const std::string& directory) {
  const auto names = FileSystem::Real()->List(directory);
  if (!names.ok()) return {std::string(names.status().message())};
  std::vector<std::string> damage = FindRocksLogsDamage(directory);
  for (const std::string& name : *names) {
    if (!name.ends_with(".sst")) continue;
    rocksdb::SstFileReader reader{rocksdb::Options()};
    rocksdb::Status status = reader.Open(directory + "/" + name);
    std::string holds = "what it holds is unknown";
    if (status.ok()) {
      const std::unique_ptr<rocksdb::Iterator> rows(reader.NewIterator({}));
      rows->SeekToFirst();
      const std::string first = rows->Valid() ? DescribeKey(FromSlice(rows->key())) : "?";
      rows->SeekToLast();
      const std::string last = rows->Valid() ? DescribeKey(FromSlice(rows->key())) : "?";
      holds = absl::StrCat("it holds ", reader.GetTableProperties()->num_entries, " rows from ", first, " to ", last);
      status = reader.VerifyChecksum();
    }
    if (!status.ok()) damage.push_back(absl::StrCat("database file ", name, ": ", status.ToString(), "; ", holds));
  }
  return damage;
}

absl::Status RocksDatabase::Migrate() {
  uint32_t version = 1;
  const absl::StatusOr<std::string> stored = Snapshot(this).Get(kSchemaKey);
  if (stored.ok()) {
    ByteReader in(*stored);
    version = in.Get<uint32_t>();
    if (!in.done()) return absl::DataLossError("database: its schema version cannot be read");
  } else if (!absl::IsNotFound(stored.status())) {
    return stored.status();
  }
  if (version > kSchemaVersion) {
    return absl::FailedPreconditionError(
        absl::StrCat("database: a newer version of bellwetherd wrote it (schema ", version, ", this one knows ",
                     kSchemaVersion, " and older); use that version again, or restore a backup of before"));
  }
  if (version == kSchemaVersion) return absl::OkStatus();
  // A later schema adds its steps here, one after the other: each brings the rows
  // of `version` to the next and can be begun again after a crash.
  std::string current;
  ByteWriter(&current).Put(kSchemaVersion);
  rocksdb::WriteBatch batch;
  batch.Put(kSchemaKey, current);
  return WriteSynced(&batch);
}

RocksDatabase::~RocksDatabase() {
  for (rocksdb::ColumnFamilyHandle* const family : {lasting_, passing_}) {
    if (family != nullptr) db_->DestroyColumnFamilyHandle(family);
  }
}

absl::StatusOr<std::unique_ptr<Database>> Database::Open(const Options& options) {
  return RocksDatabase::Open(options);
}

absl::Status RocksDatabase::Write(rocksdb::WriteBatch* batch) {
  rocksdb::WriteOptions options;
  options.disableWAL = true;
  GoOnAfterAnError();
  return Noted(FromRocks(db_->Write(options, batch)));
}

absl::Status RocksDatabase::WriteDurably(rocksdb::WriteBatch* batch) {
  BW_RETURN_IF_ERROR(Share(*batch));
  return WriteSynced(batch);
}

absl::Status RocksDatabase::WriteSynced(rocksdb::WriteBatch* batch) {
  rocksdb::WriteOptions options;
  options.sync = true;
  GoOnAfterAnError();
  return Noted(FromRocks(db_->Write(options, batch)));
}

absl::Status RocksDatabase::Noted(absl::Status status) {
  if (!status.ok()) failed_ = true;
  return status;
}

void RocksDatabase::GoOnAfterAnError() {
  if (!failed_) return;
  const int64_t now_ns = Clock::System()->MonotonicNanos();
  int64_t due_ns = resume_due_ns_;
  if (now_ns < due_ns || !resume_due_ns_.compare_exchange_strong(due_ns, now_ns + kResumeNanos)) return;
  failed_ = false;
  (void)db_->Resume();  // The next write tells whether it helped.
}

absl::StatusOr<std::vector<RunRecord>> RocksDatabase::ListRuns(RunId first, RunId end) const {
  std::vector<RunRecord> runs;
  absl::Status damage;
  BW_RETURN_IF_ERROR(Snapshot(this).Scan("r", RunKey(first), [&](std::string_view key, std::string_view value) {
    if (KeyNumber(key, 1, 8) >= end) return false;
    absl::StatusOr<RunRecord> run = DecodeRunRecord(value);
    if (run.ok()) runs.push_back(*std::move(run));
    damage = run.status();
    return damage.ok();
  }));
  BW_RETURN_IF_ERROR(damage);
  return runs;
}

absl::StatusOr<RunRecord> RocksDatabase::GetRun(RunId run) const {
  BW_ASSIGN_OR_RETURN(const std::string value, Snapshot(this).Get(RunKey(run)));
  return DecodeRunRecord(value);
}

absl::Status RocksDatabase::DeleteRun(const RunRecord& run) {
  RunRecord gone;
  gone.id = run.id;
  gone.ended = true;
  gone.deleted = true;
  gone.applied_lsn = run.applied_lsn;
  rocksdb::WriteBatch batch;
  batch.Put(RunKey(run.id), EncodeRunRecord(gone));
  BW_RETURN_IF_ERROR(WriteDurably(&batch));
  BW_RETURN_IF_ERROR(DeleteRows('T', run.id));
  for (const char kind : kKindsOfRuns) BW_RETURN_IF_ERROR(DeleteRows(kind, run.id));
  return absl::OkStatus();
}

absl::Status RocksDatabase::DeleteRows(char kind, RunId run) {
  const std::string prefix = KeyBuilder(kind).U64(run).key();
  for (size_t rows = kRowsDeletedAtOnce; rows == kRowsDeletedAtOnce;) {
    rocksdb::WriteBatch batch;
    rows = 0;
    BW_RETURN_IF_ERROR(Snapshot(this).Scan(prefix, {}, [&](std::string_view key, std::string_view value) {
      batch.Delete(FamilyOf(key), ToSlice(key));
      if (kind == 'T') batch.Delete(TransitionKey(ByteReader(value).Get<uint64_t>()));
      superseded_bytes_ += FamilyOf(key) == passing_ ? static_cast<int64_t>(value.size()) : 0;
      return ++rows < kRowsDeletedAtOnce;
    }));
    if (rows == 0) break;
    // Alerts are numbered in a store of their own, if there is one.
    BW_RETURN_IF_ERROR(kind == 'T' ? WriteSynced(&batch) : WriteDurably(&batch));
    if (kind == 's' || kind == 'm') series_deleted_ = true;
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<RankRecord>> RocksDatabase::ListRanks(RunId run) const {
  std::vector<RankRecord> ranks;
  absl::Status damage;
  const KeyBuilder prefix = KeyBuilder('k').U64(run);
  BW_RETURN_IF_ERROR(Snapshot(this).Scan(prefix.key(), {}, [&](std::string_view, std::string_view value) {
    absl::StatusOr<RankRecord> rank = DecodeRankRecord(value);
    if (rank.ok()) ranks.push_back(*rank);
    damage = rank.status();
    return damage.ok();
  }));
  BW_RETURN_IF_ERROR(damage);
  return ranks;
}

absl::StatusOr<std::string> RocksDatabase::GetState(RunId run) const {
  const Snapshot snapshot(this);
  absl::StatusOr<std::string> packed = snapshot.Get(StateKey(run, /*ended=*/false));
  if (absl::IsNotFound(packed.status())) packed = snapshot.Get(StateKey(run, /*ended=*/true));
  BW_RETURN_IF_ERROR(packed.status());
  return UnpackState(*packed);
}

absl::StatusOr<RunRows> RocksDatabase::GetRows(RunId run) const {
  const absl::StatusOr<std::string> packed = Snapshot(this).Get(RowsKey(run));
  if (absl::IsNotFound(packed.status())) return RunRows();
  BW_RETURN_IF_ERROR(packed.status());
  BW_ASSIGN_OR_RETURN(const std::string bytes, UnpackState(*packed));
  return DecodeRunRows(bytes);
}

absl::StatusOr<std::vector<RunEvent>> RocksDatabase::ListEvents(RunId run, uint64_t skip, size_t count) const {
  std::vector<RunEvent> events;
  if (count == 0) return events;
  absl::Status damage;
  const KeyBuilder prefix = KeyBuilder('e').U64(run);
  // They are numbered from 0 on, without gaps.
  const KeyBuilder from = KeyBuilder('e').U64(run).U64(skip);
  BW_RETURN_IF_ERROR(Snapshot(this).Scan(prefix.key(), from.key(), [&](std::string_view, std::string_view value) {
    absl::StatusOr<RunEvent> event = DecodeRunEvent(value);
    if (event.ok()) events.push_back(*std::move(event));
    damage = event.status();
    return damage.ok() && events.size() < count;
  }));
  BW_RETURN_IF_ERROR(damage);
  return events;
}

absl::StatusOr<uint64_t> RocksDatabase::CountEvents(RunId run) const {
  const std::unique_ptr<rocksdb::Iterator> it(db_->NewIterator({}));
  it->SeekForPrev(KeyBuilder('e').U64(run).U64(UINT64_MAX).key());
  const bool any = it->Valid() && it->key().starts_with(KeyBuilder('e').U64(run).key());
  const uint64_t count = any ? KeyNumber(FromSlice(it->key()), 9, 8) + 1 : 0;
  BW_RETURN_IF_ERROR(FromRocks(it->status()));
  return count;
}

RocksBatch::~RocksBatch() {
  for (const auto& call : abandoned_) call();
}

absl::Status RocksDatabase::ShareBatch(RunBatch* batch) {
  RocksBatch* const rocks = RocksBatch::As(batch);
  // An event's number is one above the run's last: found by looking, so that it is
  // right after any crash.
  std::map<RunId, uint64_t> next;
  for (const auto& [run, bytes] : std::exchange(rocks->events_, {})) {
    const auto [entry, is_new] = next.try_emplace(run, 0);
    if (is_new) {
      BW_ASSIGN_OR_RETURN(entry->second, CountEvents(run));
    }
    rocks->Put(KeyBuilder('e').U64(run).U64(entry->second++).key(), bytes);
  }
  BW_RETURN_IF_ERROR(Share(rocks->batch_));
  rocks->is_shared_ = true;
  return absl::OkStatus();
}

absl::Status RocksDatabase::Commit(std::unique_ptr<RunBatch> batch) {
  RocksBatch* const rocks = RocksBatch::As(batch.get());
  if (!rocks->is_shared_) BW_RETURN_IF_ERROR(ShareBatch(rocks));
  BW_RETURN_IF_ERROR(Write(&rocks->batch_));
  superseded_bytes_ += rocks->superseded_bytes_;
  rocks->abandoned_.clear();
  for (const auto& call : rocks->committed_) call();
  return absl::OkStatus();
}

absl::Status RocksDatabase::LoadTransitionIds() {
  const std::unique_ptr<rocksdb::Iterator> it(db_->NewIterator({}));
  uint64_t last = 0;
  it->SeekForPrev(TransitionKey(UINT64_MAX));
  if (it->Valid() && it->key().starts_with("t")) last = KeyNumber(FromSlice(it->key()), 1, 8);
  BW_RETURN_IF_ERROR(FromRocks(it->status()));
  const absl::StatusOr<std::string> lost = Snapshot(this).Get(kLostIdsKey);
  if (lost.ok()) {
    last = std::max(last, ByteReader(*lost).Get<uint64_t>());
  } else if (!absl::IsNotFound(lost.status())) {
    return lost.status();
  }
  absl::MutexLock lock(&transitions_mutex_);
  last_transition_id_ = last;
  return absl::OkStatus();
}

absl::StatusOr<bool> RocksDatabase::FindTransition(const std::string& index, AlertTransition* transition) const {
  const absl::StatusOr<std::string> stored = Snapshot(this).Get(index);
  if (absl::IsNotFound(stored.status())) return false;
  BW_RETURN_IF_ERROR(stored.status());
  transition->id = ByteReader(*stored).Get<uint64_t>();
  return true;
}

absl::StatusOr<bool> RocksDatabase::PutTransition(AlertTransition* transition) {
  const std::string index = TransitionIndex(*transition);
  if (shared_ != nullptr) return PutSharedTransition(index, transition);
  absl::MutexLock lock(&transitions_mutex_);
  BW_ASSIGN_OR_RETURN(const bool is_stored, FindTransition(index, transition));
  if (is_stored) return false;
  transition->id = last_transition_id_ + 1;
  std::string id;
  ByteWriter(&id).Put(transition->id);
  rocksdb::WriteBatch batch;
  batch.Put(index, id);
  batch.Put(TransitionKey(transition->id), EncodeTransition(*transition));
  BW_RETURN_IF_ERROR(WriteDurably(&batch));
  last_transition_id_ = transition->id;
  return true;
}

absl::StatusOr<std::vector<AlertTransition>> RocksDatabase::ListTransitions(uint64_t after, size_t limit,
                                                                            RunId run) const {
  std::vector<AlertTransition> transitions;
  if (limit == 0 || after == UINT64_MAX) return transitions;
  absl::Status damage;
  BW_RETURN_IF_ERROR(Snapshot(this).Scan("t", TransitionKey(after + 1), [&](std::string_view, std::string_view value) {
    absl::StatusOr<AlertTransition> transition = DecodeTransition(value);
    damage = transition.status();
    if (!damage.ok()) return false;
    if (run == 0 || transition->run == run) transitions.push_back(*std::move(transition));
    return transitions.size() < limit;
  }));
  BW_RETURN_IF_ERROR(damage);
  return transitions;
}

uint64_t RocksDatabase::last_transition_id() const {
  absl::MutexLock lock(&transitions_mutex_);
  return last_transition_id_;
}

absl::Status RocksDatabase::PutAlertNote(RunId run, const std::string& key, const AlertNote& note) {
  rocksdb::WriteBatch batch;
  batch.Put(RecordKey(run, key), EncodeAlertNote(note));
  return WriteDurably(&batch);
}

absl::StatusOr<Database::AlertNote> RocksDatabase::GetAlertNote(RunId run, const std::string& key) const {
  const absl::StatusOr<std::string> value = Snapshot(this).Get(RecordKey(run, key));
  if (absl::IsNotFound(value.status())) return AlertNote{};
  BW_RETURN_IF_ERROR(value.status());
  return DecodeAlertNote(*value);
}

absl::Status RocksDatabase::PutTold(RunId run, uint32_t receiver, uint64_t id) {
  std::string value;
  ByteWriter(&value).Put(id);
  rocksdb::WriteBatch batch;
  batch.Put(ToldKey(run, receiver), value);
  return WriteDurably(&batch);
}

absl::StatusOr<uint64_t> RocksDatabase::GetTold(RunId run, uint32_t receiver) const {
  const absl::StatusOr<std::string> value = Snapshot(this).Get(ToldKey(run, receiver));
  if (absl::IsNotFound(value.status())) return 0;
  BW_RETURN_IF_ERROR(value.status());
  ByteReader in(*value);
  const auto id = in.Get<uint64_t>();
  if (!in.done()) return absl::DataLossError("what a receiver was told of: damaged");
  return id;
}

absl::StatusOr<size_t> RocksDatabase::PutAction(RunId run, const Action& action) {
  const std::string key = ActionKey(run).String(action.id).key();
  size_t fresh = action.history.size();
  const absl::StatusOr<std::string> before = Snapshot(this).Get(key);
  if (before.ok()) {
    BW_ASSIGN_OR_RETURN(const Action old, DecodeAction(*before));
    fresh = FreshChanges(old, action);
  } else if (!absl::IsNotFound(before.status())) {
    return before.status();
  }
  if (fresh == 0) return fresh;
  rocksdb::WriteBatch batch;
  batch.Put(key, EncodeAction(action));
  BW_RETURN_IF_ERROR(WriteDurably(&batch));
  return fresh;
}

absl::StatusOr<std::vector<Action>> RocksDatabase::ListActions(RunId run) const {
  std::vector<Action> actions;
  absl::Status damage;
  BW_RETURN_IF_ERROR(Snapshot(this).Scan(ActionKey(run).key(), {}, [&](std::string_view, std::string_view value) {
    absl::StatusOr<Action> action = DecodeAction(value);
    damage = action.status();
    if (damage.ok()) actions.push_back(*std::move(action));
    return damage.ok();
  }));
  BW_RETURN_IF_ERROR(damage);
  return actions;
}

absl::StatusOr<bool> RocksDatabase::PutAudit(RunId run, Lsn lsn, const AuditEntry& entry) {
  const std::string key = AuditKey(run).U64(lsn).key();
  std::vector<std::string> kept;
  BW_RETURN_IF_ERROR(Snapshot(this).Scan(AuditKey(run).key(), {}, [&](std::string_view at, std::string_view) {
    kept.emplace_back(at);
    return true;
  }));
  if (std::binary_search(kept.begin(), kept.end(), key)) return false;
  rocksdb::WriteBatch batch;
  if (kept.size() >= kAuditMax) {
    if (key < kept.front()) return false;
    batch.Delete(kept.front());
  }
  batch.Put(key, EncodeAuditEntry(entry));
  BW_RETURN_IF_ERROR(WriteDurably(&batch));
  return true;
}

absl::StatusOr<std::vector<AuditEntry>> RocksDatabase::ListAudit(RunId run) const {
  std::vector<AuditEntry> entries;
  absl::Status damage;
  BW_RETURN_IF_ERROR(Snapshot(this).Scan(AuditKey(run).key(), {}, [&](std::string_view, std::string_view value) {
    absl::StatusOr<AuditEntry> entry = DecodeAuditEntry(value);
    damage = entry.status();
    if (damage.ok()) entries.push_back(*std::move(entry));
    return damage.ok();
  }));
  BW_RETURN_IF_ERROR(damage);
  return entries;
}

absl::Status RocksDatabase::PutBands(RunId run, std::string_view row) {
  rocksdb::WriteBatch batch;
  batch.Put(BandsKey(run), ToSlice(row));
  return WriteDurably(&batch);
}

absl::Status RocksDatabase::DeleteBands(RunId run) {
  rocksdb::WriteBatch batch;
  batch.Delete(BandsKey(run));
  return WriteDurably(&batch);
}

absl::StatusOr<std::vector<Database::BandsRow>> RocksDatabase::ListBands() const {
  std::vector<BandsRow> rows;
  BW_RETURN_IF_ERROR(Snapshot(this).Scan("b", {}, [&rows](std::string_view key, std::string_view value) {
    rows.push_back({KeyNumber(key, 1, 8), std::string(value)});
    return true;
  }));
  return rows;
}

// ---- shared rows ----

absl::Status Database::TakeUpRows(const std::vector<SharedRow>&, bool) {
  return absl::UnimplementedError("this database shares no rows");
}
absl::Status Database::ForgetRuns(RunId, RunId) { return absl::UnimplementedError("this database shares no rows"); }
absl::StatusOr<std::vector<AlertTransition>> Database::FetchTransitions() { return std::vector<AlertTransition>(); }

absl::Status RocksDatabase::Share(const rocksdb::WriteBatch& batch) const {
  if (shared_ == nullptr) return absl::OkStatus();
  // In their order, per run.
  class Collector final : public rocksdb::WriteBatch::Handler {
   public:
    std::map<RunId, std::vector<SharedRow>> rows;
    rocksdb::Status PutCF(uint32_t, const rocksdb::Slice& key, const rocksdb::Slice& value) override {
      Add(FromSlice(key), std::string(FromSlice(value)));
      return rocksdb::Status::OK();
    }
    rocksdb::Status DeleteCF(uint32_t, const rocksdb::Slice& key) override {
      Add(FromSlice(key), std::nullopt);
      return rocksdb::Status::OK();
    }

   private:
    void Add(std::string_view key, std::optional<std::string> value) {
      if (key.size() < 9) return;  // Of no run.
      rows[KeyNumber(key, 1, 8)].push_back({std::string(key), std::move(value)});
    }
  } collector;
  BW_RETURN_IF_ERROR(FromRocks(batch.Iterate(&collector)));
  for (const auto& [run, rows] : collector.rows) BW_RETURN_IF_ERROR(shared_->PutRows(run, rows));
  return absl::OkStatus();
}

absl::StatusOr<bool> RocksDatabase::PutSharedTransition(const std::string& index, AlertTransition* transition) {
  BW_ASSIGN_OR_RETURN(const bool is_stored, FindTransition(index, transition));
  if (is_stored) return false;
  {
    absl::MutexLock lock(&transitions_mutex_);
    being_put_.insert(index);
  }
  // Without a lock: a store that is silent keeps only those waiting who put into it.
  const absl::StatusOr<bool> is_new = shared_->PutTransition(transition);
  absl::Status fetched;
  if (is_new.ok()) {
    // With all that others stored before it: readers go by ids, and miss none.
    absl::MutexLock fetch(&fetch_mutex_);
    fetched = FetchLocked();
  }
  absl::MutexLock lock(&transitions_mutex_);
  being_put_.erase(index);
  BW_RETURN_IF_ERROR(is_new.status());
  // Of others': this one is there, and is found so the next time.
  if (!fetched.ok()) return absl::UnavailableError(fetched.message());
  std::erase_if(fetched_, [&](const AlertTransition& other) { return *is_new && other.id == transition->id; });
  return is_new;
}

absl::Status RocksDatabase::FetchLocked() {
  constexpr size_t kPage = 1000;
  for (;;) {
    BW_ASSIGN_OR_RETURN(std::vector<AlertTransition> page, shared_->ListTransitions(last_transition_id(), kPage));
    if (page.empty()) return absl::OkStatus();
    rocksdb::WriteBatch batch;
    for (const AlertTransition& transition : page) {
      std::string id;
      ByteWriter(&id).Put(transition.id);
      batch.Put(TransitionIndex(transition), id);
      batch.Put(TransitionKey(transition.id), EncodeTransition(transition));
    }
    BW_RETURN_IF_ERROR(Write(&batch));
    absl::MutexLock lock(&transitions_mutex_);
    last_transition_id_ = page.back().id;
    const bool last_page = page.size() < kPage;
    std::move(page.begin(), page.end(), std::back_inserter(fetched_));
    if (last_page) return absl::OkStatus();
  }
}

absl::StatusOr<std::vector<AlertTransition>> RocksDatabase::FetchTransitions() {
  if (shared_ == nullptr) return std::vector<AlertTransition>();
  absl::MutexLock fetch(&fetch_mutex_);
  BW_RETURN_IF_ERROR(FetchLocked());
  absl::MutexLock lock(&transitions_mutex_);
  const auto others =
      std::stable_partition(fetched_.begin(), fetched_.end(), [this](const AlertTransition& transition) {
        transitions_mutex_.AssertHeld();
        return being_put_.contains(TransitionIndex(transition));
      });
  std::vector<AlertTransition> fetched(std::make_move_iterator(others), std::make_move_iterator(fetched_.end()));
  fetched_.erase(others, fetched_.end());
  return fetched;
}

uint32_t RocksDatabase::StoreOf(RunId run) const { return shared_ == nullptr ? 0 : shared_->StoreOf(run); }

absl::Status RocksDatabase::KeepTransition(const AlertTransition& transition) {
  return shared_ == nullptr ? absl::OkStatus() : shared_->KeepTransition(transition);
}

absl::Status RocksDatabase::TakeUpRows(const std::vector<SharedRow>& rows, bool only_missing) {
  const Snapshot snapshot(this);
  rocksdb::WriteBatch batch;
  for (const SharedRow& row : rows) {
    if (!row.value.has_value() || (only_missing && snapshot.Get(row.key).ok())) continue;
    batch.Put(FamilyOf(row.key), row.key, *row.value);
  }
  return Write(&batch);
}

absl::Status RocksDatabase::ForgetRuns(RunId first, RunId end) {
  rocksdb::WriteBatch batch;
  for (const char kind : std::string("r").append(kKindsOfRuns)) {
    const std::string from = KeyBuilder(kind).U64(first).key();
    batch.DeleteRange(FamilyOf(from), from, KeyBuilder(kind).U64(end).key());
  }
  return Write(&batch);
}

absl::Status RocksDatabase::Flush() {
  GoOnAfterAnError();
  BW_RETURN_IF_ERROR(Noted(FromRocks(db_->Flush(rocksdb::FlushOptions(), {lasting_, passing_}))));
  if (series_deleted_.exchange(false)) BW_RETURN_IF_ERROR(CompactSeries());
  return CompactPassing();
}

absl::Status RocksDatabase::CopyTo(const std::string& directory) {
  rocksdb::Checkpoint* made = nullptr;
  BW_RETURN_IF_ERROR(FromRocks(rocksdb::Checkpoint::Create(db_.get(), &made)));
  const std::unique_ptr<rocksdb::Checkpoint> checkpoint(made);
  // 0: what is in memory only is flushed first; its own log does not hold it.
  return FromRocks(checkpoint->CreateCheckpoint(directory, /*log_size_for_flush=*/0));
}

absl::Status RocksDatabase::CompactPassing() {
  uint64_t passing_bytes = 0;
  db_->GetIntProperty(passing_, rocksdb::DB::Properties::kTotalSstFilesSize, &passing_bytes);
  const int64_t worth_it =
      std::max({kSupersededBytesMin, bytes() / kSupersededPart, static_cast<int64_t>(passing_bytes / 2)});
  if (superseded_bytes_ < worth_it) return absl::OkStatus();
  superseded_bytes_ = 0;
  rocksdb::CompactRangeOptions options;
  options.exclusive_manual_compaction = false;
  return FromRocks(db_->CompactRange(options, passing_, nullptr, nullptr));
}

absl::Status RocksDatabase::CompactSeries() {
  rocksdb::CompactRangeOptions options;
  options.exclusive_manual_compaction = false;
  for (const char* const kind : {"m", "s"}) {
    const std::string behind(1, static_cast<char>(kind[0] + 1));
    const rocksdb::Slice begin(kind), end(behind);
    BW_RETURN_IF_ERROR(FromRocks(db_->CompactRange(options, lasting_, &begin, &end)));
  }
  return absl::OkStatus();
}

int64_t RocksDatabase::bytes() const {
  int64_t bytes = 0;
  for (rocksdb::ColumnFamilyHandle* const family : {lasting_, passing_}) {
    uint64_t files = 0, memory = 0;
    db_->GetIntProperty(family, rocksdb::DB::Properties::kTotalSstFilesSize, &files);
    db_->GetIntProperty(family, rocksdb::DB::Properties::kCurSizeAllMemTables, &memory);
    bytes += static_cast<int64_t>(files + memory);
  }
  return bytes;
}

}  // namespace bellwether::server
