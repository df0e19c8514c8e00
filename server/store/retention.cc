#include "server/store/retention.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "server/store/chunk.h"
#include "server/store/rocks_database.h"
#include "server/store/series_keys.h"
#include "server/store/series_summary.h"
#include "server/util/log.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

constexpr HistoryPoint kNothing{0, INT64_MIN};
constexpr size_t kMetaCellsStored = 4;
// Of a batch, before it is written and others get their turn.
constexpr int64_t kBatchBytesMax = 4 << 20;
// Of one that is a transaction of a shared store, too, for which commits of the run's
// partition wait.
constexpr int64_t kSharedBatchBytesMax = 512 << 10;
constexpr int64_t kSharedBatchRowsMax = 512;
constexpr std::chrono::milliseconds kBetweenBatches{20};
constexpr int64_t kPassSecondsMin = 1, kPassSecondsMax = 3600;
constexpr int64_t kNanos = 1'000'000'000;
// A run that is silent for so long has no newer step on its way.
constexpr int64_t kSilentNanos = 3600 * kNanos;
// Clocks that are slewed stay below it.
constexpr int64_t kJumpNanosMin = 60 * kNanos;
// Less freed than this, or than this part of all, is not worth a compaction.
constexpr int64_t kFreedBytesMin = 16 << 20;
constexpr int64_t kFreedPart = 16;

// What is done to rows, and what came of it.
struct Work {
  RocksDatabase* database;
  std::unique_ptr<RunBatch> batch;
  int64_t batch_bytes = 0;
  int64_t batch_rows = 0;
  int64_t freed_bytes = 0;

  RocksBatch* rocks() { return RocksBatch::As(batch.get()); }
  absl::Status Commit() {
    const absl::Status status = database->Commit(std::move(batch));
    batch = database->NewBatch();
    batch_bytes = batch_rows = 0;
    return status;
  }
};

// Visits the rows of one group that begin behind `done` or around it, and not
// behind `limit`, in both cases as far as attempts and steps go.
// `visit(key, value, limit_step)` gives a status.
template <typename Visit>
absl::Status VisitGroup(const RocksDatabase::Snapshot& snapshot, char prefix, const SeriesAddress& address,
                        const HistoryPoint& done, const HistoryPoint& limit, Visit visit) {
  std::string from = SeriesRowKey(prefix, address, done.first, done.second);
  std::string key, value;
  // The row that `done` falls into has steps behind it.
  BW_ASSIGN_OR_RETURN(const bool before, snapshot.FindBefore(SeriesPrefix(prefix, address), from, &key, &value));
  if (before) from = key;
  absl::Status status;
  BW_RETURN_IF_ERROR(
      snapshot.Scan(SeriesPrefix(prefix, address), from, [&](std::string_view found, std::string_view bytes) {
        if (found.size() != kSeriesKeyBytes) {
          status = absl::DataLossError("stored series: damaged key");
          return false;
        }
        const HistoryPoint first{KeyAttempt(found), KeyFirstStep(found)};
        if (first > limit) return false;
        status = visit(found, bytes, first.first < limit.first ? INT64_MAX : limit.second);
        return status.ok();
      }));
  return status;
}

absl::Status RoundRow(std::string_view key, std::string_view value, int64_t limit_step, Work* work, Counter* counter) {
  std::vector<int64_t> steps;
  size_t cells = 0;
  BW_RETURN_IF_ERROR(DecodeChunkShape(value, &steps, &cells));
  if (steps.back() > limit_step) return absl::OkStatus();
  Chunk chunk;
  BW_RETURN_IF_ERROR(DecodeChunk(value, &chunk));
  bool changed = false;
  for (float& each : chunk.values) {
    const float rounded = RoundTo12Bits(each);
    changed = changed || std::bit_cast<uint32_t>(rounded) != std::bit_cast<uint32_t>(each);
    each = rounded;
  }
  if (!changed) return absl::OkStatus();
  const std::string row =
      EncodeChunk({.steps = chunk.steps, .values = chunk.values.data(), .cells = chunk.cells, .stride = chunk.cells});
  // Values that are as short already, such as counts, gain nothing.
  if (row.size() >= value.size()) return absl::OkStatus();
  work->rocks()->Put(key, row);
  work->batch_bytes += static_cast<int64_t>(row.size());
  ++work->batch_rows;
  work->freed_bytes += static_cast<int64_t>(value.size() - row.size());
  counter->Add();
  return absl::OkStatus();
}

void DeleteRow(std::string_view key, std::string_view value, Work* work, Counter* counter) {
  work->rocks()->Delete(key, /*bytes=*/0);  // Not among what passes: nothing is owed there.
  work->batch_bytes += static_cast<int64_t>(key.size());
  ++work->batch_rows;
  work->freed_bytes += static_cast<int64_t>(value.size());
  counter->Add();
}

}  // namespace

float RoundTo12Bits(float value) {
  constexpr uint32_t kDropped = 23 - 12;
  constexpr uint32_t kMask = (uint32_t{1} << kDropped) - 1;
  if (!std::isfinite(value)) return value;
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t even = bits >> kDropped & 1;
  const auto rounded = std::bit_cast<float>((bits + (kMask >> 1) + even) & ~kMask);
  return std::isfinite(rounded) ? rounded : std::bit_cast<float>(bits & ~kMask);
}

bool KeepsAllBits(SignalId signal) { return signal == SignalId::kDeltaBiasSum || signal == SignalId::kKeyLeakSum; }

Retention::Retention(const Options& options, const RunTable* runs, Database* database, SeriesStore* series,
                     Counters* counters, Clock* clock)
    : options_(options),
      runs_(runs),
      database_(database),
      series_(series),
      clock_(clock),
      rounded_(counters->counter("bellwether_retention_rows_total", {{"result", "rounded"}})),
      summarized_(counters->counter("bellwether_retention_rows_total", {{"result", "summarized"}})),
      dropped_(counters->counter("bellwether_retention_rows_total", {{"result", "dropped"}})),
      freed_bytes_(counters->counter("bellwether_retention_freed_bytes_total")),
      failures_(counters->counter("bellwether_retention_failures_total")),
      last_pass_(counters->gauge("bellwether_retention_last_pass_timestamp_seconds")) {}

Retention::~Retention() { Stop(); }

bool Retention::forever() const {
  return options_.raw_seconds == 0 && options_.rounded_seconds == 0 && options_.summarized_seconds == 0;
}

void Retention::Start() {
  Now();
  thread_ = std::thread([this] { Loop(); });
}

void Retention::Stop() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
}

bool Retention::stopping() const {
  const std::lock_guard lock(mutex_);
  return stop_;
}

void Retention::Loop() {
  // Often enough that nothing is kept for an eighth too long, an hour at most.
  int64_t shortest = kPassSecondsMax * 8;
  for (const int64_t seconds : {options_.raw_seconds, options_.rounded_seconds, options_.summarized_seconds}) {
    if (seconds > 0) shortest = std::min(shortest, seconds);
  }
  const std::chrono::seconds between(std::clamp(shortest / 8, kPassSecondsMin, kPassSecondsMax));
  std::unique_lock lock(mutex_);
  while (!wake_.wait_for(lock, between, [this] { return stop_; })) {
    lock.unlock();
    Pass();
    lock.lock();
  }
}

void Retention::Pass() {
  const double freed_before = freed_bytes_->value();
  for (const RunSnapshotPtr& run : runs_->List()) {
    if (stopping()) return;
    if (!MayPass(run->record.id)) continue;
    const absl::Status status = PassRun(*run);
    if (status.ok() || absl::IsCancelled(status)) continue;
    if (!MayPass(run->record.id)) continue;  // It moved meanwhile: its next server does it again.
    failures_->Add();
    LogError("what is old of run {} stays as it is: {}", run->record.description.name, std::string(status.message()));
  }
  last_pass_->Set(static_cast<double>(clock_->UnixMillis()) * 1e-3);
  const auto freed = static_cast<int64_t>(freed_bytes_->value() - freed_before);
  if (freed >= std::max(kFreedBytesMin, database_->bytes() / kFreedPart)) {
    const absl::Status status = RocksDatabase::As(database_)->CompactSeries();
    if (!status.ok()) LogError("what is old is deleted, its space is not free yet: {}", std::string(status.message()));
  }
}

void Retention::Mark(const RunSnapshot& run, int64_t now_unix_ns, RetentionState* state) const {
  const RunRecord& record = run.record;
  HistoryPoint newest{record.description.attempt, record.step};
  if (run.newest != nullptr) {
    newest = {run.newest->attempt, run.newest->step};
  } else if (!record.ended && now_unix_ns - record.last_report_unix_ns < kSilentNanos) {
    return;  // Attempt and step need not belong together.
  }
  if (record.steps_recorded == 0) return;
  std::vector<RetentionState::Mark>& marks = state->marks;
  // The clock was set back: what it said before is told again when it is true.
  while (!marks.empty() && marks.back().time_unix_ns > now_unix_ns) marks.pop_back();
  if (!marks.empty() && marks.back().newest >= newest) return;
  marks.push_back({now_unix_ns, newest});
  if (marks.size() <= kMarksMax) return;
  // Of the older half every second one: coarser the older it is.
  size_t kept = 0;
  for (size_t i = 0; i < marks.size(); ++i) {
    if (i >= kMarksMax / 2 || i % 2 == 1) marks[kept++] = marks[i];
  }
  marks.resize(kept);
}

int64_t Retention::Now() {
  const int64_t unix_ns = UnixNanos(), monotonic_ns = clock_->MonotonicNanos();
  const int64_t by_ns = last_unix_ns_ == 0 ? 0 : (unix_ns - last_unix_ns_) - (monotonic_ns - last_monotonic_ns_);
  if (by_ns >= kJumpNanosMin) {
    jumps_.push_back({last_unix_ns_, by_ns});
    LogWarning("the clock was set ahead by {} s: what is stored gets no older by that", by_ns / kNanos);
  }
  last_unix_ns_ = unix_ns;
  last_monotonic_ns_ = monotonic_ns;
  return unix_ns;
}

void Retention::GoWithJumps(RunId run, RetentionState* state) const {
  const auto seen = jumped_.find(run);
  for (size_t i = seen == jumped_.end() ? 0 : seen->second; i < jumps_.size(); ++i) {
    int64_t latest = INT64_MIN;
    for (RetentionState::Mark& mark : state->marks) {
      // A later one is from a time at which the clock was right, and went back since.
      if (mark.time_unix_ns <= jumps_[i].from_unix_ns) mark.time_unix_ns += jumps_[i].by_ns;
      latest = mark.time_unix_ns = std::max(mark.time_unix_ns, latest);
    }
  }
}

HistoryPoint Retention::Older(const RetentionState& state, int64_t now_unix_ns, int64_t seconds) {
  HistoryPoint point = kNothing;
  if (seconds == 0) return point;
  for (const RetentionState::Mark& mark : state.marks) {
    if (now_unix_ns - mark.time_unix_ns >= seconds * kNanos) point = std::max(point, mark.newest);
  }
  return point;
}

absl::Status Retention::PassRun(const RunSnapshot& run) {
  RocksDatabase* const database = RocksDatabase::As(database_);
  const RunId id = run.record.id;
  const RocksDatabase::Snapshot snapshot(database);
  // In the database: its last steps are then, too.
  const absl::StatusOr<RunRecord> record = database->GetRun(id);
  const bool closed = run.record.ended && record.ok() && record->ended;
  if (closed) {
    bool unpacked = false;
    BW_RETURN_IF_ERROR(snapshot.Scan(KeyBuilder('w').U64(id).key(), {}, [&](std::string_view, std::string_view) {
      unpacked = true;
      return false;
    }));
    // The next pass finds it in chunks.
    if (unpacked) series_->Pack(id);
    if (unpacked) return absl::OkStatus();
  }
  if (forever()) return absl::OkStatus();
  const std::string key = RetentionKey(id);
  RetentionState state;
  const absl::StatusOr<std::string> stored = snapshot.Get(key);
  if (stored.ok()) {
    BW_ASSIGN_OR_RETURN(state, DecodeRetentionState(*stored));
  } else if (!absl::IsNotFound(stored.status())) {
    return stored.status();
  }
  const int64_t now_unix_ns = Now();
  const size_t jumps = jumps_.size();
  GoWithJumps(id, &state);
  Mark(run, now_unix_ns, &state);
  const HistoryPoint round = std::max(Older(state, now_unix_ns, options_.raw_seconds), state.rounded);
  const HistoryPoint summarize = std::max(Older(state, now_unix_ns, options_.rounded_seconds), state.summarized);
  const HistoryPoint drop = std::max(Older(state, now_unix_ns, options_.summarized_seconds), state.dropped);
  if (closed && !state.whole) state.rounded = state.summarized = state.dropped = kNothing;
  state.whole = closed;
  Work work{.database = database, .batch = database->NewBatch()};
  const auto breathe = [&]() -> absl::Status {
    const bool shared = sharing_.whole != nullptr;
    const bool full = work.batch_bytes >= (shared ? kSharedBatchBytesMax : kBatchBytesMax) ||
                      (shared && work.batch_rows >= kSharedBatchRowsMax);
    if (!full) return absl::OkStatus();
    BW_RETURN_IF_ERROR(work.Commit());
    std::unique_lock lock(mutex_);
    return wake_.wait_for(lock, kBetweenBatches, [this] { return stop_; }) ? absl::CancelledError() : absl::OkStatus();
  };
  const auto summarize_row = [&](std::string_view row, std::string_view value, int64_t limit_step) -> absl::Status {
    std::vector<int64_t> steps;
    size_t cells = 0;
    BW_RETURN_IF_ERROR(DecodeChunkShape(value, &steps, &cells));
    if (steps.back() <= limit_step) DeleteRow(row, value, &work, summarized_);
    return breathe();
  };
  const auto round_row = [&](std::string_view row, std::string_view value, int64_t limit_step) -> absl::Status {
    BW_RETURN_IF_ERROR(RoundRow(row, value, limit_step, &work, rounded_));
    return breathe();
  };
  const auto drop_row = [&](std::string_view row, std::string_view value, int64_t limit_step) -> absl::Status {
    std::vector<SummarizedSpan> spans;
    BW_RETURN_IF_ERROR(DecodeSpans(value, 0, &spans));
    if (spans.empty() || spans.back().last_step <= limit_step) DeleteRow(row, value, &work, dropped_);
    return breathe();
  };
  // `cells` of a signal, group after group.
  const auto visit_signal = [&](uint16_t signal, size_t cells, bool measured, bool round_it) -> absl::Status {
    const HistoryPoint round_from = std::max(state.rounded, summarize);
    SeriesAddress address{.run = id, .signal = signal, .index = 0};
    for (size_t cell = 0; cell < cells; cell += kGroupCells, ++address.index) {
      if (measured && summarize > state.summarized) {
        BW_RETURN_IF_ERROR(VisitGroup(snapshot, 's', address, state.summarized, summarize, summarize_row));
      }
      if (measured && round_it && round > round_from) {
        BW_RETURN_IF_ERROR(VisitGroup(snapshot, 's', address, round_from, round, round_row));
      }
      if (drop > state.dropped) {
        BW_RETURN_IF_ERROR(VisitGroup(snapshot, 'm', address, state.dropped, drop, drop_row));
      }
    }
    return absl::OkStatus();
  };
  if (summarize > state.summarized || round > state.rounded || drop > state.dropped) {
    // The step itself goes last of all: what is left of a step can be told.
    for (size_t i = 0; i < SignalCount(); ++i) {
      const SignalInfo& info = SignalTable()[i];
      const auto cells = static_cast<size_t>(ShapeOf(info, run.record.description.layout).size());
      BW_RETURN_IF_ERROR(visit_signal(static_cast<uint16_t>(info.id), cells, !info.derived, !KeepsAllBits(info.id)));
    }
    BW_RETURN_IF_ERROR(visit_signal(kMetaSignal, kMetaCellsStored, /*measured=*/true, /*round_it=*/false));
  }
  state.rounded = round;
  state.summarized = summarize;
  state.dropped = drop;
  // Marks that everything was done for say nothing any more.
  const auto oldest_wanted = [&](const RetentionState::Mark& mark) {
    return (options_.raw_seconds > 0 && mark.newest > state.rounded) ||
           (options_.rounded_seconds > 0 && mark.newest > state.summarized) ||
           (options_.summarized_seconds > 0 && mark.newest > state.dropped);
  };
  std::erase_if(state.marks,
                [&](const RetentionState::Mark& mark) { return !oldest_wanted(mark) && &mark != &state.marks.back(); });
  const std::string bytes = EncodeRetentionState(state);
  if (!stored.ok() || *stored != bytes) work.rocks()->Put(key, bytes);
  BW_RETURN_IF_ERROR(work.Commit());
  if (!jumps_.empty()) jumped_[id] = jumps;
  freed_bytes_->Add(static_cast<double>(work.freed_bytes));
  return absl::OkStatus();
}

}  // namespace bellwether::server
