// head_rules.h: the detectors of all heads of a run, and what they found.
//
// A sample is added to the batch means of its signals.  When a batch is full a
// detector bank evaluates the tests of all heads (a tick).  The rules draw
// their conclusions for the few heads that a test holds of.  Between ticks
// nothing is decided.  Which rules there are and what they mean:
// docs/concepts/detection.md.
//
// A head's stage: 1 drift, 2 ties and bias, 3 norm growth, 4 logits; 0 none.
//
// Not thread-safe.

#ifndef BELLWETHER_SERVER_DETECT_HEAD_RULES_H_
#define BELLWETHER_SERVER_DETECT_HEAD_RULES_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "server/detect/batch_series.h"
#include "server/detect/detector_bank.h"
#include "server/detect/finding.h"
#include "server/detect/head_tests.h"
#include "server/detect/judge_options.h"
#include "server/detect/trend.h"
#include "server/model/run_types.h"
#include "server/model/step_sample.h"

namespace bellwether::server {

class HeadRules {
 public:
  // `bank` must outlive this.
  HeadRules(const JudgeOptions& options, const Layout& layout, DetectorBank* bank);
  ~HeadRules();
  HeadRules(const HeadRules&) = delete;
  HeadRules& operator=(const HeadRules&) = delete;

  // Adds the head signals of `sample`.  True if that filled a batch: call
  // Tick() next.
  bool Add(const StepSample& sample);
  // Runs the rules.  `excused`: something announced disturbs the run now, so
  // nothing begins or ends, but for states: scores and weights that are out of
  // bounds whatever was announced.  `repaired`: heads of a drift
  // that goes on under repair; large scores in their layers are its last stage,
  // as in those of a drift that is found.  `forming`: heads take shape, which is no past to grow from.
  void Tick(const AttentionTraits& traits, bool excused, bool forming, const std::vector<Head>& repaired = {});
  // Whether enough was seen since what the kernel is fed has changed, for a
  // growth to be found.
  bool SeesGrowth() const;
  // Whether the weights of all of these heads have stood still for `steps`, as
  // far as a window reaches: by sigma(W_Q), else by the largest scores.  False
  // where neither is measured.  -1 stands for all heads, or layers.
  bool StandStill(const std::vector<Head>& heads, int64_t steps) const;
  // The findings of the last tick.
  std::vector<Finding>* rounding() { return &rounding_; }
  std::vector<Finding>* logits() { return &logits_; }
  int32_t stage_of(size_t head) const { return stage_[head]; }
  int32_t stage() const;
  // Goes on under other thresholds with what it has seen.
  void SetOptions(const JudgeOptions& options);
  // The kernel's input has changed: growth before it means nothing.
  void ForgetTrends();
  // The run begins again at an earlier step: the open batch is of the past.
  void Rewind();
  size_t memory_bytes() const;

  template <class A>
  void Visit(A& a) {
    for (BatchSeries& series : series_) a(series);
    for (Held& held : held_) a(held);
    a(stage_), a(leak_step_);
    a(eta_steps_), a(eta_lower_), a(eta_upper_), a(eta_step_), a(ticks_);
    a(batch_begin_);
    a(last_step_);
  }
  // How heads were found is not known: nothing counts as found so.
  void ForgetHowFound();
  // What came later, which older states lack.
  template <class A>
  void VisitLater(A& a) {
    for (std::vector<float>& values : found_) a(values);
  }
  bool Consistent() const;

 private:
  // A condition that must hold for some ticks to count and fail as long to
  // stop.
  struct Held {
    std::vector<uint16_t> count;
    std::vector<uint8_t> active;
    std::vector<int64_t> since;
    template <class A>
    void Visit(A& a) {
      a(count), a(active), a(since);
    }
    void Update(size_t head, bool condition, int32_t hold, int64_t step);
    // Whether any of the heads `begin` to `end` - 1 counts.
    bool Counts(size_t begin, size_t end) const;
  };

  struct Reading;

  float Newest(HeadTrack track, size_t head) const;  // NaN if there is no value.
  // Keeps each head's first value of a track whose states may have been there before the run.
  void KeepFound(HeadTrack track, std::span<const float> values);
  // What has been within bounds since then was not found as it is.
  void ForgetFound();
  // Whether a value above `threshold` was so in the head's first sample, and has not grown much since then.
  bool AsFound(HeadTrack track, size_t head, double value, double threshold) const;
  bool MostAsFound(HeadTrack track, double threshold) const;  // Of the heads' newest values.
  double Threshold(HeadTest test, HeadTrack track) const;
  Reading Read(size_t head) const;
  Reading ReadStates(size_t head) const;
  // What the bank found, counted over the ticks.
  void Hold(HeadTest test);
  // Whether the key gradients of any head of its layer leak.
  bool LayerLeaks(size_t head) const;
  // The same, within the newest leak.memory_steps.
  bool LayerLeakedLately(size_t head) const;
  // `states`: of what is out of bounds alone.
  void JudgeHead(size_t head, const AttentionTraits& traits, bool states);
  void JudgeStates(const AttentionTraits& traits);
  // States that a head had in its first sample are information.
  void NoteAsFound(size_t head, const Reading& reading, bool rounding_possible);
  void TellAsFound();
  // Scores that are far out of bounds need no second batch.
  void HoldFarLogits();
  // Weights that are far above the other heads' and above their own earlier
  // ones.
  void HoldFarWeights();
  // Large scores in a layer with a drifting head are the drift's last stage.
  void JoinLogits(const std::vector<Head>& repaired);
  // Heads of a drifting head's layer see the same input and follow it; the
  // ones with the largest common mode have the least mantissa left.
  void NameSuspects();
  // All heads at once: the median head's scores are large, its entropy gone.
  void JudgeRunLogits();
  // A test that has long been sure is fitted anew only now and then: marks the
  // heads that are not due.
  void MarkUnwanted(HeadTest test);
  // When the ratio passes its critical level on its trend, and when the common
  // mode does on its own.  The ratio comes early, since the spread grows with
  // the common mode at last.  The mode comes late, since it accelerates.
  // Returns the mean of both, and an interval that holds both intervals.
  Eta JoinedEta(size_t head, const Trend& ratio_trend);
  void StoreEta(size_t head, const Eta& eta);
  Eta EtaNow(size_t head) const;
  Head At(size_t head) const;
  Fact FactOf(HeadTrack track, HeadTest test, size_t head, double threshold, const char* detector) const;

  JudgeOptions options_;
  const Layout layout_;
  const size_t heads_;
  DetectorBank* const bank_;
  std::vector<BatchSeries> series_;  // [kHeadTracks]
  std::array<Held, kHeadTests> held_;
  std::vector<int32_t> stage_;
  std::vector<int64_t> leak_step_;  // Of each layer: when a head of it last leaked; -1 = never.
  // Of the last fit; steps < 0: unknown.
  std::vector<float> eta_steps_, eta_lower_, eta_upper_;
  std::vector<int64_t> eta_step_;
  int64_t ticks_ = 0;
  int64_t batch_begin_ = -1;
  int64_t last_step_ = -1;
  std::array<std::vector<float>, kHeadTracks> found_;  // Each head's first value; empty: not kept of that track.

  std::vector<Finding> rounding_, logits_;
  std::vector<Finding> rounding_found_, logits_found_;  // Of a tick, while it judges.
  std::vector<float> derived_, expanded_, values_, steps_;
  TrendScratch trend_scratch_;
  // What the bank works on.
  kernels::BankRun run_;
  std::vector<uint64_t> hits_;  // [kHeadTests][HitWords]
  std::array<std::vector<uint8_t>, kHeadTests> unwanted_;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_DETECT_HEAD_RULES_H_
