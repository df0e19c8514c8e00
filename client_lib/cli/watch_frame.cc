#include "cli/watch_frame.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>

#include "bellwether/time_text.h"
#include "cli/cli.h"

namespace bellwether::cli {
namespace {

constexpr size_t kStripRowsMin = 3;
constexpr size_t kStripRowsMax = 32;
constexpr int kAlertsMax = 5;
constexpr size_t kActionsMax = 4;

std::string Painted(const std::string& text, const char* code, Palette palette) {
  return palette == Palette::kPlain ? text : std::string("\x1b[") + code + "m" + text + "\x1b[0m";
}

// Where the run stands.
std::vector<std::string> Header(const v1::Run& run, int64_t now_unix_ns) {
  std::string state = "live";
  if (run.ended()) state = "ended" + (run.end_reason().empty() ? "" : ": " + run.end_reason());
  std::vector<std::string> lines = {
      run.description().name() + "  attempt " + std::to_string(run.description().attempt()) + "  step " +
          Integer(run.step()) + "  stage " + Stage(run) + "  " + state,
      "loss " + LossText(run, 5, "not reported") + "  last report " +
          (run.last_report_unix_ns() == 0
               ? "never"
               : TimeText(1e-9 * static_cast<double>(now_unix_ns - run.last_report_unix_ns())) + " ago, " +
                     Date(run.last_report_unix_ns()))};
  const v1::Eta& eta = run.eta();
  if (eta.known()) {
    const auto steps = [](double value) { return Integer(std::llround(value)); };
    lines.push_back("time left: " + steps(eta.steps()) + " steps (" + steps(eta.lower_steps()) + ".." +
                    steps(eta.upper_steps()) + " with 80 %), near step " +
                    steps(static_cast<double>(run.step()) + eta.steps()) +
                    (eta.step_seconds() > 0 ? ", in " + TimeText(eta.steps() * eta.step_seconds()) : ""));
  }
  return lines;
}

Table Heads(const v1::TopHeadsResponse& top) {
  Table table{.columns = {"LAYER", "HEAD", SignalText(top.signal()), "MEDIAN", "PEER SCORE", "STAGE"}};
  for (const v1::TopHead& head : top.heads()) {
    table.rows.push_back({std::to_string(head.layer()), std::to_string(head.head()), Number(head.value(), 4),
                          Number(head.median(), 4), Number(head.peer_score(), 3), Stage(head.stage())});
  }
  return table;
}

Table Alerts(const v1::ListAlertsResponse& alerts) {
  Table table{.columns = {"SEVERITY", "RULE", "HEAD", "SINCE", "ETA", "SUMMARY"}};
  if (ForPeople()) table.columns[4] = "LEFT";
  for (int i = 0; i < std::min(alerts.alerts_size(), kAlertsMax); ++i) {
    const v1::Alert& alert = alerts.alerts(i);
    const v1::Transition& last = alert.last();
    const int colour = alert.muted()                              ? -1
                       : last.severity() == v1::SEVERITY_CRITICAL ? 196
                       : last.severity() == v1::SEVERITY_WARNING  ? 214
                                                                  : -1;
    const bool known = ForPeople() && !last.cause().empty() && last.cause() != "unknown";
    const std::string cause = known ? " [" + last.cause() + "]" : "";
    table.rows.push_back({Cell(SeverityName(last.severity()), colour), last.rule(), HeadText(last.layer(), last.head()),
                          Integer(last.first_step()), EtaText(last.eta()),
                          (alert.muted()          ? "(false alarm) "
                           : alert.acknowledged() ? "(acknowledged) "
                                                  : "") +
                              SummaryText(last) + cause});
  }
  return table;
}

// Of the worst alert that fires: people look after it, or nothing is to be done.
std::string Advice(const v1::ListAlertsResponse& alerts) {
  const v1::Transition* worst = nullptr;
  for (const v1::Alert& alert : alerts.alerts()) {
    if (alert.muted() || alert.last().advice().empty()) continue;
    if (worst == nullptr || alert.last().severity() > worst->severity()) worst = &alert.last();
  }
  return worst == nullptr ? "" : "do: " + DoText(*worst);
}

// The newest first: those that wait, are on their way or on trial.
Table Actions(const v1::ListActionsResponse& actions) {
  Table table = ActionTable();
  for (int i = actions.actions_size() - 1; i >= 0 && table.rows.size() < kActionsMax; --i) {
    const v1::ActionState state = actions.actions(i).state();
    if (state == v1::ACTION_STATE_PROPOSED || state == v1::ACTION_STATE_APPROVED || state == v1::ACTION_STATE_SENT ||
        state == v1::ACTION_STATE_APPLIED) {
      table.rows.push_back(ActionRow(actions.actions(i)));
    }
  }
  return table;
}

}  // namespace

std::vector<std::string> Frame(const RunState& state, const std::string& trouble, int64_t now_unix_ns,
                               const FrameOptions& options) {
  const bool colours = options.palette != Palette::kPlain;
  const size_t cut = options.cut ? options.width : 0;
  const auto fit = [&](const std::string& line) { return cut == 0 ? Clean(line) : CutTo(Clean(line), cut); };
  std::vector<std::string> above;
  for (const std::string& line : Header(state.run, now_unix_ns)) {
    above.push_back(above.empty() ? Painted(fit(line), "1", options.palette) : fit(line));
  }
  if (!trouble.empty()) above.push_back(Painted(fit(trouble), "7", options.palette));
  above.emplace_back();

  std::vector<std::string> below;
  const auto add = [&](const std::string& title, const Table& table) {
    below.emplace_back();
    if (table.rows.empty()) {
      below.push_back(fit("no " + title));
      return;
    }
    for (std::string& line : Lines(table, /*headers=*/true, cut, colours)) below.push_back(std::move(line));
  };
  // What a person needs first: a page that is too small shows the rest in part.
  add("alerts firing", Alerts(state.alerts));
  if (state.alerts.alerts_size() > kAlertsMax) {
    below.push_back(fit("and " + std::to_string(state.alerts.alerts_size() - kAlertsMax) + " more"));
  }
  if (const std::string advice = Advice(state.alerts); !advice.empty()) {
    bool first = true;
    for (const std::string& part : Wrap(Clean(advice), cut == 0 ? SIZE_MAX - 1 : std::max<size_t>(cut, 5) - 4)) {
      below.push_back((first ? "" : "    ") + part);
      first = false;
    }
  }
  add("heads by " + SignalText(state.top.signal()), Heads(state.top));
  add("open actions", Actions(state.actions));

  // The strip gets what the rest leaves: its title and its axis take two.
  size_t rows = kStripRowsMax;
  if (options.height > 0) {
    const size_t taken = above.size() + below.size() + 2;
    const size_t least = std::clamp(options.height / 4, kStripRowsMin, kStripRowsMax);
    rows = std::clamp(options.height > taken ? options.height - taken : 0, least, kStripRowsMax);
  }
  std::vector<std::string> lines = std::move(above);
  for (std::string& line : HeatStrip(state.matrix, options.width, rows, options.palette))
    lines.push_back(std::move(line));
  for (std::string& line : below) lines.push_back(std::move(line));
  if (options.height > 0 && lines.size() > options.height) lines.resize(options.height);
  return lines;
}

}  // namespace bellwether::cli
