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

// The numbers of a type, by what their distance needs of the exponent's field of a double.
struct SimdGrid {
  int64_t least;  // of the smallest normal number
  int64_t drop;   // what the distance's is smaller by
};

// Roundings inside of a kernel.
struct SimdInside {
  SimdGrid grid;
  double factor;    // 0 to 1: where factor * ds is subnormal, it is what is rounded
  double of_score;  // what roundings of its score give p, as a variance over p^2
};

// Sums over the keys of a row, of probabilities p and dp, ds = p (dp - delta).  e(x) is the distance of
// the grid's numbers at x, r(x) = x rounded - x, u(x) the lesser of e(x)^2 / 12 and x^2.
struct LawTerms {
  double keys;         // how many p are not 0
  double p_square;     // p^2
  double p_error;      // r(p)
  double p_variance;   // w(p) = u(p) + of_score p^2
  double dp_p_error;   // dp r(p)
  double dp_variance;  // dp^2 w(p)
  double ds;           // ds
  double ds_error;     // r(ds)
  double ds_variance;  // u(ds) + w(p) (dp - delta)^2 + (2^-24 p)^2 (dp^2 + delta^2)
};

// What columns() adds up of each element x with its weight w; see LawTerms.
enum ColumnSum : int {
  kColumnSum = 0,      // x
  kColumnAbs,          // |x|
  kColumnSquare,       // x^2
  kColumnNonfinite,    // 1 if it is not finite
  kColumnUlpSquare,    // e(x)^2
  kColumnUlp,          // e(x)
  kColumnProduct,      // w x
  kColumnWeightedSq,   // (w e(x))^2
  kColumnWeightedUlp,  // w e(x)
  kColumnSame,         // 1 if it is the one before and not 0
  kColumnNotZero,      // 1 if it is not 0
  kColumnSums
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

  // x = factor * (x rounded to the grid)
  void (*round)(double* x, int64_t panels, double factor, SimdGrid grid);
  // score = exp(score - first), 0 where it is masked; returns their sum.
  double (*weigh)(double* scores, int64_t panels, double first);
  // weight = weight * factor; returns sum weight * dp.
  double (*normalise)(double* weights, const double* dp, int64_t panels, double factor);
  LawTerms (*law_terms)(const double* p, const double* dp, int64_t panels, double delta, SimdInside inside);
  // Adds what ColumnSum says of `panels` panels of elements, each to sums[which * stride + c].
  void (*columns)(const double* x, const double* before, const double* weight, int64_t panels, SimdGrid grid,
                  double* sums, int64_t stride);
};

inline constexpr int kSimdSetsMax = 3;

// Fills `sets` with those that this processor has, the fastest last; returns
// their number, >= 1.  Any thread.
int UsableSimdKernels(const SimdKernels* sets[kSimdSetsMax]);

// The fastest of them.  Any thread.
const SimdKernels& SelectSimdKernels();

}  // namespace bellwether::kernels::cpu

#endif  // BELLWETHER_KERNELS_CPU_SIMD_H_
