// Goal: of a sample with values that are not finite the layer, the heads and
// the tensor are named in which they arose, and not what follows from them.
// Method: samples of 6 layers with a NaN where a broken layer would leave one,
// and wherever it travels from there.

#include "server/detect/nonfinite_origin.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <bit>
#include <initializer_list>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "server/detect/judge_options.h"
#include "server/detect/run_judge.h"
#include "tests/support/judged_samples.h"

namespace bellwether::server {
namespace {

// A sample of 6 layers of 4 query heads and 2 key heads, all finite but for what `spoil` does.
template <class Spoil>
StepSample Spoiled(const RunDescription& run, int64_t step, const Spoil& spoil) {
  StepSample sample = SampleAt(run, {.period = 1, .drift_from = -1}, step);
  for (const SignalId id : {SignalId::kKeyGradientSum, SignalId::kKeyLeakSum, SignalId::kDeltaAbsSum,
                            SignalId::kDeltaErrorAbsSum, SignalId::kWkSigma}) {
    for (float& value : sample.Add(id)) value = 1;
  }
  spoil(&sample);
  return sample;
}
// Layer `layer`'s values of `signals`: of `head`, or of all heads.
void Nan(StepSample* sample, std::initializer_list<SignalId> signals, int32_t layer, int32_t head = -1) {
  for (const SignalId id : signals) {
    const auto values = sample->Add(id);
    const auto columns = static_cast<int32_t>(values.size()) / sample->layout().layers;
    for (int32_t column = 0; column < columns; ++column) {
      if (head >= 0 && column != head * columns / sample->layout().heads) continue;
      values[static_cast<size_t>(layer * columns + column)] = kNan;
    }
  }
}
constexpr std::initializer_list<SignalId> kGradients = {SignalId::kKeyGradientSum, SignalId::kKeyLeakSum,
                                                        SignalId::kDeltaAbsSum, SignalId::kDeltaErrorAbsSum};
constexpr std::initializer_list<SignalId> kScores = {SignalId::kCommonModeSum, SignalId::kSpreadSum,
                                                     SignalId::kLogitMax};
constexpr std::initializer_list<SignalId> kWeightsOf = {SignalId::kWqSigma, SignalId::kWkSigma};

RunDescription SixLayers(const std::string& dtype = "bf16") {
  RunDescription run = SyntheticRun(6, 4);
  run.layout.kv_heads = 2;
  run.attention.score_dtype = dtype;
  return run;
}

template <class Spoil>
AlertTransition NanAlert(const Spoil& spoil) {
  const RunDescription run = SixLayers();
  RunJudge judge(JudgeOptions{}, run);
  std::vector<AlertTransition> out;
  judge.Observe(Spoiled(run, 40, spoil), &out);
  EXPECT_EQ(out.size(), 1u);
  if (out.empty()) return {};
  EXPECT_EQ(out[0].rule, "nonfinite");
  EXPECT_EQ(out[0].severity, Severity::kCritical);
  std::set<Head> once(out[0].heads.begin(), out[0].heads.end());
  EXPECT_EQ(once.size(), out[0].heads.size());
  EXPECT_EQ(out[0].heads_total, out[0].heads.size());
  return out[0];
}
std::vector<Head> HeadsOf(int32_t layer, std::initializer_list<int32_t> heads) {
  std::vector<Head> all;
  for (const int32_t head : heads) all.push_back({layer, head});
  return all;
}

TEST(NonfiniteOriginTest, BackwardPassNamesTheHighestLayer) {
  const AlertTransition t = NanAlert([](StepSample* s) {
    for (const int32_t layer : {0, 1}) Nan(s, kGradients, layer);
    Nan(s, {SignalId::kDeltaAbsSum}, 2, 3);
    s->Add(SignalId::kGradNorm)[0] = kNan;
  });
  EXPECT_EQ(t.heads, HeadsOf(2, {3}));
  EXPECT_EQ(t.strongest, (Head{2, 3}));
  EXPECT_THAT(t.summary, testing::HasSubstr("first in layer 2 head 3: delta of the backward pass"));
  EXPECT_THAT(t.summary, testing::HasSubstr("layers 0 to 1 below follow from it"));
}

TEST(NonfiniteOriginTest, KeyGradientNamesItsTensorAndSharingHeads) {
  const AlertTransition t = NanAlert([](StepSample* s) {
    for (const int32_t layer : {0, 1, 2, 3}) Nan(s, kGradients, layer);
    Nan(s, {SignalId::kKeyGradientSum, SignalId::kKeyLeakSum}, 4, 2);
  });
  EXPECT_EQ(t.heads, HeadsOf(4, {2, 3}));
  EXPECT_THAT(t.summary, testing::HasSubstr("layer 4 heads 2, 3: the key gradient dK of the backward pass"));
  EXPECT_THAT(t.summary, testing::HasSubstr("layers 0 to 3 below follow from it"));
}

// As after an all-reduce, which spreads the NaN of one rank.
TEST(NonfiniteOriginTest, RanksWhoseOwnGradientsAreNotFiniteAreNamed) {
  RunDescription run = SixLayers();
  run.world = 4;
  run.layout.ranks = 4;
  const auto told = [&run](std::initializer_list<int32_t> bad, int32_t measured) {
    const Nonfinite found = FindNonfinite(Spoiled(run, 40,
                                                  [&](StepSample* sample) {
                                                    sample->Add(SignalId::kGradNorm)[0] = kNan;
                                                    const auto norms = sample->Add(SignalId::kRankGradNormMax);
                                                    for (int32_t rank = 0; rank < measured; ++rank) {
                                                      norms[static_cast<size_t>(rank)] = 1;
                                                    }
                                                    for (const int32_t rank : bad) {
                                                      norms[static_cast<size_t>(rank)] = kNan;
                                                    }
                                                  }),
                                          true);
    EXPECT_EQ(found.findings.size(), 1u);
    return found.findings.empty() ? "?" : found.findings.front().note;
  };
  EXPECT_EQ(told({2}, 4), "the own gradients of rank 2 are not finite, those of 3 others are");
  EXPECT_EQ(told({0, 3}, 3), "the own gradients of ranks 0, 3 are not finite, those of 2 others are");
  EXPECT_EQ(told({1}, 2), "the own gradients of rank 1 are not finite, those of 1 other are");
  EXPECT_EQ(told({0, 1, 2, 3}, 4), "");
  EXPECT_EQ(told({}, 4), "");
}

TEST(NonfiniteOriginTest, TheQueriesGradientShowsInTheWeightsAlone) {
  // dQ of layer 2, heads 1: W_Q of that head, and all that lies below.
  const AlertTransition t = NanAlert([](StepSample* s) {
    Nan(s, {SignalId::kWqSigma}, 2, 1);
    for (const int32_t layer : {0, 1}) {
      Nan(s, kGradients, layer);
      Nan(s, kWeightsOf, layer);
    }
  });
  EXPECT_EQ(t.heads, HeadsOf(2, {1}));
  EXPECT_THAT(t.summary, testing::HasSubstr("layer 2 head 1: W_Q, by the queries' gradient dQ"));
  EXPECT_THAT(t.summary, testing::HasSubstr("layers 0 to 1 below follow from it"));
  // Clipping by a norm that is NaN spoils all weights, which then tell nothing:
  // what lies between layer 1 and layer 2 is not excluded, and said.
  const AlertTransition clipped = NanAlert([](StepSample* s) {
    for (int32_t layer = 0; layer < 6; ++layer) Nan(s, kWeightsOf, layer);
    for (const int32_t layer : {0, 1}) Nan(s, kGradients, layer);
  });
  EXPECT_EQ(clipped.strongest.layer, 1);
  EXPECT_THAT(clipped.summary, testing::HasSubstr("or what lies between it and layer 2"));
}

// How many elements of the gradients are not finite: none, yet.
void AddCounts(StepSample* sample) {
  for (const SignalId id :
       {SignalId::kDoNonfinite, SignalId::kDqNonfinite, SignalId::kDkNonfinite, SignalId::kDvNonfinite}) {
    for (float& value : sample->Add(id)) value = 0;
  }
}
void Count(StepSample* sample, std::initializer_list<SignalId> counts, int32_t layer, int32_t head, float elements) {
  for (const SignalId id : counts) {
    const auto values = sample->Add(id);
    const auto columns = static_cast<int32_t>(values.size()) / sample->layout().layers;
    values[static_cast<size_t>(layer * columns + head * columns / sample->layout().heads)] = elements;
  }
}
// What a layer below a NaN has: all of it.
void Drown(StepSample* sample, int32_t layer) {
  for (int32_t head = 0; head < 4; ++head) {
    Count(sample, {SignalId::kDoNonfinite, SignalId::kDqNonfinite, SignalId::kDkNonfinite, SignalId::kDvNonfinite},
          layer, head, 1000);
  }
  Nan(sample, kGradients, layer);
}

TEST(NonfiniteOriginTest, AKernelsNanIsNamedAndLayersBelowAreNot) {
  // As PyTorch's attention on Hopper did: dQ of one head, forward and loss finite.
  const AlertTransition t = NanAlert([](StepSample* s) {
    AddCounts(s);
    Count(s, {SignalId::kDqNonfinite}, 2, 1, 640);
    Nan(s, {SignalId::kLawA3, SignalId::kDqSumsq}, 2, 1);
    for (const int32_t layer : {0, 1}) Drown(s, layer);
    s->Add(SignalId::kGradNorm)[0] = kNan;
  });
  EXPECT_EQ(t.heads, HeadsOf(2, {1}));
  EXPECT_EQ(t.cause, "faulty kernel");
  EXPECT_THAT(t.summary, testing::HasSubstr("first in layer 2 head 1: dQ, as the kernel returned it from a finite dO "
                                            "(dq_nonfinite); layers 0 to 1 below follow from it"));
  EXPECT_THAT(t.advice, testing::StartsWith("Stop. Switch to another kernel of attention."));
  ASSERT_GE(t.evidence.size(), 1u);
  EXPECT_EQ(t.evidence[0].signal, "dq_nonfinite");
  EXPECT_EQ(t.evidence[0].value, 640);
}

TEST(NonfiniteOriginTest, ALossThatFollowsDoesNotReplaceTheKernelsNan) {
  const RunDescription run = SixLayers();
  RunJudge judge(JudgeOptions{}, run);
  std::vector<AlertTransition> out;
  for (int64_t step = 0; step < 900; ++step) judge.Observe(Spoiled(run, step, AddCounts), &out);
  ASSERT_TRUE(out.empty());
  judge.Observe(Spoiled(run, 900,
                        [](StepSample* s) {
                          AddCounts(s);
                          Count(s, {SignalId::kDqNonfinite}, 2, 1, 640);
                        }),
                &out);
  for (int64_t step = 901; step < 950; ++step) {
    judge.Observe(Spoiled(run, step,
                          [](StepSample* s) {
                            AddCounts(s);
                            s->Add(SignalId::kLoss)[0] = kNan;
                          }),
                  &out);
  }
  ASSERT_EQ(out.size(), 1u);
  EXPECT_EQ(out[0].cause, "faulty kernel");
}

TEST(NonfiniteOriginTest, ASecondFaultyKernelBelowIsNamedToo) {
  // Layer 4's NaN does not reach layer 1, whose dO is finite.
  const AlertTransition t = NanAlert([](StepSample* s) {
    AddCounts(s);
    Count(s, {SignalId::kDqNonfinite}, 4, 0, 1);
    Count(s, {SignalId::kDkNonfinite, SignalId::kDvNonfinite}, 3, 3, 2);
  });
  EXPECT_EQ(t.heads_total, 1u + 2u);
  EXPECT_THAT(t.summary, testing::HasSubstr("by itself also in layer 3 heads 2, 3"));
}

TEST(NonfiniteOriginTest, ADoThatIsNotFiniteCameFromAbove) {
  const AlertTransition t = NanAlert([](StepSample* s) {
    AddCounts(s);
    for (const int32_t layer : {0, 1, 2}) Drown(s, layer);
  });
  EXPECT_EQ(t.cause, "unknown");
  EXPECT_EQ(t.strongest.layer, 2);
  EXPECT_THAT(t.summary, testing::HasSubstr("the gradient dO that its attention is given"));
  EXPECT_THAT(t.summary, testing::HasSubstr("or what lies between it and layer 3"));
  EXPECT_THAT(t.advice, testing::StartsWith("Stop, or go back to a checkpoint."));
}

TEST(NonfiniteOriginTest, AnOverflowInFp16IsNoFaultOfTheKernel) {
  for (const bool lost : {false, true}) {
    RunJudge judge(JudgeOptions{}, SixLayers("fp16"));
    std::vector<AlertTransition> out;
    judge.Observe(Spoiled(SixLayers("fp16"), 40,
                          [&](StepSample* s) {
                            AddCounts(s);
                            Count(s, {SignalId::kDqNonfinite}, 2, 1, 640);
                            if (lost) Nan(s, kWeightsOf, 2, 1);
                          }),
                  &out);
    ASSERT_EQ(out.size(), 1u);
    EXPECT_EQ(out[0].severity, lost ? Severity::kCritical : Severity::kInfo);
    EXPECT_EQ(out[0].cause, "unknown");
  }
}

TEST(NonfiniteOriginTest, SumsOfLawsThatOverflowAreNoFault) {
  std::vector<AlertTransition> out;
  RunJudge judge(JudgeOptions{}, SixLayers());
  judge.Observe(Spoiled(SixLayers(), 40,
                        [](StepSample* s) {
                          AddCounts(s);
                          for (float& value : s->Add(SignalId::kDkSumsq))
                            value = std::numeric_limits<float>::infinity();
                        }),
                &out);
  EXPECT_TRUE(out.empty());
  // Nor where dO is large itself, as behind a large loss scale.
  judge.Observe(Spoiled(SixLayers(), 60,
                        [](StepSample* s) {
                          AddCounts(s);
                          for (const SignalId id : {SignalId::kDkSumsq, SignalId::kDqSumsq, SignalId::kDvSumsq}) {
                            for (float& value : s->Add(id)) value = std::numeric_limits<float>::infinity();
                          }
                          for (float& value : s->Add(SignalId::kDoSumsq)) value = 1e30f;
                        }),
                &out);
  EXPECT_TRUE(out.empty());
}

TEST(NonfiniteOriginTest, SumsOfFiniteElementsThatOverflowBlameNoKernel) {
  const AlertTransition t = NanAlert([](StepSample* s) {
    AddCounts(s);
    s->Add(SignalId::kKeyGradientSum)[2 * 2 + 1] = std::numeric_limits<float>::infinity();
  });
  EXPECT_EQ(t.cause, "unknown");
  EXPECT_THAT(t.summary, testing::HasSubstr("first in layer 2 heads 2, 3: the key gradient dK of the backward pass"));
  EXPECT_THAT(t.advice, testing::StartsWith("Stop, or go back to a checkpoint."));
}

TEST(NonfiniteOriginTest, GramOfFiniteWeightsThatOverflowsIsInformation) {
  const RunDescription run = SixLayers();
  const auto overflow = [](StepSample* s) {
    for (const SignalId id : {SignalId::kGramSigma, SignalId::kGramTop2Ratio}) {
      for (float& value : s->Add(id)) value = NotMeasured();
      s->Add(id)[1 * 4 + 2] = kNan;
    }
    s->Add(SignalId::kWqSigma)[1 * 4 + 2] = 1e20f;
  };
  const StepSample sample = Spoiled(run, 40, overflow);
  const Nonfinite found = FindNonfinite(sample, true);
  ASSERT_EQ(found.findings.size(), 1u);
  EXPECT_EQ(found.findings[0].severity, Severity::kInfo);
  EXPECT_EQ(found.findings[0].where, (Head{1, 2}));
  EXPECT_EQ(found.findings[0].summary,
            "squares of the weights (gram_sigma, gram_top2_ratio) overflow in layer 1 head 2: the weights are finite, "
            "but these measurements cannot be used, since step 40");
  EXPECT_FALSE(found.weights) << "nothing of the weights is wrong";
  // With them not finite it is what it was.
  const AlertTransition t = NanAlert([&](StepSample* s) {
    overflow(s);
    s->Add(SignalId::kWqSigma)[1 * 4 + 2] = kNan;
  });
  EXPECT_THAT(t.summary, testing::HasSubstr("first in layer 1 head 2: W_Q"));
}

TEST(NonfiniteOriginTest, ForwardPassNamesTheLowestLayer) {
  const AlertTransition t = NanAlert([](StepSample* s) {
    Nan(s, kScores, 3, 2);
    for (const int32_t layer : {4, 5}) Nan(s, kScores, layer);
    for (int32_t layer = 0; layer < 6; ++layer) {
      Nan(s, kGradients, layer);
      Nan(s, kWeightsOf, layer);
    }
    s->Add(SignalId::kLoss)[0] = kNan;
  });
  EXPECT_EQ(t.heads, HeadsOf(3, {2}));
  EXPECT_THAT(t.summary, testing::HasSubstr("layer 3 head 2: the scores of the forward pass"));
  EXPECT_THAT(t.summary, testing::HasSubstr("layers 4 to 5 above follow from it"));
  EXPECT_THAT(t.summary, testing::HasSubstr("; the gradients follow from it"));
  // All heads of all layers: the first layer, each head once.
  const AlertTransition all = NanAlert([](StepSample* s) {
    for (int32_t layer = 0; layer < 6; ++layer) Nan(s, kScores, layer);
    s->Add(SignalId::kLoss)[0] = kNan;
  });
  EXPECT_EQ(all.heads, HeadsOf(0, {0, 1, 2, 3}));
  EXPECT_THAT(all.summary, testing::HasSubstr("layer 0 (all 4 heads)"));
}

TEST(NonfiniteOriginTest, WeightsAreNamedWhereTheyAreTheOrigin) {
  const AlertTransition alone = NanAlert([](StepSample* s) { Nan(s, {SignalId::kWkSigma}, 4, 0); });
  EXPECT_EQ(alone.heads, HeadsOf(4, {0, 1}));
  EXPECT_THAT(alone.summary, testing::HasSubstr("W_K"));
  // And what they do to the next forward pass.
  const AlertTransition used = NanAlert([](StepSample* s) {
    Nan(s, {SignalId::kWqSigma}, 2, 1);
    Nan(s, kScores, 2, 1);
    for (const int32_t layer : {3, 4, 5}) Nan(s, kScores, layer);
  });
  EXPECT_EQ(used.heads, HeadsOf(2, {1}));
  EXPECT_THAT(used.summary, testing::HasSubstr("layer 2 head 1: W_Q"));
}

TEST(NonfiniteOriginTest, TwoOriginsInOneSampleAreBothNamed) {
  const AlertTransition t = NanAlert([](StepSample* s) {
    Nan(s, {SignalId::kKeyGradientSum}, 5, 0);
    for (const int32_t layer : {0, 1, 2}) Nan(s, kGradients, layer);
  });
  EXPECT_EQ(t.strongest, (Head{5, 0}));
  EXPECT_EQ(t.heads_total, 2u + 4u);
  EXPECT_THAT(t.summary, testing::HasSubstr("by itself also in layer 2 (all 4 heads)"));
}

TEST(NonfiniteOriginTest, NoHeadIsNamedWithoutAKnownOrigin) {
  // Found by the first sample behind it: everything is lost, nothing dates it.
  const RunDescription run = SixLayers();
  RunJudge judge(JudgeOptions{}, run);
  std::vector<AlertTransition> out;
  StepSample sample;
  sample.Reset(run.layout);
  sample.step = 40;
  for (int32_t layer = 0; layer < 6; ++layer) {
    Nan(&sample, kScores, layer);
    Nan(&sample, kWeightsOf, layer);
  }
  judge.Observe(sample, &out);
  ASSERT_EQ(out.size(), 1u);
  EXPECT_EQ(out[0].severity, Severity::kCritical);
  EXPECT_TRUE(out[0].heads.empty());
  EXPECT_EQ(out[0].strongest, Head{});
  EXPECT_THAT(out[0].summary, testing::HasSubstr("in which layer it began is not known"));
}

// What the judge says of a sample in which everything is lost, after gradient norms of the steps before.
template <class Spoil>
AlertTransition AfterNorms(std::initializer_list<float> norms, const Spoil& spoil) {
  RunJudge judge(JudgeOptions{}, SixLayers());
  std::vector<AlertTransition> out;
  int64_t step = 40 - static_cast<int64_t>(norms.size());
  for (const float norm : norms) {
    StepSample sample;
    sample.Reset(SixLayers().layout);
    sample.step = step++;
    sample.Add(SignalId::kLoss)[0] = 2;
    if (norm > 0) sample.Add(SignalId::kGradNorm)[0] = norm;
    judge.Observe(sample, &out);
  }
  judge.Observe(Spoiled(SixLayers(), 40, spoil), &out);
  EXPECT_EQ(out.size(), 1u);
  return out.empty() ? AlertTransition{} : out.back();
}

TEST(NonfiniteOriginTest, NoLayerIsNamedIfPreviousStepSpoiledAllWeights) {
  // A gradient of the step before, which was no sample, spoiled the embedding and more.
  const auto lost = [](StepSample* s) {
    for (int32_t layer = 0; layer < 6; ++layer) {
      Nan(s, kScores, layer);
      Nan(s, kGradients, layer);
      Nan(s, kWeightsOf, layer);
    }
    s->Add(SignalId::kLoss)[0] = kNan;
    s->Add(SignalId::kGradNorm)[0] = kNan;
  };
  const auto no_weights = [](StepSample* s) {
    for (int32_t layer = 0; layer < 6; ++layer) {
      Nan(s, kScores, layer);
      for (const SignalId id : kWeightsOf) {
        for (float& value : s->Add(id)) value = std::bit_cast<float>(kNotMeasuredBits);
      }
    }
    s->Add(SignalId::kLoss)[0] = kNan;
  };
  for (const auto& norms : {std::initializer_list<float>{}, {0.0f}, {1.0f, 0.0f}}) {
    EXPECT_TRUE(AfterNorms(norms, lost).heads.empty());
    EXPECT_THAT(AfterNorms(norms, lost).summary, testing::HasSubstr("in which layer it began is not known"));
    EXPECT_TRUE(AfterNorms(norms, no_weights).heads.empty());
  }
  // Its gradients are known to have been finite: it began in this step.
  EXPECT_EQ(AfterNorms({1.0f}, lost).heads, HeadsOf(0, {0, 1, 2, 3}));
  EXPECT_THAT(AfterNorms({1.0f}, lost).summary, testing::HasSubstr("or what lies before it"));
  // One head of the lowest layer: no embedding does that.
  const auto one_head = [&](StepSample* s) {
    lost(s);
    for (const SignalId id : kScores) std::fill_n(s->Add(id).begin(), 4, 1.0f);
    Nan(s, kScores, 0, 3);
  };
  EXPECT_EQ(AfterNorms({}, one_head).heads, HeadsOf(0, {3}));
}

TEST(NonfiniteOriginTest, LayersThatAreNotWatchedAreNotHeldForFinite) {
  const auto hide = [](StepSample* s, std::initializer_list<SignalId> signals, int32_t layer) {
    for (const SignalId id : signals) {
      const auto values = s->Add(id);
      const auto columns = static_cast<int32_t>(values.size()) / 6;
      for (int32_t i = 0; i < columns; ++i) {
        values[static_cast<size_t>(layer * columns + i)] = std::bit_cast<float>(kNotMeasuredBits);
      }
    }
  };
  const AlertTransition forward = NanAlert([&](StepSample* s) {
    for (const int32_t layer : {3, 4, 5}) Nan(s, kScores, layer);
    for (const int32_t layer : {1, 2}) {
      for (const SignalId id : s->signals()) {
        if (FindSignal(id)->granularity != Granularity::kRun) hide(s, {id}, layer);
      }
    }
  });
  EXPECT_THAT(forward.summary, testing::HasSubstr("or what lies between it and layer 0"));
  const AlertTransition backward = NanAlert([&](StepSample* s) {
    for (const int32_t layer : {0, 1}) Nan(s, kGradients, layer);
    hide(s, kGradients, 2);
  });
  EXPECT_THAT(backward.summary, testing::HasSubstr("or what lies between it and layer 3"));
  EXPECT_THAT(backward.summary, testing::HasSubstr("layer 0 below follows from it"));
}

TEST(NonfiniteOriginTest, WeightsOfHeadsWithFiniteScoresWereLostLater) {
  // The scores of one head; its layer is one of two that are trained.
  const AlertTransition t = NanAlert([](StepSample* s) {
    Nan(s, kScores, 3, 2);
    for (const int32_t layer : {4, 5}) Nan(s, kScores, layer);
    for (const int32_t layer : {3, 4}) Nan(s, kWeightsOf, layer);
    s->Add(SignalId::kLoss)[0] = kNan;
  });
  EXPECT_EQ(t.heads, HeadsOf(3, {2}));
  EXPECT_THAT(t.summary, testing::HasSubstr("layer 3 head 2: the scores of the forward pass"));
}

TEST(NonfiniteOriginTest, NanLossBehindFiniteLayersBlamesNoHead) {
  const AlertTransition t = NanAlert([](StepSample* s) {
    s->Add(SignalId::kLoss)[0] = kNan;
    for (int32_t layer = 0; layer < 6; ++layer) {
      Nan(s, kGradients, layer);
      Nan(s, kWeightsOf, layer);
    }
  });
  EXPECT_TRUE(t.heads.empty());
  EXPECT_THAT(t.summary, testing::HasSubstr("the loss, though the scores of all layers are finite"));
}

// The severities told while samples 40, 41, ... of an fp16 run are spoiled.
template <class Spoil>
std::vector<Severity> ToldInFp16(int samples, const Spoil& spoil) {
  const RunDescription run = SixLayers("fp16");
  RunJudge judge(JudgeOptions{}, run);
  std::vector<AlertTransition> out;
  for (int i = 0; i < samples; ++i) judge.Observe(Spoiled(run, 40 + i, spoil), &out);
  std::vector<Severity> told;
  for (const AlertTransition& t : out) {
    told.push_back(t.severity);
    // In the runbook's words.
    EXPECT_THAT(t.advice,
                testing::StartsWith(t.severity == Severity::kInfo      ? "Nothing to do unless it goes on."
                                    : t.severity == Severity::kWarning ? "See whether these steps are skipped."
                                                                       : "Stop, or go back to a checkpoint."));
  }
  return told;
}

TEST(NonfiniteOriginTest, LossScalerSkipsAreInfoUntilTheyPersist) {
  const auto gradients = [](StepSample* s) {
    Nan(s, kGradients, 2);
    s->Add(SignalId::kGradNorm)[0] = std::numeric_limits<float>::infinity();
  };
  EXPECT_EQ(ToldInFp16(20, gradients), (std::vector{Severity::kInfo}));
  EXPECT_EQ(ToldInFp16(40, gradients), (std::vector{Severity::kInfo, Severity::kWarning}));
  const auto forward = [](StepSample* s) {
    Nan(s, kScores, 5, 1);
    s->Add(SignalId::kLoss)[0] = kNan;
  };
  EXPECT_EQ(ToldInFp16(1, forward), (std::vector{Severity::kInfo}));
  EXPECT_EQ(ToldInFp16(5, forward), (std::vector{Severity::kInfo, Severity::kCritical}));
  // Nobody skipped it.
  EXPECT_EQ(ToldInFp16(1, [](StepSample* s) { Nan(s, kWeightsOf, 2); }), (std::vector{Severity::kCritical}));
}

}  // namespace
}  // namespace bellwether::server
