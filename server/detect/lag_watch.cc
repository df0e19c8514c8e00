#include "server/detect/lag_watch.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/detect/measured.h"

namespace bellwether::server {

void LagWatch::Rewind() {
  past_ = {};
  excused_ = false;
  off_ = 0;
  since_ = -1;
  news_ = {};
  findings_.clear();
}

bool LagWatch::Observe(const StepSample& sample, const Context& context) {
  findings_.clear();
  const float lag = sample.scalar(SignalId::kMomentLagMax);
  if (!IsAbove0(lag)) return false;
  seen_ = true;
  news_.Begin(sample.step, context.quiet_steps);
  if (context.excused) {
    // While it is off it would be learnt.
    if (!news_.wrong_lately()) past_.Add(lag);
    excused_ = true;
    return false;
  }
  // So that what was learnt of the change is past from here on.
  if (std::exchange(excused_, false)) past_.Close();
  double limit = 0;
  const bool known = past_.known();
  if (known) {
    const double high = past_.high(), low = past_.low();
    limit = std::max(options_.lag_level, high * std::pow(high / low, options_.range_factor));
  }
  if (!known || lag <= limit) {
    off_ = 0;
    past_.Add(lag);
    return true;
  }
  const bool begins = off_++ == 0;
  if (begins) since_ = sample.step;
  news_.NoteWrong(sample.step);
  if (off_ >= options_.relearn_samples) {
    past_ = {};
    off_ = 0;
    return true;
  }
  const bool persists = off_ >= options_.lag_samples;
  Finding& finding =
      findings_.emplace_back(Finding::OfRun(Rule::kParameters, persists ? Severity::kWarning : Severity::kInfo,
                                            {.signal = FindSignal(SignalId::kMomentLagMax)->name,
                                             .value = lag,
                                             .threshold = limit,
                                             .baseline = past_.high(),
                                             .first_step = since_,
                                             .detector = "past"}));
  if (begins) finding.news = news_.Take();
  finding.cause = "second moment too slow";
  finding.summary = absl::StrFormat(
      "the second moment of an embedding or a first layer lags by %.4g in a step up to %d, where it lagged by %.4g to "
      "%.4g at most",
      lag, sample.step, past_.low(), past_.high());
  return true;
}

void LagWatch::AddTo(std::vector<Finding>* findings) const {
  if (findings_.empty()) return;
  Finding mine = findings_.front();
  if (findings->empty()) return findings->push_back(std::move(mine));
  Finding& first = findings->front();
  if (mine.severity <= first.severity) {
    mine.score = -1;
    absl::StrAppend(&first.summary, "; ", mine.summary);
    first.news |= mine.news;  // The alert is told by its first finding.
    return findings->push_back(std::move(mine));
  }
  mine.score = first.score + 1;
  absl::StrAppend(&mine.summary, "; ", first.summary);
  mine.news |= first.news;
  findings->insert(findings->begin(), std::move(mine));
}

}  // namespace bellwether::server
