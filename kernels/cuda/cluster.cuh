// cluster.cuh: sums over the blocks of a cluster, which before Hopper is one block.

#ifndef BELLWETHER_KERNELS_CUDA_CLUSTER_CUH_
#define BELLWETHER_KERNELS_CUDA_CLUSTER_CUH_

#include <cooperative_groups.h>

namespace bellwether::kernels::cuda {

// All threads of all blocks: what they wrote to shared memory is visible afterwards, and
// no block has ended before.
__device__ __forceinline__ void SyncCluster(int blocks) {
#if __CUDA_ARCH__ >= 900
  if (blocks > 1) {
    cooperative_groups::this_cluster().sync();
    return;
  }
#endif
  __syncthreads();
}

// Where block `rank` of the cluster has what this one has at *mine.
template <class T>
__device__ __forceinline__ const T* OfBlock(T* mine, int rank, int blocks) {
#if __CUDA_ARCH__ >= 900
  if (blocks > 1) return cooperative_groups::this_cluster().map_shared_rank(mine, rank);
#endif
  return mine;
}

}  // namespace bellwether::kernels::cuda

#endif  // BELLWETHER_KERNELS_CUDA_CLUSTER_CUH_
