// compare_runs.h: which heads, or rows, of two runs differ, and from which step on.
//
// At each of some steps that both runs hold, a head's difference is
// d = log2(|run| / |baseline|).  Values below 1/16 of the signal's median there
// count as that much: a value next to nothing has no ratio.  Of tensors and modules, which
// are not alike, it is 2^-20.  d is compared with
// a band of
//
//   max(log2_min, 3 own, 3 min(scale of d over heads, sqrt(2) calm))
//
//   own    noise in time: the median over the steps so far of the scale over
//          heads of (d - d of the step before) / sqrt(2)
//   calm   the scale over heads of log2(value) in that of the two runs where it
//          is less: two unrelated draws from such heads differ by sqrt(2) of it
//
// with scale = 1.4826 MAD (robust.h).  Twins, alike in nearly all heads, get a
// narrow band.  Runs of two seeds get one as wide as heads of a healthy run are
// apart, however many heads have left it in the other.  With fewer than 8 heads
// the last term is left out.
//
// A head differs from its first step on beyond the band after which never 3
// compared steps in a row lie within it.  At least 3 of them (or all) and three
// quarters of them must lie beyond.  Where one run is not finite and the other is,
// they differ.  Not measured in either: not compared.
//
// Not thread-safe.

#ifndef BELLWETHER_SERVER_QUERY_COMPARE_RUNS_H_
#define BELLWETHER_SERVER_QUERY_COMPARE_RUNS_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace bellwether::server {

class RunComparison {
 public:
  static constexpr size_t kStepsMax = 64;
  static constexpr int kWithinMax = 3;  // So many in a row end what differs.

  // Of the median: values below it count as that much.
  static constexpr double kFloorPart = 1.0 / 16;
  static constexpr double kFloorPartOfRows = 1.0 / (1 << 20);  // Of tensors or modules.

  RunComparison(size_t cells, double log2_min, double floor_part = kFloorPart)
      : log2_min_(log2_min), floor_part_(floor_part), heads_(cells) {}

  // A step above the last one, at most kStepsMax; both with `cells` values.
  void Add(int64_t step, std::span<const float> run, std::span<const float> baseline);
  size_t steps() const { return steps_.size(); }

  struct Difference {
    double ratio = 0;  // Largest d, sign kept; infinite where only one is finite; 0 = none.
    int first = -1;    // Index of the step; -1: it does not differ.
    int before = -1;   // Of the step compared before it; -1 = none.
  };
  Difference Of(size_t cell) const;
  // Of step number `index` of those added.
  int64_t step(int index) const { return steps_[static_cast<size_t>(index)].step; }
  double band(int index) const { return steps_[static_cast<size_t>(index)].band; }

  enum class Pair { kNotCompared, kWithin, kBeyond };
  // Two further values, as those at step number `index` were compared.
  Pair Compare(int index, float run, float baseline) const;

 private:
  struct Step {
    int64_t step = 0;
    double floor = 0;
    double band = 0;
  };
  struct Head {
    uint64_t compared = 0, beyond = 0;  // A bit a step.
    double ratio = 0;
    float last = 0;  // d at the last step where it was finite.
    bool has_last = false;
  };

  const double log2_min_, floor_part_;
  std::vector<Step> steps_;
  std::vector<Head> heads_;
  std::vector<double> noises_;  // Of each step, as they came.
};

}  // namespace bellwether::server

#endif  // BELLWETHER_SERVER_QUERY_COMPARE_RUNS_H_
