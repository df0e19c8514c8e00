// metrics_catalog.h: every exported metric that is not a signal's.
//
// Together with the metric options of signals.proto this is the only list of
// metric names.  The exporter registers nothing else, and dashboards and rules
// may name nothing else (a test compares).  A counter that a part of the server
// asks for by another name is not exported.
//
// Names have base units, and _total on counters only.  No gauge ends in _sum,
// _count or _bucket.  sum() or max() over the labels means something.  A label
// is never job or instance, which are the scrape's, nor step, loss, host or
// uuid, whose values are unbounded.

#ifndef BELLWETHER_SERVER_EXPORT_METRICS_CATALOG_H_
#define BELLWETHER_SERVER_EXPORT_METRICS_CATALOG_H_

#include <array>
#include <span>
#include <string_view>

namespace bellwether::server {

enum class MetricKind { kCounter, kGauge, kHistogram };

struct CatalogMetric {
  static constexpr size_t kLabelsMax = 8;

  std::string_view name;
  MetricKind kind;
  std::string_view help;  // One sentence, ASCII.
  // In the order of the text format; unused ones are empty.
  std::array<std::string_view, kLabelsMax> labels{};

  bool HasLabel(std::string_view label) const;
  size_t label_count() const;
};

// By name.
std::span<const CatalogMetric> MetricsCatalog();
// nullptr if there is no such metric.
const CatalogMetric* FindCatalogMetric(std::string_view name);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_EXPORT_METRICS_CATALOG_H_
