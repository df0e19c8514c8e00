// naive_probe.h: the probe's definitions once more, independently of the
// library: predicates instead of ranges, counts instead of the two largest, an
// explicit covariance.  Operands are doubles that the element type represents.

#ifndef BELLWETHER_TESTS_KERNELS_NAIVE_PROBE_H_
#define BELLWETHER_TESTS_KERNELS_NAIVE_PROBE_H_

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "bellwether/kernels/probe.h"

namespace bellwether::kernels::testing {

inline uint16_t RoundBf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  if (std::isnan(x)) return 0x7fc0;
  const uint32_t low = bits & 0xffff, high = bits >> 16;
  return static_cast<uint16_t>(low > 0x8000 || (low == 0x8000 && (high & 1)) ? high + 1 : high);
}

inline float FromBf16(uint16_t x) {
  const uint32_t bits = uint32_t{x} << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

inline float FromFp16(uint16_t x) {
  const int exponent = (x >> 10) & 31, fraction = x & 1023;
  float value = exponent == 31  ? (fraction ? NAN : INFINITY)
                : exponent == 0 ? std::ldexp(static_cast<float>(fraction), -24)
                                : std::ldexp(static_cast<float>(1024 + fraction), exponent - 25);
  return x & 0x8000 ? -value : value;
}

// The float16 nearest to x, by search: half the encodings are ascending.
inline uint16_t RoundFp16(float x) {
  if (std::isnan(x)) return 0x7e00;
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  const double magnitude = std::fabs(static_cast<double>(x));
  if (magnitude >= 65520) return sign | 0x7c00;
  uint16_t low = 0, high = 0x7bff;
  while (low < high) {  // Largest encoding <= magnitude.
    const uint16_t middle = static_cast<uint16_t>((low + high + 1) / 2);
    if (static_cast<double>(FromFp16(middle)) <= magnitude)
      low = middle;
    else
      high = static_cast<uint16_t>(middle - 1);
  }
  if (low == 0x7bff) return sign | low;
  const double below = magnitude - static_cast<double>(FromFp16(low));
  const double above = static_cast<double>(FromFp16(static_cast<uint16_t>(low + 1))) - magnitude;
  const bool up = above < below || (above == below && (low & 1));
  return static_cast<uint16_t>(sign | (up ? low + 1 : low));
}

// One operand: [batch][heads][tokens][channels] in memory of any layout.
struct Operand {
  Operand(DType type, int64_t batches, int64_t head_count, int64_t token_count, int64_t channel_count)
      : dtype(type),
        batch(batches),
        heads(head_count),
        tokens(token_count),
        channels(channel_count),
        token_stride(channel_count + 3),  // Padding that must not be read.
        head_stride(token_stride * token_count),
        batch_stride(head_stride * head_count) {
    // The layout of a transposed [batch][token][head][channel] every other time.
    if (tokens % 2 == 1) {
      head_stride = channels + 3;
      token_stride = head_stride * heads;
    }
    const auto size = static_cast<size_t>(batch * batch_stride);
    floats.assign(size, NAN);
    halves.assign(size, 0x7fff);
  }

  size_t At(int64_t b, int64_t h, int64_t t, int64_t c) const {
    return static_cast<size_t>(b * batch_stride + h * head_stride + t * token_stride + c);
  }

  double Get(int64_t b, int64_t h, int64_t t, int64_t c) const {
    const size_t at = At(b, h, t, c);
    if (dtype == DType::kBFloat16) return static_cast<double>(FromBf16(halves[at]));
    if (dtype == DType::kFloat16) return static_cast<double>(FromFp16(halves[at]));
    return static_cast<double>(floats[at]);
  }

  void Set(int64_t b, int64_t h, int64_t t, int64_t c, double x) {
    const size_t at = At(b, h, t, c);
    floats[at] = static_cast<float>(x);
    if (dtype == DType::kBFloat16) halves[at] = RoundBf16(floats[at]);
    if (dtype == DType::kFloat16) halves[at] = RoundFp16(floats[at]);
  }

  template <typename Function>
  void Fill(const Function& value) {
    for (int64_t b = 0; b < batch; ++b) {
      for (int64_t h = 0; h < heads; ++h) {
        for (int64_t t = 0; t < tokens; ++t) {
          for (int64_t c = 0; c < channels; ++c) Set(b, h, t, c, value(b, h, t, c));
        }
      }
    }
  }

  void FillNormal(std::mt19937& rng, double mean = 0, double deviation = 1) {
    std::normal_distribution<double> normal(mean, deviation);
    Fill([&](int64_t, int64_t, int64_t, int64_t) { return normal(rng); });
  }

  Tensor4 View() const {
    const void* data =
        dtype == DType::kFloat32 ? static_cast<const void*>(floats.data()) : static_cast<const void*>(halves.data());
    return {data, batch_stride, head_stride, token_stride};
  }

  DType dtype;
  int64_t batch, heads, tokens, channels, token_stride, head_stride, batch_stride;
  std::vector<float> floats;
  std::vector<uint16_t> halves;
};

// A mask's tensor; an extent of 1 broadcasts.  Every other one has its keys apart.
struct MaskTensor {
  MaskTensor(MaskDType type, int64_t batches, int64_t head_count, int64_t row_count, int64_t key_count)
      : dtype(type), batch(batches), heads(head_count), rows(row_count), keys(key_count) {
    const bool turned = (rows + keys) % 2 == 1;
    row_stride = turned ? 1 : keys + 1;
    key_stride = turned ? rows + 2 : 1;
    head_stride = (rows + 2) * (keys + 2);
    batch_stride = head_stride * heads;
    const auto size = static_cast<size_t>(batch * batch_stride);
    floats.assign(size, NAN);
    halves.assign(size, 0x7fff);
    bytes.assign(size, 1);
  }

  size_t At(int64_t b, int64_t h, int64_t r, int64_t j) const {
    return static_cast<size_t>((batch > 1 ? b * batch_stride : 0) + (heads > 1 ? h * head_stride : 0) +
                               (rows > 1 ? r * row_stride : 0) + (keys > 1 ? j * key_stride : 0));
  }

  void Set(int64_t b, int64_t h, int64_t r, int64_t j, double x) {
    const size_t at = At(b, h, r, j);
    floats[at] = static_cast<float>(x);
    halves[at] = dtype == MaskDType::kFloat16 ? RoundFp16(floats[at]) : RoundBf16(floats[at]);
    bytes[at] = x != 0 ? static_cast<uint8_t>(1 + at % 255) : 0;
  }

  // What is added to the score; -inf of hidden keys.
  double Bias(int64_t b, int64_t h, int64_t r, int64_t j) const {
    const size_t at = At(b, h, r, j);
    if (dtype == MaskDType::kBool) return bytes[at] != 0 ? 0 : -INFINITY;
    const float x = dtype == MaskDType::kFloat32    ? floats[at]
                    : dtype == MaskDType::kBFloat16 ? FromBf16(halves[at])
                                                    : FromFp16(halves[at]);
    const float hidden = dtype == MaskDType::kBFloat16 ? FromBf16(RoundBf16(-10000)) : -10000.0f;
    return x <= hidden ? -INFINITY : static_cast<double>(x);
  }

  ProbeMask View(bool by_sample) const {
    const void* data = dtype == MaskDType::kBool      ? static_cast<const void*>(bytes.data())
                       : dtype == MaskDType::kFloat32 ? static_cast<const void*>(floats.data())
                                                      : static_cast<const void*>(halves.data());
    return {data,
            dtype,
            by_sample,
            batch > 1 ? batch_stride : 0,
            heads > 1 ? head_stride : 0,
            rows > 1 ? row_stride : 0,
            keys > 1 ? key_stride : 0};
  }

  MaskDType dtype;
  int64_t batch, heads, rows, keys, batch_stride = 0, head_stride = 0, row_stride = 0, key_stride = 0;
  std::vector<float> floats;
  std::vector<uint16_t> halves;
  std::vector<uint8_t> bytes;
};

// A query row, and which of the sampled rows it is.
struct SampleRow {
  int64_t row, sample;
};

// An attention call with its statistics.
struct Case {
  Case(DType dtype, int64_t batch, int64_t heads, int64_t kv_heads, int64_t q_len, int64_t k_len, int64_t channels,
       int64_t v_channels)
      : q(dtype, batch, heads, q_len, channels),
        k(dtype, batch, kv_heads, k_len, channels),
        v(dtype, batch, kv_heads, k_len, v_channels),
        o(dtype, batch, heads, q_len, v_channels),
        d_o(dtype, batch, heads, q_len, v_channels) {
    p.dtype = dtype;
    p.batch = batch;
    p.heads = heads;
    p.kv_heads = kv_heads;
    p.q_len = q_len;
    p.k_len = k_len;
    p.head_dim = channels;
    p.v_dim = v_channels;
    p.scale = static_cast<float>(1 / std::sqrt(static_cast<double>(channels)));
  }

  // [batch or 1][q_len or 1][3]
  void SetRanges(std::vector<int32_t> values, int64_t batches, int64_t rows) {
    ranges = std::move(values);
    p.ranges = {ranges.data(), batches > 1 ? rows * 3 : 0, rows > 1 ? 3 : 0};
  }

  void SetMask(MaskTensor tensor, bool by_sample = false) {
    mask = std::move(tensor);
    p.mask = mask->View(by_sample);
  }

  // V, of each head or the first's for all.
  void SetVisible(bool by_head) {
    p.visible = {};
    const int64_t count = by_head ? p.heads : 1;
    std::vector<uint8_t> bytes;
    for (int64_t b = 0; b < p.batch; ++b) {
      for (int64_t h = 0; h < count; ++h) {
        for (int64_t j = 0; j < p.k_len; ++j) bytes.push_back(InV(b, h, j) ? 3 : 0);
      }
    }
    visible = std::move(bytes);
    p.visible = {visible.data(), count * p.k_len, by_head ? p.k_len : 0, 1};
  }

  void SetSinks(std::vector<float> values) {
    sinks = std::move(values);
    p.sinks = sinks.data();
  }

  // What is added to the score of a key that the row may see; -inf if it may not.
  double Bias(int64_t b, int64_t h, SampleRow at, int64_t j) const {
    int64_t diagonal = p.top_left ? at.row : at.row + p.k_len - p.q_len;
    if (p.ranges.data != nullptr) {
      const auto first = static_cast<size_t>(b * p.ranges.batch_stride + at.row * p.ranges.row_stride);
      if (j < ranges[first] || j >= ranges[first + 1]) return -INFINITY;
      diagonal = ranges[first + 2];
    }
    if (p.causal && j > diagonal) return -INFINITY;
    if (p.window > 0 && j <= diagonal - p.window) return -INFINITY;
    if (p.window_right > 0 && j >= diagonal + p.window_right) return -INFINITY;
    return p.mask.data == nullptr ? 0 : mask->Bias(b, h, p.mask.by_sample ? at.sample : at.row, j);
  }

  bool Allowed(int64_t b, int64_t h, SampleRow at, int64_t j) const { return !(Bias(b, h, at, j) == -INFINITY); }

  bool InV(int64_t b, int64_t h, int64_t j) const {
    if (p.visible.data != nullptr) {
      return p.visible.data[b * p.visible.batch_stride + h * p.visible.head_stride + j * p.visible.key_stride] != 0;
    }
    for (const SampleRow& at : p.mask.by_sample ? Rows(b, h) : EveryRow()) {
      if (Allowed(b, h, at, j)) return true;
    }
    return false;
  }

  std::vector<SampleRow> EveryRow() const {
    std::vector<SampleRow> rows;
    for (int64_t t = 0; t < p.q_len; ++t) rows.push_back({t, t});
    return rows;
  }

  std::vector<SampleRow> Rows(int64_t b, int64_t h) const {
    if (p.rows_per_head == 0 || p.rows_per_head >= p.q_len) return EveryRow();
    std::vector<SampleRow> rows;
    for (uint32_t i = 0; i < p.rows_per_head; ++i) {
      rows.push_back({SampledRow(p.seed, static_cast<uint64_t>(b), static_cast<uint64_t>(h + p.head_offset), i,
                                 p.rows_per_head, static_cast<uint64_t>(p.q_len)),
                      i});
    }
    return rows;
  }

  double RawScore(int64_t b, int64_t h, int64_t t, int64_t j) const {
    double sum = 0;
    for (int64_t c = 0; c < p.head_dim; ++c) sum += q.Get(b, h, t, c) * k.Get(b, Kv(h), j, c);
    return sum * static_cast<double>(p.scale);
  }

  // Of an allowed key.
  double Score(int64_t b, int64_t h, SampleRow at, int64_t j) const {
    const double cap = static_cast<double>(p.softcap), raw = RawScore(b, h, at.row, j);
    return (cap > 0 ? cap * std::tanh(raw / cap) : raw) + Bias(b, h, at, j);
  }

  int64_t Kv(int64_t h) const { return h / (p.heads / p.kv_heads); }

  // O of the sampled rows as a kernel would return it: rounded to the element type.
  void ComputeOutput() {
    o.Fill([](int64_t, int64_t, int64_t, int64_t) { return 0; });
    for (int64_t b = 0; b < p.batch; ++b) {
      for (int64_t h = 0; h < p.heads; ++h) {
        for (const SampleRow& at : Rows(b, h)) {
          std::vector<double> sum(static_cast<size_t>(p.v_dim));
          double m = p.sinks != nullptr ? static_cast<double>(p.sinks[h]) : -INFINITY;
          for (int64_t j = 0; j < p.k_len; ++j) {
            if (Allowed(b, h, at, j)) m = std::fmax(m, Score(b, h, at, j));
          }
          double l = p.sinks != nullptr ? std::exp(static_cast<double>(p.sinks[h]) - m) : 0;
          for (int64_t j = 0; j < p.k_len; ++j) {
            if (!Allowed(b, h, at, j)) continue;
            const double weight = std::exp(Score(b, h, at, j) - m);
            l += weight;
            for (int64_t c = 0; c < p.v_dim; ++c) {
              sum[static_cast<size_t>(c)] += weight * v.Get(b, Kv(h), j, c);
            }
          }
          for (int64_t c = 0; c < p.v_dim; ++c) {
            o.Set(b, h, at.row, c, l > 0 ? sum[static_cast<size_t>(c)] / l : 0);
          }
        }
      }
    }
  }

  void Bind(bool with_delta) {
    p.q = q.View();
    p.k = k.View();
    p.v = with_delta ? v.View() : Tensor4{};
    p.o = with_delta ? o.View() : Tensor4{};
    p.d_o = with_delta ? d_o.View() : Tensor4{};
    p.stat_stride = p.heads + 1;
    p.kv_stat_stride = p.kv_heads + 2;
    out.assign(static_cast<size_t>(p.stat_stride * kProbeStatCount), 0.0f);
    for (int64_t h = 0; h < p.heads; ++h) out[At(kProbeLogitMax, h)] = -INFINITY;
    kv_out.assign(static_cast<size_t>(p.kv_stat_stride * kProbeKvStatCount), 0.0f);
    p.out = out.data();
    p.kv_out = kv_out.data();
  }

  size_t At(int stat, int64_t head) const { return static_cast<size_t>(stat * p.stat_stride + head); }

  float Out(int stat, int64_t head) const { return out[At(stat, head)]; }
  float KvOut(int stat, int64_t head) const { return kv_out[static_cast<size_t>(stat * p.kv_stat_stride + head)]; }

  ProbeParams p;
  Operand q, k, v, o, d_o;
  std::vector<int32_t> ranges;
  std::optional<MaskTensor> mask;
  std::vector<uint8_t> visible;
  std::vector<float> sinks;
  std::vector<float> out, kv_out;
};

// Sequences of key head g, and the sum of their coherence.
inline std::pair<double, double> NaiveKeys(const Case& a, int64_t g) {
  const ProbeParams& p = a.p;
  const int64_t group = p.heads / p.kv_heads;
  double sequences = 0, coherence = 0;
  for (int64_t b = 0; b < p.batch; ++b) {
    std::vector<double> total(static_cast<size_t>(p.head_dim));
    double norms = 0, count = 0;
    for (int64_t j = 0; j < p.k_len; ++j) {
      bool seen = false;
      for (int64_t h = g * group; h < (g + 1) * group; ++h) seen = seen || a.InV(b, h, j);
      if (!seen) continue;
      double square = 0;
      for (int64_t c = 0; c < p.head_dim; ++c) {
        const double x = a.k.Get(b, g, j, c);
        total[static_cast<size_t>(c)] += x;
        square += x * x;
      }
      norms += std::sqrt(square);
      count += 1;
    }
    if (count == 0) continue;
    double square = 0;
    for (double x : total) square += x * x;
    sequences += 1;
    coherence += norms == 0 ? 0 : std::sqrt(square) / norms;
  }
  return {sequences, coherence};
}

// All statistics of head h by their definitions.
inline std::vector<double> NaiveStats(const Case& a, int64_t h) {
  const ProbeParams& p = a.p;
  std::vector<double> sums(kProbeStatCount);
  sums[kProbeLogitMax] = -INFINITY;
  const double sink = p.sinks != nullptr ? static_cast<double>(p.sinks[h]) : -INFINITY;
  for (int64_t b = 0; b < p.batch; ++b) {
    const auto d = static_cast<size_t>(p.head_dim);
    std::vector<double> mean(d), covariance(d * d);
    std::vector<int64_t> in_v;
    for (int64_t j = 0; j < p.k_len; ++j) {
      if (a.InV(b, h, j)) in_v.push_back(j);
    }
    const double n = static_cast<double>(in_v.size());
    for (int64_t j : in_v) {
      for (size_t c = 0; c < d; ++c) {
        mean[c] += a.k.Get(b, a.Kv(h), j, static_cast<int64_t>(c)) / n;
      }
    }
    for (int64_t j : in_v) {
      for (size_t c = 0; c < d; ++c) {
        for (size_t e = 0; e < d; ++e) {
          covariance[c * d + e] += (a.k.Get(b, a.Kv(h), j, static_cast<int64_t>(c)) - mean[c]) *
                                   (a.k.Get(b, a.Kv(h), j, static_cast<int64_t>(e)) - mean[e]) / n;
        }
      }
    }
    for (const SampleRow& at : a.Rows(b, h)) {
      const int64_t t = at.row;
      std::vector<double> s, dp;
      bool finite = std::isfinite(sink) || sink < 0, sees_first = false;
      for (int64_t j = 0; j < p.k_len; ++j) {
        if (!a.Allowed(b, h, at, j)) continue;
        sees_first = sees_first || j == 0;
        s.push_back(a.Score(b, h, at, j));
        finite = finite && std::isfinite(static_cast<float>(a.RawScore(b, h, t, j))) &&
                 std::isfinite(static_cast<float>(s.back()));
        double sum = 0;
        for (int64_t c = 0; p.d_o.data != nullptr && c < p.v_dim; ++c) {
          sum += a.d_o.Get(b, h, t, c) * a.v.Get(b, a.Kv(h), j, c);
        }
        dp.push_back(sum);
      }
      if (s.empty()) continue;
      sums[kProbeRows] += 1;
      if (!finite) {
        sums[kProbeNonfiniteRows] += 1;
        continue;
      }
      double common = 0, quadratic = 0;
      for (size_t c = 0; c < d; ++c) {
        const double qc = a.q.Get(b, h, t, static_cast<int64_t>(c));
        common += qc * mean[c];
        for (size_t e = 0; e < d; ++e) {
          quadratic += qc * covariance[c * d + e] * a.q.Get(b, h, t, static_cast<int64_t>(e));
        }
      }
      sums[kProbeCommonModeSum] += std::fabs(common) * static_cast<double>(p.scale);
      sums[kProbeSpreadSum] += static_cast<double>(p.scale) * std::sqrt(quadratic < 0 ? 0 : quadratic);
      double m = sink;
      float m32 = -INFINITY;
      for (double x : s) {
        m = std::fmax(m, x);
        m32 = std::fmax(m32, static_cast<float>(x));
      }
      int bf16 = 0, eps = 0, eps_paper = 0;
      double l = std::exp(sink - m), entropy = 0, delta = 0, lp = 0;
      for (double x : s) l += std::exp(x - m);
      for (size_t i = 0; i < s.size(); ++i) {
        const double s32 = static_cast<double>(static_cast<float>(s[i]));
        bf16 += RoundBf16(static_cast<float>(s[i])) == RoundBf16(m32);
        eps += s32 >= static_cast<double>(m32) - 1.955e-3;
        eps_paper += s32 >= static_cast<double>(m32) - 1e-3;
        const double probability = std::exp(s[i] - m) / l;
        if (probability > 0) entropy -= probability * std::log(probability);
        delta += probability * dp[i];
      }
      sums[kProbeTiedRowsBf16] += bf16 > 1;
      sums[kProbeTiedRowsEps] += eps > 1;
      sums[kProbeTiedRowsEpsPaper] += eps_paper > 1;
      sums[kProbeSaturatedRows] += l < 1 + std::ldexp(1.0, -7);
      sums[kProbeLogitMax] = std::fmax(sums[kProbeLogitMax], static_cast<double>(m32));
      if (s.size() > 1) {
        sums[kProbeEntropySum] += entropy / std::log(static_cast<double>(s.size()));
      }
      if (sees_first) sums[kProbeSinkSum] += std::exp(s[0] - m) / l;
      if (p.d_o.data == nullptr) continue;
      for (int64_t c = 0; c < p.v_dim; ++c) lp += a.d_o.Get(b, h, t, c) * a.o.Get(b, h, t, c);
      sums[kProbeDeltaBiasSum] += lp - delta;
      sums[kProbeDeltaBiasSumsq] += (lp - delta) * (lp - delta);
      sums[kProbeDeltaAbsSum] += std::fabs(delta);
      sums[kProbeDeltaErrorAbsSum] += std::fabs(lp - delta);
    }
  }
  return sums;
}

}  // namespace bellwether::kernels::testing

#endif  // BELLWETHER_TESTS_KERNELS_NAIVE_PROBE_H_
