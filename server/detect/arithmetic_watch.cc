#include "server/detect/arithmetic_watch.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <span>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "server/detect/law_watch.h"

namespace bellwether::server {
namespace {

// What a float may have lost below its smallest normal number, of a few thousand parts.
constexpr double kLeastVariance = 4096.0 * std::numeric_limits<float>::min();
// Places that are named; of further ones their number is told.
constexpr size_t kPlacesMax = 8;
// Laws of a place in words and evidence.
constexpr size_t kLawsMax = 4;

bool IsUsable(float value) { return !IsNotMeasured(value) && std::isfinite(value); }

// Those of "dx=dW" or "dW:classes.3".
std::vector<std::string> ResultsOf(const std::string& law) { return absl::StrSplit(law.substr(0, law.find(':')), '='); }

}  // namespace

LawName ReadLawName(std::string_view row) {
  LawName name;
  const size_t space = row.rfind(' ');
  name.place = row.substr(0, space);
  if (space == std::string_view::npos) return name;
  name.law = row.substr(space + 1);
  name.results = ResultsOf(name.law);
  return name;
}

struct ArithmeticWatch::Row {
  size_t row = 0;
  double beyond = 0;   // Of the law, in sigmas; 0: it was not asked.
  double spoiled = 0;  // Elements that are not finite, of what was finite.
  bool wrong = false;
  double score() const { return spoiled > 0 ? std::numeric_limits<double>::infinity() : beyond; }
};

bool ArithmeticWatch::Consistent() const {
  return samples_ >= 0 && wrong_.size() <= static_cast<size_t>(kNamedRowsMax) &&
         std::is_sorted(wrong_.begin(), wrong_.end());
}

bool ArithmeticWatch::Observe(const StepSample& sample, const RowNames* names) {
  findings_.clear();
  questions_ = 0;
  const auto difference = sample.matrix(SignalId::kLawDifference), variance = sample.matrix(SignalId::kLawVariance);
  if (difference.empty() || variance.empty()) return false;
  step_ = sample.step;
  const auto at = [](std::span<const float> values, size_t row, float otherwise) {
    return row < values.size() && IsUsable(values[row]) ? values[row] : otherwise;
  };
  const auto alike = sample.matrix(SignalId::kLawAlike), together = sample.matrix(SignalId::kLawAlikeSigma);
  const auto given = sample.matrix(SignalId::kLawInNonfinite), computed = sample.matrix(SignalId::kLawOutNonfinite);
  // What is alike within each rank is so over all: the sum of its sigmas is that of their sum.  The
  // variance has their squares already.
  const double over_ranks = 1 - 1 / static_cast<double>(std::max<uint32_t>(sample.ranks, 1));
  std::vector<Row> rows;
  for (size_t i = 0; i < difference.size(); ++i) {
    Row row{.row = i};
    bool asked = false;
    if (IsUsable(difference[i]) && IsUsable(variance[i]) && variance[i] >= 0) {
      const double coherent = at(together, i, 0);
      const double sigma = std::sqrt(std::max<double>(variance[i], kLeastVariance) + over_ranks * coherent * coherent);
      const double explained = std::max<double>(at(alike, i, 0), 0);
      row.beyond = std::max(0.0, std::abs(static_cast<double>(difference[i])) - explained) / sigma;
      ++questions_;
      asked = true;
    }
    // A count that was not measured is none of zero.
    if (at(given, i, 1) == 0 && at(computed, i, -1) >= 0) {
      row.spoiled = at(computed, i, 0);
      asked = true;
    }
    if (asked) rows.push_back(row);
  }
  if (rows.empty()) return false;
  ++samples_;
  limit_ = std::max(options_.z_min, LawLimits(options_.chance, samples_, questions_).z());
  std::vector<uint32_t> wrong;
  bool any = false;
  auto before = wrong_.begin();
  for (Row& row : rows) {
    const auto number = static_cast<uint32_t>(row.row);
    for (; before != wrong_.end() && *before < number; ++before) wrong.push_back(*before);  // Not asked.
    if (before != wrong_.end() && *before == number) ++before;
    row.wrong = row.spoiled > 0 || row.beyond > limit_;
    if (row.wrong) wrong.push_back(number);
    any |= row.wrong;
  }
  wrong.insert(wrong.end(), before, wrong_.end());
  wrong_ = std::move(wrong);
  if (any) Name(rows, names);
  return true;
}

void ArithmeticWatch::Name(const std::vector<Row>& rows, const RowNames* names) {
  struct Place {
    std::string name;
    std::vector<std::pair<std::string, Row>> wrong;  // By their laws, the worst first.
    std::vector<std::string> suspects;
  };
  std::map<std::string, Place> by_name;
  for (const Row& row : rows) {
    if (!row.wrong) continue;
    const std::string name = NameOr("row", names, row.row);
    const LawName read = ReadLawName(name);
    Place& place = by_name[read.place];
    place.name = read.place;
    place.wrong.emplace_back(read.law, row);
  }
  std::vector<Place> places;
  for (auto& [name, place] : by_name) {
    std::stable_sort(place.wrong.begin(), place.wrong.end(),
                     [](const auto& a, const auto& b) { return a.second.score() > b.second.score(); });
    std::map<std::string, size_t> laws_of;
    std::vector<std::string> results;  // As they come.
    for (const auto& [law, row] : place.wrong) {
      for (const std::string& result : ResultsOf(law)) {
        if (++laws_of[result] == 1) results.push_back(result);
      }
    }
    for (const std::string& result : results) {
      if (laws_of[result] == place.wrong.size()) place.suspects.push_back(result);
    }
    if (place.suspects.empty()) place.suspects = results;
    places.push_back(std::move(place));
  }
  std::stable_sort(places.begin(), places.end(), [](const Place& a, const Place& b) {
    return a.wrong.front().second.score() > b.wrong.front().second.score();
  });

  const size_t said = std::min(places.size(), kPlacesMax);
  for (size_t i = 0; i < said; ++i) {
    for (size_t k = 0; k < std::min(places[i].wrong.size(), kLawsMax); ++k) {
      const auto& [law, row] = places[i].wrong[k];
      const bool spoiled = row.spoiled > 0;
      Finding& finding = findings_.emplace_back(Finding::OfRun(Rule::kArithmetic, Severity::kCritical,
                                                               {.signal = spoiled ? "law_out_nonfinite" : "law_z",
                                                                .value = spoiled ? row.spoiled : row.beyond,
                                                                .threshold = spoiled ? 0 : limit_,
                                                                .first_step = step_,
                                                                .detector = "law"}));
      // Places keep their order, the worst first: of all findings the front one has the words.
      finding.score = static_cast<double>((said - i) * kLawsMax - k);
      finding.note = absl::StrCat(places[i].name, " ", law);
    }
  }
  const Place& worst = places.front();
  std::vector<std::string> why;
  for (size_t k = 0; k < std::min(worst.wrong.size(), kLawsMax); ++k) {
    const auto& [law, row] = worst.wrong[k];
    if (row.spoiled > 0) {
      why.push_back(absl::StrFormat("%.0f elements of %s are not finite, though all that it was given is", row.spoiled,
                                    absl::StrJoin(ResultsOf(law), " and ")));
    } else {
      why.push_back(absl::StrFormat("law %s is broken by %.3g standard deviations of rounding", law, row.beyond));
    }
  }
  std::string& text = findings_.front().summary;
  text = absl::StrCat("arithmetic is wrong in ", worst.name, ": ", absl::StrJoin(worst.suspects, " or "), ": ",
                      absl::StrJoin(why, "; "));
  absl::StrAppendFormat(&text, " (limit %.3g)", limit_);
  for (size_t i = 1; i < said; ++i) {
    absl::StrAppend(&text, i == 1 ? "; also in " : ", ", places[i].name, " (",
                    absl::StrJoin(places[i].suspects, " or "), ")");
  }
  if (said < places.size()) absl::StrAppend(&text, " and in ", places.size() - said, " further places");
  absl::StrAppend(&text, ", since step ", step_);
}

}  // namespace bellwether::server
