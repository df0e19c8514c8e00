// TopHeads.
#include <algorithm>
#include <cmath>
#include <vector>

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

// Whether `a` comes before `b` in a list of the worst.
bool IsWorse(Worst worst, double a, double b) {
  if (std::isnan(a) || std::isnan(b)) return std::isnan(a) && !std::isnan(b);
  if (worst == Worst::kSmallest) return a < b;
  return worst == Worst::kFurthest ? std::abs(a) > std::abs(b) : a > b;
}

}  // namespace

absl::StatusOr<v1::TopHeadsResponse> QueryEngine::TopOwn(const RunSnapshot& run, const v1::TopHeadsRequest& request,
                                                         size_t limit, const CallContext& context) const {
  BW_ASSIGN_OR_RETURN(const std::shared_ptr<const RunRows> rows, RowsOf(run, *stores_.database));
  BW_ASSIGN_OR_RETURN(const OwnSignal* const own, Own("signal", request.signal(), *rows));
  BW_ASSIGN_OR_RETURN(const OwnMatrix read, ReadOwn(run, *own, *rows, request.step(), context));
  v1::TopHeadsResponse response;
  response.set_signal(own->name);
  response.set_step(read.at);
  std::vector<size_t> cells;
  std::vector<double> peers;
  for (size_t i = 0; i < read.values.size(); ++i) {
    if (read.steps[i] < 0) continue;
    cells.push_back(i);
    peers.push_back(double{read.values[i]});
  }
  const PeerStatistics statistics = DescribePeers(std::move(peers));
  const Worst worst = PastOf(own->name) == PastSide::kFalls ? Worst::kSmallest : Worst::kLargest;
  std::stable_sort(cells.begin(), cells.end(),
                   [&](size_t a, size_t b) { return IsWorse(worst, read.values[a], read.values[b]); });
  for (size_t i = 0; i < std::min(limit, cells.size()); ++i) {
    const auto cell = static_cast<int32_t>(cells[i]);
    v1::TopHead* const head = response.add_heads();
    head->set_layer(static_cast<uint32_t>(cell / own->heads));
    head->set_head(static_cast<uint32_t>(cell % own->heads));
    head->set_name(OwnCellName(*own, cell / own->heads, cell % own->heads));
    head->set_value(read.values[cells[i]]);
    head->set_step(read.steps[cells[i]]);
    head->set_median(statistics.median);
    head->set_peer_score(statistics.Score(read.values[cells[i]]));
  }
  return response;
}

absl::StatusOr<v1::TopHeadsResponse> QueryEngine::TopHeads(const v1::TopHeadsRequest& request,
                                                           const CallContext& context) const {
  BW_ASSIGN_OR_RETURN(const RunSnapshotPtr run, FindRun(request.run()));
  BW_RETURN_IF_ERROR(Range("limit", request.limit(), 0, options_.heads_max));
  BW_RETURN_IF_ERROR(Range("step", request.step(), -1, INT64_MAX));
  const size_t limit = request.limit() == 0 ? 10 : request.limit();
  if (!request.signal().empty() && FindSignal(std::string_view(request.signal())) == nullptr) {
    return TopOwn(*run, request, limit, context);
  }
  const Layout& layout = run->record.description.layout;
  std::vector<SignalId> candidates(std::begin(kTopSignals), std::end(kTopSignals));
  if (!request.signal().empty()) {
    BW_ASSIGN_OR_RETURN(const SignalInfo* const named, Signal("signal", request.signal()));
    candidates.assign(1, named->id);
  }
  constexpr int64_t kCellBytes = 96;  // Its value, an older one, itself with where it is, and its peers.
  int64_t cells_max = int64_t{layout.layers} * layout.heads;
  for (const SignalId id : candidates) cells_max = std::max(cells_max, ShapeOf(*FindSignal(id), layout).size());
  BW_RETURN_IF_ERROR(context.Reserve(cells_max * kCellBytes));
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
  std::vector<int64_t> steps(values.size(), at);
  if (OfNamedRows(signal->granularity)) {
    int64_t before = at;
    const auto lacking = [&] { return std::any_of(values.begin(), values.end(), IsNotMeasured); };
    for (int turn = 1; turn < kRowTurnsMax && before > 0 && lacking(); ++turn) {
      BW_RETURN_IF_ERROR(Check(context));
      BW_ASSIGN_OR_RETURN(const std::vector<float> older,
                          stores_.series->ReadMatrix(run->record.id, layout, signal->id, before - 1, &before));
      for (size_t i = 0; i < std::min(values.size(), older.size()); ++i) {
        if (!IsNotMeasured(values[i]) || IsNotMeasured(older[i])) continue;
        values[i] = older[i];
        steps[i] = before;
      }
    }
  }
  struct Cell {
    Head where;
    double value;
    int64_t step;
  };
  std::vector<Cell> cells;
  std::vector<double> peers;
  for (size_t i = 0; i < values.size(); ++i) {
    if (IsNotMeasured(values[i])) continue;
    const auto index = static_cast<int32_t>(i);
    cells.push_back({{index / shape.heads, index % shape.heads}, double{values[i]}, steps[i]});
    peers.push_back(double{values[i]});
  }
  const PeerStatistics statistics = DescribePeers(std::move(peers));
  std::stable_sort(cells.begin(), cells.end(),
                   [worst = signal->worst](const Cell& a, const Cell& b) { return IsWorse(worst, a.value, b.value); });
  BW_ASSIGN_OR_RETURN(const std::shared_ptr<const RunRows> rows, RowsOf(*run, *stores_.database));
  for (size_t i = 0; i < std::min(limit, cells.size()); ++i) {
    v1::TopHead* const head = response.add_heads();
    head->set_name(std::string(RowName(*signal, cells[i].where.layer, *rows)));
    head->set_layer(static_cast<uint32_t>(cells[i].where.layer));
    head->set_head(static_cast<uint32_t>(cells[i].where.head));
    head->set_value(cells[i].value);
    head->set_step(cells[i].step);
    head->set_median(statistics.median);
    head->set_peer_score(statistics.Score(cells[i].value));
    head->set_stage(StageOf(*run, shape, cells[i].where.layer, cells[i].where.head));
  }
  return response;
}

}  // namespace bellwether::server
