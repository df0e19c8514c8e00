#include "server/commands/policy_commands.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <memory>

#include "server/act/policy.h"
#include "server/act/policy_text.h"
#include "server/commands/command_result.h"
#include "server/offline/policy_dry_run.h"

namespace bellwether::server {
CLI::App* PolicyCommands::AddTo(CLI::App* app) {
  CLI::App* const policy =
      app->add_subcommand("policy", "check, explain and try a policy file: what is done about alerts");
  policy->require_subcommand(1);
  check_ = policy->add_subcommand("check", "check policy files: 0 good, 3 findings");
  check_->add_option("files", files_, "the policies")->required();
  explain_ = policy->add_subcommand("explain", "say in sentences what is done about which alert");
  explain_->add_option("file", file_, "the policy [what is built in]");
  dry_run_ = policy->add_subcommand("dry-run", "say what would have been done in recorded runs, and when");
  dry_run_->add_option("file", file_, "the policy")->required();
  dry_run_->add_option("runs", runs_, "the .bwrun files")->required();
  dry_run_->add_option("--mode", mode_, "observe, propose or enforce, whatever the file says")
      ->check(CLI::IsMember({"observe", "propose", "enforce"}));
  dry_run_->add_flag("--json", json_, "one JSON object a line per run");
  defaults_ = policy->add_subcommand("defaults", "print what is built in as a policy file");
  reference_ = policy->add_subcommand("reference", "print docs/reference/policy.md");
  return dry_run_;
}

std::optional<int> PolicyCommands::Run(const JudgeOptions& judge) const {
  if (check_->parsed()) return Check();
  if (explain_->parsed()) return Explain();
  if (dry_run_->parsed()) return DryRun(judge);
  if (!reference_->parsed() && !defaults_->parsed()) return std::nullopt;
  std::fputs((defaults_->parsed() ? std::string(DefaultPolicyText()) : PolicyReference()).c_str(), stdout);
  return kCommandOk;
}

int PolicyCommands::Check() const {
  return ForEachFile(files_, "have findings", [](const std::string& file) {
    const auto policy = ReadPolicy(file);
    if (!policy.ok()) return policy.status();
    std::printf("%s: good, mode %s, %zu rules\n", file.c_str(), NameOf((*policy)->mode), (*policy)->rules.size());
    return absl::OkStatus();
  });
}

int PolicyCommands::Explain() const {
  PolicyPtr policy = DefaultPolicy();
  if (!file_.empty()) {
    const auto read = ReadPolicy(file_);
    if (!read.ok()) return Report(read.status());
    policy = *read;
  }
  std::fputs(ExplainPolicy(*policy).c_str(), stdout);
  return kCommandOk;
}

int PolicyCommands::DryRun(const JudgeOptions& judge) const {
  const auto read = ReadPolicy(file_);
  if (!read.ok()) return Report(read.status());
  auto policy = std::make_shared<Policy>(**read);
  for (const PolicyMode mode : {PolicyMode::kObserve, PolicyMode::kPropose, PolicyMode::kEnforce}) {
    if (mode_ == NameOf(mode)) policy->mode = mode;
  }
  if (!json_) {
    std::puts(
        "Dry run: every action is taken for applied at the next step by a trainer that allows it, a proposal for "
        "approved.\nWhat it would have changed is not known: the recorded run goes on as if nothing helped or hurt, "
        "and verdicts speak of that.");
  }
  const int code = ForEachFile(runs_, "could not be judged", [&](const std::string& file) {
    const auto run =
        DryRunPolicy([&](RunListener* listener) { return WalkRecordedRun(file, listener); }, policy, judge);
    if (!run.ok()) return run.status();
    std::printf(json_ ? "%s\n" : "\n%s", (json_ ? DryRunJson(*run) : DryRunText(*run)).c_str());
    return absl::OkStatus();
  });
  return code == kCommandOk ? kCommandOk : kCommandFailed;  // A recording has no findings.
}

}  // namespace bellwether::server
