#include "server/engine/run_admission.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "bellwether/signal_table.h"
#include "server/store/chunk_rows.h"
#include "server/store/series_store.h"
#include "server/util/log.h"
#include "server/util/machine_memory.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

// Measured (run_admission_test) of a run that is saved before its windows are full.
constexpr int64_t kCellBytes = 24;         // Copies of the newest step, beside the window's own values.
constexpr int64_t kDerivedCellBytes = 20;  // What a span of its summary begins with.
constexpr int64_t kHeadBytes = 800;        // Detectors, stages.
constexpr int64_t kRowBytes = 150;         // A name and its places, a rank's row, the judge's pasts.
constexpr int64_t kRunBytes = 128 << 10;
// What a run sends is known once it has stored so many steps, signals of heads among them; or
// so many without any.
constexpr uint64_t kKnownSteps = 4;
constexpr uint64_t kKnownStepsWithoutHeads = 64;
// One that has said nothing for so long has died before that, or sends little.
constexpr int64_t kSilentNanos = 600'000'000'000;

// False also of one that only a newer server knows, which has stored it.
bool IsMeasured(const SignalInfo* signal) { return signal != nullptr && !signal->derived; }

bool IsKnown(const RunRecord& run, int64_t now_unix_ns) {
  if (now_unix_ns - std::max(run.started_unix_ns, run.last_report_unix_ns) > kSilentNanos) return true;
  const bool has_heads = std::ranges::any_of(
      run.signals, [](SignalId id) { return IsMeasured(FindSignal(id)) && OfHeads(FindSignal(id)->granularity); });
  return run.steps_recorded >= (has_heads ? kKnownSteps : kKnownStepsWithoutHeads);
}

bool Sends(std::span<const SignalId> signals, SignalId wanted) {
  return std::ranges::find(signals, wanted) != signals.end();
}

// All that are measured; of one granularity.
std::vector<SignalId> MeasuredSignals() {
  std::vector<SignalId> signals;
  for (const SignalInfo& signal : std::span(SignalTable(), SignalCount())) {
    if (!signal.derived) signals.push_back(signal.id);
  }
  return signals;
}
std::vector<SignalId> MeasuredSignals(Granularity granularity) {
  std::vector<SignalId> signals = MeasuredSignals();
  std::erase_if(signals, [granularity](SignalId id) { return FindSignal(id)->granularity != granularity; });
  return signals;
}

// Named rows of which it has sent no values yet count as if it sent all signals of them.
int64_t BytesOf(const RunRecord& run, const Layout& layout, int64_t now_unix_ns) {
  if (!IsKnown(run, now_unix_ns)) return RunMemoryBytesMax(layout);
  int64_t bytes = RunMemoryBytes(layout, run.signals);
  for (const Granularity named : {Granularity::kTensor, Granularity::kModule}) {
    const bool sends = std::ranges::any_of(run.signals, [named](SignalId id) {
      return IsMeasured(FindSignal(id)) && FindSignal(id)->granularity == named;
    });
    if (sends) continue;
    Layout rows;
    (named == Granularity::kTensor ? rows.tensors : rows.modules) =
        named == Granularity::kTensor ? layout.tensors : layout.modules;
    bytes += RunMemoryBytes(rows, MeasuredSignals(named)) - RunMemoryBytes(rows, {});
  }
  return bytes;
}

constexpr int64_t Mib(int64_t bytes) { return (bytes + (1 << 20) - 1) >> 20; }

}  // namespace

int64_t RunMemoryBytes(const Layout& layout, std::span<const SignalId> signals) {
  const auto window_steps = static_cast<size_t>(SeriesStore::Options().window_steps);
  int64_t bytes = kRunBytes + int64_t{layout.layers} * layout.heads * kHeadBytes +
                  (int64_t{layout.tensors} + layout.modules + layout.own) * kRowBytes;
  for (const SignalId id : signals) {
    const SignalInfo* const signal = FindSignal(id);
    if (!IsMeasured(signal)) continue;
    const int64_t cells = ShapeOf(*signal, layout).size();
    if (cells == 0) continue;  // Of tensors that are not named yet, for example.
    const auto steps = static_cast<int64_t>(StepsForCells(window_steps, static_cast<size_t>(cells)));
    bytes += cells * (steps * static_cast<int64_t>(sizeof(float)) + kCellBytes);
  }
  for (const SignalInfo& signal : std::span(SignalTable(), SignalCount())) {
    if (!signal.derived || !Sends(signals, signal.numerator) || !Sends(signals, signal.denominator)) continue;
    bytes += ShapeOf(signal, layout).size() * kDerivedCellBytes;
  }
  return bytes;
}

int64_t RunMemoryBytesMax(const Layout& layout) { return RunMemoryBytes(layout, MeasuredSignals()); }

absl::Status RunAdmission::Check(const Options& options) {
  if (options.memory_max == 0 || options.memory_max > options.own_bytes) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "limits.memory_max is ", options.memory_max, ": must be more than ", options.own_bytes,
      ", which the server takes without any run (storage.cache_bytes, five quarters of limits.query_memory_max and "
      "512 MiB), or 0: three quarters of what there is"));
}

absl::StatusOr<std::unique_ptr<RunAdmission>> RunAdmission::Create(const Options& options, Counters* counters) {
  BW_RETURN_IF_ERROR(Check(options));
  Options used = options;
  if (used.memory_max == 0) {
    const int64_t there = MemoryBytesWithinGroups(MachineMemoryBytes());
    used.memory_max = std::max(there / 4 * 3, used.own_bytes + kRunsLeast);
    if (used.memory_max > there) {
      LogWarning("{} MiB of memory are too few: live runs alone may take {} MiB (limits.memory_max)", there >> 20,
                 kRunsLeast >> 20);
    }
  }
  LogDebug("live runs may take {} MiB of memory (limits.memory_max: {})", (used.memory_max - used.own_bytes) >> 20,
           used.memory_max);
  return std::unique_ptr<RunAdmission>(new RunAdmission(used, counters));
}

RunAdmission::RunAdmission(const Options& options, Counters* counters)
    : options_(options),
      refused_runs_(counters->counter("bellwether_ingest_limit_refused_total", {{"limit", "runs"}})),
      refused_memory_(counters->counter("bellwether_ingest_limit_refused_total", {{"limit", "memory"}})),
      runs_bytes_(counters->gauge("bellwether_runs_memory_bytes")) {
  counters->gauge("bellwether_runs_memory_max_bytes")
      ->Set(static_cast<double>(options_.memory_max - options_.own_bytes));
}

RunAdmission::Taken RunAdmission::Take(std::span<const RunSnapshotPtr> runs, int64_t now_unix_ns) {
  Taken taken;
  std::map<RunId, Layout> still;
  for (const RunSnapshotPtr& run : runs) {
    const RunRecord& record = run->record;
    if (record.ended) continue;
    ++taken.runs;
    Layout layout = record.description.layout;
    if (const auto admitted = admitted_.find(record.id); admitted != admitted_.end()) {
      layout.GrowTo(admitted->second);
      if (layout != record.description.layout) still.insert(*admitted);
    }
    taken.bytes += BytesOf(record, layout, now_unix_ns);
  }
  admitted_ = std::move(still);
  return taken;
}

absl::Status RunAdmission::Admit(const Layout& layout, std::span<const RunSnapshotPtr> runs, int64_t now_unix_ns) {
  absl::MutexLock lock(&mutex_);
  const Taken taken = Take(runs, now_unix_ns);
  if (taken.runs >= options_.runs_live_max) {
    refused_runs_->Add();
    return absl::ResourceExhaustedError(
        absl::StrCat("runs: ", options_.runs_live_max, " are live, which is the limit (limits.runs_live_max)"));
  }
  const int64_t bytes = RunMemoryBytesMax(layout), bytes_max = options_.memory_max - options_.own_bytes;
  if (taken.bytes + bytes > bytes_max) {
    refused_memory_->Add();
    if (bytes > bytes_max) {
      return absl::ResourceExhaustedError(absl::StrCat("memory: a run of ", layout.layers, " layers x ", layout.heads,
                                                       " heads may take ", Mib(bytes), " MiB, more than the ",
                                                       Mib(bytes_max), " MiB for all runs (limits.memory_max)"));
    }
    return absl::ResourceExhaustedError(absl::StrCat("memory: a run of ", layout.layers, " layers x ", layout.heads,
                                                     " heads may take ", Mib(bytes), " MiB, and the ", taken.runs,
                                                     " live ones take ", Mib(taken.bytes), " of the ", Mib(bytes_max),
                                                     " MiB for runs (limits.memory_max)"));
  }
  return absl::OkStatus();
}

absl::Status RunAdmission::AdmitRows(const RunRecord& run, const Layout& more, std::span<const RunSnapshotPtr> runs,
                                     int64_t now_unix_ns) {
  absl::MutexLock lock(&mutex_);
  Layout before = run.description.layout;
  if (const auto admitted = admitted_.find(run.id); admitted != admitted_.end()) before.GrowTo(admitted->second);
  Layout after = before;
  after.GrowTo(more);
  if (after == before) return absl::OkStatus();
  const int64_t bytes = BytesOf(run, after, now_unix_ns) - BytesOf(run, before, now_unix_ns);
  const Taken taken = Take(runs, now_unix_ns);
  const int64_t bytes_max = options_.memory_max - options_.own_bytes;
  if (taken.bytes + bytes > bytes_max) {
    refused_memory_->Add();
    return absl::ResourceExhaustedError(
        absl::StrCat("memory: ", after.tensors + after.modules - before.tensors - before.modules,
                     " named rows more may take ", Mib(bytes), " MiB, and the ", taken.runs, " live runs take ",
                     Mib(taken.bytes), " of the ", Mib(bytes_max), " MiB for runs (limits.memory_max)"));
  }
  admitted_[run.id].GrowTo(after);
  return absl::OkStatus();
}

int64_t RunAdmission::Show(std::span<const RunSnapshotPtr> runs, int64_t now_unix_ns) {
  absl::MutexLock lock(&mutex_);
  const int64_t bytes = Take(runs, now_unix_ns).bytes;
  runs_bytes_->Set(static_cast<double>(bytes));
  return options_.own_bytes + bytes;
}

}  // namespace bellwether::server
