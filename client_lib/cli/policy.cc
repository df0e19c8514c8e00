// policy get, set; check, explain and dry-run, which bellwetherd does, offline.
#include <iostream>
#include <string>
#include <vector>

#include "cli/cli.h"
#include "client_lib/src/regular_file.h"

namespace bellwether::cli {
namespace {

constexpr size_t kPolicyBytesMax = 1 << 20;

const char* ModeName(v1::Policy::Mode mode) {
  return mode == v1::Policy::MODE_OBSERVE   ? "observe"
         : mode == v1::Policy::MODE_PROPOSE ? "propose"
         : mode == v1::Policy::MODE_ENFORCE ? "enforce"
                                            : "-";
}

// The policy as the file that would set it again.
ExitCode PrintPolicy(Cli* cli, const v1::Policy& policy) {
  if (cli->output.format != Format::kTable) {
    const Table table{.columns = {"MODE", "OWN", "YAML"},
                      .rows = {{ModeName(policy.mode()), policy.own() ? "yes" : "no", policy.yaml()}}};
    Print(cli->output, table, policy);
    return kOk;
  }
  std::cout << "# " << (policy.own() ? "set for this run" : "the server's") << ", mode " << ModeName(policy.mode())
            << '\n'
            << policy.yaml();
  if (!policy.yaml().empty() && policy.yaml().back() != '\n') std::cout << '\n';
  return kOk;
}

struct GetPolicyOptions {
  std::string run;
};

ExitCode GetPolicy(Cli* cli, const GetPolicyOptions& options) {
  v1::GetPolicyRequest request;
  request.set_run(options.run);
  return CallAndPrint<v1::GetPolicyRequest, v1::Policy>(
      cli, &v1::Query::Stub::GetPolicy, request, [cli](const v1::Policy& policy) { return PrintPolicy(cli, policy); });
}

struct SetOptions {
  std::string run, file, by = UserName();
  v1::Policy::Mode mode = v1::Policy::MODE_UNSPECIFIED;
  bool reset = false;
};

ExitCode Set(Cli* cli, const SetOptions& options) {
  const int ways =
      (options.file.empty() ? 0 : 1) + (options.mode == v1::Policy::MODE_UNSPECIFIED ? 0 : 1) + options.reset;
  if (ways != 1) {
    Complain("policy set: give one of FILE, --mode and --reset");
    return kUsage;
  }
  v1::SetPolicyRequest request;
  request.set_run(options.run);
  request.set_by(options.by);
  request.mutable_policy()->set_mode(options.mode);
  if (!options.file.empty()) {
    std::string why;
    if (!client::ReadRegularFile(options.file, kPolicyBytesMax, request.mutable_policy()->mutable_yaml(), &why)) {
      Complain(options.file + ": " + why);
      return kFailed;
    }
    if (request.policy().yaml().empty()) {
      Complain(options.file + ": is empty; --reset goes back to the server's policy");
      return kUsage;
    }
  }
  return CallAndPrint<v1::SetPolicyRequest, v1::Policy>(
      cli, &v1::Query::Stub::SetPolicy, request, [cli](const v1::Policy& policy) { return PrintPolicy(cli, policy); });
}

struct OfflineOptions {
  std::string file, mode, rules;
  std::vector<std::string> runs;
  bool json = false;
};

template <const char* command>
ExitCode Offline(Cli*, const OfflineOptions& options) {
  std::vector<std::string> arguments = {"policy", command};
  if (options.json) arguments.emplace_back("--json");
  if (!options.mode.empty()) arguments.insert(arguments.end(), {"--mode", options.mode});
  if (!options.rules.empty()) arguments.insert(arguments.end(), {"--rules", options.rules});
  if (!options.file.empty()) arguments.push_back(options.file);
  arguments.insert(arguments.end(), options.runs.begin(), options.runs.end());
  Execute(arguments);
  return kFailed;
}
constexpr char kCheckPolicy[] = "check";
constexpr char kExplainPolicy[] = "explain";
constexpr char kDryRun[] = "dry-run";

void AddOffline(Cli* cli, CLI::App* noun) {
  CLI::App* command = nullptr;
  auto* options = AddCommand<OfflineOptions>(cli, noun, kCheckPolicy, "Checks policy files; exits with 3 on findings",
                                             "bellwether policy check policy.yml", &Offline<kCheckPolicy>, &command);
  command->add_option("files", options->runs, "the policies")->required()->check(CLI::ExistingFile);
  options = AddCommand<OfflineOptions>(cli, noun, kExplainPolicy, "Says in sentences what is done about which alert",
                                       "bellwether policy explain policy.yml", &Offline<kExplainPolicy>, &command);
  command->add_option("file", options->file, "the policy; what is built in without one")->check(CLI::ExistingFile);
  options = AddCommand<OfflineOptions>(
      cli, noun, kDryRun, "Says what a policy would have done in recorded runs (.bwrun), when and why",
      "bellwether policy dry-run policy.yml run.bwrun --mode enforce", &Offline<kDryRun>, &command);
  command->add_option("file", options->file, "the policy")->required()->check(CLI::ExistingFile);
  command->add_option("runs", options->runs, "the recordings")->required()->check(CLI::ExistingFile);
  AddChoice<std::string>(command, "--mode", &options->mode,
                         {{"observe", "observe"}, {"propose", "propose"}, {"enforce", "enforce"}},
                         "whatever the file says");
  command->add_option("--rules", options->rules, "judge by this rules file")->check(CLI::ExistingFile);
  command->add_flag("--json", options->json, "one JSON object a line per run");
}

}  // namespace

void AddPolicies(Cli* cli) {
  CLI::App* const noun = AddNoun(cli, "policy", "What may be done about a run's alerts, and its approvers");
  CLI::App* command = nullptr;

  auto* const get = AddCommand<GetPolicyOptions>(cli, noun, "get", "The policy in force",
                                                 "bellwether policy get my-run", &GetPolicy, &command);
  command->add_option("run", get->run, "the run's name or uuid")->required()->type_name("RUN");

  auto* const set = AddCommand<SetOptions>(cli, noun, "set", "Another policy for one run",
                                           "bellwether policy set my-run policy.yml", &Set, &command);
  command->add_option("run", set->run, "the run's name or uuid")->required()->type_name("RUN");
  command->add_option("file", set->file, "the policy, YAML")->type_name("FILE");
  AddChoice<v1::Policy::Mode>(command, "--mode", &set->mode,
                              {{"observe", v1::Policy::MODE_OBSERVE},
                               {"propose", v1::Policy::MODE_PROPOSE},
                               {"enforce", v1::Policy::MODE_ENFORCE}},
                              "the built-in policy in this mode");
  command->add_flag("--reset", set->reset, "the server's own policy again");
  command->add_option("--by", set->by, "your name; else $USER, else your login");
  AddOffline(cli, noun);
}

}  // namespace bellwether::cli
