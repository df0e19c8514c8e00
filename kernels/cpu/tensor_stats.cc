// Chunks are the units: each turns some elements at a time into floats, and adds them in lanes of
// double.  The chunks of a tensor are then added in their order.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "backends.h"
#include "cpu/buffer.h"
#include "cpu/element.h"
#include "cpu/parallel.h"
#include "error.h"
#include "tensor_stats_parts.h"

namespace bellwether::kernels::cpu {
namespace {

constexpr int64_t kAtOnce = 512;  // Elements as floats.
constexpr int kLanes = 8;         // Independent chains.

// The second moment behind the step, as a v + b g^2, at least eps^2.
struct Second {
  double of_v = 0, of_square = 0, least = 0;
};

Second SecondOf(const TensorOfStep& t) {
  const double step = t.steps + (t.steps_at != nullptr ? static_cast<double>(*t.steps_at) : 0.0);
  const double correction = 1 - std::pow(t.beta2, step);
  return {t.beta2 / correction, (1 - t.beta2) / correction, t.eps * t.eps};
}

struct Lanes {
  double of[kLanes] = {};

  double Sum() const {
    double sum = 0;
    for (const double lane : of) sum += lane;
    return sum;
  }
  double Max() const { return *std::max_element(of, of + kLanes); }
};

struct Floats {
  float at[kAtOnce];

  void Read(const TensorPart& part, int64_t from, int64_t count) {
    WithElement(part.dtype, [&]<typename Element>(const Element*) {
      const Element* const x = static_cast<const Element*>(part.data) + from;
      for (int64_t i = 0; i < count; ++i) at[i] = ToFloat(x[i]);
    });
    for (int64_t i = count; i < (count + kLanes - 1) / kLanes * kLanes; ++i) at[i] = 0;  // Adds nothing.
  }
};

struct OfOne {
  Lanes sumsq, largest, nonfinite, zeros;

  void Add(const float* x, int64_t count, double factor) {
    for (int64_t i = 0; i < count; i += kLanes) {
      for (int lane = 0; lane < kLanes; ++lane) {
        const bool finite = std::fabs(x[i + lane]) < INFINITY;  // No NaN is.
        const double value = finite ? std::fabs(static_cast<double>(x[i + lane])) * factor : 0;
        sumsq.of[lane] += value * value;
        largest.of[lane] = std::max(largest.of[lane], value);
        nonfinite.of[lane] += finite ? 0 : 1;
        zeros.of[lane] += x[i + lane] == 0 ? 1 : 0;
      }
    }
  }
};

struct Chunk {
  OfOne grad, weight;
  Lanes change, changed, lag, dot, moment;

  void AddChange(const float* w, const float* u, int64_t count) {
    for (int64_t i = 0; i < count; i += kLanes) {
      for (int lane = 0; lane < kLanes; ++lane) {
        const float a = w[i + lane], b = u[i + lane];
        const bool finite = std::fabs(a) < INFINITY && std::fabs(b) < INFINITY;
        const double by = finite ? static_cast<double>(a) - static_cast<double>(b) : 0;
        change.of[lane] += by * by;
        changed.of[lane] += a != b && !(std::isnan(a) && std::isnan(b)) ? 1 : 0;
      }
    }
  }

  void AddLag(const float* g, const float* v, int64_t count, double factor, const Second& second) {
    for (int64_t i = 0; i < count; i += kLanes) {
      for (int lane = 0; lane < kLanes; ++lane) {
        const bool finite = std::fabs(g[i + lane]) < INFINITY && std::fabs(v[i + lane]) < INFINITY;
        const double value = finite ? static_cast<double>(g[i + lane]) * factor : 0;
        const double square = value * value;
        const double expected = second.of_v * static_cast<double>(finite ? v[i + lane] : 0) + second.of_square * square;
        lag.of[lane] += square > 0 ? square / std::max(expected, second.least) : 0;
      }
    }
  }

  void AddMoment(const float* m, int64_t count) {
    for (int64_t i = 0; i < count; i += kLanes) {
      for (int lane = 0; lane < kLanes; ++lane) {
        const double value = std::fabs(m[i + lane]) < INFINITY ? static_cast<double>(m[i + lane]) : 0;
        moment.of[lane] += value * value;
      }
    }
  }

  void AddDot(const float* g, const float* m, int64_t count, double factor) {
    for (int64_t i = 0; i < count; i += kLanes) {
      for (int lane = 0; lane < kLanes; ++lane) {
        const bool finite = std::fabs(g[i + lane]) < INFINITY && std::fabs(m[i + lane]) < INFINITY;
        dot.of[lane] += finite ? static_cast<double>(g[i + lane]) * factor * static_cast<double>(m[i + lane]) : 0;
      }
    }
  }
};

template <typename Bits>
uint64_t SumOfBits(const void* data, int64_t from, int64_t to) {
  const auto* const x = static_cast<const unsigned char*>(data);
  uint64_t sum = 0;
  for (int64_t i = from; i < to; ++i) {
    Bits bits;
    std::memcpy(&bits, x + i * static_cast<int64_t>(sizeof(Bits)), sizeof(Bits));
    sum += uint64_t{bits} * BitsWeight(i);
  }
  return sum;
}

// Elements [from, to) of a tensor; out [kTensorStatCount].
void StatsOfChunk(const TensorOfStep& t, int64_t from, int64_t to, double scale, double* out) {
  Chunk chunk;
  Floats g, w, u, m, v;
  const double factor = 1 / scale;
  const bool lags = t.grad.data != nullptr && t.second.data != nullptr;
  const Second second = lags ? SecondOf(t) : Second{};
  for (int64_t at = from; at < to; at += kAtOnce) {
    const int64_t count = std::min(kAtOnce, to - at);
    if (t.grad.data != nullptr) {
      g.Read(t.grad, at, count);
      chunk.grad.Add(g.at, count, factor);
    }
    if (t.weight.data != nullptr) {
      w.Read(t.weight, at, count);
      chunk.weight.Add(w.at, count, 1);
      if (t.before.data != nullptr) {
        u.Read(t.before, at, count);
        chunk.AddChange(w.at, u.at, count);
      }
    }
    if (t.moment.data != nullptr) {
      m.Read(t.moment, at, count);
      chunk.AddMoment(m.at, count);
      if (t.grad.data != nullptr) chunk.AddDot(g.at, m.at, count, factor);
    }
    if (lags) {
      v.Read(t.second, at, count);
      chunk.AddLag(g.at, v.at, count, factor, second);
    }
  }
  // The last lanes were filled up with zeros.
  const auto filled = static_cast<double>((kLanes - (to - from) % kLanes) % kLanes);
  out[kTensorElements] = static_cast<double>(to - from);
  out[kTensorGradSumsq] = chunk.grad.sumsq.Sum();
  out[kTensorGradMax] = chunk.grad.largest.Max();
  out[kTensorGradNonfinite] = chunk.grad.nonfinite.Sum();
  out[kTensorGradZeros] = t.grad.data != nullptr ? chunk.grad.zeros.Sum() - filled : 0;
  out[kTensorWeightSumsq] = chunk.weight.sumsq.Sum();
  out[kTensorWeightMax] = chunk.weight.largest.Max();
  out[kTensorWeightNonfinite] = chunk.weight.nonfinite.Sum();
  uint64_t bits = 0;
  if (t.weight.data != nullptr) {
    bits = t.weight.dtype == DType::kFloat32 ? SumOfBits<uint32_t>(t.weight.data, from, to)
                                             : SumOfBits<uint16_t>(t.weight.data, from, to);
  }
  out[kTensorWeightBits] = static_cast<double>(bits & kBitsMask);
  out[kTensorChangeSumsq] = chunk.change.Sum();
  out[kTensorChanged] = chunk.changed.Sum();
  out[kTensorLagSum] = chunk.lag.Sum();
  out[kTensorDot] = chunk.dot.Sum();
  out[kTensorMomentSumsq] = chunk.moment.Sum();
}

void Join(const double* chunks, int64_t count, double* out) {
  uint64_t bits = 0;
  std::fill(out, out + kTensorStatCount, 0.0);
  for (int64_t i = 0; i < count; ++i) {
    const double* const of = chunks + i * kTensorStatCount;
    for (int stat = 0; stat < kTensorStatCount; ++stat) {
      const bool largest = stat == kTensorGradMax || stat == kTensorWeightMax;
      out[stat] = largest ? std::max(out[stat], of[stat]) : out[stat] + of[stat];
    }
    bits += static_cast<uint64_t>(of[kTensorWeightBits]);
  }
  out[kTensorWeightBits] = static_cast<double>(bits & kBitsMask);
}

}  // namespace

Status TensorStats(const TensorStatsParams& p, uint32_t threads) {
  int64_t chunks = 0;
  double elements = 0;
  for (int64_t i = 0; i < p.count; ++i) {
    chunks += ChunksOf(p.tensors[i].elements);
    elements += static_cast<double>(p.tensors[i].elements);
  }
  const Buffer partial(chunks * kTensorStatCount);
  const Buffer places(chunks);  // Of each chunk: its tensor.
  if (partial.data() == nullptr || places.data() == nullptr) {
    return Fail(Status::kDeviceError, "out of memory for the sums of %lld chunks", static_cast<long long>(chunks));
  }
  auto* const tensor_of = reinterpret_cast<int64_t*>(places.data());
  for (int64_t i = 0, chunk = 0; i < p.count; ++i) {
    for (const int64_t end = chunk + ChunksOf(p.tensors[i].elements); chunk < end; ++chunk) tensor_of[chunk] = i;
  }
  const double scale = p.scale != nullptr ? static_cast<double>(*p.scale) : 1.0;
  ParallelFor(chunks, UsefulThreads(threads, chunks, elements), [&](int64_t chunk) {
    const int64_t first = std::lower_bound(tensor_of, tensor_of + chunk, tensor_of[chunk]) - tensor_of;
    const TensorOfStep& t = p.tensors[tensor_of[chunk]];
    const int64_t from = (chunk - first) * kTensorChunk;
    StatsOfChunk(t, from, std::min(t.elements, from + kTensorChunk), scale, partial.data() + chunk * kTensorStatCount);
  });
  for (int64_t i = 0, chunk = 0; i < p.count; ++i) {
    const int64_t count = ChunksOf(p.tensors[i].elements);
    Join(partial.data() + chunk * kTensorStatCount, count, p.out + i * kTensorStatCount);
    chunk += count;
  }
  return Status::kOk;
}

}  // namespace bellwether::kernels::cpu
