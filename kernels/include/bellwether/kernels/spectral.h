// spectral.h: largest singular value and ranks of each head's weights.
//
// A growing sigma(W_Q) is where the drift becomes visible in the weights; the
// effective rank of the increment of W_Q^T W_K collapses before any norm moves.
//
//   G = W W^T (rows x rows), theta = largest Ritz value of G by Lanczos with
//   full reorthogonalisation, v its unit Ritz vector
//   sigma       = sqrt(theta), a lower bound up to rounding
//   residual    = |G v - theta v|: an eigenvalue of G lies within it of theta
//   stable_rank = tr G / theta, 1..rows
//   overlap     = |cos(v before, v now)|
// Source: Gram and Lanczos are textbook; what they show, arXiv:2510.04212,
// Section 3, and arXiv:2606.28116 for the increment's effective rank.

#ifndef BELLWETHER_KERNELS_SPECTRAL_H_
#define BELLWETHER_KERNELS_SPECTRAL_H_

#include <cstdint>

#include "bellwether/kernels/device.h"
#include "bellwether/kernels/status.h"

namespace bellwether::kernels {

inline constexpr int64_t kSpectralRowsMax = 512;
inline constexpr int64_t kSpectralWeightsMax = 65536;
inline constexpr int64_t kSpectralColumnsMax = (int64_t{1} << 31) - 1;

// Lanczos steps: min(rows, 32) always; the CPU goes on in steps of 32, up to 4
// times, until residual <= 1e-6 theta (a bulk without a gap needs that).
inline constexpr int64_t kLanczosSteps = 32;
inline constexpr int64_t kLanczosRoundsMax = 4;

struct SpectralParams {
  DType dtype = DType::kFloat32;
  int64_t heads = 0;    // matrices, 0..65536
  int64_t rows = 0;     // of one head (head_dim), 1..512
  int64_t columns = 0;  // of one head (the model's width), 1..2^31-1
  // Element (h, i, j) is weight[h head_stride + i row_stride + j column_stride]:
  // nn.Linear has column_stride 1, a transposed Conv1D row_stride 1.
  const void* weight = nullptr;
  int64_t head_stride = 0;
  int64_t row_stride = 0;
  int64_t column_stride = 0;
  // All out, per head.  A weight that is not finite makes sigma, residual,
  // stable_rank, overlap and the affected Gram entries NaN and leaves direction
  // as it was.  A zero matrix has sigma, residual and stable_rank 0.
  float* sigma = nullptr;        // [heads]
  float* residual = nullptr;     // [heads] or null; units of sigma^2
  float* stable_rank = nullptr;  // [heads] or null
  // In: 0, or a vector that warms the start (any length; not finite counts as
  // 0).  Out: unit top left singular vector, its sign such that it does not
  // turn away from what was there, else largest element positive; 0 for a zero
  // matrix.
  float* direction = nullptr;  // [heads][rows] or null
  float* overlap = nullptr;    // [heads] or null; needs direction; NaN if 0
                               // before or now
  float* gram = nullptr;       // [heads][rows][rows] or null
};

// Measures `count` weights, 0..65536.  The Gram matrix and all that follows is double.  No scaling is needed for any
// float32 weights, but residual and gram overflow to inf where sigma^2 exceeds
// float32.  kCpu is done on return.
//
// kCuda enqueues one kernel for up to 32 weights in a row of one type and number of
// rows.  It has a block for each head, and computes in float32: sigma is within 4e-6
// (1e-6 with hundreds of columns) of what 32 steps give.  Squares of weights must be
// in float32's range.  Above 128 rows it needs `gram` to work in.
//
// kInvalidArgument, kUnsupported (rows above 512; kCuda: above 128 without
// gram), kUnavailable: nothing was written.  kDeviceError: of some weights perhaps.  Any thread.
[[nodiscard]] Status SpectralNorms(const SpectralParams* each, int64_t count, const Device& device);
[[nodiscard]] inline Status SpectralNorms(const SpectralParams& params, const Device& device) {
  return SpectralNorms(&params, 1, device);
}

// Effective rank of the first-order change of M = W_Q^T W_K per query head,
//   dM = dW_Q^T W_K + W_Q^T dW_K,  d = now - before,
//   effective rank = exp(-sum p ln p), p = s_i^2 / sum s^2, s = singular values.
// With A = [c dW_Q; W_Q], B = [W_K / c; dW_K] (2 rows x columns),
// c = |W_Q| / |dW_Q|, dM = A^T B and s^2 = eig(R^T (B B^T) R) for A A^T = R R^T.
struct IncrementRankParams {
  int64_t heads = 0;  // query heads, 0..65536, a multiple of kv_heads
  int64_t kv_heads = 0;
  int64_t rows = 0;     // 1..512
  int64_t columns = 0;  // 1..2^31-1
  // Float32, element (h, i, j) at h head_stride + i row_stride + j.  W_Q and
  // W_K in the formulas are the weights before.
  const float* wq = nullptr;  // [heads][rows][columns]
  const float* wq_before = nullptr;
  const float* wk = nullptr;  // [kv_heads][rows][columns]
  const float* wk_before = nullptr;
  int64_t q_head_stride = 0, q_row_stride = 0;
  int64_t k_head_stride = 0, k_row_stride = 0;
  float* effective_rank = nullptr;  // [heads] out; NaN if dM = 0 or not finite
};

// CPU only: kUnavailable for other backends.  Otherwise as SpectralNorms.
[[nodiscard]] Status IncrementRank(const IncrementRankParams& params, const Device& device);

}  // namespace bellwether::kernels

#endif  // BELLWETHER_KERNELS_SPECTRAL_H_
