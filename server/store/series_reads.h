// series_reads.h: what people ask of stored series, answered by a SeriesReader.
//
// Private to server/store; series_store.h says what each answer holds.  Pure
// but for the reader; a reader serves one thread.

#ifndef BELLWETHER_SERVER_STORE_SERIES_READS_H_
#define BELLWETHER_SERVER_STORE_SERIES_READS_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/store/series_reader.h"
#include "server/store/series_store.h"

namespace bellwether::server {

// A signal and one of its cells.
struct CellKey {
  uint16_t signal = 0;
  size_t cell = 0;
};
// What a series is read from: its own cell and, if it is derived, those of
// numerator and denominator.  REQUIRES: the signal has this head.
std::vector<CellKey> CellsOf(const SignalInfo& info, const Layout& layout, const SeriesKey& key);

absl::StatusOr<SeriesPoints> ReadSeriesFrom(const SeriesReader& reader, const Layout& layout, const SeriesKey& key,
                                            const SeriesRange& range, size_t points_max);
absl::StatusOr<std::vector<float>> ReadMatrixFrom(const SeriesReader& reader, const Layout& layout,
                                                  const SignalInfo& info, int64_t step, int64_t* at);
absl::Status ReadAllFrom(const SeriesReader& reader, const Layout& layout,
                         const std::function<absl::Status(const StepSample&)>& visit);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_STORE_SERIES_READS_H_
