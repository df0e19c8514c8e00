// own_values.h: numbers that a job has named itself become rows of the run's matrices.
//
// The first values of a name say what it is for the whole run (own_signals.h).  What says something else
// later, or is too many, is left out, and the caller is told why.  What people read of a signal (unit and
// limits) may be another in a later attempt.
//
// Deterministic.  Not thread-safe: the run's shard owns it.

#ifndef BELLWETHER_SERVER_INGEST_OWN_VALUES_H_
#define BELLWETHER_SERVER_INGEST_OWN_VALUES_H_

#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "server/model/row_names.h"
#include "server/model/step_sample.h"

namespace bellwether::server {

// Values that were left out.
struct OwnRefusal {
  enum class Cause : uint8_t { kCatalogue, kDisagrees, kSignals, kCells };
  Cause cause;
  std::string name;
  std::string why;  // A sentence without its subject: "merge is sum, and was mean before".
  uint64_t values = 0;
};
const char* NameOf(OwnRefusal::Cause cause);

class OwnRows {
 public:
  // The frame with blocks in place of its own values.  What the run's rows lack is added to a copy of
  // `rows`, which is then `grown`.  REQUIRES: `rows` are always those of the same run, and only grow.
  RankFrame Translate(const RankFrame& frame, const RunRows& rows, std::optional<RunRows>* grown,
                      std::vector<OwnRefusal>* refused);

 private:
  std::unordered_map<uint64_t, int32_t> known_;  // Rows of cells, so that no name is made for each value.
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_INGEST_OWN_VALUES_H_
