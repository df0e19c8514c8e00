// One pass over dK, sums in double.  Units are (batch, head); each head's sums
// are added in batch order, whatever the threads.

#include <algorithm>
#include <cmath>
#include <new>
#include <vector>

#include "backends.h"
#include "cpu/element.h"
#include "cpu/parallel.h"
#include "error.h"

namespace bellwether::kernels::cpu {
namespace {

struct Leak {
  double leak = 0;
  double gradient = 0;
};

template <typename Element>
Leak MeasureSequence(const KeyLeakParams& p, int64_t batch, int64_t head) {
  double sum[kHeadDimMax];
  std::fill(sum, sum + p.head_dim, 0.0);
  Leak result;
  for (int64_t j = 0; j < p.k_len; ++j) {
    const Element* row = RowOf<Element>(p.d_k, batch, head, j);
    constexpr int64_t kLanes = 8;  // Independent chains: the squares' sum is no bottleneck.
    double squares[kLanes] = {};
    int64_t c = 0;
    for (; c + kLanes <= p.head_dim; c += kLanes) {
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        const double x = static_cast<double>(ToFloat(row[c + lane]));
        sum[c + lane] += x;
        squares[lane] += x * x;
      }
    }
    for (; c < p.head_dim; ++c) {
      const double x = static_cast<double>(ToFloat(row[c]));
      sum[c] += x;
      squares[0] += x * x;
    }
    for (int64_t lane = 1; lane < kLanes; ++lane) squares[0] += squares[lane];
    result.gradient += std::sqrt(squares[0]);
  }
  double squares = 0;
  for (int64_t c = 0; c < p.head_dim; ++c) squares += sum[c] * sum[c];
  result.leak = std::sqrt(squares);
  return result;
}

}  // namespace

Status KeyLeak(const KeyLeakParams& p, uint32_t threads) {
  const int64_t units = p.batch * p.kv_heads;
  if (units == 0 || p.k_len == 0) return Status::kOk;
  std::vector<Leak> leaks;
  try {
    leaks.resize(static_cast<size_t>(units));
  } catch (const std::bad_alloc&) {
    return Fail(Status::kDeviceError, "out of memory for %lld sequences", static_cast<long long>(units));
  }
  const double elements = static_cast<double>(units * p.k_len) * static_cast<double>(p.head_dim);
  WithElement(p.dtype, [&]<typename Element>(const Element*) {
    ParallelFor(units, UsefulThreads(threads, units, elements), [&](int64_t unit) {
      leaks[static_cast<size_t>(unit)] = MeasureSequence<Element>(p, unit / p.kv_heads, unit % p.kv_heads);
    });
  });
  for (int64_t head = 0; head < p.kv_heads; ++head) {
    Leak total;
    for (int64_t batch = 0; batch < p.batch; ++batch) {
      const Leak& leak = leaks[static_cast<size_t>(batch * p.kv_heads + head)];
      total.leak += leak.leak;
      total.gradient += leak.gradient;
    }
    p.leak_sum[head] = static_cast<float>(static_cast<double>(p.leak_sum[head]) + total.leak);
    p.gradient_sum[head] = static_cast<float>(static_cast<double>(p.gradient_sum[head]) + total.gradient);
  }
  return Status::kOk;
}

}  // namespace bellwether::kernels::cpu
