#include "server/cluster/postgres_log.h"

#include <zstd.h>

#include <algorithm>
#include <array>
#include <deque>
#include <map>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "server/cluster/connection.h"
#include "server/cluster/partition.h"
#include "server/store/record_codec.h"
#include "server/store/wal_format.h"
#include "server/util/await_for.h"
#include "server/util/clock.h"
#include "server/util/log.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

constexpr uint32_t kSalt = 0;  // Of packed records: nobody looks for one among other bytes.
constexpr int64_t kBodyBytesMax = 64 << 20;
constexpr int kFrameTables = 4;  // Of 001_tables.sql.
constexpr int64_t kDayNanos = int64_t{86'400} * 1'000'000'000;
constexpr int64_t kEmptyOldNanos = int64_t{600} * 1'000'000'000;
constexpr size_t kRowsPerStatement = 32;
constexpr int64_t kRowsPage = 256;
constexpr int64_t kBodiesPage = 32;
constexpr absl::Duration kRetry = absl::Milliseconds(100);
constexpr absl::Duration kCloseWait = absl::Seconds(5);

// The transaction's first two statements; see postgres_log.h.
void AppendFence(uint32_t partition, uint64_t epoch, std::vector<PgStatement>* flight) {
  flight->push_back({"SELECT epoch FROM bellwether.lease WHERE p = $1 FOR UPDATE", {int64_t{partition}}});
  flight->push_back({"SELECT 1 / count(*) FROM bellwether.lease WHERE p = $1 AND epoch = $2",
                     {int64_t{partition}, static_cast<int64_t>(epoch)}});
}

std::string Pack(const std::vector<WalRecord>& records) {
  std::string plain;
  for (const WalRecord& record : records) {
    RecordView view;
    view.lsn = record.lsn;
    view.kind = record.kind;
    view.run = record.run;
    view.rank = record.rank;
    view.attempt = record.attempt;
    view.epoch = record.epoch;
    view.seq = record.seq;
    view.time_unix_ms = record.time_unix_ms;
    view.payload = record.payload;
    AppendRecord(view, kSalt, &plain);
  }
  std::string packed(ZSTD_compressBound(plain.size()), '\0');
  packed.resize(ZSTD_compress(packed.data(), packed.size(), plain.data(), plain.size(), 1));
  return packed;
}

absl::Status Unpack(std::string_view packed, const std::function<absl::Status(const WalRecord&)>& visit) {
  const unsigned long long size = ZSTD_getFrameContentSize(packed.data(), packed.size());
  if (size > kBodyBytesMax) return absl::DataLossError("shared log: a body is damaged");
  std::string plain(size, '\0');
  if (ZSTD_decompress(plain.data(), plain.size(), packed.data(), packed.size()) != size) {
    return absl::DataLossError("shared log: a body is damaged");
  }
  for (std::string_view left = plain; !left.empty();) {
    RecordView view;
    if (!ParseRecord(left, kSalt, &view)) return absl::DataLossError("shared log: a record is damaged");
    WalRecord record;
    record.lsn = view.lsn;
    record.kind = view.kind;
    record.run = view.run;
    record.rank = view.rank;
    record.attempt = view.attempt;
    record.epoch = view.epoch;
    record.seq = view.seq;
    record.time_unix_ms = view.time_unix_ms;
    record.payload = std::string(view.payload);
    BW_RETURN_IF_ERROR(visit(record));
    left.remove_prefix(static_cast<size_t>(RecordBytes(view.payload.size())));
  }
  return absl::OkStatus();
}

// A connection that is made again when it broke; several threads take turns.
class Link {
 public:
  Link(const PostgresLogOptions& options) : options_(options) {}

  // Calls `work` with a connection.  What is UNAVAILABLE is not tried again.
  template <typename Work>
  auto With(Work work) -> decltype(work(std::declval<PgConnection*>())) {
    absl::MutexLock lock(&mutex_);
    if (connection_ == nullptr || connection_->broken()) {
      connection_.reset();
      auto made = PgConnection::Connect(options_.dsn, options_.answer_ms_max);
      if (!made.ok()) return made.status();
      connection_ = *std::move(made);
    }
    return work(connection_.get());
  }

 private:
  const PostgresLogOptions& options_;
  absl::Mutex mutex_;
  std::unique_ptr<PgConnection> connection_ ABSL_GUARDED_BY(mutex_);
};

class PostgresLog final : public SharedLog {
 public:
  PostgresLog(const PostgresLogOptions& options, DurableCallback on_durable)
      : options_(options), on_durable_(std::move(on_durable)), rows_link_(options_), read_link_(options_) {}
  ~PostgresLog() override { (void)Close(); }

  absl::Status Start() {
    BW_RETURN_IF_ERROR(Check());
    for (int i = 0; i < options_.writers; ++i) {
      threads_.emplace_back([this, i] { Write(static_cast<uint32_t>(i)); });
    }
    return absl::OkStatus();
  }

  // ---- SharedLog ----
  void SetLost(LostCallback on_lost) override {
    absl::MutexLock lock(&mutex_);
    on_lost_ = std::move(on_lost);
  }

  absl::Status Own(uint32_t partition, uint64_t epoch) override {
    BW_ASSIGN_OR_RETURN(const Lsn last, LastLsn(partition));
    absl::MutexLock lock(&mutex_);
    next_lsn_ = std::max(next_lsn_, last + 1);
    Part& part = parts_[partition];
    part.owned = true;
    part.epoch = epoch;
    durable_ = std::max(durable_, Watermark());
    return absl::OkStatus();
  }

  void Disown(uint32_t partition) override {
    absl::MutexLock lock(&mutex_);
    Part& part = parts_[partition];
    part.owned = false;
    Drop(&part);
    const auto done = [&part]() { return !part.committing; };
    mutex_.Await(absl::Condition(&done));
    durable_ = std::max(durable_, Watermark());
  }

  absl::Status ReadRows(uint32_t partition, std::string_view first, std::string_view end,
                        const std::function<absl::Status(const std::vector<SharedRow>&)>& visit) const override {
    for (std::string after(first);;) {
      BW_ASSIGN_OR_RETURN(const std::vector<SharedRow> page, ReadRowsPage(partition, after, std::string(end)));
      BW_RETURN_IF_ERROR(visit(page));
      if (static_cast<int64_t>(page.size()) < kRowsPage) return absl::OkStatus();
      after = page.back().key;
    }
  }

  absl::Status ReadRecords(uint32_t partition,
                           const std::function<absl::Status(const WalRecord&)>& visit) const override {
    BW_ASSIGN_OR_RETURN(const auto kept, Ask({"SELECT keep FROM bellwether.lease WHERE p = $1", {int64_t{partition}}}));
    if (kept.rows() != 1) return absl::InternalError("the lease table lost a row");
    const auto keep = kept.Number(0, 0);
    std::string tables;
    for (int i = 0; i < kFrameTables; ++i) {
      absl::StrAppend(&tables, i == 0 ? "" : " UNION ALL ", "SELECT first_lsn, last_lsn, body FROM bellwether.frames_",
                      i, " WHERE p = $1 AND first_lsn > $2");
    }
    // Whole bodies: the first may begin below `keep`.
    int64_t after = -1;
    for (;;) {
      BW_ASSIGN_OR_RETURN(const auto page,
                          Ask({absl::StrCat("SELECT first_lsn, body FROM (", tables,
                                            ") AS f WHERE last_lsn >= $3 ORDER BY first_lsn LIMIT ", kBodiesPage),
                               {int64_t{partition}, after, keep}}));
      for (int row = 0; row < page.rows(); ++row) {
        after = page.Number(row, 0);
        BW_RETURN_IF_ERROR(Unpack(page.Text(row, 1), visit));
      }
      if (page.rows() < kBodiesPage) return absl::OkStatus();
    }
  }

  // ---- SharedRows ----
  absl::Status PutRows(RunId run, const std::vector<SharedRow>& rows) override {
    const uint32_t partition = PartitionOfRun(run);
    BW_ASSIGN_OR_RETURN(const uint64_t epoch, EpochOf(partition));
    std::vector<PgStatement> flight;
    AppendFence(partition, epoch, &flight);
    // A key that stands twice has its last word; one statement takes each key once.
    std::map<std::string_view, const SharedRow*> last;
    for (const SharedRow& row : rows) last[row.key] = &row;
    PgStatement put;
    size_t in_put = 0;
    const auto finish = [&] {
      if (in_put == 0) return;
      put.sql += " ON CONFLICT (p, key) DO UPDATE SET value = excluded.value";
      flight.push_back(std::move(put));
      put = {};
      in_put = 0;
    };
    for (const auto& [key, row] : last) {
      if (!row->value.has_value()) {
        flight.push_back({"DELETE FROM bellwether.run_rows WHERE p = $1 AND key = $2",
                          {int64_t{partition}, PgValue::Bytes(row->key)}});
        continue;
      }
      if (in_put == 0) {
        put = {"INSERT INTO bellwether.run_rows (p, key, value) VALUES ", {int64_t{partition}}};
      }
      absl::StrAppend(&put.sql, in_put == 0 ? "" : ", ", "($1, $", put.values.size() + 1, ", $", put.values.size() + 2,
                      ")");
      put.values.push_back(PgValue::Bytes(row->key));
      put.values.push_back(PgValue::Bytes(*row->value));
      if (++in_put == kRowsPerStatement) finish();
    }
    finish();
    return rows_link_
        .With([&](PgConnection* connection) { return connection->Transact(flight, options_.answer_ms_max); })
        .status();
  }

  absl::StatusOr<bool> PutTransition(Transition* transition) override {
    const uint32_t partition = PartitionOfRun(transition->run);
    BW_ASSIGN_OR_RETURN(const uint64_t epoch, EpochOf(partition));
    std::vector<PgStatement> flight;
    AppendFence(partition, epoch, &flight);
    const PgValue p = int64_t{partition}, run = static_cast<int64_t>(transition->run), key = transition->key,
                  k = int64_t{transition->k};
    flight.push_back(
        {"UPDATE bellwether.alert_count SET n = n + 1 WHERE one = 1 AND NOT EXISTS "
         "(SELECT 1 FROM bellwether.alerts WHERE p = $1 AND run = $2 AND key = $3 AND k = $4)",
         {p, run, key, k}});
    flight.push_back(
        {"INSERT INTO bellwether.alerts (p, run, key, k, n, epoch, owner, body) SELECT CAST($1 AS integer), "
         "CAST($2 AS bigint), CAST($3 AS text), CAST($4 AS integer), n, CAST($5 AS bigint), CAST($6 AS text), $7 "
         "FROM bellwether.alert_count WHERE one = 1 ON CONFLICT (p, run, key, k) DO NOTHING",
         {p, run, key, k, static_cast<int64_t>(epoch), options_.owner, PgValue::Bytes(EncodeTransition(*transition))}});
    flight.push_back(
        {"SELECT n FROM bellwether.alerts WHERE p = $1 AND run = $2 AND key = $3 AND k = $4", {p, run, key, k}});
    const auto done =
        rows_link_.With([&](PgConnection* connection) { return connection->Transact(flight, options_.answer_ms_max); });
    BW_RETURN_IF_ERROR(done.status());
    if (done->back().rows() != 1) return absl::InternalError("an alert is not there after it was stored");
    transition->id = static_cast<uint64_t>(done->back().Number(0, 0));
    return (*done)[done->size() - 2].affected() == 1;
  }

  absl::StatusOr<std::vector<Transition>> ListTransitions(uint64_t after, size_t limit) const override {
    BW_ASSIGN_OR_RETURN(const auto rows, Ask({"SELECT n, body FROM bellwether.alerts WHERE n > $1 ORDER BY n LIMIT $2",
                                              {static_cast<int64_t>(after), static_cast<int64_t>(limit)}}));
    std::vector<Transition> transitions;
    for (int row = 0; row < rows.rows(); ++row) {
      BW_ASSIGN_OR_RETURN(Transition transition, DecodeTransition(rows.Text(row, 1)));
      transition.id = static_cast<uint64_t>(rows.Number(row, 0));
      transitions.push_back(std::move(transition));
    }
    return transitions;
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

  absl::StatusOr<Lsn> Append(WalRecord record) override {
    if (record.kind == WalKind::kNone) return absl::InvalidArgumentError("log: a record needs a kind");
    const auto bytes = static_cast<int64_t>(record.payload.size());
    if (bytes > options_.record_bytes_max) {
      return absl::InvalidArgumentError(
          absl::StrCat("log: a record of ", bytes, " bytes: at most ", options_.record_bytes_max));
    }
    absl::MutexLock lock(&mutex_);
    if (closing_) return absl::UnavailableError("the log is closed");
    Part& part = parts_[PartitionOfRun(record.run)];
    if (!part.owned) return absl::UnavailableError("another server of the cluster owns this run; come back");
    if (pending_bytes_ + bytes > options_.pending_bytes_max) {
      return absl::ResourceExhaustedError("the log is full of records that wait for the database");
    }
    pending_bytes_ += RecordBytes(record.payload.size());
    record.lsn = next_lsn_++;
    const Lsn lsn = record.lsn;
    part.waiting.push_back(std::move(record));
    return lsn;
  }

  absl::Status Sync(Lsn lsn) override {
    absl::MutexLock lock(&mutex_);
    const auto over = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return durable_ >= lsn || closed_ || !HealthLocked().ok();
    };
    // Time passes without anybody touching what `over` looks at.
    while (!AwaitFor(&mutex_, absl::Condition(&over), absl::Milliseconds(100))) {
    }
    if (durable_ >= lsn) return absl::OkStatus();
    return closed_ ? absl::UnavailableError("the log is closed") : HealthLocked();
  }

  absl::Status Truncate(Lsn keep) override {
    BW_RETURN_IF_ERROR(health());
    std::vector<PgStatement> keeps;
    {
      absl::MutexLock lock(&mutex_);
      for (uint32_t p = 0; p < kPartitions; ++p) {
        if (!parts_[p].owned) continue;
        keeps.push_back({"UPDATE bellwether.lease SET keep = $1 WHERE p = $2 AND epoch = $3 AND keep < $1",
                         {static_cast<int64_t>(keep), int64_t{p}, static_cast<int64_t>(parts_[p].epoch)}});
      }
    }
    return rows_link_.With([&](PgConnection* connection) -> absl::Status {
      for (const PgStatement& each : keeps) {  // One partition a transaction.
        BW_RETURN_IF_ERROR(connection->Run({each}, options_.answer_ms_max).status());
      }
      return EmptyOldFrames(connection);
    });
  }

  void Hold(const absl::Status& why) override {
    absl::MutexLock lock(&mutex_);
    held_ = why;
  }
  absl::Status CopyTo(const std::string&) override {
    return absl::FailedPreconditionError(
        "the log is in PostgreSQL: back that up instead (docs/operate/cluster.md); this server's folder is a cache");
  }

  absl::Status Close() override {
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

  Lsn durable_lsn() const override {
    absl::MutexLock lock(&mutex_);
    return durable_;
  }
  Lsn last_lsn() const override {
    absl::MutexLock lock(&mutex_);
    return next_lsn_ - 1;
  }
  int64_t bytes() const override { return 0; }
  Lsn TailBegin(int64_t) const override { return 0; }
  absl::Status health() const override {
    absl::MutexLock lock(&mutex_);
    return HealthLocked();
  }
  void TakeSyncSeconds(std::vector<double>* seconds) override {
    absl::MutexLock lock(&mutex_);
    *seconds = std::exchange(commit_seconds_, {});
  }

 private:
  struct Part {
    bool owned = false;
    bool committing = false;
    uint64_t epoch = 0;
    Lsn first_committing = 0;
    std::deque<WalRecord> waiting;
  };
  struct Group {
    uint32_t partition = 0;
    uint64_t epoch = 0;
    Lsn first_lsn = 0, last_lsn = 0;
    int64_t bytes = 0;
    std::vector<WalRecord> records;
    int table = -1;  // Chosen once: a commit that is tried again must find itself.
  };

  // What must be there, said at the start rather than at the first takeover.
  absl::Status Check() {
    const auto version = Ask({"SELECT max(version) FROM bellwether.migrations", {}});
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
    const auto standbys = Ask({"SHOW synchronous_standby_names", {}});
    if (standbys.ok() && standbys->rows() == 1 && standbys->Text(0, 0).empty()) {
      LogWarning(
          "the database has no synchronous standby (synchronous_standby_names is empty): what is acknowledged is on "
          "its "
          "disk alone");
    }
    return absl::OkStatus();
  }

  absl::StatusOr<PgResult> Ask(PgStatement statement) const {
    auto results = read_link_.With(
        [&](PgConnection* connection) { return connection->Run({std::move(statement)}, options_.answer_ms_max); });
    BW_RETURN_IF_ERROR(results.status());
    return std::move(results->front());
  }

  absl::StatusOr<std::vector<SharedRow>> ReadRowsPage(uint32_t partition, const std::string& after,
                                                      const std::string& end) const {
    BW_ASSIGN_OR_RETURN(const auto rows,
                        Ask({absl::StrCat("SELECT key, value FROM bellwether.run_rows WHERE p = $1 AND key > $2 AND "
                                          "key < $3 ORDER BY key LIMIT ",
                                          kRowsPage),
                             {int64_t{partition}, PgValue::Bytes(after), PgValue::Bytes(end)}}));
    std::vector<SharedRow> page;
    for (int row = 0; row < rows.rows(); ++row) {
      page.push_back({std::string(rows.Text(row, 0)), std::string(rows.Text(row, 1))});
    }
    return page;
  }

  absl::StatusOr<Lsn> LastLsn(uint32_t partition) const {
    std::string sql = "SELECT max(lsn) FROM (SELECT keep AS lsn FROM bellwether.lease WHERE p = $1";
    for (int i = 0; i < kFrameTables; ++i) {
      absl::StrAppend(&sql, " UNION ALL SELECT max(last_lsn) AS lsn FROM bellwether.frames_", i, " WHERE p = $1");
    }
    BW_ASSIGN_OR_RETURN(const auto last, Ask({sql + ") AS l", {int64_t{partition}}}));
    return static_cast<Lsn>(last.IsNull(0, 0) ? 0 : last.Number(0, 0));
  }

  absl::StatusOr<uint64_t> EpochOf(uint32_t partition) const {
    absl::MutexLock lock(&mutex_);
    if (!parts_[partition].owned) return absl::AbortedError("another server of the cluster owns this run");
    return parts_[partition].epoch;
  }

  absl::Status HealthLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (!held_.ok()) return held_;
    if (failing_since_ns_ == 0) return absl::OkStatus();
    const int64_t failing_ns = Clock::System()->MonotonicNanos() - failing_since_ns_;
    return failing_ns < options_.patience_ms * 1'000'000 ? absl::OkStatus() : failing_;
  }

  // Everything up to it is committed, or dropped because it is somebody else's.
  Lsn Watermark() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    Lsn first = next_lsn_;
    for (const Part& part : parts_) {
      if (part.committing) first = std::min(first, part.first_committing);
      if (!part.waiting.empty()) first = std::min(first, part.waiting.front().lsn);
    }
    return first - 1;
  }

  void Drop(Part* part) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    for (const WalRecord& record : part->waiting) pending_bytes_ -= RecordBytes(record.payload.size());
    part->waiting.clear();
  }

  // Fills in the group that writer `writer` commits next; false: the log is closed.
  bool NextGroup(uint32_t writer, uint32_t* turn, Group* group) {
    absl::MutexLock lock(&mutex_);
    std::optional<uint32_t> found;
    const auto ready = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
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
    mutex_.Await(absl::Condition(&ready));
    if (!found.has_value()) return false;
    *turn = *found + 1;
    Part& part = parts_[*found];
    *group = {};
    group->partition = *found;
    group->epoch = part.epoch;
    while (!part.waiting.empty() && (group->records.empty() || group->bytes < options_.group_bytes_max)) {
      group->bytes += RecordBytes(part.waiting.front().payload.size());
      group->records.push_back(std::move(part.waiting.front()));
      part.waiting.pop_front();
    }
    group->first_lsn = group->records.front().lsn;
    group->last_lsn = group->records.back().lsn;
    part.committing = true;
    part.first_committing = group->first_lsn;
    return true;
  }

  void Write(uint32_t writer) {
    std::unique_ptr<PgConnection> connection;
    uint32_t turn = 0;
    Group group;
    while (NextGroup(writer, &turn, &group)) {
      const int64_t began_ns = Clock::System()->MonotonicNanos();
      const absl::Status committed = Commit(&group, &connection);
      if (absl::IsAborted(committed)) Lose(group);
      absl::MutexLock order(&durable_mutex_);  // Callbacks in the order of what they say.
      Lsn durable = 0;
      {
        absl::MutexLock lock(&mutex_);
        Part& part = parts_[group.partition];
        part.committing = false;
        pending_bytes_ -= group.bytes;
        if (!committed.ok() && !absl::IsAborted(committed)) return;  // Closed with it unwritten.
        if (committed.ok() && commit_seconds_.size() < 4096) {
          commit_seconds_.push_back(static_cast<double>(Clock::System()->MonotonicNanos() - began_ns) * 1e-9);
        }
        durable = Watermark();
        if (durable <= durable_) continue;
        durable_ = durable;
      }
      on_durable_(durable);
    }
  }

  // Until it is committed (OK), void (ABORTED), or the log is closed (any other).
  absl::Status Commit(Group* group, std::unique_ptr<PgConnection>* connection) {
    const std::string body = Pack(group->records);
    for (;;) {
      absl::Status status;
      if (*connection == nullptr || (*connection)->broken()) {
        connection->reset();
        auto made = PgConnection::Connect(options_.dsn, options_.answer_ms_max);
        status = made.status();
        if (made.ok()) *connection = *std::move(made);
        if (made.ok()) status = LearnDay(connection->get());
      }
      if (status.ok()) {
        if (group->table < 0) group->table = TableOfToday();
        std::vector<PgStatement> flight;
        AppendFence(group->partition, group->epoch, &flight);
        flight.push_back(
            {absl::StrCat("INSERT INTO bellwether.frames_", group->table,
                          " (p, first_lsn, last_lsn, epoch, owner, body) VALUES ($1, $2, $3, $4, $5, $6) "
                          "ON CONFLICT (p, first_lsn) DO NOTHING"),
             {int64_t{group->partition}, static_cast<int64_t>(group->first_lsn), static_cast<int64_t>(group->last_lsn),
              static_cast<int64_t>(group->epoch), options_.owner, PgValue::Bytes(body)}});
        status = (*connection)->Transact(flight, options_.answer_ms_max).status();
      }
      absl::MutexLock lock(&mutex_);
      if (status.ok() || absl::IsAborted(status)) {
        if (failing_since_ns_ != 0) LogInfo("the database answers again: acknowledgements go on");
        failing_since_ns_ = 0;
        return status;
      }
      if (failing_since_ns_ == 0) {
        failing_since_ns_ = Clock::System()->MonotonicNanos();
        LogWarning("a commit waits for the database: {}", std::string(status.message()));
      }
      failing_ = absl::UnavailableError(status.message());
      if (!parts_[group->partition].owned) return absl::AbortedError("given up meanwhile");
      const auto closed = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return closed_; };
      if (AwaitFor(&mutex_, absl::Condition(&closed), kRetry)) return status;
    }
  }

  // Whoever waits for the partition's acknowledgements is let go first.
  void Lose(const Group& group) {
    LostCallback on_lost;
    {
      absl::MutexLock lock(&mutex_);
      Part& part = parts_[group.partition];
      if (!part.owned || part.epoch != group.epoch) return;  // It knows.
      on_lost = on_lost_;
    }
    LogWarning("partition {} was taken by another server: epoch {} is over", group.partition, group.epoch);
    if (on_lost != nullptr) on_lost(group.partition);
    absl::MutexLock lock(&mutex_);
    Part& part = parts_[group.partition];
    part.owned = false;
    Drop(&part);
  }

  // The database's day, so that no server's clock decides which frames are old.
  absl::Status LearnDay(PgConnection* connection) {
    const auto now =
        connection->Run({{"SELECT CAST(floor(extract(epoch FROM now())) AS bigint)", {}}}, options_.answer_ms_max);
    BW_RETURN_IF_ERROR(now.status());
    absl::MutexLock lock(&mutex_);
    day_offset_ns_ = now->front().Number(0, 0) * 1'000'000'000 - Clock::System()->MonotonicNanos();
    return absl::OkStatus();
  }
  int64_t Day() const {
    absl::MutexLock lock(&mutex_);
    return (day_offset_ns_ + Clock::System()->MonotonicNanos()) / kDayNanos;
  }
  int TableOfToday() const { return static_cast<int>(Day() % kFrameTables); }

  // The tables of the days before yesterday, unless some server's state is not that
  // far yet: then they stay, and it is said.
  absl::Status EmptyOldFrames(PgConnection* connection) {
    const int64_t now_ns = Clock::System()->MonotonicNanos();
    if (emptied_ns_ != 0 && now_ns - emptied_ns_ < kEmptyOldNanos) return absl::OkStatus();
    BW_RETURN_IF_ERROR(LearnDay(connection));
    emptied_ns_ = now_ns;
    const int64_t today = Day();
    for (const int64_t day : {today + 1, today + 2}) {
      const std::string table = absl::StrCat("bellwether.frames_", day % kFrameTables);
      const auto holds =
          connection->Run({{absl::StrCat("SELECT count(*), count(CASE WHEN f.last_lsn >= l.keep THEN 1 END) FROM ",
                                         table, " f JOIN bellwether.lease l ON l.p = f.p"),
                            {}}},
                          options_.answer_ms_max);
      BW_RETURN_IF_ERROR(holds.status());
      if (holds->front().Number(0, 0) == 0) continue;
      if (holds->front().Number(0, 1) > 0) {
        LogWarning("{} holds frames of two days ago that are needed still: it is not emptied", table);
        continue;
      }
      BW_RETURN_IF_ERROR(
          connection->Run({{absl::StrCat("TRUNCATE TABLE ", table), {}}}, options_.answer_ms_max).status());
    }
    return absl::OkStatus();
  }

  const PostgresLogOptions options_;
  const DurableCallback on_durable_;
  const Recovery recovery_;
  mutable Link rows_link_;  // Commits of rows and alerts.
  mutable Link read_link_;
  absl::Mutex durable_mutex_ ABSL_ACQUIRED_BEFORE(mutex_);
  mutable absl::Mutex mutex_;
  LostCallback on_lost_ ABSL_GUARDED_BY(mutex_);
  std::array<Part, kPartitions> parts_ ABSL_GUARDED_BY(mutex_);
  Lsn next_lsn_ ABSL_GUARDED_BY(mutex_) = 1;
  Lsn durable_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t pending_bytes_ ABSL_GUARDED_BY(mutex_) = 0;  // Waiting or being committed.
  absl::Status held_ ABSL_GUARDED_BY(mutex_);
  absl::Status failing_ ABSL_GUARDED_BY(mutex_);
  int64_t failing_since_ns_ ABSL_GUARDED_BY(mutex_) = 0;  // 0 = the last commit was answered.
  int64_t day_offset_ns_ ABSL_GUARDED_BY(mutex_) = 0;
  bool closing_ ABSL_GUARDED_BY(mutex_) = false;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<double> commit_seconds_ ABSL_GUARDED_BY(mutex_);
  int64_t emptied_ns_ = 0;  // Under rows_link_'s lock.
  std::vector<std::thread> threads_;
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
