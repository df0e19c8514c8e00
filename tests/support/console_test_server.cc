// console_test_server: the page over synthetic runs.
//
// For tests and pictures of the page, and for working on it without a trainer.
// Prints one line of JSON, {"port": N}, and serves until its input ends.
//
//   --scenario=ill|healthy|partly|empty|many|huge|hostile   --port=N   --token=T
//   --access-file=F --tokens-file=F --absent=ADDRESS,... --unserved=N
// huge: 126 layers of 128 heads, a million steps.  hostile: every text that a
// trainer or a person can choose is kHostile.  partly: as healthy, but of the
// first run only the key gradients are measured, and of the last one the loss.
// absent: it is of a cluster, whose other servers do not answer.
// The first run has a policy that proposes, and an action that waits for a
// person; "apply" is the trainer's answer to what was approved.
// Every line on the input is one command: "step" lets the ill run go on,
// "alert" posts a critical alert of a head, "loss" one of the run as a whole.

#include <iostream>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "server/act/action_engine.h"
#include "server/act/policy.h"
#include "server/http/http_server.h"
#include "server/query/json_api.h"
#include "server/query/query_engine.h"
#include "server/query/run_router.h"
#include "server/store/baselines.h"
#include "tests/support/absent_peers.h"
#include "tests/support/memory_database.h"
#include "tests/support/synthetic_runs.h"

namespace bellwether::server {
namespace {

constexpr char kPolicy[] = "mode: propose\n";
constexpr char kHostile[] =
    "\"'><img src=x onerror=\"window.pwned=1\"><script>window.pwned=1</script>javascript:window.pwned=1";

class Control final : public RunControl {
 public:
  // `run` is the one that can be acted on; 0 = none.
  Control(RunTable* table, AlertStore* alerts, ActionStore* actions, Clock* clock, RunId run,
          const RunDescription& description)
      : table_(table),
        alerts_(alerts),
        actions_(actions),
        clock_(clock),
        run_(run),
        engine_(description, ParsePolicy(kPolicy, "policy").value()) {
    if (run_ == 0) return;
    std::vector<Action> changed;
    const uint32_t every_kind = (1u << kActionKindEnd) - 2;
    engine_.OnHello(description, {.kinds_mask = every_kind, .ranks_agree = true}, Now(), &changed);
    Post(changed);
    Action action{.kind = ActionKind::kCenterK, .scope = {.layers = {1}}, .value = 1};
    (void)Act(run_, {.verb = ActionRequest::Verb::kPropose, .action = action, .by = "alice"}, "");
  }

  // The trainer's word on what it was handed.
  void Apply() {
    std::vector<Action> changed;
    for (const Action& due : engine_.Due(0)) {
      engine_.OnSent(due.id, Now(), &changed);
      engine_.OnResult({.id = due.id, .applied = true, .step = kStep + 20}, Now(), &changed);
    }
    Post(changed);
  }
  absl::Status Annotate(RunId, const RunEvent&) override { return absl::OkStatus(); }
  absl::Status Rename(RunId run, const std::string& name) override {
    auto renamed = std::make_shared<RunSnapshot>(*table_->Get(run));
    renamed->record.description.name = name;
    table_->Publish(std::move(renamed));
    return absl::OkStatus();
  }
  absl::Status Delete(RunId run) override {
    table_->Remove(run);
    return absl::OkStatus();
  }
  absl::Status NoteAlert(RunId run, const std::string& key, const Database::AlertNote& note) override {
    return alerts_->Annotate(run, key, note);
  }
  absl::Status SayFalseAlarm(RunId run, const std::string& key, const Database::AlertNote& note) override {
    FalseAlarm said = note.false_alarms.back();
    said.key = key;
    std::vector<Action> changed;
    if (run == run_) engine_.OnFalseAlarm(said, Now(), &changed);
    Post(changed);
    return NoteAlert(run, key, note);
  }
  absl::StatusOr<Action> Act(RunId run, const ActionRequest& request, const std::string& malformed) override {
    absl::Status status = malformed.empty() ? absl::OkStatus() : absl::InvalidArgumentError(malformed);
    std::vector<Action> changed;
    if (run != run_) status.Update(absl::FailedPreconditionError("nobody acts here"));
    if (status.ok()) status = engine_.OnRequest(request, Now(), &changed);
    if (!status.ok()) {
      const AuditEntry entry{.time_unix_ns = clock_->UnixNanos(),
                             .step = kStep,
                             .by = request.by,
                             .what = "approve",
                             .action_id = request.id,
                             .refused = std::string(status.message())};
      actions_->Note(run, ++notes_, entry).IgnoreError();
      return status;
    }
    Post(changed);
    return changed.back();
  }
  absl::StatusOr<PolicyView> GetPolicy(RunId run) override {
    return run == run_ ? PolicyView{.mode = 2, .text = kPolicy} : PolicyView{.mode = 1, .text = "mode: observe\n"};
  }
  absl::StatusOr<PolicyView> SetPolicy(RunId, const std::string&, const std::string&, const std::string&) override {
    return absl::UnimplementedError("the policy stays as it is here");
  }
  std::unique_ptr<RunImport> StartImport(const std::string&, bool) override { return nullptr; }
  absl::Status Export(RunId, const std::function<bool(std::string_view)>&) override { return absl::OkStatus(); }
  absl::Status Ready() const override { return absl::OkStatus(); }

 private:
  static constexpr int64_t kStep = 3700;

  ActionEngine::Now Now() const { return {.time_unix_ns = clock_->UnixNanos(), .step = kStep}; }
  void Post(const std::vector<Action>& changed) {
    for (const Action& action : changed) actions_->Post(run_, action).IgnoreError();
  }

  RunTable* const table_;
  AlertStore* const alerts_;
  ActionStore* const actions_;
  Clock* const clock_;
  const RunId run_;
  ActionEngine engine_;
  Lsn notes_ = 0;
};

std::vector<SyntheticRun> Scenario(const std::string& name) {
  std::vector<SyntheticRun> runs;
  if (name == "empty") return runs;
  runs.push_back({.id = 1, .name = "gpt2-small/bf16-fa2"});
  if (name == "huge") {
    runs.back().layout = {.layers = 126, .heads = 128, .kv_heads = 8, .head_dim = 128, .seq_len = 8192};
    runs.back().steps = 1'000'000;
    runs.back().failing = {70, 100};
    runs.back().fails_at = 998'000;
    runs.back().stage = 2;
    return runs;
  }
  if (name == "hostile") runs.back().name = kHostile;
  if (name == "ill" || name == "many" || name == "hostile") {
    runs.back().steps = 3700;
    runs.back().failing = {1, 0};
    runs.back().stage = 2;
  }
  runs.push_back({.id = 2, .name = "gpt2-small/fp32-control", .steps = 3700});
  runs.push_back({.id = 3,
                  .name = "llama-1b/sweep-lr-3e-4",
                  .layout = {.layers = 32, .heads = 32, .kv_heads = 8, .head_dim = 64, .seq_len = 4096},
                  .steps = 12400});
  runs.push_back({.id = 4, .name = "gpt2-small/warmup-test", .steps = 800, .ended = true});
  if (name == "partly") runs.push_back({.id = 5, .name = "gpt2-small/first-steps", .steps = 50});
  for (RunId id = 5; name == "many" && id <= 1000; ++id) {
    runs.push_back({.id = id,
                    .name = absl::StrCat("sweep/run-", id),
                    .layout = {.layers = 4, .heads = 4, .kv_heads = 4},
                    .steps = static_cast<int64_t>(id) * 10});
  }
  return runs;
}

int Main(const std::vector<std::string>& arguments) {
  std::string scenario = "ill";
  AccessOptions who;
  HttpOptions options{.port = 0};
  std::string absent;
  uint32_t unserved = 0;
  for (absl::string_view argument : arguments) {
    if (absl::ConsumePrefix(&argument, "--scenario=")) {
      scenario = std::string(argument);
    } else if (absl::ConsumePrefix(&argument, "--token=")) {
      who.page_token = std::string(argument);
    } else if (absl::ConsumePrefix(&argument, "--absent=")) {
      absent = std::string(argument);
    } else if (absl::ConsumePrefix(&argument, "--unserved=")) {
      if (!absl::SimpleAtoi(argument, &unserved)) return 2;
    } else if (absl::ConsumePrefix(&argument, "--access-file=")) {
      who.access_file = std::string(argument);
    } else if (absl::ConsumePrefix(&argument, "--tokens-file=")) {
      who.tokens_file = std::string(argument);
    } else if (!absl::ConsumePrefix(&argument, "--port=") || !absl::SimpleAtoi(argument, &options.port)) {
      std::cerr << "unknown argument\n";
      return 2;
    }
  }
  Clock* const clock = Clock::System();
  MemoryDatabase database;
  AlertStore alerts(&database);
  RunTable table;
  Counters counters;
  SyntheticSeries series;
  std::vector<SyntheticRun> runs = Scenario(scenario);
  const bool hostile = scenario == "hostile";
  const auto publish = [&](const SyntheticRun& run) {
    series.Add(run);
    auto snapshot = std::make_shared<RunSnapshot>(*MakeSnapshot(run, clock->UnixNanos()));
    if (hostile) {
      RunDescription& description = snapshot->record.description;
      description.framework = description.model = description.attention.kernel = description.attention.score_dtype =
          kHostile;
      snapshot->record.end_reason = kHostile;
    }
    if (run.ended) snapshot->record.import_of = "a recording";
    if (scenario == "partly" && (run.id == 1 || run.ended)) {
      std::vector<SignalId> reported = {SignalId::kLoss};
      if (run.id == 1) reported = {SignalId::kKeyLeakSum, SignalId::kKeyGradientSum};
      snapshot->record.coverage = RunCoverage::Of(reported, run.layout.layers, 0, run.steps);
      if (run.id == 1) {
        snapshot->record.signals = reported;
        auto newest = std::make_shared<StepSample>();
        newest->Reset(run.layout);
        newest->step = run.steps;
        snapshot->newest = newest;
      }
    }
    table.Publish(snapshot);
  };
  for (const SyntheticRun& run : runs) publish(run);
  const auto post = [&](Severity severity, const std::string& rule) {
    AlertTransition alert = MakeAlert(runs[0], severity, rule, clock->UnixNanos());
    if (rule == "loss") {
      alert.strongest = {-1, -1};
      alert.heads.clear();
      alert.evidence.clear();
      alert.siblings.clear();
      alert.first_step = alert.step;
      alert.summary = runs[0].name + ": loss";
    }
    if (hostile) {
      alert.rule = alert.cause = alert.summary = alert.advice = alert.siblings = kHostile;
      for (Evidence& piece : alert.evidence) piece.signal = piece.detector = piece.text = kHostile;
    }
    return alerts.Post(alert).ok();
  };
  const auto worsen = [&](int32_t stage, const std::string& rule) {
    runs[0].stage = stage;
    publish(runs[0]);
    return post(Severity::kCritical, rule);
  };
  if (!runs.empty() && runs[0].stage > 0) post(Severity::kWarning, "drift");

  Baselines baselines({}, &database, &counters);
  ActionStore actions(&database);
  const bool acts = !runs.empty() && runs[0].stage > 0;
  Control control(&table, &alerts, &actions, clock, acts ? runs[0].id : 0,
                  acts ? MakeSnapshot(runs[0], clock->UnixNanos())->record.description : RunDescription{});
  AbsentPeers peers(absent, unserved);
  RunRouter router(&peers, &table, clock);
  const QueryEngine engine({}, {.runs = &table,
                                .series = &series,
                                .alerts = &alerts,
                                .database = &database,
                                .baselines = &baselines,
                                .control = &control,
                                .clock = clock,
                                .counters = &counters,
                                .actions = &actions,
                                .router = router.others() ? &router : nullptr,
                                .info = [] {
                                  return ServerInfo{.version = "0.1.0",
                                                    .revision = "synthetic",
                                                    .backend = "cpu: no device",
                                                    .limits = {{"runs_live", 1000}, {"series", 20000}}};
                                }});
  std::unique_ptr<Access> access;
  if (!who.page_token.empty() || !who.access_file.empty() || router.others()) {
    auto opened = Access::Open(who, &counters, clock);
    if (!opened.ok()) {
      std::cerr << opened.status() << "\n";
      return 1;
    }
    access = *std::move(opened);
    access->SetPeers("a key of thirty-two bytes or more", [clock] { return clock->UnixMillis(); });
  }
  auto server = HttpServer::Start(
      options, {.metrics = [] { return std::string(); },
                .ready = [&control] { return control.Ready(); },
                .call =
                    [&engine](const std::string& method, const std::string& body, const GrantPtr& grant,
                              const std::function<bool()>& cancelled, std::shared_ptr<const void>* memory) {
                      return CallJson(engine, method, body, grant, cancelled, memory);
                    },
                .methods = JsonMethods(),
                .access = access.get(),
                .transition_json = [](const AlertTransition& transition) { return TransitionToJson(transition); },
                .runs = &table,
                .alerts = &alerts,
                .counters = &counters});
  if (!server.ok()) {
    std::cerr << server.status() << "\n";
    return 1;
  }
  std::cout << "{\"port\": " << (*server)->port() << "}" << std::endl;
  std::string command;
  while (std::getline(std::cin, command)) {
    if (command == "step" && !runs.empty()) {
      runs[0].steps += runs[0].every;
      publish(runs[0]);
    } else if (command == "alert" && !runs.empty()) {
      worsen(3, "norm");
    } else if (command == "loss" && !runs.empty()) {
      worsen(5, "loss");
    } else if (command == "apply") {
      control.Apply();
    }
    std::cout << "ok" << std::endl;
  }
  (*server)->Stop();
  return 0;
}

}  // namespace
}  // namespace bellwether::server

int main(int argc, char** argv) { return bellwether::server::Main({argv + 1, argv + argc}); }
