// ownership.h: which runs this server serves, and which numbers new runs get.
//
// A server alone serves every run: AlwaysHere.  A server of a cluster serves the runs of
// the partitions that it was given: server/cluster/partition_ownership.h.  The engine
// acquires and releases partitions (partition_host.h), and records here which it has.
//
// Thread-safe; AlwaysHere by the engine's registry lock.  The engine calls most of it
// under that lock, so no call may wait.

#ifndef BELLWETHER_SERVER_ENGINE_PORTS_OWNERSHIP_H_
#define BELLWETHER_SERVER_ENGINE_PORTS_OWNERSHIP_H_

#include <algorithm>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "server/model/run_types.h"

namespace bellwether::server {

class Ownership {
 public:
  virtual ~Ownership() = default;

  // Which lane of the log the records of a run with this uuid go into.
  virtual uint32_t LaneOf(const RunUuid& uuid) const = 0;
  // OK: a run with this uuid is served here.  UNAVAILABLE: it is not, and `*address` is
  // the server that serves it, "" while that is not known.
  virtual absl::Status Admit(const RunUuid& uuid, std::string* address) const = 0;
  virtual bool Serves(RunId run) const = 0;
  // The series that the run had on its earlier server are here, too.
  virtual bool HasWhole(RunId run) const = 0;
  // A new number for a run with this uuid; each is given once.
  virtual RunId NextRun(const RunUuid& uuid) = 0;
  // A run of this number is known: NextRun() does not give it.
  virtual void RecordRun(RunId run) = 0;

  // ---- of a cluster's partitions ----
  // It is taken up: none of its runs is known yet.
  virtual void BeginPartition(uint32_t partition) = 0;
  virtual void ServePartition(uint32_t partition) = 0;
  // It has the series that it had on its earlier server; no effect if it is not served any more.
  virtual void CompletePartition(uint32_t partition) = 0;
  // It is not served from here on.
  virtual void FencePartition(uint32_t partition) = 0;
  // The server that serves it, "" while that is not known.
  virtual std::string OwnerAddress(uint32_t partition) const = 0;
};

// Of a server alone.
class AlwaysHere : public Ownership {
 public:
  uint32_t LaneOf(const RunUuid&) const override { return 0; }
  absl::Status Admit(const RunUuid&, std::string*) const override { return absl::OkStatus(); }
  bool Serves(RunId) const override { return true; }
  bool HasWhole(RunId) const override { return true; }
  RunId NextRun(const RunUuid&) override { return next_run_++; }
  void RecordRun(RunId run) override { next_run_ = std::max(next_run_, run + 1); }

  void BeginPartition(uint32_t) override {}
  void ServePartition(uint32_t) override {}
  void CompletePartition(uint32_t) override {}
  void FencePartition(uint32_t) override {}
  std::string OwnerAddress(uint32_t) const override { return ""; }

 private:
  RunId next_run_ = 1;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_ENGINE_PORTS_OWNERSHIP_H_
