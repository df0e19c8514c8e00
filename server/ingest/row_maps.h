// row_maps.h: a rank's rows by name become the run's.
//
// Each rank counts the tensors and modules that it reports in an order of its own
// (Names in ingest.proto).  The run has one order (row_names.h).  A map from one to the
// other is kept for each rank, for its newest attempt.
//
// Deterministic.  Not thread-safe: the run's shard owns it.

#ifndef BELLWETHER_SERVER_INGEST_ROW_MAPS_H_
#define BELLWETHER_SERVER_INGEST_ROW_MAPS_H_

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "server/ingest/message.h"
#include "server/model/row_names.h"
#include "server/util/byte_io.h"

namespace bellwether::server {

class RowMaps {
 public:
  // Adds the names to `rows`.  Returns how many of them are refused: there is a gap before
  // them, they are of an attempt before, or too many for the run.  Or the rank has given
  // their row another name, or their name another row.  Values of a refused name have no row.
  size_t Add(uint32_t rank, const NamesMessage& message, RunRows* rows);
  // The frame with the run's rows in place of the rank's, and without what `layout` has no
  // rows for, or the rank no names.  Adds the number of values left out.
  RankFrame Translate(uint32_t rank, const RankFrame& frame, const Layout& layout, uint64_t* left_out) const;
  // Whether Translate() would return the frame as it is.
  static bool IsPlain(const RankFrame& frame);

  void Save(ByteWriter* out) const;
  bool Restore(ByteReader* in);
  bool empty() const { return ranks_.empty(); }

 private:
  struct Map {
    std::vector<int32_t> to;  // The run's row, -1 = refused.
    std::vector<bool> taken;  // By the run's row.
    // The run's row, or -1, for the rank's next one.
    void Append(int32_t row);
  };
  struct Rank {
    uint32_t attempt = 0;
    std::array<Map, 2> rows;  // Tensors, modules.
  };
  static size_t Index(Granularity granularity) { return granularity == Granularity::kTensor ? 0 : 1; }

  std::map<uint32_t, Rank> ranks_;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_INGEST_ROW_MAPS_H_
