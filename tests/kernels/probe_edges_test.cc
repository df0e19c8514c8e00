// Goal: the rows that break naive code: ties and near-ties on both sides of
// each tolerance, single keys, constant and zero keys, infinities and NaN, in
// the scores and behind masks, and none of them in another head.
// Method: one channel, q = 1, so that the scores are the keys; small enough to
// check by eye.  Every case runs through the reference and the fast path.

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "bellwether/kernels/probe.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/backends.h"
#include "tests/kernels/naive_probe.h"

namespace bellwether::kernels {
namespace {

using testing::Case;
using testing::MaskTensor;

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

class ProbeEdgesTest : public ::testing::TestWithParam<bool> {
 protected:
  static Case Make(const std::vector<std::vector<double>>& heads, int64_t q_len) {
    const auto tokens = static_cast<int64_t>(heads[0].size());
    const auto count = static_cast<int64_t>(heads.size());
    Case a(DType::kFloat32, 1, count, count, q_len, tokens, 1, 1);
    a.p.scale = 1;
    a.q.Fill([](int64_t, int64_t, int64_t, int64_t) { return 1.0; });
    a.k.Fill(
        [&](int64_t, int64_t h, int64_t t, int64_t) { return heads[static_cast<size_t>(h)][static_cast<size_t>(t)]; });
    a.v.Fill([](int64_t, int64_t, int64_t t, int64_t) { return 1.0 + static_cast<double>(t); });
    a.o.Fill([](int64_t, int64_t, int64_t, int64_t) { return 1.0; });
    a.d_o.Fill([](int64_t, int64_t, int64_t, int64_t) { return 1.0; });
    return a;
  }

  static void Run(Case& a, bool with_delta = false) {
    a.Bind(with_delta);
    ASSERT_EQ(GetParam() ? Probe(a.p, {}) : cpu::ProbeReference(a.p), Status::kOk);
  }

  // {bf16, eps, eps_paper} of one row with these scores.
  static std::vector<float> Ties(const std::vector<double>& scores) {
    Case a = Make({scores}, 1);
    Run(a);
    return {a.Out(kProbeTiedRowsBf16, 0), a.Out(kProbeTiedRowsEps, 0), a.Out(kProbeTiedRowsEpsPaper, 0)};
  }
};

using ::testing::ElementsAre;

TEST_P(ProbeEdgesTest, TiesAreCountedByEachRule) {
  EXPECT_THAT(Ties({3, 1, 3}), ElementsAre(1, 1, 1));
  EXPECT_THAT(Ties({3, 1, 2}), ElementsAre(0, 0, 0));
  EXPECT_THAT(Ties({0, 9e-4}), ElementsAre(0, 1, 1));
  EXPECT_THAT(Ties({0, 1.01e-3}), ElementsAre(0, 1, 0));
  EXPECT_THAT(Ties({0, 1.95e-3}), ElementsAre(0, 1, 0));
  EXPECT_THAT(Ties({0, 1.96e-3}), ElementsAre(0, 0, 0));
  EXPECT_THAT(Ties({300, 299.5}), ElementsAre(1, 0, 0)) << "bf16 steps by 2 up there";
  EXPECT_THAT(Ties({-4, -4, -5}), ElementsAre(1, 1, 1)) << "negative maximum";
  EXPECT_THAT(Ties({0.0, -0.0}), ElementsAre(1, 1, 1)) << "zeros are equal";
}

TEST_P(ProbeEdgesTest, TiesAreFoundWhereverTheyStand) {
  for (size_t i = 0; i < 19; ++i) {
    for (size_t j = i + 1; j < 19; ++j) {
      std::vector<double> scores(19, 1.0);
      for (size_t t = 0; t < 19; ++t) scores[t] -= 0.01 * static_cast<double>(t);
      scores[i] = scores[j] = 7;
      EXPECT_THAT(Ties(scores), ElementsAre(1, 1, 1)) << i << " " << j;
      scores[j] = 6.5;
      EXPECT_THAT(Ties(scores), ElementsAre(0, 0, 0)) << i << " " << j;
    }
  }
}

TEST_P(ProbeEdgesTest, TiesNeedTwoKeysThatTheRowMaySee) {
  Case a = Make({{5, 5, 5}}, 3);
  a.p.causal = true;
  Run(a);
  EXPECT_EQ(a.Out(kProbeRows, 0), 3);
  EXPECT_EQ(a.Out(kProbeTiedRowsEps, 0), 2) << "row 0 sees one key";
  EXPECT_EQ(a.Out(kProbeSaturatedRows, 0), 1);
  EXPECT_FLOAT_EQ(a.Out(kProbeEntropySum, 0), 2.0f) << "one key adds 0, uniform rows 1";
  EXPECT_FLOAT_EQ(a.Out(kProbeSinkSum, 0), static_cast<float>(1 + 1 / 2.0 + 1 / 3.0));
}

TEST_P(ProbeEdgesTest, ConstantKeysHaveNoSpreadAndFullCoherence) {
  Case a = Make({{2.5, 2.5, 2.5, 2.5, 2.5}, {0, 0, 0, 0, 0}}, 2);
  Run(a);
  EXPECT_EQ(a.Out(kProbeSpreadSum, 0), 0);
  EXPECT_EQ(a.Out(kProbeCommonModeSum, 0), 5);
  EXPECT_FLOAT_EQ(a.KvOut(kProbeKvKeyCoherenceSum, 0), 1);
  EXPECT_EQ(a.Out(kProbeCommonModeSum, 1), 0);
  EXPECT_EQ(a.KvOut(kProbeKvKeyCoherenceSum, 1), 0) << "zero keys";
  EXPECT_EQ(a.Out(kProbeTiedRowsBf16, 1), 2);
}

TEST_P(ProbeEdgesTest, SaturationBeginsAtOnePlusTwoToTheMinusSeven) {
  for (double above : {0.99, 1.01}) {
    Case a = Make({{0, std::log(above * std::ldexp(1.0, -7))}}, 1);
    Run(a);
    EXPECT_EQ(a.Out(kProbeSaturatedRows, 0), above < 1 ? 1 : 0);
  }
}

TEST_P(ProbeEdgesTest, NonfiniteRowsAddToNothingElse) {
  for (double bad : {kInf, -kInf, kNan}) {
    // Key 1 is bad: row 0 does not see it, rows 1 and 2 do.
    Case a = Make({{1, bad, 3}, {1, 2, 3}}, 3);
    a.p.causal = true;
    Run(a, true);
    EXPECT_EQ(a.Out(kProbeRows, 0), 3);
    EXPECT_EQ(a.Out(kProbeNonfiniteRows, 0), 2);
    EXPECT_EQ(a.Out(kProbeLogitMax, 0), 1);
    EXPECT_EQ(a.Out(kProbeSinkSum, 0), 1);
    EXPECT_EQ(a.Out(kProbeDeltaAbsSum, 0), 1) << "row 0 only: P = 1, dP = 1";
    EXPECT_EQ(a.Out(kProbeTiedRowsBf16, 0), 0);
    EXPECT_TRUE(std::isnan(a.Out(kProbeCommonModeSum, 0))) << "the mean key is not finite";
    EXPECT_TRUE(std::isnan(a.Out(kProbeSpreadSum, 0)));
    EXPECT_TRUE(std::isnan(a.KvOut(kProbeKvKeyCoherenceSum, 0)));
    EXPECT_EQ(a.KvOut(kProbeKvSequences, 0), 1);
    for (int stat = 0; stat < kProbeStatCount; ++stat) {
      EXPECT_TRUE(std::isfinite(a.Out(stat, 1))) << "leaked into head 1, stat " << stat;
    }
    EXPECT_EQ(a.Out(kProbeNonfiniteRows, 1), 0);
  }
}

TEST_P(ProbeEdgesTest, ABadQueryRowIsOneNonfiniteRow) {
  Case a = Make({{1, 2, 3}}, 3);
  a.q.Set(0, 0, 1, 0, kNan);
  Run(a, true);
  EXPECT_EQ(a.Out(kProbeRows, 0), 3);
  EXPECT_EQ(a.Out(kProbeNonfiniteRows, 0), 1);
  EXPECT_EQ(a.Out(kProbeCommonModeSum, 0), 4);
  for (int stat = 0; stat < kProbeStatCount; ++stat) EXPECT_TRUE(std::isfinite(a.Out(stat, 0)));
}

TEST_P(ProbeEdgesTest, AScoreBeyondFloat32IsInfinite) {
  Case a = Make({{3e38, 1}}, 2);
  a.q.Set(0, 0, 1, 0, -2);
  a.p.scale = 1;
  Run(a);
  EXPECT_EQ(a.Out(kProbeNonfiniteRows, 0), 1);
  EXPECT_FLOAT_EQ(a.Out(kProbeLogitMax, 0), 3e38f);
}

TEST_P(ProbeEdgesTest, ABadValueBehindTheMaskIsNotRead) {
  Case a = Make({{1, 2, 3}}, 3);
  a.p.causal = true;
  a.v.Set(0, 0, 2, 0, kNan);
  a.p.window = 2;
  Run(a, true);
  EXPECT_EQ(a.Out(kProbeNonfiniteRows, 0), 0);
  EXPECT_TRUE(std::isnan(a.Out(kProbeDeltaBiasSum, 0))) << "row 2 sees it";
  EXPECT_TRUE(std::isfinite(a.Out(kProbeEntropySum, 0)));
  a.d_o.Set(0, 0, 2, 0, 0);
  a.v.Set(0, 0, 2, 0, 1);
  a.v.Set(0, 0, 0, 0, kNan);
  a.p.window = 1;
  Run(a, true);
  EXPECT_TRUE(std::isnan(a.Out(kProbeDeltaBiasSum, 0))) << "row 0 sees key 0";
  Case b = Make({{1, 2, 3}}, 2);  // Rows 1 and 2 of three keys; nobody sees key 0.
  b.p.causal = true;
  b.p.window = 1;
  b.v.Set(0, 0, 0, 0, kNan);
  Run(b, true);
  EXPECT_EQ(b.Out(kProbeDeltaAbsSum, 0), 5);
  EXPECT_EQ(b.Out(kProbeSinkSum, 0), 0);
}

TEST_P(ProbeEdgesTest, RowsWithoutVisibleKeysAreNotCounted) {
  Case a = Make({{1, 2}}, 5);
  a.p.causal = true;
  Run(a);
  EXPECT_EQ(a.Out(kProbeRows, 0), 2);
  EXPECT_EQ(a.Out(kProbeLogitMax, 0), 2);
}

TEST_P(ProbeEdgesTest, AnAdditiveMaskHidesFromMinusTenThousandOn) {
  for (MaskDType dtype : {MaskDType::kFloat32, MaskDType::kBFloat16, MaskDType::kFloat16}) {
    for (const auto& [bias, hidden] : {std::pair(-10000.0, true), std::pair(-9900.0, false), std::pair(-kInf, true),
                                       std::pair(-65504.0, true), std::pair(2.0, false)}) {
      Case a = Make({{1, 2, 3}}, 1);
      MaskTensor mask(dtype, 1, 1, 1, 3);
      for (int64_t j = 0; j < 3; ++j) mask.Set(0, 0, 0, j, j == 2 ? bias : 0);
      a.SetMask(mask);
      a.SetVisible(false);
      Run(a);
      const double kept = (bias == -9900 ? mask.Bias(0, 0, 0, 2) : bias) + 3;
      EXPECT_EQ(a.Out(kProbeLogitMax, 0), static_cast<float>(hidden ? 2 : std::max(2.0, kept))) << bias;
      EXPECT_FLOAT_EQ(a.Out(kProbeCommonModeSum, 0), hidden ? 1.5f : 2.0f) << "before the mask, over V";
    }
  }
}

TEST_P(ProbeEdgesTest, ANanInAnAdditiveMaskIsANonfiniteRow) {
  Case a = Make({{1, 2, 3}}, 2);
  MaskTensor mask(MaskDType::kFloat32, 1, 1, 2, 3);
  for (int64_t j = 0; j < 3; ++j) {
    mask.Set(0, 0, 0, j, j == 1 ? kNan : 0);
    mask.Set(0, 0, 1, j, 0);
  }
  a.SetMask(mask);
  a.SetVisible(false);
  Run(a, true);
  EXPECT_EQ(a.Out(kProbeRows, 0), 2);
  EXPECT_EQ(a.Out(kProbeNonfiniteRows, 0), 1);
  for (int stat = 0; stat < kProbeStatCount; ++stat) EXPECT_TRUE(std::isfinite(a.Out(stat, 0))) << stat;
}

TEST_P(ProbeEdgesTest, PaddingIsOutsideOfEverySum) {
  // The first two keys are padding; so are the rows beside them.
  Case a = Make({{kNan, kInf, 4, 6}}, 4);
  a.v.Set(0, 0, 0, 0, kNan);
  a.p.causal = true;
  a.SetRanges({2, 4, 0, 2, 4, 1, 2, 4, 2, 2, 4, 3}, 1, 4);
  a.SetVisible(false);
  Run(a, true);
  EXPECT_EQ(a.Out(kProbeRows, 0), 2);
  EXPECT_EQ(a.Out(kProbeNonfiniteRows, 0), 0);
  EXPECT_EQ(a.Out(kProbeCommonModeSum, 0), 10);
  EXPECT_EQ(a.Out(kProbeSpreadSum, 0), 2);
  EXPECT_EQ(a.Out(kProbeSinkSum, 0), 0);
  EXPECT_EQ(a.Out(kProbeLogitMax, 0), 6);
  EXPECT_EQ(a.KvOut(kProbeKvSequences, 0), 1);
  EXPECT_FLOAT_EQ(a.KvOut(kProbeKvKeyCoherenceSum, 0), 1);
  for (int stat = 0; stat < kProbeStatCount; ++stat) EXPECT_TRUE(std::isfinite(a.Out(stat, 0))) << stat;
}

TEST_P(ProbeEdgesTest, ASequenceOfPaddingAloneIsNone) {
  Case a = Make({{1, 2}}, 2);
  a.SetRanges({0, 0, 0}, 1, 1);
  a.SetVisible(false);
  Run(a, true);
  for (int stat = 0; stat < kProbeStatCount; ++stat) {
    EXPECT_EQ(a.Out(stat, 0), stat == kProbeLogitMax ? static_cast<float>(-kInf) : 0) << stat;
  }
  EXPECT_EQ(a.KvOut(kProbeKvSequences, 0), 0);
  EXPECT_EQ(a.KvOut(kProbeKvKeyCoherenceSum, 0), 0);
}

TEST_P(ProbeEdgesTest, TheDiagonalMayStandAtEitherEnd) {
  for (bool top_left : {false, true}) {
    Case a = Make({{1, 2, 3, 4}}, 2);
    a.p.causal = true;
    a.p.top_left = top_left;
    Run(a);
    EXPECT_EQ(a.Out(kProbeLogitMax, 0), top_left ? 2 : 4);
    EXPECT_EQ(a.Out(kProbeSaturatedRows, 0), top_left ? 1 : 0) << "row 0 sees key 0 alone";
    EXPECT_FLOAT_EQ(a.Out(kProbeCommonModeSum, 0), top_left ? 3.0f : 5.0f) << "no row sees keys 2 and 3";
  }
}

TEST_P(ProbeEdgesTest, ASinkTakesItsPartAndNothingElse) {
  Case a = Make({{0, 0}, {0, 0}, {0, 0}, {0, 0}}, 1);
  a.SetSinks({0, static_cast<float>(std::log(2.0)), static_cast<float>(-kInf), 1000});
  Run(a, true);
  // P = 1/3, 1/4, 1/2, 0; dP = 1, 2.
  EXPECT_FLOAT_EQ(a.Out(kProbeSinkSum, 0), 1 / 3.0f);
  EXPECT_FLOAT_EQ(a.Out(kProbeEntropySum, 0), static_cast<float>(2 * std::log(3.0) / 3 / std::log(2.0)));
  EXPECT_FLOAT_EQ(a.Out(kProbeDeltaAbsSum, 0), 1);
  EXPECT_FLOAT_EQ(a.Out(kProbeDeltaAbsSum, 1), 0.75f);
  EXPECT_FLOAT_EQ(a.Out(kProbeDeltaAbsSum, 2), 1.5f);
  EXPECT_FLOAT_EQ(a.Out(kProbeEntropySum, 2), 1);
  EXPECT_EQ(a.Out(kProbeDeltaAbsSum, 3), 0);
  EXPECT_EQ(a.Out(kProbeEntropySum, 3), 0);
  for (int64_t h = 0; h < 4; ++h) {
    EXPECT_EQ(a.Out(kProbeTiedRowsBf16, h), 1);
    EXPECT_EQ(a.Out(kProbeLogitMax, h), 0) << "of keys";
    EXPECT_EQ(a.Out(kProbeSaturatedRows, h), h == 3 ? 1 : 0) << "the sink has all";
  }
}

TEST_P(ProbeEdgesTest, ABadSinkMakesItsHeadsRowsNonfinite) {
  Case a = Make({{1, 2}, {1, 2}, {1, 2}}, 2);
  a.SetSinks({static_cast<float>(kNan), static_cast<float>(kInf), 0});
  Run(a, true);
  for (int64_t h = 0; h < 3; ++h) {
    EXPECT_EQ(a.Out(kProbeRows, h), 2);
    EXPECT_EQ(a.Out(kProbeNonfiniteRows, h), h < 2 ? 2 : 0);
    EXPECT_EQ(a.Out(kProbeEntropySum, h) > 0, h == 2);
  }
}

TEST_P(ProbeEdgesTest, CallersNanInOutputsIsKept) {
  Case a = Make({{1, 2}, {1, 2}}, 2);
  a.Bind(false);
  a.out[a.At(kProbeLogitMax, 0)] = NAN;
  a.out[a.At(kProbeSinkSum, 0)] = NAN;
  ASSERT_EQ(GetParam() ? Probe(a.p, {}) : cpu::ProbeReference(a.p), Status::kOk);
  EXPECT_TRUE(std::isnan(a.Out(kProbeLogitMax, 0)));
  EXPECT_TRUE(std::isnan(a.Out(kProbeSinkSum, 0)));
  EXPECT_EQ(a.Out(kProbeLogitMax, 1), 2);
}

INSTANTIATE_TEST_SUITE_P(Paths, ProbeEdgesTest, ::testing::Values(false, true),
                         [](const auto& path) { return path.param ? "Fast" : "Reference"; });

}  // namespace
}  // namespace bellwether::kernels
