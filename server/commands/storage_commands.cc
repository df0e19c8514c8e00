#include "server/commands/storage_commands.h"

#include <CLI/CLI.hpp>
#include <cstdio>
#include <filesystem>

#include "absl/strings/str_cat.h"
#include "server/commands/command_result.h"
#include "server/engine/run_state.h"
#include "server/net/checkpoint_socket.h"
#include "server/store/check_data.h"
#include "server/store/file_system.h"
#include "server/store/storage_lock.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

namespace fs = std::filesystem;

// The log and the database of `from`, whole and synced, as the new folder `to`:
// it appears when it is complete.
absl::Status CopyStorage(const std::string& from, const std::string& to) {
  const fs::path partial = to + ".partial";
  std::error_code error;
  fs::remove_all(partial, error);
  if (!fs::create_directories(partial, error) || error) {
    return absl::UnavailableError(absl::StrCat(partial.string(), ": ", error.message()));
  }
  fs::permissions(partial, fs::perms::owner_all, error);
  for (const char* part : {"db", "wal"}) {
    fs::create_directory(partial / part, error);
    for (auto file = fs::directory_iterator(fs::path(from) / part, error); !error && file != fs::end(file);
         file.increment(error)) {
      // Whoever closes one gives up this process's own lock of it.
      if (file->path().filename() == StorageLock::kFileName) continue;
      fs::copy(file->path(), partial / part, fs::copy_options::recursive, error);
      if (error) break;
    }
    if (error) return absl::UnavailableError(absl::StrCat("copy ", from, "/", part, ": ", error.message()));
  }
  for (const auto& entry : fs::recursive_directory_iterator(partial, error))
    BW_RETURN_IF_ERROR(SyncPath(entry.path().string()));
  if (error) return absl::UnavailableError(absl::StrCat(partial.string(), ": ", error.message()));
  BW_RETURN_IF_ERROR(SyncPath(partial.string()));
  fs::rename(partial, to, error);
  if (error) return absl::UnavailableError(absl::StrCat(to, ": ", error.message()));
  return SyncPath(fs::absolute(to).parent_path().string());
}

bool IsThere(const std::string& path) {
  std::error_code error;
  return fs::exists(path, error) && !(fs::is_directory(path, error) && fs::is_empty(path, error));
}

void Print(const DataReport& report) {
  for (const std::string& fact : report.facts) std::printf("%s\n", fact.c_str());
  for (const std::string& damage : report.damage) std::fprintf(stderr, "%s\n", damage.c_str());
}

}  // namespace

void StorageCommands::AddTo(CLI::App* app) {
  check_ = app->add_subcommand("check-data", "read all that a stopped server keeps: 0 whole, 3 damaged");
  check_->add_flag("--repair", repair_, "cut out what is damaged and say what is lost");
  backup_ = app->add_subcommand("backup", "copy all that is durable to a new folder, while the server runs or not");
  backup_->add_option("directory", directory_, "the backup: a storage folder of its own")->required();
  restore_ = app->add_subcommand("restore", "verify a backup and copy it to --storage.path, which must be empty");
  restore_->add_option("directory", directory_, "the backup")->required();
  check_->footer("Example:\n  bellwetherd check-data --storage.path=/var/lib/bellwether");
  backup_->footer("Example:\n  bellwetherd backup --storage.path=/var/lib/bellwether /var/backups/bellwether");
  restore_->footer("Example:\n  bellwetherd restore --storage.path=/var/lib/bellwether /var/backups/bellwether");
  for (CLI::App* command : {check_, backup_, restore_}) command->fallthrough();  // --storage.path, --config.file
}

std::optional<int> StorageCommands::Run(const Engine::Options& options) const {
  if (check_->parsed()) return Check(options);
  if (backup_->parsed()) return Backup(options);
  if (restore_->parsed()) return Restore(options);
  return std::nullopt;
}

int StorageCommands::Check(const Engine::Options& options) const {
  const auto report = CheckData(options.storage_path, options.wal, options.database, RunState::SavedLsn, repair_);
  if (!report.ok()) return Report(report.status());
  Print(*report);
  if (report->damage.empty()) {
    std::printf("%s: whole\n", options.storage_path.c_str());
    return kCommandOk;
  }
  std::fprintf(stderr, "%s: %s\n", options.storage_path.c_str(),
               report->repaired ? "repaired; what is lost is said above"
                                : "damaged; --repair goes on without what is named above");
  return report->repaired ? kCommandOk : kCommandFindings;
}

int StorageCommands::Backup(const Engine::Options& options) const {
  if (IsThere(directory_)) {
    std::fprintf(stderr, "%s: exists already; a backup is a new folder\n", directory_.c_str());
    return kCommandFailed;
  }
  absl::Status copied = CheckpointSocket::Ask(
      options.storage_path, [this](const std::string& copy) { return CopyStorage(copy, directory_); });
  if (absl::IsNotFound(copied)) {
    // No server: what it left, if it is whole.
    const auto report =
        CheckData(options.storage_path, options.wal, options.database, RunState::SavedLsn, /*repair=*/false);
    copied = report.status();
    if (report.ok()) {
      Print(*report);
      if (!report->damage.empty()) return kCommandFindings;
      const auto lock = StorageLock::Take(options.storage_path);  // A server may have begun since.
      copied = lock.ok() ? CopyStorage(options.storage_path, directory_) : lock.status();
    }
  }
  if (!copied.ok()) return Report(copied);
  const auto report = CheckData(directory_, options.wal, options.database, RunState::SavedLsn, /*repair=*/false);
  if (!report.ok()) return Report(report.status());
  Print(*report);
  if (!report->damage.empty()) return kCommandFindings;
  std::printf("%s: a whole copy of %s\n", directory_.c_str(), options.storage_path.c_str());
  return kCommandOk;
}

int StorageCommands::Restore(const Engine::Options& options) const {
  if (IsThere(options.storage_path)) {
    std::fprintf(stderr, "storage.path %s: is not empty; move away what is there\n", options.storage_path.c_str());
    return kCommandFailed;
  }
  const auto report = CheckData(directory_, options.wal, options.database, RunState::SavedLsn, /*repair=*/false);
  if (!report.ok()) return Report(report.status());
  Print(*report);
  if (!report->damage.empty()) return kCommandFindings;
  std::error_code ignored;
  fs::remove(options.storage_path, ignored);  // Empty, or not there.
  if (const absl::Status copied = CopyStorage(directory_, options.storage_path); !copied.ok()) return Report(copied);
  std::printf("%s: restored; start the server on it\n", options.storage_path.c_str());
  return kCommandOk;
}

}  // namespace bellwether::server
