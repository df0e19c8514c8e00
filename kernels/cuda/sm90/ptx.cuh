// ptx.cuh: the Hopper instructions that CUDA C++ has no name for: mbarriers,
// bulk tensor copies, register reallocation, named barriers.
//
// Every wrapper is one instruction (a wait is a loop around one).  Shared
// memory addresses are memory.cuh's.

#ifndef BELLWETHER_KERNELS_CUDA_SM90_PTX_CUH_
#define BELLWETHER_KERNELS_CUDA_SM90_PTX_CUH_

#include <cuda.h>

#include <cstdint>

#include "cuda/memory.cuh"

namespace bellwether::kernels::cuda::sm90 {

// ---- mbarriers: a phase ends when `count` arrivals and all expected bytes are in.

__device__ __forceinline__ void BarrierInit(uint32_t bar, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count));
}

// Makes initialised barriers visible to the copy engine.
__device__ __forceinline__ void BarrierInitFence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void BarrierArrive(uint32_t bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}

__device__ __forceinline__ void BarrierArriveExpect(uint32_t bar, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}

// Returns once the phase of this parity has ended.
__device__ __forceinline__ void BarrierWait(uint32_t bar, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@p bra done;\n"
      "bra again;\n"
      "done:\n"
      "}\n" ::"r"(bar),
      "r"(parity)
      : "memory");
}

// ---- clusters: the blocks of one reach each other's shared memory

__device__ __forceinline__ uint32_t ClusterRank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// The address in the whole cluster of what block `rank` has at `address`.
__device__ __forceinline__ uint32_t AddressOfRank(uint32_t address, uint32_t rank) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}

// All threads of all blocks.
__device__ __forceinline__ void ClusterSync() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// `bar` is AddressOfRank's.  Says that the copy engine or wgmma may go on there; what ordinary stores wrote is not
// released to the other block, which would make the thread wait for all it wrote to global memory.
__device__ __forceinline__ void BarrierArriveThere(uint32_t bar) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(bar) : "memory");
}

// ---- named barriers, for warpgroups that take turns

__device__ __forceinline__ void NamedSync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void NamedArrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- bulk tensor copies; coordinates innermost first

__device__ __forceinline__ void TmaPrefetchMap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

__device__ __forceinline__ void TmaLoad5(uint32_t dst, const CUtensorMap* map, uint32_t bar, int c0, int c1, int c2,
                                         int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(dst),
      "l"(map), "r"(bar), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

// What L2 keeps longest, and what it lets go first: createpolicy.fractional's of all of an access.
inline constexpr uint64_t kEvictLast = 0x14F0000000000000, kEvictFirst = 0x12F0000000000000;

__device__ __forceinline__ void TmaLoad5(uint32_t dst, const CUtensorMap* map, uint32_t bar, int c0, int c1, int c2,
                                         int c3, int c4, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(dst),
      "l"(map), "r"(bar), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "l"(policy)
      : "memory");
}

// The same to the same place of every block of the cluster in `mask`, each with its own barrier there.
__device__ __forceinline__ void TmaLoad5Multicast(uint32_t dst, const CUtensorMap* map, uint32_t bar, uint16_t mask,
                                                  int c0, int c1, int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%4, %5, %6, %7, %8}], [%2], %3;" ::"r"(dst),
      "l"(map), "r"(bar), "h"(mask), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}

// From shared memory; what lies outside the tensor is not written.
__device__ __forceinline__ void TmaStore5(const CUtensorMap* map, uint32_t src, int c0, int c1, int c2, int c3,
                                          int c4) {
  asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(map),
               "r"(src), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
               : "memory");
}

// `bytes` contiguous bytes, a multiple of 16, both sides 16-byte aligned.
__device__ __forceinline__ void BulkLoad(uint32_t dst, const void* src, uint32_t bar, uint32_t bytes) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %3, [%2];" ::"r"(dst),
               "l"(src), "r"(bar), "r"(bytes)
               : "memory");
}

// Copies to another block's shared memory, and counts there: `dst` and `bar` are AddressOfRank's.
__device__ __forceinline__ void BulkCopyThere(uint32_t dst, uint32_t src, uint32_t bar, uint32_t bytes) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %3, [%2];" ::"r"(dst),
      "r"(src), "r"(bar), "r"(bytes)
      : "memory");
}

// Adds `bytes` of floats in shared memory to global memory; both as BulkLoad's.  The
// thread's own commits and waits say when.
__device__ __forceinline__ void BulkReduceAdd(float* dst, uint32_t src, uint32_t bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(dst), "r"(src),
               "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void BulkCommit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Until all but the last kPending groups have read shared memory.
template <int kPending = 0>
__device__ __forceinline__ void BulkWaitRead() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Until all is done.
__device__ __forceinline__ void BulkWait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Between the copy engine's accesses to global memory and ordinary ones.
__device__ __forceinline__ void GlobalProxyFence() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// Ordinary stores to shared memory before it, wgmma's or the copy engine's reads after it (and a
// barrier between the threads).
__device__ __forceinline__ void ProxyFence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Four 8 x 8 matrices of 16-bit elements; lane i gives the address of row i % 8
// of matrix i / 8.
__device__ __forceinline__ void StoreMatrices(uint32_t row_address, uint32_t w0, uint32_t w1, uint32_t w2,
                                              uint32_t w3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_address), "r"(w0), "r"(w1),
               "r"(w2), "r"(w3)
               : "memory");
}

// Each matrix transposed: two words of a thread, of one column, go to two rows.
__device__ __forceinline__ void StoreMatricesTransposed(uint32_t row_address, uint32_t w0, uint32_t w1, uint32_t w2,
                                                        uint32_t w3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_address), "r"(w0),
               "r"(w1), "r"(w2), "r"(w3)
               : "memory");
}

// The same word four times.
__device__ __forceinline__ void StoreShared4(uint32_t address, uint32_t word) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(address), "r"(word) : "memory");
}

__device__ __forceinline__ void StoreShared4(uint32_t address, float a, float b, float c, float d) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}

__device__ __forceinline__ float4 LoadShared4(uint32_t address) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

__device__ __forceinline__ int LoadShared(uint32_t address) {
  int word;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(address) : "memory");
  return word;
}

// ---- registers

template <int kRegisters>
__device__ __forceinline__ void RegistersShrink() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void RegistersGrow() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace bellwether::kernels::cuda::sm90

#endif  // BELLWETHER_KERNELS_CUDA_SM90_PTX_CUH_
