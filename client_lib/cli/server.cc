// server info, version.
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "cli/cli.h"

namespace bellwether::cli {
namespace {

ExitCode Info(Cli* cli, const NoOptions&) {
  return CallAndPrint<v1::GetServerInfoRequest, v1::ServerInfo>(
      cli, &v1::Query::Stub::GetServerInfo, v1::GetServerInfoRequest(), [cli](const v1::ServerInfo& info) {
        const std::vector<std::string> columns = {"FIELD", "VALUE"};
        std::vector<Section> sections = {{.table = {.columns = columns,
                                                    .rows = {{"version", info.version()},
                                                             {"revision", info.revision()},
                                                             {"grpc_version", info.grpc_version()},
                                                             {"backend", info.backend()},
                                                             {"started", Time(info.started_unix_ns())},
                                                             {"storage_path", info.storage_path()},
                                                             {"http_address", info.http_address()},
                                                             {"grpc_address", info.grpc_address()}}}}};
        const auto add = [&](const char* title, const auto& values, const auto& text) {
          // Sorted: a protobuf map has no order.
          std::map<std::string, std::string> sorted;
          for (const auto& [name, value] : values) sorted[name] = text(value);
          Section section{.title = title, .table = {.columns = columns}};
          for (const auto& [name, value] : sorted) section.table.rows.push_back({name, value});
          sections.push_back(std::move(section));
        };
        const auto number = [](double value) { return Number(value, 12); };
        add("options", info.options(), [](const std::string& value) { return value; });
        add("limits", info.limits(), number);
        add("counters", info.counters(), number);
        if (info.partitions_size() > 0) {
          Section section{.title = "partitions", .table = {.columns = {"PARTITION", "EPOCH"}}};
          for (const v1::HeldPartition& held : info.partitions()) {
            section.table.rows.push_back({std::to_string(held.number()), std::to_string(held.epoch())});
          }
          sections.push_back(std::move(section));
        }
        Print(cli->output, sections, info);
        return kOk;
      });
}

ExitCode Version(Cli* cli, const NoOptions&) {
  const nlohmann::ordered_json json = {{"version", BELLWETHER_VERSION}, {"grpc_version", grpc::Version()}};
  switch (cli->output.format) {
    case Format::kJson:
      std::cout << json.dump(2) << '\n';
      break;
    case Format::kYaml:
      std::cout << ToYaml(json.dump());
      break;
    case Format::kTable:
    case Format::kCsv:
      std::cout << "bellwether " << BELLWETHER_VERSION << " (gRPC " << grpc::Version() << ")\n";
      break;
  }
  return kOk;
}

}  // namespace

void AddServer(Cli* cli) {
  CLI::App* const noun = AddNoun(cli, "server", "The server itself");
  CLI::App* command = nullptr;
  AddCommand<NoOptions>(cli, noun, "info", "Shows its version, options, limits and counters", "bellwether server info",
                        &Info, &command);
  AddCommand<NoOptions>(cli, &cli->app, "version", "Shows the version of this command", "bellwether version", &Version,
                        &command);
}

}  // namespace bellwether::cli
