// law_watch.h: whether a kernel of attention is right, by sums that exact arithmetic makes equal.
//
// Four laws hold between what goes into a call of attention and what comes out of its backward
// pass, whatever the model and the step (docs/concepts/laws.md):
//
//   A1  sum_j dk_j = 0                    8 projections
//   A2  sum_j dv_j = sum_T w_T dO_T       8 projections
//   A3  sum_T q_T . dq_T = sum_j k_j . dk_j
//   A4  sum_T o_T . dO_T = sum_j v_j . dv_j
//
// A sample has the difference of each by layer and key head, its variance from independent
// roundings, and how far roundings that are all alike can move it.  Of o, dq, dk and dv it has the
// distance from a reference at sampled rows or keys beside what rounding gives (the shadow check).  It
// has the factor by which each is off, too: such a distance says little of one near 1.
// Ranks and micro-batches are sums of these, and so are judged as one.
//
// broken   (|difference| - alike) / sqrt(variance), of a law or a factor, or the distance, is beyond
//          what chance gives.
//          A kernel is at fault: one sample is enough.
// biased   |difference| / sqrt(variance) is, but roundings that are alike explain it; or it is A1
//          alone, and less than twice what they explain.  Every production kernel does so in broad rows.  It is
//          evidence, no fault.
//
// Chance.  All questions of a run, however long it is, share one probability of a false alarm, C.
// The k-th sample has C 6 / (pi^2 k^2) of it, since the sum of 1 / k^2 is pi^2 / 6.  Each of its n
// questions has p = C 6 / (pi^2 k^2 n).
//   laws, factors
//           A rounding is uniform, and so is sub-Gaussian with its own variance.  A sum of
//           independent ones is, too: P(|x| > z sigma) <= 2 exp(-z^2 / 2).  z = sqrt(2 ln(2 / p)).
//   shadow  The rest is a sum of squares of sub-Gaussian numbers.  A row's variance is v_T,
//           V = sum v_T, d = V^2 / sum v_T^2.  Then (Hsu, Kakade and Zhang 2012; of normal numbers
//           Laurent and Massart 2000)
//           P(rest > V (1 + 2 sqrt(x / d) + 2 x / sqrt(d))) <= exp(-x), x = ln(1 / p).
//           However the errors within a row depend on each other.
//
// A law whose difference, variance or alike is not measured or not finite is not asked: values that
// are not finite are nonfinite_origin.h's.  A variance below what a float holds well counts as that
// much, and a sum of v_T^2 that is lost below it as d = 1: so numbers that are small make limits
// wider.
//
// huge     dQ, dK or dV has a sum of squares that a float cannot hold, though all its elements are
//          finite, and dO is finite and small.  An element of 1e26 makes its laws' variances infinite as
//          well.  No forward pass that a model trains with makes that of such a dO, so no chance is spent.
//          Where dO is large or not known it is overflow, and no fault.  So it is of dQ and dK where the scores or O
//          are far beyond those of such a pass, as behind a weight that has jumped.
//
// A1 alone is broken only where it is also beyond twice alike.  Its bias in healthy kernels is tens
// of sigmas, so that otherwise everything would hang on how well alike is known from some rows.
//
// Not thread-safe.

#ifndef BELLWETHER_SERVER_DETECT_LAW_WATCH_H_
#define BELLWETHER_SERVER_DETECT_LAW_WATCH_H_

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "server/detect/finding.h"
#include "server/detect/judge_options.h"
#include "server/model/run_types.h"
#include "server/model/step_sample.h"

namespace bellwether::server {

// How far chance goes in one of `questions`, of the `sample`-th sample of a run (from 1 on).
struct LawLimits {
  double chance = 0;  // Of one question.
  LawLimits() = default;
  LawLimits(double of_run, int64_t sample, int64_t questions);
  double z() const;
  // Of a mean over so many independent rows.
  double excess(double degrees) const;
};

// What laws 1 to 4 leave as wrong if these are broken; `broken` has bit law - 1.
const char* SuspectsOf(uint32_t broken);

class LawWatch {
 public:
  explicit LawWatch(const KernelOptions& options) : options_(options) {}
  void SetOptions(const KernelOptions& options) { options_ = options; }

  // Judges a sample.  False: there was nothing to judge.
  bool Observe(const StepSample& sample, const AttentionTraits& traits);
  // What is broken in the last sample: a finding for each head of the worst layers.  Those whose tensor
  // is known come first, then the worst.
  std::vector<Finding>* findings() { return &findings_; }
  // Adds what is biased in the last sample to findings of the same heads.
  void AddEvidence(std::vector<Finding>* findings) const;
  // How many questions the last sample was asked.
  int64_t questions() const { return questions_; }
  // Samples that were judged.
  int64_t samples() const { return samples_; }

  template <class A>
  void Visit(A& a) {
    a(samples_);
  }
  bool Consistent() const { return samples_ >= 0; }

 private:
  static constexpr size_t kLaws = 4, kTensors = 4;
  struct Place;  // What is broken at a key head.
  // Of one tensor and head beside its reference.
  struct Beside {
    double excess = 0, degrees = 0;                 // degrees 0: not asked.
    double times = 1, beyond = 0, information = 0;  // A factor and its z; information 0: not asked.
  };
  struct Reading {
    bool asked = false;
    double z = 0, beyond = 0;
    bool twice = false;  // Beyond twice alike.
  };

  void Read(const StepSample& sample);
  void ReadSquares(const StepSample& sample);
  bool IsHuge(size_t tensor, size_t at) const { return at < huge_[tensor].size() && huge_[tensor][at] >= 0; }
  std::string HugeText(const Place& place) const;
  void Judge(std::vector<Place>* places);
  void Name(const AttentionTraits& traits, const std::vector<Place>& places);

  KernelOptions options_;
  int64_t samples_ = 0;  // k of the budget: all that is kept over a restart.
  // Of the last sample.
  int64_t step_ = -1;
  int64_t questions_ = 0;
  Layout layout_;
  LawLimits limits_;
  std::vector<std::array<Reading, kLaws>> laws_;      // [layer][key head]
  std::array<std::vector<Beside>, kTensors> shadow_;  // [layer][head], or [layer][key head].
  std::array<std::vector<double>, kTensors> huge_;    // The squares of dO where it is; -1: it is not.
  bool any_huge_ = false;
  std::vector<uint32_t> biased_;  // [layer][key head] bit law - 1
  std::vector<Finding> findings_;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_DETECT_LAW_WATCH_H_
