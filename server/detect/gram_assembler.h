// gram_assembler.h: a run's Gram matrices, until there is something to compute.
//
// A head's W_Q needs one matrix, the change of its W_Q^T W_K two.  Holds the first
// of two until the other comes or its step closes.  Its memory is bounded, whatever
// clients send.
//
// Deterministic and without a clock.  Not thread-safe: the run's shard owns it.

#ifndef BELLWETHER_SERVER_DETECT_GRAM_ASSEMBLER_H_
#define BELLWETHER_SERVER_DETECT_GRAM_ASSEMBLER_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include "server/model/gram_types.h"

namespace bellwether::server {

// What one answer is computed from.
struct GramTask {
  RunId run = 0;
  ShippedGram gram;    // Of W_Q, or A of the increment.
  ShippedGram second;  // B of the increment; its `upper` is null for W_Q.

  bool increment() const { return second.upper != nullptr; }
  size_t bytes() const { return (gram.upper->size() + (increment() ? second.upper->size() : 0)) * sizeof(float); }
};

class GramAssembler {
 public:
  struct Options {
    size_t grams_per_step_max = 4096;
    size_t held_bytes_max = 8 << 20;  // Of matrices whose other half is awaited.
  };
  enum class Outcome {
    kTask,      // There is something to compute now.
    kHeld,      // The other half is awaited.
    kRepeated,  // The same was here in this step.
    kRefused,   // A limit is reached, or its halves differ in size.
  };

  explicit GramAssembler(const Options& options) : options_(options) {}

  // `task`, without a run, is set for kTask only.
  Outcome Take(const ShippedGram& gram, GramTask* task);
  // Every step up to and with this one has closed; how many halves are given up.
  size_t Close(uint32_t attempt, int64_t step);

 private:
  using StepKey = std::pair<uint32_t, int64_t>;  // attempt, step
  struct Step {
    std::set<std::pair<Head, GramOf>> seen;
    std::map<Head, ShippedGram> halves;
  };

  const Options options_;
  std::map<StepKey, Step> steps_;
  size_t held_bytes_ = 0;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_DETECT_GRAM_ASSEMBLER_H_
