#include "server/cluster/postgres_log.h"

#include <atomic>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/cluster/commit_queue.h"
#include "server/cluster/frame_tables.h"
#include "server/cluster/link.h"
#include "server/cluster/postgres_alerts.h"
#include "server/cluster/postgres_rows.h"
#include "server/cluster/waiting_alerts.h"
#include "server/model/partition.h"
#include "server/util/log.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

// Several saves wait for their commits at once (kSavers, engine.cc), and alerts wait for
// none of those; several partitions are read at once.
constexpr size_t kRowLinks = 4;
constexpr size_t kAlertLinks = 2;
constexpr size_t kReadLinks = 2;

class PostgresLog final : public SharedLog {
 public:
  PostgresLog(const PostgresLogOptions& options, DurableCallback on_durable)
      : owner_(options.owner),
        may_be_away_(options.may_be_away),
        numbers_(options.numbers),
        rows_link_(options.dsn, options.answer_ms_max, kRowLinks),
        alerts_link_(options.dsn, options.answer_ms_max, kAlertLinks),
        read_link_(options.dsn, options.answer_ms_max, kReadLinks),
        queue_(options, &tables_, std::move(on_durable)) {}

  absl::Status Start() {
    const absl::Status checked = Check();
    if (!checked.ok() && !(may_be_away_ && absl::IsUnavailable(checked))) return checked;
    queue_.Start();
    return absl::OkStatus();
  }

  // ---- SharedLog ----
  void SetLost(LostCallback on_lost) override { queue_.SetLost(std::move(on_lost)); }

  absl::Status AcquirePartition(uint32_t partition, uint64_t epoch) override {
    BW_ASSIGN_OR_RETURN(const Lsn last, FrameTables::LastLsn(partition, &read_link_));
    write_numbers_.Begin({partition, epoch});
    queue_.AcquirePartition({partition, epoch}, last);
    return absl::OkStatus();
  }
  void ReleasePartition(uint32_t partition) override { queue_.ReleasePartition(partition); }

  absl::Status ReadRows(uint32_t partition, std::string_view first, std::string_view end,
                        const std::function<absl::Status(const std::vector<SharedRow>&)>& visit) const override {
    return ReadPostgresRows(partition, first, std::string(end), &read_link_, visit);
  }
  absl::Status ReadRecords(uint32_t partition,
                           const std::function<absl::Status(const WalRecord&)>& visit) const override {
    return FrameTables::Read(partition, &read_link_, visit);
  }

  // ---- SharedRows ----
  absl::Status PutRows(RunId run, const std::vector<SharedRow>& rows) override {
    BW_ASSIGN_OR_RETURN(const Fence fence, queue_.FenceOf(PartitionInDatabase(PartitionOfRun(run))));
    absl::Status put = PutPostgresRows(fence, rows, &write_numbers_, &rows_link_);
    if (absl::IsUnavailable(put)) queue_.RecordSilence(put);  // Further ones need not wait as long.
    return put;
  }
  absl::StatusOr<bool> PutTransition(AlertTransition* transition) override {
    BW_ASSIGN_OR_RETURN(const Fence fence, queue_.FenceOf(PartitionInDatabase(PartitionOfRun(transition->run))));
    if (numbers_ == nullptr) return PutPostgresTransition(fence, owner_, transition, &alerts_link_);
    BW_RETURN_IF_ERROR(KeepWaitingAlert(fence, owner_, *transition, &alerts_link_));
    BW_ASSIGN_OR_RETURN(const bool is_new, numbers_->Put(fence.epoch, owner_, transition));
    // One that stays is numbered already: found so, and dropped, by the next owner.
    (void)DropWaitingAlert(fence.partition, *transition, &alerts_link_);
    return is_new;
  }
  absl::Status KeepTransition(const AlertTransition& transition) override {
    if (numbers_ == nullptr) return absl::OkStatus();
    BW_ASSIGN_OR_RETURN(const Fence fence, queue_.FenceOf(PartitionInDatabase(PartitionOfRun(transition.run))));
    return KeepWaitingAlert(fence, owner_, transition, &alerts_link_);
  }
  absl::StatusOr<std::vector<AlertTransition>> ListTransitions(uint64_t after, size_t limit) const override {
    return ListPostgresTransitions(after, limit, &read_link_, &unreadable_);
  }

  // ---- LogBackend ----
  // A server begins with no partition, and so with nothing to recover.
  const Recovery& recovery() const override { return recovery_; }
  absl::Status Read(Lsn, Lsn, const std::function<absl::Status(const WalRecord&)>&) const override {
    return absl::OkStatus();
  }
  absl::Status ReadHeads(const std::function<absl::Status(const WalRecord&)>&) const override {
    return absl::OkStatus();
  }

  absl::StatusOr<Lsn> Append(WalRecord&& record) override { return queue_.Append(std::move(record)); }
  absl::Status Sync(Lsn lsn) override { return queue_.Sync(lsn); }
  absl::Status Truncate(Lsn keep) override {
    BW_RETURN_IF_ERROR(health());
    for (const Fence& fence : queue_.Owned()) {  // One partition a transaction.
      BW_RETURN_IF_ERROR(
          rows_link_
              .Ask({"UPDATE bellwether.lease SET keep = $1 WHERE p = $2 AND epoch = $3 AND keep < $1",
                    {static_cast<int64_t>(keep), int64_t{fence.partition}, static_cast<int64_t>(fence.epoch)}})
              .status());
      BW_RETURN_IF_ERROR(NumberLeftAlerts(fence));
    }
    return tables_.EmptyOld(&rows_link_);
  }
  void Hold(const absl::Status& why) override { queue_.Hold(why); }
  absl::Status CopyTo(const std::string&) override {
    return absl::FailedPreconditionError(
        "the log is in PostgreSQL: back that up instead (docs/operate/cluster.md); this server's folder is a cache");
  }
  absl::Status Close() override { return queue_.Close(); }

  Lsn durable_lsn() const override { return queue_.durable_lsn(); }
  Lsn last_lsn() const override { return queue_.last_lsn(); }
  int64_t bytes() const override { return 0; }
  Lsn TailBegin(int64_t) const override { return 0; }
  absl::Status health() const override { return queue_.health(); }
  void TakeSyncSeconds(std::vector<double>* seconds) override { queue_.TakeSyncSeconds(seconds); }

 private:
  // Those that an owner before this one could not number any more.
  absl::Status NumberLeftAlerts(const Fence& fence) {
    if (numbers_ == nullptr) return absl::OkStatus();
    BW_ASSIGN_OR_RETURN(std::vector<WaitingAlert> left, ListWaitingAlerts(fence, &rows_link_));
    for (WaitingAlert& alert : left) {
      if (!numbers_->Put(alert.epoch, alert.owner, &alert.transition).ok()) return absl::OkStatus();  // Another time.
      BW_RETURN_IF_ERROR(DropWaitingAlert(fence.partition, alert.transition, &rows_link_));
    }
    return absl::OkStatus();
  }

  // What must be there, said at the start rather than at the first takeover.
  absl::Status Check() {
    const auto version = read_link_.Ask({"SELECT max(version) FROM bellwether.migrations", {}});
    if (!version.ok()) {
      if (!absl::IsFailedPrecondition(version.status())) return version.status();
      return absl::FailedPreconditionError(absl::StrCat(std::string(version.status().message()),
                                                        ": run the files of deploy/postgres as the schema's owner, and "
                                                        "grant bellwether_server to this role"));
    }
    const int64_t is = version->IsNull(0, 0) ? 0 : version->Number(0, 0);
    if (is != kSharedSchemaVersion) {
      return absl::FailedPreconditionError(absl::StrCat("the shared schema is of version ", is, ", this server speaks ",
                                                        kSharedSchemaVersion,
                                                        ": run the newer files of deploy/postgres"));
    }
    // Not every engine has the setting; who has none is not warned.
    const auto standbys = read_link_.Ask({"SHOW synchronous_standby_names", {}});
    if (standbys.ok() && standbys->rows() == 1 && standbys->Text(0, 0).empty()) {
      LogWarning(
          "the database has no synchronous standby (synchronous_standby_names is empty): what is acknowledged is on "
          "its disk alone");
    }
    return absl::OkStatus();
  }

  const std::string owner_;
  const bool may_be_away_;
  const std::shared_ptr<AlertNumbers> numbers_;
  const Recovery recovery_;
  WriteNumbers write_numbers_;
  mutable SharedPgLink rows_link_, alerts_link_;  // Commits of them.
  mutable SharedPgLink read_link_;
  mutable std::atomic<uint64_t> unreadable_ = 0;
  FrameTables tables_;
  CommitQueue queue_;  // First to go: its writers use the tables.
};

}  // namespace

absl::StatusOr<std::unique_ptr<SharedLog>> OpenPostgresLog(const PostgresLogOptions& options,
                                                           LogBackend::DurableCallback on_durable) {
  if (options.writers < 1 || options.writers > static_cast<int>(kPartitions)) {
    return absl::InvalidArgumentError(absl::StrCat("cluster.connections = ", options.writers, ": must be in [1, 64]"));
  }
  auto log = std::make_unique<PostgresLog>(options, std::move(on_durable));
  BW_RETURN_IF_ERROR(log->Start());
  return log;
}

}  // namespace bellwether::server
