// Goal: a sample holds what was put into it, tells "not measured" from NaN, and
// derives ratios as the header defines them.
// Method: small layouts with grouped key heads, every special value.
#include "server/model/step_sample.h"

#include <gtest/gtest.h>

#include <cmath>

namespace bellwether::server {
namespace {

const Layout kLayout{.layers = 2, .heads = 4, .kv_heads = 2};

TEST(StepSampleTest, ShapesFollowTheGranularity) {
  EXPECT_EQ(ShapeOf(*FindSignal(SignalId::kLoss), kLayout).size(), 1);
  EXPECT_EQ(ShapeOf(*FindSignal(SignalId::kRows), kLayout).size(), 8);
  EXPECT_EQ(ShapeOf(*FindSignal(SignalId::kKeyLeakSum), kLayout).size(), 4);
}

TEST(StepSampleTest, StartsNotMeasuredAndKeepsSignalsSorted) {
  StepSample sample;
  sample.Reset(kLayout);
  EXPECT_FALSE(sample.has(SignalId::kRows));
  EXPECT_TRUE(sample.matrix(SignalId::kRows).empty());
  EXPECT_TRUE(IsNotMeasured(sample.scalar(SignalId::kLoss)));
  sample.Add(SignalId::kLoss)[0] = 2;
  sample.Add(SignalId::kRows)[3] = NAN;
  EXPECT_EQ(sample.signals(), (std::vector<SignalId>{SignalId::kRows, SignalId::kLoss}));
  EXPECT_EQ(sample.scalar(SignalId::kLoss), 2);
  EXPECT_TRUE(IsNotMeasured(sample.matrix(SignalId::kRows)[0]));
  EXPECT_FALSE(IsNotMeasured(sample.matrix(SignalId::kRows)[3]));
  EXPECT_TRUE(std::isnan(sample.Add(SignalId::kRows)[3])) << "a second Add keeps the values";
  sample.Reset(kLayout);
  EXPECT_TRUE(sample.signals().empty());
  EXPECT_TRUE(IsNotMeasured(sample.Add(SignalId::kRows)[3]));
}

TEST(DeriveMatrixTest, DividesWhereBothAreMeasured) {
  StepSample sample;
  sample.Reset(kLayout);
  std::vector<float> out;
  const SignalInfo& drift = *FindSignal(SignalId::kDriftRatio);
  EXPECT_FALSE(DeriveMatrix(sample, drift, &out));
  const auto above = sample.Add(SignalId::kCommonModeSum);
  EXPECT_FALSE(DeriveMatrix(sample, drift, &out));
  EXPECT_TRUE(out.empty());
  sample.Add(SignalId::kSpreadSum)[0] = 4;
  sample.Add(SignalId::kCommonModeSum)[0] = 6;
  sample.Add(SignalId::kSpreadSum)[1] = 0;
  sample.Add(SignalId::kCommonModeSum)[1] = 6;
  sample.Add(SignalId::kSpreadSum)[2] = 1;
  ASSERT_TRUE(DeriveMatrix(sample, drift, &out));
  EXPECT_EQ(out[0], 1.5f);
  EXPECT_TRUE(IsNotMeasured(out[1])) << "denominator 0";
  EXPECT_TRUE(IsNotMeasured(out[2])) << "numerator not measured";
  EXPECT_EQ(above.size(), 8u);
}

TEST(DeriveMatrixTest, RootsTheDenominatorWhereTheCatalogueSaysSo) {
  EXPECT_EQ(DeriveValue(*FindSignal(SignalId::kDeltaBiasT), 6, 9), 2);
  EXPECT_EQ(DeriveValue(*FindSignal(SignalId::kDriftRatio), 6, 3), 2);
  EXPECT_TRUE(std::isnan(DeriveValue(*FindSignal(SignalId::kDeltaBiasT), 6, -9)));
}

TEST(DeriveMatrixTest, RootsTheWholeWhereTheCatalogueSaysSo) {
  const SignalInfo& rms = *FindSignal(SignalId::kTensorWeightRms);
  EXPECT_EQ(DeriveValue(rms, 36, 4), 3);
  EXPECT_EQ(DeriveValue(rms, 0, 4), 0);
  EXPECT_TRUE(IsNotMeasured(DeriveValue(rms, 36, 0)));
  EXPECT_TRUE(IsNotMeasured(DeriveValue(rms, NotMeasured(), 4)));
}

TEST(DeriveMatrixTest, ASquareOverItsOwnRootIsTheRoot) {
  const SignalInfo& norm = *FindSignal(SignalId::kTensorGradNorm);
  EXPECT_EQ(DeriveValue(norm, 9, 9), 3);
  EXPECT_EQ(DeriveValue(norm, 0, 0), 0);
  EXPECT_TRUE(IsNotMeasured(DeriveValue(norm, NotMeasured(), NotMeasured())));
}

TEST(DeriveMatrixTest, CopiesAMeasuredSignal) {
  StepSample sample;
  sample.Reset(kLayout);
  std::vector<float> out = {1};
  EXPECT_FALSE(DeriveMatrix(sample, *FindSignal(SignalId::kRows), &out));
  EXPECT_TRUE(out.empty());
  sample.Add(SignalId::kRows)[7] = 5;
  ASSERT_TRUE(DeriveMatrix(sample, *FindSignal(SignalId::kRows), &out));
  EXPECT_EQ(out[7], 5);
}

}  // namespace
}  // namespace bellwether::server
