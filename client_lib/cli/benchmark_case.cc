#include "cli/benchmark_case.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <ostream>
#include <utility>

#include "cli/cli.h"
#include "cli/output.h"

namespace bellwether::cli {
namespace {

using Json = nlohmann::ordered_json;

// Steps of one call: no value of them is merged with others.
constexpr int64_t kStepsPerCall = 10'000;
constexpr uint32_t kAlertsMax = 1000;
constexpr size_t kUuidBytes = 4;

template <typename Request, typename Response>
ExitCode Ask(Connection* connection,
             grpc::Status (v1::Query::Stub::*method)(grpc::ClientContext*, const Request&, Response*),
             const Request& request, Response* response) {
  grpc::ClientContext context;
  connection->Prepare(&context);
  return Report(*connection, (connection->stub().*method)(&context, request, response));
}

// Loss and gradient norm.
using Curves = std::map<int64_t, std::pair<float, float>>;

ExitCode ReadCurves(Connection* connection, const v1::Run& run, Curves* curves) {
  constexpr float kNone = std::numeric_limits<float>::quiet_NaN();
  v1::GetSeriesRequest request;
  request.set_run(Hex(run.description().uuid()));
  request.add_series()->set_signal("loss");
  request.add_series()->set_signal("grad_norm");
  request.set_points_max(kStepsPerCall);
  request.set_attempt(-1);
  for (int64_t begin = 0; begin <= run.step(); begin += kStepsPerCall) {
    request.set_step_begin(begin);
    request.set_step_end(begin + kStepsPerCall);
    v1::GetSeriesResponse response;
    const ExitCode code = Ask(connection, &v1::Query::Stub::GetSeries, request, &response);
    if (code != kOk) return code;
    for (const v1::Series& series : response.series()) {
      const bool of_loss = series.id().signal() == "loss";
      for (int i = 0; i < series.step_size(); ++i) {
        auto& [loss, norm] = curves->try_emplace(series.step(i), kNone, kNone).first->second;
        (of_loss ? loss : norm) = series.mean(i);
      }
    }
  }
  return kOk;
}

std::string Csv(const Curves& curves) {
  std::string text = "step,loss,grad_norm\n";
  for (const auto& [step, values] : curves) {
    char line[80];
    std::snprintf(line, sizeof line, "%lld,%.9g,%.9g\n", static_cast<long long>(step), double{values.first},
                  double{values.second});
    text += line;
  }
  return text;
}

// The steps between two samples: the least there are.
int64_t Every(const Curves& curves) {
  int64_t every = 0, before = -1;
  for (const auto& [step, values] : curves) {
    if (before >= 0 && (every == 0 || step - before < every)) every = step - before;
    before = step;
  }
  return std::max<int64_t>(every, 1);
}

// As instabilities/truth.py has it of a healthy run, and who called which alerts false.
Json Truth(const v1::Run& run, const Curves& curves, const v1::ListAlertsResponse& alerts) {
  Json said = Json::array();
  for (const v1::Alert& alert : alerts.alerts()) {
    if (!alert.muted()) continue;
    const v1::FalseAlarm& mark = alert.false_alarm();
    said.push_back({{"key", alert.last().key()},
                    {"rule", alert.last().rule()},
                    {"cause", mark.cause()},
                    {"severity", SeverityName(mark.severity())},
                    {"step", mark.step()},
                    {"by", mark.by()},
                    {"reason", mark.reason()},
                    {"time", Time(mark.time_unix_ns())}});
  }
  const int64_t steps = curves.empty() ? 0 : curves.rbegin()->first - curves.begin()->first + 1;
  Json truth = {{"cause", "healthy"}, {"family", "healthy"}, {"split", "field"}, {"variant", ""}, {"kind", "healthy"}};
  for (const char* const none : {"onset", "until", "strength", "layer", "head", "tensor", "expert", "rank"}) {
    truth[none] = nullptr;
  }
  truth["harmless"] = true;
  truth["loss_up"] = nullptr;
  truth["steps"] = steps;
  truth["every"] = Every(curves);
  truth["seed"] = 0;
  truth["architecture"] = run.description().model();
  truth["optimizer"] = "";
  truth["setting"] = Json::object();
  truth["stats"] = "";
  truth["versions"] = {{"bellwether", BELLWETHER_VERSION}, {"framework", run.description().framework()}};
  truth["false_alarms"] = std::move(said);
  return truth;
}

ExitCode WriteText(const std::string& file, const std::string& text) {
  const bool whole = WriteWhole(file, [&text](std::ostream* out) {
    *out << text;
    return true;  // What could not be written shows when the file is closed.
  });
  return whole ? kOk : kFailed;
}

std::string NameOf(const v1::RunDescription& run) {
  std::string name = run.name();
  std::replace_if(
      name.begin(), name.end(), [](char c) { return c == '/' || c == ':'; }, '-');
  return name + "-" + Hex(run.uuid().substr(0, kUuidBytes));
}

}  // namespace

ExitCode WriteBenchmarkCase(Connection* connection, const std::string& run, const std::string& directory) {
  std::error_code error;
  std::filesystem::create_directories(directory, error);
  if (error) {
    Complain(directory + ": " + error.message());
    return kFailed;
  }
  v1::GetRunRequest get;
  get.set_run(run);
  v1::Run found;
  if (const ExitCode code = Ask(connection, &v1::Query::Stub::GetRun, get, &found); code != kOk) return code;
  v1::ListAlertsRequest list;
  list.set_run(Hex(found.description().uuid()));
  list.set_limit(kAlertsMax);
  v1::ListAlertsResponse alerts;
  if (const ExitCode code = Ask(connection, &v1::Query::Stub::ListAlerts, list, &alerts); code != kOk) return code;
  Curves curves;
  if (const ExitCode code = ReadCurves(connection, found, &curves); code != kOk) return code;

  const std::string base = (std::filesystem::path(directory) / NameOf(found.description())).string();
  ExitCode code = ExportTo(connection, list.run(), base + ".bwrun");
  if (code == kOk) code = WriteText(base + ".csv", Csv(curves));
  if (code == kOk) code = WriteText(base + ".json", Truth(found, curves, alerts).dump(1) + "\n");
  if (code != kOk) return code;
  const auto others = std::count_if(alerts.alerts().begin(), alerts.alerts().end(), [](const v1::Alert& alert) {
    return !alert.muted() && alert.last().severity() >= v1::SEVERITY_WARNING;
  });
  if (others > 0) {
    Complain("the run has " + std::to_string(others) +
             " more warnings or criticals: in this case they count as false alarms, too");
  }
  return kOk;
}

}  // namespace bellwether::cli
