// attention_fwd_launch.h: which kernels of the forward serve a call.

#ifndef BELLWETHER_KERNELS_CUDA_SM80_ATTENTION_FWD_LAUNCH_H_
#define BELLWETHER_KERNELS_CUDA_SM80_ATTENTION_FWD_LAUNCH_H_

#include <cuda_runtime.h>

#include "bellwether/kernels/attention.h"
#include "cuda/sm80/attention_params.h"

namespace bellwether::kernels::cuda::sm80 {

struct FwdLauncher {
  int rows;  // of a tile
  Status (*launch)(const FwdParams&, int tiles, cudaStream_t);
};

// Head dims up to 256.  shared_bytes_sm: what a multiprocessor of this GPU has.
FwdLauncher FindFwdLauncher(const AttentionForwardParams& params, int shared_bytes_sm);

// One per source file attention_fwd_<type>_hd<head_dim>.cu, for head dims up to it.
FwdLauncher FindFwdBf16Hd64(const AttentionForwardParams& params, int shared_bytes_sm);
FwdLauncher FindFwdBf16Hd96(const AttentionForwardParams& params, int shared_bytes_sm);
FwdLauncher FindFwdBf16Hd128(const AttentionForwardParams& params, int shared_bytes_sm);
FwdLauncher FindFwdBf16Hd256(const AttentionForwardParams& params, int shared_bytes_sm);
FwdLauncher FindFwdF16Hd64(const AttentionForwardParams& params, int shared_bytes_sm);
FwdLauncher FindFwdF16Hd96(const AttentionForwardParams& params, int shared_bytes_sm);
FwdLauncher FindFwdF16Hd128(const AttentionForwardParams& params, int shared_bytes_sm);
FwdLauncher FindFwdF16Hd256(const AttentionForwardParams& params, int shared_bytes_sm);

// One per source file attention_fwd_masked_<type>_hd<head_dim>.cu: calls with a mask, key bounds or sinks.
FwdLauncher FindMaskedFwdBf16Hd64(const AttentionForwardParams& params, int shared_bytes_sm);
FwdLauncher FindMaskedFwdBf16Hd96(const AttentionForwardParams& params, int shared_bytes_sm);
FwdLauncher FindMaskedFwdBf16Hd128(const AttentionForwardParams& params, int shared_bytes_sm);
FwdLauncher FindMaskedFwdBf16Hd256(const AttentionForwardParams& params, int shared_bytes_sm);
FwdLauncher FindMaskedFwdF16Hd64(const AttentionForwardParams& params, int shared_bytes_sm);
FwdLauncher FindMaskedFwdF16Hd96(const AttentionForwardParams& params, int shared_bytes_sm);
FwdLauncher FindMaskedFwdF16Hd128(const AttentionForwardParams& params, int shared_bytes_sm);
FwdLauncher FindMaskedFwdF16Hd256(const AttentionForwardParams& params, int shared_bytes_sm);

}  // namespace bellwether::kernels::cuda::sm80

#endif  // BELLWETHER_KERNELS_CUDA_SM80_ATTENTION_FWD_LAUNCH_H_
