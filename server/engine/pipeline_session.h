// pipeline_session.h: one stream's claim on a (run, rank).
//
// Private to the pipeline.  Thread-safe.

#ifndef BELLWETHER_SERVER_ENGINE_PIPELINE_SESSION_H_
#define BELLWETHER_SERVER_ENGINE_PIPELINE_SESSION_H_

#include <atomic>
#include <memory>
#include <string>
#include <utility>

#include "server/engine/pipeline.h"
#include "server/util/log.h"

namespace bellwether::server {

// A stream's claim.  The owner is called under owner_mutex_, which Detach()
// takes too: after it no call is in flight.
class Pipeline::Session final : public IngestSession, public std::enable_shared_from_this<Session> {
 public:
  Session(Pipeline* pipeline, RunEntry* run, RankSlot* slot, const HelloMessage& hello, SessionOwner* owner)
      : pipeline_(pipeline),
        run_(run->shared_from_this()),
        slot_(slot),
        rank_(hello.rank),
        attempt_(hello.run.attempt),
        epoch_(slot->epoch),
        first_unacked_seq_(hello.first_unacked_seq),
        layout_(run->description.layout),
        owner_(owner) {}

  uint64_t epoch() const override { return epoch_; }
  uint32_t attempt() const override { return attempt_; }
  const Layout& layout() const override { return layout_; }
  absl::StatusOr<Taken> Put(IngestMessage& message, std::string& payload) override {
    return pipeline_->Put(this, message, payload);
  }
  void Heartbeat(const HeartbeatMessage&) override {}

  bool Bye(IngestMessage message, std::string payload) override {
    Shard& shard = *pipeline_->shards_[run_->shard];
    absl::MutexLock lock(&shard.mutex());
    if (slot_->epoch != epoch_) return false;
    WalRecord record;
    record.kind = WalKind::kBye;
    record.run = run_->id;
    record.rank = rank_;
    record.epoch = epoch_;
    record.time_unix_ms = pipeline_->clock_->UnixMillis();
    record.payload = std::move(payload);
    const auto lsn = shard.Append(std::move(record), std::move(message));
    if (!lsn.ok()) {
      LogWarning("run {}: the goodbye of rank {} is lost: {}", run_->description.name, rank_,
                 std::string(lsn.status().message()));
      return false;
    }
    pipeline_->PendingAcks(*run_).push_back(
        {*lsn, PendingAck::Of::kBye, 0, pipeline_->clock_->MonotonicNanos(), shared_from_this()});
    return true;
  }

  void Detach() override {
    attached_ = false;
    absl::MutexLock lock(&owner_mutex_);
    owner_ = nullptr;
  }

  // What waits for the log holds sessions longer than their streams do.  Takes no lock:
  // owners are called under one, and call back into the shard, whose lock the caller has.
  bool attached() const { return attached_; }

  template <typename Call>
  void Tell(Call call) {
    absl::MutexLock lock(&owner_mutex_);
    if (owner_ != nullptr) call(owner_);
  }

  RunEntry* run() const { return run_.get(); }
  RankSlot* slot() const { return slot_; }
  uint32_t rank() const { return rank_; }
  uint64_t first_unacked_seq() const { return first_unacked_seq_; }  // As its hello told; 0 = none.

 private:
  Pipeline* const pipeline_;
  const std::shared_ptr<RunEntry> run_;
  RankSlot* const slot_;
  const uint32_t rank_;
  const uint32_t attempt_;
  const uint64_t epoch_;
  const uint64_t first_unacked_seq_;
  const Layout layout_;
  std::atomic<bool> attached_ = true;
  absl::Mutex owner_mutex_;
  SessionOwner* owner_ ABSL_GUARDED_BY(owner_mutex_);
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_ENGINE_PIPELINE_SESSION_H_
