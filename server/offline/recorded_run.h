// recorded_run.h: a recording, handed out as its run would have been lived.
//
// Ranks are merged as a shard merges them, without log, store and clock.

#ifndef BELLWETHER_SERVER_OFFLINE_RECORDED_RUN_H_
#define BELLWETHER_SERVER_OFFLINE_RECORDED_RUN_H_

#include <functional>
#include <string>

#include "absl/status/status.h"
#include "server/model/row_names.h"
#include "server/model/run_types.h"
#include "server/model/step_sample.h"

namespace bellwether::server {

// What happens in a run, in order.  The first call is OnHello.
class RunListener {
 public:
  virtual ~RunListener() = default;
  // Of each rank, and of each attempt.
  virtual void OnHello(const RunDescription& run) = 0;
  // More tensors or modules were named.
  virtual void OnRows(const RunRows& /*rows*/) {}
  virtual void OnSample(const StepSample& sample) = 0;
  virtual void OnEvent(const RunEvent& event) = 0;
};

// Hands out one run, the same at every call.
using RunWalk = std::function<absl::Status(RunListener*)>;

// Reads the .bwrun to its end.  NOT_FOUND: it cannot be read.
// INVALID_ARGUMENT: damaged, cut off, or not a recording.
absl::Status WalkRecordedRun(const std::string& file, RunListener* listener);

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_OFFLINE_RECORDED_RUN_H_
