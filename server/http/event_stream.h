// event_stream.h: what the page receives as it happens, as server-sent events.
//
//   event: alert  id: <transition id>   data: the transition, one line of JSON
//   event: runs                         data: {"runs":["a","b"]} changed, or
//                                       {"all":true} if there are many, or other
//                                       servers of a cluster have runs, too
//   event: resync                       the reader should ask for everything
//   event: refused                      data: {"message":"..."}, why the reader's right
//                                       ended; then the stream ends
//
// A stream begins after the id of Last-Event-ID, so that a reader that was away
// misses no transition; without one it begins now.  `runs` comes at most once a
// second.  A comment every 15 s shows a dead reader.

#ifndef BELLWETHER_SERVER_HTTP_EVENT_STREAM_H_
#define BELLWETHER_SERVER_HTTP_EVENT_STREAM_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "absl/synchronization/mutex.h"
#include "server/access/access.h"
#include "server/store/alert_store.h"
#include "server/store/run_table.h"
#include "server/util/counters.h"

namespace bellwether::server {

class EventHub;

// One reader.  Used by one thread.
class EventStream {
 public:
  ~EventStream();
  EventStream(const EventStream&) = delete;
  EventStream& operator=(const EventStream&) = delete;

  // Waits until there is an event, a tick at the longest, and returns it.
  // Returns nothing once the hub has stopped, or the reader was refused or is
  // `gone`.
  std::optional<std::string> Next(const std::function<bool()>& gone = nullptr);

 private:
  friend class EventHub;
  EventStream(EventHub* hub, uint64_t after, GrantPtr grant);
  bool Sees(const std::string& run) const { return grant_ == nullptr || grant_->Sees(run); }

  EventHub* const hub_;
  const GrantPtr grant_;  // Null: the reader may see everything.
  uint64_t after_;        // The last transition that was sent.
  bool greeted_ = false;
  bool refused_ = false;
  bool failed_ = false;  // The log could not be read: not again before the next tick.
  uint64_t table_version_ = 0;
  int64_t runs_sent_ns_ = 0;
  int64_t written_ns_ = 0;
  int64_t others_told_ns_ = 0;
  std::map<RunId, uint64_t> versions_;
};

// Thread-safe.
class EventHub {
 public:
  struct Options {
    int streams_max = 64;
    int64_t tick_ns = 1'000'000'000;
    int64_t look_ns = 200'000'000;  // So often whether the reader has gone.
    int64_t keepalive_ns = 15'000'000'000;
    size_t transitions_max = 256;  // At once; the rest follows.
    size_t runs_named_max = 32;
    int64_t others_ns = 2'000'000'000;  // So often `all`, where other servers have runs, too.
  };
  using ToJson = std::function<std::string(const AlertTransition&)>;

  // All must outlive this object.
  // `others`: whether runs may have changed of which `runs` does not know; null = no.
  EventHub(const Options& options, const RunTable* runs, AlertStore* alerts, Counters* counters, ToJson to_json,
           std::function<bool()> others = nullptr);
  ~EventHub();

  // nullptr: streams_max are open, or the hub has stopped.  The hub must
  // outlive the stream.  The stream has the events that `grant` may see, and
  // ends with it; null: all events.
  std::unique_ptr<EventStream> Open(std::optional<uint64_t> after, GrantPtr grant = nullptr);

  // Ends all streams, for good.
  void Stop();

  int streams() const;

 private:
  friend class EventStream;

  const Options options_;
  const RunTable* const runs_;
  AlertStore* const alerts_;
  Gauge* const open_;
  const ToJson to_json_;
  const std::function<bool()> others_;
  int64_t subscription_ = 0;
  mutable absl::Mutex mutex_;
  uint64_t posted_ ABSL_GUARDED_BY(mutex_) = 0;  // Id of the newest transition.
  int streams_ ABSL_GUARDED_BY(mutex_) = 0;
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_HTTP_EVENT_STREAM_H_
