// ingest_coordinator.h: sessions of streams and imports, from a Hello to the last
// acknowledgement.
//
// The coordinator numbers the epochs of a rank's sessions, drops duplicates, appends
// to the log, and acknowledges a message once the log reports it durable.
//
// Thread-safe.

#ifndef BELLWETHER_SERVER_ENGINE_INGEST_COORDINATOR_H_
#define BELLWETHER_SERVER_ENGINE_INGEST_COORDINATOR_H_

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/engine/live_run.h"
#include "server/engine/log_replay.h"
#include "server/engine/ports/ownership.h"
#include "server/engine/run_admission.h"
#include "server/engine/run_registry.h"
#include "server/engine/shards.h"
#include "server/ingest/ingest_sink.h"

namespace bellwether::server {

class RankSession;

class IngestCoordinator final : public ImportSink {
 public:
  // What the coordinator works with; all must outlive it.
  struct Parts {
    const LiveRunParts* runs = nullptr;
    const Shards* shards = nullptr;
    RunRegistry* registry = nullptr;
    Ownership* ownership = nullptr;
    RunAdmission* admission = nullptr;
    const LogReplay* replay = nullptr;
  };
  explicit IngestCoordinator(const Parts& parts);

  // Before the first session, once the shards have started.
  void Start() { pending_acks_.resize(shards_.size() * log_->lanes()); }
  // Refuses sessions and messages from here on.
  void Close() { closing_ = true; }

  // ImportSink
  absl::StatusOr<std::shared_ptr<IngestSession>> Open(const HelloMessage& hello, std::string payload,
                                                      SessionOwner* owner) override;
  void AwaitApplied(RunId run) override;
  void EndUnheard(RunId run) override;

  // What a session forwards here.
  absl::StatusOr<IngestSession::Taken> Put(RankSession* session, IngestMessage& message, std::string& payload);
  bool Bye(RankSession* session, IngestMessage message, std::string payload);

  // The log's lane is durable up to `durable`: acknowledges what that covers.
  void OnDurable(uint32_t lane, Lsn durable);
  // Passes an action on to the rank's stream; false: it has none.
  bool HandOver(RunId run, uint32_t rank, const Action& action);
  // A stream or an import of the run is open.
  bool IsAttached(RunId run);
  // Asks the clients of runs to look deeper at the heads that fail.
  void RequestDeeperHeads();
  // Ends the claims of the sessions of runs in [first, end): their next message is
  // refused, and nothing more is acknowledged.  Returns the sessions, to be notified
  // once the registry's mutex is released.
  std::vector<std::shared_ptr<RankSession>> Fence(RunId first, RunId end)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(registry_.mutex());

 private:
  // An acknowledgement that waits for the log; in the order of its lane.
  struct PendingAck {
    enum class Of { kHello, kMessage, kBye };
    Lsn lsn = 0;
    Of of = Of::kMessage;
    uint64_t seq = 0;
    int64_t since_ns = 0;
    std::shared_ptr<RankSession> session;
  };

  // The acknowledgements of a shard and a lane; guarded by the shard's mutex.
  std::deque<PendingAck>& PendingAcks(size_t shard, uint32_t lane) {
    return pending_acks_[shard * log_->lanes() + lane];
  }
  std::deque<PendingAck>& PendingAcks(RunId run) { return PendingAcks(shards_.IndexOf(run), log_->LaneOf(run)); }

  // OK, or which server serves the run.
  absl::Status AdmitRun(const RunUuid& uuid) const;
  // Gives the Hello the attempt that its run counts for its launch.
  absl::Status ResolveAttempt(int64_t time_unix_ms, HelloMessage* hello) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(registry_.mutex());
  absl::StatusOr<std::shared_ptr<RunEntry>> FindOrCreate(const HelloMessage& hello, int64_t time_unix_ms)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(registry_.mutex());
  // Log the rules and the policy that a new run is judged by from its first step on.
  void AppendRules(Shard* shard, const RunEntry& run, int64_t time_unix_ms);
  void AppendPolicy(Shard* shard, const RunEntry& run, int64_t time_unix_ms);
  // Names that the memory does not hold become an event of the same seq, and their values have no row.  The
  // first of a run says so, and then each that has four times as many before it; the others say nothing.
  void AdmitNames(RunId run, NamesTaken* taken, IngestMessage* message, std::string* payload) const;
  // INVALID_ARGUMENT: the seq is too far beyond the last one.
  absl::Status CheckRise(const RankSession& session, uint64_t seq) const;

  // Constant after construction.
  const LiveRunParts& runs_;
  const Shards& shards_;
  RunRegistry& registry_;
  Ownership* const ownership_;
  RunAdmission* const admission_;
  const LogReplay& replay_;
  LogBackend* const log_;
  Clock* const clock_;
  Counter* const gaps_;
  Histogram* const ack_seconds_;

  std::atomic<bool> closing_ = false;
  // Constant in size after Start(); each queue is guarded by its shard's mutex.
  std::vector<std::deque<PendingAck>> pending_acks_;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_ENGINE_INGEST_COORDINATOR_H_
