#include "server/detect/head_rules.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <iterator>
#include <limits>
#include <utility>

#include "server/model/alert_words.h"

namespace bellwether::server {
namespace {

// Names a run's series in a bank; no two are alike.
uint64_t NextKey() {
  static std::atomic<uint64_t> last = 0;
  return ++last;
}

// With the factors that hold for a run of so many heads.
JudgeOptions ForHeads(JudgeOptions options, const Layout& layout) {
  DriftOptions& drift = options.drift;
  const double heads = static_cast<double>(layout.layers) * static_cast<double>(layout.heads);
  const double scale = std::pow(std::max(1.0, heads / drift.heads_usual), drift.heads_exponent);
  drift.grown_factor *= scale;
  drift.level_factor *= scale;
  TiesOptions& ties = options.ties;
  ties.fraction_min = std::max(ties.fraction_min, std::min(ties.fraction_min * scale, ties.fraction_high));
  return options;
}

// Times the scores that are out of bounds: so far they need not hold.
constexpr double kFarLogits = 4;

// Of which a state may have been there before the run began, and the test that says what is one.
constexpr std::pair<HeadTrack, HeadTest> kFoundTracks[] = {{kRatio, kLevel}, {kTied, kTies}, {kLogitMax, kLogit}};

int32_t WindowOf(const JudgeOptions& options) { return std::clamp(options.trend.window_batches, 8, kWindowBatchesMax); }

}  // namespace

HeadRules::HeadRules(const JudgeOptions& options, const Layout& layout, DetectorBank* bank)
    : options_(ForHeads(options, layout)),
      layout_(layout),
      heads_(static_cast<size_t>(layout.layers) * static_cast<size_t>(layout.heads)),
      bank_(bank) {
  const int32_t window = WindowOf(options);
  for (const HeadTrackInfo& info : kHeadTrackInfo) series_.emplace_back(heads_, info.window ? window : 0);
  for (Held& held : held_) {
    held.count.assign(heads_, 0);
    held.active.assign(heads_, 0);
    held.since.assign(heads_, 0);
  }
  stage_.assign(heads_, 0);
  leak_step_.assign(static_cast<size_t>(layout.layers), -1);
  for (auto* values : {&eta_steps_, &eta_lower_, &eta_upper_}) values->assign(heads_, -1);
  eta_step_.assign(heads_, 0);
  run_.key = NextKey();
  hits_.resize(kHeadTests * static_cast<size_t>(kernels::HitWords(static_cast<int64_t>(heads_))));
  run_.hits = hits_.data();
}

HeadRules::~HeadRules() { bank_->Forget(run_.key); }

bool HeadRules::Add(const StepSample& sample) {
  bool any = false;
  for (size_t track = 0; track < kHeadTracks; ++track) {
    const SignalInfo& signal = *FindSignal(kHeadTrackInfo[track].signal);
    if (!DeriveMatrix(sample, signal, &derived_)) continue;
    any = true;
    if (signal.granularity == Granularity::kKvHead && layout_.kv_heads != layout_.heads) {
      const int32_t group = layout_.heads / layout_.kv_heads;
      expanded_.resize(heads_);
      for (size_t i = 0; i < heads_; ++i) expanded_[i] = derived_[i / static_cast<size_t>(group)];
      derived_.swap(expanded_);
    }
    series_[track].Add(derived_);
    KeepFound(static_cast<HeadTrack>(track), derived_);
  }
  if (!any) return false;
  const int64_t gap = last_step_ < 0 ? 0 : sample.step - last_step_;
  last_step_ = sample.step;
  if (batch_begin_ < 0) batch_begin_ = sample.step;
  // Full if a further sample at this pace would lie beyond the batch.
  if (sample.step - batch_begin_ + std::max<int64_t>(gap, 1) < options_.trend.batch_steps) return false;
  batch_begin_ = -1;
  return true;
}

void HeadRules::Held::Update(size_t head, bool condition, int32_t hold, int64_t step) {
  uint16_t& n = count[head];
  if (condition) {
    if (n == 0) since[head] = step;
    n = static_cast<uint16_t>(std::min(n + 1, 2 * hold));
    if (n >= hold) active[head] = 1;
  } else if (n > 0 && --n == 0) {
    active[head] = 0;
  }
}

bool HeadRules::Held::Counts(size_t begin, size_t end) const {
  uint16_t any = 0;
  for (size_t head = begin; head < end; ++head) any |= count[head];
  return any != 0;
}

float HeadRules::Newest(HeadTrack track, size_t head) const {
  return series_[track].present() ? series_[track].newest(head) : std::numeric_limits<float>::quiet_NaN();
}

void HeadRules::KeepFound(HeadTrack track, std::span<const float> values) {
  if (std::none_of(std::begin(kFoundTracks), std::end(kFoundTracks),
                   [&](const auto& kept) { return kept.first == track; }))
    return;
  std::vector<float>& found = found_[track];
  if (found.empty()) found.assign(heads_, std::numeric_limits<float>::quiet_NaN());
  for (size_t i = 0; i < heads_; ++i) {
    // A value that is not finite is no measure of what comes.
    if (std::isnan(found[i]) && std::isfinite(values[i])) found[i] = values[i];
  }
}

void HeadRules::ForgetHowFound() {
  for (const auto& [track, test] : kFoundTracks) found_[track].assign(heads_, 0);
}

void HeadRules::ForgetFound() {
  for (const auto& [track, test] : kFoundTracks) {
    if (found_[track].empty()) continue;
    const auto newest = series_[track].newest();
    double least = Threshold(test, track);
    if (track == kLogitMax) least = std::min(least, options_.logits.logit_median_large);
    const auto threshold = static_cast<float>(least);
    for (size_t i = 0; i < heads_; ++i) {
      if (newest[i] <= threshold) found_[track][i] = 0;
    }
  }
}

bool HeadRules::AsFound(HeadTrack track, size_t head, double value, double threshold) const {
  const std::vector<float>& found = found_[track];
  if (found.empty() || !(found[head] > threshold)) return false;
  return value <= options_.context.found_factor * found[head];
}

bool HeadRules::MostAsFound(HeadTrack track, double threshold) const {
  if (found_[track].empty()) return false;
  size_t as_found = 0;
  for (size_t head = 0; head < heads_; ++head) {
    as_found += AsFound(track, head, series_[track].newest(head), threshold) ? 1 : 0;
  }
  return 2 * as_found > heads_;
}

void HeadRules::MarkUnwanted(HeadTest test) {
  const Held& held = held_[test];
  const int32_t sure = 2 * HoldBatches(options_, test);
  std::vector<uint8_t>& unwanted = unwanted_[test];
  bool any = false;
  for (const uint16_t count : held.count) any |= count >= sure;
  if (!any) return;
  unwanted.resize(heads_);
  for (size_t head = 0; head < heads_; ++head) {
    const bool due = (ticks_ + static_cast<int64_t>(head)) % options_.trend.refit_batches == 0;
    unwanted[head] = held.count[head] >= sure && !due;
  }
  run_.test[test].unwanted = unwanted.data();
}

void HeadRules::Hold(HeadTest test) {
  Held& held = held_[test];
  const int32_t hold = HoldBatches(options_, test);
  const kernels::BankTest& asked = run_.test[test];
  const auto words = static_cast<size_t>(kernels::HitWords(static_cast<int64_t>(heads_)));
  for (size_t word = 0; word < words; ++word) {
    const uint64_t hits = hits_[test * words + word];
    const size_t begin = word * 64;
    const size_t end = std::min(begin + 64, heads_);
    if (hits == 0 && !held.Counts(begin, end)) continue;
    for (size_t head = begin; head < end; ++head) {
      if (asked.unwanted != nullptr && asked.unwanted[head] != 0) continue;
      const bool hit = (hits >> (head - begin) & 1) != 0;
      held.Update(head, hit, hold, last_step_);
      if (hit && test == kGrowth) {
        Trend trend;
        kernels::PassesWindows(asked, run_.track[kRatio], run_.heads, static_cast<int64_t>(head), &trend);
        StoreEta(head, JoinedEta(head, trend));
      }
    }
  }
}

Eta HeadRules::JoinedEta(size_t head, const Trend& ratio_trend) {
  const DriftOptions& drift = options_.drift;
  const Eta by_ratio = EtaTo(ratio_trend, drift.ratio_critical, drift.eta_steps_max);
  if (!by_ratio.known || !series_[kCommonMode].present()) return by_ratio;
  const BatchSeries& series = series_[kCommonMode];
  const int32_t rows = std::min(options_.trend.window_batches_short, series.rows());
  series.Window(head, rows, false, &values_, &steps_);
  const Trend trend = FitTrend(values_, steps_, options_.trend.window_batches_min, 0, &trend_scratch_);
  const Eta by_mode = EtaTo(trend, drift.common_mode_critical, drift.eta_steps_max);
  if (!by_mode.known) return by_ratio;
  // The ratio stays near its critical level while the common mode goes on: from
  // half of it on the mode alone says when.
  const bool saturated = ratio_trend.log_level > std::log(drift.ratio_critical / 2);
  return {.known = true,
          .steps = saturated ? by_mode.steps : (by_ratio.steps + by_mode.steps) / 2,
          .lower_steps = std::min(by_ratio.lower_steps, by_mode.lower_steps),
          .upper_steps = std::max(by_ratio.upper_steps, by_mode.upper_steps)};
}

void HeadRules::StoreEta(size_t head, const Eta& eta) {
  // Unknown: no steps.
  eta_steps_[head] = eta.known ? static_cast<float>(eta.steps) : -1.0f;
  eta_lower_[head] = static_cast<float>(eta.lower_steps);
  eta_upper_[head] = static_cast<float>(eta.upper_steps);
  eta_step_[head] = last_step_;
}

Eta HeadRules::EtaNow(size_t head) const {
  if (eta_steps_[head] < 0) return {};
  const auto passed = static_cast<double>(last_step_ - eta_step_[head]);
  return {.known = true,
          .steps = std::max(0.0, eta_steps_[head] - passed),
          .lower_steps = std::max(0.0, eta_lower_[head] - passed),
          .upper_steps = std::max(0.0, eta_upper_[head] - passed)};
}

Head HeadRules::At(size_t head) const {
  return {static_cast<int32_t>(head / static_cast<size_t>(layout_.heads)),
          static_cast<int32_t>(head % static_cast<size_t>(layout_.heads))};
}

Fact HeadRules::FactOf(HeadTrack track, HeadTest test, size_t head, double threshold, const char* detector) const {
  return {.signal = kHeadTrackInfo[track].name,
          .where = At(head),
          .value = series_[track].newest(head),
          .threshold = threshold,
          .baseline = series_[track].median(),
          .first_step = held_[test].since[head],
          .detector = detector};
}

void HeadRules::Tick(const AttentionTraits& traits, bool excused, bool forming, const std::vector<Head>& repaired) {
  for (BatchSeries& series : series_) series.CloseRow(last_step_);
  ++ticks_;
  if (forming) {
    for (BatchSeries& series : series_) series.ForgetWindow();
  }
  SetRun(options_, series_, heads_, &run_);
  for (const HeadTest test : {kGrowth, kCommonGrowth, kNorm}) MarkUnwanted(test);
  bank_->Evaluate(&run_);
  for (size_t track = 0; track < kHeadTracks; ++track) series_[track].Settle(run_.track[track]);
  ForgetFound();
  if (excused) {
    JudgeStates(traits);
    return;
  }
  rounding_.clear();
  logits_.clear();
  for (size_t test = 0; test < kHeadTests; ++test) Hold(static_cast<HeadTest>(test));
  HoldFarLogits();
  for (size_t head = 0; head < heads_; ++head) {
    if (held_[kLeaking].active[head] != 0) leak_step_[head / static_cast<size_t>(layout_.heads)] = last_step_;
  }
  for (size_t head = 0; head < heads_; ++head) {
    uint8_t active = 0;
    for (const Held& held : held_) active |= held.active[head];
    stage_[head] = 0;
    if (active != 0) JudgeHead(head, traits, false);
  }
  JoinLogits(repaired);
  NameSuspects();
  JudgeRunLogits();
  TellAsFound();
}

void HeadRules::HoldFarLogits() {
  Held& held = held_[kLogit];
  const double far = kFarLogits * options_.logits.logit_max_large;
  const int32_t hold = HoldBatches(options_, kLogit);
  for (size_t head = 0; head < heads_; ++head) {
    if (held.count[head] > 0 && held.count[head] < hold && Newest(kLogitMax, head) > far) {
      held.count[head] = static_cast<uint16_t>(hold);
      held.active[head] = 1;
    }
  }
}

void HeadRules::HoldFarWeights() {
  Held& held = held_[kNorm];
  const double factor = options_.norm.far_factor;
  for (size_t head = 0; head < heads_; ++head) {
    // Against the other heads, and against itself before the change.
    const bool far = Newest(kSigma, head) > factor * series_[kSigma].median() &&
                     kernels::RiseOf(run_.track[kSigma], run_.heads, static_cast<int64_t>(head), series_[kSigma].rows(),
                                     true) >= factor;
    // A rise that held before the change is neither begun nor ended here.
    if (far || held.active[head] == 0) held.Update(head, far, options_.norm.hold_batches, last_step_);
  }
}

void HeadRules::JudgeStates(const AttentionTraits& traits) {
  rounding_.clear();
  logits_.clear();
  Hold(kLogit);
  HoldFarLogits();
  HoldFarWeights();
  // What a drifting layer comes to is its drift's, which goes on behind the excuse.
  std::vector<bool> ill(static_cast<size_t>(layout_.layers));
  for (size_t head = 0; head < heads_; ++head) {
    if (stage_[head] >= 1 && stage_[head] <= 2) ill[head / static_cast<size_t>(layout_.heads)] = true;
  }
  for (size_t head = 0; head < heads_; ++head) {
    const bool holds = held_[kNorm].active[head] != 0 || held_[kLogit].active[head] != 0;
    if (holds && !ill[head / static_cast<size_t>(layout_.heads)]) JudgeHead(head, traits, true);
  }
  JudgeRunLogits();
}

// What a head's newest means say, before any rule has a name.
struct HeadRules::Reading {
  double ratio, ratio_peer, common, leak, leak_threshold, tied, tied_threshold, sigma, sigma_peer, logit;
  bool growth, level, common_growth, leaking, ties, norm, norm_far, logit_high;
  bool level_sure, common_growth_sure, ties_sure;  // For twice as long as they must hold.
  bool level_found, ties_found, logit_found;       // As in its first sample.
  bool leak_measured;
};

double HeadRules::Threshold(HeadTest test, HeadTrack track) const {
  return ThresholdOf(options_, test, series_[track].median());
}

HeadRules::Reading HeadRules::Read(size_t head) const {
  Reading r{};
  r.ratio = Newest(kRatio, head);
  r.ratio_peer = std::max<double>(series_[kRatio].median(), options_.drift.ratio_floor);
  r.common = Newest(kCommonMode, head);
  r.leak = Newest(kLeak, head);
  r.leak_measured = !options_.off.has(Builtin::kDriftLeak) && std::isfinite(r.leak);
  r.leak_threshold = Threshold(kLeaking, kLeak);
  r.tied = Newest(kTied, head);
  r.tied_threshold = Threshold(kTies, kTied);
  r.sigma = Newest(kSigma, head);
  r.sigma_peer = series_[kSigma].median();
  r.logit = Newest(kLogitMax, head);
  const auto holds = [&](HeadTest test) { return options_.is_on(BuiltinOf(test)) && held_[test].active[head] != 0; };
  r.growth = holds(kGrowth);
  r.level_found = holds(kLevel) && AsFound(kRatio, head, r.ratio, Threshold(kLevel, kRatio));
  r.level = holds(kLevel) && !r.level_found;
  r.common_growth = holds(kCommonGrowth);
  r.leaking = holds(kLeaking);
  r.ties_found = holds(kTies) && AsFound(kTied, head, r.tied, r.tied_threshold);
  r.ties = holds(kTies) && !r.ties_found;
  const auto sure = [&](HeadTest test) { return held_[test].count[head] >= 2 * HoldBatches(options_, test); };
  r.level_sure = r.level && sure(kLevel);
  r.common_growth_sure = r.common_growth && sure(kCommonGrowth);
  r.ties_sure = r.ties && sure(kTies);
  r.norm = holds(kNorm);
  r.norm_far = options_.is_on(Builtin::kNorm) && r.sigma > options_.norm.far_factor * r.sigma_peer;
  r.logit_found = holds(kLogit) && AsFound(kLogitMax, head, r.logit, options_.logits.logit_max_large);
  r.logit_high = holds(kLogit) && !r.logit_found;
  return r;
}

HeadRules::Reading HeadRules::ReadStates(size_t head) const {
  Reading r = Read(head);
  r.growth = r.level = r.common_growth = r.leaking = r.ties = false;
  r.level_sure = r.common_growth_sure = r.ties_sure = false;
  r.level_found = r.ties_found = r.logit_found = false;
  r.norm = r.norm && r.norm_far;
  return r;
}

bool HeadRules::LayerLeaks(size_t head) const {
  const std::vector<uint8_t>& active = held_[kLeaking].active;
  const size_t heads = static_cast<size_t>(layout_.heads);
  const size_t first = head / heads * heads;
  return std::any_of(active.begin() + static_cast<ptrdiff_t>(first),
                     active.begin() + static_cast<ptrdiff_t>(first + heads), [](uint8_t holds) { return holds != 0; });
}

bool HeadRules::LayerLeakedLately(size_t head) const {
  const int64_t step = leak_step_[head / static_cast<size_t>(layout_.heads)];
  return step >= 0 && last_step_ - step <= options_.leak.memory_steps;
}

void HeadRules::JudgeHead(size_t head, const AttentionTraits& traits, bool states) {
  const DriftOptions& drift = options_.drift;
  const Reading r = states ? ReadStates(head) : Read(head);
  // Rounding needs low-precision scores; centred keys carry no common mode.
  const bool rounding_possible = traits.score_dtype != "fp32" && !traits.centred;
  // A large common mode may be the loss's own wish.  The leak is the witness:
  // where it is measured and silent in a whole layer, the kernel's error does
  // not push.  The head that is pushed furthest need not leak most.
  const bool leaks = r.leak_measured && LayerLeaks(head);
  const bool pushed = !r.leak_measured || leaks || LayerLeakedLately(head);
  // What has no second witness must hold longer.
  const bool far = r.level_sure || (r.level && (r.ties || leaks));
  const bool mode_grows = r.common_growth && (leaks || (r.common_growth_sure && !r.leak_measured));
  const bool drifting = r.growth || far || r.leaking || mode_grows;
  Finding finding;
  finding.where = At(head);
  finding.severity = Severity::kWarning;
  finding.sigma = r.sigma;
  if (rounding_possible && drifting) {
    finding.rule = Rule::kDrift;
    const bool moved = r.norm || r.norm_far;
    finding.stage = r.logit_high ? 4 : moved ? 3 : r.ties ? 2 : 1;
    const bool lost = r.ties && pushed && r.common > drift.common_mode_large;
    if (moved || r.logit_high || lost) finding.severity = Severity::kCritical;
    finding.score =
        std::max({std::isfinite(r.ratio) ? r.ratio / r.ratio_peer : 0.0, r.leaking ? r.leak / r.leak_threshold : 0.0,
                  r.common_growth ? r.common / drift.common_mode_large : 0.0});
    if (r.growth) finding.eta = EtaNow(head);
  } else if (rounding_possible && r.ties_sure && !r.leak_measured) {
    finding.rule = Rule::kTies;
    finding.stage = 2;
    finding.score = r.tied;
  } else if (r.norm) {
    finding.rule = Rule::kNorm;
    finding.stage = 3;
    finding.score = r.sigma / r.sigma_peer;
  } else if (r.logit_high) {
    finding.rule = Rule::kLogits;
    finding.stage = 4;
    finding.score = r.logit / options_.logits.logit_max_large;
  } else {
    NoteAsFound(head, r, rounding_possible);
    return;
  }
  finding.first_step = last_step_;
  // A test that holds on while its newest value has fallen back is no evidence
  // to show, but its beginning is the illness's.
  const auto add = [&](bool active, HeadTrack track, HeadTest test, double threshold, const char* detector) {
    if (!active) return;
    finding.first_step = std::min(finding.first_step, held_[test].since[head]);
    const Fact fact = FactOf(track, test, head, threshold, detector);
    if (fact.value > threshold) finding.Add(fact);
  };
  if (finding.rule != Rule::kLogits) {
    add(r.growth, kRatio, kGrowth, Threshold(kGrowth, kRatio), "growth");
    add(r.level && !r.growth, kRatio, kLevel, Threshold(kLevel, kRatio), "peers");
    add(r.common_growth, kCommonMode, kCommonGrowth, drift.common_mode_large, "growth");
    add(r.leaking, kLeak, kLeaking, r.leak_threshold, "level");
    add(r.ties, kTied, kTies, r.tied_threshold, "level");
    add(r.norm, kSigma, kNorm, Threshold(kNorm, kSigma), "growth");
    if (r.norm_far && !r.norm && finding.rule == Rule::kDrift) {
      Fact far_off = FactOf(kSigma, kNorm, head, options_.norm.far_factor * r.sigma_peer, "peers");
      far_off.first_step = last_step_;  // The test of the rise need not hold.
      finding.Add(far_off);
    }
  }
  add(r.logit_high, kLogitMax, kLogit, options_.logits.logit_max_large, "level");
  stage_[head] = finding.stage;
  (finding.rule == Rule::kLogits ? logits_ : rounding_).push_back(std::move(finding));
}

void HeadRules::NoteAsFound(size_t head, const Reading& r, bool rounding_possible) {
  const bool level = rounding_possible && r.level_found, ties = rounding_possible && r.ties_found;
  if (!level && !ties && !r.logit_found) return;
  Finding finding;
  finding.rule = r.logit_found ? Rule::kLogits : level ? Rule::kDrift : Rule::kTies;
  finding.severity = Severity::kInfo;
  finding.where = At(head);
  finding.sigma = r.sigma;
  finding.first_step = last_step_;
  const auto add = [&](bool holds, HeadTrack track, HeadTest test, double threshold) {
    if (!holds) return;
    finding.first_step = std::min(finding.first_step, held_[test].since[head]);
    finding.Add(FactOf(track, test, head, threshold, kFoundDetector));
  };
  add(r.logit_found, kLogitMax, kLogit, options_.logits.logit_max_large);
  add(level, kRatio, kLevel, Threshold(kLevel, kRatio));
  add(ties, kTied, kTies, r.tied_threshold);
  finding.score = finding.facts[0].value / finding.facts[0].threshold;
  (r.logit_found ? logits_found_ : rounding_found_).push_back(std::move(finding));
}

void HeadRules::TellAsFound() {
  // Beside what is worse they say nothing.
  if (rounding_.empty()) rounding_.swap(rounding_found_);
  if (logits_.empty()) logits_.swap(logits_found_);
  rounding_found_.clear();
  logits_found_.clear();
}

bool HeadRules::SeesGrowth() const {
  bool any = false;
  for (size_t track = 0; track < kHeadTracks; ++track) {
    if (!kHeadTrackInfo[track].window || !series_[track].present()) continue;
    if (series_[track].rows() >= options_.trend.window_batches_min) return true;
    any = true;
  }
  return !any;
}

bool HeadRules::StandStill(const std::vector<Head>& heads, int64_t steps) const {
  const BatchSeries& series = series_[kSigma].present() ? series_[kSigma] : series_[kLogitMax];
  if (!series.present() || series.rows() < options_.trend.window_batches_min) return false;
  const bool full = series.rows() == WindowOf(options_);
  const int64_t span = series.span_steps(series.rows());
  if (span < steps && !full) return false;
  // What doubles more slowly than this may be training: that is no push any more.
  const double rise_max =
      std::exp2(options_.trend.gate_share * static_cast<double>(span) / options_.trend.doubling_steps_max);
  for (size_t head = 0; head < heads_; ++head) {
    const Head at = At(head);
    const bool named = std::any_of(heads.begin(), heads.end(), [&](const Head& one) {
      return one.layer < 0 || (one.layer == at.layer && (one.head < 0 || one.head == at.head));
    });
    // Not: a rise that is no number is no rest.
    if (named && !(series.Rise(head, series.rows(), false) <= rise_max)) return false;
  }
  return true;
}

void HeadRules::JoinLogits(const std::vector<Head>& repaired) {
  std::vector<bool> ill(static_cast<size_t>(layout_.layers));
  for (const Head& head : repaired) {
    if (head.layer >= 0 && head.layer < layout_.layers) ill[static_cast<size_t>(head.layer)] = true;
  }
  for (const Finding& finding : rounding_) ill[static_cast<size_t>(finding.where.layer)] = true;
  const auto joins = [&](const Finding& finding) { return ill[static_cast<size_t>(finding.where.layer)]; };
  for (Finding& finding : logits_) {
    if (!joins(finding)) continue;
    finding.severity = Severity::kCritical;
    rounding_.push_back(finding);
  }
  std::erase_if(logits_, [&](const Finding& finding) { return joins(finding); });
}

void HeadRules::NameSuspects() {
  const Finding* worst = nullptr;
  for (const Finding& finding : rounding_) {
    const bool worse = worst == nullptr || finding.severity > worst->severity ||
                       (finding.severity == worst->severity && finding.score > worst->score);
    if (finding.rule == Rule::kDrift && worse) worst = &finding;
  }
  if (worst == nullptr || !series_[kCommonMode].present()) return;
  const int32_t layer = worst->where.layer;
  std::vector<size_t> others;
  for (int32_t head = 0; head < layout_.heads; ++head) {
    const Head where{layer, head};
    const bool named =
        std::any_of(rounding_.begin(), rounding_.end(), [&](const Finding& f) { return f.where == where; });
    const size_t at = static_cast<size_t>(layer) * static_cast<size_t>(layout_.heads) + static_cast<size_t>(head);
    if (!named && std::isfinite(series_[kCommonMode].newest(at))) others.push_back(at);
  }
  const auto named_here = static_cast<size_t>(
      std::count_if(rounding_.begin(), rounding_.end(), [&](const Finding& f) { return f.where.layer == layer; }));
  const auto wanted = static_cast<size_t>(options_.alert.suspects_min);
  if (named_here >= wanted) return;
  std::stable_sort(others.begin(), others.end(),
                   [&](size_t a, size_t b) { return series_[kCommonMode].newest(a) > series_[kCommonMode].newest(b); });
  others.resize(std::min(others.size(), wanted - named_here));
  for (const size_t head : others) {
    Finding finding;
    finding.rule = Rule::kDrift;
    finding.severity = Severity::kInfo;
    finding.where = At(head);
    finding.first_step = last_step_;
    finding.Add(FactOf(kCommonMode, kCommonGrowth, head, options_.drift.common_mode_large, kNextInLine));
    finding.facts[0].first_step = last_step_;
    rounding_.push_back(std::move(finding));
  }
}

void HeadRules::JudgeRunLogits() {
  if (!options_.is_on(Builtin::kLogits)) return;
  if (!series_[kLogitMax].present() || !series_[kEntropy].present()) return;
  const double logit = series_[kLogitMax].median();
  const double entropy = series_[kEntropy].median();
  if (logit < options_.logits.logit_median_large || entropy > options_.logits.entropy_ratio_collapsed) return;
  const bool found = MostAsFound(kLogitMax, options_.logits.logit_median_large);
  if (found && !logits_found_.empty()) return;
  const auto values = series_[kLogitMax].newest();
  const auto worst = static_cast<size_t>(std::max_element(values.begin(), values.end()) - values.begin());
  Finding finding;
  finding.rule = Rule::kLogits;
  finding.stage = found ? 0 : 4;
  finding.severity = found                                            ? Severity::kInfo
                     : logit >= options_.logits.logit_median_critical ? Severity::kCritical
                                                                      : Severity::kWarning;
  finding.where = At(worst);
  finding.score = logit;
  finding.first_step = last_step_;
  finding.Add(FactOf(kLogitMax, kLogit, worst, options_.logits.logit_median_large, found ? kFoundDetector : "level"));
  finding.facts[0].first_step = last_step_;
  (found ? logits_found_ : logits_).push_back(finding);
}

void HeadRules::SetOptions(const JudgeOptions& options) {
  options_ = ForHeads(options, layout_);
  for (size_t track = 0; track < kHeadTracks; ++track) {
    if (kHeadTrackInfo[track].window) series_[track].SetWindow(WindowOf(options));
  }
}

int32_t HeadRules::stage() const { return stage_.empty() ? 0 : *std::max_element(stage_.begin(), stage_.end()); }

void HeadRules::Rewind() {
  ForgetTrends();
  batch_begin_ = -1;
  last_step_ = -1;
}

void HeadRules::ForgetTrends() {
  for (BatchSeries& series : series_) series.ForgetWindow();
  for (Held& held : held_) {
    std::fill(held.count.begin(), held.count.end(), uint16_t{0});
    std::fill(held.active.begin(), held.active.end(), uint8_t{0});
  }
  std::fill(stage_.begin(), stage_.end(), 0);
  rounding_.clear();
  logits_.clear();
}

size_t HeadRules::memory_bytes() const {
  size_t bytes = sizeof *this + heads_ * (kHeadTests * (2 + 1 + 8) + 4 + 3 * 4 + 8 + std::size(kFoundTracks) * 4);
  for (const BatchSeries& series : series_) bytes += series.memory_bytes();
  return bytes;
}

bool HeadRules::Consistent() const {
  for (const BatchSeries& series : series_) {
    if (!series.Consistent()) return false;
  }
  for (const Held& held : held_) {
    if (held.count.size() != heads_ || held.active.size() != heads_ || held.since.size() != heads_) return false;
  }
  return stage_.size() == heads_ && leak_step_.size() == static_cast<size_t>(layout_.layers) &&
         eta_steps_.size() == heads_ && eta_lower_.size() == heads_ && eta_upper_.size() == heads_ &&
         eta_step_.size() == heads_ && std::all_of(found_.begin(), found_.end(), [this](const auto& values) {
           return values.empty() || values.size() == heads_;
         });
}

}  // namespace bellwether::server
