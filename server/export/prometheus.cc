#include "server/export/prometheus.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/export/alert_json.h"
#include "server/export/metrics_catalog.h"
#include "server/export/process_metrics.h"
#include "server/export/run_metrics.h"
#include "server/util/log.h"

namespace bellwether::server {
namespace {

constexpr const char* kExported = "bellwether_series_exported";
constexpr const char* kSuppressed = "bellwether_series_suppressed_total";

bool IsIll(const RunSnapshot& run) { return run.record.stage > 0; }

int64_t SeriesOf(const Counters::Entry& entry) {
  return entry.histogram == nullptr ? 1 : static_cast<int64_t>(entry.histogram->bounds().size()) + 3;
}

}  // namespace

Exporter::Exporter(const ExportOptions& options, const RunTable* runs, AlertStore* alerts, Counters* counters,
                   Clock* clock)
    : options_(options),
      runs_(runs),
      alerts_(alerts),
      counters_(counters),
      clock_(clock),
      heads_(options.heads),
      rows_(options.rows) {
  // From the first scrape on, so that increase() sees the first suppression.
  for (const SeriesLevel level :
       {SeriesLevel::kAlert, SeriesLevel::kRun, SeriesLevel::kLayer, SeriesLevel::kHead, SeriesLevel::kRow})
    Suppress(level, 0);
  subscription_ = alerts_->Subscribe([this](const AlertTransition& transition) {
    const char* const to = transition.state == AlertState::kFiring ? "firing" : "resolved";
    counters_->counter("bellwether_alert_transitions_total", {{"rule", transition.rule}, {"to", to}})->Add();
  });
}

Exporter::~Exporter() { alerts_->Unsubscribe(subscription_); }

void Exporter::Suppress(SeriesLevel level, int64_t series) {
  counters_->counter(kSuppressed, {{"level", kSeriesLevelNames[static_cast<size_t>(level)]}})
      ->Add(static_cast<double>(series));
}

std::string Exporter::Render() {
  absl::MutexLock lock(&mutex_);
  const int64_t now_ns = clock_->UnixNanos();
  std::vector<RunSnapshotPtr> runs = ExportedRuns(now_ns);
  FamilySet set;
  AddProcessMetrics(&set);
  int64_t own = static_cast<int64_t>(kSeriesLevelNames.size());  // bellwether_series_exported
  for (const Counters::Entry& entry : counters_->List()) own += SeriesOf(entry);
  int64_t budget = std::max<int64_t>(options_.series_max - set.series() - own, 0);
  AddAlerts(runs, now_ns, &budget, &set);
  runs = AddCores(std::move(runs), &budget, &set);
  AddDetails(runs, budget, now_ns, &set);

  // Last, with what this scrape itself suppressed.
  AddCounters(&set);
  std::array<double, kSeriesLevelNames.size()> exported;
  for (size_t i = 0; i < exported.size(); ++i) {
    exported[i] = static_cast<double>(set.series(static_cast<SeriesLevel>(i)));
  }
  exported[static_cast<size_t>(SeriesLevel::kServer)] += static_cast<double>(exported.size());
  for (size_t i = 0; i < exported.size(); ++i) {
    set.Add(SeriesLevel::kServer, kExported, {{"level", kSeriesLevelNames[i]}}, exported[i]);
  }
  return set.Serialize();
}

std::vector<RunSnapshotPtr> Exporter::ExportedRuns(int64_t now_ns) const {
  std::vector<RunSnapshotPtr> exported = CurrentRuns(*runs_, options_.holds, now_ns);
  for (RunSnapshotPtr& run : exported) run = alerts_->WithoutMuted(std::move(run));
  std::sort(exported.begin(), exported.end(), [](const RunSnapshotPtr& a, const RunSnapshotPtr& b) {
    return std::make_tuple(-a->record.stage, a->record.id) < std::make_tuple(-b->record.stage, b->record.id);
  });
  return exported;
}

std::vector<RunSnapshotPtr> Exporter::AddCores(std::vector<RunSnapshotPtr> runs, int64_t* budget, FamilySet* set) {
  std::vector<RunSnapshotPtr> by_worth = runs;
  std::stable_sort(by_worth.begin(), by_worth.end(),
                   [](const RunSnapshotPtr& a, const RunSnapshotPtr& b) { return a->record.ended < b->record.ended; });
  const auto fit = static_cast<size_t>(*budget / kRunCoreSeries);
  if (fit < runs.size()) {
    Suppress(SeriesLevel::kRun, static_cast<int64_t>(runs.size() - fit) * kRunCoreSeries);
    std::set<RunId> out;
    for (size_t i = fit; i < by_worth.size(); ++i) out.insert(by_worth[i]->record.id);
    std::erase_if(runs, [&out](const RunSnapshotPtr& run) { return out.contains(run->record.id); });
  }
  *budget -= static_cast<int64_t>(runs.size()) * kRunCoreSeries;
  for (const RunSnapshotPtr& run : runs) AddRunCore(*run, set);
  return runs;
}

void Exporter::AddAlerts(const std::vector<RunSnapshotPtr>& runs, int64_t now_ns, int64_t* budget, FamilySet* set) {
  std::map<RunId, const RunSnapshot*> by_id;
  for (const RunSnapshotPtr& run : runs) by_id[run->record.id] = run.get();
  // Two alerts that differ only in when they began are one series.
  std::set<std::tuple<RunId, std::string, Severity, Head>> seen;
  std::vector<AlertView> alerts = alerts_->List(/*run=*/0, /*firing_only=*/true);
  std::stable_sort(alerts.begin(), alerts.end(),
                   [](const AlertView& a, const AlertView& b) { return a.last.severity > b.last.severity; });
  for (const AlertView& alert : alerts) {
    const AlertTransition& last = alert.last;
    if (!alert.notifies(now_ns)) continue;
    const auto run = by_id.find(last.run);
    if (run == by_id.end() || !seen.insert({last.run, last.rule, last.severity, last.strongest}).second) continue;
    if (*budget == 0) {
      Suppress(SeriesLevel::kAlert, 1);
      continue;
    }
    --*budget;
    FamilySet::LabelList labels = {
        {"run", run->second->record.description.name}, {"rule", last.rule}, {"severity", SeverityName(last.severity)}};
    if (last.strongest.layer >= 0) labels.push_back({"layer", absl::StrCat(last.strongest.layer)});
    if (last.strongest.head >= 0) labels.push_back({"head", absl::StrCat(last.strongest.head)});
    set->Add(SeriesLevel::kAlert, "bellwether_alert_active", std::move(labels), 1);
  }
}

void Exporter::AddCounters(FamilySet* set) {
  mutex_.AssertHeld();
  for (const Counters::Entry& entry : counters_->List()) {
    const CatalogMetric* const metric = FindCatalogMetric(entry.name);
    bool added =
        metric != nullptr && std::all_of(entry.labels.begin(), entry.labels.end(),
                                         [metric](const auto& label) { return metric->HasLabel(label.first); });
    if (added) {
      FamilySet::LabelList labels;
      for (const auto& [name, value] : entry.labels) labels.push_back({name, value});
      added = entry.histogram != nullptr
                  ? set->Add(SeriesLevel::kServer, entry.name, std::move(labels), *entry.histogram)
                  : set->Add(SeriesLevel::kServer, entry.name, std::move(labels),
                             entry.counter != nullptr ? entry.counter->value() : entry.gauge->value());
    }
    if (!added && unknown_names_.insert(entry.name).second) {
      LogError("metric {} is not exported: the catalogue has no such name, kind or labels", entry.name);
    }
  }
}

void Exporter::AddDetails(const std::vector<RunSnapshotPtr>& runs, int64_t budget, int64_t now_ns, FamilySet* set) {
  std::set<RunId> kept;
  for (const RunSnapshotPtr& run : runs) kept.insert(run->record.id);
  heads_.Keep(kept);
  rows_.Keep(kept);

  const auto admit = [&](SeriesLevel level, int64_t series) {
    if (series > budget) {
      Suppress(level, series);
      return false;
    }
    budget -= series;
    return true;
  };
  // Most important first; the runs are in order of their stage.
  for (const bool ill : {true, false}) {
    if (!ill) {
      for (const RunSnapshotPtr& run : runs) {
        if (admit(SeriesLevel::kRun, RunExtraSeriesMax(*run))) AddRunExtras(*run, set);
      }
    }
    for (const RunSnapshotPtr& run : runs) {
      if (IsIll(*run) == ill && admit(SeriesLevel::kLayer, LayerSeriesMax(*run))) AddLayers(*run, set);
    }
  }
  for (const RunSnapshotPtr& run : runs) {
    std::vector<ChosenRow> rows = rows_.Choose(*run, now_ns);
    if (rows.empty() || !admit(SeriesLevel::kRow, RowCountSeries(*run))) continue;
    const auto fit = static_cast<size_t>(std::max<int64_t>(budget, 0));
    if (fit < rows.size()) {
      Suppress(SeriesLevel::kRow, static_cast<int64_t>(rows.size() - fit));
      rows.resize(fit);
    }
    budget -= static_cast<int64_t>(rows.size());
    AddRowCounts(*run, rows, set);
    AddRows(*run, rows, set);
  }
  for (const RunSnapshotPtr& run : runs) {
    const int64_t per_head = HeadSeriesMax(*run);
    if (per_head == 0) continue;
    std::vector<Head> heads = heads_.Choose(*run, now_ns);
    const auto fit = static_cast<size_t>(std::max<int64_t>(budget, 0) / per_head);
    if (fit < heads.size()) {
      Suppress(SeriesLevel::kHead, static_cast<int64_t>(heads.size() - fit) * per_head);
      heads.resize(fit);
    }
    budget -= static_cast<int64_t>(heads.size()) * per_head;
    AddHeads(*run, heads, set);
  }
}

}  // namespace bellwether::server
