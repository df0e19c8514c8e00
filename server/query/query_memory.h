// query_memory.h: how much memory all queries under way may take together.
//
// A query reserves what it may come to before it reads, and keeps that until
// its answer has been written.  It gives back what it did not need as soon as
// it knows.  A query that does not fit beside the others waits for wait_ns_max,
// and is then refused.  One waits at a time, since a waiting query has a thread
// that others need.  One caller has three quarters at most, so that others'
// queries go on beside those that it leaves unread.  Queries of no more than
// small_bytes have a quarter as much for themselves, on top.  So lists are
// answered beside queries that take all.

#ifndef BELLWETHER_SERVER_QUERY_QUERY_MEMORY_H_
#define BELLWETHER_SERVER_QUERY_QUERY_MEMORY_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "server/util/counters.h"

namespace bellwether::server {

// Thread-safe.
class QueryMemory {
 public:
  // Each refusal counts in bellwether_query_limit_refused_total{limit="query_memory"};
  // bellwether_query_memory_bytes is what is reserved.
  struct Options {
    int64_t bytes_max = int64_t{256} << 20;
    int64_t small_bytes = int64_t{1} << 20;
    int64_t wait_ns_max = 2'000'000'000;

    // What small queries have is on top.
    int64_t WholeMax() const { return bytes_max + bytes_max / 4; }
  };

  QueryMemory(const Options& options, Counters* counters);
  QueryMemory(const QueryMemory&) = delete;
  QueryMemory& operator=(const QueryMemory&) = delete;

  // Of queries of one size.
  struct Part {
    const int64_t bytes_max;
    int64_t reserved = 0;
    std::map<std::string, int64_t> callers = {};  // Those that have some.

    int64_t OwnMax(const std::string& who) const { return who.empty() ? bytes_max : bytes_max / 4 * 3; }
    bool Fits(const std::string& who, int64_t more) const;
    void Add(const std::string& who, int64_t more);  // Negative: gives back.
  };

  // What one query has; its end gives it back.  For one thread at a time; the
  // memory must outlive it.
  class Use {
   public:
    // "" = a caller without a name, which no share bounds.
    Use(QueryMemory* memory, std::string who) : memory_(memory), who_(std::move(who)), part_(&memory->small_) {}
    ~Use() { ShrinkTo(0); }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

    // Has at least so many bytes afterwards; waits for them.
    // RESOURCE_EXHAUSTED: they are more than one query may have, or were not
    // free in time.  Ask once, for all: a query that waits while it holds some
    // keeps others waiting.
    absl::Status Reserve(int64_t bytes);
    // The same without waiting.
    absl::Status GrowTo(int64_t bytes);
    void ShrinkTo(int64_t bytes);

   private:
    absl::Status Take(int64_t bytes, int64_t wait_ns);

    QueryMemory* const memory_;
    const std::string who_;
    Part* part_;  // Where it has what it has.
    int64_t held_ = 0;
  };

  int64_t reserved() const;

 private:
  void Show() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const Options options_;
  Counter* const refused_;
  Gauge* const reserved_gauge_;
  mutable absl::Mutex mutex_;
  Part large_ ABSL_GUARDED_BY(mutex_);
  Part small_ ABSL_GUARDED_BY(mutex_);
  bool one_waits_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_QUERY_QUERY_MEMORY_H_
