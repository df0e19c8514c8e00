// series get.
#include <charconv>
#include <string>
#include <vector>

#include "cli/cli.h"

namespace bellwether::cli {
namespace {

struct GetSeriesOptions {
  std::string run;
  std::vector<std::string> series;
  int64_t from = 0, to = 0;
  uint32_t points = 1000;
  int32_t attempt = -1;
};

bool ParseIndex(const std::string& text, uint32_t* index) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *index);
  return error == std::errc() && end == text.data() + text.size();
}

// signal, or signal:layer:head, or signal@name of a tensor or module, which may hold anything.
bool ParseSeries(const std::string& text, v1::SeriesId* id) {
  if (const size_t name = text.find('@'); name != std::string::npos) {
    id->set_signal(text.substr(0, name));
    id->set_name(text.substr(name + 1));
    return name > 0 && name + 1 < text.size();
  }
  const size_t first = text.find(':');
  id->set_signal(text.substr(0, first));
  if (first == std::string::npos) return !text.empty();
  const size_t second = text.find(':', first + 1);
  if (second == std::string::npos) return false;
  uint32_t layer = 0, head = 0;
  if (!ParseIndex(text.substr(first + 1, second - first - 1), &layer)) return false;
  if (!ParseIndex(text.substr(second + 1), &head)) return false;
  id->set_layer(layer);
  id->set_head(head);
  return first > 0;
}

ExitCode GetSeries(Cli* cli, const GetSeriesOptions& options) {
  v1::GetSeriesRequest request;
  request.set_run(options.run);
  for (const std::string& text : options.series) {
    if (!ParseSeries(text, request.add_series())) {
      Complain(
          "series \"" + text +
          "\": must be SIGNAL:LAYER:HEAD, such as drift_ratio:3:5, SIGNAL@NAME of a tensor or module, or SIGNAL for "
          "a run's own");
      return kUsage;
    }
  }
  request.set_step_begin(options.from);
  request.set_step_end(options.to);
  request.set_points_max(options.points);
  request.set_attempt(options.attempt);
  return CallAndPrint<v1::GetSeriesRequest, v1::GetSeriesResponse>(
      cli, &v1::Query::Stub::GetSeries, request, [cli](const v1::GetSeriesResponse& response) {
        // One row a point, so that series of different steps fit one table.
        Table table{.columns = {"SIGNAL", "LAYER", "HEAD", "STEP", "MIN", "MEAN", "MAX"}};
        for (const v1::Series& series : response.series()) {
          // With the name that was asked for: a row's number means nothing to people.
          const std::string& name = series.id().name();
          const std::string signal = SignalText(series.id().signal()) + (name.empty() ? "" : "@" + name);
          for (int i = 0; i < series.step_size(); ++i) {
            table.rows.push_back({signal, std::to_string(series.id().layer()), std::to_string(series.id().head()),
                                  std::to_string(series.step(i)), Number(series.min(i), 9), Number(series.mean(i), 9),
                                  Number(series.max(i), 9)});
          }
        }
        Print(cli->output, table, response);
        return kOk;
      });
}

}  // namespace

void AddSeries(Cli* cli) {
  CLI::App* const noun = AddNoun(cli, "series", "Time series of runs and heads");
  CLI::App* command = nullptr;
  auto* const get = AddCommand<GetSeriesOptions>(cli, noun, "get", "Shows series over steps",
                                                 "bellwether series get my-run drift_ratio:3:5 loss --from 1000 -o csv",
                                                 &GetSeries, &command);
  command->add_option("run", get->run, "the run's name or uuid")->required()->type_name("RUN");
  command
      ->add_option("series", get->series,
                   "SIGNAL:LAYER:HEAD, SIGNAL@NAME of a tensor or module, or SIGNAL for a run's own; up to 64")
      ->required()
      ->type_name("SERIES");
  command->add_option("--from", get->from, "first step")->check(CLI::NonNegativeNumber);
  command->add_option("--to", get->to, "the step after the last; 0 = to the end")->check(CLI::NonNegativeNumber);
  command->add_option("--points", get->points, "at most so many a series, 1..10000; more are merged")
      ->capture_default_str();
  command->add_option("--attempt", get->attempt, "one attempt only; else the newest that wrote the step");
}

}  // namespace bellwether::cli
