// head top, matrix.
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "cli/cli.h"
#include "cli/heat.h"

namespace bellwether::cli {
namespace {

struct TopOptions {
  std::string run, signal;
  uint32_t limit = 10;
  int64_t step = -1;
};

ExitCode Top(Cli* cli, const TopOptions& options) {
  v1::TopHeadsRequest request;
  request.set_run(options.run);
  request.set_signal(options.signal);
  request.set_limit(options.limit);
  request.set_step(options.step);
  return CallAndPrint<v1::TopHeadsRequest, v1::TopHeadsResponse>(
      cli, &v1::Query::Stub::TopHeads, request, [cli](const v1::TopHeadsResponse& response) {
        Table table{.columns = {"LAYER", "HEAD", SignalText(response.signal()), "MEDIAN", "PEER SCORE", "STAGE"}};
        for (const v1::TopHead& head : response.heads()) {
          table.rows.push_back({std::to_string(head.layer()), std::to_string(head.head()), Number(head.value()),
                                Number(head.median()), Number(head.peer_score(), 3), Stage(head.stage())});
        }
        Print(cli->output, table, response);
        if (response.heads_size() == 0) Complain("no sample of " + response.signal() + " at or before that step");
        return kOk;
      });
}

struct MatrixOptions {
  std::string run, signal;
  int64_t step = -1;
};

// Five shades from cold to hot; the numbers say the same.
int Colour(const HeatScale& scale, float value) {
  static constexpr int kShades[] = {-1, -1, 149, 214, 196};
  if (std::isnan(value)) return 201;
  return kShades[std::min(static_cast<int>(scale.Place(value) * 5), 4)];
}

ExitCode Matrix(Cli* cli, const MatrixOptions& options) {
  v1::GetMatrixRequest request;
  request.set_run(options.run);
  request.set_signal(options.signal);
  request.set_step(options.step);
  return CallAndPrint<v1::GetMatrixRequest, v1::GetMatrixResponse>(
      cli, &v1::Query::Stub::GetMatrix, request, [cli](const v1::GetMatrixResponse& matrix) {
        const HeatScale scale({matrix.values().data(), static_cast<size_t>(matrix.values_size())});
        const uint32_t layers = matrix.values_size() == 0 ? 0 : matrix.layers();
        // On a terminal the heads are wrapped into blocks that fit.
        constexpr size_t kCellWidth = 11;
        const size_t width = cli->output.format == Format::kTable ? TerminalWidth() : 0;
        const uint32_t block = width == 0 ? std::max(matrix.heads(), 1u)
                                          : static_cast<uint32_t>(std::max<size_t>((width - 1) / kCellWidth, 2) - 1);
        std::vector<Section> sections;
        for (uint32_t begin = 0; begin < std::max(matrix.heads(), 1u); begin += block) {
          const uint32_t end = std::min(begin + block, matrix.heads());
          Section section;
          if (begin == 0 && cli->output.headers) {
            section.title = SignalText(matrix.signal()) + " at step " + Integer(matrix.step());
          }
          section.table.fit = false;
          section.table.columns.push_back(matrix.names_size() > 0 ? "row" : "layer");
          for (uint32_t head = begin; head < end; ++head) {
            section.table.columns.push_back(
                std::string(cli->output.format == Format::kTable ? "H" : "").append(std::to_string(head)));
          }
          for (uint32_t layer = 0; layer < layers; ++layer) {
            const auto at = static_cast<int>(layer);
            std::vector<Cell> row = {at < matrix.names_size() ? Cell(matrix.names(at)) : Cell(std::to_string(layer))};
            for (uint32_t head = begin; head < end; ++head) {
              const float value = matrix.values(static_cast<int>(layer * matrix.heads() + head));
              row.emplace_back(Number(value, 4), Colour(scale, value));
            }
            section.table.rows.push_back(std::move(row));
          }
          sections.push_back(std::move(section));
        }
        Print(cli->output, sections, matrix);
        if (matrix.step() < 0) Complain("no sample of " + matrix.signal() + " at or before that step");
        return kOk;
      });
}

}  // namespace

void AddHeads(Cli* cli) {
  CLI::App* const noun = AddNoun(cli, "head", "Attention heads");
  CLI::App* command = nullptr;
  auto* const top = AddCommand<TopOptions>(cli, noun, "top", "Lists the heads with the worst values of a signal",
                                           "bellwether head top my-run --signal wq_sigma --limit 5", &Top, &command);
  command->add_option("run", top->run, "the run's name or uuid")->required()->type_name("RUN");
  command->add_option("--signal", top->signal, "a signal of the catalogue; else drift_ratio, else what there is")
      ->type_name("SIGNAL");
  command->add_option("--limit", top->limit, "at most so many, 1..1024")->capture_default_str();
  command->add_option("--step", top->step, "the last sample at or before it; else the newest")
      ->check(CLI::NonNegativeNumber);
  AddWatch(cli, command);

  auto* const matrix =
      AddCommand<MatrixOptions>(cli, &cli->app, "matrix", "Shows a signal of every head, layers down, heads across",
                                "bellwether matrix my-run drift_ratio --step 12000", &Matrix, &command);
  command->add_option("run", matrix->run, "the run's name or uuid")->required()->type_name("RUN");
  command->add_option("signal", matrix->signal, "a signal of the catalogue, such as drift_ratio")
      ->required()
      ->type_name("SIGNAL");
  command->add_option("--step", matrix->step, "the last sample at or before it; else the newest")
      ->check(CLI::NonNegativeNumber);
  AddWatch(cli, command);
}

}  // namespace bellwether::cli
