#include "tests/support/query_stack.h"

#include <stdlib.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

constexpr int64_t kStarted = 1'700'000'000'000'000'000;

// A broken stack can test nothing.
void Require(const absl::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "query_stack: %s\n", status.ToString().c_str());
  std::abort();
}

template <typename T>
T Require(absl::StatusOr<T> value) {
  Require(value.status());
  return *std::move(value);
}

}  // namespace

// Does at once, in memory, what the engine does through its log.
class QueryStack::Control final : public RunControl {
 public:
  explicit Control(QueryStack* stack) : stack_(stack) {}

  absl::Status Annotate(RunId run, const RunEvent& event) override {
    auto batch = stack_->database_->NewBatch();
    batch->PutEvent(run, event);
    return stack_->database_->Commit(std::move(batch));
  }

  absl::Status Rename(RunId run, const std::string& name) override {
    stack_->Edit(run, [&name](RunSnapshot* snapshot) { snapshot->record.description.name = name; });
    return absl::OkStatus();
  }

  absl::Status Delete(RunId run) override {
    stack_->runs_.Remove(run);
    stack_->alerts_->Forget(run);
    return absl::OkStatus();
  }

  absl::Status NoteAlert(RunId run, const std::string& key, const Database::AlertNote& note) override {
    std::function<void()> before;
    {
      absl::MutexLock lock(&mutex_);
      before = before_note_;
    }
    if (before) before();
    return stack_->alerts_->Annotate(run, key, note);
  }

  absl::Status SayFalseAlarm(RunId run, const std::string& key, const Database::AlertNote& note) override {
    BW_RETURN_IF_ERROR(NoteAlert(run, key, note));
    stack_->Edit(run, [](RunSnapshot*) {});
    return absl::OkStatus();
  }

  // Every legal proposal waits, every other request is granted.
  absl::StatusOr<Action> Act(RunId run, const ActionRequest& request, const std::string& malformed) override {
    absl::MutexLock lock(&mutex_);
    if (!malformed.empty()) {
      const AuditEntry entry{.by = request.by, .action_id = request.id, .refused = malformed, .detail = request.reason};
      Require(stack_->actions_->Note(run, ++lsn_, entry));
      return absl::InvalidArgumentError(malformed);
    }
    Action action = request.action;
    ActionState state = action.state == ActionState::kApproved ? action.state : ActionState::kProposed;
    if (request.verb == ActionRequest::Verb::kPropose) {
      action.id = absl::StrCat("00000000-", ++last_action_);
    } else {
      BW_ASSIGN_OR_RETURN(action, stack_->actions_->Get(run, request.id));
      state = request.verb == ActionRequest::Verb::kApprove ? ActionState::kApproved : ActionState::kRefused;
    }
    action.state = state;
    action.history.push_back({.state = state, .time_unix_ns = kStarted, .by = request.by, .reason = request.reason});
    Require(stack_->actions_->Post(run, action));
    return action;
  }
  absl::StatusOr<PolicyView> GetPolicy(RunId) override {
    absl::MutexLock lock(&mutex_);
    return policy_;
  }
  absl::StatusOr<PolicyView> SetPolicy(RunId, const std::string& text, const std::string&,
                                       const std::string& malformed) override {
    if (!malformed.empty()) return absl::InvalidArgumentError(malformed);
    absl::MutexLock lock(&mutex_);
    return policy_ = {.mode = 2, .text = text, .own = !text.empty()};
  }

  class Import final : public RunImport {
   public:
    Import(Control* control, std::string name) : control_(control), name_(std::move(name)) {}
    absl::Status Feed(std::string_view bytes) override {
      bytes_.append(bytes);
      if (std::string_view(bytes_).substr(0, 5) != "BWRUN") return absl::InvalidArgumentError("not a .bwrun");
      return absl::OkStatus();
    }
    absl::StatusOr<Result> Finish() override {
      const std::string name = name_.empty() ? "imported" : name_;
      if (control_->stack_->runs_.Find(name) != nullptr) {
        return absl::AlreadyExistsError(absl::StrCat("run \"", name, "\": is here already"));
      }
      {
        absl::MutexLock lock(&control_->mutex_);
        control_->imported_ = bytes_;
      }
      return Result{.run = control_->stack_->AddRun({.name = name, .steps = 10}), .frames = 10, .events = 1};
    }

   private:
    Control* const control_;
    const std::string name_;
    std::string bytes_;
  };

  std::unique_ptr<RunImport> StartImport(const std::string& as_name, bool) override {
    return std::make_unique<Import>(this, as_name);
  }

  absl::Status Export(RunId, const std::function<bool(std::string_view)>& sink) override {
    std::string bytes;
    bool endless = false;
    {
      absl::MutexLock lock(&mutex_);
      bytes = exported_;
      endless = endless_;
      ++exports_running_;
      ++exports_started_;
    }
    absl::Status status;
    do {
      if (!sink(bytes)) status = absl::CancelledError("the reader stopped");
    } while (endless && status.ok());
    absl::MutexLock lock(&mutex_);
    --exports_running_;
    return status;
  }

  absl::Status Ready() const override { return absl::OkStatus(); }

  mutable absl::Mutex mutex_;
  std::string imported_ ABSL_GUARDED_BY(mutex_);
  std::string exported_ ABSL_GUARDED_BY(mutex_);
  bool endless_ ABSL_GUARDED_BY(mutex_) = false;
  int exports_started_ ABSL_GUARDED_BY(mutex_) = 0;
  int exports_running_ ABSL_GUARDED_BY(mutex_) = 0;
  Lsn lsn_ ABSL_GUARDED_BY(mutex_) = 0;
  int last_action_ ABSL_GUARDED_BY(mutex_) = 0;
  PolicyView policy_ ABSL_GUARDED_BY(mutex_){.mode = 1, .text = "mode: observe\n"};
  std::function<void()> before_note_ ABSL_GUARDED_BY(mutex_);

 private:
  QueryStack* const stack_;
};

QueryStack::QueryStack() {
  std::string name = (std::filesystem::temp_directory_path() / "bw_query_XXXXXX").string();
  if (mkdtemp(name.data()) == nullptr) Require(absl::InternalError("mkdtemp failed"));
  folder_ = name;
  database_ = Require(Database::Open({.directory = folder_ / "db"}));
  series_ = SeriesStore::Create({}, database_.get());
  alerts_ = std::make_unique<AlertStore>(database_.get());
  Require(alerts_->Load());
  actions_ = std::make_unique<ActionStore>(database_.get());
  baselines_ = std::make_unique<Baselines>(Baselines::Options(), database_.get(), &counters_);
  control_ = std::make_unique<Control>(this);
}

QueryStack::~QueryStack() {
  control_.reset();
  baselines_.reset();
  alerts_.reset();
  actions_.reset();
  series_.reset();
  database_.reset();
  std::error_code error;
  std::filesystem::remove_all(folder_, error);
}

double QueryStack::DriftRatio(const RunSpec& spec, int64_t step, Head head) {
  if (head == spec.nan) return std::numeric_limits<double>::quiet_NaN();
  if (head != spec.failing || step < spec.fails_at) return 1;
  return std::exp2(static_cast<double>(step - spec.fails_at) / 50);
}

RunId QueryStack::AddRun(const RunSpec& spec) {
  const RunId run = next_run_++;
  Layout layout = spec.layout;
  if (spec.own_every > 0) layout.own = 4;
  series_->Open(run, layout);
  auto snapshot = std::make_shared<RunSnapshot>();
  std::shared_ptr<StepSample> heads, newest;
  for (int64_t step = 0; step < spec.steps; ++step) {
    auto sample = std::make_shared<StepSample>();
    sample->Reset(layout);
    sample->step = step;
    sample->ranks = 1;
    sample->Add(SignalId::kLoss)[0] = 4.0f / static_cast<float>(1 + step);
    if (step % spec.every == 0) {
      // Add() may move the values: spans only once all are there.
      sample->Add(SignalId::kRows);
      sample->Add(SignalId::kCommonModeSum);
      sample->Add(SignalId::kSpreadSum);
      const auto rows = sample->Add(SignalId::kRows);
      const auto common = sample->Add(SignalId::kCommonModeSum);
      const auto spread = sample->Add(SignalId::kSpreadSum);
      for (int32_t i = 0; i < spec.layout.layers * spec.layout.heads; ++i) {
        const Head head{.layer = i / spec.layout.heads, .head = i % spec.layout.heads};
        const auto n = static_cast<size_t>(i);
        rows[n] = 32;
        spread[n] = 2;
        common[n] = static_cast<float>(2 * DriftRatio(spec, step, head));
      }
      heads = sample;
    }
    if (spec.ends) {
      for (const SignalId id :
           {SignalId::kExpertLoad, SignalId::kExpertIdealLoad, SignalId::kDeltaBiasSum, SignalId::kDeltaBiasSumsq}) {
        const auto values = sample->Add(id);
        std::fill(values.begin(), values.end(), OfHeads(FindSignal(id)->granularity) ? 1 : NotMeasured());
      }
      const auto load = sample->Add(SignalId::kExpertLoad);
      for (int32_t i = 0; i < layout.experts; ++i)
        load[static_cast<size_t>(layout.experts + i)] = static_cast<float>(i);
      sample->Add(SignalId::kExpertIdealLoad)[1] = 2;
      sample->Add(SignalId::kDeltaBiasSum).back() = -9;
    }
    if (spec.own_every > 0) {
      if (step % spec.own_every == 0) sample->Add(SignalId::kOwnMean)[0] = static_cast<float>(step);
      for (const size_t row : {1u, 2u}) sample->Add(SignalId::kOwnMax)[row] = 9.0f + static_cast<float>(row);
      sample->Add(SignalId::kOwnSum)[3] = 1;
    }
    newest = sample;
    Require(series_->Append(run, *sample));
  }
  RunRecord& record = snapshot->record;
  record.id = run;
  record.description.name = spec.name;
  for (size_t i = 0; i < record.description.uuid.size(); ++i) {
    record.description.uuid[i] = static_cast<uint8_t>(0xa0 + i + run);
  }
  record.description.layout = layout;
  record.description.attention = {.kernel = "flash", .score_dtype = "bf16"};
  record.description.framework = "torch 2.13.0";
  record.description.model = "TinyTransformer";
  record.description.labels = {{"team", "numerics"}};
  record.step = spec.steps - 1;
  record.stage = spec.stage;
  record.ended = spec.ended;
  record.started_unix_ns = kStarted;
  record.last_report_unix_ns = spec.last_report_unix_ns;
  record.frames = static_cast<uint64_t>(spec.steps);
  record.steps_recorded = static_cast<uint64_t>(spec.steps);
  record.signals = {SignalId::kRows, SignalId::kCommonModeSum, SignalId::kSpreadSum, SignalId::kLoss};
  // As if the other signals of the heads had come, too.
  record.coverage = RunCoverage::Of(record.signals, spec.layout.layers, 0, record.step);
  std::fill(record.coverage.missed.begin(), record.coverage.missed.end(), uint8_t{0});
  if (spec.own_every > 0) {
    auto rows = std::make_shared<RunRows>();
    rows->own_signals = {{.name = "kl"},
                         {.name = "z", .granularity = Granularity::kLayer, .merge = Merge::kMax},
                         {.name = "seen", .merge = Merge::kSum}};
    for (const OwnCell& cell : {OwnCell{0, 0, 0}, {1, 0, 0}, {1, 1, 0}, {2, 0, 0}}) rows->AddOwnCell(cell);
    snapshot->rows = rows;
  }
  snapshot->ranks_reporting = 1;
  snapshot->version = 1;
  snapshot->heads = heads;
  snapshot->newest = newest;
  snapshot->head_stage.assign(static_cast<size_t>(spec.layout.layers * spec.layout.heads), 0);
  if (spec.failing.layer >= 0 && spec.failing.layer < spec.layout.layers && spec.failing.head < spec.layout.heads) {
    snapshot->head_stage[static_cast<size_t>(spec.failing.layer * spec.layout.heads + spec.failing.head)] = 1;
  }
  runs_.Publish(snapshot);
  return run;
}

void QueryStack::Edit(RunId run, const std::function<void(RunSnapshot*)>& edit) {
  auto snapshot = std::make_shared<RunSnapshot>(*runs_.Get(run));
  ++snapshot->version;
  edit(snapshot.get());
  runs_.Publish(snapshot);
}

AlertTransition QueryStack::MakeTransition(RunId run, const std::string& key, uint32_t k, AlertState state,
                                           Severity severity, size_t bytes) const {
  const RunSnapshotPtr snapshot = runs_.Get(run);
  AlertTransition transition;
  transition.run = run;
  transition.run_name = snapshot ? snapshot->record.description.name : "?";
  transition.key = key;
  transition.k = k;
  transition.state = state;
  transition.severity = severity;
  transition.rule = "drift";
  transition.stage = 1;
  transition.step = 300;
  transition.first_step = 220;
  transition.strongest = {.layer = 1, .head = 2};
  transition.heads = {{.layer = 1, .head = 2}, {.layer = 0, .head = 3}};
  transition.heads_total = 2;
  transition.eta = {.known = true, .steps = 1200, .lower_steps = 900, .upper_steps = 1600};
  transition.evidence = {{.signal = "drift_ratio",
                          .where = {.layer = 1, .head = 2},
                          .value = 4.5,
                          .threshold = 2,
                          .baseline = 1,
                          .first_step = 220,
                          .detector = "growth",
                          .text = "doubles each 50 steps",
                          .siblings = {.runs = 12,
                                       .step_begin = 256,
                                       .step_end = 362,
                                       .min = 0.2,
                                       .p01 = 0.31,
                                       .p50 = 0.95,
                                       .p99 = 1.9,
                                       .max = 2.4}},
                         {.signal = "loss",
                          .value = 0.0133,
                          .threshold = 2,
                          .first_step = 300,
                          .detector = "impulse",
                          .text = "as it should be"}};
  transition.cause = "rounding drift";
  transition.summary = std::string(bytes, 's');
  transition.advice = "center the keys";
  transition.time_unix_ns = kStarted;
  transition.siblings = "of 12 siblings";
  return transition;
}

AlertTransition QueryStack::Post(AlertTransition transition) {
  const RunId run = transition.run;
  const std::string key = transition.key;
  Require(alerts_->Post(std::move(transition)).status());
  return Require(alerts_->Get(run, key)).last;
}

QueryStores QueryStack::stores() {
  return {.runs = &runs_,
          .series = series_.get(),
          .alerts = alerts_.get(),
          .database = database_.get(),
          .baselines = baselines_.get(),
          .control = control_.get(),
          .clock = Clock::System(),
          .counters = &counters_,
          .actions = actions_.get(),
          .info = [] {
            return ServerInfo{.version = "0.1.0",
                              .revision = "0123abc",
                              .grpc_version = "1.51.1",
                              .backend = "cpu (no bank library)",
                              .storage_path = "/var/lib/bellwether",
                              .http_address = "127.0.0.1:7071",
                              .grpc_address = "127.0.0.1:7070",
                              .started_unix_ns = kStarted,
                              .options = {{"log.level", "info"}},
                              .limits = {{"runs_live", 1000}},
                              .counters = {{"bellwether_ingest_frames_total", 12}}};
          }};
}

double QueryStack::refused(const std::string& limit) {
  return counters_.counter("bellwether_query_limit_refused_total", {{"limit", limit}})->value();
}

std::string QueryStack::imported() const {
  absl::MutexLock lock(&control_->mutex_);
  return control_->imported_;
}

void QueryStack::set_exported(std::string bytes) {
  absl::MutexLock lock(&control_->mutex_);
  control_->exported_ = std::move(bytes);
}

void QueryStack::set_export_endless(bool endless) {
  absl::MutexLock lock(&control_->mutex_);
  control_->endless_ = endless;
}

int QueryStack::exports_started() const {
  absl::MutexLock lock(&control_->mutex_);
  return control_->exports_started_;
}

int QueryStack::exports_running() const {
  absl::MutexLock lock(&control_->mutex_);
  return control_->exports_running_;
}

void QueryStack::set_before_note(std::function<void()> hook) {
  absl::MutexLock lock(&control_->mutex_);
  control_->before_note_ = std::move(hook);
}

}  // namespace bellwether::server
