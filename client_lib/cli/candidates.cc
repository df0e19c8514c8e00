// What fits where the cursor stands: commands, flags, the words of a choice,
// signals, and what the server knows by name.
//
// Printed a line each, with its help behind a tab; ":files" = names of files.
#include <algorithm>
#include <chrono>
#include <iostream>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bellwether/signal_table.h"
#include "cli/cli.h"
#include "cli/nearest.h"

namespace bellwether::cli {
namespace {

using namespace std::chrono_literals;

// Longer, and a shell seems to hang.
constexpr auto kPatience = 1s;
constexpr uint32_t kNamesMax = 200;

bool TakesValue(const CLI::Option* option) { return option->get_items_expected_max() > 0; }

class Answer {
 public:
  Answer(Cli* cli, CommandWords place, std::string current)
      : cli_(cli), place_(std::move(place)), current_(std::move(current)) {}

  void Print() {
    const size_t equals = current_.find('=');
    if (place_.awaits != nullptr) {
      Values(place_.awaits);
    } else if (current_.rfind("--", 0) == 0 && equals != std::string::npos) {
      const CLI::Option* option = place_.command->get_option_no_throw(current_.substr(0, equals));
      if (option == nullptr) option = cli_->app.get_option_no_throw(current_.substr(0, equals));
      prefix_ = current_.substr(0, equals + 1);
      if (option != nullptr) Values(option);
    } else if (!current_.empty() && current_[0] == '-') {
      Flags();
    } else {
      for (const CLI::App* command : place_.command->get_subcommands([](const CLI::App*) { return true; })) {
        Offer(command->get_name(), command->get_description());
      }
      Positional();
    }
  }

 private:
  void Offer(const std::string& word, const std::string& help = "") {
    const std::string whole = prefix_ + word;
    if (whole.rfind(current_, 0) == 0) std::cout << whole << '\t' << Clean(help) << '\n';
  }

  void Flags() {
    std::vector<const CLI::Option*> options = place_.command->get_options();
    const std::vector<const CLI::Option*> globals = GlobalsOf(place_.command);
    options.insert(options.end(), globals.begin(), globals.end());
    for (const CLI::Option* option : options) {
      for (const std::string& name : option->get_lnames()) Offer("--" + name, option->get_description());
      for (const std::string& name : option->get_snames()) Offer("-" + name, option->get_description());
    }
  }

  void Positional() {
    std::vector<const CLI::Option*> positionals;
    for (const CLI::Option* option : place_.command->get_options()) {
      if (option->get_positional()) positionals.push_back(option);
    }
    const size_t given = place_.positionals.size();
    if (given < positionals.size()) {
      Values(positionals[given]);
    } else if (!positionals.empty() && positionals.back()->get_items_expected_max() > 1) {
      Values(positionals.back());
    }
  }

  void Values(const CLI::Option* option) {
    const std::string type = option->get_type_name();
    if (type.find('|') != std::string::npos) {
      for (size_t begin = 0; begin <= type.size();) {
        const size_t end = std::min(type.find('|', begin), type.size());
        Offer(type.substr(begin, end - begin));
        begin = end + 1;
      }
    } else if (type == "SIGNAL" || type == "SERIES") {
      for (size_t i = 0; i < SignalCount(); ++i) Offer(SignalTable()[i].name, SignalTable()[i].help);
    } else if (type == "RUN" || type == "KEY" || type == "ID") {
      FromServer(type);
    } else if (type.find("FILE") != std::string::npos || type.find("DIR") != std::string::npos) {
      std::cout << ":files\n";
    }
  }

  // Nothing is offered if nobody answers: a shell is no place for errors.
  void FromServer(const std::string& type) {
    // CLI11 takes the words from behind; it reads the environment's ones too.
    std::vector<std::string> words = {"version"};
    words.insert(words.end(), place_.globals.rbegin(), place_.globals.rend());
    try {
      cli_->app.parse(std::move(words));
    } catch (const CLI::ParseError&) {
      return;
    }
    cli_->connect.timeout = kPatience;
    ExitCode code = kOk;
    std::string why;
    const std::unique_ptr<Connection> connection = TryConnect(cli_->connect, &code, &why);
    if (connection == nullptr) return;
    grpc::ClientContext context;
    connection->Prepare(&context);
    if (type == "RUN") {
      v1::ListRunsRequest request;
      request.set_limit(kNamesMax);
      v1::ListRunsResponse runs;
      if (!connection->stub().ListRuns(&context, request, &runs).ok()) return;
      for (const v1::Run& run : runs.runs()) {
        Offer(run.description().name(), "step " + Integer(run.step()) + ", stage " + Stage(run));
      }
      return;
    }
    const std::string run = place_.positionals.empty() ? "" : place_.positionals[0];
    if (type == "KEY") {
      v1::ListAlertsRequest request;
      request.set_run(run);
      request.set_limit(kNamesMax);
      v1::ListAlertsResponse alerts;
      if (!connection->stub().ListAlerts(&context, request, &alerts).ok()) return;
      for (const v1::Alert& alert : alerts.alerts()) Offer(alert.last().key(), alert.last().summary());
      return;
    }
    v1::ListActionsRequest request;
    request.set_run(run);
    v1::ListActionsResponse actions;
    if (!connection->stub().ListActions(&context, request, &actions).ok()) return;
    for (const v1::Action& action : actions.actions()) {
      Offer(action.id(), ActionRow(action)[1].text + ": " + ActionRow(action)[2].text);
    }
  }

  Cli* const cli_;
  const CommandWords place_;
  const std::string current_;
  std::string prefix_;  // "--output=" while its value is written.
};

}  // namespace

CommandWords WalkCommand(const CLI::App* root, const std::vector<std::string>& words) {
  CommandWords found{.command = root};
  bool global = false;
  for (const std::string& word : words) {
    if (found.awaits != nullptr) {
      if (global) found.globals.push_back(word);
      found.awaits = nullptr;
    } else if (word.size() > 1 && word[0] == '-') {
      const size_t equals = word.find('=');
      const std::string name = word.substr(0, equals);
      const CLI::Option* option = found.command->get_option_no_throw(name);
      global = option == nullptr || found.command == root;
      if (option == nullptr) option = root->get_option_no_throw(name);
      if (option == nullptr) continue;
      if (global) found.globals.push_back(word);
      if (TakesValue(option) && equals == std::string::npos) found.awaits = option;
    } else if (const CLI::App* const command = FindCommand(found.command, word); command != nullptr) {
      found.command = command;
    } else {
      found.positionals.push_back(word);
    }
  }
  return found;
}

std::vector<const CLI::Option*> GlobalsOf(const CLI::App* command) {
  std::vector<const CLI::Option*> globals;
  const CLI::App* root = command;
  while (root->get_parent() != nullptr) root = root->get_parent();
  if (root == command) return globals;
  for (const CLI::Option* option : root->get_options()) {
    const auto own = [command](const std::string& dashes, const std::vector<std::string>& names) {
      return std::any_of(names.begin(), names.end(), [&](const std::string& name) {
        return command->get_option_no_throw(dashes + name) != nullptr;
      });
    };
    if (!own("--", option->get_lnames()) && !own("-", option->get_snames())) globals.push_back(option);
  }
  return globals;
}

ExitCode Candidates(Cli* cli, const std::vector<std::string>& words) {
  if (words.empty()) return kOk;
  Answer(cli, WalkCommand(&cli->app, {words.begin(), words.end() - 1}), words.back()).Print();
  return kOk;
}

}  // namespace bellwether::cli
