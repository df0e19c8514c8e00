// gram_spectrum.h: what the eigenvalues of a head's Gram matrix show, for the
// server.
//
// A client that ships G = W W^T of a head ships all that the spectrum of W
// holds.  For the change of W_Q^T W_K between two samples it ships two
// matrices.  With A = [c dW_Q; W_Q] and B = [W_K / c; dW_K] the change is A^T B
// to first order.  Its squared singular values are the eigenvalues of R^T (B
// B^T) R for A A^T = R R^T.
//
// Grams come in float32.  So their eigenvalues are known to about 1e-7
// lambda_1, and the small ones may come out below 0: those count as 0.  All
// that follows is double.  The results are rounded to kGramResultBits
// significant bits.  Two ways to the same eigenvalues (LAPACK's, a GPU's, ours)
// agree to 1e-13 lambda_1.  So they give the same floats except for about one
// value in a billion.
//
// Source: Gram and Householder are textbook; the increment's spectrum,
// arXiv:2606.28116.
//
// Every function may be called from any thread and keeps nothing.

#ifndef BELLWETHER_KERNELS_GRAM_SPECTRUM_H_
#define BELLWETHER_KERNELS_GRAM_SPECTRUM_H_

#include <cstdint>

namespace bellwether::kernels {

inline constexpr int64_t kGramRowsMax = 512;
inline constexpr int kGramResultBits = 17;

inline constexpr int64_t GramTriangle(int64_t n) { return n * (n + 1) / 2; }

struct GramSpectrum {
  float sigma = 0;           // sqrt(lambda_1)
  float stable_rank = 0;     // sum lambda / lambda_1, 1..n
  float effective_rank = 0;  // exp(-sum p ln p), p = lambda / sum lambda, 1..n
  float top2_ratio = 0;      // sqrt(lambda_2 / lambda_1), 0..1
};

// `eigenvalues` [n], in any order.  All results are 0 if no eigenvalue is above 0, and NaN
// if one is not finite.
GramSpectrum SpectrumOf(const double* eigenvalues, int64_t n);

enum class GramKind {
  kGram,       // A Gram matrix up to rounding.
  kNonfinite,  // A value is NaN or infinite.
  kNotAGram,   // A value on the diagonal is below 0, or one beside it is too large for
               // its row and column: |g_ij| > (1 + 1e-3) sqrt(g_ii g_jj) + 1e-6 max g.
};
// `upper` [GramTriangle(n)]: the upper triangle by rows.
GramKind ClassifyGram(const float* upper, int64_t n);
// Writes the whole matrix [n][n].
void ExpandGram(const float* upper, int64_t n, double* matrix);

// Makes the matrix [n][n] whose eigenvalues are the squared singular values of the change,
// and zeros, from both increment Grams [GramTriangle(n)].  `scratch`: [2 n][n].
void IncrementMatrix(const float* upper_a, const float* upper_b, int64_t n, double* matrix, double* scratch);

namespace cpu {

// Eigenvalues [count][n], in no order, of symmetric matrices [count][n][n], which are
// destroyed; n in 1..kGramRowsMax.  By Householder reflections and implicit QL; the
// reference for every other backend.  False if one did not converge, which finite values
// never do.
bool SymmetricEigenvalues(int64_t n, int64_t count, double* matrices, double* values);

}  // namespace cpu
}  // namespace bellwether::kernels

#endif  // BELLWETHER_KERNELS_GRAM_SPECTRUM_H_
