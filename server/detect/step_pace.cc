#include "server/detect/step_pace.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <type_traits>

namespace bellwether::server {
namespace {

constexpr int64_t kShorterMost = 16;
constexpr int32_t kToldMost = 1 << 20;  // Counted so far, then round again.

}  // namespace

void StepPace::Observe(const StepSample& sample) {
  const float seconds = sample.scalar(SignalId::kStepSeconds);
  if (!std::isfinite(seconds) || seconds <= 0) return;
  const auto room = static_cast<int32_t>(newest_.size());
  newest_[static_cast<size_t>(told_ % room)] = seconds;
  told_ = told_ + 1 < kToldMost ? told_ + 1 : room;
  std::array<float, 16> sorted = newest_;
  const auto middle = sorted.begin() + (std::min(told_, room) - 1) / 2;
  std::nth_element(sorted.begin(), middle, sorted.begin() + std::min(told_, room));
  seconds_ = *middle;
}

bool StepPace::Consistent() const {
  return told_ >= 0 && told_ < kToldMost && std::isfinite(seconds_) && seconds_ >= 0;
}

int32_t StepPace::Shorter(const ContextOptions& options, int64_t age) const {
  if (seconds_ < options.slow_step_seconds || seconds_ <= 0) return 1;
  // By half at the end of them.
  const int64_t by = std::clamp<int64_t>(2 * options.young_steps / std::max<int64_t>(1, age), 1, kShorterMost);
  return static_cast<int32_t>(std::bit_floor(static_cast<uint64_t>(by)));
}

JudgeOptions WithShorterSpans(const JudgeOptions& options, int32_t by) {
  JudgeOptions shorter = options;
  if (by <= 1) return shorter;
  const auto shorten = [by](auto* span, int32_t least) {
    using Span = std::remove_reference_t<decltype(*span)>;
    *span = std::min(*span, std::max(*span / static_cast<Span>(by), static_cast<Span>(least)));
  };
  shorten(&shorter.trend.batch_steps, 1);
  shorten(&shorter.trend.doubling_steps_max, 1);
  shorten(&shorter.leak.memory_steps, 1);
  shorten(&shorter.loss.persist_steps, shorter.loss.turn_values);
  shorten(&shorter.loss.critical_steps, shorter.loss.turn_lasting_values);
  shorten(&shorter.own.persist_batches, shorter.own.hold_batches);
  shorten(&shorter.context.warmup_steps, 1);
  shorten(&shorter.context.warmed_steps, 1);
  shorten(&shorter.context.settle_steps, 1);
  shorten(&shorter.alert.resolve_steps, 1);
  shorten(&shorter.alert.cooldown_steps, 1);
  return shorter;
}

}  // namespace bellwether::server
