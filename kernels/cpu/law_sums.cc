// One pass over the matrix, sums in double.  Units are some of the kept rows, or columns, so that
// each result is made by one thread in one order.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

#include "backends.h"
#include "cpu/element.h"
#include "cpu/parallel.h"
#include "law_sums_parts.h"

namespace bellwether::kernels::cpu {
namespace {

constexpr int64_t kTogether = 64;  // Results of a unit.
constexpr int64_t kLanes = 8;      // Independent chains.

struct Lanes {
  double sum[kLanes] = {}, abs_sum[kLanes] = {}, ulp_sum[kLanes] = {}, variance[kLanes] = {};
  int64_t low_bits[kLanes] = {};
};

inline void Add(Lanes& lanes, int64_t lane, float x, UlpOf of) {
  const auto bits = std::bit_cast<uint32_t>(x);
  const auto exponent = std::max(static_cast<int32_t>((bits >> 23) & 0xff), of.least) + of.shift;
  const double ulp = std::bit_cast<double>(static_cast<uint64_t>(exponent) << 52);
  const auto value = static_cast<double>(x);
  lanes.sum[lane] += value;
  lanes.abs_sum[lane] += std::fabs(value);
  lanes.ulp_sum[lane] += ulp;
  lanes.variance[lane] += ulp * ulp;
  lanes.low_bits[lane] += (bits & 0xffff) != 0;
}

void Store(const Lanes& lanes, int64_t from, int64_t count, double* out) {
  for (int64_t lane = from; lane < from + count; ++lane) {
    out[kLawSumSum] += lanes.sum[lane];
    out[kLawSumAbsSum] += lanes.abs_sum[lane];
    out[kLawSumUlpSum] += lanes.ulp_sum[lane];
    out[kLawSumVariance] += lanes.variance[lane] / 12;
    out[kLawSumLowBits] += static_cast<double>(lanes.low_bits[lane]);
  }
}

// Of one result.
template <typename Element>
void Along(const LawSumsParams& p, int64_t i, UlpOf of) {
  const Element* const x = static_cast<const Element*>(p.data) + i * p.kept_stride;
  Lanes lanes;
  int64_t j = 0;
  if (p.summed_stride == 1) {
    for (; j + kLanes <= p.summed; j += kLanes) {
      for (int64_t lane = 0; lane < kLanes; ++lane) Add(lanes, lane, ToFloat(x[j + lane]), of);
    }
  }
  for (; j < p.summed; ++j) Add(lanes, j % kLanes, ToFloat(x[j * p.summed_stride]), of);
  Store(lanes, 0, kLanes, p.out + i * kLawSumStatCount);
}

// Of results that lie beside each other.
template <typename Element>
void Across(const LawSumsParams& p, int64_t first, int64_t count, UlpOf of) {
  const Element* const x = static_cast<const Element*>(p.data) + first;
  Lanes lanes[kTogether / kLanes];
  for (int64_t j = 0; j < p.summed; ++j) {
    const Element* const row = x + j * p.summed_stride;
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
      for (int64_t lane = 0; lane < kLanes; ++lane) Add(lanes[i / kLanes], lane, ToFloat(row[i + lane]), of);
    }
    for (; i < count; ++i) Add(lanes[i / kLanes], i % kLanes, ToFloat(row[i]), of);
  }
  for (int64_t i = 0; i < count; ++i) {
    Store(lanes[i / kLanes], i % kLanes, 1, p.out + (first + i) * kLawSumStatCount);
  }
}

}  // namespace

Status LawSums(const LawSumsParams& p, uint32_t threads) {
  const UlpOf of = UlpOfType(p.dtype);
  const bool across = p.kept_stride == 1 && p.summed_stride != 1;
  const int64_t units = (p.kept + kTogether - 1) / kTogether;
  const double elements = static_cast<double>(p.kept) * static_cast<double>(p.summed);
  ParallelFor(units, UsefulThreads(threads, units, elements), [&](int64_t unit) {
    const int64_t first = unit * kTogether, count = std::min(kTogether, p.kept - first);
    WithElement(p.dtype, [&]<typename Element>(const Element*) {
      if (across) return Across<Element>(p, first, count, of);
      for (int64_t i = first; i < first + count; ++i) Along<Element>(p, i, of);
    });
  });
  return Status::kOk;
}

}  // namespace bellwether::kernels::cpu
