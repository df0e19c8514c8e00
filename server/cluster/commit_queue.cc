#include "server/cluster/commit_queue.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "server/store/wal_format.h"
#include "server/util/await_for.h"
#include "server/util/clock.h"
#include "server/util/log.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

constexpr absl::Duration kRetry = absl::Milliseconds(100);
constexpr absl::Duration kProbe = absl::Milliseconds(250);
constexpr absl::Duration kCloseWait = absl::Seconds(5);

}  // namespace

CommitQueue::CommitQueue(const PostgresLogOptions& options, FrameTables* tables, LogBackend::DurableCallback on_durable)
    : options_(options),
      tables_(tables),
      on_durable_(std::move(on_durable)),
      lsns_(options.lsns != nullptr ? options.lsns : std::make_shared<LsnCount>()) {}

CommitQueue::~CommitQueue() { (void)Close(); }

void CommitQueue::Start() {
  for (int i = 0; i < options_.writers; ++i) {
    threads_.emplace_back([this, i] { Write(static_cast<uint32_t>(i)); });
  }
}

void CommitQueue::SetLost(SharedLog::LostCallback on_lost) {
  absl::MutexLock lock(&mutex_);
  on_lost_ = std::move(on_lost);
}

void CommitQueue::AcquirePartition(const Fence& fence, Lsn last) {
  absl::MutexLock lock(&mutex_);
  lsns_->RaiseTo(last);
  Part& part = parts_[fence.partition];
  part.owned = true;
  part.epoch = fence.epoch;
}

void CommitQueue::ReleasePartition(uint32_t partition) {
  {
    absl::MutexLock lock(&mutex_);
    Part& part = parts_[partition];
    part.owned = false;
    Drop(&part);
    const auto done = [&part]() { return !part.committing; };
    mutex_.Await(absl::Condition(&done));
  }
  NotifyDurable();  // What waited for what was dropped.
}

absl::StatusOr<Fence> CommitQueue::FenceOf(uint32_t partition) const {
  absl::MutexLock lock(&mutex_);
  if (!parts_[partition].owned) return absl::AbortedError("another server of the cluster owns this run");
  return Fence{partition, parts_[partition].epoch};
}

std::vector<Fence> CommitQueue::Owned() const {
  std::vector<Fence> owned;
  absl::MutexLock lock(&mutex_);
  for (uint32_t p = 0; p < kPartitions; ++p) {
    if (parts_[p].owned) owned.push_back({p, parts_[p].epoch});
  }
  return owned;
}

absl::StatusOr<Lsn> CommitQueue::Append(WalRecord&& record) {
  if (record.kind == WalKind::kNone) return absl::InvalidArgumentError("log: a record needs a kind");
  const auto bytes = static_cast<int64_t>(record.payload.size());
  if (bytes > options_.record_bytes_max) {
    return absl::InvalidArgumentError(
        absl::StrCat("log: a record of ", bytes, " bytes: at most ", options_.record_bytes_max));
  }
  absl::MutexLock lock(&mutex_);
  if (closing_) return absl::UnavailableError("the log is closed");
  Part& part = parts_[PartitionInDatabase(PartitionOfRun(record.run))];
  if (!part.owned) return absl::UnavailableError("another server of the cluster owns this run; come back");
  if (pending_bytes_ + bytes > options_.pending_bytes_max) {
    return absl::ResourceExhaustedError("the log is full of records that wait for the database");
  }
  pending_bytes_ += RecordBytes(record.payload.size());
  record.lsn = lsns_->Next();
  const Lsn lsn = record.lsn;
  part.waiting.push_back(std::move(record));
  return lsn;
}

absl::Status CommitQueue::Sync(Lsn lsn) {
  absl::MutexLock lock(&mutex_);
  const auto over = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return Watermark() >= lsn || closed_ || !HealthLocked().ok();
  };
  // Time passes without anybody touching what `over` looks at.
  while (!AwaitFor(&mutex_, absl::Condition(&over), absl::Milliseconds(100))) {
  }
  if (Watermark() >= lsn) return absl::OkStatus();
  return closed_ ? absl::UnavailableError("the log is closed") : HealthLocked();
}

void CommitQueue::Hold(const absl::Status& why) {
  absl::MutexLock lock(&mutex_);
  held_ = why;
}

absl::Status CommitQueue::Close() {
  absl::Status left;
  {
    absl::MutexLock lock(&mutex_);
    if (closed_) return absl::OkStatus();
    held_ = absl::OkStatus();
    closing_ = true;
    const auto drained = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return pending_bytes_ == 0; };
    AwaitFor(&mutex_, absl::Condition(&drained), kCloseWait);
    if (pending_bytes_ != 0) left = absl::UnavailableError("the database did not take what had been received");
    closed_ = true;
  }
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
  return left;
}

Lsn CommitQueue::durable_lsn() const {
  absl::MutexLock lock(&mutex_);
  return Watermark();  // Above what was told, where other databases have had all since then.
}

Lsn CommitQueue::last_lsn() const { return lsns_->last(); }

absl::Status CommitQueue::health() const {
  absl::MutexLock lock(&mutex_);
  return HealthLocked();
}

void CommitQueue::TakeSyncSeconds(std::vector<double>* seconds) {
  absl::MutexLock lock(&mutex_);
  *seconds = std::exchange(commit_seconds_, {});
}

absl::Status CommitQueue::HealthLocked() const {
  if (!held_.ok()) return held_;
  if (failing_since_ns_ == 0) return absl::OkStatus();
  return MonotonicNow() - failing_since_ns_ < options_.patience_ms * 1'000'000 ? absl::OkStatus() : failing_;
}

Lsn CommitQueue::Watermark() const {
  Lsn first = std::min(lsns_->last() + 1, unwritten_);
  for (const Part& part : parts_) {
    if (part.committing) first = std::min(first, part.first_committing);
    if (!part.waiting.empty()) first = std::min(first, part.waiting.front().lsn);
  }
  return first - 1;
}

void CommitQueue::Drop(Part* part) {
  for (const WalRecord& record : part->waiting) pending_bytes_ -= RecordBytes(record.payload.size());
  part->waiting.clear();
}

CommitQueue::Next CommitQueue::NextGroup(uint32_t writer, uint32_t* turn, Group* group) {
  absl::MutexLock lock(&mutex_);
  std::optional<uint32_t> found;
  const auto ready = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    found.reset();  // What was found before may have been dropped since.
    if (closed_) return true;
    if (!held_.ok()) return false;
    const auto writers = static_cast<uint32_t>(options_.writers);
    for (uint32_t i = 0; i < kPartitions; ++i) {
      const uint32_t p = (*turn + i) % kPartitions;
      if (p % writers != writer || parts_[p].waiting.empty()) continue;
      found = p;
      return true;
    }
    return false;
  };
  const auto ready_or_failing = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (ready()) return true;
    // A commit that is under way finds out itself: where it waits for a standby a
    // database answers, and commits nothing.
    return writer == 0 && failing_since_ns_ != 0 &&
           std::none_of(parts_.begin(), parts_.end(), [](const Part& part) { return part.committing; });
  };
  mutex_.Await(absl::Condition(&ready_or_failing));
  if (!found.has_value() && !closed_ && !AwaitFor(&mutex_, absl::Condition(&ready), kProbe)) return Next::kProbe;
  if (!found.has_value()) return Next::kClosed;
  *turn = *found + 1;
  Part& part = parts_[*found];
  *group = {};
  group->fence = {*found, part.epoch};
  while (!part.waiting.empty() && (group->records.empty() || group->bytes < options_.group_bytes_max)) {
    group->bytes += RecordBytes(part.waiting.front().payload.size());
    group->records.push_back(std::move(part.waiting.front()));
    part.waiting.pop_front();
  }
  group->first_lsn = group->records.front().lsn;
  group->last_lsn = group->records.back().lsn;
  part.committing = true;
  part.first_committing = group->first_lsn;
  return Next::kGroup;
}

void CommitQueue::Write(uint32_t writer) {
  PgLink link(options_.dsn, options_.answer_ms_max,
              [this](PgConnection* connection) { return tables_->LearnDay(connection, options_.answer_ms_max); });
  uint32_t turn = 0;
  Group group;
  for (;;) {
    const Next next = NextGroup(writer, &turn, &group);
    if (next == Next::kClosed) return;
    if (next == Next::kProbe) {
      Probe(&link);
      continue;
    }
    const int64_t began_ns = MonotonicNow();
    const absl::Status committed = Commit(&group, &link);
    if (absl::IsAborted(committed)) Lose(group);
    {
      absl::MutexLock lock(&mutex_);
      Part& part = parts_[group.fence.partition];
      part.committing = false;
      pending_bytes_ -= group.bytes;
      if (!committed.ok() && !absl::IsAborted(committed)) {  // Closed.
        unwritten_ = std::min(unwritten_, group.first_lsn);
        return;
      }
      if (committed.ok() && commit_seconds_.size() < 4096) {
        commit_seconds_.push_back(static_cast<double>(MonotonicNow() - began_ns) * 1e-9);
      }
    }
    NotifyDurable();
  }
}

void CommitQueue::Probe(PgLink* link) {
  if (!link->Run({{"SELECT 1", {}}}).ok()) return;
  absl::MutexLock lock(&mutex_);
  RecordAnswer();
}

void CommitQueue::RecordAnswer() {
  if (failing_since_ns_ != 0) LogInfo("the database answers again: acknowledgements go on");
  failing_since_ns_ = 0;
}

void CommitQueue::RecordSilence(const char* what, const absl::Status& why) {
  if (failing_since_ns_ == 0) {
    failing_since_ns_ = MonotonicNow();
    LogWarning("{} for the database: {}", what, std::string(why.message()));
  }
  failing_ = absl::UnavailableError(why.message());
}

void CommitQueue::RecordSilence(const absl::Status& why) {
  absl::MutexLock lock(&mutex_);
  RecordSilence("rows of runs wait", why);
}

void CommitQueue::NotifyDurable() {
  absl::MutexLock order(&durable_mutex_);  // Callbacks in the order of what they say.
  Lsn durable = 0;
  {
    absl::MutexLock lock(&mutex_);
    durable = Watermark();
    if (durable <= durable_) return;
    durable_ = durable;
  }
  on_durable_(durable);
}

absl::Status CommitQueue::Commit(Group* group, PgLink* link) {
  const std::string body = PackRecords(group->records);
  for (;;) {
    // The day is known with the first connection.
    absl::Status status = link->Connect();
    if (status.ok()) {
      if (group->table < 0) group->table = tables_->TableOfToday();
      std::vector<PgStatement> flight = FencedFlight(group->fence);
      flight.push_back(
          FrameTables::Insert(group->table, group->fence, group->first_lsn, group->last_lsn, options_.owner, body));
      status = link->Transact(flight).status();
    }
    absl::MutexLock lock(&mutex_);
    if (status.ok() || absl::IsAborted(status)) {
      RecordAnswer();
      return status;
    }
    RecordSilence("a commit waits", status);
    if (!parts_[group->fence.partition].owned) return absl::AbortedError("given up meanwhile");
    const auto closed = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return closed_; };
    if (AwaitFor(&mutex_, absl::Condition(&closed), kRetry)) return status;
  }
}

void CommitQueue::Lose(const Group& group) {
  const auto [partition, epoch] = group.fence;
  SharedLog::LostCallback on_lost;
  {
    absl::MutexLock lock(&mutex_);
    const Part& part = parts_[partition];
    if (!part.owned || part.epoch != epoch) return;  // It knows.
    on_lost = on_lost_;
  }
  LogWarning("partition {} was taken by another server: epoch {} is over", partition, epoch);
  if (on_lost != nullptr) on_lost(partition);
  absl::MutexLock lock(&mutex_);
  Part& part = parts_[partition];
  part.owned = false;
  Drop(&part);
}

}  // namespace bellwether::server
