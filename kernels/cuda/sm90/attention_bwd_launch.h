// attention_bwd_launch.h: which tile shape serves a call, and its launcher.

#ifndef BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_BWD_LAUNCH_H_
#define BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_BWD_LAUNCH_H_

#include <cuda.h>
#include <cuda_runtime.h>

#include "bellwether/kernels/attention.h"
#include "cuda/attention_params.h"

namespace bellwether::kernels::cuda::sm90 {

struct BwdMaps {
  CUtensorMap q, k, v, d_o;
  CUtensorMap d_k;                // if it is centred under the next launch
  CUtensorMap o, o_lo, d_o_unit;  // if rows are prepared ahead
};

struct BwdLauncher {
  int rows = 0;         // queries a step: the boxes of the tensor maps of Q and dO
  int cols = 0;         // keys a tile
  int key_box = 0;      // keys of the boxes of the tensor maps of K and V
  int turn_steps = 0;   // of a tile, on average: from there on turns begin with the first keys
  bool counts = false;  // the errors of delta before dS is rounded
  int center_rows = 0;  // keys of the boxes of the tensor map of dK, if it is centred under the next launch
  Status (*launch)(const AttentionBwdParams&, const BwdMaps&, cudaStream_t) = nullptr;
  int ahead_rows = 0;  // of the boxes of the tensor maps of O and dO, if rows may be prepared ahead
};

// Head dims up to 256.
BwdLauncher FindBwdLauncher(const AttentionBackwardParams& params);

// One per source file attention_bwd_<type>_hd<head_dim>.cu, for head dims up to it; 192 for values of up to 128.
BwdLauncher FindBwdBf16Hd64(const AttentionBackwardParams& params);
BwdLauncher FindBwdBf16Hd128(const AttentionBackwardParams& params);
BwdLauncher FindBwdBf16Hd192(const AttentionBackwardParams& params);
BwdLauncher FindBwdBf16Hd256(const AttentionBackwardParams& params);
BwdLauncher FindBwdF16Hd64(const AttentionBackwardParams& params);
BwdLauncher FindBwdF16Hd128(const AttentionBackwardParams& params);
BwdLauncher FindBwdF16Hd192(const AttentionBackwardParams& params);
BwdLauncher FindBwdF16Hd256(const AttentionBackwardParams& params);

}  // namespace bellwether::kernels::cuda::sm90

#endif  // BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_BWD_LAUNCH_H_
