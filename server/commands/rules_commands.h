// rules_commands.h: bellwetherd rules check, test, explain, defaults and reference,
// and the rules file that other offline commands take.

#ifndef BELLWETHER_SERVER_COMMANDS_RULES_COMMANDS_H_
#define BELLWETHER_SERVER_COMMANDS_RULES_COMMANDS_H_

#include <optional>
#include <string>
#include <vector>

#include "server/detect/judge_options.h"

namespace CLI {
class App;
}

namespace bellwether::server {

class RulesCommands {
 public:
  // Adds `rules` with its commands; `app` must outlive this object.
  void AddTo(CLI::App* app);
  // Adds --rules to a command that judges.
  void AddFlag(CLI::App* command);

  // Runs the command that was parsed, if one of ours was.  The exit code: 0
  // good, 1 failed, 3 findings in a file.
  std::optional<int> Run() const;
  // The options of --rules, or the built-in ones.  An exit code, with the
  // findings on standard error, if the file is not good.
  std::optional<int> ReadFlag(JudgeOptions* options) const;

 private:
  int Check() const;
  int Test() const;
  int Explain() const;

  CLI::App* check_ = nullptr;
  CLI::App* test_ = nullptr;
  CLI::App* explain_ = nullptr;
  CLI::App* defaults_ = nullptr;
  CLI::App* reference_ = nullptr;
  std::string file_, rule_, flag_;
  std::vector<std::string> files_;  // To check, or of tests.
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_COMMANDS_RULES_COMMANDS_H_
