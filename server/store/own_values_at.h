// own_values_at.h: the newest values of an own signal's cells within some steps.
//
// A job tells its own signals at steps of their own, so each cell is read by itself: kOwnCellsRead of them at most,
// evenly spread where there are more.
//
// Any thread.

#ifndef BELLWETHER_SERVER_STORE_OWN_VALUES_AT_H_
#define BELLWETHER_SERVER_STORE_OWN_VALUES_AT_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "server/model/row_names.h"
#include "server/store/series_store.h"

namespace bellwether::server {

inline constexpr size_t kOwnCellsRead = 16;

// Of each read cell its last value in [begin, end), if it has any there.  Where a cell was told rarely over very many
// steps that may be the mean of its last ones.  REQUIRES: `signal` is an index of rows.own_signals.
absl::StatusOr<std::vector<float>> OwnValuesAt(const SeriesStore& series, RunId run, const Layout& layout,
                                               const RunRows& rows, size_t signal, int64_t begin, int64_t end);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_STORE_OWN_VALUES_AT_H_
