// law_samples.h: sums of the laws of attention as a kernel that is right has them.

#ifndef BELLWETHER_TESTS_SUPPORT_LAW_SAMPLES_H_
#define BELLWETHER_TESTS_SUPPORT_LAW_SAMPLES_H_

#include <cstddef>
#include <cstdint>
#include <random>

#include "server/model/step_sample.h"

namespace bellwether::server {

inline SignalId LawSignal(SignalId first, int i) { return static_cast<SignalId>(static_cast<int>(first) + i); }

inline constexpr SignalId kShadowFirst[] = {SignalId::kShadowODot, SignalId::kShadowDqDot, SignalId::kShadowDkDot,
                                            SignalId::kShadowDvDot};
inline constexpr SignalId kFactorFirst[] = {SignalId::kShadowOFactor, SignalId::kShadowDqFactor,
                                            SignalId::kShadowDkFactor, SignalId::kShadowDvFactor};
inline constexpr float kInformation = 1000;  // Standard deviations that a factor of 2 makes.
inline constexpr float kShadowRows = 16;     // Of each head, with the same variance.

// `normal()`: a normal number; `square_sum()`: a sum of squares of kShadowRows of them.  Every
// difference has a variance of 4, every tensor one of 3 a row.
template <class Normal, class SquareSum>
void AddHealthyLaws(StepSample* sample, const Normal& normal, const SquareSum& square_sum) {
  for (int i = 0; i < 18; ++i) {
    for (float& value : sample->Add(LawSignal(SignalId::kLawA10, i))) value = 2 * normal();
  }
  for (int i = 0; i < 4; ++i) {
    for (float& value : sample->Add(LawSignal(SignalId::kLawA1Variance, i))) value = 4;
    for (float& value : sample->Add(LawSignal(SignalId::kLawA1Alike, i))) value = 0;
  }
  for (const SignalId id :
       {SignalId::kDoNonfinite, SignalId::kDqNonfinite, SignalId::kDkNonfinite, SignalId::kDvNonfinite}) {
    for (float& value : sample->Add(id)) value = 0;
  }
  for (const SignalId first : kFactorFirst) {
    for (float& value : sample->Add(first)) value = kInformation * normal();
    for (float& value : sample->Add(LawSignal(first, 1))) value = kInformation * kInformation;
    for (float& value : sample->Add(LawSignal(first, 2))) value = 0;
  }
  for (const SignalId first : kShadowFirst) {
    for (int i = 0; i < 3; ++i) {
      for (float& value : sample->Add(LawSignal(first, i))) value = 1;
    }
    for (float& value : sample->Add(LawSignal(first, 3))) value = 3 * square_sum();
    for (float& value : sample->Add(LawSignal(first, 4))) value = 3 * kShadowRows;
    for (float& value : sample->Add(LawSignal(first, 5))) value = 9 * kShadowRows;
  }
}

// Of random numbers that follow from the step.
inline void AddHealthyLaws(StepSample* sample) {
  std::mt19937 random(static_cast<uint32_t>(sample->step) + 3);
  std::normal_distribution<float> normal;
  std::gamma_distribution<float> squares(kShadowRows / 2, 2);
  AddHealthyLaws(
      sample, [&] { return normal(random); }, [&] { return squares(random); });
}

}  // namespace bellwether::server

#endif  // BELLWETHER_TESTS_SUPPORT_LAW_SAMPLES_H_
