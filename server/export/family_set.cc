#include "server/export/family_set.h"

#include <prometheus/text_serializer.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include "bellwether/signal_table.h"
#include "server/export/metrics_catalog.h"
#include "server/util/clean_text.h"

namespace bellwether::server {
namespace {

prometheus::MetricType TypeOf(MetricKind kind) {
  switch (kind) {
    case MetricKind::kCounter:
      return prometheus::MetricType::Counter;
    case MetricKind::kGauge:
      return prometheus::MetricType::Gauge;
    case MetricKind::kHistogram:
      return prometheus::MetricType::Histogram;
  }
  return prometheus::MetricType::Untyped;
}

}  // namespace

std::string CleanLabelValue(std::string_view text) { return CleanText(text, kLabelBytesMax); }

FamilySet::FamilySet() {
  const auto declare = [this](std::string_view name, std::string_view help, prometheus::MetricType type) {
    prometheus::MetricFamily& family = families_[std::string(name)];
    family.name = name;
    family.help = help;
    family.type = type;
  };
  for (const CatalogMetric& metric : MetricsCatalog()) declare(metric.name, metric.help, TypeOf(metric.kind));
  for (size_t i = 0; i < SignalCount(); ++i) {
    const SignalInfo& signal = SignalTable()[i];
    for (size_t m = 0; m < signal.metric_count; ++m) {
      const MetricInfo& metric = signal.metrics[m];
      declare(metric.name, metric.help,
              metric.aggregate == Aggregate::kTotal ? prometheus::MetricType::Counter : prometheus::MetricType::Gauge);
    }
  }
}

prometheus::MetricFamily* FamilySet::Find(std::string_view name, bool histogram) {
  const auto found = families_.find(name);
  if (found == families_.end()) return nullptr;
  return (found->second.type == prometheus::MetricType::Histogram) == histogram ? &found->second : nullptr;
}

bool FamilySet::Add(SeriesLevel level, std::string_view name, LabelList labels, double value) {
  prometheus::MetricFamily* const family = Find(name, /*histogram=*/false);
  if (family == nullptr) return false;
  prometheus::ClientMetric& metric = family->metric.emplace_back();
  for (auto& label : labels) label.value = CleanLabelValue(label.value);
  metric.label = std::move(labels);
  (family->type == prometheus::MetricType::Counter ? metric.counter.value : metric.gauge.value) = value;
  ++series_[static_cast<size_t>(level)];
  return true;
}

bool FamilySet::Add(SeriesLevel level, std::string_view name, LabelList labels, const Histogram& histogram) {
  prometheus::MetricFamily* const family = Find(name, /*histogram=*/true);
  if (family == nullptr) return false;
  prometheus::ClientMetric& metric = family->metric.emplace_back();
  for (auto& label : labels) label.value = CleanLabelValue(label.value);
  metric.label = std::move(labels);
  const std::vector<uint64_t> counts = histogram.counts();
  uint64_t cumulative = 0;
  for (size_t i = 0; i < counts.size(); ++i) {
    cumulative += counts[i];
    const bool last = i == histogram.bounds().size();
    metric.histogram.bucket.push_back(
        {cumulative, last ? std::numeric_limits<double>::infinity() : histogram.bounds()[i]});
  }
  metric.histogram.sample_count = cumulative;
  metric.histogram.sample_sum = histogram.sum();
  series_[static_cast<size_t>(level)] += static_cast<int64_t>(counts.size()) + 2;
  return true;
}

int64_t FamilySet::series() const { return std::accumulate(series_.begin(), series_.end(), int64_t{0}); }

std::string FamilySet::Serialize() {
  std::vector<prometheus::MetricFamily> filled;
  for (auto& [name, family] : families_) {
    if (family.metric.empty()) continue;
    filled.push_back({family.name, family.help, family.type, std::move(family.metric)});
    family.metric.clear();
  }
  series_.fill(0);
  const prometheus::TextSerializer serializer;
  return serializer.Serialize(filled);
}

}  // namespace bellwether::server
