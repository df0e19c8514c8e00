// disk_guard.h: keeps a floor of the data's file system free.
//
// Below the floor the log is held: nothing more is acknowledged.  The log goes on when
// a tenth more than the floor is free.
//
// Not thread-safe.

#ifndef BELLWETHER_SERVER_ENGINE_DISK_GUARD_H_
#define BELLWETHER_SERVER_ENGINE_DISK_GUARD_H_

#include <cstdint>
#include <functional>
#include <string>

#include "server/store/log_backend.h"
#include "server/util/counters.h"

namespace bellwether::server {

class DiskGuard {
 public:
  struct Options {
    std::string path;
    // The floor is the smaller of these.
    int64_t free_bytes_min = 0;
    double free_ratio_min = 0;
  };
  // `give_back` makes the log need less of the disk; called before the log is held.
  DiskGuard(const Options& options, LogBackend* log, std::function<void()> give_back, Counters* counters)
      : options_(options),
        log_(log),
        give_back_(std::move(give_back)),
        free_bytes_(counters->gauge("bellwether_store_free_bytes")),
        degraded_(counters->gauge("bellwether_degraded", {{"reason", "disk"}})) {}

  // Call each second.
  void Check();

 private:
  // Constant after construction.
  const Options options_;
  LogBackend* const log_;
  const std::function<void()> give_back_;
  Gauge* const free_bytes_;
  Gauge* const degraded_;

  bool low_ = false;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_ENGINE_DISK_GUARD_H_
