// downsample.h: many points as few, without losing an extreme.
//
// Pure; any thread.

#ifndef BELLWETHER_SERVER_STORE_DOWNSAMPLE_H_
#define BELLWETHER_SERVER_STORE_DOWNSAMPLE_H_

#include <cstddef>
#include <vector>

#include "server/store/series_reader.h"
#include "server/store/series_store.h"

namespace bellwether::server {

// Both rise and do not overlap.  At most points_max buckets of about equally
// many values each, a span always whole within one: the extremes are exact and
// belong to the bucket's steps.  Points that were not measured are left out.
SeriesPoints Downsample(const std::vector<SeriesPoint>& points, const std::vector<SummarizedSpan>& spans,
                        size_t points_max);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_STORE_DOWNSAMPLE_H_
