#include "server/detect/scale_watch.h"

#include <algorithm>
#include <limits>
#include <string>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/detect/measured.h"
#include "server/detect/parameter_role.h"

namespace bellwether::server {
namespace {

// As client_lib/python/bellwether/_step/fp8_sample.py names a row: "layers.0.mlp.up fp8:x".
constexpr std::string_view kSide = " fp8:";
constexpr double kAlwaysThere = 0.5;
constexpr uint16_t kOffMax = 10000;  // As parameters.scale_samples at most.
constexpr size_t kScalesNamedMax = 8;

std::string WordsOf(std::string_view row) {
  const size_t at = row.rfind(kSide);
  if (at == std::string_view::npos) return std::string(row);
  const std::string_view side = row.substr(at + kSide.size());
  const char* const what = side == "x" ? "the input" : side == "w" ? "the weight" : "the output's gradient";
  return absl::StrCat(what, " of ", absl::string_view(row.data(), at));
}

}  // namespace

void ScaleWatch::Rewind() {
  rows_.clear();
  news_ = {};
  findings_.clear();
}

double ScaleWatch::LimitOf(const Course& course, double level) const {
  if (course.seen == 0 || course.usual > kAlwaysThere) return std::numeric_limits<double>::infinity();
  if (course.seen < kScaleSamples) return kScaleFar * level;
  return std::clamp(kScaleBeyond * course.usual, level, kScaleFar * level);
}

bool ScaleWatch::Observe(const StepSample& sample, const RowNames* names, int64_t quiet_steps) {
  findings_.clear();
  const std::array counts{sample.matrix(SignalId::kFp8Saturated), sample.matrix(SignalId::kFp8Flushed)};
  const std::array wholes{sample.matrix(SignalId::kFp8Elements), sample.matrix(SignalId::kFp8NonzeroInputs)};
  if (names == nullptr || counts[kSaturated].empty()) return false;
  news_.Begin(sample.step, quiet_steps);
  const size_t count = std::min(counts[kSaturated].size(), static_cast<size_t>(names->size()));
  if (rows_.size() < count) rows_.resize(count);
  bool covers = false;
  std::vector<Off> off;
  for (size_t row = 0; row < count; ++row) {
    for (const Share share : {kSaturated, kFlushed}) {
      Course& course = rows_[row].of[share];
      const double level = LevelOf(share), limit = LimitOf(course, level);
      const float part = ValueAt(counts[share], row), whole = ValueAt(wholes[share], row);
      if (IsAtLeast0(part) && IsAbove0(whole)) {
        covers = true;
        course.value = part / whole;
        if (course.value > limit) {
          if (course.off == 0) course.since = sample.step;
          course.off = std::min<uint16_t>(static_cast<uint16_t>(course.off + 1), kOffMax);
        } else {
          course.off = 0;
          course.told = false;
        }
        if (course.seen < kScaleSamples) {
          course.usual = course.seen == 0 ? course.value : std::min(course.usual, course.value);
          ++course.seen;
        }
      }
      if (course.off >= options_.scale_samples) off.push_back({.row = row, .share = share, .limit = limit});
    }
  }
  if (!off.empty()) {
    news_.NoteWrong(sample.step);
    Tell(off, *names);
  }
  return covers;
}

void ScaleWatch::Tell(const std::vector<Off>& off, const RowNames& names) {
  std::vector<Off> sorted = off;
  const auto course = [this](const Off& each) -> Course& { return rows_[each.row].of[each.share]; };
  std::stable_sort(sorted.begin(), sorted.end(), [&](const Off& a, const Off& b) {
    // What begins later may follow from it.
    if (course(a).since != course(b).since) return course(a).since < course(b).since;
    return course(a).value / LevelOf(a.share) > course(b).value / LevelOf(b.share);
  });
  bool fresh = false;
  for (const Off& each : sorted) {
    fresh |= !course(each).told;
    course(each).told = true;
  }
  std::string text = "a scale does not fit, and a tensor loses numbers in 8 bits: ";
  const size_t said = std::min(sorted.size(), kScalesNamedMax);
  for (size_t i = 0; i < said; ++i) {
    const Off& each = sorted[i];
    const Course& now = course(each);
    const bool saturated = each.share == kSaturated;
    const std::string& name = names.names()[each.row];
    Finding& finding = findings_.emplace_back(Finding::OfRun(
        Rule::kParameters, Severity::kWarning,
        {.signal = FindSignal(saturated ? SignalId::kFp8SaturatedShare : SignalId::kFp8FlushedShare)->name,
         .value = now.value,
         .threshold = each.limit,
         .baseline = now.usual,
         .first_step = now.since,
         .detector = "scale"}));
    finding.note = name;
    absl::StrAppendFormat(&text, "%s%.3g %% of %s are %s", i == 0 ? "" : "; ", 100 * now.value, WordsOf(name),
                          saturated ? "at the largest number" : "0 and were not");
    if (i == 0) absl::StrAppendFormat(&text, ", where %.2g %% were, since step %d", 100 * now.usual, now.since);
  }
  if (said < sorted.size()) absl::StrAppend(&text, "; and ", sorted.size() - said, " more");
  Finding& first = findings_.front();
  first.where.layer = LayerOf(names.names()[sorted.front().row]);
  first.cause = "FP8 saturation";
  first.summary = std::move(text);
  first.news = fresh && news_.Take();
}

void ScaleWatch::AddTo(std::vector<Finding>* findings) const { PutBefore(findings_, findings); }

}  // namespace bellwether::server
