// baseline list, get.
#include <algorithm>
#include <string>
#include <vector>

#include "cli/cli.h"

namespace bellwether::cli {
namespace {

ExitCode ListKinds(Cli* cli, const NoOptions&) {
  return CallAndPrint<v1::ListBaselinesRequest, v1::ListBaselinesResponse>(
      cli, &v1::Query::Stub::ListBaselines, {}, [cli](const v1::ListBaselinesResponse& response) {
        Table table{.columns = {"RUNS", "STEPS", "NEWEST", "KIND"}};
        for (const v1::Baseline& baseline : response.baselines()) {
          int64_t steps = 0;
          for (const v1::BaselineRun& run : baseline.runs()) steps = std::max<int64_t>(steps, run.step());
          table.rows.push_back({std::to_string(baseline.runs_size()), Integer(steps),
                                baseline.runs_size() > 0 ? baseline.runs(0).run() : "-", baseline.kind()});
        }
        Print(cli->output, table, response);
        ComplainOf(response.unanswered(), "runs are missing here");
        if (response.baselines_size() + response.unanswered_size() == 0) Complain("no run has ended healthy yet");
        return kOk;
      });
}

struct GetBaselineOptions {
  std::string run, signal;
};

ExitCode GetBaseline(Cli* cli, const GetBaselineOptions& options) {
  v1::GetBaselineRequest request;
  request.set_run(options.run);
  request.set_signal(options.signal);
  return CallAndPrint<v1::GetBaselineRequest, v1::GetBaselineResponse>(
      cli, &v1::Query::Stub::GetBaseline, request, [cli](const v1::GetBaselineResponse& response) {
        Section runs{.title = response.baseline().kind()};
        runs.table.columns = {"RUN", "STEP", "LEARNED"};
        for (const v1::BaselineRun& run : response.baseline().runs()) {
          runs.table.rows.push_back({run.run(), Integer(run.step()), Time(run.learned_unix_ns())});
        }
        Section bands{.title = "bands"};
        bands.table.columns = {"SIGNAL", "FROM STEP", "TO STEP", "RUNS",    "MIN",    "P1",
                               "P50",    "P99",       "MAX",     "ITS P50", "ITS MAX"};
        for (const v1::BaselineBand& item : response.bands()) {
          const v1::SiblingBand& band = item.band();
          bands.table.rows.push_back({SignalText(item.signal()), Integer(band.step_begin()),
                                      Integer(band.step_end() - 1), std::to_string(band.runs()), Number(band.min(), 4),
                                      Number(band.p01(), 4), Number(band.p50(), 4), Number(band.p99(), 4),
                                      Number(band.max(), 4), item.has_run() ? Number(item.run().p50(), 4) : "-",
                                      item.has_run() ? Number(item.run().max(), 4) : "-"});
        }
        Print(cli->output, {runs, bands}, response);
        if (response.baseline().runs_size() == 0) Complain("no run of its kind has ended healthy yet");
        return kOk;
      });
}

}  // namespace

void AddBaselines(Cli* cli) {
  CLI::App* const noun = AddNoun(cli, "baseline", "What healthy runs looked like, for those that come after");
  CLI::App* command = nullptr;
  AddCommand<NoOptions>(cli, noun, "list", "Lists the kinds of runs of which healthy ones are known",
                        "bellwether baseline list", &ListKinds, &command);
  auto* const get =
      AddCommand<GetBaselineOptions>(cli, noun, "get", "Shows what a run's siblings looked like, by stage of training",
                                     "bellwether baseline get my-run --signal drift_ratio", &GetBaseline, &command);
  command->add_option("run", get->run, "the run's name, or its uuid in hexadecimal")->required()->type_name("RUN");
  command
      ->add_option("--signal", get->signal,
                   "a signal of the catalogue, or one that jobs have named themselves; else all of them")
      ->type_name("SIGNAL");
}

}  // namespace bellwether::cli
