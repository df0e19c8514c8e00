// launches.h: which attempt of a run a launch is.
//
// A launch is one start of a job's processes, and all of them report the same
// time of it.  They also report the launcher's number of the attempt, which can
// be wrong. torchrun counts each node's own failures, so that after a restart
// the nodes differ.  A node that is new begins at 0 again.  A job that goes on
// with other nodes than before counts nothing.  So a launch that is later than
// all before is the run's next attempt, and its ranks have that number whatever
// they report.
//
// Deterministic; what it depends on is in the log.  Not thread-safe.

#ifndef BELLWETHER_SERVER_INGEST_LAUNCHES_H_
#define BELLWETHER_SERVER_INGEST_LAUNCHES_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>

namespace bellwether::server {

class Launches {
 public:
  // Returns the launch time to use for a client that reported `launch_unix_ms`
  // at `now_unix_ms`.  Returns 0 (unknown) if it is more than one hour in the
  // future: no later launch would ever come then.
  static int64_t Credible(int64_t launch_unix_ms, int64_t now_unix_ms);

  // The attempt of a process launched at `launch_unix_ms` (0 = not known) that
  // calls its attempt `told`.  Nothing if a later launch has begun and this one
  // had no number before that: its remaining processes are not wanted.
  std::optional<uint32_t> AttemptOf(int64_t launch_unix_ms, uint32_t told) const;

  // An attempt has begun.  Of the launches the newest `kLaunchesMax` are remembered.
  void Begin(int64_t launch_unix_ms, uint32_t attempt);

  uint32_t newest_attempt() const { return newest_attempt_; }

 private:
  static constexpr size_t kLaunchesMax = 16;
  static constexpr int64_t kAheadMsMax = 3'600'000;

  std::map<int64_t, uint32_t> attempts_;  // launch -> attempt
  uint32_t newest_attempt_ = 0;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_INGEST_LAUNCHES_H_
