// alert_cursor.h: one reader's place in the alert log.
//
// A cursor delivers everything after the last id that the reader saw, then
// whatever happens, each once and in order.  The log on disk is the queue: a
// reader holds one page of it, and a new transition only wakes the reader.
// That leaves no gap between history and live, nor between two threads that
// post at once.  An id is delivered only by reading the log up to it, never by
// the notice.
//
// A reader that has caught up and then falls behind by more than
// behind_bytes_max must ask again (kResync), which ends its cursor: so many
// bytes wait for no reader.

#ifndef BELLWETHER_SERVER_QUERY_ALERT_CURSOR_H_
#define BELLWETHER_SERVER_QUERY_ALERT_CURSOR_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/store/alert_store.h"

namespace bellwether::server {

// Next() is for one thread at a time; the log's posting threads notify the
// cursor meanwhile.
class AlertCursor {
 public:
  struct Options {
    size_t page_transitions = 32;
    size_t pages_max = 32;      // Looked through by one Next() of which nothing matches.
    size_t unstored_max = 256;  // Kept for a slow reader; more of them it finds once they are stored.
    int64_t behind_bytes_max = 1 << 20;
  };
  struct Filter {
    RunId run = 0;  // 0 = all
    Severity severity_min = Severity::kNone;
    // Of which runs, by name; empty = all.  Called from posting threads too.
    std::function<bool(const std::string& run)> sees;
  };
  struct Item {
    enum Kind { kNone, kTransition, kCaughtUp, kResync };
    Kind kind = kNone;
    AlertTransition transition;
    uint64_t after = 0;  // kCaughtUp, kResync: everything up to it was delivered or filtered out.
  };

  // Delivers ids above `after`; UINT64_MAX = only new ones.  `wake` is called
  // from posting threads, and by Next(), when Next() may have more: be quick, and
  // call nothing of this class.  `log` must outlive this object.
  AlertCursor(const Options& options, AlertStore* log, const Filter& filter, uint64_t after,
              std::function<void()> wake);
  ~AlertCursor();
  AlertCursor(const AlertCursor&) = delete;
  AlertCursor& operator=(const AlertCursor&) = delete;

  // What to deliver next; kNone = nothing now, or not yet, where pages_max did not
  // match: then it has called `wake`.  kCaughtUp comes once.  After kResync there
  // is only kNone.  May read from disk.  What cannot be stored comes
  // behind kCaughtUp, without an id, and once more with it when it is stored.
  // OUT_OF_RANGE: `after` was above every id that this log ever gave.
  absl::StatusOr<Item> Next();

 private:
  bool Matches(const AlertTransition& transition) const;
  void RecordUnstored(const AlertTransition& transition);
  void OnTransition(const AlertTransition& transition);

  const Options options_;
  AlertStore* const log_;
  const Filter filter_;
  const std::function<void()> wake_;
  uint64_t after_;  // Everything up to it was delivered or filtered out.
  bool out_of_range_ = false;
  bool caught_up_ = false;
  bool ended_ = false;
  std::deque<AlertTransition> page_;
  int64_t subscription_ = 0;

  absl::Mutex mutex_;
  uint64_t noticed_ ABSL_GUARDED_BY(mutex_) = 0;  // All ids up to it are readable.
  // Bytes of what was posted since the reader caught up and is not delivered.
  uint64_t delivered_ ABSL_GUARDED_BY(mutex_) = 0;
  bool counting_ ABSL_GUARDED_BY(mutex_) = false;
  bool behind_ ABSL_GUARDED_BY(mutex_) = false;
  std::map<uint64_t, int64_t> waiting_ ABSL_GUARDED_BY(mutex_);
  int64_t waiting_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  std::deque<AlertTransition> unstored_ ABSL_GUARDED_BY(mutex_);  // To be delivered.
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_QUERY_ALERT_CURSOR_H_
