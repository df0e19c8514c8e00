// launches.h: which attempt of a run a launch is.
//
// A launch is one start of a job's processes; all of them tell the same time of it.
// The number of the attempt that they tell besides is the launcher's, and need not
// be one: torchrun counts each node's own failures, so that after a restart the
// nodes differ, a node that is new begins at 0 again, and a job that goes on with
// other nodes than before counts nothing.  So a launch that is later than all before
// is the run's next attempt, and its ranks have that number whatever they tell.
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
  // The launch that counts of one that a client told at `now_unix_ms`: none (0) where
  // it is more than an hour ahead, since no later one would ever come then.
  static int64_t Credible(int64_t launch_unix_ms, int64_t now_unix_ms);

  // The attempt of what was launched at `launch_unix_ms` (0 = not known) and calls
  // itself attempt `told`; none where a later launch has begun and there is no number
  // for this one before that: whoever is left of it is not wanted.
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
