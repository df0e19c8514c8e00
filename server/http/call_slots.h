// call_slots.h: how many queries by HTTP run at once, in all and of one caller.
//
// There are far more workers than a processor has cores, since most of them
// wait for readers.  Queries that all ran at once would take the processors
// that ingest needs.  So a query waits for one of running_max places,
// wait_ns_max at the longest and with waiting_max others at most.  One caller
// has half of the places and of the waiting, so that it does not keep all
// others out.

#ifndef BELLWETHER_SERVER_HTTP_CALL_SLOTS_H_
#define BELLWETHER_SERVER_HTTP_CALL_SLOTS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "absl/synchronization/mutex.h"
#include "server/util/counters.h"

namespace bellwether::server {

// Thread-safe.
class CallSlots {
 public:
  // Each refusal counts in bellwether_query_limit_refused_total{limit="http_calls"}.
  struct Options {
    int running_max = 8;
    int waiting_max = 32;
    int64_t wait_ns_max = 5'000'000'000;
  };
  // A place; its end gives it back.  The slots must outlive it.
  class Place {
   public:
    Place(CallSlots* slots, std::string who) : slots_(slots), who_(std::move(who)) {}
    ~Place() { slots_->Leave(who_); }
    Place(const Place&) = delete;
    Place& operator=(const Place&) = delete;

   private:
    CallSlots* const slots_;
    const std::string who_;
  };

  CallSlots(const Options& options, Counters* counters);

  // Null: too many wait, or none became free in time.
  std::unique_ptr<Place> Enter(const std::string& who);

 private:
  struct Use {
    int running = 0;
    int waiting = 0;
  };
  void Leave(const std::string& who);
  // Half of `max`, and no less than one.
  static int Share(int max) { return max < 2 ? 1 : max / 2; }

  const Options options_;
  Counter* const refused_;
  absl::Mutex mutex_;
  Use all_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, Use> callers_ ABSL_GUARDED_BY(mutex_);  // Those that run or wait.
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_HTTP_CALL_SLOTS_H_
