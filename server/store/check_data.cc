#include "server/store/check_data.h"

#include <algorithm>
#include <filesystem>
#include <memory>
#include <optional>

#include "absl/strings/str_cat.h"
#include "server/store/rocks_database.h"
#include "server/util/status_macros.h"

namespace bellwether::server {
namespace {

// null: damaged, and left as it is.
absl::StatusOr<std::unique_ptr<Wal>> OpenLog(const Wal::Options& options, DataReport* report) {
  auto wal = Wal::Open(options, nullptr);
  if (absl::IsDataLoss(wal.status())) {
    report->damage.emplace_back(wal.status().message());
    return nullptr;
  }
  BW_RETURN_IF_ERROR(wal.status());
  const Wal::Recovery& found = (*wal)->recovery();
  report->facts.push_back(absl::StrCat("log: ", found.records, " records, LSN ", found.first_lsn, "-", found.last_lsn,
                                       ", ", found.bytes, " bytes"));
  if (found.torn_bytes > 0) {
    report->facts.push_back(absl::StrCat("log: ", found.torn_bytes, " bytes at its end were never acknowledged"));
  }
  if (!found.lost.empty()) {
    report->damage.push_back(absl::StrCat("cut out of the log: ", found.lost));
    report->repaired = true;
  }
  return wal;
}

// Which record of the log the run's rows go up to.
absl::StatusOr<Lsn> SavedOf(const Database& database, const RunRecord& run, const SavedLsn& saved_lsn) {
  if (run.ended) return run.applied_lsn;
  const absl::StatusOr<std::string> state = database.GetState(run.id);
  if (absl::IsNotFound(state.status())) return run.applied_lsn;
  BW_RETURN_IF_ERROR(state.status());
  BW_ASSIGN_OR_RETURN(const Lsn saved, saved_lsn(*state));
  return std::max(run.applied_lsn, saved);
}

// Returns the last record of the log that its rows know of; nullopt: it cannot be served.
absl::StatusOr<std::optional<Lsn>> CheckDatabase(const Database::Options& options, const SavedLsn& saved_lsn,
                                                 bool repair, DataReport* report) {
  // Before it is opened: from then on it writes files of its own accord.
  std::vector<std::string> damage = RocksDatabase::FindDamage(options.directory);
  auto database = RocksDatabase::Open(options);
  if (absl::IsFailedPrecondition(database.status())) return database.status();
  if (!database.ok() && damage.empty()) damage.emplace_back(database.status().message());
  report->damage.insert(report->damage.end(), damage.begin(), damage.end());
  if (!damage.empty() && repair) {
    database = absl::UnavailableError("closed");
    BW_RETURN_IF_ERROR(RocksDatabase::Repair(options));
    database = RocksDatabase::Open(options);
    report->repaired = database.ok();
  }
  if (!database.ok()) return std::nullopt;  // Said above.
  const auto runs = (*database)->ListRuns();
  if (!runs.ok()) {
    report->damage.emplace_back(runs.status().message());
    return std::nullopt;
  }
  std::optional<Lsn> saved = 0;
  for (const RunRecord& run : *runs) {
    if (run.deleted) continue;
    const absl::StatusOr<Lsn> of_run = SavedOf(**database, run, saved_lsn);
    if (of_run.ok()) {
      if (saved) saved = std::max(*saved, *of_run);
    } else {
      saved.reset();
      report->damage.push_back(absl::StrCat("run ", run.description.name, ": ", of_run.status().message()));
    }
  }
  const auto kept = std::count_if(runs->begin(), runs->end(), [](const RunRecord& run) { return !run.deleted; });
  report->facts.push_back(absl::StrCat("database: ", kept, " runs, ", (*database)->last_transition_id(),
                                       " changes of alerts, ", (*database)->bytes(), " bytes"));
  return saved;
}

// Whole segments that are gone from the log's end leave no trace in it.
absl::Status CheckEnd(Lsn saved, bool repair, Wal* wal, DataReport* report) {
  const Lsn last = wal->recovery().last_lsn;
  if (saved <= last) return absl::OkStatus();
  report->damage.push_back(absl::StrCat("the log ends at LSN ", last, ", runs are saved up to ", saved, ": LSN ",
                                        last + 1, "-", saved, " are missing from the log"));
  if (!repair) return absl::OkStatus();
  BW_RETURN_IF_ERROR(wal->GoOnAbove(saved));  // None of them may be given again.
  report->repaired = true;
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<DataReport> CheckData(const std::string& storage_path, Wal::Options wal, Database::Options database,
                                     const SavedLsn& saved_lsn, bool repair) {
  std::error_code error;
  if (!std::filesystem::is_directory(storage_path + "/wal", error) ||
      !std::filesystem::is_directory(storage_path + "/db", error)) {
    return absl::NotFoundError(absl::StrCat("storage.path ", storage_path, ": no server kept its data there"));
  }
  wal.directory = storage_path + "/wal";
  wal.repair = repair;
  database.directory = storage_path + "/db";
  DataReport report;
  BW_ASSIGN_OR_RETURN(const std::unique_ptr<Wal> log, OpenLog(wal, &report));
  BW_ASSIGN_OR_RETURN(const std::optional<Lsn> saved, CheckDatabase(database, saved_lsn, repair, &report));
  if (!saved || log == nullptr) report.repaired = false;
  if (log == nullptr) return report;
  if (saved) BW_RETURN_IF_ERROR(CheckEnd(*saved, repair, log.get(), &report));
  BW_RETURN_IF_ERROR(log->Close());
  return report;
}

}  // namespace bellwether::server
