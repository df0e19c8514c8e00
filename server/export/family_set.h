// family_set.h: one page of metrics under construction.
//
// Knows every name of the catalogue and of signals.proto and no other, so that
// neither an invalid name nor a second type for a name can reach the page.
// Label values are made harmless here: valid UTF-8, no control characters, at
// most kLabelBytesMax bytes; the serializer escapes the rest.  Not thread-safe.

#ifndef BELLWETHER_SERVER_EXPORT_FAMILY_SET_H_
#define BELLWETHER_SERVER_EXPORT_FAMILY_SET_H_

#include <prometheus/metric_family.h>

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "server/util/counters.h"

namespace bellwether::server {

// What a series belongs to, as label `level` of the metrics about the page.
enum class SeriesLevel : uint8_t { kServer = 0, kAlert = 1, kRun = 2, kLayer = 3, kHead = 4, kRow = 5 };
inline constexpr std::array<const char*, 6> kSeriesLevelNames = {"server", "alert", "run", "layer", "head", "row"};

inline constexpr size_t kLabelBytesMax = 128;

// `text` with every byte that is not part of valid UTF-8 replaced by '?', every
// control character by a space, cut at a character's end.
std::string CleanLabelValue(std::string_view text);

class FamilySet {
 public:
  using LabelList = std::vector<prometheus::ClientMetric::Label>;

  FamilySet();

  // One sample of a counter or gauge; any value is legal, NaN and infinities
  // too.  False, adding nothing: no such metric, or it is a histogram.
  bool Add(SeriesLevel level, std::string_view name, LabelList labels, double value);
  // As Add(); counts as one series per bucket, and two.
  bool Add(SeriesLevel level, std::string_view name, LabelList labels, const Histogram& histogram);

  int64_t series(SeriesLevel level) const { return series_[static_cast<size_t>(level)]; }
  int64_t series() const;

  // The text format 0.0.4, families by name.  The set is empty afterwards.
  std::string Serialize();

 private:
  prometheus::MetricFamily* Find(std::string_view name, bool histogram);

  std::map<std::string, prometheus::MetricFamily, std::less<>> families_;
  std::array<int64_t, kSeriesLevelNames.size()> series_{};
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_EXPORT_FAMILY_SET_H_
