// parallel.h: spreads independent units over threads that end with the call.
//
// No pool: a library inside a trainer must not own threads, which a fork would
// lose.  A thread costs about 20 us to start, so callers ask for as many as the
// work is worth.

#ifndef BELLWETHER_KERNELS_CPU_PARALLEL_H_
#define BELLWETHER_KERNELS_CPU_PARALLEL_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <new>
#include <system_error>
#include <thread>

#include "bellwether/kernels/device.h"

namespace bellwether::kernels::cpu {

// One thread more for every so many operations (multiply-adds, or elements
// read): about 100 us of work.
inline constexpr double kOperationsPerThread = 1e6;

inline uint32_t UsefulThreads(uint32_t threads, int64_t units, double operations) {
  const double useful =
      std::min({static_cast<double>(threads), static_cast<double>(units), operations / kOperationsPerThread});
  return static_cast<uint32_t>(std::max(1.0, useful));
}

// Calls run(unit) for 0..units-1, each once, in any order, from up to `threads`
// threads, and returns when all are done.  run must not throw.  If the system
// gives no thread the caller does the work.
template <typename Function>
void ParallelFor(int64_t units, uint32_t threads, const Function& run) {
  if (threads <= 1 || units <= 1) {
    for (int64_t unit = 0; unit < units; ++unit) run(unit);
    return;
  }
  std::atomic<int64_t> next{0};
  const auto work = [&] {
    for (int64_t unit; (unit = next.fetch_add(1, std::memory_order_relaxed)) < units;) run(unit);
  };
  std::thread helpers[kThreadsMax];
  uint32_t started = 0;
  try {
    for (; started + 1 < std::min(threads, kThreadsMax); ++started) {
      helpers[started] = std::thread(work);
    }
  } catch (const std::system_error&) {  // Out of threads: fewer do the work.
  } catch (const std::bad_alloc&) {
  }
  work();
  for (uint32_t i = 0; i < started; ++i) helpers[i].join();
}

}  // namespace bellwether::kernels::cpu

#endif  // BELLWETHER_KERNELS_CPU_PARALLEL_H_
