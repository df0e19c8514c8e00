// alert_store.h: stores every transition once, and notifies its subscribers.
//
// Post() stores a transition exactly once (by run, key and k) and calls the
// subscribers.  Read() serves the rest, so that a reader that missed something
// asks again from the last id it saw.  Thread-safe.

#ifndef BELLWETHER_SERVER_STORE_ALERT_STORE_H_
#define BELLWETHER_SERVER_STORE_ALERT_STORE_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/model/alert_transition.h"
#include "server/store/database.h"
#include "server/store/run_table.h"
#include "server/util/counters.h"

namespace bellwether::server {

// An alert as it stands: its newest transition and people's notes.
struct AlertView {
  AlertTransition last;
  Database::AlertNote note;
  Illness illness;            // As it was when it last fired.
  int64_t first_unix_ns = 0;  // When its first transition was.
  // What was said last of its illness, unless that was taken back; under whatever key.
  std::optional<FalseAlarm> false_alarm;
  // By that: no notification goes out, and it does not count.  What is worse than was judged is news.
  bool muted = false;

  // Whether people are to hear of it now.
  bool notifies(int64_t now_unix_ns) const { return !muted && note.silenced_until_unix_ns <= now_unix_ns; }
};

class AlertStore {
 public:
  // Called from the thread that posts, without the log's lock: be quick.
  using Subscriber = std::function<void(const AlertTransition&)>;

  // `database` and `counters` must outlive this object; null = nothing is counted.
  explicit AlertStore(Database* database, Counters* counters = nullptr);

  // Reads what is stored.  Call once, before anything else.
  absl::Status Load();

  // False: it is stored already, or waits for that (a replay after a crash);
  // subscribers are not called.  ABORTED: another server owns the run by now
  // and decides; subscribers are not called.
  //
  // Any other error: it could not be stored.  Subscribers are called all the
  // same, without an id, and it is kept for StoreWaiting().  It is not even
  // tried while others of its store wait, so that a silent store keeps no
  // caller waiting a second time.  Beyond 4,096 that wait it is counted
  // instead.
  absl::StatusOr<bool> Post(AlertTransition transition);
  // Stores what could not be stored, in order of each store, and calls the
  // subscribers again with its id.  Call now and then, from one thread.
  // Returns the first error.  If a crash comes first, the transition is
  // concluded again from the log, or was kept with its run.  A transition whose
  // row there is damaged is counted and given up.
  absl::Status StoreWaiting();

  // A transition of the run was reported that is stored nowhere.  A state of
  // the run that was saved now would not conclude it again.
  bool Waits(RunId run) const;
  // Reported, and not stored yet; oldest first.
  std::vector<AlertTransition> Unstored() const;

  absl::StatusOr<std::vector<AlertTransition>> Read(uint64_t after, size_t limit, RunId run) const;
  uint64_t last_id() const;

  // The newest stored transitions of alerts of the runs in [first, end) that are not
  // older than `since_unix_ns`, by run.
  std::vector<AlertTransition> Newest(RunId first, RunId end, int64_t since_unix_ns) const;
  // The highest id of the run that was sent to a receiver, 0 = none: as
  // Database.
  absl::Status PutTold(RunId run, uint32_t receiver, uint64_t id) { return database_->PutTold(run, receiver, id); }
  absl::StatusOr<uint64_t> GetTold(RunId run, uint32_t receiver) const { return database_->GetTold(run, receiver); }

  // Newest transition of each alert; run 0 = all.  Firing first, then newest.
  std::vector<AlertView> List(RunId run, bool firing_only) const;
  absl::StatusOr<AlertView> Get(RunId run, const std::string& key) const;
  absl::Status Annotate(RunId run, const std::string& key, const Database::AlertNote& note);
  // Forgets the alerts of a run that is deleted.
  void Forget(RunId run);
  // Reads people's notes of the runs in [first, end), which another server kept.  Only the
  // writers of notes wait for that.
  absl::Status LoadNotes(RunId first, RunId end);
  // When the newest mark of a false alarm in the run was set or taken back; 0 = never.
  int64_t LastSaidUnixNanos(RunId run) const;
  // All that was said of the alert's illness, and by its key, oldest first.
  std::vector<FalseAlarm> FalseAlarmsOf(const AlertView& alert) const;
  // `run` with the stage, eta and number of those of its firing alerts that are not muted.
  RunSnapshotPtr WithoutMuted(RunSnapshotPtr run) const;

  // Reports what other servers of a cluster stored since the last call, marked
  // so.
  absl::Status NotifyForeign();

  int64_t Subscribe(Subscriber subscriber);
  void Unsubscribe(int64_t id);  // Returns once no call is in flight.

 private:
  static constexpr size_t kWaitingMax = 4096;

  void Tell(const AlertTransition& transition);
  // Shows the transition as the newest of its alert.
  void Show(const AlertTransition& transition) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Finds what the notes of the run's alerts say of false alarms.
  void GatherFalseAlarms(RunId run) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // What was said last of the illness in the run; null: nothing.
  const FalseAlarm* LastSaid(RunId run, const Illness& illness) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The view as readers are given it.
  AlertView Judged(AlertView view) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  struct Waiting {
    AlertTransition transition;
    bool kept = false;  // With its run, in a store that does not number it.
  };
  // Keeps it with its run, if that is where it is not numbered.
  bool Keep(const AlertTransition& transition);
  void KeepWaiting(Waiting waiting) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void ShowWaiting() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  Database* const database_;
  Gauge* const waiting_now_;  // Null: not counted.
  Counter* const never_stored_;
  // Held by the thread that writes a note, or reads notes.  Writers into another store, and
  // readers, do not wait for a store that is silent.
  absl::Mutex* NotesMutex(RunId run);
  mutable absl::Mutex mutex_;
  std::map<std::pair<RunId, std::string>, AlertView> alerts_ ABSL_GUARDED_BY(mutex_);
  std::map<RunId, std::vector<FalseAlarm>> false_alarms_ ABSL_GUARDED_BY(mutex_);  // In the order of time.
  std::map<uint32_t, absl::Mutex> notes_mutexes_ ABSL_GUARDED_BY(mutex_);          // By store; acquired before mutex_.
  std::deque<Waiting> waiting_ ABSL_GUARDED_BY(mutex_);                            // Reported, but not stored.
  bool full_said_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Mutex subscribers_mutex_ ABSL_ACQUIRED_AFTER(mutex_);
  std::map<int64_t, Subscriber> subscribers_ ABSL_GUARDED_BY(subscribers_mutex_);
  int64_t next_subscriber_ ABSL_GUARDED_BY(subscribers_mutex_) = 1;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_STORE_ALERT_STORE_H_
