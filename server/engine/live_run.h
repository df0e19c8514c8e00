// live_run.h: one run while it is being written.
//
// Applies the run's messages in the order of the log: merges ranks, stores the
// closed steps, judges them, posts what changes.  The same messages after the
// same saved state give the same result, which is what recovery rests on: a
// commit saves everything as of one LSN, and what the log holds after it is
// applied again.
//
// Not thread-safe: the shard that owns the run calls it.

#ifndef BELLWETHER_SERVER_ENGINE_LIVE_RUN_H_
#define BELLWETHER_SERVER_ENGINE_LIVE_RUN_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "server/act/action_engine.h"
#include "server/detect/detector_bank.h"
#include "server/detect/gram_assembler.h"
#include "server/detect/run_judge.h"
#include "server/engine/action_outbox.h"
#include "server/engine/reloadable_policy.h"
#include "server/engine/reloadable_rules.h"
#include "server/engine/spectra_worker.h"
#include "server/ingest/message.h"
#include "server/ingest/rank_merge.h"
#include "server/store/action_store.h"
#include "server/store/alert_store.h"
#include "server/store/baselines.h"
#include "server/store/database.h"
#include "server/store/run_table.h"
#include "server/store/series_store.h"
#include "server/store/wal.h"
#include "server/util/clock.h"
#include "server/util/counters.h"
#include "server/util/work_pool.h"

namespace bellwether::server {

// What every run needs; all must outlive it.
struct LiveRunParts {
  ReloadableRules* rules = nullptr;
  ReloadablePolicy* policy = nullptr;
  ActionStore* actions = nullptr;
  Database* database = nullptr;
  SeriesStore* series = nullptr;
  AlertStore* alerts = nullptr;
  RunTable* table = nullptr;
  LogBackend* wal = nullptr;
  Counters* counters = nullptr;
  Clock* clock = nullptr;
  DetectorBank* bank = nullptr;          // Null = the CPU's.
  const Baselines* baselines = nullptr;  // Null = nothing is known of other runs.
  SpectraWorker* spectra = nullptr;      // Null = Gram matrices give no signals.
  // By lane of the log; null = runs are saved by their shard's thread.
  const std::vector<std::unique_ptr<WorkPool>>* savers = nullptr;
  // Passes an action on to the rank's stream; false = it has none.  Null = nobody
  // is handed anything.
  std::function<bool(RunId run, uint32_t rank, const Action& action)> hand_over;
  uint64_t events_max = 10'000;  // Kept of a run.
  // A stream or an import of the run is open.  Null = none ever is.
  std::function<bool(RunId run)> attached;
};

class LiveRun {
 public:
  // A run that the database may know: Load() takes up its saved state.
  LiveRun(const LiveRunParts& parts, const RunRecord& record);

  absl::Status Load();

  // `arrived_ns` (monotonic) is when the message came in; 0 in recovery.
  void Apply(const LoggedMessage& message, int64_t arrived_ns);

  // Shows readers the newest state if it changed since the last call, and
  // shows a record as it was saved.
  void Publish();
  static void PublishRecord(const RunRecord& record, const LiveRunParts& parts);
  // Saves everything as of the last applied message, atomically.
  absl::Status Commit();
  // The same in three, for a store that may keep one waiting: what is to be saved, that
  // it is with the others, which any thread may wait for, and what follows from it.
  // Messages may be applied meanwhile, unless the save closes the run.  One at a time.
  struct Save {
    std::unique_ptr<RunBatch> batch;
    Lsn last_lsn = 0, applied_lsn = 0;
    size_t events = 0;
    uint64_t steps = 0;
  };
  absl::StatusOr<Save> BeginSave();
  static absl::Status ShareSave(const LiveRunParts& parts, RunId run, Save* save);
  absl::Status EndSave(Save save, absl::Status shared);
  bool saving() const { return saving_; }
  bool closing() const { return saving_ && closing_; }
  // Steps and time since the last commit make one due.
  bool CommitDue(int64_t now_ns) const;

  // An open step whose deadline passed at `now_ns`; false if none.
  bool StepOverdue(int64_t now_ns, int64_t deadline_ns, StepClosedMessage* overdue);
  // Ranks' silence has begun or ended; false if nothing changed.
  bool SilenceChanged(int64_t now_ns, int64_t silence_ns_min, SilenceMessage* silence);

  // Nobody has said anything of the run for `silent_ns_max`, restarts included, nor since
  // this server has it, or since NoteHere(), for as long as a trainer needs to come back.
  bool SilentTooLong(int64_t now_ns, int64_t silent_ns_max, RunSilentMessage* silent);
  // Somebody is there, though he may say nothing.
  void NoteHere(int64_t now_ns) { here_ns_ = now_ns; }
  int64_t here_ns() const { return here_ns_; }

  // Hands the worker what recovery found unanswered.
  void SubmitUnanswered();

  // The run is judged by other rules than `current`, and was not told yet.
  bool RulesDiffer(const RuleSetPtr& current);
  // A record that brings them is on its way.
  void NoteRulesComing(const RuleSetPtr& rules) { coming_rules_ = rules; }

  // ---- actions (live_run_actions.cc) ----
  // What ranks are to be handed that their streams were not handed yet.
  struct Errand {
    uint32_t rank = 0;
    Action action;
  };
  std::vector<Errand> Errands();                          // Empty until another one may be due.
  void LookForErrandsAgain() { due_seen_ = UINT64_MAX; }  // They could not be passed on.
  // The rank's stream has it.
  void NoteHanded(uint32_t rank, const std::string& id) { handed_[rank].insert(id); }
  // The server's policy is another one, nobody set one for this run, and it was
  // not told yet.
  bool PolicyDiffers(const PolicyPtr& current) const;
  void NotePolicyComing(const PolicyPtr& policy) { coming_policy_ = policy; }
  const PolicyPtr& policy() const { return engine_->policy(); }
  // Stores what changed while the log or the store did not go on; does not wait for the log.
  void PostWaiting(int64_t now_ns);
  bool policy_is_own() const { return policy_is_own_; }
  Lsn last_lsn() const { return last_lsn_; }
  // What has LSNs up to here is in saved state, but for what belongs to open steps.
  Lsn saved_lsn() const { return saved_lsn_; }
  // The same, of a state that was saved.  DATA_LOSS: it is none.
  static absl::StatusOr<Lsn> SavedLsn(std::string_view state);

  const RunRecord& record() const { return record_; }
  // Every LSN from here on is still needed in the log for this run; 0 = none.
  Lsn needed_lsn() const;
  // Of a recording, and no rank has left yet: its ranks are as late as whoever imports
  // it, which no deadline judges while he is there, or may soon be again.
  bool importing() const { return !record_.import_of.empty() && merge_.gone().empty(); }
  bool ended() const { return record_.ended; }
  // It has ended, and all of it is stored.
  bool closed() const { return record_.ended && needed_lsn() == 0 && outbox_.empty(); }

 private:
  // Frames, as a client told since it started.
  struct Losses {
    uint64_t dropped = 0, stripped = 0;
  };
  void ApplyHello(const HelloMessage& hello);
  void KeepEvent(const RunEvent& event);
  void ApplyActionResult(uint32_t rank, const ActionResultMessage& result);
  void ApplyActionRequest(const ActionRequestMessage& message);
  void ApplyPolicy(const PolicyMessage& message);
  absl::Status CheckPolicy(const PolicyMessage& message) const;
  // Keeps what was refused, or a change of policy, and tells whoever waits.
  void Conclude(const absl::Status& status, AuditEntry entry, ActionOutcome* outcome);
  void RestoreActions(std::string_view policy, std::string_view state);
  // Tells the engine of the transitions that it has not seen.
  void NotifyEngine();
  // Stores what changed, once its cause is durable; PostWaiting() what cannot be.
  void PostActions();
  absl::Status PostOutbox(const absl::Status& durable);
  void ApplyFrame(uint32_t rank, const RankFrame& frame, Lsn lsn);
  void GoOn();  // Something of a next step came: the run has not ended.
  void ApplyGram(const ShippedGram& gram, Lsn lsn);
  void ApplySpectra(const SpectraMessage& spectra);
  // A goodbye waits for the signals of the last steps.
  void ApplyBye(uint32_t rank, const ByeMessage& bye);
  void LetGo(bool all);  // Takes those that need not wait any longer.
  void TakeLeave(uint32_t rank, const ByeMessage& bye);
  // Of bellwether_spectra_total.
  void CountGram(const char* result, double count = 1);
  void EndSilent(const RunSilentMessage& silent);
  void ApplyRules(const RulesMessage& rules);
  void OnStep(const StepSample& sample);
  absl::Status LoadStored();
  void ShowEvents(RunSnapshot* snapshot);
  // Null: none was stored.
  static std::shared_ptr<const StepSample> NewestLoss(const RunRecord& record, const LiveRunParts& parts);
  void OpenSeries();  // If the run was closed, and goes on.
  void AddTotals(const StepSample& sample);
  void Post(std::vector<AlertTransition>* transitions);
  std::string SaveState(const std::string& series_state) const;
  bool RestoreState(const std::string& state, std::string* series_state);

  const LiveRunParts parts_;
  RunRecord record_;
  RankMerge merge_;
  RuleSetPtr rules_;  // By which it is judged.
  RuleSetPtr coming_rules_;
  RunJudge judge_;
  std::unique_ptr<ActionEngine> engine_;
  PolicyPtr coming_policy_;
  bool policy_is_own_ = false;
  ActionEngine::Now now_;        // Of the message that is being applied.
  size_t transitions_told_ = 0;  // Of transitions_, to the engine.
  std::vector<Action> changed_actions_;
  std::vector<AuditEntry> audit_;
  ActionOutbox outbox_;                               // Of both, until they are stored.
  bool actions_wait_ = false;                         // They could not be stored.
  int64_t next_post_ns_ = 0;                          // When they are tried again.
  std::map<uint32_t, std::set<std::string>> handed_;  // rank -> ids, to its newest stream
  uint64_t due_seen_ = UINT64_MAX;                    // due_version() when Errands() last looked.
  RankMerge::Sink sink_;
  GramAssembler grams_;
  std::vector<GramTask> unanswered_;                   // Found by recovery.
  std::vector<std::pair<uint32_t, ByeMessage>> byes_;  // rank; they wait.
  std::map<uint32_t, RankRecord> ranks_;
  std::map<SignalId, std::vector<double>> totals_;
  std::map<uint32_t, Losses> told_;  // rank -> by its client

  Lsn last_lsn_ = 0;   // Last applied.
  Lsn saved_lsn_ = 0;  // Events and Hellos up to here are in saved state.
  bool dirty_ = false;
  bool saving_ = false, closing_ = false;  // A save is under way, of a run that has ended.
  bool series_closed_ = false;             // By such a save.
  bool changed_ = false;
  uint64_t events_stored_ = 0;  // In the database.
  std::vector<RunEvent> new_events_;
  std::shared_ptr<const std::vector<RunEvent>> shown_events_;  // new_events_ as last published.
  uint64_t steps_since_commit_ = 0;
  int64_t committed_ns_ = 0;
  int64_t arrived_ns_ = 0;
  std::vector<AlertTransition> transitions_;

  StepSample last_heads_;
  StepSample last_sample_;
  bool stepped_ = false;  // It saw a step close itself: what it shows is more than what is stored.
  std::shared_ptr<const StepSample> shown_heads_;
  bool heads_changed_ = false;
  uint64_t version_ = 0;

  // Deadlines, on the monotonic clock; never part of the saved state.
  std::pair<uint32_t, int64_t> open_step_{0, -1};
  int64_t open_since_ns_ = 0;
  std::map<uint32_t, int64_t> heard_ns_;
  uint32_t silent_ranks_ = 0;
  int64_t here_ns_ = 0;  // When somebody was there, or could first come.

  Counter* const late_;
  Counter* const repeated_;
  Counter* const closed_by_deadline_;
  Counter* const ended_silent_;
  Counter* const events_refused_;
  Counter* const disagreements_left_out_;
  Histogram* const alert_seconds_;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_ENGINE_LIVE_RUN_H_
