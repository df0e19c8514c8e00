// Goal: "healthy" is said of a run only while every family of rules has its
// signals of all layers, and behind the first steps; else it is said what the run is judged by, or in how many
// steps nothing was found.
// Method: samples of a small run that lack what a padded batch, a layer of
// another kind, a loss alone or another attempt lacks.
#include "server/model/run_coverage.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "server/store/record_codec.h"
#include "server/store/run_table.h"

namespace bellwether::server {
namespace {

const Layout kCoveredLayout{.layers = 3, .heads = 4, .kv_heads = 2};

enum Part : unsigned { kScores = 1, kLeak = 2, kSigma = 4, kLoss = 8, kAll = 15 };

// A layer that was not probed adds 0 to sums and has no maximum, as clients send it.
StepSample SampleOf(int64_t step, unsigned parts, unsigned scored_layers = 7, uint32_t attempt = 0) {
  StepSample sample;
  sample.Reset(kCoveredLayout);
  sample.step = step;
  sample.attempt = attempt;
  if ((parts & kScores) != 0) {
    for (const SignalId id : {SignalId::kRows, SignalId::kCommonModeSum, SignalId::kSpreadSum, SignalId::kTiedRowsBf16,
                              SignalId::kLogitMax}) {
      const std::span<float> values = sample.Add(id);
      for (size_t i = 0; i < values.size(); ++i) {
        const bool scored = (scored_layers >> (i / 4) & 1) != 0;
        values[i] = scored ? 2 : id == SignalId::kLogitMax ? NotMeasured() : 0;
      }
    }
  }
  if ((parts & kLeak) != 0) {
    for (const SignalId id : {SignalId::kKeyLeakSum, SignalId::kKeyGradientSum}) {
      for (float& value : sample.Add(id)) value = 1;
    }
  }
  if ((parts & kSigma) != 0) {
    for (float& value : sample.Add(SignalId::kWqSigma)) value = 1;
  }
  if ((parts & kLoss) != 0) sample.Add(SignalId::kLoss)[0] = 2;
  return sample;
}

class RunCoverageTest : public testing::Test {
 protected:
  void Steps(int count, unsigned parts, unsigned scored_layers = 7, uint32_t attempt = 0) {
    for (int i = 0; i < count; ++i) coverage_.Observe(SampleOf(step_++, parts, scored_layers, attempt));
  }
  JudgedBy Now() const { return coverage_.At(step_ - 1, kCoveredLayout.layers, kFewSteps); }
  std::string Text() const { return Now().Text(false); }

  RunCoverage coverage_;
  int64_t step_ = kYoungSteps;
};

TEST_F(RunCoverageTest, ARunWithAllSignalsOfAllLayersIsHealthy) {
  EXPECT_EQ(Text(), "not judged yet");
  Steps(1, kAll);
  EXPECT_EQ(Text(), "healthy");
  EXPECT_TRUE(Now().whole());
  Steps(300, kLoss);  // Between two samples.
  EXPECT_EQ(Text(), "healthy");
}

TEST_F(RunCoverageTest, OfAYoungRunStepsWithoutAFindingAreTold) {
  step_ = 0;
  Steps(1, kAll);
  EXPECT_EQ(coverage_.At(0, 3, 1).Text(false), "nothing found in 1 step");
  EXPECT_EQ(coverage_.At(0, 3, 1).Text(true), "nothing found in 1 step") << "that it has ended makes it no older";
  EXPECT_TRUE(coverage_.At(0, 3, 1).whole());
  EXPECT_EQ(coverage_.At(kYoungSteps - 2, 3, 140).Text(false), "nothing found in 140 steps");
  EXPECT_EQ(coverage_.At(kYoungSteps - 1, 3, 140).Text(false), "healthy");
  EXPECT_EQ(coverage_.At(900, 3, kFewSteps - 1).Text(false), "nothing found in 99 steps") << "watched from step 800 on";
  coverage_ = {};
  Steps(20, kLeak);
  EXPECT_EQ(coverage_.At(step_, 3, 20).Text(false), "judged by: leak");
}

TEST_F(RunCoverageTest, TextNamesJudgingFamiliesWhereSignalsAreMissing) {
  Steps(20, kLeak);
  EXPECT_EQ(Text(), "judged by: leak");
  EXPECT_FALSE(Now().whole());
  EXPECT_EQ(Now().judged, (std::array<int32_t, kRuleFamilies>{0, 0, 0, 0, 3, 0}));
  coverage_ = {};
  Steps(20, kLeak | kSigma | kLoss);
  EXPECT_EQ(Text(), "judged by: norm, leak, loss");
  coverage_ = {};
  Steps(20, kAll & ~kLoss);
  EXPECT_EQ(Text(), "judged by: all but loss");
}

TEST_F(RunCoverageTest, HowManyLayersIsSaidWhereSomeLackSignals) {
  Steps(20, kAll, 5);
  EXPECT_EQ(Text(), "judged by: norm, leak, loss; drift, ties, logits in 2 of 3 layers");
  EXPECT_EQ(Now().judged[static_cast<size_t>(RuleFamily::kDrift)], 2);
}

TEST_F(RunCoverageTest, ALossAloneIsToldAfterTheFirstSteps) {
  Steps(3, kLoss);
  EXPECT_EQ(Text(), "not judged yet");
  EXPECT_EQ(Now().Text(true), "judged by: loss") << "it has ended: nothing comes any more";
  Steps(10, kLoss);
  EXPECT_EQ(Text(), "judged by: loss");
  coverage_ = {};
  Steps(20, 0);
  EXPECT_EQ(Text(), "not judged");
}

TEST_F(RunCoverageTest, AFewBatchesWithoutAreNoChangeAndManyAre) {
  Steps(1, kAll);
  Steps(7, kLeak | kSigma | kLoss);
  EXPECT_EQ(Text(), "healthy");
  Steps(1, kLeak | kSigma | kLoss);
  EXPECT_EQ(Text(), "judged by: norm, leak, loss");
  Steps(1, kAll);
  EXPECT_EQ(Text(), "healthy");
}

TEST_F(RunCoverageTest, SamplesOrLossesThatEndAreNoticed) {
  Steps(4, kAll);
  Steps(1001, kLoss);
  EXPECT_EQ(Text(), "judged by: loss");
  Steps(1, kAll);
  Steps(1001, kAll & ~kLoss);
  EXPECT_EQ(Text(), "judged by: all but loss");
}

TEST_F(RunCoverageTest, SamplesMayBeAsFarApartAsTheClientSays) {
  StepSample sample = SampleOf(0, kAll);
  sample.Add(SignalId::kSamplingPeriod)[0] = 5000;
  coverage_.Observe(sample);
  step_ = 1;
  Steps(9000, kLoss);
  EXPECT_EQ(Text(), "healthy");
}

TEST_F(RunCoverageTest, AnAttemptBeginsAnewAndItsStragglersAreIgnored) {
  Steps(20, kAll);
  Steps(1, kLoss, 7, 1);
  EXPECT_EQ(Text(), "not judged yet");
  Steps(1, kAll, 7, 0);
  EXPECT_EQ(Text(), "not judged yet");
  Steps(1, kLeak, 7, 1);
  EXPECT_EQ(Text(), "judged by: leak, loss");
}

TEST_F(RunCoverageTest, LayerIsJudgedIfAllItsReportingHeadsAre) {
  StepSample sample = SampleOf(0, kAll);
  for (const SignalId id : {SignalId::kRows, SignalId::kSpreadSum}) sample.Add(id)[1] = 0;
  coverage_.Observe(sample);
  EXPECT_EQ(coverage_.At(0, 3, 1).judged[0], 2) << "one head of layer 0 has no scores";
  // A narrower layer has no such head at all.
  sample = SampleOf(1, kAll);
  for (const SignalId id : {SignalId::kRows, SignalId::kSpreadSum, SignalId::kKeyGradientSum}) {
    const std::span<float> values = sample.Add(id);
    for (size_t i = values.size() / 6; i < values.size() / 3; ++i) values[i] = 0;
  }
  for (const SignalId id : {SignalId::kLogitMax, SignalId::kWqSigma})
    sample.Add(id)[2] = sample.Add(id)[3] = NotMeasured();
  coverage_ = {};
  coverage_.Observe(sample);
  EXPECT_TRUE(coverage_.At(1, 3, 2).whole());
}

TEST_F(RunCoverageTest, EqualScoresAndNanValuesCountAsMeasured) {
  StepSample sample = SampleOf(0, kAll);
  sample.Add(SignalId::kSpreadSum)[5] = 0;
  sample.Add(SignalId::kLogitMax)[2] = NAN;
  sample.Add(SignalId::kKeyGradientSum)[2] = NAN;
  coverage_.Observe(sample);
  EXPECT_TRUE(coverage_.At(0, 3, 1).whole());
}

TEST_F(RunCoverageTest, ARuleThatIsSwitchedOffJudgesNothing) {
  coverage_.off = 1u << static_cast<unsigned>(RuleFamily::kTies);
  Steps(2, kAll);
  EXPECT_EQ(Text(), "judged by: all but ties");
}

TEST_F(RunCoverageTest, RecordKeepsCoverageAndOlderOnesUseTheirSignals) {
  RunRecord run;
  run.description.layout = kCoveredLayout;
  run.step = kYoungSteps;
  run.steps_recorded = kFewSteps;
  run.signals = SampleOf(0, kAll).signals();
  EXPECT_EQ(JudgedByOf(run).Text(false), "healthy");
  run.signals = SampleOf(0, kLeak).signals();
  EXPECT_EQ(JudgedByOf(run).Text(false), "judged by: leak");

  // What the signals say as well is stored as servers of before read it.
  Steps(20, kLeak);
  run.coverage = coverage_;
  EXPECT_LT(EncodeRunRecord(run)[0], 7);
  run.signals = SampleOf(0, kAll).signals();
  EXPECT_EQ(EncodeRunRecord(run)[0], 7) << "an earlier attempt had them";
  Steps(4, kAll, 2);
  run.step = step_ - 1;
  run.coverage = coverage_;
  const auto read = DecodeRunRecord(EncodeRunRecord(run));
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(JudgedByOf(*read).Text(false), "judged by: norm, leak, loss; drift, ties, logits in 1 of 3 layers");
  EXPECT_EQ(read->coverage.missed, run.coverage.missed);
  EXPECT_EQ(read->coverage.head_step, run.coverage.head_step);
}

}  // namespace
}  // namespace bellwether::server
