// expert_watch.h: experts that get no tokens any more, and routers that send all to the same ones.
//
// idle      An expert that had tokens in experts.seen samples gets none: in so many samples in a row, and
//           in so many times as many as ever before.  One that is sent tokens only now and then has a
//           habit of being idle, and is judged by that.  One that was never idle, and never had less than
//           experts.steady_share of the mean expert's tokens, is dead after two samples.  By its lowest share
//           so far it should have had experts.steady_tokens in them.
// unused    It gets none in experts.start_samples of them, and had so in fewer before, or never.  A
//           fine-tune may well have such experts, so this is information.
// collapsed The tokens of a layer go to few experts.  Its breadth is (n - k) / (experts - k), where n is
//           the effective number of experts, (sum of loads)^2 / sum of loads^2, and k how many a token is
//           sent to: 1 is balanced, 0 always the same.  Where the router is sure, with an entropy below
//           experts.breadth of the largest, one expert that all tokens are sent to is enough.  The breadth
//           is below experts.breadth, and so many times below all of its best kExpertsBlock samples, for
//           experts.samples in a row; for two, where it is below them by that factor squared.  What has never
//           been broad, as batches that are mostly padding, is not told.
//
// In the first steps only what takes two samples is told, and habits of that time are forgotten.  Steps behind an
// announced change are neither judged nor learnt from.  What is wrong
// stays so over such a change and into a new attempt, until a sample shows otherwise.  What is well again, and
// wrong once more before the alert has ended, is no news.
//
// The state is 24 bytes an expert.  Not thread-safe.

#ifndef BELLWETHER_SERVER_DETECT_EXPERT_WATCH_H_
#define BELLWETHER_SERVER_DETECT_EXPERT_WATCH_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "server/detect/finding.h"
#include "server/detect/judge_options.h"
#include "server/detect/news.h"
#include "server/model/step_sample.h"

namespace bellwether::server {

inline constexpr int32_t kExpertsBlock = 64;  // Samples of a layer, of which the least breadth counts.

class ExpertWatch {
 public:
  explicit ExpertWatch(const ExpertsOptions& options) : options_(options) {}
  void SetOptions(const ExpertsOptions& options) { options_ = options; }

  // Judges a sample.  False: it tells of no expert.  What was wrong is news again after `quiet_steps`.
  // `warming`: the run is in its first steps.
  bool Observe(const StepSample& sample, int64_t quiet_steps, bool warming = false);
  // What is wrong now, in the layers of this sample and others: the worst first.
  std::vector<Finding>* findings() { return &findings_; }
  // Something announced may change what is usual: it is learnt anew.  What is wrong stays so.
  void Forget();
  // A new attempt begins: the same.
  void Rewind();
  size_t memory_bytes() const { return experts_.capacity() * sizeof(Expert) + routers_.capacity() * sizeof(Router); }

  template <class A>
  void Visit(A& a) {
    a(columns_), news_.VisitTold(a), a(experts_), a(routers_);
  }
  // What earlier versions did not save.
  template <class A>
  void VisitLater(A& a) {
    news_.VisitLast(a);
  }
  template <class A>
  void VisitLatest(A& a) {
    a(warming_);
    for (Expert& expert : experts_) a(expert.lowest), a(expert.expected);
    for (Router& router : routers_) a(router.sharp);
  }
  bool Consistent() const;

 private:
  struct Expert {
    uint16_t seen = 0;     // In so many samples it had tokens,
    uint16_t idle = 0;     // in so many it had none since,
    uint16_t longest = 0;  // and of those before.
    bool told = false;
    int64_t since = -1;  // The first of `idle`, or when that was over.
    // The lowest share of the mean expert's tokens that it ever had; -1: not known.
    float lowest = -1;
    float expected = 0;  // Tokens that it should have had in `idle` by that.
    template <class A>
    void Visit(A& a) {
      a(seen), a(idle), a(longest), a(told), a(since);
    }
  };
  struct Router {
    uint16_t count = 0;      // Samples of the block under way.
    uint16_t collapsed = 0;  // In a row,
    uint16_t sharp = 0;      // and so many of them far below all of its past.
    bool told = false;
    float least = 0;            // Breadth of the block under way,
    float best = -1;            // and the largest of those of whole blocks; -1: none.
    float breadth = -1;         // In the last sample,
    float load = 0, ideal = 0;  // load of its busiest expert there, and of the mean one,
    float entropy = -1;         // and its entropy over the largest one; -1: not known.
    int32_t busiest = -1, experts = 0;
    int64_t since = -1;  // As of an expert.
    template <class A>
    void Visit(A& a) {
      a(count), a(collapsed), a(told), a(least), a(best), a(breadth), a(load), a(ideal), a(entropy), a(busiest);
      a(experts), a(since);
    }
  };
  enum class State : uint8_t { kWell, kUnused, kIdle };

  State StateOf(const Expert& expert) const;
  bool IsSteady(const Expert& expert) const;
  bool IsCollapsed(const Router& router) const;
  void EndWarmUp();
  void TakeLoads(std::span<const float> loads, double mean, int64_t step, Expert* experts);
  void TakeBreadth(std::span<const float> loads, double tokens, int64_t step, Router* router);
  // An expert or a router is wrong, for the first sample in a row or a later one.
  template <class Place>
  void BeginWrong(int64_t step, bool first, Place* place) const;
  void Tell(int64_t step);

  ExpertsOptions options_;
  bool warming_ = false;  // The last sample was of the first steps.
  int32_t columns_ = 0;   // Experts of a layer.
  News news_;
  int64_t quiet_steps_ = 0;      // Of the last sample.
  std::vector<Expert> experts_;  // [layer][expert]
  std::vector<Router> routers_;  // [layer]
  std::vector<Finding> findings_;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_DETECT_EXPERT_WATCH_H_
