// retention.h: what is old becomes smaller, then goes.
//
//   younger than raw              every value, bit for bit
//   younger than rounded          mantissas of 12 bits: a relative error of at
//                                 most 2^-13; a third of the bytes.  NaNs and
//                                 infinities stay, and so do the signals whose
//                                 sign is what counts (KeepsAllBits)
//   younger than summarized       of each series minimum, mean and maximum of
//                                 256 steps
//   older                         nothing; the run's record, events, alerts and
//                                 actions stay
//
// A step's age is counted by this server's clock, from when the thread first
// saw it stored.  It is never counted by a trainer's clock, nor from the times
// in an imported file.  Row x of a run keeps when steps were first seen: up to
// kMarksMax marks (time, attempt, step).  Fewer marks than steps mean that
// things are kept a little longer, never shorter.
//
// A clock that is set ahead while this server runs makes nothing older: the
// marks before the jump go with it.  The monotonic clock says that it jumped.
// One that is set back has its marks seen anew.
//
// In a cluster each server goes over the runs that it serves, by the database's
// clock.  Row x and what is rewritten are in the shared store, so that the
// run's next server goes on where this one was (Sharing).
//
// A thread of its own goes over all runs now and then.  What it rewrites and
// deletes goes through the database like everything else, and after a crash it
// is done again.  Readers see a chunk before or after, never half.
//
// Thread-safe.

#ifndef BELLWETHER_SERVER_STORE_RETENTION_H_
#define BELLWETHER_SERVER_STORE_RETENTION_H_

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "server/store/database.h"
#include "server/store/retention_state.h"
#include "server/store/run_table.h"
#include "server/store/series_store.h"
#include "server/util/clock.h"
#include "server/util/counters.h"

namespace bellwether::server {

// The nearest value with a mantissa of 12 bits; ties to even.  What is not finite
// stays as it is, bit for bit.
float RoundTo12Bits(float value);
// Sums whose sign is tested: rounding would make a bias of noise.
bool KeepsAllBits(SignalId signal);

class Retention {
 public:
  // Seconds; 0 = for ever.  Each that is not 0 is at least the one before.
  struct Options {
    int64_t raw_seconds = 7 * 86'400;
    int64_t rounded_seconds = 30 * 86'400;
    int64_t summarized_seconds = 365 * 86'400;
  };
  static constexpr size_t kMarksMax = 512;

  // Where several servers share what they keep.
  struct Sharing {
    // Whether this server may change the run's rows now, and has all of them: what it
    // does not know of it would keep for ever.  Null: no other server changes any.
    std::function<bool(RunId run)> whole;
    // The time that all of them go by; null = the clock's.
    std::function<int64_t()> unix_nanos;
  };

  // All must outlive it.  Nothing runs before Start().
  Retention(const Options& options, const RunTable* runs, Database* database, SeriesStore* series, Counters* counters,
            Clock* clock);
  void Share(Sharing sharing) { sharing_ = std::move(sharing); }  // Before Start().
  ~Retention();                                                   // As Stop().
  Retention(const Retention&) = delete;
  Retention& operator=(const Retention&) = delete;

  void Start();
  void Stop();

  // One pass over all runs, at once and in the caller's thread.  What fails is
  // logged and counted, and tried again in the next one.
  void Pass();

 private:
  bool forever() const;
  absl::Status PassRun(const RunSnapshot& run);
  void Mark(const RunSnapshot& run, int64_t now_unix_ns, RetentionState* state) const;
  // The time now, and whether it came by a jump ahead.
  int64_t Now();
  // Marks from before the jumps that the run has not seen.
  void GoWithJumps(RunId run, RetentionState* state) const;
  // The newest point that is older than `seconds`.
  bool MayPass(RunId run) const { return sharing_.whole == nullptr || sharing_.whole(run); }
  int64_t UnixNanos() const { return sharing_.unix_nanos == nullptr ? clock_->UnixNanos() : sharing_.unix_nanos(); }
  static HistoryPoint Older(const RetentionState& state, int64_t now_unix_ns, int64_t seconds);
  void Loop();
  bool stopping() const;

  const Options options_;
  const RunTable* const runs_;
  Database* const database_;
  SeriesStore* const series_;
  Clock* const clock_;
  Sharing sharing_;
  // Of the thread that passes.
  struct Jump {
    int64_t from_unix_ns, by_ns;
  };
  std::vector<Jump> jumps_;         // Of this server's life.
  std::map<RunId, size_t> jumped_;  // How many of them a run's stored marks went with.
  int64_t last_unix_ns_ = 0, last_monotonic_ns_ = 0;
  Counter* const rounded_;
  Counter* const summarized_;
  Counter* const dropped_;
  Counter* const freed_bytes_;
  Counter* const failures_;
  Gauge* const last_pass_;
  mutable std::mutex mutex_;
  std::condition_variable wake_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_STORE_RETENTION_H_
