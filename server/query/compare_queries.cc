// CompareRuns.
#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/query/compare_runs.h"
#include "server/query/convert.h"
#include "server/query/query_engine.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

// Where in [points of both] the difference begins, `until` if no earlier than
// that: backwards, as long as the two do not agree for some samples in a row.
int64_t FirstBeyond(const RunComparison& comparison, int index, const SeriesPoints& run, const SeriesPoints& baseline,
                    int64_t until) {
  int64_t first = until;
  int within = 0;
  size_t b = baseline.step.size();
  for (size_t a = run.step.size(); a-- > 0 && within < RunComparison::kWithinMax;) {
    while (b > 0 && baseline.step[b - 1] > run.step[a]) --b;
    if (b == 0) break;
    if (baseline.step[b - 1] != run.step[a]) continue;
    switch (comparison.Compare(index, run.mean[a], baseline.mean[b - 1])) {
      case RunComparison::Pair::kBeyond:
        first = run.step[a];
        within = 0;
        break;
      case RunComparison::Pair::kWithin:
        ++within;
        break;
      case RunComparison::Pair::kNotCompared:
        break;
    }
  }
  return first;
}

}  // namespace

absl::StatusOr<v1::CompareRunsResponse> QueryEngine::CompareRuns(const v1::CompareRunsRequest& request,
                                                                 const CallContext& context) const {
  BW_ASSIGN_OR_RETURN(const RunSnapshotPtr run, FindRun(request.run()));
  BW_ASSIGN_OR_RETURN(const RunSnapshotPtr baseline, FindRun(request.baseline()));
  BW_ASSIGN_OR_RETURN(const SignalInfo* const signal, Signal("signal", request.signal()));
  BW_RETURN_IF_ERROR(Range("limit", request.limit(), 0, options_.heads_max));
  const Layout& layout = run->record.description.layout;
  const Layout& other = baseline->record.description.layout;
  const MatrixShape shape = ShapeOf(*signal, layout);
  const MatrixShape other_shape = ShapeOf(*signal, other);
  if (shape.layers != other_shape.layers || shape.heads != other_shape.heads) {
    return absl::InvalidArgumentError(absl::StrCat("baseline \"", request.baseline(), "\": its ", other_shape.layers,
                                                   " x ", other_shape.heads, " heads are not the run's ", shape.layers,
                                                   " x ", shape.heads));
  }
  const size_t limit = request.limit() == 0 ? 20 : request.limit();
  const int64_t last = std::min(run->record.step, baseline->record.step);
  const int64_t grid = std::min<int64_t>({options_.compare_steps, int64_t{RunComparison::kStepsMax}, last + 1});

  RunComparison comparison(static_cast<size_t>(shape.size()), options_.compare_log2_min);
  int64_t newest = -1;
  for (int64_t i = 0; i < grid; ++i) {
    BW_RETURN_IF_ERROR(Check(context));
    const int64_t step = grid == 1 ? last : last / (grid - 1) * i + last % (grid - 1) * i / (grid - 1);
    int64_t at = -1, other_at = -1;
    BW_ASSIGN_OR_RETURN(const std::vector<float> values,
                        stores_.series->ReadMatrix(run->record.id, layout, signal->id, step, &at));
    BW_ASSIGN_OR_RETURN(const std::vector<float> others,
                        stores_.series->ReadMatrix(baseline->record.id, other, signal->id, step, &other_at));
    // Sampled more rarely than it is compared here.
    if (at < 0 || other_at < 0 || std::max(at, other_at) <= newest) continue;
    newest = std::max(at, other_at);
    comparison.Add(newest, values, others);
  }

  struct Found {
    Head where;
    RunComparison::Difference is;
  };
  std::vector<Found> heads;
  v1::CompareRunsResponse response;
  response.set_step_end(std::max<int64_t>(last, 0));
  for (int32_t n = 0; n < static_cast<int32_t>(shape.size()); ++n) {
    const RunComparison::Difference difference = comparison.Of(static_cast<size_t>(n));
    if (difference.ratio == 0 && difference.first < 0) continue;  // Nothing in common, or no difference at all.
    if (difference.first >= 0) response.set_heads_differing(response.heads_differing() + 1);
    heads.push_back({{n / shape.heads, n % shape.heads}, difference});
  }
  std::stable_sort(heads.begin(), heads.end(), [](const Found& a, const Found& b) {
    const bool a_differs = a.is.first >= 0, b_differs = b.is.first >= 0;
    return a_differs != b_differs ? a_differs : std::abs(a.is.ratio) > std::abs(b.is.ratio);
  });
  heads.resize(std::min(heads.size(), limit));
  for (const Found& head : heads) {
    const int index = head.is.first >= 0 ? head.is.first : static_cast<int>(comparison.steps()) - 1;
    int64_t first = head.is.first >= 0 ? comparison.step(index) : -1;
    if (head.is.first >= 0 && head.is.before >= 0) {
      // Between two compared steps: read what lies there.
      BW_RETURN_IF_ERROR(Check(context));
      const SeriesKey key{signal->id, head.where.layer, head.where.head};
      const int64_t begin = comparison.step(head.is.before);
      BW_ASSIGN_OR_RETURN(const SeriesPoints mine,
                          stores_.series->ReadSeries(run->record.id, layout, key, begin, first + 1, options_.points_max,
                                                     SeriesStore::kNewestAttempt));
      BW_ASSIGN_OR_RETURN(const SeriesPoints theirs,
                          stores_.series->ReadSeries(baseline->record.id, other, key, begin, first + 1,
                                                     options_.points_max, SeriesStore::kNewestAttempt));
      first = FirstBeyond(comparison, index, mine, theirs, first);
    }
    v1::HeadDifference* const to = response.add_heads();
    to->set_layer(static_cast<uint32_t>(head.where.layer));
    to->set_head(static_cast<uint32_t>(head.where.head));
    to->set_first_step(first);
    to->set_ratio(head.is.ratio);
    to->set_band(comparison.band(index));
  }
  return response;
}

}  // namespace bellwether::server
