// check_data.h: whether what a server keeps is whole, and what is not.
//
// For a storage folder that no server has open: the log and the database lock it.

#ifndef BELLWETHER_SERVER_STORE_CHECK_DATA_H_
#define BELLWETHER_SERVER_STORE_CHECK_DATA_H_

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/store/database.h"
#include "server/store/wal.h"

namespace bellwether::server {

struct DataReport {
  std::vector<std::string> facts;   // What is there, a line each.
  std::vector<std::string> damage;  // What is lost or unreadable, a line each; empty = whole.
  bool repaired = false;            // What is left of it can be served.
};

// The last record of the log that a run's saved state holds.  DATA_LOSS.
using SavedLsn = std::function<absl::StatusOr<Lsn>(std::string_view state)>;

// Reads every record of the log, every block of the database and how far open runs
// are saved.  With `repair` cuts out what is damaged, goes on above what the log has
// lost at its end, and `damage` says what is gone.  Options' directories are set from
// `storage_path`.
// NOT_FOUND: nothing is there.  FAILED_PRECONDITION: a server has it open, or a
// newer version wrote it.
absl::StatusOr<DataReport> CheckData(const std::string& storage_path, Wal::Options wal, Database::Options database,
                                     const SavedLsn& saved_lsn, bool repair);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_STORE_CHECK_DATA_H_
