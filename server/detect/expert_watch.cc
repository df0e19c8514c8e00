#include "server/detect/expert_watch.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/detect/measured.h"

namespace bellwether::server {
namespace {

// Experts that are named, and findings of an alert; of further ones their number is told.
constexpr size_t kExpertsNamedMax = 8;
constexpr size_t kCasesSaidMax = 4;  // In the words of an alert.
constexpr uint16_t kExpertCountMax = 60000;
// What has no chance of being a batch's whim need not be seen more often.
constexpr uint16_t kSureSamples = 2;

uint16_t OneMore(uint16_t count) { return std::min<uint16_t>(kExpertCountMax, static_cast<uint16_t>(count + 1)); }

}  // namespace

void ExpertWatch::Forget() {
  for (Expert& expert : experts_) {
    if (StateOf(expert) == State::kWell) expert = {};
  }
  for (Router& router : routers_) {
    if (!IsCollapsed(router)) router = {};
  }
}

void ExpertWatch::Rewind() {
  Forget();
  findings_.clear();
}

bool ExpertWatch::Consistent() const {
  return columns_ >= 0 && experts_.size() == routers_.size() * static_cast<size_t>(columns_);
}

bool ExpertWatch::IsSteady(const Expert& expert) const {
  return expert.seen >= options_.seen && expert.longest == 0 && expert.lowest >= options_.steady_share;
}

bool ExpertWatch::IsCollapsed(const Router& router) const {
  return router.sharp >= kSureSamples || (!warming_ && router.collapsed >= options_.samples);
}

// What has a habit of the first steps begins anew.
void ExpertWatch::EndWarmUp() {
  for (Expert& expert : experts_) {
    if (StateOf(expert) != State::kWell) continue;
    if (expert.longest > 0 || expert.seen == 0) expert = {};
    expert.idle = 0;
    expert.expected = 0;
  }
  for (Router& router : routers_) {
    if (!IsCollapsed(router)) router = {};
  }
}

ExpertWatch::State ExpertWatch::StateOf(const Expert& expert) const {
  if (expert.idle >= kSureSamples && expert.expected >= options_.steady_tokens && IsSteady(expert)) return State::kIdle;
  if (warming_) return State::kWell;
  if (expert.idle < options_.samples * (expert.longest + 1)) return State::kWell;
  if (expert.seen >= options_.seen) return State::kIdle;
  return expert.idle >= options_.start_samples ? State::kUnused : State::kWell;
}

bool ExpertWatch::Observe(const StepSample& sample, int64_t quiet_steps, bool warming) {
  findings_.clear();
  if (warming_ && !warming) EndWarmUp();
  warming_ = warming;
  const auto loads = sample.matrix(SignalId::kExpertLoad);
  // Tokens of an expert may lie at a rank that is missing.
  if (loads.empty() || !sample.complete) return false;
  const auto columns = sample.layout().experts;
  if (columns <= 1 || loads.size() % static_cast<size_t>(columns) != 0) return false;
  const size_t layers = loads.size() / static_cast<size_t>(columns);
  if (columns != columns_ || layers != routers_.size()) {
    columns_ = columns;
    routers_.assign(layers, {});
    experts_.assign(loads.size(), {});
    news_ = {};
  }
  const auto tokens = sample.matrix(SignalId::kRouterTokens);
  const auto entropies = sample.matrix(SignalId::kRouterEntropySum);
  const auto largest = sample.matrix(SignalId::kRouterEntropyLargestSum);
  news_.Begin(sample.step, quiet_steps);
  quiet_steps_ = quiet_steps;
  bool any = false;
  for (size_t layer = 0; layer < layers; ++layer) {
    const auto row = loads.subspan(layer * static_cast<size_t>(columns), static_cast<size_t>(columns));
    // Layers may have fewer experts than the run's largest one; the rest is not measured.
    size_t count = 0;
    double sum = 0;
    while (count < row.size() && IsAtLeast0(row[count])) sum += row[count++];
    if (count < 2 || sum <= 0) continue;
    any = true;
    Router& router = routers_[layer];
    router.experts = static_cast<int32_t>(count);
    router.entropy = -1;
    if (const float most = ValueAt(largest, layer), some = ValueAt(entropies, layer);
        IsAbove0(most) && IsAtLeast0(some)) {
      router.entropy = some / most;
    }
    TakeLoads(row.first(count), sum / static_cast<double>(count), sample.step,
              &experts_[layer * static_cast<size_t>(columns)]);
    const float given = ValueAt(tokens, layer);
    if (IsAbove0(given)) TakeBreadth(row.first(count), given, sample.step, &router);
  }
  if (!any) return false;
  Tell(sample.step);
  return true;
}

template <class Place>
void ExpertWatch::BeginWrong(int64_t step, bool first, Place* place) const {
  if (first && place->told && step - place->since > quiet_steps_) place->told = false;
  // A new attempt may have gone back behind it.
  place->since = first ? step : std::min(place->since, step);
}

void ExpertWatch::TakeLoads(std::span<const float> loads, double mean, int64_t step, Expert* experts) {
  for (size_t i = 0; i < loads.size(); ++i) {
    Expert& expert = experts[i];
    if (loads[i] > 0) {
      // Before its first tokens it was unused, which is no habit.
      if (expert.seen > 0) expert.longest = std::max(expert.longest, expert.idle);
      expert.seen = OneMore(expert.seen);
      if (expert.idle > 0) expert.since = step;
      expert.idle = 0;
      expert.expected = 0;
      const auto share = static_cast<float>(loads[i] / mean);
      expert.lowest = expert.lowest < 0 ? share : std::min(expert.lowest, share);
    } else {
      BeginWrong(step, expert.idle == 0, &expert);
      if (expert.lowest > 0) expert.expected += static_cast<float>(expert.lowest * mean);
      expert.idle = OneMore(expert.idle);
    }
  }
}

void ExpertWatch::TakeBreadth(std::span<const float> loads, double tokens, int64_t step, Router* router) {
  double sum = 0, squares = 0;
  const auto busiest = std::max_element(loads.begin(), loads.end());
  for (const float load : loads) {
    sum += load;
    squares += double{load} * load;
  }
  const auto experts = static_cast<double>(loads.size());
  const double chosen = sum / tokens;
  router->load = *busiest;
  router->ideal = static_cast<float>(sum / experts);
  router->busiest = static_cast<int32_t>(busiest - loads.begin());
  // Few tokens reach few experts.
  if (router->ideal < options_.tokens || chosen > experts - 1) return;
  double breadth = std::clamp((sum * sum / squares - chosen) / (experts - chosen), 0.0, 1.0);
  if (router->entropy >= 0 && router->entropy < options_.breadth) {
    breadth = std::min(breadth, std::max(0.0, (1 - router->load / tokens) / (1 - chosen / experts)));
  }
  router->breadth = static_cast<float>(breadth);
  const float of_block = router->count >= options_.seen ? router->least : -1;
  const double best = std::max(router->best, of_block), fall = options_.breadth_fall;
  const bool sharp = breadth < options_.breadth && breadth * fall * fall < best;
  if (sharp || (router->best >= 0 && breadth < options_.breadth && breadth * fall < router->best)) {
    BeginWrong(step, router->collapsed == 0, router);
    router->collapsed = OneMore(router->collapsed);
    if (sharp) {
      router->sharp = OneMore(router->sharp);
    } else if (router->sharp < kSureSamples) {
      router->sharp = 0;
    }
    return;
  }
  if (router->collapsed > 0) router->since = step;
  router->collapsed = 0;
  router->sharp = 0;
  router->least = router->count == 0 ? router->breadth : std::min(router->least, router->breadth);
  if (++router->count < kExpertsBlock) return;
  router->best = std::max(router->best, router->least);
  router->count = 0;
}

void ExpertWatch::Tell(int64_t step) {
  const auto layers = static_cast<int32_t>(routers_.size());
  const auto columns = static_cast<size_t>(columns_);
  bool any = false;
  const auto of_layer = [&](int32_t layer, Severity severity, const Fact& fact) -> Finding& {
    any = true;
    Finding& finding = findings_.emplace_back(Finding::OfRun(Rule::kExperts, severity, fact));
    finding.where.layer = layer;
    return finding;
  };
  for (int32_t layer = 0; layer < layers; ++layer) {
    Router& router = routers_[static_cast<size_t>(layer)];
    if (!IsCollapsed(router)) continue;
    const Fact fact{.signal = FindSignal(SignalId::kExpertLargestShare)->name,
                    .where = {layer, -1},
                    .value = router.ideal > 0 ? router.load / router.ideal : 0,
                    .first_step = router.since,
                    .detector = "breadth"};
    Finding& finding = of_layer(layer, Severity::kWarning, fact);
    finding.Add({.signal = FindSignal(SignalId::kExpertShare)->name,
                 .where = {layer, router.busiest},
                 .value = fact.value,
                 .first_step = router.since,
                 .detector = "breadth"});
    finding.news = !router.told && news_.Take();
    router.told = true;
    finding.cause = "dead experts";
    finding.score = 3;
    finding.summary = absl::StrFormat(
        "the router of layer %d sends its tokens to the same few experts: expert %d has %.3g times its share", layer,
        router.busiest, fact.value);
    if (router.entropy >= 0) {
      absl::StrAppendFormat(&finding.summary, "; the entropy of its softmax is %.2g of the largest", router.entropy);
      finding.Add({.signal = FindSignal(SignalId::kRouterEntropyShare)->name,
                   .where = {layer, -1},
                   .value = router.entropy,
                   .first_step = router.since,
                   .detector = "breadth"});
    }
    absl::StrAppend(&finding.summary, ", since step ", router.since);
  }
  for (int32_t layer = 0; layer < layers; ++layer) {
    for (const State state : {State::kIdle, State::kUnused}) {
      std::vector<size_t> wrong;
      bool fresh = false;
      int64_t since = -1;
      uint16_t samples = 0;
      for (size_t i = 0; i < columns; ++i) {
        Expert& expert = experts_[static_cast<size_t>(layer) * columns + i];
        if (StateOf(expert) != state) continue;
        fresh |= !expert.told;
        expert.told = true;
        since = since < 0 ? expert.since : std::min(since, expert.since);
        samples = wrong.empty() ? expert.idle : std::min(samples, expert.idle);
        wrong.push_back(i);
      }
      if (wrong.empty()) continue;
      const bool idle = state == State::kIdle;
      const auto at = [&](size_t i) {
        return Fact{.signal = FindSignal(SignalId::kExpertLoad)->name,
                    .where = {layer, static_cast<int32_t>(wrong[i])},
                    .value = 0,
                    .threshold = 1,
                    .first_step = experts_[static_cast<size_t>(layer) * columns + wrong[i]].since,
                    .detector = idle ? "idle" : "unused"};
      };
      Finding& finding = of_layer(layer, idle ? Severity::kWarning : Severity::kInfo, at(0));
      finding.news = fresh && news_.Take();
      finding.cause = "dead experts";
      finding.first_step = since;
      // The layer that has lost most of its experts first.
      finding.score = (idle ? 1 : 0) + static_cast<double>(wrong.size()) / routers_[static_cast<size_t>(layer)].experts;
      std::string names = wrong.size() == 1 ? "expert " : "experts ";
      for (size_t i = 0; i < std::min(wrong.size(), kExpertsNamedMax); ++i) {
        absl::StrAppend(&names, i == 0 ? "" : ", ", wrong[i]);
        if (i > 0) finding.Add(at(i));
      }
      if (wrong.size() > kExpertsNamedMax) absl::StrAppend(&names, ", ...");
      const char* const has = wrong.size() == 1 ? "has" : "have";
      const int32_t of = routers_[static_cast<size_t>(layer)].experts;
      finding.summary = idle ? absl::StrCat(wrong.size(), " of ", of, " experts of layer ", layer, " ", has,
                                            " had no token in ", samples, " samples, after having some: ", names)
                             : absl::StrCat(wrong.size(), " of ", of, " experts of layer ", layer, " ", has,
                                            " had no token in ", samples, " samples: ", names);
      absl::StrAppend(&finding.summary, ", since step ", since);
    }
  }
  if (any) news_.NoteWrong(step);
  // In this order: news first, so that the alert's words are of it; else the worst.
  const size_t all = findings_.size();
  const bool news = std::any_of(findings_.begin(), findings_.end(), [](const Finding& f) { return f.news; });
  std::stable_sort(findings_.begin(), findings_.end(), [](const Finding& a, const Finding& b) {
    if (a.severity != b.severity) return a.severity > b.severity;
    if (a.news != b.news) return a.news;
    return a.score > b.score;
  });
  if (all > kExpertsNamedMax) findings_.resize(kExpertsNamedMax);
  for (size_t i = 0; i < findings_.size(); ++i) findings_[i].score = static_cast<double>(findings_.size() - i);
  if (all < 2) return;
  findings_.front().news = news;  // The alert is told by its first finding.
  std::string& words = findings_.front().summary;
  const size_t said = std::min(findings_.size(), kCasesSaidMax);
  for (size_t i = 1; i < said; ++i) absl::StrAppend(&words, "; ", findings_[i].summary);
  if (said < all) absl::StrAppend(&words, "; and ", all - said, " more");
}

}  // namespace bellwether::server
