// Goal: the catalogue is what its header says: sorted, well named, no name
// twice, none that a signal has too, no forbidden label.
// Method: goes over every entry; planted names prove that the rules see.

#include "server/export/metrics_catalog.h"

#include <gtest/gtest.h>

#include <regex>
#include <set>
#include <string>

#include "bellwether/signal_table.h"

namespace bellwether::server {
namespace {

// What is wrong with a metric; "" if nothing is.
std::string Fault(const std::string& name, MetricKind kind, const std::set<std::string>& labels) {
  if (!std::regex_match(name, std::regex("[a-z][a-z0-9_]*"))) return "name";
  if (name.ends_with("_total") != (kind == MetricKind::kCounter)) return "_total";
  if (std::regex_search(name, std::regex("_(sum|count|bucket)$"))) return "reserved suffix";
  if (std::regex_search(name, std::regex("milli|micro|percent|_ms|_kb"))) return "not a base unit";
  for (const char* forbidden : {"job", "instance", "step", "loss", "host", "hostname", "uuid", "le"}) {
    if (labels.contains(forbidden)) return "label";
  }
  return "";
}

TEST(MetricsCatalogTest, EveryEntryFollowsTheRules) {
  ASSERT_GE(MetricsCatalog().size(), 40u);
  std::string before;
  for (const CatalogMetric& metric : MetricsCatalog()) {
    const std::string name(metric.name);
    std::set<std::string> labels;
    for (const std::string_view label : metric.labels) {
      if (!label.empty()) labels.emplace(label);
    }
    EXPECT_EQ(Fault(name, metric.kind, labels), "") << name;
    EXPECT_EQ(labels.size(), metric.label_count()) << name;
    EXPECT_LT(before, name) << "not sorted, or twice";
    EXPECT_FALSE(metric.help.empty()) << name;
    EXPECT_EQ(metric.help.back(), '.') << name;
    EXPECT_EQ(FindCatalogMetric(name), &metric);
    before = name;
  }
}

TEST(MetricsCatalogTest, SignalMetricsFollowTheRulesUnderUniqueNames) {
  for (size_t i = 0; i < SignalCount(); ++i) {
    for (size_t m = 0; m < SignalTable()[i].metric_count; ++m) {
      const MetricInfo& metric = SignalTable()[i].metrics[m];
      const MetricKind kind = metric.aggregate == Aggregate::kTotal ? MetricKind::kCounter : MetricKind::kGauge;
      EXPECT_EQ(Fault(metric.name, kind, {metric.label_name}), "") << metric.name;
      EXPECT_EQ(FindCatalogMetric(metric.name), nullptr) << metric.name;
    }
  }
}

TEST(MetricsCatalogTest, NamingRulesFindPlantedFaults) {
  EXPECT_EQ(Fault("bellwether_frames", MetricKind::kCounter, {}), "_total");
  EXPECT_EQ(Fault("bellwether_frames_total", MetricKind::kGauge, {}), "_total");
  EXPECT_EQ(Fault("bellwether_frames_sum", MetricKind::kGauge, {}), "reserved suffix");
  EXPECT_EQ(Fault("bellwether_x", MetricKind::kGauge, {"job"}), "label");
  EXPECT_EQ(Fault("bellwether_x_ms", MetricKind::kGauge, {}), "not a base unit");
  EXPECT_EQ(FindCatalogMetric("bellwether_no_such_metric"), nullptr);
}

}  // namespace
}  // namespace bellwether::server
