// ListBaselines, GetBaseline.
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "server/query/convert.h"
#include "server/query/query_engine.h"
#include "server/store/own_values_at.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

// Of the runs only those that the caller may know of.
v1::Baseline ToProto(const std::string& kind, const std::vector<std::shared_ptr<const BaselinePercentiles>>& runs,
                     const CallContext& context) {
  v1::Baseline proto;
  proto.set_kind(kind);
  for (const auto& run : runs) {
    if (!context.Sees(run->name)) continue;
    v1::BaselineRun* const to = proto.add_runs();
    to->set_run(run->name);
    to->set_run_uuid(run->uuid.data(), run->uuid.size());
    to->set_step(run->step);
    to->set_learned_unix_ns(run->learned_unix_ns);
  }
  return proto;
}

}  // namespace

absl::StatusOr<v1::ListBaselinesResponse> QueryEngine::ListBaselines(const v1::ListBaselinesRequest&,
                                                                     const CallContext& context) const {
  v1::ListBaselinesResponse response;
  for (const auto& runs : stores_.baselines->List()) {
    v1::Baseline baseline = ToProto(runs.front()->kind, runs, context);
    if (baseline.runs_size() > 0) *response.add_baselines() = std::move(baseline);
  }
  return response;
}

absl::StatusOr<v1::GetBaselineResponse> QueryEngine::GetBaseline(const v1::GetBaselineRequest& request,
                                                                 const CallContext& context) const {
  BW_ASSIGN_OR_RETURN(const RunSnapshotPtr run, FindRun(request.run()));
  const SignalInfo* const wanted = FindSignal(std::string_view(request.signal()));
  const std::string wanted_own = wanted == nullptr ? request.signal() : "";
  BW_ASSIGN_OR_RETURN(const std::shared_ptr<const RunRows> rows, RowsOf(*run, *stores_.database));
  const std::string kind = KindOf(run->record.description);
  auto siblings = stores_.baselines->Siblings(kind, run->record.id);
  // Merged with few others, or none, a hidden run's values would be told.
  std::erase_if(siblings, [&context](const auto& sibling) { return !context.Sees(sibling->name); });
  std::map<std::tuple<SignalId, std::string, int>, std::vector<const Band*>> bands;
  bool known = request.signal().empty() || wanted != nullptr || rows->FindOwn(wanted_own) != nullptr;
  for (const auto& sibling : siblings) {
    BW_RETURN_IF_ERROR(Check(context));
    for (const Band& band : sibling->bands) {
      const std::string& own = OwnNameOf(*sibling, band);
      if (wanted != nullptr && (band.signal != wanted->id || !own.empty())) continue;
      if (!wanted_own.empty() && own != wanted_own) continue;
      known = true;
      bands[{band.signal, own, band.range}].push_back(&band);
    }
  }
  if (!known) return Own("signal", wanted_own, *rows).status();
  v1::GetBaselineResponse response;
  *response.mutable_baseline() = ToProto(kind, siblings, context);
  for (const auto& [key, of_runs] : bands) {
    const auto& [id, own, range] = key;
    const SignalInfo* const signal = FindSignal(id);
    if (signal == nullptr) continue;  // Of an older catalogue.
    v1::BaselineBand* const to = response.add_bands();
    to->set_signal(own.empty() ? signal->name : own);
    *to->mutable_band() = server::ToProto(MergeBands(of_runs));
    BW_RETURN_IF_ERROR(Check(context));
    const int64_t begin = BandBegin(range), end = BandBegin(range + 1);
    const Layout& layout = run->record.description.layout;
    std::vector<float> values;
    if (own.empty()) {
      int64_t at = -1;
      BW_ASSIGN_OR_RETURN(values, stores_.series->ReadMatrix(run->record.id, layout, id, end - 1, &at));
      if (at < begin) continue;
    } else if (const OwnSignal* const mine = rows->FindOwn(own); mine != nullptr && MatrixOf(*mine) == id) {
      const auto index = static_cast<size_t>(mine - rows->own_signals.data());
      BW_ASSIGN_OR_RETURN(values, OwnValuesAt(*stores_.series, run->record.id, layout, *rows, index, begin, end));
    }
    Band band{.signal = id, .range = static_cast<uint8_t>(range)};
    if (DescribeBand(&values, &band)) *to->mutable_run() = server::ToProto(MergeBands({&band}));
  }
  return response;
}

}  // namespace bellwether::server
