// shard.h: one thread that owns a part of the runs.
//
// Messages enter through a bounded queue in the order of the log: Append() writes
// to the log and enters the queue under one mutex, so that for the runs of a shard
// both orders are the same.  On the shard's thread no locks are
// needed; it applies messages, closes overdue steps, watches for silence,
// publishes and commits.

#ifndef BELLWETHER_SERVER_ENGINE_SHARD_H_
#define BELLWETHER_SERVER_ENGINE_SHARD_H_

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
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
    // A run of which nobody says anything for so long, and no stream of which is open, has
    // ended: its machine is gone, and it would hold its place and memory for good.  Longer
    // than a job waits in a queue over night; one that comes back later goes on all the same.
    int64_t run_silent_ms_max = 86'400'000;
    int64_t publish_ms = 50;
  };
  using Task = std::function<void()>;
  // Saves of a lane under way at once, each with what it writes in memory, where others
  // wait for them (LiveRunParts::savers); further ones wait, and messages do not, but those
  // of a run whose end is being saved.
  static constexpr int kSavesMax = 8;

  Shard(const Options& options, const LiveRunParts& parts, int index);
  ~Shard();  // As Stop().
  Shard(const Shard&) = delete;
  Shard& operator=(const Shard&) = delete;

  void Start();
  // Applies what is queued, commits everything, ends the thread.
  void Stop();

  // Guards the order of log and queue; and whatever the pipeline keeps per
  // rank of this shard's runs.
  absl::Mutex& mutex() ABSL_LOCK_RETURNED(mutex_) { return mutex_; }
  bool HasRoom(size_t bytes) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Appends a record to the log and queues its message, which has the record's run, rank,
  // epoch and time.  `bytes` is what HasRoom was asked for; 0 = records that always find
  // room.  `once_logged` is called in between.  An error is the log's: nothing is queued,
  // and `message` is left as it was.
  absl::StatusOr<Lsn> Append(
      WalRecord record, IngestMessage&& message, size_t bytes = 0, absl::FunctionRef<void()> once_logged = [] {})
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // ---- while the log of before is applied behind what comes now ----
  enum class Feed {
    kLive,      // Append() queues.
    kReadBack,  // Append() leaves it to the log, which will be read up to there.
    kKeepBack,  // Append() keeps it until the log was read up to the switch.
  };
  void SetFeed(Feed feed) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // What recovery has read; whatever the feed.
  void PushRecovered(LoggedMessage message, size_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool HasRoomForRecovered(size_t bytes) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Called on the shard's thread, once, when the queue has become half empty.
  void CallWhenRoom(Task task) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Takes up a run before any message of it is queued.  The shard adds records of
  // its own from then on: what introduces the run to the log is there already.
  void Adopt(std::unique_ptr<LiveRun> run) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Forgets the runs in [first, end) after what is queued now; `save`: commits
  // them before.  Waits.  The result is the first LSN that they need still, or
  // the largest there is.  What comes for them behind it is left to the log, whose next
  // reader may be another server, until Expect() is called.
  Lsn Drop(RunId first, RunId end, bool save);
  void Expect(RunId first, RunId end);
  // Has the worker compute what nobody answered for the live runs in [first, end).
  // Once their answers are taken: one that is refused does not come again.
  void SubmitUnanswered(RunId first, RunId end);
  // Runs `task` on the shard's thread after what is queued now; waits.
  void Barrier(const Task& task);
  // Calls `task` with the run, read from the database if nobody writes it, after
  // what is queued now; nullptr = there is none.  Waits.
  void WithRun(RunId run, const std::function<void(const LiveRun*)>& task);
  // Shows readers a run with all that is queued for it now; waits.
  void PublishApplied(RunId run);
  // Commits every run of the log's lane that is live when this is called and still
  // needs an LSN below `end`, one after each batch of messages, so that none of them
  // waits for more than one commit; waits.  Every LSN of the lane below the result is
  // not needed by this shard.
  Lsn CommitBefore(uint32_t lane, Lsn end);
  std::vector<Lsn> CommitAll();  // The same of all runs, by lane.
  // Logs what Gram matrices of a run of this shard gave, and hands it to the run.
  // False: the log does not take it now.
  bool AppendSpectra(RunId run, const SpectraMessage& answers);
  // While recovery feeds the shard, deadlines and silence are not judged and no
  // spectra computed: the log holds what was decided then.
  void BeginRecovery() { recovering_ = true; }
  // After all that was pushed; waits.
  void EndRecovery();

 private:
  struct Item {
    LoggedMessage message;
    size_t bytes = 0;
    int64_t arrived_ns = 0;
    Task task;  // Instead of a message.
  };

  void Loop();
  void Enqueue(Task task);
  void ApplyItem(Item* item);
  Lsn NeededLsn(uint32_t lane);
  // Says, once, which run keeps the log from being made shorter, as far as `end`.
  void TellWhoNeeds(uint32_t lane, Lsn end);
  // The run's writing state; taken up from the database if it had ended.
  LiveRun* FindOrLoad(RunId id);
  void Tick(int64_t now_ns);
  // Logs what the clock says of a run: overdue steps, silent ranks, its end.
  void JudgeTime(LiveRun* run, int64_t now_ns);
  bool IsAttached(RunId run) const { return parts_.attached != nullptr && parts_.attached(run); }
  // Saves that somebody waits for together; `then` is called after the last of them.
  struct SaveGroup {
    size_t left = 0;
    Task then;
  };
  using SaveGroupPtr = std::shared_ptr<SaveGroup>;
  void CommitIfDue(LiveRun* run, int64_t now_ns, const SaveGroupPtr& group = nullptr);
  void EndSave(RunId id, LiveRun::Save save, const absl::Status& shared, const SaveGroupPtr& group);
  void RecordSaved(const LiveRun& run, const absl::Status& status);
  // Saves those of the lane's `runs` that still need an LSN below `end`, one after each
  // batch of messages; `then` once all of that, and what was under way of them, has an end.
  void SaveThen(uint32_t lane, const std::vector<RunId>& runs, Lsn end, Task then);
  void SaveOf(RunId id, Lsn end, const SaveGroupPtr& group);
  void Arrive(const SaveGroupPtr& group);
  // False: the log did not take it.
  bool AppendOwn(const LiveRun& run, WalKind kind, std::string payload, IngestMessage message);
  bool AppendOwn(RunId run, uint32_t attempt, WalKind kind, std::string payload, IngestMessage message);
  // Tells runs that are judged by other rules than those in force, some per
  // tick: their texts go through the log.
  void SpreadRules();
  void SpreadPolicy();  // Likewise.
  // Passes on what ranks are to be handed, once the log has it.
  void Deliver(LiveRun* run);

  const Options options_;
  const LiveRunParts parts_;
  Gauge* const depth_;
  Counter* const save_failures_;
  Counter* const unknown_;
  std::atomic<bool> recovering_ = false;

  mutable absl::Mutex mutex_;
  std::deque<Item> queue_ ABSL_GUARDED_BY(mutex_);
  int64_t queue_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<Task> when_room_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  Feed feed_ ABSL_GUARDED_BY(mutex_) = Feed::kLive;
  std::deque<Item> kept_back_ ABSL_GUARDED_BY(mutex_);
  int64_t kept_back_bytes_ ABSL_GUARDED_BY(mutex_) = 0;

  std::map<RunId, std::unique_ptr<LiveRun>> runs_;  // The thread's own.
  std::deque<Item> batch_;                          // Likewise: taken from the queue, not applied yet.
  // Likewise, of a lane of the log: what can wait, one after each batch, and saves under way.
  struct Lane {
    std::deque<Task> chores;
    int saves = 0;
    bool ready() const { return !chores.empty() && saves < kSavesMax; }
  };
  std::vector<Lane> lanes_;
  std::set<RunId> saves_waiting_;                  // Likewise: whose save is one of the chores.
  std::set<RunId> unsaved_;                        // Likewise: whose last try to save failed.
  std::set<RunId> needing_;                        // Likewise: who need the log, and that was said.
  int saves_ = 0;                                  // Likewise: under way in all; changed while it does not wait.
  std::map<RunId, std::vector<Task>> after_save_;  // Likewise: what waits for a run's save.
  using RunRanges = std::set<std::pair<RunId, RunId>>;
  static bool Holds(const RunRanges& ranges, RunId run);
  RunRanges dropping_, dropped_;             // Likewise: what Drop() was called for, and what it has done.
  std::map<RunId, std::vector<Item>> held_;  // Likewise: came while a run's end is being saved.
  Lsn processed_lsn_ = 0;
  std::thread thread_;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_ENGINE_SHARD_H_
