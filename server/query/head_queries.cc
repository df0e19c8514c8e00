// TopHeads and CompareRuns.
#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/query/convert.h"
#include "server/query/query_engine.h"
#include "server/query/robust.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

// What TopHeads looks at if nobody says: the signals in causal order.
constexpr SignalId kTopSignals[] = {SignalId::kDriftRatio, SignalId::kTiedFractionBf16, SignalId::kKeyLeak,
                                    SignalId::kDeltaBiasT, SignalId::kWqSigma,          SignalId::kLogitMax};

uint32_t StageOf(const RunSnapshot& run, const MatrixShape& shape, int32_t layer, int32_t head) {
  const Layout& layout = run.record.description.layout;
  if (run.head_stage.size() != static_cast<size_t>(layout.layers) * static_cast<size_t>(layout.heads)) return 0;
  if (shape.heads == 0 || shape.layers != layout.layers) return 0;
  // A key head stands for its group of query heads: the worst of them.
  const int32_t group = std::max(layout.heads / shape.heads, 1);
  uint32_t stage = 0;
  for (int32_t i = head * group; i < std::min((head + 1) * group, layout.heads); ++i) {
    stage = std::max<uint32_t>(stage, run.head_stage[static_cast<size_t>(layer * layout.heads + i)]);
  }
  return stage;
}

// log2(run / baseline); nothing to say unless both are positive and finite.
std::optional<double> Log2Ratio(float value, float baseline) {
  const double a = std::abs(static_cast<double>(value)), b = std::abs(static_cast<double>(baseline));
  if (!std::isfinite(a) || !std::isfinite(b) || a == 0 || b == 0) return std::nullopt;
  return std::log2(a / b);
}

}  // namespace

absl::StatusOr<v1::TopHeadsResponse> QueryEngine::TopHeads(const v1::TopHeadsRequest& request,
                                                           const CallContext& context) const {
  BW_ASSIGN_OR_RETURN(const RunSnapshotPtr run, FindRun(request.run()));
  BW_RETURN_IF_ERROR(Range("limit", request.limit(), 0, options_.heads_max));
  BW_RETURN_IF_ERROR(Range("step", request.step(), -1, INT64_MAX));
  const size_t limit = request.limit() == 0 ? 10 : request.limit();
  const Layout& layout = run->record.description.layout;
  std::vector<SignalId> candidates(std::begin(kTopSignals), std::end(kTopSignals));
  if (!request.signal().empty()) {
    BW_ASSIGN_OR_RETURN(const SignalInfo* const named, Signal("signal", request.signal()));
    candidates.assign(1, named->id);
  }
  std::vector<float> values;
  int64_t at = -1;
  const SignalInfo* signal = nullptr;
  for (const SignalId id : candidates) {
    BW_RETURN_IF_ERROR(Check(context));
    signal = FindSignal(id);
    BW_ASSIGN_OR_RETURN(values, stores_.series->ReadMatrix(run->record.id, layout, id, request.step(), &at));
    if (at >= 0) break;
  }
  v1::TopHeadsResponse response;
  response.set_signal(signal->name);
  response.set_step(at);
  if (at < 0) return response;

  const MatrixShape shape = ShapeOf(*signal, layout);
  struct Cell {
    Head where;
    double value;
  };
  std::vector<Cell> cells;
  std::vector<double> peers;
  for (size_t i = 0; i < values.size(); ++i) {
    if (IsNotMeasured(values[i])) continue;
    const auto index = static_cast<int32_t>(i);
    cells.push_back({{index / shape.heads, index % shape.heads}, double{values[i]}});
    peers.push_back(double{values[i]});
  }
  const PeerStatistics statistics = DescribePeers(std::move(peers));
  std::stable_sort(cells.begin(), cells.end(), [](const Cell& a, const Cell& b) {
    if (std::isnan(a.value) || std::isnan(b.value)) return std::isnan(a.value) && !std::isnan(b.value);
    return a.value > b.value;
  });
  for (size_t i = 0; i < std::min(limit, cells.size()); ++i) {
    v1::TopHead* const head = response.add_heads();
    head->set_layer(static_cast<uint32_t>(cells[i].where.layer));
    head->set_head(static_cast<uint32_t>(cells[i].where.head));
    head->set_value(cells[i].value);
    head->set_median(statistics.median);
    head->set_peer_score(statistics.Score(cells[i].value));
    head->set_stage(StageOf(*run, shape, cells[i].where.layer, cells[i].where.head));
  }
  return response;
}

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

  struct Difference {
    Head where;
    double ratio = 0;          // Largest, sign kept.
    int64_t same_until = 0;    // Last compared step at which they were alike.
    int64_t differ_from = -1;  // First of the compared steps from then on.
  };
  std::vector<Difference> heads(static_cast<size_t>(shape.size()));
  const int64_t last = std::min(run->record.step, baseline->record.step);
  const int64_t grid = std::min<int64_t>(options_.compare_steps, last + 1);
  for (int64_t i = 0; i < grid; ++i) {
    BW_RETURN_IF_ERROR(Check(context));
    const int64_t step =
        grid == 1
            ? last
            : static_cast<int64_t>(static_cast<double>(last) * static_cast<double>(i) / static_cast<double>(grid - 1));
    int64_t at = -1, other_at = -1;
    BW_ASSIGN_OR_RETURN(const std::vector<float> values,
                        stores_.series->ReadMatrix(run->record.id, layout, signal->id, step, &at));
    BW_ASSIGN_OR_RETURN(const std::vector<float> others,
                        stores_.series->ReadMatrix(baseline->record.id, other, signal->id, step, &other_at));
    if (at < 0 || other_at < 0) continue;
    for (size_t n = 0; n < heads.size(); ++n) {
      const std::optional<double> ratio = Log2Ratio(values[n], others[n]);
      if (!ratio) continue;
      Difference& head = heads[n];
      if (std::abs(*ratio) > std::abs(head.ratio)) head.ratio = *ratio;
      if (std::abs(*ratio) < options_.compare_log2_min) {
        head.differ_from = -1;
        head.same_until = step;
      } else if (head.differ_from < 0) {
        head.differ_from = step;
      }
    }
  }
  for (size_t n = 0; n < heads.size(); ++n) {
    heads[n].where = {static_cast<int32_t>(n) / shape.heads, static_cast<int32_t>(n) % shape.heads};
  }
  std::stable_sort(heads.begin(), heads.end(),
                   [](const Difference& a, const Difference& b) { return std::abs(a.ratio) > std::abs(b.ratio); });
  heads.resize(std::min(heads.size(), limit));

  v1::CompareRunsResponse response;
  for (const Difference& head : heads) {
    if (head.ratio == 0) break;  // Nothing in common, or no difference at all.
    int64_t first = head.differ_from;
    if (first > head.same_until) {
      // Between two compared steps: read what lies there.
      BW_RETURN_IF_ERROR(Check(context));
      const SeriesKey key{signal->id, head.where.layer, head.where.head};
      BW_ASSIGN_OR_RETURN(const SeriesPoints mine,
                          stores_.series->ReadSeries(run->record.id, layout, key, head.same_until, first + 1,
                                                     options_.points_max, SeriesStore::kNewestAttempt));
      BW_ASSIGN_OR_RETURN(const SeriesPoints theirs,
                          stores_.series->ReadSeries(baseline->record.id, other, key, head.same_until, first + 1,
                                                     options_.points_max, SeriesStore::kNewestAttempt));
      // Backwards from the step where they differ, as long as they do.
      size_t b = theirs.step.size();
      for (size_t a = mine.step.size(); a-- > 0;) {
        while (b > 0 && theirs.step[b - 1] > mine.step[a]) --b;
        if (b == 0) break;
        if (theirs.step[b - 1] != mine.step[a]) continue;
        const std::optional<double> ratio = Log2Ratio(mine.mean[a], theirs.mean[b - 1]);
        if (ratio && std::abs(*ratio) < options_.compare_log2_min) break;
        if (ratio) first = mine.step[a];
      }
    }
    v1::HeadDifference* const to = response.add_heads();
    to->set_layer(static_cast<uint32_t>(head.where.layer));
    to->set_head(static_cast<uint32_t>(head.where.head));
    to->set_first_step(first);
    to->set_ratio(head.ratio);
  }
  return response;
}

}  // namespace bellwether::server
