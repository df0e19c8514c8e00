// run_state.h: the state of one run, which its log records alone change.
//
// Apply() merges ranks, stores closed steps in the series, and judges them.  The same
// messages after the same saved state give the same state and the same effects: there is
// no clock here, and nothing waits.  Recovery rests on that: a save holds everything as of
// one LSN, and the log's later messages are applied again.
//
// Not thread-safe: the shard that owns the run calls it.

#ifndef BELLWETHER_SERVER_ENGINE_RUN_STATE_H_
#define BELLWETHER_SERVER_ENGINE_RUN_STATE_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/act/action_engine.h"
#include "server/detect/gram_assembler.h"
#include "server/detect/run_judge.h"
#include "server/engine/live_run_parts.h"
#include "server/ingest/message.h"
#include "server/ingest/own_values.h"
#include "server/ingest/rank_merge.h"
#include "server/ingest/row_maps.h"
#include "server/model/row_values.h"

namespace bellwether::server {

// What one message led to, beside the new state.
struct RunEffects {
  std::vector<AlertTransition> transitions;
  std::vector<Action> actions;     // Each change of an action, with its whole history.
  std::vector<AuditEntry> audit;   // Refused requests, and changes of the policy.
  std::optional<uint32_t> joined;  // A rank that has a new stream.
  std::vector<uint32_t> left;      // Ranks that left.
  bool ended_by_silence = false;
};

// A save of a run that is under way.
struct RunSave {
  std::unique_ptr<RunBatch> batch;
  Lsn last_lsn = 0, applied_lsn = 0;
  std::shared_ptr<const RunRows> rows;  // Null: they are saved already.
  size_t events = 0;
  uint64_t steps = 0, values = 0;
};

// The newest loss that is stored, as a sample of its step; null: none.
std::shared_ptr<const StepSample> ReadNewestLoss(const RunRecord& record, const SeriesStore& series);

class RunState {
 public:
  // `parts` must outlive it.
  RunState(const LiveRunParts* parts, const RunRecord& record);
  RunState(const RunState&) = delete;
  RunState& operator=(const RunState&) = delete;

  // Loads the saved state; false: there is none.  DATA_LOSS: it cannot be read.
  absl::StatusOr<bool> Load();
  // Applies the next message.  `is_live`: it is not read back from the log.
  RunEffects Apply(const LoggedMessage& message, bool is_live);
  // Has the worker compute the spectra that recovery found no answer for.
  void SubmitUnanswered();
  // The run is judged by other rules than `current`.
  bool RulesDiffer(const RuleSetPtr& current);
  // The policy is another one than `current`, and is the server's own.
  bool PolicyDiffers(const PolicyPtr& current) const;

  // ---- saving ----
  // Writes everything as of the last applied message to save->batch; fills in the rest.
  absl::Status Write(RunSave* save);
  // The save is committed; `closed`: the series are closed by it.
  void RecordSaved(const RunSave& save, bool closed);
  // The LSN up to which a saved state has everything but open steps.  DATA_LOSS: it is no
  // saved state.
  static absl::StatusOr<Lsn> SavedLsn(std::string_view state);

  const RunRecord& record() const { return record_; }
  const RankMerge& merge() const { return merge_; }
  const RunJudge& judge() const { return judge_; }
  const ActionEngine& action_engine() const { return *engine_; }
  const PolicyPtr& policy() const { return engine_->policy(); }
  bool policy_is_own() const { return policy_is_own_; }
  const std::map<uint32_t, RankRecord>& ranks() const { return ranks_; }
  const std::map<SignalId, std::vector<double>>& totals() const { return totals_; }
  // Never null.
  const std::shared_ptr<const RunRows>& rows() const { return rows_; }
  Lsn last_lsn() const { return last_lsn_; }
  Lsn saved_lsn() const { return saved_lsn_; }
  uint64_t unsaved_steps() const { return unsaved_steps_; }
  uint64_t unsaved_values() const { return unsaved_values_; }
  uint64_t events_stored() const { return events_stored_; }
  const std::vector<RunEvent>& new_events() const { return new_events_; }
  bool has_waiting_byes() const { return !byes_.empty(); }
  // A step was closed since the state was loaded.
  bool stepped() const { return stepped_; }
  // The newest closed step, and the newest with signals per head.
  const StepSample& newest() const { return newest_; }
  const StepSample& heads() const { return heads_; }
  uint64_t heads_version() const { return heads_version_; }
  const RowValues& row_values() const { return row_values_; }
  uint64_t row_values_version() const { return row_values_version_; }
  // A recording is being imported, and no rank of it has left yet.  Its ranks are as late as
  // the import: no deadline judges them.
  bool importing() const { return !record_.import_of.empty() && merge_.gone().empty(); }

 private:
  // Frames, as a client counted them since it started.
  struct Losses {
    uint64_t dropped = 0, stripped = 0;
  };

  absl::StatusOr<bool> LoadStored();
  void ApplyHello(const HelloMessage& hello);
  void ApplyNames(uint32_t rank, const NamesMessage& names);
  void ApplyFrame(uint32_t rank, const RankFrame& frame, Lsn lsn);
  // Counts what was left out, and says each signal once.
  void NoteRefused(const RankFrame& frame, const std::vector<OwnRefusal>& refused);
  void NoteUnknown(const RankFrame& frame);
  void ApplyGram(const ShippedGram& gram, Lsn lsn);
  void ApplySpectra(const SpectraMessage& spectra);
  void ApplyEvent(const RunEvent& event);
  void ApplyRules(const RulesMessage& rules);
  void ApplyPolicy(const PolicyMessage& message);
  void ApplyActionRequest(const ActionRequestMessage& message);
  void ApplyActionResult(uint32_t rank, const ActionResultMessage& result);
  void OnStep(const StepSample& sample);
  // A goodbye waits for the signals of the rank's last steps.
  void ApplyBye(uint32_t rank, const ByeMessage& bye);
  void ReleaseByes(bool all);  // Applies those goodbyes that need not wait any longer.
  void LeaveRank(uint32_t rank, const ByeMessage& bye);
  void EndBySilence(const RunSilentMessage& silent);
  // The run has not ended: a message of a next step came.
  void Reopen();

  // The run has what `layout` has more of.
  void Grow(const Layout& layout);
  void KeepEvent(const RunEvent& event);
  void AddTotals(const StepSample& sample);
  // Opens the series if a save closed them.
  void OpenSeries();
  absl::Status CheckPolicy(const PolicyMessage& message) const;
  // Keeps a refused request or a change of the policy, and answers the caller.
  void Conclude(const absl::Status& status, AuditEntry entry, ActionOutcome* outcome);
  // Passes on to the action engine the transitions that it has not seen.
  void NotifyEngine();
  // Counts in bellwether_spectra_total.
  void CountGram(const char* result, double count = 1);

  std::string SaveState(const std::string& series_state) const;
  bool RestoreState(const std::string& state, std::string* series_state);
  void RestoreActions(std::string_view policy, std::string_view state);

  // Constant after construction.
  const LiveRunParts& parts_;
  const RankMerge::Sink sink_;
  Counter* const late_;
  Counter* const repeated_;
  Counter* const closed_by_deadline_;
  Counter* const ended_silent_;
  Counter* const events_refused_;
  Counter* const disagreements_left_out_;
  Counter* const names_refused_;
  Counter* const values_without_row_;
  Counter* const values_unknown_;
  Counter* const rule_rows_left_out_;

  // Saved, as of the last applied message.
  RunRecord record_;
  std::map<uint32_t, RankRecord> ranks_;
  RankMerge merge_;  // But its open steps, which the log keeps.
  RuleSetPtr rules_;
  RunJudge judge_;
  std::unique_ptr<ActionEngine> engine_;
  bool policy_is_own_ = false;
  std::map<SignalId, std::vector<double>> totals_;
  std::shared_ptr<const RunRows> rows_ = std::make_shared<RunRows>(), rows_saved_ = rows_;
  RowMaps row_maps_;
  OwnRows own_rows_;  // Follows from rows_.
  uint64_t rule_rows_counted_ = 0;
  std::set<std::string> refused_told_;  // Own signals, with the cause; as unknown_told_.
  std::set<int32_t> unknown_told_;      // Signals; not saved, so a server that was restarted says them again.
  std::map<uint32_t, Losses> counted_;  // rank -> its client's counts.
  Lsn last_lsn_ = 0;                    // Of the last applied message.
  std::vector<RunEvent> new_events_;    // Since the last save.

  // Follow from the log: open steps and what waits for them.
  GramAssembler grams_;
  std::vector<GramTask> unanswered_;                   // Found by recovery.
  std::vector<std::pair<uint32_t, ByeMessage>> byes_;  // rank, its goodbye; they wait.

  // Of the message that is being applied.
  ActionEngine::Now now_;
  bool is_live_ = false;
  RunEffects effects_;
  size_t transitions_notified_ = 0;  // Of effects_.transitions, to the engine.

  // Relative to the last save and to the load.
  Lsn saved_lsn_ = 0;
  uint64_t events_stored_ = 0;
  uint64_t unsaved_steps_ = 0, unsaved_values_ = 0;
  bool series_closed_ = false;
  bool stepped_ = false;
  StepSample newest_;
  StepSample heads_;
  uint64_t heads_version_ = 0;
  RowValues row_values_;
  uint64_t row_values_version_ = 0;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_ENGINE_RUN_STATE_H_
