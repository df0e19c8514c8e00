#include "tools/lab/synthetic_places.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <numbers>
#include <string>

#include "absl/strings/str_cat.h"

namespace bellwether::server {
namespace {

constexpr int64_t kSamplePeriod = 10;  // Of the recorded runs; correlations count in it.
constexpr size_t kExperts = 16, kRanks = 8;
constexpr int64_t kTurn = 16;
constexpr double kRouterTokens = 4096, kExpertsOfToken = 2;
constexpr double kLabels = 4096, kSequences = 4;
constexpr double kRate = 1e-3, kWarmUp = 100;
constexpr double kElements = 1 << 20;
constexpr double kTrendEnds = 1000;
constexpr double kGrowthPower = 0.4;
constexpr int kShadowRows = 16;
constexpr int kHeavy = 5;  // Degrees of heavy tails.

constexpr const char* kMatrices[] = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
                                     "mlp.gate_proj",    "mlp.up_proj",      "mlp.down_proj"};
constexpr size_t kMatricesOfLayer = std::size(kMatrices);
constexpr const char* kGains[] = {"input_norm", "mlp_norm"};
constexpr const char* kLaws[] = {"y=dx", "dx=dW", "dW=y"};

constexpr const char* kOwnNames[] = {"reward", "kl", "entropy", "rollout_corr/kl"};
constexpr size_t kComparesPolicies = 3;  // Of kOwnNames: it has no noise.

SignalId Behind(SignalId first, int i) { return static_cast<SignalId>(static_cast<int>(first) + i); }

}  // namespace

SyntheticPlaces::SyntheticPlaces(const SyntheticOptions& options)
    : options_(options), random_(options.kind, options.seed * 1000 + 500 + static_cast<uint64_t>(options.kind)) {
  MakeTensors();
  const auto layers = static_cast<size_t>(options.layers);
  loads_ = Make(layers * kExperts, {0, 0.18, 0.18, 0.35});
  entropies_ = Make(layers, {-0.10, 0, 0.012, 0});
  ranks_ = Make(kRanks, {0, 0, 0.29, 0});
  lag_ = Make({0.39, 0, 0.19, 0});
  sequences_ = Make({0.196, 0, 0.092, 0});
  repeated_ = Make({std::log(0.22), 0, 0.33, 0});
  own_ = {Make({std::log(0.51), 0, 0.125, 0}), Make({std::log(1.0), 0, 0.095, 0}), Make({std::log(4.5), 0, 0.020, 0})};
  loss_ = Make({0, 0, 0.08, 0});
  // What is a share of something does not grow with the steps.
  for (Place* const share : {&lag_, &sequences_, &repeated_, &loss_, &own_[0], &own_[2]}) share->exponent = 0;
  for (Place& entropy : entropies_) entropy.exponent = 0;
  for (int32_t layer = 0; layer < options.layers; ++layer) {
    for (const char* const matrix : kMatrices) {
      for (const char* const law : kLaws) rows_.modules.Add(absl::StrCat("layers.", layer, ".", matrix, " ", law));
    }
  }
  for (const char* const name : kOwnNames) {
    OwnSignal signal;
    signal.name = name;
    signal.layers = signal.heads = 1;
    rows_.own_signals.push_back(signal);
    rows_.AddOwnCell({.signal = static_cast<int32_t>(rows_.own_signals.size()) - 1});
  }
}

SyntheticPlaces::Place SyntheticPlaces::Make(const Statistics& s) {
  const bool grows = options_.kind == SyntheticKind::kLogGrowth;
  Place place;
  place.level = s.level + s.places * random_.Normal();
  place.noise = s.noise * std::exp(s.noise_places * random_.Normal());
  place.exponent = (grows ? kGrowthPower : s.exponent) + s.exponent_places * random_.Normal();
  place.slow = random_.Normal();
  place.wave_steps = 400 * std::pow(10.0, random_.Uniform());
  place.wave_begin = random_.Uniform();
  return place;
}

std::vector<SyntheticPlaces::Place> SyntheticPlaces::Make(size_t count, const Statistics& statistics) {
  std::vector<Place> places;
  for (size_t i = 0; i < count; ++i) places.push_back(Make(statistics));
  return places;
}

void SyntheticPlaces::MakeTensors() {
  const auto add = [this](const std::string& name, bool is_gain) {
    rows_.tensors.Add(name + ".weight");
    weights_.push_back({.size = is_gain ? 1 : std::exp(-3.5 + 0.25 * random_.Normal()),
                        .growth = is_gain ? 0 : std::exp(-0.1 + 0.86 * random_.Normal()),
                        .slow = random_.Normal(),
                        .is_gain = is_gain});
  };
  add("embed_tokens", false);
  for (int32_t layer = 0; layer < options_.layers; ++layer) {
    for (const char* const matrix : kMatrices) add(absl::StrCat("layers.", layer, ".", matrix), false);
    for (const char* const gain : kGains) add(absl::StrCat("layers.", layer, ".", gain), true);
  }
  add("norm", true);
  add("lm_head", false);
  const size_t count = weights_.size();
  // Of ln sigma over places: (ln p95 - ln p50) / 1.645.
  gradients_ = Make(count, {-2.8, 1.4, 0.20, 0.47, 0.39, 0.7});
  largest_ = Make(count, {-2.2, 0.7, 0.29, 0.34});
  changes_ = Make(count, {-1.49, 0.18, 0.10, 0.5});
  lags_ = Make(count, {-0.06, 0.25, 0.14, 0.6});
  shared_gradient_ = Make({0, 0, 0.21, 0});
  shared_lag_ = Make({0, 0, 0.13, 0});
  // Only gradients grow by themselves; what is a ratio has no trend of its own.
  for (std::vector<Place>* const ratios : {&largest_, &changes_, &lags_}) {
    for (Place& place : *ratios) place.exponent = 0;
  }
  shared_gradient_.exponent = shared_lag_.exponent = 0;
}

void SyntheticPlaces::Describe(RunDescription* run) const {
  run->layout.experts = static_cast<int32_t>(kExperts);
  run->layout.ranks = static_cast<int32_t>(kRanks);
  run->layout.tensors = rows_.tensors.size();
  run->layout.modules = rows_.modules.size();
  run->layout.own = rows_.own.size();
  run->world = run->reporters = kRanks;
}

double SyntheticPlaces::RateAt(int64_t at) const {
  const auto step = static_cast<double>(at), steps = static_cast<double>(options_.steps);
  if (step < kWarmUp) return kRate * (step + 1) / kWarmUp;
  const double part = std::min(1.0, (step - kWarmUp) / std::max(1.0, steps - kWarmUp));
  return kRate * (0.55 + 0.45 * std::cos(std::numbers::pi * part));
}

double SyntheticPlaces::SumOfRates(int64_t at) const {
  const auto step = static_cast<double>(at), steps = static_cast<double>(options_.steps);
  if (step < kWarmUp) return kRate * (step + 1) * (step + 1) / (2 * kWarmUp);
  const double length = std::max(1.0, steps - kWarmUp), since = std::min(step - kWarmUp, length);
  const double turned = std::sin(std::numbers::pi * since / length) * length / std::numbers::pi;
  return kRate * (kWarmUp / 2 + 0.55 * since + 0.45 * turned);
}

double SyntheticPlaces::Next(int64_t at, double gap, Place* place) {
  const auto step = static_cast<double>(at);
  const SyntheticKind kind = options_.kind;
  const double kept = std::pow(kind == SyntheticKind::kAr90 ? 0.9 : 0.98, gap);
  const double until = kind == SyntheticKind::kLogGrowth ? step : std::min(step, kTrendEnds);
  double x = place->level + place->exponent * std::log(std::max(until, 100.0) / 400) +
             place->noise * random_.Of(kind, kept, 0, kHeavy, &place->slow);
  if (kind == SyntheticKind::kSeasonal) {
    const double turns = step / place->wave_steps + place->wave_begin;
    x += std::numbers::sqrt2 * place->noise * std::sin(2 * std::numbers::pi * turns);
  }
  return x;
}

template <typename Value>
void SyntheticPlaces::PutScalar(SignalId signal, StepSample* sample, const Value& value) {
  if (!random_.Misses(0.05)) sample->Add(signal)[0] = static_cast<float>(value);
}

template <typename Value>
void SyntheticPlaces::Put(SignalId signal, StepSample* sample, const Value& value) {
  if (random_.Misses(0.1)) return;
  const auto matrix = sample->Add(signal);
  for (size_t row = 0; row < matrix.size(); ++row) {
    if (!random_.Misses(0.05)) matrix[row] = static_cast<float>(value(row));
  }
}

double SyntheticPlaces::NextLoss(int64_t step) { return Next(step, 1, &loss_); }

void SyntheticPlaces::AddEach(StepSample* sample) {
  const int64_t step = sample->step;
  sample->ranks = kRanks;
  sample->complete = !random_.Misses(0.05);
  PutScalar(SignalId::kLearningRate, sample, RateAt(step));
  const double largest = std::max(0.0, Next(step, 1, &sequences_));
  const double repeated = std::min(1.0, std::exp(Next(step, 1, &repeated_)));
  if (const float loss = sample->scalar(SignalId::kLoss); !IsNotMeasured(loss)) {
    PutScalar(SignalId::kLossSequences, sample, kSequences);
    PutScalar(SignalId::kLossSequenceSum, sample, kSequences * loss);
    PutScalar(SignalId::kLossSequenceMax, sample, loss * std::exp(largest));
    PutScalar(SignalId::kLossTokens, sample, kLabels);
    PutScalar(SignalId::kLossGivenTokens, sample, kLabels);
    PutScalar(SignalId::kLossMaskedTokens, sample, 0);
    PutScalar(SignalId::kLossRepeatedTokens, sample, std::round(kLabels * repeated));
  }
  Put(SignalId::kOwnMean, sample,
      [&](size_t row) { return row == kComparesPolicies ? 0.0 : std::exp(Next(step, 1, &own_[row])); });
}

void SyntheticPlaces::AddSampled(StepSample* sample) {
  if (random_.Misses(0.1)) return;
  const auto steps = static_cast<double>(sample->step - sampled_at_);
  const double gap = sampled_at_ < 0 || steps <= 0 ? 1 : steps / static_cast<double>(kSamplePeriod);
  sampled_at_ = sample->step;
  ++turn_;
  AddTensors(sample, gap);
  AddExperts(sample, gap);
  AddLaws(sample);
  if (const float norm = sample->scalar(SignalId::kGradNorm); !IsNotMeasured(norm)) {
    Put(SignalId::kRankGradNorm, sample,
        [&](size_t rank) { return norm * std::exp(Next(sample->step, gap, &ranks_[rank])); });
  }
}

void SyntheticPlaces::AddTensors(StepSample* sample, double gap) {
  const int64_t step = sample->step;
  const double shared = Next(step, gap, &shared_gradient_), shared_lag = Next(step, gap, &shared_lag_);
  std::vector<double> norms, sizes;
  for (Place& place : gradients_) norms.push_back(std::exp(shared + Next(step, gap, &place)));
  const double rates = std::pow(SumOfRates(step) / 0.9, 0.6);
  const double kept = std::pow(0.9, gap);
  for (Weight& weight : weights_) {
    const double noise = 0.002 * random_.Of(SyntheticKind::kAr90, kept, 1, kHeavy, &weight.slow);
    sizes.push_back(weight.size * std::sqrt(1 + std::pow(weight.growth * rates, 2)) * std::exp(noise));
  }
  Put(SignalId::kTensorElements, sample, [](size_t) { return kElements; });
  Put(SignalId::kTensorGradSumsq, sample, [&](size_t row) { return norms[row] * norms[row]; });
  Put(SignalId::kTensorGradMax, sample,
      [&](size_t row) { return norms[row] * std::exp(std::min(0.0, Next(step, gap, &largest_[row]))); });
  Put(SignalId::kTensorGradNonfinite, sample, [](size_t) { return 0; });
  Put(SignalId::kTensorMoved, sample, [](size_t) { return 1; });
  Put(SignalId::kTensorWeightSumsq, sample, [&](size_t row) { return kElements * sizes[row] * sizes[row]; });
  PutScalar(SignalId::kMomentLagMax, sample, std::exp(Next(step, gap, &lag_)));
  const double rate = RateAt(step);
  const auto covered = [&](size_t row) { return static_cast<int64_t>(row) % kTurn == turn_ % kTurn; };
  const auto of_turn = [&](SignalId signal, const auto& value) {
    Put(signal, sample, [&](size_t row) { return covered(row) ? static_cast<float>(value(row)) : NotMeasured(); });
  };
  of_turn(SignalId::kTensorChangeSumsq, [&](size_t row) {
    return kElements * std::pow(rate * std::exp(Next(step, gap * static_cast<double>(kTurn), &changes_[row])), 2);
  });
  of_turn(SignalId::kTensorChangeWeightSumsq, [&](size_t row) { return kElements * sizes[row] * sizes[row]; });
  of_turn(SignalId::kTensorLagSum, [&](size_t row) {
    return kElements * std::exp(2 * (shared_lag + Next(step, gap * static_cast<double>(kTurn), &lags_[row])));
  });
}

void SyntheticPlaces::AddExperts(StepSample* sample, double gap) {
  const auto layers = static_cast<size_t>(options_.layers);
  std::vector<double> loads;
  for (Place& place : loads_) loads.push_back(std::exp(Next(sample->step, gap, &place)));
  std::vector<double> largest(layers);
  for (size_t layer = 0; layer < layers; ++layer) {
    const auto begin = loads.begin() + static_cast<ptrdiff_t>(layer * kExperts);
    double sum = 0;
    for (auto load = begin; load != begin + static_cast<ptrdiff_t>(kExperts); ++load) sum += *load;
    for (auto load = begin; load != begin + static_cast<ptrdiff_t>(kExperts); ++load) {
      *load = std::min(kRouterTokens, std::round(*load / sum * kRouterTokens * kExpertsOfToken));
      largest[layer] = std::max(largest[layer], *load);
    }
  }
  const double entropy = kRouterTokens * std::log(static_cast<double>(kExperts));
  Put(SignalId::kExpertLoad, sample, [&](size_t expert) { return loads[expert]; });
  Put(SignalId::kExpertIdealLoad, sample,
      [](size_t) { return kRouterTokens * kExpertsOfToken / static_cast<double>(kExperts); });
  Put(SignalId::kExpertLargestLoad, sample, [&](size_t layer) { return largest[layer]; });
  Put(SignalId::kRouterTokens, sample, [](size_t) { return kRouterTokens; });
  Put(SignalId::kRouterEntropyLargestSum, sample, [&](size_t) { return entropy; });
  Put(SignalId::kRouterEntropySum, sample,
      [&](size_t layer) { return entropy * std::exp(std::min(0.0, Next(sample->step, gap, &entropies_[layer]))); });
}

void SyntheticPlaces::AddLaws(StepSample* sample) {
  const size_t layer = static_cast<size_t>(turn_) % static_cast<size_t>(options_.layers);
  const auto heads = static_cast<size_t>(options_.heads);
  const auto of_layer = [&](SignalId signal, const auto& value) {
    Put(signal, sample,
        [&](size_t head) { return head / heads == layer ? static_cast<float>(value()) : NotMeasured(); });
  };
  const auto normal = [this] { return random_.Normal(); };
  const auto one = [] { return 1.0; };
  const auto zero = [] { return 0.0; };
  for (int i = 0; i < 8; ++i) {
    of_layer(Behind(SignalId::kLawA10, i), normal);
    of_layer(Behind(SignalId::kLawA20, i), normal);
  }
  of_layer(SignalId::kLawA3, normal);
  of_layer(SignalId::kLawA4, normal);
  for (const SignalId variance :
       {SignalId::kLawA1Variance, SignalId::kLawA2Variance, SignalId::kLawA3Variance, SignalId::kLawA4Variance}) {
    of_layer(variance, one);
  }
  for (const SignalId alike :
       {SignalId::kLawA1Alike, SignalId::kLawA2Alike, SignalId::kLawA3Alike, SignalId::kLawA4Alike}) {
    of_layer(alike, zero);
  }
  const auto squares = [this] {
    double sum = 0;
    for (int i = 0; i < kShadowRows; ++i) sum += std::pow(random_.Normal(), 2);
    return sum / kShadowRows;
  };
  struct Tensor {
    SignalId rest, variance, variance_sq, factor;
  };
  for (const Tensor& tensor : {Tensor{SignalId::kShadowORest, SignalId::kShadowOVariance, SignalId::kShadowOVarianceSq,
                                      SignalId::kShadowOFactor},
                               {SignalId::kShadowDqRest, SignalId::kShadowDqVariance, SignalId::kShadowDqVarianceSq,
                                SignalId::kShadowDqFactor},
                               {SignalId::kShadowDkRest, SignalId::kShadowDkVariance, SignalId::kShadowDkVarianceSq,
                                SignalId::kShadowDkFactor},
                               {SignalId::kShadowDvRest, SignalId::kShadowDvVariance, SignalId::kShadowDvVarianceSq,
                                SignalId::kShadowDvFactor}}) {
    of_layer(tensor.rest, squares);
    of_layer(tensor.variance, one);
    of_layer(tensor.variance_sq, [] { return 1.0 / kShadowRows; });
    of_layer(tensor.factor, normal);
    of_layer(Behind(tensor.factor, 1), one);
    of_layer(Behind(tensor.factor, 2), zero);
  }
  const size_t rows = kMatricesOfLayer * std::size(kLaws);
  const auto of_modules = [&](SignalId signal, const auto& value) {
    Put(signal, sample, [&](size_t row) { return row / rows == layer ? static_cast<float>(value()) : NotMeasured(); });
  };
  of_modules(SignalId::kLawDifference, normal);
  of_modules(SignalId::kLawVariance, one);
  of_modules(SignalId::kLawAlike, zero);
}

}  // namespace bellwether::server
