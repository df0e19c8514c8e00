// What `run list` shows on a terminal: where each run stands, and how its worst alert is.
#include <iostream>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "cli/cli.h"
#include "cli/private_server.h"

namespace bellwether::cli {
namespace {

constexpr uint32_t kAlertsAsked = 1000;  // The server's own limit.

// The worst alert that fires, by the run's uuid.  `muted`: those where one fires that was called false.
std::map<std::string, v1::Transition> WorstAlerts(Connection* connection, std::set<std::string>* muted) {
  v1::ListAlertsRequest request;
  request.set_firing_only(true);
  request.set_limit(kAlertsAsked);
  v1::ListAlertsResponse response;
  grpc::ClientContext context;
  connection->Prepare(&context);
  std::map<std::string, v1::Transition> worst;
  if (!connection->stub().ListAlerts(&context, request, &response).ok()) return worst;  // The runs are there.
  const auto worse = [](const v1::Transition& a, const v1::Transition& b) {
    if (a.severity() != b.severity()) return a.severity() > b.severity();
    return a.stage() != b.stage() ? a.stage() > b.stage() : a.first_step() < b.first_step();
  };
  for (const v1::Alert& alert : response.alerts()) {
    if (alert.muted()) {
      muted->insert(alert.last().run_uuid());
      continue;
    }
    const auto [at, is_new] = worst.try_emplace(alert.last().run_uuid(), alert.last());
    if (!is_new && worse(alert.last(), at->second)) at->second = alert.last();
  }
  return worst;
}

std::string StateOf(const v1::Run& run) {
  if (!run.ended()) return "live";
  if (run.imported()) return "imported";
  const bool plain = run.end_reason().empty() || run.end_reason() == "finished";
  return plain ? "ended" : "ended: " + run.end_reason();
}

// Of a run without alerts: what may be claimed of it, where there is no room for its stage.
std::string Health(const v1::Run& run, bool muted) {
  if (muted) return "muted";
  if (!run.has_judged() || run.stage() > 0) return "-";
  if (!run.judged().whole()) return "partly";
  return run.judged().text() == "healthy" ? "healthy" : "none yet";
}

}  // namespace

Table RunsForPeople(Connection* connection, const v1::ListRunsResponse& response) {
  std::set<std::string> muted;
  const std::map<std::string, v1::Transition> worst = WorstAlerts(connection, &muted);
  Table table{.columns = {"RUN", "STATE", "SEV", "HEAD", "SINCE", "LEFT", "STAGE", "STEP", "LOSS", "REPORT"},
              .texts = {"-"},  // None of them is a sentence.
              .spare = {"LOSS", "STEP", "REPORT", "STAGE"}};
  for (const v1::Run& run : response.runs()) {
    const auto found = worst.find(run.description().uuid());
    const v1::Transition alert = found == worst.end() ? v1::Transition() : found->second;
    const bool ill = found != worst.end();
    const int colour = !ill                                        ? -1
                       : alert.severity() == v1::SEVERITY_CRITICAL ? 196
                       : alert.severity() == v1::SEVERITY_WARNING  ? 214
                                                                   : -1;
    table.rows.push_back(
        {run.description().name(), StateOf(run),
         Cell(ill ? SeverityName(alert.severity()) : Health(run, muted.contains(run.description().uuid())), colour),
         ill ? HeadText(alert.layer(), alert.head()) : "-", ill ? Integer(alert.first_step()) : "-", EtaText(run.eta()),
         Stage(run), Integer(run.step()), LossText(run, 4), Time(run.last_report_unix_ns())});
  }
  return table;
}

void SayHowToBegin(const Connection& connection) {
  const std::string server = connection.is_private() ? "" : "BELLWETHER_SERVER=" + connection.address() + " ";
  Complain("no run yet at " + connection.address() + "; to begin: " + server + "python -m bellwether run train.py");
  if (!connection.is_private()) {
    if (const std::string earlier = EarlierRuns("bellwether open --private"); !earlier.empty()) Complain(earlier);
  }
}

}  // namespace bellwether::cli
