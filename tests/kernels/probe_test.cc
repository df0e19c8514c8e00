// Goal: the fast probe and the reference are the definitions of probe.h, for
// every element type, mask, head grouping, row choice and code path.
// Method: an independent fp64 computation (naive_probe.h) on seeded random
// operands in padded and transposed memory.  Counts must be equal, sums agree to
// 1e-5, the signed bias to 1e-3 of the sum of absolute errors.  simd_test.cc
// holds the inner loops of every instruction set to plain loops.

#include "bellwether/kernels/probe.h"

#include <algorithm>
#include <cmath>
#include <ostream>
#include <random>
#include <tuple>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/backends.h"
#include "tests/kernels/probe_expectations.h"

namespace bellwether::kernels {
namespace {

using testing::Case;
using testing::Check;

struct Shape {
  int64_t batch, heads, kv_heads, q_len, k_len, channels, v_channels;
  bool causal;
  int32_t window;
  float softcap;
  uint32_t rows_per_head;
};

std::ostream& operator<<(std::ostream& os, const Shape& s) {
  return os << s.batch << "x" << s.heads << "/" << s.kv_heads << " " << s.q_len << "x" << s.k_len << " d" << s.channels
            << "/" << s.v_channels << (s.causal ? " causal" : "") << " window " << s.window << " cap " << s.softcap
            << " rows " << s.rows_per_head;
}

class ProbeShapeTest : public ::testing::TestWithParam<std::tuple<Shape, DType>> {};

TEST_P(ProbeShapeTest, EqualsAnIndependentComputation) {
  const auto& [s, dtype] = GetParam();
  Case a(dtype, s.batch, s.heads, s.kv_heads, s.q_len, s.k_len, s.channels, s.v_channels);
  a.p.causal = s.causal;
  a.p.window = s.window;
  a.p.softcap = s.softcap;
  a.p.rows_per_head = s.rows_per_head;
  a.p.seed = 77;
  std::mt19937 rng(2510);
  a.q.FillNormal(rng, 0.3);
  a.k.FillNormal(rng, 0.5);
  a.v.FillNormal(rng, 1);
  a.d_o.FillNormal(rng);
  // Repeat keys, so that ties occur and must be seen across panels and lanes.
  std::uniform_int_distribution<int64_t> any(0, s.k_len - 1);
  for (int64_t i = 0; i < s.k_len / 3; ++i) {
    const int64_t from = any(rng), to = any(rng);
    for (int64_t c = 0; c < s.channels; ++c) a.k.Set(0, 0, to, c, a.k.Get(0, 0, from, c));
  }
  a.ComputeOutput();
  a.Bind(true);
  Check(a, true);
  Check(a, false);
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, ProbeShapeTest,
    ::testing::Combine(
        ::testing::Values(Shape{4, 1, 1, 64, 64, 64, 64, true, 0, 0, 0}, Shape{2, 2, 1, 33, 33, 24, 16, false, 0, 0, 0},
                          Shape{1, 4, 2, 17, 40, 5, 3, true, 0, 0, 0}, Shape{1, 4, 1, 40, 17, 8, 8, true, 0, 0, 0},
                          Shape{1, 2, 2, 50, 50, 16, 16, true, 7, 0, 0}, Shape{1, 2, 1, 50, 61, 16, 20, false, 9, 0, 0},
                          Shape{1, 2, 1, 31, 31, 16, 16, true, 0, 3.5f, 0},
                          Shape{2, 4, 2, 90, 90, 8, 8, true, 0, 0, 13}, Shape{1, 1, 1, 600, 600, 4, 4, true, 0, 0, 0},
                          Shape{1, 2, 1, 300, 300, 6, 6, true, 5, 0, 0}, Shape{1, 1, 1, 1, 1, 1, 1, true, 0, 0, 0}),
        ::testing::Values(DType::kFloat32, DType::kBFloat16, DType::kFloat16)));

// The last regime before the loss goes: a common mode hundreds of times the
// spread, where float32 sums would lose the scores' differences.
TEST(ProbeTest, DriftedKeysKeepTheirSpreadAndTies) {
  for (DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    Case a(dtype, 1, 1, 1, 128, 128, 32, 32);
    a.p.causal = true;
    std::mt19937 rng(5);
    a.q.FillNormal(rng, 20, 1);
    a.k.FillNormal(rng, 20, 0.05);
    a.v.FillNormal(rng, 1);
    a.d_o.FillNormal(rng);
    a.ComputeOutput();
    Check(a, true);
    const double ratio =
        static_cast<double>(a.Out(kProbeCommonModeSum, 0)) / static_cast<double>(a.Out(kProbeSpreadSum, 0));
    EXPECT_GE(ratio, 100);
    EXPECT_GE(a.Out(kProbeTiedRowsBf16, 0), 60);
  }
}

TEST(ProbeTest, LogitsOfTenThousandKeepEntropyAndDelta) {
  Case a(DType::kBFloat16, 1, 2, 1, 64, 64, 64, 16);
  std::mt19937 rng(6);
  a.q.FillNormal(rng, 0, 40);
  a.k.FillNormal(rng, 0, 40);
  a.v.FillNormal(rng);
  a.d_o.FillNormal(rng);
  a.ComputeOutput();
  Check(a, true);
  EXPECT_GE(a.Out(kProbeLogitMax, 0), 2000);
}

TEST(ProbeTest, ThreadsDoNotChangeABit) {
  Case a(DType::kBFloat16, 3, 4, 2, 300, 300, 32, 32);
  a.p.causal = true;
  std::mt19937 rng(7);
  a.q.FillNormal(rng);
  a.k.FillNormal(rng);
  a.v.FillNormal(rng);
  a.o.FillNormal(rng);
  a.d_o.FillNormal(rng);
  a.Bind(true);
  ASSERT_EQ(Probe(a.p, {}), Status::kOk);
  const std::vector<float> one = a.out, kv_one = a.kv_out;
  for (uint32_t threads : {2u, 3u, 16u, 256u}) {
    a.Bind(true);
    ASSERT_EQ(Probe(a.p, {.threads = threads}), Status::kOk);
    EXPECT_EQ(a.out, one) << threads;
    EXPECT_EQ(a.kv_out, kv_one) << threads;
  }
}

TEST(ProbeTest, EveryShardingOfTheHeadsSamplesTheSameRows) {
  Case whole(DType::kFloat32, 2, 4, 2, 200, 200, 16, 16);
  whole.p.rows_per_head = 20;
  whole.p.seed = 11;
  whole.p.causal = true;
  std::mt19937 rng(8);
  whole.q.FillNormal(rng);
  whole.k.FillNormal(rng);
  whole.Bind(false);
  ASSERT_EQ(Probe(whole.p, {}), Status::kOk);
  for (int64_t shard = 0; shard < 2; ++shard) {
    Case part(DType::kFloat32, 2, 2, 1, 200, 200, 16, 16);
    part.p.rows_per_head = 20;
    part.p.seed = 11;
    part.p.causal = true;
    part.p.head_offset = 2 * shard;
    part.q.Fill([&](int64_t b, int64_t h, int64_t t, int64_t c) { return whole.q.Get(b, h + 2 * shard, t, c); });
    part.k.Fill([&](int64_t b, int64_t, int64_t t, int64_t c) { return whole.k.Get(b, shard, t, c); });
    part.Bind(false);
    ASSERT_EQ(Probe(part.p, {}), Status::kOk);
    for (int64_t h = 0; h < 2; ++h) {
      for (int stat = 0; stat < kProbeDeltaBiasSum; ++stat) {
        EXPECT_EQ(part.Out(stat, h), whole.Out(stat, h + 2 * shard)) << stat;
      }
    }
  }
}

TEST(ProbeTest, StrataCoverTheRowsAndDependOnEveryInput) {
  for (int64_t q_len : {7, 64, 1000}) {
    for (int64_t strata : {int64_t{1}, int64_t{3}, q_len}) {
      for (int64_t i = 0; i < strata; ++i) {
        const int64_t row =
            SampledRow(1, 2, 3, static_cast<uint64_t>(i), static_cast<uint64_t>(strata), static_cast<uint64_t>(q_len));
        EXPECT_GE(row, i * q_len / strata);
        EXPECT_LT(row, (i + 1) * q_len / strata);
      }
    }
  }
  constexpr uint64_t kTokens = 1u << 30;
  const int64_t row = SampledRow(1, 2, 3, 0, 2, kTokens);
  EXPECT_EQ(row, SampledRow(1, 2, 3, 0, 2, kTokens));
  EXPECT_NE(row, SampledRow(2, 2, 3, 0, 2, kTokens));
  EXPECT_NE(row, SampledRow(1, 3, 3, 0, 2, kTokens));
  EXPECT_NE(row, SampledRow(1, 2, 4, 0, 2, kTokens));
  // The hash is part of the interface: another backend must reproduce it.
  EXPECT_EQ(ProbeMix(0), 0xe220a8397b1dcdafu);
}

TEST(ProbeTest, ProbeAddsToItsOutputs) {
  Case a(DType::kFloat32, 1, 2, 1, 9, 9, 4, 4);
  std::mt19937 rng(9);
  a.q.FillNormal(rng);
  a.k.FillNormal(rng);
  a.Bind(false);
  ASSERT_EQ(Probe(a.p, {}), Status::kOk);
  const std::vector<float> once = a.out;
  ASSERT_EQ(Probe(a.p, {}), Status::kOk);
  EXPECT_EQ(a.Out(kProbeRows, 1), 18);
  EXPECT_EQ(a.Out(kProbeLogitMax, 1), once[a.At(kProbeLogitMax, 1)]);
  EXPECT_FLOAT_EQ(a.Out(kProbeEntropySum, 1), 2 * once[a.At(kProbeEntropySum, 1)]);
  EXPECT_EQ(a.KvOut(kProbeKvSequences, 0), 2);
  EXPECT_EQ(a.Out(kProbeDeltaAbsSum, 0), 0) << "not written without d_o";
}

TEST(ProbeTest, EmptyCallsChangeNothing) {
  for (int field = 0; field < 3; ++field) {
    Case a(DType::kFloat32, 1, 1, 1, 4, 4, 4, 4);
    a.Bind(false);
    (field == 0 ? a.p.batch : field == 1 ? a.p.q_len : a.p.k_len) = 0;
    a.p.q = a.p.k = {};
    const std::vector<float> before = a.out;
    EXPECT_EQ(Probe(a.p, {}), Status::kOk) << LastErrorMessage();
    EXPECT_EQ(a.out, before);
    EXPECT_EQ(a.KvOut(kProbeKvSequences, 0), 0);
  }
}

}  // namespace
}  // namespace bellwether::kernels
