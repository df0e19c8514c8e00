#include "server/engine/baseline_learner.h"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "server/store/own_values_at.h"
#include "server/util/await_for.h"
#include "server/util/log.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

// Sums depend on how many rows were sampled; what is derived from them, and the
// largest and the equal, can be held against another run's.
bool IsComparable(const SignalInfo& signal) {
  if (signal.granularity == Granularity::kRun) {
    return signal.id == SignalId::kLoss || signal.id == SignalId::kGradNorm;
  }
  // Of other things than heads a run of another size has others.
  return OfHeads(signal.granularity) && (signal.derived || signal.merge != Merge::kSum);
}

// Another run may have other ranks, and sums depend on how many there are.
bool IsComparable(const OwnSignal& signal) {
  return signal.merge != Merge::kSum && signal.granularity != Granularity::kRank;
}

bool WasReported(const SignalInfo& signal, const RunRecord& run) {
  const auto has = [&run](SignalId id) { return std::binary_search(run.signals.begin(), run.signals.end(), id); };
  return signal.derived ? has(signal.numerator) && has(signal.denominator) : has(signal.id);
}

bool SaysIll(const AlertTransition& alert) {
  return alert.severity >= Severity::kWarning && alert.rule != "silent" && alert.rule != "overhead";
}

// Unless by the loss, and by each other family in all layers or in none.
bool IsJudgedInPart(const JudgedBy& judged) {
  for (size_t family = 0; family < kHeadFamilies; ++family) {
    if (judged.judged[family] != 0 && judged.judged[family] != judged.layers) return true;
  }
  return judged.judged[static_cast<size_t>(RuleFamily::kLoss)] == 0;
}

}  // namespace

BaselineLearner::BaselineLearner(const Options& options, const BaselineLearnerParts& parts)
    : options_(options), parts_(parts) {}

BaselineLearner::~BaselineLearner() { Stop(); }

void BaselineLearner::Start() {
  thread_ = std::thread([this] { Loop(); });
}

void BaselineLearner::Stop() {
  if (!thread_.joinable()) return;
  stopping_ = true;
  {
    absl::MutexLock lock(&mutex_);
    stop_ = true;
  }
  thread_.join();
}

void BaselineLearner::Drain() {
  absl::MutexLock lock(&mutex_);
  const uint64_t mine = ++wanted_;
  const auto done = [this, mine]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return done_ >= mine || stop_; };
  mutex_.Await(absl::Condition(&done));
}

void BaselineLearner::Loop() {
  for (;;) {
    uint64_t asked = 0;
    {
      absl::MutexLock lock(&mutex_);
      const auto wake = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return stop_ || wanted_ > done_; };
      AwaitFor(&mutex_, absl::Condition(&wake), absl::Milliseconds(options_.poll_ms));
      if (stop_) return;
      asked = wanted_;
    }
    Scan();
    absl::MutexLock lock(&mutex_);
    done_ = asked;
  }
}

bool BaselineLearner::IsOver(const RunRecord& run) const {
  if (run.ended || run.last_report_unix_ns == 0) return run.ended;
  return parts_.clock->UnixNanos() - run.last_report_unix_ns >= options_.silent_ms * 1'000'000;
}

void BaselineLearner::Scan() {
  for (const RunSnapshotPtr& run : parts_.runs->List()) {
    if (stopping_) return;
    const RunRecord& record = run->record;
    const int64_t last_said = parts_.alerts->LastSaidUnixNanos(record.id);
    const AsOf as_of{record.description.attempt, record.step, record.steps_recorded, last_said};
    const auto seen = seen_.find(record.id);
    if (!IsOver(record) || (seen != seen_.end() && seen->second == as_of)) continue;
    const auto known = parts_.baselines->Get(record.id);
    const bool same_run = known != nullptr && known->uuid == record.description.uuid;
    if (same_run && last_said <= known->learned_unix_ns &&
        as_of == AsOf{known->attempt, known->step, known->steps_recorded, last_said}) {
      seen_[record.id] = as_of;  // Learned before a restart.
      continue;
    }
    absl::StatusOr<Verdict> verdict = Judge(*run);
    absl::Status status = verdict.status();
    if (status.ok() && *verdict == Verdict::kLearned) {
      absl::StatusOr<BaselinePercentiles> bands = Read(*run);
      status = bands.ok() ? parts_.baselines->Put(*std::move(bands)) : bands.status();
    } else if (status.ok()) {
      status = parts_.baselines->Remove(record.id);
    }
    if (absl::IsCancelled(status)) return;
    seen_[record.id] = as_of;
    static constexpr const char* kResults[] = {"learned", "ill", "short", "changed", "old", "partly"};
    const char* const result = status.ok() ? kResults[static_cast<size_t>(*verdict)] : "failed";
    parts_.counters->counter("bellwether_baseline_runs_total", {{"result", result}})->Add();
    if (!status.ok()) {
      LogError("nothing is learned from run {}: {}", record.description.name, std::string(status.message()));
    }
  }
}

absl::StatusOr<BaselineLearner::Verdict> BaselineLearner::Judge(const RunSnapshot& run) const {
  if (run.record.step < options_.steps_min) return Verdict::kShort;
  int32_t false_stage = 0;  // That false alarms explain.
  for (const AlertView& alert : parts_.alerts->List(run.record.id, /*firing_only=*/false)) {
    const bool fires = alert.last.state == AlertState::kFiring;
    if (alert.muted) {
      if (fires) false_stage = std::max(false_stage, alert.last.stage);
    } else if (SaysIll(alert.last) || (run.record.stage > 0 && fires && alert.last.stage > 0)) {
      return Verdict::kIll;
    }
  }
  if (run.record.stage > false_stage) return Verdict::kIll;
  if (run.record.kind_changed) return Verdict::kChanged;
  if (IsJudgedInPart(JudgedByOf(run.record))) return Verdict::kPartly;
  // Records of before there were bands do not tell.
  EventReader events(&run, parts_.database);
  for (;;) {
    BW_ASSIGN_OR_RETURN(const RunEvent* const event, events.Peek());
    if (event == nullptr) break;
    if (ChangesKind(event->kind)) return Verdict::kChanged;
    events.Pop();
  }
  if (!parts_.baselines->HasRoomFor(run.record.id, KindOf(run.record.description))) return Verdict::kOld;
  return Verdict::kLearned;
}

absl::StatusOr<BaselinePercentiles> BaselineLearner::Read(const RunSnapshot& snapshot) const {
  const RunRecord& run = snapshot.record;
  BaselinePercentiles bands{.run = run.id,
                            .name = run.description.name,
                            .uuid = run.description.uuid,
                            .kind = KindOf(run.description),
                            .attempt = run.description.attempt,
                            .step = run.step,
                            .steps_recorded = run.steps_recorded,
                            .learned_unix_ns = parts_.clock->UnixNanos()};
  for (size_t i = 0; i < SignalCount(); ++i) {
    const SignalInfo& signal = SignalTable()[i];
    if (!IsComparable(signal) || !WasReported(signal, run)) continue;
    BW_RETURN_IF_ERROR(ReadSignal(run, signal, &bands));
  }
  BW_RETURN_IF_ERROR(ReadOwn(snapshot, &bands));
  return bands;
}

absl::Status BaselineLearner::ReadOwn(const RunSnapshot& run, BaselinePercentiles* bands) const {
  const Layout& layout = run.record.description.layout;
  if (layout.own == 0) return absl::OkStatus();
  BW_ASSIGN_OR_RETURN(const std::shared_ptr<const RunRows> rows, RowsOf(run, *parts_.database));
  const int last_range = BandRangeOf(run.record.step);
  for (size_t signal = 0; signal < rows->own_signals.size(); ++signal) {
    const OwnSignal& own = rows->own_signals[signal];
    if (!IsComparable(own)) continue;
    if (bands->own.size() >= kOwnBandSignalsMax) {
      parts_.counters->counter("bellwether_baseline_limit_refused_total", {{"limit", "own_signals"}})->Add();
      continue;
    }
    bands->own.push_back(own.name);
    for (int range = 0; range <= last_range; ++range) {
      const int64_t begin = BandBegin(range);
      const int64_t width = std::min(BandBegin(range + 1), run.record.step + 1) - begin;
      std::vector<float> values;
      for (int64_t i = 0; i < options_.samples; ++i) {
        if (stopping_) return absl::CancelledError("the server is going down");
        BW_ASSIGN_OR_RETURN(const std::vector<float> found, OwnValuesAt(*parts_.series, run.record.id, layout, *rows,
                                                                        signal, begin + width * i / options_.samples,
                                                                        begin + width * (i + 1) / options_.samples));
        values.insert(values.end(), found.begin(), found.end());
      }
      Band band{.signal = MatrixOf(own),
                .own = static_cast<uint16_t>(bands->own.size()),
                .range = static_cast<uint8_t>(range)};
      if (DescribeBand(&values, &band)) bands->bands.push_back(band);
    }
  }
  return absl::OkStatus();
}

absl::Status BaselineLearner::ReadSignal(const RunRecord& run, const SignalInfo& signal,
                                         BaselinePercentiles* bands) const {
  const Layout& layout = run.description.layout;
  const int last_range = BandRangeOf(run.step);
  const int64_t cells = std::max<int64_t>(ShapeOf(signal, layout).size(), 1);
  const int64_t samples = std::clamp<int64_t>(options_.cells_max / cells / (last_range + 1), 1, options_.samples);
  for (int range = 0; range <= last_range; ++range) {
    const int64_t begin = BandBegin(range);
    const int64_t width = std::min(BandBegin(range + 1), run.step + 1) - begin;
    std::vector<float> values;
    int64_t newest = -1;
    for (int64_t i = 1; i <= samples; ++i) {
      if (stopping_) return absl::CancelledError("the server is going down");
      int64_t at = -1;
      BW_ASSIGN_OR_RETURN(const std::vector<float> matrix,
                          parts_.series->ReadMatrix(run.id, layout, signal.id, begin + width * i / samples - 1, &at));
      // Sampled more rarely than it is asked for here.
      if (at < begin || at <= newest) continue;
      newest = at;
      values.insert(values.end(), matrix.begin(), matrix.end());
    }
    Band band{.signal = signal.id, .range = static_cast<uint8_t>(range)};
    if (DescribeBand(&values, &band)) bands->bands.push_back(band);
  }
  return absl::OkStatus();
}

}  // namespace bellwether::server
