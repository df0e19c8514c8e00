#include "server/detect/nonfinite_origin.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace bellwether::server {
namespace {

enum Side : size_t { kForward, kBackward, kWeights, kSides };

// Layers that are named as origins; of further ones their number is told.
constexpr size_t kOriginsMax = 8;
constexpr size_t kHeadsInWords = 8;

Side SideOf(SignalId id) {
  switch (id) {
    case SignalId::kKeyLeakSum:
    case SignalId::kKeyGradientSum:
    case SignalId::kDeltaBiasSum:
    case SignalId::kDeltaBiasSumsq:
    case SignalId::kDeltaAbsSum:
    case SignalId::kDeltaErrorAbsSum:
    case SignalId::kKeyLeak:
    case SignalId::kDeltaBiasRatio:
    case SignalId::kDeltaBiasT:
    case SignalId::kLawA10:
    case SignalId::kLawA11:
    case SignalId::kLawA12:
    case SignalId::kLawA13:
    case SignalId::kLawA14:
    case SignalId::kLawA15:
    case SignalId::kLawA16:
    case SignalId::kLawA17:
    case SignalId::kLawA20:
    case SignalId::kLawA21:
    case SignalId::kLawA22:
    case SignalId::kLawA23:
    case SignalId::kLawA24:
    case SignalId::kLawA25:
    case SignalId::kLawA26:
    case SignalId::kLawA27:
    case SignalId::kLawA3:
    case SignalId::kLawA4:
    case SignalId::kLawA1Variance:
    case SignalId::kLawA2Variance:
    case SignalId::kLawA3Variance:
    case SignalId::kLawA4Variance:
    case SignalId::kLawA1Alike:
    case SignalId::kLawA2Alike:
    case SignalId::kLawA3Alike:
    case SignalId::kLawA4Alike:
    case SignalId::kDkSumsq:
    case SignalId::kDkNonfinite:
    case SignalId::kDvSumsq:
    case SignalId::kDvNonfinite:
    case SignalId::kDoSumsq:
    case SignalId::kDoNonfinite:
    case SignalId::kDqSumsq:
    case SignalId::kDqNonfinite:
    case SignalId::kLawRowsLeftOut:
    case SignalId::kShadowODot:
    case SignalId::kShadowOGotSumsq:
    case SignalId::kShadowORefSumsq:
    case SignalId::kShadowORest:
    case SignalId::kShadowOVariance:
    case SignalId::kShadowOVarianceSq:
    case SignalId::kShadowDqDot:
    case SignalId::kShadowDqGotSumsq:
    case SignalId::kShadowDqRefSumsq:
    case SignalId::kShadowDqRest:
    case SignalId::kShadowDqVariance:
    case SignalId::kShadowDqVarianceSq:
    case SignalId::kShadowDkDot:
    case SignalId::kShadowDkGotSumsq:
    case SignalId::kShadowDkRefSumsq:
    case SignalId::kShadowDkRest:
    case SignalId::kShadowDkVariance:
    case SignalId::kShadowDkVarianceSq:
    case SignalId::kShadowDvDot:
    case SignalId::kShadowDvGotSumsq:
    case SignalId::kShadowDvRefSumsq:
    case SignalId::kShadowDvRest:
    case SignalId::kShadowDvVariance:
    case SignalId::kShadowDvVarianceSq:
    case SignalId::kLawA3Z:
    case SignalId::kLawA4Z:
    case SignalId::kShadowOExcess:
    case SignalId::kShadowDqExcess:
    case SignalId::kShadowDkExcess:
    case SignalId::kShadowDvExcess:
    case SignalId::kShadowOFactor:
    case SignalId::kShadowOFactorVariance:
    case SignalId::kShadowOFactorAlike:
    case SignalId::kShadowOFactorZ:
    case SignalId::kShadowDqFactor:
    case SignalId::kShadowDqFactorVariance:
    case SignalId::kShadowDqFactorAlike:
    case SignalId::kShadowDqFactorZ:
    case SignalId::kShadowDkFactor:
    case SignalId::kShadowDkFactorVariance:
    case SignalId::kShadowDkFactorAlike:
    case SignalId::kShadowDkFactorZ:
    case SignalId::kShadowDvFactor:
    case SignalId::kShadowDvFactorVariance:
    case SignalId::kShadowDvFactorAlike:
    case SignalId::kShadowDvFactorZ:
    case SignalId::kLawDifference:
    case SignalId::kLawVariance:
    case SignalId::kLawAlike:
    case SignalId::kLawAlikeSigma:
    case SignalId::kLawInNonfinite:
    case SignalId::kLawOutNonfinite:
    case SignalId::kLawZ:
    case SignalId::kTensorGradNorm:
    case SignalId::kTensorGradZeroShare:
    case SignalId::kTensorGradSumsq:
    case SignalId::kTensorGradMax:
    case SignalId::kTensorGradNonfinite:
    case SignalId::kTensorGradZeros:
    case SignalId::kModuleGradElements:
    case SignalId::kModuleGradSumsq:
    case SignalId::kModuleGradNonfinite:
    case SignalId::kModuleGradRms:
    case SignalId::kRankGradNorm:
    case SignalId::kRankGradNormMax:
      return kBackward;
    case SignalId::kWqSigma:
    case SignalId::kWkSigma:
    case SignalId::kWqDirectionOverlap:
    case SignalId::kWqStableRank:
    case SignalId::kQkIncrementRank:
    case SignalId::kWqSigmaResidual:
    case SignalId::kWkSigmaResidual:
    case SignalId::kGramSigma:
    case SignalId::kGramStableRank:
    case SignalId::kGramEffectiveRank:
    case SignalId::kGramTop2Ratio:
    case SignalId::kGramIncrementRank:
    case SignalId::kOwnMean:
    case SignalId::kOwnSum:
    case SignalId::kOwnMax:
    case SignalId::kReplicaSumLow:
    case SignalId::kReplicaSumHigh:
    case SignalId::kTensorElements:
    case SignalId::kTensorMoved:
    case SignalId::kTensorWeightSumsq:
    case SignalId::kTensorWeightRms:
    case SignalId::kTensorChangeSumsq:
    case SignalId::kTensorChangeWeightSumsq:
    case SignalId::kTensorUpdateRatio:
    case SignalId::kTensorLagSum:
    case SignalId::kTensorMomentLag:
    case SignalId::kTensorMomentumDot:
    case SignalId::kTensorMomentumNorms:
    case SignalId::kTensorMomentumAlignment:
    case SignalId::kRouterRowCosineMax:
    case SignalId::kTensorSigma:
    case SignalId::kTensorSigmaResidual:
    case SignalId::kEmbeddingMeanSumsq:
    case SignalId::kEmbeddingMeanNorm:
    case SignalId::kNormGainLastBin:
    case SignalId::kNormGainLastBinShare:
      return kWeights;
    // Whoever adds a signal says here on which side of a step it is measured.
    case SignalId::kNone:
    case SignalId::kRows:
    case SignalId::kCommonModeSum:
    case SignalId::kSpreadSum:
    case SignalId::kTiedRowsBf16:
    case SignalId::kTiedRowsEps:
    case SignalId::kTiedRowsEpsPaper:
    case SignalId::kSaturatedRows:
    case SignalId::kLogitMax:
    case SignalId::kEntropySum:
    case SignalId::kSinkSum:
    case SignalId::kKeyCoherenceSum:
    case SignalId::kSequences:
    case SignalId::kNonfiniteRows:
    case SignalId::kLoss:
    case SignalId::kGradNorm:
    case SignalId::kLearningRate:
    case SignalId::kTokens:
    case SignalId::kStepSeconds:
    case SignalId::kHookSeconds:
    case SignalId::kSamplingPeriod:
    case SignalId::kDriftRatio:
    case SignalId::kCommonMode:
    case SignalId::kSpread:
    case SignalId::kTiedFractionBf16:
    case SignalId::kTiedFractionEps:
    case SignalId::kTiedFractionEpsPaper:
    case SignalId::kSaturatedFraction:
    case SignalId::kEntropyRatio:
    case SignalId::kSinkRatio:
    case SignalId::kKeyCoherence:
    case SignalId::kHookOverhead:
    case SignalId::kModuleElements:
    case SignalId::kModuleSumsq:
    case SignalId::kModuleLargest:
    case SignalId::kModuleLargestRatio:
    case SignalId::kModuleNonfinite:
    case SignalId::kModuleFourths:
    case SignalId::kModuleTopSumsq:
    case SignalId::kModuleTopChannel:
    case SignalId::kModuleRms:
    case SignalId::kModuleKurtosis:
    case SignalId::kModuleTopShare:
    case SignalId::kExpertShare:
    case SignalId::kExpertDroppedShare:
    case SignalId::kExpertLargestShare:
    case SignalId::kRouterEntropy:
    case SignalId::kRouterEntropyShare:
    case SignalId::kLossSequenceMean:
    case SignalId::kLossMaskedShare:
    case SignalId::kLossRepeatedShare:
    case SignalId::kExpertLoad:
    case SignalId::kExpertDropped:
    case SignalId::kExpertDead:
    case SignalId::kExpertIdealLoad:
    case SignalId::kExpertLargestLoad:
    case SignalId::kRouterTokens:
    case SignalId::kRouterEntropySum:
    case SignalId::kRouterEntropyLargestSum:
    case SignalId::kRouterLogitMax:
    case SignalId::kLossSequences:
    case SignalId::kLossSequenceSum:
    case SignalId::kLossSequenceMax:
    case SignalId::kLossMicrobatchMax:
    case SignalId::kLossTokens:
    case SignalId::kLossMaskedTokens:
    case SignalId::kLossGivenTokens:
    case SignalId::kLossRepeatedTokens:
    case SignalId::kMomentLagMax:
    case SignalId::kGradSaturated:
    case SignalId::kLossMax:
    case SignalId::kGradNormMax:
    case SignalId::kSkippedSteps:
    case SignalId::kLossScale:
    case SignalId::kClipFactor:
    case SignalId::kDataSeconds:
    case SignalId::kForwardSeconds:
    case SignalId::kBackwardSeconds:
    case SignalId::kOptimizerSeconds:
    case SignalId::kDataShare:
    case SignalId::kMemoryAllocated:
    case SignalId::kMemoryPeak:
    case SignalId::kLogitsRows:
    case SignalId::kLogitsLogZSum:
    case SignalId::kLogitsLogZMax:
    case SignalId::kLogitsMax:
    case SignalId::kLogitsMarginSum:
    case SignalId::kLogitsLogZ:
    case SignalId::kLogitsMargin:
    case SignalId::kModuleMeanSumsq:
    case SignalId::kModuleMeanNorm:
    case SignalId::kFp8Elements:
    case SignalId::kFp8Saturated:
    case SignalId::kFp8Zeros:
    case SignalId::kFp8NonzeroInputs:
    case SignalId::kFp8Flushed:
    case SignalId::kFp8Nonfinite:
    case SignalId::kFp8Scale:
    case SignalId::kFp8AmaxAge:
    case SignalId::kFp8SaturatedShare:
    case SignalId::kFp8ZeroShare:
    case SignalId::kFp8FlushedShare:
      return kForward;
  }
  return kForward;
}

// Counts what is not finite.
bool MustBeZero(SignalId id) {
  switch (id) {
    case SignalId::kNonfiniteRows:
    case SignalId::kDoNonfinite:
    case SignalId::kDqNonfinite:
    case SignalId::kDkNonfinite:
    case SignalId::kDvNonfinite:
      return true;
    default:
      return false;
  }
}

bool IsBad(SignalId id, float value) {
  if (IsNotMeasured(value)) return false;
  return MustBeZero(id) ? value > 0 || std::isnan(value) : !std::isfinite(value);
}

// True if no value is worth a look: finite or not measured, and 0 if
// `must_be_zero`.  Branchless, since every value of every sample passes here.
bool AllUsual(std::span<const float> values, bool must_be_zero) {
  constexpr uint32_t kExponent = 0x7f800000u;
  uint32_t unusual = 0;
  for (const float value : values) {
    const auto bits = std::bit_cast<uint32_t>(value);
    const bool odd = (must_be_zero && value > 0) || (bits & kExponent) == kExponent;
    unusual |= static_cast<uint32_t>(odd) & static_cast<uint32_t>(bits != kNotMeasuredBits);
  }
  return unusual == 0;
}

bool CountsGradient(SignalId id) {
  return id == SignalId::kDqNonfinite || id == SignalId::kDkNonfinite || id == SignalId::kDvNonfinite;
}

// What is made of elements that are counted one by one where this is measured.
bool FollowsFromCounts(SignalId id) {
  const bool of_factors = id >= SignalId::kShadowOFactor && id <= SignalId::kShadowDvFactorAlike;
  return of_factors || (id >= SignalId::kLawA10 && id <= SignalId::kShadowDvVarianceSq && !MustBeZero(id));
}

// What is made of squares of a matrix, and so overflows before its largest singular value does: that value.
SignalId SigmaBehind(SignalId id) {
  switch (id) {
    case SignalId::kGramSigma:
    case SignalId::kGramStableRank:
    case SignalId::kGramEffectiveRank:
    case SignalId::kGramTop2Ratio:
    case SignalId::kGramIncrementRank:
    case SignalId::kWqSigmaResidual:
      return SignalId::kWqSigma;
    case SignalId::kWkSigmaResidual:
      return SignalId::kWkSigma;
    default:
      return SignalId::kNone;
  }
}

// Values of the run and of heads; an origin among other things is not looked for.
bool IsLookedAt(SignalId id) {
  // A sequence whose labels are all masked has a mean of NaN, and jobs drop it.
  if (id == SignalId::kLossSequenceSum || id == SignalId::kLossSequenceMax || id == SignalId::kLossMicrobatchMax) {
    return false;
  }
  // What is told of the steps since the sample before was bad in a step before this one.
  if (id >= SignalId::kMomentLagMax && id <= SignalId::kMemoryPeak) return false;
  const Granularity granularity = FindSignal(id)->granularity;
  return granularity == Granularity::kRun || OfHeads(granularity);
}

class Search {
 public:
  Search(const StepSample& sample, bool weights_were_finite)
      : sample_(sample),
        layers_(static_cast<size_t>(sample.layout().layers)),
        heads_(sample.layout().heads),
        weights_were_finite_(weights_were_finite) {
    for (Layers& side : side_) side.resize(layers_);
  }

  Nonfinite Run() {
    bool any = false;
    for (const SignalId id : sample_.signals()) {
      if (IsLookedAt(id)) any |= !AllUsual(sample_.matrix(id), MustBeZero(id));
    }
    if (!any) return std::move(found_);
    ReadCounts();
    Read();
    Trace();
    for (const Origin& origin : origins_) NameHeads(origin);
    found_.kernel = !origins_.empty() && origins_[0].side == kBackward && IsCulprit(origins_[0].layer) &&
                    !found_.forward && !found_.loss;
    if (origins_.empty() && bad_ > 0) NameNobody();
    if (!found_.findings.empty() && bad_ > 0) {
      Finding& first = found_.findings.front();
      first.summary = Words();
      if (bad_ > told_.size()) first.note = absl::StrCat(bad_ - told_.size(), " further values are not finite");
    }
    NameRun();
    NameOverflows();
    return std::move(found_);
  }

 private:
  struct Layer {
    bool measured = false, bad = false;
  };
  // Of a layer's counts: whether any is there; of its dO, whether all are and are 0.
  struct Counts {
    bool measured = false;
    bool given_finite = false;
    bool returned_bad = false;  // Of dQ, dK or dV: any that is not finite.
  };
  using Layers = std::vector<Layer>;
  struct Origin {
    Side side;
    size_t layer;
    std::vector<int32_t> heads;
    std::vector<const char*> signals;
    bool key_heads = false;  // Known by the key head only: all heads of its group.
  };

  void ReadCounts() {
    counts_.resize(layers_);
    for (const SignalId id : sample_.signals()) {
      if (!CountsGradient(id) && id != SignalId::kDoNonfinite) continue;
      const auto values = sample_.matrix(id);
      const size_t columns = values.size() / layers_;
      for (size_t at = 0; at < layers_; ++at) {
        const auto row = values.subspan(at * columns, columns);
        Counts& counts = counts_[at];
        counts.measured |= std::any_of(row.begin(), row.end(), [](float value) { return !IsNotMeasured(value); });
        if (CountsGradient(id)) {
          counts.returned_bad |= std::any_of(row.begin(), row.end(), [id](float value) { return IsBad(id, value); });
        }
        if (id == SignalId::kDoNonfinite) {
          counts.given_finite = std::all_of(row.begin(), row.end(), [](float value) { return value == 0; });
        }
      }
    }
  }

  bool IsBadHere(SignalId id, size_t layer, const float& value) const {
    return IsBad(id, value) && !(counts_[layer].measured && FollowsFromCounts(id)) && !IsOverflow(id, value);
  }
  // Of a value of the sample that is not finite: whether the weights that it is made of are.
  bool IsOverflow(SignalId id, const float& value) const {
    const SignalId behind = SigmaBehind(id);
    if (behind == SignalId::kNone) return false;
    const auto at = static_cast<size_t>(&value - sample_.matrix(id).data());
    const auto sigmas = sample_.matrix(behind);
    return at < sigmas.size() && !IsNotMeasured(sigmas[at]) && std::isfinite(sigmas[at]);
  }

  // Whether a kernel made it.  Sums of a layer that overflow, though all elements are finite, are no fault.
  bool IsCulprit(size_t layer) const { return counts_[layer].given_finite && counts_[layer].returned_bad; }

  void Read() {
    for (const SignalId id : sample_.signals()) {
      const SignalInfo& signal = *FindSignal(id);
      if (signal.granularity == Granularity::kRun) {
        const bool bad = IsBad(id, sample_.scalar(id));
        found_.loss |= bad && id == SignalId::kLoss;
        found_.grad_norm |= bad && id == SignalId::kGradNorm;
        continue;
      }
      if (!IsLookedAt(id)) continue;
      const auto values = sample_.matrix(id);
      const auto columns = static_cast<size_t>(ShapeOf(signal, sample_.layout()).heads);
      Layers& layers = side_[SideOf(id)];
      for (size_t i = 0; i < values.size(); ++i) {
        Layer& layer = layers[i / columns];
        layer.measured |= !IsNotMeasured(values[i]);
        if (!IsBadHere(id, i / columns, values[i])) continue;
        ++bad_;
        layer.bad = true;
      }
    }
    const auto any = [](const Layers& layers) {
      return std::any_of(layers.begin(), layers.end(), [](const Layer& layer) { return layer.bad; });
    };
    found_.forward = any(side_[kForward]);
    found_.backward = any(side_[kBackward]);
    found_.weights = any(side_[kWeights]);
  }

  // The layers that are not finite though the one before them, in the order of
  // the pass, is.
  std::vector<size_t> First(Side side) const {
    std::vector<size_t> first;
    bool before = false;
    for (size_t i = 0; i < layers_; ++i) {
      const size_t at = side == kBackward ? layers_ - 1 - i : i;
      const Layer& layer = side_[side][at];
      if (!layer.measured) continue;
      if (layer.bad && (!before || (side == kBackward && IsCulprit(at)))) first.push_back(at);
      before = layer.bad;
    }
    return first;
  }

  bool AllWeightsBad() const {
    size_t measured = 0;
    for (const Layer& layer : side_[kWeights]) {
      if (layer.measured && !layer.bad) return false;
      measured += layer.measured ? 1 : 0;
    }
    return measured > 1;
  }

  // All heads of all layers that were measured, more than one, and no weights
  // that are finite still.
  bool LostEverywhere() const {
    size_t measured = 0;
    bool weights = false;
    for (size_t at = 0; at < layers_; ++at) {
      const Layer& layer = side_[kForward][at];
      if (layer.measured && !layer.bad) return false;
      measured += layer.measured ? 1 : 0;
      weights |= side_[kWeights][at].measured && !side_[kWeights][at].bad;
    }
    if (measured < 2 || weights) return false;
    const std::vector<size_t> lowest = First(kForward);
    return MakeOrigin(kForward, lowest.front()).heads.size() == static_cast<size_t>(heads_);
  }

  bool ReachedTheLoss() const {
    if (found_.loss) return true;
    for (size_t at = layers_; at-- > 0;) {
      if (side_[kForward][at].measured) return side_[kForward][at].bad;
    }
    return false;
  }

  void Trace() {
    const Layers& weights = side_[kWeights];
    const bool all_weights = found_.weights && AllWeightsBad();
    const std::vector<size_t> forward = First(kForward);
    std::vector<size_t> backward = First(kBackward);
    if (!forward.empty()) {
      // A step before may have spoiled the weights of all layers.
      if (!weights_were_finite_ && LostEverywhere()) return;
      for (const size_t layer : forward) {
        AddOrigin(!all_weights && FromWeights(layer) ? kWeights : kForward, layer);
      }
      if (ReachedTheLoss()) backward.clear();
      for (const size_t layer : backward) AddOrigin(kBackward, layer);
      return;
    }
    const bool scores =
        std::any_of(side_[kForward].begin(), side_[kForward].end(), [](const Layer& layer) { return layer.measured; });
    if (found_.loss && scores) {
      of_loss_ = true;
      return;
    }
    if (found_.weights && !all_weights) {
      for (size_t at = layers_; at-- > 0;) {
        if (!weights[at].bad) continue;
        // The gradient of a layer's queries shows in W_Q, and below.
        if (backward.empty() ? LeadsDown(at) : at > backward.front()) {
          AddOrigin(kWeights, at);
          from_gradient_ = true;
          if (!backward.empty()) backward.erase(backward.begin());
        }
        break;
      }
      if (backward.empty() && origins_.empty()) {
        for (size_t at = 0; at < layers_; ++at) {
          if (weights[at].bad) AddOrigin(kWeights, at);
        }
      }
    }
    for (const size_t layer : backward) AddOrigin(kBackward, layer);
  }

  // Whether the weights of all layers from the lowest to `top`, at least two,
  // are not finite: what a gradient leaves behind.
  bool LeadsDown(size_t top) const {
    size_t bad = 0;
    for (size_t at = 0; at <= top; ++at) {
      const Layer& layer = side_[kWeights][at];
      if (layer.measured && !layer.bad) return false;
      bad += layer.bad ? 1 : 0;
    }
    return bad > 1;
  }

  void AddOrigin(Side side, size_t layer) {
    if (origins_.size() == kOriginsMax) {
      ++origins_left_out_;
    } else {
      origins_.push_back(MakeOrigin(side, layer));
    }
  }

  Origin MakeOrigin(Side side, size_t layer) const {
    Origin origin{.side = side, .layer = layer};
    // A signal of the query heads says it exactly; one of the key heads means
    // all query heads of its group.
    std::vector<uint8_t> of_queries(static_cast<size_t>(heads_)), of_keys(static_cast<size_t>(heads_));
    for (const SignalId id : sample_.signals()) {
      const SignalInfo& signal = *FindSignal(id);
      if (!OfHeads(signal.granularity) || SideOf(id) != side) continue;
      const int32_t columns = ShapeOf(signal, sample_.layout()).heads;
      const auto row = sample_.matrix(id).subspan(layer * static_cast<size_t>(columns), static_cast<size_t>(columns));
      bool bad = false;
      for (int32_t head = 0; head < heads_; ++head) {
        const auto column = static_cast<size_t>(head / (heads_ / columns));
        if (!IsBadHere(id, layer, row[column])) continue;
        bad = true;
        (columns == heads_ ? of_queries : of_keys)[static_cast<size_t>(head)] = 1;
      }
      if (bad) origin.signals.push_back(signal.name);
    }
    const auto is_bad = [](uint8_t bad) { return bad != 0; };
    origin.key_heads = std::none_of(of_queries.begin(), of_queries.end(), is_bad);
    std::vector<uint8_t>& heads = origin.key_heads ? of_keys : of_queries;
    // Of a kernel that returned dK or dV, too: also the groups of which no query head is known.
    if (side == kBackward && counts_[layer].measured && !origin.key_heads) {
      const auto group = static_cast<size_t>(heads_ / sample_.layout().kv_heads);
      for (size_t first = 0; first < heads.size(); first += group) {
        const auto begin = heads.begin() + static_cast<ptrdiff_t>(first);
        if (std::any_of(begin, begin + static_cast<ptrdiff_t>(group), is_bad)) continue;
        std::copy_n(of_keys.begin() + static_cast<ptrdiff_t>(first), group, begin);
      }
    }
    for (int32_t head = 0; head < heads_; ++head) {
      if (heads[static_cast<size_t>(head)] != 0) origin.heads.push_back(head);
    }
    return origin;
  }

  // Heads whose weights are lost while their scores are finite lost them later.
  bool FromWeights(size_t layer) const {
    const std::vector<int32_t> weights = MakeOrigin(kWeights, layer).heads;
    const std::vector<int32_t> scores = MakeOrigin(kForward, layer).heads;
    return !weights.empty() && std::includes(scores.begin(), scores.end(), weights.begin(), weights.end());
  }

  void NameHeads(const Origin& origin) {
    for (const int32_t head : origin.heads) {
      Finding& finding = found_.findings.emplace_back();
      finding.rule = Rule::kNonfinite;
      finding.stage = 5;
      finding.first_step = sample_.step;
      finding.where = {static_cast<int32_t>(origin.layer), head};
      finding.score = static_cast<double>(kOriginsMax - static_cast<size_t>(&origin - origins_.data()));
      for (const SignalId id : sample_.signals()) {
        const SignalInfo& signal = *FindSignal(id);
        if (!OfHeads(signal.granularity) || SideOf(id) != origin.side) continue;
        const auto columns = static_cast<size_t>(ShapeOf(signal, sample_.layout()).heads);
        const size_t group = static_cast<size_t>(heads_) / columns;
        const float& value = sample_.matrix(id)[origin.layer * columns + static_cast<size_t>(head) / group];
        if (!IsBadHere(id, origin.layer, value) || finding.fact_count == static_cast<int32_t>(finding.facts.size()))
          continue;
        told_.insert(&value);
        finding.Add({.signal = signal.name,
                     .where = finding.where,
                     .value = value,
                     .first_step = sample_.step,
                     .detector = "nonfinite"});
      }
    }
  }

  // Where it arose cannot be known from this sample: no head is named.
  void NameNobody() {
    Finding& finding = found_.findings.emplace_back();
    finding.rule = Rule::kNonfinite;
    finding.stage = 5;
    finding.first_step = sample_.step;
    finding.score = 1;
    for (const SignalId id : sample_.signals()) {
      if (!OfHeads(FindSignal(id)->granularity)) continue;
      for (const float& value : sample_.matrix(id)) {
        if (!IsBad(id, value)) continue;
        told_.insert(&value);
        finding.Add(
            {.signal = FindSignal(id)->name, .value = value, .first_step = sample_.step, .detector = "nonfinite"});
        break;
      }
    }
  }

  // Information: what cannot be used, though nothing that was measured is wrong.
  void NameOverflows() {
    Finding finding;
    finding.rule = Rule::kNonfinite;
    finding.severity = Severity::kInfo;
    finding.first_step = sample_.step;
    finding.score = -1;
    std::vector<const char*> signals;
    size_t others = 0;
    for (const SignalId id : sample_.signals()) {
      if (SigmaBehind(id) == SignalId::kNone) continue;
      const auto values = sample_.matrix(id);
      const size_t columns = values.size() / layers_;
      for (const float& value : values) {
        if (!IsBad(id, value) || !IsOverflow(id, value)) continue;
        const auto at = static_cast<size_t>(&value - values.data());
        const Head where = {static_cast<int32_t>(at / columns),
                            static_cast<int32_t>(at % columns * (static_cast<size_t>(heads_) / columns))};
        if (signals.empty()) finding.where = where;
        others += where == finding.where ? 0 : 1;
        if (signals.empty() || signals.back() != FindSignal(id)->name) signals.push_back(FindSignal(id)->name);
        finding.Add({.signal = FindSignal(id)->name,
                     .where = where,
                     .value = value,
                     .first_step = sample_.step,
                     .detector = "overflow"});
      }
    }
    if (signals.empty()) return;
    finding.summary =
        absl::StrCat("squares of the weights (", absl::StrJoin(signals, ", "), ") overflow in layer ",
                     finding.where.layer, " head ", finding.where.head, others > 0 ? " and others" : "",
                     ": the weights are finite, but these measurements cannot be used, since step ", sample_.step);
    finding.advice =
        "Look at sigma(W_Q) and sigma(W_K) of the named heads. The Gram matrix has their squares, which no float "
        "holds.";
    found_.findings.push_back(std::move(finding));
  }

  void NameRun() {
    for (const SignalId id : sample_.signals()) {
      if (!IsLookedAt(id) || FindSignal(id)->granularity != Granularity::kRun || !IsBad(id, sample_.scalar(id)))
        continue;
      Finding& finding = found_.findings.emplace_back();
      finding.rule = Rule::kNonfinite;
      finding.stage = 5;
      finding.first_step = sample_.step;
      finding.Add({.signal = FindSignal(id)->name,
                   .value = sample_.scalar(id),
                   .first_step = sample_.step,
                   .detector = "nonfinite"});
    }
  }

  // "layer 2 head 1", "all 8 heads of layer 2"
  std::string PlaceOf(const Origin& origin) const {
    const std::string layer = absl::StrCat("layer ", origin.layer);
    if (heads_ > 1 && origin.heads.size() == static_cast<size_t>(heads_)) {
      return absl::StrCat(layer, " (all ", heads_, " heads)");
    }
    if (origin.heads.size() == 1) return absl::StrCat(layer, " head ", origin.heads[0]);
    const size_t said = std::min(origin.heads.size(), kHeadsInWords);
    std::string text =
        absl::StrCat(layer, " heads ",
                     absl::StrJoin(origin.heads.begin(), origin.heads.begin() + static_cast<ptrdiff_t>(said), ", "));
    if (said < origin.heads.size()) absl::StrAppend(&text, " and ", origin.heads.size() - said, " others");
    return text;
  }

  static bool HasSignal(const Origin& origin, std::initializer_list<const char*> prefixes) {
    return std::any_of(origin.signals.begin(), origin.signals.end(), [&](std::string_view signal) {
      return std::any_of(prefixes.begin(), prefixes.end(),
                         [&](std::string_view prefix) { return signal.substr(0, prefix.size()) == prefix; });
    });
  }

  // "dQ and dV, as the kernel returned them from a finite dO"
  static std::string ReturnedBy(const Origin& origin) {
    std::vector<const char*> tensors;
    if (HasSignal(origin, {"dq_nonfinite"})) tensors.push_back("dQ");
    if (HasSignal(origin, {"dk_nonfinite"})) tensors.push_back("dK");
    if (HasSignal(origin, {"dv_nonfinite"})) tensors.push_back("dV");
    return absl::StrCat(absl::StrJoin(tensors, " and "), ", as the kernel returned ",
                        tensors.size() == 1 ? "it" : "them", " from a finite dO");
  }

  // What is not finite there, as a tensor of the attention.
  std::string TensorOf(const Origin& origin) const {
    switch (origin.side) {
      case kForward:
        if (HasSignal(origin, {"rows", "common_mode", "spread", "tied", "saturated", "logit_max", "nonfinite_rows"})) {
          return "the scores of the forward pass";
        }
        return HasSignal(origin, {"key_coherence"}) ? "the keys of the forward pass"
                                                    : "the probabilities of the forward pass";
      case kBackward: {
        if (IsCulprit(origin.layer)) return ReturnedBy(origin);
        if (HasSignal(origin, {"do_nonfinite"})) return "the gradient dO that its attention is given";
        // delta = dO . O; with O finite it is dO, which comes from above.
        const bool keys = HasSignal(origin, {"key_gradient", "key_leak"});
        const bool delta = HasSignal(origin, {"delta"});
        if (!delta) return "the key gradient dK of the backward pass";
        return keys ? "delta and the key gradient dK of the backward pass" : "delta of the backward pass";
      }
      default: {
        const bool keys = HasSignal(origin, {"wk_"});
        const bool queries = HasSignal(origin, {"wq_", "gram_"});
        const char* const weights = keys && queries ? "W_Q and W_K" : keys ? "W_K" : queries ? "W_Q" : "the weights";
        if (!from_gradient_) return weights;
        return absl::StrCat(weights, ", by ", keys && !queries ? "their gradient" : "the queries' gradient dQ");
      }
    }
  }

  // Of the layers of a side that are not finite and no origins.
  std::vector<size_t> Following(Side side) const {
    std::vector<size_t> layers;
    for (size_t at = 0; at < layers_; ++at) {
      const bool origin = std::any_of(origins_.begin(), origins_.end(), [&](const Origin& o) { return o.layer == at; });
      if (side_[side][at].bad && !origin) layers.push_back(at);
    }
    return layers;
  }

  static std::string FollowText(const std::vector<size_t>& layers, const char* where) {
    if (layers.size() == 1) return absl::StrCat("; layer ", layers[0], " ", where, " follows from it");
    const bool whole = layers.back() - layers.front() + 1 == layers.size();
    return absl::StrCat(whole ? "; layers " : "; some of the layers ", layers.front(), " to ", layers.back(), " ",
                        where, " follow from it");
  }

  // Scores and delta of all heads may have come so from what lies between two
  // layers' attentions, where nothing is measured.
  std::string OrBefore(const Origin& origin) const {
    if (origin.heads.size() != static_cast<size_t>(heads_)) return {};
    const Layers& side = side_[origin.side];
    // The next layer of which anything is known, in the pass's order.
    if (origin.side == kForward) {
      for (size_t at = origin.layer; at-- > 0;) {
        if (side[at].measured) return absl::StrCat(", or what lies between it and layer ", at);
      }
      return ", or what lies before it";
    }
    if (origin.side != kBackward || IsCulprit(origin.layer) || !HasSignal(origin, {"delta", "do_nonfinite"})) return {};
    for (size_t at = origin.layer + 1; at < layers_; ++at) {
      if (side[at].measured) return absl::StrCat(", or what lies between it and layer ", at);
    }
    return ", or what lies between it and the loss";
  }

  std::string Words() const {
    if (of_loss_) {
      return absl::StrCat(
          "nonfinite: the loss, though the scores of all layers are finite: it arose behind those of the ",
          "last layer, and the gradients follow from it, since step ", sample_.step);
    }
    if (origins_.empty()) {
      return absl::StrCat("nonfinite: the ", found_.forward ? "scores" : "weights",
                          " of all layers; in which layer it began is not known, since step ", sample_.step);
    }
    std::string text = absl::StrCat("nonfinite first in ", PlaceOf(origins_[0]), ": ", TensorOf(origins_[0]), " (",
                                    absl::StrJoin(origins_[0].signals, ", "), ")");
    absl::StrAppend(&text, OrBefore(origins_[0]));
    for (size_t i = 1; i < origins_.size(); ++i) {
      absl::StrAppend(&text, i == 1 ? "; by itself also in " : ", ", PlaceOf(origins_[i]));
    }
    if (origins_left_out_ > 0) absl::StrAppend(&text, " and in ", origins_left_out_, " further layers");
    const std::vector<size_t> above = Following(kForward);
    const std::vector<size_t> below = Following(kBackward);
    if (!above.empty()) text += FollowText(above, "above");
    if (found_.forward && found_.backward) {
      absl::StrAppend(&text, "; the gradients follow from it");
    } else if (!below.empty()) {
      text += FollowText(below, "below");
    }
    absl::StrAppend(&text, ", since step ", sample_.step);
    return text;
  }

  const StepSample& sample_;
  const size_t layers_;
  const int32_t heads_;
  const bool weights_were_finite_;
  Nonfinite found_;
  std::array<Layers, kSides> side_;
  std::vector<Counts> counts_;  // By layer.
  std::vector<Origin> origins_;
  size_t origins_left_out_ = 0;
  size_t bad_ = 0;
  std::set<const float*> told_;  // One value of a key head is one, however many heads share it.
  bool from_gradient_ = false;
  bool of_loss_ = false;
};

// Which ranks' own gradients are not finite, in words; empty where all have them, or none, or it is not measured.
std::string RanksOfIt(const StepSample& sample) {
  constexpr size_t kRanksMax = 8;
  std::vector<size_t> bad;
  size_t finite = 0;
  const std::span<const float> norms = sample.matrix(SignalId::kRankGradNormMax);
  for (size_t rank = 0; rank < norms.size(); ++rank) {
    if (IsNotMeasured(norms[rank])) continue;
    if (std::isfinite(norms[rank])) {
      ++finite;
    } else {
      bad.push_back(rank);
    }
  }
  if (bad.empty() || finite == 0) return {};
  const size_t more = bad.size() > kRanksMax ? bad.size() - kRanksMax : 0;
  bad.resize(bad.size() - more);
  return absl::StrCat("the own gradients of ", bad.size() > 1 ? "ranks " : "rank ", absl::StrJoin(bad, ", "),
                      more > 0 ? absl::StrCat(" and ", more, " more") : "", " are not finite, those of ", finite,
                      finite > 1 ? " others are" : " other are");
}

}  // namespace

Nonfinite FindNonfinite(const StepSample& sample, bool weights_were_finite) {
  Nonfinite found = Search(sample, weights_were_finite).Run();
  if (const std::string ranks = found.findings.empty() ? "" : RanksOfIt(sample); !ranks.empty()) {
    std::string& note = found.findings.front().note;
    absl::StrAppend(&note, note.empty() ? "" : "; ", ranks);
  }
  return found;
}

}  // namespace bellwether::server
