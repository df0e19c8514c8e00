// Goal: the generated table is the catalogue: every enum value, its options,
// and nothing else; lookups by id and name agree.
// Method: each entry is compared with the option it came from.

#include "bellwether/signal_table.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

#include "bellwether/v1/signals.pb.h"

namespace bellwether {
namespace {

TEST(SignalTableTest, HoldsEveryEnumValueWithItsOptions) {
  const auto* descriptor = v1::Signal_descriptor();
  ASSERT_EQ(SignalCount() + 1, static_cast<size_t>(descriptor->value_count()));
  for (int i = 1; i < descriptor->value_count(); ++i) {
    const auto& spec = descriptor->value(i)->options().GetExtension(v1::signal);
    const SignalInfo* info = FindSignal(static_cast<SignalId>(descriptor->value(i)->number()));
    ASSERT_NE(info, nullptr) << spec.name();
    EXPECT_EQ(info->name, spec.name());
    EXPECT_EQ(info->unit, spec.unit());
    EXPECT_EQ(info->help, spec.help());
    EXPECT_EQ(static_cast<int>(info->granularity), static_cast<int>(spec.granularity()));
    EXPECT_EQ(static_cast<int>(info->merge), static_cast<int>(spec.merge()));
    EXPECT_EQ(info->metric_count, static_cast<size_t>(spec.metric_size()));
    EXPECT_EQ(FindSignal(spec.name()), info);
  }
}

TEST(SignalTableTest, DerivedSignalsNameMeasuredParts) {
  for (size_t i = 0; i < SignalCount(); ++i) {
    const SignalInfo& info = SignalTable()[i];
    const int id = static_cast<int>(info.id);
    EXPECT_EQ(info.derived, id >= 64 && id < 128) << info.name;
    if (!info.derived) continue;
    ASSERT_NE(FindSignal(info.numerator), nullptr) << info.name;
    ASSERT_NE(FindSignal(info.denominator), nullptr) << info.name;
    EXPECT_FALSE(FindSignal(info.numerator)->derived);
    EXPECT_FALSE(FindSignal(info.denominator)->derived);
  }
}

TEST(SignalTableTest, MetricNamesKeepPrometheusRules) {
  std::set<std::string> series;
  for (size_t i = 0; i < SignalCount(); ++i) {
    const SignalInfo& info = SignalTable()[i];
    for (size_t m = 0; m < info.metric_count; ++m) {
      const MetricInfo& metric = info.metrics[m];
      const std::string name = metric.name;
      EXPECT_EQ(name.rfind("bellwether_", 0), 0u) << name;
      EXPECT_EQ(name.ends_with("_total"), metric.aggregate == Aggregate::kTotal) << name;
      for (const char* bad : {"_sum", "_count", "_bucket"}) EXPECT_FALSE(name.ends_with(bad)) << name;
      EXPECT_TRUE(series.insert(name + "{" + metric.label_name + "=" + metric.label_value + "}").second) << name;
    }
  }
  EXPECT_GT(series.size(), 30u);
}

TEST(SignalTableTest, UnknownSignalsAreNull) {
  EXPECT_EQ(FindSignal(static_cast<SignalId>(39)), nullptr);
  EXPECT_EQ(FindSignal("no_such_signal"), nullptr);
}

}  // namespace
}  // namespace bellwether
