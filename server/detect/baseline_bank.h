// baseline_bank.h: for many cells at once, the newest values of each, as what a
// further value is held against.
//
//   mean, deviation   of the window's values
//   phi               their lag-1 autocorrelation in the order in which they
//                     came, held in [0, 0.9]; of 50 values it is rough, and
//                     what is below 0 would make a test stricter than it is
//
// The caller decides what enters: never the value that is scored, never one
// that alarms.  A value that is not finite does not enter.
//
// Struct of arrays, [window][cells]; memory is taken at the first value and is
// fixed: (window + 1) floats a cell.  Not thread-safe.

#ifndef BELLWETHER_SERVER_DETECT_BASELINE_BANK_H_
#define BELLWETHER_SERVER_DETECT_BASELINE_BANK_H_

#include <cstddef>
#include <cstdint>
#include <vector>

namespace bellwether::server {

class BaselineBank {
 public:
  // window 2..65535.
  BaselineBank(size_t cells, int32_t window) : cells_(cells), window_(static_cast<size_t>(window)) {}

  struct Baseline {
    double mean = 0;
    double deviation = 0;  // Above 0 even where all values are equal.
    double phi = 0;
    // By which a deviation of one value must be wider for what follows it
    // being alike: sqrt((1 + phi) / (1 - phi)).
    double widening() const;
  };
  // False until the cell's window is full.
  bool Read(size_t cell, Baseline* baseline) const;
  void Push(size_t cell, double value);
  void Forget(size_t cell);
  void ForgetAll();
  size_t memory_bytes() const;

  template <class A>
  void Visit(A& a) {
    a(values_), a(next_), a(count_);
  }
  // After Visit with a reader: whether the sizes are those of this object.
  bool Consistent() const;

 private:
  size_t cells_;
  size_t window_;
  std::vector<float> values_;  // [window][cells], a ring per cell
  std::vector<uint16_t> next_, count_;
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_DETECT_BASELINE_BANK_H_
