// Goal: a fine-tune whose learning rate is too high is told in its first dozens of steps, and healthy starts are not:
// of fine-tunes, of training from nothing, of a policy, of data that becomes harder.
// Method: made-up losses with scatter, a sample with sigma(W_Q) every ten steps.

#include "server/detect/loss_start.h"

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

struct Start {
  std::function<double(int64_t)> loss;
  std::function<double(int64_t)> sigma;
  double scatter = 0.1;
  double rate = 1e-2;
  bool no_warmup = false;
};

// The first step at which it is told, -1: it is not in 400 steps.  `last`: what is told then.
int64_t ToldAt(const Start& start, uint32_t seed = 1, Finding* last = nullptr) {
  LossStart watch((LossOptions()));
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  for (int64_t step = 0; step < 400; ++step) {
    StepSample sample;
    sample.Reset({.layers = 2, .heads = 4, .kv_heads = 4});
    sample.step = step;
    sample.Add(SignalId::kLoss)[0] = static_cast<float>(start.loss(step) * (1 + start.scatter * normal(random)));
    sample.Add(SignalId::kLearningRate)[0] = static_cast<float>(start.rate);
    if (step % 10 == 0) {
      for (float& value : sample.Add(SignalId::kWqSigma)) value = static_cast<float>(start.sigma(step));
    }
    watch.Observe(sample, start.no_warmup);
    // A server that starts again goes on where it was.
    if (step == 20) {
      std::string saved;
      StateWriter writer(&saved);
      writer(watch);
      LossStart other((LossOptions()));
      StateReader reader(saved);
      reader(other);
      EXPECT_TRUE(reader.at_end() && other.Consistent());
      watch = other;
    }
    std::vector<Finding> found;
    watch.Find(&found);
    if (found.empty()) continue;
    if (last != nullptr) *last = found[0];
    return step;
  }
  return -1;
}

double Lost(int64_t step) { return step < 3 ? 2.0 : 2.6; }
double Still(int64_t step) { return 1.5 + 1e-4 * static_cast<double>(step); }
double Moves(int64_t step) { return 1.5 * std::exp(0.02 * static_cast<double>(step)); }

TEST(LossStartTest, FineTuneThatLosesWhatWasLearntIsTold) {
  for (uint32_t seed = 1; seed <= 20; ++seed) {
    Finding told;
    const int64_t step = ToldAt({.loss = Lost, .sigma = Moves}, seed, &told);
    EXPECT_GE(step, 10) << seed;
    EXPECT_LE(step, 30) << seed;
    EXPECT_EQ(told.cause, "learning rate too high");
    EXPECT_THAT(told.summary, HasSubstr("the learning rate is 0.01"));
    EXPECT_EQ(told.severity, Severity::kWarning);
  }
}

TEST(LossStartTest, UntrainedModelWithoutWarmUpLacksThat) {
  Finding told;
  const auto loss = [](int64_t step) { return step < 3 ? 5.5 : 7.0; };
  EXPECT_GE(ToldAt({.loss = loss, .sigma = Moves, .scatter = 0.003, .no_warmup = true}, 1, &told), 0);
  EXPECT_EQ(told.cause, "warm-up missing");
}

TEST(LossStartTest, HealthyStartsAreNotTold) {
  const auto level = [](int64_t) { return 2.0; };
  const auto harder = [](int64_t step) { return 2.0 + 0.005 * static_cast<double>(step); };
  const auto falls = [](int64_t step) { return 5.5 * std::exp(-0.005 * static_cast<double>(step)); };
  const auto policy = [](int64_t step) { return -0.1 + 0.01 * static_cast<double>(step); };
  for (uint32_t seed = 1; seed <= 20; ++seed) {
    EXPECT_EQ(ToldAt({.loss = level, .sigma = Still}, seed), -1) << seed;
    EXPECT_EQ(ToldAt({.loss = harder, .sigma = Still}, seed), -1) << seed;
    EXPECT_EQ(ToldAt({.loss = falls, .sigma = Moves, .scatter = 0.01}, seed), -1) << seed;
    EXPECT_EQ(ToldAt({.loss = policy, .sigma = Moves}, seed), -1) << seed;
  }
}

}  // namespace
}  // namespace bellwether::server
