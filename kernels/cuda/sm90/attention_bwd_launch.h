// attention_bwd_launch.h: which tile shape serves a call, and its launcher.

#ifndef BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_BWD_LAUNCH_H_
#define BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_BWD_LAUNCH_H_

#include "bellwether/kernels/attention.h"
#include "cuda/sm90/attention_bwd_params.h"

namespace bellwether::kernels::cuda::sm90 {

struct BwdLauncher {
  int rows = 0;  // queries a step: the boxes of the tensor maps of Q and dO
  Status (*launch)(const BwdParams&, const BwdMaps&, cudaStream_t) = nullptr;
};

// launch is null if the shape is not built.
BwdLauncher FindBwdLauncher(const AttentionBackwardParams& params);

// One per source file attention_bwd_<type>_hd<head_dim>.cu, for head dims up to it.
BwdLauncher FindBwdBf16Hd64(const AttentionBackwardParams& params);
BwdLauncher FindBwdBf16Hd128(const AttentionBackwardParams& params);
BwdLauncher FindBwdF16Hd64(const AttentionBackwardParams& params);
BwdLauncher FindBwdF16Hd128(const AttentionBackwardParams& params);

}  // namespace bellwether::kernels::cuda::sm90

#endif  // BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_BWD_LAUNCH_H_
