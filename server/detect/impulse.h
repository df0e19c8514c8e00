// impulse.h: values far from those before them, for many cells at once.
//
//   score = (x - mean) / deviation of the cell's `window` values before x
//   alarm while score >= sigmas, in the watched direction
//
// A value that alarms does not enter the window (baseline_bank.h); after
// `relearn` of them in a row they are the new normal, and the cell starts
// afresh.  A value that is not finite changes nothing.
//
// Struct of arrays; memory is taken at the first value.  Not thread-safe.

#ifndef BELLWETHER_SERVER_DETECT_IMPULSE_H_
#define BELLWETHER_SERVER_DETECT_IMPULSE_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "server/detect/baseline_bank.h"
#include "server/detect/cusum.h"
#include "server/detect/user_rule.h"

namespace bellwether::server {

class ImpulseBank {
 public:
  struct Options {
    double sigmas = 6;
    int32_t window = 64;
    int32_t relearn = 100;
    RuleDirection direction = RuleDirection::kUp;
  };
  ImpulseBank(size_t cells, const Options& options)
      : options_(options), cells_(cells), baselines_(cells, options.window) {}

  // Scores `value`, then lets it into the window unless it alarms.
  BankReading Update(size_t cell, double value);
  void ForgetAll();
  // Of the same window; what is remembered stays.
  void SetOptions(const Options& options) { options_ = options; }
  size_t memory_bytes() const { return baselines_.memory_bytes() + alarming_.capacity() * sizeof(uint16_t); }

  template <class A>
  void Visit(A& a) {
    a(baselines_), a(alarming_);
  }
  bool Consistent() const { return baselines_.Consistent() && (alarming_.empty() || alarming_.size() == cells_); }

 private:
  Options options_;
  size_t cells_;
  BaselineBank baselines_;
  std::vector<uint16_t> alarming_;  // Batches in a row.
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_DETECT_IMPULSE_H_
