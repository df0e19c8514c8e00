// run_coverage.h: what a run can be judged by: which layers' signals arrive.
//
// A rule finds nothing where its signals do not arrive, which looks like health.
// So it is kept how long ago each family of rules last had its signals of each
// layer.  A layer has them if each head does that reports anything.
//
// Deterministic, and part of a run's record.  Not thread-safe.

#ifndef BELLWETHER_SERVER_MODEL_RUN_COVERAGE_H_
#define BELLWETHER_SERVER_MODEL_RUN_COVERAGE_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "server/model/step_sample.h"

namespace bellwether::server {

enum class RuleFamily : uint8_t { kDrift, kTies, kNorm, kLogits, kLeak, kLoss };
inline constexpr size_t kRuleFamilies = 6;
inline constexpr size_t kHeadFamilies = 5;  // All but the loss.
const char* FamilyName(RuleFamily family);

// Before this step trends of heads are not judged (ContextOptions::warmup_steps): that nothing was found says little.
inline constexpr int64_t kYoungSteps = 700;
// Nor does it after fewer steps than these, where a run is watched from a later step on.
inline constexpr uint64_t kFewSteps = 100;

// What is told of it at one moment.
struct JudgedBy {
  bool yet = false;                             // False: too few steps have come to say.
  int32_t layers = 0;                           // Of the run.
  std::array<int32_t, kRuleFamilies> judged{};  // Layers; of the loss 0 or 1.
  int64_t step = -1;                            // The newest.
  uint64_t steps = 0;                           // That were judged, of all attempts.
  int32_t of(RuleFamily family) const { return family == RuleFamily::kLoss ? 1 : layers; }
  bool whole() const;  // By each family in all layers.
  bool young() const { return step + 1 < kYoungSteps || steps < kFewSteps; }
  // If whole(): "healthy", or of a young run "nothing found in 5 steps".  Else what is to be said in their
  // place: "not judged yet", "not judged", "judged by: leak", "judged by: norm, leak, loss; drift, ties, logits in 3
  // of 12 layers".
  std::string Text(bool ended) const;
};

struct RunCoverage {
  static constexpr uint8_t kNever = 255;

  uint32_t attempt = 0;
  uint8_t steps = 0;                     // Of the attempt, counted to kFirstSteps.
  uint8_t off = 0;                       // 1 << RuleFamily: those whose rules are switched off.
  int64_t head_step = -1, head_gap = 0;  // The newest sample of heads, and how long after the one before.
  int64_t loss_step = -1, loss_gap = 0;
  float period = 0;             // In steps, as the client told.
  std::vector<uint8_t> missed;  // [kHeadFamilies][layers]: samples of heads since the family's was among them.

  // Takes a closed step in.  A higher attempt begins anew, a lower one is ignored.
  void Observe(const StepSample& sample);
  // After `steps_judged` steps, of all attempts.
  JudgedBy At(int64_t step, int32_t layers, uint64_t steps_judged) const;

  // Of a record that knows only which signals were reported: in all layers, up to `step`.
  static RunCoverage Of(const std::vector<SignalId>& signals, int32_t layers, uint32_t attempt, int64_t step);
  // Whether Of() makes as much of the record as this tells.
  bool Follows(const std::vector<SignalId>& signals, int32_t layers) const;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_MODEL_RUN_COVERAGE_H_
