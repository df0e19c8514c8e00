// cusum.h: sums of what is too much, for many cells at once.
//
//   z   = (x - mean) / (deviation sqrt((1 + phi) / (1 - phi)))
//   S+  = max(0, S+ + z - k), S- = max(0, S- - z - k), both held at 2 h
//   alarm while the S of the watched direction is above h
//
// x is a batch mean.  mean, deviation and the lag-1 autocorrelation phi are
// those of the cell's `window` values before it (baseline_bank.h).  They stand
// still while the cell alarms, and from half of the way to it on.  So neither
// the value that is scored nor what leads to an alarm becomes normal.  After
// `relearn` batches of alarm it is the new normal all the same, and the cell
// starts afresh.  S is held at 2 h so that an alarm ends soon after its cause.
// A value that is not finite changes nothing.
//
// Far above k and on independent normal values the sum passes s by chance with
// probability exp(-2 k (s + 0.583)) at any one batch.  Source: Siegmund,
// Sequential Analysis (1985), Section 10.2.
//
// Struct of arrays; memory is taken at the first value.  Not thread-safe.

#ifndef BELLWETHER_SERVER_DETECT_CUSUM_H_
#define BELLWETHER_SERVER_DETECT_CUSUM_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "server/detect/baseline_bank.h"
#include "server/detect/user_rule.h"

namespace bellwether::server {

// What a detector with a baseline finds in one value.
struct BankReading {
  bool scored = false;  // False: the baseline is not full yet.
  bool alarm = false;
  double score = 0;      // Standard deviations, in the watched direction.
  double p = 1;          // Of a score so large by chance.
  double mean = 0;       // Of the baseline.
  double deviation = 0;  // What one unit of a value's score is.
};

class CusumBank {
 public:
  struct Options {
    double k = 1, h = 8;
    int32_t window = 50;
    int32_t relearn = 100;
    RuleDirection direction = RuleDirection::kUp;
  };
  CusumBank(size_t cells, const Options& options);

  // Scores `value`, then lets it into the baseline unless that stands still.
  BankReading Update(size_t cell, double value);
  void ForgetAll();
  // Of the same window; what is remembered stays.
  void SetOptions(const Options& options) { options_ = options; }
  size_t memory_bytes() const;

  template <class A>
  void Visit(A& a) {
    a(baselines_), a(up_), a(down_), a(alarming_);
  }
  bool Consistent() const;

 private:
  double Score(size_t cell) const;

  Options options_;
  size_t cells_;
  BaselineBank baselines_;
  std::vector<float> up_, down_;
  std::vector<uint16_t> alarming_;  // Batches in a row.
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_DETECT_CUSUM_H_
