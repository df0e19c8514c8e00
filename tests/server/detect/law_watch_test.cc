// Goal: a kernel that breaks a law of attention is called broken in one sample, with the place and
// what is left as wrong; healthy rounding never is, however many questions are asked.
// Method: sums as a healthy kernel has them, 10^7 questions; the same with one thing planted; and
// what is not measured, not finite, or too small for a float.

#include "server/detect/law_watch.h"

#include <gmock/gmock.h>

#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "tests/support/judged_samples.h"
#include "tests/support/law_samples.h"

namespace bellwether::server {
namespace {

using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;
using testing::SizeIs;

// 3 layers of 8 query heads and 4 key heads.
StepSample Lawful(int64_t step = 20) {
  StepSample sample;
  sample.Reset({.layers = 3, .heads = 8, .kv_heads = 4});
  sample.step = step;
  AddHealthyLaws(&sample);
  return sample;
}
// In layer 1, key head 2, if not said otherwise.
constexpr size_t kCell = 1 * 4 + 2;
void Break(StepSample* sample, SignalId law, float z) { sample->Add(law)[kCell] = 2 * z; }
void Explain(StepSample* sample, int law, float z) {
  sample->Add(LawSignal(SignalId::kLawA1Alike, law - 1))[kCell] = 2 * z;
}
void PutFar(StepSample* sample, SignalId first, size_t cell, float excess) {
  sample->Add(LawSignal(first, 3))[cell] = 3 * kShadowRows * excess;
}

std::vector<Finding> Judged(const StepSample& sample, const std::string& kernel = "flash") {
  LawWatch watch{KernelOptions{}};
  EXPECT_TRUE(watch.Observe(sample, {.kernel = kernel}));
  return *watch.findings();
}

TEST(LawWatchTest, AllQuestionsOfARunShareOneChance) {
  double spent = 0;
  constexpr int64_t kSamples = 1000000;
  for (int64_t k = 1; k <= kSamples; ++k) spent += 7 * LawLimits(1e-3, k, 7).chance;
  // What is left is less than the chance over the number of samples.
  EXPECT_LE(spent, 1e-3);
  EXPECT_GE(spent, 1e-3 * (1 - 1.0 / kSamples));
}

TEST(LawWatchTest, LimitsAreBoundsOfSubGaussianNumbers) {
  const LawLimits limits(1e-3, 50, 20000);
  EXPECT_NEAR(2 * std::exp(-limits.z() * limits.z() / 2), limits.chance, 1e-6 * limits.chance);
  const double x = std::log(1 / limits.chance);
  EXPECT_NEAR(limits.excess(1), 1 + 2 * std::sqrt(x) + 2 * x, 1e-9);
  // Many rows average out.
  EXPECT_NEAR(limits.excess(1e12), 1, 1e-3);
  EXPECT_GT(limits.excess(4), limits.excess(16));
  EXPECT_GT(LawLimits(1e-3, 51, 20000).z(), limits.z());
  EXPECT_GT(LawLimits(1e-3, 50, 20001).z(), limits.z());
}

TEST(LawWatchTest, TenMillionHealthyQuestionsGiveNoAlarm) {
  LawWatch watch{KernelOptions{}};
  std::mt19937_64 random(42);
  std::normal_distribution<float> normal;
  std::gamma_distribution<float> squares(kShadowRows / 2, 2);
  int64_t asked = 0;
  StepSample sample;
  while (asked < 10'000'000) {
    sample.Reset({.layers = 32, .heads = 32, .kv_heads = 32});
    sample.step = asked;
    AddHealthyLaws(
        &sample, [&] { return normal(random); }, [&] { return squares(random); });
    ASSERT_TRUE(watch.Observe(sample, {}));
    ASSERT_THAT(*watch.findings(), IsEmpty()) << watch.findings()->front().summary;
    asked += watch.questions();
  }
}

TEST(LawWatchTest, BrokenLawsNameTheirSet) {
  const struct {
    std::vector<int> laws;
    const char* set;
  } cases[] = {{{1}, "leaves delta"},
               {{3}, "leaves dQ or dK, by a factor or of exchanged heads"},
               {{1, 4}, "leaves O"},
               {{1, 3}, "leaves dK, or keys whose dK was not written"},
               {{2}, "leaves dV, or P of the backward pass"},
               {{2, 4}, "leaves dV, or P of the backward pass"},
               {{4}, "leaves O or dV"}};
  for (const auto& c : cases) {
    SCOPED_TRACE(c.set);
    StepSample sample = Lawful();
    for (const int law : c.laws) {
      Break(&sample, law <= 2 ? LawSignal(SignalId::kLawA10, 8 * (law - 1) + 5) : LawSignal(SignalId::kLawA3, law - 3),
            -40);
    }
    const std::vector<Finding> found = Judged(sample);
    // Both query heads of the key head.
    ASSERT_THAT(found, SizeIs(2));
    EXPECT_EQ(found[0].where, (Head{1, 4}));
    EXPECT_EQ(found[1].where, (Head{1, 5}));
    EXPECT_EQ(found[0].severity, Severity::kCritical);
    EXPECT_EQ(found[0].rule, Rule::kKernel);
    EXPECT_THAT(found[0].summary, HasSubstr("kernel (flash) is wrong in layer 1 heads 4, 5: "));
    EXPECT_THAT(found[0].summary, HasSubstr(c.set));
    EXPECT_THAT(found[0].summary, HasSubstr("by 40"));
    EXPECT_EQ(found[0].fact_count, static_cast<int32_t>(c.laws.size()));
    EXPECT_NEAR(found[0].facts[0].value, 40, 1e-3);
  }
}

TEST(LawWatchTest, TheShadowCheckNamesTheTensorAndTheHead) {
  StepSample sample = Lawful();
  Break(&sample, SignalId::kLawA3, 30);
  PutFar(&sample, SignalId::kShadowDqDot, 1 * 8 + 5, 400);
  std::vector<Finding> found = Judged(sample, "");
  ASSERT_THAT(found, SizeIs(1));
  EXPECT_EQ(found[0].where, (Head{1, 5}));
  EXPECT_THAT(found[0].summary, HasSubstr("kernel is wrong in layer 1 head 5: dQ is wrong: 400 times as far"));
  EXPECT_STREQ(found[0].facts[0].signal, "shadow_dq_excess");
  // What sums cancel out.
  sample = Lawful();
  PutFar(&sample, SignalId::kShadowDvDot, kCell, 40);
  found = Judged(sample);
  ASSERT_THAT(found, SizeIs(2));
  EXPECT_THAT(found[0].summary, HasSubstr("heads 4, 5: dV is wrong: 40 times"));
  EXPECT_THAT(found[0].summary, Not(HasSubstr("broken")));
}

TEST(LawWatchTest, AFactorNearOneNamesItsTensor) {
  StepSample sample = Lawful();
  const auto put = [&](SignalId first, size_t cell, float more, float alike) {
    sample.Add(first)[cell] = kInformation * kInformation * more;
    sample.Add(LawSignal(first, 2))[cell] = kInformation * alike;
  };
  put(SignalId::kShadowDvFactor, kCell, 0.01f, 2);
  std::vector<Finding> found = Judged(sample, "");
  ASSERT_THAT(found, SizeIs(2));
  EXPECT_THAT(found[0].summary, HasSubstr("kernel is wrong in layer 1 heads 4, 5: dV is wrong: 1.01 times its "
                                          "reference, 8 standard deviations of rounding from once"));
  ASSERT_EQ(found[0].fact_count, 1);
  EXPECT_STREQ(found[0].facts[0].signal, "shadow_dv_factor_z");
  EXPECT_TRUE(found[0].exact);
  // What roundings explain that are alike is no fault.
  put(SignalId::kShadowDvFactor, kCell, 0.01f, 9);
  EXPECT_THAT(Judged(sample), IsEmpty());
  // A head of the queries, too small.
  put(SignalId::kShadowDqFactor, 1 * 8 + 5, -0.02f, 0);
  found = Judged(sample);
  ASSERT_THAT(found, SizeIs(1));
  EXPECT_EQ(found[0].where, (Head{1, 5}));
  EXPECT_THAT(found[0].summary, HasSubstr("dQ is wrong: 0.98 times its reference, 20 standard deviations"));
  // Not measured, or in a type whose rounding is not known.
  for (const float variance : {0.0f, std::numeric_limits<float>::quiet_NaN()}) {
    sample.Add(SignalId::kShadowDqFactorVariance)[1 * 8 + 5] = variance;
    EXPECT_THAT(Judged(sample), IsEmpty());
  }
}

TEST(LawWatchTest, NoFactorOfGradientsThatMayUnderflowIsAFault) {
  StepSample sample = Lawful();
  const size_t at = 1 * 8 + 5;
  sample.Add(SignalId::kShadowDqFactor)[at] = -kInformation * kInformation;  // dQ is 0.
  ASSERT_THAT(Judged(sample), SizeIs(1));
  sample.Add(SignalId::kShadowDqRest)[at] = sample.Add(SignalId::kShadowDqVariance)[at] = 1e-36f;
  EXPECT_THAT(Judged(sample), IsEmpty());
}

TEST(LawWatchTest, TheWorstLayersAreNamedAndTheOthersCounted) {
  StepSample sample;
  sample.Reset({.layers = 12, .heads = 2, .kv_heads = 2});
  sample.step = 5;
  AddHealthyLaws(&sample);
  for (size_t layer = 0; layer < 12; ++layer) {
    for (size_t head = 0; head < 2; ++head) {
      sample.Add(SignalId::kLawA3)[layer * 2 + head] = layer == 7 ? 4000.0f : 400.0f;
    }
  }
  const std::vector<Finding> found = Judged(sample);
  EXPECT_THAT(found, SizeIs(2 * 8));
  EXPECT_THAT(found[0].summary, HasSubstr("wrong in layer 7 (all 2 heads)"));
  EXPECT_THAT(found[0].summary, HasSubstr("also in layer 0 (all 2 heads), layer 1"));
  EXPECT_THAT(found[0].summary, HasSubstr("and in 4 further layers, since step 5"));
}

TEST(LawWatchTest, RoundingsThatAreAlikeAreEvidenceAndNoAlarm) {
  StepSample sample = Lawful();
  // As flash attention in broad rows: A1 in every projection, beyond what is known of it, too.
  for (int i = 0; i < 8; ++i) Break(&sample, LawSignal(SignalId::kLawA10, i), 70);
  Explain(&sample, 1, 40);
  Break(&sample, SignalId::kLawA4, 20);
  Explain(&sample, 4, 19);
  LawWatch watch{KernelOptions{}};
  ASSERT_TRUE(watch.Observe(sample, {}));
  EXPECT_THAT(*watch.findings(), IsEmpty());
  std::vector<Finding> drift(3);
  drift[0].where = {1, 5};
  drift[1].where = {1, 0};
  watch.AddEvidence(&drift);  // The third is of the run.
  ASSERT_EQ(drift[0].fact_count, 2);
  EXPECT_STREQ(drift[0].facts[0].signal, "law_a1_z");
  EXPECT_NEAR(drift[0].facts[0].value, 70, 1e-3);
  EXPECT_STREQ(drift[0].facts[1].signal, "law_a4_z");
  EXPECT_EQ(drift[1].fact_count, 0);
  EXPECT_EQ(drift[2].fact_count, 0);
  // Of that sample alone.
  StepSample next = Lawful(21);
  watch.Observe(next, {});
  std::vector<Finding> later(1);
  later[0].where = {1, 5};
  watch.AddEvidence(&later);
  EXPECT_EQ(later[0].fact_count, 0);
}

TEST(LawWatchTest, NoQuestionIsAskedOfUnmeasuredOrNonfiniteValues) {
  LawWatch watch{KernelOptions{}};
  StepSample nothing;
  nothing.Reset({.layers = 3, .heads = 8, .kv_heads = 4});
  EXPECT_FALSE(watch.Observe(nothing, {}));
  nothing.Add(SignalId::kLawA3Variance);
  nothing.Add(SignalId::kLawA3);
  nothing.Add(SignalId::kLawA3Alike);
  EXPECT_FALSE(watch.Observe(nothing, {})) << "all cells are not measured";
  EXPECT_EQ(watch.samples(), 0) << "no part of the chance is spent";
  ASSERT_TRUE(watch.Observe(Lawful(), {}));
  const int64_t all = watch.questions();
  EXPECT_EQ(all, 12 * 18 + 2 * 2 * (24 + 12)) << "distances and factors";
  StepSample partly = Lawful();
  partly.Add(LawSignal(SignalId::kLawA10, 3))[0] = kNan;
  partly.Add(LawSignal(SignalId::kLawA20, 3))[0] = NotMeasured();
  partly.Add(SignalId::kLawA3Variance)[0] = std::numeric_limits<float>::infinity();
  partly.Add(SignalId::kLawA4Alike)[0] = kNan;
  partly.Add(SignalId::kShadowDkRest)[0] = kNan;
  partly.Add(SignalId::kShadowDvVariance)[0] = 0;
  partly.Add(SignalId::kShadowDqFactor)[0] = kNan;
  ASSERT_TRUE(watch.Observe(partly, {}));
  EXPECT_EQ(watch.questions(), all - 18 - 5);
  EXPECT_THAT(*watch.findings(), IsEmpty());
}

// Sums of squares as of a step whose gradients are small.
StepSample WithSquares() {
  StepSample sample = Lawful();
  for (const SignalId id : {SignalId::kDoSumsq, SignalId::kDqSumsq, SignalId::kDkSumsq, SignalId::kDvSumsq}) {
    for (float& value : sample.Add(id)) value = 0.25f;
  }
  return sample;
}
// An element of 1e26 or so: the law's difference holds it, its variance and the sum of squares do not.
void Overflow(StepSample* sample, SignalId squares, size_t at, int law) {
  sample->Add(squares)[at] = std::numeric_limits<float>::infinity();
  sample->Add(LawSignal(SignalId::kLawA1Variance, law - 1))[kCell] = std::numeric_limits<float>::infinity();
}

TEST(LawWatchTest, OverflowingSquaresOfSmallDoAreAFault) {
  const struct {
    SignalId squares;
    size_t at;
    int law;
    std::vector<int32_t> heads;
    const char* said;
  } cases[] = {{SignalId::kDqSumsq, 1 * 8 + 5, 3, {5}, "layer 1 head 5: dQ is wrong: "},
               {SignalId::kDkSumsq, kCell, 1, {4, 5}, "layer 1 heads 4, 5: dK is wrong: "},
               {SignalId::kDvSumsq, kCell, 2, {4, 5}, "layer 1 heads 4, 5: dV is wrong: "}};
  for (const auto& c : cases) {
    SCOPED_TRACE(c.said);
    StepSample sample = WithSquares();
    Overflow(&sample, c.squares, c.at, c.law);
    const std::vector<Finding> found = Judged(sample, "");
    ASSERT_THAT(found, SizeIs(c.heads.size()));
    for (size_t i = 0; i < c.heads.size(); ++i) EXPECT_EQ(found[i].where, (Head{1, c.heads[i]}));
    EXPECT_EQ(found[0].rule, Rule::kKernel);
    EXPECT_EQ(found[0].severity, Severity::kCritical);
    EXPECT_THAT(found[0].summary, HasSubstr(c.said));
    EXPECT_THAT(found[0].summary,
                HasSubstr("its elements are finite, but the sum of their squares is beyond 3.4e38, and that of dO is"));
    ASSERT_EQ(found[0].fact_count, 1);
    EXPECT_TRUE(std::isinf(found[0].facts[0].value));
  }
}

TEST(LawWatchTest, SquaresAreJudgedWhereNoLawIsAsked) {
  // As in float32.
  StepSample sample;
  sample.Reset({.layers = 3, .heads = 8, .kv_heads = 4});
  for (const SignalId id : {SignalId::kDoSumsq, SignalId::kDqSumsq, SignalId::kDoNonfinite, SignalId::kDqNonfinite}) {
    for (float& value : sample.Add(id)) value = 0;
  }
  LawWatch watch{KernelOptions{}};
  EXPECT_FALSE(watch.Observe(sample, {}));
  sample.Add(SignalId::kDqSumsq)[9] = std::numeric_limits<float>::infinity();
  ASSERT_TRUE(watch.Observe(sample, {}));
  EXPECT_THAT(*watch.findings(), SizeIs(1));
  EXPECT_EQ(watch.samples(), 0) << "no part of the chance is spent";
}

TEST(LawWatchTest, DqAndDkBeyondAFloatLeaveOAsWell) {
  StepSample sample = WithSquares();
  Overflow(&sample, SignalId::kDqSumsq, 1 * 8 + 5, 3);
  Overflow(&sample, SignalId::kDkSumsq, kCell, 1);
  const std::vector<Finding> found = Judged(sample, "");
  ASSERT_THAT(found, Not(IsEmpty()));
  EXPECT_THAT(found[0].summary, HasSubstr("dQ and dK are wrong, or O, of which both are made: "));
}

TEST(LawWatchTest, OverflowingSquaresOfLargeDoAreNoFault) {
  const float infinite = std::numeric_limits<float>::infinity();
  const auto none = [&](const auto& change) {
    StepSample sample = WithSquares();
    Overflow(&sample, SignalId::kDkSumsq, kCell, 1);
    change(&sample);
    EXPECT_THAT(Judged(sample), IsEmpty());
  };
  // Of one of the group's two query heads.
  for (const float of_do : {1e8f, infinite, kNan, NotMeasured()}) {
    none([&](StepSample* sample) { sample->Add(SignalId::kDoSumsq)[1 * 8 + 5] = of_do; });
  }
  none([](StepSample* sample) { sample->Add(SignalId::kDoNonfinite)[1 * 8 + 5] = 1; });
  none([](StepSample* sample) { sample->Add(SignalId::kDoNonfinite)[1 * 8 + 5] = NotMeasured(); });
  // What is not finite itself is another rule's.
  none([](StepSample* sample) { sample->Add(SignalId::kDkNonfinite)[kCell] = 1; });
  none([](StepSample* sample) { sample->Add(SignalId::kDkNonfinite)[kCell] = NotMeasured(); });
  none([](StepSample* sample) { sample->Add(SignalId::kDkSumsq)[kCell] = kNan; });
  none([](StepSample* sample) { sample->Add(SignalId::kDkSumsq)[kCell] = NotMeasured(); });
}

TEST(LawWatchTest, OverflowBehindAHugeForwardPassIsNoFault) {
  const float infinite = std::numeric_limits<float>::infinity();
  const auto found = [&](SignalId squares, size_t at, int law, const auto& change) {
    StepSample sample = WithSquares();
    for (float& value : sample.Add(SignalId::kLogitMax)) value = 30;
    Overflow(&sample, squares, at, law);
    change(&sample);
    return Judged(sample).size();
  };
  const auto usual = [](StepSample*) {};
  const auto scores = [](StepSample* sample) { sample->Add(SignalId::kLogitMax)[1 * 8 + 5] = 1e12f; };
  const auto outputs = [&](StepSample* sample) { sample->Add(SignalId::kLawA4Variance)[kCell] = infinite; };
  EXPECT_EQ(found(SignalId::kDqSumsq, 1 * 8 + 5, 3, usual), 1u);
  EXPECT_EQ(found(SignalId::kDqSumsq, 1 * 8 + 5, 3, scores), 0u);
  EXPECT_EQ(found(SignalId::kDqSumsq, 1 * 8 + 5, 3, outputs), 0u);
  EXPECT_EQ(found(SignalId::kDkSumsq, kCell, 1, scores), 0u);
  EXPECT_EQ(found(SignalId::kDkSumsq, kCell, 1, outputs), 0u);
  EXPECT_EQ(found(SignalId::kDvSumsq, kCell, 2, scores), 2u) << "dV is made of P and dO alone";
}

TEST(LawWatchTest, NumbersTooSmallForAFloatWidenLimits) {
  StepSample sample = Lawful();
  // Variances that were lost as zeros.
  sample.Add(SignalId::kLawA3)[kCell] = 1e-20f;
  sample.Add(SignalId::kLawA3Variance)[kCell] = 0;
  PutFar(&sample, SignalId::kShadowDqDot, 3, 30);
  sample.Add(SignalId::kShadowDqVarianceSq)[3] = 0;
  const auto scale = [&](SignalId id, float by) { sample.Add(id)[3] *= by; };
  scale(SignalId::kShadowDqRest, 1e-24f);
  scale(SignalId::kShadowDqVariance, 1e-24f);
  EXPECT_THAT(Judged(sample), IsEmpty());
  // One row is what it counts as.
  scale(SignalId::kShadowDqRest, 4);
  EXPECT_THAT(Judged(sample), SizeIs(1));
}

TEST(LawWatchTest, LaterSamplesHaveLessOfTheChance) {
  LawWatch watch{KernelOptions{}};
  StepSample sample = Lawful();
  Break(&sample, SignalId::kLawA3, 5.8f);
  ASSERT_TRUE(watch.Observe(sample, {}));
  const auto near = watch.findings()->size();
  for (int k = 0; k < 1000; ++k) watch.Observe(Lawful(k), {});
  ASSERT_TRUE(watch.Observe(sample, {}));
  EXPECT_EQ(near, 2u);
  EXPECT_THAT(*watch.findings(), IsEmpty());
  Break(&sample, SignalId::kLawA3, 8);
  ASSERT_TRUE(watch.Observe(sample, {}));
  EXPECT_THAT(*watch.findings(), SizeIs(2));
}

}  // namespace
}  // namespace bellwether::server
