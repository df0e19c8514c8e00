// rank_session.h: the claim of one stream on a (run, rank).
//
// Private to the engine.  Thread-safe.

#ifndef BELLWETHER_SERVER_ENGINE_RANK_SESSION_H_
#define BELLWETHER_SERVER_ENGINE_RANK_SESSION_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/synchronization/mutex.h"
#include "server/engine/ingest_coordinator.h"
#include "server/engine/run_registry.h"
#include "server/ingest/ingest_sink.h"

namespace bellwether::server {

// The session calls its owner under owner_mutex_, which Detach() takes, too: after
// Detach() no call to the owner is under way.
class RankSession final : public IngestSession, public std::enable_shared_from_this<RankSession> {
 public:
  RankSession(IngestCoordinator* coordinator, std::shared_ptr<RunEntry> run, RankSlot* slot, const HelloMessage& hello,
              SessionOwner* owner)
      : coordinator_(coordinator),
        run_(std::move(run)),
        slot_(slot),
        rank_(hello.rank),
        attempt_(hello.run.attempt),
        epoch_(slot->epoch),
        first_unacked_seq_(hello.first_unacked_seq),
        owner_(owner) {}

  uint64_t epoch() const override { return epoch_; }
  uint32_t attempt() const override { return attempt_; }
  const Layout& layout() const override { return run_->description.layout; }
  absl::StatusOr<Taken> Put(IngestMessage& message, std::string& payload) override {
    return coordinator_->Put(this, message, payload);
  }
  void Heartbeat(const HeartbeatMessage&) override {}
  bool Bye(IngestMessage message, std::string payload) override {
    return coordinator_->Bye(this, std::move(message), std::move(payload));
  }
  void Detach() override {
    attached_ = false;
    absl::MutexLock lock(&owner_mutex_);
    owner_ = nullptr;
  }

  // Pending acknowledgements hold sessions longer than their streams do.  This takes no
  // lock, because an owner calls back into the shard whose lock the caller holds.
  bool attached() const { return attached_; }

  // Calls the owner, unless the session is detached.
  template <typename Call>
  void Notify(Call call) {
    absl::MutexLock lock(&owner_mutex_);
    if (owner_ != nullptr) call(owner_);
  }

  const RunEntry& run() const { return *run_; }
  RankSlot* slot() const { return slot_; }
  NamesTaken* names() const { return &run_->names; }
  uint32_t rank() const { return rank_; }
  uint64_t first_unacked_seq() const { return first_unacked_seq_; }  // As in its Hello; 0 = none.

 private:
  // Constant after construction.
  IngestCoordinator* const coordinator_;
  const std::shared_ptr<RunEntry> run_;
  RankSlot* const slot_;
  const uint32_t rank_;
  const uint32_t attempt_;
  const uint64_t epoch_;
  const uint64_t first_unacked_seq_;

  std::atomic<bool> attached_ = true;
  // Guarded by owner_mutex_.
  absl::Mutex owner_mutex_;
  SessionOwner* owner_ ABSL_GUARDED_BY(owner_mutex_);
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_ENGINE_RANK_SESSION_H_
