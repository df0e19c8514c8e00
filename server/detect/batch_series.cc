#include "server/detect/batch_series.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <utility>

namespace bellwether::server {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

}  // namespace

void BatchSeries::Add(std::span<const float> values) {
  if (newest_.empty()) {
    sum_.assign(heads_, 0);
    count_.assign(heads_, 0);
    newest_.assign(heads_, kNan);
    ring_.assign(heads_ * static_cast<size_t>(window_), kNan);
    ring_median_.assign(static_cast<size_t>(window_), kNan);
    ring_step_.assign(static_cast<size_t>(window_), 0);
  }
  for (size_t i = 0; i < heads_; ++i) {
    const bool finite = std::isfinite(values[i]);
    sum_[i] += finite ? values[i] : 0.0f;
    count_[i] += finite ? 1.0f : 0.0f;
  }
}

bool BatchSeries::CloseRow(int64_t step) {
  fresh_ = false;
  if (newest_.empty()) return false;
  bool any = false;
  bool holes = false;
  float* const out = window_ > 0 ? ring_.data() + static_cast<size_t>(next_) * heads_ : nullptr;
  for (size_t i = 0; i < heads_; ++i) {
    const bool measured = count_[i] > 0;
    const float mean = sum_[i] / count_[i];  // 0 / 0 is the NaN that the window wants.
    newest_[i] = measured ? mean : newest_[i];
    any |= measured;
    holes |= !measured;
    if (out != nullptr) out[i] = mean;
  }
  if (!any) return false;
  std::fill(sum_.begin(), sum_.end(), 0.0f);
  std::fill(count_.begin(), count_.end(), 0.0f);
  fresh_ = true;
  holes_ = holes;
  if (window_ > 0) {
    slot_ = next_;
    ++rows_written_;
    ring_step_[static_cast<size_t>(next_)] = static_cast<float>(step);
    next_ = (next_ + 1) % window_;
    rows_ = std::min(rows_ + 1, window_);
  }
  return true;
}

bool BatchSeries::Close(int64_t step) {
  if (!CloseRow(step)) return false;
  scratch_.resize(heads_);
  kernels::BankTrack track = Track();
  track.median = kernels::LowerMedian(newest_.data(), static_cast<int64_t>(heads_), scratch_.data());
  Settle(track);
  return true;
}

kernels::BankTrack BatchSeries::Track() const {
  kernels::BankTrack track;
  if (newest_.empty()) return track;
  track.newest = newest_.data();
  track.fresh = fresh_;
  track.holes = holes_;
  track.median = median_;
  if (window_ == 0) return track;
  track.ring = ring_.data();
  track.ring_median = ring_median_.data();
  track.ring_step = ring_step_.data();
  track.window = window_;
  track.rows = rows_;
  track.next = next_;
  track.slot = slot_;
  track.rows_written = rows_written_;
  return track;
}

void BatchSeries::Settle(const kernels::BankTrack& track) {
  median_ = track.median;
  if (fresh_ && slot_ >= 0) ring_median_[static_cast<size_t>(slot_)] = track.median;
  fresh_ = false;
}

void BatchSeries::ForgetWindow() {
  rows_ = 0;
  next_ = 0;
  std::fill(sum_.begin(), sum_.end(), 0.0f);
  std::fill(count_.begin(), count_.end(), 0.0f);
}

void BatchSeries::SetWindow(int32_t window) {
  if (window == window_) return;
  const int32_t kept = std::min(rows_, window);
  if (present()) {
    std::vector<float> ring(heads_ * static_cast<size_t>(window), kNan);
    std::vector<float> medians(static_cast<size_t>(window), kNan);
    std::vector<float> steps(static_cast<size_t>(window), 0);
    for (int32_t i = 0; i < kept; ++i) {
      const size_t from = row(rows_ - kept + i);
      const auto to = static_cast<size_t>(i);
      std::copy_n(ring_.data() + from * heads_, heads_, ring.data() + to * heads_);
      medians[to] = ring_median_[from];
      steps[to] = ring_step_[from];
    }
    ring_ = std::move(ring);
    ring_median_ = std::move(medians);
    ring_step_ = std::move(steps);
  }
  window_ = window;
  // A copy of the ring elsewhere is of no more use.
  slot_ = -1;
  ++rows_written_;
  rows_ = kept;
  next_ = window > 0 ? kept % window : 0;
}

void BatchSeries::Window(size_t head, int32_t newest, bool relative, std::vector<float>* values,
                         std::vector<float>* steps) const {
  values->resize(static_cast<size_t>(newest));
  steps->resize(static_cast<size_t>(newest));
  kernels::CopyWindow(Track(), static_cast<int64_t>(heads_), static_cast<int64_t>(head), newest, relative,
                      values->data(), steps->data());
}

int64_t BatchSeries::span_steps(int32_t newest) const {
  return static_cast<int64_t>(ring_step_[row(rows_ - 1)] - ring_step_[row(rows_ - newest)]);
}

float BatchSeries::Rise(size_t head, int32_t newest, bool relative) const {
  return kernels::RiseOf(Track(), static_cast<int64_t>(heads_), static_cast<int64_t>(head), newest, relative);
}

size_t BatchSeries::memory_bytes() const {
  return (sum_.capacity() + count_.capacity() + newest_.capacity() + ring_.capacity() + ring_median_.capacity() +
          ring_step_.capacity() + scratch_.capacity()) *
         sizeof(float);
}

bool BatchSeries::Consistent() const {
  if (rows_ < 0 || rows_ > window_ || next_ < 0 || next_ > std::max(0, window_ - 1)) return false;
  if (newest_.empty()) return sum_.empty() && ring_.empty() && rows_ == 0;
  const auto window = static_cast<size_t>(window_);
  return newest_.size() == heads_ && sum_.size() == heads_ && count_.size() == heads_ &&
         ring_.size() == heads_ * window && ring_median_.size() == window && ring_step_.size() == window;
}

}  // namespace bellwether::server
