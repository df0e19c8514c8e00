// attention_problem.h: one attention call of a test: inputs, outputs, and the
// same in float64 without tiles.

#ifndef BELLWETHER_TESTS_KERNELS_ATTENTION_PROBLEM_H_
#define BELLWETHER_TESTS_KERNELS_ATTENTION_PROBLEM_H_

#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <random>
#include <vector>

#include "bellwether/kernels/attention.h"
#include "bellwether/kernels/probe.h"
#include "cpu/element.h"

namespace bellwether::kernels {

using cpu::BFloat16;
using cpu::Float16;

struct AttentionShape {
  int64_t batch = 1, heads = 1, kv_heads = 1, q_len = 1, k_len = 256, head_dim = 16;
  int64_t v_dim = 0;  // 0 = head_dim

  int64_t ValueDim() const { return v_dim == 0 ? head_dim : v_dim; }
};

// Dense [batch][head][token][channel] arrays.
template <typename Element>
struct AttentionProblem {
  explicit AttentionProblem(const AttentionShape& s, AttentionMode mode = AttentionMode::kHp)
      : shape(s),
        q(Count(s.heads, s.q_len, s.head_dim)),
        k(Count(s.kv_heads, s.k_len, s.head_dim)),
        v(Count(s.kv_heads, s.k_len, s.ValueDim())),
        d_o(Count(s.heads, s.q_len, s.ValueDim())),
        o(d_o.size()),
        dq(q.size()),
        dk(k.size()),
        dv(v.size()),
        o_lo(o.size()),
        lse(static_cast<size_t>(s.batch * s.heads * s.q_len), kNan),
        anchor(lse.size(), kNan),
        rounded_sum(lse.size(), kNan) {
    AttentionForwardParams& p = params.forward;
    p.dtype = std::is_same_v<Element, float>      ? DType::kFloat32
              : std::is_same_v<Element, BFloat16> ? DType::kBFloat16
                                                  : DType::kFloat16;
    p.batch = s.batch;
    p.heads = s.heads;
    p.kv_heads = s.kv_heads;
    p.q_len = s.q_len;
    p.k_len = s.k_len;
    p.head_dim = s.head_dim;
    p.v_dim = s.v_dim;
    p.scale = 1;
    p.q = View(q, s.heads, s.q_len, s.head_dim);
    p.k = View(k, s.kv_heads, s.k_len, s.head_dim);
    p.v = View(v, s.kv_heads, s.k_len, s.ValueDim());
    p.o = View(o, s.heads, s.q_len, s.ValueDim());
    p.lse = lse.data();
    p.lse_batch_stride = s.heads * s.q_len;
    p.lse_head_stride = s.q_len;
    params.d_o = View(d_o, s.heads, s.q_len, s.ValueDim());
    params.dq = View(dq, s.heads, s.q_len, s.head_dim);
    params.dk = View(dk, s.kv_heads, s.k_len, s.head_dim);
    params.dv = View(dv, s.kv_heads, s.k_len, s.ValueDim());
    SetMode(mode);
  }

  void SetMode(AttentionMode mode) {
    AttentionForwardParams& p = params.forward;
    p.mode = mode;
    const bool residual = mode == AttentionMode::kHp || mode == AttentionMode::kHpm || mode == AttentionMode::kHpNolt;
    p.o_lo = residual ? View(o_lo, shape.heads, shape.q_len, shape.ValueDim()) : Tensor4{};
    p.anchor = mode == AttentionMode::kHpm ? anchor.data() : nullptr;
    p.rounded_sum = mode == AttentionMode::kHpm ? rounded_sum.data() : nullptr;
  }

  // Rows from kProbeRows on; [kProbeStatCount][heads], empty before.  Of all rows, or
  // of a part.
  void WantStats(uint32_t every = 1) {
    stats.assign(static_cast<size_t>(kProbeStatCount * shape.heads), 0);
    for (int64_t h = 0; h < shape.heads; ++h) {
      stats[static_cast<size_t>(kProbeLogitMax * shape.heads + h)] = -std::numeric_limits<float>::infinity();
    }
    params.forward.stats = stats.data();
    params.forward.stat_stride = shape.heads;
    params.forward.stats_every = every;
  }

  // The probe of the same call.  out: [kProbeStatCount][heads].
  ProbeParams Probed(float* out) const {
    const AttentionForwardParams& p = params.forward;
    ProbeParams probe;
    probe.dtype = p.dtype;
    probe.batch = p.batch;
    probe.heads = p.heads;
    probe.kv_heads = p.kv_heads;
    probe.q_len = p.q_len;
    probe.k_len = p.k_len;
    probe.head_dim = p.head_dim;
    probe.v_dim = shape.ValueDim();
    probe.q = p.q;
    probe.k = p.k;
    probe.v = p.v;
    probe.o = p.o;  // Rounded: the deltas are fa's.
    probe.d_o = params.d_o;
    probe.scale = p.scale;
    probe.softcap = p.softcap;
    probe.causal = p.causal;
    probe.window = static_cast<int32_t>(p.window);
    probe.mask = p.mask;
    probe.sinks = p.sinks;
    probe.stat_stride = p.heads;
    probe.out = out;
    return probe;
  }

  void WantSinks(const std::vector<float>& logits) {
    sinks = logits;
    d_sinks.assign(sinks.size(), kNan);
    params.forward.sinks = sinks.data();
    params.d_sinks = d_sinks.data();
  }

  void FillRandom(uint32_t seed) {
    std::mt19937 random(seed);
    std::normal_distribution<double> normal;
    for (auto* values : {&q, &k, &v, &d_o}) {
      for (Element& x : *values) cpu::Assign(x, normal(random));
    }
  }

  // Makes every row's scores s(j) exactly up to 2^-24: q is ones in the first
  // three channels and each key holds its score in three parts.  V has one sign.
  void FillScores(const std::function<double(int64_t)>& score, uint32_t seed = 1) {
    std::mt19937 random(seed);
    std::uniform_real_distribution<double> positive(0.5, 1.5);
    std::fill(q.begin(), q.end(), Element{});
    std::fill(k.begin(), k.end(), Element{});
    const auto dim = static_cast<size_t>(shape.head_dim);
    for (size_t row = 0; row < q.size() / dim; ++row) {
      for (size_t c = 0; c < 3; ++c) cpu::Assign(q[row * dim + c], 1);
    }
    for (size_t key = 0; key < k.size() / dim; ++key) {
      double rest = score(static_cast<int64_t>(key) % shape.k_len);
      for (size_t c = 0; c < 3; ++c) {
        cpu::Assign(k[key * dim + c], rest);
        rest -= static_cast<double>(cpu::ToFloat(k[key * dim + c]));
      }
    }
    for (Element& x : v) cpu::Assign(x, positive(random));
    for (Element& x : d_o) cpu::Assign(x, positive(random) - 1);
  }

  Status Forward(uint32_t threads = 1) { return AttentionForward(params.forward, {.threads = threads}); }
  Status Backward(uint32_t threads = 1) { return AttentionBackward(params, {.threads = threads}); }

  double O(size_t i) const {
    const double lo = params.forward.o_lo.data == nullptr ? 0 : static_cast<double>(cpu::ToFloat(o_lo[i]));
    return static_cast<double>(cpu::ToFloat(o[i])) + lo;
  }

  AttentionShape shape;
  AttentionBackwardParams params;
  std::vector<Element> q, k, v, d_o, o, dq, dk, dv;
  std::vector<BFloat16> o_lo;
  std::vector<float> lse, anchor, rounded_sum, stats, sinks, d_sinks;

 private:
  static constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

  size_t Count(int64_t heads, int64_t tokens, int64_t dim) const {
    return static_cast<size_t>(shape.batch * heads * tokens * dim);
  }
  template <typename T>
  static Tensor4 View(const std::vector<T>& x, int64_t heads, int64_t tokens, int64_t dim) {
    return {x.data(), heads * tokens * dim, tokens * dim, dim};
  }
};

// What a mask adds to the score of a (batch, head, row, key); -inf hides the key.
using Bias = std::function<double(int64_t, int64_t, int64_t, int64_t)>;

// Everything in float64, without tiles.
struct ExactAttention {
  std::vector<double> o, lse, dq, dk, dv, d_sinks;
  std::vector<double> delta;     // sum_j P dP
  std::vector<double> dp_scale;  // sqrt(sum_j P dP^2)
  double d_sink_terms = 0;       // sum of what is added up in d_sinks, without signs

  template <typename Element>
  explicit ExactAttention(const AttentionProblem<Element>& problem, bool center = false, const Bias& bias = nullptr)
      : o(problem.o.size()),
        lse(problem.lse.size()),
        dq(problem.q.size()),
        dk(problem.k.size()),
        dv(problem.v.size()),
        d_sinks(problem.sinks.size()),
        delta(problem.lse.size()),
        dp_scale(problem.lse.size()) {
    const AttentionForwardParams& p = problem.params.forward;
    const int64_t v_dim = ValueDim(p);
    const auto at = [&](const std::vector<Element>& x, int64_t row, int64_t c, int64_t dim) {
      return static_cast<double>(cpu::ToFloat(x[static_cast<size_t>(row * dim + c)]));
    };
    for (int64_t head = 0; head < p.batch * p.heads; ++head) {
      const int64_t group = p.heads / p.kv_heads;
      const int64_t kv = head / p.heads * p.kv_heads + head % p.heads / group;
      std::vector<double> mean(static_cast<size_t>(p.head_dim));
      for (int64_t j = 0; center && j < p.k_len; ++j) {
        for (int64_t c = 0; c < p.head_dim; ++c) {
          mean[static_cast<size_t>(c)] += at(problem.k, kv * p.k_len + j, c, p.head_dim) / static_cast<double>(p.k_len);
        }
      }
      for (int64_t t = 0; t < p.q_len; ++t) {
        const int64_t row = head * p.q_len + t;
        const int64_t diagonal = t + p.k_len - p.q_len;
        std::vector<double> s, slope, weight, dp;
        std::vector<int64_t> keys;
        double top = -std::numeric_limits<double>::infinity();
        for (int64_t j = 0; j < p.k_len; ++j) {
          if ((p.causal && j > diagonal) || (p.window > 0 && j <= diagonal - p.window)) continue;
          const int64_t batch = head / p.heads;
          if (p.key_bounds != nullptr && (j < p.key_bounds[2 * batch] || j >= p.key_bounds[2 * batch + 1])) continue;
          const double added = bias == nullptr ? 0 : bias(batch, head % p.heads, t, j);
          if (added == -std::numeric_limits<double>::infinity()) continue;
          double dot = 0, d_prob = 0;
          for (int64_t c = 0; c < p.head_dim; ++c) {
            dot += at(problem.q, row, c, p.head_dim) * at(problem.k, kv * p.k_len + j, c, p.head_dim);
          }
          for (int64_t c = 0; c < v_dim; ++c) {
            d_prob += at(problem.d_o, row, c, v_dim) * at(problem.v, kv * p.k_len + j, c, v_dim);
          }
          dot *= static_cast<double>(p.scale);
          const auto cap = static_cast<double>(p.softcap);
          slope.push_back(cap > 0 ? 1 - std::tanh(dot / cap) * std::tanh(dot / cap) : 1);
          s.push_back((cap > 0 ? cap * std::tanh(dot / cap) : dot) + added);
          dp.push_back(d_prob);
          keys.push_back(j);
          top = std::max(top, s.back());
        }
        const size_t h = static_cast<size_t>(head % p.heads);
        if (p.sinks != nullptr) top = std::max(top, static_cast<double>(p.sinks[h]));
        double sum = p.sinks == nullptr ? 0 : std::exp(static_cast<double>(p.sinks[h]) - top);
        if (!(top > -std::numeric_limits<double>::infinity())) sum = 0;  // Neither a key nor a sink.
        const double sink_weight = sum;
        for (const double x : s) sum += std::exp(x - top);
        lse[static_cast<size_t>(row)] = top + std::log(sum);
        double& d = delta[static_cast<size_t>(row)];
        for (size_t i = 0; i < s.size(); ++i) {
          weight.push_back(std::exp(s[i] - top) / sum);
          d += weight[i] * dp[i];
          dp_scale[static_cast<size_t>(row)] += weight[i] * dp[i] * dp[i];
        }
        dp_scale[static_cast<size_t>(row)] = std::sqrt(dp_scale[static_cast<size_t>(row)]);
        if (p.sinks != nullptr && sum > 0) {
          d_sinks[h] -= sink_weight / sum * d;
          d_sink_terms += sink_weight / sum * std::fabs(d);
        }
        for (size_t i = 0; i < s.size(); ++i) {
          const double ds = weight[i] * (dp[i] - d) * static_cast<double>(p.scale) * slope[i];
          for (int64_t c = 0; c < v_dim; ++c) {
            const auto oc = static_cast<size_t>(row * v_dim + c);
            const auto vc = static_cast<size_t>((kv * p.k_len + keys[i]) * v_dim + c);
            o[oc] += weight[i] * static_cast<double>(cpu::ToFloat(problem.v[vc]));
            dv[vc] += weight[i] * static_cast<double>(cpu::ToFloat(problem.d_o[oc]));
          }
          for (int64_t c = 0; c < p.head_dim; ++c) {
            const auto qc = static_cast<size_t>(row * p.head_dim + c);
            const auto kc = static_cast<size_t>((kv * p.k_len + keys[i]) * p.head_dim + c);
            dq[qc] += ds * (static_cast<double>(cpu::ToFloat(problem.k[kc])) - mean[static_cast<size_t>(c)]);
            dk[kc] += ds * static_cast<double>(cpu::ToFloat(problem.q[qc]));
          }
        }
      }
    }
  }
};

}  // namespace bellwether::kernels

#endif  // BELLWETHER_TESTS_KERNELS_ATTENTION_PROBLEM_H_
