// replay, check config, rules: work that bellwetherd itself does, offline; scorecard: bellwether-lab's.
//
// A replay must judge as the server judges, so it is the server's binary that
// runs: the one beside this command, else the one in $PATH.  The laboratory is
// found in the same way.
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <iostream>
#include <string>
#include <vector>

#include "cli/cli.h"

namespace bellwether::cli {
namespace {

std::string Find(const std::string& program) {
  std::error_code error;
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe", error);
  if (!error) {
    const std::filesystem::path beside = self.parent_path() / program;
    if (access(beside.c_str(), X_OK) == 0) return beside;
  }
  return program;  // execvp looks in $PATH.
}

}  // namespace

void Execute(const std::vector<std::string>& arguments, const std::string& program) {
  const std::string binary = Find(program);
  std::vector<char*> argv = {const_cast<char*>(binary.c_str())};
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  std::cout.flush();
  execvp(binary.c_str(), argv.data());
  Complain(program + " cannot be started: " + std::string(std::strerror(errno)) +
           "; it is looked for beside this command, then in $PATH");
}

namespace {

struct ReplayOptions {
  std::string file, rules;
  bool json = false;
  CLI::App* command = nullptr;
};

ExitCode Replay(Cli*, const ReplayOptions& options) {
  std::vector<std::string> arguments = {"replay", options.file};
  if (options.json) arguments.push_back("--json");
  if (!options.rules.empty()) arguments.insert(arguments.end(), {"--rules", options.rules});
  for (const std::string& extra : options.command->remaining()) arguments.push_back(extra);
  Execute(arguments);
  return kFailed;
}

struct ScorecardOptions {
  std::string folder, labels, rules;
  std::vector<std::string> without;
  bool json = false, bars = false, ablate = false, tune = false, synthetic = false;
  std::string runs, seed;
};

ExitCode Scorecard(Cli*, const ScorecardOptions& options) {
  std::vector<std::string> arguments = {"scorecard"};
  const auto flag = [&](const char* name, bool given) {
    if (given) arguments.emplace_back(name);
  };
  const auto value = [&](const char* name, const std::string& text) {
    if (!text.empty()) arguments.insert(arguments.end(), {name, text});
  };
  flag("--json", options.json);
  flag("--bars", options.bars);
  flag("--ablate", options.ablate);
  flag("--tune", options.tune);
  flag("--synthetic", options.synthetic);
  value("--labels", options.labels);
  value("--rules", options.rules);
  value("--runs", options.runs);
  value("--seed", options.seed);
  for (const std::string& test : options.without) value("--without", test);
  if (!options.folder.empty()) arguments.push_back(options.folder);
  Execute(arguments, "bellwether-lab");
  return kFailed;
}

struct RulesOptions {
  std::string file, rule;
  std::vector<std::string> files;  // To check, or of tests.
};

template <const char* command>
ExitCode Rules(Cli*, const RulesOptions& options) {
  std::vector<std::string> arguments = {"rules", command};
  arguments.insert(arguments.end(), options.files.begin(), options.files.end());
  for (const std::string& word : {options.file, options.rule}) {
    if (!word.empty()) arguments.push_back(word);
  }
  Execute(arguments);
  return kFailed;
}
constexpr char kCheckRules[] = "check";
constexpr char kTest[] = "test";
constexpr char kExplainRules[] = "explain";

void AddRules(Cli* cli) {
  CLI::App* const noun = AddNoun(cli, "rules", "Thresholds and own rules, as files");
  CLI::App* command = nullptr;
  auto* options = AddCommand<RulesOptions>(cli, noun, "check", "Checks rules files; exits with 3 on findings",
                                           "bellwether rules check rules.yml", &Rules<kCheckRules>, &command);
  command->add_option("files", options->files, "the rules")->required()->check(CLI::ExistingFile);
  options = AddCommand<RulesOptions>(cli, noun, "test",
                                     "Runs tests of rules on made-up series; exits with 1 if some fail, 3 on findings",
                                     "bellwether rules test rules_test.yml", &Rules<kTest>, &command);
  command->add_option("files", options->files, "the tests")->required()->check(CLI::ExistingFile);
  options =
      AddCommand<RulesOptions>(cli, noun, "explain", "Says in sentences when each rule fires, with its numbers",
                               "bellwether rules explain rules.yml drift.growth", &Rules<kExplainRules>, &command);
  command->add_option("file", options->file, "the rules")->required()->check(CLI::ExistingFile);
  command->add_option("rule", options->rule, "this one only");
}

struct CheckOptions {
  std::string file;
};

ExitCode CheckConfig(Cli*, const CheckOptions& options) {
  const pid_t child = fork();
  if (child < 0) {
    Complain(std::string("fork: ") + std::strerror(errno));
    return kFailed;
  }
  if (child == 0) {
    Execute({"--config.check", "--config.file=" + options.file});
    _exit(127);
  }
  int status = 0;
  while (waitpid(child, &status, 0) < 0) {
    if (errno != EINTR) return kFailed;
  }
  if (!WIFEXITED(status) || WEXITSTATUS(status) == 127) return kFailed;
  return WEXITSTATUS(status) == 0 ? kOk : kFindings;
}

}  // namespace

void AddReplay(Cli* cli) {
  CLI::App* command = nullptr;
  auto* const replay = AddCommand<ReplayOptions>(
      cli, &cli->app, "replay", "Judges recorded runs (.bwrun) with the server's own detectors, offline",
      "bellwether replay run.bwrun --json", &Replay, &command);
  replay->command = command;
  command->add_option("file", replay->file, "the recording, or a folder of them; more may follow")
      ->required()
      ->check(CLI::ExistingPath);
  command->add_flag("--json", replay->json, "one JSON object a line per transition");
  command->add_option("--rules", replay->rules, "judge by this rules file")->check(CLI::ExistingFile);
  command->allow_extras();      // The rest is bellwetherd's,
  command->fallthrough(false);  // so no flag of this command is looked for there.

  auto* const scorecard = AddCommand<ScorecardOptions>(
      cli, &cli->app, "scorecard",
      "How early and how rightly the detectors warn over a folder of recorded runs, beside the rules that others use",
      "bellwether scorecard runs/ --json", &Scorecard, &command);
  command->add_option("dir", scorecard->folder, "the folder of .bwrun files; not for --synthetic")
      ->check(CLI::ExistingDirectory);
  command
      ->add_option("--labels", scorecard->labels,
                   "what became of the runs [labels.json in the folder, else found in the runs]")
      ->check(CLI::ExistingFile);
  command->add_option("--without", scorecard->without, "switch a test off, such as drift.leak or ties; may be repeated")
      ->allow_extra_args(false);
  command->add_flag("--json", scorecard->json,
                    "one JSON object a line per run, then one with \"run\": null for the set");
  command->add_flag("--bars", scorecard->bars, "exit with 1 if a bar is missed; else it is a report");
  command->add_flag("--ablate", scorecard->ablate, "what each test is worth: the runs without it");
  command->add_flag("--tune", scorecard->tune,
                    "what tuning wins on all runs, and on runs that it did not see (minutes)");
  command->add_flag("--synthetic", scorecard->synthetic,
                    "false alarms in made-up healthy runs of 1,024 heads (minutes)");
  command->add_option("--runs", scorecard->runs, "synthetic runs of each kind [5]");
  command->add_option("--seed", scorecard->seed, "of the first synthetic run of each kind [1]");

  command->add_option("--rules", scorecard->rules, "judge by this rules file")->check(CLI::ExistingFile);
  AddRules(cli);

  CLI::App* const noun = AddNoun(cli, "check", "Checks files without a server");
  auto* const config =
      AddCommand<CheckOptions>(cli, noun, "config", "Checks a server configuration; exits with 3 on findings",
                               "bellwether check config bellwether.yml", &CheckConfig, &command);
  command->add_option("file", config->file, "the configuration")->required()->check(CLI::ExistingFile);
}

}  // namespace bellwether::cli
