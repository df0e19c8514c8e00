// load_fleet.h: trainers that send at a rate, and what became of it.
//
// Not thread-safe; it starts threads of its own.

#ifndef BELLWETHER_TESTS_BENCH_LOAD_FLEET_H_
#define BELLWETHER_TESTS_BENCH_LOAD_FLEET_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tests/bench/load_parts.h"
#include "tests/bench/load_server.h"
#include "tests/bench/load_trainer.h"

namespace bellwether {

class LoadFleet {
 public:
  // `count` runs named after `name`, of `tenant`, connected.  Exits the program
  // if one is not welcome within a minute.
  LoadFleet(const LoadServer* server, const EncodedFrames* frames, const std::string& tenant, const std::string& name,
            int count);

  // As many runs more, connected.  Exits the program as the constructor does.
  void Add(int count);

  // Frames of all runs together, each run at its share, evenly spread, for so
  // long; returns when the last one was due.  `nans`: so many runs, of those that
  // have had none, send a NaN meanwhile.
  void Pace(double frames_per_second, double seconds, int nans = 0);
  // All runs at once: `frames` more each, as fast as acknowledgements come.
  void Backlog(uint64_t frames);
  // Of the runs from number `first` on.
  void Offer(int first, uint64_t frames);
  void Saturate(uint64_t window);
  // Breaks all streams; then KeepConnected() until all are back.
  void Cut();
  void KeepConnected();
  bool AllWelcomed() const;
  // Until all that was offered is acknowledged.  False: not within `seconds`.
  bool Drain(double seconds);

  uint64_t offered() const;
  uint64_t acked() const;
  uint64_t refused() const;
  std::string error() const;  // Why a stream ended unasked; "" = none did.
  // Latencies in seconds of what was acknowledged since the last call.
  std::vector<double> TakeLatencies();
  // From when a NaN was due until somebody was told, in seconds, of those runs
  // whose NaN was due within [begin, end); `*sent` of them.
  std::vector<double> AlertLatencies(const AlertWatch& watch, double begin, double end, size_t* sent) const;

 private:
  const LoadServer* const server_;
  const EncodedFrames* const frames_;
  const std::string tenant_, name_;
  std::vector<std::string> names_;
  std::vector<std::unique_ptr<LoadTrainer>> trainers_;
  size_t nans_sent_ = 0;
};

}  // namespace bellwether

#endif  // BELLWETHER_TESTS_BENCH_LOAD_FLEET_H_
