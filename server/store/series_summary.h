// series_summary.h: the rows that a long range is drawn from: extremes and mean
// of each series, a span of steps at a time.
//
// Beside every chunk stands a row with a summary for each 256 of its steps.  A
// derived signal has no chunks, and has such rows all the same: the extremes of
// a ratio do not follow from those of its parts.
//
// Pure; any thread.  A SpanBuilder is not thread-safe.

#ifndef BELLWETHER_SERVER_STORE_SERIES_SUMMARY_H_
#define BELLWETHER_SERVER_STORE_SERIES_SUMMARY_H_

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "server/store/chunk.h"
#include "server/util/byte_io.h"

namespace bellwether::server {

inline constexpr uint32_t kSpanSteps = 256;

// One series over a span.  Cells that were not measured count nowhere; a
// measured NaN counts in `nans` and in nothing else.
struct SeriesSummary {
  float min = 0, mean = 0, max = 0;  // Over the numbers; NaN if there are none.
  uint16_t numbers = 0;
  uint16_t nans = 0;
};
struct SpanSummary {
  int64_t first_step = 0, last_step = 0;
  uint32_t steps = 0;                 // 1..kSpanSteps
  std::vector<SeriesSummary> series;  // [cells]
};

// Builds the summary of one span step by step.
class SpanBuilder {
 public:
  explicit SpanBuilder(size_t cells);

  // REQUIRES: steps() < kSpanSteps, `step` above the last one.
  void Add(int64_t step, const float* values);
  uint32_t steps() const { return steps_; }
  int64_t first_step() const { return first_step_; }
  // REQUIRES: steps() > 0.  Starts afresh.
  SpanSummary Take();

  // What was added since the last Take().
  void Save(ByteWriter* out) const;
  // False: damaged, or of another number of cells.
  bool Restore(ByteReader* in);
  size_t memory_bytes() const;

 private:
  void Clear();

  uint32_t steps_ = 0;
  int64_t first_step_ = 0, last_step_ = 0;
  std::vector<float> min_, max_;
  std::vector<double> sum_;
  std::vector<uint16_t> numbers_, nans_;
};

// One summary for each kSpanSteps of the steps, the last one of the rest.
std::vector<SpanSummary> Summarize(const ChunkInput& input);

// Cells [cell_begin, cell_end) of the spans as a row.
std::string EncodeSpans(std::span<const SpanSummary> spans, size_t cell_begin, size_t cell_end);

// One series over a span, as stored.
struct SummarizedSpan {
  int64_t first_step = 0, last_step = 0;
  uint32_t steps = 0;
  SeriesSummary summary;
  // The row's writer kept nothing between last_step and here; the reader knows it.
  int64_t next_step = 0;
};
// Appends the row's spans of one of its cells, next_step just behind each; none
// if the row has no such cell.  DATA_LOSS: not a row of EncodeSpans.
absl::Status DecodeSpans(std::string_view bytes, size_t cell, std::vector<SummarizedSpan>* spans);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_STORE_SERIES_SUMMARY_H_
