// policy_commands.h: bellwetherd policy check, explain, dry-run, defaults and reference.

#ifndef BELLWETHER_SERVER_COMMANDS_POLICY_COMMANDS_H_
#define BELLWETHER_SERVER_COMMANDS_POLICY_COMMANDS_H_

#include <optional>
#include <string>
#include <vector>

#include "server/detect/judge_options.h"

namespace CLI {
class App;
}

namespace bellwether::server {

class PolicyCommands {
 public:
  // Adds `policy` with its commands; `app` must outlive this object.  Returns
  // the dry run, whose judge's options the caller passes to Run().
  CLI::App* AddTo(CLI::App* app);

  // Runs the command that was parsed, if one of ours was.  The exit code: 0
  // good, 1 failed, 3 findings in a file.
  std::optional<int> Run(const JudgeOptions& judge) const;

 private:
  int Check() const;
  int Explain() const;
  int DryRun(const JudgeOptions& judge) const;

  CLI::App* check_ = nullptr;
  CLI::App* explain_ = nullptr;
  CLI::App* dry_run_ = nullptr;
  CLI::App* defaults_ = nullptr;
  CLI::App* reference_ = nullptr;
  std::string file_, mode_;
  std::vector<std::string> files_, runs_;
  bool json_ = false;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_COMMANDS_POLICY_COMMANDS_H_
