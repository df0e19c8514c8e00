// Goal: a batch of one repeated token and a sequence that loses far more than any before are told in their
// step, with the ids that the job has named.  Healthy losses are not, whatever their tails are like.
// Method: losses of steps, drawn at random, with one thing planted.

#include "server/detect/sequence_watch.h"

#include <gmock/gmock.h>

#include <cmath>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "server/detect/archive.h"

namespace bellwether::server {
namespace {

using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;

constexpr SequenceWatch::Context kJudged{.excused = false, .quiet_steps = 1000};

StepSample Lost(int64_t step, double largest, double repeated = 0.02, double labels = 4096) {
  StepSample sample;
  sample.Reset({.layers = 1, .heads = 1, .kv_heads = 1});
  sample.step = step;
  sample.Add(SignalId::kLossSequenceMax)[0] = static_cast<float>(largest);
  sample.Add(SignalId::kLossTokens)[0] = static_cast<float>(labels);
  sample.Add(SignalId::kLossRepeatedTokens)[0] = static_cast<float>(repeated * labels);
  return sample;
}

class SequenceWatchTest : public testing::Test {
 protected:
  const std::vector<Finding>& Judge(const StepSample& sample) {
    watch_.Observe(sample, kJudged);
    return *watch_.findings();
  }
  double Usual() { return 3 * std::exp(0.15 * normal_(random_)); }
  // With the mean of its sequences, and labels that vary.
  StepSample Whole(int64_t step, double largest, double mean, double repeated = -1) {
    if (repeated < 0) repeated = 0.2 + 0.02 * normal_(random_);
    StepSample sample = Lost(step, largest, std::round(repeated * 4096) / 4096);
    sample.Add(SignalId::kLossSequences)[0] = 64;
    sample.Add(SignalId::kLossSequenceSum)[0] = static_cast<float>(64 * (mean + 0.02 * normal_(random_)));
    return sample;
  }
  void JudgeHealthy(int steps) {
    for (int i = 0; i < steps; ++i) ASSERT_THAT(Judge(Lost(step_++, Usual())), IsEmpty());
  }

  int64_t step_ = 1000;
  std::mt19937 random_{3};
  std::normal_distribution<double> normal_;
  SequenceWatch watch_{SequencesOptions{}};
};

TEST_F(SequenceWatchTest, OneRepeatedTokenIsToldInItsStep) {
  JudgeHealthy(300);
  const std::vector<Finding>& found = Judge(Lost(step_++, Usual(), 0.99));
  ASSERT_THAT(found, SizeIs(1));
  EXPECT_EQ(found[0].rule, Rule::kSequences);
  EXPECT_EQ(found[0].severity, Severity::kInfo);
  EXPECT_EQ(found[0].facts[0].signal, std::string("loss_repeated_share"));
  EXPECT_EQ(found[0].summary,
            "99 % of the labels are the same as the one before, at step 1300; in the past at most 2 %");
  JudgeHealthy(300);
}

TEST_F(SequenceWatchTest, TwoInARowAreAWarning) {
  JudgeHealthy(300);
  for (const Severity severity : {Severity::kInfo, Severity::kWarning, Severity::kWarning}) {
    ASSERT_THAT(Judge(Lost(step_++, Usual(), 0.99)), SizeIs(1));
    EXPECT_EQ(watch_.findings()->front().severity, severity);
    EXPECT_EQ(watch_.findings()->front().first_step, 1300);
    EXPECT_EQ(watch_.findings()->front().cause, "bad data");
  }
}

TEST_F(SequenceWatchTest, BadDataIsToldAgainWhenItIsOver) {
  for (int i = 0; i < 200; ++i) Judge(Whole(step_++, Usual(), 2.5));
  const std::string words = "largest losses of sequences: 9 0123456789abcdef";
  for (int i = 0; i < 3; ++i) {
    watch_.OnEvent({.step = step_, .kind = EventKind::kAnnotation, .value = 9, .text = words});
    Judge(Whole(step_++, 9, 4.2));
    ASSERT_EQ(watch_.findings()->size(), i == 0 ? 0u : 1u);
    EXPECT_EQ(watch_.bad_data(), i > 0);
  }
  EXPECT_THAT(watch_.findings()->front().summary,
              HasSubstr("the data of steps 1200 to 1202 is not like that before: 3 batches are odd; a sequence has "
                        "lost 9, where the largest of a step loses "));
  EXPECT_THAT(watch_.findings()->front().summary, HasSubstr("step 1202: 9 0123456789abcdef"));
  for (int i = 0; i < 5; ++i) EXPECT_THAT(Judge(Whole(step_++, Usual(), 2.5)), IsEmpty());
  const std::vector<Finding>& over = Judge(Whole(step_++, Usual(), 2.5));
  ASSERT_THAT(over, SizeIs(1));
  EXPECT_TRUE(over[0].news);
  EXPECT_THAT(over[0].summary, HasSubstr("the batches since are usual"));
  for (int i = 0; i < 50; ++i) EXPECT_THAT(Judge(Whole(step_++, Usual(), 2.5)), IsEmpty());
}

TEST_F(SequenceWatchTest, BatchesWithoutALabelHaveNothingToLearn) {
  for (int i = 0; i < 100; ++i) Judge(Whole(step_++, Usual(), 2.5));
  for (int i = 0; i < 5; ++i) {
    StepSample sample = Lost(step_++, 0, 0, 0);
    sample.Add(SignalId::kLossGivenTokens)[0] = 4096;
    Judge(sample);
    ASSERT_THAT(*watch_.findings(), SizeIs(i == 0 ? 0 : 1));
  }
  EXPECT_EQ(watch_.findings()->front().cause, "nothing to learn");
  EXPECT_EQ(watch_.findings()->front().severity, Severity::kWarning);
  EXPECT_EQ(watch_.findings()->front().summary,
            "nothing is learned: no label counts, all are masked, in 5 steps, since step 1100");
  for (int i = 0; i < 50; ++i) EXPECT_THAT(Judge(Whole(step_++, Usual(), 2.5)), IsEmpty());
}

TEST_F(SequenceWatchTest, LabelsThatStayTheSameHaveNothingToLearn) {
  for (int i = 0; i < 100; ++i) Judge(Whole(step_++, Usual(), 2.5));
  for (int i = 0; i < 300; ++i) {
    const std::vector<Finding>& found = Judge(Whole(step_++, 1, 0.5, 0.98));
    ASSERT_THAT(found, SizeIs(i < 7 ? 0 : 1)) << i;
    if (i < 7) continue;
    EXPECT_EQ(found[0].cause, "nothing to learn");
  }
  for (int i = 0; i < 50; ++i) EXPECT_THAT(Judge(Whole(step_++, Usual(), 2.5)), IsEmpty());
}

TEST_F(SequenceWatchTest, OneBatchAgainAndAgainHasNothingToLearn) {
  for (int i = 0; i < 100; ++i) Judge(Whole(step_++, Usual(), 2.5, 0.1 + 0.001 * (i % 17)));
  for (int i = 0; i < 20; ++i) {
    const std::vector<Finding>& found = Judge(Whole(step_++, Usual(), 2.5, 0.13));
    ASSERT_THAT(found, SizeIs(i < 7 ? 0 : 1)) << i;
    if (i < 7) continue;
    EXPECT_THAT(found[0].summary, HasSubstr("the batch is the same: exactly 4096 labels count"));
  }
  EXPECT_THAT(Judge(Whole(step_++, Usual(), 2.5, 0.14)), IsEmpty());
}

TEST_F(SequenceWatchTest, CountsThatOftenComeAgainSayNothingOfTheBatch) {
  for (int i = 0; i < 3000; ++i) EXPECT_THAT(Judge(Whole(step_++, Usual(), 2.5, i / 5 % 2 == 0 ? 0 : 0.1)), IsEmpty());
  for (int i = 0; i < 20; ++i) EXPECT_THAT(Judge(Whole(step_++, Usual(), 2.5, 0)), IsEmpty());
}

TEST_F(SequenceWatchTest, ABatchThatStaysIsTheNewNormal) {
  JudgeHealthy(300);
  for (int i = 0; i < 100; ++i) Judge(Lost(step_++, Usual(), 0.99));
  EXPECT_THAT(Judge(Lost(step_++, Usual(), 0.99)), IsEmpty());
}

TEST_F(SequenceWatchTest, TextThatRepeatsATokenNowAndThenIsHealthy) {
  for (int i = 0; i < 3000; ++i) ASSERT_THAT(Judge(Lost(step_++, Usual(), i % 100 == 50 ? 0.97 : 0.1)), IsEmpty());
}

TEST_F(SequenceWatchTest, AnnouncedChangesAreLearntAndNotJudged) {
  JudgeHealthy(300);
  for (int i = 0; i < 10; ++i) {
    EXPECT_FALSE(watch_.Observe(Lost(step_++, 90 + i, 0.97), {.excused = true, .quiet_steps = 1000}));
  }
  for (int i = 0; i < 50; ++i) EXPECT_THAT(Judge(Lost(step_++, 95, 0.97)), IsEmpty());
}

TEST_F(SequenceWatchTest, ChangesDoNotMakeWhatIsWrongUsual) {
  JudgeHealthy(300);
  Judge(Lost(step_++, 90, 0.97));
  for (int i = 0; i < 200; ++i) watch_.Observe(Lost(step_++, 90, 0.97), {.excused = true, .quiet_steps = 1000});
  EXPECT_THAT(Judge(Lost(step_++, 90, 0.97)), SizeIs(1));
}

TEST_F(SequenceWatchTest, ASecondFindingBesideAWarningIsTold) {
  JudgeHealthy(300);
  for (int i = 0; i < 10; ++i) Judge(Lost(step_++, Usual(), 0.99));
  const std::vector<Finding>& found = Judge(Lost(step_++, 90, 0.99));
  ASSERT_THAT(found, SizeIs(1));
  EXPECT_EQ(found[0].severity, Severity::kWarning);
  EXPECT_TRUE(found[0].news);
  EXPECT_THAT(found[0].summary, HasSubstr("a sequence has lost 90"));
}

TEST_F(SequenceWatchTest, StepsWithoutALabelSayNothing) {
  SequencesOptions options;
  options.labels = 0;
  SequenceWatch watch{options};
  for (int i = 0; i < 600; ++i) watch.Observe(Lost(step_++, Usual(), 0.02, i % 2 == 0 ? 4096 : 0), kJudged);
  watch.Observe(Lost(step_++, Usual(), 0.99), kJudged);
  EXPECT_THAT(*watch.findings(), SizeIs(1));
}

TEST_F(SequenceWatchTest, FewLabelsSayNothingOfRepeats) {
  JudgeHealthy(300);
  EXPECT_THAT(Judge(Lost(step_++, Usual(), 1.0, 10)), IsEmpty());
}

TEST_F(SequenceWatchTest, AnOddSequenceIsToldWithItsIds) {
  JudgeHealthy(300);
  watch_.OnEvent({.step = step_,
                  .kind = EventKind::kAnnotation,
                  .value = 90,
                  .text = "largest losses of sequences: 90 0123456789abcdef, 3.1 fedcba9876543210"});
  const std::vector<Finding>& found = Judge(Lost(step_++, 90));
  ASSERT_THAT(found, SizeIs(1));
  EXPECT_EQ(found[0].facts[0].signal, std::string("loss_sequence_max"));
  EXPECT_EQ(found[0].note, "90 0123456789abcdef, 3.1 fedcba9876543210");
  EXPECT_THAT(found[0].summary, HasSubstr("a sequence has lost 90 at step 1300, where the largest of a step has lost"));
  EXPECT_THAT(found[0].summary, HasSubstr("losses and ids of the largest: 90 0123456789abcdef"));
}

TEST_F(SequenceWatchTest, WordsOfAnotherStepAreLeftOut) {
  JudgeHealthy(300);
  watch_.OnEvent(
      {.step = step_ - 1, .kind = EventKind::kAnnotation, .value = 90, .text = "largest losses of sequences: 90 a"});
  watch_.OnEvent({.step = step_, .kind = EventKind::kAnnotation, .value = 90, .text = "something else"});
  ASSERT_THAT(Judge(Lost(step_, 90)), SizeIs(1));
  EXPECT_EQ(watch_.findings()->front().note, "");
}

TEST_F(SequenceWatchTest, OfSeveralRanksTheLargestIsNamed) {
  JudgeHealthy(300);
  for (const double loss : {80.0, 90.0, 70.0}) {
    watch_.OnEvent({.step = step_,
                    .kind = EventKind::kAnnotation,
                    .value = loss,
                    .text = "largest losses of sequences: " + std::to_string(static_cast<int>(loss))});
  }
  ASSERT_THAT(Judge(Lost(step_, 90)), SizeIs(1));
  EXPECT_EQ(watch_.findings()->front().note, "90");
}

TEST_F(SequenceWatchTest, NothingIsToldBeforeThereIsAPast) {
  for (int i = 0; i < 200; ++i) {
    EXPECT_THAT(Judge(Lost(step_++, i % 10 == 0 ? 90 : 3, i % 10 == 0 ? 0.99 : 0.02)), IsEmpty());
  }
}

TEST_F(SequenceWatchTest, AJobWithoutSequencesIsJudgedByItsLoss) {
  const auto judge = [this](double loss) {
    StepSample sample;
    sample.Reset({.layers = 1, .heads = 1, .kv_heads = 1});
    sample.step = step_++;
    sample.Add(SignalId::kLoss)[0] = static_cast<float>(loss + 0.1 * normal_(random_));
    return Judge(sample);
  };
  for (int i = 0; i < 400; ++i) ASSERT_THAT(judge(std::max(5.5 - 0.02 * i, 2.5)), IsEmpty());
  const int64_t first = step_;
  EXPECT_THAT(judge(8), IsEmpty());
  const std::vector<Finding> found = judge(8);
  ASSERT_THAT(found, SizeIs(1));
  EXPECT_EQ(found[0].cause, "bad data");
  EXPECT_EQ(found[0].facts[0].signal, std::string("loss"));
  EXPECT_EQ(found[0].first_step, first);
  for (int i = 0; i < 200; ++i) judge(2.5);
  // Up, but not worse than chance: it may be the training's.
  for (int i = 0; i < 20; ++i) EXPECT_THAT(judge(4), IsEmpty());
}

TEST_F(SequenceWatchTest, HealthyLossesOfAllKindsAreSilent) {
  std::student_t_distribution<double> tails(6);
  std::exponential_distribution<double> long_tails(3);
  double level = 0;
  const std::vector<std::function<double(int)>> kinds = {
      [&](int) { return Usual(); },
      [&](int) { return 3 * std::exp(0.15 * tails(random_)); },
      [&](int) { return 3 * std::exp(long_tails(random_)); },
      [&](int i) { return 2 + 8 * std::exp(-i / 500.0) + 0.1 * std::abs(normal_(random_)); },
      [&](int i) { return 3 + std::sin(i / 100.0) + 0.1 * normal_(random_); },
      [&](int) { return 3 * std::exp(level = 0.98 * level + 0.05 * normal_(random_)); },
  };
  for (size_t kind = 0; kind < kinds.size(); ++kind) {
    for (int run = 0; run < 20; ++run) {
      watch_.Rewind();
      for (int i = 0; i < 10000; ++i) ASSERT_THAT(Judge(Lost(step_++, kinds[kind](i))), IsEmpty()) << kind;
    }
  }
}

TEST_F(SequenceWatchTest, ASavedStateGoesOn) {
  JudgeHealthy(300);
  Judge(Lost(step_++, Usual(), 0.99));
  std::string saved;
  StateWriter writer(&saved);
  writer(watch_);
  SequenceWatch restored{SequencesOptions{}};
  StateReader reader(saved);
  reader(restored);
  ASSERT_TRUE(reader.at_end() && restored.Consistent() && restored.has_seen());
  EXPECT_TRUE(restored.Observe(Lost(step_, Usual(), 0.99), kJudged));
  ASSERT_THAT(*restored.findings(), SizeIs(1));
  EXPECT_EQ(restored.findings()->front().first_step, 1300);
}

}  // namespace
}  // namespace bellwether::server
