#include "server/run_admission.h"

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "bellwether/signal_table.h"
#include "server/store/chunk_rows.h"
#include "server/store/series_store.h"
#include "server/util/machine_memory.h"

namespace bellwether::server {
namespace {

// Measured (run_admission_test), and rounded up: beside the window's own values 4 bytes for
// each of as many steps that wait to be saved, spans of summaries, and copies of the newest step.
constexpr int64_t kSeriesBytes = 270;
constexpr int64_t kHeadBytes = 800;  // Detectors, stages.
constexpr int64_t kRunBytes = 128 << 10;
// What a run sends is known once it has stored so many steps, signals of heads among them; or
// so many without any.
constexpr uint64_t kKnownSteps = 4;
constexpr uint64_t kKnownStepsWithoutHeads = 64;

bool IsKnown(const RunRecord& run) {
  const bool has_heads =
      std::ranges::any_of(run.signals, [](SignalId id) { return FindSignal(id)->granularity != Granularity::kRun; });
  return run.steps_recorded >= (has_heads ? kKnownSteps : kKnownStepsWithoutHeads);
}

constexpr int64_t Mib(int64_t bytes) { return (bytes + (1 << 20) - 1) >> 20; }

}  // namespace

int64_t RunMemoryBytes(const Layout& layout, std::span<const SignalId> signals) {
  const auto window_steps = static_cast<size_t>(SeriesStore::Options().window_steps);
  int64_t bytes = kRunBytes + int64_t{layout.layers} * layout.heads * kHeadBytes;
  for (const SignalId id : signals) {
    const int64_t cells = ShapeOf(*FindSignal(id), layout).size();
    const auto steps = static_cast<int64_t>(StepsForCells(window_steps, static_cast<size_t>(cells)));
    bytes += cells * (steps * static_cast<int64_t>(sizeof(float)) + kSeriesBytes);
  }
  return bytes;
}

int64_t RunMemoryBytesMax(const Layout& layout) {
  std::vector<SignalId> signals;
  for (const SignalInfo& signal : std::span(SignalTable(), SignalCount())) {
    if (!signal.derived) signals.push_back(signal.id);
  }
  return RunMemoryBytes(layout, signals);
}

absl::StatusOr<std::unique_ptr<RunAdmission>> RunAdmission::Create(const Options& options, Counters* counters) {
  Options used = options;
  if (used.memory_max == 0) {
    const int64_t machine = MachineMemoryBytes();
    // Where nobody knows how much there is, runs are limited by their number alone.
    used.memory_max = machine == 0 ? int64_t{1} << 60 : std::max(machine / 4 * 3, kMemoryMaxLeast);
    used.memory_max = std::max(used.memory_max, used.own_bytes + kMemoryMaxLeast / 2);
  } else if (used.memory_max <= used.own_bytes) {
    return absl::InvalidArgumentError(absl::StrCat("limits.memory_max is ", used.memory_max, ": must be more than ",
                                                   used.own_bytes,
                                                   ", which the server takes without any run, or 0 (three quarters "
                                                   "of what there is)"));
  }
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

RunAdmission::Taken RunAdmission::Take(std::span<const RunSnapshotPtr> runs) {
  Taken taken;
  for (const RunSnapshotPtr& run : runs) {
    const RunRecord& record = run->record;
    if (record.ended) continue;
    ++taken.runs;
    const Layout& layout = record.description.layout;
    taken.bytes += IsKnown(record) ? RunMemoryBytes(layout, record.signals) : RunMemoryBytesMax(layout);
  }
  return taken;
}

absl::Status RunAdmission::Admit(const Layout& layout, std::span<const RunSnapshotPtr> runs) {
  const Taken taken = Take(runs);
  if (taken.runs >= options_.runs_live_max) {
    refused_runs_->Add();
    return absl::ResourceExhaustedError(
        absl::StrCat("runs: ", options_.runs_live_max, " are live, which is the limit (limits.runs_live_max)"));
  }
  const int64_t bytes = RunMemoryBytesMax(layout), bytes_max = options_.memory_max - options_.own_bytes;
  if (taken.bytes + bytes > bytes_max) {
    refused_memory_->Add();
    return absl::ResourceExhaustedError(absl::StrCat("memory: a run of ", layout.layers, " layers x ", layout.heads,
                                                     " heads may take ", Mib(bytes), " MiB, and the ", taken.runs,
                                                     " live ones take ", Mib(taken.bytes), " of the ", Mib(bytes_max),
                                                     " MiB for runs (limits.memory_max)"));
  }
  return absl::OkStatus();
}

void RunAdmission::Show(std::span<const RunSnapshotPtr> runs) {
  runs_bytes_->Set(static_cast<double>(Take(runs).bytes));
}

}  // namespace bellwether::server
