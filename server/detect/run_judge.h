// run_judge.h: everything that is concluded about one run.
//
// Takes the run's merged samples and events in order and returns which alerts
// change state.  Deterministic: the same calls give the same transitions, on
// any machine, after any Save and Restore.  It knows nothing of clocks, files
// or other runs, which is what makes a replay equal to the live run.  Silence
// of a rank (a matter of clocks) is judged by the caller, which calls
// OnSilence().
//
// Not thread-safe: the shard that owns the run calls it.

#ifndef BELLWETHER_SERVER_DETECT_RUN_JUDGE_H_
#define BELLWETHER_SERVER_DETECT_RUN_JUDGE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "server/model/alert_transition.h"
#include "server/model/row_names.h"
#include "server/model/run_types.h"
#include "server/model/step_sample.h"

namespace bellwether::server {

struct JudgeOptions;  // judge_options.h: thresholds and windows, all of them.
class DetectorBank;

class RunJudge {
 public:
  // `bank` evaluates the heads' tests and must outlive this; null = the CPU's.
  RunJudge(const JudgeOptions& options, const RunDescription& run, DetectorBank* bank = nullptr);
  ~RunJudge();
  RunJudge(const RunJudge&) = delete;
  RunJudge& operator=(const RunJudge&) = delete;

  // Appends the transitions that this sample causes to `*out`.  `id`, `run`
  // and `time_unix_ns` of a transition are left for the caller.  A sample
  // whose step is not above the last one of its attempt is ignored; a higher
  // attempt starts from that step with what still holds.
  void Observe(const StepSample& sample, std::vector<AlertTransition>* out);
  void OnEvent(const RunEvent& event, std::vector<AlertTransition>* out);
  // A new attempt or new traits were announced.
  void OnHello(const RunDescription& run, std::vector<AlertTransition>* out);
  // What the rows of tensors and modules are, for the words of alerts.
  void SetRows(std::shared_ptr<const RunRows> rows);
  // `silent_ranks` of the run's reporters have been silent past the deadline
  // (0: all report again).
  void OnSilence(uint32_t silent_ranks, int64_t silent_seconds, std::vector<AlertTransition>* out);

  // From here on it judges by other options, with all that it has seen.  Ends
  // the alerts of rules that are gone, off or another kind of rule now.
  void SetOptions(const JudgeOptions& options, std::vector<AlertTransition>* out);

  // 0-5: the furthest of its heads now and of its open alerts.
  int32_t stage() const;
  Eta eta() const;  // Of the most urgent firing alert.
  // Worst stage that a head is in; 0..5.
  int32_t stage_of(int32_t layer, int32_t head) const;
  uint32_t alerts_firing() const;
  size_t memory_bytes() const;
  // Tensors, modules and own cells for which a rule had no room (kRuleRowsMax, kOwnPastsMax); only grows, until other
  // rules are in force.
  uint64_t rule_rows_left_out() const;

  // The whole state, versioned.  Restore returns false, leaving the judge
  // fresh, if `state` is of another version or layout or is damaged.  If only
  // the rules that people wrote are others than when it was saved, those begin
  // afresh and the rest is restored.
  std::string Save() const;
  bool Restore(std::string_view state);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_DETECT_RUN_JUDGE_H_
