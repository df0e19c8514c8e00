#include "server/store/check_data.h"

#include <algorithm>
#include <filesystem>
#include <memory>

#include "absl/strings/str_cat.h"
#include "server/store/rocks_database.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

// `*last` is the log's last record.
absl::Status CheckLog(const Wal::Options& options, DataReport* report, Lsn* last) {
  auto wal = Wal::Open(options, nullptr);
  if (absl::IsDataLoss(wal.status())) {
    report->damage.emplace_back(wal.status().message());
    return absl::OkStatus();
  }
  BW_RETURN_IF_ERROR(wal.status());
  const Wal::Recovery& found = (*wal)->recovery();
  *last = found.last_lsn;
  report->facts.push_back(absl::StrCat("log: ", found.records, " records, LSN ", found.first_lsn, "-", found.last_lsn,
                                       ", ", found.bytes, " bytes"));
  if (found.torn_bytes > 0) {
    report->facts.push_back(absl::StrCat("log: ", found.torn_bytes, " bytes at its end were never acknowledged"));
  }
  if (!found.lost.empty()) {
    report->damage.push_back(absl::StrCat("cut out of the log: ", found.lost));
    report->repaired = true;
  }
  return (*wal)->Close();
}

absl::Status CheckDatabase(const Database::Options& options, bool repair, Lsn last_lsn, DataReport* report) {
  auto database = RocksDatabase::Open(options);
  if (absl::IsFailedPrecondition(database.status())) return database.status();
  std::vector<std::string> damage = RocksDatabase::FindDamage(options.directory);
  if (!database.ok()) damage.emplace_back(database.status().message());
  report->damage.insert(report->damage.end(), damage.begin(), damage.end());
  if (!damage.empty() && repair) {
    database = absl::UnavailableError("closed");
    BW_RETURN_IF_ERROR(RocksDatabase::Repair(options));
    database = RocksDatabase::Open(options);
    report->repaired = database.ok();
  }
  if (!database.ok()) return absl::OkStatus();  // Said above.
  const auto runs = (*database)->ListRuns();
  if (!runs.ok()) {
    report->damage.emplace_back(runs.status().message());
    return absl::OkStatus();
  }
  Lsn applied = 0;
  for (const RunRecord& run : *runs) applied = std::max(applied, run.applied_lsn);
  report->facts.push_back(absl::StrCat("database: ", runs->size(), " runs, ", (*database)->last_transition_id(),
                                       " changes of alerts, ", (*database)->bytes(), " bytes"));
  if (last_lsn > 0 && applied > last_lsn) {
    report->damage.push_back(absl::StrCat("the log ends at LSN ", last_lsn, ", runs are applied up to ", applied,
                                          ": LSN ", last_lsn + 1, "-", applied, " are missing from the log"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<DataReport> CheckData(const std::string& storage_path, Wal::Options wal, Database::Options database,
                                     bool repair) {
  std::error_code error;
  if (!std::filesystem::is_directory(storage_path + "/wal", error) ||
      !std::filesystem::is_directory(storage_path + "/db", error)) {
    return absl::NotFoundError(absl::StrCat("storage.path ", storage_path, ": no server kept its data there"));
  }
  wal.directory = storage_path + "/wal";
  wal.repair = repair;
  database.directory = storage_path + "/db";
  DataReport report;
  Lsn last_lsn = 0;
  BW_RETURN_IF_ERROR(CheckLog(wal, &report, &last_lsn));
  BW_RETURN_IF_ERROR(CheckDatabase(database, repair, last_lsn, &report));
  return report;
}

}  // namespace bellwether::server
