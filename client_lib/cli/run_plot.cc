// run plot: asks for the worst heads, their series and what happened, and draws.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bellwether/signal_table.h"
#include "cli/cli.h"
#include "cli/plot.h"

namespace bellwether::cli {
namespace {

// In the order of cause and effect.
constexpr const char* kStory[] = {"drift_ratio", "key_leak", "tied_fraction_bf16", "delta_bias_t", "wq_sigma",
                                  "logit_max",   "loss"};
constexpr uint32_t kHeadsRanked = 64;
constexpr size_t kAlertsDrawn = 5, kActionsDrawn = 4, kEventsDrawn = 4;
// How far ahead of the run the axis goes for what is expected, in its length.
constexpr double kAhead = 0.5;

struct PlotOptions {
  std::string run, file, size = "1200x900";
  std::vector<std::string> signals, heads;
  uint32_t count = 4;
  int64_t from = 0, to = 0;
};

struct HeadOfLayer {
  uint32_t layer, head;
  std::string Name() const { return HeadText(static_cast<int32_t>(layer), static_cast<int32_t>(head)); }
};

// Everything of one `run plot`; the first failed call ends it.
class Plotter {
 public:
  Plotter(Connection* connection, const PlotOptions& options, std::vector<HeadOfLayer> heads)
      : connection_(connection), options_(options), heads_(std::move(heads)) {}

  grpc::Status Gather(Plot* plot) {
    v1::GetRunRequest get;
    get.set_run(options_.run);
    if (grpc::Status s = Call(&v1::Query::Stub::GetRun, get, &run_); !s.ok()) return s;
    if (heads_.empty()) {
      if (grpc::Status s = RankHeads(); !s.ok()) return s;
    }
    const auto end = static_cast<double>(run_.step()) + 1;
    plot->step_begin = static_cast<double>(options_.from);
    plot->step_end = options_.to > 0 ? static_cast<double>(options_.to) : end;
    if (grpc::Status s = Panels(plot); !s.ok()) return s;
    if (grpc::Status s = Spans(plot); !s.ok()) return s;
    const v1::Eta& eta = run_.eta();
    const auto now = static_cast<double>(run_.step());
    if (eta.known() && options_.to == 0) {
      plot->predicted = true;
      plot->expected = now + eta.steps();
      plot->expected_low = now + eta.lower_steps();
      plot->expected_high = now + eta.upper_steps();
      plot->step_end = std::min(plot->expected_high, end + kAhead * (end - plot->step_begin));
    }
    plot->title = run_.description().name();
    plot->subtitle =
        run_.description().model() + ", " + run_.description().attention().kernel() + " " +
        run_.description().attention().score_dtype() + ", " + std::to_string(run_.description().layout().layers()) +
        " layers x " + std::to_string(run_.description().layout().heads()) + " heads; step " + Integer(run_.step()) +
        ", stage " + Stage(run_) + (eta.known() ? "; divergence expected in " + EtaText(eta) + " steps" : "");
    return grpc::Status::OK;
  }

 private:
  template <typename Request, typename Response>
  grpc::Status Call(grpc::Status (v1::Query::Stub::*method)(grpc::ClientContext*, const Request&, Response*),
                    const Request& request, Response* response) {
    grpc::ClientContext context;
    connection_->Prepare(&context);
    return (connection_->stub().*method)(&context, request, response);
  }

  // By stage, then by drift: the same heads in every panel.
  grpc::Status RankHeads() {
    v1::TopHeadsRequest request;
    request.set_run(options_.run);
    request.set_limit(kHeadsRanked);
    request.set_step(-1);
    v1::TopHeadsResponse top;
    if (grpc::Status s = Call(&v1::Query::Stub::TopHeads, request, &top); !s.ok()) return s;
    std::vector<v1::TopHead> ranked(top.heads().begin(), top.heads().end());
    std::stable_sort(ranked.begin(), ranked.end(),
                     [](const v1::TopHead& a, const v1::TopHead& b) { return a.stage() > b.stage(); });
    for (size_t i = 0; i < std::min<size_t>(ranked.size(), options_.count); ++i) {
      heads_.push_back({ranked[i].layer(), ranked[i].head()});
    }
    return grpc::Status::OK;
  }

  grpc::Status Panels(Plot* plot) {
    const bool asked = !options_.signals.empty();
    const std::vector<std::string> signals =
        asked ? options_.signals : std::vector<std::string>(std::begin(kStory), std::end(kStory));
    for (const std::string& signal : signals) {
      PlotPanel panel{.title = signal};
      if (grpc::Status s = Series(signal, &panel); !s.ok()) return s;
      // Of the story, what the run does not tell is left out.
      if (asked || !panel.series.empty()) plot->panels.push_back(std::move(panel));
    }
    return grpc::Status::OK;
  }

  grpc::Status Series(const std::string& signal, PlotPanel* panel) {
    const SignalInfo* const info = FindSignal(std::string_view(signal));
    const v1::Layout& layout = run_.description().layout();
    v1::GetSeriesRequest request;
    request.set_run(options_.run);
    request.set_step_begin(options_.from);
    request.set_step_end(options_.to);
    request.set_attempt(-1);
    std::vector<std::pair<std::string, size_t>> names;
    const auto add = [&](uint32_t layer, uint32_t head, std::string name, size_t colour) {
      v1::SeriesId* const id = request.add_series();
      id->set_signal(signal);
      id->set_layer(layer);
      id->set_head(head);
      names.emplace_back(std::move(name), colour);
    };
    if (info == nullptr || info->granularity == Granularity::kRun) {
      add(0, 0, "run", kRunColour);  // An unknown signal: the server says so.
    } else {
      for (size_t i = 0; i < heads_.size(); ++i) {
        uint32_t head = heads_[i].head;
        if (info->granularity == Granularity::kKvHead && layout.heads() > 0) {
          head = head * layout.kv_heads() / layout.heads();
        }
        add(heads_[i].layer, head, heads_[i].Name(), i);
      }
    }
    if (request.series().empty()) return grpc::Status::OK;
    v1::GetSeriesResponse response;
    if (grpc::Status s = Call(&v1::Query::Stub::GetSeries, request, &response); !s.ok()) return s;
    for (int i = 0; i < response.series_size(); ++i) {
      const v1::Series& from = response.series(i);
      if (from.step().empty()) continue;
      panel->series.push_back({.name = names[static_cast<size_t>(i)].first,
                               .colour = names[static_cast<size_t>(i)].second,
                               .step = {from.step().begin(), from.step().end()},
                               .low = {from.min().begin(), from.min().end()},
                               .mean = {from.mean().begin(), from.mean().end()},
                               .high = {from.max().begin(), from.max().end()}});
    }
    return grpc::Status::OK;
  }

  grpc::Status Spans(Plot* plot) {
    v1::ListAlertsRequest list;
    list.set_run(options_.run);
    v1::ListAlertsResponse alerts;
    if (grpc::Status s = Call(&v1::Query::Stub::ListAlerts, list, &alerts); !s.ok()) return s;
    const auto end = static_cast<double>(run_.step());
    for (const v1::Alert& alert : alerts.alerts()) {
      if (plot->spans.size() == kAlertsDrawn) break;
      const v1::Transition& last = alert.last();
      const bool critical = last.severity() == v1::SEVERITY_CRITICAL;
      plot->spans.push_back({.begin = static_cast<double>(last.first_step()),
                             .end = last.state() == v1::ALERT_STATE_RESOLVED ? static_cast<double>(last.step()) : end,
                             .text = std::string(SeverityName(last.severity())) + " " + last.rule() +
                                     (last.layer() < 0 ? "" : " " + HeadText(last.layer(), last.head())),
                             .rgb = critical ? 0xd7191cu : 0xf0a30au,
                             .shade = last.severity() >= v1::SEVERITY_WARNING});
    }
    v1::ListActionsRequest asked;
    asked.set_run(options_.run);
    v1::ListActionsResponse actions;
    if (grpc::Status s = Call(&v1::Query::Stub::ListActions, asked, &actions); !s.ok()) return s;
    for (int i = std::max(0, actions.actions_size() - static_cast<int>(kActionsDrawn)); i < actions.actions_size();
         ++i) {
      if (!actions.actions(i).history().empty()) plot->spans.push_back(SpanOf(actions.actions(i), end));
    }
    v1::ListEventsRequest of;
    of.set_run(options_.run);
    of.set_limit(kEventsDrawn);
    v1::ListEventsResponse events;
    if (grpc::Status s = Call(&v1::Query::Stub::ListEvents, of, &events); !s.ok()) return s;
    if (events.total() > kEventsDrawn) {  // The newest are drawn.
      of.set_after(events.total() - kEventsDrawn);
      if (grpc::Status s = Call(&v1::Query::Stub::ListEvents, of, &events); !s.ok()) return s;
    }
    size_t drawn = 0;
    for (int i = events.events_size() - 1; i >= 0 && drawn < kEventsDrawn; --i) {
      const v1::Event& event = events.events(i);
      const auto step = static_cast<double>(event.step());
      plot->spans.push_back({.begin = step,
                             .end = step,
                             .text = EventKindName(event.kind()) + (event.text().empty() ? "" : ": ") + event.text(),
                             .rgb = 0x555555,
                             .shade = false});
      ++drawn;
    }
    return grpc::Status::OK;
  }

  // From where it was applied to where it was taken back; else the moment of
  // its last change.
  static PlotSpan SpanOf(const v1::Action& action, double end) {
    const v1::ActionChange& last = action.history(action.history_size() - 1);
    PlotSpan span{.begin = static_cast<double>(last.step()),
                  .end = static_cast<double>(last.step()),
                  .text = ActionRow(action)[1].text + ": " + ActionRow(action)[2].text,
                  .rgb = 0x2c7bb6,
                  .shade = false};
    for (const v1::ActionChange& change : action.history()) {
      if (change.state() != v1::ACTION_STATE_APPLIED) continue;
      span.begin = static_cast<double>(change.step());
      if (action.state() != v1::ACTION_STATE_UNDONE) span.end = end;
      span.shade = true;
      break;
    }
    return span;
  }

  static constexpr size_t kRunColour = 6;

  Connection* const connection_;
  const PlotOptions& options_;
  std::vector<HeadOfLayer> heads_;
  v1::Run run_;
};

// False: it complained.
bool ParseHeads(const std::vector<std::string>& words, std::vector<HeadOfLayer>* heads) {
  for (const std::string& word : words) {
    HeadOfLayer head{};
    char rest = 0;
    if (std::sscanf(word.c_str(), "%u/%u%c", &head.layer, &head.head, &rest) != 2) {
      Complain("--head " + word + ": must be LAYER/HEAD, such as 3/5");
      return false;
    }
    heads->push_back(head);
  }
  return true;
}

bool ParseSize(const std::string& text, int* width, int* height) {
  char rest = 0;
  if (std::sscanf(text.c_str(), "%dx%d%c", width, height, &rest) == 2 && *width >= 400 && *width <= 10000 &&
      *height >= 300 && *height <= 10000) {
    return true;
  }
  Complain("--size " + text + ": must be WIDTHxHEIGHT, 400x300 to 10000x10000 pixels");
  return false;
}

ExitCode Run(Cli* cli, const PlotOptions& options) {
  const std::filesystem::path file = options.file;
  const bool png = file.extension() == ".png";
  if (!png && file.extension() != ".svg") {
    Complain("--output " + options.file + ": must end in .svg or .png");
    return kUsage;
  }
  int width = 0, height = 0;
  std::vector<HeadOfLayer> heads;
  if (!ParseSize(options.size, &width, &height) || !ParseHeads(options.heads, &heads)) return kUsage;

  ExitCode code = kOk;
  if (!CanReplace(options.file)) return kFailed;
  const std::unique_ptr<Connection> connection = Connect(cli->connect, &code);
  if (connection == nullptr) return code;
  Plot plot;
  const grpc::Status status = Plotter(connection.get(), options, std::move(heads)).Gather(&plot);
  if (!status.ok()) return Report(*connection, status);
  std::string why;
  const std::unique_ptr<Canvas> canvas =
      png ? NewPngCanvas(width, height, &why) : NewSvgCanvas(width, height, plot.title);
  // Under another name until it is whole.
  const std::string part = options.file + ".part";
  std::error_code error;
  if (canvas != nullptr) {
    Draw(plot, width, height, canvas.get());
    if (canvas->Write(part, &why)) std::filesystem::rename(part, file, error);
    if (error) why = options.file + ": " + error.message();
  }
  if (why.empty()) return kOk;
  std::filesystem::remove(part, error);
  Complain(why);
  return kFailed;
}

}  // namespace

void AddRunPlot(Cli* cli, CLI::App* noun) {
  CLI::App* command = nullptr;
  auto* const plot = AddCommand<PlotOptions>(
      cli, noun, "plot", "Draws the worst heads of a run, from the drift to the loss, with alerts and actions",
      "bellwether run plot my-run -o my-run.svg", &Run, &command);
  command->add_option("run", plot->run, "the run's name, or its uuid in hexadecimal")->required()->type_name("RUN");
  command->add_option("-o,--output", plot->file, "the picture, .svg or .png (by libcairo.so.2)")
      ->required()
      ->type_name("FILE");
  command
      ->add_option("--signal", plot->signals,
                   "a panel of this signal; may be repeated (default: the story from drift_ratio to loss)")
      ->allow_extra_args(false)
      ->type_name("SIGNAL");
  auto* const head =
      command->add_option("--head", plot->heads, "LAYER/HEAD to draw; may be repeated (default: the worst)")
          ->allow_extra_args(false)
          ->type_name("LAYER/HEAD");
  command->add_option("--heads", plot->count, "so many of the worst heads, 1..8")
      ->check(CLI::Range(1, 8))
      ->type_name("COUNT")
      ->capture_default_str()
      ->excludes(head);
  command->add_option("--from", plot->from, "first step")->check(CLI::NonNegativeNumber);
  command->add_option("--to", plot->to, "the step after the last; 0 = to the end, and what is expected")
      ->check(CLI::NonNegativeNumber);
  command->add_option("--size", plot->size, "pixels")->type_name("WIDTHxHEIGHT")->capture_default_str();
}

}  // namespace bellwether::cli
