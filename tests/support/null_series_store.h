// null_series_store.h: a series store that stores nothing and has nothing, for tests that
// override what they watch.

#ifndef BELLWETHER_TESTS_SUPPORT_NULL_SERIES_STORE_H_
#define BELLWETHER_TESTS_SUPPORT_NULL_SERIES_STORE_H_

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "server/store/series_store.h"

namespace bellwether::server {

class NullSeriesStore : public SeriesStore {
 public:
  void Open(RunId, const Layout&) override {}
  absl::Status Append(RunId, const StepSample&) override { return absl::OkStatus(); }
  absl::Status Save(RunId, RunBatch*, std::string*) override { return absl::OkStatus(); }
  absl::Status Restore(RunId, const Layout&, std::string_view) override { return absl::OkStatus(); }
  absl::Status Close(RunId, RunBatch*) override { return absl::OkStatus(); }
  absl::StatusOr<SeriesPoints> ReadSeries(RunId, const Layout&, const SeriesKey&, int64_t, int64_t, size_t,
                                          int32_t) const override {
    return SeriesPoints();
  }
  absl::StatusOr<std::vector<float>> ReadMatrix(RunId, const Layout&, SignalId, int64_t, int64_t*) const override {
    return std::vector<float>();
  }
  absl::Status ReadAll(RunId, const Layout&, const std::function<absl::Status(const StepSample&)>&) const override {
    return absl::OkStatus();
  }
  int64_t memory_bytes() const override { return 0; }
  void Drain() override {}
};

}  // namespace bellwether::server

#endif  // BELLWETHER_TESTS_SUPPORT_NULL_SERIES_STORE_H_
