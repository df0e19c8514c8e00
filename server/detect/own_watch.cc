#include "server/detect/own_watch.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace bellwether::server {
namespace {

constexpr size_t kRing = static_cast<size_t>(kOwnWindowBatches) + static_cast<size_t>(kOwnLagBatches);
constexpr SignalId kMatrices[] = {SignalId::kOwnMean, SignalId::kOwnSum, SignalId::kOwnMax};

// "fallen to 0.2" or "risen to 3".
const char* WordOf(bool falls) { return falls ? "fallen" : "risen"; }

std::string NumberOf(double value) { return std::isnan(value) ? "NaN" : absl::StrFormat("%.4g", value); }

}  // namespace

void OwnWatch::Grow(const RunRows& rows) {
  for (size_t row = finite_.size(); row < rows.own_cells.size(); ++row) {
    const OwnSignal& signal = rows.own_signals[static_cast<size_t>(rows.own_cells[row].signal)];
    const PastSide side = PastOf(signal.name);
    uint16_t past = 0;
    if (side != PastSide::kNone && pasts_.size() >= kOwnPastsMax) {
      ++cells_left_out_;
    } else if (side != PastSide::kNone) {
      pasts_.push_back({.row = static_cast<uint32_t>(row), .side = side});
      past = static_cast<uint16_t>(pasts_.size());
    }
    finite_.push_back(0);
    row_of_past_.push_back(past);
  }
}

bool OwnWatch::Observe(const StepSample& sample, const RunRows* rows, const Context& context) {
  readings_.clear();
  findings_.clear();
  if (rows == nullptr) return false;
  bool any = false;
  for (const SignalId matrix : kMatrices) {
    if (!sample.has(matrix) || !DeriveMatrix(sample, *FindSignal(matrix), &matrix_)) continue;
    Grow(*rows);
    const size_t size = std::min({matrix_.size(), finite_.size(), rows->own_cells.size()});
    for (size_t row = 0; row < size; ++row) {
      if (IsNotMeasured(matrix_[row])) continue;
      const OwnSignal& signal = rows->own_signals[static_cast<size_t>(rows->own_cells[row].signal)];
      if (MatrixOf(signal) != matrix) continue;
      any = true;
      Take(static_cast<uint32_t>(row), matrix_[row], signal, context, sample.step);
    }
  }
  if (!any) return false;
  Remember(sample.step, context.quiet_steps);
  Tell(*rows, sample.step);
  return true;
}

void OwnWatch::Take(uint32_t row, float value, const OwnSignal& signal, const Context& context, int64_t step) {
  uint8_t& finite = finite_[row];
  if (!std::isfinite(value)) {
    if (finite >= options_.finite_values) {
      readings_.push_back({.row = row, .kind = Kind::kNonfinite, .value = value, .since = step});
    } else {
      finite = 0;
    }
    return;
  }
  if (finite < options_.finite_values) ++finite;
  // Limits are doubles and values floats: the nearest float of a limit is within it.
  const auto beyond = [&](const std::optional<double>& limit, double side) {
    if (!limit.has_value() || !(side * (value - static_cast<float>(*limit)) > 0)) return false;
    readings_.push_back({.row = row, .kind = Kind::kLimit, .value = value, .threshold = *limit, .since = step});
    return true;
  };
  if (!beyond(signal.low, -1)) beyond(signal.high, 1);
  const uint16_t index = row_of_past_[row];
  if (index == 0 || !context.pasts || context.excused) return;
  if (ComparesPolicies(signal.name)) Compare(row, index - 1u, value, step);
  Past& past = pasts_[index - 1u];
  if (past.side == PastSide::kRisesLate && context.warming) return;
  past.sum += value;
  if (++past.count < options_.batch_values) return;
  const auto batch = static_cast<float>(past.sum / past.count);
  past.sum = 0;
  past.count = 0;
  Judge(batch, step, &past);
}

void OwnWatch::Compare(uint32_t row, size_t past, float value, int64_t step) {
  if (zeros_.size() <= past) zeros_.resize(past + 1);
  if (most_.size() < zeros_.size()) most_.resize(zeros_.size());
  Zeros& of = zeros_[past];
  float& most = most_[past];
  const float size = std::abs(value);
  if (size <= kOwnRounding && (size == 0 || most > 0 || of.zeros < kOwnZeros)) {
    of.zeros = of.others > 0 ? 1 : std::min<uint16_t>(of.zeros + 1, kOwnZeros);
    of.others = 0;
    most = std::max(of.zeros == 1 ? 0 : most, size);
    return;
  }
  // Beside a past of rounding.
  if (most > 0 && size < kOwnApart) of.zeros = of.others = 0;
  if (of.others++ == 0) of.since = step;
  if (of.zeros < kOwnZeros || of.others >= kOwnApartMax) {
    of.zeros = of.others = 0;
  } else if (of.others >= 2) {
    readings_.push_back({.row = row, .kind = Kind::kApart, .value = value, .threshold = most, .since = of.since});
  }
}

void OwnWatch::Judge(float batch, int64_t step, Past* into) {
  Past& past = *into;
  const auto push = [&past](float value) {
    if (past.batches.capacity() < kRing) past.batches.reserve(kRing);
    if (past.batches.size() < kRing) return past.batches.push_back(value);
    past.batches[past.oldest] = value;
    past.oldest = static_cast<uint16_t>((past.oldest + 1u) % kRing);
  };
  if (past.batches.size() < kRing) return push(batch);
  scratch_.clear();
  for (size_t i = 0; i < static_cast<size_t>(kOwnWindowBatches); ++i) {
    scratch_.push_back(past.batches[(past.oldest + i) % kRing]);
  }
  const auto middle = scratch_.begin() + kOwnWindowBatches / 2;
  std::nth_element(scratch_.begin(), middle, scratch_.end());
  const double median = *middle;
  const auto [low, high] = std::minmax_element(scratch_.begin(), scratch_.end());
  const bool falls = past.side == PastSide::kFalls;
  const double reach = options_.range_factor * (static_cast<double>(*high) - *low);
  double limit = falls ? std::min(*low - reach, median - options_.fall_share * std::abs(median))
                       : std::max(*high + reach, options_.rise_factor * median);
  // What is positive may vary by factors.
  if (!falls && *low > 0) limit = std::max(limit, *high * std::pow(*high / *low, options_.range_factor));
  // Beside a past of zeros, or below zero, no factor says what is large.
  const bool judged = falls ? median != 0 : median > 0;
  const bool off = judged && (falls ? batch < limit : batch > limit);
  const auto hold = static_cast<uint16_t>(options_.hold_batches);
  if (!off) {
    if (past.off > 0) past.off = static_cast<uint16_t>(std::min<int>(past.off, 2 * hold) - 1);
    return push(batch);
  }
  if (past.off++ == 0) past.since = step;
  if (past.off >= options_.hold_batches) {
    const bool persists = past.off >= options_.persist_batches;
    readings_.push_back({.row = past.row,
                         .kind = persists ? Kind::kPastLong : Kind::kPast,
                         .severity = persists ? Severity::kWarning : Severity::kInfo,
                         .value = batch,
                         .threshold = limit,
                         .baseline = median,
                         .since = past.since});
  }
  if (past.off < options_.relearn_batches) return;
  past.batches.clear();
  past.oldest = past.off = 0;
}

// Since when each is wrong, and which of them the alert has not told of.
void OwnWatch::Remember(int64_t step, int64_t quiet_steps) {
  std::erase_if(wrong_, [&](const Wrong& wrong) { return step - wrong.last > quiet_steps; });
  if (wrong_.empty()) news_ = {};
  for (Reading& reading : readings_) {
    const auto found = std::find_if(wrong_.begin(), wrong_.end(), [&](const Wrong& wrong) {
      return wrong.row == reading.row && wrong.kind == reading.kind;
    });
    if (found != wrong_.end()) {
      reading.since = IsPast(reading.kind) ? reading.since : found->since;
      found->last = step;
      continue;
    }
    if (wrong_.size() >= kOwnWrongMax) continue;
    wrong_.push_back({.row = reading.row, .kind = reading.kind, .since = reading.since, .last = step});
    reading.news = news_.Take();
  }
}

void OwnWatch::Tell(const RunRows& rows, int64_t step) {
  // News first, so that the alert's words are of it.
  std::stable_sort(readings_.begin(), readings_.end(), [](const Reading& a, const Reading& b) {
    return std::pair(-static_cast<int>(a.severity), !a.news) < std::pair(-static_cast<int>(b.severity), !b.news);
  });
  const size_t count = std::min(readings_.size(), kOwnWrongMax);
  for (size_t i = 0; i < count; ++i) {
    const Reading& reading = readings_[i];
    const OwnSignal& signal = rows.own_signals[static_cast<size_t>(rows.own_cells[reading.row].signal)];
    const std::string& cell = rows.own.names()[reading.row];
    const std::string value = NumberOf(reading.value);
    Finding& finding = findings_.emplace_back(
        Finding::OfRun(Rule::kOwn, reading.severity,
                       {.signal = signal.name.c_str(),
                        .value = reading.value,
                        .threshold = reading.kind == Kind::kNonfinite ? std::nan("") : reading.threshold,
                        .baseline = IsPast(reading.kind) ? reading.baseline : std::nan(""),
                        .first_step = reading.since,
                        .detector = reading.kind == Kind::kNonfinite ? "nonfinite"
                                    : reading.kind == Kind::kApart   ? "apart"
                                    : reading.kind == Kind::kLimit   ? "limit"
                                                                     : "past"}));
    finding.score = static_cast<double>(count - i);  // In this order.
    finding.news = reading.news;
    finding.note = cell;
    if (reading.kind == Kind::kNonfinite) {
      finding.summary = absl::StrCat(cell, " is ", value, " at step ", step, ", after finite values");
    } else if (reading.kind == Kind::kLimit) {
      const bool below = reading.value < reading.threshold;
      finding.summary =
          absl::StrCat(cell, " is ", value, " at step ", step, ", ", below ? "below its low" : "above its high",
                       " limit of ", NumberOf(reading.threshold));
    } else if (reading.kind == Kind::kApart) {
      finding.cause = "rollout apart";
      finding.summary = absl::StrCat(
          cell, reading.threshold > 0 ? " was 0 but for rounding and is " : " was exactly 0 and is ", value,
          ", since step ", reading.since, ": the policy that samples is not the one that is trained");
      finding.advice =
          "Look whether the sampler got the weights of the last step, and at what else differs from step " +
          absl::StrCat(reading.since, " on: precision, kernels, the tokens and their mask.");
    } else {
      finding.summary = absl::StrCat(cell, " has ", WordOf(reading.value < reading.baseline), " to ", value, ", from ",
                                     NumberOf(reading.baseline), " (limit ", NumberOf(reading.threshold),
                                     "), since step ", reading.since);
    }
  }
  constexpr size_t kSaidMax = 4;
  if (count < 2) return;
  std::string& words = findings_.front().summary;
  // What is worst may have been told, and another one not.
  const auto news = std::find_if(findings_.begin(), findings_.end(), [](const Finding& f) { return f.news; });
  if (news != findings_.end() && news != findings_.begin()) {
    absl::StrAppend(&words, "; ", news->summary);
    findings_.front().news = true;
  }
  for (size_t i = 1; i <= std::min(kSaidMax, count - 1); ++i) {
    absl::StrAppend(&words, i == 1 ? "; also wrong: " : ", ", rows.own.names()[readings_[i].row]);
  }
  if (readings_.size() - 1 > kSaidMax) absl::StrAppend(&words, " and ", readings_.size() - 1 - kSaidMax, " more");
}

void OwnWatch::Forget() {
  for (Past& past : pasts_) {
    past.batches.clear();
    past.oldest = past.off = past.count = 0;
    past.sum = 0;
  }
  zeros_.clear();
  most_.clear();
}

void OwnWatch::Rewind() {
  Forget();
  wrong_.clear();
  news_ = {};
}

size_t OwnWatch::memory_bytes() const {
  size_t bytes = finite_.capacity() + row_of_past_.capacity() * sizeof(uint16_t) + wrong_.capacity() * sizeof(Wrong) +
                 pasts_.capacity() * sizeof(Past) + zeros_.capacity() * sizeof(Zeros) +
                 most_.capacity() * sizeof(float);
  for (const Past& past : pasts_) bytes += past.batches.capacity() * sizeof(float);
  return bytes;
}

bool OwnWatch::Consistent() const {
  if (finite_.size() > static_cast<size_t>(kNamedRowsMax) || row_of_past_.size() != finite_.size() ||
      pasts_.size() > kOwnPastsMax || zeros_.size() > pasts_.size() || most_.size() > pasts_.size() ||
      wrong_.size() > kOwnWrongMax)
    return false;
  for (size_t row = 0; row < row_of_past_.size(); ++row) {
    const uint16_t past = row_of_past_[row];
    if (past > pasts_.size() || (past > 0 && pasts_[past - 1u].row != row)) return false;
  }
  const auto known = [&](uint32_t row) { return row < finite_.size(); };
  return std::all_of(wrong_.begin(), wrong_.end(), [&](const Wrong& wrong) { return known(wrong.row); }) &&
         std::all_of(pasts_.begin(), pasts_.end(), [&](const Past& past) {
           return known(past.row) && past.batches.size() <= kRing && past.oldest < kRing &&
                  (past.oldest == 0 || past.batches.size() == kRing);
         });
}

}  // namespace bellwether::server
