// attention_bwd_launch.h: which kernels of the backward serve a call.

#ifndef BELLWETHER_KERNELS_CUDA_SM80_ATTENTION_BWD_LAUNCH_H_
#define BELLWETHER_KERNELS_CUDA_SM80_ATTENTION_BWD_LAUNCH_H_

#include <cuda_runtime.h>

#include "bellwether/kernels/attention.h"
#include "cuda/sm80/attention_params.h"

namespace bellwether::kernels::cuda::sm80 {

struct BwdLauncher {
  int cols;  // keys of a CTA
  int shared_bytes;
  Status (*launch)(const BwdParams&, cudaStream_t);
};

// Head dims up to 256.  shared_bytes_max: what a block of this GPU can have.
BwdLauncher FindBwdLauncher(const AttentionBackwardParams& params, int shared_bytes_max);

// One per source file attention_bwd_<type>_hd<head_dim>.cu, for head dims up to it.
BwdLauncher FindBwdBf16Hd64(const AttentionBackwardParams& params, int shared_bytes_max);
BwdLauncher FindBwdBf16Hd96(const AttentionBackwardParams& params, int shared_bytes_max);
BwdLauncher FindBwdBf16Hd128(const AttentionBackwardParams& params, int shared_bytes_max);
BwdLauncher FindBwdBf16Hd256(const AttentionBackwardParams& params, int shared_bytes_max);
BwdLauncher FindBwdF16Hd64(const AttentionBackwardParams& params, int shared_bytes_max);
BwdLauncher FindBwdF16Hd96(const AttentionBackwardParams& params, int shared_bytes_max);
BwdLauncher FindBwdF16Hd128(const AttentionBackwardParams& params, int shared_bytes_max);
BwdLauncher FindBwdF16Hd256(const AttentionBackwardParams& params, int shared_bytes_max);

// One per source file attention_bwd_masked_<type>_hd<head_dim>.cu: calls with a mask, key bounds or sinks.
BwdLauncher FindMaskedBwdBf16Hd64(const AttentionBackwardParams& params, int shared_bytes_max);
BwdLauncher FindMaskedBwdBf16Hd96(const AttentionBackwardParams& params, int shared_bytes_max);
BwdLauncher FindMaskedBwdBf16Hd128(const AttentionBackwardParams& params, int shared_bytes_max);
BwdLauncher FindMaskedBwdBf16Hd256(const AttentionBackwardParams& params, int shared_bytes_max);
BwdLauncher FindMaskedBwdF16Hd64(const AttentionBackwardParams& params, int shared_bytes_max);
BwdLauncher FindMaskedBwdF16Hd96(const AttentionBackwardParams& params, int shared_bytes_max);
BwdLauncher FindMaskedBwdF16Hd128(const AttentionBackwardParams& params, int shared_bytes_max);
BwdLauncher FindMaskedBwdF16Hd256(const AttentionBackwardParams& params, int shared_bytes_max);

}  // namespace bellwether::kernels::cuda::sm80

#endif  // BELLWETHER_KERNELS_CUDA_SM80_ATTENTION_BWD_LAUNCH_H_
