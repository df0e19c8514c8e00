#include "server/detect/illness.h"

namespace bellwether::server {
namespace {

template <class... Families>
constexpr uint32_t All(Families... families) {
  return (BitOf(families) | ...);
}

// What a run shows that goes wrong, whatever the cause.
constexpr uint32_t kOfTheRun =
    All(Family::kLoss, Family::kGradient, Family::kNonfinite, Family::kParameters, Family::kSequences);
constexpr uint32_t kOfWrongNumbers = kOfTheRun | All(Family::kLogits, Family::kRounding, Family::kLearning);
constexpr int64_t kOneBatch = 200;

constexpr IllnessCause kCauses[] = {
    {"faulty kernel", 9, kOfTheRun | All(Family::kCorruption, Family::kLearning), kAsLongAsItFires},
    {"corruption", 7, kOfWrongNumbers | All(Family::kDisagreement, Family::kCorruption), kAsLongAsItFires},
    {"replicas apart", 6, kOfWrongNumbers | All(Family::kDisagreement, Family::kCorruption), kAsLongAsItFires},
    {"epsilon too small", 7, kOfTheRun | All(Family::kLogits, Family::kLearning), kAsLongAsItFires},
    {"nothing to learn", 6, kOfTheRun | All(Family::kFrozen, Family::kLearning), kAsLongAsItFires},
    {"optimizer does not move", 6, kOfTheRun | All(Family::kFrozen, Family::kLearning), kAsLongAsItFires},
    {"gradients not cleared", 6, kOfWrongNumbers, kAsLongAsItFires},
    {"gradients scaled wrongly", 6, kOfTheRun, kAsLongAsItFires},
    {"learning rate too high", 6, kOfTheRun | All(Family::kLogits, Family::kExperts, Family::kLearning),
     kAsLongAsItFires},
    {"rounding drift", 5, kOfTheRun | All(Family::kLogits), kAsLongAsItFires},
    {"FP8 saturation", 5, kOfTheRun | All(Family::kLearning), kAsLongAsItFires},
    {"logit growth", 4, kOfTheRun | All(Family::kLogits, Family::kRounding), kAsLongAsItFires},
    {"residual growth", 4, kOfTheRun, kAsLongAsItFires},
    {"head growth", 4, kOfTheRun, kAsLongAsItFires},
    {"warm-up missing", 6, kOfTheRun | All(Family::kLogits, Family::kExperts, Family::kLearning), kAsLongAsItFires},
    {"second moment too slow", 6, kOfTheRun | All(Family::kLearning), kAsLongAsItFires},
    {"stall", 5, kOfTheRun | All(Family::kLearning), kAsLongAsItFires},
    // It says what the loss does and not why: whatever grew before it says more.
    {"step change of the loss", 3, All(Family::kLoss, Family::kGradient, Family::kParameters, Family::kSequences),
     kAsLongAsItFires},
    {"bad data", 2, All(Family::kLoss, Family::kGradient, Family::kParameters), kOneBatch},
    {"parameters out of their past", 1, All(Family::kGradient, Family::kLoss, Family::kNonfinite), kOneBatch},
    {"steps rounded away", 1, 0, 0},
    {"dead experts", 1, 0, 0},
    {"rollout apart", 1, 0, 0},
};

// Parameters may stand still on purpose: nothing else follows from that.
constexpr IllnessCause kStandsStill = {"optimizer does not move", 1, 0, 0};
constexpr IllnessCause kUnknownOfRounding = {"unknown", 1, kOfTheRun | All(Family::kLogits), kAsLongAsItFires};
constexpr IllnessCause kUnknownOfNonfinite = {"unknown", 1, All(Family::kLoss, Family::kGradient, Family::kParameters),
                                              kAsLongAsItFires};
constexpr IllnessCause kUnknownOfTheRun = {
    "unknown", 0, All(Family::kLoss, Family::kGradient, Family::kNonfinite, Family::kParameters), kOneBatch};
constexpr IllnessCause kUnknown = {"unknown", 0, 0, 0};

}  // namespace

const IllnessCause& CauseNamed(Family family, std::string_view cause) {
  if (family == Family::kFrozen && cause == kStandsStill.name) return kStandsStill;
  for (const IllnessCause& known : kCauses) {
    if (known.name == cause) return known;
  }
  switch (family) {
    case Family::kRounding:
      return kUnknownOfRounding;
    case Family::kNonfinite:
      return kUnknownOfNonfinite;
    case Family::kLoss:
    case Family::kGradient:
      return kUnknownOfTheRun;
    default:
      return kUnknown;
  }
}

}  // namespace bellwether::server
