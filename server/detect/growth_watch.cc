#include "server/detect/growth_watch.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/detect/measured.h"

namespace bellwether::server {
namespace {

// Growths of its own that a parameter is held against, at least.
constexpr uint16_t kGrowthsMin = kGrowthBlock;
// Other parameters of the run, at least.
constexpr size_t kGrowthOthersMin = 4;
// Of so many others one may grow as well.
constexpr size_t kGrowthOthersAside = 16;
// Of its fastest growth; what is slower has begun to end.
constexpr double kGrowthGoesOn = 0.6;
// Beyond its past by so many times what is off: fewer samples are enough, but never one.
constexpr double kGrowthFar = 1.5;
constexpr int32_t kGrowthSamplesMin = 2;
constexpr size_t kGrowingNamedMax = 8;
constexpr double kEtaStepsMax = 100000;  // Longer times are unknown.

bool IsWeight(ParameterRole role) { return role != ParameterRole::kVector && role != ParameterRole::kRouter; }

const char* CauseOfGrowth(ParameterRole role) {
  switch (role) {
    case ParameterRole::kHead:
      return "head growth";
    case ParameterRole::kResidual:
      return "residual growth";
    case ParameterRole::kScores:
      return "logit growth";
    default:
      return "";  // That of its family.
  }
}

const char* WordsOfGrowth(ParameterRole role) {
  switch (role) {
    case ParameterRole::kHead:
      return "the output layer or an embedding grows";
    case ParameterRole::kResidual:
      return "what a block adds to the residual stream grows";
    case ParameterRole::kScores:
      return "weights of queries or keys grow, and scores with them";
    default:
      return "weights grow";
  }
}

// ln of how many times as large as before such weights are when the loss is 5 % above that of the same run without
// their growth: a tenth, half and nine tenths of the runs.  Of 15 runs whose residual stream grew, 13 with the output
// layer and 8 with the embedding, of two optimizers and five architectures (the seeds 1 to 30 of the train split of
// instabilities/).  Of 30 runs with growing queries and keys the loss of one rose within 250 to 540 steps: nothing is
// said of them.
struct GrowthTillLoss {
  double lower, middle, upper;
};

constexpr GrowthTillLoss kResidualTillLoss{.lower = 2.7, .middle = 5.2, .upper = 6.7};
constexpr GrowthTillLoss kEmbeddingTillLoss{.lower = 2.7, .middle = 3.5, .upper = 4.3};
constexpr GrowthTillLoss kOutputTillLoss{.lower = 0.9, .middle = 1.1, .upper = 2.2};

// Null: not known.  `has_output`: the run has an output layer of another name than its embeddings.
const GrowthTillLoss* TillLoss(ParameterRole role, const std::string& name, bool has_output) {
  if (role == ParameterRole::kResidual) return &kResidualTillLoss;
  if (role != ParameterRole::kHead) return nullptr;
  return has_output && IsEmbedding(name) ? &kEmbeddingTillLoss : &kOutputTillLoss;
}

// Of weights that are exp(grown) times as large as before, and grow by `rate` in a step.
Eta EtaOfLoss(const GrowthTillLoss& till, double grown, double rate, double steps_max) {
  Eta eta;
  const auto steps = [&](double level) { return std::max(0.0, level - grown) / rate; };
  if (!(rate > 0) || steps(till.middle) > steps_max) return eta;
  eta.known = true;
  eta.steps = steps(till.middle);
  eta.lower_steps = steps(till.lower);
  eta.upper_steps = std::min(steps_max, steps(till.upper));
  return eta;
}

}  // namespace

bool GrowthWatch::Consistent() const { return rows_.size() <= static_cast<size_t>(kNamedRowsMax); }

void GrowthWatch::Rewind() {
  for (Row& row : rows_) {
    row.size = 0;
    row.step = -1;
    row.off = 0;
    row.told = false;
  }
  rate_ = -1;
  findings_.clear();
}

bool GrowthWatch::HasOutput(const RowNames& names) const {
  for (size_t i = 0; i < places_.size(); ++i) {
    if (places_[i].role == ParameterRole::kHead && !IsEmbedding(names.names()[i])) return true;
  }
  return false;
}

bool GrowthWatch::IsJudged(size_t row) const { return row < places_.size() && IsWeight(places_[row].role); }

double GrowthWatch::UsualOf(const Row& row, double rate) const {
  const bool whole = row.seen >= kGrowthBlock, under_way = row.seen % kGrowthBlock != 0;
  double growth = std::log(2.0) / options_.growth_doubling_steps / options_.growth_rate_factor;
  for (const auto& [has, high] : {std::pair(whole, &row.whole), std::pair(under_way, &row.now)}) {
    if (!has) continue;
    growth = std::max(growth, static_cast<double>(high->growth));
    if (rate > 0) growth = std::max(growth, high->per_rate * rate);
  }
  return growth;
}

void GrowthWatch::Learn(double growth, double rate, Row* row) const {
  const High high{.growth = static_cast<float>(growth), .per_rate = rate > 0 ? static_cast<float>(growth / rate) : 0};
  if (row->seen % kGrowthBlock == 0) row->now = high;
  row->now.growth = std::max(row->now.growth, high.growth);
  row->now.per_rate = std::max(row->now.per_rate, high.per_rate);
  ++row->seen;
  if (row->seen % kGrowthBlock == 0) row->whole = row->now;
  // Only what it is modulo the block counts then.
  if (row->seen == 2 * kGrowthBlock) row->seen = kGrowthBlock;
}

double GrowthWatch::GrowthOfOthers(size_t row) {
  if (sorted_.empty()) {
    for (size_t i = 0; i < rows_.size(); ++i) {
      if (IsJudged(i) && rows_[i].step >= 0) sorted_.emplace_back(rows_[i].growth, i);
    }
    std::sort(sorted_.begin(), sorted_.end(), std::greater<>());
  }
  const int32_t layer = places_[row].layer;
  const auto is_other = [&](size_t other) { return other != row && (layer < 0 || places_[other].layer != layer); };
  const auto others = static_cast<size_t>(
      std::count_if(sorted_.begin(), sorted_.end(), [&](const auto& each) { return is_other(each.second); }));
  if (others < kGrowthOthersMin) return std::numeric_limits<double>::infinity();
  size_t aside = others / kGrowthOthersAside;
  for (const auto& [growth, other] : sorted_) {
    if (is_other(other) && aside-- == 0) return growth;
  }
  return std::numeric_limits<double>::infinity();
}

void GrowthWatch::Judge(size_t index, double growth, double usual, int64_t before, double size) {
  Row& row = rows_[index];
  if (row.off == 0) {
    row.from = static_cast<float>(size);
    row.fastest = 0;
    row.since = before;
  }
  ++row.off;
  news_.NoteWrong(row.step);
  row.fastest = std::max(row.fastest, static_cast<float>(growth));
  const bool far = growth > kGrowthFar * options_.growth_rate_factor * usual;
  const int32_t hold = far ? std::min(kGrowthSamplesMin, options_.growth_samples) : options_.growth_samples;
  const bool goes_on = growth >= kGrowthGoesOn * row.fastest;
  if (row.told || (row.off >= hold && goes_on && row.size >= options_.growth_factor * row.from)) {
    growing_.push_back({.row = index, .usual = usual});
  }
}

bool GrowthWatch::Observe(const StepSample& sample, const RowNames* names, const Context& context) {
  findings_.clear();
  growing_.clear();
  sorted_.clear();
  const auto squares = sample.matrix(SignalId::kTensorWeightSumsq);
  const auto elements = sample.matrix(SignalId::kTensorElements);
  // A part of a tensor may lie at a rank that is missing.
  if (names == nullptr || !sample.complete || squares.empty() || elements.size() != squares.size()) return false;
  for (size_t i = places_.size(); i < static_cast<size_t>(names->size()); ++i) {
    const std::string& name = names->names()[i];
    places_.push_back({.role = RoleOf(name), .layer = LayerOf(name)});
  }
  if (rows_.size() < squares.size()) rows_.resize(std::min(squares.size(), static_cast<size_t>(kNamedRowsMax)));
  const float told = sample.scalar(SignalId::kLearningRate);
  const double now = IsAtLeast0(told) ? told : -1;
  // Between two samples it was one of both, or between them.
  const double rate = now >= 0 && rate_ >= 0 ? std::max(now, rate_) : -1;
  rate_ = now;
  news_.Begin(sample.step, context.quiet_steps);
  const bool judged = !context.excused && (!context.warming || rate >= 0);
  struct Grown {
    size_t row;
    double growth, size;  // Its size before,
    int64_t before;       // at that step.
  };
  std::vector<Grown> grown;
  for (size_t i = 0; i < rows_.size(); ++i) {
    if (i >= squares.size() || !IsJudged(i) || !IsAtLeast0(squares[i]) || !IsAbove0(elements[i])) continue;
    Row& row = rows_[i];
    const double size = std::sqrt(squares[i] / elements[i]);
    if (size > 0 && row.size > 0 && sample.step > row.step) {
      const double growth = std::log(size / row.size) / static_cast<double>(sample.step - row.step);
      grown.push_back({.row = i, .growth = growth, .size = row.size, .before = row.step});
      row.growth = static_cast<float>(growth);
    }
    row.size = static_cast<float>(size);
    row.step = sample.step;
  }
  for (const Grown& each : grown) {
    Row& row = rows_[each.row];
    if (!judged) {
      if (row.off == 0) Learn(each.growth, rate, &row);
      continue;
    }
    const double usual = UsualOf(row, rate);
    const double limit = options_.growth_rate_factor * usual;
    if (row.seen >= kGrowthsMin && each.growth > limit &&
        each.growth > options_.growth_rate_factor * GrowthOfOthers(each.row)) {
      Judge(each.row, each.growth, usual, each.before, each.size);
      if (row.off < options_.relearn_samples) continue;
      row.seen = 0;
    }
    row.off = 0;
    row.told = false;
    Learn(each.growth, rate, &row);
  }
  if (!growing_.empty()) Tell(sample.step, *names);
  return judged && !grown.empty();
}

void GrowthWatch::Tell(int64_t step, const RowNames& names) {
  std::stable_sort(growing_.begin(), growing_.end(), [this](const Growing& a, const Growing& b) {
    const Row &row_a = rows_[a.row], &row_b = rows_[b.row];
    // What begins later may follow from it.
    if (row_a.since != row_b.since) return row_a.since < row_b.since;
    return row_a.size * row_b.from > row_b.size * row_a.from;
  });
  // What says most of the cause, of those that began first.
  const auto named = std::find_if(growing_.begin(), growing_.end(), [this](const Growing& each) {
    return *CauseOfGrowth(places_[each.row].role) != '\0' && rows_[each.row].since == rows_[growing_.front().row].since;
  });
  if (named != growing_.end()) std::rotate(growing_.begin(), named, named + 1);
  const Place& place = places_[growing_.front().row];
  int32_t layer = place.layer;
  bool fresh = false;
  for (const Growing& each : growing_) {
    const Place& other = places_[each.row];
    // Another kind of parameter in another layer is no part of it.
    if (other.role == place.role && other.layer != place.layer) layer = -1;
    fresh |= !rows_[each.row].told;
    rows_[each.row].told = true;
  }
  std::string text = WordsOfGrowth(place.role);
  const size_t said = std::min(growing_.size(), kGrowingNamedMax);
  for (size_t i = 0; i < said; ++i) {
    const Row& row = rows_[growing_[i].row];
    const std::string& name = names.names()[growing_[i].row];
    Finding& finding = findings_.emplace_back(Finding::OfRun(Rule::kParameters, Severity::kWarning,
                                                             {.signal = FindSignal(SignalId::kTensorWeightRms)->name,
                                                              .value = row.size,
                                                              .threshold = options_.growth_factor * row.from,
                                                              .baseline = row.from,
                                                              .first_step = row.since,
                                                              .detector = "growth"}));
    finding.note = name;
    if (i == 0) {
      absl::StrAppendFormat(&text,
                            ": the root mean square of %s was %.3g at step %d and is %.3g at step %d, %.2g %% more in "
                            "each step, where it grew by %.2g %% at most",
                            name, row.from, row.since, row.size, step, 100 * std::expm1(row.growth),
                            100 * std::expm1(growing_[i].usual));
    } else {
      absl::StrAppend(&text, i == 1 ? "; " : ", ", name);
    }
  }
  if (said < growing_.size()) absl::StrAppend(&text, " and ", growing_.size() - said, " more");
  if (growing_.size() > 1) absl::StrAppend(&text, growing_.size() > 2 ? " grow" : " grows", ", too");
  Finding& first = findings_.front();
  absl::StrAppend(&text, ", since step ", first.first_step);
  first.where.layer = layer;
  first.cause = CauseOfGrowth(place.role);
  first.summary = std::move(text);
  if (const GrowthTillLoss* const till = TillLoss(place.role, first.note, HasOutput(names))) {
    const Row& row = rows_[growing_.front().row];
    first.eta = EtaOfLoss(*till, std::log(row.size / row.from), row.growth, kEtaStepsMax);
    first.eta_words = "the loss is expected to be 5 % higher";
  }
  first.news = fresh && news_.Take();
}

void GrowthWatch::AddTo(std::vector<Finding>* findings) const { PutBefore(findings_, findings); }

}  // namespace bellwether::server
