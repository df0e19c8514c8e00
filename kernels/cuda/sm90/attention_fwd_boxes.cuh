// attention_fwd_boxes.cuh: how O and O_lo of the Hopper forward leave.

#ifndef BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_FWD_BOXES_CUH_
#define BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_FWD_BOXES_CUH_

#include "cuda/registers.cuh"
#include "cuda/sm90/attention_fwd_layout.cuh"

namespace bellwether::kernels::cuda::sm90 {

// A warp's rows of O or O_lo, box by box through shared memory: the copy engine
// writes them while the warp goes on.
template <class S>
struct StoreByBoxes {
  const FwdMaps& maps;
  uint32_t boxes;  // this warp's
  TileOrigin at;
  int token;  // the warp's first

  __device__ __forceinline__ void operator()(const uint32_t (&words)[S::kHeadDim / 4], bool residual) const {
    const int lane = ThreadIndexAgain() % 32, row = lane % 16;
    const uint32_t place = row * 128 + ((lane / 16) ^ (row % 8)) * 16;
#pragma unroll
    for (int box = 0; box < S::kBoxes; ++box) {
      const int number = (residual ? S::kBoxes : 0) + box;
      const uint32_t to = boxes + number % S::kOutBoxes * S::kOutBoxBytes;
      if (lane == 0) {  // Those of the last tile were read long ago.
        if (number == 0) BulkWaitRead<0>();
        if (number >= S::kOutBoxes) BulkWaitRead<S::kOutBoxes - 1>();
      }
      __syncwarp();
#pragma unroll
      for (int chunk = 0; chunk < 8; chunk += 2) {
        const int i = 16 * box + 2 * chunk;
        StoreMatrices(to + (place ^ (chunk * 16)), words[i], words[i + 1], words[i + 2], words[i + 3]);
      }
      ProxyFence();
      __syncwarp();
      if (lane == 0) {
        TmaStore5(residual ? &maps.o_lo : &maps.o, to, box * 64, at.x + token, at.y, at.z, at.head);
        BulkCommit();
      }
    }
  }
};

}  // namespace bellwether::kernels::cuda::sm90

#endif  // BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_FWD_BOXES_CUH_
