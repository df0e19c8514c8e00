// attention_fwd_boxes.cuh: how O and O_lo of the Hopper forward leave.

#ifndef BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_FWD_BOXES_CUH_
#define BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_FWD_BOXES_CUH_

#include "cuda/registers.cuh"
#include "cuda/sm90/attention_fwd_layout.cuh"

namespace bellwether::kernels::cuda::sm90 {

// A warp's rows of O or O_lo, box by box through shared memory: the copy engine
// writes them while the warp goes on.  Where each is one box they go together, with one fence.
template <class S>
struct StoreByBoxes {
  const FwdMaps& maps;
  uint32_t boxes;  // this warp's
  TileOrigin at;
  int token;  // the warp's first
  bool both;  // O_lo follows O

  __device__ __forceinline__ void operator()(const uint32_t (&words)[S::kHeadDim / 4], bool residual) const {
    constexpr int kParts = kFwdOutputRows / S::kOutRows;  // of the warp's rows
    const int lane = ThreadIndexAgain() % 32, row = lane % S::kOutRows;
    const uint32_t place = row * 128 + ((lane / S::kOutRows) ^ (row % 8)) * 16;
#pragma unroll
    for (int n = 0; n < S::kBoxes * kParts; ++n) {
      const int box = n / kParts, part = n % kParts, number = (residual ? S::kBoxes * kParts : 0) + n;
      const uint32_t to = boxes + number % S::kOutBoxes * S::kOutBoxBytes;
      const bool together = S::kBoxes * kParts == 1 && both;
      if (!together || !residual) {
        if (lane == 0) {  // Those of the last tile were read long ago.
          if (number == 0) BulkWaitRead<0>();
          if (number >= S::kOutBoxes) BulkWaitRead<S::kOutBoxes - 1>();
        }
        __syncwarp();
      }
      // A store takes 2 x 2 blocks of 8 x 8, or 1 x 4.
#pragma unroll
      for (int chunk = 0; chunk < 8; chunk += 2 * kParts) {
        const int i = 16 * box + 2 * chunk + part;
        StoreMatrices(to + (place ^ (chunk * 16)), words[i], words[i + kParts], words[i + 2 * kParts],
                      words[i + 3 * kParts]);
      }
      if (together && !residual) return;
      ProxyFence();
      __syncwarp();
      if (lane == 0) {
        const int x = at.x + token + part * S::kOutRows;
        if (together) TmaStore5(&maps.o, boxes, 0, x, at.y, at.z, at.head);
        TmaStore5(residual ? &maps.o_lo : &maps.o, to, box * 64, x, at.y, at.z, at.head);
        BulkCommit();
      }
    }
  }
};

}  // namespace bellwether::kernels::cuda::sm90

#endif  // BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_FWD_BOXES_CUH_
