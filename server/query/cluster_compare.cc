// The comparison of run_router.h: of runs that different servers serve.
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/model/row_names.h"
#include "server/query/compared_run.h"
#include "server/query/convert.h"
#include "server/query/query_engine.h"
#include "server/query/run_router.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

absl::Status Unreadable(const RunRouter::Location& place) {
  return absl::InternalError(absl::StrCat("server ", place.server, ": what it says of run ", place.name,
                                          " cannot be compared: is it of another version?"));
}

// Read from its owner, a question at a time.
class OwnersRun final : public ComparedRun {
 public:
  OwnersRun(RunRouter* router, RunRouter::Location place, const CallContext& context, std::string asked,
            const Layout& layout, int64_t step, std::map<std::string, MatrixShape> own)
      : ComparedRun(std::move(asked), layout, step),
        router_(router),
        place_(std::move(place)),
        context_(context),
        own_(std::move(own)) {}

  MatrixShape OwnShape(const std::string& name) const override {
    const auto found = own_.find(name);
    return found == own_.end() ? MatrixShape() : found->second;
  }
  absl::StatusOr<std::vector<std::string>> NamesOf(const Signal& signal) override {
    BW_ASSIGN_OR_RETURN(const v1::GetMatrixResponse matrix, Matrix(signal, this->step()));
    return std::vector<std::string>(matrix.names().begin(), matrix.names().end());
  }
  absl::StatusOr<std::vector<float>> ReadMatrix(const Signal& signal, int64_t step, int64_t* at) override {
    BW_ASSIGN_OR_RETURN(const v1::GetMatrixResponse matrix, Matrix(signal, step));
    *at = matrix.step();
    std::vector<float> values(matrix.values().begin(), matrix.values().end());
    if (!signal.rows.empty() && *at >= 0) {
      if (matrix.names_size() != matrix.values_size()) return Unreadable(place_);
      const std::vector<std::string> names(matrix.names().begin(), matrix.names().end());
      const RowNames rows(names);
      std::vector<float> picked;
      for (const std::string& name : signal.rows) {
        const int32_t row = rows.Find(name);
        picked.push_back(row < 0 ? NotMeasured() : values[static_cast<size_t>(row)]);
      }
      values = std::move(picked);
    }
    const auto cells = static_cast<size_t>(signal.shape.size());
    if (*at >= 0 && values.size() != cells) return Unreadable(place_);
    return values;
  }

  absl::StatusOr<std::vector<Values>> ReadSeries(const Signal& signal, const std::vector<Head>& heads, int64_t begin,
                                                 int64_t end, size_t points_max) override {
    v1::GetSeriesRequest request;
    request.set_run(place_.uuid);
    for (const Head& head : heads) {
      v1::SeriesId* const id = request.add_series();
      id->set_signal(signal.name);
      if (!signal.rows.empty()) {
        id->set_name(signal.rows[static_cast<size_t>(head.layer)]);
        continue;
      }
      id->set_layer(static_cast<uint32_t>(head.layer));
      id->set_head(static_cast<uint32_t>(head.head));
    }
    request.set_step_begin(begin);
    request.set_step_end(end);
    request.set_points_max(static_cast<uint32_t>(points_max));
    request.set_attempt(SeriesStore::kNewestAttempt);
    BW_ASSIGN_OR_RETURN(const auto response,
                        (router_->Call<v1::GetSeriesRequest, v1::GetSeriesResponse>(
                            place_.server, "GetSeries", request, *context_.grant, context_.deadline_monotonic_ns)));
    if (static_cast<size_t>(response.series_size()) != heads.size()) return Unreadable(place_);
    std::vector<Values> read;
    for (const v1::Series& series : response.series()) {
      if (series.step_size() != series.mean_size()) return Unreadable(place_);
      read.push_back({{series.step().begin(), series.step().end()}, {series.mean().begin(), series.mean().end()}});
    }
    return read;
  }

 private:
  absl::StatusOr<v1::GetMatrixResponse> Matrix(const Signal& signal, int64_t step) {
    v1::GetMatrixRequest request;
    request.set_run(place_.uuid);
    request.set_signal(signal.name);
    request.set_step(step);
    return router_->Call<v1::GetMatrixRequest, v1::GetMatrixResponse>(place_.server, "GetMatrix", request,
                                                                      *context_.grant, context_.deadline_monotonic_ns);
  }

  RunRouter* const router_;
  const RunRouter::Location place_;
  const CallContext& context_;
  const std::map<std::string, MatrixShape> own_;
};

absl::StatusOr<std::unique_ptr<ComparedRun>> OpenAtOwner(RunRouter* router, const RunRouter::Location& place,
                                                         const std::string& asked, const CallContext& context) {
  v1::GetRunRequest request;
  request.set_run(place.uuid);
  BW_ASSIGN_OR_RETURN(const auto run,
                      (router->Call<v1::GetRunRequest, v1::Run>(place.server, "GetRun", request, *context.grant,
                                                                context.deadline_monotonic_ns)));
  const v1::Layout& told = run.description().layout();
  const Layout layout = {.layers = static_cast<int32_t>(told.layers()),
                         .heads = static_cast<int32_t>(told.heads()),
                         .kv_heads = static_cast<int32_t>(told.kv_heads()),
                         .head_dim = static_cast<int32_t>(told.head_dim()),
                         .seq_len = static_cast<int32_t>(told.seq_len()),
                         .experts = static_cast<int32_t>(told.experts())};
  std::map<std::string, MatrixShape> own;
  for (const v1::OwnSignal& signal : run.own_signals()) {
    own[signal.name()] = {static_cast<int32_t>(signal.layers()), static_cast<int32_t>(signal.heads())};
  }
  return std::make_unique<OwnersRun>(router, place, context, asked, layout, run.step(), std::move(own));
}

}  // namespace

absl::StatusOr<v1::CompareRunsResponse> RunRouter::CompareRuns(const QueryEngine& engine,
                                                               const v1::CompareRunsRequest& request,
                                                               const Location& run, const Location& baseline,
                                                               const CallContext& context) {
  const auto open = [&](const Location& place, const std::string& asked) {
    return place.server.empty() ? engine.OpenCompared(place.uuid, asked, context)
                                : OpenAtOwner(this, place, asked, context);
  };
  BW_ASSIGN_OR_RETURN(const std::unique_ptr<ComparedRun> one, open(run, request.run()));
  BW_ASSIGN_OR_RETURN(const std::unique_ptr<ComparedRun> other, open(baseline, request.baseline()));
  return engine.Compare(one.get(), other.get(), request, context);
}

}  // namespace bellwether::server
