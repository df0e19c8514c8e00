// live_run.h: one run while it is being written.
//
// Applies the run's messages in the order of the log: merges ranks, stores the
// closed steps, judges them, posts what changes.  The same messages after the
// same saved state give the same result, which is what recovery rests on: a
// commit saves everything as of one LSN, and what the log holds after it is
// applied again.
//
// Not thread-safe: the shard that owns the run calls it.

#ifndef BELLWETHER_SERVER_LIVE_RUN_H_
#define BELLWETHER_SERVER_LIVE_RUN_H_

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "server/detect/detector_bank.h"
#include "server/detect/gram_desk.h"
#include "server/detect/run_judge.h"
#include "server/ingest/message.h"
#include "server/ingest/rank_merge.h"
#include "server/rules_in_force.h"
#include "server/spectra_worker.h"
#include "server/store/alert_log.h"
#include "server/store/baselines.h"
#include "server/store/database.h"
#include "server/store/run_table.h"
#include "server/store/series_store.h"
#include "server/store/wal.h"
#include "server/util/clock.h"
#include "server/util/counters.h"

namespace bellwether::server {

// What every run needs; all must outlive it.
struct LiveRunParts {
  RulesInForce* rules = nullptr;
  Database* database = nullptr;
  SeriesStore* series = nullptr;
  AlertLog* alerts = nullptr;
  RunTable* table = nullptr;
  Wal* wal = nullptr;
  Counters* counters = nullptr;
  Clock* clock = nullptr;
  DetectorBank* bank = nullptr;  // Null = the CPU's.
  const Baselines* baselines = nullptr;  // Null = nothing is known of other runs.
  SpectraWorker* spectra = nullptr;  // Null = Gram matrices give no signals.
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
  // Steps and time since the last commit make one due.
  bool CommitDue(int64_t now_ns) const;

  // An open step whose deadline passed at `now_ns`; false if none.
  bool StepOverdue(int64_t now_ns, int64_t deadline_ns, StepClosedMessage* overdue);
  // Ranks' silence has begun or ended; false if nothing changed.
  bool SilenceChanged(int64_t now_ns, int64_t silence_ns_min, SilenceMessage* silence);

  // Hands the worker what recovery found unanswered.
  void SubmitUnanswered();

  // The run is judged by other rules than `current`, and was not told yet.
  bool RulesDiffer(const RuleSetPtr& current);
  // A record that brings them is on its way.
  void NoteRulesComing(const RuleSetPtr& rules) { coming_rules_ = rules; }

  const RunRecord& record() const { return record_; }
  // Every LSN from here on is still needed in the log for this run; 0 = none.
  Lsn needed_lsn() const;
  bool ended() const { return record_.ended; }

 private:
  void ApplyHello(const HelloMessage& hello);
  void ApplyFrame(uint32_t rank, const RankFrame& frame, Lsn lsn);
  void ApplyGram(const ShippedGram& gram, Lsn lsn);
  void ApplySpectra(const SpectraMessage& spectra);
  // A goodbye waits for the signals of the last steps.
  void ApplyBye(uint32_t rank, const ByeMessage& bye);
  void LetGo(bool all);  // Takes those that need not wait any longer.
  void TakeLeave(uint32_t rank, const ByeMessage& bye);
  // Of bellwether_spectra_total.
  void CountGram(const char* result, double count = 1);
  void ApplyRules(const RulesMessage& rules);
  void OnStep(const StepSample& sample);
  void AddTotals(const StepSample& sample);
  void Post(std::vector<Transition>* transitions);
  std::string SaveState(const std::string& series_state) const;
  bool RestoreState(const std::string& state, std::string* series_state);

  const LiveRunParts parts_;
  RunRecord record_;
  RankMerge merge_;
  RuleSetPtr rules_;  // By which it is judged.
  RuleSetPtr coming_rules_;
  RunJudge judge_;
  RankMerge::Sink sink_;
  GramDesk grams_;
  std::vector<GramTask> unanswered_;  // Found by recovery.
  std::vector<std::pair<uint32_t, ByeMessage>> byes_;  // rank; they wait.
  std::map<uint32_t, RankRecord> ranks_;
  std::set<uint32_t> gone_;
  std::map<SignalId, std::vector<double>> totals_;
  std::map<uint32_t, uint64_t> dropped_;  // rank -> told by its client

  Lsn last_lsn_ = 0;       // Last applied.
  Lsn saved_lsn_ = 0;      // Events and Hellos up to here are in saved state.
  bool dirty_ = false;
  bool changed_ = false;
  uint64_t events_stored_ = 0;  // In the database.
  std::vector<RunEvent> new_events_;
  std::shared_ptr<const std::vector<RunEvent>> shown_events_;  // new_events_ as last published.
  uint64_t steps_since_commit_ = 0;
  int64_t committed_ns_ = 0;
  int64_t arrived_ns_ = 0;
  std::vector<Transition> transitions_;

  StepSample last_heads_;
  StepSample last_sample_;
  std::shared_ptr<const StepSample> shown_heads_;
  bool heads_changed_ = false;
  uint64_t version_ = 0;

  // Deadlines, on the monotonic clock; never part of the saved state.
  std::pair<uint32_t, int64_t> open_step_{0, -1};
  int64_t open_since_ns_ = 0;
  std::map<uint32_t, int64_t> heard_ns_;
  uint32_t silent_ranks_ = 0;

  Counter* const late_;
  Counter* const repeated_;
  Counter* const closed_by_deadline_;
  Histogram* const alert_seconds_;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_LIVE_RUN_H_
