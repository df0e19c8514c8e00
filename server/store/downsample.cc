#include "server/store/downsample.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace bellwether::server {
namespace {

struct Bucket {
  int64_t step = 0;
  uint64_t values = 0, numbers = 0;
  float min = std::numeric_limits<float>::infinity(), max = -std::numeric_limits<float>::infinity();
  double sum = 0;

  void Add(const SeriesSummary& s) {
    values += uint64_t{s.numbers} + s.nans;
    if (s.numbers == 0) return;
    numbers += s.numbers;
    min = std::min(min, s.min);
    max = std::max(max, s.max);
    sum += static_cast<double>(s.mean) * s.numbers;
  }
  void Add(float value) {
    ++values;
    if (std::isnan(value)) return;
    ++numbers;
    min = std::min(min, value);
    max = std::max(max, value);
    sum += value;
  }
};

uint64_t Values(const SummarizedSpan& span) { return uint64_t{span.summary.numbers} + span.summary.nans; }

}  // namespace

SeriesPoints Downsample(const std::vector<SeriesPoint>& points, const std::vector<SummarizedSpan>& spans,
                        size_t points_max) {
  SeriesPoints out;
  for (const SeriesPoint& point : points) out.values += IsNotMeasured(point.value) ? 0 : 1;
  for (const SummarizedSpan& span : spans) out.values += Values(span);
  if (points_max == 0 || out.values == 0) return out;
  out.downsampled = out.values > points_max || !spans.empty();

  uint64_t seen = 0;
  Bucket bucket;
  const auto flush = [&] {
    if (bucket.values == 0) return;
    const bool any = bucket.numbers > 0;
    const float nan = std::numeric_limits<float>::quiet_NaN();
    out.step.push_back(bucket.step);
    out.min.push_back(any ? bucket.min : nan);
    out.mean.push_back(any ? static_cast<float>(bucket.sum / static_cast<double>(bucket.numbers)) : nan);
    out.max.push_back(any ? bucket.max : nan);
    bucket = Bucket();
  };
  // Bucket i ends where (i + 1) / points_max of all values are reached: never
  // more than points_max of them.
  const auto begin = [&](int64_t step) {
    if (bucket.values == 0) bucket.step = step;
  };
  const auto end = [&](uint64_t added) {
    const uint64_t before = seen;
    seen += added;
    const auto index = [&](uint64_t n) { return n * points_max / out.values; };
    if (out.values <= points_max || index(seen) > index(before)) flush();
  };
  size_t p = 0, s = 0;
  while (p < points.size() || s < spans.size()) {
    if (s == spans.size() || (p < points.size() && points[p].step < spans[s].first_step)) {
      const SeriesPoint& point = points[p++];
      if (IsNotMeasured(point.value)) continue;
      begin(point.step);
      bucket.Add(point.value);
      end(1);
    } else {
      const SummarizedSpan& span = spans[s++];
      if (Values(span) == 0) continue;
      begin(span.first_step);
      bucket.Add(span.summary);
      end(Values(span));
    }
  }
  flush();
  return out;
}

}  // namespace bellwether::server
