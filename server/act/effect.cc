#include "server/act/effect.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/detect/judge_options.h"
#include "server/detect/trend.h"

namespace bellwether::server {
namespace {

constexpr int64_t kBatchSteps = 20;                 // As the judge's.
constexpr int32_t kWindowRows = 32;                 // 640 steps at the usual sampling.
constexpr int kPointsMin = 4;                       // Of a line.
constexpr double kBetterShare = 0.6;                // Of the predicted growth.
constexpr double kGrowthMin = 0.15;                 // Predicted, in ln: less is noise.
constexpr double kFastPerStep = 0.35e-3;            // ln 2 / 2,000 steps: trend.doubling_steps_max.
constexpr double kAlonePerStep = 2 * kFastPerStep;  // Without peers: no healthy head kept that up.
constexpr double kSureZ = 3;                        // Mann-Kendall's, for a growth to be predicted from.
constexpr double kPredictedMax = 14;                // e^14: beyond that a prediction is only "lost".
constexpr double kLossWorse = 1.15;
constexpr int32_t kLossRows = 5;
constexpr double kSettleShare = 0.2;   // Of the trial, at its start.
constexpr double kRawKeysSafe = 1.1;   // Sigma against that at the action.
constexpr double kClipSigmaPeers = 2;  // Times the median head: norm.peer_factor.
constexpr double kClipLogits = 200;    // logits.logit_median_large

constexpr LeakOptions kLeak;
constexpr double kLeakLoud = kLeak.floor * kLeak.factor;

struct TrackInfo {
  SignalId signal;
  const char* name;
  double loud = 0;         // As the judge's rules say: what stays below is nobody's illness.
  double highest = 1e300;  // That it can reach.
};
constexpr std::array<TrackInfo, kEffectTracks> kTracks = {{
    {SignalId::kWqSigma, "wq_sigma"},
    {SignalId::kCommonMode, "common_mode", DriftOptions().common_mode_large},
    {SignalId::kDriftRatio, "drift_ratio", DriftOptions().grown_factor},
    {SignalId::kKeyLeak, "key_leak", kLeakLoud, 1},
    {SignalId::kTiedFractionBf16, "tied_fraction_bf16", TiesOptions().fraction_min, 1},
    {SignalId::kLogitMax, "logit_max", LogitsOptions().logit_median_large},
}};

// Whether the track means the same once the action is in force.
bool IsComparable(ActionKind kind, EffectTrack track) {
  return kind != ActionKind::kCenterK || track == kEffectSigma || track == kEffectTied || track == kEffectLogit;
}

std::string Number(double value) { return absl::StrFormat("%.3g", value); }

// `peers`: the level now in those of the median head; 0 = nobody knows.
std::string SaidOf(const EffectBefore& was, double now, double predicted, double slope, double peers) {
  return absl::StrCat(
      kTracks[was.track].name, " of layer ", was.layer, " head ", was.head, ": ", Number(now), ", was to be ",
      predicted < was.level * std::exp(kPredictedMax) * 0.99 ? "" : "above ", Number(predicted),
      "; growth per 1,000 steps ", Number(1000 * slope), ", before ", Number(1000 * was.slope),
      peers > 0 ? absl::StrCat("; times the median head ", Number(peers), ", before ", Number(was.peers)) : "");
}

}  // namespace

EffectWatch::EffectWatch(const Layout& layout) : layout_(layout), loss_(1, kWindowRows) {
  const auto heads = static_cast<size_t>(layout.layers) * static_cast<size_t>(layout.heads);
  for (size_t i = 0; i < kEffectTracks; ++i) series_.emplace_back(heads, kWindowRows);
}

void EffectWatch::RecordNonfinite(const StepSample& sample) {
  const auto bad = [](float value) { return !IsNotMeasured(value) && !std::isfinite(value); };
  std::string found;
  if (bad(sample.scalar(SignalId::kLoss))) found = "the loss is not a number";
  for (const SignalId id : {SignalId::kWqSigma, SignalId::kLogitMax, SignalId::kCommonModeSum}) {
    const auto values = sample.matrix(id);
    const auto at = std::find_if(values.begin(), values.end(), bad);
    if (at == values.end() || !found.empty()) continue;
    const auto index = static_cast<int32_t>(at - values.begin());
    found = absl::StrCat(FindSignal(id)->name, " of layer ", index / layout_.heads, " head ", index % layout_.heads,
                         " is not a number");
  }
  if (found.empty()) return;
  if (nonfinite_samples_++ == 0) nonfinite_ = absl::StrCat(found, " at step ", sample.step);
}

void EffectWatch::Observe(const StepSample& sample) {
  RecordNonfinite(sample);
  const float loss = sample.scalar(SignalId::kLoss);
  if (!IsNotMeasured(loss)) {
    loss_.Add({&loss, 1});
    const int64_t gap = last_loss_step_ < 0 ? 1 : std::max<int64_t>(1, sample.step - last_loss_step_);
    last_loss_step_ = sample.step;
    if (loss_begin_ < 0) loss_begin_ = sample.step;
    if (sample.step - loss_begin_ + gap >= kBatchSteps) {
      loss_.Close(sample.step);
      loss_begin_ = -1;
    }
  }
  bool any = false;
  for (size_t track = 0; track < kEffectTracks; ++track) {
    const SignalInfo& signal = *FindSignal(kTracks[track].signal);
    if (!DeriveMatrix(sample, signal, &derived_)) continue;
    any = true;
    if (signal.granularity == Granularity::kKvHead && layout_.kv_heads != layout_.heads) {
      const auto group = static_cast<size_t>(layout_.heads / layout_.kv_heads);
      expanded_.resize(derived_.size() * group);
      for (size_t i = 0; i < expanded_.size(); ++i) expanded_[i] = derived_[i / group];
      series_[track].Add(expanded_);
    } else {
      series_[track].Add(derived_);
    }
  }
  if (!any) return;
  const int64_t gap = last_step_ < 0 ? 1 : std::max<int64_t>(1, sample.step - last_step_);
  last_step_ = sample.step;
  if (batch_begin_ < 0) batch_begin_ = sample.step;
  // Full if a further sample at this pace would lie beyond the batch.
  if (sample.step - batch_begin_ + gap < kBatchSteps) return;
  for (BatchSeries& series : series_) series.Close(sample.step);
  batch_begin_ = -1;
}

void EffectWatch::Forget() {
  for (BatchSeries& series : series_) series.ForgetWindow();
  loss_.ForgetWindow();
  batch_begin_ = loss_begin_ = last_step_ = last_loss_step_ = -1;
  nonfinite_samples_ = 0;
  nonfinite_.clear();
}

EffectWatch::Reading EffectWatch::Read(EffectTrack track, size_t head, double skip, bool relative) const {
  Reading reading;
  const BatchSeries& series = series_[track];
  if (!series.present() || series.rows() == 0) return reading;
  const auto skipped = static_cast<int32_t>(skip * series.rows());
  std::vector<float> values;
  std::vector<float> steps;
  series.Window(head, series.rows() - skipped, relative, &values, &steps);
  TrendScratch scratch;
  const Trend trend = FitTrend(values, steps, kPointsMin, 0, &scratch);
  if (trend.points > 0) {
    reading = {.known = true, .level = std::exp(trend.log_level), .slope = trend.slope, .grows = trend.z >= kSureZ};
    return reading;
  }
  // Too few for a line: the newest that is a number.
  for (size_t i = values.size(); i-- > 0 && !reading.known;) {
    if (std::isfinite(values[i]) && values[i] > 0) reading = {.known = true, .level = values[i]};
  }
  return reading;
}

std::vector<Head> EffectWatch::Choose(const Action& action, const std::vector<Head>& heads) const {
  std::vector<Head> chosen = !action.scope.heads.empty() ? action.scope.heads : heads;
  if (chosen.empty()) {
    const std::vector<int32_t>& layers = action.scope.layers;
    for (int32_t layer = 0; layer < layout_.layers; ++layer) {
      if (!layers.empty() && !std::binary_search(layers.begin(), layers.end(), layer)) continue;
      for (int32_t head = 0; head < layout_.heads; ++head) chosen.push_back({layer, head});
    }
    const EffectTrack by = series_[kEffectSigma].present() ? kEffectSigma : kEffectCommon;
    std::vector<std::pair<double, Head>> ranked;
    for (const Head& head : chosen) {
      const Reading reading = Read(by, At(head), 0);
      ranked.emplace_back(reading.known ? -reading.slope : 1.0, head);
    }
    std::stable_sort(ranked.begin(), ranked.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    for (size_t i = 0; i < chosen.size(); ++i) chosen[i] = ranked[i].second;
  }
  if (chosen.size() > kJudgedHeadsMax) chosen.resize(kJudgedHeadsMax);
  return chosen;
}

double EffectWatch::LevelAfter(const Action& action, EffectTrack track, Head head, double level) const {
  if (action.kind != ActionKind::kQkClip) return level;
  const std::vector<Head>& clipped = action.scope.heads;
  if (std::find(clipped.begin(), clipped.end(), head) == clipped.end()) return level;
  if (track != kEffectSigma && track != kEffectCommon && track != kEffectLogit) return level;
  if (action.value > 0) return level * (track == kEffectSigma ? std::sqrt(action.value) : action.value);
  // Down to the other heads' median norm; what becomes of the scores nobody knows.
  if (track != kEffectSigma) return 0;
  const double median = series_[kEffectSigma].median();
  return std::isfinite(median) ? std::min(level, median) : 0;
}

EffectSnapshot EffectWatch::Begin(const Action& action, const std::vector<Head>& heads, int64_t step) {
  EffectSnapshot snapshot;
  snapshot.step = step;
  for (const Head& head : Choose(action, heads)) {
    for (uint8_t track = 0; track < kEffectTracks; ++track) {
      const auto which = static_cast<EffectTrack>(track);
      const Reading reading = Read(which, At(head), 0);
      if (!reading.known || !IsComparable(action.kind, which)) continue;
      const double level = LevelAfter(action, which, head, reading.level);
      const Reading peers = HasPeers() ? Read(which, At(head), 0, true) : Reading();
      snapshot.heads.push_back({.layer = head.layer,
                                .head = head.head,
                                .track = track,
                                .level = level,
                                .slope = reading.grows ? reading.slope : 0,
                                .peers = peers.known ? peers.level * level / reading.level : 0});
    }
  }
  if (loss_.present() && loss_.rows() > 0) {
    std::vector<float> values;
    std::vector<float> steps;
    loss_.Window(0, loss_.rows(), false, &values, &steps);
    for (const float value : values) {
      if (std::isfinite(value)) snapshot.loss_highest = std::max<double>(snapshot.loss_highest, value);
    }
    double sum = 0;
    int count = 0;
    for (size_t i = values.size() - std::min<size_t>(values.size(), kLossRows); i < values.size(); ++i) {
      if (!std::isfinite(values[i])) continue;
      sum += values[i];
      ++count;
    }
    snapshot.loss = count > 0 ? sum / count : 0;
  }
  Forget();
  return snapshot;
}

bool EffectWatch::CanJudge() const {
  const bool blind = std::none_of(series_.begin(), series_.end(), [](const BatchSeries& s) { return s.present(); });
  return blind || std::any_of(series_.begin(), series_.end(), [](const BatchSeries& series) {
           return series.present() && series.rows() >= kPointsMin + 1;
         });
}

bool EffectWatch::IsIllness(const Action& action, const EffectBefore& was, const Reading& now, const Reading& by_peers,
                            double passed) const {
  const double came = std::log(now.level / was.level);
  if (came < kGrowthMin || now.slope < kFastPerStep || now.level < kTracks[was.track].loud) return false;
  if (was.peers > 0) {
    return by_peers.known && by_peers.level >= 1 && std::log(by_peers.level / was.peers) >= kGrowthMin &&
           by_peers.slope >= kFastPerStep;
  }
  if (action.kind == ActionKind::kAttentionMode) {
    const Reading leak = Read(kEffectLeak, At({was.layer, was.head}), kSettleShare);
    if (leak.known) return leak.level >= kTracks[kEffectLeak].loud;
  }
  return came >= std::max(std::log(2), kAlonePerStep * passed);
}

Effect EffectWatch::Judge(const EffectSnapshot& before, const Action& action, int64_t step) const {
  if (turned_nonfinite()) return {.verdict = Effect::Verdict::kDidNotHelp, .numbers = nonfinite_};
  const auto passed = static_cast<double>(std::max<int64_t>(1, step - before.step));
  // Scores of centred keys are others than those of raw ones: less of them is
  // good news for the kernel, more is not comparable.
  const bool sigma_alone_condemns = action.kind == ActionKind::kCenterK;
  // The most telling of each: by how far it is from what was to be.
  std::string better;
  std::string worse;
  std::string same;
  double best = 0;
  double worst = 0;
  bool sigma_worse = false;
  for (const EffectBefore& was : before.heads) {
    const auto which = static_cast<EffectTrack>(was.track);
    const Reading now = Read(which, At({was.layer, was.head}), kSettleShare);
    if (!now.known || !(was.level > 0)) continue;
    const double room = std::max(0.0, std::log(kTracks[was.track].highest / was.level));
    const double predicted = std::min({kPredictedMax, room, std::max(0.0, was.slope * passed)});
    const double came = std::log(now.level / was.level);
    const Reading by_peers = was.peers > 0 ? Read(which, At({was.layer, was.head}), kSettleShare, true) : Reading();
    const std::string said = SaidOf(was, now.level, was.level * std::exp(predicted), now.slope, by_peers.level);
    const bool was_to_grow = predicted >= kGrowthMin && was.level * std::exp(predicted) >= kTracks[was.track].loud;
    if (was_to_grow && came <= kBetterShare * predicted) {
      if (better.empty() || predicted - came > best) {
        best = predicted - came;
        better = said;
      }
    } else if ((was.track == kEffectSigma || !sigma_alone_condemns) && IsIllness(action, was, now, by_peers, passed)) {
      sigma_worse = sigma_worse || was.track == kEffectSigma;
      if (worse.empty() || came > worst) {
        worst = came;
        worse = said;
      }
    } else if (same.empty()) {
      same = said;
    }
  }
  if (before.loss > 0 && loss_.present() && loss_.rows() >= kLossRows) {
    std::vector<float> values;
    std::vector<float> steps;
    loss_.Window(0, kLossRows, false, &values, &steps);
    // The least of them: a spike that is over is the data's.
    double loss = 0;
    for (const float value : values) {
      if (std::isfinite(value)) loss = loss == 0 ? value : std::min<double>(loss, value);
    }
    if (loss > kLossWorse * before.loss && loss > before.loss_highest) {
      return {.verdict = Effect::Verdict::kDidNotHelp,
              .numbers = absl::StrCat("loss: ", Number(loss), " and more, before ", Number(before.loss), ", at most ",
                                      Number(before.loss_highest))};
    }
  }
  if (sigma_worse || (!worse.empty() && better.empty())) {
    return {.verdict = Effect::Verdict::kDidNotHelp, .numbers = worse};
  }
  if (!better.empty()) return {.verdict = Effect::Verdict::kHelped, .numbers = better};
  return {.numbers = same.empty() ? "nothing was measured to judge it by" : same};
}

bool EffectWatch::IsSafeToUndo(const EffectSnapshot& before, const Action& action, std::string* why) const {
  if (turned_nonfinite()) {
    *why = nonfinite_;
    return false;
  }
  if (action.kind != ActionKind::kCenterK || action.value == 0) return true;
  bool known = false;
  for (const EffectBefore& was : before.heads) {
    if (was.track != kEffectSigma) continue;
    const Reading now = Read(kEffectSigma, At({was.layer, was.head}), 0);
    if (!now.known) continue;
    known = true;
    if (now.level <= kRawKeysSafe * was.level) continue;
    *why =
        absl::StrCat("without centring the kernel would see what has grown: ", kTracks[kEffectSigma].name, " of layer ",
                     was.layer, " head ", was.head, " is ", Number(now.level), ", was ", Number(was.level));
    return false;
  }
  if (!known) *why = "wq_sigma is not measured: nobody knows what the raw keys would do";
  return known;
}

std::vector<Head> EffectWatch::WorthClipping(const std::vector<Head>& heads, const std::vector<int32_t>& layers) const {
  const BatchSeries& sigma = series_[kEffectSigma];
  const BatchSeries& logit = series_[kEffectLogit];
  if (!sigma.present() && !logit.present()) return heads;
  const auto stands_out = [&](const Head& head) {
    const bool by_sigma = sigma.present() && sigma.newest(At(head)) >= kClipSigmaPeers * sigma.median();
    const bool by_logit = logit.present() && logit.newest(At(head)) >= kClipLogits;
    return by_sigma || by_logit;
  };
  std::vector<Head> worth;
  for (const Head& head : heads) {
    if (stands_out(head)) worth.push_back(head);
  }
  for (const int32_t layer : layers) {
    for (int32_t i = 0; i < layout_.heads; ++i) {
      const Head head{layer, i};
      if (stands_out(head) && std::find(worth.begin(), worth.end(), head) == worth.end()) worth.push_back(head);
    }
  }
  return worth;
}

bool EffectWatch::Consistent() const {
  return loss_.Consistent() &&
         std::all_of(series_.begin(), series_.end(), [](const BatchSeries& series) { return series.Consistent(); });
}

}  // namespace bellwether::server
