// effect.h: what an action did to the heads that it was for.
//
// Follows the heads' indicators as means of batches of steps.  When an action
// is applied, level and growth of each are taken: level L and slope g of ln x
// (Theil-Sen) predict L exp(g t) for t steps later, had nothing been done.
// After the trial the present state is compared with that:
//   better   less than 0.6 of the predicted growth came, where it would have
//            been more than noise
//   worse    more came, it still doubles within 2,000 steps, and it is an illness
//
// Weights and scores of healthy heads grow too.  An illness is what the run's
// median head does not share, at a level that healthy heads stay below.  With
// fewer than kPeersMin other heads there is no median.  Then the witness is the
// key leak, the push itself: what grows while the leak is silent is training.
// If there is no leak either, only what doubles is taken for an illness.  Three
// things outweigh what got better: a head whose W_Q got worse, a loss that left
// its course, or values that are no numbers any more.  What is not measured is
// left out.
//
// Only what means the same before and after is compared.  After
// attention.center_k the scores may be those of centred keys.  So fewer ties
// and smaller scores are good news, but W_Q alone shows bad news.  qk.clip
// itself makes sigma smaller by sqrt(gamma) and scores by gamma, which is taken
// into account; gamma 0 brings sigma down to the other heads' median.
//
// Deterministic, no clock.  Not thread-safe.

#ifndef BELLWETHER_SERVER_ACT_EFFECT_H_
#define BELLWETHER_SERVER_ACT_EFFECT_H_

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "server/detect/batch_series.h"
#include "server/model/action.h"
#include "server/model/run_types.h"
#include "server/model/step_sample.h"

namespace bellwether::server {

enum EffectTrack : uint8_t { kEffectSigma, kEffectCommon, kEffectRatio, kEffectLeak, kEffectTied, kEffectLogit };
inline constexpr size_t kEffectTracks = 6;
inline constexpr size_t kJudgedHeadsMax = 8;
inline constexpr int32_t kPeersMin = 4;  // Other heads, for a median to be theirs.

// One indicator of one head when an action was applied.
struct EffectBefore {
  int32_t layer = -1, head = -1;
  uint8_t track = 0;
  double level = 0;  // As it would be then: a clip has been taken into account.  0: not known.
  double slope = 0;  // Of ln x a step; 0 where growth could not be told from noise.
  double peers = 0;  // The level in those of the run's median head; 0: too few heads.
  template <class A>
  void Visit(A& a) {
    a(layer), a(head), a(track), a(level), a(slope), a(peers);
  }
};

struct EffectSnapshot {
  int64_t step = -1;  // -1: none was taken.
  std::vector<EffectBefore> heads;
  double loss = 0, loss_highest = 0;  // 0: not measured.
  template <class A>
  void Visit(A& a) {
    a(step), a(heads), a(loss), a(loss_highest);
  }
};

struct Effect {
  enum class Verdict : uint8_t { kHelped, kDidNotHelp, kUnclear };
  Verdict verdict = Verdict::kUnclear;
  std::string numbers;
};

class EffectWatch {
 public:
  explicit EffectWatch(const Layout& layout);

  void Observe(const StepSample& sample);
  // Values from before this mean nothing for those after it.
  void Forget();

  // The state of the action's heads when it took effect, at `step`; what
  // follows is the time after it.  The heads are those of `heads`, else those
  // of its scope that grow fastest, at most kJudgedHeadsMax.
  EffectSnapshot Begin(const Action& action, const std::vector<Head>& heads, int64_t step);
  // Whether enough was measured since Begin(), or nothing ever is.
  bool CanJudge() const;
  // More than one sample since Begin() had values that are no numbers.
  bool turned_nonfinite() const { return nonfinite_samples_ > 1; }
  Effect Judge(const EffectSnapshot& before, const Action& action, int64_t step) const;
  // Whether undoing is known to do no harm; `*why` if not.  While keys are
  // centred it is not known what the raw ones would do.
  bool IsSafeToUndo(const EffectSnapshot& before, const Action& action, std::string* why) const;
  // Of these heads and all of these layers: those whose W_Q or scores stand out.
  // All of `heads` if neither is measured.
  std::vector<Head> WorthClipping(const std::vector<Head>& heads, const std::vector<int32_t>& layers) const;

  template <class A>
  void Visit(A& a) {
    for (BatchSeries& series : series_) a(series);
    a(loss_);
    a(batch_begin_), a(loss_begin_), a(last_step_), a(last_loss_step_), a(nonfinite_samples_), a(nonfinite_);
  }
  bool Consistent() const;

 private:
  struct Reading {
    bool known = false;
    double level = 0, slope = 0;
    bool grows = false;  // Surely.
  };
  bool HasPeers() const { return layout_.layers * layout_.heads > kPeersMin; }
  size_t At(Head head) const { return static_cast<size_t>(head.layer * layout_.heads + head.head); }
  // Of the newest rows, without the oldest `skip` share of them; `relative` to
  // the run's median head.
  Reading Read(EffectTrack track, size_t head, double skip, bool relative = false) const;
  // Whether training does not explain the growth from `was` to `now`, `passed`
  // steps later.
  bool IsIllness(const Action& action, const EffectBefore& was, const Reading& now, const Reading& by_peers,
                 double passed) const;
  std::vector<Head> Choose(const Action& action, const std::vector<Head>& heads) const;
  // What the action itself makes of a level; 0 = not known.
  double LevelAfter(const Action& action, EffectTrack track, Head head, double level) const;
  void RecordNonfinite(const StepSample& sample);

  Layout layout_;
  std::vector<BatchSeries> series_;  // [kEffectTracks]
  BatchSeries loss_;
  int64_t batch_begin_ = -1;
  int64_t loss_begin_ = -1;
  int64_t last_step_ = -1;
  int64_t last_loss_step_ = -1;
  int32_t nonfinite_samples_ = 0;
  std::string nonfinite_;  // The first of them.
  std::vector<float> derived_, expanded_;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_ACT_EFFECT_H_
