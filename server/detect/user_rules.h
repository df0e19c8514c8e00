// user_rules.h: judges the rules that people wrote, beside the built-in ones.
//
// It works as the built-in rules do: samples are averaged to batches, a full
// batch is judged once, a rule must hold for some batches and fail as long to
// stop.  The first steps of a run, announced disturbances and the kernel's
// input count as for those (run_judge.h).
//
// Rules on the same series share it.  The memory is fixed by the rules and the
// number of heads, and taken when a signal is first seen.  It is (3 + window)
// floats a cell and series, 11 bytes a cell and rule, and window floats a cell
// of rules with a baseline.  A rule on each tensor or module has kRuleRowsMax cells.
//
// Not thread-safe.

#ifndef BELLWETHER_SERVER_DETECT_USER_RULES_H_
#define BELLWETHER_SERVER_DETECT_USER_RULES_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "server/detect/batch_series.h"
#include "server/detect/cusum.h"
#include "server/detect/finding.h"
#include "server/detect/impulse.h"
#include "server/detect/judge_options.h"
#include "server/detect/trend.h"
#include "server/detect/user_rule.h"
#include "server/model/row_names.h"
#include "server/model/run_types.h"
#include "server/model/step_sample.h"

namespace bellwether::server {

class UserRules {
 public:
  UserRules(const JudgeOptions& options, const Layout& layout);

  size_t size() const { return memories_.size(); }
  const UserRule& rule(size_t index) const { return (*options_.rules)[index]; }

  // Of which tensors and modules the next samples are; null = not known.  Not owned.
  void SetRows(const RunRows* rows) { rows_ = rows; }

  // Takes the sample.  Calls `found` for every rule that was judged by it;
  // without findings it was looked for and not found.  `excused`: something
  // announced disturbs the run now, so nothing begins or ends.
  using Found = std::function<void(size_t rule, std::vector<Finding>* findings)>;
  void Observe(const StepSample& sample, const AttentionTraits& traits, bool excused, const Found& found);

  // What the kernel is fed has changed: nothing before it counts.
  void Forget();
  // Something announced may move every level: what is normal is learnt anew.
  void Excuse();
  // Takes what `old` remembers for rules that go on.  The result holds, for
  // each rule here, the one of `old` that it continues, or -1.
  std::vector<int> TakeOver(UserRules* old);

  // Tensors and modules whose names fit a rule that had no cell left for them.
  uint64_t rows_left_out() const;
  size_t memory_bytes() const;
  template <class A>
  void Visit(A& a) {
    for (Track& track : tracks_) a(track.series), a(track.batch_begin), a(track.last_step);
    for (Memory& memory : memories_) {
      a(memory.count), a(memory.active), a(memory.since);
      if (memory.cusum) a(*memory.cusum);
      if (memory.impulse) a(*memory.impulse);
    }
  }
  bool Consistent() const;

 private:
  // One series, and the rules on it.
  struct Track {
    SignalId signal;
    std::string own;  // As UserRule's.
    RuleScope scope;
    RuleAggregate aggregate;
    std::string rows;
    int32_t batch_steps;
    size_t cells;
    int32_t window;
    BatchSeries series;
    int64_t batch_begin = -1;
    int64_t last_step = -1;
    int32_t row = -1;  // Of a tensor or module: that whose value the newest aggregate was.
    // Of tensors and modules: those whose names fit, by cell where each is judged.  They follow from the
    // run's names, which only grow.
    std::vector<int32_t> fitting;
    int32_t names_read = 0;
    uint64_t left_out = 0;
    std::vector<size_t> rules;

    bool SameSeries(const UserRule& rule) const {
      return signal == rule.signal && own == rule.own && scope == rule.scope && aggregate == rule.aggregate &&
             rows == rule.rows && batch_steps == rule.batch_steps;
    }
  };
  // What a rule remembers of its cells.
  struct Memory {
    std::vector<uint16_t> count;  // Of batches that it held.
    std::vector<uint8_t> active;
    std::vector<int64_t> since;
    std::optional<CusumBank> cusum;
    std::optional<ImpulseBank> impulse;
  };
  // What a rule finds in one cell at one batch.
  struct Reading {
    bool known = false;  // False: nothing was measured, nothing changes.
    bool fires = false;
    double score = 0;
    double p = 1;
    double value = 0, threshold = 0, baseline = 0;
    Trend trend;
    Eta eta;
  };

  size_t CellsOf(RuleScope scope) const;
  void AddTrack(size_t rule);
  void SetBankOptions(size_t rule);
  // Fills values_; false if the sample lacks the signal.
  bool Extract(const StepSample& sample, Track* track);
  float Aggregate(RuleAggregate how, size_t begin, size_t end);
  void Judge(size_t rule, const Track& track, std::vector<Finding>* findings);
  void ReadLevel(const UserRule& rule, const Track& track);
  void ReadPeers(const UserRule& rule, const Track& track);
  void ReadGrowth(const UserRule& rule, const Track& track);
  void ReadBank(const UserRule& rule, const Track& track, Memory* memory);
  bool Hold(Memory* memory, size_t cell, bool fires, int32_t hold, int64_t step) const;
  Finding FindingOf(const UserRule& rule, const Track& track, const Memory& memory, size_t cell) const;
  // Finds the tensors, modules or own cells that the track is of.
  void ReadNames(Track* track) const;
  // What the cell's newest value is of, if it is of one tensor or module whose name is known.
  std::string NameOfRow(const Track& track, size_t cell) const;
  // Says in the words of the worst which others there are.
  static void NameOthers(const std::vector<std::string>& names, std::vector<Finding>* findings);
  Head At(RuleScope scope, size_t cell) const;

  JudgeOptions options_;
  Layout layout_;
  const RunRows* rows_ = nullptr;
  std::vector<Track> tracks_;
  std::vector<Memory> memories_;  // One per rule.

  std::vector<float> matrix_, values_, window_, steps_, scratch_;
  std::vector<Reading> readings_;  // One per cell.
  std::vector<double> p_, p_scratch_;
  std::vector<Finding> findings_;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_DETECT_USER_RULES_H_
