#include "tools/lab/synthetic_run.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <limits>
#include <numbers>
#include <optional>
#include <string>
#include <vector>

#include "tools/lab/synthetic_noise.h"
#include "tools/lab/synthetic_places.h"

namespace bellwether::server {
namespace {

constexpr int64_t kPeriod = 10;         // Of the recorded runs; lags count in it.
constexpr float kRows = 2048;           // Query rows a sample.
constexpr double kSlowShare = 1.0 / 3;  // Of the recorded noise's variance.
constexpr double kSlow = 0.98;
constexpr double kWanderRate = 1.05;  // Radians in ln(step).
constexpr double kLogGrowth = 0.4;

enum Series : size_t { kRatio, kSpread, kTied, kLogit, kEntropy, kSigma, kLeak, kSeriesEnd };

// The table of synthetic_run.h.
struct Statistics {
  double level, head, wander;
  double noise, noise_head;        // noise_head: standard deviation of ln sigma over heads.
  double noise_level;              // Exponent of the head's level in sigma.
  double exponent, exponent_head;  // exponent_head: standard deviation over heads.
};
constexpr std::array<Statistics, kSeriesEnd> kStatistics = {{
    {0.95, 0.6, 0.38, 0.122, 0.3, -0.56, 0, 0},
    {3.8, 1.0, 0.29, 0.085, 0.30, 0, 0, 0},
    {0.027, 0.6, 0.38, 0.30, 0.38, -0.3, 0, 0},
    {25, 0.8, 0.29, 0.122, 0.38, 0, 0, 0},
    {0.46, 0.5, 0.23, 0.055, 0.73, 0, 0, 0},
    {5.0, 0.28, 0, 0.007, 0.33, 0, 0.39, 0.16},
    {4e-4, 0.5, 0, 0.2, 0.3, 0, 0, 0},
}};

class Generator {
 public:
  explicit Generator(const SyntheticOptions& options)
      : options_(options),
        heads_(static_cast<size_t>(options.layers) * static_cast<size_t>(options.heads)),
        random_(options.kind, options.seed * 1000 + static_cast<uint64_t>(options.kind)) {
    if (options.places) places_.emplace(options);
    for (size_t series = 0; series < kSeriesEnd; ++series) {
      const Statistics& s = kStatistics[series];
      const bool grows = options.kind == SyntheticKind::kLogGrowth && series != kSigma && series != kLeak;
      for (size_t head = 0; head < heads_; ++head) {
        Cell& cell = cells_[series].emplace_back();
        const double above = std::sqrt(s.head * s.head - s.wander * s.wander) * Normal();
        cell.level = std::log(s.level) + above;
        cell.wander = std::numbers::sqrt2 * s.wander * Normal();
        cell.phase = 2 * std::numbers::pi * Uniform();
        cell.noise = s.noise * std::exp(s.noise_head * Normal() + s.noise_level * above);
        cell.exponent = (grows ? kLogGrowth : s.exponent) + s.exponent_head * Normal();
        cell.slow = Normal();
        cell.wave_steps = 400 * std::pow(10.0, Uniform());
        cell.wave_begin = Uniform();
      }
    }
  }

  void Walk(RunListener* listener) {
    RunDescription run;
    run.name = std::string("synthetic ") + NameOf(options_.kind);
    run.layout = {.layers = options_.layers, .heads = options_.heads, .kv_heads = options_.heads};
    run.attention.kernel = "flash";
    run.attention.score_dtype = "bf16";
    if (places_) places_->Describe(&run);
    listener->OnHello(run);
    if (places_) listener->OnRows(places_->rows());
    int64_t restart_at = NextRestart(0);
    for (int64_t step = 0; step <= options_.steps; ++step) {
      if (step >= restart_at) {
        restart_at = NextRestart(step);
        step -= static_cast<int64_t>(500 * Uniform());
        ++run.attempt;
        listener->OnHello(run);
        if (run.attempt % 2 == 0) {
          listener->OnEvent({.attempt = run.attempt, .step = step, .kind = EventKind::kRestore});
        }
        sampled_at_ = -1;
      }
      if (options_.kind == SyntheticKind::kMissing && IsHole(step)) continue;
      sample_.Reset(run.layout);
      sample_.attempt = run.attempt;
      sample_.step = step;
      sample_.ranks = 1;
      AddScalars();
      if (places_) places_->AddEach(&sample_);
      if (step % PeriodAt(step) == 0) {
        AddHeads();
        if (places_) places_->AddSampled(&sample_);
      }
      listener->OnSample(sample_);
    }
  }

 private:
  struct Cell {
    double level, exponent, wander, phase, noise;
    double slow;  // State of the correlated noise, of variance 1.
    double wave_steps, wave_begin;
  };

  double Normal() { return random_.Normal(); }
  double Uniform() { return random_.Uniform(); }
  bool Misses(double share) { return random_.Misses(share); }

  int64_t NextRestart(int64_t step) {
    if (options_.kind != SyntheticKind::kRestarts) return options_.steps + 1;
    return step + 2000 + static_cast<int64_t>(2000 * Uniform());
  }

  // 500 steps of every 5,000: from 4,000, 9,000, ... on.
  static bool IsHole(int64_t step) { return step % 5000 >= 4000 && step % 5000 < 4500; }

  int64_t PeriodAt(int64_t step) const {
    if (options_.kind != SyntheticKind::kPeriods) return kPeriod;
    constexpr std::array<int64_t, 5> kPeriods = {10, 50, 5, 100, 20};
    return kPeriods[static_cast<size_t>(step / 2000) % kPeriods.size()];
  }

  // The norm of a weight is its own past, whatever the noise of the samples.
  SyntheticKind NoiseOf(Series series) const { return series == kSigma ? SyntheticKind::kAr90 : options_.kind; }

  void Fill(Series series, std::vector<double>* out) {
    const auto step = static_cast<double>(sample_.step);
    const int64_t gap = sampled_at_ < 0 ? kPeriod : sample_.step - sampled_at_;
    const SyntheticKind kind = NoiseOf(series);
    const double lag1 = kind == SyntheticKind::kAr90 ? 0.9 : kSlow;
    const double kept = std::pow(lag1, static_cast<double>(gap) / kPeriod);
    const double time = std::log(std::max(step, 100.0) / 5000);
    const bool waves = options_.kind == SyntheticKind::kSeasonal && series != kSigma;
    out->clear();
    for (Cell& cell : cells_[series]) {
      double x = cell.level + cell.exponent * time + cell.wander * std::sin(kWanderRate * time + cell.phase) +
                 cell.noise * random_.Of(kind, kept, kSlowShare, 3, &cell.slow);
      if (waves) {
        const double turns = step / cell.wave_steps + cell.wave_begin;
        x += std::numbers::sqrt2 * cell.noise * std::sin(2 * std::numbers::pi * turns);
      }
      out->push_back(std::exp(x));
    }
  }

  // `value` of a head's number.
  template <typename Value>
  void Put(SignalId signal, const Value& value) {
    if (Misses(0.1)) return;
    const auto matrix = sample_.Add(signal);
    for (size_t head = 0; head < heads_; ++head) {
      if (!Misses(0.05)) matrix[head] = static_cast<float>(value(head));
    }
  }

  void AddScalars() {
    const auto step = static_cast<double>(sample_.step);
    const double loss = 1.65 + 9.2 * std::exp(-step / 300), gradient = 0.55 + 9.5 * std::exp(-step / 200);
    if (!Misses(0.05)) {
      const double white = 0.08 * Normal();
      const double noise = places_ ? places_->NextLoss(sample_.step) : white;
      sample_.Add(SignalId::kLoss)[0] = static_cast<float>(loss * std::exp(noise));
    }
    const double noise = random_.StudentT(5);  // Kurtosis 9.
    if (!Misses(0.05)) sample_.Add(SignalId::kGradNorm)[0] = static_cast<float>(gradient * std::exp(0.1 * noise));
    sample_.Add(SignalId::kStepSeconds)[0] = static_cast<float>(0.3 * std::exp(0.05 * Normal()));
    sample_.Add(SignalId::kHookSeconds)[0] = 0.0015f;
  }

  void AddHeads() {
    if (Misses(0.1)) return;
    Fill(kRatio, &ratio_);
    Fill(kSpread, &values_);
    const auto spread = [&](size_t head) { return kRows * values_[head]; };
    Put(SignalId::kRows, [](size_t) { return kRows; });
    Put(SignalId::kSpreadSum, spread);
    Put(SignalId::kCommonModeSum, [&](size_t head) { return ratio_[head] * spread(head); });
    const auto put = [&](Series series, SignalId signal, double factor, double max) {
      Fill(series, &values_);
      Put(signal, [&](size_t head) { return factor * std::min(values_[head], max); });
    };
    const double any = std::numeric_limits<double>::infinity();
    Fill(kTied, &values_);
    Put(SignalId::kTiedRowsBf16, [&](size_t head) { return std::round(kRows * std::min(values_[head], 1.0)); });
    put(kLogit, SignalId::kLogitMax, 1, any);
    put(kEntropy, SignalId::kEntropySum, kRows, 1);
    put(kSigma, SignalId::kWqSigma, 1, any);
    if (options_.key_leak) {
      put(kLeak, SignalId::kKeyLeakSum, 1, 1);
      Put(SignalId::kKeyGradientSum, [](size_t) { return 1; });
    }
    sampled_at_ = sample_.step;
  }

  const SyntheticOptions options_;
  const size_t heads_;
  SyntheticNoise random_;
  std::optional<SyntheticPlaces> places_;
  std::array<std::vector<Cell>, kSeriesEnd> cells_;
  StepSample sample_;
  std::vector<double> ratio_, values_;
  int64_t sampled_at_ = -1;
};

}  // namespace

const char* NameOf(SyntheticKind kind) {
  switch (kind) {
    case SyntheticKind::kAsRecorded:
      return "as recorded";
    case SyntheticKind::kAr90:
      return "AR(0.9)";
    case SyntheticKind::kAr98:
      return "AR(0.98)";
    case SyntheticKind::kHeavyTails:
      return "heavy tails";
    case SyntheticKind::kLogGrowth:
      return "log growth";
    case SyntheticKind::kSeasonal:
      return "seasonal";
    case SyntheticKind::kRestarts:
      return "restarts";
    case SyntheticKind::kMissing:
      return "missing data";
    case SyntheticKind::kPeriods:
      return "changing periods";
  }
  return "unknown";
}

void WalkSyntheticRun(const SyntheticOptions& options, RunListener* listener) { Generator(options).Walk(listener); }

}  // namespace bellwether::server
