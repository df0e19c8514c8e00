#include "server/commands/rules_commands.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>

#include "server/commands/command_result.h"
#include "server/detect/rules_file.h"
#include "server/detect/rules_text.h"
#include "server/offline/rule_tests.h"

namespace bellwether::server {
void RulesCommands::AddTo(CLI::App* app) {
  CLI::App* const rules = app->add_subcommand("rules", "check, test and explain a rules file");
  rules->require_subcommand(1);
  check_ = rules->add_subcommand("check", "check rules files: 0 good, 3 findings");
  check_->add_option("files", files_, "the rules")->required();
  test_ = rules->add_subcommand("test", "run tests of rules: 0 all passed, 1 some failed, 3 findings in a file");
  test_->add_option("files", files_, "the tests")->required();
  explain_ = rules->add_subcommand("explain", "say in sentences when each rule fires");
  explain_->add_option("file", file_, "the rules [what is built in]");
  explain_->add_option("rule", rule_, "this one only");
  defaults_ = rules->add_subcommand("defaults", "print what is built in as a rules file");
  reference_ = rules->add_subcommand("reference", "print docs/reference/rules.md");
}

void RulesCommands::AddFlag(CLI::App* command) {
  command->add_option("--rules", flag_, "judge by this rules file [what is built in]");
}

std::optional<int> RulesCommands::Run() const {
  if (check_->parsed()) return Check();
  if (test_->parsed()) return Test();
  if (explain_->parsed()) return Explain();
  if (!reference_->parsed() && !defaults_->parsed()) return std::nullopt;
  std::fputs((defaults_->parsed() ? BuiltinRulesFile() : RulesReference()).c_str(), stdout);
  return kCommandOk;
}

std::optional<int> RulesCommands::ReadFlag(JudgeOptions* options) const {
  if (flag_.empty()) return std::nullopt;
  const auto rules = ReadRules(flag_);
  if (!rules.ok()) return Report(rules.status());
  *options = (*rules)->options;
  return std::nullopt;
}

int RulesCommands::Check() const {
  return ForEachFile(files_, "have findings", [](const std::string& file) {
    const auto rules = ReadRules(file);
    if (!rules.ok()) return rules.status();
    const size_t own = (*rules)->options.rules == nullptr ? 0 : (*rules)->options.rules->size();
    std::printf("%s: good, %zu own rules\n", file.c_str(), own);
    return absl::OkStatus();
  });
}

int RulesCommands::Test() const {
  size_t passed = 0;
  size_t failed = 0;
  const int code = ForEachFile(files_, "could not be run", [&](const std::string& file) {
    const auto results = RunRuleTests(file);
    if (!results.ok()) return results.status();
    for (const RuleTestResult& result : *results) {
      ++(result.failures.empty() ? passed : failed);
      std::printf("%s  %s: %s\n", result.failures.empty() ? "ok    " : "FAILED", file.c_str(), result.name.c_str());
      for (const std::string& failure : result.failures) std::printf("        %s\n", failure.c_str());
    }
    return absl::OkStatus();
  });
  std::printf("%zu passed, %zu failed\n", passed, failed);
  return std::max(code, failed > 0 ? kCommandFailed : kCommandOk);
}

int RulesCommands::Explain() const {
  JudgeOptions options;
  if (!file_.empty()) {
    const auto rules = ReadRules(file_);
    if (!rules.ok()) return Report(rules.status());
    options = (*rules)->options;
  }
  const auto text = ExplainRules(options, rule_);
  if (!text.ok()) return Report(text.status());
  std::fputs(text->c_str(), stdout);
  return kCommandOk;
}

}  // namespace bellwether::server
