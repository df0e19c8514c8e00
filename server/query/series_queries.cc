// GetSeries, GetMatrix, WatchRun's content.
#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/query/convert.h"
#include "server/query/query_engine.h"
#include "server/store/series_reader.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

// Of an answer's message: a step, the smallest, mean and largest value; and what
// becomes of them as text.
constexpr int64_t kPointBytes = 20;
constexpr int64_t kPointTextBytes = 80;

// Of a matrix: its parts, itself, and the answer.
constexpr int64_t kCellBytes = 48;

// Samples among which the newest value of each cell of an own signal is looked for.
constexpr int kOwnTurnsMax = 64;

// The newest sample that can hold the signal.
const StepSample* NewestFor(const RunSnapshot& run, const SignalInfo& signal) {
  const bool newest = run.newest != nullptr && run.newest->has(signal.derived ? signal.numerator : signal.id);
  return newest || signal.granularity == Granularity::kRun ? run.newest.get() : run.heads.get();
}

// An own signal's newest cells, if the run has it.
void AddOwnMatrix(const RunSnapshot& run, const std::string& name, v1::WatchRunResponse* response) {
  const OwnSignal* const own = run.rows == nullptr ? nullptr : run.rows->FindOwn(name);
  if (own == nullptr) return;
  v1::GetMatrixResponse* const matrix = response->add_matrices();
  matrix->set_signal(name);
  matrix->set_step(-1);
  matrix->set_layers(static_cast<uint32_t>(own->layers));
  matrix->set_heads(static_cast<uint32_t>(own->heads));
  const auto values = run.newest == nullptr ? std::span<const float>() : run.newest->matrix(MatrixOf(*own));
  if (values.empty()) return;
  matrix->set_step(run.newest->step);
  for (int32_t layer = 0; layer < own->layers; ++layer) {
    for (int32_t head = 0; head < own->heads; ++head) {
      const auto row = static_cast<size_t>(run.rows->OwnRow(*own, layer, head));
      matrix->add_values(row < values.size() ? values[row] : NotMeasured());
    }
  }
}

// A series of a tensor or module may be asked for by its name.
absl::StatusOr<uint32_t> LayerOrRow(const SignalInfo& signal, const v1::SeriesId& id, const RunRows& rows) {
  if (id.name().empty()) return id.layer();
  if (!OfNamedRows(signal.granularity)) {
    return absl::InvalidArgumentError(
        absl::StrCat("series.name \"", id.name().substr(0, 64), "\": ", signal.name, " is of no tensor or module"));
  }
  const int32_t row = rows.of(signal.granularity).Find(id.name());
  if (row >= 0) return static_cast<uint32_t>(row);
  return absl::NotFoundError(absl::StrCat("series.name \"", id.name().substr(0, 128), "\": the run has no such ",
                                          signal.granularity == Granularity::kTensor ? "tensor" : "module"));
}

}  // namespace

absl::StatusOr<v1::Series> QueryEngine::ReadSeries(const RunSnapshot& run, const SeriesKey& key, int64_t begin,
                                                   int64_t end, size_t points, int32_t attempt) const {
  BW_ASSIGN_OR_RETURN(SeriesPoints read, stores_.series->ReadSeries(run.record.id, run.record.description.layout, key,
                                                                    begin, end, points, attempt));
  return ToProto(std::move(read), FindSignal(key.signal)->name, key);
}

int64_t QueryEngine::ReadBytes(const RunSnapshot& run, const SignalInfo& signal, int64_t steps, size_t points) {
  const int64_t raw = std::min<int64_t>(
      {static_cast<int64_t>(run.record.steps_recorded), steps, static_cast<int64_t>(points) * kSpanSteps / 2 + 1});
  // Vectors that have just grown; of a derived signal its two parts and their quotient.
  return raw * static_cast<int64_t>(sizeof(SeriesPoint)) * (signal.derived ? 4 : 2);
}

absl::StatusOr<v1::GetSeriesResponse> QueryEngine::GetSeries(const v1::GetSeriesRequest& request,
                                                             const CallContext& context) const {
  BW_ASSIGN_OR_RETURN(const RunSnapshotPtr run, FindRun(request.run()));
  const Layout& layout = run->record.description.layout;
  BW_RETURN_IF_ERROR(Range("series", request.series_size(), 1, options_.series_max));
  BW_RETURN_IF_ERROR(Range("points_max", request.points_max(), 0, options_.points_max));
  BW_RETURN_IF_ERROR(Range("step_begin", request.step_begin(), 0, INT64_MAX - 1));
  const int64_t end = request.step_end() == 0 ? INT64_MAX : request.step_end();
  BW_RETURN_IF_ERROR(Range("step_end", end, request.step_begin() + 1, INT64_MAX));
  BW_RETURN_IF_ERROR(Range("attempt", request.attempt(), SeriesStore::kNewestAttempt, INT32_MAX));
  const size_t points = request.points_max() == 0 ? options_.points_default : request.points_max();
  BW_ASSIGN_OR_RETURN(const std::shared_ptr<const RunRows> rows, RowsOf(*run, *stores_.database));
  std::vector<SeriesKey> keys;
  std::vector<const OwnSignal*> own_signals;  // By key; null: it is of the catalogue.
  int64_t read_bytes = 0;
  for (const v1::SeriesId& id : request.series()) {
    if (FindSignal(std::string_view(id.signal())) == nullptr) {
      BW_ASSIGN_OR_RETURN(const OwnSignal* const own, Own("series.signal", id.signal(), *rows));
      BW_RETURN_IF_ERROR(Range("series.layer", id.layer(), 0, own->layers - 1));
      BW_RETURN_IF_ERROR(Range("series.head", id.head(), 0, own->heads - 1));
      const SignalInfo* const matrix = FindSignal(MatrixOf(*own));
      const auto in_layer = static_cast<int32_t>(id.layer()), in_head = static_cast<int32_t>(id.head());
      const int32_t row = rows->OwnRow(*own, in_layer, in_head);
      if (row < 0) {
        return absl::NotFoundError(absl::StrCat("series.signal \"", OwnCellName(*own, in_layer, in_head),
                                                "\": the run has reported nothing of it"));
      }
      keys.push_back({matrix->id, row, 0});
      own_signals.push_back(own);
      read_bytes = std::max(read_bytes, ReadBytes(*run, *matrix, end - request.step_begin(), points));
      continue;
    }
    BW_ASSIGN_OR_RETURN(const SignalInfo* const signal, Signal("series.signal", id.signal()));
    BW_ASSIGN_OR_RETURN(const uint32_t layer, LayerOrRow(*signal, id, *rows));
    const MatrixShape shape = ShapeOf(*signal, layout);
    if (shape.size() == 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("series.signal \"", signal->name, "\": the run reports nothing of it"));
    }
    BW_RETURN_IF_ERROR(Range("series.layer", layer, 0, shape.layers - 1));
    BW_RETURN_IF_ERROR(Range("series.head", id.head(), 0, shape.heads - 1));
    own_signals.push_back(nullptr);
    keys.push_back({signal->id, static_cast<int32_t>(layer), static_cast<int32_t>(id.head())});
    read_bytes = std::max(read_bytes, ReadBytes(*run, *signal, end - request.step_begin(), points));
  }
  const int64_t points_in_all =
      static_cast<int64_t>(keys.size() * std::min<uint64_t>(points, run->record.steps_recorded));
  const int64_t answer_bytes = points_in_all * (context.as_text ? kPointBytes + kPointTextBytes : 2 * kPointBytes);
  BW_RETURN_IF_ERROR(context.Reserve(answer_bytes + read_bytes));
  v1::GetSeriesResponse response;
  for (const SeriesKey& key : keys) {
    BW_RETURN_IF_ERROR(Check(context));
    BW_ASSIGN_OR_RETURN(*response.add_series(),
                        ReadSeries(*run, key, request.step_begin(), end, points, request.attempt()));
    v1::SeriesId* const id = response.mutable_series(response.series_size() - 1)->mutable_id();
    if (const OwnSignal* const own = own_signals[static_cast<size_t>(response.series_size() - 1)]) {
      const OwnCell& cell = rows->own_cells[static_cast<size_t>(key.layer)];
      id->set_signal(own->name);
      id->set_layer(static_cast<uint32_t>(cell.layer));
      id->set_head(static_cast<uint32_t>(cell.head));
      continue;
    }
    const std::string_view name = RowName(*FindSignal(key.signal), key.layer, *rows);
    if (!name.empty()) id->set_name(std::string(name));
  }
  return response;
}

absl::StatusOr<v1::GetMatrixResponse> QueryEngine::GetMatrix(const v1::GetMatrixRequest& request,
                                                             const CallContext& context) const {
  BW_ASSIGN_OR_RETURN(const RunSnapshotPtr run, FindRun(request.run()));
  BW_RETURN_IF_ERROR(Range("step", request.step(), -1, INT64_MAX));
  if (FindSignal(std::string_view(request.signal())) == nullptr) {
    BW_ASSIGN_OR_RETURN(const std::shared_ptr<const RunRows> rows, RowsOf(*run, *stores_.database));
    BW_ASSIGN_OR_RETURN(const OwnSignal* const own, Own("signal", request.signal(), *rows));
    BW_ASSIGN_OR_RETURN(const OwnMatrix read, ReadOwn(*run, *own, *rows, request.step(), context));
    v1::GetMatrixResponse response;
    response.set_signal(own->name);
    response.set_step(read.at);
    response.set_layers(static_cast<uint32_t>(own->layers));
    response.set_heads(static_cast<uint32_t>(own->heads));
    response.mutable_values()->Add(read.values.begin(), read.values.end());
    return response;
  }
  BW_ASSIGN_OR_RETURN(const SignalInfo* const signal, Signal("signal", request.signal()));
  BW_RETURN_IF_ERROR(Check(context));
  const Layout& layout = run->record.description.layout;
  BW_RETURN_IF_ERROR(context.Reserve(ShapeOf(*signal, layout).size() * kCellBytes));
  int64_t at = -1;
  BW_ASSIGN_OR_RETURN(const std::vector<float> values,
                      stores_.series->ReadMatrix(run->record.id, layout, signal->id, request.step(), &at));
  const MatrixShape shape = ShapeOf(*signal, layout);
  v1::GetMatrixResponse response;
  response.set_signal(signal->name);
  response.set_step(at);
  response.set_layers(static_cast<uint32_t>(shape.layers));
  response.set_heads(static_cast<uint32_t>(shape.heads));
  response.mutable_values()->Add(values.begin(), values.end());
  if (OfNamedRows(signal->granularity)) {
    BW_ASSIGN_OR_RETURN(const std::shared_ptr<const RunRows> rows, RowsOf(*run, *stores_.database));
    BW_RETURN_IF_ERROR(context.Reserve(shape.size() * static_cast<int64_t>(kRowNameBytesMax)));
    for (int32_t row = 0; row < shape.layers; ++row) {
      response.add_names(std::string(RowName(*signal, row, *rows)));
    }
  }
  return response;
}

absl::StatusOr<QueryEngine::OwnMatrix> QueryEngine::ReadOwn(const RunSnapshot& run, const OwnSignal& signal,
                                                            const RunRows& rows, int64_t step,
                                                            const CallContext& context) const {
  const Layout& layout = run.record.description.layout;
  const SignalId matrix = MatrixOf(signal);
  const auto cells = static_cast<int64_t>(signal.layers) * signal.heads;
  BW_RETURN_IF_ERROR(context.Reserve((ShapeOf(*FindSignal(matrix), layout).size() + 2 * cells) * kCellBytes));
  OwnMatrix found;
  found.values.assign(static_cast<size_t>(cells), NotMeasured());
  found.steps.assign(static_cast<size_t>(cells), -1);
  int64_t lacking = 0;
  std::vector<int32_t> row_of(static_cast<size_t>(cells), -1);
  for (int32_t layer = 0; layer < signal.layers; ++layer) {
    for (int32_t head = 0; head < signal.heads; ++head) {
      const int32_t row = rows.OwnRow(signal, layer, head);
      row_of[static_cast<size_t>(layer * signal.heads + head)] = row;
      lacking += row >= 0;
    }
  }
  // Jobs log some numbers more rarely than others.
  for (int turn = 0; turn < kOwnTurnsMax && lacking > 0; ++turn) {
    BW_RETURN_IF_ERROR(Check(context));
    int64_t at = -1;
    BW_ASSIGN_OR_RETURN(const std::vector<float> read,
                        stores_.series->ReadMatrix(run.record.id, layout, matrix, step, &at));
    if (at < 0) break;
    for (size_t i = 0; i < row_of.size(); ++i) {
      const auto row = static_cast<size_t>(row_of[i]);
      if (row_of[i] < 0 || row >= read.size() || found.steps[i] >= 0 || IsNotMeasured(read[row])) continue;
      found.values[i] = read[row];
      found.steps[i] = at;
      found.at = std::max(found.at, at);
      --lacking;
    }
    step = at - 1;
    if (step < 0) break;
  }
  return found;
}

absl::Status QueryEngine::Prepare(v1::WatchRunRequest* request) const {
  BW_ASSIGN_OR_RETURN(const RunSnapshotPtr run, FindRun(request->run()));
  BW_RETURN_IF_ERROR(Range("signals", request->signals_size(), 0, options_.watch_signals_max));
  for (const std::string& name : request->signals()) {
    if (FindSignal(std::string_view(name)) != nullptr) continue;
    BW_ASSIGN_OR_RETURN(const std::shared_ptr<const RunRows> rows, RowsOf(*run, *stores_.database));
    BW_RETURN_IF_ERROR(Own("signals", name, *rows).status());
  }
  if (request->min_interval_ms() == 0) request->set_min_interval_ms(1000);
  return Range("min_interval_ms", request->min_interval_ms(), options_.watch_interval_ms_min,
               options_.watch_interval_ms_max);
}

int64_t QueryEngine::WatchBytes(const RunSnapshot& run, const v1::WatchRunRequest& request) {
  int64_t cells = 0;
  for (const std::string& name : request.signals()) {
    if (const SignalInfo* const signal = FindSignal(std::string_view(name))) {
      cells += ShapeOf(*signal, run.record.description.layout).size();
    } else if (const OwnSignal* const own = run.rows == nullptr ? nullptr : run.rows->FindOwn(name)) {
      cells += static_cast<int64_t>(own->layers) * own->heads;
    }
  }
  return cells * 2 * static_cast<int64_t>(sizeof(float));  // One on its way, one being made.
}

v1::WatchRunResponse QueryEngine::Watch(const RunSnapshot& run, const v1::WatchRunRequest& request) const {
  v1::WatchRunResponse response;
  *response.mutable_run() = ToProto(run);
  std::vector<float> values;
  for (const std::string& name : request.signals()) {
    const SignalInfo* const signal = FindSignal(std::string_view(name));
    if (signal == nullptr) {
      AddOwnMatrix(run, name, &response);
      continue;
    }
    const MatrixShape shape = ShapeOf(*signal, run.record.description.layout);
    v1::GetMatrixResponse* const matrix = response.add_matrices();
    matrix->set_signal(name);
    matrix->set_layers(static_cast<uint32_t>(shape.layers));
    matrix->set_heads(static_cast<uint32_t>(shape.heads));
    const StepSample* const sample = NewestFor(run, *signal);
    if (sample == nullptr || !DeriveMatrix(*sample, *signal, &values)) {
      matrix->set_step(-1);
      continue;
    }
    matrix->set_step(sample->step);
    matrix->mutable_values()->Add(values.begin(), values.end());
  }
  return response;
}

}  // namespace bellwether::server
