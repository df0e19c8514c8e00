// storage_commands.h: bellwetherd check-data, backup and restore.

#ifndef BELLWETHER_SERVER_COMMANDS_STORAGE_COMMANDS_H_
#define BELLWETHER_SERVER_COMMANDS_STORAGE_COMMANDS_H_

#include <optional>
#include <string>

#include "server/engine/engine.h"

namespace CLI {
class App;
}

namespace bellwether::server {

class StorageCommands {
 public:
  // `app` must outlive this object.
  void AddTo(CLI::App* app);
  // Runs the command that was parsed, if one of ours was.  The exit code: 0
  // good, 1 failed, 3 the data is damaged.
  std::optional<int> Run(const Engine::Options& options) const;

 private:
  int Check(const Engine::Options& options) const;
  int Backup(const Engine::Options& options) const;
  int Restore(const Engine::Options& options) const;

  CLI::App* check_ = nullptr;
  CLI::App* backup_ = nullptr;
  CLI::App* restore_ = nullptr;
  std::string directory_;
  bool repair_ = false;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_COMMANDS_STORAGE_COMMANDS_H_
