#include "server/cluster/spread_log.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/cluster/identity.h"
#include "server/model/partition.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

class SpreadLog final : public SharedLog {
 public:
  SpreadLog(std::vector<std::unique_ptr<SharedLog>> logs, std::shared_ptr<AlertNumbers> numbers)
      : logs_(std::move(logs)), numbers_(logs_.size() > 1 ? std::move(numbers) : nullptr) {}

  // ---- SharedLog ----
  void SetLost(LostCallback on_lost) override {
    for (uint32_t i = 0; i < logs_.size(); ++i) {
      logs_[i]->SetLost([on_lost, i](uint32_t place) { on_lost(i * kPartitions + place); });
    }
  }
  absl::Status AcquirePartition(uint32_t partition, uint64_t epoch) override {
    return LogWith(partition).AcquirePartition(PartitionInDatabase(partition), epoch);
  }
  void ReleasePartition(uint32_t partition) override {
    LogWith(partition).ReleasePartition(PartitionInDatabase(partition));
  }
  absl::Status ReadRows(uint32_t partition, std::string_view first, std::string_view end,
                        const std::function<absl::Status(const std::vector<SharedRow>&)>& visit) const override {
    return LogWith(partition).ReadRows(PartitionInDatabase(partition), first, end, visit);
  }
  absl::Status ReadRecords(uint32_t partition,
                           const std::function<absl::Status(const WalRecord&)>& visit) const override {
    return LogWith(partition).ReadRecords(PartitionInDatabase(partition), visit);
  }

  // ---- SharedRows ----
  absl::Status PutRows(RunId run, const std::vector<SharedRow>& rows) override {
    return LogWith(PartitionOfRun(run)).PutRows(run, rows);
  }
  absl::StatusOr<bool> PutTransition(AlertTransition* transition) override {
    const uint32_t partition = PartitionOfRun(transition->run);
    if (DatabaseOf(partition) != 0) {
      BW_RETURN_IF_ERROR(LogWith(partition).health());  // Other runs' alerts need not wait for it.
      return LogWith(partition).PutTransition(transition);
    }
    return OfFirst([&] { return logs_.front()->PutTransition(transition); });
  }
  uint32_t StoreOf(RunId run) const override { return LaneOf(run); }
  absl::Status KeepTransition(const AlertTransition& transition) override {
    SharedLog& log = LogWith(PartitionOfRun(transition.run));
    BW_RETURN_IF_ERROR(log.health());
    return log.KeepTransition(transition);
  }
  absl::StatusOr<std::vector<AlertTransition>> ListTransitions(uint64_t after, size_t limit) const override {
    return OfFirst([&] { return logs_.front()->ListTransitions(after, limit); });
  }

  // ---- LogBackend ----
  uint32_t lanes() const override { return static_cast<uint32_t>(logs_.size()); }
  uint32_t LaneOf(RunId run) const override { return DatabaseOf(PartitionOfRun(run)); }
  LogBackend* lane(uint32_t lane) override { return logs_[lane].get(); }

  const Recovery& recovery() const override { return logs_.front()->recovery(); }  // Nothing, of all.
  absl::Status Read(Lsn, Lsn, const std::function<absl::Status(const WalRecord&)>&) const override {
    return absl::OkStatus();
  }
  absl::Status ReadHeads(const std::function<absl::Status(const WalRecord&)>&) const override {
    return absl::OkStatus();
  }

  absl::StatusOr<Lsn> Append(WalRecord&& record) override {
    return LogWith(PartitionOfRun(record.run)).Append(std::move(record));
  }
  absl::Status Sync(Lsn lsn) override {
    return OfAll([lsn](LogBackend& log) { return log.Sync(lsn); });
  }
  absl::Status Truncate(Lsn keep) override {
    return OfAll([keep](LogBackend& log) { return log.Truncate(keep); });
  }
  void Hold(const absl::Status& why) override {
    for (const auto& log : logs_) log->Hold(why);
  }
  absl::Status CopyTo(const std::string& directory) override { return logs_.front()->CopyTo(directory); }
  absl::Status Close() override {
    return OfAll([](LogBackend& log) { return log.Close(); });
  }

  Lsn durable_lsn() const override {
    Lsn durable = logs_.front()->durable_lsn();
    for (const auto& log : logs_) durable = std::min(durable, log->durable_lsn());
    return durable;
  }
  Lsn last_lsn() const override { return logs_.front()->last_lsn(); }  // One count.
  int64_t bytes() const override { return 0; }
  Lsn TailBegin(int64_t) const override { return 0; }
  absl::Status health() const override {
    return OfAll([](const LogBackend& log) { return log.health(); });
  }
  void TakeSyncSeconds(std::vector<double>* seconds) override {
    seconds->clear();
    for (const auto& log : logs_) {
      std::vector<double> some;
      log->TakeSyncSeconds(&some);
      seconds->insert(seconds->end(), some.begin(), some.end());
    }
  }

 private:
  SharedLog& LogWith(uint32_t partition) const { return *logs_[DatabaseOf(partition)]; }
  // Does it with all; the first error.
  template <typename Call>
  absl::Status OfAll(Call call) const {
    absl::Status first;
    for (const auto& log : logs_) {
      absl::Status status = call(*log);
      if (first.ok()) first = std::move(status);
    }
    return first;
  }

  // What the first database is asked about alerts, unless it did not answer just now.
  template <typename Call>
  auto OfFirst(Call call) const -> decltype(call()) {
    if (numbers_ == nullptr) return call();
    BW_RETURN_IF_ERROR(numbers_->answers());
    auto answer = call();
    numbers_->Note(answer.status());
    return answer;
  }

  const std::vector<std::unique_ptr<SharedLog>> logs_;
  const std::shared_ptr<AlertNumbers> numbers_;  // Null: there is one database.
};

}  // namespace

absl::StatusOr<std::unique_ptr<SharedLog>> OpenSpreadLog(const std::vector<std::string>& dsns,
                                                         const PostgresLogOptions& options,
                                                         SharedLog::LaneDurableCallback on_durable) {
  if (dsns.empty() || dsns.size() > kDatabasesMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("cluster.dsn_files holds ", dsns.size(), " entries: must be 1 to ", kDatabasesMax));
  }
  PostgresLogOptions of_one = options;
  of_one.lsns = std::make_shared<LsnCount>();
  std::vector<std::unique_ptr<SharedLog>> logs;
  for (uint32_t i = 0; i < dsns.size(); ++i) {
    of_one.dsn = dsns[i];
    of_one.may_be_away = i > 0;
    auto log = OpenPostgresLog(of_one, [on_durable, i](Lsn durable) { on_durable(i, durable); });
    if (!log.ok()) {
      if (dsns.size() == 1) return log.status();
      return absl::Status(log.status().code(),
                          absl::StrCat("cluster.dsn_files, entry ", i + 1, ": ", std::string(log.status().message())));
    }
    logs.push_back(*std::move(log));
    if (i == 0) of_one.numbers = std::make_shared<AlertNumbers>(dsns[0], options.answer_ms_max);
  }
  BW_RETURN_IF_ERROR(CheckIdentity(dsns, options.answer_ms_max).status());
  return std::make_unique<SpreadLog>(std::move(logs), of_one.numbers);
}

}  // namespace bellwether::server
