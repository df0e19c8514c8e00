#include "server/detect/law_watch.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <span>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

namespace bellwether::server {
namespace {

// Sums of a few thousand parts, each of which a float may have lost below its smallest normal
// number, are off by no more.
constexpr double kSmallest = 4096.0 * std::numeric_limits<float>::min();

// A dO whose squares add up to less is small.  dQ, dK and dV that a float cannot hold would have to be
// 10^16 times as large; what is made of it is at most |q|, |k| or |v| times the root of its rows.
constexpr double kSmallDo = 1e6;

// A forward pass that a model trains with: the largest score, and the variance that roundings give A4 beside the
// squares of dO, which follows |O|.  Beyond them Q, K or V are so large that their products overflow in any kernel.
constexpr double kUsualScore = 1e8;
constexpr double kUsualOutput = 1e12;

// Layers that are named; of further ones their number is told.
constexpr size_t kLayersMax = 8;
constexpr size_t kHeadsInText = 8;

struct LawInfo {
  const char* name;
  const char* z;  // In evidence.
  SignalId first;
  uint16_t projections;
  SignalId variance, alike;
};
constexpr LawInfo kLawInfo[] = {
    {"A1", "law_a1_z", SignalId::kLawA10, 8, SignalId::kLawA1Variance, SignalId::kLawA1Alike},
    {"A2", "law_a2_z", SignalId::kLawA20, 8, SignalId::kLawA2Variance, SignalId::kLawA2Alike},
    {"A3", "law_a3_z", SignalId::kLawA3, 1, SignalId::kLawA3Variance, SignalId::kLawA3Alike},
    {"A4", "law_a4_z", SignalId::kLawA4, 1, SignalId::kLawA4Variance, SignalId::kLawA4Alike},
};
static_assert(static_cast<int>(SignalId::kLawA17) == static_cast<int>(SignalId::kLawA10) + 7);
static_assert(static_cast<int>(SignalId::kLawA27) == static_cast<int>(SignalId::kLawA20) + 7);

struct TensorInfo {
  const char* name;
  const char* excess;
  bool of_keys;
  SignalId rest, variance, variance_sq;
  const char* factor_z;
  SignalId factor;  // Then its variance, then alike.
  const char* squares_name = "";
  SignalId squares = SignalId::kNone, nonfinite = SignalId::kNone;
};
constexpr TensorInfo kTensorInfo[] = {
    {"O", "shadow_o_excess", false, SignalId::kShadowORest, SignalId::kShadowOVariance, SignalId::kShadowOVarianceSq,
     "shadow_o_factor_z", SignalId::kShadowOFactor},
    {"dQ", "shadow_dq_excess", false, SignalId::kShadowDqRest, SignalId::kShadowDqVariance,
     SignalId::kShadowDqVarianceSq, "shadow_dq_factor_z", SignalId::kShadowDqFactor, "dq_sumsq", SignalId::kDqSumsq,
     SignalId::kDqNonfinite},
    {"dK", "shadow_dk_excess", true, SignalId::kShadowDkRest, SignalId::kShadowDkVariance,
     SignalId::kShadowDkVarianceSq, "shadow_dk_factor_z", SignalId::kShadowDkFactor, "dk_sumsq", SignalId::kDkSumsq,
     SignalId::kDkNonfinite},
    {"dV", "shadow_dv_excess", true, SignalId::kShadowDvRest, SignalId::kShadowDvVariance,
     SignalId::kShadowDvVarianceSq, "shadow_dv_factor_z", SignalId::kShadowDvFactor, "dv_sumsq", SignalId::kDvSumsq,
     SignalId::kDvNonfinite},
};

constexpr uint32_t kDq = 2, kDk = 4;  // Bits of kTensorInfo.

constexpr uint32_t kA1 = 1, kA2 = 2, kA3 = 4, kA4 = 8;

SignalId Next(SignalId first, uint16_t i) { return static_cast<SignalId>(static_cast<uint16_t>(first) + i); }

bool Usable(float value) { return !IsNotMeasured(value) && std::isfinite(value); }

// "all 8 heads", "head 1", "heads 1, 2 and 9 others"
std::string HeadsText(const std::vector<int32_t>& heads, int32_t of) {
  if (of > 1 && heads.size() == static_cast<size_t>(of)) return absl::StrCat("(all ", of, " heads)");
  if (heads.size() == 1) return absl::StrCat("head ", heads[0]);
  const size_t said = std::min(heads.size(), kHeadsInText);
  std::string text =
      absl::StrCat("heads ", absl::StrJoin(heads.begin(), heads.begin() + static_cast<ptrdiff_t>(said), ", "));
  if (said < heads.size()) absl::StrAppend(&text, " and ", heads.size() - said, " others");
  return text;
}

}  // namespace

LawLimits::LawLimits(double of_run, int64_t sample, int64_t questions) {
  const auto k = static_cast<double>(std::max<int64_t>(sample, 1));
  const auto n = static_cast<double>(std::max<int64_t>(questions, 1));
  chance = of_run * 6 / (std::numbers::pi * std::numbers::pi * k * k * n);
}

double LawLimits::z() const { return std::sqrt(2 * std::log(2 / chance)); }

double LawLimits::excess(double degrees) const {
  const double x = std::log(1 / chance);
  return 1 + 2 * std::sqrt(x / degrees) + 2 * x / std::sqrt(degrees);
}

const char* SuspectsOf(uint32_t broken) {
  if (broken == kA1) return "delta, or keys whose dK was not written";
  if (broken == (kA1 | kA4)) return "O";
  if ((broken & kA1) != 0 && (broken & kA3) != 0) return "dK, or keys whose dK was not written";
  if (broken == kA3) return "dQ or dK, by a factor or of exchanged heads";
  if ((broken & kA2) != 0) return "dV, or P of the backward pass (its logsumexp)";
  return "O or dV";
}

struct LawWatch::Place {
  size_t layer = 0, key_head = 0;
  uint32_t laws = 0;     // Broken: bit law - 1.
  uint32_t tensors = 0;  // Beyond their limit: bit of kTensorInfo.
  uint32_t huge = 0;     // Beyond a float: the same bits.
  std::vector<int32_t> heads;
  double score = 0;
};

void LawWatch::Read(const StepSample& sample) {
  const size_t cells = static_cast<size_t>(layout_.layers) * static_cast<size_t>(layout_.kv_heads);
  laws_.assign(cells, {});
  questions_ = 0;
  for (size_t law = 0; law < kLaws; ++law) {
    const LawInfo& info = kLawInfo[law];
    const auto variance = sample.matrix(info.variance), alike = sample.matrix(info.alike);
    if (variance.empty() || alike.empty()) continue;
    std::array<std::span<const float>, 8> differences;
    bool whole = true;
    for (uint16_t i = 0; i < info.projections; ++i) {
      differences[i] = sample.matrix(Next(info.first, i));
      whole &= !differences[i].empty();
    }
    if (!whole) continue;
    for (size_t cell = 0; cell < cells; ++cell) {
      if (!Usable(variance[cell]) || !Usable(alike[cell]) || variance[cell] < 0) continue;
      double largest = 0;
      bool usable = true;
      for (uint16_t i = 0; i < info.projections; ++i) {
        const float difference = differences[i][cell];
        usable &= Usable(difference);
        largest = std::max(largest, std::abs(static_cast<double>(difference)));
      }
      if (!usable) continue;
      const double sigma = std::sqrt(std::max<double>(variance[cell], kSmallest));
      const double explained = std::max<double>(alike[cell], 0);
      laws_[cell][law] = {.asked = true,
                          .z = largest / sigma,
                          .beyond = std::max(0.0, largest - explained) / sigma,
                          .twice = largest > 2 * explained};
      questions_ += info.projections;
    }
  }
  for (size_t tensor = 0; tensor < kTensors; ++tensor) {
    const TensorInfo& info = kTensorInfo[tensor];
    const auto rest = sample.matrix(info.rest), variance = sample.matrix(info.variance);
    const auto squares = sample.matrix(info.variance_sq);
    const auto factor = sample.matrix(info.factor), factor_variance = sample.matrix(Next(info.factor, 1));
    const auto alike = sample.matrix(Next(info.factor, 2));
    const size_t factors = std::min({factor.size(), factor_variance.size(), alike.size()});
    shadow_[tensor].assign(std::min(rest.size(), variance.size()), {});
    for (size_t i = 0; i < shadow_[tensor].size(); ++i) {
      // Below it gradients may underflow: in the kernel, or in its reference.
      if (!Usable(rest[i]) || !Usable(variance[i]) || variance[i] <= kSmallest || rest[i] < 0) continue;
      if (i < factors && Usable(factor[i]) && Usable(factor_variance[i]) && Usable(alike[i]) &&
          factor_variance[i] > 0) {
        const double of = factor_variance[i], beyond = std::abs(static_cast<double>(factor[i])) - alike[i];
        shadow_[tensor][i].times = 1 + factor[i] / of;
        shadow_[tensor][i].beyond = std::max(0.0, beyond) / std::sqrt(of);
        shadow_[tensor][i].information = of;
        ++questions_;
      }
      const double of_rows = variance[i];
      // Where it is not known how many rows that is, it counts as one.
      double degrees = 1;
      if (i < squares.size() && Usable(squares[i])) {
        degrees = std::max(1.0, of_rows * of_rows / std::max<double>(squares[i], kSmallest));
      }
      shadow_[tensor][i].excess = rest[i] / of_rows;
      shadow_[tensor][i].degrees = degrees;
      ++questions_;
    }
  }
}

void LawWatch::ReadSquares(const StepSample& sample) {
  const auto squares_of_do = sample.matrix(SignalId::kDoSumsq), bad_of_do = sample.matrix(SignalId::kDoNonfinite);
  const auto scores = sample.matrix(SignalId::kLogitMax), of_outputs = sample.matrix(SignalId::kLawA4Variance);
  const auto heads = static_cast<size_t>(layout_.heads), key_heads = static_cast<size_t>(layout_.kv_heads);
  any_huge_ = false;
  for (size_t tensor = 0; tensor < kTensors; ++tensor) {
    const TensorInfo& info = kTensorInfo[tensor];
    huge_[tensor].clear();
    if (info.squares == SignalId::kNone || squares_of_do.empty() || bad_of_do.empty()) continue;
    const auto squares = sample.matrix(info.squares), bad = sample.matrix(info.nonfinite);
    if (squares.empty() || bad.size() != squares.size()) continue;
    // The query heads of which it is made: a head's own, or its group.
    const size_t columns = info.of_keys ? key_heads : heads, width = heads / columns;
    for (size_t at = 0; at < squares.size(); ++at) {
      if (squares[at] != std::numeric_limits<float>::infinity() || bad[at] != 0) continue;
      double given = 0;
      bool usual = true;  // The forward pass, as far as it was measured.
      for (size_t head = at * width; head < (at + 1) * width; ++head) {
        const bool known = bad_of_do[head] == 0 && Usable(squares_of_do[head]);
        given += known ? squares_of_do[head] : std::numeric_limits<double>::infinity();
        usual &= head >= scores.size() || IsNotMeasured(scores[head]) || std::abs(scores[head]) <= kUsualScore;
      }
      if (given > kSmallDo) continue;
      const size_t cell = info.of_keys ? at : at * key_heads / heads;
      usual &= cell >= of_outputs.size() || std::isnan(of_outputs[cell]) ||
               of_outputs[cell] <= kUsualOutput * std::max(given, kSmallest);
      // dV is made of P and dO alone.
      if (!usual && info.squares != SignalId::kDvSumsq) continue;
      huge_[tensor].resize(squares.size(), -1);
      huge_[tensor][at] = given;
      any_huge_ = true;
    }
  }
}

void LawWatch::Judge(std::vector<Place>* places) {
  const double z = limits_.z();
  const auto heads = static_cast<size_t>(layout_.heads), key_heads = static_cast<size_t>(layout_.kv_heads);
  const size_t group = heads / key_heads;
  biased_.assign(laws_.size(), 0);
  // Beyond 1: beyond chance, in standard deviations.
  const auto over = [&](size_t tensor, size_t at) {
    if (at >= shadow_[tensor].size()) return 0.0;
    const Beside& beside = shadow_[tensor][at];
    const double far = beside.degrees == 0 ? 0 : std::sqrt(beside.excess / limits_.excess(beside.degrees));
    return std::max(far, beside.beyond / z);
  };
  for (size_t cell = 0; cell < laws_.size(); ++cell) {
    Place place{.layer = cell / key_heads, .key_head = cell % key_heads};
    for (size_t law = 0; law < kLaws; ++law) {
      const Reading& reading = laws_[cell][law];
      if (reading.beyond > z) {
        place.laws |= 1u << law;
        place.score = std::max(place.score, reading.beyond / z);
      } else if (reading.z > z) {
        biased_[cell] |= 1u << law;
      }
    }
    for (size_t tensor = 0; tensor < kTensors; ++tensor) {
      if (kTensorInfo[tensor].of_keys) {
        const double far = over(tensor, cell);
        if (far > 1) place.tensors |= 1u << tensor;
        if (far > 1) place.score = std::max(place.score, far);
        if (IsHuge(tensor, cell)) place.huge |= 1u << tensor;
        continue;
      }
      for (size_t i = 0; i < group; ++i) {
        const size_t head = place.key_head * group + i;
        const double far = over(tensor, place.layer * heads + head);
        const bool huge = IsHuge(tensor, place.layer * heads + head);
        if (far <= 1 && !huge) continue;
        if (huge) place.huge |= 1u << tensor;
        if (far > 1) place.tensors |= 1u << tensor;
        if (far > 1) place.score = std::max(place.score, far);
        const auto number = static_cast<int32_t>(head);
        if (std::find(place.heads.begin(), place.heads.end(), number) == place.heads.end())
          place.heads.push_back(number);
      }
    }
    // A bias of delta, which healthy kernels have, shows in A1 alone.
    if (place.laws == kA1 && place.tensors == 0 && place.huge == 0 && !laws_[cell][0].twice) {
      biased_[cell] |= kA1;
      continue;
    }
    if (place.laws == 0 && place.tensors == 0 && place.huge == 0) continue;
    if (place.huge != 0) place.score = std::numeric_limits<float>::max();
    if (place.heads.empty()) {
      for (size_t i = 0; i < group; ++i) place.heads.push_back(static_cast<int32_t>(place.key_head * group + i));
    }
    std::sort(place.heads.begin(), place.heads.end());
    places->push_back(std::move(place));
  }
  std::stable_sort(places->begin(), places->end(), [](const Place& a, const Place& b) {
    const bool a_exact = a.tensors != 0, b_exact = b.tensors != 0;
    return a_exact != b_exact ? a_exact : a.score > b.score;
  });
}

void LawWatch::Name(const AttentionTraits& traits, const std::vector<Place>& places) {
  const auto heads = static_cast<size_t>(layout_.heads), key_heads = static_cast<size_t>(layout_.kv_heads);
  // Layers in the order of their worst head.
  std::vector<std::pair<size_t, std::vector<int32_t>>> layers;
  for (const Place& place : places) {
    auto layer = std::find_if(layers.begin(), layers.end(), [&](const auto& l) { return l.first == place.layer; });
    if (layer == layers.end()) layer = layers.insert(layers.end(), {place.layer, {}});
    layer->second.insert(layer->second.end(), place.heads.begin(), place.heads.end());
  }
  for (auto& [layer, named] : layers) std::sort(named.begin(), named.end());

  const double z = limits_.z();
  std::vector<std::string> why;
  for (const Place& place : places) {
    const auto layer =
        std::find_if(layers.begin(), layers.end(), [&](const auto& l) { return l.first == place.layer; });
    if (static_cast<size_t>(layer - layers.begin()) >= kLayersMax) continue;
    const bool worst = &place == &places.front();
    for (const int32_t head : place.heads) {
      Finding& finding = findings_.emplace_back();
      finding.rule = Rule::kKernel;
      finding.severity = Severity::kCritical;
      finding.first_step = step_;
      finding.where = {static_cast<int32_t>(place.layer), head};
      finding.score = place.score;
      finding.exact = place.tensors != 0;
      for (size_t tensor = 0; tensor < kTensors; ++tensor) {
        const TensorInfo& info = kTensorInfo[tensor];
        const size_t at =
            info.of_keys ? place.layer * key_heads + place.key_head : place.layer * heads + static_cast<size_t>(head);
        if (at >= shadow_[tensor].size()) continue;
        const Beside& beside = shadow_[tensor][at];
        const double limit = beside.degrees == 0 ? 0 : limits_.excess(beside.degrees);
        const bool is_far = beside.degrees != 0 && beside.excess > limit, is_scaled = beside.beyond > z;
        const auto add = [&](const char* signal, double value, double threshold) {
          finding.Add({.signal = signal,
                       .where = finding.where,
                       .value = value,
                       .threshold = threshold,
                       .first_step = step_,
                       .detector = kExactDetector});
        };
        if (is_far) add(info.excess, beside.excess, limit);
        if (is_scaled) add(info.factor_z, beside.beyond, z);
        if (!worst || head != place.heads.front()) continue;
        if (is_far) {
          why.push_back(
              absl::StrFormat("%s is wrong: %.3g times as far from its reference as rounding gives (limit %.3g)",
                              info.name, beside.excess, limit));
        } else if (is_scaled) {
          why.push_back(absl::StrFormat(
              "%s is wrong: %.4g times its reference, %.3g standard deviations of rounding from once (limit %.3g)",
              info.name, beside.times, beside.beyond, z));
        }
      }
      for (size_t tensor = 0; tensor < kTensors; ++tensor) {
        const TensorInfo& info = kTensorInfo[tensor];
        const size_t at =
            info.of_keys ? place.layer * key_heads + place.key_head : place.layer * heads + static_cast<size_t>(head);
        if (!IsHuge(tensor, at)) continue;
        finding.Add({.signal = info.squares_name,
                     .where = finding.where,
                     .value = std::numeric_limits<double>::infinity(),
                     .threshold = std::numeric_limits<float>::max(),
                     .first_step = step_,
                     .detector = "law"});
      }
      for (size_t law = 0; law < kLaws; ++law) {
        if ((place.laws >> law & 1u) == 0) continue;
        finding.Add({.signal = kLawInfo[law].z,
                     .where = finding.where,
                     .value = laws_[place.layer * key_heads + place.key_head][law].beyond,
                     .threshold = z,
                     .first_step = step_,
                     .detector = "law"});
      }
    }
    if (worst && place.huge != 0) why.push_back(HugeText(place));
    if (!worst || place.laws == 0) continue;
    std::vector<std::string> names, sigmas;
    for (size_t law = 0; law < kLaws; ++law) {
      if ((place.laws >> law & 1u) == 0) continue;
      names.push_back(kLawInfo[law].name);
      sigmas.push_back(absl::StrFormat("%.3g", laws_[place.layer * key_heads + place.key_head][law].beyond));
    }
    why.push_back(
        absl::StrFormat("law%s %s %s broken by %s standard deviations of rounding (limit %.3g), which leaves %s",
                        names.size() == 1 ? "" : "s", absl::StrJoin(names, " and "), names.size() == 1 ? "is" : "are",
                        absl::StrJoin(sigmas, " and "), z, SuspectsOf(place.laws)));
  }
  std::string& text = findings_.front().summary;
  text = absl::StrCat("kernel", traits.kernel.empty() ? "" : absl::StrCat(" (", traits.kernel, ")"),
                      " is wrong in layer ", layers.front().first, " ", HeadsText(layers.front().second, layout_.heads),
                      ": ", absl::StrJoin(why, "; "));
  const size_t said = std::min(layers.size(), kLayersMax);
  for (size_t i = 1; i < said; ++i) {
    absl::StrAppend(&text, i == 1 ? "; also in layer " : ", layer ", layers[i].first, " ",
                    HeadsText(layers[i].second, layout_.heads));
  }
  if (said < layers.size()) absl::StrAppend(&text, " and in ", layers.size() - said, " further layers");
  absl::StrAppend(&text, ", since step ", step_);
}

// "dQ is wrong: its elements are finite, but ..."
std::string LawWatch::HugeText(const Place& place) const {
  std::vector<const char*> names;
  double given = 0;
  for (size_t tensor = 0; tensor < kTensors; ++tensor) {
    if ((place.huge >> tensor & 1u) == 0) continue;
    names.push_back(kTensorInfo[tensor].name);
    const auto columns = static_cast<size_t>(kTensorInfo[tensor].of_keys ? layout_.kv_heads : layout_.heads);
    const size_t width = static_cast<size_t>(layout_.heads) / columns;
    for (const int32_t head : place.heads) {
      const size_t at = place.layer * columns + static_cast<size_t>(head) / width;
      if (IsHuge(tensor, at)) given = std::max(given, huge_[tensor][at]);
    }
  }
  const bool one = names.size() == 1;
  const bool or_o = (place.huge & kDq) != 0 && (place.huge & kDk) != 0;
  return absl::StrFormat(
      "%s %s wrong%s: %s elements are finite, but the sum of their squares is beyond 3.4e38, and that of dO is %.3g",
      absl::StrJoin(names, " and "), one ? "is" : "are", or_o ? ", or O, of which both are made" : "",
      one ? "its" : "their", given);
}

bool LawWatch::Observe(const StepSample& sample, const AttentionTraits& traits) {
  findings_.clear();
  biased_.clear();
  questions_ = 0;
  const bool any =
      std::any_of(std::begin(kLawInfo), std::end(kLawInfo),
                  [&](const LawInfo& law) { return sample.has(law.variance); }) ||
      std::any_of(std::begin(kTensorInfo), std::end(kTensorInfo), [&](const TensorInfo& tensor) {
        return sample.has(tensor.rest) || (tensor.squares != SignalId::kNone && sample.has(tensor.squares));
      });
  if (!any) return false;
  step_ = sample.step;
  layout_ = sample.layout();
  Read(sample);
  ReadSquares(sample);
  if (questions_ == 0 && !any_huge_) return false;
  if (questions_ > 0) ++samples_;
  limits_ = LawLimits(options_.chance, samples_, questions_);
  std::vector<Place> places;
  Judge(&places);
  if (!places.empty()) Name(traits, places);
  return true;
}

void LawWatch::AddEvidence(std::vector<Finding>* findings) const {
  if (biased_.empty()) return;
  const auto group = static_cast<size_t>(layout_.heads / layout_.kv_heads);
  for (Finding& finding : *findings) {
    if (finding.where.layer < 0 || finding.where.head < 0) continue;
    const size_t cell = static_cast<size_t>(finding.where.layer) * static_cast<size_t>(layout_.kv_heads) +
                        static_cast<size_t>(finding.where.head) / group;
    if (cell >= biased_.size()) continue;
    for (size_t law = 0; law < kLaws; ++law) {
      if ((biased_[cell] >> law & 1u) == 0) continue;
      finding.Add({.signal = kLawInfo[law].z,
                   .where = finding.where,
                   .value = laws_[cell][law].z,
                   .threshold = limits_.z(),
                   .first_step = step_,
                   .detector = "law"});
    }
  }
}

}  // namespace bellwether::server
