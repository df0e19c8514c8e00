// Goal: a layer that computes wrongly is named in one sample with the tensor that is wrong; healthy
// rounding never is, however many questions are asked.  An alert ends only where its layers were
// asked again.
// Method: differences as healthy layers have them, 10^8 questions; the same with one thing planted;
// and what is not measured, not finite, or alike on all ranks.

#include "server/detect/arithmetic_watch.h"

#include <gmock/gmock.h>

#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "tests/support/judged_samples.h"

namespace bellwether::server {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;
using testing::SizeIs;

// Three laws of each layer.
RowNames LinearNames(int layers) {
  RowNames names;
  for (int i = 0; i < layers; ++i) {
    for (const char* const law : {"y=dx", "dx=dW", "dW=y"}) names.Add("layers." + std::to_string(i) + " " + law);
  }
  return names;
}

// Of one sigma each, all asked.
StepSample RightLayers(int layers, int64_t step = 20) {
  StepSample sample;
  Layout layout{.layers = 1, .heads = 1, .kv_heads = 1};
  layout.modules = 3 * layers;
  sample.Reset(layout);
  sample.step = step;
  for (float& value : sample.Add(SignalId::kLawDifference)) value = -2;
  for (float& value : sample.Add(SignalId::kLawVariance)) value = 4;
  for (const SignalId zero : {SignalId::kLawAlike, SignalId::kLawInNonfinite, SignalId::kLawOutNonfinite}) {
    for (float& value : sample.Add(zero)) value = 0;
  }
  return sample;
}

void Differ(StepSample* sample, size_t row, float sigmas) { sample->Add(SignalId::kLawDifference)[row] = 2 * sigmas; }

std::vector<Finding> JudgedLayers(const StepSample& sample, const RowNames& names) {
  ArithmeticWatch watch{ArithmeticOptions{}};
  EXPECT_TRUE(watch.Observe(sample, &names));
  return *watch.findings();
}

TEST(ArithmeticWatchTest, ARowsNameHasPlaceLawAndResults) {
  LawName name = ReadLawName("model.layers.3.mlp.up_proj dx=dW");
  EXPECT_EQ(name.place, "model.layers.3.mlp.up_proj");
  EXPECT_EQ(name.law, "dx=dW");
  EXPECT_THAT(name.results, ElementsAre("dx", "dW"));
  name = ReadLawName("my head dW:classes.3");
  EXPECT_EQ(name.place, "my head");
  EXPECT_THAT(name.results, ElementsAre("dW"));
  EXPECT_THAT(ReadLawName("nothing").results, IsEmpty());
}

TEST(ArithmeticWatchTest, AHundredMillionHealthyQuestionsGiveNoAlarm) {
  // Normal numbers that come again in another order: so many are soon asked.
  std::mt19937_64 random(42);
  std::normal_distribution<float> normal;
  std::vector<float> numbers(1 << 20);
  for (float& number : numbers) number = 2 * normal(random);
  ArithmeticOptions options;
  options.z_min = 0;
  ArithmeticWatch watch{options};
  StepSample sample = RightLayers(4096);
  int64_t asked = 0;
  while (asked < 100'000'000) {
    const size_t at = random() % numbers.size(), stride = random() | 1;
    size_t i = 0;
    for (float& value : sample.Add(SignalId::kLawDifference)) value = numbers[(at + stride * i++) % numbers.size()];
    ASSERT_TRUE(watch.Observe(sample, nullptr));
    ASSERT_THAT(*watch.findings(), IsEmpty()) << watch.findings()->front().summary;
    asked += watch.questions();
  }
}

TEST(ArithmeticWatchTest, TheTensorOfAllBrokenLawsIsNamed) {
  const RowNames names = LinearNames(3);
  const struct {
    std::vector<size_t> laws;
    const char* said;
  } cases[] = {{{0, 1}, "layers.1: dx: "},
               {{1, 2}, "layers.1: dW: "},
               {{0, 2}, "layers.1: y: "},
               {{1}, "layers.1: dx or dW: "},
               {{0, 1, 2}, "layers.1: y or dx or dW: "}};
  for (const auto& c : cases) {
    SCOPED_TRACE(c.said);
    StepSample sample = RightLayers(3);
    for (const size_t law : c.laws) Differ(&sample, 3 + law, -40);
    const std::vector<Finding> found = JudgedLayers(sample, names);
    ASSERT_THAT(found, SizeIs(c.laws.size()));
    EXPECT_EQ(found[0].rule, Rule::kArithmetic);
    EXPECT_EQ(found[0].severity, Severity::kCritical);
    EXPECT_EQ(found[0].where, (Head{-1, -1}));
    EXPECT_THAT(found[0].summary, HasSubstr(std::string("arithmetic is wrong in ") + c.said));
    EXPECT_THAT(found[0].summary, HasSubstr("is broken by 40 standard deviations of rounding"));
    EXPECT_THAT(found[0].summary, HasSubstr("since step 20"));
    EXPECT_EQ(found[0].note, "layers.1 " + std::string(ReadLawName(names.names()[3 + c.laws[0]]).law));
    EXPECT_STREQ(found[0].facts[0].signal, "law_z");
    EXPECT_NEAR(found[0].facts[0].value, 40, 1e-4);
    EXPECT_EQ(found[0].facts[0].threshold, 6);
  }
}

TEST(ArithmeticWatchTest, TheWorstPlacesAreNamedAndTheOthersCounted) {
  const RowNames names = LinearNames(12);
  StepSample sample = RightLayers(12);
  for (size_t i = 0; i < 12; ++i) {
    for (size_t law = 1; law < 3; ++law) Differ(&sample, 3 * i + law, i == 7 ? 4000.0f : 400.0f);
  }
  const std::vector<Finding> found = JudgedLayers(sample, names);
  EXPECT_THAT(found, SizeIs(2 * 8));
  EXPECT_THAT(found[0].summary, HasSubstr("wrong in layers.7: dW: "));
  EXPECT_THAT(found[0].summary, HasSubstr("; also in layers.0 (dW), layers.1 (dW)"));
  EXPECT_THAT(found[0].summary, HasSubstr(" and in 4 further places, since step"));
}

TEST(ArithmeticWatchTest, NonfiniteResultsOfFiniteOperandsAreFaults) {
  const RowNames names = LinearNames(3);
  StepSample sample = RightLayers(3);
  for (const size_t law : {1, 2}) {
    sample.Add(SignalId::kLawOutNonfinite)[3 + law] = 5;
    sample.Add(SignalId::kLawDifference)[3 + law] = kNan;
  }
  // What lies below was given them.
  for (size_t law = 0; law < 3; ++law) {
    sample.Add(SignalId::kLawInNonfinite)[law] = 9;
    sample.Add(SignalId::kLawOutNonfinite)[law] = 900;
    sample.Add(SignalId::kLawDifference)[law] = kNan;
  }
  std::vector<Finding> found = JudgedLayers(sample, names);
  ASSERT_THAT(found, SizeIs(2));
  EXPECT_THAT(found[0].summary, HasSubstr("wrong in layers.1: dW: 5 elements of dx and dW are not finite"));
  EXPECT_THAT(found[0].summary, Not(HasSubstr("layers.0")));
  EXPECT_STREQ(found[0].facts[0].signal, "law_out_nonfinite");
  EXPECT_EQ(found[0].facts[0].value, 5);
  // What was not counted is not known to be finite, or not to be.
  sample.Add(SignalId::kLawInNonfinite)[4] = NotMeasured();
  sample.Add(SignalId::kLawOutNonfinite)[5] = NotMeasured();
  EXPECT_THAT(JudgedLayers(sample, names), IsEmpty());
}

TEST(ArithmeticWatchTest, AlikeRoundingsAreNoFault) {
  const RowNames names = LinearNames(1);
  StepSample sample = RightLayers(1);
  Differ(&sample, 1, 40);
  sample.Add(SignalId::kLawAlike)[1] = 2 * 36;
  EXPECT_THAT(JudgedLayers(sample, names), IsEmpty());
  sample.Add(SignalId::kLawAlike)[1] = 2 * 33;
  EXPECT_THAT(JudgedLayers(sample, names), SizeIs(1));
}

TEST(ArithmeticWatchTest, RoundingsThatAllRanksShareAddUp) {
  const RowNames names = LinearNames(1);
  // 64 ranks with the same difference, all of which is of tokens that come again on each.
  StepSample sample = RightLayers(1);
  sample.ranks = 64;
  for (const SignalId sum : {SignalId::kLawDifference, SignalId::kLawVariance}) {
    for (float& value : sample.Add(sum)) value *= 64;
  }
  for (float& value : sample.Add(SignalId::kLawAlikeSigma)) value = 2 * 64;
  EXPECT_THAT(JudgedLayers(sample, names), IsEmpty());
  Differ(&sample, 1, 64 * 6.5f);
  EXPECT_THAT(JudgedLayers(sample, names), SizeIs(1));
  // Nothing is shared by one.
  sample = RightLayers(1);
  sample.ranks = 1;
  for (float& value : sample.Add(SignalId::kLawAlikeSigma)) value = 2;
  Differ(&sample, 1, 6.1f);
  EXPECT_THAT(JudgedLayers(sample, names), SizeIs(1));
}

TEST(ArithmeticWatchTest, NothingIsAskedOfUnmeasuredValues) {
  ArithmeticWatch watch{ArithmeticOptions{}};
  StepSample sample;
  Layout layout{.layers = 1, .heads = 1, .kv_heads = 1};
  layout.modules = 3;
  sample.Reset(layout);
  EXPECT_FALSE(watch.Observe(sample, nullptr));
  sample.Add(SignalId::kLawDifference);
  sample.Add(SignalId::kLawVariance);
  EXPECT_FALSE(watch.Observe(sample, nullptr));
  EXPECT_EQ(watch.samples(), 0) << "no part of the chance is spent";
  sample = RightLayers(2);
  sample.Add(SignalId::kLawDifference)[0] = kNan;
  sample.Add(SignalId::kLawVariance)[1] = std::numeric_limits<float>::infinity();
  sample.Add(SignalId::kLawVariance)[2] = -1;
  ASSERT_TRUE(watch.Observe(sample, nullptr));
  EXPECT_EQ(watch.questions(), 3);
  EXPECT_THAT(*watch.findings(), IsEmpty());
}

TEST(ArithmeticWatchTest, NumbersTooSmallForAFloatWidenTheLimit) {
  StepSample sample = RightLayers(1);
  sample.Add(SignalId::kLawDifference)[0] = 1e-20f;
  sample.Add(SignalId::kLawVariance)[0] = 0;
  EXPECT_THAT(JudgedLayers(sample, LinearNames(1)), IsEmpty());
}

TEST(ArithmeticWatchTest, ManyQuestionsAndSamplesRaiseTheLimit) {
  ArithmeticOptions options;
  options.z_min = 0;
  for (const int layers : {1, 4000}) {
    ArithmeticWatch watch{options};
    StepSample sample = RightLayers(layers);
    Differ(&sample, 1, 5);
    ASSERT_TRUE(watch.Observe(sample, nullptr));
    EXPECT_EQ(watch.findings()->size(), layers == 1 ? 1u : 0u);
    Differ(&sample, 1, 6.5f);
    ASSERT_TRUE(watch.Observe(sample, nullptr));
    EXPECT_THAT(*watch.findings(), SizeIs(1));
    for (int i = 0; i < 1000; ++i) watch.Observe(RightLayers(layers), nullptr);
    ASSERT_TRUE(watch.Observe(sample, nullptr));
    EXPECT_THAT(*watch.findings(), IsEmpty());
  }
}

TEST(ArithmeticWatchTest, APlaceStaysWrongUntilItIsAskedAgain) {
  ArithmeticWatch watch{ArithmeticOptions{}};
  StepSample sample = RightLayers(4);
  Differ(&sample, 4, 50);
  Differ(&sample, 10, 50);
  ASSERT_TRUE(watch.Observe(sample, nullptr));
  EXPECT_TRUE(watch.any_wrong());
  sample = RightLayers(4);
  sample.Add(SignalId::kLawDifference)[4] = NotMeasured();
  sample.Add(SignalId::kLawInNonfinite)[4] = NotMeasured();
  ASSERT_TRUE(watch.Observe(sample, nullptr));
  EXPECT_TRUE(watch.any_wrong());
  ASSERT_TRUE(watch.Observe(RightLayers(4), nullptr));
  EXPECT_FALSE(watch.any_wrong());
}

}  // namespace
}  // namespace bellwether::server
