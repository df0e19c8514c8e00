#include "server/store/series_summary.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "server/model/step_sample.h"

namespace bellwether::server {
namespace {

constexpr uint8_t kSummaryVersion = 1;
// Every cell of the span was measured at every step, and as a number: counts
// are left out.
constexpr uint8_t kAllNumbers = 1;
constexpr size_t kShortBytes = 3 * sizeof(float), kLongBytes = kShortBytes + 2 * sizeof(uint16_t);

absl::Status DamagedSummary() { return absl::DataLossError("stored summary: damaged"); }

template <typename T>
void PutAll(const std::vector<T>& values, ByteWriter* out) {
  for (const T value : values) out->Put(value);
}
template <typename T>
void GetAll(ByteReader* in, std::vector<T>* values) {
  for (T& value : *values) value = in->Get<T>();
}

}  // namespace

SpanBuilder::SpanBuilder(size_t cells) : min_(cells), max_(cells), sum_(cells), numbers_(cells), nans_(cells) {
  Clear();
}

void SpanBuilder::Clear() {
  steps_ = 0;
  std::fill(min_.begin(), min_.end(), std::numeric_limits<float>::infinity());
  std::fill(max_.begin(), max_.end(), -std::numeric_limits<float>::infinity());
  std::fill(sum_.begin(), sum_.end(), 0.0);
  std::fill(numbers_.begin(), numbers_.end(), uint16_t{0});
  std::fill(nans_.begin(), nans_.end(), uint16_t{0});
}

// Without branches: it runs over every derived value of every step.
void SpanBuilder::Add(int64_t step, const float* values) {
  if (steps_++ == 0) first_step_ = step;
  last_step_ = step;
  const size_t cells = min_.size();
  for (size_t c = 0; c < cells; ++c) {
    const float value = values[c];
    min_[c] = value < min_[c] ? value : min_[c];  // False for a NaN.
    max_[c] = value > max_[c] ? value : max_[c];
  }
  for (size_t c = 0; c < cells; ++c) sum_[c] += std::isnan(values[c]) ? 0.0 : static_cast<double>(values[c]);
  for (size_t c = 0; c < cells; ++c) {
    const auto number = static_cast<uint16_t>(!std::isnan(values[c]));
    numbers_[c] = static_cast<uint16_t>(numbers_[c] + number);
    nans_[c] = static_cast<uint16_t>(nans_[c] + (1 - number - static_cast<uint16_t>(IsNotMeasured(values[c]))));
  }
}

SpanSummary SpanBuilder::Take() {
  SpanSummary summary;
  summary.first_step = first_step_;
  summary.last_step = last_step_;
  summary.steps = steps_;
  summary.series.resize(min_.size());
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  for (size_t c = 0; c < min_.size(); ++c) {
    const bool any = numbers_[c] > 0;
    summary.series[c] = {.min = any ? min_[c] : kNan,
                         .mean = any ? static_cast<float>(sum_[c] / numbers_[c]) : kNan,
                         .max = any ? max_[c] : kNan,
                         .numbers = numbers_[c],
                         .nans = nans_[c]};
  }
  Clear();
  return summary;
}

void SpanBuilder::Save(ByteWriter* out) const {
  out->PutVarint(min_.size());
  out->Put(steps_);
  if (steps_ == 0) return;
  out->Put(first_step_);
  out->Put(last_step_);
  PutAll(min_, out);
  PutAll(max_, out);
  PutAll(sum_, out);
  PutAll(numbers_, out);
  PutAll(nans_, out);
}

bool SpanBuilder::Restore(ByteReader* in) {
  Clear();
  if (in->GetVarint() != min_.size()) return false;
  const auto steps = in->Get<uint32_t>();
  if (!in->ok() || steps >= kSpanSteps) return false;
  if (steps == 0) return true;
  steps_ = steps;
  first_step_ = in->Get<int64_t>();
  last_step_ = in->Get<int64_t>();
  GetAll(in, &min_);
  GetAll(in, &max_);
  GetAll(in, &sum_);
  GetAll(in, &numbers_);
  GetAll(in, &nans_);
  return in->ok();
}

size_t SpanBuilder::memory_bytes() const {
  return min_.capacity() * (2 * sizeof(float) + sizeof(double) + 2 * sizeof(uint16_t));
}

std::vector<SpanSummary> Summarize(const ChunkInput& input) {
  std::vector<SpanSummary> spans;
  SpanBuilder builder(input.cells);
  for (size_t t = 0; t < input.steps.size(); ++t) {
    builder.Add(input.steps[t], input.values + t * input.stride);
    if (builder.steps() == kSpanSteps || t + 1 == input.steps.size()) spans.push_back(builder.Take());
  }
  return spans;
}

std::string EncodeSpans(std::span<const SpanSummary> spans, size_t cell_begin, size_t cell_end) {
  std::string bytes;
  ByteWriter out(&bytes);
  out.Put(kSummaryVersion);
  out.PutVarint(spans.size());
  out.PutVarint(cell_end - cell_begin);
  for (const SpanSummary& span : spans) {
    const auto first = span.series.begin() + static_cast<ptrdiff_t>(cell_begin);
    const auto last = span.series.begin() + static_cast<ptrdiff_t>(cell_end);
    const bool all = std::all_of(first, last, [&](const SeriesSummary& s) { return s.numbers == span.steps; });
    out.PutSigned(span.first_step);
    out.PutVarint(static_cast<uint64_t>(span.last_step) - static_cast<uint64_t>(span.first_step));
    out.PutVarint(span.steps);
    out.Put(all ? kAllNumbers : uint8_t{0});
    for (auto s = first; s != last; ++s) {
      out.Put(s->min);
      out.Put(s->mean);
      out.Put(s->max);
      if (all) continue;
      out.Put(s->numbers);
      out.Put(s->nans);
    }
  }
  return bytes;
}

absl::Status DecodeSpans(std::string_view bytes, size_t cell, std::vector<SummarizedSpan>* spans) {
  ByteReader in(bytes);
  if (in.Get<uint8_t>() != kSummaryVersion) return DamagedSummary();
  const size_t count = in.GetCount(4);
  const size_t cells = in.GetCount(kShortBytes);
  for (size_t i = 0; i < count; ++i) {
    SummarizedSpan span;
    span.first_step = in.GetSigned();
    const uint64_t length = in.GetVarint();
    span.last_step = static_cast<int64_t>(static_cast<uint64_t>(span.first_step) + length);
    span.next_step = span.last_step == INT64_MAX ? INT64_MAX : span.last_step + 1;
    span.steps = static_cast<uint32_t>(in.GetVarint());
    const bool all = (in.Get<uint8_t>() & kAllNumbers) != 0;
    const std::string_view records = in.GetRaw(cells * (all ? kShortBytes : kLongBytes));
    if (!in.ok() || span.last_step < span.first_step || span.steps < 1 || span.steps > kSpanSteps)
      return DamagedSummary();
    if (cell >= cells) continue;
    ByteReader record(records.substr(cell * (all ? kShortBytes : kLongBytes)));
    span.summary.min = record.Get<float>();
    span.summary.mean = record.Get<float>();
    span.summary.max = record.Get<float>();
    span.summary.numbers = all ? static_cast<uint16_t>(span.steps) : record.Get<uint16_t>();
    span.summary.nans = all ? uint16_t{0} : record.Get<uint16_t>();
    spans->push_back(span);
  }
  return in.done() ? absl::OkStatus() : DamagedSummary();
}

}  // namespace bellwether::server
