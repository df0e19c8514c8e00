// mma.cuh: the tensor core instructions of compute capability 8.0, by warps.
//
// With g = lane / 4 and t = lane % 4, of one product D[16, 8] += A[16, 16] B[16, 8]
//   d[0, 1]  row g,     columns 2 t, 2 t + 1;     d[2, 3]  the same of row g + 8
//   a[0]     row g,     k = 2 t, 2 t + 1;         a[1]     the same of row g + 8
//   a[2]     row g,     k = 2 t + 8, 2 t + 9;     a[3]     the same of row g + 8
//   b[0]     column g,  k = 2 t, 2 t + 1;         b[1]     k = 2 t + 8, 2 t + 9
// so that two neighbouring D, packed to 16 bits, are the A of the next product.
//
// Source: PTX ISA, "Matrix Fragments for mma.m16n8k16", "ldmatrix".

#ifndef BELLWETHER_KERNELS_CUDA_SM80_MMA_CUH_
#define BELLWETHER_KERNELS_CUDA_SM80_MMA_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace bellwether::kernels::cuda::sm80 {

template <class T>
__device__ __forceinline__ void Mma(float* d, const uint32_t* a, uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9},"
        " {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9},"
        " {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// Four 8 x 8 matrices of 16-bit elements; lane i gives the address of row i % 8 of
// matrix i / 8.  w[m] is row g, columns 2 t and 2 t + 1 of matrix m; transposed:
// column g, rows 2 t and 2 t + 1.
template <bool kTransposed>
__device__ __forceinline__ void LoadMatrices(uint32_t (&w)[4], uint32_t row_address) {
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                 : "r"(row_address));
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                 : "r"(row_address));
  }
}

}  // namespace bellwether::kernels::cuda::sm80

#endif  // BELLWETHER_KERNELS_CUDA_SM80_MMA_CUH_
