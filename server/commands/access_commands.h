// access_commands.h: bellwetherd cert and bellwetherd token: what a set-up with
// TLS and identities needs, made in a minute.

#ifndef BELLWETHER_SERVER_COMMANDS_ACCESS_COMMANDS_H_
#define BELLWETHER_SERVER_COMMANDS_ACCESS_COMMANDS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "server/commands/command_result.h"

namespace CLI {
class App;
}

namespace bellwether::server {

class AccessCommands {
 public:
  // Adds `cert` and `token`; `app` must outlive this object.
  void AddTo(CLI::App* app);
  // Runs the command that was parsed, if one of ours was.  The exit code: 0
  // good, 1 failed, 3 findings in a file.
  std::optional<int> Run() const;

 private:
  int CertInit() const;
  int CertServer() const;
  int CertClient() const;
  int CertRevoke() const;
  int CertShow() const;
  int TokenCreate() const;
  int TokenList() const;
  int TokenRevoke() const;

  CLI::App* cert_init_ = nullptr;
  CLI::App* cert_server_ = nullptr;
  CLI::App* cert_client_ = nullptr;
  CLI::App* cert_revoke_ = nullptr;
  CLI::App* cert_show_ = nullptr;
  CLI::App* token_create_ = nullptr;
  CLI::App* token_list_ = nullptr;
  CLI::App* token_revoke_ = nullptr;
  std::string folder_, name_, uri_, file_, out_, id_, expires_;
  bool replace_ = false;
  std::vector<std::string> hosts_;
  int64_t days_ = 365, authority_days_ = 3650;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_COMMANDS_ACCESS_COMMANDS_H_
