#include "server/export/run_metrics.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/util/clean_text.h"

namespace bellwether::server {
namespace {

constexpr double kSecondsPerNano = 1e-9;
// Attempt, ended, ranks expected and reporting, frames dropped and stripped, what is judged.
constexpr int64_t kRunExtraFixed = 7;
constexpr int64_t kEtaSeries = 3;

bool Has(const StepSample* sample, const SignalInfo& signal) {
  if (sample == nullptr) return false;
  return signal.derived ? sample->has(signal.numerator) && sample->has(signal.denominator) : sample->has(signal.id);
}

// The sample that a metric of `level` reads.  Signals of the run that are told with samples of the heads alone are
// read from those: nearly every scrape falls between two of them.
const StepSample* SampleOf(const RunSnapshot& run, MetricLevel level, const SignalInfo& signal) {
  return level == MetricLevel::kRun && Has(run.newest.get(), signal) ? run.newest.get() : run.heads.get();
}

// Calls with every metric of `level` whose signal the sample, or for totals the
// snapshot, has.
template <typename F>
void ForEachMetric(const RunSnapshot& run, MetricLevel level, F&& call) {
  for (size_t i = 0; i < SignalCount(); ++i) {
    const SignalInfo& signal = SignalTable()[i];
    for (size_t m = 0; m < signal.metric_count; ++m) {
      const MetricInfo& metric = signal.metrics[m];
      if (metric.level != level) continue;
      const bool present = metric.aggregate == Aggregate::kTotal ? run.totals.contains(signal.id)
                                                                 : Has(SampleOf(run, level, signal), signal);
      if (present) call(signal, metric);
    }
  }
}

FamilySet::LabelList RunLabel(const RunSnapshot& run) { return {{"run", run.record.description.name}}; }

double ShareOf(const JudgedBy& judged, RuleFamily family) {
  return static_cast<double>(judged.judged[static_cast<size_t>(family)]) / std::max(judged.of(family), 1);
}

// Of the family that has least.
double LeastShare(const JudgedBy& judged) {
  double least = 1;
  for (size_t i = 0; i < kRuleFamilies; ++i) least = std::min(least, ShareOf(judged, static_cast<RuleFamily>(i)));
  return least;
}

void AddConstantLabel(const MetricInfo& metric, FamilySet::LabelList* labels) {
  if (metric.label_name[0] != '\0') labels->push_back({metric.label_name, metric.label_value});
}

int64_t MeasuredRows(const RunSnapshot& run, size_t signal) {
  const auto values = run.row_values->of(signal);
  return std::count_if(values.begin(), values.end(), [](float value) { return !IsNotMeasured(value); });
}

// A family of its own; nullptr: its rows are in one with those of other signals.
const MetricInfo* RowMetricOf(const SignalInfo& signal) {
  const std::span<const MetricInfo> metrics(signal.metrics, signal.metric_count);
  const auto found = std::ranges::find(metrics, MetricLevel::kRow, &MetricInfo::level);
  return found == metrics.end() ? nullptr : &*found;
}

// What a signal of ranks has beside its largest rows: a rank stands out from the median of all.
struct RankMetrics {
  SignalId signal;
  const char *max, *median;
};
constexpr RankMetrics kRankMetrics[] = {
    {SignalId::kRankGradNorm, "bellwether_run_rank_grad_norm_max", "bellwether_run_rank_grad_norm_median"}};

const RankMetrics* RankMetricsOf(size_t signal) {
  const auto* const found = std::ranges::find(kRankMetrics, kRowSignals[signal], &RankMetrics::signal);
  return found == std::end(kRankMetrics) ? nullptr : found;
}

const char* RowLabelName(Granularity granularity) {
  switch (granularity) {
    case Granularity::kTensor:
      return "tensor";
    case Granularity::kRank:
      return "rank";
    default:
      return "module";
  }
}

// Where a row is stands at its beginning, which law it is at its end.
std::string RowLabel(std::string_view name) {
  constexpr size_t kBegin = 48, kEnd = 72;
  const std::string whole = CleanText(name, name.size());
  if (whole.size() <= kLabelBytesMax) return whole;
  return CleanLabelValue(absl::StrCat(whole.substr(0, kBegin), "...", whole.substr(whole.size() - kEnd)));
}

}  // namespace

void AddRunCore(const RunSnapshot& run, FamilySet* set) {
  const RunRecord& record = run.record;
  const RunDescription& description = record.description;
  FamilySet::LabelList info = RunLabel(run);
  info.push_back({"framework", description.framework});
  info.push_back({"model", description.model});
  info.push_back({"attention", description.attention.kernel});
  info.push_back({"score_dtype", description.attention.score_dtype});
  info.push_back({"layers", absl::StrCat(description.layout.layers)});
  info.push_back({"heads", absl::StrCat(description.layout.heads)});
  info.push_back({"world", absl::StrCat(description.world)});
  set->Add(SeriesLevel::kRun, "bellwether_run_info", std::move(info), 1);
  set->Add(SeriesLevel::kRun, "bellwether_run_step", RunLabel(run), static_cast<double>(record.step));
  set->Add(SeriesLevel::kRun, "bellwether_run_stage", RunLabel(run), record.stage);
  set->Add(SeriesLevel::kRun, "bellwether_run_last_report_timestamp_seconds", RunLabel(run),
           static_cast<double>(record.last_report_unix_ns) * kSecondsPerNano);
}

int64_t RunExtraSeriesMax(const RunSnapshot& run) {
  const int64_t families = JudgedByOf(run.record).whole() ? 0 : int64_t{kRuleFamilies};
  int64_t series = kRunExtraFixed + families + (run.eta.known ? kEtaSeries : 0);
  ForEachMetric(run, MetricLevel::kRun, [&series](const SignalInfo&, const MetricInfo&) { ++series; });
  return series;
}

void AddRunExtras(const RunSnapshot& run, FamilySet* set) {
  const RunRecord& record = run.record;
  const auto add = [&](std::string_view name, double value) {
    set->Add(SeriesLevel::kRun, name, RunLabel(run), value);
  };
  add("bellwether_run_attempt", record.description.attempt);
  add("bellwether_run_ended", record.ended ? 1 : 0);
  add("bellwether_run_ranks_expected", record.description.reporters);
  add("bellwether_run_ranks_reporting", run.ranks_reporting);
  FamilySet::LabelList dropped = RunLabel(run);
  dropped.push_back({"reason", "client"});
  set->Add(SeriesLevel::kRun, "bellwether_run_frames_dropped_total", std::move(dropped),
           static_cast<double>(record.frames_dropped));
  add("bellwether_run_frames_stripped_total", static_cast<double>(record.frames_stripped));
  const JudgedBy judged = JudgedByOf(record);
  const auto add_judged = [&](std::string_view family, double share) {
    FamilySet::LabelList labels = RunLabel(run);
    labels.push_back({"family", std::string(family)});
    set->Add(SeriesLevel::kRun, "bellwether_run_judged_ratio", std::move(labels), share);
  };
  add_judged("all", LeastShare(judged));
  for (size_t i = 0; !judged.whole() && i < kRuleFamilies; ++i) {
    const auto family = static_cast<RuleFamily>(i);
    add_judged(FamilyName(family), ShareOf(judged, family));
  }
  if (run.eta.known) {
    add("bellwether_run_eta_steps", run.eta.steps);
    add("bellwether_run_eta_lower_steps", run.eta.lower_steps);
    add("bellwether_run_eta_upper_steps", run.eta.upper_steps);
  }
  std::vector<float> values;
  ForEachMetric(run, MetricLevel::kRun, [&](const SignalInfo& signal, const MetricInfo& metric) {
    double value;
    if (metric.aggregate == Aggregate::kTotal) {
      const std::vector<double>& total = run.totals.at(signal.id);
      if (total.empty()) return;
      value = total[0];
    } else {
      const StepSample& sample = *SampleOf(run, MetricLevel::kRun, signal);
      if (!DeriveMatrix(sample, signal, &values) || IsNotMeasured(values[0])) return;
      value = values[0];
    }
    FamilySet::LabelList labels = RunLabel(run);
    AddConstantLabel(metric, &labels);
    set->Add(SeriesLevel::kRun, metric.name, std::move(labels), value);
  });
}

int64_t LayerSeriesMax(const RunSnapshot& run) {
  int64_t series = 0;
  ForEachMetric(run, MetricLevel::kLayer, [&](const SignalInfo& signal, const MetricInfo& metric) {
    series += metric.aggregate == Aggregate::kTotal ? static_cast<int64_t>(run.totals.at(signal.id).size())
                                                    : run.heads->layout().layers;
  });
  return series;
}

void AddLayers(const RunSnapshot& run, FamilySet* set) {
  std::vector<float> values;
  SignalId derived = SignalId::kNone;  // What `values` holds.
  ForEachMetric(run, MetricLevel::kLayer, [&](const SignalInfo& signal, const MetricInfo& metric) {
    const auto add = [&](int32_t layer, double value) {
      FamilySet::LabelList labels = RunLabel(run);
      labels.push_back({"layer", absl::StrCat(layer)});
      AddConstantLabel(metric, &labels);
      set->Add(SeriesLevel::kLayer, metric.name, std::move(labels), value);
    };
    if (metric.aggregate == Aggregate::kTotal) {
      const std::vector<double>& totals = run.totals.at(signal.id);
      for (size_t layer = 0; layer < totals.size(); ++layer) add(static_cast<int32_t>(layer), totals[layer]);
      return;
    }
    if (derived != signal.id && !DeriveMatrix(*run.heads, signal, &values)) return;
    derived = signal.id;
    const MatrixShape shape = ShapeOf(signal, run.heads->layout());
    for (int32_t layer = 0; layer < shape.layers; ++layer) {
      const float value = AggregateRow(metric.aggregate, std::span<const float>(values).subspan(
                                                             static_cast<size_t>(layer) * shape.heads, shape.heads));
      if (!IsNotMeasured(value)) add(layer, value);
    }
  });
}

int64_t HeadSeriesMax(const RunSnapshot& run) {
  int64_t series = 0;
  ForEachMetric(run, MetricLevel::kHead, [&series](const SignalInfo&, const MetricInfo&) { ++series; });
  return series;
}

void AddHeads(const RunSnapshot& run, std::span<const Head> heads, FamilySet* set) {
  if (heads.empty()) return;
  std::vector<float> values;
  ForEachMetric(run, MetricLevel::kHead, [&](const SignalInfo& signal, const MetricInfo& metric) {
    if (!DeriveMatrix(*run.heads, signal, &values)) return;
    const MatrixShape shape = ShapeOf(signal, run.heads->layout());
    const int32_t query_heads = run.heads->layout().heads;
    for (const Head& head : heads) {
      const float value = values[static_cast<size_t>(head.layer) * shape.heads + head.head * shape.heads / query_heads];
      if (IsNotMeasured(value)) continue;
      FamilySet::LabelList labels = RunLabel(run);
      labels.push_back({"layer", absl::StrCat(head.layer)});
      labels.push_back({"head", absl::StrCat(head.head)});
      AddConstantLabel(metric, &labels);
      set->Add(SeriesLevel::kHead, metric.name, std::move(labels), value);
    }
  });
}

int64_t RowCountSeries(const RunSnapshot& run) {
  int64_t series = 0;
  bool own = false;
  for (size_t i = 0; run.row_values != nullptr && i < kRowSignals.size(); ++i) {
    if (MeasuredRows(run, i) == 0) continue;
    series += RankMetricsOf(i) == nullptr ? 1 : 3;
    own |= IsOwnMatrix(i);
  }
  return series + (own ? 1 : 0);
}

void AddRowCounts(const RunSnapshot& run, std::span<const ChosenRow> rows, FamilySet* set) {
  int64_t own = 0;
  for (size_t i = 0; run.row_values != nullptr && i < kRowSignals.size(); ++i) {
    const int64_t measured = MeasuredRows(run, i);
    if (measured == 0) continue;
    if (IsOwnMatrix(i)) own += measured;
    FamilySet::LabelList labels = RunLabel(run);
    labels.push_back({"signal", FindSignal(kRowSignals[i])->name});
    set->Add(SeriesLevel::kRow, "bellwether_run_rows", std::move(labels), static_cast<double>(measured));
    if (const RankMetrics* const ranks = RankMetricsOf(i); ranks != nullptr) {
      const auto values = run.row_values->of(i);
      set->Add(SeriesLevel::kRow, ranks->max, RunLabel(run), AggregateRow(Aggregate::kMax, values));
      set->Add(SeriesLevel::kRow, ranks->median, RunLabel(run), AggregateRow(Aggregate::kMedian, values));
    }
  }
  if (own == 0) return;
  const auto shown =
      std::count_if(rows.begin(), rows.end(), [](const ChosenRow& row) { return IsOwnMatrix(row.signal); });
  set->Add(SeriesLevel::kRow, "bellwether_run_own_left_out", RunLabel(run), static_cast<double>(own - shown));
}

void AddRows(const RunSnapshot& run, std::span<const ChosenRow> rows, FamilySet* set) {
  if (run.rows == nullptr) return;
  std::set<std::pair<size_t, std::string>> seen;  // No series twice, whatever names have in common.
  for (const ChosenRow& chosen : rows) {
    const SignalInfo& signal = *FindSignal(kRowSignals[chosen.signal]);
    std::string name = signal.granularity == Granularity::kRank ? absl::StrCat(chosen.row)
                                                                : RowLabel(RowName(signal, chosen.row, *run.rows));
    if (name.empty() || !seen.emplace(chosen.signal, name).second) continue;
    FamilySet::LabelList labels = RunLabel(run);
    const float value = run.row_values->of(chosen.signal)[static_cast<size_t>(chosen.row)];
    if (const MetricInfo* const metric = RowMetricOf(signal); metric != nullptr) {
      labels.push_back({RowLabelName(signal.granularity), std::move(name)});
      set->Add(SeriesLevel::kRow, metric->name, std::move(labels), value);
      continue;
    }
    const bool own = IsOwnMatrix(chosen.signal);
    const auto cell = static_cast<size_t>(chosen.row);
    if (own && cell >= run.rows->own_cells.size()) continue;
    labels.push_back({"signal", own ? run.rows->own_signals[static_cast<size_t>(run.rows->own_cells[cell].signal)].name
                                    : std::string(signal.name)});
    labels.push_back({"row", std::move(name)});
    set->Add(SeriesLevel::kRow, own ? "bellwether_own_value" : "bellwether_row_value", std::move(labels), value);
  }
}

float AggregateRow(Aggregate aggregate, std::span<const float> row) {
  std::vector<float> measured;
  measured.reserve(row.size());
  bool has_nan = false;
  for (const float value : row) {
    if (IsNotMeasured(value)) continue;
    if (std::isnan(value)) {
      has_nan = true;
    } else {
      measured.push_back(value);
    }
  }
  const float nan = std::numeric_limits<float>::quiet_NaN();
  if (measured.empty()) return has_nan ? nan : NotMeasured();
  if (aggregate == Aggregate::kMedian) {
    const size_t middle = measured.size() / 2;
    std::nth_element(measured.begin(), measured.begin() + static_cast<std::ptrdiff_t>(middle), measured.end());
    const float upper = measured[middle];
    if (measured.size() % 2 == 1) return upper;
    return 0.5f * (upper + *std::max_element(measured.begin(), measured.begin() + static_cast<std::ptrdiff_t>(middle)));
  }
  if (has_nan) return nan;
  switch (aggregate) {
    case Aggregate::kMin:
      return *std::min_element(measured.begin(), measured.end());
    case Aggregate::kSignedExtreme:
      return *std::max_element(measured.begin(), measured.end(),
                               [](float a, float b) { return std::abs(a) < std::abs(b); });
    case Aggregate::kSum:
      return std::accumulate(measured.begin(), measured.end(), 0.0f);
    case Aggregate::kMax:
    case Aggregate::kLast:
    case Aggregate::kTotal:
    case Aggregate::kMedian:
      break;
  }
  return *std::max_element(measured.begin(), measured.end());
}

}  // namespace bellwether::server
