// Goal: whatever order, holes, numbers and crashes a run comes with, what is
// said of it depends on what its samples and events said until then and on
// nothing else: not on what comes later, not on names, not on where the judge
// was killed and restored.
// Method: all recorded runs, cut off, renamed, and with a restore at every
// sample of the heads; made-up runs of anything at all, judged twice, once with
// a restore after every call.

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <limits>
#include <memory>
#include <random>
#include <set>

#include "tests/support/judged_run.h"
#include "tests/support/law_samples.h"
#include "tests/support/transition_text.h"

namespace bellwether::server {
namespace {

const std::string kWalkedRuns = BELLWETHER_TESTDATA "/runs";

// Every recorded run, one at a time: they fill half a GiB together.
template <typename Body>
void ForEachRun(const Body& body) {
  int runs = 0;
  for (const auto& entry : std::filesystem::directory_iterator(kWalkedRuns)) {
    if (entry.path().extension() != ".bwrun") continue;
    SCOPED_TRACE(entry.path().filename());
    const auto run = ReadRecordedRun(entry.path());
    ASSERT_TRUE(run);
    body(*run);
    ++runs;
  }
  EXPECT_EQ(runs, 27);
}

void Give(const RecordedItem& item, RunJudge* judge, std::vector<AlertTransition>* out) {
  if (item.is_event) {
    judge->OnEvent(item.event, out);
  } else {
    judge->Observe(item.sample, out);
  }
}

TEST(JudgeWalksTest, TruncatedRunGivesTheSameAlertsUntilItsEnd) {
  size_t told = 0;
  ForEachRun([&](const RecordedRun& run) {
    const Verdict whole = Judge(run);
    const std::vector<std::string> all = TextsOf(whole.transitions);
    for (const double share : {0.2, 0.35, 0.5, 0.8}) {
      RecordedRun part;
      part.description = run.description;
      part.items.assign(run.items.begin(),
                        run.items.begin() + static_cast<ptrdiff_t>(share * static_cast<double>(run.items.size())));
      const RecordedItem& last = part.items.back();
      const int64_t end = last.is_event ? last.event.step : last.sample.step;
      const std::vector<std::string> some = TextsOf(Judge(part).transitions);
      const auto expected = std::count_if(whole.transitions.begin(), whole.transitions.end(),
                                          [&](const AlertTransition& t) { return t.step <= end; });
      ASSERT_EQ(static_cast<ptrdiff_t>(some.size()), expected) << "up to step " << end;
      EXPECT_TRUE(std::equal(some.begin(), some.end(), all.begin())) << "up to step " << end;
      told += some.size();
    }
  });
  EXPECT_GT(told, 50u);
}

TEST(JudgeWalksTest, AKillBetweenAnyTwoSamplesChangesNothing) {
  size_t told = 0;
  ForEachRun([&](const RecordedRun& run) {
    const auto expected = TextsOf(Judge(run).transitions);
    auto judge = std::make_unique<RunJudge>(JudgeOptions{}, run.description);
    std::vector<AlertTransition> out;
    for (const RecordedItem& item : run.items) {
      Give(item, judge.get(), &out);
      if (!item.is_event && !item.sample.has(SignalId::kWqSigma)) continue;
      const std::string saved = judge->Save();
      judge = std::make_unique<RunJudge>(JudgeOptions{}, run.description);
      ASSERT_TRUE(judge->Restore(saved));
    }
    EXPECT_EQ(TextsOf(out), expected);
    told += out.size();
  });
  EXPECT_GT(told, 30u);
}

TEST(JudgeWalksTest, JobDescriptionInHelloChangesNoVerdict) {
  ForEachRun([](RecordedRun run) {
    const auto plain = TextsOf(Judge(run).transitions);
    const std::string name = run.description.name;
    run.description.name = "healthy-for-sure";
    run.description.uuid.fill(7);
    run.description.framework = "another";
    run.description.model = "diverges";
    run.description.weight_decay = 3;
    run.description.world = 64;
    run.description.labels = {{"family", "healthy"}};
    auto renamed = TextsOf(Judge(run).transitions);
    for (std::string& text : renamed) {
      for (size_t at = 0; (at = text.find(run.description.name, at)) != std::string::npos;) {
        text.replace(at, run.description.name.size(), name);
      }
    }
    EXPECT_EQ(renamed, plain);
  });
}

// Anything that may reach a judge, whatever sense it makes.
class Chaos {
 public:
  explicit Chaos(uint32_t seed) : random_(seed) {
    run_.name = "chaos";
    const int32_t heads = 1 << Below(4);
    run_.layout = {.layers = static_cast<int32_t>(1 + Below(4)), .heads = heads, .kv_heads = 1 << Below(2)};
    run_.layout.kv_heads = std::min(run_.layout.kv_heads, heads);
    run_.reporters = 3;
    run_.attention.score_dtype = "bf16";
  }

  const RunDescription& run() const { return run_; }

  // Gives the next call to both judges.
  void Next(RunJudge* a, std::vector<AlertTransition>* told_a, RunJudge* b, std::vector<AlertTransition>* told_b) {
    switch (Below(40)) {
      case 0:
        run_.attempt += static_cast<uint32_t>(Below(2));
        run_.attention.centred = Below(2) == 0;
        run_.attention.score_dtype = Below(4) == 0 ? "fp32" : "bf16";
        a->OnHello(run_, told_a);
        b->OnHello(run_, told_b);
        return;
      case 1: {
        const RunEvent event = {.attempt = run_.attempt,
                                .step = step_ + static_cast<int64_t>(Below(100)) - 50,
                                .kind = static_cast<EventKind>(Below(14)),
                                .value = Number()};
        a->OnEvent(event, told_a);
        b->OnEvent(event, told_b);
        return;
      }
      case 2: {
        const auto silent = static_cast<uint32_t>(Below(4));
        a->OnSilence(silent, 90, told_a);
        b->OnSilence(silent, 90, told_b);
        return;
      }
      default:
        const StepSample sample = Sample();
        a->Observe(sample, told_a);
        b->Observe(sample, told_b);
    }
  }

 private:
  size_t Below(size_t end) { return random_() % end; }

  float Number() {
    constexpr float kLimit = std::numeric_limits<float>::max();
    switch (Below(200)) {
      case 0:
        return std::numeric_limits<float>::quiet_NaN();
      case 1:
        return std::numeric_limits<float>::infinity();
      case 2:
        return -std::numeric_limits<float>::infinity();
      case 3:
        return kLimit;
      case 4:
        return -1;
      case 5:
        return std::numeric_limits<float>::denorm_min();
      case 6:
        return NotMeasured();
      case 7:
        return 0;
      default:
        // Mostly a trend, so that the rules have something to say.
        return std::exp2(static_cast<float>(step_ % 4000) / 400.0f) * static_cast<float>(1 + Below(3));
    }
  }

  StepSample Sample() {
    StepSample sample;
    sample.Reset(run_.layout);
    // Mostly forward, by changing periods; sometimes back, or very far.
    const size_t move = Below(100);
    step_ =
        move == 0 ? static_cast<int64_t>(Below(3000)) : step_ + static_cast<int64_t>(move < 3 ? 500 : 1 + Below(20));
    if (move == 1) ++run_.attempt;
    sample.attempt = Below(50) == 0 ? run_.attempt + 1 : run_.attempt;
    sample.step = step_;
    for (const SignalId id : {SignalId::kRows, SignalId::kCommonModeSum, SignalId::kSpreadSum, SignalId::kTiedRowsBf16,
                              SignalId::kWqSigma, SignalId::kLogitMax, SignalId::kEntropySum, SignalId::kKeyLeakSum,
                              SignalId::kKeyGradientSum, SignalId::kNonfiniteRows, SignalId::kLoss, SignalId::kGradNorm,
                              SignalId::kStepSeconds, SignalId::kHookSeconds, SignalId::kLearningRate}) {
      if (Below(10) == 0) continue;
      const bool divides = id == SignalId::kRows || id == SignalId::kSpreadSum || id == SignalId::kKeyGradientSum;
      for (float& value : sample.Add(id)) value = divides && Below(50) != 0 ? 1.0f : Number();
    }
    if (Below(4) == 0) {
      AddHealthyLaws(&sample);
      if (Below(20) == 0) sample.Add(SignalId::kLawA3)[0] = Number();
      if (Below(20) == 0) sample.Add(SignalId::kLawA10)[0] = 100;
      if (Below(50) == 0) sample.Add(SignalId::kDqNonfinite)[0] = Number();
    }
    if (Below(200) == 0) sample.disagreements.push_back({SignalId::kWqSigma, 0, 0, 1.0f, Number()});
    return sample;
  }

  std::mt19937 random_;
  RunDescription run_;
  int64_t step_ = 0;
};

TEST(JudgeWalksTest, RestoreAfterEveryCallChangesNoVerdict) {
  size_t told = 0;
  std::set<std::string> rules;
  for (uint32_t seed = 1; seed <= 30; ++seed) {
    SCOPED_TRACE(seed);
    Chaos chaos(seed);
    RunJudge steady(JudgeOptions{}, chaos.run());
    auto killed = std::make_unique<RunJudge>(JudgeOptions{}, chaos.run());
    std::vector<AlertTransition> told_steady, told_killed;
    for (int call = 0; call < 1000; ++call) {
      const RunDescription run = chaos.run();
      chaos.Next(&steady, &told_steady, killed.get(), &told_killed);
      ASSERT_EQ(TextsOf(told_killed), TextsOf(told_steady)) << "call " << call;
      for (const AlertTransition& transition : told_steady) rules.insert(transition.rule);
      told += told_steady.size();
      told_steady.clear();
      told_killed.clear();
      const std::string saved = killed->Save();
      ASSERT_EQ(saved, steady.Save());
      killed = std::make_unique<RunJudge>(JudgeOptions{}, run);
      ASSERT_TRUE(killed->Restore(saved));
    }
  }
  // Not silence that is compared with silence.
  EXPECT_GT(told, 300u);
  EXPECT_GE(rules.size(), 6u);
}

}  // namespace
}  // namespace bellwether::server
