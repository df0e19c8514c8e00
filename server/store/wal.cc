#include "server/store/wal.h"

#include <algorithm>
#include <deque>
#include <optional>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "server/store/file_system.h"
#include "server/store/wal_format.h"
#include "server/store/wal_read.h"
#include "server/store/wal_recovery.h"
#include "server/util/await_for.h"
#include "server/util/clock.h"
#include "server/util/log.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

constexpr size_t kSyncSecondsMax = 65536;  // Kept for TakeSyncSeconds().
constexpr absl::Duration kPrepareRetry = absl::Milliseconds(100);

absl::Status CheckOptions(const Wal::Options& options) {
  if (options.directory.empty()) return absl::InvalidArgumentError("the log needs a directory");
  if (options.record_bytes_max < 1 || options.record_bytes_max > int64_t{1} << 30) {
    return absl::InvalidArgumentError("record_bytes_max: must be within 1 and 1 GiB");
  }
  if (options.segment_bytes % 8 != 0 ||
      options.segment_bytes < kSegmentHeaderBytes + RecordBytes(static_cast<size_t>(options.record_bytes_max))) {
    return absl::InvalidArgumentError(absl::StrCat("segment_bytes ", options.segment_bytes,
                                                   ": must be a multiple of 8 and hold a header and one record of ",
                                                   options.record_bytes_max, " bytes"));
  }
  if (options.group_bytes_max < 1 || options.group_wait_us_max < 0 || options.cover_idle_us < 0) {
    return absl::InvalidArgumentError("group_bytes_max, group_wait_us_max, cover_idle_us: out of range");
  }
  if (options.pending_bytes_max < RecordBytes(static_cast<size_t>(options.record_bytes_max))) {
    return absl::InvalidArgumentError("pending_bytes_max: less than one record of record_bytes_max");
  }
  return absl::OkStatus();
}

int64_t BytesOf(const WalRecord& record) { return RecordBytes(record.payload.size()); }

class LocalWal final : public Wal {
 public:
  LocalWal(const Options& options, FileSystem* file_system, DurableCallback on_durable, std::unique_ptr<File> lock)
      : options_(options), fs_(file_system), on_durable_(std::move(on_durable)), lock_(std::move(lock)) {}

  ~LocalWal() override { Close().IgnoreError(); }

  absl::Status Start() {
    BW_ASSIGN_OR_RETURN(RecoveredWal found, RecoverWal(options_, fs_));
    recovery_ = found.recovery;
    salt_ = found.salt;
    absl::MutexLock lock(&mutex_);
    segments_ = std::move(found.segments);
    last_ = found.next_lsn - 1;
    durable_ = last_;
    if (segments_.empty()) {
      BW_ASSIGN_OR_RETURN(std::unique_ptr<File> file, fs_->Create(NextPath(), options_.segment_bytes));
      BW_RETURN_IF_ERROR(StartSegment(std::move(file), 1));
    } else {
      BW_ASSIGN_OR_RETURN(file_, fs_->Open(segments_.back().path));
      // The recovered records may be served from now on: cover them.
      uncovered_ = recovery_.last_lsn > 0;
    }
    preparer_ = std::thread([this] { Prepare(); });
    writer_ = std::thread([this] { Write(); });
    return absl::OkStatus();
  }

  const Recovery& recovery() const override { return recovery_; }

  absl::Status Read(Lsn from, Lsn until, const std::function<absl::Status(const WalRecord&)>& visit) const override;
  absl::Status ReadHeads(const std::function<absl::Status(const WalRecord&)>& visit) const override;

  absl::StatusOr<Lsn> Append(WalRecord&& record) override {
    if (record.kind == WalKind::kNone) return absl::InvalidArgumentError("a record needs a kind");
    const auto size = static_cast<int64_t>(record.payload.size());
    if (size > options_.record_bytes_max) {
      return absl::InvalidArgumentError(
          absl::StrCat("record of ", size, " bytes: at most ", options_.record_bytes_max, " are taken"));
    }
    Queued queued;
    queued.record = std::move(record);
    queued.record.lsn = 0;
    const absl::StatusOr<Lsn> lsn = Enqueue(std::move(queued));
    if (!lsn.ok()) record = std::move(queued.record);
    return lsn;
  }

  absl::Status GoOnAbove(Lsn lsn) override {
    if (lsn <= last_lsn()) return absl::OkStatus();
    Queued gap;
    gap.control = WalControl::kGap;
    gap.record.lsn = lsn;
    BW_ASSIGN_OR_RETURN(const Lsn last, Enqueue(std::move(gap)));
    return Sync(last);
  }

  absl::Status Sync(Lsn lsn) override {
    absl::MutexLock lock(&mutex_);
    const auto settled = [this, lsn]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return durable_ >= lsn || stopped_ || !Health().ok();
    };
    mutex_.Await(absl::Condition(&settled));
    if (durable_ >= lsn) return absl::OkStatus();
    const absl::Status health = Health();
    return health.ok() ? absl::UnavailableError("the log is closed") : health;
  }

  absl::Status Truncate(Lsn keep) override;
  absl::Status Close() override;

  Lsn durable_lsn() const override {
    absl::MutexLock lock(&mutex_);
    return durable_;
  }
  Lsn last_lsn() const override {
    absl::MutexLock lock(&mutex_);
    return last_;
  }
  int64_t bytes() const override {
    absl::MutexLock lock(&mutex_);
    int64_t bytes = 0;
    for (const WalSegment& segment : segments_) bytes += segment.bytes;
    return bytes;
  }
  Lsn TailBegin(int64_t bytes) const override {
    absl::MutexLock lock(&mutex_);
    size_t first = segments_.size() - 1;
    for (bytes -= segments_[first].bytes; first > 0 && segments_[first - 1].bytes <= bytes; --first) {
      bytes -= segments_[first - 1].bytes;
    }
    return first == 0 ? 0 : segments_[first].first_lsn;
  }
  absl::Status health() const override {
    absl::MutexLock lock(&mutex_);
    return Health();
  }
  void Hold(const absl::Status& why) override {
    absl::MutexLock lock(&mutex_);
    held_ = why;
  }
  absl::Status CopyTo(const std::string& directory) override;
  void TakeSyncSeconds(std::vector<double>* seconds) override {
    seconds->clear();
    absl::MutexLock lock(&mutex_);
    seconds->swap(sync_seconds_);
  }

 private:
  struct Queued {
    WalRecord record;
    WalControl control = WalControl::kCover;
    int64_t since_ns = Clock::System()->MonotonicNanos();
    Lsn first_lsn() const { return control == WalControl::kGap ? record.seq : record.lsn; }
  };

  absl::Status Health() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (!failed_.ok()) return failed_;
    if (!held_.ok()) return held_;
    return stalled_ ? prepare_error_ : absl::OkStatus();
  }
  std::vector<WalSegment> Segments() const {
    absl::MutexLock lock(&mutex_);
    return segments_;
  }
  std::string NextPath() const { return absl::StrCat(options_.directory, "/next.tmp"); }

  // An error leaves `queued` as it was.
  absl::StatusOr<Lsn> Enqueue(Queued&& queued) {
    const int64_t bytes = BytesOf(queued.record);
    absl::MutexLock lock(&mutex_);
    if (!failed_.ok()) return absl::UnavailableError(failed_.message());
    if (closing_) return absl::UnavailableError("the log is closed");
    if (pending_bytes_ + bytes > options_.pending_bytes_max) {
      return absl::ResourceExhaustedError(
          absl::StrCat("the log has ", pending_bytes_, " bytes that are not yet on disk: try later"));
    }
    pending_bytes_ += bytes;
    const Lsn first = last_ + 1;
    last_ = std::max(first, queued.record.lsn);  // A gap has its last.
    queued.record.lsn = last_;
    if (queued.control == WalControl::kGap) queued.record.seq = first;
    queue_.push_back(std::move(queued));
    return last_;
  }

  // ---- the log's thread ----
  void Write();
  // Waits for records and takes a group of them; empty: the log ends.
  std::vector<Queued> TakeGroup() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status WriteGroup(const std::vector<Queued>& group, Lsn durable);
  // Waits for the spare file.  Not OK: the log is closing and there is none.
  absl::Status Rotate() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status StartSegment(std::unique_ptr<File> file, uint64_t number) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Fail(const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (failed_.ok()) LogError("the log failed and takes no more: {}", std::string(status.message()));
    failed_ = status;
  }

  // ---- the preparer's thread: always has the next segment ready ----
  void Prepare();
  // Waits until so many zeros may be in the next segment; false: it is not needed.
  bool AwaitTurn(int64_t zeros);

  const Options options_;
  FileSystem* const fs_;
  const DurableCallback on_durable_;
  const std::unique_ptr<File> lock_;
  Recovery recovery_;
  uint32_t salt_ = 0;

  mutable absl::Mutex mutex_;
  absl::Mutex truncate_mutex_ ABSL_ACQUIRED_BEFORE(mutex_);
  std::deque<Queued> queue_ ABSL_GUARDED_BY(mutex_);
  int64_t queue_bytes_taken_ ABSL_GUARDED_BY(mutex_) = 0;  // Of the group in flight.
  int64_t pending_bytes_ ABSL_GUARDED_BY(mutex_) = 0;      // Queued and in flight.
  size_t group_before_ ABSL_GUARDED_BY(mutex_) = 0;        // Records of the last group.
  Lsn last_ ABSL_GUARDED_BY(mutex_) = 0;
  Lsn durable_ ABSL_GUARDED_BY(mutex_) = 0;
  bool uncovered_ ABSL_GUARDED_BY(mutex_) = false;  // No record says that durable_ is.
  bool closing_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;  // The log's thread has ended.
  absl::Status failed_ ABSL_GUARDED_BY(mutex_);
  absl::Status held_ ABSL_GUARDED_BY(mutex_);
  std::vector<WalSegment> segments_ ABSL_GUARDED_BY(mutex_);  // back() is written to.
  std::unique_ptr<File> spare_ ABSL_GUARDED_BY(mutex_);       // The next one, zeroed, at NextPath().
  bool stalled_ ABSL_GUARDED_BY(mutex_) = false;              // The log's thread waits for spare_.
  absl::Status prepare_error_ ABSL_GUARDED_BY(mutex_);
  std::vector<double> sync_seconds_ ABSL_GUARDED_BY(mutex_);

  std::unique_ptr<File> file_;  // Start(), then the log's thread.
  std::string buffer_;          // The log's thread.
  std::thread writer_, preparer_;
};

void LocalWal::Prepare() {
  absl::MutexLock lock(&mutex_);
  // A log that closes may still need one for what is queued.
  const auto wanted = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return stopped_ || (spare_ == nullptr && (!closing_ || stalled_));
  };
  for (;;) {
    mutex_.Await(absl::Condition(&wanted));
    if (stopped_) return;
    mutex_.Unlock();
    absl::StatusOr<std::unique_ptr<File>> spare =
        fs_->Create(NextPath(), options_.segment_bytes, [this](int64_t zeros) { return AwaitTurn(zeros); });
    mutex_.Lock();
    if (spare.ok()) {
      if (!prepare_error_.ok()) LogInfo("the log has room for the next segment again");
      spare_ = *std::move(spare);
      prepare_error_ = absl::OkStatus();
    } else if (!stopped_) {
      const bool is_new = prepare_error_.ok();
      prepare_error_ = spare.status();
      if (is_new) LogError("no room for the log's next segment: {}", std::string(prepare_error_.message()));
      AwaitFor(&mutex_, absl::Condition(&stopped_), kPrepareRetry);
    }
  }
}

// Zeros come twice as fast as the log grows, so that acknowledgements never wait
// behind a whole segment of them; at the disk's speed once the log has to wait.
bool LocalWal::AwaitTurn(int64_t zeros) {
  absl::MutexLock lock(&mutex_);
  const auto turn = [this, zeros]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return stopped_ || stalled_ || zeros <= 2 * segments_.back().end;
  };
  mutex_.Await(absl::Condition(&turn));
  return !stopped_;
}

absl::Status LocalWal::StartSegment(std::unique_ptr<File> file, uint64_t number) {
  const Lsn first = queue_.empty() ? last_ + 1 : queue_.front().first_lsn();
  const std::string path = absl::StrCat(options_.directory, "/", SegmentName(number, salt_));
  const SegmentHeader header{.number = number, .first_lsn = first, .segment_bytes = options_.segment_bytes};
  BW_RETURN_IF_ERROR(file->WriteAt(0, EncodeSegmentHeader(header, salt_)));
  BW_RETURN_IF_ERROR(file->Sync());
  BW_RETURN_IF_ERROR(fs_->Rename(NextPath(), path));
  BW_RETURN_IF_ERROR(fs_->SyncDirectory(options_.directory));
  file_ = std::move(file);
  segments_.push_back({number, path, first, kSegmentHeaderBytes, options_.segment_bytes});
  return absl::OkStatus();
}

absl::Status LocalWal::Rotate() {
  const auto ready = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return spare_ != nullptr || (closing_ && !prepare_error_.ok());
  };
  stalled_ = true;
  mutex_.Await(absl::Condition(&ready));
  stalled_ = false;
  if (spare_ == nullptr) return prepare_error_;
  // Appenders wait for these two fsyncs, once a segment; a reader must never
  // see a segment in the list that is not there.
  return StartSegment(std::move(spare_), segments_.back().number + 1);
}

std::vector<LocalWal::Queued> LocalWal::TakeGroup() {
  const auto work = [this]()
                        ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return (!queue_.empty() && held_.ok()) || closing_; };
  do {
    if (uncovered_ && held_.ok() && !closing_) {
      AwaitFor(&mutex_, absl::Condition(&work), absl::Microseconds(options_.cover_idle_us));
    } else {
      mutex_.Await(absl::Condition(&work));
    }
  } while (!held_.ok() && !closing_);  // Held while it was waited.
  if (queue_.empty()) {
    if (!uncovered_) return {};
    Queued cover;
    cover.record.lsn = ++last_;
    queue_.push_back(std::move(cover));
    pending_bytes_ += kRecordHeaderBytes;
  }
  // Several came while the last group was synced: whoever sends in lockstep
  // will again, and one fsync for all of them is cheaper than one for the first.
  const auto gathered = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return queue_.size() >= group_before_ || closing_ || pending_bytes_ >= options_.group_bytes_max;
  };
  if (group_before_ > 1 && !gathered()) {
    const int64_t waited_ns = Clock::System()->MonotonicNanos() - queue_.front().since_ns;
    AwaitFor(&mutex_, absl::Condition(&gathered),
             absl::Microseconds(options_.group_wait_us_max) - absl::Nanoseconds(waited_ns));
  }

  std::vector<Queued> group;
  const WalSegment& segment = segments_.back();
  int64_t room = segment.bytes - segment.end;
  int64_t bytes = 0;
  while (!queue_.empty()) {
    const int64_t next = BytesOf(queue_.front().record);
    if (next > room || (bytes > 0 && bytes + next > options_.group_bytes_max)) break;
    room -= next;
    bytes += next;
    group.push_back(std::move(queue_.front()));
    queue_.pop_front();
  }
  queue_bytes_taken_ = bytes;
  if (group.empty()) {
    // The next record needs a new segment.
    if (absl::Status status = Rotate(); !status.ok()) {
      Fail(status);
      return {};
    }
    return TakeGroup();
  }
  group_before_ = group.size();
  return group;
}

absl::Status LocalWal::WriteGroup(const std::vector<Queued>& group, Lsn durable) {
  buffer_.clear();
  for (const Queued& queued : group) {
    RecordView view = ViewOf(queued.record, durable);
    view.control = queued.control;
    AppendRecord(view, salt_, &buffer_);
  }
  int64_t offset = 0;
  {
    absl::MutexLock lock(&mutex_);
    offset = segments_.back().end;
  }
  BW_RETURN_IF_ERROR(file_->WriteAt(offset, buffer_));
  const int64_t begin_ns = Clock::System()->MonotonicNanos();
  BW_RETURN_IF_ERROR(file_->Sync());
  const double seconds = static_cast<double>(Clock::System()->MonotonicNanos() - begin_ns) * 1e-9;
  absl::MutexLock lock(&mutex_);
  segments_.back().end += static_cast<int64_t>(buffer_.size());
  if (sync_seconds_.size() < kSyncSecondsMax) sync_seconds_.push_back(seconds);
  return absl::OkStatus();
}

void LocalWal::Write() {
  for (;;) {
    std::vector<Queued> group;
    Lsn durable = 0;
    {
      absl::MutexLock lock(&mutex_);
      group = TakeGroup();
      durable = durable_;
      if (group.empty()) {
        stopped_ = true;
        return;
      }
    }
    const absl::Status status = WriteGroup(group, durable);
    const Lsn last = group.back().record.lsn;
    {
      absl::MutexLock lock(&mutex_);
      if (!status.ok()) {
        Fail(status);
        stopped_ = true;
        return;
      }
      durable_ = last;
      pending_bytes_ -= queue_bytes_taken_;
      uncovered_ = std::any_of(group.begin(), group.end(), [](const Queued& queued) {
        return queued.record.kind != WalKind::kNone || queued.control != WalControl::kCover;
      });
    }
    if (on_durable_) on_durable_(last);
  }
}

absl::Status LocalWal::Truncate(Lsn keep) {
  absl::MutexLock truncate_lock(&truncate_mutex_);
  std::vector<WalSegment> give_up;
  Queued marker;
  marker.control = WalControl::kKeep;
  {
    absl::MutexLock lock(&mutex_);
    BW_RETURN_IF_ERROR(Health());
    size_t n = 0;
    while (n + 1 < segments_.size() && segments_[n + 1].first_lsn <= keep) give_up.push_back(segments_[n++]);
    marker.record.seq = segments_[n].number;
    marker.record.epoch = segments_[n].first_lsn;
  }
  if (give_up.empty()) return absl::OkStatus();
  // Durable before the first file goes: tells a truncation from a loss.
  BW_ASSIGN_OR_RETURN(const Lsn lsn, Enqueue(std::move(marker)));
  BW_RETURN_IF_ERROR(Sync(lsn));
  {
    absl::MutexLock lock(&mutex_);
    segments_.erase(segments_.begin(), segments_.begin() + static_cast<ptrdiff_t>(give_up.size()));
  }
  absl::Status status;
  for (const WalSegment& segment : give_up) status.Update(fs_->Remove(segment.path));  // Else the next start does.
  status.Update(fs_->SyncDirectory(options_.directory));
  return status;
}

absl::Status LocalWal::Close() {
  {
    absl::MutexLock lock(&mutex_);
    closing_ = true;
  }
  if (writer_.joinable()) writer_.join();
  if (preparer_.joinable()) preparer_.join();
  absl::MutexLock lock(&mutex_);
  if (spare_ != nullptr) {
    if (failed_.ok()) fs_->Remove(NextPath()).IgnoreError();  // Else the next start does.
    spare_ = nullptr;
  }
  return failed_;
}

absl::Status LocalWal::Read(Lsn from, Lsn until, const std::function<absl::Status(const WalRecord&)>& visit) const {
  return ReadRecords(fs_, Segments(), salt_, from, until == 0 ? recovery_.last_lsn : until, visit);
}

absl::Status LocalWal::ReadHeads(const std::function<absl::Status(const WalRecord&)>& visit) const {
  return ReadRecordHeads(fs_, Segments(), recovery_.last_lsn, visit);
}

absl::Status LocalWal::CopyTo(const std::string& directory) {
  absl::MutexLock truncate_lock(&truncate_mutex_);
  return CopySegments(fs_, Segments(), options_.directory, directory);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Wal>> Wal::Open(const Options& options, DurableCallback on_durable) {
  BW_RETURN_IF_ERROR(CheckOptions(options));
  FileSystem* const file_system = options.file_system != nullptr ? options.file_system : FileSystem::Real();
  BW_RETURN_IF_ERROR(file_system->MakeDirectory(options.directory));
  BW_ASSIGN_OR_RETURN(std::unique_ptr<File> lock, file_system->Lock(options.directory + "/LOCK"));
  auto wal = std::make_unique<LocalWal>(options, file_system, std::move(on_durable), std::move(lock));
  BW_RETURN_IF_ERROR(wal->Start());
  return wal;
}

}  // namespace bellwether::server
