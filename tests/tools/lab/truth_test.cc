// Goal: what became of a run is found in it by the definition of truth.h.
// Method: made-up runs at the edges of the definition; the recorded runs
// against their labels.

#include "tools/lab/truth.h"

#include <cmath>
#include <functional>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/offline/recorded_run.h"
#include "tools/lab/scorecard.h"

namespace bellwether::server {
namespace {

constexpr Layout kLayout{.layers = 1, .heads = 2, .kv_heads = 2};

Truth FindNorms(int64_t every, int64_t end, const std::function<float(int64_t step, int head)>& sigma) {
  TruthFinder finder;
  StepSample sample;
  for (int64_t step = 0; step < end; step += every) {
    sample.Reset(kLayout);
    sample.step = step;
    const auto to = sample.Add(SignalId::kWqSigma);
    for (int head = 0; head < 2; ++head) to[static_cast<size_t>(head)] = sigma(step, head);
    finder.Observe(sample);
  }
  return finder.truth();
}

Truth FindLoss(int64_t end, const std::function<float(int64_t step)>& loss) {
  TruthFinder finder;
  StepSample sample;
  for (int64_t step = 0; step < end; ++step) {
    sample.Reset(kLayout);
    sample.step = step;
    sample.Add(SignalId::kLoss)[0] = loss(step);
    finder.Observe(sample);
  }
  return finder.truth();
}

TEST(TruthTest, NormExplodesWhenLargeAndDoubledWithin500Steps) {
  // Doubles every 250 steps from 1: above 20 first at step 1,090.
  const auto grown = [](double doubling) {
    return [doubling](int64_t step, int head) {
      return head == 0 ? static_cast<float>(std::exp2(static_cast<double>(step) / doubling)) : 3.f;
    };
  };
  const Truth fast = FindNorms(10, 3000, grown(250));
  EXPECT_EQ(fast.t_sigma, 1090);
  EXPECT_THAT(fast.heads, ::testing::ElementsAre(Head{0, 0}));
  EXPECT_EQ(FindNorms(10, 9000, grown(501)).t_sigma, -1);
  EXPECT_EQ(FindNorms(10, 3000, [](int64_t, int) { return 100.f; }).t_sigma, -1);
}

TEST(TruthTest, HeadsExplodingWithin500StepsAreListedInOrder) {
  const auto jump_at = [](int64_t first, int64_t second) {
    return FindNorms(10, 4000,
                     [=](int64_t step, int head) { return step >= (head == 1 ? first : second) ? 50.f : 5.f; });
  };
  EXPECT_THAT(jump_at(1000, 1500).heads, ::testing::ElementsAre(Head{0, 1}, Head{0, 0}));
  EXPECT_THAT(jump_at(1000, 1510).heads, ::testing::ElementsAre(Head{0, 1}));
}

TEST(TruthTest, LossIsLostWhenMeanStaysHalfAboveMinimum) {
  const auto off_for = [](int64_t steps) {
    return FindLoss(3000, [steps](int64_t step) { return step >= 1000 && step < 1000 + steps ? 9.f : 2.f; });
  };
  // A mean of 50 with 4 values of 9 is 0.56 above: that of 954 to 1,003.
  EXPECT_EQ(off_for(1000).t_loss, 953);
  EXPECT_EQ(off_for(100).t_loss, -1);
  EXPECT_EQ(FindLoss(3000, [](int64_t step) { return 9.f - static_cast<float>(step) / 1000; }).t_loss, -1);
  EXPECT_GE(FindLoss(3000, [](int64_t step) { return step < 1000 ? 2.f : NAN; }).t_loss, 900);
  EXPECT_EQ(FindLoss(3000, [](int64_t step) { return step == 1000 ? NAN : 2.f; }).t_loss, -1) << "one NaN is no end";
}

class Finder final : public RunListener {
 public:
  void OnHello(const RunDescription&) override {}
  void OnSample(const StepSample& sample) override { finder_.Observe(sample); }
  void OnEvent(const RunEvent&) override {}
  const Truth& truth() const { return finder_.truth(); }

 private:
  TruthFinder finder_;
};

TEST(TruthTest, TheRecordedRunsAreAsTheirLabelsSay) {
  const std::string folder = BELLWETHER_TESTDATA "/runs/";
  const auto labels = ReadRunLabels(folder + "labels.json");
  ASSERT_TRUE(labels.ok()) << labels.status();
  ASSERT_EQ(labels->size(), 27u);
  for (const auto& [name, label] : *labels) {
    Finder finder;
    ASSERT_TRUE(WalkRecordedRun(folder + name + ".bwrun", &finder).ok());
    EXPECT_EQ(finder.truth().t_loss, label.truth.t_loss) << name;
    if (label.family == "logits") continue;  // Its norms explode too, but that is not what it died of.
    EXPECT_EQ(finder.truth().t_sigma, label.truth.t_sigma) << name;
    EXPECT_THAT(finder.truth().heads, ::testing::UnorderedElementsAreArray(label.truth.heads)) << name;
  }
}

}  // namespace
}  // namespace bellwether::server
