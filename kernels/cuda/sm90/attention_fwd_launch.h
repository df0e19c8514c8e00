// attention_fwd_launch.h: which tile shape serves a call, and its launcher.

#ifndef BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_FWD_LAUNCH_H_
#define BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_FWD_LAUNCH_H_

#include "bellwether/kernels/attention.h"
#include "cuda/sm90/attention_fwd_params.h"

namespace bellwether::kernels::cuda::sm90 {

struct FwdLauncher {
  int rows = 0, cols = 0, out_rows = 0;  // of the boxes of the tensor maps: Q's and K's tiles, O's
  Status (*launch)(const FwdParams&, const FwdMaps&, int multiprocessors, cudaStream_t) = nullptr;
};

// Head dims up to 256.
FwdLauncher FindFwdLauncher(const AttentionForwardParams& params);

// One per source file attention_fwd_<type>_hd<head_dim>.cu, for head dims up to it.
FwdLauncher FindFwdBf16Hd64(const AttentionForwardParams& params);
FwdLauncher FindFwdBf16Hd128(const AttentionForwardParams& params);
FwdLauncher FindFwdBf16Hd256(const AttentionForwardParams& params);
FwdLauncher FindFwdF16Hd64(const AttentionForwardParams& params);
FwdLauncher FindFwdF16Hd128(const AttentionForwardParams& params);
FwdLauncher FindFwdF16Hd256(const AttentionForwardParams& params);

}  // namespace bellwether::kernels::cuda::sm90

#endif  // BELLWETHER_KERNELS_CUDA_SM90_ATTENTION_FWD_LAUNCH_H_
