// The bellwether command.
#include <pwd.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <iostream>
#include <map>
#include <string>
#include <string_view>

#include "cli/cli.h"

namespace bellwether::cli {

using namespace std::chrono_literals;

CLI::App* AddNoun(Cli* cli, const std::string& name, const std::string& what) {
  CLI::App* const noun = cli->app.add_subcommand(name, what);
  noun->require_subcommand(1);
  noun->footer("Each has an example: bellwether " + name + " COMMAND --help");
  return noun;
}

void AddTime(CLI::App* command, const std::string& name, std::chrono::milliseconds* value,
             std::chrono::milliseconds min, std::chrono::milliseconds max, const std::string& what) {
  const auto text_of = [](std::chrono::milliseconds time) {
    const auto ms = time.count();
    if (ms % 86'400'000 == 0) return std::to_string(ms / 86'400'000) + "d";
    if (ms % 60'000 == 0) return std::to_string(ms / 60'000) + "m";
    return ms % 1000 == 0 ? std::to_string(ms / 1000) + "s" : std::to_string(ms) + "ms";
  };
  const std::string range = text_of(min) + ".." + text_of(max);
  command
      ->add_option_function<std::string>(
          name,
          [name, value, min, max, range](const std::string& text) {
            static const std::map<std::string, double> kUnits = {
                {"ms", 1}, {"s", 1e3}, {"m", 60e3}, {"h", 3600e3}, {"d", 86400e3}};
            char* unit = nullptr;
            const double number = std::strtod(text.c_str(), &unit);
            if (unit != text.c_str() && *unit == '\0') {
              throw CLI::ValidationError(name,
                                         "\"" + text + "\": needs a unit, such as " + text + "s; legal is " + range);
            }
            const auto found = kUnits.find(unit);
            const double ms = found == kUnits.end() || unit == text.c_str() ? 0 : number * found->second;
            if (!(ms >= static_cast<double>(min.count()) && ms <= static_cast<double>(max.count()))) {
              throw CLI::ValidationError(name, "\"" + text + "\": must be " + range + ", such as 10s or 2m");
            }
            *value = std::chrono::milliseconds(static_cast<int64_t>(ms));
          },
          what + ", " + range + (value->count() == 0 ? "" : " (default " + text_of(*value) + ")"))
      ->type_name("TIME");
}

std::string UserName() {
  if (const char* const user = std::getenv("USER"); user != nullptr && *user != '\0') return user;
  const passwd* const entry = getpwuid(geteuid());
  return entry != nullptr ? entry->pw_name : "";
}

namespace {

void AddGlobals(Cli* cli) {
  CLI::App& app = cli->app;
  app.name("bellwether");
  app.description("Asks a bellwetherd about runs, heads and alerts.");
  app.footer(
      "Examples:\n"
      "  bellwether run list\n"
      "  bellwether head top my-run --signal drift_ratio\n"
      "  bellwether alert watch --severity warning\n"
      "\n"
      "Exit codes: 0 ok, 1 failed, 2 usage, 3 findings (lint, or alerts firing with\n"
      "--exit-code), 4 no server answers, 5 denied.");
  app.require_subcommand(1);
  app.fallthrough();
  app.get_formatter()->column_width(36);
  app.add_option("--server", cli->connect.server,
                 "HOST:PORT or unix:PATH of the server; else 127.0.0.1:7070, else your own private server")
      ->envname("BELLWETHER_SERVER");
  app.add_option("--tls-ca", cli->connect.tls_ca, "PEM file: the authorities of the server's certificate")
      ->envname("BELLWETHER_TLS_CA")
      ->check(CLI::ExistingFile);
  app.add_option("--tls-cert", cli->connect.tls_cert, "PEM file: your certificate")
      ->envname("BELLWETHER_TLS_CERT")
      ->check(CLI::ExistingFile);
  app.add_option("--tls-key", cli->connect.tls_key, "PEM file: its key")
      ->envname("BELLWETHER_TLS_KEY")
      ->check(CLI::ExistingFile);
  app.add_option("--token-file", cli->connect.token_file, "file that holds your token")
      ->envname("BELLWETHER_TOKEN_FILE")
      ->check(CLI::ExistingFile);
  AddTime(&app, "--timeout", &cli->connect.timeout, 1ms, 60min, "how long one answer may take");
  AddChoice<Format>(
      &app, "-o,--output", &cli->output.format,
      {{"table", Format::kTable}, {"json", Format::kJson}, {"yaml", Format::kYaml}, {"csv", Format::kCsv}},
      "how results are printed");
  app.add_flag_callback(
      "--no-headers", [cli] { cli->output.headers = false; }, "tables and CSV without their first line");
  app.add_flag_callback(
      "--wide", [cli] { cli->output.wide = true; },
      "on a terminal as in a pipe: every column, a line each, times as dates");
}

}  // namespace
}  // namespace bellwether::cli

int main(int argc, char** argv) {
  using namespace bellwether::cli;
  // What fails is said in our words, once; gRPC's own lines are for whoever asks for them.
  setenv("GRPC_VERBOSITY", "NONE", /*overwrite=*/0);
  Cli cli;
  AddGlobals(&cli);
  AddRuns(&cli);
  AddOpen(&cli);
  AddHeads(&cli);
  AddSeries(&cli);
  AddTensors(&cli);
  AddAlerts(&cli);
  AddActions(&cli);
  AddPolicies(&cli);
  AddBaselines(&cli);
  AddServer(&cli);
  AddAccess(&cli);
  AddReplay(&cli);
  AddCompletion(&cli);
  if (argc > 2 && std::string_view(argv[1]) == "completion" && std::string_view(argv[2]) == kCandidates) {
    return Candidates(&cli, {argv + 3, argv + argc});
  }
  try {
    cli.app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    const bool failed = error.get_exit_code() != static_cast<int>(CLI::ExitCodes::Success);
    if (const std::string why = failed ? WhyNoCommand(&cli.app, {argv + 1, argv + argc}) : ""; !why.empty()) {
      Complain(why);
      return kUsage;
    }
    if (dynamic_cast<const CLI::RequiredError*>(&error) != nullptr) {
      if (const std::string which = WhichIsMissing(&cli.app, {argv + 1, argv + argc}); !which.empty()) {
        Complain(which);
        return kUsage;
      }
    }
    // CLI11 has codes of its own; help is a success and goes to stdout.
    if (!failed) return cli.app.exit(error, std::cout, std::cerr) == 0 ? kOk : kUsage;
    Complain(std::string(error.what()) + " (see --help)");
    return kUsage;
  }
  SetForPeople(cli.output);
  const ExitCode code = cli.every.count() > 0 ? Repeat(&cli) : cli.action();
  std::cout.flush();
  return code;
}
