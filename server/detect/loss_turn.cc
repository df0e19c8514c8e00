#include "server/detect/loss_turn.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <span>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/detect/median.h"

namespace bellwether::server {
namespace {

constexpr size_t kValueLosses = 5;
constexpr size_t kLevelLosses = 16;
constexpr size_t kSpreadMoves = 32;  // Differences of neighbours.
constexpr int32_t kTurnCountMax = 1 << 30;

double MedianBefore(const std::vector<float>& values, size_t end, size_t count) {
  return MedianOr(0,
                  {values.begin() + static_cast<ptrdiff_t>(end - count), values.begin() + static_cast<ptrdiff_t>(end)});
}

}  // namespace

void LossTurn::Observe(int64_t step, float loss) {
  if (!std::isfinite(loss)) return;
  if (newest_.size() == kValueLosses + kSpreadMoves + 1) newest_.erase(newest_.begin());
  newest_.push_back(loss);
  if (newest_.size() < kValueLosses + kLevelLosses) return;
  const size_t before = newest_.size() - kValueLosses;
  const double level = MedianBefore(newest_, before, kLevelLosses);
  if (!known_ || level < level_) {
    start_ = known_ ? std::max(start_, level) : level;
    known_ = true;
    level_ = level;
    const size_t count = std::min(kSpreadMoves + 1, before);
    spread_ = ScatterOfNeighbours(std::span(newest_).subspan(before - count, count));
  }
  value_ = MedianBefore(newest_, newest_.size(), kValueLosses);
  limit_ = level_ + std::max({options_.turn_rise_of_level * std::abs(level_),
                              options_.turn_rise_of_gain * (start_ - level_), options_.turn_sigma * spread_});
  if (value_ <= limit_) {
    above_ = 0;
    since_ = -1;
    return;
  }
  if (above_ == 0) since_ = step;
  above_ = std::min(above_ + 1, kTurnCountMax);
}

void LossTurn::Forget() {
  const LossOptions options = options_;
  *this = LossTurn(options);
}

void LossTurn::Find(const AnnouncedChange* rise, std::vector<Finding>* out) const {
  if (!holds()) return;
  const bool lasts = rise != nullptr || above_ >= options_.turn_lasting_values;
  Finding& finding = out->emplace_back(Finding::OfRun(Rule::kLoss, lasts ? Severity::kWarning : Severity::kInfo,
                                                      {.signal = "loss",
                                                       .value = value_,
                                                       .threshold = limit_,
                                                       .baseline = level_,
                                                       .first_step = since_,
                                                       .detector = "turn"}));
  finding.stage = lasts ? 5 : 0;
  const std::string after = rise != nullptr ? "after " + WordsOf(*rise) : "from step " + StepWords(since_) + " on";
  finding.summary = absl::StrFormat("the loss has gone from %.3g to %.3g %s", level_, value_, after);
  finding.note = finding.summary;
  if (rise != nullptr) {
    finding.cause = "learning rate too high";
    finding.advice = AdviceOn(*rise);
  } else {
    finding.advice = absl::StrCat(
        "Look at the data and the learning rate of these steps. If the loss stays up, go back to a checkpoint from "
        "before step ",
        StepWords(since_), ".");
  }
}

bool LossTurn::Consistent() const { return newest_.size() <= kValueLosses + kSpreadMoves + 1; }

}  // namespace bellwether::server
