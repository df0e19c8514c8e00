// shard.h: one thread that owns a part of the runs.
//
// Messages enter through a bounded queue in the order of the log.  Append() writes to
// the log and enters the queue under one mutex, so both orders are the same for the runs
// of a shard.  The shard's thread needs no locks.  It applies messages, closes overdue
// steps, watches for silence, publishes and saves.

#ifndef BELLWETHER_SERVER_ENGINE_SHARD_H_
#define BELLWETHER_SERVER_ENGINE_SHARD_H_

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/engine/live_run.h"

namespace bellwether::server {

class Shard {
 public:
  struct Options {
    size_t queue_messages_max = 4096;
    int64_t queue_bytes_max = 64 << 20;
    int64_t step_deadline_ms = 10'000;
    int64_t silence_ms_min = 120'000;
    // A run without an open stream that sends nothing for so long has ended: else it would
    // hold its place and memory for good.  Longer than a job waits in a queue over night.
    // A run that sends again is reopened.
    int64_t run_silent_ms_max = 86'400'000;
    int64_t publish_ms = 50;
  };
  using Task = std::function<void()>;
  // Saves of a lane that may be under way at once, each with its rows in memory
  // (LiveRunParts::savers).  Further saves wait.  Messages do not wait for saves, except
  // those of a run whose end is being saved.
  static constexpr int kSavesMax = 8;

  Shard(const Options& options, const LiveRunParts& parts, int index);
  ~Shard();  // As Stop().
  Shard(const Shard&) = delete;
  Shard& operator=(const Shard&) = delete;

  void Start();
  // Applies what is queued, saves every run, ends the thread.
  void Stop();

  // Guards the order of log and queue, and the engine's rank slots of this shard's runs.
  absl::Mutex& mutex() ABSL_LOCK_RETURNED(mutex_) { return mutex_; }
  bool HasRoom(size_t bytes) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Appends a record to the log and queues its message, which has the record's run, rank,
  // epoch and time.  `bytes` is what HasRoom was asked for; 0 = records that always find
  // room.  `once_logged` is called in between.  An error is the log's: nothing is queued,
  // and `record` and `message` are left as they were.
  absl::StatusOr<Lsn> Append(
      WalRecord&& record, IngestMessage&& message, size_t bytes = 0, absl::FunctionRef<void()> once_logged = [] {})
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Calls `task` on the shard's thread, once, when the queue has become half empty.
  void CallWhenRoom(Task task) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Takes a run before any message of it is queued.  From then on the shard logs records
  // of its own for the run, so the log must have the run's first Hello.
  void Adopt(std::unique_ptr<LiveRun> run) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // ---- while the log is replayed behind new messages ----
  enum class ReplayMode {
    kLive,      // Append() queues the message.
    kReadBack,  // Append() leaves the message to the log, which will be read up to there.
    kKeepBack,  // Append() keeps the message until the log was read up to the switch.
  };
  void SetReplayMode(ReplayMode mode) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Queues a message that was read from the log, in every mode.
  void PushRecovered(LoggedMessage message, size_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool HasRoomForRecovered(size_t bytes) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // During recovery deadlines and silence are not judged and no spectra are computed: the
  // log holds what was decided then.
  void BeginRecovery() { recovering_ = true; }
  // Ends that after all that is queued now; waits.
  void EndRecovery();

  // ---- each waits for what is queued before it ----
  // Runs `task` on the shard's thread.
  void Barrier(const Task& task);
  // Calls `task` with the run, loaded from the database if it is not live; nullptr = there
  // is none.
  void WithRun(RunId run, const std::function<void(const LiveRun*)>& task);
  // Shows readers the newest state of a run.
  void PublishApplied(RunId run);
  // The same where something beside the run's state has changed: people's notes.
  void PublishAgain(RunId run);
  // Saves the lane's live runs that need an LSN below `end`, one after each batch of
  // messages, so that no message waits for more than one save.  Returns the first LSN of
  // the lane that this shard still needs.
  Lsn CommitBefore(uint32_t lane, Lsn end);
  std::vector<Lsn> CommitAll();  // The same of all runs, by lane.
  // Forgets the runs in [first, end); `save`: saves them before.  Returns the first LSN
  // that they still need, or the largest there is.  Later messages of these runs are left
  // to the log, which another server may read next, until Expect() is called.
  Lsn Drop(RunId first, RunId end, bool save);

  // ---- waits for nothing ----
  // Takes messages of the runs in [first, end) again.
  void Expect(RunId first, RunId end);
  // Has the worker compute the spectra of live runs in [first, end) that recovery found no
  // answer for.  Only once answers are taken: a refused answer is not computed again.
  void SubmitUnanswered(RunId first, RunId end);
  // Logs what Gram matrices of a run of this shard gave, and queues it.  False: the log
  // does not take it now.
  bool AppendSpectra(RunId run, const SpectraMessage& answers);

 private:
  struct Item {
    LoggedMessage message;
    size_t bytes = 0;
    int64_t arrived_ns = 0;
    Task task;  // Instead of a message.
  };
  // Saves that a caller waits for together; `then` is called after the last of them.
  struct SaveGroup {
    size_t left = 0;
    Task then;
  };
  using SaveGroupPtr = std::shared_ptr<SaveGroup>;
  // A lane of the log: its saves.
  struct Lane {
    std::deque<Task> tasks;  // Saves that wait; one is begun after each batch of messages.
    int saves = 0;           // Saves that are under way.
    bool ready() const { return !tasks.empty() && saves < kSavesMax; }
  };
  using RunRanges = std::set<std::pair<RunId, RunId>>;

  void Loop();
  void Enqueue(Task task);
  void ApplyItem(Item* item);
  // The live run, loaded from the database if it had ended; nullptr: there is none.
  LiveRun* FindOrLoad(RunId id);
  void Tick(int64_t now_ns);
  // A server that was stopped meanwhile, or had no processor, heard no rank.
  void NoteAway();
  // Logs what the clock says of a run: overdue steps, silent ranks, its end.
  void CheckDeadlines(LiveRun* run, int64_t now_ns);
  bool IsAttached(RunId run) const { return parts_.attached != nullptr && parts_.attached(run); }
  // Hands over the run's pending deliveries, once the log has their cause.
  void Deliver(LiveRun* run);
  // Log new rules or a new policy for the runs that are judged by others, some per tick.
  void SpreadRules();
  void SpreadPolicy();
  // False: the log did not take it.
  bool AppendOwn(const LiveRun& run, WalKind kind, std::string payload, IngestMessage message);
  bool AppendOwn(RunId run, uint32_t attempt, WalKind kind, std::string payload, IngestMessage message);

  // ---- saves ----
  void SaveIfDue(LiveRun* run, int64_t now_ns, const SaveGroupPtr& group = nullptr);
  void EndSave(RunId id, RunSave save, const absl::Status& shared, const SaveGroupPtr& group);
  void RecordSaved(const LiveRun& run, const absl::Status& status);
  // Saves those of the lane's `runs` that still need an LSN below `end`, one after each
  // batch of messages.  Calls `then` once these saves, and those under way, have ended.
  void SaveThen(uint32_t lane, const std::vector<RunId>& runs, Lsn end, Task then);
  void SaveOf(RunId id, Lsn end, const SaveGroupPtr& group);
  void Arrive(const SaveGroupPtr& group);
  Lsn NeededLsn(uint32_t lane);
  // Logs, once each, the runs that keep the log from being truncated up to `end`.
  void LogWhichRunNeeds(uint32_t lane, Lsn end);
  static bool Holds(const RunRanges& ranges, RunId run);

  // Constant after construction.
  const Options options_;
  const LiveRunParts parts_;
  Gauge* const depth_;
  Counter* const save_failures_;
  Counter* const unknown_;
  std::thread thread_;

  std::atomic<bool> recovering_ = false;

  // Guarded by mutex_.
  mutable absl::Mutex mutex_;
  std::deque<Item> queue_ ABSL_GUARDED_BY(mutex_);
  int64_t queue_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<Task> when_room_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  ReplayMode replay_mode_ ABSL_GUARDED_BY(mutex_) = ReplayMode::kLive;
  std::deque<Item> kept_back_ ABSL_GUARDED_BY(mutex_);  // By ReplayMode::kKeepBack.
  int64_t kept_back_bytes_ ABSL_GUARDED_BY(mutex_) = 0;

  // Shard's thread only.
  std::map<RunId, std::unique_ptr<LiveRun>> runs_;
  std::deque<Item> batch_;                         // Items from the queue that are not applied yet.
  std::map<RunId, std::vector<Item>> held_;        // Messages that came while their run's end is being saved.
  RunRanges dropping_;                             // Ranges whose Drop() is under way.
  RunRanges dropped_;                              // Ranges that Drop() has forgotten.
  int64_t ticked_ns_ = 0;                          // The last tick, by the machine's own clock.
  Lsn processed_lsn_ = 0;                          // The highest LSN that was applied.
  std::vector<Lane> lanes_;                        // By lane of the log.
  int saves_ = 0;                                  // Saves under way in all lanes.
  std::set<RunId> saves_waiting_;                  // Runs whose save is one of a lane's tasks.
  std::map<RunId, std::vector<Task>> after_save_;  // Tasks that wait for the end of a run's save.
  std::set<RunId> unsaved_;                        // Runs whose last save failed.
  std::set<RunId> needing_;                        // Runs that need a log that is too long; that was logged.
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_ENGINE_SHARD_H_
