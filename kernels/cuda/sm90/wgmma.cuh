// wgmma.cuh: warpgroup matrix products (m64nNk16, fp32 accumulators).
//
// One warpgroup computes D[64, N] += A[64, 16] B[16, N].  Thread t holds rows r
// = 16 (t / 32) + (t % 32) / 4 and r + 8.  d[4 j + 0, 1] are columns 8 j + 2 (t
// % 4) + 0, 1 of row r, and d[4 j + 2, 3] the same columns of row r + 8.  A in
// registers has the layout of four such groups packed to 16 bits.  So the pairs
// of an accumulator of 16 columns are the A operand of the next product without
// any shuffle.
//
// Operands in shared memory are tiles of 64 elements (128 bytes) a row with the
// 128-byte swizzle, 1024-byte aligned, as a bulk tensor copy with
// CU_TENSOR_MAP_SWIZZLE_128B leaves them.  Wider rows are several such tiles.
//
// A product is asynchronous: WgmmaFence, products, WgmmaCommit, and the
// registers are free again after WgmmaWait.  Touching them in between makes
// ptxas serialise everything (warning C7510).

#ifndef BELLWETHER_KERNELS_CUDA_SM90_WGMMA_CUH_
#define BELLWETHER_KERNELS_CUDA_SM90_WGMMA_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace bellwether::kernels::cuda::sm90 {

__device__ __forceinline__ void WgmmaFence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void WgmmaCommit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void WgmmaWait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Descriptor of an operand tile.  `stride_bytes` is from 8 rows to the next 8;
// `leading_bytes` from 64 columns to the next 64 (read only when the operand is
// transposed, that is when its rows are the product's K).  Advance by adding
// bytes / 16.
__device__ __forceinline__ uint64_t TileDescriptor(uint32_t shared_address, uint32_t leading_bytes,
                                                   uint32_t stride_bytes) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  return kSwizzle128 | (uint64_t{(shared_address & 0x3ffff) >> 4}) | (uint64_t{leading_bytes >> 4} << 16) |
         (uint64_t{stride_bytes >> 4} << 32);
}

// Ss: A and B in shared memory.  Rs: A in registers.  `accumulate` 0 overwrites
// d.  kTransA/kTransB: the operand's rows in memory are the product's K.
template <class T, int kN, bool kTransA, bool kTransB>
struct Wgmma;

// clang-format off
#define BW_WGMMA_SS(N, TYPE, D, R, X0, X1, X2, X3, X4)                                    \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " X2 ", 0;\n"                            \
               "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE              \
               " {" D "}, " X0 ", " X1 ", p, 1, 1, " X3 ", " X4 ";\n}\n"                    \
               : R(d) : "l"(a), "l"(b), "r"(accumulate), "n"(int{kTransA}), "n"(int{kTransB}))
#define BW_WGMMA_RS(N, TYPE, D, R, X0, X1, X2, X3, X4, X5, X6)                            \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " X5 ", 0;\n"                            \
               "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE              \
               " {" D "}, {" X0 ", " X1 ", " X2 ", " X3 "}, " X4 ", p, 1, 1, " X6 ";\n}\n"  \
               : R(d) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(accumulate),           \
                 "n"(int{kTransB}))
#define BW_WGMMA(N, D, R, X0, X1, X2, X3, X4, X5, X6)                                     \
  template <class T, bool kTransA, bool kTransB>                                          \
  struct Wgmma<T, N, kTransA, kTransB> {                                                  \
    static __device__ __forceinline__ void Ss(float (&d)[N / 2], uint64_t a, uint64_t b,  \
                                              int accumulate) {                           \
      if constexpr (std::is_same_v<T, __nv_bfloat16>) {                                   \
        BW_WGMMA_SS(N, "bf16", D, R, X0, X1, X2, X3, X4);                                 \
      } else {                                                                            \
        BW_WGMMA_SS(N, "f16", D, R, X0, X1, X2, X3, X4);                                  \
      }                                                                                   \
    }                                                                                     \
    static __device__ __forceinline__ void Rs(float (&d)[N / 2], uint32_t a0, uint32_t a1,\
                                              uint32_t a2, uint32_t a3, uint64_t b,       \
                                              int accumulate) {                           \
      static_assert(!kTransA, "A in registers cannot be transposed");                     \
      if constexpr (std::is_same_v<T, __nv_bfloat16>) {                                   \
        BW_WGMMA_RS(N, "bf16", D, R, X0, X1, X2, X3, X4, X5, X6);                         \
      } else {                                                                            \
        BW_WGMMA_RS(N, "f16", D, R, X0, X1, X2, X3, X4, X5, X6);                          \
      }                                                                                   \
    }                                                                                     \
  };

#define BW_D32 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define BW_R32(d) \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), \
  "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), \
  "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
BW_WGMMA(32, BW_D32, BW_R32, "%16", "%17", "%18", "%19", "%20", "%21", "%22")
#undef BW_D32
#undef BW_R32

#define BW_D48 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23"
#define BW_R48(d) \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), \
  "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
  "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), \
  "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), \
  "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), \
  "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
BW_WGMMA(48, BW_D48, BW_R48, "%24", "%25", "%26", "%27", "%28", "%29", "%30")
#undef BW_D48
#undef BW_R48

#define BW_D64 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define BW_R64(d) \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), \
  "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), \
  "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), \
  "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), \
  "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), \
  "+f"(d[30]), "+f"(d[31])
BW_WGMMA(64, BW_D64, BW_R64, "%32", "%33", "%34", "%35", "%36", "%37", "%38")
#undef BW_D64
#undef BW_R64

#define BW_D72 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35"
#define BW_R72(d) \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), \
  "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), \
  "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), \
  "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), \
  "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), \
  "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35])
BW_WGMMA(72, BW_D72, BW_R72, "%36", "%37", "%38", "%39", "%40", "%41", "%42")
#undef BW_D72
#undef BW_R72

#define BW_D96 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define BW_R96(d) \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), \
  "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
  "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), \
  "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), \
  "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), \
  "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), \
  "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), \
  "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), \
  "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), \
  "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), \
  "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), \
  "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
BW_WGMMA(96, BW_D96, BW_R96, "%48", "%49", "%50", "%51", "%52", "%53", "%54")
#undef BW_D96
#undef BW_R96

#define BW_D128 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define BW_R128(d) \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), \
  "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), \
  "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), \
  "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), \
  "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), \
  "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), \
  "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), \
  "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), \
  "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), \
  "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), \
  "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
BW_WGMMA(128, BW_D128, BW_R128, "%64", "%65", "%66", "%67", "%68", "%69", "%70")
#undef BW_D128
#undef BW_R128

#define BW_D136 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
  "%64, %65, %66, %67"
#define BW_R136(d) \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), \
  "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), \
  "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), \
  "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), \
  "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), \
  "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), \
  "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), \
  "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), \
  "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), \
  "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), \
  "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]), "+f"(d[64]), "+f"(d[65]), \
  "+f"(d[66]), "+f"(d[67])
BW_WGMMA(136, BW_D136, BW_R136, "%68", "%69", "%70", "%71", "%72", "%73", "%74")
#undef BW_D136
#undef BW_R136

#undef BW_WGMMA
#undef BW_WGMMA_RS
#undef BW_WGMMA_SS
// clang-format on

}  // namespace bellwether::kernels::cuda::sm90

#endif  // BELLWETHER_KERNELS_CUDA_SM90_WGMMA_CUH_
