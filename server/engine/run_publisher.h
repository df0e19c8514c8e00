// run_publisher.h: shows readers the newest state of a run.
//
// Not thread-safe: the shard that owns the run calls it.

#ifndef BELLWETHER_SERVER_ENGINE_RUN_PUBLISHER_H_
#define BELLWETHER_SERVER_ENGINE_RUN_PUBLISHER_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "server/engine/live_run_parts.h"
#include "server/engine/run_state.h"
#include "server/store/run_table.h"

namespace bellwether::server {

class RunPublisher {
 public:
  // Both must outlive it.
  RunPublisher(const LiveRunParts* parts, const RunState* state) : parts_(*parts), state_(*state) {}

  // The state changed, or the number of its silent ranks.
  void MarkChanged() { changed_ = true; }
  // Shows the state if it changed since the last call.
  void Publish(uint32_t silent_ranks);
  // Shows a record as it was saved.
  static void PublishRecord(const RunRecord& record, const LiveRunParts& parts);

 private:
  void AddEvents(RunSnapshot* snapshot);

  const LiveRunParts& parts_;
  const RunState& state_;
  bool changed_ = false;
  uint64_t version_ = 0;
  // Copies that snapshots share, and what they were made of.
  std::shared_ptr<const StepSample> heads_;
  uint64_t heads_version_ = 0;
  std::shared_ptr<const RowValues> row_values_;
  uint64_t row_values_version_ = 0;
  std::shared_ptr<const std::vector<RunEvent>> events_;
  std::pair<uint64_t, size_t> events_version_;  // Stored, new.
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_ENGINE_RUN_PUBLISHER_H_
