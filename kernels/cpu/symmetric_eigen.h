// symmetric_eigen.h: eigenvalues of small symmetric matrices, in double.

#ifndef BELLWETHER_KERNELS_CPU_SYMMETRIC_EIGEN_H_
#define BELLWETHER_KERNELS_CPU_SYMMETRIC_EIGEN_H_

#include <cstdint>
#include <limits>

namespace bellwether::kernels::cpu {

// Reduces the symmetric matrix a [n][n] (destroyed) to tridiagonal form with
// the same eigenvalues by Householder reflections: diagonal [n],
// off_diagonal [n] (the last element is 0), scratch [n].
void Tridiagonalize(int64_t n, double* a, double* diagonal, double* off_diagonal, double* scratch);

// Replaces `diagonal` by the eigenvalues, in no order, by the implicit QL
// method; off_diagonal [n] is destroyed.  With `vectors` [n][n] = identity on
// entry, row i becomes the unit eigenvector of diagonal[i].  False if it did
// not converge (only for values that are not finite).
bool TridiagonalEigen(int64_t n, double* diagonal, double* off_diagonal, double* vectors);

// R with A = R R^T for the positive semidefinite a [n][n] (destroyed), by
// Cholesky with complete pivoting.  It stops where what is left is rounding
// error, n epsilon max a_ii.  `epsilon` is that of the numbers that a was made
// of.  factor [n][n]: row c is column c of R, in A's row order.  Returns R's
// columns.
int64_t PivotedCholesky(int64_t n, double* a, double* factor, double epsilon = std::numeric_limits<double>::epsilon());

}  // namespace bellwether::kernels::cpu

#endif  // BELLWETHER_KERNELS_CPU_SYMMETRIC_EIGEN_H_
