#include "server/model/step_sample.h"

#include <algorithm>
#include <cmath>

namespace bellwether::server {

MatrixShape ShapeOf(const SignalInfo& signal, const Layout& layout) {
  switch (signal.granularity) {
    case Granularity::kRun:
      return {1, 1};
    case Granularity::kHead:
      return {layout.layers, layout.heads};
    case Granularity::kKvHead:
      return {layout.layers, layout.kv_heads};
    case Granularity::kLayer:
      return {layout.layers, 1};
    case Granularity::kExpert:
      return {layout.layers, layout.experts};
    case Granularity::kRank:
      return {layout.ranks, 1};
    case Granularity::kTensor:
      return {layout.tensors, 1};
    case Granularity::kModule:
      return {layout.modules, 1};
    case Granularity::kOwn:
      return {layout.own, 1};
  }
  return {};
}

void StepSample::Reset(const Layout& layout) {
  attempt = 0;
  step = 0;
  time_unix_ns = 0;
  ranks = 0;
  complete = true;
  disagreements.clear();
  disagreements_left_out = 0;
  layout_ = layout;
  signals_.clear();
  offset_.fill(-1);
  values_.clear();
}

void StepSample::Grow(const Layout& layout) {
  if (layout == layout_) return;
  const StepSample before = *this;
  layout_ = layout;
  signals_.clear();
  offset_.fill(-1);
  values_.clear();
  for (const SignalId signal : before.signals_) {
    // Rows are only added behind, and a row keeps its length.
    std::ranges::copy(before.matrix(signal), Add(signal).begin());
  }
}

std::span<const float> StepSample::matrix(SignalId signal) const {
  const int64_t offset = offset_[index(signal)];
  if (offset < 0) return {};
  const MatrixShape shape = ShapeOf(*FindSignal(signal), layout_);
  return {values_.data() + offset, static_cast<size_t>(shape.size())};
}

std::span<float> StepSample::Add(SignalId signal) {
  const MatrixShape shape = ShapeOf(*FindSignal(signal), layout_);
  const size_t size = static_cast<size_t>(shape.size());
  int64_t& offset = offset_[index(signal)];
  if (offset < 0) {
    offset = static_cast<int64_t>(values_.size());
    values_.resize(values_.size() + size, NotMeasured());
    signals_.insert(std::upper_bound(signals_.begin(), signals_.end(), signal), signal);
  }
  return {values_.data() + offset, size};
}

float StepSample::scalar(SignalId signal) const {
  const auto values = matrix(signal);
  return values.empty() ? NotMeasured() : values[0];
}

float DeriveValue(const SignalInfo& signal, float numerator, float denominator) {
  if (IsNotMeasured(numerator) || IsNotMeasured(denominator)) return NotMeasured();
  if (denominator == 0) {
    const bool of_itself = signal.numerator == signal.denominator && signal.denominator_root;
    return of_itself ? 0.0f : NotMeasured();
  }
  if (signal.root) return std::sqrt(numerator / denominator);
  return signal.denominator_root ? numerator / std::sqrt(denominator) : numerator / denominator;
}

bool DeriveMatrix(const StepSample& sample, const SignalInfo& signal, std::vector<float>* out) {
  out->clear();
  if (!signal.derived) {
    const auto values = sample.matrix(signal.id);
    out->assign(values.begin(), values.end());
    return !values.empty();
  }
  const auto numerator = sample.matrix(signal.numerator);
  const auto denominator = sample.matrix(signal.denominator);
  if (numerator.empty() || denominator.empty()) return false;
  const MatrixShape top = ShapeOf(*FindSignal(signal.numerator), sample.layout());
  const MatrixShape bottom = ShapeOf(*FindSignal(signal.denominator), sample.layout());
  const MatrixShape shape = ShapeOf(signal, sample.layout());
  out->resize(static_cast<size_t>(shape.size()));
  if (numerator.size() == out->size() && denominator.size() == out->size()) {
    // The common case, without the divisions of the index below.
    for (size_t i = 0; i < out->size(); ++i) {
      (*out)[i] = DeriveValue(signal, numerator[i], denominator[i]);
    }
    return true;
  }
  for (int32_t layer = 0; layer < shape.layers; ++layer) {
    for (int32_t head = 0; head < shape.heads; ++head) {
      const auto pick = [&](std::span<const float> values, MatrixShape from) {
        return values[static_cast<size_t>(layer * from.heads + head * from.heads / shape.heads)];
      };
      (*out)[static_cast<size_t>(layer * shape.heads + head)] =
          DeriveValue(signal, pick(numerator, top), pick(denominator, bottom));
    }
  }
  return true;
}

}  // namespace bellwether::server
