// simd.h: the inner loops, built once per instruction set and chosen at run
// time, so that one binary runs on every x86-64.
//
// Keys come in panels of kPanel: element c of the panel's keys is at
// panel[c * stride + 0..7], one vector lane per key.  Every key is summed in the
// same order whatever its lane, so equal keys give equal scores.

#ifndef BELLWETHER_KERNELS_CPU_SIMD_H_
#define BELLWETHER_KERNELS_CPU_SIMD_H_

#include <cstdint>

namespace bellwether::kernels::cpu {

inline constexpr int64_t kPanel = 8;  // Doubles; 64 bytes, the alignment of panels.

// Stands in the score array for a key that is not allowed; exp() of it is 0.
inline constexpr double kMaskedScore = -1.7976931348623157e308;

// What one pass over a row's scores finds; masked scores count for nothing.
struct ScoreScan {
  double first;    // largest
  double second;   // second largest with multiplicity; kMaskedScore if none
  bool nonfinite;  // some score is NaN or beyond float32
};

struct ScoreSums {
  double l;               // sum exp(s - first)
  double weighted_score;  // sum exp(s - first) (s - first)
  double weighted_dp;     // sum exp(s - first) dp; 0 without dp
};

struct SimdKernels {
  int64_t tile_rows;  // Rows of one tile, divides kPanel.

  // out[r][lane] = sum_c a[c * a_stride + r] * b[c * b_stride + lane] for
  // r < tile_rows, lane < kPanel.  b and out are aligned to 64 bytes.
  void (*tile)(const double* a, int64_t a_stride, const double* b, int64_t b_stride, int64_t depth, double* out,
               int64_t out_stride);
  // The same, added to what out holds.
  void (*accumulate_tile)(const double* a, int64_t a_stride, const double* b, int64_t b_stride, int64_t depth,
                          double* out, int64_t out_stride);

  // out[c] = element c of a row, c < n; index: DType.
  void (*widen[3])(const void* row, int64_t n, double* out);
  // sum[c] += x[c], c < n.
  void (*add)(const double* x, int64_t n, double* sum);
  // squares[lane] = sum_c panel[c * 8 + lane]^2, c < dim.
  void (*square_lanes)(const double* panel, int64_t dim, double* squares);
  // sum_c a[c * stride] * b[c], c < n.
  double (*dot)(const double* a, int64_t stride, const double* b, int64_t n);
  // A panel from 8 rows: out[c * 8 + lane] = rows[lane * dim + c], c < dim.
  void (*transpose)(const double* rows, int64_t dim, double* out);

  // `panels` panels of scores, aligned to 64 bytes.
  ScoreScan (*scan)(const double* scores, int64_t panels);
  ScoreSums (*sum)(const double* scores, const double* dp, int64_t panels, double first);
  // s = cap tanh(s / cap), masked scores stay.
  void (*cap)(double* scores, int64_t panels, double cap);
  // sum (s - center)^2 over the first `count` scores.
  double (*spread)(const double* scores, int64_t count, double center);
};

inline constexpr int kSimdSetsMax = 3;

// Fills `sets` with those that this processor has, the fastest last; returns
// their number, >= 1.  Any thread.
int UsableSimdKernels(const SimdKernels* sets[kSimdSetsMax]);

// The fastest of them.  Any thread.
const SimdKernels& SelectSimdKernels();

}  // namespace bellwether::kernels::cpu

#endif  // BELLWETHER_KERNELS_CPU_SIMD_H_
