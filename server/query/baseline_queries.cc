// ListBaselines, GetBaseline.
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "server/query/convert.h"
#include "server/query/query_engine.h"
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
  SignalId wanted = SignalId::kNone;
  if (!request.signal().empty()) {
    BW_ASSIGN_OR_RETURN(const SignalInfo* const signal, Signal("signal", request.signal()));
    wanted = signal->id;
  }
  const std::string kind = KindOf(run->record.description);
  auto siblings = stores_.baselines->Siblings(kind, run->record.id);
  // Merged with few others, or none, a hidden run's values would be told.
  std::erase_if(siblings, [&context](const auto& sibling) { return !context.Sees(sibling->name); });
  std::map<std::pair<SignalId, int>, std::vector<const Band*>> bands;
  for (const auto& sibling : siblings) {
    BW_RETURN_IF_ERROR(Check(context));
    for (const Band& band : sibling->bands) {
      if (wanted == SignalId::kNone || band.signal == wanted) bands[{band.signal, band.range}].push_back(&band);
    }
  }
  v1::GetBaselineResponse response;
  *response.mutable_baseline() = ToProto(kind, siblings, context);
  for (const auto& [key, of_runs] : bands) {
    const SignalInfo* const signal = FindSignal(key.first);
    if (signal == nullptr) continue;  // Of an older catalogue.
    v1::BaselineBand* const to = response.add_bands();
    to->set_signal(signal->name);
    *to->mutable_band() = server::ToProto(MergeBands(of_runs));
    BW_RETURN_IF_ERROR(Check(context));
    const int64_t begin = BandBegin(key.second), last = BandBegin(key.second + 1) - 1;
    int64_t at = -1;
    BW_ASSIGN_OR_RETURN(
        std::vector<float> values,
        stores_.series->ReadMatrix(run->record.id, run->record.description.layout, key.first, last, &at));
    Band own{.signal = key.first, .range = static_cast<uint8_t>(key.second)};
    if (at >= begin && DescribeBand(&values, &own)) *to->mutable_run() = server::ToProto(MergeBands({&own}));
  }
  return response;
}

}  // namespace bellwether::server
