#include "cli/benchmark_case.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <iterator>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <ostream>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

#include "bellwether/signal_table.h"
#include "cli/cli.h"
#include "cli/output.h"

namespace bellwether::cli {
namespace {

using Json = nlohmann::ordered_json;

// Steps of one call: no value of them is merged with others.
constexpr int64_t kStepsPerCall = 10'000;
constexpr size_t kSeriesMax = 8;  // Of one call, so that its answer is no large message.
constexpr uint32_t kAlertsMax = 1000;
constexpr size_t kUuidBytes = 4;
constexpr char kPeriod[] = "sampling_period";

template <typename Request, typename Response>
ExitCode Ask(Connection* connection,
             grpc::Status (v1::Query::Stub::*method)(grpc::ClientContext*, const Request&, Response*),
             const Request& request, Response* response) {
  grpc::ClientContext context;
  connection->Prepare(&context);
  return Report(connection, (connection->stub().*method)(&context, request, response));
}

// Loss and gradient norm.
using Curves = std::map<int64_t, std::pair<float, float>>;

struct History {
  Curves curves;
  std::map<int64_t, int64_t> periods;  // Steps from sample to sample, as the job tells it -> how often.
  std::set<int64_t> sampled;           // Steps with values of heads.
};

// Where the job does not tell how often it samples, signals of the first head show it.
std::vector<v1::SeriesId> SeriesOf(const v1::Run& run) {
  const auto& told = run.signals();
  std::vector<v1::SeriesId> series;
  for (const char* const name : {"loss", "grad_norm", kPeriod}) series.emplace_back().set_signal(name);
  if (std::find(told.begin(), told.end(), kPeriod) != told.end()) return series;
  for (const std::string& name : told) {
    const SignalInfo* const signal = FindSignal(std::string_view(name));
    const bool of_heads = signal != nullptr && OfHeads(signal->granularity);
    if (of_heads && series.size() < kSeriesMax) series.emplace_back().set_signal(name);
  }
  return series;
}

void Take(const v1::Series& series, History* history) {
  constexpr float kNone = std::numeric_limits<float>::quiet_NaN();
  const std::string& signal = series.id().signal();
  for (int i = 0; i < series.step_size(); ++i) {
    const int64_t step = series.step(i);
    const float value = series.mean(i);
    if (signal == "loss") {
      history->curves.try_emplace(step, kNone, kNone).first->second.first = value;
    } else if (signal == "grad_norm") {
      history->curves.try_emplace(step, kNone, kNone).first->second.second = value;
    } else if (!std::isfinite(value)) {
      continue;
    } else if (signal == kPeriod) {
      ++history->periods[std::llround(value)];
    } else {
      history->sampled.insert(step);
    }
  }
}

ExitCode ReadHistory(Connection* connection, const v1::Run& run, History* history) {
  v1::GetSeriesRequest request;
  request.set_run(Hex(run.description().uuid()));
  for (const v1::SeriesId& series : SeriesOf(run)) *request.add_series() = series;
  request.set_points_max(kStepsPerCall);
  request.set_attempt(-1);
  for (int64_t begin = 0; begin <= run.step(); begin += kStepsPerCall) {
    request.set_step_begin(begin);
    request.set_step_end(begin + kStepsPerCall);
    v1::GetSeriesResponse response;
    const ExitCode code = Ask(connection, &v1::Query::Stub::GetSeries, request, &response);
    if (code != kOk) return code;
    for (const v1::Series& series : response.series()) Take(series, history);
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

// The one that is there most often, the shortest of several; 0: there is none.
int64_t MostOften(const std::map<int64_t, int64_t>& counts) {
  const auto most =
      std::max_element(counts.begin(), counts.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
  return most == counts.end() ? 0 : most->first;
}

// The steps from one sample to the next.  The loss may be told in between, too.
int64_t Every(const History& history) {
  if (const int64_t told = MostOften(history.periods); told > 0) return told;
  std::set<int64_t> steps = history.sampled;
  if (steps.size() < 2) {
    for (const auto& [step, values] : history.curves) steps.insert(step);
  }
  std::map<int64_t, int64_t> gaps;
  for (auto at = steps.begin(); at != steps.end() && std::next(at) != steps.end(); ++at) ++gaps[*std::next(at) - *at];
  return std::max<int64_t>(MostOften(gaps), 1);
}

// As instabilities/truth.py has it of a healthy run, and who called which alerts false.
Json Truth(const v1::Run& run, const History& history, const v1::ListAlertsResponse& alerts) {
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
  const Curves& curves = history.curves;
  const int64_t steps = curves.empty() ? 0 : curves.rbegin()->first - curves.begin()->first + 1;
  Json truth = {{"cause", "healthy"}, {"family", "healthy"}, {"split", "field"}, {"variant", ""}, {"kind", "healthy"}};
  for (const char* const none : {"onset", "until", "strength", "layer", "head", "tensor", "expert", "rank"}) {
    truth[none] = nullptr;
  }
  truth["harmless"] = true;
  truth["loss_up"] = nullptr;
  truth["steps"] = steps;
  truth["every"] = Every(history);
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
  History history;
  if (const ExitCode code = ReadHistory(connection, found, &history); code != kOk) return code;

  const std::string base = (std::filesystem::path(directory) / NameOf(found.description())).string();
  ExitCode code = ExportTo(connection, list.run(), base + ".bwrun");
  if (code == kOk) code = WriteText(base + ".csv", Csv(history.curves));
  if (code == kOk) code = WriteText(base + ".json", Truth(found, history, alerts).dump(1) + "\n");
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
