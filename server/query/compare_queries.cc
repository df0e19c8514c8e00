// CompareRuns.
#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/query/compare_runs.h"
#include "server/query/compared_run.h"
#include "server/query/convert.h"
#include "server/query/query_engine.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

// Where in [points of both] the difference begins, `until` if no earlier than
// that: backwards, as long as the two do not agree for some samples in a row.
int64_t FirstBeyond(const RunComparison& comparison, int index, const ComparedRun::Values& run,
                    const ComparedRun::Values& baseline, int64_t until) {
  int64_t first = until;
  int within = 0;
  size_t b = baseline.step.size();
  for (size_t a = run.step.size(); a-- > 0 && within < RunComparison::kWithinMax;) {
    while (b > 0 && baseline.step[b - 1] > run.step[a]) --b;
    if (b == 0) break;
    if (baseline.step[b - 1] != run.step[a]) continue;
    switch (comparison.Compare(index, run.value[a], baseline.value[b - 1])) {
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

// Those of both, in the order of `run`, with their rows there.
struct CommonRows {
  std::vector<std::string> names;
  std::vector<int32_t> rows;
};
absl::StatusOr<CommonRows> CommonRowsOf(ComparedRun* run, ComparedRun* baseline, const ComparedRun::Signal& signal) {
  BW_ASSIGN_OR_RETURN(const std::vector<std::string> mine, run->NamesOf(signal));
  BW_ASSIGN_OR_RETURN(std::vector<std::string> theirs, baseline->NamesOf(signal));
  std::sort(theirs.begin(), theirs.end());
  CommonRows common;
  for (size_t row = 0; row < mine.size(); ++row) {
    if (!std::binary_search(theirs.begin(), theirs.end(), mine[row])) continue;
    common.names.push_back(mine[row]);
    common.rows.push_back(static_cast<int32_t>(row));
  }
  if (!common.names.empty()) return common;
  return absl::InvalidArgumentError(absl::StrCat("signal \"", signal.name, "\": runs \"", run->asked(), "\" (",
                                                 mine.size(), " names) and \"", baseline->asked(), "\" (",
                                                 theirs.size(), ") have no tensor or module of the same name"));
}

// Samples that bring no row a value, behind which no more are asked: some rows never have one.
constexpr int kIdleMax = 8;

// As ReadMatrix().  Rows may take turns: what the sample lacks is as it was last measured after step `after`.
// `check` says whether to go on.
absl::StatusOr<std::vector<float>> ReadTurn(ComparedRun* run, const ComparedRun::Signal& signal, int64_t step,
                                            int64_t after, const std::function<absl::Status()>& check, int64_t* at) {
  BW_ASSIGN_OR_RETURN(std::vector<float> values, run->ReadMatrix(signal, step, at));
  if (signal.rows.empty()) return values;
  int64_t before = *at;
  const auto lacking = [&] { return std::any_of(values.begin(), values.end(), IsNotMeasured); };
  for (int turn = 1, idle = 0; turn < kRowTurnsMax && idle < kIdleMax && lacking(); ++turn) {
    if (before - 1 <= after) break;
    BW_RETURN_IF_ERROR(check());
    BW_ASSIGN_OR_RETURN(const std::vector<float> older, run->ReadMatrix(signal, before - 1, &before));
    if (before <= after) break;
    ++idle;
    for (size_t i = 0; i < std::min(values.size(), older.size()); ++i) {
      if (!IsNotMeasured(values[i]) || IsNotMeasured(older[i])) continue;
      values[i] = older[i];
      idle = 0;
    }
  }
  return values;
}

// Whether both runs count what it is of alike: heads, layers, experts; rows have names.
bool IsCompared(Granularity granularity) {
  return granularity == Granularity::kRun || OfHeads(granularity) || granularity == Granularity::kLayer ||
         granularity == Granularity::kExpert || IsNamedByRanks(granularity);
}

// One of this server's own.
class StoredRun final : public ComparedRun {
 public:
  // The own signal's cells, as ReadMatrix() has those of the catalogue.
  using ReadOwn = std::function<absl::StatusOr<std::vector<float>>(const OwnSignal&, int64_t step, int64_t* at)>;
  StoredRun(const SeriesStore* series, const RunRecord& run, std::shared_ptr<const RunRows> rows, ReadOwn read_own,
            std::string asked)
      : ComparedRun(std::move(asked), run.description.layout, run.step),
        series_(series),
        id_(run.id),
        rows_(std::move(rows)),
        read_own_(std::move(read_own)) {}

  MatrixShape OwnShape(const std::string& name) const override {
    const OwnSignal* const own = rows_->FindOwn(name);
    return own == nullptr ? MatrixShape() : MatrixShape{own->layers, own->heads};
  }
  absl::StatusOr<std::vector<std::string>> NamesOf(const Signal& signal) override {
    return rows_->of(signal.info->granularity).names();
  }
  absl::StatusOr<std::vector<float>> ReadMatrix(const Signal& signal, int64_t step, int64_t* at) override {
    if (signal.info == nullptr) return read_own_(*rows_->FindOwn(signal.name), step, at);
    BW_ASSIGN_OR_RETURN(std::vector<float> all, series_->ReadMatrix(id_, layout(), signal.info->id, step, at));
    if (signal.rows.empty() || *at < 0) return all;
    std::vector<float> values;
    for (const std::string& name : signal.rows) {
      const auto row = static_cast<size_t>(rows_->of(signal.info->granularity).Find(name));
      values.push_back(row < all.size() ? all[row] : NotMeasured());
    }
    return values;
  }
  absl::StatusOr<std::vector<Values>> ReadSeries(const Signal& signal, const std::vector<Head>& heads, int64_t begin,
                                                 int64_t end, size_t points_max) override {
    std::vector<Values> read;
    for (const Head& head : heads) {
      const SeriesKey key = KeyOf(signal, head);
      BW_ASSIGN_OR_RETURN(SeriesPoints points,
                          series_->ReadSeries(id_, layout(), key, begin, end, points_max, SeriesStore::kNewestAttempt));
      read.push_back({std::move(points.step), std::move(points.mean)});
    }
    return read;
  }

 private:
  SeriesKey KeyOf(const Signal& signal, const Head& head) const {
    if (!signal.rows.empty()) {
      const std::string& name = signal.rows[static_cast<size_t>(head.layer)];
      return {signal.info->id, rows_->of(signal.info->granularity).Find(name), 0};
    }
    if (signal.info != nullptr) return {signal.info->id, head.layer, head.head};
    const OwnSignal& own = *rows_->FindOwn(signal.name);
    return {MatrixOf(own), rows_->OwnRow(own, head.layer, head.head), 0};
  }

  const SeriesStore* const series_;
  const RunId id_;
  const std::shared_ptr<const RunRows> rows_;
  const ReadOwn read_own_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<ComparedRun>> QueryEngine::OpenCompared(const std::string& run, const std::string& asked,
                                                                       const CallContext& context) const {
  BW_ASSIGN_OR_RETURN(const RunSnapshotPtr found, FindRun(run));
  BW_ASSIGN_OR_RETURN(const std::shared_ptr<const RunRows> rows, RowsOf(*found, *stores_.database));
  const auto read_own = [this, found, rows, &context](const OwnSignal& own, int64_t step,
                                                      int64_t* at) -> absl::StatusOr<std::vector<float>> {
    BW_ASSIGN_OR_RETURN(OwnMatrix read, ReadOwn(*found, own, *rows, step, context));
    *at = read.at;
    return std::move(read.values);
  };
  return std::make_unique<StoredRun>(stores_.series, found->record, rows, read_own, asked);
}

absl::StatusOr<v1::CompareRunsResponse> QueryEngine::CompareRuns(const v1::CompareRunsRequest& request,
                                                                 const CallContext& context) const {
  BW_ASSIGN_OR_RETURN(const std::unique_ptr<ComparedRun> run, OpenCompared(request.run(), request.run(), context));
  BW_ASSIGN_OR_RETURN(const std::unique_ptr<ComparedRun> baseline,
                      OpenCompared(request.baseline(), request.baseline(), context));
  return Compare(run.get(), baseline.get(), request, context);
}

absl::StatusOr<v1::CompareRunsResponse> QueryEngine::Compare(ComparedRun* run, ComparedRun* baseline,
                                                             const v1::CompareRunsRequest& request,
                                                             const CallContext& context) const {
  ComparedRun::Signal signal{.name = request.signal(), .info = FindSignal(std::string_view(request.signal()))};
  BW_RETURN_IF_ERROR(Range("limit", request.limit(), 0, options_.heads_max));
  MatrixShape other_shape;
  std::vector<int32_t> rows;  // In the run, of named ones.
  if (signal.info != nullptr && !IsCompared(signal.info->granularity)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "signal \"", signal.name, "\": must be of the run, heads, layers, experts, tensors or modules, not of ranks"));
  }
  if (signal.info != nullptr && IsNamedByRanks(signal.info->granularity)) {
    BW_ASSIGN_OR_RETURN(CommonRows common, CommonRowsOf(run, baseline, signal));
    signal.rows = std::move(common.names);
    rows = std::move(common.rows);
    signal.shape = other_shape = {static_cast<int32_t>(rows.size()), 1};
  } else if (signal.info != nullptr) {
    signal.shape = ShapeOf(*signal.info, run->layout());
    other_shape = ShapeOf(*signal.info, baseline->layout());
  } else {
    signal.shape = run->OwnShape(signal.name);
    other_shape = baseline->OwnShape(signal.name);
    for (const auto& [asked, cells] :
         {std::pair(run->asked(), signal.shape.size()), {baseline->asked(), other_shape.size()}}) {
      if (cells > 0) continue;
      return absl::InvalidArgumentError(absl::StrCat("signal \"", signal.name.substr(0, 64),
                                                     "\": must be a name of the signal catalogue, such as drift_ratio, "
                                                     "or one that both runs' jobs have given; run \"",
                                                     asked, "\" has none of that name"));
    }
  }
  const MatrixShape shape = signal.shape;
  if (shape.layers != other_shape.layers || shape.heads != other_shape.heads) {
    return absl::InvalidArgumentError(absl::StrCat("baseline \"", baseline->asked(), "\": its ", other_shape.layers,
                                                   " x ", other_shape.heads, " heads are not the run's ", shape.layers,
                                                   " x ", shape.heads));
  }
  const size_t limit = request.limit() == 0 ? 20 : request.limit();
  const int64_t last = std::min(run->step(), baseline->step());
  constexpr int64_t kCellBytes = 192;  // Of the comparison, and of a head that it found.
  constexpr int64_t kPointBytes = 48;  // Of a series of each run, and of what is read for it.
  const int64_t points = std::clamp<int64_t>(last, 0, options_.points_max) * options_.series_max;
  BW_RETURN_IF_ERROR(context.Reserve(shape.size() * kCellBytes + points * kPointBytes));
  const int64_t grid = std::min<int64_t>({options_.compare_steps, int64_t{RunComparison::kStepsMax}, last + 1});

  // Heads are alike, and tensors are not: one with small values is no tensor without any.
  const double floor_part = rows.empty() ? RunComparison::kFloorPart : RunComparison::kFloorPartOfRows;
  RunComparison comparison(static_cast<size_t>(shape.size()), options_.compare_log2_min, floor_part);
  const auto check = [this, &context] { return Check(context); };
  int64_t newest = -1;
  for (int64_t i = 0; i < grid; ++i) {
    BW_RETURN_IF_ERROR(Check(context));
    const int64_t step = grid == 1 ? last : last / (grid - 1) * i + last % (grid - 1) * i / (grid - 1);
    int64_t at = -1, other_at = -1;
    BW_ASSIGN_OR_RETURN(const std::vector<float> values, ReadTurn(run, signal, step, newest, check, &at));
    BW_ASSIGN_OR_RETURN(const std::vector<float> others, ReadTurn(baseline, signal, step, newest, check, &other_at));
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

  // Between two compared steps: read what lies there, of heads alike together.
  std::map<std::pair<int, int>, std::vector<size_t>> between;  // Compared before, first beyond -> of `heads`.
  for (size_t i = 0; i < heads.size(); ++i) {
    if (heads[i].is.first >= 0 && heads[i].is.before >= 0)
      between[{heads[i].is.before, heads[i].is.first}].push_back(i);
  }
  std::map<size_t, int64_t> first_steps;
  for (const auto& [indices, those] : between) {
    const int64_t begin = comparison.step(indices.first), until = comparison.step(indices.second);
    for (size_t from = 0; from < those.size(); from += options_.series_max) {
      BW_RETURN_IF_ERROR(Check(context));
      const size_t count = std::min<size_t>(options_.series_max, those.size() - from);
      std::vector<Head> where;
      for (size_t i = 0; i < count; ++i) where.push_back(heads[those[from + i]].where);
      BW_ASSIGN_OR_RETURN(const std::vector<ComparedRun::Values> mine,
                          run->ReadSeries(signal, where, begin, until + 1, options_.points_max));
      BW_ASSIGN_OR_RETURN(const std::vector<ComparedRun::Values> theirs,
                          baseline->ReadSeries(signal, where, begin, until + 1, options_.points_max));
      for (size_t i = 0; i < count; ++i) {
        first_steps[those[from + i]] = FirstBeyond(comparison, indices.second, mine[i], theirs[i], until);
      }
    }
  }
  for (size_t i = 0; i < heads.size(); ++i) {
    const Found& head = heads[i];
    const int index = head.is.first >= 0 ? head.is.first : static_cast<int>(comparison.steps()) - 1;
    const auto exact = first_steps.find(i);
    v1::HeadDifference* const to = response.add_heads();
    const auto place = static_cast<size_t>(head.where.layer);
    if (!rows.empty()) to->set_name(signal.rows[place]);
    to->set_layer(static_cast<uint32_t>(rows.empty() ? head.where.layer : rows[place]));
    to->set_head(static_cast<uint32_t>(head.where.head));
    to->set_first_step(exact != first_steps.end() ? exact->second : head.is.first >= 0 ? comparison.step(index) : -1);
    to->set_ratio(head.is.ratio);
    to->set_band(comparison.band(index));
  }
  return response;
}

}  // namespace bellwether::server
