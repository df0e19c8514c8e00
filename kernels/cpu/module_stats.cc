// Parts of the rows are the units: each adds its rows, some elements at a time as floats, to sums of its
// channels.  The parts are then added in their order.

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "backends.h"
#include "cpu/buffer.h"
#include "cpu/element.h"
#include "cpu/parallel.h"
#include "error.h"
#include "module_stats_parts.h"

namespace bellwether::kernels::cpu {
namespace {

constexpr int64_t kAtOnce = 512;  // Elements as floats.
constexpr int kLanes = 8;         // Independent chains.

struct Totals {
  double largest[kLanes] = {}, nonfinite[kLanes] = {}, fourths[kLanes] = {};

  // `sums`: of squares of these channels.
  void Add(const float* x, int64_t count, double* sums) {
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
      for (int lane = 0; lane < kLanes; ++lane) AddOne(x[i + lane], lane, sums + i + lane);
    }
    for (int lane = 0; i < count; ++i, ++lane) AddOne(x[i], lane, sums + i);
  }

  void Store(double* out) const {
    out[kModuleTotalLargest] = *std::max_element(largest, largest + kLanes);
    out[kModuleTotalNonfinite] = out[kModuleTotalFourths] = 0;
    for (int lane = 0; lane < kLanes; ++lane) {
      out[kModuleTotalNonfinite] += nonfinite[lane];
      out[kModuleTotalFourths] += fourths[lane];
    }
  }

 private:
  void AddOne(float x, int lane, double* sum) {
    const bool finite = std::fabs(x) < INFINITY;  // No NaN is.
    const double value = finite ? std::fabs(static_cast<double>(x)) : 0, square = value * value;
    *sum += square;
    largest[lane] = std::max(largest[lane], value);
    nonfinite[lane] += finite ? 0 : 1;
    fourths[lane] += square * square;
  }
};

// Rows from..to-1.
template <typename Element>
void AddRows(const ModuleStatsParams& p, int64_t from, int64_t to, double* sums, double* totals) {
  std::fill(sums, sums + p.channels, 0.0);
  Totals of;
  float at[kAtOnce];
  for (int64_t row = from; row < to; ++row) {
    const Element* const x = static_cast<const Element*>(p.data) + row * p.row_stride;
    for (int64_t first = 0; first < p.channels; first += kAtOnce) {
      const int64_t count = std::min(kAtOnce, p.channels - first);
      for (int64_t i = 0; i < count; ++i) at[i] = ToFloat(x[first + i]);
      of.Add(at, count, sums + first);
    }
  }
  of.Store(totals);
}

}  // namespace

Status ModuleStats(const ModuleStatsParams& p, uint32_t threads) {
  const ModuleParts parts = PartsOfModule(p.rows, p.channels);
  const Buffer memory(parts.parts * (p.channels + kModuleTotalCount));
  if (memory.data() == nullptr) {
    return Fail(Status::kDeviceError, "out of memory for the sums of %lld channels",
                static_cast<long long>(p.channels));
  }
  double* const sums = memory.data();
  double* const totals = sums + parts.parts * p.channels;
  const double elements = static_cast<double>(p.rows) * static_cast<double>(p.channels);
  ParallelFor(parts.parts, UsefulThreads(threads, parts.parts, elements), [&](int64_t part) {
    const int64_t from = part * parts.rows, to = std::min(p.rows, from + parts.rows);
    WithElement(p.dtype, [&]<typename Element>(const Element*) {
      AddRows<Element>(p, from, to, sums + part * p.channels, totals + part * kModuleTotalCount);
    });
  });
  double squares = 0, top = 0;
  int64_t top_at = 0;
  for (int64_t channel = 0; channel < p.channels; ++channel) {
    double sum = 0;
    for (int64_t part = 0; part < parts.parts; ++part) sum += sums[part * p.channels + channel];
    squares += sum;
    if (p.channel_sumsq == nullptr) continue;
    const double all = p.channel_sumsq[channel] += sum;
    if (all > top) top = all, top_at = channel;
  }
  p.out[kModuleElements] += elements;
  p.out[kModuleSumsq] += squares;
  for (int64_t part = 0; part < parts.parts; ++part) {
    const double* const of = totals + part * kModuleTotalCount;
    p.out[kModuleLargest] = std::max(p.out[kModuleLargest], of[kModuleTotalLargest]);
    p.out[kModuleNonfinite] += of[kModuleTotalNonfinite];
    p.out[kModuleFourths] += of[kModuleTotalFourths];
  }
  p.out[kModuleTopSumsq] = top;
  p.out[kModuleTop] = static_cast<double>(top_at);
  return Status::kOk;
}

}  // namespace bellwether::kernels::cpu
